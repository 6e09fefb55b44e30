import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.causal import transport_value
from heedful.causal.causal_bounds import duals
from heedful.causal.causal_bounds.duals import Problem, cross_fitted_dual, dual_values
from heedful.causal.causal_bounds.transport import Transport
from heedful.causal.causal_bounds.trial import Trial, squared_distances

ETAS = [0.0, 0.1, 1.0, 10.0, 1e3]
EVERYBODY = (slice(None), slice(None))


def squared_effect(y0, y1):
    return ((y1[None] - y0[:, None]) ** 2).sum(axis=-1)


def problem_of(y0, y1, z0, z1, a, b):
    trial = Trial(y0, y1, z0, z1, a, b)
    return Problem(trial, squared_effect, Transport(squared_effect(y0, y1), squared_distances(z0, z1), a, b))


def random_problem(seed, n=14, m=11, dz=2, dy=1):
    rng = np.random.default_rng(seed)
    outcomes = rng.normal(size=(n, dy)), rng.normal(size=(m, dy))
    return problem_of(*outcomes, rng.normal(size=(n, dz)), rng.normal(size=(m, dz)), *weights(rng, n, m))


def weights(rng, n, m):
    return rng.dirichlet(np.full(n, 5.0)), rng.dirichlet(np.full(m, 5.0))


def least_cost(transport, eta, sign):
    plan = transport_value(sign * transport.h, transport.d2, transport.a, transport.b, eta=eta)
    return plan.value + eta * plan.mismatch


@given(seed=st.integers(0, 2**31 - 1), eta=st.sampled_from(ETAS), sign=st.sampled_from([1, -1]))
def test_dual_values_are_feasible_and_so_bound_the_cost_of_the_units_that_did_not_fit_them(seed, eta, sign):
    problem = random_problem(seed)
    for fit, on in problem.halves():
        dual = dual_values(problem, eta, fit, on, sign=sign)
        block = problem.block(*on).transport
        cost = sign * block.h + eta * block.d2
        largest = 1 + np.abs(cost).max()
        assert (dual.f[:, None] + dual.g <= cost + 1e-9 * largest).all()
        assert dual.a @ dual.f + dual.b @ dual.g <= least_cost(block, eta, sign) + 1e-8 * largest


def test_dual_values_of_the_units_that_fitted_them_reach_the_cost(seed):
    """Strong duality: nothing is lost between the simplex and the c-transforms."""
    problem = random_problem(seed, 20, 20)
    dual = dual_values(problem, 3.0, EVERYBODY, EVERYBODY)
    assert dual.a @ dual.f + dual.b @ dual.g == pytest.approx(least_cost(problem.transport, 3.0, 1), abs=1e-8)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dy", [1, 2])
def test_dual_functions_are_those_of_the_definition(sign, dy, seed):
    """Naive twin: every minimum by itself."""
    problem = random_problem(seed, 9, 8, dy=dy)
    (y0, y1, z0, z1, a, b), eta = problem.trial, 1.7
    fit, on = problem.halves()[0]
    v = problem.transport.block(*fit).potential(eta, sign=sign)
    first, second = range(4), range(4, 9)
    treated_fit, treated_on = range(4), range(4, 8)

    def cost(y, z, y_, z_):
        return sign * ((y_ - y) ** 2).sum() + eta * ((z_ - z) ** 2).sum()

    def f(y, z):
        return min(cost(y, z, y1[k], z1[k]) - v[k] for k in treated_fit)

    def g(y, z, others):
        return min(cost(y0[j], z0[j], y, z) - f(y0[j], z0[j]) for j in others)

    center0, center1 = np.average(y0[first], 0, a[first]), np.average(y1[treated_fit], 0, b[treated_fit])
    dual = dual_values(problem, eta, fit, on, sign=sign)
    np.testing.assert_allclose(dual.f, [f(y0[j], z0[j]) for j in second])
    np.testing.assert_allclose(dual.g, [g(y1[k], z1[k], range(9)) for k in treated_on])
    np.testing.assert_allclose(dual.phi, [f(center0, z) for z in (*z0[second], *z1[treated_on])])
    gamma = [g(center1, z0[i], [j for j in range(9) if j != i]) for i in second]
    gamma += [g(center1, z1[k], range(9)) for k in treated_on]
    np.testing.assert_allclose(dual.gamma, gamma)
    w0, w1 = a[second] / a[second].sum(), b[treated_on] / b[treated_on].sum()
    shared = dual.phi + dual.gamma
    expected = w0 @ (dual.f - dual.phi[:5]) + w1 @ (dual.g - dual.gamma[5:]) + shared.mean()
    assert dual.value() == pytest.approx(expected)
    parts0 = w0 * ((dual.f - dual.phi[:5]) - w0 @ (dual.f - dual.phi[:5]))
    parts1 = w1 * ((dual.g - dual.gamma[5:]) - w1 @ (dual.g - dual.gamma[5:]))
    parts = np.concatenate([parts0, parts1]) + (shared - shared.mean()) / 9
    assert dual.variance() == pytest.approx((parts**2).sum())


@pytest.mark.parametrize("eta", [0.0, 2.0])
def test_values_do_not_depend_on_how_many_pairs_are_in_work_at_once(eta, monkeypatch):
    problem = random_problem(0, 31, 17)
    whole = cross_fitted_dual(problem, eta)
    monkeypatch.setattr(duals, "_BLOCK", 40)
    assert cross_fitted_dual(problem, eta) == pytest.approx(whole, rel=1e-12)


def test_the_halves_of_an_arm_are_disjoint_and_leave_nobody_out():
    (first, second), (second_again, first_again) = random_problem(0, 7, 4).halves()
    assert (first, second) == (first_again, second_again)
    for arm, size in zip((0, 1), (7, 4), strict=True):
        units = [*range(size)]
        assert units[first[arm]] + units[second[arm]] == units
        assert units[first[arm]]


def gaussian_problem(seed, n):
    rng = np.random.default_rng(seed)
    z0, z1, noise0, noise1 = rng.normal(size=(4, n, 1))
    even = np.full(n, 1 / n)
    return problem_of(0.6 * z0 + noise0, -1.6 * z1 + noise1, z0, z1, even, even)


def test_an_imbalance_of_the_covariates_does_not_lift_the_dual_value_at_a_large_eta():
    """Means of f and g alone follow η times the imbalance, and in some draws end above where they were at η = 10."""
    plain, values = np.empty((30, 2)), np.empty((30, 2))
    for seed in range(30):
        problem = gaussian_problem(seed, 60)
        for i, eta in enumerate((10.0, 1000.0)):
            both = [dual_values(problem, eta, fit, on) for fit, on in problem.halves()]
            plain[seed, i] = np.mean([dual.a @ dual.f + dual.b @ dual.g for dual in both])
            values[seed, i] = np.mean([dual.value() for dual in both])
    assert (plain[:, 1] > plain[:, 0]).any()
    assert (values[:, 1] < values[:, 0]).all()


def test_dual_values_stay_below_the_conditional_bound_and_their_errors_say_how_they_vary():
    """V_c = (0.6 + 1.6)² = 4.84. Of 40 draws the mean is within 0.5 of nothing above it, and the spread within a third."""
    values, errors = np.array([cross_fitted_dual(gaussian_problem(seed, 60), 5.0) for seed in range(40)]).T
    assert 2 < values.mean() < 4.84
    assert 2 / 3 < values.std() / errors.mean() < 3 / 2


def test_matching_alone_has_no_dual_value():
    assert cross_fitted_dual(random_problem(0), np.inf) == (-np.inf, 0.0)


def test_without_covariates_the_dual_value_is_that_of_the_outcomes():
    rng = np.random.default_rng(0)
    outcomes, empty = rng.normal(size=(2, 40, 1)), np.empty((40, 0))
    even = np.full(40, 1 / 40)
    problem = problem_of(*outcomes, empty, empty, even, even)
    fit, on = problem.halves()[0]
    dual = dual_values(problem, 0.0, fit, on)
    assert dual.value() == pytest.approx(dual.a @ dual.f + dual.b @ dual.g, abs=0.05)
