"""What scikit-learn, aeon and this library ask of every estimator."""

import inspect
import warnings

import numpy as np
import pytest
import sklearn.utils.estimator_checks as sklearn_checks
from aeon.testing.estimator_checking import check_estimator as check_aeon_estimator

from heedful.timeseries import ReservoirClassifier, SARCClassifier, SpectralReservoir
from heedful.timeseries.sarc._aeon import SARCAeonClassifier
from tests.conformance import cases
from tests.conformance.estimators import CHECKS, EstimatorRow, check_scikit_learn_contract
from tests.conformance.typechecks import as_users_have_it


def three_classes():
    rng = np.random.default_rng(0)
    y = np.arange(60) % 3
    return np.sin(np.arange(30) * (0.3 + 0.1 * y[:, None])) + 0.3 * rng.normal(size=(60, 30)), y


ROWS = tuple(
    EstimatorRow(type(make()).__name__, make, three_classes)
    for make in (
        lambda: SpectralReservoir(3, extend_to=10, random_state=0),
        lambda: SARCClassifier(3, extend_to=10, random_state=0),
        lambda: ReservoirClassifier(n_units=5, random_state=0),
    )
)


# scikit-learn's own data have two columns now and then, and a series has three points: see below.
@pytest.mark.parametrize(("check", "row"), cases(ROWS, [c for c in CHECKS if c is not check_scikit_learn_contract]))
def test_estimator(check, row):
    check(row)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_scikit_learns_checks_pass_on_series_of_at_least_three_points(row, monkeypatch):
    """Where the data of a check have one or two columns, they are made wider as scikit-learn fits data to tags."""
    adapt = sklearn_checks._enforce_estimator_tags_X

    def adapt_and_widen(estimator, X, **settings):
        X = adapt(estimator, X, **settings)
        narrow = isinstance(X, np.ndarray) and X.ndim == 2 and X.shape[1] < 3
        return np.pad(X, ((0, 0), (0, 4))) if narrow else X

    monkeypatch.setattr(sklearn_checks, "_enforce_estimator_tags_X", adapt_and_widen)
    classifies = hasattr(row.make(), "predict")
    expected = {"check_decision_proba_consistency": "two columns that do not pass there"} if classifies else {}
    with warnings.catch_warnings(), as_users_have_it():
        warnings.filterwarnings("ignore", "The series, or the mean of the series, is constant")
        done = sklearn_checks.check_estimator(row.make(), expected_failed_checks=expected, on_skip=None, on_fail=None)
    failed = [f"{check['check_name']}: {check['exception']!r}" for check in done if check["status"] == "failed"]
    assert not failed, "\n".join(failed)
    assert {check["check_name"] for check in done if check["status"] == "xfail"} == set(expected)


@pytest.mark.parametrize("kind", [SARCClassifier, ReservoirClassifier])
@pytest.mark.parametrize("n_classes", [2, 3])
def test_probabilities_are_in_the_order_of_the_scores(kind, n_classes):
    """What the excluded check asks, for more classes too."""
    X, y = three_classes()
    X, y = X[y < n_classes], y[y < n_classes]
    fitted = kind(random_state=0).fit(X, y)
    scores, P = fitted.decision_function(X), fitted.predict_proba(X)
    np.testing.assert_allclose(P.sum(axis=1), 1, rtol=0, atol=1e-12)
    assert P.shape == (len(X), n_classes)
    if n_classes == 2:
        np.testing.assert_array_equal(np.argsort(scores), np.argsort(P[:, 1]))
        np.testing.assert_allclose(P[:, 1], 1 / (1 + np.exp(-scores)), rtol=0, atol=1e-12)
    else:
        np.testing.assert_array_equal(np.argsort(scores, axis=1), np.argsort(P, axis=1))
    np.testing.assert_array_equal(fitted.predict(X), fitted.classes_[P.argmax(axis=1)])


def test_aeons_checks_pass(monkeypatch):
    # They look at the code of __init__, where the type checks of the test run have put a wrapper.
    monkeypatch.setattr(SARCAeonClassifier, "__init__", inspect.unwrap(SARCAeonClassifier.__init__))
    with warnings.catch_warnings(), as_users_have_it():
        done = check_aeon_estimator(SARCClassifier(4, extend_to=10, random_state=0).to_aeon())
    assert len(done) > 15
    failed = {name: outcome for name, outcome in done.items() if outcome != "PASSED"}
    assert not failed
