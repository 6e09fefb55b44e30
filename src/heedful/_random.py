"""Explicit randomness: one door for every ``random_state`` and every trial seed.

Nothing in heedful reads or moves a global generator when a ``random_state`` or ``generator`` is given.
"""

import numbers
from typing import Any, TypeGuard

import numpy as np
import torch

from heedful.errors import ParameterError

_ACCEPTED = "None, an int >= 0, a numpy Generator, or a numpy RandomState"


def numpy_generator(random_state=None) -> np.random.Generator:
    """The NumPy ``Generator`` that ``random_state`` stands for.

    A ``Generator`` is returned as it is (drawing from it moves it); a ``RandomState`` seeds a new one by one draw.
    """
    if isinstance(random_state, np.random.Generator):
        return random_state
    if isinstance(random_state, np.random.RandomState):
        return np.random.default_rng(random_state.randint(2**31, size=4))
    if random_state is None or _is_seed(random_state):
        return np.random.default_rng(random_state)
    raise ParameterError(f"random_state must be {_ACCEPTED}; got {random_state!r}.")


def torch_generator(random_state=None, *, device: str | torch.device = "cpu") -> torch.Generator:
    """A new torch ``Generator`` on ``device``, seeded from ``random_state`` (an int seeds it directly)."""
    if _is_seed(random_state) and random_state < 2**63:  # beyond, torch takes no seed
        seed = int(random_state)
    else:
        seed = int(numpy_generator(random_state).integers(2**63))
    return torch.Generator(device).manual_seed(seed)


def spawn(random_state, n: int) -> list[int]:
    """``n`` independent integer seeds for parts of a job, the same whatever order the parts run in."""
    if _is_seed(random_state):
        return [int(child.generate_state(1)[0]) for child in np.random.SeedSequence(int(random_state)).spawn(n)]
    return [int(seed) for seed in numpy_generator(random_state).integers(2**31, size=n)]


def _is_seed(random_state: Any) -> TypeGuard[int]:
    return not isinstance(random_state, bool) and isinstance(random_state, numbers.Integral) and int(random_state) >= 0
