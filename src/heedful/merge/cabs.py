"""Conflict-aware and balanced sparsification of task vectors.

Merging prunes the task vectors τ_k = W_k − W_0 of fine-tuned models, each on its own. That is blind to conflict, since the
largest entries of all of them sit at the same places, and to balance, since one threshold leaves some rows dense and
others empty. CABS prunes one vector after the other at the places that are still free, and keeps n of every m entries:

    M_k = the n_k largest |τ_k| in each block of m, outside of H,      H ← H ∪ {M_k τ_k ≠ 0},      W = W_0 + Σ_k λ_k M_k τ_k.

The pruned vectors are then orthogonal: λ_k scales what model k adds, and touches no weight that belongs to another.

Yang et al.: CABS: Conflict-Aware and Balanced Sparsification for Enhancing Model Merging, ICML 2025, arXiv:2503.01874.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from heedful._masks import nm_mask, require_pattern
from heedful._validation import require_choice, require_number
from heedful.errors import InputError, ParameterError
from heedful.merge._task_vectors import (
    masked,
    one_each,
    open_models,
    open_state_dict,
    read,
    require_same_tensors,
    weighted_sum,
)

__all__ = ["cabs_delta", "cabs_masks", "sparsity_report"]


def cabs_masks(
    deltas: Sequence[Float[Tensor, "..."]],
    n: int | Sequence[int],
    m: int,
    *,
    order: Sequence[int] | None = None,
    tail: Literal["proportional", "drop", "keep"] = "proportional",
) -> list[Bool[Tensor, "..."]]:
    """Which entries of each task vector are kept: n of every m, at different places as far as possible.

    Parameters
    ----------
    deltas : sequence of Float[Tensor, "..."]
        One tensor's task vectors, fine-tuned minus base, K >= 1 of one shape.
    n : int or sequence of int
        Entries kept of each block, 0 <= n <= m, for all vectors or one each. The paper keeps 3 of 32 in small encoders
        and 64 of 256 in a 7B model.
    m : int
        Length of the blocks, >= 1, in the flattened (row-major) tensor; usually 32 to 256.
    order : sequence of int, optional
        The order in which the vectors choose; the first is best preserved. If None, as given.
    tail : {"proportional", "drop", "keep"}
        What to keep of the last L < m entries: ⌊n L / m + 1/2⌋, none, or all that are free.

    Returns
    -------
    list of Bool[Tensor, "..."]
        A mask for each vector. They are disjoint if the n sum to at most m. Otherwise a vector that finds fewer than n
        free entries in a block takes all of them and its largest of the others, the least overlap possible.

    Notes
    -----
    An entry is held by a vector that keeps it and is not zero there. Scaling a vector by c > 0 changes no mask; the first
    one does not depend on the other vectors; equal sizes go to the lowest index. O(K N).
    """
    return _choose_in_turn(deltas, one_each(n, len(deltas), "n"), m, order=order, tail=tail)


def cabs_delta(
    deltas: Sequence[Float[Tensor, "..."]],
    *,
    n: int | Sequence[int] = 64,
    m: int = 256,
    scale: float | Sequence[float] = 1.0,
    order: Sequence[int] | None = None,
    overlap: Literal["sum", "ties", "first"] = "sum",
    tail: Literal["proportional", "drop", "keep"] = "proportional",
) -> Float[Tensor, "..."]:
    """What one tensor of the merged model adds to the base: Σ scale_k M_k τ_k, with the masks of ``cabs_masks``.

    Parameters
    ----------
    deltas, n, m, order, tail
        As in ``cabs_masks``.
    scale : float or sequence of float
        λ, for all vectors or one each; usually 0.4 to 1.5. Nothing else rescales, so it alone sets the size of the result.
    overlap : {"sum", "ties", "first"}
        Where masks overlap: add, add only what agrees with the sign of the sum, or keep what comes first in the order.
    """
    counts, scales = one_each(n, len(deltas), "n"), one_each(scale, len(deltas), "scale")
    for one in scales:
        require_number(one, "scale")
    pruned = prune_in_turn(deltas, counts, m, order=order, overlap=overlap, tail=tail)
    return weighted_sum(pruned, scales, elect=overlap == "ties")


def sparsity_report(
    base: Mapping[str, Tensor],
    models: Sequence[Mapping[str, Tensor]] | Mapping[str, Mapping[str, Tensor]],
    *,
    masks: Sequence[Mapping[str, Tensor]] | None = None,
    m: int = 256,
    exclude: Sequence[str] = (),
):  # -> DataFrame; pandas is imported where it is used
    """How much task vectors collide, and how unevenly their entries lie: the two things that CABS heeds.

    Parameters
    ----------
    base, models, exclude
        As in ``merge_state_dicts``.
    masks : sequence of mapping of str to Bool[Tensor, "..."], optional
        For each model, what is kept of its tensors. If None, everything is.
    m : int
        Length of the blocks whose balance is looked at.

    Returns
    -------
    DataFrame
        A row for each merged tensor, and one for all of them, named "total". An entry counts where it is kept and not zero.

        * ``entries``, and ``density``, the share of them that count, on average over models;
        * ``overlap``: entries that count in both models of a pair over those that count in either (Jaccard), over all pairs;
        * ``sign_conflict``: the share of overlapping entries whose signs differ;
        * ``block_imbalance``, ``row_imbalance``, ``tensor_imbalance``: coefficient of variation, on average over models, of
          the share that counts in a block of ``m``, in a row (first dimension), in a tensor;
        * ``block_mass_imbalance`` and so on: the same of the mean absolute value.

        NaN where there is nothing to compare: one model, one block, one tensor.
    """
    require_number(m, "m", low=1, integer=True)
    start, sources = open_state_dict(base, "the base"), open_models(models)
    names = require_same_tensors(start, sources, exclude)
    kept = [{}] * len(sources) if masks is None else masks
    if len(kept) != len(sources):
        raise InputError(f"masks must be a mapping for each of the {len(sources)} models; got {len(kept)}.")
    for label, own in zip(sources, kept, strict=True):
        for name, mask in own.items():
            if name not in base or mask.shape != base[name].shape or mask.dtype != torch.bool:
                raise InputError(
                    f"masks of {label}: {name} must be a tensor of the base, and its mask bool, of its shape."
                )

    def vectors() -> Iterator[tuple[str, list[Tensor]]]:
        for name in names:
            origin = read(start, name, start.origin)
            deltas = [read(source, name, label) - origin for label, source in sources.items()]
            yield name, [masked(d, mask[name]) if name in mask else d for d, mask in zip(deltas, kept, strict=True)]

    return report_on(vectors(), m=m)


def report_on(vectors: Iterable[tuple[str, Sequence[Tensor]]], *, m: int = 256):  # a DataFrame
    """``sparsity_report`` of a stream: of each tensor its name and the vectors of all models, zero where not kept."""
    import pandas as pd

    rows, total = [], None
    for name, deltas in vectors:
        if not deltas[0].numel():
            continue
        tally = _tally(deltas, m)
        rows.append({"tensor": name} | _summary(tally))
        total = tally if total is None else {key: total[key] + value for key, value in tally.items()}
    return pd.DataFrame([*rows, {"tensor": "total"} | _summary(total)] if total else [])


def _tally(deltas: Sequence[Tensor], m: int) -> dict[str, np.ndarray]:
    """Numbers that add up over tensors: counts, and for each model the moments (n, Σx, Σx²) of what should be balanced."""
    signs = [delta.sign().to(torch.int8) for delta in deltas]
    tally = {
        "entries": np.array([deltas[0].numel()]),
        "counting": np.array([int(sign.count_nonzero()) for sign in signs]),
    }
    tally["pairs"] = np.zeros(3)
    for one, other in itertools.combinations(signs, 2):
        product = one * other
        tally["pairs"] += [int(x.sum()) for x in (product != 0, (one != 0) | (other != 0), product < 0)]
    for suffix, sizes in (("", [sign.abs() for sign in signs]), ("_mass", [delta.abs() for delta in deltas])):
        for part in ("block", "row", "tensor"):
            shares = [_cut(size, part, m).mean(dim=1, dtype=torch.float64).numpy() for size in sizes]
            tally[part + suffix] = np.array([[len(x), x.sum(), np.square(x).sum()] for x in shares])
    return tally


def _cut(x: Tensor, part: str, m: int) -> Tensor:
    """The full blocks of a tensor, or its rows (none if it has one dimension), or all of it: one each row."""
    if part == "block":
        return x.flatten()[: x.numel() // m * m].view(x.numel() // m, m)
    if part == "row":
        return x.flatten(1) if x.ndim > 1 else x.new_empty(0, 1)
    return x.reshape(1, x.numel())


def _summary(tally: Mapping[str, np.ndarray]) -> dict[str, int | float]:
    both, either, opposite = tally["pairs"]
    with np.errstate(divide="ignore", invalid="ignore"):  # NaN where there is nothing to compare
        summary: dict[str, int | float] = {
            "entries": int(tally["entries"][0]),
            "density": float(np.mean(tally["counting"] / tally["entries"])),
            "overlap": float(both / either),
            "sign_conflict": float(opposite / both),
        }
        for suffix in ("", "_mass"):
            for part in ("block", "row", "tensor"):
                n, total, squares = tally[part + suffix].T
                variance = np.maximum(squares / n - (total / n) ** 2, 0)
                variation = np.where(n > 1, np.sqrt(variance) / (total / n), np.nan)
                summary[f"{part}{suffix}_imbalance"] = float(np.mean(variation))
    return summary


def prune_in_turn(
    deltas: Sequence[Tensor],
    counts: Sequence[int],
    m: int,
    *,
    order: Sequence[int] | None = None,
    overlap: str = "sum",
    tail: Any = "proportional",
) -> Iterator[Tensor]:
    """The vectors, in the order given, with zeros where they are not kept."""
    require_choice(overlap, "overlap", ("sum", "ties", "first"))
    fill = overlap != "first"  # who takes only what is free leaves it to the first
    masks = _choose_in_turn(deltas, counts, m, order=order, tail=tail, fill=fill)
    return (masked(delta, mask) for delta, mask in zip(deltas, masks, strict=True))


def _choose_in_turn(
    deltas: Sequence[Tensor],
    counts: Sequence[int],
    m: int,
    *,
    order: Sequence[int] | None,
    tail: Any,
    fill: bool = True,
) -> list[Tensor]:
    """Masks of the vectors, each at the places that those before it left free (and, if fill, at others where it must)."""
    for n in counts:
        require_pattern(n, m)
    if len({delta.shape for delta in deltas}) != 1:
        raise InputError(f"deltas must be tensors of one shape; got {[tuple(delta.shape) for delta in deltas]}.")
    order = range(len(deltas)) if order is None else order
    require_order(order, len(deltas))
    fill = fill and sum(counts) > m  # else rounding in the tail could make it overlap
    masks: dict[int, Tensor] = {}
    free: Tensor | None = None
    for k in order:
        masks[k] = nm_mask(deltas[k], counts[k], m, available=free, fill=fill, tail=tail)
        left = ~(masks[k] & deltas[k].bool())  # a zero that was kept holds nothing
        free = left if free is None else free & left
    return [masks[k] for k in range(len(deltas))]


def require_order(order: Any, count: int) -> None:
    """Raise ``ParameterError`` unless ``order`` names each of ``count`` models once."""
    if not isinstance(order, Sequence) or len(order) != count or set(order) != set(range(count)):
        raise ParameterError(f"order must name each of 0 to {count - 1} once; got {order!r}.")
