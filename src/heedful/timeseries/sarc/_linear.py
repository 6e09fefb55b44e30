"""What comes after the features: a linear classifier, how it speaks to scikit-learn, and how it is kept in a file."""

from typing import Any

import numpy as np
from sklearn.base import ClassifierMixin, clone
from sklearn.linear_model import LogisticRegression, RidgeClassifier, RidgeClassifierCV
from sklearn.svm import LinearSVC
from sklearn.utils import assert_all_finite
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d

from heedful._validation import as_probabilities, require_fitted
from heedful.errors import InputError, ParameterError

# What a fit sets, besides classes.
_FITTED: dict[type, tuple[str, ...]] = {
    RidgeClassifierCV: ("coef_", "intercept_", "alpha_", "best_score_"),
    RidgeClassifier: ("coef_", "intercept_"),
    LogisticRegression: ("coef_", "intercept_"),
    LinearSVC: ("coef_", "intercept_"),
}
_KINDS = {kind.__name__: kind for kind in _FITTED}
_PLAIN = (bool, int, float, str, type(None))


def _has(*names):
    """For ``available_if``: whether the linear classifier has one of these methods."""

    def check(self) -> bool:
        estimator = getattr(self, "estimator_", self.estimator)
        return estimator is None or any(hasattr(estimator, name) for name in names)

    return check


class LinearOnFeatures(ClassifierMixin):
    """Classifiers of series that fit ``estimator`` to features; a class gives them by ``_read(X)`` once it is fitted."""

    def predict(self, X) -> np.ndarray:
        """Class of each series, shape (m,)."""
        require_fitted(self)
        return self.estimator_.predict(self._read(X))

    @available_if(_has("decision_function"))
    def decision_function(self, X) -> np.ndarray:
        """Scores of the linear classifier, shape (m,) for two classes and (m, C) for more."""
        require_fitted(self)
        return self.estimator_.decision_function(self._read(X))

    @available_if(_has("predict_proba", "decision_function"))
    def predict_proba(self, X) -> np.ndarray:
        """Class probabilities of the linear classifier, shape (m, C).

        If it has none: softmax of its scores, which orders the classes and is not calibrated.
        """
        require_fitted(self)
        features = self._read(X)
        if hasattr(self.estimator_, "predict_proba"):
            return self.estimator_.predict_proba(features)
        scores = self.estimator_.decision_function(features)
        if scores.ndim == 1:  # of the second class against the first
            scores = np.column_stack([-scores / 2, scores / 2])
        return as_probabilities(scores, "decision_function(X)", input="logits")

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags

    def _read(self, X) -> np.ndarray:
        raise NotImplementedError

    def _make_linear(self) -> Any:
        return RidgeClassifierCV(alphas=np.logspace(-3, 3, 10)) if self.estimator is None else clone(self.estimator)

    def _read_labels(self, y, n: int) -> np.ndarray:
        """``y`` as n labels of at least two classes; sets ``classes_``."""
        if y is None:
            raise InputError(f"{type(self).__name__} requires y to be passed, but the target y is None.")
        y = column_or_1d(y, warn=True)
        if len(y) != n:
            raise InputError(f"X has {n} cases and y has {len(y)} labels; they must be as many.")
        assert_all_finite(y, input_name="y")
        check_classification_targets(y)
        self.classes_ = np.unique(y)
        if len(self.classes_) < 2:
            raise InputError(f"y must hold at least two classes; got {len(self.classes_)} class.")
        return y


def linear_to_saved(estimator: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and metadata of a fitted linear classifier.

    Raises
    ------
    ParameterError
        If it is of another kind than these four, or has a parameter that is no number, text or list of numbers.
    """
    if type(estimator) not in _FITTED:
        raise ParameterError(
            f"only {', '.join(_KINDS)} can be saved as the classifier of the features; got {estimator!r}. Save "
            "transformer_ alone, and keep the classifier your way."
        )
    parameters = {
        name: value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
        for name, value in estimator.get_params(deep=False).items()
    }
    for name, value in parameters.items():
        if not all(isinstance(item, _PLAIN) for item in (value if isinstance(value, (list, tuple)) else [value])):
            raise ParameterError(f"{name} of {estimator!r} cannot be saved; numbers, text and lists of them can.")
    classes = np.asarray(estimator.classes_)
    meta = {
        "kind": type(estimator).__name__,
        "parameters": parameters,
        "classes": classes.tolist(),
        "classes_dtype": classes.dtype.str,
    }
    return {name: np.asarray(getattr(estimator, name)) for name in _FITTED[type(estimator)]}, meta


def linear_from_saved(arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> ClassifierMixin:
    """The classifier that ``linear_to_saved`` took apart."""
    kind = _KINDS[meta["kind"]]
    classes = np.array(meta["classes"], dtype=np.dtype(meta["classes_dtype"]))
    estimator = kind(**meta["parameters"])
    # A toy problem with these classes sets whatever this version of scikit-learn keeps beside the weights.
    toy = np.repeat(np.arange(len(classes)), 10)
    estimator.fit(np.eye(len(classes))[toy], classes[toy])
    for name in _FITTED[kind]:
        setattr(estimator, name, arrays[name] if arrays[name].ndim else arrays[name].item())
    estimator.n_features_in_ = arrays["coef_"].shape[-1]
    return estimator
