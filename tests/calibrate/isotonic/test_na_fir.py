import cvxpy as cp
import numpy as np
import pytest

from heedful.calibrate.isotonic import _na_fir
from heedful.calibrate.isotonic._na_fir import NormalizedLoss, duality_gap, fit_scores
from heedful.calibrate.isotonic._pooled import assign_cells, at_true_class, flattened_isotonic


def cells_of(P, y, blocks="fir"):
    """Cells, weights, number of cells and the pooled fit's scores on them, held to the floor 1/(nK)."""
    weight = np.full(len(y), 1 / len(y))
    fit = flattened_isotonic(P, y, weight)
    edges = fit.edges if blocks == "fir" else np.unique(at_true_class(P, y))
    edges = edges[edges > P.min()]
    cells = assign_cells(P, edges)
    return cells, weight, len(edges) + 1, fit


def naive_loss(P, y, u_of_pairs, weight):
    scores = np.exp(u_of_pairs)
    q = scores / scores.sum(axis=1, keepdims=True)
    return -float(weight @ np.log(q[np.arange(len(y)), y]))


@pytest.mark.parametrize("kept", [10**8, 0])  # counts kept, and rebuilt in chunks each time
def test_value_gradient_and_hessian_are_those_of_the_normalised_log_loss(draw, monkeypatch, kept):
    monkeypatch.setattr(_na_fir, "_KEPT_COUNTS", kept)
    monkeypatch.setattr("heedful.calibrate.isotonic._pooled._CHUNK", 50)
    P, y = draw(40, 4, 0)
    cells, _, m, _ = cells_of(P, y)
    rng = np.random.default_rng(1)
    weight = rng.dirichlet(np.ones(40))
    u = np.sort(rng.normal(size=m))
    loss = NormalizedLoss(cells, y, weight, m)
    assert loss.value(u) == pytest.approx(naive_loss(P, y, u[cells], weight), abs=1e-13)
    h = 1e-5  # central differences: the error is h² times third derivatives below 1, plus rounding 1e-16/h
    slope = [(loss.value(u + h * e) - loss.value(u - h * e)) / (2 * h) for e in np.eye(m)]
    np.testing.assert_allclose(loss.gradient(u), slope, atol=1e-9)
    curvature = [(loss.gradient(u + h * e) - loss.gradient(u - h * e)) / (2 * h) for e in np.eye(m)]
    np.testing.assert_allclose(loss.hessian(u), curvature, atol=1e-9)


@pytest.mark.parametrize("seed", range(50))
def test_training_loss_is_at_most_that_of_the_pooled_fit_and_the_gap_is_certified(draw, seed):
    rng = np.random.default_rng(seed)
    n, K = int(rng.integers(10, 300)), int(rng.integers(2, 12))
    P, y = draw(n, K, seed, sharpness=float(rng.uniform(0.3, 4)))
    cells, weight, m, fir = cells_of(P, y)
    floor = 1 / (n * K)
    found = fit_scores(cells, y, weight, m, floor=floor)
    loss = NormalizedLoss(cells, y, weight, m)
    with np.errstate(divide="ignore"):
        pooled = np.maximum(np.log(fir.values / fir.values[-1]), np.log(floor))
    assert loss.value(found.u) <= loss.value(pooled) + 1e-12
    assert found.gap <= 1e-7
    assert found.gap == pytest.approx(duality_gap(found.u, loss.gradient(found.u), -np.log(floor)), abs=1e-12)
    assert (np.diff(found.u) >= 0).all()
    assert np.log(floor) - 1e-12 <= found.u[0] <= found.u[-1] == 0


@pytest.mark.parametrize("blocks", ["fir", "all"])
def test_optimum_does_not_depend_on_the_start(draw, blocks):
    P, y = draw(150, 6, 3)
    cells, weight, m, _ = cells_of(P, y, blocks)
    loss = NormalizedLoss(cells, y, weight, m)
    rng = np.random.default_rng(0)
    starts = [None, np.zeros(m), np.sort(rng.normal(size=m)), np.linspace(-9, 0, m)]
    values = [loss.value(fit_scores(cells, y, weight, m, floor=1e-3, start=start).u) for start in starts]
    assert max(values) - min(values) < 1e-7


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("blocks", ["fir", "all"])
def test_optimum_equals_that_of_a_conic_solver(draw, seed, blocks):
    P, y = draw(8, 3, seed)
    cells, weight, m, _ = cells_of(P, y, blocks)
    floor = 1 / 24
    u = cp.Variable(m)
    loss = sum(cp.log_sum_exp(u[cells[i].astype(int)]) - u[int(cells[i, y[i]])] for i in range(8)) / 8
    problem = cp.Problem(
        cp.Minimize(loss), [cp.diff(u) >= 0, u[m - 1] == 0, u[0] >= np.log(floor)] if m > 1 else [u == 0]
    )
    problem.solve(solver=cp.CLARABEL)
    found = fit_scores(cells, y, weight, m, floor=floor, tol=1e-9)
    # The certificate promises 1e-9; Clarabel stops at about 1e-8.
    assert NormalizedLoss(cells, y, weight, m).value(found.u) == pytest.approx(problem.value, abs=5e-8)


def test_gap_bounds_the_distance_to_the_optimum_at_any_feasible_point(draw):
    P, y = draw(60, 4, 0)
    cells, weight, m, _ = cells_of(P, y)
    loss, radius = NormalizedLoss(cells, y, weight, m), np.log(240)
    least = loss.value(fit_scores(cells, y, weight, m, floor=1 / 240, tol=1e-10).u)
    for seed in range(20):
        u = np.sort(np.random.default_rng(seed).uniform(-radius, 0, size=m))
        u[-1] = 0
        assert loss.value(u) - least <= duality_gap(u, loss.gradient(u), radius)


def test_all_places_lower_the_loss_of_the_pooled_blocks_by_little(draw):
    P, y = draw(600, 10, 0)
    losses = {}
    for blocks in ("fir", "all"):
        cells, weight, m, _ = cells_of(P, y, blocks)
        found = fit_scores(cells, y, weight, m, floor=1 / 6000)
        assert found.gap <= 1e-7
        losses[blocks] = naive_loss(P, y, found.u[cells], weight)
    assert -1e-7 <= losses["fir"] - losses["all"] < 3e-4


def test_a_single_cell_and_an_exhausted_budget_are_reported_as_they_are(draw):
    P, y = draw(100, 4, 0)
    alone = fit_scores(np.zeros((100, 4), dtype=np.uint8), y, np.full(100, 0.01), 1, floor=0.01)
    assert (alone.u.tolist(), alone.gap, alone.n_iter) == ([0.0], 0.0, 0)
    cells, weight, m, _ = cells_of(P, y)
    cut_short = fit_scores(cells, y, weight, m, floor=1 / 400, max_iter=2)
    assert cut_short.n_iter == 2
    assert cut_short.gap > 1e-7


@pytest.mark.parametrize("seed", range(40))
def test_a_tight_tolerance_is_met_on_saturated_and_tied_probabilities_with_labels_from_nowhere(seed):
    rng = np.random.default_rng(seed)
    n, K = int(rng.integers(2, 300)), int(rng.integers(2, 20))
    z = rng.normal(size=(n, K)) * rng.choice([0.1, 1.0, 10.0, 100.0])
    P = np.exp(z - z.max(axis=1, keepdims=True))
    if seed % 2:
        P = np.round(5 * P)  # the largest is 5, so no row vanishes
    P /= P.sum(axis=1, keepdims=True)
    y = rng.integers(K, size=n)
    cells, _, m, _ = cells_of(P, y, "all")
    weight = rng.dirichlet(np.ones(n))
    found = fit_scores(cells, y, weight, m, floor=1 / (n * K), tol=1e-10)
    gradient = NormalizedLoss(cells, y, weight, m).gradient(found.u)
    assert duality_gap(found.u, gradient, np.log(n * K)) <= 1.01e-10
    assert found.n_iter < 60
