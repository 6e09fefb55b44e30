import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.estimator_checks import check_estimator

from heedful.errors import InputError
from heedful.timeseries._series import as_series, validate_series
from tests.conformance.typechecks import as_users_have_it


def refusal(X, **settings):
    with pytest.raises(InputError) as error:
        as_series(X, **settings)
    return str(error.value)


def draw(*shape):
    return np.random.default_rng(0).standard_normal(shape)


def test_two_axes_are_univariate_cases():
    X = draw(4, 7)
    series = as_series(X)
    np.testing.assert_array_equal(series.cases, X[:, None])
    assert series.lengths.tolist() == [7] * 4
    assert series.equal_length
    assert series.n_channels == 1


def test_three_axes_are_taken_as_they_are_without_a_copy_and_protected():
    X = draw(4, 2, 7)
    series = as_series(X)
    assert np.shares_memory(series.cases, X)
    with pytest.raises(ValueError, match="read-only"):
        series.cases[0, 0, 0] = 1
    X[0, 0, 0] = 5  # the caller's own array stays writable


@pytest.mark.parametrize("make", [list, tuple, lambda cases: np.array([*cases, None], dtype=object)[:-1]], ids=str)
def test_cases_of_different_lengths_stay_as_they_are(make):
    cases = [draw(2, 5) + 9, draw(2, 3) + 9, draw(2, 4) + 9]
    before = [case.copy() for case in cases]
    series = as_series(make(cases))
    assert series.lengths.tolist() == [5, 3, 4]
    assert not series.equal_length
    assert series.n_channels == 2
    for mine, case, copy in zip(cases, series.cases, before, strict=True):
        np.testing.assert_array_equal(case, copy)
        assert np.shares_memory(mine, case)  # however long another one is
        with pytest.raises(ValueError, match="read-only"):
            case[0, 0] = 1


def test_vectors_of_different_lengths_are_univariate_cases():
    series = as_series([[1, 2, 3, 4], [5, 6, 7]])
    assert [case.tolist() for case in series.cases] == [[[1, 2, 3, 4]], [[5, 6, 7]]]


@given(n=st.integers(1, 5), d=st.integers(1, 3), length=st.integers(3, 9), dtype=st.sampled_from("fdilB"))
def test_a_list_of_equal_cases_is_the_array_of_them(n, d, length, dtype):
    X = (10 * draw(n, d, length) % 50).astype(dtype)
    from_list, from_array = as_series(list(X)), as_series(X)
    np.testing.assert_array_equal(from_list.cases, from_array.cases)
    assert from_list.cases.dtype == np.float64
    np.testing.assert_array_equal(from_array.cases, X)


def test_frames_and_object_arrays_of_numbers_are_arrays():
    X = draw(4, 5)
    for given_ in (pd.DataFrame(X), X.astype(object), X.tolist()):
        np.testing.assert_array_equal(as_series(given_).cases[:, 0], X)
    column = pd.Series(list(X))  # a series in each cell
    np.testing.assert_array_equal(as_series(column).cases[:, 0], X)
    assert as_series(pd.Series([X[0], X[1, :4]])).lengths.tolist() == [5, 4]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_located_and_imputing_offered(bad):
    X = draw(6, 2, 8)
    X[4, 1, 3] = X[4, 1, 7] = X[5, 0, 0] = bad
    assert refusal(X) == (
        "case 4 of X has 2 values that are NaN or infinite, the first in channel 1 at time point 3. Impute them, for instance "
        "with aeon.transformations.collection.SimpleImputer; or, if the case merely begins later or ends earlier, cut it "
        "there and pass a list of arrays (channels, time points)."
    )
    assert refusal([*X, draw(2, 5)]).startswith("case 4 of X has 2 values that are NaN or infinite")


@pytest.mark.parametrize(
    ("X", "message"),
    [
        (
            np.ones((4, 1)),
            "X: at least 3 time points are needed, got n_features = 1. Found 1 feature(s) (shape=(4, 1)) while a minimum of 3 "
            "is required.",
        ),
        (
            np.ones((4, 2, 2)),
            "X: at least 3 time points are needed, got 2. The axes are (cases, channels, time points); its shape is (4, 2, 2).",
        ),
        (
            [np.ones((2, 5)), np.ones((2, 2))],
            "case 1 of X: at least 3 time points are needed, got shape (2, 2). Leave it out.",
        ),
        (
            [np.ones((2, 5)), np.ones((3, 4))],
            "case 1 of X has shape (3, 4); it must be (2, time points), as case 0 has.",
        ),
        ([np.ones((1, 2, 5)), np.ones(4)], "case 0 of X has shape (1, 2, 5); it must be (channels, time points)."),
        (
            np.ones(5),
            "X must have shape (cases, time points) or (cases, channels, time points); got shape (5,). Reshape your data: a "
            "single univariate case is X.reshape(1, -1).",
        ),
        (np.ones((0, 5)), "X has no cases: its shape is (0, 5)."),
        ([], "X has no cases: its shape is (0, 0)."),
        (np.ones((5, 0, 4)), "X has no channels: its shape is (5, 0, 4)."),
        (sparse.eye_array(5), "X is a sparse matrix; series are dense. Pass X.toarray()."),
        (
            np.ones((4, 5)) * 1j,
            "X is complex. Complex data not supported: pass real and imaginary parts as channels.",
        ),
        (np.array([["1", "2", "3"]]), "X must hold numbers; got <U1. Convert it first."),
        (np.array([["1", 2, 3]], dtype=object), "X must hold numbers; got text. Convert it first."),
        ([["1", "2", "3"], ["1", "2"]], "case 0 of X must hold numbers; got <U1. Convert it first."),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_a_wrong_layout_says_what_is_needed(X, message):
    assert refusal(X) == message


def test_a_case_of_ragged_channels_is_named():
    assert refusal([[[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5]]]).startswith(
        "case 1 of X has channels of different lengths: "
    )


def test_messages_use_the_name_and_the_minimum_they_are_given():
    assert refusal(np.ones((2, 4)), name="the test set", min_length=5).startswith(
        "the test set: at least 5 time points"
    )


class Means(TransformerMixin, BaseEstimator):
    """The smallest estimator on ``validate_series``; two points will do, for scikit-learn's checks use no more."""

    def fit(self, X, y=None):
        validate_series(self, X, reset=True, min_length=2)
        return self

    def transform(self, X):
        series = validate_series(self, X, reset=False, min_length=2)
        return np.stack([case.mean(axis=1) for case in series.cases])


def test_estimators_built_on_it_pass_scikit_learns_checks():
    with as_users_have_it():
        done = check_estimator(Means(), on_skip=None, on_fail=None)
    assert not [check for check in done if check["status"] == "failed"]


def test_fit_remembers_channels_and_length():
    estimator = Means().fit(draw(4, 2, 7))
    assert (estimator.n_channels_in_, estimator.n_timepoints_in_) == (2, 7)
    with pytest.raises(InputError) as error:
        estimator.transform(draw(4, 3, 7))
    assert str(error.value) == (
        "the cases of X have 3 channels, but Means was fitted on 2. The axes are (cases, channels, time points)."
    )
    for longer in (draw(4, 2, 8), [draw(2, 7), draw(2, 8)]):
        with pytest.raises(InputError, match="8 time points, but Means was fitted on cases of 7"):
            estimator.transform(longer)


def test_after_a_fit_on_different_lengths_any_length_will_do():
    estimator = Means().fit([draw(2, 7), draw(2, 5)])
    assert estimator.n_timepoints_in_ is None
    for X in (draw(3, 2, 4), draw(3, 2, 11), [draw(2, 3), draw(2, 30)]):
        assert estimator.transform(X).shape == (len(X), 2)


def test_univariate_cases_may_come_with_or_without_the_axis_of_channels():
    X = draw(5, 6)
    estimator = Means().fit(X)
    np.testing.assert_array_equal(estimator.transform(X[:, None]), estimator.transform(X))
    np.testing.assert_array_equal(Means().fit(X[:, None]).transform(X), estimator.transform(X))
    with pytest.raises(InputError, match="X has 5 features, but Means is expecting 6 features as input"):
        estimator.transform(X[:, :5])


def test_names_of_columns_are_kept_and_compared():
    frame = pd.DataFrame(draw(5, 3), columns=["jan", "feb", "mar"])
    estimator = Means().fit(frame)
    assert estimator.feature_names_in_.tolist() == ["jan", "feb", "mar"]
    with pytest.raises(InputError, match="feature names should match"):
        estimator.transform(frame[["mar", "feb", "jan"]])


def test_a_second_fit_forgets_what_the_first_knew_of_columns():
    estimator = Means().fit(pd.DataFrame(draw(5, 3), columns=["jan", "feb", "mar"]))
    estimator.fit(draw(5, 2, 6))
    assert not hasattr(estimator, "n_features_in_")
    assert not hasattr(estimator, "feature_names_in_")
