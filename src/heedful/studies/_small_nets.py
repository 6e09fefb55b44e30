"""Networks small enough for a study on two cores; the same seed gives the same initial weights."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn


def mlp(widths: Sequence[int], *, seed: int) -> nn.Sequential:
    """Linear layers of these widths, inputs first and outputs last, with ReLU between; inputs are flattened."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = [nn.Flatten()]
        for fan_in, fan_out in pairwise(widths):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        return nn.Sequential(*layers[:-1])
