"""A user's own task, named ``package.module:function`` on the command line."""

import functools
import hashlib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heedful.errors import HeedfulError, InputError
from heedful.evidence._study import Study, Task

_EXAMPLE = """\
    # my_tasks.py
    def build(*, split, seed):
        \"\"\"split is "validation" while settings are chosen and "test" afterwards.\"\"\"
        return MyTask(...)"""


def load_task(reference: str, study: Study) -> Study:
    """``study`` on the user's task alone.

    Parameters
    ----------
    reference : str
        ``package.module:function``; the module is looked for on the Python path and in the current folder. The function
        is called as ``function(split="validation" | "test", seed=int)`` and returns what the study's protocol asks for.
        A function attribute ``data`` (a mapping of names to checksums) makes changed data another trial.
    study : Study
        The study to run on it. The task is built once, to check its form before any work starts.

    Raises
    ------
    InputError
        If it cannot be imported or has the wrong form; the message shows the right one.
    """
    module_name, _, function_name = reference.partition(":")
    if not module_name or not function_name.isidentifier():
        raise InputError(f"A task is named package.module:function; got {reference!r}.{_right_form(study)}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        build = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise InputError(f"The task {reference!r} cannot be imported: {error}.{_right_form(study)}") from error
    except (Exception, SystemExit) as error:  # whatever the user's module does when it is imported
        raise InputError(f"The task {reference!r} cannot be imported: {_told(error)}.{_right_form(study)}") from error
    try:
        inspect.signature(build).bind(split="validation", seed=0)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"The task {reference!r} must be a function of split and seed ({error}).{_right_form(study)}"
        ) from error
    data = getattr(build, "data", {})
    if not isinstance(data, Mapping) or not all(isinstance(text, str) for pair in data.items() for text in pair):
        raise InputError(
            f"The attribute data of the task {reference!r} must be a mapping of names to checksums; got {data!r}."
        )
    chosen = study.with_task(reference, Task(build, data=dict(data) or _source_digest(build)))
    try:
        chosen.build_task(reference, split="validation", seed=0)
    except HeedfulError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's function does
        raise InputError(
            f"The task {reference!r} cannot be built with split='validation', seed=0: {_told(error)}."
        ) from error
    return chosen


def _told(error: BaseException) -> str:
    """An exception and where it was raised, for a command line that shows no traceback."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.filename}, line {place.lineno})"


def _source_digest(build: Any) -> dict[str, str]:
    while isinstance(build, functools.partial):
        build = build.func
    if not (inspect.isroutine(build) or inspect.isclass(build)):
        build = type(build)  # an object that can be called
    try:
        file = inspect.getsourcefile(build)
    except TypeError:  # built into Python
        file = None
    return {"source": hashlib.sha256(Path(file).read_bytes()).hexdigest()} if file else {}


def _right_form(study: Study) -> str:
    shape = "" if study.protocol is None else f"\n\nwhere MyTask follows\n\n{inspect.getsource(study.protocol)}"
    return f" The right form:\n\n{_EXAMPLE}{shape}"
