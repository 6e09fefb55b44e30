"""Collections of time series, checked at the door and brought into one layout.

Users hold a collection as an array (cases, time), as an array (cases, channels, time), or, where lengths differ, as a list
of arrays (channels, time). Methods of this room take it as ``Series``.
"""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64, Shaped
from scipy import sparse

from heedful.errors import InputError


@dataclasses.dataclass(frozen=True, eq=False)
class Series:
    """A checked collection: finite numbers, the same channels in every case.

    Parameters
    ----------
    cases : ndarray of float64, shape (n, d, L), or list of n arrays of float64, shape (d, L_i)
        ``cases[i]`` is of shape (d, L_i) either way. Not padded: a single long case would make all others as large.
        Read-only: they may be the caller's own arrays.
    lengths : ndarray of int64, shape (n,)
        Number of time points of each case.
    """

    cases: Float64[np.ndarray, "n d L"] | list[Float64[np.ndarray, "d _"]]
    lengths: Int64[np.ndarray, " n"]

    @property
    def n_channels(self) -> int:
        """Channels d."""
        return len(self.cases[0])

    @property
    def equal_length(self) -> bool:
        """Whether all cases have one length."""
        return bool((self.lengths == self.lengths[0]).all())


class _NotNumbers(InputError, TypeError):
    """scikit-learn expects a TypeError for entries that are no numbers, such as dicts."""


def as_series(X: Any, name: str = "X", *, min_length: int = 3) -> Series:
    """``X`` as ``Series``; it is not changed, and not copied if it is one array of float64.

    Parameters
    ----------
    X : array-like of shape (n, L) or (n, d, L), or sequence of n array-likes of shape (d, L_i)
        In a sequence, vectors of different lengths are univariate cases.
    name : str
        What messages call it.
    min_length : int
        The fewest time points a case may have.

    Raises
    ------
    InputError
        If there are no cases, the shape is another one, entries are no finite numbers (it says in which case), channels
        differ between cases, or a case is too short.
    """
    return _checked(_layout(X, name), name, min_length)


def validate_series(estimator: Any, X: Any, *, reset: bool, min_length: int = 3) -> Series:
    """``X`` as ``Series``, and as ``estimator`` was fitted on: scikit-learn's ``validate_data`` for collections.

    With ``reset`` (in ``fit``) it sets ``n_channels_in_`` (int), ``n_timepoints_in_`` (int, or None if lengths differ) and,
    for two-dimensional X, ``n_features_in_`` and ``feature_names_in_``. Without, X must have as many channels and, if all
    cases of ``fit`` were of one length, as many time points.
    """
    from sklearn.utils.validation import validate_data

    layout = _layout(X, "X")
    flat = isinstance(layout, np.ndarray) and layout.ndim == 2
    if flat and not reset and hasattr(estimator, "n_features_in_"):
        try:
            validate_data(estimator, X, reset=False, skip_check_array=True)
        except ValueError as error:  # in the words that scikit-learn's users know
            raise InputError(str(error)) from None
    series = _checked(layout, "X", min_length)
    channels = series.n_channels
    name = type(estimator).__name__
    if reset:
        for stale in {"n_features_in_", "feature_names_in_"} & vars(estimator).keys():
            delattr(estimator, stale)
        if flat:
            validate_data(estimator, X, reset=True, skip_check_array=True)
        estimator.n_channels_in_ = channels
        estimator.n_timepoints_in_ = int(series.lengths[0]) if series.equal_length else None
        return series
    if channels != estimator.n_channels_in_:
        raise InputError(
            f"the cases of X have {channels} channel{'s' * (channels != 1)}, but {name} was fitted on "
            f"{estimator.n_channels_in_}. The axes are (cases, channels, time points)."
        )
    expected = estimator.n_timepoints_in_
    if expected is not None and (other := series.lengths != expected).any():
        case = int(np.argmax(other))
        raise InputError(
            f"case {case} of X has {series.lengths[case]} time points, but {name} was fitted on cases of {expected}. Cut it "
            "to that length, or fit on a list of cases of different lengths."
        )
    return series


def _layout(X: Any, name: str) -> Shaped[np.ndarray, "..."] | list[Shaped[np.ndarray, "..."]]:
    """One array if all cases have one shape, else a list with the array of each."""
    if sparse.issparse(X):
        raise InputError(f"{name} is a sparse matrix; series are dense. Pass {name}.toarray().")
    if not isinstance(X, (list, tuple)):
        X = np.asarray(X)
        if X.dtype != object or X.ndim != 1:
            return X
    cases = []
    for i, case in enumerate(X):
        try:
            cases.append(np.asarray(case))
        except ValueError as error:  # ragged inside
            raise InputError(f"case {i} of {name} has channels of different lengths: {error}.") from error
    if len({case.shape for case in cases}) > 1:
        return cases
    return np.stack(cases) if cases else np.empty((0, 0))


def _checked(layout: Shaped[np.ndarray, "..."] | list[Shaped[np.ndarray, "..."]], name: str, min_length: int) -> Series:
    if isinstance(layout, list):
        return _unequal(layout, name, min_length)
    return _equal(layout, name, min_length)


def _equal(X: Shaped[np.ndarray, "..."], name: str, min_length: int) -> Series:
    if X.ndim not in (2, 3):
        raise InputError(
            f"{name} must have shape (cases, time points) or (cases, channels, time points); got shape {X.shape}. Reshape "
            f"your data: a single univariate case is {name}.reshape(1, -1)."
        )
    values = _numbers(X, name)
    cases = values[:, None] if values.ndim == 2 else values
    n, channels, length = cases.shape
    if n == 0 or channels == 0:
        raise InputError(f"{name} has no {'channels' if n else 'cases'}: its shape is {X.shape}.")
    if length < min_length:
        asked = f"at least {min_length} time points are needed, got"
        if X.ndim == 2:  # in the words that scikit-learn's users, and its checks, know
            raise InputError(
                f"{name}: {asked} n_features = {length}. Found {length} feature(s) (shape={X.shape}) while a minimum of "
                f"{min_length} is required."
            )
        raise InputError(
            f"{name}: {asked} {length}. The axes are (cases, channels, time points); its shape is {X.shape}."
        )
    _require_finite(cases, name)
    return Series(_read_only(cases), np.full(n, length, dtype=np.int64))


def _unequal(given: list[Shaped[np.ndarray, "..."]], name: str, min_length: int) -> Series:
    cases: list[np.ndarray] = []
    for i, values in enumerate(given):
        case = np.atleast_2d(_numbers(values, f"case {i} of {name}"))
        if values.ndim not in (1, 2) or (cases and len(case) != len(cases[0])):
            wanted = f"({len(cases[0])}, time points), as case 0 has" if cases else "(channels, time points)"
            raise InputError(f"case {i} of {name} has shape {values.shape}; it must be {wanted}.")
        if case.shape[1] < min_length or len(case) == 0:
            raise InputError(
                f"case {i} of {name}: at least {min_length} time points are needed, got shape {case.shape}. Leave it out."
            )
        _require_finite(case[None], name, first=i)
        cases.append(_read_only(case))
    return Series(cases, np.array([case.shape[1] for case in cases], dtype=np.int64))


def _numbers(values: Shaped[np.ndarray, "..."], what: str) -> Float64[np.ndarray, "..."]:
    if values.dtype.kind == "c":
        raise InputError(f"{what} is complex. Complex data not supported: pass real and imaginary parts as channels.")
    texts = values.dtype == object and any(isinstance(value, (str, bytes)) for value in values.flat)
    if values.dtype.kind not in "biufO" or texts:
        raise _NotNumbers(f"{what} must hold numbers; got {'text' if texts else values.dtype}. Convert it first.")
    try:
        return values.astype(np.float64, copy=False)
    except (TypeError, ValueError) as error:
        raise _NotNumbers(f"{what} must hold numbers; {error}.") from error


def _require_finite(cases: Float64[np.ndarray, "n d L"], name: str, *, first: int = 0) -> None:
    bad = ~np.isfinite(cases)
    if bad.any():
        case, channel, point = (int(i) for i in np.argwhere(bad)[0])
        raise InputError(
            f"case {first + case} of {name} has {int(bad[case].sum())} values that are NaN or infinite, the first in channel "
            f"{channel} at time point {point}. Impute them, for instance with aeon.transformations.collection.SimpleImputer; "
            "or, if the case merely begins later or ends earlier, cut it there and pass a list of arrays (channels, time "
            "points)."
        )


def _read_only(values: Float64[np.ndarray, "*axes"]) -> Float64[np.ndarray, "*axes"]:
    view = values.view()
    view.flags.writeable = False
    return view
