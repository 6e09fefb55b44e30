"""Problems that every test of unlearning draws from."""

from collections.abc import Callable

import numpy as np
import pytest


@pytest.fixture
def draw() -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """``draw(n, d, seed)``: unit vectors without preferred directions, and the class (0 or 1) on whose side they lie."""

    def problem(n: int, d: int, seed: int, *, margin: float = 0.0):
        rng = np.random.default_rng(seed)
        X = rng.normal(size=(n, d))
        X /= np.linalg.norm(X, axis=1, keepdims=True)
        direction = rng.normal(size=d)
        side = X @ (direction / np.linalg.norm(direction))
        keep = np.abs(side) >= margin
        return X[keep], (side[keep] > 0).astype(int)

    return problem
