"""``heedful classify``: a class for each whole time series of a file."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from heedful.errors import InputError, ParameterError

if TYPE_CHECKING:
    from heedful.timeseries import SARCClassifier


def classify(
    test: Annotated[
        Path, typer.Argument(metavar="TEST", help="Series to classify: .ts, .tsv, .txt, .arff, .csv, .parquet or .npz.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="Classes and probabilities: .csv, .parquet or .npz.")
    ],
    train: Annotated[
        Path | None, typer.Option("--train", metavar="TRAIN", help="Labelled series to fit on; or say --model.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="FILE", help="A fitted classifier to use, as --save keeps it.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Keep what was fitted (.safetensors).")
    ] = None,
    method: Annotated[Literal["sarc"], typer.Option("--method", help="Spectral-aware reservoirs.")] = "sarc",
    label: Annotated[
        str, typer.Option("--label", help="The column of labels in .csv and .parquet, the array of them in .npz.")
    ] = "y",
    tune: Annotated[
        Literal["random", "grid"] | None,
        typer.Option("--tune", help="Choose settings by cross-validation on TRAIN: 20 random ones, or all 360."),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", help="Processors to use; -1 is all of them.")] = 1,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Draws the reservoirs.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace outputs that are there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")] = False,
) -> None:
    """Classify whole time series; where TEST has labels, say how many are right.

    Series may have several channels and different lengths. In a table, a row is a case, and every column but the label
    a time point. FILE gets a row a case: its label, if it has one, the class predicted, and a probability for each class.

    Example: heedful classify GunPoint_TEST.ts --train GunPoint_TRAIN.ts -o predicted.csv
    """
    if (train is None) == (model is None):
        raise ParameterError(
            "say what to predict by: --train TRAIN, to fit on it, or --model FILE, which was fitted before."
        )
    if model is not None and (save is not None or tune is not None):
        raise ParameterError("--save and --tune go with --train: a model from a file is used as it is.")
    if jobs == 0:
        raise ParameterError("--jobs must be a number of processors, or -1 for all of them; got 0.")
    import numpy as np
    import pandas as pd

    from heedful.cli._progress import messages
    from heedful.cli._series_files import read_series
    from heedful.cli._tables import check_suffix, refuse_existing, write_table

    check_suffix(out)
    if save is not None and save.suffix != ".safetensors":
        raise InputError(f"{save}: a classifier is saved as .safetensors; got {save.suffix or 'no suffix'}.")
    for path in filter(None, (out, save)):
        refuse_existing(path, overwrite=overwrite)
        if not path.parent.is_dir():
            raise FileNotFoundError(
                f"{path}: the folder {path.parent} does not exist. Create it, or choose another path."
            )
    asked = read_series(test, label=label)
    with messages(quiet=quiet):
        if train is not None:
            classifier = _fit(train, label=label, tune=tune, n_jobs=jobs, random_state=seed)
            if save is not None:  # at once: what may have taken hours outlives a TEST that does not suit it
                classifier.save(save)
        elif model is not None:
            classifier = _load(model)
        try:
            P = classifier.predict_proba(asked.series)
        except InputError as error:
            raise InputError(f"{test}: {error}") from error
    classes = [str(name) for name in classifier.classes_]
    predicted = np.array(classes)[P.argmax(axis=1)]
    frame = pd.DataFrame({"predicted": predicted} | {f"p_{name}": p for name, p in zip(classes, P.T, strict=True)})
    result: dict[str, Any] = {"method": method, "cases": len(frame), "classes": classes}
    if asked.labels is not None:
        result |= _quality(asked.labels, predicted, classes, test)
        frame.insert(0, "label", asked.labels)
    write_table(frame, out, overwrite=overwrite)
    result |= {"written": str(out)} | ({} if save is None else {"saved": str(save)})
    if as_json:
        print(json.dumps(result, indent=2))
        return
    right = f", {result['accuracy']:.2f} % of them correctly" if "accuracy" in result else ""
    kept = "" if save is None else f"; the classifier is saved as {save}"
    print(f"{len(frame)} cases classified{right}, written to {out}{kept}")


def _fit(path: Path, *, label: str, **settings: Any) -> "SARCClassifier":
    from heedful.cli._series_files import read_series
    from heedful.timeseries import SARCClassifier

    known = read_series(path, label=label)
    if known.labels is None:
        raise InputError(f"{path} has no labels to learn from. In a table they are the column {label!r}: see --label.")
    try:
        return SARCClassifier(**settings).fit(known.series, known.labels)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _load(path: Path) -> "SARCClassifier":
    import heedful
    from heedful.timeseries import SARCClassifier

    classifier = heedful.load(path)
    if not isinstance(classifier, SARCClassifier):
        raise InputError(f"{path} holds a {type(classifier).__name__}; give a file that heedful classify --save wrote.")
    return classifier


def _quality(labels: list[str], predicted: Any, classes: list[str], path: Path) -> dict[str, float]:
    """Accuracies in %."""
    import numpy as np

    if set(labels).isdisjoint(classes):
        raise InputError(
            f"the labels of {path} ({', '.join(sorted(set(labels))[:5])}) are none of the classes that were learnt: "
            f"{', '.join(classes[:5])}. Is it the right column?"
        )
    truth = np.array(labels)
    right = predicted == truth
    recalls = [right[truth == name].mean() for name in np.unique(truth)]
    return {"accuracy": 100 * float(right.mean()), "balanced_accuracy": 100 * float(np.mean(recalls))}
