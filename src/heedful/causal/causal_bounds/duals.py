"""Dual values of units that fitted nothing: what η is chosen by, and what confidence limits are made of.

Half of the units fit dual variables v of the treated, which extend to functions of any unit,

    f(y, z) = min_k h(y, y1_k) + η ‖z − z1_k‖² − v_k,        g(y, z) = min over control outcomes y0 of h(y0, y) − f(y0, z),

so that f(y0, z) + g(y1, z) ≤ h(y0, y1) at any covariates z, in however many dimensions, and E f(Y0, Z) + E g(Y1, Z) is at
most the sharp conditional bound V_c, however v was found. (The c-transform of the joint problem, with a minimum over
controls that have covariates of their own, keeps that promise at those controls alone; in several dimensions the gaps
between them lift its values far above V_c.)

The means over the other half would carry η times the chance imbalance of the covariates between its arms. But Z has the
same law in both arms, so with φ(z) = f(c0, z) and γ(z) = g(c1, z), at fixed outcomes c0 and c1,

    D = mean over controls of f − φ  +  mean over treated of g − γ  +  mean over all units of φ + γ

has the same expectation, and as φ + γ ≤ h(c0, c1) none of its terms grows with η. Control outcomes are c0 and at most 64
that are spread over those of the sample.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float

from heedful.causal.causal_bounds.transport import Transport
from heedful.causal.causal_bounds.trial import Trial, squared_distances

Block: TypeAlias = tuple[slice, slice]  # some controls and some treated units
_BLOCK = 1 << 18  # pairs in work at once
_OUTCOMES = 64  # of controls, that g takes its minimum over: work grows with them


class Problem(NamedTuple):
    """The units of a trial, the cost h of their outcomes, and the transport problems between the arms."""

    trial: Trial
    cost: Callable[[Any, Any], Any]
    transport: Transport

    def block(self, rows: slice, columns: slice) -> "Problem":
        """Some controls with some treated units, as views."""
        return Problem(self.trial.take(rows, columns), self.cost, self.transport.block(rows, columns))

    def halves(self) -> tuple[tuple[Block, Block], tuple[Block, Block]]:
        """(fit, on) for both directions between the first half of the units of both arms and the second."""
        middle0, middle1 = len(self.trial.a) // 2, len(self.trial.b) // 2
        first, second = (slice(0, middle0), slice(0, middle1)), (slice(middle0, None), slice(middle1, None))
        return (first, second), (second, first)


class DualValues(NamedTuple):
    """Dual functions at the units of a block that did not fit them: f of controls (n), g of treated units (m).

    ``phi`` and ``gamma`` are f and g at fixed outcomes, of all units of the block, controls first; ``a`` and ``b`` the
    weights of the arms.
    """

    f: Float[np.ndarray, " n"]
    g: Float[np.ndarray, " m"]
    phi: Float[np.ndarray, " n+m"]
    gamma: Float[np.ndarray, " n+m"]
    a: Float[np.ndarray, " n"]
    b: Float[np.ndarray, " m"]

    def value(self) -> float:
        """D of the block."""
        n = len(self.a)
        own = self.a @ (self.f - self.phi[:n]) + self.b @ (self.g - self.gamma[n:])
        return float(own + np.mean(self.phi + self.gamma))

    def variance(self, more0: Any = 0.0, more1: Any = 0.0) -> float:
        """Variance of D, less the means over the arms of values ``more0`` of controls and ``more1`` of treated units."""
        n, shared = len(self.a), (self.phi + self.gamma) / len(self.phi)
        own0, own1 = self.f - self.phi[:n] - more0, self.g - self.gamma[n:] - more1
        influence = np.concatenate([self.a * (own0 - self.a @ own0), self.b * (own1 - self.b @ own1)])
        return float(np.sum((influence + shared - shared.mean()) ** 2))


def dual_values(problem: Problem, eta: float, fit: Block, on: Block, *, sign: int = 1) -> DualValues:
    """Fit dual variables to one block and evaluate the functions f and g on another, for ``sign`` · h."""
    fitted, evaluated = problem.trial.take(*fit), problem.trial.take(*on)
    v = problem.transport.block(*fit).potential(eta, sign=sign)
    f = np.empty(len(evaluated.a))
    for some in _chunks(len(f), len(v)):
        between = eta * squared_distances(evaluated.z0[some], fitted.z1)
        f[some] = (between + sign * problem.cost(evaluated.y0[some], fitted.y1) - v).min(axis=1)

    center0, center1 = fitted.a @ fitted.y0, fitted.b @ fitted.y1
    outcomes = np.concatenate([center0[None], spread_out(problem.trial.y0)])
    z = np.concatenate([evaluated.z0, evaluated.z1])
    at_outcomes = _f_at(z, fitted.z1, sign * problem.cost(outcomes, fitted.y1) - v, eta)
    h = sign * problem.cost(outcomes, np.concatenate([center1[None], evaluated.y1]))
    g = (h[:, 1:].T - at_outcomes[len(f) :]).min(axis=1)
    gamma = (h[:, 0] - at_outcomes).min(axis=1)
    return DualValues(f, g, at_outcomes[:, 0], gamma, evaluated.a, evaluated.b)


def cross_fitted_dual(problem: Problem, eta: float, *, sign: int = 1) -> tuple[float, float]:
    """D(η) of each half of the units, with functions that the other half fitted, averaged; and its standard error."""
    if np.isinf(eta):
        return -np.inf, 0.0
    duals = [dual_values(problem, eta, fit, on, sign=sign) for fit, on in problem.halves()]
    error = np.sqrt(sum(dual.variance() for dual in duals)) / len(duals)
    return float(np.mean([dual.value() for dual in duals])), float(error)


def spread_out(outcomes: Float[np.ndarray, "n dy"]) -> Float[np.ndarray, "s dy"]:
    """At most ``_OUTCOMES`` of them, evenly spaced in their order, the least and the largest among them."""
    distinct = np.unique(outcomes, axis=0)
    if len(distinct) <= _OUTCOMES:
        return distinct
    return distinct[np.linspace(0, len(distinct) - 1, _OUTCOMES).round().astype(int)]


def _f_at(
    z: Float[np.ndarray, "k dz"], z1: Float[np.ndarray, "l dz"], costs: Float[np.ndarray, "s l"], eta: float
) -> Float[np.ndarray, "k s"]:
    """min_l costs[s, l] + η ‖z − z1_l‖² at each z, for each s."""
    least = np.empty((len(z), len(costs)))
    for some in _chunks(len(z), len(z1)):
        between = eta * squared_distances(z[some], z1)
        work = np.empty_like(between)
        for column, cost in zip(least[some].T, costs, strict=True):
            np.add(between, cost, out=work)
            work.min(axis=1, out=column)
    return least


def _chunks(rows: int, columns: int) -> list[slice]:
    step = max(1, _BLOCK // columns)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
