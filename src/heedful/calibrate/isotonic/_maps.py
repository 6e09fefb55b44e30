"""Fitted calibrators as torch modules: the one place where they are evaluated, by estimators and networks alike.

A module takes a tensor of shape (…, K) and returns calibrated probabilities of the same shape, dtype and device. Its
buffers are float64, and so is its arithmetic; ``module.float()`` makes both float32.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heedful.calibrate.isotonic._pooled import merge_ties

Interpolation = Literal["linear", "step"]


def interpolate(
    p: Float[Tensor, "*shape"], knots: Float[Tensor, "*maps m"], values: Float[Tensor, "*maps m"], mode: Interpolation
) -> Float[Tensor, "*shape"]:
    """Non-decreasing function through (knots, values) at ``p``; constant outside; exactly monotone despite rounding.

    Parameters
    ----------
    p : tensor
        Any shape, or (K, n) when knots and values have one row a class.
    knots : tensor of shape (m,) or (K, m)
        Increasing; rows may be padded with +inf.
    values : tensor of shape (m,) or (K, m)
        Non-decreasing, padded with their last entry.
    mode : {"linear", "step"}
        Straight lines between knots, or the value of the last knot that is <= p.
    """
    at = torch.searchsorted(knots, p.contiguous(), right=True) - 1

    def pick(table, index):
        return table[index] if table.ndim == 1 else table.gather(-1, index)

    if mode == "step" or knots.shape[-1] == 1:
        return pick(values, at.clamp(min=0))
    at = at.clamp(0, knots.shape[-1] - 2)
    left, right = pick(knots, at), pick(knots, at + 1)
    low, high = pick(values, at), pick(values, at + 1)
    width = right - left
    apart = width > 0  # In float32 knots can fall together.
    share = torch.where(apart, (p - left) / torch.where(apart, width, 1.0), 1.0).clamp(0, 1)
    return torch.minimum(low + share * (high - low), high)


class CalibrationMap(nn.Module):
    """Input as probabilities, in the buffers' precision; the map itself; the guard against zeros; and back."""

    def __init__(self, *, input: Literal["proba", "logits"] = "proba", epsilon: float = 0.0):
        super().__init__()
        self.input, self.epsilon = input, epsilon

    def forward(self, x: Float[Tensor, "*batch K"]) -> Float[Tensor, "*batch K"]:
        p = x.to(next(self.buffers()).dtype)
        if self.input == "logits":
            p = torch.softmax(p, dim=-1)
        if p.dtype == torch.float64:
            p = merge_ties(p)
        return (self.calibrate(p) * (1 - self.epsilon) + self.epsilon / x.shape[-1]).to(x.dtype)

    def calibrate(self, p: Float[Tensor, "*batch K"]) -> Float[Tensor, "*batch K"]:
        raise NotImplementedError


class PooledMap(CalibrationMap):
    """f(p_ij) / Σ_l f(p_il), with f itself interpolated, or its logarithm (``log_scale``)."""

    knots: Tensor
    values: Tensor

    def __init__(self, knots: Tensor, values: Tensor, *, interpolation: Interpolation, log_scale: bool, **common):
        super().__init__(**common)
        self.interpolation, self.log_scale = interpolation, log_scale
        self.register_buffer("knots", knots)
        self.register_buffer("values", values)

    def calibrate(self, p: Float[Tensor, "*batch K"]) -> Float[Tensor, "*batch K"]:
        f = interpolate(p, self.knots, self.values, self.interpolation)
        return torch.softmax(f, dim=-1) if self.log_scale else _normalize(f)


class PerClassMap(CalibrationMap):
    """f_j(p_ij) / Σ_l f_l(p_il), one function a class."""

    knots: Tensor
    values: Tensor

    def __init__(self, knots: Tensor, values: Tensor, **common):
        super().__init__(**common)
        self.register_buffer("knots", knots)
        self.register_buffer("values", values)

    def calibrate(self, p: Float[Tensor, "*batch K"]) -> Float[Tensor, "*batch K"]:
        f = interpolate(p.reshape(-1, p.shape[-1]).T, self.knots, self.values, "linear")
        return _normalize(f.T).reshape(p.shape)


class SortedMap(CalibrationMap):
    """q_(r) = g(S_r, r) − g(S_{r−1}, r−1) for the leading ranks; the others share 1 − g in proportion to p."""

    knots: Tensor
    values: Tensor

    def __init__(self, knots: Tensor, values: Tensor, *, interpolation: Interpolation, **common):
        super().__init__(**common)
        self.interpolation = interpolation
        self.register_buffer("knots", knots)
        self.register_buffer("values", values)

    def calibrate(self, p: Float[Tensor, "*batch K"]) -> Float[Tensor, "*batch K"]:
        n_ranks = len(self.values)
        ranked, order = torch.sort(p, dim=-1, descending=True, stable=True)
        sums = ranked[..., :n_ranks].cumsum(dim=-1)
        knots = self.knots.expand(n_ranks, -1).contiguous()
        g = interpolate(sums.reshape(-1, n_ranks).T, knots, self.values, self.interpolation).T.reshape(sums.shape)
        # Both arguments of g grow along a row; what is below zero here is rounding.
        steps = torch.diff(g, dim=-1, prepend=torch.zeros_like(g[..., :1])).clamp(min=0)
        rest = (1 - steps.sum(dim=-1, keepdim=True)).clamp(min=0)
        q = torch.cat([steps, rest * _normalize(ranked[..., n_ranks:])], dim=-1)
        return torch.zeros_like(q).scatter(-1, order, q)


class SoftmaxMap(CalibrationMap):
    """softmax(A log p + b), with p no smaller than ``smallest``."""

    scale: Tensor
    bias: Tensor

    def __init__(self, scale: Tensor, bias: Tensor, *, smallest: float, **common):
        super().__init__(**common)
        self.smallest = smallest
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    def calibrate(self, p: Float[Tensor, "*batch K"]) -> Float[Tensor, "*batch K"]:
        z = torch.log(p.clamp(min=max(self.smallest, torch.finfo(p.dtype).tiny)))
        return torch.softmax((z @ self.scale.T if self.scale.ndim == 2 else z * self.scale) + self.bias, dim=-1)


def _normalize(f: Float[Tensor, "*batch K"]) -> Float[Tensor, "*batch K"]:
    """Rows divided by their sums; a row of zeros becomes uniform."""
    total = f.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, f / total, torch.full_like(f, 1 / f.shape[-1]))
