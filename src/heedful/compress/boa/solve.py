"""The solver of GPTQ, run along the columns and the rows of a weight.

A weight ΔW away from the original costs tr(H_row ΔW H_col ΔWᵀ). With Hᵢ = Rᵢ Rᵢᵀ, Rᵢ upper triangular, entries are quantized
one by one, row by row, each making up for the errors before it: of w, what its row has become by the errors of the rows
above is v, what it has become by those of the columns to its left as well is rounded to q,

    v[j] = w[j] + Σ_{j′<j} (w − q)[j′] R_row[j′, j] / R_row[j, j],
    q[c] = round(v[c] + Σ_{c′<c} (v − q)[c′] R_col[c′, c] / R_col[c, c]).

This is GPTQ on H_row ⊗ H_col = (R_row ⊗ R_col)(R_row ⊗ R_col)ᵀ, in the form of Babai's nearest plane, which needs no inverse:
the entries still to come can undo all of an error but what R puts on the entries so far. Entry (j, c) needs nothing but
entries (j′ < j, c) and (j, c′ < c). So all entries with one value of j + c, of all heads, take their turn together, in
blocks of 128 columns: rows + 128 steps a block in place of rows · 128, with the same result.

Frantar et al.: GPTQ, ICLR 2023, arXiv:2210.17323. BoA, ICML 2025, arXiv:2406.13474. Steps of several rows: TurboBoA,
ICLR 2026, arXiv:2602.04929. Nearest plane: Chen et al., arXiv:2507.18553.
"""

import dataclasses
from typing import Literal

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from heedful._kronecker import upper_cholesky
from heedful.compress._grids import QuantGrid, require_groups
from heedful.compress.boa.config import QuantConfig
from heedful.compress.boa.grid_search import find_grid, require_factors
from heedful.errors import InputError

_BLOCK = 128  # columns that take their turn before those to their right are told
_HELD = 2**26  # entries of column factors that are inverted at a time, where every head has its own


Order = Literal["off", "rows", "columns", "both"]


@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """A weight as integer codes and the grid that gives them values.

    Parameters
    ----------
    codes : Integer[Tensor, "*heads rows cols"]
        uint8, from 0 to 2^bits − 1.
    grid : QuantGrid
        Scales and zero points, shaped [*heads, rows, groups].
    act_order : {"off", "rows", "columns", "both"}
        The order in which entries were quantized; they stand in their own places again.
    """

    codes: Integer[Tensor, "*heads rows cols"]
    grid: QuantGrid
    act_order: Order = "off"

    def dequantize(self) -> Float[Tensor, "*heads rows cols"]:
        """The quantized weight, in the dtype that the weight had."""
        return self.grid.dequantize(self.codes)

    def merge_heads(self) -> "QuantizedWeight":
        """The heads of a projection below each other: [heads, rows, cols] as [heads · rows, cols]."""
        flat = {name: getattr(self.grid, name).flatten(0, -2) for name in ("scale", "zero")}
        return dataclasses.replace(self, codes=self.codes.flatten(0, -2), grid=dataclasses.replace(self.grid, **flat))


@torch.no_grad()
def kron_quantize(
    weight: Float[Tensor, "*heads rows cols"],
    h_col: Float[Tensor, "*heads_or_none cols cols"],
    h_row: Float[Tensor, "*heads rows rows"] | None = None,
    *,
    config: QuantConfig,
    grid: QuantGrid | None = None,
) -> QuantizedWeight:
    """Quantize a weight so that tr(H_row ΔW H_col ΔWᵀ) stays small.

    Parameters
    ----------
    weight : Float[Tensor, "*heads rows cols"]
        The rows of one layer, or those of each head of a projection. Nothing given is changed.
    h_col : Float[Tensor, "cols cols"] or Float[Tensor, "heads cols cols"]
        Second moments of the inputs, for all heads or each. Its scale does not matter. Inputs that are always zero have a
        zero on the diagonal, and their weights become zero.
    h_row : Float[Tensor, "*heads rows rows"], optional
        What an error of one row does to those of others, for each head. If None, or diagonal, rows do not heed each other:
        GPTQ.
    config : QuantConfig
        ``method="gptq"`` ignores ``h_row``; ``method="rtn"`` rounds, with h_col used for the grid alone.
    grid : QuantGrid, optional
        A grid for the weight along its last axis. If None, that of ``find_grid``.

    Returns
    -------
    QuantizedWeight

    Raises
    ------
    InputError
        Shapes that do not match, or entries that are not finite.
    ConvergenceError
        A factor that is not positive definite even after damping it eleven times.

    Notes
    -----
    heads · rows · cols² multiplications, as GPTQ, plus heads · rows² · cols, and cols³ for each column factor. Solved in
    float32, or in float64 if an argument is. With several rows a step (Turbo), those of a step do not heed each other.
    """
    require_factors(weight, h_col, h_row)
    h_col = h_col.to(torch.promote_types(torch.promote_types(weight.dtype, h_col.dtype), torch.float32))
    dead = h_col.diagonal(dim1=-2, dim2=-1) == 0
    weight = weight.masked_fill(dead[..., None, :], 0)
    grid = find_grid(weight, h_col, config=config) if grid is None else _checked(grid, weight, config)
    if config.method == "rtn":
        return QuantizedWeight(grid.quantize(weight), grid)

    w, scale, zero = (x.to(h_col.dtype).reshape(-1, *x.shape[-2:]) for x in (weight, grid.scale, grid.zero))
    columns = (_revived(h_col, dead) if dead.any() else h_col).reshape(-1, *h_col.shape[-2:])
    rows = None
    if config.method == "boa" and h_row is not None and not _is_diagonal(h_row):
        rows = h_row.to(h_col.dtype).reshape(-1, *h_row.shape[-2:])

    shared = len(columns) == 1
    heads = len(w) if shared else max(1, _HELD // columns[0].numel())  # that are solved together
    parts = [slice(start, start + heads) for start in range(0, len(w), heads)]

    def solve(order: Order) -> QuantizedWeight:
        codes = [
            _solve(
                w[part],
                columns if shared else columns[part],
                None if rows is None else rows[part],
                scale[part],
                zero[part],
                order=order,
                qmax=grid.qmax,
                config=config,
            )
            for part in parts
        ]
        return QuantizedWeight(torch.cat(codes).view(weight.shape), grid, order)

    def loss(quantized: QuantizedWeight) -> float:
        return float(_kron_loss(quantized.dequantize().to(w.dtype).view(w.shape) - w, columns, rows).sum())

    if config.act_order != "auto":
        return solve(config.act_order)
    return min(map(solve, _orders(config, heed_rows=rows is not None)), key=loss)


def _kron_loss(
    delta: Float[Tensor, "*heads rows cols"],
    h_col: Float[Tensor, "*heads_or_none cols cols"],
    h_row: Float[Tensor, "*heads rows rows"] | None = None,
) -> Float[Tensor, "*heads"]:
    """tr(H_row ΔW H_col ΔWᵀ) of each head; without ``h_row``, H_row = I."""
    right = delta @ h_col
    left = delta if h_row is None else h_row @ delta
    return (left * right).sum(dim=(-2, -1))


def _revived(h: Float[Tensor, "*factors n n"], dead: Bool[Tensor, "*factors n"]) -> Float[Tensor, "*factors n n"]:
    """With the mean of the others on the diagonal for inputs that are always zero: so they do not change what damps those."""
    diagonal = h.diagonal(dim1=-2, dim2=-1)
    mean = diagonal.sum(-1, keepdim=True) / (~dead).sum(-1, keepdim=True).clamp(min=1)
    return h + torch.diag_embed(dead * torch.where(mean > 0, mean, 1))


def _orders(config: QuantConfig, *, heed_rows: bool) -> list[Order]:
    """The orders that can make a difference."""
    orders: list[Order] = ["off"]
    if heed_rows:
        orders.append("rows")
    if config.group_size == -1:
        orders.append("columns")
    return [*orders, "both"] if len(orders) == 3 else orders


def _solve(
    w: Float[Tensor, "heads rows cols"],
    h_col: Float[Tensor, "factors cols cols"],
    h_row: Float[Tensor, "heads rows rows"] | None,
    scale: Float[Tensor, "heads rows groups"],
    zero: Float[Tensor, "heads rows groups"],
    *,
    order: Order,
    qmax: int,
    config: QuantConfig,
) -> Integer[Tensor, "heads rows cols"]:
    """Codes, where asked those of greatest curvature first."""
    back_rows = back_cols = None
    if order in ("rows", "both") and h_row is not None:
        turn, back_rows = _by_size(h_row)
        w, scale, zero = (x.take_along_dim(turn[..., None], 1) for x in (w, scale, zero))
        h_row = h_row.take_along_dim(turn[:, :, None], 1).take_along_dim(turn[:, None], 2)
    if order in ("columns", "both"):
        turn, back_cols = _by_size(h_col)
        w = w.take_along_dim(turn[:, None], 2)
        h_col = h_col.take_along_dim(turn[:, :, None], 1).take_along_dim(turn[:, None], 2)
    codes = _solve_in_order(w, h_col, h_row, scale, zero, qmax=qmax, config=config)
    if back_cols is not None:
        codes = codes.take_along_dim(back_cols[:, None], 2)
    if back_rows is not None:
        codes = codes.take_along_dim(back_rows[..., None], 1)
    return codes


def _by_size(h: Float[Tensor, "k n n"]) -> tuple[Integer[Tensor, "k n"], Integer[Tensor, "k n"]]:
    """Indices from the largest diagonal entry to the smallest, and those that undo it."""
    turn = h.diagonal(dim1=-2, dim2=-1).argsort(dim=-1, descending=True, stable=True)
    return turn, turn.argsort(dim=-1)


def _solve_in_order(
    w: Float[Tensor, "heads rows cols"],
    h_col: Float[Tensor, "factors cols cols"],
    h_row: Float[Tensor, "heads rows rows"] | None,
    scale: Float[Tensor, "heads rows groups"],
    zero: Float[Tensor, "heads rows groups"],
    *,
    qmax: int,
    config: QuantConfig,
) -> Integer[Tensor, "heads rows cols"]:
    """Steps of rows, of all heads together, each one column behind the step before it.

    Tensors are laid out [columns, steps, lanes], the last step first, with a lane for every row of a step in every head:
    what takes its turn at one time is then a diagonal of columns and steps, and PyTorch has views of those.
    """
    heads, rows, cols = w.shape
    step = rows if h_row is None else min(config.rows_per_step, rows)
    steps = -(-rows // step)
    padding = steps * step - rows

    def lay_out(x: Tensor, fill: float = 0) -> Tensor:
        x = torch.nn.functional.pad(x, (0, 0, 0, padding), value=fill) if padding else x
        x = x.view(heads, steps, step, x.shape[-1]).flip(1)
        return x.permute(3, 1, 0, 2).reshape(x.shape[-1], steps, heads * step).contiguous()

    left, scale, zero = lay_out(w), lay_out(scale, 1), lay_out(zero)
    r = torch.empty_like(h_col)
    for factor, h in zip(r, h_col, strict=True):  # one by one, as each takes several times its memory
        factor.copy_(upper_cholesky(h, damping=config.damping))
        factor.div_(factor.diagonal().clone())  # columns by their pivots
    below = None if h_row is None else _compensation(upper_cholesky(h_row, damping=config.damping), step)
    group = torch.arange(cols, device=w.device) // (cols // len(scale))
    errors = left.new_zeros(left.shape)
    codes = torch.empty(left.shape, dtype=torch.uint8, device=w.device)
    for start in range(0, cols, _BLOCK):
        block = slice(start, min(start + _BLOCK, cols))
        codes[block] = _solve_block(
            left[block],
            _asked(r[:, :start, block], errors[:start]),
            r[:, block, block],
            below,
            scale[group[block]],
            zero[group[block]],
            errors[block],
            qmax=qmax,
        )
    codes = codes.view(cols, steps, heads, step).flip(1).permute(2, 1, 3, 0)
    return codes.reshape(heads, steps * step, cols)[:, :rows].contiguous()


def _asked(r: Float[Tensor, "factors k b"], errors: Float[Tensor, "k steps lanes"]) -> Float[Tensor, "b steps lanes"]:
    """What the errors of earlier columns ask of a block of columns, in one product."""
    k, steps, lanes = errors.shape
    factors, _, b = r.shape
    shares = lanes // factors
    by_factor = errors.view(k, steps, factors, shares).permute(2, 0, 1, 3).reshape(factors, k, steps * shares)
    return (r.mT @ by_factor).view(factors, b, steps, shares).permute(1, 2, 0, 3).reshape(b, steps, lanes)


def _compensation(r: Float[Tensor, "heads n n"], step: int) -> Float[Tensor, "steps heads padded step"]:
    """How much of an error of a row each later row takes over: R_earlier,B R_BB⁻¹ for the rows B of a step, steps reversed.

    The rows of a step are known together, so they solve for all of those above; for one row it is R_j,later / R_later,later.
    """
    heads, n, _ = r.shape
    r = torch.nn.functional.pad(r, (0, -n % step, 0, -n % step))
    n_padded = r.shape[-1]
    of = torch.arange(n_padded, device=r.device) // step
    inside = r * (of[:, None] == of)
    inside.diagonal(dim1=-2, dim2=-1)[:, n:] = 1
    share = torch.linalg.solve_triangular(inside, r, upper=True, left=False) * (of[:, None] < of)
    # From a row of a step to a row of a step; then to step, head, from row, to row.
    share = share.view(heads, -1, step, n_padded // step, step).flip(1, 3).permute(3, 0, 1, 2, 4)
    return share.reshape(-1, heads, n_padded, step).contiguous()


def _solve_block(
    left: Float[Tensor, "b steps lanes"],
    asked: Float[Tensor, "b steps lanes"],
    r: Float[Tensor, "factors b b"],
    below: Float[Tensor, "steps heads padded step"] | None,
    scale: Float[Tensor, "b steps lanes"],
    zero: Float[Tensor, "b steps lanes"],
    errors: Float[Tensor, "b steps lanes"],
    *,
    qmax: int,
) -> Float[Tensor, "b steps lanes"]:
    """Quantize the columns of one block: fills ``errors``, with zeros so far, and returns codes."""
    b, steps, lanes = left.shape
    factors = len(r)
    low, high, codes = -zero, qmax - zero, torch.empty_like(left)
    # With a factor for all heads, small products do the work; with one for each head they would have a single column.
    one_row, one_factor = r[0].T.contiguous().unsqueeze(1), errors.transpose(0, 1)
    r = r.permute(1, 2, 0).contiguous().unsqueeze(3)  # [from column, to column, factors, 1]
    if below is not None:
        _, heads, n, step = below.shape
        moved = left.new_zeros(b, heads, steps, step)  # how far what each row became is from what it was
    for t in range(b + steps - 1):
        offset = t - (steps - 1)
        first, last = max(0, offset), min(b, t + 1)  # columns
        begin, end = first - offset, last - offset  # steps
        now = last - first
        value, value_scale, least, greatest, error, code = (
            x.diagonal(-offset) for x in (left, scale, low, high, errors, codes)
        )  # [lanes, now]
        v = value
        if below is not None:
            share = below[begin:end] * moved[first:last].view(now, heads, n, 1)
            v = value + share.sum(2).view(now, lanes).T
        w = v + asked.diagonal(-offset)
        if factors == 1:
            w = w + torch.bmm(one_row[first:last, :, :last], one_factor[begin:end, :last]).view(now, lanes).T
        else:
            shares = r[:last, first:last] * errors[:last, begin:end].view(last, now, factors, -1)
            w = w + shares.sum(0).view(now, lanes).T
        torch.clamp((w / value_scale).round_(), least, greatest, out=code)
        q = code * value_scale
        torch.sub(v, q, out=error)
        if below is not None:
            moved.diagonal(-offset, 0, 2).copy_((value - q).view(heads, step, now))
    return codes.add_(zero)


def _is_diagonal(h: Tensor) -> bool:
    return not bool((h - torch.diag_embed(h.diagonal(dim1=-2, dim2=-1))).any())


def _checked(grid: QuantGrid, weight: Tensor, config: QuantConfig) -> QuantGrid:
    """The grid, if it is one for this weight and these bits."""
    groups = weight.shape[-1] // require_groups(weight.shape[-1], grid.group_size)
    shape, qmax = (*weight.shape[:-1], groups), 2**config.bits - 1
    if tuple(grid.scale.shape) != shape or (grid.qmin, grid.qmax) != (0, qmax):
        raise InputError(
            f"the grid must have scales of shape {shape} and codes from 0 to {qmax}; got {tuple(grid.scale.shape)} and "
            f"{grid.qmin} to {grid.qmax}. Make it by find_grid with the same config."
        )
    return grid
