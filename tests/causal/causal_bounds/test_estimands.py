import re

import numpy as np
import pytest

from heedful.causal.causal_bounds import estimands
from heedful.causal.causal_bounds.estimands import make_estimand
from heedful.errors import InputError, ParameterError

SORTABLE = ("effect_second_moment", "effect_variance", "correlation", "neyman_variance", "product")
NAMES = (*SORTABLE, "prob_benefit", "prob_harm", "effect_cdf")


def arms(seed, n=6, m=5, dy=1):
    rng = np.random.default_rng(seed)
    y0, y1 = rng.normal(size=(n, dy)), 2 + 3 * rng.normal(size=(m, dy))
    return y0, y1, rng.dirichlet(np.ones(n)), rng.dirichlet(np.ones(m))


def of_coupling(name, y0, y1, plan, threshold):
    """The estimand of a joint distribution, by its definition."""
    y0, y1, mass = y0[:, None], y1[None], plan
    mean = lambda x: (mass * x).sum()  # noqa: E731
    effect = y1 - y0
    n, m = plan.shape
    variance = mean(effect**2) - mean(effect) ** 2
    s0, s1 = (mean(y**2) - mean(y) ** 2 for y in (y0, y1))
    return {
        "effect_second_moment": mean(effect**2),
        "effect_variance": variance,
        "correlation": (mean(y0 * y1) - mean(y0) * mean(y1)) / np.sqrt(s0 * s1),
        "prob_benefit": mean(y1 > y0),
        "prob_harm": mean(y1 < y0),
        "effect_cdf": mean(effect <= threshold),
        "neyman_variance": s0 / (n - 1) + s1 / (m - 1) - variance / (n + m),
        "product": mean(y0 * y1),
    }[name]


@pytest.mark.parametrize("name", NAMES)
def test_scale_times_the_mean_of_the_cost_is_the_estimand_of_every_coupling(name, seed):
    y0, y1, a, b = arms(seed)
    estimand = make_estimand(name, y0, y1, a, b, threshold=1.5 if name == "effect_cdf" else 0.0)
    # A coupling that is not independent: mass moved round a rectangle keeps the marginals.
    plan = np.outer(a, b)
    moved = 0.9 * min(plan[0, 0], plan[1, 1])
    plan[[0, 1], [0, 1]] -= moved
    plan[[0, 1], [1, 0]] += moved
    expected = of_coupling(name, y0[:, 0], y1[:, 0], plan, 1.5)
    assert estimand.value((plan * estimand.cost(y0, y1)).sum()) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", ["effect_variance", "correlation", "neyman_variance"])
def test_far_from_zero_nothing_is_lost(name):
    """Of E[Y0 Y1] − μ0 μ1, computed like that, no digit would be left."""
    y0, y1, a, b = arms(0)
    plan = np.outer(a, b)
    near = make_estimand(name, y0, y1, a, b)
    far = make_estimand(name, y0 + 1e8, y1 + 1e8, a, b)
    means = [(plan * estimand.cost(*ys)).sum() for estimand, ys in ((near, (y0, y1)), (far, (y0 + 1e8, y1 + 1e8)))]
    assert far.value(means[1]) == pytest.approx(near.value(means[0]), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", ["effect_second_moment", "effect_variance", "product"])
def test_of_several_outcomes_an_estimand_is_the_sum(name):
    y0, y1, a, b = arms(1, dy=3)
    together = make_estimand(name, y0, y1, a, b)
    alone = sum(
        make_estimand(name, u, v, a, b).cost(u, v) for u, v in zip(y0.T[:, :, None], y1.T[:, :, None], strict=True)
    )
    np.testing.assert_allclose(together.cost(y0, y1), alone)
    assert together.sortable is None


@pytest.mark.parametrize("name", NAMES)
def test_costs_do_not_depend_on_how_many_pairs_are_compared_at_once(name, monkeypatch):
    y0, y1, a, b = arms(2, 23, 7)
    estimand = make_estimand(name, y0, y1, a, b)
    whole = estimand.cost(y0, y1)
    monkeypatch.setattr(estimands, "_BLOCK", 20)
    np.testing.assert_array_equal(estimand.cost(y0, y1), whole)


@pytest.mark.parametrize("name", SORTABLE)
def test_costs_of_pairs_are_those_of_the_matrix(name):
    y0, y1, a, b = arms(3)
    estimand = make_estimand(name, y0, y1, a, b)
    rows, columns = np.array([0, 5, 2]), np.array([4, 0, 0])
    np.testing.assert_allclose(estimand.sortable.pair(y0[rows], y1[columns]), estimand.cost(y0, y1)[rows, columns])


def test_the_own_function_of_one_outcome_gets_a_column_and_a_row():
    y0, y1, a, b = arms(4)
    shapes = []

    def gain(u, v):
        shapes.append((u.shape, v.shape))
        return np.maximum(v - u, 0)

    estimand = make_estimand(gain, y0, y1, a, b)
    np.testing.assert_array_equal(estimand.cost(y0, y1), np.maximum(y1.T - y0, 0))
    assert shapes == [((6, 1), (1, 5))]
    assert estimand.name == "gain"


def test_the_own_function_of_several_outcomes_gets_them_along_the_last_axis():
    y0, y1, a, b = arms(5, dy=2)
    estimand = make_estimand(lambda u, v: np.abs(v - u).max(axis=-1), y0, y1, a, b)
    np.testing.assert_array_equal(estimand.cost(y0, y1), np.abs(y1[None] - y0[:, None]).max(axis=-1))


def test_what_the_own_function_returned_is_not_written_to():
    y0, y1, a, b = arms(6)
    kept = np.zeros((6, 5))
    estimand = make_estimand(lambda u, v: kept, y0, y1, a, b)
    estimand.cost(y0, y1)[:] = 1
    assert not kept.any()


# Bad input


def test_an_unknown_name_is_answered_with_the_list():
    with pytest.raises(
        ParameterError,
        match=r"estimand must be one of 'effect_variance', 'effect_second_moment', 'correlation', .*; got 'ate'",
    ):
        make_estimand("ate", *arms(0))


def test_a_function_of_the_wrong_shape_is_told_the_right_one():
    message = "for y0 of shape (6, 1) and y1 of shape (1, 5) it must return (n, m) = (6, 5); it returned (6, 1)."
    with pytest.raises(InputError, match=re.escape(message)):
        make_estimand(lambda y0, y1: y0, *arms(0)).cost(*arms(0)[:2])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda y0, y1: np.log(y1 * 0 + y0 * 0 - 1), "h(y0, y1) has 30 entries that are NaN"),
        (lambda y0, y1: np.full((6, 5), "a"), "estimand must return numbers"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered in log:RuntimeWarning")
def test_a_function_that_gives_no_numbers_is_refused(function, message):
    with pytest.raises(InputError, match=re.escape(message)):
        make_estimand(function, *arms(0)).cost(*arms(0)[:2])


@pytest.mark.parametrize("name", ["correlation", "prob_benefit", "prob_harm", "effect_cdf", "neyman_variance"])
def test_what_several_outcomes_do_not_have_is_refused(name):
    with pytest.raises(InputError, match=f"estimand='{name}' is of a single outcome; got 2 columns"):
        make_estimand(name, *arms(0, dy=2))


def test_a_constant_outcome_has_no_correlation():
    y0, y1, a, b = arms(0)
    with pytest.raises(InputError, match="needs outcomes that vary; those of the treated arm do not"):
        make_estimand("correlation", y0, np.full_like(y1, 0.1), a, b)


def test_neyman_variance_needs_two_units_in_each_arm():
    with pytest.raises(InputError, match="needs two units in each arm; got 1 and 5"):
        make_estimand("neyman_variance", *arms(0, n=1))


def test_a_threshold_belongs_to_the_distribution_of_effects():
    with pytest.raises(
        ParameterError, match=r"threshold is of estimand='effect_cdf' alone; got threshold=1\.0 for 'prob_benefit'"
    ):
        make_estimand("prob_benefit", *arms(0), threshold=1.0)
    for threshold in (np.nan, "0"):
        with pytest.raises(ParameterError, match="threshold must be a number"):
            make_estimand("effect_cdf", *arms(0), threshold=threshold)
