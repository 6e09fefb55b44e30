"""The kernel classifier on a core set: kernel ridge regression on the samples whose images are new directions.

In feature space the leverage of φ(x) is, by A⁻¹ = (I − Φᵀ(K + λI)⁻¹Φ)/λ,

    φ(x)ᵀ A⁻¹ φ(x) = (k(x, x) − k_Qᵀ (K_Q + λI)⁻¹ k_Q) / λ,

so that selection needs the kernel alone, and a Cholesky factor that grows by a row with each sample that is kept.
"""

import math
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.linalg import cho_solve, solve_triangular
from sklearn.metrics.pairwise import pairwise_kernels

from heedful._validation import require_choice, require_number
from heedful.unlearn.system_aware_unlearning._base import SavedCoreSetClassifier
from heedful.unlearn.system_aware_unlearning._core import Core
from heedful.unlearn.system_aware_unlearning._data import checked_rows, stack_rows
from heedful.unlearn.system_aware_unlearning.selection import cholesky_factor, divisors, len_of, squared_norms

_BLOCK = 512  # rows that meet the core set at a time
_PARAMETERS = {"linear": (), "rbf": ("gamma",), "laplacian": ("gamma",), "poly": ("gamma", "degree", "coef0")}


class KernelSelectiveSamplingClassifier(SavedCoreSetClassifier):
    """``SelectiveSamplingClassifier`` in the feature space of a kernel.

    A sample is kept if the leverage of its image exceeds T^(−κ), labels unseen; the classifier is kernel ridge regression
    on those kept, and deletion solves it anew on what remains. With the linear kernel it is the linear classifier.

    Parameters
    ----------
    kernel : {"rbf", "laplacian", "poly", "linear"}
        k(x, x′), as in ``sklearn.metrics.pairwise``.
    gamma : float, optional
        > 0; None is 1/d. Nothing here is scaled by the variance of the data, which would tell of all samples.
    degree : int
        Of the polynomial kernel, (γ xᵀx′ + coef0)^degree; >= 1.
    coef0 : float
        >= 0.
    kappa, ridge, horizon
        As in ``SelectiveSamplingClassifier``. How many samples are kept depends on the kernel: on how many directions of
        feature space the data fill.
    fit_intercept : bool
        k becomes (k + 1)/2: a constant in feature space.
    normalize : {"sample", "unit"} or None
        Divide images by max(1, ‖φ(x)‖), by ‖φ(x)‖, or not at all. Images have norm 1 under "rbf" and "laplacian".
    unique_ids : bool
        Whether each sample must have an id of its own. False: an id may name a person, or whatever samples come from, and
        all its samples are deleted together.

    Attributes
    ----------
    core_X_, core_y_, core_ids_
        Who is stored, in order of arrival: samples as they were given, labels, ids (None if there are none).
    dual_coef_ : array of shape (m, 1) or (m, K)
        (K_Q + λI)⁻¹ T, a weight for each stored sample.
    classes_, threshold_, horizon_, n_features_in_, feature_names_in_
        As in ``SelectiveSamplingClassifier``.

    Notes
    -----
    ``fit`` takes O(n m d + n m²) time for n samples of which m are kept, a deletion that touches the core O(m² d + m³),
    any other O(1). Memory is O(m d + m²) while fitting, O(m d) after it.

    References
    ----------
    Lu, Sekhari, Sridharan: System-Aware Unlearning Algorithms: Use Lesser, Forget Faster, ICML 2025, Algorithm 2.
    Gentile, Wang, Zhang: Achieving minimax rates in pool-based batch active learning, ICML 2022.

    Examples
    --------
    >>> import numpy as np
    >>> from heedful.unlearn import KernelSelectiveSamplingClassifier
    >>> X = np.random.default_rng(0).uniform(-2, 2, size=(2000, 2))
    >>> y = np.linalg.norm(X, axis=1) < 1.5
    >>> model = KernelSelectiveSamplingClassifier(kappa=0.4, horizon=2000).fit(X, y)
    >>> bool(len(model.core_y_) < 500 and model.score(X, y) > 0.93)
    True
    """

    _learned = ("dual_coef_",)

    def __init__(
        self,
        *,
        kernel="rbf",
        gamma=None,
        degree=3,
        coef0=1.0,
        kappa=0.25,
        ridge=1.0,
        horizon=None,
        fit_intercept=True,
        normalize="sample",
        unique_ids=True,
    ):
        self.kernel, self.gamma, self.degree, self.coef0 = kernel, gamma, degree, coef0
        self.kappa, self.ridge, self.horizon = kappa, ridge, horizon
        self.fit_intercept, self.normalize, self.unique_ids = fit_intercept, normalize, unique_ids

    def decision_function(self, X) -> np.ndarray:
        """Shape (n,) with two classes (positive: the second), else (n, K), one against the rest."""
        core = self._fitted_core()
        X = checked_rows(self, X)
        scores = np.empty((len_of(X), self.dual_coef_.shape[1]))
        for start in range(0, len(scores), _BLOCK):
            rows = X[start : start + _BLOCK]
            scores[start : start + _BLOCK] = self._gram(rows, core.X) @ self.dual_coef_
        return scores.ravel() if len(self.classes_) == 2 else scores

    def predict(self, X) -> np.ndarray:
        """Class of each row; 0 counts as positive, and with more than two classes ties go to the first."""
        return self._decide(self.decision_function(X))

    def _check_parameters(self) -> None:
        super()._check_parameters()
        require_choice(self.kernel, "kernel", tuple(_PARAMETERS))
        if self.gamma is not None:
            require_number(self.gamma, "gamma", low=0, open_low=True)
        require_number(self.degree, "degree", low=1, integer=True)
        require_number(self.coef0, "coef0", low=0)

    def _learn(self, core: Core) -> dict[str, Any]:
        targets = self._targets(core.codes)
        return {"dual_coef_": cho_solve((self._factor(core.X), True), targets).copy() if len(core) else targets}

    def _learned_arrays(self) -> dict[str, np.ndarray]:
        return {"dual_coef": self.dual_coef_}

    def _from_arrays(self, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        return {"dual_coef_": arrays["dual_coef"].copy()}

    def _select(self, X, core: Core | None, threshold: float) -> np.ndarray:
        self._warn_of_long_rows(float(self._squares(X, self._divisors(X)).max(initial=0)))
        stored = X[:0] if core is None else core.X
        factor = self._factor(stored)
        kept: list[int] = []
        for start in range(0, len_of(X), _BLOCK):
            block = X[start : start + _BLOCK]
            new, rows, pivots = self._grow(block, stored, factor, threshold)
            if len(new):
                factor = np.block([[factor, np.zeros((len(factor), len(new)))], [rows, pivots]])
                stored = stack_rows(stored, block[new])
                kept += (start + new).tolist()
        return np.array(kept, dtype=np.int64)

    def _grow(
        self, block, stored, factor: Float[np.ndarray, "m m"], threshold: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Which rows of a block to keep, and the rows by which they extend the Cholesky factor of K + λI.

        With L the factor and V = L⁻¹ K(Q, block), leverages times λ are k(x, x) − ‖v‖². A kept row adds a row w to V,
        w_j = (k(x, x_j) − vᵀv_j)/p with the pivot p² = λ(1 + leverage), and lowers leverages by w²/λ.
        """
        V = self._gram(stored, block)
        if len(V):
            V = solve_triangular(factor, V, lower=True)
        leverage = (self._squares(block, self._divisors(block)) - np.square(V).sum(axis=0)) / self.ridge
        places = np.flatnonzero(leverage > threshold)
        V, leverage = V[:, places], leverage[places]
        K = self._gram(block[places], block[places])
        W = np.empty((len(places), len(places)))
        new: list[int] = []
        for i in range(len(places)):
            if leverage[i] > threshold:
                pivot = math.sqrt(self.ridge * (1 + leverage[i]))
                w = (K[i] - V[:, i] @ V - W[: len(new), i] @ W[: len(new)]) / pivot
                w[i] = pivot
                leverage[i + 1 :] -= np.square(w[i + 1 :]) / self.ridge
                W[len(new)] = w
                new.append(i)
        return places[new], V[:, new].T, np.tril(W[: len(new), new].T)

    def _factor(self, X) -> Float[np.ndarray, "m m"]:
        """Lower Cholesky factor of K + λI."""
        K = self._gram(X, X)
        K.flat[:: len(K) + 1] += self.ridge
        return cholesky_factor(K) if len(K) else K

    def _gram(self, X, Y) -> Float[np.ndarray, "n m"]:
        """Inner products of normalised images."""
        if not (len_of(X) and len_of(Y)):
            return np.zeros((len_of(X), len_of(Y)))
        settings = {name: getattr(self, name) for name in _PARAMETERS[self.kernel]}
        K = pairwise_kernels(X, Y, metric=self.kernel, **settings)
        if self.fit_intercept:
            K = K + 1
        return K / (self._divisors(X)[:, None] * self._divisors(Y))

    def _squares(self, X, by: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Squared norms of images divided by ``by``."""
        return (self._raw_squares(X) + (1 if self.fit_intercept else 0)) / np.square(by)

    def _divisors(self, X) -> Float[np.ndarray, " n"]:
        return divisors(self._raw_squares(X), fit_intercept=self.fit_intercept, normalize=self.normalize)

    def _raw_squares(self, X) -> Float[np.ndarray, " n"]:
        """k(x, x) of the kernel itself."""
        squares = squared_norms(X)
        if self.kernel == "linear":
            return squares
        if self.kernel == "poly":
            gamma = 1 / X.shape[1] if self.gamma is None else self.gamma
            return (gamma * squares + self.coef0) ** self.degree
        return np.ones(len(squares))
