import functools

import numpy as np
import pytest
import torch

from heedful.calibrate import (
    DirichletCalibrator,
    FlattenedIsotonicCalibrator,
    NormalizationAwareIsotonicCalibrator,
    OneVsRestIsotonicCalibrator,
    SortedCumulativeIsotonicCalibrator,
    TemperatureCalibrator,
    VectorCalibrator,
)
from heedful.merge import PreferenceLinear
from tests.conformance import cases
from tests.conformance.modules import CHECKS, ModuleRow


def probabilities(n, generator):
    return (torch.softmax(2 * torch.randn(n, 3, generator=generator), dim=1),)


@functools.cache
def fitted(calibrator):
    """Fitted to 200 probabilities that are twice as sure as they should be."""
    (P,) = probabilities(200, torch.Generator().manual_seed(0))
    true = np.sqrt(P.numpy()) / np.sqrt(P.numpy()).sum(axis=1, keepdims=True)
    y = (true.cumsum(axis=1) < np.random.default_rng(0).random((200, 1))).sum(axis=1).clip(max=2)
    return calibrator().fit(P.numpy(), y)


def torch_module(calibrator):
    return fitted(calibrator).torch_module()


def row(calibrator):
    return ModuleRow(f"{calibrator.__name__}.torch_module", functools.partial(torch_module, calibrator), probabilities)


def preference_linear():
    generator = torch.Generator().manual_seed(0)
    parts = (torch.randn(shape, generator=generator) / 3 for shape in ((4, 6), (4,), (4, 2), (6, 2), (3, 2, 2)))
    return PreferenceLinear(*parts)


def rows_with_preferences(n, generator):
    return torch.randn(n, 6, generator=generator), torch.rand(n, 3, generator=generator) + 0.1


def rows_alone(n, generator):
    return (torch.randn(n, 5, 6, generator=generator),)


ROWS = (
    ModuleRow("PreferenceLinear", preference_linear, rows_with_preferences),
    ModuleRow("PreferenceLinear, one preference", preference_linear, rows_alone),
    row(NormalizationAwareIsotonicCalibrator),
    row(SortedCumulativeIsotonicCalibrator),
    row(FlattenedIsotonicCalibrator),
    row(OneVsRestIsotonicCalibrator),
    row(TemperatureCalibrator),
    row(VectorCalibrator),
    row(DirichletCalibrator),
)


@pytest.mark.parametrize(("check", "row"), cases(ROWS, CHECKS))
def test_module(check, row):
    check(row)
