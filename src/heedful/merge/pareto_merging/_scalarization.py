"""Preferences on the simplex, and the one number that a preference makes of several objectives."""

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from heedful._validation import require_number
from heedful.errors import InputError, ParameterError

Preference = Sequence[float] | np.ndarray | Tensor | Mapping[str, float]


def smooth_tchebycheff(
    values: Float[Tensor, "*batch K"],
    preference: Float[Tensor, "*#batch K"],
    *,
    smoothing: float = 0.1,
    ideal: float | Float[Tensor, " K"] = 0.0,
) -> Float[Tensor, "*batch"]:
    """A smooth max_k w_k: smoothing · log Σ_k exp(w_k / smoothing), where w_k = preference_k (values_k − ideal_k).

    Lies between max_k w_k and max_k w_k + smoothing · log K, and rises with every value. The maximum reaches the points of
    a Pareto front that no weighted sum does, those where the front is not convex.

    Parameters
    ----------
    values : Float[Tensor, "*batch K"]
        Objectives, smaller is better, of comparable size. Half precision and integers are computed in float32.
    preference : Float[Tensor, "*#batch K"]
        Weights >= 0, usually with sum 1; they are not normalised here.
    smoothing : float
        > 0, in the units of ``values``; usually 0.01 to 1. Towards 0 it is the weighted maximum; for large ones the result
        less smoothing · log K is the weighted sum over K.
    ideal : float or Float[Tensor, " K"]
        What each objective could at best be.

    References
    ----------
    Lin, Zhang, Yang, Liu, Wang, Zhang: Smooth Tchebycheff Scalarization for Multi-Objective Optimization, ICML 2024.

    Examples
    --------
    >>> smooth_tchebycheff(torch.tensor([1.0, 4.0]), torch.tensor([0.5, 0.5]), smoothing=0.01)
    tensor(2.)
    """
    require_number(smoothing, "smoothing", low=0, open_low=True)
    if values.shape[-1] != preference.shape[-1]:
        raise InputError(
            f"values has {values.shape[-1]} objectives and preference {preference.shape[-1]} weights. Give one for each."
        )
    values = values if values.dtype in (torch.float32, torch.float64) else values.float()
    return smoothing * torch.logsumexp(preference.to(values) * (values - ideal) / smoothing, dim=-1)


def scalarize(values: Tensor, preference: Tensor, scalarization: str, smoothing: float) -> Tensor:
    """``smooth_tchebycheff``, or for "linear" the weighted sum."""
    if scalarization == "linear":
        return (values * preference).sum(-1)
    return smooth_tchebycheff(values, preference, smoothing=smoothing)


def as_preference(preference: Preference, names: Sequence[str]) -> Float[Tensor, " K"]:
    """``preference`` as float32 weights with sum 1, in the order of ``names``; names that a mapping lacks weigh 0."""
    if isinstance(preference, Mapping):
        if unknown := sorted(str(name) for name in preference if name not in names):
            raise InputError(f"The preference speaks of {', '.join(unknown)}; the models are {', '.join(names)}.")
        preference = [preference.get(name, 0.0) for name in names]
    try:
        weights = torch.as_tensor(preference, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError) as error:
        raise ParameterError(
            f"A preference is numbers, one for each of {', '.join(names)}, or a mapping from names to numbers; got "
            f"{preference!r:.80}."
        ) from error
    if weights.shape != (len(names),):
        raise InputError(
            f"A preference needs one weight for each of the {len(names)} models {', '.join(names)}; got shape "
            f"{tuple(weights.shape)}."
        )
    return normalized(weights).float()


def normalized(weights: Float[Tensor, "*batch K"]) -> Float[Tensor, "*batch K"]:
    """Rows divided by their sums, after a check that they are preferences at all."""
    sums = weights.sum(-1, keepdim=True)
    if bool((weights < 0).any()) or not bool(((sums > 0) & sums.isfinite()).all()):
        raise ParameterError(
            f"A preference needs finite weights >= 0 that are not all zero; got {weights.tolist()}. Equal preference is "
            f"{[1.0] * weights.shape[-1]}."
        )
    return weights / sums


def simplex_lattice(n_models: int, n_points: int) -> Float[np.ndarray, "n K"]:
    """The finest regular lattice of at most ``n_points`` preferences, the corners among them; the first entry falls."""
    require_number(n_points, "n_points", integer=True)
    if n_points < n_models:
        raise ParameterError(
            f"n_points must be at least the number of models, {n_models}, one corner each; got {n_points!r}."
        )
    parts = 1
    while math.comb(parts + n_models, n_models - 1) <= n_points:
        parts += 1
    bars = itertools.combinations(range(parts + n_models - 1), n_models - 1)
    edges = np.array([(-1, *bar, parts + n_models - 1) for bar in bars])
    return (np.diff(edges, axis=1) - 1)[::-1] / parts
