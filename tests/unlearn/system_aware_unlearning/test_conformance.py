"""What scikit-learn and this library ask of every estimator, and of everything that is saved."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, RidgeClassifier

from heedful.unlearn import (
    KernelSelectiveSamplingClassifier,
    SelectiveSamplingClassifier,
    SISAClassifier,
    SystemAwareUnlearner,
)
from tests.conformance import cases, files
from tests.conformance.estimators import CHECKS, EstimatorRow

ARRIVAL = {"check_order_of_rows_is_nothing": "samples are kept, or not, in the order in which they arrive"}
SHARDS = {"check_order_of_rows_is_nothing": "who is in which shard depends on the order of rows"}


def three_classes():
    rng = np.random.default_rng(0)
    y = np.arange(60) % 3
    return rng.normal(size=(60, 4)) + y[:, None] * [1.0, 0.0, -1.0, 0.5], y


def row(name, make, exclusions=ARRIVAL):
    return EstimatorRow(name, make, three_classes, exclusions=exclusions)


ROWS = (
    row("linear", SelectiveSamplingClassifier),
    row("linear-unit", lambda: SelectiveSamplingClassifier(normalize="unit", fit_intercept=False)),
    row("linear-parts", lambda: SelectiveSamplingClassifier(horizon=1000, update="downdate", kappa=0.4)),
    row("kernel", KernelSelectiveSamplingClassifier),
    row("kernel-parts", lambda: KernelSelectiveSamplingClassifier(kernel="poly", horizon=1000)),
    row("wrapper", lambda: SystemAwareUnlearner(LogisticRegression(random_state=0))),
    row("wrapper-parts", lambda: SystemAwareUnlearner(RidgeClassifier(random_state=0), horizon=1000)),
    row("sisa", lambda: SISAClassifier(LogisticRegression(), random_state=0), SHARDS),
    row(
        "sisa-slices",
        lambda: SISAClassifier(
            LogisticRegression(tol=1e-10, max_iter=1000), n_shards=2, n_slices=2, voting="soft", random_state=0
        ),
        SHARDS,
    ),
)


@pytest.mark.parametrize(("check", "row"), cases(ROWS, CHECKS))
def test_estimator(check, row):
    check(row)


def save(path, model):
    model.save(path)


def load_linear(path):
    return SelectiveSamplingClassifier.load(path)


def small():
    return SelectiveSamplingClassifier().fit(*three_classes(), ids=[f"p{row}" for row in range(60)])


def large():
    X = np.random.default_rng(0).normal(size=(1200, 12))
    return SelectiveSamplingClassifier(kappa=1.0, horizon=10**9, update="downdate").fit(X, X[:, 0] > 0, ids=range(1200))


def same(left, right):
    return left.state_digest() == right.state_digest()


FILES = (files.FileRow("linear", ".safetensors", save, load_linear, small, large, same),)


@pytest.mark.parametrize(("check", "row"), cases(FILES, files.CHECKS))
def test_file(check, row, tmp_path):
    check(row, tmp_path)
