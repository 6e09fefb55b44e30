"""Bounds of E[(Y1 − Y0)²] from a regression of each outcome on the covariates, valid whatever the regression.

Any functions with f0(y0, z) + f1(y1, z) ≤ (y1 − y0)² bound it from below by E[f0(Y0, Z)] + E[f1(Y1, Z)], which a trial
identifies. The best ones are the dual potentials of the optimal transport between the laws of Y0 and of Y1 given Z = z.
They are taken as if those laws were what the regression says on other folds: a mean and an empirical law of residuals, or
a probability where outcomes are 0 and 1. A wrong regression widens the bounds and does not invalidate them.

Ji, Lei, Spector: Model-Agnostic Covariate-Assisted Inference on Partially Identified Causal Effects, 2023,
arXiv:2310.08115. The potentials are exact here where they searched a grid: for squares of differences of outcomes that
differ from their laws' means by residuals, they are sums of products and of one pair of functions for all z.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from scipy.interpolate import BSpline, make_interp_spline
from sklearn.model_selection import StratifiedKFold, cross_val_predict

FOLDS = 5
_LEVELS = (np.arange(100) + 0.5) / 100  # of the quantiles that stand for a law of residuals


class Arms(NamedTuple):
    """Some number for each potential outcome: values of both, or of one where only one was seen."""

    control: Any
    treated: Any


def dual_bounds(
    outcome: Float[np.ndarray, " n"],
    treatment: Bool[np.ndarray, " n"],
    covariates: Float[np.ndarray, "n d"],
    *,
    make_model: Callable[[], Any],
    seed: int,
) -> tuple[float, float]:
    """Lower and upper bound, cross-fitted over five folds, by augmented inverse propensity weighting.

    ``make_model()`` is a regressor of scikit-learn; each arm gets its own. The propensity is the treated fraction.
    """
    binary = len(np.unique(outcome)) == 2
    unit = np.ptp(outcome) if binary else 1.0
    if binary:  # as 0 and 1: the difference knows no shift
        outcome = (outcome - outcome.min()) / unit
    share = treatment.mean()
    bounds = np.empty((2, len(outcome)))
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed).split(covariates, treatment)
    for fit, held in folds:
        means, residuals = [], []
        for arm in (~treatment[fit], treatment[fit]):
            X, y = covariates[fit][arm], outcome[fit][arm]
            means.append(make_model().fit(X, y).predict(covariates[held]))
            # Residuals of the rows that a model was fitted on are too small.
            residuals.append(y - cross_val_predict(make_model(), X, y, cv=FOLDS))
        for row, sign in enumerate((1, -1)):
            if binary:
                values, expected = binary_duals(outcome[held], Arms(*means), sign)
            else:
                values, expected = residual_duals(outcome[held], Arms(*means), Arms(*residuals), sign)
            seen = np.where(
                treatment[held],
                (values.treated - expected.treated) / share,
                (values.control - expected.control) / (1 - share),
            )
            bounds[row, held] = expected.control + expected.treated + seen
    lower, upper = unit**2 * bounds.mean(axis=1)
    return float(lower), float(upper)


def residual_duals(y: Float[np.ndarray, " n"], mean: Arms, residuals: Arms, sign: int) -> tuple[Arms, Arms]:
    """f0(y, z) and f1(y, z), and their means by the model, for the lower bound (``sign`` 1) or the upper one (−1).

    With outcomes μ + r, (y1 − y0)² = y0² + y1² − 2 (μ0 μ1 + μ1 r0 + μ0 r1 + r0 r1), and r0 r1 ≤ A(r0) + B(r1) for the
    integrals A and B of a growing function and of its inverse (Young), best if it maps the law of r0 to that of r1. For
    the upper bound r1 changes its sign.
    """
    laws = Arms(*(values - values.mean() for values in residuals))
    integrals = _young_pair(laws.control, sign * laws.treated)
    values, expected = [], []
    for own, other, law, integral, flip in zip(mean, mean[::-1], laws, integrals, (1, sign), strict=True):

        def dual(r, mu, nu, integral=integral, flip=flip):
            return (mu + r) ** 2 - mu * nu - 2 * nu * r - 2 * sign * integral(flip * r)

        values.append(dual(y - own, own, other))
        # The mean of the dual over r: the law has mean zero, and the integral does not depend on z.
        expected.append(own**2 + np.mean(law**2) - own * other - 2 * sign * integral(flip * law).mean())
    return Arms(*values), Arms(*expected)


def binary_duals(y: Float[np.ndarray, " n"], mean: Arms, sign: int) -> tuple[Arms, Arms]:
    """The same for outcomes 0 and 1, of which (y1 − y0)² is 1 if they differ; ``mean`` has probabilities of 1.

    ±(y1 − y0) ≤ 1{y1 ≠ y0} ≤ y0 + y1, 2 − y0 − y1; each is best on its side of p1 = p0, or of p0 + p1 = 1.
    """
    probability = Arms(*(np.clip(values, 0, 1) for values in mean))
    if sign > 0:
        side = np.where(probability.treated > probability.control, 1, -1)

        def duals(control, treated):
            return Arms(-side * control, side * treated)
    else:
        side = np.where(probability.control + probability.treated < 1, 1, -1)

        def duals(control, treated):
            return Arms(*((1 - side) / 2 + side * p for p in (control, treated)))

    return duals(y, y), duals(*probability)


def _young_pair(
    x: Float[np.ndarray, " n"], y: Float[np.ndarray, " m"]
) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """A and B with s t ≤ A(s) + B(t) for all real s and t, equal where t is as far up in ``y`` as s is in ``x``."""
    p, q = _quantiles(x), _quantiles(y)
    A, B = make_interp_spline(p, q, k=1).antiderivative(), make_interp_spline(q, p, k=1).antiderivative()

    def shifted(integral: BSpline, start: float) -> Callable[[Any], Any]:
        return lambda values: integral(values) - integral(start) + p[0] * q[0] / 2

    return shifted(A, p[0]), shifted(B, q[0])


def _quantiles(values: Float[np.ndarray, " n"]) -> Float[np.ndarray, " k"]:
    """Strictly growing quantiles; one more at either end, so that lines beyond them rise by the ratio of the spreads."""
    spread = values.std() or 1.0
    inner = np.quantile(values, _LEVELS) + 1e-6 * spread * np.arange(len(_LEVELS))
    return np.concatenate([[inner[0] - spread], inner, [inner[-1] + spread]])
