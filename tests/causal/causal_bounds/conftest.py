import numpy as np
import pytest


@pytest.fixture
def linear_trial():
    """``linear_trial(n, seed)`` gives outcome, treatment and a covariate of n units in each arm.

    Y0 = 0.6 Z + ε0 and Y1 = 1.6 Z + ε1 with all of Z, ε0, ε1 standard normal.
    """

    def draw(n, seed, *, b0=0.6, b1=1.6):
        rng = np.random.default_rng(seed)
        treated = rng.permutation(2 * n) < n
        z = rng.normal(size=2 * n)
        return np.where(treated, b1, b0) * z + rng.normal(size=2 * n), treated, z

    return draw


@pytest.fixture
def small_trial():
    """``small_trial(seed, n, m, dz)``: a few units, and propensities that vary with the first covariate."""

    def draw(seed, n=7, m=5, dz=2):
        rng = np.random.default_rng(seed)
        treated = rng.permutation(n + m) < m
        z = rng.normal(size=(n + m, dz))
        propensity = 1 / (1 + np.exp(-z[:, 0]))
        return z.sum(axis=1) + treated + rng.normal(size=n + m), treated, z, propensity

    return draw
