"""A classifier with calibrated probabilities, in the place of scikit-learn's ``CalibratedClassifierCV``."""

import inspect
import warnings
from typing import Any

import numpy as np
import sklearn
from sklearn.base import BaseEstimator, ClassifierMixin, MetaEstimatorMixin, clone
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import StratifiedKFold, check_cv, cross_val_predict
from sklearn.svm import LinearSVC
from sklearn.utils import Bunch, _safe_indexing, assert_all_finite, get_tags, indexable
from sklearn.utils.metadata_routing import MetadataRouter, MethodMapping, process_routing
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_method_params, _check_sample_weight, column_or_1d

from heedful._random import spawn
from heedful._validation import as_probabilities, require_choice, require_fitted
from heedful.calibrate.isotonic._base import Calibrator
from heedful.calibrate.isotonic._calibrators import (
    FlattenedIsotonicCalibrator,
    NormalizationAwareIsotonicCalibrator,
    OneVsRestIsotonicCalibrator,
    SortedCumulativeIsotonicCalibrator,
)
from heedful.calibrate.isotonic._scaling import DirichletCalibrator, TemperatureCalibrator, VectorCalibrator
from heedful.errors import HeedfulWarning, InputError, ParameterError

METHODS: dict[str, type[Calibrator]] = {
    "na_fir": NormalizationAwareIsotonicCalibrator,
    "scir": SortedCumulativeIsotonicCalibrator,
    "fir": FlattenedIsotonicCalibrator,
    "ovr": OneVsRestIsotonicCalibrator,
    "temperature": TemperatureCalibrator,
    "vector": VectorCalibrator,
    "dirichlet": DirichletCalibrator,
}


class CalibratedClassifier(ClassifierMixin, MetaEstimatorMixin, BaseEstimator):
    """Fit a classifier and calibrate its probabilities on data that it did not see.

    Arguments mean what they mean in scikit-learn's ``CalibratedClassifierCV``. A classifier that is fitted already is
    given as ``FrozenEstimator(classifier)``, and ``fit`` then takes the held-out calibration set.

    Parameters
    ----------
    estimator : classifier, optional
        With ``predict_proba`` or, failing that, ``decision_function``, whose values then pass through softmax (a
        sigmoid for two classes). Default ``LinearSVC(random_state=0)``.
    method : {"na_fir", "scir", "fir", "ovr", "temperature", "vector", "dirichlet"} or calibrator
        The calibrator, with its defaults; or an instance, of which a clone is fitted.
    cv : int, splitter or iterable, optional
        How folds are cut; default 5 stratified ones.
    ensemble : bool or "auto"
        True: a pair of classifier and calibrator for each fold; probabilities are averaged. False: one classifier,
        fitted on everything, and one calibrator, fitted on out-of-fold probabilities. "auto": False for a frozen
        classifier, else True.
    random_state : int, RandomState, Generator or None
        Shuffles the rows before folds are cut, where ``cv`` is None or an int. None keeps their order, as scikit-learn
        does.

    Attributes
    ----------
    classes_ : array of shape (K,)
        Class labels, in the order of the columns of ``predict_proba``.
    calibrated_classifiers_ : list of Bunch(estimator, calibrator)
        The fitted pairs: one a fold, or one.
    n_features_in_, feature_names_in_
        As the fitted classifier has them.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from sklearn.model_selection import train_test_split
    >>> from sklearn.naive_bayes import GaussianNB
    >>> from heedful.calibrate import CalibratedClassifier, expected_calibration_error
    >>> X, X_test, y, y_test = train_test_split(*load_digits(return_X_y=True), random_state=0)
    >>> raw = GaussianNB().fit(X, y).predict_proba(X_test)
    >>> calibrated = CalibratedClassifier(GaussianNB()).fit(X, y).predict_proba(X_test)
    >>> expected_calibration_error(y_test, calibrated) < expected_calibration_error(y_test, raw) / 2
    True
    """

    def __init__(
        self,
        estimator=None,
        *,
        method="na_fir",
        cv=None,
        ensemble="auto",
        random_state=None,
    ):
        self.estimator, self.method, self.cv = estimator, method, cv
        self.ensemble, self.random_state = ensemble, random_state

    def fit(self, X, y, sample_weight=None, **fit_params) -> "CalibratedClassifier":
        """Fit classifier and calibrator.

        Parameters
        ----------
        X : array-like of shape (n, d)
            What the classifier takes.
        y : array-like of shape (n,)
            Class labels.
        sample_weight : array-like of shape (n,), optional
            Weights of the rows, for the calibrator and, where its ``fit`` takes them, for the classifier.
        **fit_params
            For the classifier's ``fit``; with metadata routing enabled, for whoever requested them.

        Raises
        ------
        InputError
            If a class has fewer rows than there are folds.
        """
        require_choice(self.ensemble, "ensemble", (True, False, "auto"))
        calibrator = self._make_calibrator()
        X, y = indexable(X, column_or_1d(y, warn=True))
        assert_all_finite(y, input_name="y")
        check_classification_targets(y)
        estimator = self._estimator()
        if not (hasattr(estimator, "predict_proba") or hasattr(estimator, "decision_function")):
            raise ParameterError(
                "CalibratedClassifier needs a classifier with predict_proba or decision_function; got "
                f"{estimator!r}. A regressor's output cannot be calibrated here."
            )
        frozen = isinstance(estimator, FrozenEstimator)
        self.classes_, codes = _frozen_codes(estimator, y) if frozen else np.unique(y, return_inverse=True)
        params = self._route(estimator, sample_weight, fit_params)
        if sample_weight is not None:
            sample_weight = _check_sample_weight(sample_weight, X, dtype=np.float64)
        weighted = codes if sample_weight is None else codes[sample_weight > 0]
        if (weighted == weighted[:1]).all():
            raise InputError(
                f"y must hold at least two classes with positive weight; got one class of {self.classes_.tolist()}."
            )
        in_folds = not frozen if self.ensemble == "auto" else self.ensemble

        self.calibrated_classifiers_: list[Bunch] = []
        if in_folds:
            cv = self._splitter(y)
            for train, test in cv.split(X, y, **params.splitter.split):
                fold = clone(estimator)
                fold_params = _check_method_params(X, params=params.estimator.fit, indices=train)
                fold.fit(_safe_indexing(X, train), _safe_indexing(y, train), **fold_params)
                P = self._probabilities(fold, _safe_indexing(X, test))
                weight = None if sample_weight is None else sample_weight[test]
                self._add_pair(fold, calibrator, P, codes[test], weight)
        elif frozen:  # It has seen none of these rows.
            self._add_pair(estimator, calibrator, self._probabilities(estimator, X), codes, sample_weight)
        else:
            whole = clone(estimator)
            cv = list(self._splitter(y).split(X, y, **params.splitter.split))
            values = cross_val_predict(whole, X, y, cv=cv, method=_response(whole), params=params.estimator.fit)
            whole.fit(X, y, **params.estimator.fit)
            self._add_pair(whole, calibrator, self._as_matrix(values, _response(whole)), codes, sample_weight)

        first = self.calibrated_classifiers_[0].estimator
        for name in ("n_features_in_", "feature_names_in_"):
            if hasattr(first, name):
                setattr(self, name, getattr(first, name))
        return self

    def predict_proba(self, X) -> np.ndarray:
        """Calibrated probabilities, shape (m, K): the mean over the fitted pairs."""
        require_fitted(self)
        pairs = self.calibrated_classifiers_
        return sum(p.calibrator.predict_proba(self._probabilities(p.estimator, X)) for p in pairs) / len(pairs)

    def predict(self, X) -> np.ndarray:
        """The class with the largest calibrated probability; it can differ from what the classifier itself predicts."""
        require_fitted(self)
        return self.classes_[self.predict_proba(X).argmax(axis=1)]

    def get_metadata_routing(self) -> MetadataRouter:
        """Who gets which metadata: ``fit`` of the classifier, ``split`` of the splitter."""
        router = MetadataRouter(owner=self).add_self_request(self)
        router.add(estimator=self._estimator(), method_mapping=MethodMapping().add(caller="fit", callee="fit"))
        return router.add(splitter=self.cv, method_mapping=MethodMapping().add(caller="fit", callee="split"))

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = get_tags(self._estimator()).input_tags.sparse
        return tags

    def _estimator(self):
        if self.estimator is not None:
            return self.estimator
        estimator = LinearSVC(random_state=0)
        if sklearn.get_config()["enable_metadata_routing"]:
            estimator.set_fit_request(sample_weight=True)
        return estimator

    def _make_calibrator(self):
        if isinstance(self.method, str):
            require_choice(self.method, "method", tuple(METHODS))
            return METHODS[self.method]()
        if not (hasattr(self.method, "fit") and hasattr(self.method, "predict_proba")):
            raise ParameterError(
                f"method must be one of {', '.join(map(repr, METHODS))}, or a calibrator with fit and predict_proba; got "
                f"{self.method!r}."
            )
        calibrator = clone(self.method)
        # Whatever the classifier returns reaches the calibrator as probabilities.
        return calibrator.set_params(input="proba") if "input" in calibrator.get_params(deep=False) else calibrator

    def _splitter(self, labels: np.ndarray):
        n_folds = self.cv if isinstance(self.cv, int) else getattr(self.cv, "n_splits", None)
        counts = np.unique(labels, return_counts=True)[1]
        if n_folds is not None and counts.min() < n_folds:
            raise InputError(
                f"Requesting {n_folds}-fold cross-validation but provided less than {n_folds} examples for at least one "
                f"class (the rarest has {counts.min()}). Use fewer folds, or merge rare classes."
            )
        if self.random_state is not None and (self.cv is None or isinstance(self.cv, int)):
            return StratifiedKFold(n_folds or 5, shuffle=True, random_state=spawn(self.random_state, 1)[0])
        return check_cv(self.cv, labels, classifier=True)

    def _route(self, estimator, sample_weight, fit_params: dict[str, Any]) -> Bunch:
        """Parameters for ``estimator.fit`` and ``splitter.split``, with or without scikit-learn's metadata routing."""
        if sklearn.get_config()["enable_metadata_routing"]:
            return process_routing(self, "fit", sample_weight=sample_weight, **fit_params)
        if sample_weight is not None and not isinstance(estimator, FrozenEstimator):
            if "sample_weight" in inspect.signature(estimator.fit).parameters:
                fit_params = {**fit_params, "sample_weight": sample_weight}
            else:
                warnings.warn(
                    f"{type(estimator).__name__}.fit takes no sample_weight: the weights reach the calibrator alone.",
                    HeedfulWarning,
                    stacklevel=3,
                )
        return Bunch(estimator=Bunch(fit=fit_params), splitter=Bunch(split={}))

    def _add_pair(self, estimator, calibrator, P, codes, weight) -> None:
        fitted = clone(calibrator)
        # A fold may lack classes; calibrators of ours are told which there are.
        known = {"classes": np.arange(P.shape[1])} if isinstance(fitted, Calibrator) else {}
        fitted.fit(P, codes, **known, **({} if weight is None else {"sample_weight": weight}))
        self.calibrated_classifiers_.append(Bunch(estimator=estimator, calibrator=fitted))

    def _probabilities(self, estimator, X) -> np.ndarray:
        """One column for each class of the whole problem; classes that the estimator has not seen get 0."""
        response = _response(estimator)
        if response == "decision_function" and getattr(estimator, "decision_function_shape", "ovr") == "ovo":
            raise ParameterError(
                f"{estimator!r} scores pairs of classes, and a score for each class is needed. Set "
                'decision_function_shape="ovr", or probability=True.'
            )
        P = self._as_matrix(getattr(estimator, response)(X), response)
        if np.array_equal(estimator.classes_, self.classes_):
            return P
        wide = np.zeros((len(P), len(self.classes_)))
        wide[:, np.searchsorted(self.classes_, estimator.classes_)] = P
        return wide

    @staticmethod
    def _as_matrix(values, response: str) -> np.ndarray:
        if response == "predict_proba":
            return np.asarray(values, dtype=np.float64)
        scores = np.asarray(values, dtype=np.float64)
        if scores.ndim == 1:  # of the second class against the first
            scores = np.column_stack([-scores / 2, scores / 2])
        return as_probabilities(scores, "decision_function(X)", input="logits")


def _response(estimator) -> str:
    return "predict_proba" if hasattr(estimator, "predict_proba") else "decision_function"


def _frozen_codes(estimator, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Classes of a fitted classifier, in its order, and the column of every label."""
    classes = np.asarray(estimator.classes_)
    order = np.argsort(classes)
    at = order[np.searchsorted(classes, y, sorter=order).clip(max=len(classes) - 1)]
    if unknown := sorted(set(y[classes[at] != y].tolist())):
        raise InputError(
            f"y has labels {unknown} that the frozen classifier does not know; its classes are {classes.tolist()}. "
            "Calibrate it on data with its own labels."
        )
    return classes, at
