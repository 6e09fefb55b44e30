"""Diagonal products on the CPU, compiled by numba.

Seen from the outputs, every diagonal is a window that slides over the inputs: with P = max(M, N) and the inputs continued
periodically after P (padded with zeros up to it), output r and diagonal o meet input (r + o) mod P of a wide matrix and
(r - o) mod P of a tall one. So whole vectors of neighbouring outputs meet whole vectors of neighbouring inputs, in both
directions of the product, and nothing is gathered or transposed.

Few rows x are bound by reading the values, which are then streamed once, diagonal by diagonal. Many rows are bound by
arithmetic: tiles of 4 rows × 64 outputs stay in registers while the diagonals that cross those outputs go by in the order
of their windows, which overlap and so come from the first-level cache. The gradient of the values is the same tile with
other roles: 4 diagonals × 64 entries, while rows of the batch go by.
"""

import functools
import threading
from collections.abc import Callable
from typing import NamedTuple, no_type_check  # the latter: numba types the kernels

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

# A tile fills the vector registers but for a few: 32 of 512 bits with AVX-512, else 16 of 256.
_LANES, _VECTORS = (16, 4) if "+avx512f" in cpu_target.target_context.codegen().magic_tuple()[2] else (8, 3)
_WIDTH = _LANES * _VECTORS  # neighbouring outputs of a tile
_ROWS = 4
_FEW = 8  # rows of x below which the values are streamed
_NEAR = 2**17  # numbers of x that a pass over all outputs should find in the second-level cache
_WORTH_A_THREAD = 2**23  # multiplications


def product(x: np.ndarray, values: np.ndarray, offsets: np.ndarray, out_features: int, *, tall: bool) -> np.ndarray:
    """``x`` (batch, in) times the transposed matrix, C-contiguous arrays of one type, float32 or float64."""
    batch, in_features = x.shape
    if batch < _FEW or out_features < _WIDTH:
        if not tall:
            y = np.zeros((batch, out_features), x.dtype)
            _gather(y, values, np.concatenate([x, x[:, :out_features]], axis=1), offsets)
            return y
        unrolled = np.zeros((batch, out_features + in_features), x.dtype)
        _scatter(unrolled, values, x, offsets)
        unrolled[:, :in_features] += unrolled[:, out_features:]
        return np.ascontiguousarray(unrolled[:, :out_features])
    windows, period = _windows(out_features, in_features, offsets.tobytes(), tall), max(out_features, in_features)
    packed = np.empty((len(windows.which), _WIDTH), x.dtype)
    packed[windows.which < 0] = 0
    _repack(values, packed, windows.which, windows.place, windows.order, period, True)
    inputs, y = _continued(x, period), np.empty((batch, out_features), x.dtype)
    near = max(_ROWS, _NEAR // inputs.shape[1] // _ROWS * _ROWS)
    _spread(_tile_product, batch * values.size, windows, y, packed, inputs, near)
    return y


def value_gradient(grad: np.ndarray, x: np.ndarray, offsets: np.ndarray, *, tall: bool) -> np.ndarray:
    """Entries of gradᵀ x on the diagonals: (k, d) from (batch, out) and (batch, in)."""
    (batch, out_features), in_features = grad.shape, x.shape[1]
    gradient = np.zeros((len(offsets), min(out_features, in_features)), x.dtype)
    if batch < _FEW or out_features < _WIDTH:
        fixed, sliding = (x, grad) if tall else (grad, x)
        _correlate(gradient, fixed, np.concatenate([sliding, sliding[:, : fixed.shape[1]]], axis=1), offsets)
        return gradient
    windows, period = _windows(out_features, in_features, offsets.tobytes(), tall), max(out_features, in_features)
    packed = np.empty((len(windows.which), _WIDTH), x.dtype)
    inputs = _continued(x, period)
    near = max(1, _NEAR // inputs.shape[1])
    _spread(_tile_gradient, batch * gradient.size, windows, packed, grad, inputs, near)
    _repack(gradient, packed, windows.which, windows.place, windows.order, period, False)
    return gradient


class _Windows(NamedTuple):
    """The diagonals that cross each block of ``_WIDTH`` outputs, in the order of their windows on the inputs.

    Block i has the entries first[i] : first[i + 1], filled up to a multiple of ``_ROWS`` by some with which = -1. The last
    block overlaps the one before it rather than reach beyond the last output.
    """

    first: np.ndarray
    which: np.ndarray  # diagonal of each entry
    start: np.ndarray  # input at which its window begins
    place: np.ndarray  # index into the diagonal's values of the first that it needs
    order: np.ndarray  # the real entries by diagonal and block: as the values lie in memory


@functools.lru_cache(maxsize=64)
def _windows(out_features: int, in_features: int, offsets: bytes, tall: bool) -> _Windows:
    """They depend on the offsets alone, which change rarely, so they are kept."""
    numbers = np.frombuffer(offsets, np.int64)
    by_offset = numbers.argsort()
    period = max(out_features, in_features)
    rows = np.minimum(np.arange(-(-out_features // _WIDTH)) * _WIDTH, out_features - _WIDTH)
    cols = (rows[:, None] + numbers[by_offset] * (-1 if tall else 1)) % period
    crossing = (cols < in_features) | (cols + _WIDTH > period)  # elsewhere the window sees nothing but padding
    counts = crossing.sum(1)
    first = np.concatenate([[0], (-(-counts // _ROWS) * _ROWS).cumsum()])
    block, column = crossing.nonzero()
    entry = np.arange(len(block)) + (first[:-1] - counts.cumsum() + counts)[block]
    which, start, place = np.full(first[-1], -1), np.zeros(first[-1], np.int64), np.zeros(first[-1], np.int64)
    which[entry] = by_offset[column]
    start[entry] = cols[block, column]
    place[entry] = start[entry] if tall else rows[block]
    return _Windows(first, which, start, place, entry[which[entry].argsort(kind="stable")])


def _continued(x: np.ndarray, period: int) -> np.ndarray:
    """Rows padded with zeros to ``period`` and continued by a window; no power of two apart, which caches dislike."""
    batch, in_features = x.shape
    inputs = np.zeros((batch, (period + _WIDTH) // 16 * 16 + 32), x.dtype)
    inputs[:, :in_features] = x
    inputs[:, period : period + _WIDTH] = inputs[:, :_WIDTH]
    return inputs


def _spread(kernel: Callable, work: int, windows: _Windows, *given) -> None:
    """Run the kernel on all blocks of outputs, in as many threads as torch may use and the work deserves."""
    n_blocks = len(windows.first) - 1
    n = min(torch.get_num_threads(), n_blocks, 1 + work // _WORTH_A_THREAD)
    bounds = [n_blocks * i // n for i in range(n + 1)]
    parts = [(windows.first, windows.start, *bounds[i : i + 2], *given) for i in range(n)]
    others = [threading.Thread(target=kernel, args=part) for part in parts[1:]]
    for thread in others:
        thread.start()
    kernel(*parts[0])
    for thread in others:
        thread.join()


def _compiled(function: Callable) -> Callable:
    options = {"nogil": True, "fastmath": {"contract"}}  # multiply and add in one instruction
    try:
        return njit(function, cache=True, **options)
    except RuntimeError:  # there is no folder for numba's cache
        return njit(function, **options)


@_compiled
@no_type_check
def _gather(y, values, sliding, offsets):
    for k in range(len(offsets)):
        v = values[k]
        for b in range(len(y)):
            into, window = y[b], sliding[b, offsets[k] :]
            for d in range(len(v)):
                into[d] += v[d] * window[d]


@_compiled
@no_type_check
def _scatter(sliding, values, x, offsets):
    for k in range(len(offsets)):
        v = values[k]
        for b in range(len(x)):
            window, fixed = sliding[b, offsets[k] :], x[b]
            for d in range(len(v)):
                window[d] += v[d] * fixed[d]


@_compiled
@no_type_check
def _correlate(gradient, fixed, sliding, offsets):
    for k in range(len(offsets)):
        into = gradient[k]
        for b in range(len(fixed)):
            entries, window = fixed[b], sliding[b, offsets[k] :]
            for d in range(len(into)):
                into[d] += entries[d] * window[d]


def _places(builder, vector, start):
    """Where the ``_VECTORS`` vectors of a window begin; multiples of a number's size, no more."""
    return [
        builder.bitcast(builder.gep(start, [ir.IntType(64)(j * _LANES)]), vector.as_pointer()) for j in range(_VECTORS)
    ]


def _load(builder, vector, start):
    return [builder.load(place, align=4) for place in _places(builder, vector, start)]


def _store(builder, vectors, start):
    for place, vector in zip(_places(builder, vectors[0].type, start), vectors, strict=True):
        builder.store(vector, place, align=4)


@intrinsic
@no_type_check
def _tile(typing, out, out_at, out_stride, factor, factor_at, inputs, across, across_at, along, along_at, n, fresh):
    """Σ_{l < n} factor[factor_at + l, :] · inputs[across[across_at + i] + along[along_at + l] + (0 … width - 1)] for 4 i's.

    Row i is written to the flattened ``out`` from out_at + i · out_stride, or added to what is there unless ``fresh``.
    Sums are LLVM vectors, since numba by itself keeps no array in registers. Nothing is checked against bounds.
    """
    index, flag = types.intp, types.boolean
    signature = types.void(out, index, index, factor, index, inputs, across, index, along, index, index, flag)

    def generate(context, builder, signature, args):
        def pointer(position):
            return context.make_array(signature.args[position])(context, builder, args[position]).data

        out, factor, inputs, across, along = (pointer(position) for position in (0, 3, 5, 6, 8))
        _, out_at, out_stride, _, factor_at, _, _, across_at, _, along_at, n, fresh = args
        vector, whole = ir.VectorType(context.get_value_type(signature.args[0].dtype), _LANES), n.type

        def at(base, *steps):
            for step in steps:
                base = builder.gep(base, [whole(step) if isinstance(step, int) else step])
            return base

        starts = [at(inputs, builder.load(at(across, across_at, i))) for i in range(_ROWS)]
        targets = [at(out, out_at, builder.mul(out_stride, whole(i))) for i in range(_ROWS)]
        zero = vector([0.0] * _LANES)
        initial = [[builder.select(fresh, zero, old) for old in _load(builder, vector, target)] for target in targets]
        before, head, body, after = builder.block, *(builder.append_basic_block() for _ in range(3))
        builder.branch(head)

        builder.position_at_end(head)
        step = builder.phi(whole)
        step.add_incoming(whole(0), before)
        sums = [[builder.phi(vector) for _ in range(_VECTORS)] for _ in range(_ROWS)]
        for row, values in zip(sums, initial, strict=True):
            for total, value in zip(row, values, strict=True):
                total.add_incoming(value, before)
        builder.cbranch(builder.icmp_signed("<", step, n), body, after)

        builder.position_at_end(body)
        factors = _load(builder, vector, at(factor, builder.mul(builder.add(factor_at, step), whole(_WIDTH))))
        shift = builder.load(at(along, along_at, step))
        for start, row in zip(starts, sums, strict=True):
            for total, left, right in zip(row, factors, _load(builder, vector, at(start, shift)), strict=True):
                term = builder.fmul(left, right, flags=("contract",))
                total.add_incoming(builder.fadd(total, term, flags=("contract",)), body)
        step.add_incoming(builder.add(step, whole(1)), body)
        builder.branch(head)

        builder.position_at_end(after)
        for target, row in zip(targets, sums, strict=True):
            _store(builder, row, target)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
@no_type_check
def _copy(typing, target, target_at, source, source_at):
    """``_WIDTH`` numbers from one flattened array to another: a slice would take longer to make than to copy."""
    signature = types.void(target, types.intp, source, types.intp)

    def generate(context, builder, signature, args):
        target, source = (
            builder.gep(context.make_array(signature.args[i])(context, builder, args[i]).data, [args[i + 1]])
            for i in (0, 2)
        )
        vector = ir.VectorType(context.get_value_type(signature.args[0].dtype), _LANES)
        _store(builder, _load(builder, vector, source), target)
        return context.get_dummy_value()

    return signature, generate


@_compiled
@no_type_check
def _repack(values, packed, which, place, order, period, there):
    """Copy values (k, d) to packed (entries, width), or back if not ``there``, in the order in which values lie."""
    size = values.shape[1]
    for e in order:
        k, low = which[e], place[e]
        if low + _WIDTH <= size:
            if there:
                _copy(packed, e * _WIDTH, values, k * size + low)
            else:
                _copy(values, k * size + low, packed, e * _WIDTH)
            continue
        for j in range(_WIDTH):  # a window that leaves the inputs, or comes round to the first of them
            d = (low + j) % period
            if there:
                packed[e, j] = values[k, d] if d < size else 0
            elif d < size:
                values[k, d] = packed[e, j]


@_compiled
@no_type_check
def _tile_product(first, start, begin, end, y, packed, inputs, near):
    batch, out_features = y.shape
    rows = np.arange(batch) * inputs.shape[1]
    for low in range(0, batch, near):
        for i in range(begin, end):
            column, n = min(i * _WIDTH, out_features - _WIDTH), first[i + 1] - first[i]
            for b in range(low, min(low + near, batch), _ROWS):
                top = min(b, batch - _ROWS)  # the last tile overlaps the one before it
                at = top * out_features + column
                _tile(y, at, out_features, packed, first[i], inputs, rows, top, start, first[i], n, True)


@_compiled
@no_type_check
def _tile_gradient(first, start, begin, end, packed, grad, inputs, near):
    batch, out_features = grad.shape
    rows = np.arange(batch) * inputs.shape[1]
    block = np.empty((near, _WIDTH), grad.dtype)
    for low in range(0, batch, near):
        n = min(near, batch - low)
        for i in range(begin, end):
            column = min(i * _WIDTH, out_features - _WIDTH)
            for b in range(n):
                block[b] = grad[low + b, column : column + _WIDTH]
            for e in range(first[i], first[i + 1], _ROWS):
                _tile(packed, e * _WIDTH, _WIDTH, block, 0, inputs, start, e, rows, low, n, low == 0)
