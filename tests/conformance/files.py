"""What everything that writes and reads files must do: the old file or the complete new one, and never a pickle."""

import dataclasses
import io
import os
import pickle
import resource
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
import torch

from heedful.errors import FileFormatError
from tests.conformance.distributed import processes


@dataclasses.dataclass(frozen=True)
class FileRow:
    """A format to check.

    Parameters
    ----------
    name : str
        What the test is called.
    suffix : str
        How its files end.
    save, load : callable
        ``save(path, value)`` and ``load(path) -> value``, functions at the top of a module (they travel to other
        processes).
    old, new : callable
        Give two values that differ; the file of ``new`` has at least 64 KiB.
    same : callable
        ``same(left, right) -> bool`` of two values.
    exclusions : mapping
        Name of a check that must fail -> reason.
    """

    name: str
    suffix: str
    save: Callable[[Path, Any], Any]
    load: Callable[[Path], Any]
    old: Callable[[], Any]
    new: Callable[[], Any]
    same: Callable[[Any, Any], bool]
    exclusions: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def holds(self, path: Path) -> str:
        """Which value the file holds: "old" or "new"; raises if it holds neither."""
        value = self.load(path)
        for name in ("old", "new"):
            if self.same(value, getattr(self, name)()):
                return name
        raise AssertionError(f"{path.name} holds neither the old value nor the new one")


@dataclasses.dataclass(frozen=True)
class WorkRow:
    """Long work that keeps its pieces in a folder.

    ``work(folder)``, a function at the top of a module, does all of it, goes on from the pieces that it finds, and
    returns the result, of which ``same(left, right)`` compares two.
    """

    name: str
    work: Callable[[Path], Any]
    same: Callable[[Any, Any], bool]
    exclusions: Mapping[str, str] = dataclasses.field(default_factory=dict)


def check_round_trip(row: FileRow, folder: Path) -> None:
    path = folder / f"value{row.suffix}"
    for name in ("old", "new"):
        row.save(path, getattr(row, name)())
        assert row.holds(path) == name, "the file gives back another value"
    content = path.read_bytes()
    row.save(path, row.new())
    assert path.read_bytes() == content, "the same value saved twice gives other bytes"
    assert os.listdir(folder) == [path.name], "other files were left in the folder"


def check_missing_places(row: FileRow, folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        row.load(folder / f"absent{row.suffix}")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        row.save(folder / "nowhere" / f"value{row.suffix}", row.new())
    (folder / f"folder{row.suffix}").mkdir()
    with pytest.raises(OSError, match="folder"):
        row.save(folder / f"folder{row.suffix}", row.new())
    assert os.listdir(folder) == [f"folder{row.suffix}"], "a refused save left files"


def check_full_disk_leaves_the_old_file(row: FileRow, folder: Path) -> None:
    """A process whose files may not grow beyond 16 KiB meets the error that a full disk gives."""
    path = folder / f"value{row.suffix}"
    row.save(path, row.old())
    before = path.read_bytes()
    assert exit_code(_save_without_space, row, path) == 0, "save did not raise an OSError when there was no space"
    assert path.read_bytes() == before, "the old file is gone"
    assert os.listdir(folder) == [path.name], "a failed save left files"


def _save_without_space(row: FileRow, path: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, 2**14))
    try:
        row.save(path, row.new())
    except OSError:
        return
    os._exit(2)


def check_kill_leaves_old_or_new(row: FileRow, folder: Path) -> None:
    """SIGKILL before the n-th line that save runs, for n spread over all of them; the next save then succeeds."""
    path = folder / f"value{row.suffix}"
    row.save(path, row.old())
    lines = count_lines(folder / "lines", _save_new, row, path)
    row.save(path, row.old())
    for n in sorted({*range(1, lines, max(1, lines // 10)), lines - 1, lines}):
        assert exit_code(run_until_line, n, _save_new, row, path) == -signal.SIGKILL
        try:
            row.holds(path)
        except Exception as error:
            raise AssertionError(f"killed before line {n} of {lines}, save left a broken file") from error
    row.save(path, row.new())
    assert row.holds(path) == "new", "after a save that was killed, the next one has no effect"


def _save_new(row: FileRow, path: Path) -> None:
    row.save(path, row.new())


def count_lines(result: Path, function: Callable[..., Any], *args: Any) -> int:
    """How many lines of Python a call runs, in a process of its own as those that are killed: imports and caches count."""
    assert exit_code(_write_line_count, result, function, *args) == 0
    lines = int(result.read_text())
    result.unlink()
    return lines


def _write_line_count(result: Path, function: Callable[..., Any], *args: Any) -> None:
    count = 0

    def tick():
        nonlocal count
        count += 1

    _trace(tick, lambda: function(*args))
    result.write_text(str(count))


def run_until_line(n: int, function: Callable[..., Any], *args: Any) -> None:
    """Call, and end by SIGKILL before the ``n``-th line of Python that runs."""

    def tick():
        nonlocal n
        n -= 1
        if n == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    _trace(tick, lambda: function(*args))


def _trace(tick: Callable[[], None], call: Callable[[], Any]) -> None:
    """Call, with ``tick()`` before every line of Python that runs meanwhile."""

    def on_event(frame, event, argument):
        if event == "line":
            tick()
        return on_event

    previous = sys.gettrace()
    sys.settrace(on_event)
    try:
        call()
    finally:
        sys.settrace(previous)


def check_permissions(row: FileRow, folder: Path) -> None:
    """A new file has what the umask leaves, and a file made private stays private."""
    for umask, mode in ((0o027, 0o640), (0o002, 0o664)):
        path = folder / f"umask-{umask:o}{row.suffix}"
        previous = os.umask(umask)
        try:
            row.save(path, row.new())
        finally:
            os.umask(previous)
        found = stat.S_IMODE(path.stat().st_mode)
        assert found == mode, f"with umask {umask:03o} the file has mode {found:03o}, not {mode:03o}"
    path.chmod(0o600)
    row.save(path, row.old())
    found = stat.S_IMODE(path.stat().st_mode)
    assert found == 0o600, f"a private file was replaced by one of mode {found:03o}"


def check_links_stay(row: FileRow, folder: Path) -> None:
    target, link = folder / f"target{row.suffix}", folder / f"link{row.suffix}"
    row.save(target, row.old())
    link.symlink_to(target.name)
    row.save(link, row.new())
    assert link.is_symlink(), "a link was replaced by a file"
    assert row.holds(target) == "new", "what the link points to was not written"


def check_concurrent_writers(row: FileRow, folder: Path) -> None:
    """Four threads write, one reads; each time it reads a complete value."""
    path = folder / f"value{row.suffix}"
    row.save(path, row.old())
    errors: list[BaseException] = []

    def write(name: str) -> None:
        try:
            for _ in range(8):
                row.save(path, getattr(row, name)())
        except BaseException as error:
            errors.append(error)

    writers = [threading.Thread(target=write, args=(name,)) for name in ("old", "new", "old", "new")]
    for writer in writers:
        writer.start()
    try:
        while any(writer.is_alive() for writer in writers):
            row.holds(path)
    except Exception as error:
        errors.append(error)
    for writer in writers:
        writer.join()
    assert not errors, f"while others wrote: {errors[0]!r}"
    row.holds(path)
    assert os.listdir(folder) == [path.name], "concurrent saves left files"


class _Trap:
    """Unpickled, it leaves a folder that tells."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return (os.mkdir, (os.fspath(self.marker),))


def pickles(marker: Path) -> Iterator[tuple[str, bytes]]:
    """Files of the usual kinds that make ``marker`` when they are unpickled."""
    trap = _Trap(marker)
    yield "pickle", pickle.dumps(trap)
    yield "pickle of protocol 0", pickle.dumps(trap, protocol=0)
    for name, write in {
        "npy": lambda file: np.save(file, np.array([trap, None]), allow_pickle=True),
        "npz": lambda file: np.savez(file, x=np.array([trap, None])),
        "torch": lambda file: torch.save({"x": trap}, file),
        "torch, legacy": lambda file: torch.save({"x": trap}, file, _use_new_zipfile_serialization=False),
        "joblib": lambda file: joblib.dump(trap, file),
        "joblib, compressed": lambda file: joblib.dump(trap, file, compress=3),
    }.items():
        file = io.BytesIO()
        write(file)
        yield name, file.getvalue()


def check_refuses_pickles(row: FileRow, folder: Path) -> None:
    marker, path = folder / "unpickled", folder / f"value{row.suffix}"
    for kind, content in pickles(marker):
        path.write_bytes(content)
        message = None
        try:
            row.load(path)
        except FileFormatError as error:
            message = str(error)
        except Exception as error:
            raise AssertionError(f"a {kind} file raises {error!r}, not a FileFormatError") from error
        finally:
            assert not marker.exists(), f"a {kind} file was unpickled"
        assert message is not None, f"a {kind} file was taken for one of ours"
        assert path.name in message, "the message does not name the file"


def check_refuses_damaged_files(row: FileRow, folder: Path) -> None:
    """Cut anywhere, or with another byte at the head, it is refused or read, but raises nothing other."""
    path = folder / f"value{row.suffix}"
    row.save(path, row.new())
    content = path.read_bytes()
    cuts = {0, 1, 7, 8, 9, *(len(content) * i // 16 for i in range(16)), len(content) - 1}
    for cut in sorted(cuts):
        path.write_bytes(content[:cut])
        try:
            row.load(path)
        except FileFormatError:
            continue
        except Exception as error:
            raise AssertionError(f"cut to {cut} bytes, it raises {error!r}, not a FileFormatError") from error
        raise AssertionError(f"cut to {cut} of {len(content)} bytes, it was read as if complete")
    for place in range(0, min(256, len(content)), 3):
        damaged = bytearray(content)
        damaged[place] ^= 0x41
        path.write_bytes(damaged)
        try:
            row.load(path)
        except FileFormatError:
            pass
        except Exception as error:
            raise AssertionError(f"with byte {place} changed, it raises {error!r}, not a FileFormatError") from error


def check_killed_work_goes_on(row: WorkRow, folder: Path) -> None:
    """Whenever it is killed, what it has kept stays as it is, and the rest leads to the result of an unbroken run."""
    (folder / "whole").mkdir()
    lines = count_lines(folder / "lines", row.work, folder / "whole")
    expected, kept = row.work(folder / "whole"), 0
    for n in range(1 + lines // 8, lines, 1 + lines // 8):
        place = folder / str(n)
        place.mkdir()
        assert exit_code(run_until_line, n, row.work, place) == -signal.SIGKILL
        before = _pieces(place)
        kept += len(before)
        assert row.same(row.work(place), expected), f"killed before line {n} of {lines}, it ends with another result"
        after = _pieces(place)
        assert all(after.get(name) == stamp for name, stamp in before.items()), "a piece that was done is done again"
    assert kept, "it keeps no piece until the end"


def check_broken_pieces_are_done_again(row: WorkRow, folder: Path) -> None:
    expected = row.work(folder)
    for name in _pieces(folder):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])
        assert row.same(row.work(folder), expected), "a piece of which half is there spoils the result"
        assert (folder / name).read_bytes() == content, "a piece of which half is there is not done again"


def _pieces(folder: Path) -> dict[str, tuple[int, int]]:
    """Files that are not hidden, and what tells whether one was written again."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("[!.]*") if path.is_file()}


def exit_code(function: Callable[..., None], *args: Any) -> int:
    """Call in a process of its own, and say how that ended; one that takes longer than a minute is killed."""
    process = processes.Process(target=function, args=args)
    process.start()
    process.join(60)
    process.kill()
    process.join()
    code = process.exitcode
    process.close()
    return code


CHECKS = (
    check_round_trip,
    check_missing_places,
    check_full_disk_leaves_the_old_file,
    check_kill_leaves_old_or_new,
    check_permissions,
    check_links_stay,
    check_concurrent_writers,
    check_refuses_pickles,
    check_refuses_damaged_files,
)

WORK_CHECKS = (
    check_killed_work_goes_on,
    check_broken_pieces_are_done_again,
)
