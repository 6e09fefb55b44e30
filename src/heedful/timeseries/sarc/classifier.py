"""A linear classifier on features of reservoirs that look back one full cycle."""

import itertools
import numbers
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
from sklearn.base import BaseEstimator, clone
from sklearn.model_selection import check_cv, cross_val_score

from heedful._files import Saved
from heedful._random import numpy_generator, spawn
from heedful._results import track
from heedful._validation import require_choice, require_fitted, require_number
from heedful.errors import InputError, MissingExtraError, ParameterError
from heedful.timeseries._series import Series, validate_series
from heedful.timeseries.sarc._linear import LinearOnFeatures, linear_from_saved, linear_to_saved
from heedful.timeseries.sarc.transformer import SpectralReservoir

T = TypeVar("T", bound="SARCClassifier")
# The paper's grid, 360 combinations.
_GRID: dict[str, tuple[float, ...]] = {
    "input_scaling": (0.5, 1.0, 2.0, 4.0),
    "spectral_radius": (0.4, 0.6, 0.8),
    "cycle_radius": (0.4, 0.6, 0.8),
    "leak": (0.0, 0.2, 0.4, 0.6, 0.8),
    "ridge": (0.5, 1.0),
}


class SARCClassifier(LinearOnFeatures, Saved, BaseEstimator):
    """Classify whole series by random reservoirs that see one step and one full cycle back.

    ``SpectralReservoir`` turns each series into features in closed form; a linear classifier does the rest.

    Parameters
    ----------
    n_units : int
        Units of each reservoir in one direction.
    estimator : classifier, optional
        Fitted to the features; default ``RidgeClassifierCV(alphas=np.logspace(-3, 3, 10))``.
    tune : {None, "random", "grid"}
        How ``input_scaling``, ``spectral_radius``, ``cycle_radius``, ``leak`` and ``ridge`` are chosen: not at all, among
        ``n_candidates`` random points of the paper's grid, or among all its 360. The accuracy of the linear classifier in
        cross-validation decides; the features, which no label enters, are made once for each candidate.
    n_candidates : int
        For ``tune="random"``.
    cv : int, splitter or iterable of splits
        Stratified folds of ``tune``, fewer where a class has fewer cases.
    periods, n_frequencies, wavelet, hp_lambda, extend_to, spectral_radius, cycle_radius, leak, input_scaling, ridge, \
reservoir, cyclic, max_pool, normalize, dtype, max_memory, n_jobs
        As in ``SpectralReservoir``.
    random_state : int, RandomState, Generator or None
        Draws the weights and the candidates.

    Attributes
    ----------
    classes_ : array of shape (C,)
        Class labels.
    transformer_ : SpectralReservoir
        The fitted reservoirs.
    estimator_ : classifier
        The fitted linear classifier.
    best_params_ : dict
        The five settings that ``tune`` chooses, as they were used.
    n_channels_in_, n_timepoints_in_, n_features_in_, feature_names_in_
        As in ``SpectralReservoir``.

    Notes
    -----
    Time grows linearly with cases, periods and time points, and does not depend on the number of classes before the linear
    classifier comes.

    References
    ----------
    SARC: Spectral-Aware Reservoir Computing for Fast and Accurate Time Series Classification. ICML 2025.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> y = np.arange(60) % 2
    >>> phase = rng.uniform(0, 2 * np.pi, size=(60, 1))
    >>> cycles = np.sin(2 * np.pi * np.arange(100) / np.where(y, 10, 13)[:, None] + phase)
    >>> X = cycles + rng.normal(size=(60, 100))
    >>> SARCClassifier(random_state=0).fit(X[:40], y[:40]).score(X[40:], y[40:]) > 0.8
    True
    """

    def __init__(
        self,
        n_units=10,
        *,
        estimator=None,
        tune=None,
        n_candidates=20,
        cv=5,
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
        self.n_units, self.estimator = n_units, estimator
        self.tune, self.n_candidates, self.cv = tune, n_candidates, cv
        self.periods, self.n_frequencies, self.wavelet = periods, n_frequencies, wavelet
        self.hp_lambda, self.extend_to = hp_lambda, extend_to
        self.spectral_radius, self.cycle_radius, self.leak = spectral_radius, cycle_radius, leak
        self.input_scaling, self.ridge, self.reservoir, self.cyclic = input_scaling, ridge, reservoir, cyclic
        self.max_pool, self.normalize, self.dtype = max_pool, normalize, dtype
        self.max_memory, self.n_jobs, self.random_state = max_memory, n_jobs, random_state

    def fit(self, X, y) -> "SARCClassifier":
        """Find the periods, draw the reservoirs, choose settings if asked to, and fit the linear classifier.

        Parameters
        ----------
        X : array-like of shape (n, L) or (n, d, L), or list of n arrays of shape (d, L_i)
            Series of at least three time points.
        y : array-like of shape (n,)
            Class labels, of at least two classes.

        Returns
        -------
        self

        Raises
        ------
        ParameterError
            For a setting out of range.
        InputError
            If series are too short, of different channels, or not finite (it says which), or y holds one class, or one
            case of a class that ``tune`` would part into folds.
        """
        self._check_parameters()
        series = validate_series(self, X, reset=True)
        y = self._read_labels(y, len(series.lengths))
        weights_seed, tuning_seed = spawn(self.random_state, 2)
        transformer = SpectralReservoir(**{name: getattr(self, name) for name in SpectralReservoir._get_param_names()})
        transformer.set_params(random_state=weights_seed)
        if self.tune is not None:
            transformer._check_parameters()  # also of the settings that will be replaced
            transformer.set_params(**self._choose(transformer, X, series, y, tuning_seed))
        self.transformer_ = transformer.fit(X)
        self.best_params_ = {name: getattr(transformer, name) for name in _GRID}
        self.estimator_ = self._make_linear().fit(self._describe(transformer, series, [transformer.ridge])[0], y)
        return self

    def to_aeon(self):
        """This classifier, unfitted, as an aeon ``BaseClassifier``.

        Raises
        ------
        MissingExtraError
            If aeon is not installed.
        """
        try:
            from heedful.timeseries.sarc._aeon import SARCAeonClassifier
        except ImportError as error:
            raise MissingExtraError('to_aeon needs aeon: pip install "heedful[timeseries]".') from error
        return SARCAeonClassifier(clone(self))

    def _read(self, X) -> np.ndarray:
        series = validate_series(self, X, reset=False)
        return self._describe(self.transformer_, series, [self.transformer_.ridge])[0]

    @staticmethod
    def _describe(transformer: SpectralReservoir, series: Series, ridges: list[float]) -> np.ndarray:
        # In single precision the scores of a case would change in their last digits with the cases beside it.
        return transformer._features(series, ridges).astype(np.float64)

    def _choose(self, transformer: SpectralReservoir, X, series: Series, y: np.ndarray, seed: int) -> dict[str, float]:
        """The settings with the best accuracy in cross-validation, among equals the first in the order of the grid."""
        counts = np.unique(y, return_counts=True)[1]
        if counts.min() < 2:
            alone = self.classes_[counts.argmin()]
            raise InputError(f"tune needs at least two cases of every class; class {alone} has 1.")
        generator = numpy_generator(seed)
        points = list(itertools.product(*_GRID.values()))
        if self.tune == "random":
            n_candidates = min(self.n_candidates, len(points))
            chosen = generator.choice(len(points), n_candidates, replace=False)
            points = [points[i] for i in sorted(chosen.tolist())]
        cv = self.cv
        if isinstance(cv, numbers.Integral):
            cv = max(2, min(cv, int(counts.min())))
        folds = list(check_cv(cv, y, classifier=True).split(series.lengths, y))
        scores: dict[tuple[float, ...], float] = {}
        # Candidates that differ in the penalty alone stand side by side, and share all but the last step.
        shared = [(point, [p[-1] for p in group]) for point, group in itertools.groupby(points, lambda p: p[:-1])]
        for point, ridges in track(shared, "candidates"):
            transformer.set_params(**dict(zip(_GRID, point, strict=False))).fit(X)
            for ridge, features in zip(ridges, self._describe(transformer, series, ridges), strict=True):
                scores[*point, ridge] = cross_val_score(
                    self._make_linear(), features, y, cv=folds, error_score="raise"
                ).mean()
        best, _ = max(scores.items(), key=lambda item: item[1])
        return dict(zip(_GRID, best, strict=True))

    def _check_parameters(self) -> None:
        require_choice(self.tune, "tune", (None, "random", "grid"))
        require_number(self.n_candidates, "n_candidates", low=1, integer=True)
        if isinstance(self.cv, numbers.Integral):
            require_number(self.cv, "cv", low=2, integer=True)
        elif isinstance(self.cv, str) or not (hasattr(self.cv, "split") or isinstance(self.cv, Iterable)):
            raise ParameterError(f"cv must be an int >= 2, a splitter or an iterable of splits; got {self.cv!r}.")

    def _to_saved(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        require_fitted(self)
        arrays, transformer = self.transformer_._to_saved()
        fitted, linear = linear_to_saved(self.estimator_)
        own = set(self.get_params(deep=False)) - set(transformer["parameters"]) - {"estimator"}
        # Of those that both have, the transformer has the chosen ones, and another seed.
        parameters = {name: getattr(self, name) for name in own | {*_GRID, "random_state"}}
        for name, default in {"cv": 5, "random_state": None}.items():
            if not isinstance(parameters[name], numbers.Integral):  # a splitter or generator, which has done its work
                parameters[name] = default
        meta = {
            "parameters": {k: v.item() if isinstance(v, np.generic) else v for k, v in parameters.items()},
            "transformer": transformer,
            "default_estimator": self.estimator is None,
            "linear": linear,
        }
        return arrays | {f"linear.{name}": array for name, array in fitted.items()}, meta

    @classmethod
    def _from_saved(cls: type[T], arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> T:
        linear = {name.removeprefix("linear."): arrays[name] for name in arrays if name.startswith("linear.")}
        fitted = linear_from_saved(linear, meta["linear"])
        estimator = None if meta["default_estimator"] else clone(fitted)
        self = cls(**{**meta["transformer"]["parameters"], **meta["parameters"], "estimator": estimator})
        self._check_parameters()
        self.transformer_, self.estimator_ = SpectralReservoir._from_saved(arrays, meta["transformer"]), fitted
        self.classes_ = fitted.classes_
        self.best_params_ = {name: getattr(self.transformer_, name) for name in _GRID}
        for name in ("n_channels_in_", "n_timepoints_in_", "n_features_in_", "feature_names_in_"):
            if hasattr(self.transformer_, name):
                setattr(self, name, getattr(self.transformer_, name))
        return self
