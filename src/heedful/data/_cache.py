"""Contents of data sets on disk: one safetensors file each, checked against the declared checksum whenever it is read.

The checksum covers the parsed content, not an archive: whatever way a data set came, the same content has the same
checksum, and a cached file that was damaged or changed no longer has it.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
from filelock import FileLock

from heedful._files import load_arrays, save_arrays, write_atomic
from heedful.data._forms import Form
from heedful.data._registry import DataSet
from heedful.errors import DataUnavailableError, FileFormatError


def cache_folder() -> Path:
    """Where data are kept: the environment variable ``HEEDFUL_DATA``, else the user's cache folder of this platform."""
    override = os.environ.get("HEEDFUL_DATA")
    return Path(override).expanduser().absolute() if override else platformdirs.user_cache_path("heedful") / "data"


def cached_file(dataset: DataSet, folder: Path) -> Path:
    """Where ``dataset`` is, or would be, kept."""
    return folder / f"{dataset.name}.safetensors"


def verify_cached(dataset: DataSet, folder: Path) -> dict[str, np.ndarray]:
    """The arrays of the cached content, complete and with the declared checksum.

    Raises
    ------
    FileNotFoundError
        If it is not cached.
    FileFormatError
        If the cached file is not readable or its content differs from what the registry declares.
    """
    arrays, _ = load_arrays(cached_file(dataset, folder))
    require_checksum(dataset, arrays)
    return arrays


def read_cached(dataset: DataSet, folder: Path) -> Form:
    """The cached content as its form; raises as ``verify_cached`` does."""
    return _from_arrays(dataset, verify_cached(dataset, folder), folder)


def fill_cache(dataset: DataSet, folder: Path, obtain: Callable[[Path], Form]) -> None:
    """Cache what ``obtain(work)`` returns, once, however many processes ask for it at the same time.

    ``obtain`` vouches for the content; ``work`` is an empty folder that is gone afterwards. The lock belongs to the
    system and ends with the process that holds it, so whatever lies in the work folder when the lock is taken was left
    by a process that died.
    """
    if folder.exists() and not folder.is_dir():
        raise DataUnavailableError(f"{folder} is a file, and data are kept in a folder. Set HEEDFUL_DATA to a folder.")
    folder.mkdir(parents=True, exist_ok=True)
    work = folder / f".{dataset.name}.partial"
    with FileLock(folder / f".{dataset.name}.lock"):
        with contextlib.suppress(FileNotFoundError, FileFormatError):
            verify_cached(dataset, folder)  # another process was quicker
            return
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            save_arrays(work / "content.safetensors", to_arrays(obtain(work)), {"data": dataset.name})
            os.replace(work / "content.safetensors", cached_file(dataset, folder))
        finally:
            shutil.rmtree(work, ignore_errors=True)


def content_checksum(arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over names, types, shapes and bytes, in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.data)
    return digest.hexdigest()


def require_checksum(dataset: DataSet, arrays: Mapping[str, np.ndarray]) -> None:
    """Raise ``FileFormatError`` unless ``arrays`` are the content that the registry declares."""
    found = content_checksum(arrays)
    if found != dataset.checksum:
        raise FileFormatError(
            f"the content read for {dataset.name} has checksum {found}, but {dataset.checksum} is declared: it is "
            "damaged, or another version. Reinstall or fetch again what it was read from."
        )


def to_arrays(form: Form) -> dict[str, np.ndarray]:
    """The fields of a form as named arrays: tuples as JSON, a file as its bytes, a dict of arrays one by one."""
    return dict(_named_arrays(form))


def _named_arrays(form: Form) -> Iterator[tuple[str, np.ndarray]]:
    for field in dataclasses.fields(form):
        value = getattr(form, field.name)
        match value:
            case np.ndarray():
                yield field.name, value
            case dict():
                yield from ((f"{field.name}/{key}", array) for key, array in value.items())
            case Path():
                yield f"{field.name}:file", np.frombuffer(value.read_bytes(), np.uint8)
            case tuple():
                text = json.dumps(value, ensure_ascii=False)
                yield f"{field.name}:json", np.frombuffer(text.encode(), np.uint8)


def _from_arrays(dataset: DataSet, arrays: Mapping[str, np.ndarray], folder: Path) -> Form:
    """The inverse of ``to_arrays``; a file is written beside the cached content, whose checksum vouches for it."""
    fields: dict[str, Any] = {}
    for name, array in arrays.items():
        array.flags.writeable = False
        field, _, kind = name.partition(":")
        field, _, key = field.partition("/")
        if kind == "json":
            fields[field] = tuple(json.loads(array.tobytes()))
        elif kind == "file":
            fields[field] = _file_with(folder / f"{dataset.name}.{field}.json", array.tobytes())
        elif key:
            fields.setdefault(field, {})[key] = array
        else:
            fields[field] = array
    return dataset.form(**fields)


def _file_with(path: Path, contents: bytes) -> Path:
    if not path.is_file() or path.read_bytes() != contents:
        with write_atomic(path) as temporary:
            temporary.write_bytes(contents)
    return path
