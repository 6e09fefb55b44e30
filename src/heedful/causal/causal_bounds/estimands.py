"""What is bounded: each estimand as scale · E[h(Y(0), Y(1))] with a cost h that depends on the coupling.

Outcomes are centred by the arms' (weighted) means where the estimand is: E[((Y1 − μ1) − (Y0 − μ0))²] is the variance of
the effect, and E[(Y0 − μ0)(Y1 − μ1)]/(σ0σ1) the correlation, with no subtraction of large numbers afterwards. Terms of h
in one outcome alone change every coupling's cost by the same amount, so centring leaves the optimal couplings as they
are; and as the derivatives in μ0 and μ1 vanish at the means, estimating these costs the intervals nothing to first order.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from heedful._validation import require_choice, require_finite, require_number
from heedful.errors import InputError, ParameterError

_BLOCK = 1 << 18  # pairs that are compared at once: bounds temporaries, whatever the number of units


class Sortable(NamedTuple):
    """A cost that is least on average when both arms are sorted alike (``pairing`` 1) or oppositely (−1).

    ``pair(y0, y1)`` of outcomes of shapes (k, 1) and (k, 1) gives h pair by pair.
    """

    pair: Callable[[Any, Any], Any]
    pairing: int


@dataclasses.dataclass(frozen=True)
class Estimand:
    """An estimand θ = ``scale`` · E[h(Y0, Y1)], ``scale`` > 0, so that its lower bound is that of E[h].

    Parameters
    ----------
    name : str
        What it is called.
    cost : callable
        ``cost(y0, y1)`` of outcomes of shapes (n, dy) and (m, dy) gives h of all pairs, shape (n, m).
    sortable : Sortable, optional
        How the coupling with the least E[h] is found by sorting, for one outcome and h sub- or supermodular.
    scale, low, high : float
        The factor, and the range of θ.
    normed : callable, optional
        ``normed(y0, y1)`` gives each unit's part t in the influence −θ (t − E[t]) that estimating ``scale`` has on θ.
    """

    name: str
    cost: Callable[[Any, Any], Any]
    sortable: Sortable | None = None
    scale: float = 1.0
    low: float = -np.inf
    high: float = np.inf
    normed: Callable[[Any, Any], Any] | None = None

    def value(self, mean: float) -> float:
        """θ for a value of E[h]; what rounding carried over an end of the range is put back."""
        return float(min(max(self.scale * mean, self.low), self.high))


def make_estimand(
    estimand: Any,
    y0: Float[np.ndarray, "n dy"],
    y1: Float[np.ndarray, "m dy"],
    a: Float[np.ndarray, " n"],
    b: Float[np.ndarray, " m"],
    *,
    threshold: Any = 0.0,
) -> Estimand:
    """The estimand of this name, or of a callable h, for arms with these outcomes and weights.

    Raises
    ------
    ParameterError
        For an unknown name, or a threshold that the estimand does not have.
    InputError
        For an estimand that these outcomes do not have: a correlation of several outcomes, or of a constant one.
    """
    require_number(threshold, "threshold")
    if threshold != 0 and estimand != "effect_cdf":
        raise ParameterError(
            f"threshold is of estimand='effect_cdf' alone; got threshold={threshold!r} for {estimand!r}."
        )
    if callable(estimand):
        return Estimand(getattr(estimand, "__name__", type(estimand).__name__), partial(_users_cost, estimand))
    require_choice(estimand, "estimand", tuple(_MAKERS))
    if estimand in _OF_ONE_OUTCOME and y0.shape[1] > 1:
        raise InputError(
            f"estimand={estimand!r} is of a single outcome; got {y0.shape[1]} columns. Pass one of them, or take "
            "'effect_variance', 'effect_second_moment', 'product' or a callable."
        )
    return _MAKERS[estimand](_Arms(y0, y1, a @ y0, b @ y1, a, b), float(threshold))


def require_design(estimand: Any, a: Float[np.ndarray, " n"], b: Float[np.ndarray, " m"]) -> None:
    """Raise ``ParameterError`` for Neyman's variance of units that do not weigh alike."""
    if estimand == "neyman_variance" and any(np.ptp(weights) > 1e-9 * weights.min() for weights in (a, b)):
        raise ParameterError(
            "estimand='neyman_variance' is the variance of a difference in means, which is no estimate of the effect "
            "where propensities differ, between units or strata. Take 'effect_variance', or leave them out."
        )


@dataclasses.dataclass(frozen=True)
class _Arms:
    y0: Float[np.ndarray, "n dy"]
    y1: Float[np.ndarray, "m dy"]
    mean0: Float[np.ndarray, " dy"]
    mean1: Float[np.ndarray, " dy"]
    a: Float[np.ndarray, " n"]
    b: Float[np.ndarray, " m"]

    def variances(self) -> tuple[float, float]:
        """Weighted variances, summed over outcomes."""
        return (
            float(self.a @ ((self.y0 - self.mean0) ** 2).sum(axis=1)),
            float(self.b @ ((self.y1 - self.mean1) ** 2).sum(axis=1)),
        )


def _estimand(name: str, arms: _Arms, pair: Callable, *, pairing: int = 0, **settings) -> Estimand:
    sortable = Sortable(pair, pairing) if pairing and arms.y0.shape[1] == 1 else None
    return Estimand(name, partial(_all_pairs, pair), sortable, **settings)


def _second_moment(arms: _Arms, threshold: float) -> Estimand:
    def pair(y0, y1):
        return ((y1 - y0) ** 2).sum(axis=-1)

    return _estimand("effect_second_moment", arms, pair, pairing=1, low=0.0)


def _variance(arms: _Arms, threshold: float) -> Estimand:
    effect = arms.mean1 - arms.mean0

    def pair(y0, y1):
        return ((y1 - y0 - effect) ** 2).sum(axis=-1)

    return _estimand("effect_variance", arms, pair, pairing=1, low=0.0)


def _neyman(arms: _Arms, threshold: float) -> Estimand:
    """S0²/n + S1²/m − Var(Y1 − Y0)/(n + m), all three terms in one h, times n + m so that η is that of the variance."""
    (n, m), effect = (len(arms.y0), len(arms.y1)), arms.mean1 - arms.mean0
    if min(n, m) < 2:
        raise InputError(f"estimand='neyman_variance' needs two units in each arm; got {n} and {m}.")

    def pair(y0, y1):
        own = ((y0 - arms.mean0) ** 2).sum(axis=-1) / (n - 1) + ((y1 - arms.mean1) ** 2).sum(axis=-1) / (m - 1)
        return (n + m) * own - ((y1 - y0 - effect) ** 2).sum(axis=-1)

    return _estimand("neyman_variance", arms, pair, pairing=-1, scale=1 / (n + m), low=0.0)


def _product(arms: _Arms, threshold: float) -> Estimand:
    def pair(y0, y1):
        return (y0 * y1).sum(axis=-1)

    return _estimand("product", arms, pair, pairing=-1)


def _correlation(arms: _Arms, threshold: float) -> Estimand:
    variance0, variance1 = arms.variances()
    for name, y, variance in (("control", arms.y0, variance0), ("treated", arms.y1, variance1)):
        if not np.ptp(y) > 0 or not variance > 0:
            raise InputError(f"estimand='correlation' needs outcomes that vary; those of the {name} arm do not.")

    def pair(y0, y1):
        return ((y0 - arms.mean0) * (y1 - arms.mean1)).sum(axis=-1)

    def normed(y0, y1):
        return ((y0 - arms.mean0)[:, 0] ** 2 / (2 * variance0), (y1 - arms.mean1)[:, 0] ** 2 / (2 * variance1))

    scale = 1 / np.sqrt(variance0 * variance1)
    return _estimand("correlation", arms, pair, pairing=-1, scale=scale, low=-1.0, high=1.0, normed=normed)


def _benefit(arms: _Arms, threshold: float) -> Estimand:
    def pair(y0, y1):
        return (y1 > y0)[..., 0]

    return _estimand("prob_benefit", arms, pair, low=0.0, high=1.0)


def _harm(arms: _Arms, threshold: float) -> Estimand:
    def pair(y0, y1):
        return (y1 < y0)[..., 0]

    return _estimand("prob_harm", arms, pair, low=0.0, high=1.0)


def _effect_cdf(arms: _Arms, threshold: float) -> Estimand:
    def pair(y0, y1):
        return (y1 - y0 <= threshold)[..., 0]

    return _estimand("effect_cdf", arms, pair, low=0.0, high=1.0)


_MAKERS: dict[str, Callable[[_Arms, float], Estimand]] = {
    "effect_variance": _variance,
    "effect_second_moment": _second_moment,
    "correlation": _correlation,
    "prob_benefit": _benefit,
    "prob_harm": _harm,
    "effect_cdf": _effect_cdf,
    "neyman_variance": _neyman,
    "product": _product,
}
_OF_ONE_OUTCOME = ("correlation", "prob_benefit", "prob_harm", "effect_cdf", "neyman_variance")


def _all_pairs(
    pair: Callable, y0: Float[np.ndarray, "n dy"], y1: Float[np.ndarray, "m dy"]
) -> Float[np.ndarray, "n m"]:
    """The cost of every control outcome with every treated one, some rows at a time."""
    h = np.empty((len(y0), len(y1)))
    rows = max(1, _BLOCK // y1.size)
    for start in range(0, len(y0), rows):
        h[start : start + rows] = pair(y0[start : start + rows, None], y1[None])
    return h


def _users_cost(
    function: Callable, y0: Float[np.ndarray, "n dy"], y1: Float[np.ndarray, "m dy"]
) -> Float[np.ndarray, "n m"]:
    """h(y0[:, None], y1[None, :]) of a single outcome; several keep their axis at the end."""
    if y0.shape[1] == 1:
        y0, y1 = y0[:, 0], y1[:, 0]
    given = function(y0[:, None], y1[None])
    shape = (len(y0), len(y1))
    if np.shape(given) != shape:
        raise InputError(
            f"estimand must be a function h(y0, y1) that broadcasts: for y0 of shape {y0[:, None].shape} and y1 of shape "
            f"{y1[None].shape} it must return (n, m) = {shape}; it returned {np.shape(given)}."
        )
    try:
        h = np.array(given, dtype=np.float64, order="C")  # a copy: what was returned may be kept by its maker
    except (TypeError, ValueError) as error:
        raise InputError(f"estimand must return numbers; {error}.") from error
    return require_finite(h, "h(y0, y1)")
