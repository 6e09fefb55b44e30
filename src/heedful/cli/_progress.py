"""Progress bars on standard error for whatever reports progress."""

import contextlib
import sys
import warnings
from collections.abc import Iterator

from heedful._results import Event, progress
from heedful.errors import HeedfulWarning


@contextlib.contextmanager
def bars(*, quiet: bool = False) -> Iterator[None]:
    """Show a bar per phase while the block runs; nothing if ``quiet``."""
    if quiet:
        yield
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    # The stream of now: a trial that runs in this process has its own for a while, and the bars do not belong there.
    with Progress(*columns, console=Console(file=sys.stderr)) as shown:
        tasks = {}

        def show(event: Event) -> None:
            if event.phase not in tasks:
                tasks[event.phase] = shown.add_task(event.phase, total=event.total)
            shown.update(tasks[event.phase], completed=event.done, total=event.total)

        with progress(show):
            yield


@contextlib.contextmanager
def messages(*, quiet: bool = False) -> Iterator[None]:
    """Progress bars, and warnings as one line each, on standard error."""

    def show(message, category, filename, lineno, file=None, line=None) -> None:
        print(f"heedful: {message}", file=sys.stderr)

    with bars(quiet=quiet), warnings.catch_warnings():
        warnings.simplefilter("always", HeedfulWarning)
        warnings.showwarning = show
        yield
