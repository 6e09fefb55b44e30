"""Pooled isotonic regression: all classes under one non-decreasing function.

The n·K pairs (p_ij, 1[y_i = j]) are gathered in *cells* of neighbouring probabilities. A least-squares isotonic fit of
0/1 targets rises only at probabilities that some true class received, so cells that begin at those values lose nothing,
and there are at most n + 1 of them however many pairs there are.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Integer, Shaped
from scipy.optimize import isotonic_regression

_CHUNK = 2**18  # pairs worked on at a time: temporaries stay in the processor's cache, and small beside P


class StepFit(NamedTuple):
    """A non-decreasing step function: ``values[b]`` from ``edges[b − 1]`` on, ``values[0]`` below every edge."""

    edges: Float[np.ndarray, " steps-1"]
    values: Float[np.ndarray, " steps"]


def merge_ties(p):
    """Probabilities (an array or a float64 tensor) without their last 13 bits, so that 0.1 and 1 − 0.9 are one score.

    A Veltkamp split: exact, and it keeps the order. The relative change is below 1e-12.
    """
    shifted = p * (2.0**13 + 1)
    return shifted - (shifted - p)


def row_chunks(n: int, width: int) -> Iterator[slice]:
    """Slices that cover n rows of ``width`` entries, about 2¹⁸ entries each."""
    step = max(1, _CHUNK // width)
    for start in range(0, n, step):
        yield slice(start, start + step)


def at_true_class(values: Shaped[np.ndarray, "n K"], codes: Int[np.ndarray, " n"]) -> Shaped[np.ndarray, " n"]:
    """The entry of each row in the column of its true class."""
    return np.take_along_axis(values, codes[:, None], axis=1)[:, 0]


def assign_cells(P: Float[np.ndarray, "n K"], edges: Float[np.ndarray, " m"]) -> Integer[np.ndarray, "n K"]:
    """Number of the cell of every pair: how many of the increasing ``edges`` are <= p_ij (0 to m).

    O(nK log m); the result has the smallest unsigned type that holds m.
    """
    cells = np.empty(P.shape, dtype=np.min_scalar_type(len(edges)))
    for rows in row_chunks(*P.shape):
        cells[rows] = np.searchsorted(edges, P[rows], side="right")
    return cells


def cell_weights(
    cells: Integer[np.ndarray, "n K"], row_values: Float[np.ndarray, " n"], m: int
) -> Float[np.ndarray, " m"]:
    """Σ_i row_values_i N_ib over rows, with N_ib the number of classes of row i whose pair lies in cell b."""
    total = np.zeros(m)
    for rows in row_chunks(*cells.shape):
        values = np.repeat(row_values[rows], cells.shape[1])
        total += np.bincount(cells[rows].ravel(), weights=values, minlength=m)
    return total


def monotone_frequencies(
    positives: Float[np.ndarray, " m"], totals: Float[np.ndarray, " m"]
) -> Float[np.ndarray, " m"]:
    """Non-decreasing least-squares fit (PAVA) of positives/totals, weighted by totals; empty cells follow the one
    before.

    For 0/1 targets this is also the maximum-likelihood fit. O(m).
    """
    # A cell may be empty: the first one, when the smallest probability of all went to a true class.
    full = np.flatnonzero(totals > 0)
    fit = isotonic_regression(positives[full] / totals[full], weights=totals[full]).x
    return fit[np.maximum(np.searchsorted(full, np.arange(len(totals)), side="right") - 1, 0)]


def flattened_isotonic(
    P: Float[np.ndarray, "n K"], codes: Int[np.ndarray, " n"], weight: Float[np.ndarray, " n"]
) -> StepFit:
    """FIR: the one non-decreasing f with least Σ_ij w_i (1[y_i = j] − f(p_ij))².

    Parameters
    ----------
    P : array of shape (n, K)
        Probabilities.
    codes : array of shape (n,)
        Column of each row's true class.
    weight : array of shape (n,)
        Positive weights of the rows.

    Returns
    -------
    StepFit
        Its edges are the probabilities at which f rises. O(nK log n) time, O(n) memory beside P.
    """
    true, cell_of_true = np.unique(at_true_class(P, codes), return_inverse=True)
    m = len(true) + 1
    totals = np.zeros(m)
    for rows in row_chunks(*P.shape):
        cells = np.searchsorted(true, P[rows].ravel(), side="right")
        totals += np.bincount(cells, weights=np.repeat(weight[rows], P.shape[1]), minlength=m)
    fit = monotone_frequencies(np.bincount(cell_of_true + 1, weights=weight, minlength=m), totals)
    rises = np.flatnonzero(np.diff(fit) > 0)
    return StepFit(true[rises], fit[np.r_[rises, m - 1]])


def cell_bounds(
    P: Float[np.ndarray, "n K"], cells: Integer[np.ndarray, "n K"], m: int
) -> tuple[Float[np.ndarray, " m"], Float[np.ndarray, " m"]]:
    """Smallest and largest probability in each of ``m`` cells, none of them empty."""
    lower, upper = np.full(m, np.inf), np.full(m, -np.inf)
    for rows in row_chunks(*P.shape):
        np.minimum.at(lower, cells[rows], P[rows])
        np.maximum.at(upper, cells[rows], P[rows])
    return lower, upper


def quantile_edges(
    x: Float[np.ndarray, " m"], weight: Float[np.ndarray, " m"], n_bins: int
) -> Float[np.ndarray, " edges"]:
    """Lower ends, but for the first, of ``n_bins`` bins with equal weight; fewer, where equal x must share a bin."""
    order = np.argsort(x)
    x, mass = x[order], np.cumsum(weight[order])
    shares = (np.arange(1, n_bins) / n_bins + 1e-9) * mass[-1]  # a share met but for rounding is met
    edges = np.unique(x[np.minimum(np.searchsorted(mass, shares, side="right"), len(x) - 1)])
    return edges[edges > x[0]]
