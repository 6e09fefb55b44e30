"""``heedful unlearn``: a classifier that people's data can be deleted from."""

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from heedful.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from heedful.unlearn import KernelSelectiveSamplingClassifier, SelectiveSamplingClassifier

app = typer.Typer(no_args_is_help=True, help="Delete people's data from a classifier: fit, delete, audit, apply.")

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="What fit saved.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output if it is there.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]

PREDICTION = "prediction"


@app.command("fit")
def fit(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="Rows to learn from: CSV, Parquet or npz.")],
    label: Annotated[str, typer.Option("--label", help="The column of classes.")],
    id_column: Annotated[
        str, typer.Option("--id", metavar="COLUMN", help="The column that says whose row it is; ids may repeat.")
    ],
    save: Annotated[Path, typer.Option("--save", metavar="FILE", help="Where the model goes (.safetensors).")],
    features: Annotated[
        str | None,
        typer.Option("--features", metavar="NAMES", help="Columns to learn from, with commas. Default: all others."),
    ] = None,
    kappa: Annotated[
        float, typer.Option("--kappa", help="0 to 1: more of the rows are stored, and accuracy lasts for longer.")
    ] = 0.25,
    ridge: Annotated[float, typer.Option("--ridge", help="Added to the diagonal of the second moments.")] = 1.0,
    horizon: Annotated[
        int | None, typer.Option("--horizon", help="Rows to expect; it is stored. Default: those of TABLE.")
    ] = None,
    normalize: Annotated[
        Literal["sample", "unit", "none"],
        typer.Option("--normalize", help="Shorten rows to length 1, make all of them so, or trust that they are."),
    ] = "sample",
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Learn to classify from a few rows, chosen without a look at their classes; the model stores these and no others.

    Scale columns by constants that you know (such as units), not by means of TABLE, which would hold traces of everybody.

    Example: heedful unlearn fit users.csv --label churned --id user --save churn.safetensors
    """
    from heedful.cli._progress import messages
    from heedful.cli._tables import read_table
    from heedful.unlearn import SelectiveSamplingClassifier

    _check_target(save, overwrite=overwrite)
    if label == id_column:
        raise InputError(f"--label and --id both name {label!r}, and the list of classes is public. Give two columns.")
    frame = read_table(table, text=(label, id_column))
    y, ids = _text(frame, label, path=table, what="class"), _ids(frame, id_column, path=table)
    wanted = None if features is None else [name.strip() for name in features.split(",")]
    X = _numbers(frame, wanted, but=(label, id_column), path=table)
    classifier = SelectiveSamplingClassifier(
        kappa=kappa,
        ridge=ridge,
        horizon=horizon,
        normalize=None if normalize == "none" else normalize,
        unique_ids=False,  # an id is a person's, and all rows of a person go together
    )
    with messages(quiet=True):
        classifier.fit(X, y, ids=ids)
    with _locked(save):
        classifier.save(save)
    result: dict[str, Any] = {
        "rows": len(X),
        "stored_rows": len(classifier.core_y_),
        "ids": len(set(ids)),
        "stored_ids": len(set(classifier.core_ids_)),
        "classes": classifier.classes_.tolist(),
        "features": X.columns.tolist(),
        "saved": str(save),
    }
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print(
            f"{result['stored_rows']} of {len(X)} rows stored, of {result['stored_ids']} of {result['ids']} ids; "
            f"saved as {save}"
        )


@app.command("delete")
def delete(
    model: Model,
    ids: Annotated[Path, typer.Option("--ids", metavar="REQUESTS", help="A table of the ids to delete.")],
    id_column: Annotated[
        str | None, typer.Option("--id", metavar="COLUMN", help="Its column of ids; needed if there are several.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="NEW", help="Leave MODEL as it is, and write here.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Delete all rows of these ids: MODEL becomes what it were if it had been fitted to the other stored rows alone.

    MODEL is replaced at once or not at all, and nothing is kept of the requests. An id of which no row is stored changes
    nothing. Counts go to standard error.

    Example: heedful unlearn delete churn.safetensors --ids requests.csv
    """
    if out is not None:
        _check_target(out, overwrite=overwrite)
        out = None if out.resolve() == model.resolve() else out
    if not model.is_file():
        raise FileNotFoundError(f"{model} does not exist or is not a file.")
    requested, name = _requests(ids, id_column)
    with _locked(out or model):
        classifier = _load(model)
        wanted, stored = _as_stored(requested, classifier.core_ids_)
        if id_column is None and name.strip() in map(str, stored):
            raise InputError(
                f"{ids} begins with {name!r}, the id of a stored row, where the name of its column should stand. Put a "
                "header in the first line, or say that this is one: --id."
            )
        report = classifier.unlearn(wanted)
        if report.touched or out is not None:
            classifier.save(model if out is None else out)
    if as_json:
        print(json.dumps(report.to_dict() | {"model": str(out or model)}, indent=2))
    found = len(stored.intersection(wanted))
    print(f"{found} of {len(set(requested))} ids had rows in the model: {report.removed} rows removed", file=sys.stderr)
    if out is not None:
        print(f"{model} still holds what it held: delete it, and copies of it", file=sys.stderr)


@app.command("audit")
def audit(
    model: Model,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail, too, where --horizon was left to the number of rows in TABLE.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Learn anew from the stored rows, and compare with the model; exit status 1 if it holds anything else.

    Example: heedful unlearn audit churn.safetensors
    """
    classifier = _load(model)
    report = classifier.audit(strict=strict)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    elif report.passed:
        print(f"passed: {model} holds what its {len(classifier.core_y_)} stored rows give, and nothing else")
    else:
        print(f"failed: {' '.join(report.findings)}")
    if not report.passed:
        raise typer.Exit(1)


@app.command("apply")
def apply(
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Rows with the columns that were fitted.")],
    model: Annotated[Path, typer.Option("--model", metavar="FILE", help="What fit saved.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help=f"The table, with a column {PREDICTION} more.")
    ],
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Classify new rows; their columns stay as they are.

    Example: heedful unlearn apply new.csv --model churn.safetensors -o classified.csv
    """
    from heedful.cli._tables import read_table, refuse_existing, take_columns, write_table

    refuse_existing(out, overwrite=overwrite)
    classifier = _load(model)
    if not hasattr(classifier, "feature_names_in_"):
        raise InputError(f"{model} does not know the names of its columns. Fit it with: heedful unlearn fit")
    frame = read_table(new)
    if PREDICTION in frame:
        raise InputError(f"{new} has a column {PREDICTION!r}, where the classes would go. Rename it.")
    predicted = classifier.predict(take_columns(frame, classifier.feature_names_in_.tolist(), path=new))
    as_it_stands = read_table(new, text=[str(name) for name in frame])
    write_table(as_it_stands.assign(**{PREDICTION: predicted}), out, overwrite=overwrite)
    if as_json:
        print(json.dumps({"rows": len(frame), "classes": classifier.classes_.tolist(), "written": str(out)}, indent=2))
    else:
        print(f"{len(frame)} rows classified, written to {out}")


def _load(path: Path) -> "SelectiveSamplingClassifier | KernelSelectiveSamplingClassifier":
    import heedful
    from heedful.unlearn import KernelSelectiveSamplingClassifier, SelectiveSamplingClassifier

    classifier = heedful.load(path)
    if not isinstance(classifier, SelectiveSamplingClassifier | KernelSelectiveSamplingClassifier):
        raise InputError(f"{path} holds a {type(classifier).__name__}; give a file that heedful unlearn fit saved.")
    return classifier


def _check_target(path: Path, *, overwrite: bool) -> None:
    """Refuse, before any work is done, a path that no model can be written to."""
    from heedful.cli._tables import refuse_existing

    if path.suffix != ".safetensors":
        raise InputError(f"Models are .safetensors files; got {path}. Choose such a name.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: the folder {path.parent} does not exist. Create it, or choose another path.")
    refuse_existing(path, overwrite=overwrite)


@contextlib.contextmanager
def _locked(path: Path):
    """Two commands at a time would each write back what the other had removed. An empty file stays beside ``path``.

    Copies that a killed command had not finished go: they hold people's rows, and no request would reach them.
    """
    from filelock import FileLock

    from heedful._files import leftovers

    path = path.resolve()
    with FileLock(path.with_name(f".{path.name}.lock")):
        for copy in leftovers(path):
            copy.unlink(missing_ok=True)
        yield


def _requests(path: Path, column: str | None) -> tuple[list[str], str]:
    """The ids in a table, and the name of their column, which need not be said if there is no other."""
    from heedful.cli._tables import read_table

    names = list(read_table(path))
    if column is None and len(names) != 1:
        raise InputError(
            f"{path} has the columns {', '.join(map(str, names))}. Say which of them holds ids: --id COLUMN"
        )
    name = str(names[0]) if column is None else column
    return _ids(read_table(path, text=(name,)), name, path=path).tolist(), name


def _as_stored(requested: list[str], stored: "np.ndarray | None") -> tuple[list[Any], set[Any]]:
    """The requests as ids of the model's own kind, numbers if it was fitted to such in Python; and the ids it holds."""
    known = set() if stored is None else set(stored.tolist())
    if stored is None or stored.dtype.kind == "U":
        return requested, known
    numbers = [int(n) for n in requested if n.removeprefix("-").isdecimal() and len(n.lstrip("-0")) < 20]
    return [number for number in numbers if -(2**63) <= number < 2**63], known  # no others are stored


def _ids(frame: "pd.DataFrame", column: str, *, path: Path) -> "np.ndarray":
    """As text, without spaces around: a request must find its rows, in whatever form of table it comes."""
    import pandas as pd

    from heedful.cli._tables import take_columns

    kind = pd.api.types.infer_dtype(take_columns(frame, [column], path=path)[column].astype(object))
    if kind not in ("string", "integer", "empty"):
        raise InputError(f"{path}: the column {column!r} must hold ids, text or whole numbers; it holds {kind}.")
    return _text(frame, column, path=path, what="id")


def _text(frame: "pd.DataFrame", column: str, *, path: Path, what: str) -> "np.ndarray":
    from heedful.cli._tables import take_columns

    values = take_columns(frame, [column], path=path)[column]
    text = values.astype(object).astype(str).str.strip()
    if missing := int((values.isna() | (text == "")).sum()):
        raise InputError(f"{path}: {missing} rows have no {what} in column {column!r}. Give one, or remove them.")
    return text.to_numpy(dtype=str)


def _numbers(frame: "pd.DataFrame", wanted: list[str] | None, *, but: tuple[str, ...], path: Path) -> "pd.DataFrame":
    """The columns to learn from: those that were named, or all but ``but``."""
    from heedful.cli._tables import take_columns

    X = take_columns(frame, wanted or [str(name) for name in frame if name not in but], path=path)
    if others := [str(name) for name in X if X[name].dtype.kind not in "iufb"]:
        raise InputError(
            f"{path}: the columns {', '.join(others)} hold no numbers. Name the columns to learn from: --features a,b"
        )
    return X
