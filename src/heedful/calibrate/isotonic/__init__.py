"""Multi-class calibration by isotonic regression that knows a row of probabilities adds up to one.

One-vs-rest isotonic calibration fits each class as if the others did not exist and divides by the sum afterwards. Here
the sum is part of the fit. NA-FIR pools the pairs (p_ij, 1[y_i = j]) of all classes under one non-decreasing f and
minimises the log loss of what is finally handed out,

    min over f > 0, non-decreasing:   −Σ_i log( f(p_{i,y_i}) / Σ_j f(p_ij) );

SCIR fits the cumulative sums of the sorted row, as one function of (sum, rank) that grows in both, so that differences
of neighbours are probabilities that add up to one by construction.

Improving Multi-Class Calibration through Normalization-Aware Isotonic Techniques, ICML 2025, arXiv:2512.09054.
"""

from heedful.calibrate.isotonic._calibrators import (
    FlattenedIsotonicCalibrator,
    NormalizationAwareIsotonicCalibrator,
    OneVsRestIsotonicCalibrator,
    SortedCumulativeIsotonicCalibrator,
)
from heedful.calibrate.isotonic._classifier import CalibratedClassifier
from heedful.calibrate.isotonic._metrics import ReliabilityCurve, expected_calibration_error, reliability_curve
from heedful.calibrate.isotonic._scaling import DirichletCalibrator, TemperatureCalibrator, VectorCalibrator

__all__ = [
    "CalibratedClassifier",
    "DirichletCalibrator",
    "FlattenedIsotonicCalibrator",
    "NormalizationAwareIsotonicCalibrator",
    "OneVsRestIsotonicCalibrator",
    "ReliabilityCurve",
    "SortedCumulativeIsotonicCalibrator",
    "TemperatureCalibrator",
    "VectorCalibrator",
    "expected_calibration_error",
    "reliability_curve",
]
