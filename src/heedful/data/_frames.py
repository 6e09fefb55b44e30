"""Columns of a pandas table out of a pickle, without unpickling it.

A pickle is a program that imports names and calls them. Here no name is imported: each becomes an inert record of what it
would have been called with, and the numbers are read off the records.
"""

import io
import lzma
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from heedful.errors import FileFormatError

_MALFORMED = (
    lzma.LZMAError,
    pickle.UnpicklingError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    EOFError,
    OverflowError,  # lengths that no file has
    MemoryError,
)


def numeric_columns(file: Path) -> dict[str, Float64[np.ndarray, " n"]]:
    """The columns of numbers in an xz-compressed pickle of a ``DataFrame``, by name, in the order of the table.

    Raises
    ------
    FileFormatError
        If the file is anything else.
    """
    try:
        table = _Inert(io.BytesIO(lzma.decompress(file.read_bytes()))).load()
        blocks, (names, _) = table.state["_mgr"].args
        columns = dict.fromkeys(names.args[1]["data"].state[4])
        for block in blocks:
            values, places, _ = block.args
            if values.name == "_frombuffer":  # objects, such as texts, are no buffer
                columns |= zip(np.array(list(columns))[_places(places)].tolist(), _array(values), strict=True)
        return {name: values.astype(np.float64) for name, values in columns.items() if values is not None}
    except _MALFORMED as error:
        raise FileFormatError(f"{file.name} is not the pickle of a table as pandas 2 writes it: {error!r}.") from error


class _Record:
    """What would have been called, with what, and the state it would have been given."""

    name: str
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> "_Record":
        self = super().__new__(cls)
        self.args, self.state = args, None
        return self

    def __init__(self, *args: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Inert(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[_Record]:
        return type("_Record", (_Record,), {"name": name})


def _array(values: Any) -> np.ndarray:
    buffer, dtype, shape, order = values.args
    kind = np.dtype(dtype.args[0]).newbyteorder(dtype.state[1])
    return np.frombuffer(buffer, kind).reshape(shape, order=order)


def _places(places: Any) -> Any:
    return slice(*places.args) if places.name == "slice" else _array(places)
