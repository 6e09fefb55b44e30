"""Problems that every test of calibration draws from."""

from collections.abc import Callable

import numpy as np
import pytest


@pytest.fixture
def draw() -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """``draw(n, K, seed)``: probabilities that are too sure of themselves by ``sharpness``, and labels."""

    def problem(n: int, K: int, seed: int, *, sharpness: float = 2.0, spread: float = 1.5):
        rng = np.random.default_rng(seed)
        z = spread * rng.normal(size=(n, K))
        truth = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
        y = (truth.cumsum(axis=1) > rng.random((n, 1))).argmax(axis=1)
        y[:K] = np.arange(K)[:n]  # every class is there
        P = truth**sharpness
        return P / P.sum(axis=1, keepdims=True), y

    return problem
