"""NA-FIR: the normalisation inside the optimisation.

With u = log f constant on M cells, N_ib the number of classes of row i in cell b and b(i) the cell of the true class,

    J(u) = Σ_i w_i [ log Σ_b N_ib e^{u_b} − u_{b(i)} ],     Σ_i w_i = 1,     log floor = −R ≤ u_1 ≤ … ≤ u_M = 0,

a convex problem (J does not change when a constant is added to u, which u_M = 0 fixes; the floor holds a cell that has
no true class). In the rises x_b = u_{b+1} − u_b the constraints are a simplex, x ≥ 0 and Σx ≤ R. A primal-dual
interior-point Newton method solves it on a few blocks of cells; blocks are then split where the gradient says that a
rise would pay, until none would. The stopping rule bounds the distance to the optimum over *all* cells,

    J(u) − J* ≤ ⟨∇J, u⟩ − min over feasible v of ⟨∇J, v⟩ = ⟨∇J, u⟩ + R max(0, max_m Σ_{b≤m} ∇_b J).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Integer
from scipy.linalg import cho_factor, cho_solve
from scipy.sparse import csr_array, issparse

from heedful.calibrate.isotonic._pooled import at_true_class, cell_weights, monotone_frequencies, row_chunks

_KEPT_COUNTS = 10**8  # N is kept (a byte an entry for K < 256) up to this many entries, else rebuilt chunk by chunk


class Scores(NamedTuple):
    """Solution of the convex problem: ``u`` on every cell, the certified gap J(u) − J* in nats, Newton steps taken."""

    u: Float[np.ndarray, " m"]
    gap: float
    n_iter: int


class NormalizedLoss:
    """J and its derivatives for pairs in ``m`` cells.

    Parameters
    ----------
    cells : array of shape (n, K)
        Cell of every pair, 0 to m − 1.
    codes : array of shape (n,)
        Column of the true class.
    weight : array of shape (n,)
        Positive weights with sum 1.
    m : int
        Number of cells.

    Notes
    -----
    With s the cells that a row meets, at most min(K, m), a value or gradient costs O(ns) and a Hessian O(ns²): N is
    sparse where K is far below m, and otherwise dense, because there the dense products are faster.
    """

    def __init__(
        self, cells: Integer[np.ndarray, "n K"], codes: Int[np.ndarray, " n"], weight: Float[np.ndarray, " n"], m: int
    ):
        self.cells, self.weight, self.m = cells, weight, m
        true = at_true_class(cells, codes)
        self.positives = np.bincount(true, weights=weight, minlength=m)
        n, K = cells.shape
        self._kept: list[Any] | None = None
        if m >= 4 * K:
            whole = csr_array((np.ones(n * K), cells.ravel(), np.arange(0, n * K + 1, K)), shape=(n, m))
            whole.sum_duplicates()
            self._kept = [whole]
        elif n * m <= _KEPT_COUNTS:
            small = np.min_scalar_type(K)
            self._kept = [N.astype(small) for _, N in self._counts()]

    def _counts(self) -> Iterator[tuple[slice, Any]]:
        """Rows of N, in chunks."""
        if self._kept is not None and issparse(self._kept[0]):
            yield slice(None), self._kept[0]
            return
        for i, rows in enumerate(row_chunks(len(self.cells), self.m)):
            if self._kept is not None:
                yield rows, self._kept[i].astype(np.float64)
            else:
                chunk = self.cells[rows]
                flat = chunk + np.arange(len(chunk))[:, None] * self.m
                counts = np.bincount(flat.ravel(), minlength=len(chunk) * self.m)
                yield rows, counts.reshape(-1, self.m).astype(np.float64)

    def value(self, u: Float[np.ndarray, " m"]) -> float:
        """J(u), in nats."""
        return float(self.weight @ np.log(self.denominators(u)) - self.positives @ u)

    def denominators(self, u: Float[np.ndarray, " m"]) -> Float[np.ndarray, " n"]:
        """z_i = Σ_b N_ib e^{u_b}."""
        f = np.exp(u)
        return np.concatenate([N @ f for _, N in self._counts()])

    def gradient(self, u: Float[np.ndarray, " m"]) -> Float[np.ndarray, " m"]:
        """∇_b = Σ_i w_i Q_ib − c_b, with Q_ib = N_ib e^{u_b} / z_i and c_b the weight of rows with b(i) = b."""
        f = np.exp(u)
        mass = np.zeros(self.m)
        for rows, N in self._counts():
            mass += (self.weight[rows] / (N @ f)) @ N
        return mass * f - self.positives

    def hessian(self, u: Float[np.ndarray, " m"]) -> Float[np.ndarray, "m m"]:
        """diag(Σ_i w_i Q_i) − Σ_i w_i Q_i Q_iᵀ, positive semi-definite."""
        f = np.exp(u)
        mass, outer = np.zeros(self.m), np.zeros((self.m, self.m))
        for rows, N in self._counts():
            z = N @ f
            mass += (self.weight[rows] / z) @ N
            product = N.T @ (N * (self.weight[rows] / z**2)[:, None])
            outer += product.toarray() if issparse(product) else product
        return np.diag(mass * f) - outer * np.outer(f, f)


def duality_gap(u: Float[np.ndarray, " m"], gradient: Float[np.ndarray, " m"], radius: float) -> float:
    """Bound on J(u) − J* from the linear problem over all feasible scores: ⟨∇, u⟩ + R max(0, max_m Σ_{b≤m} ∇_b)."""
    return float(gradient @ u + radius * max(0.0, np.cumsum(gradient[:-1]).max(initial=0.0)))


def fit_scores(
    cells: Integer[np.ndarray, "n K"],
    codes: Int[np.ndarray, " n"],
    weight: Float[np.ndarray, " n"],
    m: int,
    *,
    floor: float,
    tol: float = 1e-7,
    max_iter: int = 500,
    start: Float[np.ndarray, " m"] | None = None,
) -> Scores:
    """Minimise J over non-decreasing scores on ``m`` cells, of which the last holds a true class.

    Parameters
    ----------
    cells, codes, weight, m
        As in ``NormalizedLoss``.
    floor : float
        Least value of f relative to its greatest, in (0, 1).
    tol : float
        Stop when the certified gap is at most this, in nats.
    max_iter : int
        Most Newton steps.
    start : array of shape (m,), optional
        Non-decreasing scores to begin from; default the logarithm of the pooled isotonic fit.

    Returns
    -------
    Scores
    """
    radius = -float(np.log(floor))
    true = at_true_class(cells, codes)
    positives = np.bincount(true, weights=weight, minlength=m)
    if start is None:
        with np.errstate(divide="ignore"):
            start = np.log(monotone_frequencies(positives, cell_weights(cells, weight, m)))
    u = np.clip(start - start[-1], -radius, 0.0)

    rises = np.flatnonzero(np.diff(u) > 0)  # block k begins at cell rises[k − 1] + 1
    n_iter = 0
    while True:
        block = np.zeros(m, dtype=np.min_scalar_type(m))
        block[rises + 1] = 1
        block = np.cumsum(block, dtype=block.dtype)
        whole = len(rises) == m - 1
        loss = NormalizedLoss(cells if whole else block[cells], codes, weight, len(rises) + 1)
        blocks = _interior_point(loss, u[np.r_[rises, m - 1]], radius, tol / 2, max_iter - n_iter)
        n_iter += blocks.n_iter
        u = blocks.u[block]
        if whole:
            return Scores(u, blocks.gap, n_iter)
        gradient = np.exp(u) * cell_weights(cells, weight / loss.denominators(blocks.u), m) - positives
        gap = duality_gap(u, gradient, radius)
        useful = rises[np.diff(blocks.u) > 0]
        new = _paying_rises(np.cumsum(gradient)[:-1], block, rises)
        if gap <= tol or n_iter >= max_iter or not len(new):
            return Scores(u, gap, n_iter)
        rises = np.union1d(useful, new)


def _paying_rises(
    prefix: Float[np.ndarray, " places"], block: Integer[np.ndarray, " m"], rises: Int[np.ndarray, " k"]
) -> Int[np.ndarray, " new"]:
    """The best place for a further rise in each block, where one would lower J.

    A rise after cell m changes J at the rate −Σ_{b≤m} ∇_b. Those in use all have the same rate, the price of the floor.
    """
    price = max(0.0, prefix[rises].max(initial=0.0))
    candidate = prefix > price + 1e-12
    candidate[rises] = False
    order = np.flatnonzero(candidate)
    order = order[np.lexsort((-prefix[order], block[order]))]
    _, first = np.unique(block[order], return_index=True)
    return order[first]


def _interior_point(
    loss: NormalizedLoss, start: Float[np.ndarray, " m"], radius: float, tol: float, max_iter: int
) -> Scores:
    """Primal-dual Newton steps on the rises x ≥ 0, s = R − Σx ≥ 0, with multipliers λ and ν, from the scores ``start``.

    Boyd and Vandenberghe, Convex Optimization, section 11.7. One Hessian a step, 10 to 25 steps.
    """
    m = loss.m - 1

    def scores(x):
        return -np.r_[np.cumsum(x[::-1])[::-1], 0.0]

    def residual(x, slack, lam, nu, gradient, mu):
        return np.r_[-np.cumsum(gradient)[:-1] - lam + nu, x * lam - mu, slack * nu - mu]

    gradient = loss.gradient(start)
    gap = duality_gap(start, gradient, radius)
    if gap <= tol or m == 0 or max_iter <= 0:
        return Scores(start, gap, 0)

    x = 0.9 * np.diff(start) + 0.05 * radius / m
    slack = radius - x.sum()
    gradient = loss.gradient(scores(x))
    mu = duality_gap(scores(x), gradient, radius) / (m + 1)
    lam, nu = mu / x, mu / slack
    best = Scores(start, gap, 0)
    for n_iter in range(1, max_iter + 1):
        mu = 0.1 * (x @ lam + slack * nu) / (m + 1)
        hessian = np.cumsum(np.cumsum(loss.hessian(scores(x)), axis=0), axis=1)[:-1, :-1]
        # Rounding leaves the Hessian of a flat direction a little below zero: 1e-13 is beyond that, below any curvature.
        # The term ν/s 11ᵀ is huge when the floor binds, so it enters by the Sherman-Morrison formula and not the matrix.
        factor = cho_factor(hessian + np.diag(lam / x + 1e-13))
        free = cho_solve(factor, np.cumsum(gradient)[:-1] + mu / x - mu / slack)
        ones = cho_solve(factor, np.ones(m))
        dslack = -free.sum() * slack / (slack + nu * ones.sum())
        dx = free + ones * (nu / slack * dslack)
        dlam, dnu = mu / x - lam - lam / x * dx, mu / slack - nu - nu / slack * dslack
        state, move = np.r_[x, slack, lam, nu], np.r_[dx, dslack, dlam, dnu]
        length = min(1.0, 0.99 / max(1e-300, np.max(-move / state)))
        before = np.linalg.norm(residual(x, slack, lam, nu, gradient, mu))
        for _ in range(30):
            trial = x + length * dx, slack + length * dslack, lam + length * dlam, nu + length * dnu
            gradient = loss.gradient(scores(trial[0]))
            if np.linalg.norm(residual(*trial, gradient, mu)) <= (1 - 0.01 * length) * before:
                break
            length /= 2
        x, slack, lam, nu = trial
        u = scores(np.where(x < lam, 0.0, x))  # a rise smaller than its multiplier is on its way to zero
        gap = duality_gap(u, loss.gradient(u), radius)
        if gap < best.gap:
            best = Scores(u, gap, n_iter)
        if gap <= tol:
            break
    return best._replace(n_iter=n_iter)
