"""Any deterministic scikit-learn classifier, fitted to a core set alone."""

import functools
import math
import numbers
import re
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.base import BaseEstimator, MetaEstimatorMixin, clone
from sklearn.exceptions import NotFittedError as SklearnNotFittedError
from sklearn.utils import get_tags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

from heedful._validation import require_finite
from heedful.errors import InputError, ParameterError
from heedful.unlearn.system_aware_unlearning._base import CoreSetClassifier
from heedful.unlearn.system_aware_unlearning._core import Core
from heedful.unlearn.system_aware_unlearning._data import checked_rows
from heedful.unlearn.system_aware_unlearning._digest import digest_of
from heedful.unlearn.system_aware_unlearning._members import class_scores, fit_member, member_has, require_classifier
from heedful.unlearn.system_aware_unlearning.selection import feature_rows, len_of


class SystemAwareUnlearner(MetaEstimatorMixin, CoreSetClassifier):
    """Exact deletion for any deterministic classifier: it is fitted to a core set, and refitted when that shrinks.

    Samples are kept by the leverage of their features φ(x), labels unseen; ``estimator`` is fitted to φ of those kept. A
    deletion that misses the core set changes nothing; one that touches it fits a clone to what remains (Theorem 3.1: exact
    unlearning of the core is exact unlearning of the system).

    Parameters
    ----------
    estimator : classifier
        Every ``random_state`` in it must be an int. It is cloned, never changed. Not all that scikit-learn fits is a
        function of the data: the trees of nearest neighbours count how often they are asked, searches keep times. ``audit``
        finds such things.
    feature_map : transformer or callable, optional
        φ, which must not know the data. A callable maps X to an array with a row for each sample; whatever it holds is
        taken to be public. A transformer (random Fourier features, a random projection) is cloned and fitted to one row
        of zeros, and so can know nothing; a pretrained one comes as ``FrozenEstimator(transformer)``, not as its method.
        None is the identity.
    kappa, ridge, horizon, fit_intercept, normalize, unique_ids
        As in ``SelectiveSamplingClassifier``; the constant and the norms count in leverages, while the
        estimator gets φ(x) as it is.

    Attributes
    ----------
    estimator_ : classifier or None
        Fitted to the core set; a ``DummyClassifier`` while that holds one class, None while it is empty.
    feature_map_ : transformer, callable or None
        What φ became.
    core_X_, core_y_, core_ids_
        Who is stored, in order of arrival: samples before φ, labels, ids (None if there are none).
    classes_, threshold_, horizon_, n_features_in_, feature_names_in_
        As in ``SelectiveSamplingClassifier``.

    Notes
    -----
    It has no ``save``: arbitrary estimators cannot be written without pickling. Keep ``core_X_``, ``core_y_`` and
    ``core_ids_``; ``fit`` on them, with the same horizon and classes, gives the same state.

    References
    ----------
    Lu, Sekhari, Sridharan: System-Aware Unlearning Algorithms: Use Lesser, Forget Faster, ICML 2025, Theorem 3.1.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.tree import DecisionTreeClassifier
    >>> from heedful.unlearn import SystemAwareUnlearner
    >>> X = np.random.default_rng(0).normal(size=(2000, 5))
    >>> tree = DecisionTreeClassifier(max_depth=4, random_state=0)
    >>> model = SystemAwareUnlearner(tree, horizon=2000).fit(X, X[:, 0] > 0, ids=np.arange(2000))
    >>> model.unlearn(model.core_ids_[:1]).removed, bool(model.audit())
    (1, True)
    """

    _learned = ("estimator_",)

    def __init__(
        self,
        estimator,
        *,
        feature_map=None,
        kappa=0.25,
        ridge=1.0,
        horizon=None,
        fit_intercept=True,
        normalize="sample",
        unique_ids=True,
    ):
        self.estimator, self.feature_map = estimator, feature_map
        self.kappa, self.ridge, self.horizon = kappa, ridge, horizon
        self.fit_intercept, self.normalize, self.unique_ids = fit_intercept, normalize, unique_ids

    def predict(self, X) -> np.ndarray:
        """Class of each row; where nothing is stored, the class of a tie."""
        self._fitted_core()
        X = checked_rows(self, X)
        if self.estimator_ is None:
            return self.classes_[np.full(len_of(X), 1 if len(self.classes_) == 2 else 0)]
        return self.estimator_.predict(self._mapped(X))

    @available_if(member_has("predict_proba"))
    def predict_proba(self, X) -> np.ndarray:
        """Probabilities, shape (n, K): 0 for classes that are not in the core set, equal ones if that is empty."""
        self._fitted_core()
        X = checked_rows(self, X)
        if self.estimator_ is None:
            return np.full((len_of(X), len(self.classes_)), 1 / len(self.classes_))
        return class_scores(self.estimator_, self._mapped(X), self.classes_, "predict_proba")

    @available_if(member_has("decision_function"))
    def decision_function(self, X) -> np.ndarray:
        """Scores, shape (n,) with two classes, else (n, K); −inf for classes that are not in the core set."""
        self._fitted_core()
        X = checked_rows(self, X)
        if self.estimator_ is None:
            scores = np.zeros((len_of(X), len(self.classes_)))
        else:
            scores = class_scores(self.estimator_, self._mapped(X), self.classes_, "decision_function")
        return scores[:, 1] if len(self.classes_) == 2 else scores

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = get_tags(self.estimator).input_tags.sparse
        return tags

    def _check_parameters(self) -> None:
        super()._check_parameters()
        require_classifier(self.estimator)
        _require_fixed(self.estimator, "estimator")

    def _prepare(self) -> None:
        given = self.feature_map
        if hasattr(given, "transform"):
            _require_fixed(given, "feature_map")
            self.feature_map_ = clone(given).fit(np.zeros((1, self.n_features_in_)), None)
        elif given is None or callable(given):
            _require_no_fitted_owner(given)
            self.feature_map_ = given
        else:
            raise ParameterError(f"feature_map must be a transformer, a callable or None; got {given!r}.")

    def _mapped(self, X):
        if self.feature_map_ is None:
            return X
        features = self.feature_map_.transform(X) if hasattr(self.feature_map_, "transform") else self.feature_map_(X)
        if sparse.issparse(features):
            features = sparse.csr_array(features)
            values = features.data
        else:
            features = values = np.asarray(features, dtype=np.float64)
        if features.ndim != 2 or len_of(features) != len_of(X):
            raise InputError(
                f"feature_map must give a row for each sample; it made shape {features.shape} of {len_of(X)} samples."
            )
        require_finite(values, "feature_map(X)")
        return features

    def _rows(self, X) -> np.ndarray:
        return feature_rows(self._mapped(X), fit_intercept=self.fit_intercept, normalize=self.normalize)

    def _learn(self, core: Core) -> dict[str, Any]:
        features = self._mapped(core.X) if len(core) else core.X
        return {"estimator_": fit_member(self.estimator, features, self.classes_[core.codes])}

    def _learned_arrays(self) -> dict[str, np.ndarray]:
        digest = bytes.fromhex(digest_of(self.estimator_))
        return {"estimator": np.array(list(digest), dtype=np.uint8)}

    def _deviation(self, twin: Any) -> float:
        return math.nan  # what an arbitrary estimator is made of has no distance


def _require_no_fitted_owner(feature_map: Any) -> None:
    """Raise ``ParameterError`` for a method of a fitted estimator, which no audit could tell from a public function."""
    function = feature_map.func if isinstance(feature_map, functools.partial) else feature_map
    owner = getattr(function, "__self__", None)
    if not isinstance(owner, BaseEstimator) or not hasattr(owner, "fit") or not get_tags(owner).requires_fit:
        return
    try:
        check_is_fitted(owner)
    except SklearnNotFittedError:
        return
    raise ParameterError(
        f"feature_map is a method of a fitted {type(owner).__name__}, and may know the samples that must be forgotten. Pass "
        "the transformer itself, which is fitted to a row of zeros, or FrozenEstimator(transformer) if it was fitted on "
        "public data."
    )


def _require_fixed(estimator: BaseEstimator, name: str) -> None:
    """Raise ``ParameterError`` unless two fits on the same data must give the same result, as far as parameters tell."""
    parameters = estimator.get_params(deep=True) if hasattr(estimator, "get_params") else {}
    for key, value in list(parameters.items()):
        # Splitters are no estimators; their random_state counts if they shuffle.
        if not hasattr(value, "get_params") and hasattr(value, "random_state") and getattr(value, "shuffle", True):
            parameters[f"{key}.random_state"] = value.random_state
    for key, value in parameters.items():
        if re.split(r"__|\.", key)[-1] == "random_state" and not isinstance(value, numbers.Integral):
            raise ParameterError(
                f"{name} must be deterministic, and its {key} is {value!r}: after a deletion it would be another model. Set "
                "every random_state to an int."
            )
