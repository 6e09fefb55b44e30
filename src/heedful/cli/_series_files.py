"""Labelled time series in files, as the verbs take them, by suffix.

========================  ============================================================================================
``.ts``                   channels between colons, the label last; lengths may differ
``.arff``                 a case a line, the label last; channels are quoted together, with ``\\n`` between them
``.tsv``, ``.txt``        as the UCR archive has them: a case a line, its label first
``.csv``, ``.parquet``    a case a row, a column a time point in the order of columns, and a column of labels
``.npz``                  an array ``X`` (cases, time points) or (cases, channels, time points), and one of labels
========================  ============================================================================================

Where a case is shorter than others, its end (or its beginning) is left empty, ``?`` or NaN. aeon reads the first three as
well, but does not say in which line a mistake is, and takes no cases of different lengths from ``.arff``.
"""

from __future__ import annotations

import dataclasses
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from heedful.errors import FileFormatError, InputError

if TYPE_CHECKING:
    import numpy as np

_SHORTEST = 3
_MISSING = ("", "?")
_ARFF_NUMBERS = ("numeric", "real", "integer")
_UNNAMED = "Unnamed: 0"  # pandas calls a first column so that has no name


@dataclasses.dataclass(frozen=True, eq=False)
class LabelledSeries:
    """The cases of a file: ``series`` holds an array (channels, time points) of each, ``labels`` None or one text of each."""

    series: list[np.ndarray]
    labels: list[str] | None


class _Row(NamedTuple):
    """A case as it stands in a file: where, its channels, its label ("" if it has none)."""

    where: str
    channels: Sequence[np.ndarray]
    label: str


def read_series(path: Path, *, label: str) -> LabelledSeries:
    """The cases in ``path``; ``label`` is the column, or the array, of labels where those have names.

    Raises
    ------
    FileNotFoundError, FileFormatError, InputError, MissingExtraError
        If there is no such file, a line is not what the suffix says (it says which), the suffix is unknown, or pyarrow is
        missing.
    """
    suffix = path.suffix.lower()
    if suffix not in _READERS:
        raise InputError(f"{path}: series are read as {', '.join(_READERS)}; got {path.suffix or 'no suffix'}.")
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist or is not a file.")
    series: list[np.ndarray] = []
    labels: list[str] = []
    for row in _READERS[suffix](path, label):
        case = _case(row)
        if series and len(case) != len(series[0]):
            raise FileFormatError(f"{row.where}: {_n_channels(case)}, but the case before has {len(series[0])}.")
        if labels and bool(row.label) != bool(labels[0]):
            raise FileFormatError(f"{row.where}: {'a' if row.label else 'no'} label, unlike the case before.")
        series.append(case)
        labels.append(row.label)
    if not series:
        raise FileFormatError(f"{path} holds no cases.")
    return LabelledSeries(series, labels if labels[0] else None)


def _case(row: _Row) -> np.ndarray:
    """The channels as one array, without the missing values before and after."""
    import numpy as np

    lengths = [len(channel) for channel in row.channels]
    if len(set(lengths)) > 1:
        raise FileFormatError(f"{row.where}: the channels have different lengths: {', '.join(map(str, lengths))}.")
    case = np.stack(row.channels)
    there = np.flatnonzero(~np.isnan(case).all(axis=0))
    start, stop = (there[0], there[-1] + 1) if len(there) else (0, 0)
    case = case[:, start:stop]
    if case.shape[1] < _SHORTEST:
        raise FileFormatError(f"{row.where}: a case needs at least {_SHORTEST} time points; got {case.shape[1]}.")
    if not (finite := np.isfinite(case)).all():
        channel, point = np.argwhere(~finite)[0]
        raise FileFormatError(
            f"{row.where}: time point {start + point + 1} of channel {channel + 1} is missing or infinite. Impute it; only "
            "the ends of a case may be left out."
        )
    return case


def _n_channels(case: np.ndarray) -> str:
    return f"{len(case)} channel{'s' * (len(case) != 1)}"


def _ts(path: Path, label: str) -> Iterator[_Row]:
    lines = _lines(path, comment="#")
    labelled = False
    for where, line in lines:
        key, _, value = line.partition(" ")
        said = value.strip().lower().startswith("true")
        match key.lower():
            case "@data":
                break
            case "@classlabel":
                labelled = said
            case "@timestamps" | "@targetlabel" if said:
                what = "time stamps" if key.lower() == "@timestamps" else "numbers as targets, not classes,"
                raise FileFormatError(f"{where}: files with {what} are not read.")
            case _ if not key.startswith("@"):
                raise FileFormatError(f"{where}: lines before @data begin with @; got {line[:20]!r}.")
    for where, line in lines:
        channels = line.split(":")
        last = channels.pop().strip() if labelled else ""
        yield _Row(where, [_numbers(channel.split(","), where) for channel in channels], _known(last))


def _arff(path: Path, label: str) -> Iterator[_Row]:
    lines = _lines(path, comment="%")
    unclassed = ""  # where the last attribute is a number
    for where, line in lines:
        if (lower := line.lower()) == "@data":
            break
        if lower.startswith("@attribute"):
            unclassed = where if lower.split()[-1] in _ARFF_NUMBERS else ""
    for where, line in lines:
        if (quote := line[0]) in "'\"":
            body, _, last = line[1:].partition(quote)
            channels = body.split("\\n")
        else:
            body, _, last = line.rpartition(",")
            channels = [body]
        name = last.strip().removeprefix(",").strip().strip("'\"")
        if unclassed and quote not in "'\"" and _known(name):
            raise FileFormatError(
                f"{unclassed}: the last attribute is a number, and no class. Declare a class attribute last, with its names "
                "in braces (@attribute class {a,b}), and end each case with its class, or with ? where there is none."
            )
        yield _Row(where, [_numbers(channel.split(","), where) for channel in channels], _known(name))


def _ucr(path: Path, label: str) -> Iterator[_Row]:
    for where, line in _lines(path, comment="#", strip=str.rstrip):  # a tab at the beginning says: no label
        gap = next((gap for gap in "\t," if gap in line), None)
        name, *values = line.split(gap)
        yield _Row(where, [_numbers(values, where)], _known(_whole(name.strip())))


def _table(path: Path, label: str) -> Iterator[_Row]:
    import numpy as np

    from heedful.cli._tables import read_table

    frame = read_table(path, text=(label,))
    names = [""] * len(frame)
    if label in frame:
        names = _texts(frame.pop(label).to_numpy())
    if _UNNAMED in frame:
        raise FileFormatError(
            f"{path}: column {_UNNAMED!r} has no name, as the index that pandas writes. Write the table with index=False, or "
            "rename the column if it is a time point."
        )
    others = [str(column) for column in frame if frame[column].dtype.kind not in "iuf"]
    if others and len(frame):  # of an empty one no column is of numbers
        raise FileFormatError(
            f"{path}: every column but the labels is a time point, and {', '.join(others[:5])} hold no numbers. Leave them "
            f"out, or name the column of labels, which is {label!r} unless you say --label."
        )
    first, unit = (2, "line") if path.suffix.lower() == ".csv" else (0, "row")
    for i, (values, name) in enumerate(zip(frame.to_numpy(dtype=np.float64), names, strict=True)):
        yield _Row(f"{path}, {unit} {first + i}", [values], name)


def _npz(path: Path, label: str) -> Iterator[_Row]:
    import numpy as np

    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            read = {name: arrays[name] for name in ("X", label) if name in arrays}
            names = ", ".join(arrays.files)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise FileFormatError(f"{path} cannot be read as npz: {error}") from error
    X = read.get("X")
    if X is None or X.ndim not in (2, 3) or X.dtype.kind not in "iuf":
        got = f"has {names or 'nothing'}" if X is None else f"is {X.dtype} of shape {X.shape}"
        raise FileFormatError(
            f"{path}: an array X of numbers, (cases, time points) or (cases, channels, time points), is needed; it {got}."
        )
    y = read.get(label)
    if y is not None and y.shape != X.shape[:1]:
        raise FileFormatError(
            f"{path}: {label} must hold a label for each of the {len(X)} cases; its shape is {y.shape}."
        )
    labels = [""] * len(X) if y is None else _texts(y)
    for i, (case, name) in enumerate(zip(X.astype(np.float64), labels, strict=True)):
        yield _Row(f"{path}, case {i}", list(np.atleast_2d(case)), name)


_READERS: dict[str, Callable[[Path, str], Iterator[_Row]]] = {
    ".ts": _ts,
    ".arff": _arff,
    ".tsv": _ucr,
    ".txt": _ucr,
    ".csv": _table,
    ".parquet": _table,
    ".npz": _npz,
}


def _lines(path: Path, *, comment: str, strip: Callable[[str], str] = str.strip) -> Iterator[tuple[str, str]]:
    """Where each line stands, and the line stripped; not those that are empty or comments."""
    contents = path.read_bytes()
    try:
        text = contents.decode()
    except UnicodeDecodeError:
        text = contents.decode("latin-1")  # comments of the archives
    for number, line in enumerate(text.splitlines(), start=1):
        if (stripped := line.strip()) and not stripped.startswith(comment):
            yield f"{path}, line {number}", strip(line)


def _numbers(texts: Iterable[str], where: str) -> np.ndarray:
    import numpy as np

    values = ["nan" if text.strip() in _MISSING else text for text in texts]
    try:
        return np.array(values, dtype=np.float64)
    except ValueError as error:
        raise FileFormatError(f"{where}: numbers are needed; {error}.") from error


def _known(name: str) -> str:
    return "" if name in _MISSING else name


def _texts(labels: np.ndarray) -> list[str]:
    """Labels as texts; "" where there is none."""
    import pandas as pd

    missing = pd.isna(labels)
    return ["" if gone else _known(_plain(value)) for value, gone in zip(labels.tolist(), missing, strict=True)]


def _plain(value: object) -> str:
    return _whole(str(value)) if isinstance(value, float) else str(value)


def _whole(name: str) -> str:
    """The text 1 for 1.0 and 1.0000000e+00: tables of numbers write classes like that."""
    try:
        number = float(name)
    except ValueError:
        return name
    return str(int(number)) if number.is_integer() else name
