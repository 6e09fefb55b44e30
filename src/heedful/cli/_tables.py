"""Tables in files, as the verbs take and give them: CSV, Parquet or npz, by suffix."""

from __future__ import annotations

import importlib.util
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful.errors import FileFormatError, InputError, MissingExtraError

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

SUFFIXES = (".csv", ".parquet", ".npz")


def read_table(path: Path, *, text: Sequence[str] = ()) -> pd.DataFrame:
    """The table in ``path``. In an npz, vectors are columns, and a matrix ``p`` of shape (n, K) is p_0, p_1, ….

    Of a CSV the columns ``text`` stay text as they stand there: NA and 01 are names.

    Raises
    ------
    FileNotFoundError, FileFormatError, InputError, MissingExtraError
        If there is no such file, it is not what its suffix says, the suffix is unknown, or pyarrow is missing.
    """
    import numpy as np
    import pandas as pd

    suffix = check_suffix(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist or is not a file.")
    try:
        if suffix == ".csv":
            return pd.read_csv(path, converters=dict.fromkeys(text, str), float_precision="round_trip")
        if suffix == ".parquet":
            return pd.read_parquet(path)
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return pd.DataFrame(_columns({name: arrays[name] for name in arrays.files}))
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:  # parsing errors are ValueErrors
        raise FileFormatError(f"{path} cannot be read as {suffix[1:]}: {error}") from error


def write_table(frame: pd.DataFrame, path: Path, *, overwrite: bool) -> None:
    """Write ``frame``, without its index, atomically; in an npz every column is a vector."""
    from heedful._files import write_atomic

    suffix = check_suffix(path)
    with write_atomic(path, overwrite=overwrite) as temporary:
        if suffix == ".csv":
            frame.to_csv(temporary, index=False)
        elif suffix == ".parquet":
            frame.to_parquet(temporary, index=False)
        else:
            import numpy as np

            columns: dict[str, Any] = {str(name): _plain(frame[name].to_numpy()) for name in frame}
            np.savez(temporary, **columns)


def refuse_existing(path: Path, *, overwrite: bool) -> None:
    """Raise ``FileExistsError`` before any work is done, if ``path`` is there and must stay."""
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists. Choose another name, or say --overwrite.")


def take_columns(frame: pd.DataFrame, names: Sequence[str], *, path: Path) -> pd.DataFrame:
    """These columns of the table read from ``path``; an ``InputError`` names those that it lacks."""
    if missing := [name for name in names if name not in frame]:
        raise InputError(f"{path} lacks the columns {', '.join(missing)}; it has {', '.join(map(str, frame.columns))}.")
    return frame[list(names)]


def split_probabilities(
    frame: pd.DataFrame, *, label: str, prefix: str | None, path: Path
) -> tuple[pd.DataFrame, list[str], np.ndarray]:
    """Probability columns, the class that each stands for, and the column number of every row's label.

    Parameters
    ----------
    frame : DataFrame
        The whole table.
    label : str
        The column of labels: names of classes or, where those are not, column numbers from 0.
    prefix : str, optional
        What names of probability columns begin with; the rest is the class. Without it every column but ``label``
        holds probabilities.
    path : Path
        Where the table was read, for messages.
    """
    import numpy as np
    import pandas as pd

    take_columns(frame, [label], path=path)
    columns = [name for name in frame if name != label and (prefix is None or str(name).startswith(prefix))]
    others = [str(name) for name in columns if frame[name].dtype.kind not in "iuf"]
    if len(columns) < 2 or others:
        found = f"of which {', '.join(others)} hold no numbers" if others else "at least two are needed"
        hint = "" if prefix else " If the table holds more than them, say what their names begin with: --prob-prefix p_"
        raise InputError(f"{path} has {len(columns)} probability columns ({found}).{hint}")
    classes = [str(name).removeprefix(prefix or "") for name in columns]
    labels = frame[label]
    if (missing := labels.isna() | (labels == "")).any():
        raise InputError(f"{path}: {int(missing.sum())} rows have no label in column {label!r}. Remove them.")
    names = labels.astype(str).to_numpy()
    numbers = pd.to_numeric(labels, errors="coerce")
    if not set(names) <= set(classes) and (numbers == numbers.round()).all():  # NaN, no number, equals nothing
        numbers = numbers.astype(np.int64)
        names = numbers.astype(str).to_numpy()
    if set(names) <= set(classes):
        place = {name: j for j, name in enumerate(classes)}
        codes = np.array([place[name] for name in names], dtype=np.int64)
    elif (
        numbers.dtype == np.int64 and numbers.between(0, len(classes) - 1).all() and not all(map(str.isdigit, classes))
    ):
        codes = numbers.to_numpy()
    else:
        strange = sorted(set(names) - set(classes))[:5]
        raise InputError(
            f"{path}: labels {', '.join(strange)} of column {label!r} are none of the classes {', '.join(classes)}, which "
            "are the names of the probability columns."
        )
    return frame[columns], classes, codes


def _columns(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    columns: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if array.ndim == 1:
            columns[name] = array
        elif array.ndim == 2:
            columns |= {f"{name}_{j}": column for j, column in enumerate(array.T)}
        else:
            raise ValueError(f"the array {name} has {array.ndim} dimensions, and a table takes one or two")
    return columns


def _plain(column: np.ndarray) -> np.ndarray:
    return column.astype(str) if column.dtype.kind == "O" else column  # objects would be pickled


def check_suffix(path: Path) -> str:
    """The suffix of ``path``, which must be one that tables have; an ``InputError`` lists them."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise InputError(
            f"{path}: tables are read and written as {', '.join(SUFFIXES)}; got {path.suffix or 'no suffix'}."
        )
    if suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise MissingExtraError('Parquet files need pyarrow. Install it: pip install "heedful[tables]"')
    return suffix
