"""The command ``heedful``: studies, data, and one verb per job that users have with files.

Results go to standard output, progress and messages to standard error. Exit status: 0 done, 1 the work failed, 2 the
request was wrong. Everything heavy is imported by the command that needs it, so that ``--help`` is quick.
"""

import sys

import typer

from heedful.cli import _studies, bounds, calibrate, classify, data, inspect, merge, prune, quantize, unlearn

app = typer.Typer(
    name="heedful",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    help="Machine-learning methods that heed the structure their standard counterparts are blind to, and the evidence "
    "whether heeding pays.",
    epilog="Begin with: [bold]heedful list[/bold], then [bold]heedful study isotonic --quick[/bold]",
)
app.command("list")(_studies.list_methods)
app.command("show")(_studies.show)
app.command("study")(_studies.study)
app.command("report")(_studies.report)
app.command("merge")(merge.merge)
app.command("quantize")(quantize.quantize)
app.command("prune")(prune.prune)
app.command("inspect")(inspect.inspect)
app.command("bounds")(bounds.bounds)
app.command("classify")(classify.classify)
app.add_typer(data.app, name="data", help="Real data sets, offline: list, get, check.")
app.add_typer(calibrate.app, name="calibrate", help="Make class probabilities mean what they say: fit, apply, report.")
app.add_typer(
    unlearn.app, name="unlearn", help="Delete people's data from a classifier exactly: fit, delete, audit, apply."
)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        import heedful

        print(heedful.__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line, turning heedful's errors into one message and an exit status."""
    from heedful.errors import FileFormatError, HeedfulError, InputError, ParameterError

    try:
        app(standalone_mode=True)
    except (
        ParameterError,
        InputError,
        FileFormatError,
        FileNotFoundError,
        FileExistsError,
        IsADirectoryError,
        NotADirectoryError,
    ) as error:
        _stop(error, status=2)
    except (HeedfulError, OSError) as error:
        _stop(error, status=1)


def _stop(error: BaseException, *, status: int) -> None:
    print(f"heedful: {error}", file=sys.stderr)
    sys.exit(status)
