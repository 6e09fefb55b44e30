import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from heedful._validation import as_probabilities, require_choice, require_finite, require_number
from heedful.errors import HeedfulWarning, InputError, ParameterError
from tests.conformance.typechecks import as_users_have_it

logits = arrays(np.float64, st.tuples(st.integers(0, 5), st.integers(2, 4)), elements=st.floats(-1e6, 1e6))


def exactly(message):
    return f"^{re.escape(message)}$"


def test_require_finite_counts_and_locates():
    x = np.ones((3, 2))
    assert require_finite(x, "X") is x
    x[1, 1], x[2, 0] = np.nan, np.inf
    message = "X has 2 entries that are NaN or infinite, the first at (1, 1). Remove those rows or impute them."
    with pytest.raises(InputError, match=exactly(message)):
        require_finite(x, "X")


@given(logits)
def test_logits_become_rows_of_sum_one_in_the_same_order(z):
    P = as_probabilities(z, input="logits")
    assert P.shape == z.shape
    np.testing.assert_allclose(P.sum(axis=1), 1, rtol=1e-14)
    assert (np.take_along_axis(P, z.argsort(axis=1), axis=1)[:, 1:] >= np.sort(P, axis=1)[:, :-1] - 1e-15).all()


@given(logits, st.floats(-1e3, 1e3))
def test_logits_mean_the_same_when_shifted(z, shift):
    left, right = as_probabilities(z, input="logits"), as_probabilities(z + shift, input="logits")
    np.testing.assert_allclose(left, right, atol=1e-9)  # z + shift rounds at 1e6: 1e-10 in a logit


@given(logits)
def test_probabilities_pass_through(z):
    P = as_probabilities(z, input="logits")
    np.testing.assert_allclose(as_probabilities(P), P, rtol=1e-15)
    single = P.astype(np.float32)  # rows are off by less than 1e-6: no warning, and equal entries stay equal
    again = as_probabilities(single)
    assert again.dtype == np.float64
    np.testing.assert_array_equal(again, single)


def test_the_input_is_not_changed():
    P = np.array([[0.3002, 0.7]])
    with pytest.warns(HeedfulWarning):
        as_probabilities(P)
    assert P.tolist() == [[0.3002, 0.7]]


def test_rows_a_little_off_are_renormalised_with_a_warning():
    message = "P: 1 rows sum to 1 only within 2.0e-04; they were renormalised."
    with pytest.warns(HeedfulWarning, match=exactly(message)):
        P = as_probabilities([[0.3002, 0.7], [0.5, 0.5]])
    np.testing.assert_allclose(P.sum(axis=1), 1, rtol=1e-15)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([0.2, 0.8], "P must have shape (n, K) with K >= 2 columns; got shape (2,): give both columns, e.g. "
                     "np.column_stack([1 - p, p])."),
        ([[0.2], [0.8]], "P must have shape (n, K) with K >= 2 columns; got shape (2, 1): give one column per class."),
        ([[0.5, 0.5], [2.0, -1.0]], "P must hold probabilities; row 1 has minimum -1 and sum 1. Are these logits? "
                                    "Pass input='logits'."),
        ([[0.5, 0.5], [0.5, 0.4]], "P must hold probabilities; row 1 has minimum 0.4 and sum 0.9. Are these logits? "
                                   "Pass input='logits'."),
        ([[0.5, np.nan]], "P has 1 entries that are NaN or infinite, the first at (0, 1). Remove those rows or impute "
                          "them."),
    ],
)  # fmt: skip
def test_what_is_no_probability_is_refused(values, message):
    with pytest.raises(InputError, match=exactly(message)):
        as_probabilities(values)


@pytest.mark.parametrize("values", [[["a", "b"]], [[0.5, 0.5], [1.0]], [[0.5, {}]]])
def test_what_is_no_array_of_numbers_is_refused(values):
    with pytest.raises(InputError, match=r"^P must be an array of numbers of shape \(n, K\); "):
        as_probabilities(values)


def test_what_the_input_holds_is_never_guessed():
    message = exactly("input must be one of 'proba', 'logits'; got 'probs'.")
    with as_users_have_it(), pytest.raises(ParameterError, match=message):
        as_probabilities([[0.5, 0.5]], input="probs")


@pytest.mark.parametrize(
    ("value", "bounds", "message"),
    [
        (-0.1, {"low": 0}, "rho must be a number >= 0; got -0.1."),
        (0, {"low": 0, "open_low": True}, "rho must be a number > 0; got 0."),
        (2, {"low": 0, "high": 1}, "rho must be a number >= 0 and <= 1; got 2."),
        (float("nan"), {}, "rho must be a number; got nan."),
        ("1", {"high": 2}, "rho must be a number <= 2; got '1'."),
        (True, {}, "rho must be a number; got True."),
        (1.0, {"low": 1, "integer": True}, "rho must be an int >= 1; got 1.0."),
        (None, {"integer": True}, "rho must be an int; got None."),
        (1j, {}, "rho must be a number; got 1j."),
    ],
)
def test_numbers_out_of_range_are_refused(value, bounds, message):
    with pytest.raises(ParameterError, match=exactly(message)):
        require_number(value, "rho", **bounds)


@pytest.mark.parametrize("value", [0, 1, 0.5, np.float32(0.5), np.int64(1), np.float64(0.0)])
def test_numbers_in_range_pass(value):
    require_number(value, "rho", low=0, high=1)


def test_infinity_is_a_number_unless_bounded():
    require_number(float("inf"), "tilt", low=0)
    with pytest.raises(ParameterError):
        require_number(float("inf"), "tilt", low=0, high=1e300)


def test_choices():
    require_choice(None, "mode", ("a", None))
    with pytest.raises(ParameterError, match=exactly("mode must be one of 'a', None; got 'b'.")):
        require_choice("b", "mode", ("a", None))
    with pytest.raises(ParameterError, match="got array"):
        require_choice(np.arange(2), "mode", ("a", None))
