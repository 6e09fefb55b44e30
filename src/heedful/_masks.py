"""Masks that keep the largest entries: n of every m, or the k largest of a tensor.

Sizes are absolute values, and equal ones are told apart by their position: the lowest index wins, on every device.
"""

import math
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful._validation import require_choice, require_number
from heedful.errors import InputError, ParameterError

_CHUNK = 1 << 16  # entries looked at together on a CPU: what is made of them stays in the cache of one core
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def nm_mask(
    values: Float[Tensor, "..."],
    n: int,
    m: int,
    *,
    dim: int | None = None,
    available: Bool[Tensor, "..."] | None = None,
    fill: bool = False,
    tail: Literal["error", "proportional", "drop", "keep"] = "error",
) -> Bool[Tensor, "..."]:
    """Keep the n entries of largest absolute value in every block of m consecutive ones.

    Parameters
    ----------
    values : Float[Tensor, "..."]
        Any shape and floating type of 16 to 64 bits, no NaN.
    n, m : int
        0 <= n <= m, m >= 1.
    dim : int, optional
        The dimension that blocks run along, each line on its own. If None, blocks run over the flattened (row-major)
        tensor.
    available : Bool[Tensor, "..."], optional
        Entries that may be kept; where a block has fewer than n, fewer are kept. If None, all are.
    fill : bool
        Keep n nevertheless: all available entries of such a block, and the largest of the others.
    tail : {"error", "proportional", "drop", "keep"}
        What to do with the last L < m entries of a line: refuse them, keep ⌊n L / m + 1/2⌋, none or all.

    Returns
    -------
    Bool[Tensor, "..."]
        True where an entry is kept. Zeros are kept only where a block has too little else.

    Notes
    -----
    O(N) time: a partial sort finds each block's n-th largest entry, and one comparison makes the mask.
    """
    require_pattern(n, m)
    require_choice(tail, "tail", ("error", "proportional", "drop", "keep"))
    _check_tensors(values, available)
    lines = _lines(values.detach(), dim)
    free = None if available is None else _lines(available, dim)
    whole, rest = divmod(lines.shape[1], m)
    if rest and tail == "error":
        where = f"{lines.shape[1]} entries" if dim is None else f"{lines.shape[1]} entries along dimension {dim}"
        raise InputError(f"{where} cannot be cut into blocks of m={m}, {rest} are left over. Choose another m or tail.")

    def kept(start: int, stop: int, n: int, m: int) -> Tensor:
        free_blocks = None if free is None else free[:, start:stop].reshape(-1, m)
        mask = _largest_in_blocks(lines[:, start:stop].reshape(-1, m), n, free_blocks, fill)
        return mask.view(len(lines), stop - start)

    mask = kept(0, whole * m, n, m)
    if rest:
        n_rest = {"proportional": (2 * n * rest + m) // (2 * m), "drop": 0, "keep": rest}[tail]
        mask = torch.cat([mask, kept(whole * m, whole * m + rest, n_rest, rest)], dim=1)
    return mask.view(values.shape) if dim is None else mask.view(values.movedim(dim, -1).shape).movedim(-1, dim)


def top_mask(values: Float[Tensor, "..."], k: int) -> Bool[Tensor, "..."]:
    """Keep the k entries of largest absolute value of the whole tensor, 0 <= k <= its size."""
    require_number(k, "k", low=0, high=values.numel(), integer=True)
    return nm_mask(values, k, max(values.numel(), 1))


def check_nm(tensor: Tensor, n: int, m: int, *, dim: int | None = None) -> bool:
    """Whether every block of m consecutive entries (and what is left at the end) has at most n that are not zero."""
    require_pattern(n, m)
    lines = _lines(tensor, dim) != 0
    lines = torch.nn.functional.pad(lines, (0, -lines.shape[1] % m))
    return bool((lines.reshape(-1, m).sum(dim=1) <= n).all())


def _lines(x: Tensor, dim: int | None) -> Tensor:
    """The lines that blocks are cut from, as rows."""
    if dim is None:
        return x.reshape(1, x.numel())
    x = x.movedim(dim, -1)
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _largest_in_blocks(blocks: Tensor, n: int, free: Tensor | None, fill: bool) -> Tensor:
    """The n largest of each row of ``blocks``, those that are ``free`` before all others (and only those, unless fill)."""
    mask = torch.zeros(blocks.shape, dtype=torch.bool, device=blocks.device)
    if n == 0 or blocks.numel() == 0:
        return mask
    integers = _INTEGERS[blocks.element_size()]
    limits = torch.iinfo(integers)
    on_cpu = blocks.device.type == "cpu"
    step = max(1, _CHUNK // blocks.shape[1]) if on_cpu else len(blocks)
    for start in range(0, len(blocks), step):
        part = slice(start, start + step)
        # Without its sign bit, a float reads as an integer of the same order. Taken ones get it, and are below all others.
        keys = blocks[part].view(integers) & limits.max
        if free is not None:
            keys |= (~free[part]).to(integers) << (limits.bits - 1)
        mask[part] = torch.from_numpy(_select(keys.numpy(), n)) if on_cpu else _select_by_sorting(keys, n)
        if free is not None and not fill:
            mask[part] &= free[part]
    return mask


def _select(keys: np.ndarray, n: int) -> np.ndarray:
    """The n largest of each row, the first of equal ones."""
    least = np.partition(keys, -n, axis=1)[:, -n, None]
    mask = keys >= least
    excess = mask.sum(axis=1) - n
    if (rows := np.flatnonzero(excess)).size:  # rows where the n-th largest has equals
        equal = keys[rows] == least[rows]
        wanted = equal.sum(axis=1) - excess[rows]
        mask[rows] &= ~equal | (equal.cumsum(axis=1) <= wanted[:, None])
    return mask


def _select_by_sorting(keys: Int[Tensor, "blocks m"], n: int) -> Bool[Tensor, "blocks m"]:
    """``_select`` on devices other than the CPU."""
    chosen = keys.sort(dim=1, descending=True, stable=True).indices[:, :n]
    return torch.zeros_like(keys, dtype=torch.bool).scatter_(1, chosen, True)


def require_pattern(n: int, m: int) -> None:
    """Raise ``ParameterError`` unless n of every m entries can be kept."""
    require_number(m, "m", low=1, integer=True)
    require_number(n, "n", low=0, integer=True)
    if n > m:
        raise ParameterError(f"n must be at most m: n entries of every m are kept; got n={n}, m={m}.")


def _check_tensors(values: Tensor, available: Tensor | None) -> None:
    if values.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise InputError(f"values must be floating-point numbers of 16 to 64 bits; got {values.dtype}. Convert them.")
    if available is not None and available.shape != values.shape:
        raise InputError(
            f"available must have the shape of values, {tuple(values.shape)}; got {tuple(available.shape)}."
        )
