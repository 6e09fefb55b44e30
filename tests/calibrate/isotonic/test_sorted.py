import cvxpy as cp
import numpy as np
import pytest
from scipy.optimize import isotonic_regression

from heedful.calibrate.isotonic._sorted import _fill_unseen, bivariate_isotonic, fit_sorted


def random_grid(seed, ranks, bins):
    rng = np.random.default_rng(seed)
    total = rng.uniform(0.1, 3, size=(ranks, bins)) * (rng.random((ranks, bins)) > 0.3)  # some cells empty
    total[0, 0] = 1.0
    return total * rng.random((ranks, bins)), total


@pytest.mark.parametrize("seed", range(8))
def test_bivariate_fit_equals_the_quadratic_program_on_weighted_grids(seed):
    hits, total = random_grid(seed, 4, 7)
    seen = total > 0
    g = cp.Variable((4, 7))
    target = np.divide(hits, total, out=np.zeros_like(hits), where=seen)
    error = cp.sum(cp.multiply(total, cp.square(g - target)))
    cp.Problem(cp.Minimize(error), [cp.diff(g, axis=0) >= 0, cp.diff(g, axis=1) >= 0]).solve(solver=cp.CLARABEL)
    values, _ = bivariate_isotonic(hits, total)
    np.testing.assert_allclose(values[seen], g.value[seen], atol=1e-6)
    assert (np.diff(values, axis=0) >= 0).all()
    assert (np.diff(values, axis=1) >= 0).all()


@pytest.mark.parametrize("shape", [(1, 60), (60, 1)])
def test_bivariate_fit_along_one_axis_is_plain_isotonic_regression(shape):
    rng = np.random.default_rng(0)
    total = rng.uniform(0.5, 2, size=shape)
    target = rng.random(shape) + np.linspace(0, 1, 60).reshape(shape)
    values, _ = bivariate_isotonic(target * total, total)
    peer = isotonic_regression(target.ravel(), weights=total.ravel()).x
    np.testing.assert_allclose(values.ravel(), peer, atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_full_resolution_equals_the_quadratic_program_over_the_partial_order(draw, seed):
    P, y = draw(12, 4, seed)
    fit = fit_sorted(P, y, np.full(12, 1 / 12), n_bins=None, max_rank=25)
    ranked = -np.sort(-P, axis=1)
    sums = ranked.cumsum(axis=1)[:, :3]
    rank = (P[np.arange(12), y][:, None] < P).sum(axis=1)  # no ties here
    points = [(sums[i, r], r, float(rank[i] <= r)) for i in range(12) for r in range(3)]
    g = cp.Variable(len(points))
    order = [
        g[a] <= g[b]
        for a, (s, r, _) in enumerate(points)
        for b, (t, q, _) in enumerate(points)
        if a != b and s <= t and r <= q
    ]
    cp.Problem(cp.Minimize(cp.sum_squares(g - np.array([t for *_, t in points]))), order).solve(
        solver=cp.CLARABEL, tol_gap_abs=1e-13, tol_gap_rel=1e-13, tol_feas=1e-13
    )
    ours = [fit.values[r, np.searchsorted(fit.edges, s, side="right")] for s, r, _ in points]
    np.testing.assert_allclose(ours, g.value, atol=1e-6)


@pytest.mark.parametrize("n_bins", [None, 1, 5, 20])
def test_g_is_monotone_in_sum_and_rank_and_its_gap_is_rounding(draw, n_bins):
    P, y = draw(300, 8, 0)
    fit = fit_sorted(P, y, np.full(300, 1 / 300), n_bins=n_bins, max_rank=5)
    assert fit.values.shape == (5, len(fit.edges) + 1)
    assert (np.diff(fit.values, axis=0) >= 0).all()
    assert (np.diff(fit.values, axis=1) >= 0).all()
    assert 0 <= fit.values.min() <= fit.values.max() <= 1
    assert (np.diff(fit.centers) > 0).all()
    assert abs(fit.gap) < 1e-12


@pytest.mark.parametrize("n_bins", [None, 40])
def test_saturated_probabilities_keep_the_bins_in_order(n_bins):
    rng = np.random.default_rng(0)
    z = 40 * rng.normal(size=(400, 10))  # most sums differ from 1 by a few roundings, or not at all
    P = np.exp(z - z.max(axis=1, keepdims=True))
    P /= P.sum(axis=1, keepdims=True)
    weight = rng.dirichlet(np.ones(400))
    fit = fit_sorted(P, rng.integers(10, size=400), weight, n_bins=n_bins, max_rank=25)
    assert (np.diff(fit.centers) > 0).all()
    assert (fit.centers[1:] >= fit.edges).all()
    assert (fit.centers[:-1] < fit.edges).all()


def test_gap_sees_a_fit_that_is_not_the_best(draw, monkeypatch):
    P, y = draw(300, 5, 0)

    def worse(hits, total):
        values, n_cuts = bivariate_isotonic(hits, total)
        return np.clip(values + 0.05, 0, 1), n_cuts

    monkeypatch.setattr("heedful.calibrate.isotonic._sorted.bivariate_isotonic", worse)
    # Four ranks, each moved by up to 0.05: half the squared error grows by about 4 · 0.05²/2 at most.
    assert fit_sorted(P, y, np.full(300, 1 / 300), n_bins=10, max_rank=25).gap > 1e-4


def test_unseen_cells_lie_between_their_neighbours_and_keep_the_order():
    seen = np.array([[True, False, False], [False, True, False], [False, False, True]])
    values = np.where(seen, np.array([[0.2, 0, 0], [0, 0.4, 0], [0, 0, 0.9]]), np.nan)
    filled = _fill_unseen(values, seen)
    assert filled[seen].tolist() == [0.2, 0.4, 0.9]
    assert filled[0, 1] == filled[1, 0] == pytest.approx(0.3)  # 0.2 below, 0.4 above
    assert filled[0, 2] == pytest.approx((0.2 + 0.9) / 2)
    assert (np.diff(filled, axis=0) >= 0).all()
    assert (np.diff(filled, axis=1) >= 0).all()
