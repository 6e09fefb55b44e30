"""Collections cut into blocks of cases that pass the reservoirs together.

All blocks have one size, the last one filled up with silence, so that the matrix products of a case have the same shapes,
hence the same bits, whatever other cases there are. Shorter cases of a block begin later, and as a silent reservoir stays at
zero, nothing of that shows in their states.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from heedful.timeseries._series import Series
from heedful.timeseries.sarc.reservoir import frequency_reservoir_states

BLOCK = 32  # cases; fewer waste calls, more waste work on a single case and memory on long ones


class Block(NamedTuple):
    """Cases in the order of their lengths.

    Attributes
    ----------
    rows : array of shape (m,), m <= BLOCK
        Their numbers in the collection.
    groups : list of (slice, int)
        Positions of the cases that have one length, and that length.
    series : array of shape (BLOCK, L, d)
        Normalised; L is the length of the longest case, and the others have zeros before they begin.
    """

    rows: Int[np.ndarray, " m"]
    groups: list[tuple[slice, int]]
    series: Float[np.ndarray, "block L d"]


def cut_into_blocks(lengths: Int[np.ndarray, " n"]) -> list[Int[np.ndarray, " m"]]:
    """Numbers of the cases of each block; cases of like length share one."""
    order = np.argsort(lengths, kind="stable")
    return [order[start : start + BLOCK] for start in range(0, len(order), BLOCK)]


def read_block(
    series: Series, rows: Int[np.ndarray, " m"], *, input_scaling: float, normalize: bool, dtype: str
) -> Block:
    """The cases ``rows``, sorted by length, scaled and brought into the layout of the reservoirs."""
    lengths = series.lengths[rows]
    longest = int(lengths[-1])
    values = np.zeros((BLOCK, longest, series.n_channels), dtype)
    for place, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        case = series.cases[row]
        values[place, longest - length :] = (input_scaling * (normalized(case) if normalize else case)).T
    starts = np.flatnonzero(np.diff(lengths, prepend=0)).tolist()
    stops = [*starts[1:], len(rows)]
    groups = [(slice(start, stop), int(lengths[start])) for start, stop in zip(starts, stops, strict=True)]
    return Block(rows, groups, values)


def normalized(case: Float[np.ndarray, "d L"]) -> Float[np.ndarray, "d L"]:
    """Each channel with mean 0 and largest deviation 1; zeros where it is constant."""
    case = np.ascontiguousarray(case)  # the order in which a mean adds up depends on the layout
    largest = np.abs(case).max(axis=1, keepdims=True)
    case = case / np.where(largest > 0, largest, 1.0)  # the largest numbers would overflow in a sum
    deviation = case - case.mean(axis=1, keepdims=True)
    # The mean of equal numbers is another number, by a rounding error that must not be blown up.
    constant = case.max(axis=1, keepdims=True) == case.min(axis=1, keepdims=True)
    largest = np.abs(deviation).max(axis=1, keepdims=True)
    return np.where(constant, 0.0, deviation / np.where(constant, 1.0, largest))


def states_of(
    block: Block,
    w_in: Float[np.ndarray, "d h"],
    w_seq: Float[np.ndarray, "directions h h"],
    w_cyc: Float[np.ndarray, "directions K h h"] | None,
    periods: Sequence[int],
    leak: float,
) -> Float[np.ndarray, "block K L u"]:
    """States of the cases of a block in all directions: forward, then, if there are two, backward in time."""
    drive = np.zeros((*block.series.shape[:2], w_in.shape[1]), block.series.dtype)
    for channel, weights in enumerate(w_in.astype(block.series.dtype)):  # no matrix product, whose bits depend on L
        drive += block.series[:, :, channel, None] * weights
    states = []
    for direction, weights in enumerate(w_seq):
        cyclic = None if w_cyc is None else w_cyc[direction]
        along = slice(None, None, -1 if direction else 1)
        seen = frequency_reservoir_states(drive[:, along], weights, cyclic, periods, leak=leak)
        states.append(seen[:, :, along])
    return states[0] if len(states) == 1 else np.concatenate(states, axis=-1)
