"""Features of series from reservoirs that look back one full cycle, as a scikit-learn transformer."""

import functools
import numbers
from collections.abc import Sequence
from sys import float_info
from typing import Any, TypeVar

import numpy as np
from joblib import Parallel, delayed, effective_n_jobs
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import _check_feature_names_in
from threadpoolctl import ThreadpoolController

from heedful._files import Saved
from heedful._random import numpy_generator
from heedful._results import track
from heedful._validation import require_choice, require_fitted, require_number
from heedful.errors import ParameterError
from heedful.timeseries._series import Series, validate_series
from heedful.timeseries.sarc._blocks import BLOCK, cut_into_blocks, read_block, states_of
from heedful.timeseries.sarc.periods import check_ranges, prominent_periods
from heedful.timeseries.sarc.reservoir import as_lags, check_leak, readouts, recurrent_weights

T = TypeVar("T", bound="SpectralReservoir")
_ARRAYS = ("w_in_", "w_seq_", "w_cyc_")
_MODES = ("spectral", "spectral-base", "all")


class SpectralReservoir(TransformerMixin, Saved, BaseEstimator):
    """Describe each series by reservoirs that look one step and one full cycle back.

    The prominent periods of the training series are found in the spectrum of their mean. For each period p a random
    reservoir runs over a series; the closed-form ridge weights that predict the series from the states one step and p steps
    before, and the maximum of each state, are the features. Nothing is trained, and no label is seen.

    Parameters
    ----------
    n_units : int
        Units h of a reservoir in one direction.
    periods : {"spectral", "spectral-base", "all"} or sequence of int
        "spectral": the prominent periods and their multiples. "spectral-base": without multiples. "all": 1 to
        ``extend_to``. Or the periods themselves, each from 1 to L − 1.
    n_frequencies, wavelet, hp_lambda, extend_to
        As in ``prominent_periods``.
    spectral_radius, cycle_radius : float
        Spectral radii >= 0 of the weights from the step before and from one cycle before. Usual: 0.4 to 0.8.
    leak : float
        Share of the state before that stays, in [0, 1). Usual: 0 to 0.8.
    input_scaling : float
        Factor > 0 on the normalised series. Usual: 0.5 to 4.
    ridge : float
        Penalty > 0 of the readout. Usual: 0.5 or 1.
    reservoir : {"biesn", "esn", "scr", "crj"}
        Echo-state network in both directions of time, or forward only; a simple cycle reservoir; a cycle reservoir with
        jumps (both forward only, their recurrent weights not random).
    cyclic : bool
        Whether states look one cycle back. Without, only the readout does.
    max_pool : bool
        Whether the maxima of the states are features.
    normalize : bool
        Whether each channel of each case is centred and divided by its largest deviation.
    dtype : {"float32", "float64"}
        Of states, products and features.
    max_memory : float
        MiB, for the states and products held at once, of all jobs together; not fewer than those of 32 cases and one period.
    n_jobs : int or None
        Threads, as in joblib.
    random_state : int, RandomState, Generator or None
        Draws the weights, in ``fit``.

    Attributes
    ----------
    periods_, base_periods_ : list of int
        Periods of the K reservoirs, sorted, and those before multiples were added.
    w_in_ : array of shape (d, h)
        Input weights, shared by all.
    w_seq_ : array of shape (directions, h, h)
        Weights from the step before, shared by periods.
    w_cyc_ : array of shape (directions, K, h, h) or None
        Weights from one cycle before; None if not ``cyclic``.
    n_channels_in_, n_timepoints_in_ : int
        Channels d and time points L of the training series; L is None where lengths differ.
    n_features_in_, feature_names_in_
        As in scikit-learn, after fitting to two-dimensional X.

    Notes
    -----
    A case's features depend on it and on the fitted weights alone, bit for bit, whatever cases, memory and jobs are beside
    it. With series of different lengths each is described over its own length, weights for periods no shorter than it are
    zero, and periods are found on the mean of the series stretched to their median length.

    O(nKLh²) for states and O(nK(Lh² + h³)) for readouts.

    References
    ----------
    SARC: Spectral-Aware Reservoir Computing for Fast and Accurate Time Series Classification. ICML 2025.

    Examples
    --------
    >>> import numpy as np
    >>> X = np.sin(2 * np.pi * np.arange(120) / np.array([[20], [20], [24]]))
    >>> reservoir = SpectralReservoir(periods=[20, 24], random_state=0).fit(X)
    >>> features = reservoir.transform(X)
    >>> features.shape, reservoir.get_feature_names_out()[0]
    ((3, 120), 'p20_w0_c0')
    >>> np.array_equal(features[0], features[1])
    True
    """

    def __init__(
        self,
        n_units=10,
        *,
        periods="spectral",
        n_frequencies=1,
        wavelet="db4",
        hp_lambda=1600.0,
        extend_to=100,
        spectral_radius=0.8,
        cycle_radius=0.8,
        leak=0.0,
        input_scaling=1.0,
        ridge=1.0,
        reservoir="biesn",
        cyclic=True,
        max_pool=True,
        normalize=True,
        dtype="float32",
        max_memory=256,
        n_jobs=1,
        random_state=None,
    ):
        self.n_units, self.periods, self.n_frequencies, self.wavelet = n_units, periods, n_frequencies, wavelet
        self.hp_lambda, self.extend_to = hp_lambda, extend_to
        self.spectral_radius, self.cycle_radius, self.leak = spectral_radius, cycle_radius, leak
        self.input_scaling, self.ridge, self.reservoir, self.cyclic = input_scaling, ridge, reservoir, cyclic
        self.max_pool, self.normalize, self.dtype = max_pool, normalize, dtype
        self.max_memory, self.n_jobs, self.random_state = max_memory, n_jobs, random_state

    def fit(self, X, y=None) -> "SpectralReservoir":
        """Find the periods of the series and draw the weights.

        Parameters
        ----------
        X : array-like of shape (n, L) or (n, d, L), or list of n arrays of shape (d, L_i)
            Series of at least three time points.
        y : None
            Ignored; there for pipelines.

        Returns
        -------
        self

        Raises
        ------
        ParameterError
            For a setting out of range.
        InputError
            If series are too short, of different channels, or not finite (it says which).
        """
        self._check_parameters()
        series = validate_series(self, X, reset=True)
        self.base_periods_, self.periods_ = self._find_periods(series)
        generator = numpy_generator(self.random_state)
        kind, directions = ("esn", 2) if self.reservoir == "biesn" else (self.reservoir, 1)

        def draw(radius, *shape):
            flat = [recurrent_weights(kind, self.n_units, radius, generator) for _ in range(np.prod(shape))]
            return np.reshape(flat, (*shape, self.n_units, self.n_units))

        self.w_in_ = generator.normal(size=(self.n_channels_in_, self.n_units))
        self.w_seq_ = draw(self.spectral_radius, directions)
        self.w_cyc_ = draw(self.cycle_radius, directions, len(self.periods_)) if self.cyclic else None
        return self

    def transform(self, X) -> np.ndarray:
        """Features of each series, shape (n, F): the readout weights of all periods, then the maxima of the states.

        F = K (4 h d + 2 h) for K periods, h units in each of two directions and d channels.
        """
        require_fitted(self)
        return self._features(validate_series(self, X, reset=False), [self.ridge])[0]

    def get_feature_names_out(self, input_features=None) -> np.ndarray:
        """Names of the features, shape (F,).

        "p12_w3_c0": of the reservoir of period 12, the weight of unit 3 (units of the step before come first, then those
        of a cycle before) in predicting channel 0. "p12_max5": the maximum of unit 5.
        """
        require_fitted(self)
        if input_features is not None and hasattr(self, "n_features_in_"):
            _check_feature_names_in(self, input_features)
        width = self._width
        channels = range(self.n_channels_in_)
        names = [f"p{p}_w{i}_c{c}" for p in self.periods_ for i in range(2 * width) for c in channels]
        if self.max_pool:
            names += [f"p{p}_max{i}" for p in self.periods_ for i in range(width)]
        return np.array(names, dtype=object)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.transformer_tags.preserves_dtype = []
        return tags

    def _features(self, series: Series, ridges: Sequence[float]) -> np.ndarray:
        """What ``transform`` gives for each penalty, shape (r, n, F), without running the reservoirs anew."""
        n, d = len(series.lengths), self.n_channels_in_
        width = self._width
        n_weights, n_maxima = 2 * width * d, width if self.max_pool else 0
        K = len(self.periods_)
        out = np.empty((len(ridges), n, K * (n_weights + n_maxima)), self.dtype)

        def describe(rows, first, last):
            """The columns of periods ``first`` to ``last`` for a block of cases."""
            block = read_block(
                series, rows, input_scaling=self.input_scaling, normalize=self.normalize, dtype=self.dtype
            )
            periods = self.periods_[first:last]
            w_cyc = None if self.w_cyc_ is None else self.w_cyc_[:, first:last]
            states = states_of(block, self.w_in_, self.w_seq_, w_cyc, periods, self.leak)
            for group, length in block.groups:
                own, cases = states[group, :, -length:], rows[group]
                weights = readouts(own, block.series[group, -length:], periods, ridges)
                out[:, cases, first * n_weights : last * n_weights] = weights.reshape(len(ridges), len(cases), -1)
                if self.max_pool:
                    start = K * n_weights + first * n_maxima
                    maxima = own.max(axis=2).reshape(len(cases), -1)
                    out[:, cases, start : start + maxima.shape[1]] = maxima

        step = self._periods_at_once(int(series.lengths.max()))
        tasks = [
            delayed(describe)(rows, first, min(first + step, K))
            for rows in cut_into_blocks(series.lengths)
            for first in range(0, K, step)
        ]
        parallel = Parallel(n_jobs=self.n_jobs, require="sharedmem", return_as="generator")
        # Small products gain nothing from threads of their own, and the bits of large ones would depend on their number.
        with _libraries().limit(limits=1, user_api="blas"):
            for _ in track(parallel(tasks), "reservoirs", len(tasks)):
                pass
        return out

    @property
    def _width(self) -> int:
        """States u of a reservoir: units in all directions."""
        directions, n_units, _ = self.w_seq_.shape
        return directions * n_units

    def _find_periods(self, series: Series) -> tuple[list[int], list[int]]:
        length = int(np.median(series.lengths))
        if not isinstance(self.periods, str):
            periods = np.unique(as_lags(self.periods)).tolist()
            if periods[-1] >= length:
                raise ParameterError(
                    f"periods must lie from 1 to L - 1 = {length - 1} for series of (median) length {length}; got "
                    f"{periods[-1]}."
                )
            return periods, periods
        if self.periods == "all":
            periods = list(range(1, min(self.extend_to, length - 1) + 1))
            return periods, periods
        base, extended = prominent_periods(
            _reference(series, length, normalize=self.normalize),
            n_frequencies=self.n_frequencies,
            wavelet=self.wavelet,
            hp_lambda=self.hp_lambda,
            extend_to=self.extend_to,
        )
        return base, extended if self.periods == "spectral" else base

    def _periods_at_once(self, length: int) -> int:
        """How many periods of a block fit into a job's share of the memory."""
        width = self._width
        d, size = self.n_channels_in_, np.dtype(self.dtype).itemsize
        states = 2 * length * width * size  # of each direction, and of both side by side
        weights = 2 * width * d * size
        inputs = length * (2 * d + width) * size  # the series, x W_in, and what a period predicts
        rows = 2 * length * width * size
        m = min(2 * width, length)
        products = m * (3 * m + 2 * d) * 8
        share = self.max_memory * 2**20 / effective_n_jobs(self.n_jobs) / BLOCK
        return max(1, int((share - inputs - rows - products) // (states + weights)))

    def _check_parameters(self) -> None:
        require_number(self.n_units, "n_units", low=1, integer=True)
        if isinstance(self.periods, str):
            require_choice(self.periods, "periods", _MODES)
        else:
            as_lags(self.periods)
        check_ranges(self.n_frequencies, self.hp_lambda, self.extend_to)
        require_number(self.spectral_radius, "spectral_radius", low=0, high=float_info.max)
        require_number(self.cycle_radius, "cycle_radius", low=0, high=float_info.max)
        check_leak(self.leak)
        require_number(self.input_scaling, "input_scaling", low=0, high=float_info.max, open_low=True)
        require_number(self.ridge, "ridge", low=0, high=float_info.max, open_low=True)
        require_choice(self.reservoir, "reservoir", ("biesn", "esn", "scr", "crj"))
        for name in ("cyclic", "max_pool", "normalize"):
            require_choice(getattr(self, name), name, (True, False))
        require_choice(self.dtype, "dtype", ("float32", "float64"))
        require_number(self.max_memory, "max_memory", low=0, high=float_info.max, open_low=True)
        if self.n_jobs is not None:
            require_number(self.n_jobs, "n_jobs", integer=True)
            if self.n_jobs == 0:
                raise ParameterError("n_jobs=0 would do nothing. Give a number of threads, or -1 for all processors.")

    def _to_saved(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        require_fitted(self)
        parameters = self.get_params(deep=False)
        parameters["periods"] = self.periods if isinstance(self.periods, str) else [int(p) for p in self.periods]
        if not isinstance(self.random_state, numbers.Integral):
            parameters["random_state"] = None  # it has done its work
        meta = {
            "parameters": {k: v.item() if isinstance(v, np.generic) else v for k, v in parameters.items()},
            "periods": self.periods_,
            "base_periods": self.base_periods_,
            "n_channels": self.n_channels_in_,
            "n_timepoints": self.n_timepoints_in_,
            "n_features": getattr(self, "n_features_in_", None),
            "feature_names": self.feature_names_in_.tolist() if hasattr(self, "feature_names_in_") else None,
        }
        return {name: getattr(self, name) for name in _ARRAYS if getattr(self, name) is not None}, meta

    @classmethod
    def _from_saved(cls: type[T], arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> T:
        self = cls(**meta["parameters"])
        self._check_parameters()
        self.w_in_, self.w_seq_ = arrays["w_in_"], arrays["w_seq_"]
        self.w_cyc_ = arrays["w_cyc_"] if self.cyclic else None
        self.periods_, self.base_periods_ = meta["periods"], meta["base_periods"]
        self.n_channels_in_, self.n_timepoints_in_ = meta["n_channels"], meta["n_timepoints"]
        if meta["n_features"] is not None:
            self.n_features_in_ = meta["n_features"]
        if meta["feature_names"] is not None:
            self.feature_names_in_ = np.array(meta["feature_names"], dtype=object)
        h, directions = self.n_units, 2 if self.reservoir == "biesn" else 1
        shapes = {"w_in_": (self.n_channels_in_, h), "w_seq_": (directions, h, h)}
        if self.cyclic:
            shapes["w_cyc_"] = (directions, len(self.periods_), h, h)
        for name, shape in shapes.items():
            if arrays[name].shape != shape:
                raise ValueError(f"{name} has shape {arrays[name].shape} in the place of {shape}")
        return self


def _reference(series: Series, length: int, *, normalize: bool) -> np.ndarray:
    """Mean over cases and channels of the normalised series, each stretched to ``length``; zeros where they cancel."""
    total, size = np.zeros(length), 0.0
    grid = np.linspace(0, 1, length)
    for rows in cut_into_blocks(series.lengths):
        block = read_block(series, rows, input_scaling=1.0, normalize=normalize, dtype="float64")
        for group, own in block.groups:
            values = block.series[group, -own:]
            means = values.mean(axis=2)
            size += float(np.abs(values / (len(series.lengths) * values[0].size)).sum())
            total += sum(m if own == length else np.interp(grid, np.linspace(0, 1, own), m) for m in means)
    mean = total / len(series.lengths)
    # What is left of series that cancel is rounding, which has a spectrum too.
    return np.zeros(length) if np.abs(mean - mean.mean()).max() <= 1e-12 * size else mean


@functools.cache
def _libraries() -> ThreadpoolController:
    """Found once: the search takes milliseconds, as long as a small transform."""
    return ThreadpoolController()
