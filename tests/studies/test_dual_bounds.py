"""Dual bounds of a regression: valid whatever it says, sharp where it is right."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.dummy import DummyRegressor
from sklearn.linear_model import LinearRegression

from heedful.data import synthetic
from heedful.studies._dual_bounds import Arms, _young_pair, binary_duals, dual_bounds, residual_duals

LAWS = {
    "normal": lambda rng, n: rng.normal(size=n),
    "skewed": lambda rng, n: rng.exponential(size=n),
    "ties": lambda rng, n: rng.integers(0, 3, n).astype(float),
    "constant": lambda rng, n: np.zeros(n),
}


@given(st.sampled_from(list(LAWS)), st.sampled_from(list(LAWS)), st.floats(0.01, 100), st.integers(0, 2**32 - 1))
def test_young_s_inequality_holds_for_all_numbers_also_beyond_the_laws(one, other, scale, seed):
    rng = np.random.default_rng(seed)
    A, B = _young_pair(scale * LAWS[one](rng, 60), LAWS[other](rng, 90))
    s, t = (spread * np.linspace(-20, 20, 81) for spread in (scale, 1.0))
    gap = A(s)[:, None] + B(t) - np.outer(s, t)
    assert gap.min() > -1e-9 * np.abs(np.outer(s, t)).max()  # a few roundings of the largest terms


def test_young_s_inequality_is_an_equation_along_the_quantiles():
    rng = np.random.default_rng(0)
    x = np.sort(rng.normal(size=1000))
    A, B = _young_pair(x, 3 * x)  # the map is three times the number
    np.testing.assert_allclose(A(x) + B(3 * x), 3 * x**2, atol=1e-4)  # ties are parted by 1e-6 a quantile


@given(st.sampled_from([1, -1]), st.integers(0, 2**32 - 1))
def test_duals_of_residuals_bound_the_squared_difference_of_any_two_outcomes(sign, seed):
    rng = np.random.default_rng(seed)
    mean = Arms(*(np.full(400, value) for value in rng.normal(scale=3, size=2)))
    residuals = Arms(rng.normal(size=50), rng.exponential(size=40))
    y = rng.normal(scale=10, size=400)
    values, _ = residual_duals(y, mean, residuals, sign)  # of outcomes y, all at one covariate
    gap = sign * (np.subtract.outer(y, y) ** 2 - values.control[:, None] - values.treated)
    assert gap.min() > -1e-9 * np.square(np.ptp(y))


@pytest.mark.parametrize("sign", [1, -1])
def test_duals_of_binary_outcomes_bound_whether_they_differ(sign):
    p0, p1 = (grid.ravel() for grid in np.meshgrid(np.linspace(-0.2, 1.2, 15), np.linspace(-0.2, 1.2, 15)))
    at = {y: binary_duals(np.full(len(p0), y), Arms(p0, p1), sign)[0] for y in (0.0, 1.0)}
    for y0 in at:
        for y1 in at:
            assert (sign * (float(y0 != y1) - at[y0].control - at[y1].treated) >= -1e-12).all()


def test_duals_of_binary_outcomes_are_sharp_for_the_right_probabilities():
    p0, p1 = np.array([0.1, 0.7, 0.8]), np.array([0.4, 0.2, 0.9])
    for sign, expected in ((1, abs(p1 - p0)), (-1, np.minimum(p0 + p1, 2 - p0 - p1))):
        _, means = binary_duals(np.zeros(3), Arms(p0, p1), sign)
        np.testing.assert_allclose(means.control + means.treated, expected, atol=1e-12)


def test_expected_duals_are_means_over_the_residuals():
    rng = np.random.default_rng(1)
    residuals = Arms(rng.normal(size=300), 2 * rng.normal(size=300))
    laws = Arms(*(values - values.mean() for values in residuals))
    for sign in (1, -1):
        for arm in (0, 1):
            mean = Arms(np.full(300, 0.5), np.full(300, -1.5))
            values, expected = residual_duals(mean[arm] + laws[arm], mean, residuals, sign)
            assert values[arm].mean() == pytest.approx(expected[arm][0], abs=1e-9)


def bounds_of(draw, model, *, n=4000, seed=0):
    trial = draw(n, random_state=seed)
    return trial, dual_bounds(trial.y, trial.treatment, trial.X, make_model=model, seed=seed)


def test_the_right_regression_gives_the_sharp_bounds():
    trial, (lower, upper) = bounds_of(synthetic.trial_linear, LinearRegression)
    # Standard errors of a second moment near 5 and 9 at n = 4000, with the seed fixed: 0.15 and 0.2.
    assert lower == pytest.approx(trial.lower, abs=0.4)
    assert upper == pytest.approx(trial.upper, abs=0.6)


class OffByTwo(LinearRegression):
    def predict(self, X):
        return super().predict(X) + 2


def test_outcomes_that_were_seen_make_up_for_a_regression_that_is_off():
    """Both means are off alike, and the residual laws equal: the duals are still those of the truth."""
    trial = synthetic.trial_linear(4000, random_state=0)
    y = trial.y + 3 * trial.treatment  # an effect whose mean is 3
    lower, upper = dual_bounds(y, trial.treatment, trial.X, make_model=OffByTwo, seed=0)
    assert lower == pytest.approx(trial.lower + 9, abs=0.8)  # a standard error of 0.3
    assert upper >= trial.upper + 9 - 0.8


@pytest.mark.parametrize("draw", [synthetic.trial_linear, synthetic.trial_square, synthetic.trial_scale])
def test_a_useless_regression_gives_bounds_no_narrower_than_the_blind_ones(draw):
    trial, (lower, upper) = bounds_of(draw, DummyRegressor)
    y0, y1 = np.sort(trial.y[~trial.treatment]), np.sort(trial.y[trial.treatment])
    blind = np.mean((y1 - y0) ** 2), np.mean((y1 - y0[::-1]) ** 2)
    assert lower <= blind[0] + 0.05  # cross-fitting loses a little, and chance is shared
    assert upper >= blind[1] - 0.05
    assert lower < trial.lower < trial.upper < upper + 0.3


def test_treated_and_control_units_may_change_names():
    trial = synthetic.trial_square(300, random_state=0)
    one, other = (
        dual_bounds(trial.y, treated, trial.X, make_model=LinearRegression, seed=0)
        for treated in (trial.treatment, ~trial.treatment)
    )
    assert one == pytest.approx(other, rel=0.05)  # folds are drawn anew


def test_bounds_of_binary_outcomes_hold_the_truth():
    rng = np.random.default_rng(0)
    z, u = rng.normal(size=(4000, 1)), rng.random(4000)
    p0, p1 = 1 / (1 + np.exp(-z[:, 0])), 1 / (1 + np.exp(2 * z[:, 0]))
    treated = rng.permutation(4000) < 2000
    y = np.where(treated, u < p1, u < p0).astype(float)
    lower, upper = dual_bounds(y, treated, z, make_model=LinearRegression, seed=0)
    assert lower == pytest.approx(abs(p1 - p0).mean(), abs=0.06)  # a standard error of 0.015; the line is nearly right
    assert upper == pytest.approx(np.minimum(p0 + p1, 2 - p0 - p1).mean(), abs=0.06)
    assert lower - 0.03 < ((u < p1) != (u < p0)).mean() < upper + 0.03
    other = dual_bounds(3 + 2.5 * y, treated, z, make_model=LinearRegression, seed=0)
    assert other == pytest.approx((2.5**2 * lower, 2.5**2 * upper))  # two values are binary whatever they are
