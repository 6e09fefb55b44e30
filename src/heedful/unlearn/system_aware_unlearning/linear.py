"""The linear classifier on a core set: ridge regression on the rows that selective sampling kept."""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.linalg import cho_solve

from heedful._validation import require_choice, require_number
from heedful.unlearn.system_aware_unlearning._base import SavedCoreSetClassifier
from heedful.unlearn.system_aware_unlearning._core import Core
from heedful.unlearn.system_aware_unlearning._data import checked_rows
from heedful.unlearn.system_aware_unlearning.selection import cholesky_factor, divisors, moments, squared_norms

_DEFINITE = 1e-8  # 1 − zᵀA⁻¹z below which removing z would lose A⁻¹'s digits


@dataclasses.dataclass(frozen=True)
class _Downdated:
    """A⁻¹, B, and how many rows were taken out of them since they were last computed from the core."""

    inverse: Float[np.ndarray, "d d"]
    moments: Float[np.ndarray, "d k"]
    removals: int


class SelectiveSamplingClassifier(SavedCoreSetClassifier):
    """A linear classifier that stores a small core set, learns from it alone, and deletes from it exactly.

    A sample is kept if its direction is new, zᵀ A⁻¹ z > T^(−κ) with A = λI + Σ z zᵀ over those kept before: labels are not
    looked at. The weights are W = A⁻¹ B with B = Σ z tᵀ, t = ±1 (one against the rest where there are more than two
    classes). To delete a sample that was not kept, nothing changes. To delete one that was, it leaves the core and
    A, B, W are computed from what remains by the code that ``fit`` runs: the state is then, bit for bit, that of a model
    that never saw the sample.

    Parameters
    ----------
    kappa : float
        κ in (0, 1]; about d·T^κ samples are kept. Usual values 0.1 to 0.3. See ``kappa_for_budget``.
    ridge : float
        λ > 0.
    horizon : int, optional
        T, how many samples are expected in all, declared in advance and public. None takes the number of rows that
        ``fit`` gets, which the threshold then gives away, and rules out ``partial_fit``.
    fit_intercept : bool
        Learn from z = (x, 1)/√2 instead of x.
    normalize : {"sample", "unit"} or None
        Divide z by max(1, ‖z‖), by ‖z‖, or not at all. Each row by itself: nothing is fitted, nothing stored. Decisions
        keep their sign.
    update : {"rebuild", "downdate"}
        How a deletion reaches the weights. "rebuild" is exact. "downdate" costs O(d²) a deletion and agrees to 1e-9, but
        its rounding still tells, in principle, what was there, and it counts the deletions since it was last exact.
    refresh_every : int
        "downdate" computes everything from the core after so many deletions.
    unique_ids : bool
        Whether each sample must have an id of its own. False: an id may name a person, or whatever samples come from, and
        all its samples are deleted together.

    Attributes
    ----------
    core_X_, core_y_, core_ids_
        Who is stored, in order of arrival: samples as they were given, labels, ids (None if there are none).
    coef_ : array of shape (1, d) or (K, d)
        Weights of x before it is divided by its norm. One row if there are two classes.
    intercept_ : array of shape (1,) or (K,)
        Weights of the constant; zeros without ``fit_intercept``.
    classes_ : array of shape (K,)
        Class list; public, taken from y unless ``fit`` was given one.
    threshold_, horizon_ : float, int
        T^(−κ), and T.
    n_features_in_, feature_names_in_
        As in scikit-learn.

    Notes
    -----
    ``fit`` takes O(n d² + m d² + d³) time for n samples of which m are kept. A deletion takes O(1) if it misses the core,
    else O(m d² + d³) for a whole batch. Memory is O(m d + d²).

    References
    ----------
    Lu, Sekhari, Sridharan: System-Aware Unlearning Algorithms: Use Lesser, Forget Faster, ICML 2025, Algorithm 1.

    Examples
    --------
    >>> import numpy as np
    >>> from heedful.unlearn import SelectiveSamplingClassifier
    >>> X = np.random.default_rng(0).normal(size=(5000, 10))
    >>> model = SelectiveSamplingClassifier(horizon=5000).fit(X, X[:, 0] > 0, ids=np.arange(5000))
    >>> len(model.core_ids_) < 250
    True
    >>> model.unlearn(model.core_ids_[:3]).removed
    3
    >>> model.audit().passed
    True
    """

    _learned = ("coef_", "intercept_", "_downdated")

    def __init__(
        self,
        *,
        kappa=0.25,
        ridge=1.0,
        horizon=None,
        fit_intercept=True,
        normalize="sample",
        update="rebuild",
        refresh_every=1000,
        unique_ids=True,
    ):
        self.kappa, self.ridge, self.horizon = kappa, ridge, horizon
        self.fit_intercept, self.normalize = fit_intercept, normalize
        self.update, self.refresh_every = update, refresh_every
        self.unique_ids = unique_ids

    def decision_function(self, X) -> np.ndarray:
        """wᵀz, shape (n,) with two classes (positive: the second), else (n, K), one against the rest."""
        self._fitted_core()
        X = checked_rows(self, X)
        by = divisors(squared_norms(X), fit_intercept=self.fit_intercept, normalize=self.normalize)
        scores = (X @ self.coef_.T + self.intercept_) / by[:, None]
        return scores.ravel() if len(self.classes_) == 2 else scores

    def predict(self, X) -> np.ndarray:
        """Class of each row; 0 counts as positive, and with more than two classes ties go to the first."""
        return self._decide(self.decision_function(X))

    def _check_parameters(self) -> None:
        super()._check_parameters()
        require_choice(self.update, "update", ("rebuild", "downdate"))
        require_number(self.refresh_every, "refresh_every", low=1, integer=True)

    def _learn(self, core: Core) -> dict[str, Any]:
        A, B = moments(core.X, self._targets(core.codes), self._rows, ridge=self.ridge)
        factor = cholesky_factor(A), True
        downdated = None
        if self.update == "downdate":
            downdated = _Downdated(cho_solve(factor, np.eye(len(A))).copy(), B, 0)
        return self._fitted(cho_solve(factor, B), downdated)

    def _learn_without(self, rows: list[int], remaining: Core) -> dict[str, Any]:
        last = self._downdated
        if (
            self.update == "rebuild"
            or last is None
            or last.removals + len(rows) >= self.refresh_every
            or not len(remaining)
        ):
            return self._learn(remaining)
        inverse, B = last.inverse.copy(), last.moments.copy()
        Z, targets = self._rows(self._core.X[rows]), self._targets(self._core.codes[rows])
        for z, target in zip(Z, targets, strict=True):
            v = inverse @ z
            left = 1 - float(z @ v)
            if left < _DEFINITE:
                return self._learn(remaining)
            v /= np.sqrt(left)
            inverse += np.multiply.outer(v, v)
            B -= np.multiply.outer(z, target)
        return self._fitted(inverse @ B, _Downdated(inverse, B, last.removals + len(rows)))

    def _fitted(self, W: np.ndarray, downdated: _Downdated | None) -> dict[str, Any]:
        d = int(self.n_features_in_)
        intercept = W[d].copy() if self.fit_intercept else np.zeros(W.shape[1])
        return {"coef_": W[:d].T.copy(), "intercept_": intercept, "_downdated": downdated}

    def _learned_arrays(self) -> dict[str, np.ndarray]:
        arrays = {"coef": self.coef_, "intercept": self.intercept_}
        if self._downdated is None:
            return arrays
        inverse, B, removals = self._downdated.inverse, self._downdated.moments, self._downdated.removals
        return arrays | {"inverse": inverse, "moments": B, "removals": np.array(removals)}

    def _from_arrays(self, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        downdated = None
        if "removals" in arrays:
            downdated = _Downdated(arrays["inverse"].copy(), arrays["moments"].copy(), int(arrays["removals"]))
        return {"coef_": arrays["coef"].copy(), "intercept_": arrays["intercept"].copy(), "_downdated": downdated}

    def _audit_tolerance(self) -> float:
        return 1e-9 if self.update == "downdate" else 0.0
