"""``heedful calibrate``: make class probabilities mean what they say."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from heedful.errors import InputError

if TYPE_CHECKING:
    import numpy as np

app = typer.Typer(no_args_is_help=True, help="Make class probabilities mean what they say: fit, apply, report.")

Probs = Annotated[
    Path, typer.Argument(metavar="PROBS", help="Probabilities and labels: CSV, Parquet or npz, a column per class.")
]
Label = Annotated[str, typer.Option("--label", help="The column of labels: class names, or column numbers from 0.")]
Prefix = Annotated[
    str | None,
    typer.Option("--prob-prefix", help="What probability columns begin with, e.g. p_. Default: all other columns."),
]
Holds = Annotated[Literal["proba", "logits"], typer.Option("--input", help="What the columns hold.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output if it is there.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@app.command("fit")
def fit(
    probs: Probs,
    label: Label,
    save: Annotated[Path, typer.Option("--save", metavar="FILE", help="Where the calibrator goes (.safetensors).")],
    method: Annotated[
        str,
        typer.Option("--method", help="na_fir, scir, fir, ovr, temperature, vector or dirichlet."),
    ] = "na_fir",
    prefix: Prefix = None,
    holds: Holds = "proba",
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Fit a calibrator to the probabilities of a model on data that it was not trained on.

    Example: heedful calibrate fit held_out.csv --label y --save cal.safetensors
    """
    from heedful._validation import require_choice
    from heedful.calibrate.isotonic._classifier import METHODS
    from heedful.cli._tables import read_table, refuse_existing, split_probabilities

    name = method.replace("-", "_")
    require_choice(name, "--method", tuple(METHODS))
    refuse_existing(save, overwrite=overwrite)
    P, classes, codes = split_probabilities(read_table(probs, text=(label,)), label=label, prefix=prefix, path=probs)
    calibrator = METHODS[name](input=holds).fit(P, [classes[code] for code in codes], classes=classes)
    calibrator.save(save)
    result = {
        "calibrator": type(calibrator).__name__,
        "rows": len(P),
        "classes": classes,
        "optimality_gap": calibrator.optimality_gap_,
        "saved": str(save),
    }
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print(f"{result['calibrator']} of {len(P)} rows and {len(classes)} classes, saved as {save}")


@app.command("apply")
def apply(
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Probabilities in the columns that were fitted.")],
    model: Annotated[Path, typer.Option("--model", metavar="FILE", help="What fit saved.")],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="FILE", help="The table with calibrated probabilities in their place."),
    ],
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Calibrate the probabilities of new rows; other columns stay as they are.

    Example: heedful calibrate apply new.csv --model cal.safetensors -o calibrated.csv
    """
    import heedful
    from heedful.calibrate.isotonic._base import Calibrator
    from heedful.cli._tables import read_table, refuse_existing, take_columns, write_table

    refuse_existing(out, overwrite=overwrite)
    calibrator = heedful.load(model)
    if not isinstance(calibrator, Calibrator):
        raise InputError(f"{model} holds a {type(calibrator).__name__}; give a file that heedful calibrate fit saved.")
    if not hasattr(calibrator, "feature_names_in_"):
        raise InputError(f"{model} does not know the names of its columns. Fit it with: heedful calibrate fit")
    names = calibrator.feature_names_in_.tolist()
    others = [str(name) for name in read_table(new) if name not in names]
    frame = read_table(new, text=others)  # other columns come out as they stand
    calibrated = calibrator.predict_proba(take_columns(frame, names, path=new))
    write_table(frame.assign(**dict(zip(names, calibrated.T, strict=True))), out, overwrite=overwrite)
    if as_json:
        print(json.dumps({"rows": len(frame), "columns": names, "written": str(out)}, indent=2))
    else:
        print(f"{len(frame)} rows calibrated, written to {out}")


@app.command("report")
def report(probs: Probs, label: Label, prefix: Prefix = None, holds: Holds = "proba", as_json: Json = False) -> None:
    """Say how good probabilities are: log loss, Brier score, calibration errors, and confidence against accuracy.

    Example: heedful calibrate report held_out.csv --label y
    """
    from heedful._validation import as_probabilities
    from heedful.cli._tables import read_table, split_probabilities

    frame, _, codes = split_probabilities(read_table(probs, text=(label,)), label=label, prefix=prefix, path=probs)
    result = _quality(codes, as_probabilities(frame.to_numpy(), str(probs), input=holds))
    if as_json:
        print(json.dumps(result, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    curve = result.pop("reliability")
    numbers = Table(box=None, pad_edge=False, show_header=False)
    for name, value in result.items():
        numbers.add_row(name, f"{value}" if name == "rows" else f"{value:.4f}")
    table = Table("confidence from", "to", "mean", "accuracy", "rows", box=None, pad_edge=False, header_style="bold")
    for row in zip(*(curve[key] for key in ("lower", "upper", "confidence", "accuracy", "counts")), strict=True):
        table.add_row(*(f"{value:.3f}" for value in row[:4]), str(row[4]))
    console = Console()
    console.print(numbers)
    console.print()
    console.print(table)


def _quality(codes: "np.ndarray", P: "np.ndarray") -> dict[str, Any]:
    import numpy as np
    from sklearn.metrics import log_loss

    from heedful.calibrate import expected_calibration_error, reliability_curve

    truth = np.eye(P.shape[1])[codes]
    return {
        "rows": len(P),
        "nll": float(log_loss(truth, P)),
        "brier": float(np.square(P - truth).sum(axis=1).mean()),
        "ece": expected_calibration_error(codes, P),
        "classwise_ece": expected_calibration_error(codes, P, kind="classwise"),
        "accuracy": 100 * float((P.argmax(axis=1) == codes).mean()),
        "reliability": reliability_curve(codes, P).to_dict(),
    }
