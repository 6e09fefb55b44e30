"""Contents of data sets on disk, checked against the declared checksum whenever they are read: one safetensors file each,
or the folder of a pretrained model.

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
from safetensors import SafetensorError
from safetensors.numpy import load_file

from heedful._files import load_arrays, save_arrays, write_atomic
from heedful.data._forms import MODEL_FILES, Form, PretrainedModel
from heedful.data._registry import DataSet
from heedful.errors import DataUnavailableError, FileFormatError


def cache_folder() -> Path:
    """Where data are kept: the environment variable ``HEEDFUL_DATA``, else the user's cache folder of this platform."""
    override = os.environ.get("HEEDFUL_DATA")
    return Path(override).expanduser().absolute() if override else platformdirs.user_cache_path("heedful") / "data"


def cached_path(dataset: DataSet, folder: Path) -> Path:
    """Where ``dataset`` is, or would be, kept: a file, or the folder of a pretrained model."""
    return folder / (dataset.name if dataset.form is PretrainedModel else f"{dataset.name}.safetensors")


def verify_cached(dataset: DataSet, folder: Path) -> dict[str, np.ndarray]:
    """The arrays of the cached content, complete and with the declared checksum.

    Raises
    ------
    FileNotFoundError
        If it is not cached.
    FileFormatError
        If what is cached is not readable or its content differs from what the registry declares.
    """
    path = cached_path(dataset, folder)
    arrays = to_arrays(PretrainedModel(path)) if dataset.form is PretrainedModel else load_arrays(path)[0]
    require_checksum(dataset, arrays)
    return arrays


def read_cached(dataset: DataSet, folder: Path) -> Form:
    """The cached content as its form; raises as ``verify_cached`` does."""
    arrays = verify_cached(dataset, folder)
    if dataset.form is PretrainedModel:
        return PretrainedModel(cached_path(dataset, folder))
    return _from_arrays(dataset, arrays, folder)


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
            form, path = obtain(work), cached_path(dataset, folder)
            if isinstance(form, PretrainedModel):
                shutil.rmtree(path, ignore_errors=True)  # a damaged one
                os.replace(form.folder, path)
            else:
                save_arrays(work / "content.safetensors", to_arrays(form), {"data": dataset.name})
                os.replace(work / "content.safetensors", path)
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
    """The fields of a form as named arrays: tuples as JSON, a file as its bytes, a dict of arrays one by one.

    A pretrained model is its tensors and the bytes of its other files.
    """
    return _arrays_of_folder(form.folder) if isinstance(form, PretrainedModel) else dict(_named_arrays(form))


def _arrays_of_folder(folder: Path) -> dict[str, np.ndarray]:
    """Tensors, however the file orders them, and the bytes of the three other files of a pretrained model."""
    arrays = {name: np.frombuffer((folder / name).read_bytes(), np.uint8) for name in MODEL_FILES if "json" in name}
    try:
        return arrays | load_file(folder / "model.safetensors")
    except (SafetensorError, TypeError, AttributeError) as error:  # the latter two: a type that NumPy lacks
        raise FileFormatError(f"{folder / 'model.safetensors'} is not readable: {error}.") from error


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
