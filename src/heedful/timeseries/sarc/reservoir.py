"""Reservoirs that look one step and one cycle back, and the readouts that describe a series by them.

    h_p(t) = (1 − γ) tanh( x(t) W_in + h_p(t−1) W_s + h_p(t−p) W_c ) + γ h_p(t−1),        h_p(t) = 0 for t < 0,

    W_p = (GᵀG + ζI)⁻¹ Gᵀ X_{p..L−1},        G = [h_p(t−1), h_p(t−p)] for t = p..L−1.

States are row vectors. The arithmetic of a case never involves another one.
"""

from collections.abc import Sequence
from sys import float_info
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from heedful._validation import require_number
from heedful.errors import InputError, ParameterError


def frequency_reservoir_states(
    inputs: Float[np.ndarray, "n L h"],
    w_seq: Float[np.ndarray, "h h"],
    w_cyc: Float[np.ndarray, "K h h"] | None,
    periods: Sequence[int] | Int[np.ndarray, " K"],
    *,
    leak: float = 0.0,
) -> Float[np.ndarray, "n K L h"]:
    """States of the reservoirs of all periods, over time.

    Parameters
    ----------
    inputs : array of shape (n, L, h), float32 or float64
        The series times the input weights: x(t) W_in.
    w_seq : array of shape (h, h)
        Weights W_s from the step before.
    w_cyc : array of shape (K, h, h) or None
        Weights W_c of each period, from one cycle before. None: no such term, and the states of all periods are the same.
    periods : sequence of K int
        Each >= 1, in time steps.
    leak : float
        Share γ of the state before that stays, in [0, 1).

    Returns
    -------
    array of shape (n, K, L, h)
        In the dtype of ``inputs``. A view, read-only without ``w_cyc``: do not rely on its strides.

    Notes
    -----
    2nKLh² multiply-adds. Steps are the outer loop, and all cases and periods take one together.
    """
    check_leak(leak)
    inputs = _as_floats(inputs, "inputs", ("cases", "time", "units"))  # states are kept in their dtype
    w_seq = _as_numbers(w_seq, "w_seq", ("units", "units"))
    if w_cyc is not None:
        w_cyc = _as_numbers(w_cyc, "w_cyc", ("periods", "units", "units"))
    n, length, h = inputs.shape
    lags = as_lags(periods)
    if w_cyc is None:
        alone = frequency_reservoir_states(inputs, w_seq, np.zeros((1, h, h), inputs.dtype), [length], leak=leak)
        return np.broadcast_to(alone, (n, len(lags), length, h))
    if len(w_cyc) != len(lags):
        raise InputError(f"w_cyc has weights for {len(w_cyc)} periods and {len(lags)} periods are given.")
    if w_seq.shape != (h, h) or w_cyc.shape[1:] != (h, h):
        raise InputError(
            f"inputs are those of {h} units, so w_seq must have shape ({h}, {h}) and w_cyc (K, {h}, {h}); got {w_seq.shape} "
            f"and {w_cyc.shape}."
        )
    w_seq, w_cyc = w_seq.astype(inputs.dtype, copy=False), w_cyc.astype(inputs.dtype, copy=False)
    drive = inputs.transpose(1, 0, 2)
    states = np.empty((length + 1, len(lags), n, h), inputs.dtype)
    states[0] = 0.0  # every time before the first
    which = np.arange(len(lags))
    for t in range(1, length + 1):
        before, now = states[t - 1], states[t]
        np.matmul(before, w_seq, out=now)
        now += states[np.maximum(t - lags, 0), which] @ w_cyc
        now += drive[t - 1]
        np.tanh(now, out=now)
        if leak:
            now *= 1 - leak
            now += leak * before
    return states[1:].transpose(2, 1, 0, 3)


def reservoir_readout(
    states: Float[np.ndarray, "n K L u"],
    series: Float[np.ndarray, "n L d"],
    periods: Sequence[int] | Int[np.ndarray, " K"],
    *,
    ridge: float = 1.0,
) -> Float[np.ndarray, "n K v d"]:
    """Ridge weights that predict each series from its states one step and one cycle before, without intercept.

    Parameters
    ----------
    states : array of shape (n, K, L, u)
        As ``frequency_reservoir_states`` gives them; for two directions, both along the last axis.
    series : array of shape (n, L, d)
        What is predicted, from t = p on.
    periods : sequence of K int
        Each >= 1, in time steps.
    ridge : float
        Penalty ζ > 0.

    Returns
    -------
    array of shape (n, K, 2u, d)
        In the dtype of ``states``: weights of h(t−1), then of h(t−p). Zeros for a period that is no shorter than the series.

    Notes
    -----
    O(nK min(4Lu² + 8u³, 2L²u + L³)). Products are taken in the dtype of ``states``, systems are solved in float64.
    """
    require_number(ridge, "ridge", low=0, high=float_info.max, open_low=True)
    states = _as_floats(states, "states", ("cases", "periods", "time", "units"))
    series = _as_numbers(series, "series", ("cases", "time", "channels"))
    return readouts(states, series, periods, [ridge])[0]


def readouts(
    states: Float[np.ndarray, "n K L u"],
    series: Float[np.ndarray, "n L d"],
    periods: Sequence[int] | Int[np.ndarray, " K"],
    ridges: Sequence[float],
) -> Float[np.ndarray, "r n K v d"]:
    """``reservoir_readout`` for several penalties, which share the products GᵀG and GᵀX."""
    n, n_reservoirs, length, u = states.shape
    lags = as_lags(periods)
    if len(lags) != n_reservoirs:
        raise InputError(f"states are those of {n_reservoirs} reservoirs and {len(lags)} periods are given.")
    if series.shape[:2] != (n, length):
        raise InputError(
            f"states are those of {n} series of {length} points; series has shape {series.shape}, which is to be (n, L, d)."
        )
    weights = np.zeros((len(ridges), n, len(lags), 2 * u, series.shape[2]), states.dtype)
    for k, p in enumerate(lags.tolist()):
        if p >= length:
            continue
        rows = np.empty((n, length - p, 2 * u), states.dtype)
        rows[..., :u] = states[:, k, p - 1 : length - 1]
        rows[..., u:] = states[:, k, : length - p]
        columns = rows.transpose(0, 2, 1)
        target = np.ascontiguousarray(series[:, p:], dtype=states.dtype)
        wide = 2 * u > length - p  # then GᵀG + ζI is the larger system, and Gᵀ(GGᵀ + ζI)⁻¹X the same
        gram = (rows @ columns if wide else columns @ rows).astype(np.float64)
        right = target.astype(np.float64) if wide else (columns @ target).astype(np.float64)
        for r, ridge in enumerate(ridges):
            solution = np.linalg.solve(gram + ridge * np.eye(gram.shape[1]), right)
            weights[r, :, k] = columns @ solution.astype(states.dtype) if wide else solution
    return weights


def recurrent_weights(
    kind: str, n_units: int, radius: float, generator: np.random.Generator
) -> Float[np.ndarray, "h h"]:
    """A recurrent matrix with this spectral radius.

    "esn" draws normal entries, each kept with probability min(1, 10 / n_units). "scr" is one ring (simple cycle reservoir:
    Rodan and Tiňo, 2011) and "crj" a ring with two-way jumps over a third of it (cycle reservoir with jumps: Rodan and Tiňo,
    2012); they draw nothing.
    """
    if kind == "esn":
        weights = generator.normal(size=(n_units, n_units))
        weights *= generator.random((n_units, n_units)) < 10 / n_units
    else:
        weights = np.roll(np.eye(n_units), 1, axis=1)
        if kind == "crj":
            jump = max(2, round(n_units / 3))
            starts = np.arange(0, n_units - jump + 1, jump)
            ends = (starts + jump) % n_units
            weights[starts, ends] = weights[ends, starts] = 1.0
    largest = np.abs(np.linalg.eigvals(weights)).max()
    # A sparse draw may hold no cycle; its radius is 0 whatever its scale, and it forgets by itself.
    return weights * (radius / largest) if largest > 0 else weights


def check_leak(leak: float) -> None:
    """Raise ``ParameterError`` unless ``leak`` is a number in [0, 1)."""
    require_number(leak, "leak", low=0)
    if not leak < 1:
        raise ParameterError(f"leak must be a number >= 0 and < 1; got {leak!r}. At 1 no input would enter.")


def as_lags(periods: Any) -> Int[np.ndarray, " K"]:
    """``periods`` as an array, or ``ParameterError``."""
    lags = np.asarray(periods)
    if lags.ndim != 1 or len(lags) == 0 or lags.dtype.kind not in "iu" or lags.min() < 1:
        raise ParameterError(f"periods must be a non-empty sequence of int >= 1; got {periods!r}.")
    return lags


def _as_numbers(values: Any, name: str, axes: tuple[str, ...]) -> np.ndarray:
    """``values`` as an array of real numbers that has these axes, or ``InputError``."""
    needed = f"{name} must be an array of numbers with {len(axes)} axes ({', '.join(axes)})"
    try:
        array = np.asarray(values)
    except ValueError as error:  # nested lists of different lengths
        raise InputError(f"{needed}; {error}.") from error
    if array.ndim != len(axes):
        raise InputError(f"{needed}; got shape {array.shape}.")
    if array.dtype.kind not in "fiub":
        raise InputError(f"{needed}; got {array.dtype}.")
    return array


def _as_floats(values: Any, name: str, axes: tuple[str, ...]) -> np.ndarray:
    """``_as_numbers``, in a dtype to compute in."""
    array = _as_numbers(values, name, axes)
    if array.dtype not in (np.float32, np.float64):
        raise InputError(f"{name} must be float32 or float64; got {array.dtype}.")
    return array
