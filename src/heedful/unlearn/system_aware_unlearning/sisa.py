"""Blind baseline: sharded, isolated, sliced, aggregated training.

All data are kept, cut into shards; each shard trains a model of its own, slice after slice, with a checkpoint after each.
A deletion retrains one shard from the first slice it touches. It is exact, and must keep everything to be so.

Bourtoule, Chandrasekaran, Choquette-Choo, Jia, Travers, Zhang, Lie, Papernot: Machine Unlearning, IEEE S&P 2021.
"""

import copy
import dataclasses
import time
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, MetaEstimatorMixin
from sklearn.dummy import DummyClassifier
from sklearn.utils import get_tags
from sklearn.utils.metaestimators import available_if

from heedful._random import numpy_generator
from heedful._validation import require_choice, require_fitted, require_number
from heedful.errors import ParameterError
from heedful.unlearn.system_aware_unlearning._core import Core
from heedful.unlearn.system_aware_unlearning._data import (
    checked_data,
    checked_ids,
    checked_rows,
    class_codes,
    known_classes,
    requested_ids,
    require_known,
    restored_on_failure,
    row_keys,
    rows_like,
)
from heedful.unlearn.system_aware_unlearning._members import class_scores, fit_member, require_classifier
from heedful.unlearn.system_aware_unlearning.reports import UnlearnReport
from heedful.unlearn.system_aware_unlearning.selection import len_of


@dataclasses.dataclass(frozen=True)
class _Shard:
    """Samples of a shard slice after slice, where the slices end, and the model after each slice (None before data)."""

    data: Core
    ends: tuple[int, ...]
    models: tuple[Any, ...]


class SISAClassifier(MetaEstimatorMixin, ClassifierMixin, BaseEstimator):
    """An ensemble of models on disjoint shards of the data; a deletion retrains one of them.

    Parameters
    ----------
    estimator : classifier
        Cloned for each shard. With more than one slice it needs a ``warm_start`` that goes on with the same weights (linear
        models, ``SGDClassifier``, ``MLPClassifier``): with each slice, training on all slices so far goes on from the
        last checkpoint.
    n_shards : int
        S >= 1. More shards: cheaper deletions, weaker models. Shards differ by one sample at most when they are cut.
    n_slices : int
        R >= 1 slices a shard. More slices: a deletion in a late one starts late; R checkpoints are kept.
    voting : {"hard", "soft"}
        Majority of labels, ties to the first class; or mean of ``predict_proba``.
    unique_ids : bool
        Whether each sample must have an id of its own. False: an id may name a person, or whatever samples come from, and
        all its samples are deleted together.
    random_state : int, RandomState, Generator or None
        Who belongs to which shard and slice.

    Attributes
    ----------
    shards_ : list
        Data, slice ends and checkpoints of each shard: all samples are in there.
    classes_ : array of shape (K,)
        Class list.
    n_features_in_, feature_names_in_
        As in scikit-learn.

    Notes
    -----
    A deletion costs a fit on a shard's n/S samples, from the touched slice on, for each shard that is touched.

    References
    ----------
    Bourtoule et al.: Machine Unlearning, IEEE Symposium on Security and Privacy 2021.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.linear_model import RidgeClassifier
    >>> from heedful.unlearn import SISAClassifier
    >>> X = np.random.default_rng(0).normal(size=(1000, 5))
    >>> model = SISAClassifier(RidgeClassifier(), random_state=0).fit(X, X[:, 0] > 0, ids=np.arange(1000))
    >>> model.unlearn([3, 4]).removed
    2
    """

    def __init__(self, estimator, *, n_shards=20, n_slices=1, voting="hard", unique_ids=True, random_state=None):
        self.estimator, self.n_shards, self.n_slices = estimator, n_shards, n_slices
        self.voting, self.unique_ids, self.random_state = voting, unique_ids, random_state

    def fit(self, X, y, *, ids=None, classes=None) -> "SISAClassifier":
        """Cut the data into shards and slices at random and train a model on each shard.

        If it fails, the model stays as it was.

        Parameters
        ----------
        X : array-like or sparse matrix of shape (n, d)
            Samples, finite.
        y : array-like of shape (n,)
            Class labels.
        ids : array-like of shape (n,), optional
            A name for each sample, ints or strings, by which it can be deleted; all different unless ``unique_ids`` is
            false.
        classes : array-like, optional
            All classes, two or more; without it, those in y.

        Raises
        ------
        ParameterError
            If a parameter is out of range, ``n_slices`` > 1 without ``warm_start``, or "soft" without probabilities.
        InputError
            If data are not finite, shapes disagree, ids are not unique, or there is one class only.
        """
        require_classifier(self.estimator)
        require_number(self.n_shards, "n_shards", low=1, integer=True)
        require_number(self.n_slices, "n_slices", low=1, integer=True)
        require_choice(self.voting, "voting", ("hard", "soft"))
        require_choice(self.unique_ids, "unique_ids", (True, False))
        parameters = self.estimator.get_params(deep=False)
        if self.n_slices > 1 and ("warm_start" not in parameters or "n_estimators" in parameters):
            raise ParameterError(
                f"n_slices={self.n_slices} needs an estimator whose warm_start goes on with the same weights, which that of "
                f"{type(self.estimator).__name__} does not. Use n_slices=1, or e.g. SGDClassifier."
            )
        if self.voting == "soft" and not hasattr(self.estimator, "predict_proba"):
            raise ParameterError(
                f"voting='soft' needs predict_proba, which {self.estimator!r} lacks. Use voting='hard'."
            )
        with restored_on_failure(self):
            X, y = checked_data(self, X, y, accept_sparse=self._sparse(), reset=True)
            self.classes_ = known_classes(y, classes)
            codes = require_known(class_codes(y, self.classes_), y, self.classes_)
            ids = checked_ids(ids, len_of(X), unique=self.unique_ids)
            order = numpy_generator(self.random_state).permutation(len_of(X))
            self.shards_ = []
            for rows in np.array_split(order, self.n_shards):
                ends = tuple(np.cumsum([len(part) for part in np.array_split(rows, self.n_slices)]).tolist())
                data = Core.of(X[rows], codes[rows], None if ids is None else ids[rows])
                self.shards_.append(self._train(data, ends, ()))
        return self

    def unlearn(self, ids) -> UnlearnReport:
        """Delete samples by their ids: they leave their shards, which train again from the first slice that lost one.

        Ids that are not there are passed over in silence. If it fails, the model stays as it was.

        Parameters
        ----------
        ids : array-like of ints or strings
            Who is to go; of the kind given to ``fit``.

        Returns
        -------
        UnlearnReport

        Raises
        ------
        NotFittedError
            Before ``fit``.
        InputError
            If the model was fitted without ids, or with ids of another kind.
        """
        start = time.perf_counter()
        require_fitted(self)
        wanted = requested_ids(ids, self.shards_[0].data.ids)
        return self._forget([shard.data.find(wanted) for shard in self.shards_], len(wanted), start)

    def unlearn_samples(self, X, y) -> UnlearnReport:
        """Delete samples by value: every sample with the same features and label, to the last bit."""
        start = time.perf_counter()
        require_fitted(self)
        X, y = checked_data(self, X, y, accept_sparse=self._sparse(), reset=False)
        wanted = set(row_keys(rows_like(X, self.shards_[0].data.X), class_codes(y, self.classes_)))
        stored = (row_keys(shard.data.X, shard.data.codes) for shard in self.shards_)
        gone = [[row for row, key in enumerate(keys) if key in wanted] for keys in stored]
        return self._forget(gone, len_of(X), start)

    def predict(self, X) -> np.ndarray:
        """Class with most votes, or with the largest mean probability; the first of several."""
        require_fitted(self)
        X = checked_rows(self, X, accept_sparse=self._sparse())
        if self.voting == "soft":
            return self.classes_[self._mean_probabilities(X).argmax(axis=1)]
        votes = np.zeros((len_of(X), len(self.classes_)), dtype=np.int64)
        for member in self._members():
            votes[np.arange(len(votes)), class_codes(member.predict(X), self.classes_)] += 1
        return self.classes_[votes.argmax(axis=1)]

    @available_if(lambda self: self.voting == "soft" and hasattr(self.estimator, "predict_proba"))
    def predict_proba(self, X) -> np.ndarray:
        """Mean of the members' probabilities, shape (n, K). There only with ``voting="soft"``."""
        require_fitted(self)
        return self._mean_probabilities(checked_rows(self, X, accept_sparse=self._sparse()))

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = self._sparse()
        return tags

    def _sparse(self) -> bool:
        return get_tags(self.estimator).input_tags.sparse

    def _members(self) -> list[Any]:
        return [shard.models[-1] for shard in self.shards_ if shard.models[-1] is not None]

    def _mean_probabilities(self, X) -> np.ndarray:
        members = self._members()
        if not members:
            return np.full((len_of(X), len(self.classes_)), 1 / len(self.classes_))
        return np.mean([class_scores(member, X, self.classes_, "predict_proba") for member in members], axis=0)

    def _train(self, data: Core, ends: tuple[int, ...], checkpoints: tuple[Any, ...]) -> _Shard:
        """A shard whose first models are ``checkpoints`` and whose others are trained."""
        models = list(checkpoints)
        for r in range(len(models), len(ends)):
            before, start = (models[-1], ends[r - 1]) if r else (None, 0)
            models.append(before if ends[r] == start else self._go_on(before, data, ends[r]))
        return _Shard(data, ends, tuple(models))

    def _go_on(self, before: Any, data: Core, end: int) -> Any:
        """A model of the first ``end`` samples, from the checkpoint before it if that knows the same classes."""
        X, y = data.X[:end], self.classes_[data.codes[:end]]
        if before is None or not np.array_equal(before.classes_, np.unique(y)):
            return fit_member(self.estimator, X, y)
        if isinstance(before, DummyClassifier):  # still one class
            return before
        return copy.deepcopy(before).set_params(warm_start=True).fit(X, y)

    def _forget(self, gone: list[list[int]], requested: int, start: float) -> UnlearnReport:
        shards = list(self.shards_)
        for place, rows in enumerate(gone):
            if rows:
                shard = shards[place]
                ends = np.array(shard.ends)
                left = tuple((ends - np.searchsorted(rows, ends)).tolist())
                first = int(np.searchsorted(ends, rows[0], side="right"))
                shards[place] = self._train(shard.data.without(rows), left, shard.models[:first])
        self.shards_ = shards
        removed = sum(map(len, gone))
        return UnlearnReport(requested, removed, time.perf_counter() - start, removed > 0)
