"""Masks drawn at random, of single weights or of whole diagonals, and how many of them a sparsity leaves active."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from heedful._validation import require_number
from heedful.compress.dynadiag.pattern import active_diagonals, indices
from heedful.errors import ParameterError


def require_sparsity(sparsity: float) -> None:
    """Raise ``ParameterError`` unless ``sparsity`` is the share of zeros of a weight that is not all zeros."""
    require_number(sparsity, "sparsity", low=0, high=1)
    if sparsity == 1:
        raise ParameterError("sparsity must be below 1: nothing would be left to train; got 1.")


def active_weights(shape: Sequence[int], density: float) -> int:
    """How many weights a density keeps, at least one."""
    return max(1, round(density * math.prod(shape)))


def random_mask(
    shape: Sequence[int], density: float, *, generator: torch.Generator | None = None
) -> Bool[Tensor, "..."]:
    """Weights at random places, ``active_weights`` of them."""
    mask = torch.zeros(math.prod(shape), dtype=torch.bool)
    mask[torch.randperm(len(mask), generator=generator)[: active_weights(shape, density)]] = True
    return mask.view(*shape)


def random_diagonals(
    shape: Sequence[int], density: float, *, generator: torch.Generator | None = None
) -> Bool[Tensor, "out in"]:
    """Diagonals at random offsets, ``active_diagonals`` of them."""
    offsets = torch.randperm(max(shape), generator=generator)
    return diagonal_mask(shape, offsets[: active_diagonals(len(offsets), 1 - density)])


def diagonal_mask(shape: Sequence[int], offsets: Int[Tensor, " k"]) -> Bool[Tensor, "out in"]:
    """The wrapped diagonals of these offsets."""
    out, inputs = shape
    rows, cols = indices(out, inputs, offsets, tall=out >= inputs)
    mask = torch.zeros(out, inputs, dtype=torch.bool, device=offsets.device)
    mask[rows, cols] = True
    return mask
