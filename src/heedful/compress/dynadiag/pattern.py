"""Where the entries of wrapped diagonals lie, and how many hardware blocks they touch.

An M × N matrix (out × in) has P = max(M, N) wrapped diagonals with D = min(M, N) entries each; every cell lies on exactly
one. Entry d of the diagonal with offset o lies at ((d + o) mod M, d) if the matrix is tall, M >= N, else at (d, (d + o)
mod N). So offsets and values of a tall matrix serve its transpose too, read as a wide one, and conversely. A square
matrix is tall; its transpose is read as wide although its shape does not say so, hence the flag ``tall`` below.
"""

import functools
import math
from collections import Counter
from collections.abc import MutableMapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from heedful._validation import require_number
from heedful.compress._sparsity import hear_beta_warning
from heedful.errors import InputError, ParameterError

__all__ = ["DiagonalIndices", "block_fill", "diagonal_indices", "to_bcsr"]


class DiagonalIndices(NamedTuple):
    """Row and column of each entry of each diagonal."""

    rows: Int[Tensor, "k d"]
    cols: Int[Tensor, "k d"]


def diagonal_indices(
    out_features: int, in_features: int, offsets: Int[Tensor, " k"] | Sequence[int]
) -> DiagonalIndices:
    """Rows and columns of the entries of wrapped diagonals, in the order in which their values are stored.

    Parameters
    ----------
    out_features, in_features : int
        Shape M × N of the matrix, both >= 1.
    offsets : Int[Tensor, " k"] or sequence of int
        Which diagonals: distinct numbers in [0, max(M, N)), in any order.

    Returns
    -------
    DiagonalIndices
        ``rows`` and ``cols``, int64 of shape (k, min(M, N)), on the device of ``offsets``.

    Raises
    ------
    InputError
        If an offset is out of range or given twice.

    Examples
    --------
    >>> rows, cols = diagonal_indices(2, 3, (0, 2))
    >>> weight = torch.zeros(2, 3)
    >>> weight[rows, cols] = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> weight
    tensor([[1., 0., 3.],
            [4., 2., 0.]])
    """
    require_number(out_features, "out_features", low=1, integer=True)
    require_number(in_features, "in_features", low=1, integer=True)
    offsets = torch.as_tensor(offsets, dtype=torch.int64)
    check_offsets(offsets, max(out_features, in_features))
    return indices(out_features, in_features, offsets, tall=out_features >= in_features)


def active_diagonals(n_diagonals: int, sparsity: float, *, groups: int = 1) -> int:
    """How many of ``n_diagonals`` a sparsity keeps: its complement, rounded up, in whole runs of ``groups``, at least one."""
    runs = round((1 - sparsity) * n_diagonals / groups, 6)  # 1 − 0.95 is a little more than 0.05: no diagonal for that
    return groups * max(1, math.ceil(runs))


def block_fill(
    offsets: Int[Tensor, " k"] | Sequence[int], out_features: int, in_features: int, block: int = 16
) -> float:
    """Share of the block × block tiles of an out × in matrix that its diagonals touch, in [0, 1].

    It bounds what a block-sparse product can save: K random offsets of 768 touch about 95 % of the 16 × 16 blocks at K = 77,
    five runs of 16 neighbouring, aligned offsets about 21 %. Tiles cut off by the border count as blocks.

    Examples
    --------
    >>> block_fill([16], 768, 768)  # along the borders of blocks: one in each of 48 columns
    0.020833333333333332
    >>> block_fill([17], 768, 768)
    0.041666666666666664
    """
    require_number(block, "block", low=1, integer=True)
    rows, cols = diagonal_indices(out_features, in_features, offsets)
    touched = torch.zeros(-(-out_features // block), -(-in_features // block), dtype=torch.bool, device=rows.device)
    touched[rows // block, cols // block] = True
    return touched.double().mean().item()


def to_bcsr(
    values: Float[Tensor, "k d"],
    offsets: Int[Tensor, " k"] | Sequence[int],
    out_features: int,
    in_features: int,
    block: int = 16,
) -> Float[Tensor, "out in"]:
    """The matrix with these diagonals as a block-sparse tensor of torch (layout ``torch.sparse_bsr``).

    Parameters
    ----------
    values : Float[Tensor, "k d"]
        Row k holds the min(out, in) entries of the diagonal with offset ``offsets[k]``.
    offsets : Int[Tensor, " k"] or sequence of int
        Distinct, in [0, max(out, in)), in any order.
    out_features, in_features : int
        Shape of the matrix.
    block : int
        Edge of the square blocks; it must divide both features. Usually 16, 32 or 64.

    Returns
    -------
    Tensor
        Only touched blocks are stored; ``.to_dense()`` is the matrix. Cost and memory: O(k · d + blocks · block²).

    Raises
    ------
    InputError
        If ``values`` do not have the shape that the offsets need, or an offset is out of range or given twice.
    ParameterError
        If ``block`` does not divide both features.
    """
    require_number(block, "block", low=1, integer=True)
    if out_features % block or in_features % block:
        raise ParameterError(
            f"blocks of {block} × {block} do not tile a {out_features} × {in_features} matrix. Choose a block that "
            "divides both."
        )
    offsets = torch.as_tensor(offsets, dtype=torch.int64, device=values.device)
    check_values(values, offsets, out_features, in_features)
    numbers = check_offsets(offsets, max(out_features, in_features))
    layout = block_layout(out_features, in_features, numbers, out_features >= in_features, block, values.device)
    hear_beta_warning()
    return torch.sparse_bsr_tensor(
        layout.starts,
        layout.columns,
        layout.fill(values, block),
        size=(out_features, in_features),
        check_invariants=False,
    )


class BlockLayout(NamedTuple):
    """Blocks of a BCSR matrix, and where in their storage the entry (k, d) of the diagonals lies."""

    starts: Tensor  # int64, block rows + 1: the blocks of block row i are starts[i] : starts[i + 1]
    columns: Tensor  # int64: block column of each block
    position: Tensor  # int64, k · d: index into the flattened (blocks, block, block)

    def fill(self, values: Tensor, block: int) -> Tensor:
        """The blocks (n, block, block) that hold ``values``; elsewhere zeros."""
        blocks = values.new_zeros(len(self.columns) * block * block)
        blocks[self.position] = values.reshape(-1)
        return blocks.view(-1, block, block)


@functools.lru_cache(maxsize=32)
def block_layout(
    out_features: int, in_features: int, offsets: tuple[int, ...], tall: bool, block: int, device: torch.device
) -> BlockLayout:
    """The layout depends on the offsets alone, which change rarely, so it is kept."""
    chosen = torch.tensor(offsets, dtype=torch.int64)
    rows, cols = (i.reshape(-1) for i in indices(out_features, in_features, chosen, tall=tall))
    n_rows, n_cols = -(-out_features // block), -(-in_features // block)
    touched = torch.zeros(n_rows, n_cols, dtype=torch.bool)
    touched[rows // block, cols // block] = True
    columns = touched.nonzero()[:, 1]
    number = touched.reshape(-1).cumsum(0) - 1  # of the block at (i, j), where there is one
    position = number[rows // block * n_cols + cols // block]
    position = (position * block + rows % block) * block + cols % block
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), touched.sum(1).cumsum(0)])
    return BlockLayout(starts.to(device), columns.to(device), position.to(device))


def check_values(values: Tensor, offsets: Tensor, out_features: int, in_features: int) -> None:
    """Raise ``InputError`` unless there is a value for each entry of each diagonal."""
    expected = offsets.shape[0], min(out_features, in_features)
    if tuple(values.shape) != expected:
        raise InputError(
            f"values have shape {tuple(values.shape)}; {expected[0]} diagonals of a {out_features} × {in_features} "
            f"matrix need {expected}."
        )


def check_offsets(offsets: Tensor, n_diagonals: int) -> tuple[int, ...]:
    """Offsets as ints, or an ``InputError`` unless they are distinct and in [0, n_diagonals).

    On a GPU, where looking waits for all work before it, a tensor is looked at once until it changes.
    """
    if offsets.device.type == "cpu":
        return _distinct_of_bytes(offsets.long().numpy().tobytes(), n_diagonals)
    if offsets.is_inference():  # which does not count its changes
        return _distinct(tuple(offsets.tolist()), n_diagonals)
    version, numbers = _seen.get(offsets, (None, ()))
    if version != offsets._version:
        numbers = tuple(offsets.tolist())
        _seen[offsets] = offsets._version, numbers
    return _distinct(numbers, n_diagonals)


_seen: MutableMapping[Tensor, tuple[int | None, tuple[int, ...]]] = WeakTensorKeyDictionary()


@functools.lru_cache(maxsize=256)
def _distinct_of_bytes(offsets: bytes, n_diagonals: int) -> tuple[int, ...]:
    """Bytes are made and compared in a fraction of the time that a tuple of numbers takes."""
    return _distinct(tuple(np.frombuffer(offsets, np.int64).tolist()), n_diagonals)


@functools.lru_cache(maxsize=256)
def _distinct(numbers: tuple[int, ...], n_diagonals: int) -> tuple[int, ...]:
    low, high = min(numbers, default=0), max(numbers, default=0)
    if low < 0 or high >= n_diagonals:
        raise InputError(
            f"offsets run from {low} to {high}; a matrix with {n_diagonals} diagonals has offsets 0 to "
            f"{n_diagonals - 1}."
        )
    if len(set(numbers)) < len(numbers):
        twice = next(o for o, count in Counter(numbers).items() if count > 1)
        raise InputError(
            f"offset {twice} is given twice. Each diagonal may appear once: add up the values of those that coincide."
        )
    return numbers


def indices(out_features: int, in_features: int, offsets: Tensor, *, tall: bool) -> DiagonalIndices:
    """``diagonal_indices`` of checked offsets; ``tall=False`` with a square shape reads the diagonals of a transpose."""
    along = torch.arange(min(out_features, in_features), device=offsets.device).expand(len(offsets), -1)
    across = (along + offsets[:, None]) % max(out_features, in_features)
    return DiagonalIndices(across, along) if tall else DiagonalIndices(along, across)
