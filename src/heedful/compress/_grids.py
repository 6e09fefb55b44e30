"""The values that a quantized tensor may take: evenly spaced, by a scale and a zero point for each channel or group."""

import dataclasses

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from heedful._validation import require_number
from heedful.errors import InputError, ParameterError


@dataclasses.dataclass(frozen=True)
class QuantGrid:
    """The values scale · (code − zero), with codes from ``qmin`` to ``qmax``.

    Parameters
    ----------
    scale : Float[Tensor, "..."]
        Step of the grid, > 0. It has the dimensions of the tensor to quantize, each of the same size or 1, save that
        along ``axis`` it has one entry a group. Its dtype is that of dequantized values.
    zero : Integer[Tensor, "..."]
        The code of the value 0, shaped like ``scale``.
    qmin, qmax : int
        Least and greatest code, such as 0 and 15 for 4 bits.
    axis : int
        The dimension along which neighbours form groups; usually the last one, the inputs of a linear layer.
    group_size : int
        Entries of a group, or -1 for all of the axis.
    """

    scale: Float[Tensor, "..."]
    zero: Integer[Tensor, "..."]
    qmin: int
    qmax: int
    axis: int = -1
    group_size: int = -1

    def __post_init__(self):
        require_number(self.qmin, "qmin", integer=True)
        require_number(self.qmax, "qmax", low=self.qmin + 1, integer=True)
        if self.group_size != -1:
            require_number(self.group_size, "group_size", low=1, integer=True)
        if self.scale.shape != self.zero.shape:
            raise InputError(
                f"scale and zero must have one shape; got {tuple(self.scale.shape)} and {tuple(self.zero.shape)}."
            )
        if self.group_size == -1 and self.scale.shape[self.axis] != 1:
            raise InputError(
                f"a grid without groups has one scale along dimension {self.axis}; got {self.scale.shape[self.axis]}."
            )

    @property
    def code_dtype(self) -> torch.dtype:
        """The smallest integer type that holds every code."""
        for dtype in (torch.uint8, torch.int8, torch.int16):
            limits = torch.iinfo(dtype)
            if limits.min <= self.qmin and self.qmax <= limits.max:
                return dtype
        return torch.int32

    def quantize(self, w: Float[Tensor, "..."]) -> Integer[Tensor, "..."]:
        """Codes of the nearest values of the grid; half-way goes to the even code."""
        w, scale, zero = self._aligned(w)
        # A quotient of half precision would be off by more than a code.
        w, scale = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (w, scale))
        codes = (w / scale).round_().add_(zero).clamp_(self.qmin, self.qmax).to(self.code_dtype)
        return codes.flatten(self._dim, self._dim + 1)

    def dequantize(self, codes: Integer[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The values that codes stand for, in the dtype of ``scale``."""
        codes, scale, zero = self._aligned(codes)
        return ((codes.to(scale.dtype) - zero) * scale).flatten(self._dim, self._dim + 1)

    def fake_quantize(self, w: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The nearest values of the grid."""
        return self.dequantize(self.quantize(w))

    @property
    def _dim(self) -> int:
        return self.axis % self.scale.ndim

    def _aligned(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A tensor with its axis cut into groups, and scale and zero point that broadcast with it."""
        if x.ndim != self.scale.ndim:
            raise InputError(f"the grid is for {self.scale.ndim} dimensions; got a tensor of shape {tuple(x.shape)}.")
        groups, length = self.scale.shape[self._dim], x.shape[self._dim]
        size = length if self.group_size == -1 else self.group_size
        if groups * size != length:
            raise InputError(
                f"the grid has {groups} groups of {size} along dimension {self._dim}; the tensor has {length} entries."
            )
        scale, zero = (part.unsqueeze(self._dim + 1) for part in (self.scale, self.zero))
        return x.unflatten(self._dim, (groups, size)), scale, zero.to(scale.dtype)


def require_groups(length: int, group_size: int) -> int:
    """The size of a group along an axis of ``length``; ``ParameterError`` unless groups fill it."""
    size = length if group_size == -1 else group_size
    if length % size:
        divisors = [d for d in (32, 64, 128, 256) if length % d == 0]
        hint = f", such as {', '.join(map(str, divisors))}" if divisors else ""
        raise ParameterError(
            f"group_size must divide the number of inputs, {length}; got {group_size}. Choose a divisor{hint}, or -1."
        )
    return size
