"""What every estimator must do: scikit-learn's contract, and what it does not check: weights, names, labels, order."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
import pytest
from sklearn.base import BaseEstimator, clone, is_classifier
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator
from sklearn.utils.validation import has_fit_parameter

from tests.conformance.generators import global_generators_stay
from tests.conformance.typechecks import as_users_have_it


@dataclasses.dataclass(frozen=True)
class EstimatorRow:
    """An estimator to check.

    Parameters
    ----------
    name : str
        What the test is called.
    make : callable
        ``make()`` gives an unfitted estimator with its randomness fixed.
    data : callable
        ``data()`` gives ``X, y`` as arrays of 60 rows or so: for a classifier, labels 0, 1, ...
    tolerance : float
        Up to which two fits that are equal in exact arithmetic agree: the solver's.
    expected_failures : mapping
        scikit-learn's check -> reason why it must fail.
    exclusions : mapping
        Name of a check of this module that must fail -> reason.
    """

    name: str
    make: Callable[[], BaseEstimator]
    data: Callable[[], tuple[np.ndarray, np.ndarray]]
    tolerance: float = 1e-6
    expected_failures: Mapping[str, str] = dataclasses.field(default_factory=dict)
    exclusions: Mapping[str, str] = dataclasses.field(default_factory=dict)


def result(estimator: BaseEstimator, X) -> np.ndarray:
    """What a fitted estimator says of X, in numbers."""
    for method in ("predict_proba", "decision_function", "transform", "predict", "score_samples"):
        if hasattr(estimator, method):
            return np.asarray(getattr(estimator, method)(X), dtype=np.float64)
    raise TypeError(f"{type(estimator).__name__} says nothing of X")


def check_scikit_learn_contract(row: EstimatorRow) -> None:
    """All of ``check_estimator``; an expected failure that passes is stale."""
    with warnings.catch_warnings(), as_users_have_it():
        # Its data are made to be hard: a solver that says so does what it should.
        warnings.simplefilter("ignore", ConvergenceWarning)
        expected = dict(row.expected_failures)
        done = check_estimator(row.make(), expected_failed_checks=expected, on_skip=None, on_fail=None)
    failed = [f"{check['check_name']}: {check['exception']!r}" for check in done if check["status"] == "failed"]
    assert not failed, "\n".join(failed)
    stale = set(row.expected_failures) - {check["check_name"] for check in done if check["status"] == "xfail"}
    assert not stale, f"expected failures that do not fail: {', '.join(sorted(stale))}"


def check_fit_and_clone(row: EstimatorRow) -> None:
    X, y = row.data()
    estimator = row.make()
    before = repr(estimator.get_params())
    assert estimator.fit(X, y) is estimator, "fit must return self"
    assert repr(estimator.get_params()) == before, "fit changed a parameter"
    expected = result(estimator, X)
    twin = clone(estimator)
    assert repr(twin.get_params()) == before, "a clone has other parameters"
    with pytest.raises(NotFittedError):
        result(twin, X)
    assert np.array_equal(result(twin.fit(X, y), X), expected), "a clone fits to another result"
    again = estimator.fit(X[::2], y[::2]).fit(X, y)
    assert np.array_equal(result(again, X), expected), "a second fit remembers the first"


def check_inputs_stay(row: EstimatorRow) -> None:
    """Arrays are as before, and may be read-only, as those of a memory map are."""
    X, y = row.data()
    arrays = {"X": X, "y": y, "sample_weight": np.linspace(1.0, 2.0, len(X))}
    before = {name: array.copy() for name, array in arrays.items()}
    settings = {"sample_weight": arrays["sample_weight"]} if has_fit_parameter(row.make(), "sample_weight") else {}
    expected = result(row.make().fit(X, y, **settings), X)
    for name, array in arrays.items():
        assert np.array_equal(array, before[name]), f"fit or prediction changed {name}"
        array.flags.writeable = False
    assert np.array_equal(result(row.make().fit(X, y, **settings), X), expected), "read-only arrays give another result"


def check_sample_weight(row: EstimatorRow) -> None:
    """Weight two is the row twice, weight zero is no row, and weight one everywhere is no weight."""
    X, y = row.data()
    if not has_fit_parameter(row.make(), "sample_weight"):
        return
    times = np.random.default_rng(0).integers(0, 4, len(X))
    repeated = result(row.make().fit(np.repeat(X, times, axis=0), np.repeat(y, times)), X)
    plain = result(row.make().fit(X, y), X)
    assert not np.allclose(plain, repeated, atol=10 * row.tolerance), "the data show no weights"
    weighted = result(row.make().fit(X, y, sample_weight=times.astype(float)), X)
    message = "weights are not repetitions"
    np.testing.assert_allclose(weighted, repeated, rtol=0, atol=row.tolerance, err_msg=message)
    even = result(row.make().fit(X, y, sample_weight=np.ones(len(X))), X)
    message = "weights of one are not no weights"
    np.testing.assert_allclose(even, plain, rtol=0, atol=row.tolerance, err_msg=message)


def check_order_of_rows_is_nothing(row: EstimatorRow) -> None:
    X, y = row.data()
    order = np.random.default_rng(0).permutation(len(X))
    shuffled = result(row.make().fit(X[order], y[order]), X)
    message = "the order of the rows changed the result"
    np.testing.assert_allclose(shuffled, result(row.make().fit(X, y), X), rtol=0, atol=row.tolerance, err_msg=message)
    fitted = row.make().fit(X, y)
    chunks = np.concatenate([result(fitted, X[:7]), result(fitted, X[7:])])
    message = "in two chunks the rows get other results"  # sums in blocks of another size: the last bits
    np.testing.assert_allclose(chunks, result(fitted, X), rtol=1e-10, atol=1e-12, err_msg=message)


def check_labels_are_names(row: EstimatorRow) -> None:
    """Classes under other names, in another sort order, permute the columns and do no more."""
    X, y = row.data()
    if not is_classifier(row.make()):
        return
    plain = row.make().fit(X, y)
    names = np.array([f"class {9 - label}" for label in range(10)], dtype=object)[y]
    named = row.make().fit(X, names)
    assert list(named.classes_) == sorted(set(names)), "classes_ must be the sorted labels"
    assert set(named.predict(X)) <= set(names), "predict gives something that is no label"
    if hasattr(plain, "predict_proba"):
        left, right = named.predict_proba(X)[:, ::-1], plain.predict_proba(X)
        message = "names of classes changed the result"
        np.testing.assert_allclose(left, right, rtol=0, atol=row.tolerance, err_msg=message)


def check_pipeline_and_search(row: EstimatorRow) -> None:
    X, y = row.data()
    expected = result(row.make().fit(X, y), X)
    pipeline = make_pipeline(FunctionTransformer(np.copy), row.make()).fit(X, y)
    assert np.array_equal(result(pipeline, X), expected), "in a pipeline the estimator gives another result"
    assert np.array_equal(result(clone(pipeline).fit(X, y), X), expected), "a cloned pipeline gives another result"
    scoring = None if hasattr(row.make(), "score") else lambda fitted, X, y=None: 0.0
    search = GridSearchCV(pipeline, {"functiontransformer__validate": [False, True]}, cv=2, scoring=scoring).fit(X, y)
    assert np.array_equal(result(search.best_estimator_, X), expected), "a grid search refits to another result"


def check_set_output(row: EstimatorRow) -> None:
    """A transformer gives a DataFrame on request, with its feature names and the index of the input."""
    X, y = row.data()
    if not hasattr(row.make(), "transform"):
        return
    expected = row.make().fit(X, y).transform(X)
    frame = pd.DataFrame(X, columns=[f"f{i}" for i in range(X.shape[1])], index=np.arange(len(X)) + 100)
    estimator = row.make()
    assert hasattr(estimator, "set_output"), "a transformer must have set_output"
    out = estimator.set_output(transform="pandas").fit(frame, y).transform(frame)
    assert isinstance(out, pd.DataFrame), "set_output(transform='pandas') gives no DataFrame"
    assert list(out.columns) == list(estimator.get_feature_names_out()), "columns are not get_feature_names_out()"
    assert out.index.equals(frame.index), "the index of the input is lost"
    np.testing.assert_allclose(out.to_numpy(), expected, err_msg="as a DataFrame the values differ")


def check_global_generators_stay(row: EstimatorRow) -> None:
    X, y = row.data()
    estimator = row.make()
    if "random_state" in estimator.get_params():
        estimator.set_params(random_state=0)
    with global_generators_stay("fit or prediction"):
        first = result(estimator.fit(X, y), X)
    assert np.array_equal(result(clone(estimator).fit(X, y), X), first), "two fits with one random_state differ"


CHECKS = (
    check_scikit_learn_contract,
    check_fit_and_clone,
    check_inputs_stay,
    check_sample_weight,
    check_order_of_rows_is_nothing,
    check_labels_are_names,
    check_pipeline_and_search,
    check_set_output,
    check_global_generators_stay,
)
