"""Data that are drawn, not measured: the answer is known, or a difficulty is set by a number.

Each function is pure: the same ``random_state`` gives the same data.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64
from scipy.special import betainc, betaincinv, ndtr

from heedful._random import numpy_generator
from heedful._validation import require_finite, require_number
from heedful.errors import InputError, ParameterError

__all__ = [
    "RepeatedMotifs",
    "SeparablePoints",
    "SimulatedTrial",
    "long_memory",
    "margin",
    "trial_linear",
    "trial_scale",
    "trial_square",
]


class SeparablePoints(NamedTuple):
    """Points of two classes, and what separates them.

    Attributes
    ----------
    X : ndarray of float64, shape (n, d)
        Of norm one.
    y : ndarray of int64, shape (n,)
        The sign of ``X @ direction``, −1 or 1.
    direction : ndarray of float64, shape (d,)
        Of norm one.
    """

    X: Float64[np.ndarray, "n d"]
    y: Int64[np.ndarray, " n"]
    direction: Float64[np.ndarray, " d"]


def margin(
    n_samples: int,
    n_features: int = 50,
    *,
    gap: float = 0.1,
    direction: Float[np.ndarray, " d"] | None = None,
    random_state=None,
) -> SeparablePoints:
    """Unit vectors that stay clear of a hyperplane through the origin, which is all there is to learn.

    They are uniform on the part of the sphere where |uᵀx| ≥ ``gap``, u being the hidden ``direction``. Nothing is rejected,
    so that a wide gap costs no more than a narrow one: (uᵀx)² of a uniform unit vector x follows the Beta(1/2, (d − 1)/2)
    distribution, whose tail is drawn by its quantiles, and what is orthogonal to u is uniform. O(n d).

    Parameters
    ----------
    n_samples : int
        n >= 1.
    n_features : int
        d >= 2.
    gap : float
        Least |uᵀx|, 0 to 0.999.
    direction : array of shape (d,), optional
        u up to its length, for more points of a problem that was drawn before. Default: uniform on the sphere.
    random_state : int, Generator, RandomState or None
        Draws ``direction``, unless it is given, and the points.

    Returns
    -------
    SeparablePoints
        ``X``, ``y`` and ``direction``.

    References
    ----------
    The task "Margin" of: System-Aware Unlearning Algorithms: Use Lesser, Forget Faster. ICML 2025. arXiv:2506.06073

    Examples
    --------
    >>> from heedful.data import synthetic
    >>> X, y, u = synthetic.margin(1000, 20, gap=0.2, random_state=0)
    >>> float(abs(X @ u).min()) >= 0.2 - 1e-12, bool((y == np.sign(X @ u)).all())
    (True, True)
    """
    require_number(n_samples, "n_samples", low=1, integer=True)
    require_number(n_features, "n_features", low=2, integer=True)
    require_number(gap, "gap", low=0, high=0.999)
    rng = numpy_generator(random_state)
    u = rng.standard_normal(n_features) if direction is None else _checked_direction(direction, n_features)
    u /= np.linalg.norm(u)
    shape = 0.5, (n_features - 1) / 2
    along = np.sqrt(betaincinv(*shape, rng.uniform(betainc(*shape, gap**2), 1, n_samples)))
    along = np.clip(along, gap, 1) * rng.choice([-1, 1], n_samples)  # the inverse may fall short by a rounding
    across = rng.standard_normal((n_samples, n_features))
    across -= np.outer(across @ u, u)
    across *= (np.sqrt(1 - along**2) / np.linalg.norm(across, axis=1))[:, None]
    return SeparablePoints(np.outer(along, u) + across, np.sign(along).astype(np.int64), u)


class SimulatedTrial(NamedTuple):
    """A completely randomised trial whose law is known.

    Attributes
    ----------
    X : ndarray of float64, shape (n, d)
        Covariates, independent standard normals.
    treatment : ndarray of bool, shape (n,)
        True for ⌊n / 2⌋ units.
    y : ndarray of float64, shape (n,)
        The outcome that the treatment reveals: ``y1`` where it is True, ``y0`` elsewhere.
    y0, y1 : ndarray of float64, shape (n,)
        Both potential outcomes of every unit; their noises are independent, which no trial could tell.
    lower, upper : float
        Sharp bounds on E[(Y1 − Y0)²], the second moment of the effect, by the joint laws of each outcome and X. With
        outcomes of conditional means m and standard deviations s that are normal given X, they are
        E[(m1 − m0)² + (s1 − s0)²] and E[(m1 − m0)² + (s1 + s0)²].
    """

    X: Float64[np.ndarray, "n d"]
    treatment: Bool[np.ndarray, " n"]
    y: Float64[np.ndarray, " n"]
    y0: Float64[np.ndarray, " n"]
    y1: Float64[np.ndarray, " n"]
    lower: float
    upper: float


def trial_linear(
    n_samples: int,
    *,
    slopes: Sequence[float | Sequence[float]] = (-0.6, 1.6),
    noise: Sequence[float] = (1.0, 1.0),
    random_state=None,
) -> SimulatedTrial:
    """Outcomes Y_w = b_w · X + s_w ε_w: a linear outcome model is right.

    Parameters
    ----------
    n_samples : int
        n >= 2.
    slopes : pair of numbers, or of d numbers each
        b_0 and b_1. The default is the published simulation, which bounds E[(Y0 + Y1)²], with the sign of Y0 changed.
    noise : pair of numbers
        Standard deviations s_0 and s_1, >= 0.
    random_state : int, Generator, RandomState or None
        Draws covariates, noises and the treatment.

    Returns
    -------
    SimulatedTrial
        ``lower`` is ‖b_1 − b_0‖² + (s_1 − s_0)², 4.84 by default.

    References
    ----------
    Lin, Gao, Blanchet, Glynn: Tightening Causal Bounds via Covariate-Aware Optimal Transport. ICML 2025. arXiv:2502.01164

    Examples
    --------
    >>> from heedful.data import synthetic
    >>> trial = synthetic.trial_linear(500, random_state=0)
    >>> trial.X.shape, int(trial.treatment.sum()), round(trial.lower, 2), round(trial.upper, 2)
    ((500, 1), 250, 4.84, 8.84)
    """
    slopes0, slopes1 = _checked_slopes(slopes)
    rng, X = _covariates(n_samples, len(slopes0), random_state)
    moment = float(np.square(slopes1 - slopes0).sum())
    return _homoskedastic_trial(rng, X, X @ slopes0, X @ slopes1, noise, moment)


def trial_square(
    n_samples: int,
    *,
    slopes: Sequence[float | Sequence[float]] = (-0.2, 0.6),
    noise: Sequence[float] = (1.0, 1.0),
    random_state=None,
) -> SimulatedTrial:
    """Outcomes Y_w = b_w · X² + s_w ε_w: a linear outcome model sees nothing.

    Parameters
    ----------
    n_samples, slopes, noise, random_state
        As of ``trial_linear``.

    Returns
    -------
    SimulatedTrial
        ``lower`` is 2 ‖b_1 − b_0‖² + (Σ(b_1 − b_0))² + (s_1 − s_0)², 1.92 by default.

    References
    ----------
    As of ``trial_linear``.
    """
    slopes0, slopes1 = _checked_slopes(slopes)
    rng, X = _covariates(n_samples, len(slopes0), random_state)
    difference, squares = slopes1 - slopes0, np.square(X)
    moment = float(2 * np.square(difference).sum() + difference.sum() ** 2)
    return _homoskedastic_trial(rng, X, squares @ slopes0, squares @ slopes1, noise, moment)


def trial_scale(
    n_samples: int,
    *,
    slopes: Sequence[float] = (0.5, 1.1),
    intercepts: Sequence[float] = (-0.35, 0.35),
    random_state=None,
) -> SimulatedTrial:
    """Outcomes Y_w = (b_w X + k_w) ε_w: the covariate tells how much an outcome varies, and nothing of its mean.

    Parameters
    ----------
    n_samples : int
        n >= 2.
    slopes, intercepts : pairs of numbers
        b_0 and b_1, k_0 and k_1.
    random_state : int, Generator, RandomState or None
        Draws the covariate, noises and the treatment.

    Returns
    -------
    SimulatedTrial
        ``lower`` is E(|b_1 X + k_1| − |b_0 X + k_0|)², about 0.70 by default.

    References
    ----------
    As of ``trial_linear``.
    """
    (b0, b1), (k0, k1) = _pair(slopes, "slopes"), _pair(intercepts, "intercepts")
    rng, X = _covariates(n_samples, 1, random_state)
    z = X[:, 0]
    product = _mean_absolute_product(b0, k0, b1, k1)
    moment = b0**2 + k0**2 + b1**2 + k1**2
    y0, y1 = ((b * z + k) * rng.standard_normal(n_samples) for b, k in ((b0, k0), (b1, k1)))
    return _randomised(rng, X, y0, y1, moment - 2 * product, moment + 2 * product)


def _homoskedastic_trial(
    rng: np.random.Generator,
    X: Float64[np.ndarray, "n d"],
    mean0: Float64[np.ndarray, " n"],
    mean1: Float64[np.ndarray, " n"],
    noise: Sequence[float],
    moment: float,
) -> SimulatedTrial:
    """``moment`` is that of the difference of the means."""
    s0, s1 = _pair(noise, "noise")
    require_number(min(s0, s1), "noise", low=0)
    y0, y1 = (mean + s * rng.standard_normal(len(X)) for mean, s in ((mean0, s0), (mean1, s1)))
    return _randomised(rng, X, y0, y1, moment + (s1 - s0) ** 2, moment + (s1 + s0) ** 2)


def _randomised(
    rng: np.random.Generator,
    X: Float64[np.ndarray, "n d"],
    y0: Float64[np.ndarray, " n"],
    y1: Float64[np.ndarray, " n"],
    lower: float,
    upper: float,
) -> SimulatedTrial:
    treatment = rng.permutation(len(X)) < len(X) // 2
    return SimulatedTrial(X, treatment, np.where(treatment, y1, y0), y0, y1, lower, upper)


def _covariates(n: int, d: int, random_state) -> tuple[np.random.Generator, Float64[np.ndarray, "n d"]]:
    require_number(n, "n_samples", low=2, integer=True)
    rng = numpy_generator(random_state)
    return rng, rng.standard_normal((n, d))


def _mean_absolute_product(b0: float, k0: float, b1: float, k1: float) -> float:
    """E|(b0 Z + k0)(b1 Z + k1)| of a standard normal Z: the quadratic's moments between its roots, where its sign changes."""
    roots = sorted(-k / b for b, k in ((b0, k0), (b1, k1)) if b)
    edges = np.array([-np.inf, *roots, np.inf])
    density, cumulative = np.exp(-np.square(edges) / 2) / np.sqrt(2 * np.pi), ndtr(edges)
    edge_density = np.multiply(edges, density, out=np.zeros_like(edges), where=np.isfinite(edges))
    mass = np.diff(cumulative)
    first, second = -np.diff(density), mass - np.diff(edge_density)
    return float(np.abs(b0 * b1 * second + (b0 * k1 + b1 * k0) * first + k0 * k1 * mass).sum())


def _pair(values: Sequence[float], name: str) -> tuple[float, float]:
    if len(values) != 2:
        raise ParameterError(f"{name} must be two numbers, of the control and of the treated arm; got {values!r}.")
    for value in values:
        require_number(value, f"each of {name}", low=-np.finfo(float).max, high=np.finfo(float).max)
    return float(values[0]), float(values[1])


def _checked_slopes(
    slopes: Sequence[float | Sequence[float]],
) -> tuple[Float64[np.ndarray, " d"], Float64[np.ndarray, " d"]]:
    arms = [np.atleast_1d(np.asarray(values, dtype=np.float64)) for values in slopes]
    if [values.shape for values in arms] != 2 * [(arms[0].size,)]:
        raise ParameterError(f"slopes must be two numbers, or two vectors of one length; got {slopes!r}.")
    return require_finite(arms[0], "slopes"), require_finite(arms[1], "slopes")


class RepeatedMotifs(NamedTuple):
    """Series and their classes.

    Attributes
    ----------
    X : ndarray of float64, shape (n, n_timepoints)
    y : ndarray of int64, shape (n,)
        Index into the lags.
    """

    X: Float64[np.ndarray, "n n_timepoints"]
    y: Int64[np.ndarray, " n"]


def long_memory(
    n_samples: int,
    n_timepoints: int = 300,
    *,
    lags: Sequence[int] = (60, 75),
    motif_length: int = 20,
    noise: float = 0.3,
    random_state=None,
) -> RepeatedMotifs:
    """Series in which a motif occurs twice, whose class is the time from one occurrence to the other.

    The motif is white noise of standard deviation 1, drawn for each case, and so tells nothing; nor does its place: the
    middle between both occurrences is uniform, with equal room for every lag. What tells is to remember the first until the
    second comes. Classes are equally frequent, up to one case. O(n n_timepoints).

    Parameters
    ----------
    n_samples : int
        n >= 1.
    n_timepoints : int
        At least the longest lag and the motif.
    lags : sequence of int
        Steps from occurrence to occurrence, a class each; at least ``motif_length``, so that they do not overlap.
    motif_length : int
        >= 1.
    noise : float
        Standard deviation of the white noise that lies over everything, >= 0. At 1 a motif is as loud as the noise.
    random_state : int, Generator, RandomState or None
        Draws classes, places, motifs and noise.

    Returns
    -------
    RepeatedMotifs
        ``X`` and ``y``.

    Examples
    --------
    >>> from heedful.data import synthetic
    >>> X, y = synthetic.long_memory(4, noise=0.0, random_state=0)
    >>> first, last = np.flatnonzero(X[0])[[0, 20]]
    >>> int(last - first) == (60, 75)[y[0]], np.array_equal(X[0, first : first + 20], X[0, last : last + 20])
    (True, True)
    """
    require_number(n_samples, "n_samples", low=1, integer=True)
    require_number(motif_length, "motif_length", low=1, integer=True)
    require_number(noise, "noise", low=0)
    for value in lags:
        require_number(value, "each of lags", low=motif_length, integer=True)
    if len(set(lags)) < max(2, len(lags)):
        raise ParameterError(f"lags must be at least two, each another; got {lags!r}.")
    require_number(n_timepoints, "n_timepoints", low=max(lags) + motif_length, integer=True)
    rng = numpy_generator(random_state)
    y = rng.permutation(np.arange(n_samples) % len(lags)).astype(np.int64)
    lag = np.array(lags)[y]
    span = lag + motif_length
    # Twice the middle, so that it is a whole number; uniform where even the longest span fits.
    middle = rng.integers(max(lags) + motif_length, 2 * n_timepoints - max(lags) - motif_length + 1, n_samples)
    first = (middle - span) // 2
    motifs = rng.standard_normal((n_samples, motif_length))
    X = noise * rng.standard_normal((n_samples, n_timepoints))
    rows, steps = np.arange(n_samples)[:, None], np.arange(motif_length)
    X[rows, first[:, None] + steps] += motifs
    X[rows, (first + lag)[:, None] + steps] += motifs
    return RepeatedMotifs(X, y)


def _checked_direction(direction: Float[np.ndarray, " d"], n_features: int) -> Float64[np.ndarray, " d"]:
    u = require_finite(np.array(direction, dtype=np.float64), "direction")
    if u.shape != (n_features,) or not u.any():
        raise InputError(f"direction must be a vector of {n_features} numbers, not all zero; got shape {u.shape}.")
    return u
