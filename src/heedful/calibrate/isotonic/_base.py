"""The protocol that all calibrators of probability matrices share."""

import warnings
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from scipy import sparse
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.utils.validation import validate_data
from torch import nn

from heedful._files import Saved
from heedful._validation import as_probabilities, require_choice, require_finite, require_fitted, require_number
from heedful.calibrate.isotonic._labels import label_codes, to_numpy
from heedful.calibrate.isotonic._pooled import merge_ties, row_chunks
from heedful.errors import HeedfulWarning, InputError

Input = Literal["proba", "logits"]
_FITTED_NUMBERS = ("epsilon_", "optimality_gap_", "n_iter_", "n_features_in_")
C = TypeVar("C", bound="Calibrator")


class Calibrator(OneToOneFeatureMixin, TransformerMixin, Saved, BaseEstimator):
    """Everything but the fit: checking, labels, weights, evaluation through the torch module, files."""

    _arrays: ClassVar[tuple[str, ...]]  # fitted arrays that the map is made of

    def fit(self: C, P, y, sample_weight=None, *, classes=None) -> C:
        """Fit to the probabilities that a model gave to data it was not trained on.

        Parameters
        ----------
        P : array-like or tensor of shape (n, K)
            Probabilities (rows within 1e-3 of sum 1 are renormalised), or logits with ``input="logits"``.
        y : array-like of shape (n,)
            Labels: column numbers from 0; or column names of P; or K distinct values, which stand for the columns in
            sorted order.
        sample_weight : array-like of shape (n,), optional
            Non-negative; weight 2 is the row twice.
        classes : array-like of shape (K,), optional
            The class of each column, where the above is not what you mean. A single class in ``y`` is then accepted.

        Returns
        -------
        self

        Raises
        ------
        InputError
            If rows are no probabilities, labels match no column, or there are fewer than two rows or classes.
        """
        self._check_parameters()
        given = self._read(P, reset=True)
        matrix = np.empty_like(given)
        for rows in row_chunks(*given.shape):
            matrix[rows] = merge_ties(given[rows])
        names = self.feature_names_in_.tolist() if hasattr(self, "feature_names_in_") else None
        self.classes_, codes = label_codes(y, matrix.shape[1], classes=classes, column_names=names)
        if len(codes) != len(matrix):
            raise InputError(f"P has {len(matrix)} rows and y has {len(codes)} labels; they must be as many.")
        weight = np.ones(len(codes)) if sample_weight is None else _check_weight(sample_weight, len(codes))
        used = weight > 0
        if not used.all():
            matrix, codes, weight = matrix[used], codes[used], weight[used]
        self._check_labels(codes, at_least=2 if classes is None else 1)
        # Rows count as often as their weights say, but weights that were scaled down do not make the set smaller.
        n = max(float(weight.sum()), float(len(codes)))
        self.epsilon_ = 1 / (n + 1) if getattr(self, "smoothing", None) == "uniform" else 0.0
        self._fit(matrix, codes, weight / weight.sum(), n)
        return self

    def predict_proba(self, P):
        """Calibrated probabilities, shape (m, K): an array, or a tensor like P if P is one."""
        require_fitted(self)
        matrix = self._read(P, reset=False)
        calibrate, q = self._map("proba"), np.empty_like(matrix)
        with torch.no_grad():
            for rows in row_chunks(*matrix.shape):
                q[rows] = calibrate(torch.tensor(matrix[rows])).numpy()
        return torch.from_numpy(q).to(P) if isinstance(P, torch.Tensor) and P.is_floating_point() else q

    def transform(self, P):
        """The same as ``predict_proba``, for use as a step of a pipeline."""
        return self.predict_proba(P)

    def torch_module(self) -> nn.Module:
        """The fitted map as a module for tensors of shape (…, K) that hold what ``input`` says.

        It computes in float64 (``.float()`` changes that) and returns the dtype and device it was given.
        """
        require_fitted(self)
        return self._map(self.input)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        return tags

    def _fit(self, P: np.ndarray, codes: np.ndarray, weight: np.ndarray, n: float) -> None:
        """Set the fitted attributes, from probabilities, columns of the true classes, weights with sum 1, and n."""
        raise NotImplementedError

    def _map(self, input: Input) -> nn.Module:
        """The fitted map, for inputs of this kind."""
        raise NotImplementedError

    def _check_parameters(self) -> None:
        require_choice(self.input, "input", ("proba", "logits"))
        if hasattr(self, "smoothing"):
            require_choice(self.smoothing, "smoothing", ("uniform", None))
        if hasattr(self, "interpolation"):
            require_choice(self.interpolation, "interpolation", ("linear", "step"))
        if hasattr(self, "max_iter"):
            require_number(self.max_iter, "max_iter", low=1, integer=True)
            require_number(self.tol, "tol", low=0, open_low=True)

    def _read(self, P, *, reset: bool) -> np.ndarray:
        if sparse.issparse(P):
            raise InputError("P is a sparse matrix; probabilities are dense. Pass P.toarray().")
        values = to_numpy(P)
        if np.iscomplexobj(values):
            raise InputError("P is complex. Complex data not supported: pass real probabilities.")
        if not reset and values.ndim == 2 and values.shape[1] != self.n_features_in_:
            raise InputError(
                f"P has {values.shape[1]} columns, but {type(self).__name__} was fitted on {self.n_features_in_} classes. "
                f"X has {values.shape[1]} features, but {type(self).__name__} is expecting {self.n_features_in_} features "
                "as input."
            )
        matrix = np.ascontiguousarray(as_probabilities(values, input=self.input))
        validate_data(self, P, reset=reset, skip_check_array=True)
        return matrix

    def _check_labels(self, codes: np.ndarray, *, at_least: int) -> None:
        seen = np.bincount(codes, minlength=len(self.classes_)) > 0
        if len(codes) < 2 or seen.sum() < at_least:
            raise InputError(
                f"Calibration needs at least two rows of at least two classes; got {len(codes)} rows of {int(seen.sum())} "
                "classes. Use a larger calibration set."
            )
        if not seen.all():
            warnings.warn(
                f"No row of the calibration set has class {', '.join(map(repr, self.classes_[~seen].tolist()))}.",
                HeedfulWarning,
                stacklevel=3,
            )

    def _to_saved(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        require_fitted(self)
        fitted = {name: getattr(self, name) for name in _FITTED_NUMBERS}
        names = getattr(self, "feature_names_in_", None)
        meta = {
            "parameters": {
                k: v.item() if isinstance(v, np.generic) else v for k, v in self.get_params(deep=False).items()
            },
            "fitted": fitted,
            "classes": self.classes_.tolist(),
            "classes_dtype": self.classes_.dtype.str,
            "feature_names": None if names is None else names.tolist(),
        }
        return {name: np.asarray(getattr(self, name)) for name in self._arrays}, meta

    @classmethod
    def _from_saved(cls: type[C], arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> C:
        self = cls(**meta["parameters"])
        self._check_parameters()
        for names, values in ((cls._arrays, arrays), (_FITTED_NUMBERS, meta["fitted"])):
            for name in names:
                setattr(self, name, values[name])
        self.classes_ = np.array(meta["classes"], dtype=np.dtype(meta["classes_dtype"]))
        if len(self.classes_) != self.n_features_in_:
            raise ValueError(f"{len(self.classes_)} classes for {self.n_features_in_} columns")
        if meta["feature_names"] is not None:
            self.feature_names_in_ = np.array(meta["feature_names"], dtype=object)
        return self


def _check_weight(sample_weight, n: int) -> np.ndarray:
    weight = require_finite(np.asarray(to_numpy(sample_weight), dtype=np.float64), "sample_weight")
    if weight.shape != (n,) or (weight < 0).any() or not 0 < weight.sum() < np.inf:
        raise InputError(
            f"sample_weight must be {n} numbers >= 0, one a row, not all zero, with a finite sum; got shape "
            f"{weight.shape} with minimum {weight.min(initial=0):g}."
        )
    return weight
