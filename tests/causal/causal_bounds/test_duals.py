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


@given(
    seed=st.integers(0, 2**31 - 1),
    eta=st.sampled_from(ETAS),
    sign=st.sampled_from([1, -1]),
    dz=st.sampled_from([1, 2, 6]),
)
def test_dual_functions_are_feasible_for_any_outcomes_at_the_same_covariates(seed, eta, sign, dz):
    """Controls that stand where treated units stand: f + g is at most the cost of what may be coupled, whatever v is."""
    problem = random_problem(seed, dz=dz)
    y0, y1, z0, _, a, b = problem.trial
    (fit, on), m = problem.halves()[0], len(b[problem.halves()[0][1][1]])
    for outcome in range(len(y0)):  # each control outcome at the covariates of each treated unit
        z = z0.copy()
        z[on[0]][:m] = problem.trial.z1[on[1]][: len(z[on[0]])]
        y = y0.copy()
        y[on[0]] = y0[outcome]
        moved = problem_of(y0, y1, z, problem.trial.z1, a, b)
        there = dual_values(moved, eta, fit, on, sign=sign)
        y_moved = problem_of(y, y1, z, problem.trial.z1, a, b)
        at_outcome = dual_values(y_moved, eta, fit, on, sign=sign)
        pairs = min(len(at_outcome.f), m)
        cost = sign * squared_effect(y[on[0]][:pairs], y1[on[1]][:pairs]).diagonal()
        largest = 1 + np.abs(sign * problem.transport.h + eta * problem.transport.d2).max()
        assert (at_outcome.f[:pairs] + there.g[:pairs] <= cost + 1e-9 * largest).all()


@given(seed=st.integers(0, 2**31 - 1), eta=st.sampled_from(ETAS), sign=st.sampled_from([1, -1]))
def test_nothing_that_is_added_to_both_dual_functions_grows_with_eta(seed, eta, sign):
    problem = random_problem(seed)
    y0, y1 = problem.trial[:2]
    for fit, on in problem.halves():
        dual = dual_values(problem, eta, fit, on, sign=sign)
        fitted = problem.trial.take(*fit)
        most = sign * squared_effect((fitted.a @ y0[fit[0]])[None], (fitted.b @ y1[fit[1]])[None])[0, 0]
        assert (dual.phi + dual.gamma <= most + 1e-9 * (1 + np.abs(dual.phi).max())).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_where_covariates_do_not_vary_the_units_that_fitted_them_reach_the_cost(seed, sign):
    """Strong duality: nothing is lost between the simplex and the transforms, as 20 outcomes are all looked at."""
    rng = np.random.default_rng(seed)
    outcomes = rng.normal(size=(2, 20, 1))
    problem = problem_of(*outcomes, np.ones((20, 2)), np.ones((20, 2)), *weights(rng, 20, 20))
    dual = dual_values(problem, 3.0, EVERYBODY, EVERYBODY, sign=sign)
    assert dual.a @ dual.f + dual.b @ dual.g == pytest.approx(least_cost(problem.transport, 3.0, sign), abs=1e-8)


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

    center0, center1 = np.average(y0[first], 0, a[first]), np.average(y1[treated_fit], 0, b[treated_fit])

    def g(y, z):
        return min(sign * ((y - y_) ** 2).sum() - f(y_, z) for y_ in (center0, *y0))

    dual = dual_values(problem, eta, fit, on, sign=sign)
    everywhere = (*z0[second], *z1[treated_on])
    np.testing.assert_allclose(dual.f, [f(y0[j], z0[j]) for j in second])
    np.testing.assert_allclose(dual.g, [g(y1[k], z1[k]) for k in treated_on])
    np.testing.assert_allclose(dual.phi, [f(center0, z) for z in everywhere])
    np.testing.assert_allclose(dual.gamma, [g(center1, z) for z in everywhere])
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


@pytest.mark.parametrize("dz", [1, 3, 6])
@pytest.mark.parametrize("sign", [1, -1])
def test_dual_values_stay_below_the_conditional_bound_in_many_dimensions_too(dz, sign):
    """Outcomes that covariates say nothing of: E(Y1 - Y0)² is 0 to 4, and no η may say more, but for chance.

    The error is that of the mean over 12 draws, which a promise that is broken by η d² exceeds a hundredfold.
    """
    even, rng = np.full(50, 1 / 50), np.random.default_rng(0)
    problems = [problem_of(*rng.normal(size=(2, 50, 1)), *rng.normal(size=(2, 50, dz)), even, even) for _ in range(12)]
    for eta in ETAS:
        values, errors = np.array([cross_fitted_dual(problem, eta, sign=sign) for problem in problems]).T
        assert values.mean() < (0 if sign > 0 else -4) + 3 * errors.mean() / np.sqrt(12) + 1e-9


def test_many_outcomes_are_thinned_to_some_that_reach_from_the_least_to_the_largest():
    y = np.random.default_rng(0).normal(size=(500, 1))
    some = duals.spread_out(y)
    assert some.shape == (64, 1)
    assert (some[0, 0], some[-1, 0]) == (y.min(), y.max())
    np.testing.assert_array_equal(duals.spread_out(np.repeat([[1.0], [0.0]], 300, axis=0)), [[0.0], [1.0]])
