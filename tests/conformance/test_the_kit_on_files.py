"""The file checks pass what is right and catch what is wrong: each has at least one object that it must refuse."""

import contextlib
import dataclasses
import os
import tempfile
import time

import numpy as np
import pytest

from heedful._files import write_atomic
from heedful.errors import FileFormatError
from tests.conformance import cases
from tests.conformance.files import CHECKS, WORK_CHECKS, FileRow, WorkRow


def old():
    return np.arange(10)


def new():
    return np.arange(20_000)


def save(path, value):
    with write_atomic(path) as temporary, temporary.open("wb") as file:
        np.save(file, value, allow_pickle=False)


def load(path):
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there")
    try:
        with path.open("rb") as file:
            return np.lib.format.read_array(file, allow_pickle=False)
    except Exception as error:
        raise FileFormatError(f"{path} is no array: {error}") from error


def write_in_place(path, value):
    with path.open("wb") as file:
        np.save(file, value[:5])
        file.seek(0)
        np.save(file, value)


def leave_the_temporary_file(path, value):
    temporary = path.with_suffix(".part")
    with temporary.open("wb") as file:
        np.save(file, value)
    os.replace(temporary, path)


def swallow_errors(path, value):
    with contextlib.suppress(OSError):
        save(path, value)


def stamp_the_time(path, value):
    save(path, np.append(value, time.time_ns()))


def load_stamped(path):
    return load(path)[:-1]


def append_to_a_log(path, value):
    save(path, value)
    path.with_suffix(".log").touch()


def make_folders(path, value):
    path.parent.mkdir(exist_ok=True)
    save(path, value)


def keep_the_temporary_mode(path, value):
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        np.save(file, value)
    os.replace(name, path)


def forget_the_mode(path, value):
    path.unlink(missing_ok=True)
    save(path, value)


def unpickle(path):
    try:
        return np.load(path, allow_pickle=True)
    except Exception as error:
        raise FileFormatError(f"{path} is no array: {error}") from error


def pass_errors_on(path):
    with path.open("rb") as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def read_what_there_is(path):
    content = path.read_bytes()[128:]
    return np.frombuffer(content[: len(content) // 8 * 8], np.int64)


GOOD = FileRow("numpy", ".npy", save, load, old, new, np.array_equal)
WRONG = {
    "round_trip": [
        ({"save": stamp_the_time, "load": load_stamped}, "gives other bytes"),
        ({"save": append_to_a_log}, "other files were left"),
        ({"load": load_stamped}, "neither the old value nor the new"),
    ],
    "missing_places": [({"save": make_folders}, "DID NOT RAISE")],
    "full_disk_leaves_the_old_file": [
        ({"save": write_in_place}, "the old file is gone"),
        ({"save": leave_the_temporary_file}, "left files"),
        ({"save": swallow_errors}, "did not raise"),
    ],
    "kill_leaves_old_or_new": [({"save": write_in_place}, "left a broken file")],
    "permissions": [
        ({"save": keep_the_temporary_mode}, "mode 600, not 640"),
        ({"save": forget_the_mode}, "a private file was replaced"),
    ],
    "links_stay": [({"save": keep_the_temporary_mode}, "a link was replaced")],
    "concurrent_writers": [({"save": leave_the_temporary_file}, "while others wrote")],
    "refuses_pickles": [
        ({"load": unpickle}, "was unpickled"),
        ({"load": pass_errors_on}, "not a FileFormatError"),
        ({"load": read_what_there_is}, "taken for one of ours"),
    ],
    "refuses_damaged_files": [
        ({"load": pass_errors_on}, "not a FileFormatError"),
        ({"load": read_what_there_is}, "read as if complete"),
    ],
}


def square(piece):
    return np.array([piece**2])


def resume(folder):
    """Four squares and their sum, a file for each square."""
    total = 0
    for piece in range(1, 5):
        path = folder / f"{piece}.npy"
        try:
            done = load(path)
        except (FileNotFoundError, FileFormatError):
            done = square(piece)
            save(path, done)
        total += int(done[0])
    return total


def start_over(folder):
    for piece in range(1, 5):
        save(folder / f"{piece}.npy", square(piece))
    return 30


def keep_nothing(folder):
    return sum(int(square(piece)[0]) for piece in range(1, 5))


def trust_what_is_there(folder):
    total = 0
    for piece in range(1, 5):
        path = folder / f"{piece}.npy"
        if not path.exists():
            write_in_place(path, square(piece))
        total += int(read_what_there_is(path).sum())
    return total


def equal(left, right):
    return left == right


WRONG_WORK = {
    "killed_work_goes_on": {
        start_over: "a piece that was done is done again",
        keep_nothing: "keeps no piece",
    },
    "broken_pieces_are_done_again": {trust_what_is_there: "a piece of which half is there spoils the result"},
}


@pytest.mark.parametrize(("check", "row"), cases([GOOD], CHECKS))
def test_a_right_format_passes(check, row, tmp_path):
    check(row, tmp_path)


@pytest.mark.parametrize(
    ("check", "wrong", "message"),
    [
        pytest.param(f"check_{name}", wrong, message, id=f"{next(iter(wrong.values())).__name__}-{name}")
        for name, table in WRONG.items()
        for wrong, message in table
    ],
)
def test_wrong_formats_are_caught(check, wrong, message, tmp_path):
    with pytest.raises((AssertionError, pytest.fail.Exception), match=message):
        {check.__name__: check for check in CHECKS}[check](dataclasses.replace(GOOD, **wrong), tmp_path)


@pytest.mark.parametrize(("check", "row"), cases([WorkRow("squares", resume, equal)], WORK_CHECKS))
def test_right_work_passes(check, row, tmp_path):
    check(row, tmp_path)


@pytest.mark.parametrize(
    ("check", "wrong", "message"),
    [
        pytest.param(f"check_{name}", wrong, message, id=f"{wrong.__name__}-{name}")
        for name, table in WRONG_WORK.items()
        for wrong, message in table.items()
    ],
)
def test_wrong_work_is_caught(check, wrong, message, tmp_path):
    with pytest.raises(AssertionError, match=message):
        {check.__name__: check for check in WORK_CHECKS}[check](WorkRow(wrong.__name__, wrong, equal), tmp_path)


def test_every_check_is_known_to_fail():
    assert {f"check_{name}" for name in WRONG} == {check.__name__ for check in CHECKS}
    assert {f"check_{name}" for name in WRONG_WORK} == {check.__name__ for check in WORK_CHECKS}
