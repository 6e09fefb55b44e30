import dataclasses
import hashlib
import json
import os
import pathlib
import struct
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

import heedful
from heedful._files import Saved, digest_file, leftovers, load_arrays, save_arrays, write_atomic
from heedful.calibrate import TemperatureCalibrator
from heedful.errors import FileFormatError, InputError

# What a file must be whatever writes it (atomic, private, no pickles) is checked in tests/conformance/test_files.py.

DTYPES = [
    np.bool_,
    *(np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)),
    *map(np.dtype, ["f2", "f4", "f8"]),
]
any_array = st.sampled_from(DTYPES).flatmap(
    lambda dtype: arrays(dtype, array_shapes(min_dims=0, min_side=0, max_side=4))
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
# One folder serves all examples: each of them writes its file anew.
one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@one_folder
@given(
    named=st.dictionaries(st.text(min_size=1).filter(lambda name: name != "__metadata__"), any_array, max_size=3),
    meta=st.dictionaries(st.text().filter(lambda key: key != "format"), json_values, max_size=3),
)
def test_arrays_and_metadata_come_back_bit_for_bit(tmp_path, named, meta):
    path = tmp_path / "x.safetensors"
    save_arrays(path, named, meta)
    loaded, found = load_arrays(path)
    assert found.pop("format") == 1
    assert found == meta
    assert loaded.keys() == named.keys()
    for name, array in named.items():
        assert (loaded[name].dtype, loaded[name].shape) == (array.dtype, array.shape)
        assert loaded[name].tobytes() == array.tobytes()


@pytest.mark.parametrize(
    "array",
    [np.arange(6.0).reshape(2, 3).T, np.arange(6)[::-2], np.arange(3, dtype=">f8"), np.broadcast_to(1.0, (2, 2))],
    ids=["transposed", "strided backwards", "big-endian", "broadcast"],
)
def test_layouts_in_memory_do_not_matter(tmp_path, array):
    save_arrays(tmp_path / "x.safetensors", {"a": array}, {})
    loaded, _ = load_arrays(tmp_path / "x.safetensors")
    np.testing.assert_array_equal(loaded["a"], array)
    loaded["a"] += 1  # it is a copy, and may be written to


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([None]), np.zeros(2, complex), np.zeros(2, np.longdouble)])
def test_what_the_format_cannot_hold_is_refused_before_anything_is_written(tmp_path, array):
    message = (
        rf"^theta has dtype {array.dtype}, which a safetensors file cannot hold\. Give booleans, integers or floats "
    )
    with pytest.raises(InputError, match=message):
        save_arrays(tmp_path / "x.safetensors", {"theta": array}, {})
    assert os.listdir(tmp_path) == []


def test_metadata_that_are_no_json_leave_the_old_file(tmp_path):
    path = tmp_path / "x.safetensors"
    save_arrays(path, {}, {"which": "old"})
    with pytest.raises(TypeError, match="not JSON serializable"):
        save_arrays(path, {}, {"which": {1, 2}})
    assert load_arrays(path)[1]["which"] == "old"
    assert os.listdir(tmp_path) == [path.name]


def test_the_format_number_is_not_the_callers(tmp_path):
    save_arrays(tmp_path / "x.safetensors", {}, {"format": 99})
    assert load_arrays(tmp_path / "x.safetensors")[1]["format"] == 1


@pytest.fixture(scope="module")
def valid_bytes(tmp_path_factory):
    path = tmp_path_factory.mktemp("valid") / "x.safetensors"
    save_arrays(path, {"knots": np.arange(12.0).reshape(3, 4), "steps": np.arange(3)}, {"class": "X", "list": [1, {}]})
    return path.read_bytes()


def read_or_refuse(path, content):
    """The reader may understand the damage or refuse it; any other error fails the test."""
    path.write_bytes(content)
    try:
        return load_arrays(path)
    except FileFormatError as error:
        assert str(path) in str(error)  # noqa: PT017  (whether it raises depends on the damage)
        return None


@one_folder
@given(data=st.data())
def test_every_truncation_is_refused(tmp_path, valid_bytes, data):
    cut = data.draw(st.integers(0, len(valid_bytes) - 1))
    assert read_or_refuse(tmp_path / "x.safetensors", valid_bytes[:cut]) is None


@one_folder
@given(data=st.data())
def test_flipped_bits_are_refused_or_read_but_raise_nothing_else(tmp_path, valid_bytes, data):
    content = bytearray(valid_bytes)
    head = 8 + struct.unpack("<Q", valid_bytes[:8])[0]  # flips in the values alone cannot be noticed
    for bit in data.draw(st.lists(st.integers(0, 8 * head - 1), min_size=1, max_size=4)):
        content[bit // 8] ^= 1 << bit % 8
    read_or_refuse(tmp_path / "x.safetensors", bytes(content))


@one_folder
@given(
    header=json_values | st.dictionaries(st.sampled_from(["a", "__metadata__"]), json_values),
    values=st.binary(max_size=32),
)
def test_any_header_is_refused_or_read_but_raises_nothing_else(tmp_path, header, values):
    text = json.dumps(header).encode()
    read_or_refuse(tmp_path / "x.safetensors", struct.pack("<Q", len(text)) + text + values)


@one_folder
@given(text=st.text() | json_values.map(json.dumps))
def test_any_metadata_are_refused_or_read_but_raise_nothing_else(tmp_path, text):
    safetensors.numpy.save_file({"a": np.ones(1)}, tmp_path / "y.safetensors", metadata={"heedful": text})
    read_or_refuse(tmp_path / "x.safetensors", (tmp_path / "y.safetensors").read_bytes())


@one_folder
@given(content=st.binary(max_size=64))
def test_any_bytes_are_refused(tmp_path, content):
    assert read_or_refuse(tmp_path / "x.safetensors", content) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_types_that_numpy_lacks_are_refused(tmp_path, dtype):
    path, meta = tmp_path / "x.safetensors", {"heedful": '{"format": 1}'}
    safetensors.torch.save_file({"a": torch.zeros(2).to(dtype)}, path, metadata=meta)
    with pytest.raises(FileFormatError, match="is not a readable safetensors file"):
        load_arrays(path)


def test_deeply_nested_metadata_are_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({}, path, metadata={"heedful": "[" * 100_000})
    with pytest.raises(FileFormatError, match="is not a readable safetensors file"):
        load_arrays(path)


def test_files_of_others_and_of_the_future_say_so(tmp_path):
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({"a": np.ones(1)}, path)
    with pytest.raises(
        FileFormatError, match=r"was not written by heedful: its metadata are missing\. Give a file saved"
    ):
        load_arrays(path)
    safetensors.numpy.save_file({}, path, metadata={"heedful": '{"format": 7}'})
    with pytest.raises(FileFormatError, match=r"has format 7; this heedful reads up to 1\. Update heedful\.$"):
        load_arrays(path)
    safetensors.numpy.save_file({}, path, metadata={"heedful": '{"format": 1}', "log": "", "author": ""})
    with pytest.raises(FileFormatError, match=r"has metadata that heedful did not write: author, log\. Give the file"):
        load_arrays(path)


def test_a_full_disk_is_an_os_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        save_arrays(tmp_path / "x.safetensors", {"a": np.ones(1)}, {})
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_leaves_is_found_by_the_name_of_its_file(tmp_path):
    path, link = tmp_path / "model [1].safetensors", tmp_path / "link.safetensors"
    kill = "import sys, os, pathlib, numpy, heedful._files as files; write = pathlib.Path.write_bytes;" + (
        "pathlib.Path.write_bytes = lambda *given: (write(*given), os.kill(os.getpid(), 9));"
        "files.save_arrays(sys.argv[1], {'a': numpy.ones(9)}, {})"
    )
    subprocess.run([sys.executable, "-c", kill, path])
    (left,) = tmp_path.iterdir()
    others = [".model [1]-0123456789abcdef.csv", ".model [1]-copy.safetensors", ".model-0123456789abcdef.safetensors"]
    for name in others:
        (tmp_path / name).touch()
    link.symlink_to(path)
    assert leftovers(path) == leftovers(link) == [left]


def test_a_block_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), write_atomic(path) as temporary:  # noqa: PT012  (the block is the test)
        temporary.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_the_temporary_file_is_private_beside_the_path_and_of_its_suffix(tmp_path):
    with write_atomic(tmp_path / "table.tar.gz") as temporary:
        assert temporary.parent == tmp_path.resolve()
        assert temporary.suffix == ".gz"
        assert temporary.stat().st_mode & 0o077 == 0
        assert not (tmp_path / "table.tar.gz").exists()
    assert (tmp_path / "table.tar.gz").exists()


def test_overwriting_can_be_refused(tmp_path):
    path = tmp_path / "x.txt"
    with write_atomic(path, overwrite=False) as temporary:
        temporary.write_text("first")
    message = r"x\.txt exists\. Choose another name, or say overwrite\.$"
    with pytest.raises(FileExistsError, match=message), write_atomic(path, overwrite=False):
        pytest.fail("the block must not begin")
    assert path.read_text() == "first"


def test_names_of_the_greatest_length_work(tmp_path):
    path = tmp_path / ("n" * 251 + ".txt")
    with write_atomic(path) as temporary:
        temporary.write_text("long")
    assert path.read_text() == "long"


def test_relative_paths_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with write_atomic("x.txt") as temporary:
        temporary.write_text("here")
    assert (tmp_path / "x.txt").read_text() == "here"


def test_digest_file(tmp_path):
    (tmp_path / "x").write_bytes(b"abc" * 100_000)
    assert digest_file(tmp_path / "x") == hashlib.sha256(b"abc" * 100_000).hexdigest()


@dataclasses.dataclass
class Line(Saved):
    slope: np.ndarray
    name: str

    def _to_saved(self):
        return {"slope": self.slope}, {"name": self.name}

    @classmethod
    def _from_saved(cls, arrays, meta):
        return cls(arrays["slope"], meta["name"])


class Other(Line):
    pass


def test_an_object_comes_back(tmp_path):
    Line(np.array([1.0, 2.0]), "steep").save(tmp_path / "line.safetensors")
    line = Line.load(tmp_path / "line.safetensors")
    assert line.name == "steep"
    assert line.slope.tolist() == [1.0, 2.0]


def test_saving_asks_for_the_suffix(tmp_path):
    with pytest.raises(InputError, match=r"^Line\.save needs a path ending in \.safetensors, got '.*line\.pkl'\.$"):
        Line(np.ones(1), "x").save(tmp_path / "line.pkl")


def test_loading_asks_for_the_class(tmp_path):
    Line(np.ones(1), "x").save(tmp_path / "line.safetensors")
    with pytest.raises(FileFormatError, match=r"holds a Line, not a Other\. Use heedful\.load\(path\), which returns"):
        Other.load(tmp_path / "line.safetensors")


@pytest.mark.parametrize(("named", "meta"), [({}, {"name": "x"}), ({"slope": np.ones(1)}, {})])
def test_a_file_that_lacks_a_part_is_refused(tmp_path, named, meta):
    save_arrays(tmp_path / "line.safetensors", named, {"class": "Line", **meta})
    with pytest.raises(FileFormatError, match=r"line\.safetensors lacks or garbles a part of a Line: KeyError"):
        Line.load(tmp_path / "line.safetensors")


def test_a_class_that_does_not_say_what_it_is_made_of(tmp_path):
    class Silent(Saved):
        pass

    with pytest.raises(TypeError, match="Silent does not say what it is made of"):
        Silent().save(tmp_path / "x.safetensors")


def test_heedful_load_finds_the_class_by_its_name(tmp_path):
    P = np.array([[0.8, 0.2], [0.4, 0.6], [0.7, 0.3]])
    saved = TemperatureCalibrator().fit(P, [0, 1, 1])
    saved.save(tmp_path / "x.safetensors")
    loaded = heedful.load(tmp_path / "x.safetensors")
    assert type(loaded) is TemperatureCalibrator
    assert np.array_equal(loaded.predict_proba(P), saved.predict_proba(P))


@pytest.mark.parametrize("name", ["Line", "closure_step", "TiltedSAM", "__name__", "", None, ["x"]])
def test_heedful_load_makes_no_object_but_a_saved_one(tmp_path, name):
    save_arrays(tmp_path / "x.safetensors", {}, {"class": name})
    with pytest.raises(FileFormatError, match=r"which this heedful does not have\. Update heedful\.$"):
        heedful.load(tmp_path / "x.safetensors")
