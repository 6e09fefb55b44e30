import re
import sys

import numpy as np
import pandas as pd
import pytest

from heedful.causal.causal_bounds.trial import read_trial, squared_distances
from heedful.errors import HeedfulWarning, InputError, ParameterError

Y, W = np.arange(6.0), np.array([0, 1, 0, 1, 1, 0])
Z = np.array([[1.0, 10.0], [2.0, 30.0], [4.0, 20.0], [8.0, 50.0], [3.0, 40.0], [5.0, 10.0]])


def distances(trial):
    return squared_distances(trial.z0, trial.z1)


@pytest.mark.parametrize(
    "treatment", [W, W.astype(bool), W.astype(float), W.tolist(), pd.Series(W, index=range(9, 3, -1))]
)
def test_units_keep_their_order_inside_the_arms(treatment):
    trial = read_trial(Y, treatment, Z)
    np.testing.assert_array_equal(trial.y0[:, 0], [0, 2, 5])
    np.testing.assert_array_equal(trial.y1[:, 0], [1, 3, 4])
    np.testing.assert_array_equal(trial.z0, Z[[0, 2, 5]])
    np.testing.assert_array_equal(trial.a, np.full(3, 1 / 3))


def test_weights_are_inverse_propensities_that_sum_to_one():
    e = np.array([0.5, 0.25, 0.8, 0.5, 0.5, 0.5])
    trial = read_trial(Y, W, propensity=e)
    np.testing.assert_allclose(trial.a, np.array([2, 5, 2]) / 9)
    np.testing.assert_allclose(trial.b, np.array([4, 2, 2]) / 8)
    part = trial.take(np.array([1, 0]), np.array([2]))
    np.testing.assert_allclose(part.a, [5 / 7, 2 / 7])
    np.testing.assert_allclose(part.b, [1])


@pytest.mark.parametrize("propensity", [None, 0.5, 0.2, np.full(6, 0.3)])
def test_a_propensity_that_is_the_same_for_all_gives_equal_weights(propensity):
    trial = read_trial(Y, W, propensity=propensity)
    np.testing.assert_allclose(trial.a, 1 / 3, rtol=1e-15)
    np.testing.assert_allclose(trial.b, 1 / 3, rtol=1e-15)


def test_standardized_covariates_have_unit_variance_over_all_units():
    trial = read_trial(Y, W, Z, covariate_scale="standardize")
    z = np.vstack([trial.z0, trial.z1])
    np.testing.assert_allclose(z.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(z.std(axis=0), 1)


@pytest.mark.parametrize("scale", ["standardize", "mahalanobis"])
@pytest.mark.parametrize("unit", [1e-200, 1e-20, 1e160, 1e300])
def test_no_unit_of_measurement_is_too_small_or_too_large_to_be_scaled(unit, scale):
    ours, plain = (read_trial(Y, W, Z * [unit_, 1], covariate_scale=scale) for unit_ in (unit, 1))
    np.testing.assert_allclose(distances(ours), distances(plain), rtol=1e-9)


def test_mahalanobis_distances_are_those_of_the_inverse_covariance():
    trial = read_trial(Y, W, Z, covariate_scale="mahalanobis")
    difference = Z[W == 0][:, None] - Z[W == 1]
    inverse = np.linalg.inv(np.cov(Z, rowvar=False, ddof=0))
    np.testing.assert_allclose(distances(trial), np.einsum("ijk,kl,ijl->ij", difference, inverse, difference))


def test_mahalanobis_distances_do_not_change_under_a_linear_map_nor_when_a_column_is_repeated():
    plain = read_trial(Y, W, Z, covariate_scale="mahalanobis")
    mapped = read_trial(Y, W, Z @ [[1.0, 1e3], [-2.0, 5.0]], covariate_scale="mahalanobis")
    repeated = read_trial(Y, W, Z[:, [0, 1, 1]], covariate_scale="mahalanobis")
    np.testing.assert_allclose(distances(mapped), distances(plain), rtol=1e-8)
    np.testing.assert_allclose(distances(repeated), distances(plain), rtol=1e-8)


def test_without_scale_distances_are_those_of_the_numbers_given():
    trial = read_trial(Y, W, Z[:, 0])
    np.testing.assert_allclose(distances(trial), (Z[W == 0, 0][:, None] - Z[W == 1, 0]) ** 2)


@pytest.mark.parametrize("dtype", ["object", "category", "string"])
@pytest.mark.parametrize("scale", ["standardize", "mahalanobis", None])
def test_two_levels_of_a_category_are_at_distance_one_whatever_the_scale(dtype, scale):
    levels = np.array(["red", "blue", "red", "green", "blue", "red"])
    trial = read_trial(Y, W, pd.DataFrame({"colour": pd.Series(levels, dtype=dtype)}), covariate_scale=scale)
    expected = levels[W == 0][:, None] != levels[W == 1]
    np.testing.assert_allclose(distances(trial), expected.astype(float), atol=1e-12)


def test_numbers_in_a_data_frame_are_those_of_an_array():
    frame = pd.DataFrame({"a": Z[:, 0].astype(int), "b": Z[:, 1]}, index=[3, 1, 4, 1, 5, 9])
    np.testing.assert_array_equal(read_trial(Y, W, frame).z1, Z[W == 1])
    np.testing.assert_array_equal(read_trial(Y, W, frame["b"]).z1, Z[W == 1, 1:])
    frame["c"] = Z[:, 0] > 3
    np.testing.assert_array_equal(read_trial(Y, W, frame).z0[:, 2], Z[W == 0, 0] > 3)
    nullable = pd.DataFrame({"a": pd.array([1, 2, 4, 8, 3, 5], dtype="Int64")})
    np.testing.assert_array_equal(read_trial(Y, W, nullable).z0, Z[W == 0, :1])


def test_columns_that_do_not_vary_are_dropped_with_a_warning():
    with pytest.warns(HeedfulWarning, match=r"^covariates do not vary in column 1: dropped\.$"):
        trial = read_trial(Y, W, np.column_stack([Z[:, 0], np.full(6, 0.1)]), covariate_scale="standardize")
    assert trial.z0.shape == (3, 1)
    frame = pd.DataFrame({"x": Z[:, 0], "where": "here", "two": 2})
    with pytest.warns(HeedfulWarning, match="do not vary in column 'where', 'two': dropped"):
        assert read_trial(Y, W, frame).z0.shape == (3, 1)


def test_arrays_are_read_without_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert read_trial(Y, W, Z, propensity=0.5, covariate_scale="mahalanobis").z0.shape == (3, 2)


def test_propensities_near_zero_or_one_are_warned_of_by_count():
    message = r"^2 of 6 propensities are within 0\.01 of 0 or 1: a few units carry most of the weight\.$"
    with pytest.warns(HeedfulWarning, match=message):
        read_trial(Y, W, propensity=[0.5, 0.5, 0.001, 0.5, 0.995, 0.5])


# Bad input


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"treatment": [1, 2, 1, 2, 2, 1]}, "treatment must be 0 or 1, or bool; its values are 1, 2. Pass treatment =="),
        ({"treatment": [*"abcdef"]}, "treatment must be 0 or 1, or bool; its values are 'a', 'b', 'c', 'd', 'e', …. Pass"),
        ({"treatment": [0, 1, 0, 1, np.nan, 1]}, "its values are 0.0, 1.0, nan."),
        ({"treatment": np.array([0, 1, None, 1, 0, 1], dtype=object)}, "its values are 0, 1, None."),
        ({"treatment": np.zeros(6)}, "Bounds need units in both arms; all 6 values of treatment are 0.0."),
        ({"treatment": [0, 1]}, "treatment must be one 0 or 1 a unit, 6 as in outcome; got shape (2,)."),
        ({"outcome": [*"abcdef"]}, "outcome must be numbers; could not convert string"),
        ({"outcome": np.array([0, 1, 2, np.inf, 3, 4])}, "outcome has 1 entries that are NaN or infinite"),
        ({"outcome": np.zeros((6, 1, 1))}, "outcome must have shape (n,) or (n, number of outcomes), n >= 2; got (6, 1, 1)."),
        ({"outcome": Y * 1j}, "Complex data not supported"),
        ({"covariates": np.where(Z == 2, np.nan, Z)}, "NaN or infinite entries in column 0. Remove those rows"),
        ({"covariates": pd.DataFrame(Z, columns=["age", "dose"]).replace(50.0, np.inf)}, "infinite entries in column 'dose'."),
        ({"covariates": pd.DataFrame({"site": ["a", None, "b", "a", "b", None]})}, "have 2 missing entries in column 'site'."),
        ({"covariates": pd.DataFrame({"on": pd.date_range("2020", periods=6)})}, "hold dates or times in column 'on'."),
        ({"covariates": pd.DataFrame({"odd": [1, "a", 2, "b", 3, 4]})}, "must hold numbers or categories in column 'odd'"),
        ({"covariates": np.array([*"abcdef"])}, "covariates, unless categories in a pandas DataFrame, must be numbers"),
        ({"covariates": Z[:5]}, "covariates must have one row a unit, 6 as in outcome; got 5."),
        ({"covariates": np.zeros((6, 1, 1))}, "covariates must have shape (n, number of covariates); got (6, 1, 1)."),
        ({"covariates": np.zeros((6, 0))}, "covariates have 0 feature(s) (shape=(6, 0)) while a minimum of 1 is required."),
        ({"propensity": [0.5, 0.5, 0.0, 0.5, 1.2, np.nan]}, "propensity must lie between 0 and 1; 3 of 6 do not."),
        ({"propensity": 1.0}, "propensity must lie between 0 and 1; 1 of 1 do not."),
        ({"propensity": [0.5, 0.5]}, "propensity must be one number, or one a unit, 6; got shape (2,)."),
        ({"propensity": "w"}, "propensity must be numbers; could not convert"),
    ],
)  # fmt: skip
def test_wrong_input_is_refused_in_words(changed, message):
    given = {"outcome": Y, "treatment": W, "covariates": Z} | changed
    with pytest.raises(InputError, match=re.escape(message)):
        read_trial(**given)


@pytest.mark.parametrize("name", ["outcome", "covariates"])
def test_sparse_matrices_are_refused(name):
    from scipy.sparse import csr_array

    with pytest.raises(InputError, match=rf"sparse matrix. Pass a dense array, {name}\.toarray\(\)"):
        read_trial(**({"outcome": Y, "treatment": W, "covariates": Z} | {name: csr_array(Z)}))


def test_an_unknown_scale_is_refused():
    with pytest.raises(
        ParameterError, match="covariate_scale must be one of 'standardize', 'mahalanobis', None; got 'robust'"
    ):
        read_trial(Y, W, Z, covariate_scale="robust")


def test_rounding_is_no_variation_of_a_covariate():
    almost = np.where(np.arange(8) < 4, 0.3, 0.1 + 0.2)
    with pytest.warns(HeedfulWarning, match=r"^covariates do not vary in column 0: dropped\.$"):
        trial = read_trial(np.arange(8.0), np.arange(8) % 2, np.column_stack([almost, np.arange(8.0)]))
    assert trial.z0.shape[1] == 1
