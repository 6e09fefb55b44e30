"""The grid of a weight before it is quantized: for each row or group, the range whose rounding errors cost least."""

import itertools
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.compress._grids import QuantGrid, require_groups
from heedful.compress.boa.config import QuantConfig
from heedful.errors import InputError

_EXACT = 128  # inputs up to which all choices are compared exactly; beyond, by
_DIRECTIONS = 64  # so many leading directions of H_col, and exactly
_FINALISTS = 8  # these


@torch.no_grad()
def find_grid(
    weight: Float[Tensor, "*heads rows cols"],
    h_col: Float[Tensor, "*heads_or_none cols cols"],
    *,
    config: QuantConfig,
) -> QuantGrid:
    """Scale and zero point of every row, or of every group of a row.

    Parameters
    ----------
    weight, h_col
        As in ``kron_quantize``.
    config : QuantConfig
        ``bits, group_size, symmetric`` and ``grid``: with "minmax", the range of a row is that of its weights and 0; with
        "mse" and "hessian" it is p times that, p the one of 1.00, 0.99, …, 0.01, and the zero point the one of the two
        around the exact place of 0, of least Σ(ŵ − w)² or (ŵ − w) H_col (ŵ − w)ᵀ.

    Returns
    -------
    QuantGrid
        Shaped [*heads, rows, groups], in the dtype of the weight.

    Notes
    -----
    Of equal choices the first is taken, p from above and the lower zero point before the higher. Rows of zeros get the
    range from −1 to 1. With groups, only the blocks of H_col that lie within one count.

    "hessian" compares all 200 choices exactly up to 128 inputs. Beyond, that would be 200 products of the weight with H_col:
    all are compared by the 64 leading directions of H_col and the diagonal of the rest, and the best 8 exactly. The loss is
    then within 0.1 % of the least in the layers of a language model.
    """
    require_factors(weight, h_col, None)
    cols = weight.shape[-1]
    size = require_groups(cols, config.group_size)
    dtype = torch.promote_types(weight.dtype, torch.promote_types(h_col.dtype, torch.float32))
    h = h_col.to(dtype).reshape(-1, cols, cols)
    w = weight.to(dtype).reshape(len(h), -1, cols // size, size).transpose(1, 2)  # [factors, groups, rows, size]
    scale, zero = w.new_empty(w.shape[:-1]), w.new_empty(w.shape[:-1])
    chunk = max(128, 65536 // size) if w.device.type == "cpu" else w.shape[2]  # rows that stay in the cache of one core
    for factor, group in itertools.product(*map(range, w.shape[:2])):
        inputs = slice(group * size, (group + 1) * size)
        measure = _Measure(h[factor, inputs, inputs] if config.grid == "hessian" else None)
        for start in range(0, w.shape[2], chunk):
            rows = (factor, group, slice(start, start + chunk))
            scale[rows], zero[rows] = _choose_range(w[rows], measure, weight.dtype, config)
    scale, zero = (x.transpose(1, 2).reshape(*weight.shape[:-1], -1) for x in (scale, zero))
    return QuantGrid(scale.to(weight.dtype), zero.to(torch.int32), 0, 2**config.bits - 1, group_size=config.group_size)


def _choose_range(
    w: Float[Tensor, "rows size"], measure: "_Measure", kept: torch.dtype, config: QuantConfig
) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
    """Scale and zero point of each row; scales as they are after rounding to ``kept``, so as to judge what the model gets."""
    qmax = 2**config.bits - 1
    low, high = w.amin(1, keepdim=True).clamp(max=0), w.amax(1, keepdim=True).clamp(min=0)
    if config.symmetric:
        high = torch.maximum(-low, high)
        low = -high
    empty = low == high
    low, high = torch.where(empty, -1, low), torch.where(empty, 1, high)
    if config.symmetric:
        zeros = [torch.full_like(low, 2 ** (config.bits - 1))]
    else:
        place = -low * qmax / (high - low)  # of 0, the same for every p
        zeros = [place.round()] if config.grid == "minmax" else [place.floor(), place.ceil()]
    hundredths = [100] if config.grid == "minmax" else range(100, 0, -1)
    scales = [
        (p / 100 * (high - low) / qmax).to(kept).clamp(min=torch.finfo(kept).tiny).to(w.dtype) for p in hundredths
    ]
    choices = [torch.cat(part, 1).T for part in zip(*itertools.product(scales, zeros), strict=True)]  # [choices, rows]

    def errors(scale: Tensor, zeros: list[Tensor]) -> Iterator[Tensor]:
        """For each zero point, in units of the scale."""
        exact = w / scale
        nearest = exact.round()
        return (nearest.clamp(-zero, qmax - zero).sub_(exact) for zero in zeros)

    def chosen(index: Tensor) -> list[Tensor]:
        return [part.gather(0, index[None])[0] for part in choices]

    if len(scales) == 1:
        return choices[0][0], choices[1][0]
    losses = torch.stack(
        [scale[:, 0].square() * measure.estimate(error) for scale in scales for error in errors(scale, zeros)]
    )
    if measure.is_exact:
        best = losses.argmin(0)
    else:
        finalists = losses.topk(_FINALISTS, 0, largest=False).indices.sort(0).values
        exact_losses = []
        for finalist in finalists:
            scale, zero = (part[:, None] for part in chosen(finalist))
            (error,) = errors(scale, [zero])
            exact_losses.append(scale[:, 0].square() * measure.exact(error))
        best = finalists.gather(0, torch.stack(exact_losses).argmin(0, keepdim=True))[0]
    scale, zero = chosen(best)
    return scale, zero


class _Measure:
    """Losses e H eᵀ of many rows e; H = I if None. A large H is estimated by leading directions and what they leave."""

    def __init__(self, h: Float[Tensor, "size size"] | None):
        self.h = h
        self.is_exact = h is None or len(h) <= _EXACT
        if h is not None and not self.is_exact:
            self.basis = _leading(h, _DIRECTIONS)
            self.rest = (h.diagonal() - self.basis.square().sum(1)).clamp(min=0)

    def exact(self, error: Float[Tensor, "rows size"]) -> Float[Tensor, " rows"]:
        return torch.linalg.vecdot(error if self.h is None else error @ self.h, error)

    def estimate(self, error: Float[Tensor, "rows size"]) -> Float[Tensor, " rows"]:
        """Overwrites ``error``."""
        if self.is_exact:
            return self.exact(error)
        return (error @ self.basis).square_().sum(1) + error.square_() @ self.rest


def _leading(h: Float[Tensor, "n n"], k: int) -> Float[Tensor, "n k"]:
    """B with BBᵀ close to H in its k leading directions, by power iteration from the largest of its columns."""
    q = h[:, h.diagonal().topk(k).indices]
    for _ in range(3):
        q = h @ torch.linalg.qr(q).Q
    q = torch.linalg.qr(q).Q
    values, vectors = torch.linalg.eigh(q.T @ h @ q)
    return q @ vectors * values.clamp(min=0).sqrt()


def require_factors(weight: Tensor, h_col: Tensor, h_row: Tensor | None) -> None:
    """Raise ``InputError`` unless the factors are of the weight's size, and everything is finite."""
    if weight.ndim not in (2, 3) or not weight.numel():
        raise InputError(f"weight must have shape (rows, cols) or (heads, rows, cols); got {tuple(weight.shape)}.")
    *heads, rows, cols = weight.shape
    if tuple(h_col.shape) not in {(cols, cols), (*heads, cols, cols)}:
        raise InputError(
            f"h_col must be {cols} x {cols}, for all heads or each; got {tuple(h_col.shape)} for a weight of shape "
            f"{tuple(weight.shape)}."
        )
    if h_row is not None and tuple(h_row.shape) != (*heads, rows, rows):
        raise InputError(
            f"h_row must have shape {(*heads, rows, rows)} for a weight of shape {tuple(weight.shape)}; "
            f"got {tuple(h_row.shape)}."
        )
    for name, x in (("weight", weight), ("h_col", h_col), ("h_row", h_row)):
        if x is not None and not all(extreme.isfinite() for extreme in x.aminmax()):
            raise InputError(f"{name} has {int((~x.isfinite()).sum())} entries that are NaN or infinite.")
