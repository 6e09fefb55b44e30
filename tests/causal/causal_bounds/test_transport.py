import re
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from heedful.causal import transport_value
from heedful.causal.causal_bounds import transport
from heedful.causal.causal_bounds.transport import Transport, sorted_coupling, spread
from heedful.errors import ConvergenceError, InputError, MissingExtraError, ParameterError

ETAS = [0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0, 1e4]


def random_problem(seed, n=6, m=5, *, scale=1.0):
    rng = np.random.default_rng(seed)
    d2 = (rng.normal(size=(n, 1)) - rng.normal(size=m)) ** 2
    return scale * rng.normal(size=(n, m)), d2, rng.dirichlet(np.ones(n)), rng.dirichlet(np.ones(m))


def least_cost(cost, a, b):
    """The linear programme itself."""
    n, m = cost.shape
    marginals = np.vstack([np.kron(np.eye(n), np.ones(m)), np.kron(np.ones(n), np.eye(m))])
    return linprog(cost.ravel(), A_eq=marginals, b_eq=np.concatenate([a, b]), bounds=(0, None), method="highs")


@given(seed=st.integers(0, 2**31 - 1), eta=st.sampled_from(ETAS))
def test_plans_are_optimal_couplings_of_the_weights(seed, eta):
    h, d2, a, b = random_problem(seed)
    value, mismatch, plan = transport_value(h, d2, a, b, eta=eta)
    dense = plan.toarray()
    assert (dense >= 0).all()
    np.testing.assert_allclose(dense.sum(axis=1), a, atol=1e-12)
    np.testing.assert_allclose(dense.sum(axis=0), b, atol=1e-12)
    assert value == pytest.approx((dense * h).sum(), abs=1e-12)
    assert mismatch == pytest.approx((dense * d2).sum(), abs=1e-12)
    assert plan.nnz <= len(a) + len(b) - 1
    assert value + eta * mismatch == pytest.approx(least_cost(h + eta * d2, a, b).fun, rel=1e-8, abs=1e-8)


@given(seed=st.integers(0, 2**31 - 1), sign=st.sampled_from([1, -1]))
def test_along_rising_eta_the_value_rises_and_the_mismatch_falls(seed, sign):
    h, d2, a, b = random_problem(seed, 9, 8)
    path = [Transport(h, d2, a, b).solve(eta, sign=sign)[:2] for eta in [*ETAS, np.inf]]
    values, mismatches = np.array(path).T
    assert (np.diff(sign * values) >= -1e-9).all()
    assert (np.diff(mismatches) <= 1e-9).all()


def test_the_penalty_is_no_part_of_the_value():
    value, mismatch, _ = transport_value([[2.0]], [[3.0]], [1.0], [1.0], eta=5.0)
    assert (value, mismatch) == (2.0, 3.0)


@pytest.mark.parametrize("scale", [1e-14, 1e-6, 1e6, 1e12])
def test_units_of_measurement_do_not_matter(scale):
    """POT alone, with its absolute tolerances, is off by half the value at 1e-14."""
    h, d2, a, b = random_problem(0, 60, 50)
    plain = transport_value(h, d2, a, b, eta=1.0)
    scaled = transport_value(scale * h, scale * d2, a, b, eta=1.0)
    assert scaled.value == pytest.approx(scale * plain.value, rel=1e-9)
    assert scaled.mismatch == pytest.approx(scale * plain.mismatch, rel=1e-9)


def test_at_infinite_eta_units_are_matched_on_covariates_and_h_decides_among_equals():
    d2 = np.array([[0.0, 0.0, 4.0], [0.0, 0.0, 4.0], [4.0, 4.0, 0.0]])
    h = np.array([[0.0, 1.0, -9.0], [1.0, 4.0, -9.0], [-9.0, -9.0, 7.0]])
    third = np.full(3, 1 / 3)
    value, mismatch, plan = transport_value(h, d2, third, third, eta=np.inf)
    assert value == pytest.approx((1 + 1 + 7) / 3)
    assert mismatch == 0
    np.testing.assert_allclose(plan.toarray() * 3, [[0, 1, 0], [1, 0, 0], [0, 0, 1]], atol=1e-12)


def test_units_without_weight_take_no_part():
    h, d2, a, b = random_problem(3)
    a[2], b[0] = 0, 0
    a, b = a / a.sum(), b / b.sum()
    keep_rows, keep_columns = a > 0, b > 0
    part = np.ix_(keep_rows, keep_columns)
    expected = transport_value(h[part], d2[part], a[keep_rows], b[keep_columns], eta=2.0)
    found = transport_value(h, d2, a, b, eta=2.0)
    assert found.value == pytest.approx(expected.value, abs=1e-12)
    assert found.mismatch == pytest.approx(expected.mismatch, abs=1e-12)


@given(seed=st.integers(0, 2**31 - 1), n=st.integers(1, 9), m=st.integers(1, 9), pairing=st.sampled_from([1, -1]))
def test_sorting_finds_the_cheapest_coupling_of_one_outcome(seed, n, m, pairing):
    rng = np.random.default_rng(seed)
    x0, x1 = rng.integers(0, 5, n) + 0.0, rng.normal(size=m)  # with ties
    a, b = rng.dirichlet(np.ones(n)), rng.dirichlet(np.ones(m))
    rows, columns, mass = sorted_coupling(x0, x1, a, b, pairing=pairing)
    np.testing.assert_allclose(np.bincount(rows, mass, n), a, atol=1e-12)
    np.testing.assert_allclose(np.bincount(columns, mass, m), b, atol=1e-12)
    cost = pairing * (x0[:, None] - x1) ** 2
    assert mass @ cost[rows, columns] == pytest.approx(least_cost(cost, a, b).fun, rel=1e-8, abs=1e-8)


def test_spread_sees_the_interaction_alone():
    rng = np.random.default_rng(0)
    a, b = rng.dirichlet(np.ones(30)), rng.dirichlet(np.ones(20))
    u, v = rng.normal(size=30), rng.normal(size=20)
    u, v = u - a @ u, v - b @ v
    costs = np.outer(u, v) + 7 * u[:, None] ** 2 - 3 * np.exp(v) + 11
    assert spread(costs, a, b) == pytest.approx(np.sqrt((a @ u**2) * (b @ v**2)), rel=1e-9)


# Entropy


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("eta", [0.0, 1.0, 10.0])
def test_entropic_values_approach_the_exact_ones_and_extrapolation_halves_the_distance_at_least(eta, sign):
    rng = np.random.default_rng(0)
    y0, y1, z0, z1 = rng.normal(size=(4, 120))
    h, d2 = (y0[:, None] - y1) ** 2, (z0[:, None] - z1) ** 2
    weights = np.full(120, 1 / 120)
    exact = Transport(h, d2, weights, weights).solve(eta, sign=sign)
    problems = Transport(h, d2, weights, weights, solver="sinkhorn")
    found = problems.solve(eta, sign=sign)
    np.testing.assert_allclose(found.plan.sum(axis=0), weights, rtol=1e-3)
    np.testing.assert_allclose(found.plan.sum(axis=1), weights, rtol=1e-3)

    def cost(solved):
        return sign * solved.value + eta * solved.mismatch

    plain = sign * (found.plan * h).sum() + eta * (found.plan * d2).sum()
    assert plain >= cost(exact) - 1e-3  # an upper approximation, up to the marginals
    assert abs(cost(found) - cost(exact)) < abs(plain - cost(exact)) / 2
    assert found.value == pytest.approx(exact.value, abs=0.05 * spread(h, weights, weights))
    v = problems.potential(eta, sign=sign)
    f = (sign * h + eta * d2 - v).min(axis=1)
    dual = weights @ f + weights @ (sign * h + eta * d2 - f[:, None]).min(axis=0)
    assert cost(exact) - 0.2 * spread(h, weights, weights) < dual <= cost(exact) + 1e-9


def test_entropic_plans_of_costs_without_a_pairing_are_independent():
    a, b = np.array([0.25, 0.75]), np.array([0.5, 0.5])
    found = Transport(np.ones((2, 2)), np.zeros((2, 2)), a, b, solver="sinkhorn").solve(1.0)
    assert (found.value, found.mismatch) == (1.0, 0.0)
    np.testing.assert_allclose(found.plan.toarray(), np.outer(a, b))


# Bad input


def refuse(message, *, error=InputError, **changed):
    given = {
        "h": np.zeros((2, 3)),
        "d2": np.zeros((2, 3)),
        "a": [0.5, 0.5],
        "b": [0.5, 0.25, 0.25],
        "eta": 1.0,
    } | changed
    eta = given.pop("eta")
    with pytest.raises(error, match=message):
        transport_value(*given.values(), eta=eta)


def test_wrong_input_is_refused_in_words():
    refuse(r"h and d2 must have one row a unit in a .*\(2, 3\); got \(2, 2\) and \(2, 3\)", h=np.zeros((2, 2)))
    refuse("h has 1 entries that are NaN or infinite", h=[[0, 0, np.nan], [0, 0, 0]])
    refuse(r"h must have shape \(n, m\), both at least 1; got \(3,\)", h=np.zeros(3))
    refuse("d2 must be a matrix of numbers; could not convert", d2=[["a", "b", "c"]] * 2)
    refuse("d2 must hold squared distances, >= 0; its minimum is -1", d2=np.full((2, 3), -1.0))
    refuse("a must hold weights >= 0 with sum 1.* sum 1.5", a=[0.5, 1.0])
    refuse("b must hold weights >= 0 with sum 1.* minimum -0.5", b=[-0.5, 1.0, 0.5])
    refuse("a must be an array of weights; could not convert", a=["x", "y"])
    refuse(r"eta must be a number >= 0; got -1\.0", eta=-1.0, error=ParameterError)
    refuse("eta must be a number >= 0; got nan", eta=float("nan"), error=ParameterError)


@pytest.mark.parametrize("error", [ValueError, TypeError])
def test_a_wrong_eta_is_an_error_of_the_builtin_kinds_too(error):
    refuse("eta", eta=-1.0, error=error)


def test_a_simplex_that_stops_early_is_an_error_and_no_value(monkeypatch):
    monkeypatch.setattr(transport, "_MAX_PIVOTS", 3)
    message = (
        "The network simplex found no optimal plan for arms of 40 and 30 units at eta=1: numItermax reached before "
        "optimality. Try to increase numItermax. Lower max_points, or pass solver='sinkhorn'."
    )
    with pytest.raises(ConvergenceError, match=f"^{re.escape(message)}$"):
        transport_value(*random_problem(0, 40, 30), eta=1.0)


def test_iterations_that_do_not_converge_are_an_error_and_no_value(monkeypatch):
    monkeypatch.setattr(transport, "_SINKHORN_ITERATIONS", 2)
    with pytest.raises(ConvergenceError, match="did not converge for arms of 40 and 30 units at eta=1 and reg="):
        Transport(*random_problem(0, 40, 30), solver="sinkhorn", reg=1e-3).solve(1.0)


def test_without_pot_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ot", None)
    with pytest.raises(
        MissingExtraError, match=re.escape('Transport between arms needs POT: pip install "heedful[causal]".')
    ):
        transport_value([[1.0]], [[1.0]], [1.0], [1.0], eta=1.0)
