"""Trustworthy probabilities."""

from typing import TYPE_CHECKING

from heedful._lazy import attach

if TYPE_CHECKING:
    from heedful.calibrate.isotonic import CalibratedClassifier as CalibratedClassifier
    from heedful.calibrate.isotonic import DirichletCalibrator as DirichletCalibrator
    from heedful.calibrate.isotonic import FlattenedIsotonicCalibrator as FlattenedIsotonicCalibrator
    from heedful.calibrate.isotonic import NormalizationAwareIsotonicCalibrator as NormalizationAwareIsotonicCalibrator
    from heedful.calibrate.isotonic import OneVsRestIsotonicCalibrator as OneVsRestIsotonicCalibrator
    from heedful.calibrate.isotonic import SortedCumulativeIsotonicCalibrator as SortedCumulativeIsotonicCalibrator
    from heedful.calibrate.isotonic import TemperatureCalibrator as TemperatureCalibrator
    from heedful.calibrate.isotonic import VectorCalibrator as VectorCalibrator
    from heedful.calibrate.isotonic import expected_calibration_error as expected_calibration_error
    from heedful.calibrate.isotonic import reliability_curve as reliability_curve

__getattr__, __dir__, __all__ = attach(
    "heedful.calibrate",
    {
        "isotonic": [
            "CalibratedClassifier",
            "NormalizationAwareIsotonicCalibrator",
            "SortedCumulativeIsotonicCalibrator",
            "FlattenedIsotonicCalibrator",
            "OneVsRestIsotonicCalibrator",
            "TemperatureCalibrator",
            "VectorCalibrator",
            "DirichletCalibrator",
            "expected_calibration_error",
            "reliability_curve",
        ]
    },
)
