"""The two sparse products of a diagonal layer, y = x Wᵀ and dV, computed in several ways that agree.

Every backend is a pair of functions of contiguous tensors and checked offsets; ``tall`` says how the offsets are read
(see ``pattern``). A batch may be empty, and no function here knows of gradients.
"""

import functools
import importlib.util
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from heedful.compress._sparsity import csr_matrix, hear_beta_warning
from heedful.compress.dynadiag.pattern import block_layout, check_offsets, indices
from heedful.errors import MissingExtraError, ParameterError

_NARROW = (torch.float16, torch.bfloat16)


def product(x: Tensor, values: Tensor, offsets: Tensor, out_features: int, *, tall: bool, backend: str) -> Tensor:
    """``x`` (batch, in) times the transposed matrix: (batch, out), of the type of ``x``."""
    if 0 in (x.shape[0], offsets.shape[0]):
        return x.new_zeros(x.shape[0], out_features)
    compute, dtype = BACKENDS[backend].product, _compute_type(x, backend)
    return compute(x.to(dtype), values.to(dtype), offsets, out_features, tall=tall).to(x.dtype)


def value_gradient(grad: Tensor, x: Tensor, offsets: Tensor, *, tall: bool, backend: str) -> Tensor:
    """Gradient of the values, (k, d): the entries of gradᵀ x on the diagonals, grad (batch, out) and x (batch, in)."""
    if 0 in (x.shape[0], offsets.shape[0]):
        return x.new_zeros(offsets.shape[0], min(grad.shape[1], x.shape[1]))
    compute, dtype = BACKENDS[backend].value_gradient, _compute_type(x, backend)
    return compute(grad.to(dtype), x.to(dtype), offsets, tall=tall).to(x.dtype)


def usable(device: torch.device) -> list[str]:
    """The backends that this installation can run on the device."""
    names = ["dense", "csr", "bcsr"]
    if device.type == "cpu" and importlib.util.find_spec("numba"):
        names.append("numba")
    if device.type == "cuda" and importlib.util.find_spec("triton"):
        names.append("triton")
    return names


def require_usable(backend: str, device: torch.device) -> None:
    """Raise unless the backend's package is installed and it runs on the device."""
    if backend in ("numba", "triton") and not importlib.util.find_spec(backend):
        raise MissingExtraError(f'backend="{backend}" needs {backend}: pip install "heedful[kernels]".')
    if backend == "numba" and device.type != "cpu":
        raise ParameterError(f'backend="numba" runs on the CPU, and x is on {device}. Use "triton" or "auto".')
    if backend == "triton" and device.type != "cuda" and not _triton().INTERPRETED:
        raise ParameterError(f'backend="triton" needs a CUDA device, and x is on {device}. Use "numba" or "auto".')


def _compute_type(x: Tensor, backend: str) -> torch.dtype:
    """Half precision is computed in float32 on the CPU, where only the dense product knows bfloat16."""
    if x.device.type != "cpu" or x.dtype not in _NARROW or (backend, x.dtype) == ("dense", torch.bfloat16):
        return x.dtype
    return torch.float32


def _dense_product(x, values, offsets, out_features, *, tall):
    weight = values.new_zeros(out_features, x.shape[1])
    weight[indices(out_features, x.shape[1], offsets, tall=tall)] = values
    return linear(x, weight)


def _dense_gradient(grad, x, offsets, *, tall):
    return (grad.T @ x)[indices(grad.shape[1], x.shape[1], offsets, tall=tall)]


class _CsrPattern(NamedTuple):
    """A CSR pattern with sorted columns; ``order`` says which of the k · d values each entry is."""

    starts: Tensor
    columns: Tensor
    order: Tensor

    def with_values(self, values: Tensor, shape: tuple[int, int]) -> Tensor:
        return csr_matrix(self.starts, self.columns, values, shape)


@functools.lru_cache(maxsize=32)
def _csr_pattern(
    out_features: int, in_features: int, offsets: tuple[int, ...], tall: bool, device: torch.device
) -> _CsrPattern:
    """It depends on the offsets alone, which change rarely, so it is kept."""
    chosen = torch.tensor(offsets, dtype=torch.int64)
    rows, cols = (i.reshape(-1) for i in indices(out_features, in_features, chosen, tall=tall))
    order = (rows * in_features + cols).argsort()
    starts = torch.zeros(out_features + 1, dtype=torch.int64)
    starts[1:] = rows.bincount(minlength=out_features).cumsum(0)
    # 32 bits: half of what the product reads beside the values
    return _CsrPattern(starts.int().to(device), cols[order].int().to(device), order.to(device))


def _csr_product(x, values, offsets, out_features, *, tall):
    shape = out_features, x.shape[1]
    pattern = _csr_pattern(*shape, check_offsets(offsets, max(shape)), tall, x.device)
    matrix = pattern.with_values(values.reshape(-1)[pattern.order], shape)
    if len(x) == 1:
        return (matrix @ x[0])[None]  # half the time of a product with one column
    return (matrix @ x.T.contiguous()).T.contiguous()


def _csr_gradient(grad, x, offsets, *, tall):
    shape = grad.shape[1], x.shape[1]
    pattern = _csr_pattern(*shape, check_offsets(offsets, max(shape)), tall, x.device)
    matrix = pattern.with_values(x.new_zeros(len(pattern.order)), shape)
    gradient = x.new_empty(len(pattern.order))
    gradient[pattern.order] = torch.sparse.sampled_addmm(matrix, grad.T.contiguous(), x, beta=0.0).values()
    return gradient.view(offsets.shape[0], -1)


@functools.lru_cache(maxsize=256)
def _block_size(out_features: int, in_features: int, offsets: tuple[int, ...], tall: bool) -> int:
    """The largest of 64, 32, 16 whose blocks hold at most a quarter more numbers than those of 16."""
    held = {
        block: len(block_layout(out_features, in_features, offsets, tall, block, torch.device("cpu")).columns)
        * block**2
        for block in (16, 32, 64)
    }
    return max(block for block in held if held[block] <= 1.25 * held[16])


def _layout(shape, offsets, tall, device):
    numbers = check_offsets(offsets, max(shape))
    block = _block_size(*shape, numbers, tall)
    return block_layout(*shape, numbers, tall, block, device), block


def _bcsr_product(x, values, offsets, out_features, *, tall):
    in_features = x.shape[1]
    layout, block = _layout((out_features, in_features), offsets, tall, x.device)
    blocks = layout.fill(values, block)
    if _dots_blocks(x):
        return _triton().block_product(x, blocks, layout, out_features)
    hear_beta_warning()
    shape = (len(layout.starts) - 1) * block, -(-in_features // block) * block
    matrix = torch.sparse_bsr_tensor(layout.starts, layout.columns, blocks, size=shape, check_invariants=False)
    return (matrix @ pad(x, (0, shape[1] - in_features)).T.contiguous())[:out_features].T.contiguous()


def _bcsr_gradient(grad, x, offsets, *, tall):
    layout, block = _layout((grad.shape[1], x.shape[1]), offsets, tall, x.device)
    if _dots_blocks(x):
        blocks = _triton().block_gradient(grad, x, layout, block)
    else:
        tiles = pad(x, (0, -x.shape[1] % block)).unflatten(1, (-1, block))
        rows = pad(grad, (0, -grad.shape[1] % block)).unflatten(1, (-1, block))
        starts = layout.starts.tolist()
        blocks = torch.cat(
            [
                torch.einsum("br,bnc->nrc", rows[:, i], tiles[:, layout.columns[begin:end]])
                for i, (begin, end) in enumerate(itertools.pairwise(starts))
            ]
        )
    return blocks.reshape(-1)[layout.position].view(offsets.shape[0], -1)


def _dots_blocks(x: Tensor) -> bool:
    """Whether Triton multiplies the blocks; it has no product of blocks in float64."""
    return x.device.type == "cuda" and x.dtype != torch.float64 and bool(importlib.util.find_spec("triton"))


def _numba_product(x, values, offsets, out_features, *, tall):
    arrays = (tensor.contiguous().numpy() for tensor in (x, values, offsets))
    return torch.from_numpy(_cpu().product(*arrays, out_features, tall=tall))


def _numba_gradient(grad, x, offsets, *, tall):
    arrays = (tensor.contiguous().numpy() for tensor in (grad, x, offsets))
    return torch.from_numpy(_cpu().value_gradient(*arrays, tall=tall))


def _triton_product(x, values, offsets, out_features, *, tall):
    return _triton().product(x.contiguous(), values.contiguous(), offsets, out_features, tall=tall)


def _triton_gradient(grad, x, offsets, *, tall):
    return _triton().value_gradient(grad.contiguous(), x.contiguous(), offsets, tall=tall)


def _cpu():
    """Imported on first use: numba is an extra, and takes half a second."""
    from heedful.compress.dynadiag import _cpu

    return _cpu


def _triton():
    from heedful.compress.dynadiag import _triton

    return _triton


class Backend(NamedTuple):
    """Two functions; the second gives the gradient of the values."""

    product: Callable[..., Tensor]
    value_gradient: Callable[..., Tensor]


BACKENDS = {
    "dense": Backend(_dense_product, _dense_gradient),
    "csr": Backend(_csr_product, _csr_gradient),
    "bcsr": Backend(_bcsr_product, _bcsr_gradient),
    "numba": Backend(_numba_product, _numba_gradient),
    "triton": Backend(_triton_product, _triton_gradient),
}
