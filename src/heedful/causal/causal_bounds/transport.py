"""Optimal transport between the arms of a trial: plans, what they cost, and dual variables.

For costs H_η = h + η d² of all pairs and weights a, b of the units,

    π_η = argmin ⟨π, H_η⟩   over π ≥ 0 with π1 = a, πᵀ1 = b,        V(η) = ⟨π_η, h⟩,      mismatch(η) = ⟨π_η, d²⟩.

V rises and the mismatch falls with η. Plans are exact (network simplex of POT), or entropic.
"""

import warnings
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy import sparse

from heedful._validation import require_finite, require_number
from heedful.errors import ConvergenceError, InputError, MissingExtraError

_MAX_PIVOTS = 10_000_000  # of the network simplex; a pair of arms of 5000 units needs about a million
_SINKHORN_ITERATIONS = 20_000
_SINKHORN_TOLERANCE = 1e-5  # of the column sums, relative in the 2-norm
# Default strength of the entropy, as a share of the spread of h and of all costs; the larger counts, since iterations
# grow with the costs by the strength.
_REG_OF_H, _REG_OF_COSTS = 0.1, 0.005
_LARGEST_EXPONENT = 100.0  # of cost/reg where no solution is known to start from
_TIE_BREAK = 1e-6  # weight of h beside d² when η is infinite, both with largest value 1


class TransportValue(NamedTuple):
    """A plan and what it costs.

    Attributes
    ----------
    value : float
        V = ⟨π, h⟩, without the penalty.
    mismatch : float
        ⟨π, d²⟩.
    plan : sparse array of shape (n, m)
        π, in CSR form; an exact plan has at most n + m − 1 entries.
    """

    value: float
    mismatch: float
    plan: sparse.csr_array


def transport_value(h, d2, a, b, *, eta) -> TransportValue:
    """Solve the transport problem for one η and report the two costs of its plan apart.

    π = argmin ⟨π, h + η d²⟩ over couplings of the weights a and b.

    Parameters
    ----------
    h : array-like of shape (n, m)
        Cost of coupling control unit j with treated unit k. For an upper bound pass −h and negate the value.
    d2 : array-like of shape (n, m)
        Squared distance of their covariates, ≥ 0.
    a, b : array-like of shapes (n,) and (m,)
        Weights of the units, ≥ 0, each with sum 1.
    eta : float
        Price of a unit of squared distance, ≥ 0. ``inf`` couples by d² alone, and by h where that leaves a choice.

    Returns
    -------
    TransportValue
        ``value`` ⟨π, h⟩, ``mismatch`` ⟨π, d²⟩, ``plan`` π.

    Raises
    ------
    InputError
        If shapes do not fit, numbers are not finite, or weights are no distributions.
    ParameterError
        If ``eta`` is negative or no number.
    ConvergenceError
        If the network simplex did not reach the optimum.

    Notes
    -----
    About O(n³) at worst; measured 0.1 s at n = m = 1000. Needs POT (``pip install "heedful[causal]"``).

    References
    ----------
    Lin, Gao, Blanchet, Glynn: Tightening Causal Bounds via Covariate-Aware Optimal Transport, ICML 2025, Algorithm 1.

    Examples
    --------
    >>> h = [[0.0, 1.0], [1.0, 4.0]]
    >>> d2 = [[1.0, 0.0], [0.0, 1.0]]
    >>> half = [0.5, 0.5]
    >>> transport_value(h, d2, half, half, eta=0.0).value  # 0 + 4 or 1 + 1
    1.0
    >>> transport_value(h, d2, half, half, eta=0.0).mismatch
    0.0
    """
    h, d2 = (_read_matrix(values, name) for values, name in ((h, "h"), (d2, "d2")))
    a, b = (_read_weights(values, name) for values, name in ((a, "a"), (b, "b")))
    if not h.shape == d2.shape == (len(a), len(b)):
        raise InputError(
            f"h and d2 must have one row a unit in a and one column a unit in b, shape {(len(a), len(b))}; got "
            f"{h.shape} and {d2.shape}."
        )
    if d2.size and d2.min() < 0:
        raise InputError(f"d2 must hold squared distances, >= 0; its minimum is {d2.min():g}.")
    require_number(eta, "eta", low=0)
    return Transport(h, d2, a, b).solve(float(eta))


class Transport:
    """The transport problems of one set of pairs, for any η and for h or −h; one work matrix serves them all.

    Parameters
    ----------
    h, d2 : arrays of shape (n, m)
        Both costs of each pair.
    a, b : arrays of shapes (n,) and (m,)
        Weights, each with sum 1.
    solver : {"emd", "sinkhorn"}
        Exact, or entropic with values extrapolated from ``2 reg`` and ``reg`` to 0.
    reg : float, optional
        Strength of the entropy, in units of h. Default: 10 % of the spread of h, or more where η d² dwarfs h.
    """

    def __init__(
        self,
        h: Float[np.ndarray, "n m"],
        d2: Float[np.ndarray, "n m"],
        a: Float[np.ndarray, " n"],
        b: Float[np.ndarray, " m"],
        *,
        solver: str = "emd",
        reg: float | None = None,
    ):
        self.h, self.d2, self.a, self.b, self.solver, self.reg = h, d2, a, b, solver, reg
        # POT compares reduced costs with absolute tolerances: costs far below 1 would end in a wrong "optimum".
        self._unit = float(max(h.max(), -h.min())) or 1.0
        self._work: np.ndarray | None = None

    def block(self, rows: slice, columns: slice) -> "Transport":
        """The problems of some controls with some treated units, whose weights add up to one again; costs are views."""
        a, b = self.a[rows], self.b[columns]
        costs = self.h[rows, columns], self.d2[rows, columns]
        return Transport(*costs, a / a.sum(), b / b.sum(), solver=self.solver, reg=self.reg)

    def solve(self, eta: float, *, sign: int = 1) -> TransportValue:
        """The plan that is optimal for ``sign`` · h + η d², with its costs ⟨π, h⟩ and ⟨π, d²⟩."""
        if self.solver == "emd":
            plan, _ = self._network_simplex(eta, sign)
            rows, columns = np.nonzero(plan)
            mass = plan[rows, columns]
            value, mismatch = float(mass @ self.h[rows, columns]), float(mass @ self.d2[rows, columns])
            return TransportValue(value, mismatch, sparse.csr_array((mass, (rows, columns)), shape=plan.shape))
        plan, _, (coarse, fine) = self._sinkhorn(eta, sign)
        value, mismatch = (2 * late - early for early, late in zip(coarse, fine, strict=True))
        return TransportValue(value, mismatch, sparse.csr_array(plan))

    def potential(self, eta: float, *, sign: int = 1) -> Float[np.ndarray, " m"]:
        """The dual variables of the treated units, up to a constant."""
        return (self._network_simplex if self.solver == "emd" else self._sinkhorn)(eta, sign)[1]

    def _network_simplex(self, eta: float, sign: int) -> tuple[Float[np.ndarray, "n m"], Float[np.ndarray, " m"]]:
        ot = import_pot()
        cost, unit = self._costs(eta, sign)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it has to say becomes an error below
            plan, log = ot.emd(self.a, self.b, cost, numItermax=_MAX_PIVOTS, log=True)
        if log["warning"] is not None:
            raise ConvergenceError(
                f"The network simplex found no optimal plan for arms of {plan.shape[0]} and {plan.shape[1]} units at "
                f"eta={eta:g}: {log['warning']} Lower max_points, or pass solver='sinkhorn'."
            )
        return plan, log["v"] * unit

    def _sinkhorn(
        self, eta: float, sign: int
    ) -> tuple[Float[np.ndarray, "n m"], Float[np.ndarray, " m"], list[tuple[float, float]]]:
        """Entropic plan and dual variables at ``reg``, and (⟨π, h⟩, ⟨π, d²⟩) at ``2 reg`` and at ``reg``."""
        ot = import_pot()
        h, d2, a, b = self.h, self.d2, self.a, self.b
        cost, unit = self._costs(eta, sign)
        if self.reg is not None:
            reg = self.reg / unit
        else:
            reg = max(_REG_OF_H * spread(h, a, b) / unit, _REG_OF_COSTS * spread(cost, a, b))
        largest = float(np.ptp(cost))
        if not reg > 0 or not largest > 0:  # all couplings cost the same
            return np.outer(a, b), np.full(len(b), float(cost.flat[0]) * unit), 2 * [(a @ h @ b, a @ d2 @ b)]
        # From strong to weak: each solution starts the next, and no row of exp(−cost/reg) vanishes.
        halvings = max(1, int(np.ceil(np.log2(largest / (_LARGEST_EXPONENT * reg)))))
        duals: Any = None
        values: list[tuple[float, float]] = []
        for strength in reg * 2.0 ** np.arange(halvings, -1, -1):
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")  # what it has to say becomes an error below
                plan, log = ot.bregman.sinkhorn_stabilized(
                    a,
                    b,
                    cost,
                    strength,
                    warmstart=duals,
                    numItermax=_SINKHORN_ITERATIONS,
                    stopThr=_SINKHORN_TOLERANCE * float(np.linalg.norm(b)),
                    log=True,
                )
            if not log["err"][-1] <= _SINKHORN_TOLERANCE * float(np.linalg.norm(b)):
                raise ConvergenceError(
                    f"Sinkhorn's iterations did not converge for arms of {len(a)} and {len(b)} units at eta={eta:g} and "
                    f"reg={strength * unit:g}. Pass a larger reg, or solver='emd'."
                )
            duals = log["warmstart"]
            values.append((float(np.einsum("ij,ij", plan, h)), float(np.einsum("ij,ij", plan, d2))))
        return plan, duals[1] * unit, values[-2:]

    def _costs(self, eta: float, sign: int) -> tuple[Float[np.ndarray, "n m"], float]:
        """The costs to minimise, written into the work matrix, and the unit that they are in."""
        if self._work is None:
            self._work = np.empty(self.h.shape)
        if np.isinf(eta):
            unit, tie_break = float(self.d2.max()) or 1.0, sign * _TIE_BREAK / self._unit
            np.multiply(self.h, tie_break * unit, out=self._work)
            self._work += self.d2
        else:
            unit = self._unit
            np.multiply(self.d2, sign * eta, out=self._work)
            self._work += self.h
        self._work *= (1 if np.isinf(eta) else sign) / unit
        return self._work, unit


def import_pot():
    """POT, or an error that says how to install it."""
    try:
        import ot
    except ImportError as error:
        raise MissingExtraError('Transport between arms needs POT: pip install "heedful[causal]".') from error
    return ot


def spread(costs: Float[np.ndarray, "n m"], a: Float[np.ndarray, " n"], b: Float[np.ndarray, " m"]) -> float:
    """Root mean square of what depends on the pairing: costs less row and column means, under independent coupling."""
    centred = costs - (costs @ b)[:, None]
    centred -= a @ centred
    return float(np.sqrt(a @ np.einsum("ij,ij,j->i", centred, centred, b)))


def sorted_coupling(
    x0: Float[np.ndarray, " n"],
    x1: Float[np.ndarray, " m"],
    a: Float[np.ndarray, " n"],
    b: Float[np.ndarray, " m"],
    *,
    pairing: int,
) -> tuple[Int[np.ndarray, " k"], Int[np.ndarray, " k"], Float[np.ndarray, " k"]]:
    """Rows, columns and masses of the coupling of quantiles: alike (``pairing`` 1) or opposite (−1). O(n log n)."""
    order0, order1 = np.argsort(x0, kind="stable"), np.argsort(pairing * x1, kind="stable")
    ends0, ends1 = np.cumsum(a[order0]), np.cumsum(b[order1])
    ends = np.sort(np.concatenate([ends0, ends1]))
    mass = np.diff(ends, prepend=0.0)
    middle = ends - mass / 2
    rows = order0[np.minimum(np.searchsorted(ends0, middle), len(a) - 1)]
    columns = order1[np.minimum(np.searchsorted(ends1, middle), len(b) - 1)]
    used = mass > 0
    return rows[used], columns[used], mass[used]


def _read_matrix(values, name: str) -> Float[np.ndarray, "n m"]:
    try:
        matrix = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} must be a matrix of numbers; {error}.") from error
    if matrix.ndim != 2 or not matrix.size:
        raise InputError(f"{name} must have shape (n, m), both at least 1; got {matrix.shape}.")
    return require_finite(matrix, name)


def _read_weights(values, name: str) -> Float[np.ndarray, " n"]:
    try:
        weights = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} must be an array of weights; {error}.") from error
    if weights.ndim != 1 or not len(weights) or not (weights >= 0).all() or not abs(weights.sum() - 1) <= 1e-6:
        raise InputError(
            f"{name} must hold weights >= 0 with sum 1, one a unit; got shape {weights.shape} with minimum "
            f"{weights.min(initial=np.inf):g} and sum {weights.sum():g}."
        )
    return weights / weights.sum()
