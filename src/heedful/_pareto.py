"""Pareto fronts: which points no other beats in everything, and how much space they dominate."""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float

from heedful._random import numpy_generator
from heedful._validation import require_finite, require_number
from heedful.errors import InputError, ParameterError


def pareto_front(points, *, maximize: bool | Sequence[bool] = True) -> Bool[np.ndarray, " n"]:
    """Which points no other point dominates.

    A point dominates another if it is at least as good in every column and better in one. Equal points do not dominate
    each other: both are on the front, or neither.

    Parameters
    ----------
    points : array-like of shape (n, K)
        n points, K >= 1 finite values each.
    maximize : bool or sequence of K bools
        Whether larger is better: in all columns, or column by column.

    Returns
    -------
    Bool[np.ndarray, " n"]
        True for points on the front. O(n · front · K), after a sort.

    Examples
    --------
    >>> pareto_front([[1, 3], [2, 2], [1, 2], [3, 1]])
    array([ True,  True, False,  True])
    """
    values = _as_points(points)
    directions = np.asarray(maximize)
    if directions.dtype != bool or directions.shape not in ((), values.shape[1:]):
        raise ParameterError(
            f"maximize must be True, False, or one of them for each of the {values.shape[1]} columns; got {maximize!r}."
        )
    values = np.where(directions, values, -values)
    front = np.zeros(len(values), dtype=bool)
    best = np.empty((0, values.shape[1]))
    for i in np.lexsort(values.T[::-1])[::-1]:  # what dominates a point is lexicographically larger: it came before
        at_least_as_good = best[(best >= values[i]).all(axis=1)]
        if not (at_least_as_good > values[i]).any():
            front[i] = True
            best = np.vstack([best, values[i]])
    return front


def hypervolume(points, reference, *, tolerance: float = 1e-3, random_state=None) -> float:
    """Volume of what the points dominate and the reference does not: larger is better, in every column.

    Parameters
    ----------
    points : array-like of shape (n, K)
        Finite values, larger = better. Points that do not exceed the reference in every column add nothing.
    reference : array-like of shape (K,)
        The corner that the volume is measured from, worse than what is of interest.
    tolerance : float
        For K > 4 alone: the relative standard error of the result, > 0.
    random_state : int, NumPy RandomState or Generator, optional
        For K > 4 alone.

    Returns
    -------
    float
        In the product of the units. Exact for K <= 4 (for a front of m points O(m log m) for K <= 2, O(m^(K-1)) for K = 3
        and 4); beyond, a Monte Carlo estimate without bias.

    References
    ----------
    Zitzler and Thiele: Multiobjective evolutionary algorithms, IEEE Transactions on Evolutionary Computation 1999. The
    estimate draws from the union of boxes as Karp and Luby do (Journal of Complexity 1985).

    Examples
    --------
    >>> hypervolume([[1, 3], [2, 2], [3, 1]], reference=[0, 0])
    6.0
    """
    values = _as_points(points)
    corner = require_finite(np.asarray(reference, dtype=np.float64), "reference")
    if corner.shape != values.shape[1:]:
        raise InputError(
            f"reference has shape {corner.shape}, but the points have {values.shape[1]} columns. Give one value a column."
        )
    require_number(tolerance, "tolerance", low=0, open_low=True)
    sizes = values - corner
    sizes = sizes[(sizes > 0).all(axis=1)]
    sizes = sizes[pareto_front(sizes)]
    if not len(sizes):
        return 0.0
    if sizes.shape[1] <= 4:
        return float(_exact_volume(sizes))
    units = sizes.max(axis=0)  # products of very small or large sizes would leave the range of floats
    return math.prod(units.tolist()) * _estimated_volume(sizes / units, tolerance, numpy_generator(random_state))


def _as_points(points) -> Float[np.ndarray, "n K"]:
    values = np.asarray(points, dtype=np.float64)
    if values.ndim != 2 or values.shape[1] == 0:
        raise InputError(f"points must have shape (n, K) with K >= 1; got {values.shape}. Give one row a point.")
    return require_finite(values, "points")


def _exact_volume(sizes: Float[np.ndarray, "n K"]) -> float:
    """Volume of the union of the boxes from 0 to ``sizes``, by slices along the last axis, from the top down."""
    sizes = sizes[np.argsort(-sizes[:, -1], kind="stable")]
    heights = sizes[:, -1] - np.append(sizes[1:, -1], 0.0)  # of the slice that the first i + 1 boxes reach
    if sizes.shape[1] == 1:
        return heights.sum()
    if sizes.shape[1] == 2:
        return heights @ np.maximum.accumulate(sizes[:, 0])
    return sum(height * _exact_volume(sizes[: i + 1, :-1]) for i, height in enumerate(heights) if height > 0)


def _estimated_volume(sizes: Float[np.ndarray, "n K"], tolerance: float, generator: np.random.Generator) -> float:
    """Σ V_i · E[1 / number of boxes around a point], the point uniform in a box drawn in proportion to its volume V_i."""
    volumes = sizes.prod(axis=1)
    total, n, mean, squares = volumes.sum(), 0, 0.0, 0.0
    while True:
        boxes = generator.choice(len(sizes), size=4096, p=volumes / total)
        draws = generator.random((4096, sizes.shape[1])) * sizes[boxes]
        shares = 1 / (draws[:, None, :] <= sizes).all(axis=2).sum(axis=1)
        n += len(shares)
        step = shares.mean() - mean
        mean += step * len(shares) / n
        squares += ((shares - shares.mean()) ** 2).sum() + step**2 * len(shares) * (n - len(shares)) / n
        if math.sqrt(squares) / n <= tolerance * mean:
            return float(total * mean)
