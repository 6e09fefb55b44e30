"""Fronts and hypervolumes against their definitions."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful._pareto import _estimated_volume, hypervolume, pareto_front
from heedful.errors import InputError, ParameterError
from tests.conformance.typechecks import as_users_have_it

# A coarse grid makes ties and duplicates common.
clouds = st.integers(1, 4).flatmap(
    lambda k: st.lists(st.lists(st.integers(-3, 3), min_size=k, max_size=k), min_size=1, max_size=8)
)


def naive_front(points):
    """The definition, pair by pair."""
    return [not any((q >= p).all() and (q > p).any() for q in points) for p in points]


def naive_volume(points, reference):
    """Inclusion and exclusion over all subsets of boxes."""
    sizes = np.maximum(np.asarray(points, dtype=float) - reference, 0)
    return sum(
        (-1) ** (size + 1) * sizes[list(chosen)].min(axis=0).prod()
        for size in range(1, len(sizes) + 1)
        for chosen in itertools.combinations(range(len(sizes)), size)
    )


@given(clouds)
def test_front_is_the_definition_pair_by_pair(cloud):
    assert pareto_front(cloud).tolist() == naive_front(np.array(cloud))


@given(clouds)
def test_minimising_a_column_is_maximising_its_negative(cloud):
    points = np.array(cloud)
    assert np.array_equal(pareto_front(points, maximize=False), pareto_front(-points))
    directions = [k % 2 == 0 for k in range(points.shape[1])]
    assert np.array_equal(
        pareto_front(points, maximize=directions), pareto_front(np.where(directions, points, -points))
    )


def test_equal_points_share_their_fate_and_no_points_have_no_front():
    assert pareto_front([[1, 2], [1, 2], [0, 0], [0, 0]]).tolist() == [True, True, False, False]
    assert pareto_front(np.empty((0, 3))).shape == (0,)
    assert hypervolume(np.empty((0, 3)), [0, 0, 0]) == 0


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_hypervolume_is_inclusion_and_exclusion(k, seed):
    points = np.random.default_rng(seed).normal(size=(9, k))
    reference = np.full(k, -1.0)
    assert hypervolume(points, reference) == pytest.approx(naive_volume(points, reference), rel=1e-10, abs=1e-12)


@given(clouds)
def test_hypervolume_is_inclusion_and_exclusion_with_ties(cloud):
    reference = np.full(len(cloud[0]), -1.5)
    assert hypervolume(cloud, reference) == pytest.approx(naive_volume(cloud, reference), abs=1e-9)


@given(clouds, st.integers(0, 3))
def test_a_dominated_point_adds_nothing(cloud, less):
    reference = np.full(len(cloud[0]), -4.0)
    dominated = (np.array(cloud[0]) - less).tolist()
    assert hypervolume([*cloud, dominated], reference) == hypervolume(cloud, reference)


@given(clouds, st.floats(0.1, 10))
def test_hypervolume_scales_with_each_unit(cloud, unit):
    points, reference = np.array(cloud, dtype=float), np.full(len(cloud[0]), -4.0)
    scaled = hypervolume(
        points * [unit, *[1] * (points.shape[1] - 1)], reference * [unit, *[1] * (points.shape[1] - 1)]
    )
    assert scaled == pytest.approx(unit * hypervolume(points, reference), rel=1e-9)


def test_points_that_do_not_exceed_the_reference_count_nothing():
    assert hypervolume([[2, 2], [5, 0], [-1, 9]], [0, 0]) == 4


@pytest.mark.parametrize("k", [5, 8])
def test_beyond_four_columns_the_estimate_is_as_near_as_it_says(k):
    """A staircase in two columns, all alike in the others, has a known volume."""
    steps = np.arange(1.0, 6.0)
    points = np.column_stack([steps, steps[::-1], *[np.full(5, 2.0)] * (k - 2)])
    exact = hypervolume(points[:, :2], [0, 0]) * 2 ** (k - 2)
    estimates = [hypervolume(points, np.zeros(k), tolerance=0.01, random_state=seed) for seed in range(20)]
    errors = np.array(estimates) / exact - 1
    assert 0.003 < errors.std() < 0.02  # of 20 draws with a standard deviation of about 0.01
    assert abs(errors.mean()) < 4 * 0.01 / np.sqrt(20)
    assert hypervolume(points, np.zeros(k), random_state=3) == hypervolume(points, np.zeros(k), random_state=3)


@pytest.mark.parametrize("unit", [1e-60, 1e60])
def test_the_estimate_stands_units_whose_products_leave_the_range_of_floats(unit):
    """Two columns of tiny (or huge) units and four of the opposite: the volume itself is of ordinary size."""
    points = np.random.default_rng(0).random((6, 6)) + 0.5
    units = np.array([unit] * 3 + [1 / unit] * 3)
    plain = hypervolume(points, [0] * 6, random_state=1)
    assert hypervolume(points * units, [0] * 6, random_state=1) == pytest.approx(plain, rel=4e-3)
    shrunk = hypervolume(points * unit, [0] * 6, random_state=1)
    assert shrunk == (0.0 if unit < 1 else np.inf)  # the nearest floats


def test_the_estimate_agrees_with_the_exact_volume_where_both_exist():
    points = np.random.default_rng(0).random((12, 3))
    sizes = points[pareto_front(points)]
    estimate = _estimated_volume(sizes, 1e-3, np.random.default_rng(1))
    assert estimate == pytest.approx(hypervolume(points, [0, 0, 0]), rel=4e-3)  # four standard errors


def test_bad_input_is_explained():
    with pytest.raises(
        InputError, match=r"^points must have shape \(n, K\) with K >= 1; got \(3,\)\. Give one row a point\.$"
    ):
        pareto_front([1, 2, 3])
    with pytest.raises(InputError, match=r"^points has 1 entries that are NaN or infinite, the first at \(0, 1\)\."):
        hypervolume([[1, np.nan]], [0, 0])
    message = r"^reference has shape \(3,\), but the points have 2 columns\. Give one value a column\.$"
    with pytest.raises(InputError, match=message):
        hypervolume([[1, 2]], [0, 0, 0])
    for directions in ([True, False, True], "no", [1, 0]):
        with (
            as_users_have_it(),
            pytest.raises(
                ParameterError, match=r"^maximize must be True, False, or one of them for each of the 2 columns;"
            ),
        ):
            pareto_front([[1, 2]], maximize=directions)
    with pytest.raises(ParameterError, match=r"^tolerance must be a number > 0; got 0\.$"):
        hypervolume([[1, 2]], [0, 0], tolerance=0)
