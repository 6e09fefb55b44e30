"""What is costly to compute and the same for many trials: computed once on a machine, and kept in the data folder."""

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from heedful import data
from heedful._files import digest_file, load_arrays, save_arrays
from heedful.errors import FileFormatError

Maker = Callable[[], Mapping[str, np.ndarray]]


def kept(kind: str, depends: Any, make: Maker) -> dict[str, np.ndarray]:
    """The arrays that ``make`` makes, from the disk if they were made before.

    Of several processes that ask at the same time one makes them, and the others wait for it.

    Parameters
    ----------
    kind : str
        What they are: a folder of the data folder.
    depends : JSON types
        All that they depend on, the code included; the version of torch and the number of threads are added.
    make : callable
        Pure: what ``depends`` says determines what it returns.
    """
    (arrays,) = kept_all(kind, [(depends, make)])
    return arrays


def kept_all(kind: str, parts: Sequence[tuple[Any, Maker]]) -> list[dict[str, np.ndarray]]:
    """``kept`` of several parts, each ``(depends, make)``: processes that ask at the same time share the work.

    A part that another process is making is left to it, and waited for in the end.
    """
    found: list[dict[str, np.ndarray] | None] = [None] * len(parts)
    for timeout in (0, -1):
        for number, (depends, make) in enumerate(parts):
            if found[number] is None:
                with contextlib.suppress(Timeout):
                    found[number] = _kept(kind, depends, make, timeout=timeout)
    return [arrays for arrays in found if arrays is not None]


def made_once(
    kind: str, file: str, sources: Sequence[str], makers: Mapping[str, Callable[[], Mapping[str, Tensor]]]
) -> list[dict[str, Tensor]]:
    """``kept_all`` of tensors: what each maker makes, under its name, the code in ``file`` and the data sets ``sources``."""
    depends = [digest_file(file), data.checksums(*sources)]
    parts = [([name, *depends], functools.partial(_arrays, make)) for name, make in makers.items()]
    return [{name: torch.from_numpy(array) for name, array in arrays.items()} for arrays in kept_all(kind, parts)]


def _arrays(make: Callable[[], Mapping[str, Tensor]]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in make().items()}


def _kept(kind: str, depends: Any, make: Maker, *, timeout: float) -> dict[str, np.ndarray]:
    text = json.dumps([depends, torch.__version__, torch.get_num_threads()], sort_keys=True)
    path = data.folder() / kind / f"{hashlib.sha256(text.encode()).hexdigest()}.safetensors"
    with contextlib.suppress(FileNotFoundError, FileFormatError):  # a file appears whole, so reading needs no lock
        return load_arrays(path)[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock"), timeout=timeout):
        with contextlib.suppress(FileNotFoundError, FileFormatError):  # made by another while this one waited
            return load_arrays(path)[0]
        arrays = dict(make())
        save_arrays(path, arrays, {"kind": kind})
    return arrays
