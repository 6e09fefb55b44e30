"""The global generators, which nothing of ours may move.

Python's own is not watched: the type checker of the test run draws from it, to pick the items it looks at.
"""

import contextlib
import pickle
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def global_generators_stay(what: str) -> Iterator[None]:
    """Raise AssertionError if the block moves the global generator of NumPy or torch."""
    before = _states()
    yield
    for name, state in _states().items():
        assert state == before[name], f"{what} moved the global generator of {name}"


def _states() -> dict[str, bytes]:
    return {
        "NumPy": pickle.dumps(np.random.get_state()),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
