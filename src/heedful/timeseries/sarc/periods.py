"""The prominent periods of a series: what its spectrum says, band by band, and their multiples.

A Hodrick–Prescott trend τ and the wavelet bands of what is left of the series m,

    (I + λ DᵀD) τ = m,        m − τ = A_J + D_J + … + D_1,

each have a periodogram of their own, and each contributes its strongest period, however little energy the band holds: a
cycle may be faint beside others and still tell the classes apart.
"""

import warnings
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.linalg import solveh_banded
from scipy.signal import periodogram

from heedful._validation import require_finite, require_number
from heedful.errors import HeedfulWarning, InputError, MissingExtraError, ParameterError


class Periods(NamedTuple):
    """Periods in time steps, sorted.

    Attributes
    ----------
    base : list of int
        The strongest period of each component.
    extended : list of int
        These and their multiples.
    """

    base: list[int]
    extended: list[int]


def prominent_periods(
    series: Float[np.ndarray, " L"],
    *,
    n_frequencies: int = 1,
    wavelet: str = "db4",
    hp_lambda: float = 1600.0,
    extend_to: int = 100,
) -> Periods:
    """Periods at which each component of ``series`` is strongest, and their multiples.

    Parameters
    ----------
    series : array of shape (L,), L >= 3
        Equally spaced values, for a collection the mean over its cases. Their scale and offset do not matter.
    n_frequencies : int
        How many of the largest bins of its periodogram each component contributes.
    wavelet : str
        A discrete wavelet that PyWavelets knows.
    hp_lambda : float
        Weight of the trend's curvature, from 0 to 1e12. 1600 leaves cycles longer than about 40 steps to the trend.
    extend_to : int
        Multiples of a period up to L/5 stop below this; those of a longer one stop at the end of the series.

    Returns
    -------
    Periods
        ``base`` and ``extended``, in 1 .. L − 1. Both are 1 .. min(9, L − 1) where no component has a period, with a
        warning if that is because the series does not vary.

    Notes
    -----
    O(L log L).

    Examples
    --------
    >>> import numpy as np
    >>> found = prominent_periods(np.sin(2 * np.pi * np.arange(200) / 20))
    >>> 20 in found.base, [p for p in found.extended if p % 20 == 0]
    (True, [20, 40, 60, 80])
    """
    check_ranges(n_frequencies, hp_lambda, extend_to)
    _check_wavelet(wavelet)
    try:
        series = np.asarray(series, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"series must be a vector of numbers; {error}.") from error
    if series.ndim != 1 or len(series) < 3:
        raise InputError(f"series must be a vector of at least 3 time points; got shape {series.shape}.")
    require_finite(series, "series")
    fallback = list(range(1, min(9, len(series) - 1) + 1))
    if series.min() == series.max():
        warnings.warn(
            f"The series, or the mean of the series, is constant and has no spectrum: the periods are 1 to {fallback[-1]}.",
            HeedfulWarning,
            stacklevel=2,
        )
        return Periods(fallback, fallback)
    centred = series - series.mean()
    rounding = 1e-9 * np.abs(centred).max()  # beneath it a band holds the errors of the solver, not a cycle
    parts = [part for part in components(centred, wavelet, hp_lambda) if np.abs(part).max() > rounding]
    base = sorted({p for part in parts for p in strongest_periods(part, n_frequencies)})
    return Periods(base, multiples(base, len(series), extend_to)) if base else Periods(fallback, fallback)


def components(series: Float[np.ndarray, " L"], wavelet: str, hp_lambda: float) -> list[Float[np.ndarray, " L"]]:
    """The trend, and the wavelet bands of the rest from coarse to fine; they add up to ``series``."""
    import pywt

    trend = hp_trend(series, hp_lambda)
    cycle = series - trend
    depth = pywt.dwt_max_level(len(series), wavelet)
    coefficients = pywt.wavedec(cycle, wavelet, mode="symmetric", level=depth)
    parts = [trend]
    for band in range(len(coefficients)):
        alone = [c if i == band else np.zeros_like(c) for i, c in enumerate(coefficients)]
        parts.append(pywt.waverec(alone, wavelet, mode="symmetric")[: len(series)])
    return parts


def hp_trend(series: Float[np.ndarray, " L"], hp_lambda: float) -> Float[np.ndarray, " L"]:
    """Hodrick–Prescott trend: τ with (I + λ DᵀD) τ = m, where D takes second differences. O(L)."""
    length = len(series)
    upper = np.zeros(
        (3, length)
    )  # the diagonals of DᵀD above the main one, which is last: a row of D adds these products
    for offset, products in enumerate(([1.0, 4.0, 1.0], [-2.0, -2.0], [1.0])):
        for start, product in enumerate(products, start=offset):
            upper[2 - offset, start : start + length - 2] += product
    upper *= hp_lambda
    upper[2] += 1.0
    return solveh_banded(upper, series)


def strongest_periods(component: Float[np.ndarray, " L"], n_frequencies: int) -> list[int]:
    """Periods of the largest bins of the periodogram, without those longer than the series less a step."""
    length = len(component)
    _, power = periodogram(component)
    bins = np.argsort(-power, kind="stable")[:n_frequencies]
    return [round(length / k) for k in bins.tolist() if k >= 2 and power[k] > 0]  # 1/f = L/k; f < 1/(L − 1) if k < 2


def multiples(base: list[int], length: int, extend_to: int) -> list[int]:
    """Multiples of each period, below ``extend_to`` for periods up to a fifth of the length, and the periods themselves."""
    ends = [min(length, extend_to) if 5 * p <= length else length for p in base]
    return sorted(set(base).union(*(range(p, end, p) for p, end in zip(base, ends, strict=True))))


def check_ranges(n_frequencies: Any, hp_lambda: Any, extend_to: Any) -> None:
    """Raise ``ParameterError`` unless these settings of ``prominent_periods`` are numbers in range."""
    require_number(n_frequencies, "n_frequencies", low=1, integer=True)
    require_number(hp_lambda, "hp_lambda", low=0, high=1e12)  # beyond, the system is singular in float64
    require_number(extend_to, "extend_to", low=1, integer=True)


def _check_wavelet(wavelet) -> None:
    try:
        import pywt
    except ImportError as error:
        raise MissingExtraError(
            'Finding periods needs PyWavelets: pip install "heedful[timeseries]". Or name the periods yourself.'
        ) from error
    names = pywt.wavelist(kind="discrete")
    if wavelet not in names:
        raise ParameterError(f"wavelet must be one of {', '.join(names)}; got {wavelet!r}.")
