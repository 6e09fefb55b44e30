"""Checkpoints that appear by one rename when all of their tensors, shards and files are there."""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple

from filelock import FileLock, Timeout
from torch import Tensor

from heedful._checkpoints._safetensors import DTYPE_NAMES, TensorInfo, bits, encode_header
from heedful.errors import InputError, ParameterError

_WEIGHTS = re.compile(r"(pytorch_)?model.*\.(safetensors|bin)(\.index\.json)?")
_FOLDERS = {"additional_chat_templates"}  # others may be a training's runs or a repository, and are not thrown away
_CHUNK = 2**20  # bytes written at a time
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # decimal, as Hugging Face's
_FREE = "Free some space and run the same again, or choose another disk."


class CheckpointWriter:
    """Write a Hugging Face checkpoint tensor by tensor; ``out`` appears complete, or not at all.

    Tensors stream into shards in a hidden folder beside ``out``. A shard is flushed to the disk before it counts, and
    ``finish`` gives the folder its name. If the run ends before that, however it ends, the next one with the same
    ``key`` goes on after the shards that are complete, and the result has the same bytes.

    Parameters
    ----------
    out : path
        The folder to make. Its parent must exist.
    plan : mapping of name to TensorInfo
        All tensors, in the order in which they will be added.
    key : str
        Whatever determines the values of the tensors. What a run with another key left is thrown away.
    shard_size : int or str
        Largest size of a file, in bytes or as "5GB" (KB, MB, GB, TB, decimal). A larger tensor gets a file of its own.
    work_dir : path, optional
        Where the hidden folder is, instead of beside ``out``. It must be on the same file system as ``out``.
    overwrite : bool
        Whether ``out`` may be there. It must then be a checkpoint, without folders in it, and stays until the new one is
        complete.

    Raises
    ------
    FileExistsError
        If ``out`` is there and may not be replaced, or is written by another process at this moment.
    FileNotFoundError, NotADirectoryError
        If the folder that ``out`` belongs in does not exist, or ``out`` is a file.
    InputError
        If the plan holds what a safetensors file cannot.
    OSError
        If there is no room for the checkpoint.

    Notes
    -----
    Use it in a ``with`` block, which keeps other writers away from ``out``. Memory: one tensor, if it is not contiguous
    or not on the CPU; else nothing. Each tensor is written once, by writes of 1 MiB.
    """

    def __init__(
        self,
        out: str | os.PathLike,
        plan: Mapping[str, TensorInfo],
        *,
        key: str,
        shard_size: str | int = "5GB",
        work_dir: str | os.PathLike | None = None,
        overwrite: bool = False,
    ):
        self.out = Path(os.path.realpath(out))  # through links: what a link points to is made or replaced
        self._overwrite = overwrite
        _require_plan(plan)
        self._plan = dict(plan)
        self._shards = _lay_out(self._plan, _parse_size(shard_size))
        self._work = self._choose_work(work_dir)
        self._staged, self._replaced = self._work / "checkpoint", self._work / "replaced"
        self._pending: deque[str] = deque()
        self._file: Any = None
        self._work.mkdir(0o700, exist_ok=True)
        self._lock = FileLock(self._work / "lock", timeout=0)
        try:
            self._lock.acquire()
        except Timeout:
            raise FileExistsError(
                f"{self.out} is being written by another process. Wait until it ends, or choose another name."
            ) from None
        try:
            self._resume(key)
        except BaseException:
            self.close()
            raise

    @property
    def pending(self) -> tuple[str, ...]:
        """Names that are still to be added, in this order."""
        return tuple(self._pending)

    def add(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor: ``pending[0]``, with the shape and dtype that the plan gives it."""
        if not self._pending or name != self._pending[0]:
            expected = self._pending[0] if self._pending else "finish(), since nothing is pending"
            raise InputError(f"the next tensor of {self.out} is {expected}; got {name}. Add them as pending says.")
        given = TensorInfo(tuple(tensor.shape), tensor.dtype)
        if given != self._plan[name]:
            raise InputError(f"{name} was planned as {_describe(self._plan[name])}; got {_describe(given)}.")
        shard = next(shard for shard in self._shards if name in shard.offsets)
        with self._explained():
            if self._file is None:
                self._file = (self._work / shard.name).open("wb", buffering=0)
                _write(self._file, shard.head)
            self._file.seek(shard.offsets[name])
            _write(self._file, bits(tensor).numpy())
            self._pending.popleft()
            if not self._pending or self._pending[0] not in shard.offsets:
                self._complete(shard)

    def finish(self, *, config: Mapping[str, Any] | None = None, files: Mapping[str, Path | str] | None = None) -> Path:
        """Add the index, ``config.json`` and ``files``, and give the checkpoint its name, which is returned.

        Parameters
        ----------
        config : mapping, optional
            The contents of ``config.json``.
        files : mapping of name to path or text
            What else belongs in the folder: a ``Path`` is copied, a ``str`` is the content itself.
        """
        if self._pending:
            raise InputError(f"{self.out} still lacks {len(self._pending)} tensors, the first {self._pending[0]}.")
        for name in files or {}:
            path = PureWindowsPath(name)  # which knows all that can lead out of a folder: / and \ and drives
            if path.anchor or ".." in path.parts or not path.name or _WEIGHTS.fullmatch(str(path)):
                raise ParameterError(f"files cannot hold {name!r}: name files in the folder that are no weights.")
        texts = dict(files or {})
        if config is not None:
            texts["config.json"] = json.dumps(config, indent=2) + "\n"
        if len(self._shards) > 1:
            texts["model.safetensors.index.json"] = self._index()
        with self._explained():
            _clear(self._staged, keep={shard.name for shard in self._shards})  # of a run that ended in here
            for name, content in texts.items():
                target = self._staged / name
                target.parent.mkdir(parents=True, exist_ok=True)
                if isinstance(content, Path):
                    shutil.copyfile(content, target)
                else:
                    target.write_text(content, encoding="utf-8", newline="\n")
                with target.open("rb+") as file:  # Windows flushes only what may be written to
                    os.fsync(file.fileno())
            self._publish()
        self.close()
        return self.out

    def close(self) -> None:
        """Let others write to ``out``. Complete shards stay for the next try; without any, nothing does."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._lock.is_locked:
            for shard in self._shards:
                (self._work / shard.name).unlink(missing_ok=True)
            if not any((self._staged / shard.name).exists() for shard in self._shards):
                shutil.rmtree(self._work, ignore_errors=True)
            self._lock.release()
            with contextlib.suppress(OSError):
                self._work.rmdir()  # what is left of it where a lock that is held cannot be removed (Windows)

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _choose_work(self, work_dir: str | os.PathLike | None) -> Path:
        parent = self.out.parent
        if not parent.is_dir():
            raise FileNotFoundError(
                f"{self.out}: the folder {parent} does not exist. Create it, or choose another path."
            )
        if os.path.ismount(self.out) or (self.out.exists() and self.out.samefile(os.curdir)):
            raise ParameterError(
                f"{self.out} is {'a mount point' if os.path.ismount(self.out) else 'the current folder'}, which no other "
                "can take the place of. Name a folder inside of it."
            )
        place = parent if work_dir is None else Path(work_dir)
        if work_dir is not None:
            place.mkdir(parents=True, exist_ok=True)
        if place.stat().st_dev != parent.stat().st_dev:
            raise ParameterError(
                f"work_dir {place} is on another file system than {self.out}, where nothing can be renamed to. "
                "Choose one on the same, or leave it out."
            )
        return place / f".{self.out.name}.partial"

    def _resume(self, key: str) -> None:
        """Find what an earlier run left, keep what serves this one, and see that the rest has room."""
        self._restore()
        self._require_free()
        digest = hashlib.sha256(key.encode())
        for shard in self._shards:
            digest.update(b"\0" + shard.name.encode() + shard.head)
        note = self._work / "key"
        if not note.is_file() or note.read_text() != digest.hexdigest():
            _clear(self._work, keep={"lock"})
            note.write_text(digest.hexdigest())
        self._staged.mkdir(exist_ok=True)
        sizes = {path.name: path.stat().st_size for path in self._staged.iterdir()}
        missing = [shard for shard in self._shards if sizes.get(shard.name) != shard.size]
        self._pending.extend(name for shard in missing for name in self._plan if name in shard.offsets)
        room, needed = shutil.disk_usage(self._work).free, sum(shard.size for shard in missing)
        if room < needed:
            raise OSError(errno.ENOSPC, f"{self.out} needs {needed:,} more bytes, and the disk has {room:,}. {_FREE}")

    def _require_free(self) -> None:
        if not os.path.lexists(self.out):
            return
        if not self.out.is_dir():
            raise NotADirectoryError(f"{self.out} is a file. Name a folder.")
        held = {entry.name: entry.is_dir() for entry in self.out.iterdir()}
        if held and not self._overwrite:
            raise FileExistsError(f"{self.out} exists. Choose another name, or say overwrite.")
        folders = sorted(name for name, folder in held.items() if folder and name not in _FOLDERS)
        if folders or (held and not any(map(_WEIGHTS.fullmatch, held))):
            raise FileExistsError(
                f"{self.out} {f'holds the folder {folders[0]}' if folders else 'is a folder without a checkpoint'}, and only "
                "checkpoints are overwritten. Choose another name, or remove it yourself."
            )

    def _complete(self, shard: "_Shard") -> None:
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        os.replace(self._work / shard.name, self._staged / shard.name)

    def _publish(self) -> None:
        with contextlib.suppress(OSError):  # not every system can flush a folder
            _flush_folder(self._staged)
        self._require_free()  # it may have come meanwhile
        if self.out.exists():
            self._staged.chmod(stat.S_IMODE(self.out.stat().st_mode))
            os.rename(self.out, self._replaced)
        try:
            os.rename(self._staged, self.out)
        except OSError:
            self._restore()
            raise
        shutil.rmtree(self._replaced, ignore_errors=True)

    def _restore(self) -> None:
        """Give the old checkpoint its name again, if it has lost it and no other has it."""
        if self._replaced.exists() and not os.path.lexists(self.out):
            os.rename(self._replaced, self.out)
        shutil.rmtree(self._replaced, ignore_errors=True)

    def _index(self) -> str:
        homes = {name: shard.name for shard in self._shards for name in shard.offsets}
        total = sum(info.nbytes for info in self._plan.values())
        return json.dumps({"metadata": {"total_size": total}, "weight_map": homes}, indent=2, sort_keys=True) + "\n"

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            left = sum(shard.size for shard in self._shards if not (self._staged / shard.name).exists())
            more = f"{left:,} more bytes" if left else "a little more for what stands beside the weights"
            raise OSError(
                error.errno, f"the disk is full: {self.out} needs {more}. What is complete is kept. {_FREE}"
            ) from error


class _Shard(NamedTuple):
    """A file of the checkpoint: its head, where each tensor starts, and its size in bytes."""

    name: str
    head: bytes
    offsets: Mapping[str, int]
    size: int


def _lay_out(plan: Mapping[str, TensorInfo], largest: int) -> list[_Shard]:
    """Fill one file after another, in the order of the plan."""
    groups: list[dict[str, TensorInfo]] = [{}]
    room = largest
    for name, info in plan.items():
        if info.nbytes > room and groups[-1]:
            groups.append({})
            room = largest
        groups[-1][name] = info
        room -= info.nbytes
    shards = []
    for number, group in enumerate(groups, start=1):
        name = "model" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}"
        head, offsets = encode_header(group)
        size = len(head) + sum(info.nbytes for info in group.values())
        shards.append(_Shard(f"{name}.safetensors", head, offsets, size))
    return shards


def _require_plan(plan: Mapping[str, TensorInfo]) -> None:
    if not plan:
        raise InputError("a checkpoint needs at least one tensor; the plan has none.")
    for name, info in plan.items():
        if not name or name == "__metadata__" or "\0" in name:
            raise InputError(f"a safetensors file cannot hold a tensor called {name!r}. Rename it.")
        if info.dtype not in DTYPE_NAMES:
            raise InputError(f"{name} has dtype {info.dtype}, which a safetensors file cannot hold. Convert it.")


def _parse_size(size: str | int) -> int:
    match = re.fullmatch(r"(\d+)\s*([KMGT]?B)?", str(size).upper())
    bytes_ = int(match[1]) * _UNITS.get(match[2] or "", 1) if match else 0
    if bytes_ < 1:
        raise ParameterError(f'shard_size must be a number of bytes >= 1, or text such as "5GB"; got {size!r}.')
    return bytes_


def _write(file: Any, content: Any) -> None:
    """Write all, and have the disk begin at once: what it does meanwhile, the flush at the end need not wait for."""
    content = memoryview(content)
    while content:
        start, written = file.tell(), file.write(content[:_CHUNK])
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), start, written, os.POSIX_FADV_DONTNEED)
        content = content[written:]


def _clear(folder: Path, *, keep: set[str]) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name not in keep:
            entry.unlink()


def _flush_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _describe(info: TensorInfo) -> str:
    return f"{str(info.dtype).removeprefix('torch.')} of shape {info.shape}"
