"""Classifiers of others, fitted to parts of the data that may lack classes."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from sklearn.base import BaseEstimator, clone, is_classifier
from sklearn.dummy import DummyClassifier

from heedful.errors import ParameterError
from heedful.unlearn.system_aware_unlearning.selection import len_of

Method = Literal["predict_proba", "decision_function"]


def require_classifier(estimator: Any) -> None:
    """Raise ``ParameterError`` unless ``estimator`` can be cloned, fitted and asked for labels."""
    if isinstance(estimator, type) or not isinstance(estimator, BaseEstimator) or not is_classifier(estimator):
        raise ParameterError(f"estimator must be a scikit-learn classifier, an instance; got {estimator!r}.")


def member_has(method: str) -> Callable[[Any], bool]:
    """Whether the estimator of a meta-estimator has ``method``, for ``available_if``."""
    return lambda owner: hasattr(owner.estimator, method)


def fit_member(estimator: Any, X, y: np.ndarray) -> Any:
    """A fitted clone; a ``DummyClassifier`` where there is one class, None where there is nothing."""
    n_classes = len(np.unique(y))
    if n_classes == 0:
        return None
    return (DummyClassifier(strategy="most_frequent") if n_classes == 1 else clone(estimator)).fit(X, y)


def class_scores(member: Any, X, classes: np.ndarray, method: Method) -> np.ndarray:
    """What ``member`` says of all classes, shape (n, K); those it does not know get probability 0, or −inf."""
    if method == "decision_function" and isinstance(member, DummyClassifier):
        return np.tile(np.where(classes == member.classes_[0], 1.0, -1.0), (len_of(X), 1))
    values = np.asarray(getattr(member, method)(X), dtype=np.float64)
    if values.ndim == 1:  # of the second class against the first
        values = np.column_stack([-values, values])
    if values.shape[1] != len(member.classes_) or getattr(member, "decision_function_shape", "ovr") == "ovo":
        raise ParameterError(f"{member!r} scores pairs of classes, not classes. Set decision_function_shape='ovr'.")
    scores = np.full((len(values), len(classes)), 0.0 if method == "predict_proba" else -np.inf)
    scores[:, np.searchsorted(classes, member.classes_)] = values
    return scores
