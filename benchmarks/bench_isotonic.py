"""What calibration costs beside scikit-learn's one-vs-rest isotonic calibration, and netcal's where that is installed.

python benchmarks/bench_isotonic.py
"""

import importlib.util
import tracemalloc

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.calibration import CalibratedClassifierCV
from sklearn.frozen import FrozenEstimator
from sklearn.isotonic import IsotonicRegression

from heedful.calibrate import (
    FlattenedIsotonicCalibrator,
    NormalizationAwareIsotonicCalibrator,
    OneVsRestIsotonicCalibrator,
    SortedCumulativeIsotonicCalibrator,
    TemperatureCalibrator,
)
from measure import ratio, record, side_by_side

NETCAL = importlib.util.find_spec("netcal") is not None
OURS = {
    "ovr": OneVsRestIsotonicCalibrator(smoothing=None),
    "fir": FlattenedIsotonicCalibrator(smoothing=None),
    "na_fir": NormalizationAwareIsotonicCalibrator(smoothing=None),
    "scir": SortedCumulativeIsotonicCalibrator(smoothing=None),
    "temperature": TemperatureCalibrator(),
}


class Passthrough(ClassifierMixin, BaseEstimator):
    """A fitted classifier whose input is its probabilities, so that scikit-learn's time is that of calibration."""

    def fit(self, X, y):
        self.classes_ = np.unique(y)
        return self

    def predict_proba(self, X):
        return X

    def predict(self, X):
        return self.classes_[X.argmax(axis=1)]


def problem(n: int, K: int) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities twice as sure as they should be."""
    rng = np.random.default_rng(0)
    truth = np.exp(1.5 * rng.normal(size=(n, K)))
    truth /= truth.sum(axis=1, keepdims=True)
    y = (truth.cumsum(axis=1) > rng.random((n, 1))).argmax(axis=1)
    y[:K] = np.arange(K)
    return truth**2 / (truth**2).sum(axis=1, keepdims=True), y


def peers(P: np.ndarray, y: np.ndarray) -> dict:
    frozen = FrozenEstimator(Passthrough().fit(P, y))
    found = {"sklearn_ovr": lambda: CalibratedClassifierCV(frozen, method="isotonic").fit(P, y)}
    if NETCAL:
        found["netcal_ovr"] = lambda: _netcal().fit(P, y)
    return found


def _netcal():
    from netcal.binning import IsotonicRegression as NetcalIsotonic

    return NetcalIsotonic()


def assert_equal_results(P: np.ndarray, y: np.ndarray) -> None:
    expected = peers(P, y)["sklearn_ovr"]().predict_proba(P)
    np.testing.assert_allclose(OURS["ovr"].fit(P, y).predict_proba(P), expected, atol=1e-9)
    if NETCAL:
        np.testing.assert_allclose(_netcal().fit(P, y).transform(P), expected, atol=1e-9)
    pairs = IsotonicRegression().fit(P.ravel(), (y[:, None] == np.arange(P.shape[1])).ravel().astype(float))
    f = pairs.predict(P.ravel()).reshape(P.shape)
    np.testing.assert_allclose(OURS["fir"].fit(P, y).predict_proba(P), f / f.sum(axis=1, keepdims=True), atol=1e-9)
    assert OURS["na_fir"].fit(P, y).optimality_gap_ <= 1e-7


def measure(n: int, K: int, *, rounds: int) -> dict:
    P, y = problem(n, K)
    others = peers(P, y)
    fits = others | {name: lambda c=calibrator: c.fit(P, y) for name, calibrator in OURS.items()}
    seconds = side_by_side(fits, rounds=rounds, warmup=1)
    figures = {f"fit {name} / {peer}": ratio(seconds, name, peer) for peer in others for name in OURS}
    fitted = others["sklearn_ovr"]()
    applies = {"sklearn_ovr": lambda: fitted.predict_proba(P)}
    applies |= {name: lambda c=calibrator: c.predict_proba(P) for name, calibrator in OURS.items()}
    seconds = side_by_side(applies, rounds=rounds, warmup=1)
    for name in OURS:
        figures[f"apply {name} / sklearn_ovr"] = ratio(seconds, name, "sklearn_ovr")
        figures[f"apply {name}, million probabilities/s"] = P.size / np.median(seconds[name]) / 1e6
    for name, fit in fits.items():
        tracemalloc.start()  # NumPy's arrays; resident memory would not show what the allocator had kept from before
        fit()
        figures[f"peak memory of fit {name} / P"] = tracemalloc.get_traced_memory()[1] / P.nbytes
        tracemalloc.stop()
    return {f"n={n}, K={K}: {name}": figure for name, figure in figures.items()}


def main() -> None:
    torch.set_num_threads(1)
    assert_equal_results(*problem(2000, 10))
    figures = measure(2000, 10, rounds=15) | measure(50_000, 100, rounds=5)
    figures = {
        name: figure for name, figure in figures.items() if not name.startswith("n=2000") or "memory" not in name
    }
    if not NETCAL:
        figures["netcal"] = "not installed in this environment"
    record("isotonic", figures)


if __name__ == "__main__":
    main()
