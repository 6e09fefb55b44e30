import json

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
import torch

from heedful.calibrate import expected_calibration_error, reliability_curve
from heedful.errors import InputError, ParameterError


def binary(*confidences):
    return np.array([[c, 1 - c] for c in confidences])


def test_right_and_certain_is_calibrated():
    assert expected_calibration_error([0, 1, 1], [[1, 0], [0, 1], [0, 1]]) == 0


def test_wrong_and_certain_is_as_bad_as_can_be():
    assert expected_calibration_error([1, 0], [[1, 0], [0, 1]]) == 1


def test_hand_example_with_empty_bins():
    # bins of width 0.1: (0.8, 0.9] holds 0.85 and 0.87, one right; (0.5, 0.6] holds 0.6, right; the rest are empty
    error = expected_calibration_error([0, 1, 0], binary(0.85, 0.87, 0.6), n_bins=10)
    assert error == pytest.approx(2 / 3 * abs(0.86 - 0.5) + 1 / 3 * 0.4)


def test_a_value_on_an_edge_belongs_to_the_lower_bin():
    curve = reliability_curve([0, 0], binary(0.75, 0.76), n_bins=4)
    assert curve.upper.tolist() == [0.75, 1.0]
    assert curve.counts.tolist() == [1, 1]


def test_norms_are_the_mean_the_root_mean_square_and_the_largest_distance():
    P, y = binary(0.9, 0.9, 0.6, 0.6), [0, 1, 0, 0]  # distances 0.4 and 0.4 → make them differ
    P[2:] = [0.7, 0.3]  # 0.4 and 0.3
    assert expected_calibration_error(y, P, norm=1) == pytest.approx(0.35)
    assert expected_calibration_error(y, P, norm=2) == pytest.approx(np.sqrt((0.16 + 0.09) / 2))
    assert expected_calibration_error(y, P, norm=np.inf) == pytest.approx(0.4)


def test_classwise_error_is_the_mean_over_classes():
    P = np.tile([0.5, 0.3, 0.2], (10, 1))
    y = np.array([0] * 6 + [1] * 3 + [2])
    assert expected_calibration_error(y, P, kind="classwise") == pytest.approx((0.1 + 0 + 0.1) / 3)


def test_quantile_bins_hold_equally_many():
    confidences = np.linspace(0.51, 0.99, 100)
    y = np.zeros(100, dtype=int)
    expected = np.mean([abs(1 - part.mean()) for part in np.split(confidences, 4)])
    error = expected_calibration_error(y, binary(*confidences), n_bins=4, strategy="quantile")
    assert error == pytest.approx(expected, abs=0.005)  # an edge may take one value more or less


def test_metrics_take_tensors_frames_and_string_labels():
    P, y = binary(0.9, 0.2, 0.6), ["no", "yes", "yes"]
    expected = expected_calibration_error([0, 1, 1], P)
    assert expected_calibration_error(y, P) == expected
    assert expected_calibration_error(torch.tensor([0, 1, 1]), torch.tensor(P)) == pytest.approx(expected, abs=1e-12)
    assert expected_calibration_error(pd.Series([0, 1, 1]), pd.DataFrame(P)) == expected


def test_reliability_curve_adds_up_to_the_calibration_error(draw):
    P, y = draw(500, 4, 0)
    curve = reliability_curve(y, P, n_bins=12)
    error = curve.counts / 500 @ abs(curve.confidence - curve.accuracy)
    assert error == pytest.approx(expected_calibration_error(y, P, n_bins=12), abs=1e-12)
    assert curve.counts.sum() == 500
    assert ((curve.lower < curve.confidence) & (curve.confidence <= curve.upper)).all()
    assert json.loads(json.dumps(curve.to_dict()))["counts"] == curve.counts.tolist()


def test_reliability_curve_draws_its_points(draw):
    mpl.use("Agg")
    curve = reliability_curve(*reversed(draw(200, 3, 0)), n_bins=10)
    axes = curve.plot()
    np.testing.assert_allclose(axes.collections[0].get_offsets(), np.c_[curve.confidence, curve.accuracy])
    assert curve.plot(axes) is axes


def test_bad_input_is_refused():
    P = binary(0.9, 0.2)
    with pytest.raises(InputError, match="y and P need equally many rows, at least one; got 3 and 2"):
        expected_calibration_error([0, 1, 1], P)
    with pytest.raises(ParameterError, match="kind must be one of 'confidence', 'classwise'; got 'top'"):
        expected_calibration_error([0, 1], P, kind="top")
    with pytest.raises(ParameterError, match="n_bins must be an int >= 1; got 0"):
        reliability_curve([0, 1], P, n_bins=0)
    with pytest.raises(ParameterError, match=r"norm must be a number >= 1; got 0\.5"):
        expected_calibration_error([0, 1], P, norm=0.5)
