import json
import re
import tracemalloc

import matplotlib
import numpy as np
import pytest
from scipy.optimize import linprog
from sklearn.base import clone
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from heedful import progress
from heedful.causal import Bounds, CovariateAwareBounds, covariate_bounds
from heedful.causal.causal_bounds import bounds as module
from heedful.causal.causal_bounds.duals import Problem
from heedful.errors import HeedfulWarning, InputError, ParameterError
from tests.conformance.generators import global_generators_stay
from tests.conformance.typechecks import as_users_have_it

ESTIMANDS = (
    "effect_second_moment",
    "effect_variance",
    "correlation",
    "prob_benefit",
    "prob_harm",
    "effect_cdf",
    "neyman_variance",
    "product",
)


def ends(found):
    return np.array([found.lower, found.upper])


def sum_squared(y0, y1):
    return (y0 + y1) ** 2


def gaussian_value(eta, b0, b1, v0=1.0, v1=1.0):
    """E(Y0 + Y1)² under the coupling that is optimal at η, for Y = b Z + ε with normal Z and ε."""
    p0, p1, q = b0**2 + v0, b1**2 + v1, np.sqrt(v0 * v1)
    root = np.sqrt(p0 * p1 - 2 * eta * b0 * b1 + eta**2 + 2 * eta * q)
    return p0 + p1 - 2 * (p0 * p1 - eta * b0 * b1 + eta * q) / root


def least_mean(cost, a, b):
    """The least mean cost over all couplings, by the linear programme."""
    n, m = cost.shape
    marginals = np.vstack([np.kron(np.eye(n), np.ones(m)), np.kron(np.ones(n), np.eye(m))])
    return linprog(cost.ravel(), A_eq=marginals, b_eq=np.concatenate([a, b]), bounds=(0, None), method="highs").fun


def weighted_arms(y, treated, propensity):
    a, b = 1 / (1 - propensity[~treated]), 1 / propensity[treated]
    return y[~treated], y[treated], a / a.sum(), b / b.sum()


# What the population says


def test_the_closed_form_itself_runs_from_the_blind_to_the_conditional_bound():
    assert gaussian_value(0, 0.6, 1.6) == pytest.approx((np.sqrt(1.36) - np.sqrt(3.56)) ** 2)
    assert gaussian_value(1e9, 0.6, 1.6) == pytest.approx(2.2**2)


def test_bounds_of_gaussian_data_are_those_of_the_closed_form(linear_trial):
    """Both sides: E(Y1 − Y0)² is 2 E[Y0²] + 2 E[Y1²] − E(Y0 + Y1)².

    0.2 is more than the upward bias of arms of 1000 (about 0.1 at η = 5) and three standard errors of five draws.
    """
    etas = [0.0, 1.0, 5.0]
    found = np.zeros((2, 3))
    for seed in range(5):
        y, treated, z = linear_trial(1000, seed)
        for i, eta in enumerate(etas):
            settings = {"eta": eta, "covariate_scale": None}
            found[:, i] += ends(covariate_bounds(y, treated, z, estimand="effect_second_moment", **settings)) / 5
    lower = [gaussian_value(eta, 0.6, -1.6) for eta in etas]
    upper = [2 * (1.36 + 3.56) - gaussian_value(eta, 0.6, 1.6) for eta in etas]
    np.testing.assert_allclose(found, [lower, upper], atol=0.2)


def test_weights_undo_an_assignment_that_depends_on_the_covariate():
    """Blind bounds of the effect's variance are (σ0 ∓ σ1)². Without weights they come out 12 to 23 % too small."""
    rng = np.random.default_rng(0)
    z, noise = rng.normal(size=(2, 40_000))
    propensity = np.clip(1 / (1 + np.exp(-z)), 0.02, 0.98)
    treated = rng.random(len(z)) < propensity
    y = np.where(treated, 3.0 * z + 5, z) + noise
    sigma0, sigma1 = np.sqrt(2), np.sqrt(10)
    expected = [(sigma1 - sigma0) ** 2, (sigma1 + sigma0) ** 2]
    np.testing.assert_allclose(ends(covariate_bounds(y, treated, propensity=propensity)), expected, rtol=0.05)
    assert not np.allclose(ends(covariate_bounds(y, treated)), expected, rtol=0.05)


def test_an_interval_with_covariates_lies_inside_the_blind_one_and_eta_auto_comes_close_to_the_truth(linear_trial):
    """V_c of E(Y0 + Y1)² is 4.84 below and 8.84 above; blind 0.52 and 9.32."""
    y, treated, z = linear_trial(400, 1)
    found = covariate_bounds(y, treated, z, estimand=sum_squared, random_state=0)
    assert found.lower_blind < 1
    assert 3.5 < found.lower < 5.5
    assert 8 < found.upper <= found.upper_blind
    assert found.width == found.upper - found.lower


# Estimands at one η


@pytest.mark.parametrize("name", ESTIMANDS)
def test_bounds_are_the_extremes_of_the_linear_programme(name, small_trial, seed):
    y, treated, _, propensity = small_trial(seed)
    y = np.round(y)  # with ties
    if name == "neyman_variance":
        propensity = np.full(len(y), 0.5)
    threshold = 1.0 if name == "effect_cdf" else 0.0
    y0, y1, a, b = weighted_arms(y, treated, propensity)
    n, m = len(y0), len(y1)
    mean0, mean1, u, v = a @ y0, b @ y1, y0[:, None], y1[None]
    s0, s1 = a @ (y0 - mean0) ** 2, b @ (y1 - mean1) ** 2
    cost, scale, offset = {
        "effect_second_moment": ((v - u) ** 2, 1, 0),
        "effect_variance": ((v - u) ** 2, 1, -((mean1 - mean0) ** 2)),
        "correlation": (u * v, 1 / np.sqrt(s0 * s1), -mean0 * mean1 / np.sqrt(s0 * s1)),
        "prob_benefit": (v > u, 1, 0),
        "prob_harm": (v < u, 1, 0),
        "effect_cdf": (v - u <= threshold, 1, 0),
        "neyman_variance": (
            -((v - u) ** 2) / (n + m),
            1,
            s0 / (n - 1) + s1 / (m - 1) + (mean1 - mean0) ** 2 / (n + m),
        ),
        "product": (u * v, 1, 0),
    }[name]
    cost = cost * 1.0
    expected = [scale * least_mean(cost, a, b) + offset, -scale * least_mean(-cost, a, b) + offset]
    found = covariate_bounds(y, treated, estimand=name, threshold=threshold, propensity=propensity)
    np.testing.assert_allclose(ends(found), expected, atol=1e-8)
    assert (found.lower_blind, found.upper_blind) == (found.lower, found.upper)


@pytest.mark.parametrize("eta", [0.0, 0.7, 30.0])
def test_estimands_of_the_same_coupling_agree(eta, small_trial, seed):
    y, treated, z, propensity = small_trial(seed, 30, 20)
    bound = lambda name, **more: ends(  # noqa: E731
        covariate_bounds(y, treated, z, **({"estimand": name, "eta": eta, "propensity": propensity} | more))
    )
    y0, y1, a, b = weighted_arms(y, treated, propensity)
    mean0, mean1 = a @ y0, b @ y1
    np.testing.assert_allclose(bound("effect_variance"), bound("effect_second_moment") - (mean1 - mean0) ** 2)
    sigmas = np.sqrt((a @ (y0 - mean0) ** 2) * (b @ (y1 - mean1) ** 2))
    np.testing.assert_allclose(bound("correlation"), (bound("product") - mean0 * mean1) / sigmas, atol=1e-9)
    if eta > 0:  # where h and d² break no tie the coupling of benefits is that of its complement
        np.testing.assert_allclose(bound("effect_cdf"), 1 - bound("prob_benefit")[::-1], atol=1e-9)
    classical = y0.var(ddof=1) / 30 + y1.var(ddof=1) / 20
    equal = {"propensity": None}
    neyman = classical - bound("effect_variance", **equal)[::-1] / 50
    np.testing.assert_allclose(bound("neyman_variance", **equal), neyman)


@pytest.mark.parametrize("eta", [0.0, 2.0])
def test_the_negative_cost_swaps_and_negates_the_bounds(eta, small_trial, seed):
    y, treated, z, propensity = small_trial(seed, 15, 12)
    settings = {"eta": eta, "propensity": propensity}
    plain = covariate_bounds(y, treated, z, estimand=lambda u, v: np.sin(3 * u * v), **settings)
    negative = covariate_bounds(y, treated, z, estimand=lambda u, v: -np.sin(3 * u * v), **settings)
    np.testing.assert_allclose(ends(negative), -ends(plain)[::-1], atol=1e-12)


def test_an_estimand_may_be_a_function(small_trial):
    y, treated, z, _ = small_trial(0)
    named = covariate_bounds(y, treated, z, estimand="effect_second_moment", eta=1.0)
    own = covariate_bounds(y, treated, z, estimand=lambda u, v: (v - u) ** 2, eta=1.0)
    np.testing.assert_allclose(ends(own), ends(named))
    assert covariate_bounds(y, treated, z, estimand=sum_squared, eta=1.0).estimand == "sum_squared"


def test_sorted_quantiles_of_arms_of_unequal_size():
    """Three controls by four treated: each stands for four or three of twelve ranks."""
    y0, y1 = np.array([3.0, 0.0, 10.0]), np.array([1.0, 7.0, -2.0, 4.0])
    low, high = np.repeat(np.sort(y0), 4), np.repeat(np.sort(y1), 3)
    y, treated = np.concatenate([y0, y1]), np.arange(7) >= 3
    found = covariate_bounds(y, treated, estimand="effect_second_moment")
    np.testing.assert_allclose(ends(found), [np.mean((high - low) ** 2), np.mean((high[::-1] - low) ** 2)], rtol=1e-12)
    expected = [np.corrcoef(low, high[::-1])[0, 1], np.corrcoef(low, high)[0, 1]]
    np.testing.assert_allclose(ends(covariate_bounds(y, treated, estimand="correlation")), expected, rtol=1e-12)


@pytest.mark.parametrize(("events0", "events1"), [(3, 7), (7, 3), (5, 5), (9, 6), (0, 10)])
def test_benefit_of_a_binary_outcome_has_frechets_bounds(events0, events1):
    y = np.concatenate([np.arange(10) < events0, np.arange(10) < events1])
    p0, p1 = events0 / 10, events1 / 10
    found = covariate_bounds(y, np.arange(20) >= 10, estimand="prob_benefit")
    np.testing.assert_allclose(ends(found), [max(0, p1 - p0), min(p1, 1 - p0)], atol=1e-12)


def test_with_no_variance_of_the_effect_to_subtract_neymans_variance_is_the_classical_one():
    y0 = np.array([3.0, -1.0, 4.0, 1.5, -5.0])
    found = covariate_bounds(np.concatenate([y0, y0[::-1] + 2]), np.arange(10) >= 5, estimand="neyman_variance")
    assert found.upper == pytest.approx(2 * y0.var(ddof=1) / 5)


def test_variances_are_never_negative_and_correlations_never_beyond_one():
    y = np.array([0.1, 0.2, 0.3, 0.7, 1.1, 1.2, 1.3, 1.7]) + 1e6
    treated = np.arange(8) >= 4
    variance = covariate_bounds(y, treated, np.arange(8.0) % 4, eta=5.0)
    assert 0 <= variance.lower <= variance.upper
    correlation = covariate_bounds(y, treated, np.arange(8.0) % 4, estimand="correlation", eta=5.0)
    assert -1 <= correlation.lower <= correlation.upper <= 1


def test_several_outcomes_are_coupled_together(seed):
    """Coupled one by one each would reach its own bound; together they cannot do better than the sum."""
    rng = np.random.default_rng(seed)
    y, treated = rng.normal(size=(24, 2)), np.arange(24) % 2 == 1
    together = covariate_bounds(y, treated, estimand="effect_second_moment")
    alone = [covariate_bounds(y[:, j], treated, estimand="effect_second_moment") for j in (0, 1)]
    assert together.lower >= alone[0].lower + alone[1].lower - 1e-12
    assert together.upper <= alone[0].upper + alone[1].upper + 1e-12
    even = np.full(12, 1 / 12)
    cost = ((y[treated][None] - y[~treated][:, None]) ** 2).sum(axis=2)
    np.testing.assert_allclose(
        ends(together), [least_mean(cost, even, even), -least_mean(-cost, even, even)], atol=1e-8
    )


# Covariates


def test_covariates_that_do_not_vary_leave_the_blind_bounds(small_trial):
    y, treated, _, _ = small_trial(0, 20, 15)
    blind = covariate_bounds(y, treated)
    with pytest.warns(HeedfulWarning, match="covariates do not vary in column 0, 1: dropped"):
        constant = covariate_bounds(y, treated, np.ones((35, 2)), eta=[0.0, 1.0, 100.0])
    np.testing.assert_array_equal(ends(constant), ends(blind))
    assert constant.path["eta"].tolist() == [0.0]


@pytest.mark.parametrize("eta", [1e6, np.inf])
def test_two_arms_with_the_same_distinct_covariates_are_matched_pair_by_pair_in_the_end(eta, seed):
    rng = np.random.default_rng(seed)
    z, y = np.arange(12.0), rng.normal(size=24)
    found = covariate_bounds(y, np.arange(24) >= 12, np.tile(z, 2), eta=eta, estimand="effect_second_moment")
    np.testing.assert_allclose(ends(found), np.mean((y[12:] - y[:12]) ** 2), rtol=1e-9)
    assert found.path["mismatch_lower"] == pytest.approx(0, abs=1e-12)


def test_paths_are_monotone_and_end_on_either_side_inside_the_blind_interval(linear_trial):
    y, treated, z = linear_trial(60, 0)
    for name in ESTIMANDS:
        found = covariate_bounds(y, treated, z, estimand=name, random_state=0)
        path = found.path
        assert len(path["eta"]) == 14
        assert path["eta"][0] == 0
        assert (np.diff(path["lower"]) >= -1e-9).all()
        assert (np.diff(path["upper"]) <= 1e-9).all()
        assert (np.diff(path["mismatch_lower"]) <= 1e-9).all()
        assert (np.diff(path["mismatch_upper"]) <= 1e-9).all()
        assert (path["lower"] <= path["upper"]).all()
        assert (path["lower"][0], path["upper"][0]) == (found.lower_blind, found.upper_blind)
        assert found.lower == path["lower"][path["eta"] == found.eta_lower]
        assert found.upper == path["upper"][path["eta"] == found.eta_upper]


@pytest.mark.parametrize("name", ESTIMANDS)
def test_a_number_in_place_of_auto_gives_the_bounds_of_that_place_of_the_path(name, linear_trial):
    y, treated, z = linear_trial(30, 0)
    path = covariate_bounds(y, treated, z, estimand=name, random_state=0).path
    for i in (0, 5, 9):
        found = covariate_bounds(y, treated, z, estimand=name, eta=float(path["eta"][i]))
        np.testing.assert_allclose(ends(found), [path["lower"][i], path["upper"][i]], rtol=1e-9)
        assert found.eta_lower == found.eta_upper == path["eta"][i]
        assert found.path["dual_lower"] is None


def variants(y, treated, z, propensity):
    """What must not matter: another order of the units, another origin of the covariates, every unit twice."""
    order = np.random.default_rng(1).permutation(len(y))
    yield y[order], treated[order], z[order], propensity[order]
    yield y, treated, z + np.array([100.0, -3.0]), propensity
    yield np.repeat(y, 2), np.repeat(treated, 2), np.repeat(z, 2, axis=0), np.repeat(propensity, 2)


@pytest.mark.parametrize("name", ESTIMANDS[:-2])
@pytest.mark.parametrize("scale", ["standardize", "mahalanobis", None])
def test_order_origin_and_repetition_of_units_do_not_matter(name, scale, small_trial):
    y, treated, z, propensity = small_trial(0, 25, 18)
    settings = {"estimand": name, "eta": 0.8, "covariate_scale": scale}
    plain = ends(covariate_bounds(y, treated, z, propensity=propensity, **settings))
    for y_, treated_, z_, propensity_ in variants(y, treated, z, propensity):
        again = ends(covariate_bounds(y_, treated_, z_, propensity=propensity_, **settings))
        np.testing.assert_allclose(again, plain, rtol=1e-9)


def test_covariates_times_c_are_covariates_at_eta_times_c_squared(small_trial):
    y, treated, z, _ = small_trial(0, 25, 18)
    plain = covariate_bounds(y, treated, z, eta=2.0, covariate_scale=None)
    scaled = covariate_bounds(y, treated, 7 * z, eta=2.0 / 49, covariate_scale=None)
    np.testing.assert_allclose(ends(scaled), ends(plain), rtol=1e-9)


def test_swapping_the_arms_is_the_transposed_cost(small_trial):
    y, treated, z, propensity = small_trial(0, 25, 18)
    plain = covariate_bounds(y, treated, z, estimand=lambda u, v: u**3 * np.exp(v), eta=2.0, propensity=propensity)
    swapped = covariate_bounds(
        y, ~treated, z, estimand=lambda u, v: v**3 * np.exp(u), eta=2.0, propensity=1 - propensity
    )
    np.testing.assert_allclose(ends(swapped), ends(plain), rtol=1e-9)
    benefit = covariate_bounds(y, treated, z, estimand="prob_benefit", eta=2.0)
    harm = covariate_bounds(y, ~treated, z, estimand="prob_harm", eta=2.0)
    np.testing.assert_allclose(ends(harm), ends(benefit), rtol=1e-9)


def test_constant_propensities_are_as_good_as_none(small_trial):
    y, treated, z, _ = small_trial(0, 12, 12)
    results = [covariate_bounds(y, treated, z, eta=1.0, propensity=p) for p in (None, 0.5, np.full(24, 0.5), 0.3)]
    for found in results[1:]:
        np.testing.assert_allclose(ends(found), ends(results[0]), rtol=1e-12)
    (note,) = results[0].notes
    assert note.startswith("No propensity was given: treatment is taken to be assigned completely at random. If it was")
    assert results[1].notes == ()


def test_neymans_variance_refuses_propensities_that_differ(small_trial):
    y, treated, z, propensity = small_trial(0)
    with pytest.raises(
        ParameterError, match="difference in means, which is no estimate of the effect where propensities"
    ):
        covariate_bounds(y, treated, z, estimand="neyman_variance", eta=1.0, propensity=propensity)


# The choice of η


def test_eta_is_where_the_dual_bound_less_half_its_error_is_tightest(linear_trial):
    y, treated, z = linear_trial(80, 3)
    found = covariate_bounds(y, treated, z, random_state=0)
    path = found.path
    assert found.eta_lower == path["eta"][np.argmax(path["dual_lower"] - path["error_lower"] / 2)]
    assert found.eta_upper == path["eta"][np.argmin(path["dual_upper"] + path["error_upper"] / 2)]
    assert 0 < found.eta_lower < path["eta"][-1]
    assert (path["error_lower"] > 0).all()


def test_a_dual_value_that_is_all_error_does_not_choose_eta(monkeypatch, linear_trial):
    """One unit far out can lift it at a large η, and its error with it."""
    y, treated, z = linear_trial(20, 0)
    values = {1.0: (2.0, 0.5), 10.0: (3.0, 1.0), 100.0: (9.0, 20.0)}
    monkeypatch.setattr(module, "cross_fitted_dual", lambda problem, eta, *, sign: values[float(eta)])
    found = covariate_bounds(y, treated, z, eta=[1.0, 10.0, 100.0])
    assert (found.eta_lower, found.eta_upper) == (10.0, 10.0)


def test_of_a_sequence_eta_is_chosen_alike_and_its_order_is_nothing(linear_trial):
    y, treated, z = linear_trial(40, 0)
    found = covariate_bounds(y, treated, z, eta=[3.0, 0.5, 100.0], random_state=0)
    again = covariate_bounds(y, treated, z, eta=np.array([100.0, 0.5, 3.0, 3.0]), random_state=0)
    assert found.path["eta"].tolist() == [0.5, 3.0, 100.0]
    assert found.to_dict() == again.to_dict()
    assert found.lower_blind < found.path["lower"][0]


def test_units_of_measurement_choose_the_same_coupling(linear_trial):
    y, treated, z = linear_trial(40, 0)
    plain = covariate_bounds(y, treated, z, covariate_scale=None, random_state=0)
    scaled = covariate_bounds(1e-6 * y, treated, 1e3 * z, covariate_scale=None, random_state=0)
    np.testing.assert_allclose(ends(scaled), 1e-12 * ends(plain), rtol=1e-6)
    assert scaled.eta_lower == pytest.approx(1e-18 * plain.eta_lower, rel=1e-6)


def test_without_effects_to_couple_eta_is_zero(small_trial):
    _, treated, z, _ = small_trial(0, 20, 20)
    found = covariate_bounds(np.ones(40), treated, z)
    assert (found.lower, found.upper, found.eta_lower, found.eta_upper) == (0.0, 0.0, 0.0, 0.0)


def test_matching_alone_is_never_chosen_over_a_price(linear_trial):
    y, treated, z = linear_trial(30, 0)
    assert covariate_bounds(y, treated, z, eta=[1.0, np.inf], random_state=0).eta_lower == 1.0


def test_a_random_state_settles_the_folds(linear_trial):
    y, treated, z = linear_trial(30, 0)
    results = [covariate_bounds(y, treated, z, confidence=0.9, random_state=0).to_dict() for _ in range(2)]
    assert results[0] == results[1]
    assert results[0] != covariate_bounds(y, treated, z, confidence=0.9, random_state=1).to_dict()
    with global_generators_stay("covariate_bounds"):
        covariate_bounds(y, treated, z, random_state=np.random.default_rng(0))


# Confidence


def test_limits_stay_in_the_range_of_the_estimand(linear_trial):
    """Blind bounds of a correlation are near −1 and 1, and limits lie further out."""
    y, treated, _ = linear_trial(30, 0)
    intervals = {
        name: covariate_bounds(y, treated, estimand=name, confidence=0.9999, random_state=0).confidence_interval
        for name in ("correlation", "prob_harm", "effect_variance")
    }
    assert intervals["correlation"] == (-1.0, 1.0)
    assert intervals["prob_harm"] == (0.0, 1.0)
    assert intervals["effect_variance"][0] == 0.0


def test_the_price_of_a_limit_is_chosen_by_units_that_do_not_evaluate_it(linear_trial, monkeypatch):
    chosen, evaluated = [], []
    safest, dual_values = module._safest, module.dual_values

    def noted_choice(problem, *settings):
        chosen.append({*problem.trial.y0.ravel(), *problem.trial.y1.ravel()})
        return safest(problem, *settings)

    def noted_value(problem, eta, fit, on, *, sign):
        units = problem.trial.take(*on)
        evaluated.append({*units.y0.ravel(), *units.y1.ravel()})
        return dual_values(problem, eta, fit, on, sign=sign)

    monkeypatch.setattr(module, "_safest", noted_choice)
    monkeypatch.setattr(module, "dual_values", noted_value)
    covariate_bounds(*linear_trial(40, 0), eta=[0.0, 3.0, 30.0], confidence=0.9, random_state=0)
    assert len(chosen) == 4  # two sides in two directions
    for choice, value in zip(chosen, evaluated, strict=True):
        assert choice.isdisjoint(value)
        assert len(choice) == len(value) == 40


def test_a_price_with_a_large_error_makes_no_limit(linear_trial, monkeypatch):
    duals = {0.0: (0.5, 0.1), 3.0: (4.0, 1.0), 30.0: (6.0, 3.0)}
    monkeypatch.setattr(module, "cross_fitted_dual", lambda problem, eta, *, sign: duals[eta])
    problem, etas = Problem(None, None, None), np.array([0.0, 3.0, 30.0])
    assert [module._safest(problem, etas, quantile, 1) for quantile in (0.5, 2.0, 5.0)] == [30.0, 3.0, 0.0]


def test_an_interval_contains_both_bounds_and_grows_with_the_confidence(linear_trial):
    y, treated, z = linear_trial(100, 0)
    intervals = [
        covariate_bounds(
            y, treated, z, estimand="product", confidence=level, eta=3.0, random_state=0
        ).confidence_interval
        for level in (0.5, 0.9, 0.99)
    ]
    assert intervals[2][0] < intervals[1][0] < intervals[0][0] < intervals[0][1] < intervals[1][1] < intervals[2][1]
    assert covariate_bounds(y, treated, z, eta=3.0).confidence_interval is None


@pytest.mark.slow
def test_intervals_cover_the_bounds_of_the_population(linear_trial):
    """V_c of E(Y0 + Y1)² is 4.84 and 8.84. At 90 % either end is missed in 5 % of draws, and here η is chosen too.

    Of 40 draws more than 7 misses at one end have a chance below 1 in 500 if they are as rare as they should be.
    """
    misses = np.zeros(2)
    for seed in range(40):
        y, treated, z = linear_trial(60, seed)
        found = covariate_bounds(y, treated, z, estimand=sum_squared, confidence=0.9, random_state=seed)
        low, high = found.confidence_interval
        misses += [low > 4.84, high < 8.84]
    assert (misses <= 7).all()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("name", "low", "high"), [("effect_variance", 0.1937, 3.8063), ("correlation", -0.9031, 0.9031)]
)
def test_limits_are_as_far_from_the_bounds_as_these_vary(name, low, high, weighted):
    """Y0 is standard normal and Y1 standard exponential: sorted alike E[Y0 Y1] is 0.9032, whatever the weights.

    The distance of a limit from its middle is quantile · standard error. Middles vary 1.1 to 1.4 times as much at this
    size, since the functions that the other fold fitted vary too, which moves them outwards from the bounds alone.
    """
    stated, middles = [], []
    for seed in range(80):
        rng = np.random.default_rng(seed)
        propensity = rng.uniform(0.2, 0.8, 240) if weighted else np.full(240, 0.5)
        treated = rng.random(240) < propensity
        y = np.where(treated, rng.exponential(size=240), rng.normal(size=240))
        settings = {"estimand": name, "eta": 0.0, "propensity": propensity, "random_state": seed}
        near, far = (
            np.array(covariate_bounds(y, treated, np.arange(240.0), confidence=level, **settings).confidence_interval)
            for level in (0.05, 0.1)
        )
        stated.append(np.abs(far - near) / 0.0629507)  # between the normal quantiles of 0.525 and 0.55
        middles.append(near + [1, -1] * np.abs(far - near) / 0.0629507 * 0.0627068)
    np.testing.assert_allclose(np.mean(middles, axis=0), [low, high], atol=0.25)
    ratio = np.std(middles, axis=0) / np.mean(stated, axis=0)
    assert (ratio > 0.8).all()
    assert (ratio < 1.5).all()


# Large problems


def test_beyond_max_points_subsamples_are_averaged_with_a_warning(linear_trial):
    y, treated, z = linear_trial(100, 0)
    message = (
        "100 by 100 units are more than max_points=50 squared: bounds are averages over 5 subsamples of 50 of 100 control "
        "and 50 of 100 treated units."
    )
    settings = {"eta": [0.0, 1.0, 10.0], "max_points": 50, "random_state": 0}
    with pytest.warns(HeedfulWarning, match=f"^{re.escape(message)}$"):
        found = covariate_bounds(y, treated, z, **settings)
    assert found.notes[-1] == "Averages over 5 subsamples of 50 of 100 control and 50 of 100 treated units."
    assert (found.n_control, found.n_treated) == (100, 100)
    whole = covariate_bounds(y, treated, z, eta=[0.0, 1.0, 10.0], max_points=None, random_state=0)
    np.testing.assert_allclose(found.path["lower"], whole.path["lower"], atol=1.0)  # a third of the variance of Y1
    with pytest.warns(HeedfulWarning, match="subsamples"):
        assert covariate_bounds(y, treated, z, **settings).to_dict() == found.to_dict()


def test_subsamples_are_drawn_at_random_from_all_units(linear_trial):
    y, treated, z = linear_trial(60, 0)
    with pytest.warns(HeedfulWarning, match="5 subsamples of 30 of 60 control"):
        plans = [
            CovariateAwareBounds(eta=1.0, max_points=30, random_state=seed)
            .fit(z[:, None], y, treatment=treated)
            .plan_lower_
            for seed in (0, 1)
        ]
    for axis in (0, 1):
        often, other = (np.round(plan.sum(axis=axis) * 5 * 30) for plan in plans)  # in how many subsamples a unit is
        assert set(often) >= {1, 2, 3, 4}
        assert not np.array_equal(often, other)


def test_subsamples_keep_the_ratio_of_the_arms(linear_trial):
    y, treated, z = linear_trial(90, 0)
    keep = treated | (np.cumsum(~treated) <= 40)
    with pytest.warns(HeedfulWarning, match="20 of 40 control and 45 of 90 treated"):
        covariate_bounds(y[keep], treated[keep], z[keep], eta=1.0, max_points=30, random_state=0)


def test_subsamples_are_never_too_small_for_folds(linear_trial):
    y, treated, z = linear_trial(30, 0)
    with pytest.warns(HeedfulWarning, match="10 of 30 control and 10 of 30 treated"):
        covariate_bounds(y, treated, z, max_points=2, random_state=0)
    with pytest.warns(HeedfulWarning, match="20 of 30 control and 20 of 30 treated"):
        covariate_bounds(y, treated, z, eta=1.0, confidence=0.9, max_points=2, random_state=0)
    with pytest.warns(HeedfulWarning, match="2 of 30 control and 2 of 30 treated"):
        covariate_bounds(y, treated, z, eta=1.0, max_points=2, random_state=0)


def test_what_sorting_solves_needs_no_subsample(linear_trial):
    y, treated, _ = linear_trial(100, 0)
    assert ends(covariate_bounds(y, treated, max_points=2)).tolist() == ends(covariate_bounds(y, treated)).tolist()


def test_entropic_bounds_come_with_a_note_and_near_the_exact_ones(linear_trial):
    y, treated, z = linear_trial(60, 0)
    exact = covariate_bounds(y, treated, z, eta=3.0)
    found = covariate_bounds(y, treated, z, eta=3.0, solver="sinkhorn")
    np.testing.assert_allclose(ends(found), ends(exact), atol=0.2)
    assert "entropic plans, extrapolated to zero entropy" in found.notes[-1]
    finer = covariate_bounds(y, treated, z, eta=3.0, solver="sinkhorn", reg=0.05)
    assert np.abs(ends(finer) - ends(exact)).max() < 0.05


def test_a_path_takes_four_matrices_of_pairs():
    """As NumPy counts them: h, d², their sum, the plan. What POT keeps inside is not among them."""
    rng = np.random.default_rng(0)
    y, z = rng.normal(size=(2, 1600))
    tracemalloc.start()
    covariate_bounds(y, np.arange(1600) % 2, z, eta=[1.0, 5.0], random_state=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4.5 * 8 * 800**2


# Reports and the estimator


def test_a_report_is_json_and_a_picture(linear_trial):
    matplotlib.use("Agg")
    y, treated, z = linear_trial(30, 0)
    found = covariate_bounds(y, treated, z, confidence=0.9, random_state=0)
    again = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert again["path"]["lower"] == found.path["lower"].tolist()
    ax = found.plot()
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("η", "effect_variance")
    assert ax.get_xscale() == "symlog"
    assert covariate_bounds(y, treated).plot(ax) is ax
    matplotlib.pyplot.close("all")


def test_progress_is_reported(linear_trial):
    y, treated, z = linear_trial(20, 0)
    events = []
    with progress(events.append):
        covariate_bounds(y, treated, z, eta=[1.0, 2.0, 3.0], random_state=0)
    expected = [(phase, i, 3) for phase in ("transport", "dual values") for _ in range(2) for i in (1, 2, 3)]
    assert [(event.phase, event.done, event.total) for event in events] == expected


@pytest.mark.parametrize("eta", [0.0, 4.0, "auto"])
def test_the_plans_of_the_estimator_attain_its_bounds(eta, small_trial):
    y, treated, z, propensity = small_trial(0, 20, 15)
    fitted = CovariateAwareBounds(estimand="product", eta=eta, random_state=0)
    assert fitted.fit(z, y, treatment=treated, propensity=propensity) is fitted
    assert isinstance(fitted.bounds_, Bounds)
    y0, y1, a, b = weighted_arms(y, treated, propensity)
    for plan, value in ((fitted.plan_lower_, fitted.bounds_.lower), (fitted.plan_upper_, fitted.bounds_.upper)):
        np.testing.assert_allclose(plan.sum(axis=1), a)
        np.testing.assert_allclose(plan.sum(axis=0), b)
        assert (plan * np.outer(y0, y1)).sum() == pytest.approx(value)
    same = covariate_bounds(y, treated, z, estimand="product", eta=eta, propensity=propensity, random_state=0)
    assert fitted.bounds_.to_dict() == same.to_dict()


def test_plans_of_subsamples_are_averaged(linear_trial):
    y, treated, z = linear_trial(60, 0)
    fitted = CovariateAwareBounds(eta=4.0, max_points=20, random_state=0)
    with pytest.warns(HeedfulWarning, match="subsamples"):
        fitted.fit(z[:, None], y, treatment=treated)
    assert fitted.plan_lower_.sum() == pytest.approx(1)
    centred = y[treated][None] - y[~treated][:, None] - (y[treated].mean() - y[~treated].mean())
    assert (fitted.plan_lower_ * centred**2).sum() == pytest.approx(fitted.bounds_.lower)


def test_the_estimator_works_in_a_pipeline_and_clones(small_trial):
    y, treated, z, propensity = small_trial(0, 20, 15)
    estimator = CovariateAwareBounds(eta=2.0, covariate_scale=None)
    pipeline = make_pipeline(StandardScaler(), estimator)
    settings = {"treatment": treated, "propensity": propensity}
    pipeline.fit(z, y, **{f"covariateawarebounds__{name}": value for name, value in settings.items()})
    expected = covariate_bounds(y, treated, z, eta=2.0, propensity=propensity)
    np.testing.assert_allclose(ends(pipeline[-1].bounds_), ends(expected))
    twin = clone(pipeline[-1])
    assert twin.get_params() == estimator.get_params()
    assert not hasattr(twin, "bounds_")


class OfEveryOtherRow(CovariateAwareBounds):
    """scikit-learn's checks know no treatment."""

    def fit(self, X, y):
        return super().fit(X, y, treatment=np.arange(len(y)) % 2)


def test_the_estimator_keeps_scikit_learns_contract():
    expected = {"check_dtype_object": "entries that are no numbers raise an InputError, which is no TypeError"}
    with as_users_have_it():
        done = check_estimator(OfEveryOtherRow(eta=1.0), expected_failed_checks=expected, on_skip=None, on_fail=None)
    failed = [f"{check['check_name']}: {check['exception']!r}" for check in done if check["status"] == "failed"]
    assert not failed, "\n".join(failed)
    assert {check["check_name"] for check in done if check["status"] == "xfail"} == set(expected)


# Bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eta": -1.0}, "eta must be a number >= 0; got -1.0."),
        ({"eta": float("nan")}, "eta must be a number >= 0; got nan."),
        ({"eta": [1.0, -2.0]}, "eta must be a number >= 0; got -2.0."),
        ({"eta": []}, "eta must be 'auto', a number >= 0 or a sequence of such; got []."),
        ({"eta": None}, "eta must be a number >= 0; got None."),
        ({"eta": "best"}, "eta must be 'auto', a number >= 0 or a sequence of such; got 'best'."),
        (
            {"estimand": "ate"},
            "estimand must be one of 'effect_variance', 'effect_second_moment', 'correlation', 'prob_",
        ),
        ({"covariate_scale": "robust"}, "covariate_scale must be one of 'standardize', 'mahalanobis', None; got"),
        ({"confidence": 95}, "confidence must be a number > 0 and <= 1; got 95."),
        ({"confidence": 1.0}, "confidence must be below 1 and eta finite; got confidence=1.0 and eta='auto'."),
        (
            {"confidence": 0.9, "eta": np.inf},
            "confidence must be below 1 and eta finite; got confidence=0.9 and eta=inf.",
        ),
        ({"solver": "simplex"}, "solver must be one of 'emd', 'sinkhorn'; got 'simplex'."),
        ({"reg": 0.0}, "reg must be a number > 0"),
        ({"reg": 0.1}, "reg is of solver='sinkhorn' alone; got reg=0.1 for 'emd'."),
        ({"max_points": 1}, "max_points must be an int >= 2; got 1."),
        ({"max_points": 10.5}, "max_points must be an int >= 2; got 10.5."),
        ({"random_state": "a"}, "random_state must be None, an int >= 0"),
    ],
)
@pytest.mark.parametrize("error", [ParameterError, ValueError])
def test_wrong_settings_are_refused_in_words(settings, message, error, small_trial):
    y, treated, z, _ = small_trial(0, 20, 20)
    with pytest.raises(error, match=re.escape(message)):
        covariate_bounds(y, treated, z, **settings)


@pytest.mark.parametrize("eta", ["auto", [1.0, 2.0]])
def test_arms_too_small_for_folds_ask_for_a_number(eta, small_trial):
    y, treated, z, _ = small_trial(0, 12, 9)
    message = "Choosing eta takes at least 10 units in each arm; got 12 and 9. Pass one number as eta."
    with pytest.raises(InputError, match=re.escape(message)):
        covariate_bounds(y, treated, z, eta=eta)
    covariate_bounds(y, treated, z, eta=1.0)
    covariate_bounds(y, treated)


@pytest.mark.parametrize("n_covariates", [1, 6])
def test_covariates_that_say_nothing_do_not_narrow_the_interval_however_many_they_are(n_covariates):
    """E(Y1 - Y0)² is 0 to 4, with them and without. Limits that a promise broken by η d² had lifted would miss 8 of 8."""
    missed = np.zeros((2, 2))
    for seed in range(8):
        rng = np.random.default_rng(seed)
        y, z, treated = rng.normal(size=100), rng.normal(size=(100, n_covariates)), rng.permutation(100) < 50
        for i, covariates in enumerate((z, None)):
            found = covariate_bounds(
                y, treated, covariates, estimand="effect_second_moment", confidence=0.9, random_state=seed
            )
            low, high = found.confidence_interval
            assert low < high
            missed[i] += [low > 0, high < 4]
    assert (missed[0] <= missed[1] + 2).all()


def test_confidence_needs_folds_of_folds(small_trial):
    y, treated, z, _ = small_trial(0, 25, 19)
    with pytest.raises(InputError, match="confidence takes at least 20 units in each arm; got 25 and 19"):
        covariate_bounds(y, treated, z, eta=1.0, confidence=0.9)


def test_a_series_is_no_table_of_covariates_for_the_estimator():
    with pytest.raises(InputError, match=r"X must have shape \(n, number of covariates\); got \(4,\). Reshape one"):
        CovariateAwareBounds(eta=1.0).fit(np.arange(4.0), np.arange(4.0), treatment=[0, 1, 0, 1])


def test_the_constants_are_those_of_the_documentation():
    assert len(module._GRID) == 14
    assert module._GRID[[0, 1, -1]].tolist() == [0.0, pytest.approx(0.1), pytest.approx(1000)]
    assert module._REPEATS == 5
