"""SCIR: one bivariate isotonic fit of cumulative probability and rank.

Sort a row, p_(1) ≥ … ≥ p_(K), and let S_r be the sum of its r largest probabilities and ρ the rank of the true class.
The fit g(S, r) of 1[ρ ≤ r], non-decreasing in S and in r, gives q_(r) = g(S_r, r) − g(S_{r−1}, r−1): non-negative,
because both arguments grew, and with sum 1, because g(1, K) = 1.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from heedful.calibrate.isotonic._pooled import cell_bounds, quantile_edges


class SortedFit(NamedTuple):
    """g on a grid: ``values[r − 1, b]`` for rank r and bin b of S.

    Bin b holds edges[b − 1] <= S < edges[b] and has its weighted mean S at ``centers[b]``. ``gap`` bounds what the
    squared error (a mean over rows, summed over ranks, halved) could still lose; ``n_iter`` counts the cuts made.
    """

    edges: Float[np.ndarray, " bins-1"]
    centers: Float[np.ndarray, " bins"]
    values: Float[np.ndarray, "ranks bins"]
    gap: float
    n_iter: int


def fit_sorted(
    P: Float[np.ndarray, "n K"],
    codes: Int[np.ndarray, " n"],
    weight: Float[np.ndarray, " n"],
    *,
    n_bins: int | None,
    max_rank: int,
) -> SortedFit:
    """Fit g for ranks 1 to min(max_rank, K − 1) on bins with equal weight, or on every distinct S if ``n_bins`` is
    None.

    Ties inside a row are broken by class number. Cells of the grid without data get the middle between the largest
    value below and the smallest value above them, which keeps g monotone.
    """
    n_ranks = min(max_rank, P.shape[1] - 1)
    order = np.argsort(-P, axis=1, kind="stable")
    sums = np.cumsum(np.take_along_axis(P, order[:, :n_ranks], axis=1), axis=1)
    rank = np.argmax(order == codes[:, None], axis=1)  # from 0
    targets = rank[:, None] <= np.arange(n_ranks)

    weights = np.repeat(weight, n_ranks)
    edges = np.unique(sums)[1:] if n_bins is None else quantile_edges(sums.ravel(), weights, n_bins)
    bins = np.searchsorted(edges, sums, side="right")
    n_bins = len(edges) + 1
    cells = (np.arange(n_ranks) * n_bins + bins).ravel()
    total = np.bincount(cells, weights=weights, minlength=n_ranks * n_bins).reshape(n_ranks, n_bins)
    hits = np.bincount(cells, weights=weights * targets.ravel(), minlength=n_ranks * n_bins).reshape(n_ranks, n_bins)
    centers = np.bincount(bins.ravel(), weights=weights * sums.ravel(), minlength=n_bins) / total.sum(axis=0)
    # Sums within a few roundings of 1 can have bins narrower than the rounding of their mean.
    centers = np.clip(centers, *cell_bounds(sums, bins, n_bins))

    values, n_iter = bivariate_isotonic(hits, total)
    gradient = total * values - hits
    ascent = _best_upper_set(_suffix_sums(-gradient), *_whole(total.shape))[1]
    gap = float((gradient * values).sum() + max(0.0, ascent)) / weight.sum()
    return SortedFit(edges, centers, _fill_unseen(values, total > 0), gap, n_iter)


def bivariate_isotonic(
    hits: Float[np.ndarray, "ranks bins"], total: Float[np.ndarray, "ranks bins"]
) -> tuple[Float[np.ndarray, "ranks bins"], int]:
    """Least Σ total (hits/total − g)² over g that are non-decreasing along both axes; exact, cells may be empty.

    Recursive partitioning: a group of cells at its mean m is cut into the upper set with the largest Σ (hits − m·total)
    and the rest, until no cut gains. Upper sets of a grid are staircases, so the best one is found by dynamic
    programming, in O(ranks · bins) a cut. Luss, Rosset, Shahar: Efficient regularized isotonic regression, Annals of
    Applied Statistics 2012.

    Returns
    -------
    values : array of shape (ranks, bins)
        In a cell without weight: the value of the group it fell to.
    n_cuts : int
    """
    sum_hits, sum_total = _suffix_sums(hits), _suffix_sums(total)
    values = np.empty(hits.shape)
    ranks = np.arange(hits.shape[0])
    noise = 1e-13 * total.sum()  # gains below this are rounding
    groups, n_cuts = [_whole(hits.shape)], 0
    while groups:
        begin, end = groups.pop()
        weight = (sum_total[ranks, begin] - sum_total[ranks, end]).sum()
        mean = (sum_hits[ranks, begin] - sum_hits[ranks, end]).sum() / weight
        cut, gain = _best_upper_set(sum_hits - mean * sum_total, begin, end)
        n_cuts += 1
        if gain > noise:
            groups += [(begin, cut), (cut, end)]
        else:
            for r in ranks:
                values[r, begin[r] : end[r]] = mean
    return values, n_cuts


def _whole(shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The group of all cells, as the first bin and the end of the bins of each rank."""
    return np.zeros(shape[0], dtype=np.intp), np.full(shape[0], shape[1], dtype=np.intp)


def _suffix_sums(x: Float[np.ndarray, "ranks bins"]) -> Float[np.ndarray, "ranks bins+1"]:
    """Sums of each row from bin b to its end; 0 at the end."""
    return np.pad(np.cumsum(x[:, ::-1], axis=1)[:, ::-1], ((0, 0), (0, 1)))


def _best_upper_set(
    sums: Float[np.ndarray, "ranks places"], begin: Int[np.ndarray, " ranks"], end: Int[np.ndarray, " ranks"]
) -> tuple[Int[np.ndarray, " ranks"], float]:
    """The upper set with the largest total inside a group, as its first bin in each rank, and that total.

    The set holds the bins from t_r on in rank r, with t_1 ≥ t_2 ≥ …: a higher rank keeps whatever a lower one keeps.
    """
    first, last = begin.min(), end.max()
    places = np.clip(np.arange(first, last + 1), begin[:, None], end[:, None])
    rows = np.arange(len(begin))[:, None]
    gains = sums[rows, places] - sums[rows, end[:, None]]
    best = np.empty_like(gains)
    best[0] = gains[0]
    for r in range(1, len(gains)):
        best[r] = gains[r] + np.maximum.accumulate(best[r - 1, ::-1])[::-1]
    cut = np.empty(len(gains), dtype=np.intp)
    at = int(np.argmax(best[-1]))
    total = float(best[-1, at])
    for r in range(len(gains) - 1, -1, -1):
        at += int(np.argmax(best[r, at:]))
        cut[r] = places[r, at]
    return cut, total


def _fill_unseen(values: Float[np.ndarray, "ranks bins"], seen) -> Float[np.ndarray, "ranks bins"]:
    """Values at seen cells, and between their neighbours elsewhere."""
    low, high = values[seen].min(), values[seen].max()
    below = np.where(seen, values, low)
    above = np.where(seen, values, high)
    for axis in (0, 1):
        below = np.maximum.accumulate(below, axis=axis)
        above = np.flip(np.minimum.accumulate(np.flip(above, axis), axis=axis), axis)
    return np.where(seen, values, (below + above) / 2)
