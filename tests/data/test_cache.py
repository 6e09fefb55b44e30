import os
import pickle
import signal
import time
from pathlib import Path

import numpy as np
import platformdirs
import pytest

from heedful import data
from heedful._files import load_arrays
from heedful.data import RatedTexts, Table, Texts, TokenEmbeddings, Views
from heedful.data._cache import _from_arrays, cached_file, content_checksum, fill_cache, to_arrays
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
        Views({"one": np.ones((3, 2)), "two": np.zeros((3, 5))}, y),
        TokenEmbeddings(np.ones((4, 2), np.float32), tokenizer),
    ]


@pytest.mark.parametrize("kind", range(6))
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
    file = cached_file(toys.dataset(), data.folder())
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
    file = cached_file(toys.dataset(), data.folder())
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
    cached_file(toys.dataset(), data.folder()).write_bytes(pickle.dumps(_Bomb(bomb)))
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


def test_the_cached_file_says_which_data_it_holds(home):
    data.load("toy")
    _, meta = load_arrays(cached_file(toys.dataset(), data.folder()))
    assert meta["data"] == "toy"


def test_a_data_folder_that_is_a_file_is_explained(tmp_path):
    (tmp_path / "data").write_text("mine")
    with pytest.raises(
        DataUnavailableError, match=r"is a file, and data are kept in a folder. Set HEEDFUL_DATA to a folder"
    ):
        fill_cache(toys.dataset(), tmp_path / "data", lambda work: toys.content())
    assert (tmp_path / "data").read_text() == "mine"
