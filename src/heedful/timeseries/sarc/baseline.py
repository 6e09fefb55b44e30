"""The blind reservoirs: echo-state networks that see the step before, and four ways to describe a series by their states.

Bianchi, Scardapane, Løkse, Jenssen: Reservoir Computing Approaches for Representation and Classification of Multivariate
Time Series, IEEE Transactions on Neural Networks and Learning Systems 32, 2021.
"""

from collections.abc import Iterator
from sys import float_info

import numpy as np
from jaxtyping import Float
from sklearn.base import BaseEstimator

from heedful._random import numpy_generator
from heedful._validation import require_choice, require_number
from heedful.timeseries._series import Series, validate_series
from heedful.timeseries.sarc._blocks import cut_into_blocks, read_block, states_of
from heedful.timeseries.sarc._linear import LinearOnFeatures
from heedful.timeseries.sarc.reservoir import check_leak, recurrent_weights

_REPRESENTATIONS = ("last", "mean", "output", "reservoir")


def next_step_model(
    states: Float[np.ndarray, "n T m"], targets: Float[np.ndarray, "n T k"], ridge: float
) -> Float[np.ndarray, "n q"]:
    """Per case, the ridge regression with intercept of targets on states: its weights (m, k), row by row, then (k,)."""
    states_mean, targets_mean = states.mean(axis=1, keepdims=True), targets.mean(axis=1, keepdims=True)
    centred, columns = states - states_mean, (states - states_mean).transpose(0, 2, 1)
    system = columns @ centred + ridge * np.eye(states.shape[2])
    weights = np.linalg.solve(system, columns @ (targets - targets_mean))
    intercept = targets_mean - states_mean @ weights
    return np.concatenate([weights, intercept], axis=1).reshape(len(states), -1)


class ReservoirClassifier(LinearOnFeatures, BaseEstimator):
    """Classify series by one echo-state network and a linear classifier: the baseline that is blind to cycles.

    Parameters
    ----------
    representation : {"reservoir", "output", "mean", "last"}
        What describes a series: the ridge model that predicts the next state from the present one, or the next input from
        the present state; the mean state; or the last.
    n_units : int
        Units h of the network in one direction.
    bidirectional : bool
        Whether a second network reads the series backward; their states stand side by side, each in the order in which it
        read.
    n_components : int or None
        States are first projected on their leading principal components over all steps of all training cases. None: not.
    spectral_radius, leak, input_scaling, normalize
        As in ``SpectralReservoir``.
    ridge : float
        Penalty > 0 of the model of "output" and "reservoir". Its intercept is not penalised.
    estimator : classifier, optional
        Fitted to the features; default ``RidgeClassifierCV(alphas=np.logspace(-3, 3, 10))``.
    dtype : {"float32", "float64"}
        Of the states; what follows is float64.
    random_state : int, RandomState, Generator or None
        Draws the weights.

    Attributes
    ----------
    classes_ : array of shape (C,)
        Class labels.
    components_ : array of shape (m, u) or None
        Principal axes of the u = h or 2h states; None without ``n_components``.
    mean_ : array of shape (u,) or None
        Mean state.
    estimator_ : classifier
        The fitted linear classifier.
    n_channels_in_, n_timepoints_in_, n_features_in_, feature_names_in_
        As in ``SpectralReservoir``.

    Notes
    -----
    With m components and d channels there are m (m + 1) features for "reservoir", (m + 1) d for "output", and m else.

    References
    ----------
    Bianchi, Scardapane, Løkse, Jenssen: Reservoir Computing Approaches for Representation and Classification of
    Multivariate Time Series. IEEE Transactions on Neural Networks and Learning Systems 32, 2021.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> y = np.arange(60) % 2
    >>> X = np.sin(np.arange(50) * np.where(y, 0.5, 0.6)[:, None]) + 0.3 * rng.normal(size=(60, 50))
    >>> ReservoirClassifier(random_state=0).fit(X[:40], y[:40]).score(X[40:], y[40:]) > 0.8
    True
    """

    def __init__(
        self,
        *,
        representation="reservoir",
        n_units=100,
        bidirectional=True,
        n_components=75,
        spectral_radius=0.8,
        leak=0.0,
        input_scaling=1.0,
        ridge=10.0,
        normalize=True,
        estimator=None,
        dtype="float32",
        random_state=None,
    ):
        self.representation, self.n_units, self.bidirectional = representation, n_units, bidirectional
        self.n_components, self.spectral_radius, self.leak = n_components, spectral_radius, leak
        self.input_scaling, self.ridge, self.normalize = input_scaling, ridge, normalize
        self.estimator, self.dtype, self.random_state = estimator, dtype, random_state

    def fit(self, X, y) -> "ReservoirClassifier":
        """Draw the network, find the principal components of its states, and fit the linear classifier.

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
            If series are too short, of different channels, or not finite (it says which), or y holds one class.
        """
        self._check_parameters()
        series = validate_series(self, X, reset=True)
        y = self._read_labels(y, len(series.lengths))
        generator = numpy_generator(self.random_state)
        directions = 2 if self.bidirectional else 1
        self.w_in_ = generator.normal(size=(self.n_channels_in_, self.n_units))
        self.w_seq_ = np.stack(
            [recurrent_weights("esn", self.n_units, self.spectral_radius, generator) for _ in range(directions)]
        )
        self.mean_: np.ndarray | None = None
        self.components_: np.ndarray | None = None
        if self.n_components is not None:
            self.mean_, self.components_ = self._find_components(series)
        self.estimator_ = self._make_linear().fit(self._features(series), y)
        return self

    def _read(self, X) -> np.ndarray:
        return self._features(validate_series(self, X, reset=False))

    def _features(self, series: Series) -> Float[np.ndarray, "n F"]:
        features: list = [None] * len(series.lengths)
        for rows, states, inputs in self._run(series):
            if self.components_ is not None:
                states = (states - self.mean_) @ self.components_.T
            if self.representation == "last":
                described = states[:, -1]
            elif self.representation == "mean":
                described = states.mean(axis=1)
            else:
                targets = inputs if self.representation == "output" else states
                described = next_step_model(states[:, :-1], targets[:, 1:], self.ridge)
            for row, vector in zip(rows.tolist(), described, strict=True):
                features[row] = vector
        return np.stack(features)

    def _run(self, series: Series) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Numbers, states (m, L, u) and inputs (m, L, d) of cases of one length, a part of the collection at a time."""
        h = self.n_units
        for rows in cut_into_blocks(series.lengths):
            block = read_block(
                series, rows, input_scaling=self.input_scaling, normalize=self.normalize, dtype=self.dtype
            )
            all_states = states_of(block, self.w_in_, self.w_seq_, None, [1], self.leak)[:, 0]
            for group, length in block.groups:
                own = all_states[group, -length:].astype(np.float64)
                own[..., h:] = own[:, ::-1, h:].copy()  # in the order in which it was read
                yield rows[group], own, block.series[group, -length:].astype(np.float64)

    def _find_components(self, series: Series) -> tuple[Float[np.ndarray, " u"], Float[np.ndarray, "m u"]]:
        width = self.w_seq_.shape[0] * self.n_units
        total, products, n_steps = np.zeros(width), np.zeros((width, width)), int(series.lengths.sum())
        for _, states, _ in self._run(series):
            steps = states.reshape(-1, width)
            total += steps.sum(axis=0)
            products += steps.T @ steps
        mean = total / n_steps
        _, axes = np.linalg.eigh(products / n_steps - np.outer(mean, mean))
        axes = axes[:, ::-1][:, : self.n_components].T
        largest = np.abs(axes).argmax(axis=1)
        return mean, axes * np.sign(axes[np.arange(len(axes)), largest])[:, None]  # an eigenvector has no sign

    def _check_parameters(self) -> None:
        require_choice(self.representation, "representation", _REPRESENTATIONS)
        require_number(self.n_units, "n_units", low=1, integer=True)
        require_choice(self.bidirectional, "bidirectional", (True, False))
        if self.n_components is not None:
            require_number(self.n_components, "n_components", low=1, integer=True)
        require_number(self.spectral_radius, "spectral_radius", low=0, high=float_info.max)
        check_leak(self.leak)
        require_number(self.input_scaling, "input_scaling", low=0, high=float_info.max, open_low=True)
        require_number(self.ridge, "ridge", low=0, high=float_info.max, open_low=True)
        require_choice(self.normalize, "normalize", (True, False))
        require_choice(self.dtype, "dtype", ("float32", "float64"))
