import numpy as np
import pytest
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import GaussianNB

from heedful._validation import require_fitted
from heedful.calibrate import (
    CalibratedClassifier,
    DirichletCalibrator,
    FlattenedIsotonicCalibrator,
    NormalizationAwareIsotonicCalibrator,
    OneVsRestIsotonicCalibrator,
    SortedCumulativeIsotonicCalibrator,
    TemperatureCalibrator,
    VectorCalibrator,
)
from heedful.causal import CovariateAwareBounds
from tests.conformance import cases
from tests.conformance.estimators import CHECKS, EstimatorRow

NOT_PROBABILITIES = "scikit-learn's checks give arbitrary numbers, and it takes rows of probabilities alone"


def three_classes():
    rng = np.random.default_rng(0)
    y = np.arange(60) % 3
    return rng.normal(size=(60, 4)) + y[:, None] * [1.0, 0.0, -1.0, 0.5], y


def probabilities():
    """60 rows, twice as sure as they should be."""
    rng = np.random.default_rng(0)
    true = rng.dirichlet(np.ones(3), size=60)
    y = (true.cumsum(axis=1) < rng.random((60, 1))).sum(axis=1).clip(max=2)
    return true**2 / (true**2).sum(axis=1, keepdims=True), y


def calibrator(kind, **settings):
    exclusions = {"check_scikit_learn_contract": NOT_PROBABILITIES}
    return EstimatorRow(kind.__name__, lambda: kind(**settings), probabilities, exclusions=exclusions)


def calibrated(name, exclusions, **settings):
    make = lambda: CalibratedClassifier(**settings)  # noqa: E731
    return EstimatorRow(f"CalibratedClassifier-{name}", make, three_classes, exclusions=exclusions)


class BoundsOfASplit(CovariateAwareBounds):
    """The checks know no treatment, and ask what is said of X: the larger half of the first covariate was treated."""

    def fit(self, X, y):
        first = np.asarray(X)[:, 0]
        return super().fit(X, y, treatment=first > np.median(first))

    def predict(self, X):
        require_fitted(self)
        return np.tile([self.bounds_.lower, self.bounds_.upper], (len(X), 1))


def a_trial():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 3))
    return X, X[:, 0] + X[:, 1] + rng.normal(size=60)


NO_TREATMENT = {
    "check_scikit_learn_contract": "it leaves one arm empty; tests/causal runs it on arms of every other row"
}
FROZEN = FrozenEstimator(LogisticRegression().fit(*three_classes()))
FOLDS = {
    "check_sample_weight": "a row that stands twice may be in two folds, a row of weight two is in one",
    "check_order_of_rows_is_nothing": "the folds are cut in the order of the rows",
}
FITTED = {
    "check_scikit_learn_contract": "the frozen classifier knows the columns that it was fitted on, and no others",
    "check_labels_are_names": "the frozen classifier knows the names that it was fitted to, and no others",
}


ROWS = (
    calibrated("default", FOLDS),
    calibrated("naive_bayes", FOLDS, estimator=GaussianNB(), method="temperature", ensemble=False),
    calibrated("frozen", FITTED, estimator=FROZEN),
    calibrator(NormalizationAwareIsotonicCalibrator),
    calibrator(SortedCumulativeIsotonicCalibrator),
    calibrator(FlattenedIsotonicCalibrator),
    calibrator(OneVsRestIsotonicCalibrator),
    calibrator(TemperatureCalibrator),
    calibrator(VectorCalibrator),
    calibrator(DirichletCalibrator, ridge=1e-3),
    EstimatorRow("CovariateAwareBounds", lambda: BoundsOfASplit(eta=1.0), a_trial, exclusions=NO_TREATMENT),
)


# The checks give weights to whatever takes them, and a frozen classifier does not.
@pytest.mark.filterwarnings("ignore:FrozenEstimator.fit takes no sample_weight:heedful.errors.HeedfulWarning")
@pytest.mark.parametrize(("check", "row"), cases(ROWS, CHECKS))
def test_estimator(check, row):
    check(row)
