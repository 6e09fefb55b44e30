"""What the classifiers on a core set share: who is kept, how they are deleted, what is stored, how that is proved."""

import math
import time
import warnings
from typing import Any, ClassVar, TypeVar

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.utils.metaestimators import available_if

from heedful._files import Saved
from heedful._validation import require_choice, require_fitted, require_number
from heedful.errors import FileFormatError, HeedfulWarning, InputError, ParameterError
from heedful.unlearn.system_aware_unlearning._core import Core
from heedful.unlearn.system_aware_unlearning._data import (
    checked_data,
    checked_ids,
    class_codes,
    known_classes,
    requested_ids,
    require_known,
    restored_on_failure,
    row_keys,
    rows_like,
)
from heedful.unlearn.system_aware_unlearning._digest import digest_of
from heedful.unlearn.system_aware_unlearning.reports import AuditReport, UnlearnReport
from heedful.unlearn.system_aware_unlearning.selection import (
    feature_rows,
    grow_selection,
    len_of,
    moments,
    require_selection_settings,
    squared_norms,
)

C = TypeVar("C", bound="CoreSetClassifier")
S = TypeVar("S", bound="SavedCoreSetClassifier")


def _takes_parts(estimator: "CoreSetClassifier") -> bool:
    if estimator.horizon is None:
        raise ParameterError(
            "partial_fit needs horizon=, the number of samples expected in all: the threshold of selection may not depend "
            "on how many have come."
        )
    return True


class CoreSetClassifier(ClassifierMixin, BaseEstimator):
    """A classifier that is a function of the samples it stores, and of public parameters."""

    kappa: float
    ridge: float
    horizon: int | None
    fit_intercept: bool
    normalize: Any
    unique_ids: bool

    def fit(self: C, X, y, *, ids=None, classes=None) -> C:
        """Choose the samples to keep, without a look at y, and learn from them. If it fails, the model stays as it was.

        Parameters
        ----------
        X : array-like or sparse matrix of shape (n, d)
            Samples in order of arrival, finite.
        y : array-like of shape (n,)
            Class labels.
        ids : array-like of shape (n,), optional
            A name for each sample, ints or strings, by which it can be deleted; all different unless ``unique_ids`` is
            false. Only the names of samples that are kept are stored.
        classes : array-like, optional
            All classes, two or more. The class list is public; without it, it is read from y.

        Returns
        -------
        self

        Raises
        ------
        ParameterError
            If a parameter is out of range.
        InputError
            If data are not finite, shapes disagree, ids are not unique, or y has one class and ``classes`` is not given.
        """
        self._check_parameters()
        with restored_on_failure(self):
            X, y = checked_data(self, X, y, reset=True)
            self.classes_ = known_classes(y, classes)
            self._set_threshold(len_of(X))
            self._prepare()
            return self._absorb(None, X, y, ids)

    @available_if(_takes_parts)
    def partial_fit(self: C, X, y, *, ids=None, classes=None) -> C:
        """Let more samples arrive. There only if ``horizon`` is given.

        The result is that of one ``fit`` on all samples in this order. A call that keeps a sample learns anew from all
        that are kept: pass batches, not single rows.

        Parameters
        ----------
        X, y, ids
            As in ``fit``. All calls have ids, or none has.
        classes : array-like, optional
            All classes; the first call needs it.

        Returns
        -------
        self
        """
        first = not self.__sklearn_is_fitted__()
        if first and classes is None:
            raise InputError("The first call of partial_fit needs classes=, the list of all classes.")
        if first:
            return self.fit(X, y, ids=ids, classes=classes)
        self._check_parameters()
        if classes is not None and not np.array_equal(given := known_classes(np.asarray(y), classes), self.classes_):
            raise InputError(
                f"classes={given.tolist()} is not what the first call was given, {self.classes_.tolist()}. "
                "The class list is fixed; leave classes out."
            )
        X, y = checked_data(self, X, y, reset=False)
        return self._absorb(self._core, X, y, ids)

    def unlearn(self, ids) -> UnlearnReport:
        """Delete samples by their ids, exactly; the model then is what it were if they had never been there.

        An id that is not stored is passed over in silence: that sample was never kept, and nothing has to change. In any
        order and any batches, the same requests lead to the same state. If it fails, the model stays as it was.

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
        core = self._fitted_core()
        wanted = requested_ids(ids, core.ids)
        return self._forget(core.find(wanted), len(wanted), start)

    def unlearn_samples(self, X, y) -> UnlearnReport:
        """Delete samples by value: every stored sample with the same features and label, to the last bit.

        Parameters
        ----------
        X : array-like or sparse matrix of shape (m, d)
            Samples as they were given to ``fit``.
        y : array-like of shape (m,)
            Their labels.

        Returns
        -------
        UnlearnReport
        """
        start = time.perf_counter()
        core = self._fitted_core()
        X, y = checked_data(self, X, y, reset=False)
        wanted = set(row_keys(rows_like(X, core.X), class_codes(y, self.classes_)))
        stored = row_keys(core.X, core.codes)
        return self._forget([row for row, key in enumerate(stored) if key in wanted], len_of(X), start)

    def state(self) -> dict[str, np.ndarray]:
        """Everything stored beside public parameters, in canonical form; copies.

        ``core_X`` (or the parts of a CSR matrix), ``core_y`` (numbers of classes), ``core_ids`` if there are any, and what
        was learned from them. No array's size depends on how many samples came or were deleted.
        """
        self._fitted_core()
        return {name: array.copy() for name, array in self._arrays().items()}

    def state_digest(self) -> str:
        """SHA-256 over the state and the public parameters, 64 hexadecimal digits.

        Equal digests mean equal states, bit for bit. It depends on what the samples are and the machine's way to round.
        """
        self._fitted_core()
        threshold = f"{self.threshold_:.12g}"  # the last bit of a power is the machine's
        return digest_of([type(self).__name__, self._public() | {"threshold": threshold}, self._arrays()])

    def audit(self, *, strict: bool = False) -> AuditReport:
        """Learn anew from the stored samples and compare every attribute, bit for bit.

        What passes holds nothing but public parameters and a function of the samples in ``core_X_``: no trace of
        deleted ones, nor of samples that were never kept. It is also checked that selection would keep each stored sample
        again, and that no array is a view of a larger buffer. What is outside of the model (a scaler before it, old copies,
        backups) it cannot see.

        Parameters
        ----------
        strict : bool
            Fail, too, if ``horizon`` was not declared: the threshold then tells how many samples ``fit`` was given.

        Returns
        -------
        AuditReport
            False in an ``if`` unless it passed.

        Notes
        -----
        Another processor, BLAS or number of threads may round otherwise: then ``max_deviation`` is some 1e-15 and the
        audit does not pass. Audit where the model was last fitted or touched by a deletion.
        """
        core = self._fitted_core()
        twin = clone(self)
        for name in ("n_features_in_", "feature_names_in_", "classes_"):
            if hasattr(self, name):
                setattr(twin, name, getattr(self, name))
        twin._set_threshold(self.horizon_)
        twin._prepare()
        fresh = Core.of(core.X, core.codes, core.ids)
        twin.__dict__.update(twin._learn(fresh), _core=fresh)
        mine = {name: digest_of(value) for name, value in vars(self).items()}
        other = {name: digest_of(value) for name, value in vars(twin).items()}
        differing = sorted(name for name in mine.keys() | other.keys() if mine.get(name) != other.get(name))
        deviation = self._deviation(twin) if differing else 0.0
        derived = set(self._learned) if deviation <= self._audit_tolerance() else set()
        findings = [
            f"{name} is not what learning from the core gives." if name in other else f"{name} is not part of a model."
            for name in differing
            if name not in derived
        ]
        findings += [
            f"{name} is a view of a larger buffer." for name, array in self._arrays().items() if _is_part(array)
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HeedfulWarning)  # of long rows, which ``fit`` has given
            again = twin._select(core.X, None, twin.threshold_ * (1 - 1e-9)) if len(core) else core.codes
        if len(again) < len(core):
            findings.append(f"Selection would keep {len(again)} of the {len(core)} stored samples.")
        owner = getattr(getattr(self, "_metadata_request", None), "owner", self)
        if owner is not self and hasattr(owner, "_core"):
            findings.append(
                "_metadata_request holds another fitted model, of which scikit-learn's clone made this one."
            )
        if strict and self.horizon is None:
            findings.append("horizon was not declared: the threshold tells how many samples fit was given.")
        return AuditReport(not findings, not differing, deviation, self.state_digest(), tuple(findings))

    @property
    def core_X_(self):
        """The stored samples as they were given, in order of arrival."""
        return self._fitted_core().X

    @property
    def core_y_(self) -> np.ndarray:
        """Their labels."""
        codes = self._fitted_core().codes
        return self.classes_[codes]

    @property
    def core_ids_(self) -> np.ndarray | None:
        """Their ids, None if there are none."""
        return self._fitted_core().ids

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_core")

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    _learned: ClassVar[tuple[str, ...]]  # attributes that ``_learn`` gives

    def _set_threshold(self, horizon: int) -> None:
        """T, which is ``horizon`` unless it was declared, and T^(−κ)."""
        self.horizon_ = horizon if self.horizon is None else int(self.horizon)
        self.threshold_ = float(self.horizon_) ** -self.kappa

    def _prepare(self) -> None:
        """Set what needs the number of features, and nothing else of the data."""

    def _learn(self, core: Core) -> dict[str, Any]:
        """The fitted attributes: a function of the core and public parameters, and the one way to them."""
        raise NotImplementedError

    def _learn_without(self, rows: list[int], remaining: Core) -> dict[str, Any]:
        """The fitted attributes when these rows go and ``remaining`` is left."""
        return self._learn(remaining)

    def _learned_arrays(self) -> dict[str, np.ndarray]:
        """What was learned, as arrays with names."""
        raise NotImplementedError

    def _deviation(self, twin: Any) -> float:
        """Largest difference of a learned number from that of ``twin``."""
        pairs = zip(self._learned_arrays().values(), twin._learned_arrays().values(), strict=True)
        return max(float(np.abs(a - b).max(initial=0)) for a, b in pairs if a.dtype.kind == "f")

    def _audit_tolerance(self) -> float:
        return 0.0

    def _targets(self, codes: np.ndarray) -> np.ndarray:
        """±1, one against the rest: a column for each class, or one for the second of two."""
        if len(self.classes_) == 2:
            return np.where(codes == 1, 1.0, -1.0)[:, None]
        return np.where(codes[:, None] == np.arange(len(self.classes_)), 1.0, -1.0)

    def _decide(self, scores: np.ndarray) -> np.ndarray:
        """Classes by scores as ``decision_function`` gives them."""
        return self.classes_[(scores >= 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)]

    def _check_parameters(self) -> None:
        require_selection_settings(self.kappa, self.horizon, self.ridge)
        require_choice(self.fit_intercept, "fit_intercept", (True, False))
        require_choice(self.normalize, "normalize", ("sample", "unit", None))
        require_choice(self.unique_ids, "unique_ids", (True, False))

    def _absorb(self: C, core: Core | None, X, y: np.ndarray, ids) -> C:
        """Take the samples that selection keeps into the core, and learn if there are any."""
        n = len_of(X)
        codes = require_known(class_codes(y, self.classes_), y, self.classes_)
        ids = checked_ids(ids, n, unique=self.unique_ids)
        if core is not None:
            self._require_like_before(core, ids)
        if n > self.horizon_:
            warnings.warn(
                f"{n} samples came where horizon={self.horizon_} were expected. The threshold stays; accuracy and size of the "
                "core set may suffer. Declare a larger horizon and fit anew.",
                HeedfulWarning,
                stacklevel=3,
            )
        kept = self._select(X, core, self.threshold_)
        if core is not None and not len(kept):
            return self
        arrived = Core.of(X[kept], codes[kept], None if ids is None else ids[kept])
        grown = arrived if core is None else core.joined(arrived)
        if not len(grown):
            warnings.warn(
                f"No sample was kept: no leverage exceeds {self.threshold_:.3g}. Their norms are small or ridge={self.ridge} "
                "is large. Try normalize='unit', a smaller ridge or a larger kappa.",
                HeedfulWarning,
                stacklevel=3,
            )
        self.__dict__.update(self._learn(grown), _core=grown)
        return self

    def _require_like_before(self, core: Core, ids: np.ndarray | None) -> None:
        if (ids is None) != (core.ids is None):
            raise InputError("Either all calls have ids, or none has; this one differs from the first.")
        if ids is None or core.ids is None or not len(ids):
            return
        if ids.dtype.kind != core.ids.dtype.kind:
            raise InputError("ids must be all ints or all strings, in all calls alike.")
        if self.unique_ids and (again := [name for name in ids.tolist() if name in core.row_of]):
            raise InputError(f"ids must be unique, and {again[0]!r} is stored already. See unique_ids.")

    def _rows(self, X) -> np.ndarray:
        """Rows whose leverage is tested: of norm at most 1, dense."""
        return feature_rows(X, fit_intercept=self.fit_intercept, normalize=self.normalize)

    def _select(self, X, core: Core | None, threshold: float) -> np.ndarray:
        """Numbers of the rows of X to keep beside the core."""
        if core is None or not len(core):
            A = self.ridge * np.eye(self._rows(X[:1]).shape[1])
        else:
            A, _ = moments(core.X, np.zeros((len(core), 0)), self._rows, ridge=self.ridge)
        longest = 0.0

        def block(rows: slice) -> np.ndarray:
            nonlocal longest
            Z = self._rows(X[rows])
            longest = max(longest, float(squared_norms(Z).max(initial=0)))
            return Z

        kept = grow_selection(len_of(X), block, A, threshold)
        self._warn_of_long_rows(longest)
        return kept

    def _warn_of_long_rows(self, square: float) -> None:
        """``square``: the largest squared norm of a row, with its constant, as it was tested."""
        if self.normalize is None and square > 1 + 1e-9:
            norm = math.sqrt(2 * square - 1 if self.fit_intercept else square)
            warnings.warn(
                f"The largest norm of a sample is {norm:.4g}; selection and its guarantees need at most 1. Scale all samples "
                "by one number that does not depend on them, or let normalize='sample' do it.",
                HeedfulWarning,
                stacklevel=5,
            )

    def _fitted_core(self) -> Core:
        if not self.__sklearn_is_fitted__():
            require_fitted(self)
        return self._core

    def _forget(self, rows: list[int], requested: int, start: float) -> UnlearnReport:
        if rows:
            remaining = self._core.without(rows)
            self.__dict__.update(self._learn_without(rows, remaining), _core=remaining)  # all at once, or nothing
        return UnlearnReport(requested, len(rows), time.perf_counter() - start, bool(rows))

    def _public(self) -> dict[str, Any]:
        """What may be known: parameters, T, the class list, and what the columns are."""
        given = {name: _plain(value) for name, value in self.get_params(deep=False).items() if name != "horizon"}
        names = getattr(self, "feature_names_in_", None)
        return given | {
            "horizon": self.horizon_,
            "classes": self.classes_.tolist(),
            "n_features": int(self.n_features_in_),
            "feature_names": None if names is None else names.tolist(),
        }

    def _arrays(self) -> dict[str, np.ndarray]:
        return self._core.arrays() | self._learned_arrays()


class SavedCoreSetClassifier(CoreSetClassifier, Saved):
    """One that is arrays and plain parameters throughout, and so can be a file."""

    def _to_saved(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        self._fitted_core()
        public = self._public()
        arrays = self._arrays()
        ids = arrays.get("core_ids")
        meta = {
            "parameters": {name: _plain(value) for name, value in self.get_params(deep=False).items()},
            **{name: public[name] for name in ("horizon", "classes", "n_features", "feature_names")},
            "classes_dtype": self.classes_.dtype.str,
            "ids": ids.tolist() if ids is not None and ids.dtype.kind == "U" else None,  # safetensors holds no text
            "digest": self.state_digest(),
        }
        return {name: array for name, array in arrays.items() if array.dtype.kind != "U"}, meta

    @classmethod
    def _from_saved(cls: type[S], arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> S:
        self = cls(**meta["parameters"])
        self._check_parameters()
        given = arrays
        if meta["ids"] is not None:
            arrays = {**arrays, "core_ids": np.array(meta["ids"], dtype=str)}
        self.n_features_in_ = meta["n_features"]
        if meta["feature_names"] is not None:
            self.feature_names_in_ = np.array(meta["feature_names"], dtype=object)
        self.classes_ = np.array(meta["classes"], dtype=np.dtype(meta["classes_dtype"]))
        require_number(meta["horizon"], "horizon", low=1, integer=True)
        self._set_threshold(meta["horizon"])
        core = Core.from_arrays(arrays, self.n_features_in_)
        self.__dict__.update(self._from_arrays(arrays), _core=core)
        kept, said = self._to_saved()
        if said["digest"] != meta["digest"]:
            raise FileFormatError("the digest does not match what the file holds; it was damaged or altered")
        # What this object does not take over, no audit of it could find.
        if digest_of(kept) != digest_of(given) or said != {
            k: v for k, v in meta.items() if k not in ("class", "format")
        }:
            raise FileFormatError(f"the file holds more, or other, than a {cls.__name__} is made of; it was altered")
        return self

    def _from_arrays(self, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        """The fitted attributes that ``_learned_arrays`` described."""
        raise NotImplementedError


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _is_part(array: np.ndarray) -> bool:
    base: Any = array.base  # an array, bytes, a memory map
    return base is not None and memoryview(base).nbytes != array.nbytes
