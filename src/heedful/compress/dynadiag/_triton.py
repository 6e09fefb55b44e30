"""Diagonal products on a GPU, in Triton: straight along the diagonals, and over the blocks that they touch.

Along the diagonals, neighbouring outputs meet neighbouring inputs and values, so loads are contiguous but for the wrap,
where a mask takes over; sums are kept in float32. Over blocks (BCSR), tensor cores multiply whole tiles: worth it for many
rows when offsets come in runs, so that the diagonals touch few blocks.

With ``TRITON_INTERPRET=1`` in the environment before Triton is imported, all of it runs on a CPU, slowly.
"""

from typing import no_type_check  # Triton types the kernels

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from heedful.compress.dynadiag.pattern import BlockLayout

_PART = 2048  # most rows of x that one program of the values' gradient adds up; a multiple of every tile


@triton.jit
@no_type_check
def _product_kernel(
    x,
    values,
    offsets,
    y,
    batch,
    out_features,
    in_features,
    size,
    k,
    bucket,
    TALL: tl.constexpr,
    SUM: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, OUTPUTS), dtype=SUM)
    for i in range(k):
        offset = tl.load(offsets + i)
        if TALL:
            inputs = outputs - offset
            inputs = tl.where(inputs < 0, inputs + out_features, inputs)
            entries = inputs
        else:
            inputs = outputs + offset
            inputs = tl.where(inputs >= in_features, inputs - in_features, inputs)
            entries = outputs.to(tl.int64)
        there = (outputs < out_features) & (inputs < in_features)
        v = tl.load(values + entries, mask=there, other=0.0).to(SUM)
        at = rows[:, None] * in_features + inputs[None, :]
        total += v[None, :] * tl.load(x + at, mask=(rows < batch)[:, None] & there[None, :], other=0.0).to(SUM)
        values += size
    at = rows[:, None] * out_features + outputs[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=(rows < batch)[:, None] & (outputs < out_features)[None, :])


@triton.jit
@no_type_check
def _gradient_kernel(
    grad,
    x,
    offsets,
    parts,
    batch,
    out_features,
    in_features,
    size,
    k,
    rows_per_part,
    bucket,
    TALL: tl.constexpr,
    SUM: tl.constexpr,
    ENTRIES: tl.constexpr,
    ROWS: tl.constexpr,
):
    entries = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    i, part = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    across = entries + tl.load(offsets + i)
    if TALL:
        inputs = entries.to(tl.int64)
        outputs = tl.where(across >= out_features, across - out_features, across)
    else:
        outputs = entries.to(tl.int64)
        inputs = tl.where(across >= in_features, across - in_features, across)
    total = tl.zeros((ENTRIES,), dtype=SUM)
    for low in range(0, rows_per_part, ROWS):
        rows = part * rows_per_part + low + tl.arange(0, ROWS)
        mask = (rows < batch)[:, None] & (entries < size)[None, :]
        g = tl.load(grad + rows[:, None] * out_features + outputs[None, :], mask=mask, other=0.0).to(SUM)
        total += tl.sum(g * tl.load(x + rows[:, None] * in_features + inputs[None, :], mask=mask, other=0.0).to(SUM), 0)
    tl.store(parts + (part * k + i) * size + entries, total, mask=entries < size)


@triton.jit
@no_type_check
def _block_product_kernel(
    x,
    blocks,
    starts,
    columns,
    y,
    batch,
    out_features,
    in_features,
    bucket,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    i, inside = tl.program_id(0), tl.arange(0, BLOCK)
    rows = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for n in range(tl.load(starts + i), tl.load(starts + i + 1)):
        inputs = tl.load(columns + n) * BLOCK + inside
        mask = (rows < batch)[:, None] & (inputs < in_features)[None, :]
        left = tl.load(x + rows[:, None] * in_features + inputs[None, :], mask=mask, other=0.0)
        # The block is read transposed: in × out.
        right = tl.load(blocks + n * BLOCK * BLOCK + inside[None, :] * BLOCK + inside[:, None])
        total = tl.dot(left, right, total, input_precision=PRECISION)
    outputs = i * BLOCK + inside
    mask = (rows < batch)[:, None] & (outputs < out_features)[None, :]
    tl.store(y + rows[:, None] * out_features + outputs[None, :], total.to(y.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def _block_gradient_kernel(
    grad,
    x,
    block_rows,
    columns,
    blocks,
    batch,
    out_features,
    in_features,
    bucket,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    n, inside = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    outputs = tl.load(block_rows + n) * BLOCK + inside
    inputs = tl.load(columns + n) * BLOCK + inside
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for low in range(0, batch, ROWS):
        rows = (low + tl.arange(0, ROWS)).to(tl.int64)
        left_mask = (rows < batch)[None, :] & (outputs < out_features)[:, None]
        left = tl.load(grad + rows[None, :] * out_features + outputs[:, None], mask=left_mask, other=0.0)
        right_mask = (rows < batch)[:, None] & (inputs < in_features)[None, :]
        right = tl.load(x + rows[:, None] * in_features + inputs[None, :], mask=right_mask, other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    tl.store(blocks + n * BLOCK * BLOCK + inside[:, None] * BLOCK + inside[None, :], total)


INTERPRETED = isinstance(_product_kernel, InterpretedFunction)


def _tuned(kernel, key, tiles, names):
    """Autotuned over tiles, once for each shape and power of two of the batch; interpreted, with the last of them."""
    configs = [
        triton.Config(dict(zip(names, tile, strict=True)), num_warps=warps) for tile in tiles for warps in (4, 8)
    ]
    return triton.autotune(configs[-1:] if INTERPRETED else configs, key=[*key, "bucket"])(kernel)


_shape = ["out_features", "in_features"]
_tuned_product = _tuned(
    _product_kernel, [*_shape, "k"], [(128, 1), (256, 1), (128, 4), (128, 16), (64, 32), (128, 32)], ["OUTPUTS", "ROWS"]
)
_tuned_gradient = _tuned(
    _gradient_kernel, [*_shape, "k"], [(128, 1), (128, 8), (128, 32), (256, 16)], ["ENTRIES", "ROWS"]
)
_tuned_block_product = _tuned(_block_product_kernel, [*_shape, "BLOCK"], [(16,), (32,), (64,), (128,)], ["ROWS"])
_tuned_block_gradient = _tuned(_block_gradient_kernel, [*_shape, "BLOCK"], [(16,), (32,), (64,)], ["ROWS"])


def product(x: Tensor, values: Tensor, offsets: Tensor, out_features: int, *, tall: bool) -> Tensor:
    """``x`` (batch, in) times the transposed matrix: (batch, out). Tensors are contiguous, offsets checked."""
    (batch, in_features), (k, size) = x.shape, values.shape
    y = x.new_empty(batch, out_features)

    def grid(tile):
        return triton.cdiv(out_features, tile["OUTPUTS"]), triton.cdiv(batch, tile["ROWS"])

    sizes = batch, out_features, in_features, size, k, _bucket(batch)
    _tuned_product[grid](x, values, offsets, y, *sizes, TALL=tall, SUM=_sum_type(x))
    return y


def value_gradient(grad: Tensor, x: Tensor, offsets: Tensor, *, tall: bool) -> Tensor:
    """Entries of gradᵀ x on the diagonals, (k, d): programs add up parts of the batch, then the parts are added."""
    (batch, out_features), in_features, k = grad.shape, x.shape[1], len(offsets)
    size, n_parts = min(out_features, in_features), triton.cdiv(batch, _PART)
    sum_type = torch.float64 if x.dtype == torch.float64 else torch.float32
    parts = x.new_empty(n_parts, k, size, dtype=sum_type)

    def grid(tile):
        return triton.cdiv(size, tile["ENTRIES"]), k, n_parts

    sizes = batch, out_features, in_features, size, k, min(_PART, -(-batch // 32) * 32), _bucket(batch)
    _tuned_gradient[grid](grad, x, offsets, parts, *sizes, TALL=tall, SUM=_sum_type(x))
    return parts.sum(0).to(x.dtype)


def block_product(x: Tensor, blocks: Tensor, layout: BlockLayout, out_features: int) -> Tensor:
    """``x`` (batch, in) times the transpose of the matrix with these blocks; not for float64, which Triton cannot dot."""
    batch, in_features = x.shape
    y = x.new_empty(batch, out_features)

    def grid(tile):
        return len(layout.starts) - 1, triton.cdiv(batch, tile["ROWS"])

    _tuned_block_product[grid](
        x, blocks, layout.starts, layout.columns, y, batch, out_features, in_features, _bucket(batch),
        PRECISION=_precision(), BLOCK=blocks.shape[-1],
    )  # fmt: skip
    return y


def block_gradient(grad: Tensor, x: Tensor, layout: BlockLayout, block: int) -> Tensor:
    """Entries of gradᵀ x in the blocks of a layout, float32: (blocks, block, block)."""
    batch, out_features = grad.shape
    n = len(layout.columns)
    block_rows = torch.arange(len(layout.starts) - 1, device=x.device).repeat_interleave(layout.starts.diff())
    blocks = x.new_empty(n, block, block, dtype=torch.float32)
    _tuned_block_gradient[(n,)](
        grad, x, block_rows, layout.columns, blocks, batch, out_features, x.shape[1], _bucket(batch),
        PRECISION=_precision(), BLOCK=block,
    )  # fmt: skip
    return blocks


def _bucket(batch: int) -> int:
    return batch.bit_length()


def _sum_type(x: Tensor):
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def _precision() -> str:
    """As torch's own products of float32 matrices are set."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
