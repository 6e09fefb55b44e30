"""Dual values of units that fitted nothing: what η is chosen by, and what confidence limits are made of.

Half of the units fit dual variables v of the treated, which two c-transforms extend to functions of any unit,

    f(y, z) = min_k h(y, y1_k) + η ‖z − z1_k‖² − v_k,        g(y, z) = min_j h(y0_j, y) + η ‖z0_j − z‖² − f(y0_j, z0_j),

so that f + g ≤ h + η d², and E f(Y0, Z) + E g(Y1, Z) is at most the optimal value of the population, however v was found.
The means over the other half would carry η times the chance imbalance of the covariates between its arms. But Z has the
same law in both arms, so with φ(z) = f(c0, z) and γ(z) = g(c1, z), at fixed outcomes c0 and c1,

    D = mean over controls of f − φ  +  mean over treated of g − γ  +  mean over all units of φ + γ

has the same expectation, and as φ + γ ≤ h(c0, c1) none of its terms grows with η.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float

from heedful.causal.causal_bounds.transport import Transport
from heedful.causal.causal_bounds.trial import Trial, squared_distances

Block: TypeAlias = tuple[slice, slice]  # some controls and some treated units
_BLOCK = 1 << 18  # pairs in work at once


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
    trial, (h, d2) = problem.trial, (problem.transport.h, problem.transport.d2)
    v = problem.transport.block(*fit).potential(eta, sign=sign)
    f, g = np.empty(len(trial.a)), np.full(len(trial.b[on[1]]), np.inf)
    for some in _chunks(len(f), len(trial.b)):
        f[some] = (eta * d2[some, fit[1]] + sign * h[some, fit[1]] - v).min(axis=1)
        reduced = eta * d2[some, on[1]] + sign * h[some, on[1]] - f[some, None]
        np.minimum(g, reduced.min(axis=0), out=g)

    fitted, evaluated = trial.take(*fit), trial.take(*on)
    z = np.concatenate([evaluated.z0, evaluated.z1])
    center0, center1 = fitted.a @ fitted.y0, fitted.b @ fitted.y1
    of_treated = sign * problem.cost(center0[None], fitted.y1)[0] - v
    of_controls = sign * problem.cost(trial.y0, center1[None])[:, 0] - f
    phi = _envelope(z, fitted.z1, of_treated, eta)
    gamma = _envelope(z, trial.z0, of_controls, eta, own=range(len(trial.a))[on[0]])
    return DualValues(f[on[0]], g, phi, gamma, evaluated.a, evaluated.b)


def cross_fitted_dual(problem: Problem, eta: float, *, sign: int = 1) -> tuple[float, float]:
    """D(η) of each half of the units, with functions that the other half fitted, averaged; and its standard error."""
    if np.isinf(eta):
        return -np.inf, 0.0
    duals = [dual_values(problem, eta, fit, on, sign=sign) for fit, on in problem.halves()]
    error = np.sqrt(sum(dual.variance() for dual in duals)) / len(duals)
    return float(np.mean([dual.value() for dual in duals])), float(error)


def _envelope(
    z: Float[np.ndarray, "k dz"],
    centers: Float[np.ndarray, "l dz"],
    offsets: Float[np.ndarray, " l"],
    eta: float,
    *,
    own: range = range(0),
) -> Float[np.ndarray, " k"]:
    """min_l offsets_l + η ‖z − centers_l‖² at each z; the first points are the centers ``own``, and leave themselves out.

    A treated unit is no center of γ either: so all points see centers that are other units.
    """
    least = np.empty(len(z))
    for some in _chunks(len(z), len(centers)):
        values = eta * squared_distances(z[some], centers) + offsets
        themselves = own[some]
        values[np.arange(len(themselves)), themselves] = np.inf
        least[some] = values.min(axis=1)
    return least


def _chunks(rows: int, columns: int) -> list[slice]:
    step = max(1, _BLOCK // columns)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
