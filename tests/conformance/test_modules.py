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


ROWS = (
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
