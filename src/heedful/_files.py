"""Files that are either the old one or the complete new one, and never need unpickling.

``write_atomic`` gives a temporary path in the same folder and renames it when the block ends well. ``save_arrays`` and
``load_arrays`` keep named arrays and JSON metadata in one ``.safetensors`` file; ``Saved`` builds ``save`` and ``load``
of fitted objects on them.
"""

import contextlib
import hashlib
import importlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from heedful.catalog import methods
from heedful.errors import FileFormatError, InputError

_FORMAT = 1

S = TypeVar("S", bound="Saved")


@contextlib.contextmanager
def write_atomic(path: str | os.PathLike, *, overwrite: bool = True) -> Iterator[Path]:
    """A temporary path beside ``path``; it takes the place of ``path`` when the block ends without an exception.

    The contents are flushed to the disk before the rename, so a crash leaves the old file or the new one. The temporary
    file is removed if the block fails; after a crash ``leftovers`` finds it. A file that is replaced passes its
    permissions on.

    Raises
    ------
    FileExistsError
        If there is a file and ``overwrite`` is false.
    FileNotFoundError, IsADirectoryError
        If the folder does not exist, or ``path`` is one.
    """
    path = Path(os.path.realpath(path))  # through links: what a link points to is replaced, not the link
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder. Give the path of a file in it.")
    if not overwrite and path.exists():
        raise FileExistsError(f"{path} exists. Choose another name, or say overwrite.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: the folder {path.parent} does not exist. Create it, or choose another path.")
    # The suffix is kept: writers such as numpy's and pandas' choose the format, or add an ending, by it.
    temporary = path.with_name(f".{path.stem[:64]}-{secrets.token_hex(8)}{path.suffix}")
    temporary.touch(0o666, exist_ok=False)
    mode = stat.S_IMODE((path if path.exists() else temporary).stat().st_mode)  # a new file's depends on the umask
    temporary.chmod(0o600)  # private until it is complete
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(mode)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def leftovers(path: str | os.PathLike) -> list[Path]:
    """Temporary files of ``path`` that killed processes left; one that is being written this moment looks alike."""
    path = Path(os.path.realpath(path))
    name = re.compile(rf"\.{re.escape(path.stem[:64])}-[0-9a-f]{{16}}{re.escape(path.suffix)}")
    return [beside for beside in path.parent.iterdir() if name.fullmatch(beside.name)]


def digest_file(path: str | os.PathLike) -> str:
    """SHA-256 of the contents, as 64 hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_arrays(path: str | os.PathLike, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> None:
    """Write named arrays and JSON metadata to one safetensors file, atomically.

    Raises
    ------
    InputError
        If an array holds anything but booleans, integers or floats of at most 64 bits.
    OSError
        If the file cannot be written, say because the disk is full.
    """
    plain = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    for name, array in plain.items():
        if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
            raise InputError(
                f"{name} has dtype {array.dtype}, which a safetensors file cannot hold. Give booleans, integers or "
                "floats of at most 64 bits, and text in the metadata."
            )
    text = json.dumps({**meta, "format": _FORMAT}, sort_keys=True)
    content = save(plain, metadata={"heedful": text})
    with write_atomic(path) as temporary:
        temporary.write_bytes(content)  # save_file goes by a name of its own, where nobody finds what a kill left


def load_arrays(path: str | os.PathLike) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and metadata of a file written by ``save_arrays``.

    Raises
    ------
    FileFormatError
        If the file is not safetensors, is damaged, or carries no metadata of heedful.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist or is not a file.")
    try:
        with safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
            meta = json.loads(header.get("heedful", "null"))
            if not isinstance(meta, dict) or not isinstance(meta.get("format"), int):
                raise FileFormatError(
                    f"{path} was not written by heedful: its metadata are missing. Give a file saved by heedful."
                )
            if others := sorted(header.keys() - {"heedful"}):
                raise FileFormatError(
                    f"{path} has metadata that heedful did not write: {', '.join(others)}. Give the file as it was saved."
                )
            if meta["format"] > _FORMAT:
                raise FileFormatError(
                    f"{path} has format {meta['format']}; this heedful reads up to {_FORMAT}. Update heedful."
                )
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    except FileFormatError:
        raise
    # TypeError and AttributeError: NumPy lacks a type that safetensors has, such as bfloat16.
    except (SafetensorError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise FileFormatError(
            f"{path} is not a readable safetensors file ({error}). heedful reads nothing else here, pickles least of "
            "all: give a file that a heedful object or command saved."
        ) from error
    return arrays, meta


class Saved:
    """Mix-in: ``save`` and ``load`` through one safetensors file.

    A class states what it is made of by ``_to_saved() -> (arrays, meta)`` and ``_from_saved(arrays, meta) -> self``.
    ``heedful.load`` finds a class by its name among the public names of the rooms.
    """

    def save(self, path: str | os.PathLike) -> None:
        """Write this object to ``path`` (``.safetensors``), atomically and without pickling."""
        if Path(path).suffix != ".safetensors":
            raise InputError(
                f"{type(self).__name__}.save needs a path ending in .safetensors, got {os.fspath(path)!r}."
            )
        arrays, meta = self._to_saved()
        save_arrays(path, arrays, {**meta, "class": type(self).__name__})

    @classmethod
    def load(cls: type[S], path: str | os.PathLike) -> S:
        """Read an object of this class that ``save`` wrote."""
        arrays, meta = load_arrays(path)
        if meta.get("class") != cls.__name__:
            raise FileFormatError(
                f"{os.fspath(path)} holds a {meta.get('class')}, not a {cls.__name__}. Use heedful.load(path), which "
                "returns whatever the file holds."
            )
        try:
            return cls._from_saved(arrays, meta)
        except FileFormatError as error:
            raise FileFormatError(f"{os.fspath(path)}: {error}") from error
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise FileFormatError(
                f"{os.fspath(path)} lacks or garbles a part of a {cls.__name__}: {error!r}."
            ) from error

    def _to_saved(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        raise TypeError(f"{type(self).__name__} does not say what it is made of (_to_saved).")

    @classmethod
    def _from_saved(cls: type[S], arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> S:
        raise TypeError(f"{cls.__name__} does not say how it is rebuilt (_from_saved).")


def load(path: str | os.PathLike) -> Any:
    """Whatever object of heedful the file holds, as its class's ``load`` returns it."""
    _, meta = load_arrays(path)
    name = str(meta.get("class"))
    for room in dict.fromkeys(method.room for method in methods.values()):
        public = importlib.import_module(f"heedful.{room}")
        kind = getattr(public, name) if name in dir(public) else None
        if isinstance(kind, type) and issubclass(kind, Saved):
            return kind.load(path)
    raise FileFormatError(f"{os.fspath(path)} holds a {name}, which this heedful does not have. Update heedful.")
