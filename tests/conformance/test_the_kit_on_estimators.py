"""The estimator checks pass what is right and catch what is wrong: each has at least one object that it must refuse."""

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge
from sklearn.preprocessing import StandardScaler

from tests.conformance import cases
from tests.conformance.estimators import CHECKS, EstimatorRow, check_scikit_learn_contract


def three_classes():
    rng = np.random.default_rng(0)
    y = np.arange(60) % 3
    return rng.normal(size=(60, 4)) + y[:, None] * [1.0, 0.0, -1.0, 0.5], y


def logistic(**settings):
    return LogisticRegression(solver="newton-cholesky", tol=1e-10, **settings)


class FailsTheContract(Ridge):
    def __init__(self, alpha=1.0):
        super().__init__(alpha=alpha)
        self.undeclared = 1


class ReturnsNothing(Ridge):
    def fit(self, X, y, sample_weight=None):
        super().fit(X, y, sample_weight)


class ChangesItsSettings(Ridge):
    def fit(self, X, y, sample_weight=None):
        self.alpha = 2.0
        return super().fit(X, y, sample_weight)


class RemembersTheLastFit(Ridge):
    def fit(self, X, y, sample_weight=None):
        seen = getattr(self, "seen_", np.zeros(X.shape[1]))
        super().fit(X, y, sample_weight)
        self.seen_ = self.coef_.copy()
        self.coef_ += seen
        return self


class CentresInPlace(Ridge):
    def fit(self, X, y, sample_weight=None):
        X -= X.mean(0)
        return super().fit(X, y, sample_weight)


class IgnoresWeights(Ridge):
    def fit(self, X, y, sample_weight=None):
        return super().fit(X, y)


class HeedsTheFirstRow(Ridge):
    def fit(self, X, y, sample_weight=None):
        super().fit(X, y, sample_weight)
        self.coef_ = self.coef_ + 0.01 * X[0]
        return self


class CentresEachBatch(Ridge):
    def predict(self, X):
        return super().predict(X - X.mean(0))


class OrdersClassesAsTheyCome(LogisticRegression):
    def fit(self, X, y, sample_weight=None):
        super().fit(X, y, sample_weight)
        self.order_ = [list(self.classes_).index(label) for label in dict.fromkeys(y)]
        return self

    def predict_proba(self, X):
        return super().predict_proba(X)[:, self.order_]


class KnowsItsTrainingData(Ridge):
    def fit(self, X, y, sample_weight=None):
        self.X_, self.y_ = X, y
        return super().fit(X, y, sample_weight)

    def predict(self, X):
        return self.y_ if X is self.X_ else super().predict(X)


class ForgetsTheIndex(StandardScaler):
    def transform(self, X, copy=None):
        return super().transform(X, copy).reset_index(drop=True) if hasattr(X, "iloc") else super().transform(X, copy)


class HasNoSetOutput(StandardScaler, auto_wrap_output_keys=None):
    pass


class DrawsFromTheGlobalGenerator(Ridge):
    def fit(self, X, y, sample_weight=None):
        np.random.rand()
        return super().fit(X, y, sample_weight)


class DrawsWithoutSeed(Ridge):
    def fit(self, X, y, sample_weight=None):
        super().fit(X, y, sample_weight)
        self.coef_ = self.coef_ + np.random.default_rng().normal(size=self.coef_.shape)
        return self


GOOD = (
    EstimatorRow("logistic_regression", logistic, three_classes),
    EstimatorRow("linear_regression", LinearRegression, three_classes),
    EstimatorRow("standard_scaler", StandardScaler, three_classes),
)
WRONG = {
    "scikit_learn_contract": {FailsTheContract: "check_"},
    "fit_and_clone": {
        ReturnsNothing: "must return self",
        ChangesItsSettings: "changed a parameter",
        RemembersTheLastFit: "remembers the first",
    },
    "inputs_stay": {CentresInPlace: "changed X"},
    "sample_weight": {IgnoresWeights: "not repetitions"},
    "order_of_rows_is_nothing": {
        HeedsTheFirstRow: "order of the rows",
        CentresEachBatch: "in two chunks",
    },
    "labels_are_names": {OrdersClassesAsTheyCome: "names of classes"},
    "pipeline_and_search": {KnowsItsTrainingData: "in a pipeline"},
    "set_output": {HasNoSetOutput: "must have set_output", ForgetsTheIndex: "index of the input is lost"},
    "global_generators_stay": {
        DrawsFromTheGlobalGenerator: "global generator of NumPy",
        DrawsWithoutSeed: "two fits",
    },
}


@pytest.mark.parametrize(("check", "row"), cases(GOOD, CHECKS))
def test_right_estimators_pass(check, row):
    check(row)


@pytest.mark.parametrize(
    ("check", "wrong", "message"),
    [
        pytest.param(f"check_{name}", wrong, message, id=f"{wrong.__name__}-{name}")
        for name, table in WRONG.items()
        for wrong, message in table.items()
    ],
)
def test_wrong_estimators_are_caught(check, wrong, message):
    with pytest.raises(AssertionError, match=message):
        {check.__name__: check for check in CHECKS}[check](EstimatorRow(wrong.__name__, wrong, three_classes))


def test_expected_failures_must_fail():
    expected = {"check_n_features_in": "it fails no more"}
    row = EstimatorRow("stale", LinearRegression, three_classes, expected_failures=expected)
    with pytest.raises(AssertionError, match="expected failures that do not fail: check_n_features_in"):
        check_scikit_learn_contract(row)


def test_every_check_is_known_to_fail():
    assert {f"check_{name}" for name in WRONG} == {check.__name__ for check in CHECKS}
