"""Tables in pickles are read, and what a pickle asks to run is not."""

import lzma
import os
import pickle

import numpy as np
import pandas as pd
import pytest

from heedful.data._frames import numeric_columns
from heedful.errors import FileFormatError


def written(path, value, protocol=5):
    path.write_bytes(lzma.compress(pickle.dumps(value, protocol=protocol)))
    return path


class _Names:
    """A name of a module, called with arguments and given a state: what a pickle says, without having the module."""

    def __init__(self, module, name, *arguments, state=None):
        self.call = module, name, arguments, state


def as_pandas_2_writes_it(columns):
    """The pickle of a table as pandas 2 writes it: a block per type, objects apart, columns in another order."""

    def array(values):
        kind = _Names("numpy", "dtype", values.dtype.str[1:], False, True, state=(3, "<", None, None, None, -1, -1, 0))
        return _Names("numpy.core.numeric", "_frombuffer", bytearray(values.tobytes()), kind, values.shape, "C")

    def objects(values):
        state = (1, (1, len(values)), None, False, list(values))
        return _Names("numpy.core.multiarray", "_reconstruct", state=state)

    names = list(columns)
    blocks = []
    for kind in dict.fromkeys(columns[name].dtype.kind for name in names):
        of_kind = [name for name in names if columns[name].dtype.kind == kind]
        places = np.array([names.index(name) for name in of_kind])
        values = objects(columns[of_kind[0]]) if kind == "O" else array(np.stack([columns[name] for name in of_kind]))
        place = _Names(
            "builtins", "slice", int(places[0]), int(places[-1]) + 1, int(np.diff(places, append=places[-1] + 1)[0])
        )
        blocks.append(
            _Names("pandas._libs.internals", "_unpickle_block", values, place if kind != "i" else array(places), 2)
        )
    index = _Names(
        "pandas.core.indexes.base", "_new_Index", _Names("pandas", "Index"), {"data": objects(names), "name": None}
    )
    rows = _Names("pandas.core.indexes.base", "_new_Index", _Names("pandas", "RangeIndex"), {"start": 0})
    manager = _Names("pandas.core.internals.managers", "BlockManager", tuple(blocks), [index, rows])
    return _Names("pandas.core.frame", "DataFrame", state={"_mgr": manager, "_typ": "dataframe"})


class _Pickler(pickle._Pickler):
    """Writes what a ``_Names`` stands for: a global, called, given a state."""

    def save(self, value, save_persistent_id=True):
        if not isinstance(value, _Names):
            return super().save(value, save_persistent_id)
        module, name, arguments, state = value.call
        self.write(b"c" + f"{module}\n{name}\n".encode())
        super().save(arguments)
        self.write(b"R")
        if state is not None:
            super().save(state)
            self.write(b"b")
        return None


def dumped(path, value):
    with lzma.open(path, "wb") as file:
        _Pickler(file, protocol=5).dump(value)
    return path


def test_numbers_come_back_by_name_and_texts_stay_behind(tmp_path):
    columns = {
        "id": np.array([3, 1, 2]),
        "income": np.array([0.5, np.nan, 2.5]),
        "town": np.array(["a", "b", "a"], dtype=object),
        "age": np.array([30, 40, 50]),
        "weight": np.array([1.0, 2.0, 3.0]),
    }
    read = numeric_columns(dumped(tmp_path / "t.pkl.compress", as_pandas_2_writes_it(columns)))
    assert list(read) == ["id", "income", "age", "weight"]
    for name, values in read.items():
        np.testing.assert_array_equal(values, columns[name])
        assert values.dtype == np.float64


class _Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("make", [_Bomb, lambda path: {"_mgr": _Bomb(path)}, lambda path: [_Bomb(path)]])
def test_what_a_pickle_asks_to_run_is_never_run(tmp_path, make):
    bomb = tmp_path / "exploded"
    with pytest.raises(FileFormatError, match=r"^t.pkl.compress is not the pickle of a table as pandas 2 writes it: "):
        numeric_columns(written(tmp_path / "t.pkl.compress", make(bomb)))
    assert not bomb.exists()
    pickle.loads(pickle.dumps(_Bomb(bomb)))  # the ordinary reader would have
    assert bomb.exists()


def test_other_files_are_refused(tmp_path):
    file = tmp_path / "t.pkl.compress"
    huge = b"\x96" + (2**62).to_bytes(8, "little")  # BYTEARRAY8, of a length that no memory has
    inside = [b"", b"\x80\x05K", b"\x80\x05" + huge, b"\x80\x05\x96" + b"\xff" * 8, pickle.dumps(1)]
    for contents in (b"", b"not xz", *map(lzma.compress, inside)):
        file.write_bytes(contents)
        with pytest.raises(FileFormatError, match="is not the pickle of a table"):
            numeric_columns(file)
    with pytest.raises(FileFormatError, match="is not the pickle of a table"):
        numeric_columns(written(file, pd.Series([1.0])))


def test_a_column_of_bytes_is_refused(tmp_path):
    columns = {"id": np.array([3, 1]), "town": np.array([b"ab", b"cd"])}
    with pytest.raises(FileFormatError, match="is not the pickle of a table"):
        numeric_columns(dumped(tmp_path / "t.pkl.compress", as_pandas_2_writes_it(columns)))
