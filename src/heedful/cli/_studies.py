"""``heedful list``, ``show``, ``study`` and ``report``."""

import importlib
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from heedful.catalog import Method, methods
from heedful.errors import InputError

if TYPE_CHECKING:
    from heedful.evidence import Study, StudyResult

Slugs = Annotated[list[str] | None, typer.Argument(metavar="[SLUG]...", help="Methods; default all. See: heedful list")]
Quick = Annotated[bool, typer.Option("--quick", help="The small budget: at most a minute on two cores.")]
TaskName = Annotated[
    str | None,
    typer.Option("--task", metavar="MODULE:FUNCTION", help="Your own task in place of the shipped ones (one SLUG)."),
]
Threads = Annotated[int, typer.Option(min=1, help="Threads per trial; another number makes it another trial.")]
StorePath = Annotated[
    Path | None,
    typer.Option("--store", metavar="FILE", help="Where trials are kept; default $HEEDFUL_STORE or your data folder."),
]
ReportPath = Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The report; replaced if it is there.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bars.")]


def list_methods(
    room: Annotated[str | None, typer.Option("--room", help="Only the methods of this room, e.g. calibrate.")] = None,
    as_json: Json = False,
) -> None:
    """List the methods: what each replaces and what it heeds.

    Example: heedful list --room calibrate
    """
    rooms = sorted({method.room for method in methods.values()})
    if room is not None and room not in rooms:
        raise InputError(f"There is no room {room!r}; there are {', '.join(rooms)}.")
    chosen = [method for method in methods.values() if room in (None, method.room)]
    if as_json:
        _print_json([_as_dict(method) for method in chosen])
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("slug", "room", "instead of", "heeds", box=None, pad_edge=False, header_style="bold")
    for method in chosen:
        table.add_row(method.slug, method.room, method.replaces, method.heeds)
    Console().print(table)


def show(slug: Annotated[str, typer.Argument(help="A method, e.g. isotonic.")], as_json: Json = False) -> None:
    """Show one method: the problem, the names to import, its study and its paper.

    Example: heedful show isotonic
    """
    method = _method(slug)
    if as_json:
        _print_json(_as_dict(method))
        return
    print(f"{method.title} ({method.slug})\n")
    print(f"  problem     {method.problem}")
    print(f"  instead of  {method.replaces}")
    print(f"  heeds       {method.heeds}")
    print(f"  import      from heedful.{method.room} import {method.names[0]}")
    print(f"  also        {', '.join(method.names[1:])}")
    print(f"  study       heedful study {method.slug} --quick")
    print(f"  paper       {method.paper}")


def study(
    slugs: Slugs = None,
    quick: Quick = False,
    task: TaskName = None,
    engine: Annotated[Literal["processes", "inline", "ray"], typer.Option(help="Where trials run.")] = "processes",
    address: Annotated[str | None, typer.Option(help="An existing Ray cluster, e.g. auto (--engine ray).")] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, help="Trials at a time; default all cores.")] = None,
    threads: Threads = 1,
    store: StorePath = None,
    collect: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Add the trials of another store first; repeatable.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Run trials again that have ended before.")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Run trials again that have failed before.")] = False,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE.parquet", help="Write all trials of the store to a Parquet file.")
    ] = None,
    mlflow: Annotated[
        str | None, typer.Option(metavar="URI", help="Copy the trials to an MLflow server or database.")
    ] = None,
    out: ReportPath = Path("report.html"),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run the studies and say of each claim whether it holds.

    Trials that have ended before are not run again, so an interrupted study resumes with the same command.

    Examples:

      heedful study isotonic --quick

      heedful study tsam --task my_tasks:cifar

      heedful study --jobs 8 --store results.sqlite
    """
    from heedful.cli._progress import bars
    from heedful.evidence import Store, copy_to_mlflow, run_study
    from heedful.evidence._mlflow import check_uri

    if mlflow is not None:
        check_uri(mlflow)
    for path in (out, export):
        if path is not None:
            _check_output(path)
    chosen = _studies(slugs, task)
    command = shlex.join(["heedful", *sys.argv[1:]])
    with Store(store, fresh=fresh, retry=retry) as opened:
        for other in collect or []:
            print(f"{other}: {opened.collect(other)} trials added", file=sys.stderr)
        try:
            with bars(quiet=quiet):
                results = [
                    run_study(
                        one,
                        budget="quick" if quick else "full",
                        store=opened,
                        engine=engine,
                        workers=jobs,
                        threads=threads,
                        address=address,
                        command=command,
                    )
                    for one in chosen
                ]
        except KeyboardInterrupt:
            print("interrupted: what has ended is kept, and the same command goes on from there", file=sys.stderr)
            raise typer.Exit(130) from None
        if export is not None:
            opened.export(export)
    if mlflow is not None:
        for result in results:
            print(f"mlflow: {copy_to_mlflow(result, mlflow)} new trials of {result.study.slug}", file=sys.stderr)
    _hand_over(results, out, as_json)


def report(
    slugs: Slugs = None,
    quick: Quick = False,
    task: TaskName = None,
    threads: Threads = 1,
    store: StorePath = None,
    out: ReportPath = Path("report.html"),
    as_json: Json = False,
) -> None:
    """Write the report of studies from trials that are kept, without running anything.

    Example: heedful report isotonic --quick -o isotonic.html
    """
    from heedful.evidence import Store, stored_result
    from heedful.evidence._store import default_path

    _check_output(out)
    path = store or default_path()
    if not path.exists():
        again = shlex.join(["heedful", "study", *(slugs or [])])
        raise InputError(f"There is no store of trials at {path}. Run: {again}")
    with Store(path) as opened:
        results = [
            stored_result(
                one,
                budget="quick" if quick else "full",
                store=opened,
                threads=threads,
                command=f"heedful study {one.slug}{' --quick' if quick else ''}",
            )
            for one in _studies(slugs, task)
        ]
    _hand_over(results, out, as_json)


def _check_output(path: Path) -> None:
    """Refuse before the work what could not be written after it."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder. Give the path of a file in it.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: the folder {path.parent} does not exist. Create it, or choose another path.")


def _hand_over(results: "list[StudyResult]", out: Path, as_json: bool) -> None:
    """Write the report, print table or JSON."""
    from heedful.evidence import result_to_json, verdict_table, write_report

    write_report(results, out)
    if as_json:
        _print_json({"report": str(out), "studies": [result_to_json(result) for result in results]})
    else:
        from rich.console import Console

        Console().print(verdict_table(results))
        print(out.resolve())
    if any(all(trial.status == "failed" for trial in result.trials) for result in results):
        raise typer.Exit(1)  # The report says why every trial of a study failed.


def _studies(slugs: list[str] | None, task: str | None) -> "list[Study]":
    chosen = [_load(_method(slug)) for slug in dict.fromkeys(slugs or methods)]
    if task is None:
        return chosen
    from heedful.evidence import load_task

    if len(chosen) != 1:
        raise InputError(f"--task goes with one SLUG, since every study has its own form of task; got {len(chosen)}.")
    return [load_task(task, chosen[0])]


def _method(slug: str) -> Method:
    if slug not in methods:
        raise InputError(f"There is no method {slug!r}; there are {', '.join(methods)}.")
    return methods[slug]


def _load(method: Method) -> "Study":
    module, _, attribute = method.study.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _as_dict(method: Method) -> dict[str, Any]:
    import dataclasses

    return {**dataclasses.asdict(method), "module": method.module, "study": method.study}


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))
