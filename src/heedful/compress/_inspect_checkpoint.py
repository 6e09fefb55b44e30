"""What a checkpoint holds: bits, zeros and bytes of every weight, whether it is N:M sparse, and how long its layers take."""

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from heedful._checkpoints import TensorSource, open_checkpoint
from heedful._machine import time_call
from heedful._masks import check_nm
from heedful._results import track
from heedful.compress._prune_checkpoint import linear_weights, orientation
from heedful.compress._saved import read_metadata
from heedful.compress._sparsity import hear_beta_warning
from heedful.compress.bame._nm import parse_pattern
from heedful.compress.dynadiag._backends import usable
from heedful.compress.dynadiag.convert import described_layers
from heedful.compress.dynadiag.matmul import diagonal_matmul
from heedful.errors import FileFormatError, InputError

_PACKED = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
_DIAGONAL = ("values", "frozen_offsets")
_ROWS = 16  # of the inputs that layers are timed with


def inspect_checkpoint(
    source: str | os.PathLike, *, pattern: str | None = None, exclude: Sequence[str] = (), time: bool = False
):  # -> DataFrame; pandas is imported where it is used
    """A row for each tensor of a checkpoint; the parts of a packed or diagonal weight make one row.

    Parameters
    ----------
    source : path
        A Hugging Face folder, with plain or packed weights, or a file of weights, also of diagonals.
    pattern : str, optional
        Such as "2:4": whether each linear layer has at most n of every m weights along its inputs.
    exclude : sequence of str
        Layers that need not, besides embeddings and heads: names, globs or ``re:…``.
    time : bool
        Measure each linear layer on this machine, on 16 rows of inputs in float32: dense, and as sparse as it is.

    Returns
    -------
    DataFrame
        ``tensor, shape, stored, bits`` (of storage, per weight), ``zeros`` (share; NaN for packed codes), ``bytes`` and, as
        asked for, ``conforms`` (None where the pattern says nothing) and ``ms`` (medians by way of multiplying, or None).

    Notes
    -----
    Memory: one tensor, and where layers are timed its copies.
    """
    import pandas as pd

    n, m = (0, 1) if pattern is None else parse_pattern(pattern)
    rows = []
    with open_checkpoint(source) as model:
        names, by_inputs, diagonals = set(model.names), orientation(model), _diagonal_layers(Path(source))
        packed = {name.removesuffix(".weight_packed") for name in names if name.endswith(".weight_packed")}
        checked = (
            set() if pattern is None and not time else _plain_linear(model, exclude, whole=packed | set(diagonals))
        )
        for name in track(model.names, "inspect"):
            layer, _, part = name.rpartition(".")
            if layer in packed and part in _PACKED:
                if part == "weight_packed":
                    rows.append(_packed(model, layer) | {"conforms": None, "ms": None})
            elif layer in diagonals and part in _DIAGONAL:
                if part == "values":
                    rows.append(_diagonal(model, layer, diagonals[layer], time=time) | {"conforms": None})
            else:
                tensor, info = model.get(name), model.info(name)
                fits = check_nm(by_inputs(tensor), n, m, dim=1) if pattern is not None and name in checked else None
                ms = _time_dense(by_inputs(tensor)) if time and name in checked else None
                zeros = float((tensor == 0).double().mean()) if tensor.numel() else 0.0
                stored = str(info.dtype).removeprefix("torch.")
                rows.append(_row(name, info.shape, stored, info.nbytes, zeros) | {"conforms": fits, "ms": ms})
    unasked = [column for column, asked in (("conforms", pattern is not None), ("ms", time)) if not asked]
    return pd.DataFrame(rows).drop(columns=unasked)


def _row(name: str, shape: Sequence[int], stored: str, size: int, zeros: float) -> dict[str, Any]:
    bits = 8 * size / max(math.prod(shape), 1)
    return {"tensor": name, "shape": list(shape), "stored": stored, "bits": bits, "zeros": zeros, "bytes": size}


def _plain_linear(model: TensorSource, exclude: Sequence[str], *, whole: set[str]) -> set[str]:
    """Linear layers stored as plain weights: none may be left, if the others are packed or diagonal."""
    try:
        return set(linear_weights(model, exclude=exclude))
    except InputError:
        if whole:
            return set()
        raise


def _packed(model: TensorSource, layer: str) -> dict[str, Any]:
    parts = [f"{layer}.{part}" for part in _PACKED if f"{layer}.{part}" in model]
    if f"{layer}.weight_shape" not in model:
        raise FileFormatError(f"{model.origin} has codes for {layer}, but no weight_shape. Fetch it again.")
    shape = model.get(f"{layer}.weight_shape").tolist()
    return _row(f"{layer}.weight", shape, "packed", sum(model.info(part).nbytes for part in parts), math.nan)


def _diagonal_layers(path: Path) -> dict[str, dict[str, Any]]:
    """The diagonal layers that a file of ``save_compressed`` describes; none in other files."""
    if path.suffix != ".safetensors" or not path.is_file():
        return {}
    meta = read_metadata(path)
    return described_layers(meta) if isinstance(meta, dict) and meta.get("class") == "diagonals" else {}


def _diagonal(model: TensorSource, layer: str, described: Mapping[str, Any], *, time: bool) -> dict[str, Any]:
    shape = described.get("out_features", 0), described.get("in_features", 0)
    if not all(isinstance(n, int) and n >= 1 for n in shape) or f"{layer}.frozen_offsets" not in model:
        raise FileFormatError(f"{model.origin} does not say the shape or the offsets of {layer}. Save the model again.")
    values, offsets = (model.get(f"{layer}.{part}") for part in _DIAGONAL)
    size = values.nbytes + offsets.nbytes
    zeros = 1 - values.numel() / math.prod(shape)
    row = _row(f"{layer}.weight", shape, f"{len(offsets)} diagonals", size, zeros)
    return row | {"ms": _time_diagonal(values.float(), offsets, *shape) if time else None}


def _time_dense(weight: Tensor) -> dict[str, float]:
    weight = weight.float().contiguous()
    ways: dict[str, Callable[[Tensor], Tensor]] = {"dense": lambda x: linear(x, weight)}
    if (weight == 0).float().mean() >= 0.5:
        hear_beta_warning()
        rows = weight.to_sparse_csr()
        ways["csr"] = lambda x: (rows @ x.T).T
    return _medians(ways, weight.shape[1])


def _time_diagonal(values: Tensor, offsets: Tensor, out: int, inputs: int) -> dict[str, float]:
    weight = diagonal_matmul(torch.eye(inputs), values, offsets, out, backend="dense").T.contiguous()
    ways: dict[str, Callable[[Tensor], Tensor]] = {"dense": lambda x: linear(x, weight)}
    multiply: Callable[..., Tensor] = functools.partial(
        diagonal_matmul, values=values, offsets=offsets, out_features=out
    )
    ways |= {
        backend: functools.partial(multiply, backend=backend) for backend in usable(values.device) if backend != "dense"
    }
    return _medians(ways, inputs)


def _medians(ways: Mapping[str, Callable[[Tensor], Tensor]], inputs: int) -> dict[str, float]:
    x = torch.zeros(_ROWS, inputs)
    with torch.inference_mode():
        return {way: 1e3 * time_call(functools.partial(f, x), n_timings=7, warmup=2).median for way, f in ways.items()}
