"""Parametric calibrators of probability matrices, as scikit-learn estimators: the isotonic ones' peers."""

from typing import Any, ClassVar

import numpy as np
import torch

from heedful._validation import require_number
from heedful.calibrate.isotonic._base import Calibrator
from heedful.calibrate.isotonic._maps import SoftmaxMap
from heedful.calibrate.isotonic._softmax import Family, fit_softmax


class _SoftmaxCalibrator(Calibrator):
    """softmax(A log p + b), fitted by log loss."""

    _arrays = ("scale_", "bias_")
    _family: ClassVar[Family]
    max_iter: int
    tol: float

    def _fit(self, P, codes, weight, n):
        settings: dict[str, Any] = {"ridge": getattr(self, "ridge", 0.0), "max_iter": self.max_iter, "tol": self.tol}
        fit = fit_softmax(P, codes, weight, family=self._family, smallest=self._smallest, **settings)
        self.scale_, self.bias_, self.optimality_gap_, self.n_iter_ = fit.scale, fit.bias, fit.gap, fit.n_iter

    def _map(self, input):
        tables = torch.tensor(self.scale_), torch.tensor(self.bias_)
        return SoftmaxMap(*tables, smallest=self._smallest, input=input, epsilon=self.epsilon_)

    @property
    def _smallest(self) -> float:
        """A probability of 0 says little about how small it was; a logit says all."""
        kind = np.finfo(np.float64)
        return float(kind.tiny if self.input == "logits" else kind.eps)


class TemperatureCalibrator(_SoftmaxCalibrator):
    """Temperature scaling: softmax(log p / T), one number.

    Right wherever over- or under-confidence is the same for all rows and classes; needs few calibration rows.

    Parameters
    ----------
    max_iter, tol : int, float
        Most L-BFGS iterations; largest entry of the gradient to stop at.
    input : {"proba", "logits"}
        What the matrices hold; never guessed. Probabilities below float64's epsilon count as epsilon.

    Attributes
    ----------
    classes_ : array of shape (K,)
        The class of each column.
    optimality_gap_ : float
        Estimate, in nats, of what more iterations would gain: half the squared Newton decrement, in L-BFGS's own
        metric.
    temperature_ : float
        T; above 1 the model was too sure.

    References
    ----------
    Guo, Pleiss, Sun, Weinberger: On calibration of modern neural networks, ICML 2017.
    """

    _family = "temperature"

    def __init__(self, *, max_iter=500, tol=1e-7, input="proba"):
        self.max_iter, self.tol, self.input = max_iter, tol, input

    @property
    def temperature_(self) -> float:
        """T, above 1 if the model was too sure."""
        return 1 / float(self.scale_)


class VectorCalibrator(_SoftmaxCalibrator):
    """Vector scaling: softmax(a ∘ log p + b), a factor and an offset for each class.

    Parameters
    ----------
    max_iter, tol : int, float
        Most L-BFGS iterations; largest entry of the gradient to stop at.
    input : {"proba", "logits"}
        What the matrices hold; never guessed. Probabilities below float64's epsilon count as epsilon.

    Attributes
    ----------
    classes_ : array of shape (K,)
        The class of each column.
    optimality_gap_ : float
        Estimate, in nats, of what more iterations would gain: half the squared Newton decrement, in L-BFGS's own
        metric.
    scale_, bias_ : arrays of shape (K,)
        a and b.

    References
    ----------
    Guo, Pleiss, Sun, Weinberger: On calibration of modern neural networks, ICML 2017.
    """

    _family = "vector"

    def __init__(self, *, max_iter=500, tol=1e-7, input="proba"):
        self.max_iter, self.tol, self.input = max_iter, tol, input


class DirichletCalibrator(_SoftmaxCalibrator):
    """Dirichlet calibration: softmax(A log p + b), a full matrix, shrunk towards per-class scaling.

    Parameters
    ----------
    ridge : float
        Multiplies the mean square of A's off-diagonal entries plus that of b, >= 0. Usual values 0.1 to 100, the smaller
        the more rows there are for each of the K² numbers.
    max_iter, tol : int, float
        Most L-BFGS iterations; largest entry of the gradient to stop at.
    input : {"proba", "logits"}
        What the matrices hold; never guessed. Probabilities below float64's epsilon count as epsilon.

    Attributes
    ----------
    classes_ : array of shape (K,)
        The class of each column.
    optimality_gap_ : float
        Estimate, in nats, of what more iterations would gain: half the squared Newton decrement, in L-BFGS's own
        metric.
    scale_ : array of shape (K, K)
        A.
    bias_ : array of shape (K,)
        b.

    References
    ----------
    Kull, Perello-Nieto, Kängsepp, Silva Filho, Song, Flach: Beyond temperature scaling, NeurIPS 2019.
    """

    _family = "dirichlet"

    def __init__(self, *, ridge=10.0, max_iter=500, tol=1e-7, input="proba"):
        self.ridge, self.max_iter, self.tol, self.input = ridge, max_iter, tol, input

    def _check_parameters(self):
        super()._check_parameters()
        require_number(self.ridge, "ridge", low=0)
