"""Arrays that are made once."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from heedful.studies._kept import kept, kept_all, made_once


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A list of what was made so far, and the function that makes it."""
    monkeypatch.setenv("HEEDFUL_DATA", str(tmp_path))
    made = []

    def make():
        made.append(None)
        return {"numbers": np.arange(len(made))}

    return made, make


def test_arrays_are_made_once_whoever_asks(made):
    calls, make = made
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: kept("numbers", {"seed": 0}, make), range(4)))
    assert len(calls) == 1
    assert all(np.array_equal(arrays["numbers"], [0]) for arrays in found)


def test_what_is_there_is_read_without_a_lock_so_that_the_folder_may_be_read_only(made, monkeypatch):
    calls, make = made
    kept("numbers", {"seed": 0}, make)

    def refused(*_, **__):
        raise PermissionError

    monkeypatch.setattr("heedful.studies._kept.FileLock", refused)
    assert np.array_equal(kept("numbers", {"seed": 0}, make)["numbers"], [0])
    assert len(calls) == 1


@pytest.mark.parametrize("change", ["kind", "depends", "threads"])
def test_arrays_are_made_anew_for_whatever_they_depend_on(made, change, monkeypatch):
    calls, make = made
    kept("numbers", {"seed": 0}, make)
    if change == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    kept("others" if change == "kind" else "numbers", {"seed": int(change == "depends")}, make)
    assert len(calls) == 2


def test_a_damaged_file_is_made_anew(made, tmp_path):
    calls, make = made
    kept("numbers", None, make)
    (file,) = (tmp_path / "numbers").glob("*.safetensors")
    file.write_bytes(b"damaged")
    assert np.array_equal(kept("numbers", None, make)["numbers"], [0, 1])
    assert len(calls) == 2


def test_nothing_is_kept_of_what_failed(made):
    calls, make = made

    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        kept("numbers", None, fail)
    assert np.array_equal(kept("numbers", None, make)["numbers"], [0])
    assert len(calls) == 1


def test_who_asks_for_several_shares_the_work_rather_than_waits(tmp_path, monkeypatch):
    """Threads stand for processes: each opens the locks anew."""
    monkeypatch.setenv("HEEDFUL_DATA", str(tmp_path))
    made, begun, other_made = [], threading.Event(), threading.Event()

    def first():
        begun.set()
        assert other_made.wait(30)  # which only another can make meanwhile
        made.append("first")
        return {"x": np.ones(1)}

    def second():
        assert begun.is_set()
        made.append("second")
        other_made.set()
        return {"x": np.zeros(1)}

    def ask(_):
        return kept_all("numbers", [("first", first), ("second", second)])

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(ask, 0)
        assert begun.wait(30)
        results = [pool.submit(ask, 1).result(), one.result()]
    assert made == ["second", "first"]
    assert all([float(part["x"][0]) for part in parts] == [1, 0] for parts in results)


def test_tensors_are_made_anew_when_code_or_data_change(tmp_path, monkeypatch):
    monkeypatch.setenv("HEEDFUL_DATA", str(tmp_path))
    made, file = [], tmp_path / "code.py"
    file.write_text("1")

    def make():
        made.append(None)
        return {"x": torch.ones(2)}

    def ask(*sources):
        return made_once("tensors", str(file), sources, {"one": make})

    (first,), (again,) = ask("mnist"), ask("mnist")
    assert torch.equal(first["x"], again["x"])
    assert len(made) == 1
    ask("digits")
    assert len(made) == 2
    file.write_text("2")
    ask("mnist")
    assert len(made) == 3
