"""Rows, ids and labels in one canonical form, which depends on themselves alone and not on what stood beside them.

NumPy and SciPy let an array say more than its values: a string array is as wide as the longest string it ever met, a
slice keeps the whole it was cut from, pruned sparse matrices may keep their old buffers, and −0.0 is not 0.0 in bits.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d, validate_data

from heedful.errors import InputError

_INT64 = np.iinfo(np.int64)


def canonical_rows(X):
    """A copy in float64 that owns its memory: a C-contiguous array, or a ``csr_array`` with sorted indices, no zeros."""
    if not sparse.issparse(X):
        return np.array(X, dtype=np.float64, order="C") + 0.0  # −0.0 becomes 0.0
    X = sparse.csr_array(X, dtype=np.float64, copy=True)
    X.sum_duplicates()
    X.eliminate_zeros()
    kind = np.int32 if max(X.nnz, *X.shape) < 2**31 else np.int64
    return sparse.csr_array(
        (X.data[: X.nnz].copy(), X.indices[: X.nnz].astype(kind), X.indptr.astype(kind)), shape=X.shape
    )


def rows_like(X, stored):
    """X as a sparse matrix if ``stored`` is one, else as an array."""
    if sparse.issparse(stored):
        return sparse.csr_array(X)
    return X.toarray() if sparse.issparse(X) else X


def stack_rows(first, second):
    """The rows of both, in the container of the first."""
    second = rows_like(second, first)
    return sparse.vstack([first, second], format="csr") if sparse.issparse(first) else np.concatenate([first, second])


def row_keys(X, codes: np.ndarray) -> list[bytes]:
    """One key for each row and its label; equal keys mean equal values."""
    X, codes = canonical_rows(X), codes.astype(np.int64)
    if sparse.issparse(X):
        ends = zip(X.indptr[:-1], X.indptr[1:], strict=True)
        rows = [X.indices[i:j].astype(np.int64).tobytes() + X.data[i:j].tobytes() for i, j in ends]
    else:
        rows = [row.tobytes() for row in X]
    return [code.tobytes() + row for code, row in zip(codes, rows, strict=True)]


def canonical_ids(ids: Any) -> np.ndarray:
    """One-dimensional int64 or string array, no wider than its longest string."""
    try:
        given = np.asarray(ids)
    except ValueError as error:
        raise InputError(f"ids must be a flat list of ints or strings; {error}.") from error
    if given.ndim != 1:
        raise InputError(f"ids must be a flat list, one id for each sample; got an array of shape {given.shape}.")
    items = given.tolist()
    if not items:
        return np.array([], dtype=str if given.dtype.kind in "UOT" else np.int64)
    if all(isinstance(item, str) for item in items):
        return np.array(items, dtype=str)
    whole = all(isinstance(item, int) and not isinstance(item, bool) for item in items)
    if not whole or min(items) < _INT64.min or max(items) > _INT64.max:
        raise InputError(
            f"ids must be all ints of at most 64 bits or all strings, none missing; got {given.dtype} values such as "
            f"{items[0]!r}. Convert them first, e.g. [str(i) for i in ids]."
        )
    return np.array(items, dtype=np.int64)


def checked_ids(ids: Any, n: int, *, unique: bool) -> np.ndarray | None:
    """``canonical_ids`` of n samples, all different if ``unique``; None stays None."""
    if ids is None:
        return None
    found = canonical_ids(ids)
    if len(found) != n:
        raise InputError(f"ids must hold one id for each sample: X has {n} rows, and ids {len(found)} entries.")
    if unique and len(set(found.tolist())) < n:
        values, counts = np.unique(found, return_counts=True)
        twice = values[counts > 1].tolist()
        raise InputError(
            f"ids must be unique; {len(twice)} of them occur more than once, such as {twice[0]!r}. If an id names whom samples "
            "come from, and all of them shall go together, say unique_ids=False."
        )
    return found


def requested_ids(ids: Any, stored: np.ndarray | None) -> list:
    """The ids of a request as Python values, or an error if they could never match the stored ones."""
    if stored is None:
        raise InputError(
            "The model was fitted without ids and cannot tell who is who. Ask by value, unlearn_samples(X, y), or fit with "
            "ids=."
        )
    wanted = canonical_ids(ids)
    if len(wanted) and wanted.dtype.kind != stored.dtype.kind:
        names = {"i": "ints", "U": "strings"}
        raise InputError(
            f"The model was fitted with ids that are {names[stored.dtype.kind]}, and the request has "
            f"{names[wanted.dtype.kind]}: none would match. Convert the request."
        )
    return wanted.tolist()


def checked_rows(estimator, X, *, accept_sparse: bool = True):
    """X in float64, like that of ``fit``; scikit-learn's checks, heedful's errors."""
    settings = {"accept_sparse": "csr" if accept_sparse else False, "dtype": np.float64}
    try:
        return _summed(validate_data(estimator, X, reset=False, **settings))
    except ValueError as error:
        raise InputError(str(error)) from error


def checked_data(estimator, X, y, *, reset: bool, accept_sparse: bool = True):
    """X in float64, and y as labels."""
    settings = {"accept_sparse": "csr" if accept_sparse else False, "dtype": np.float64}
    try:
        X, y = validate_data(estimator, X, y, reset=reset, **settings)
        check_classification_targets(y)
    except ValueError as error:
        raise InputError(str(error)) from error
    return _summed(X), y


def _summed(X):
    """Sparse matrices without entries that are stored in parts, whose squares would be wrong."""
    if sparse.issparse(X) and not X.has_canonical_format:
        X = X.copy()
        X.sum_duplicates()
    return X


@contextlib.contextmanager
def restored_on_failure(model: Any) -> Iterator[None]:
    """All attributes of ``model`` are what they were if what is done meanwhile fails."""
    before = dict(vars(model))
    try:
        yield
    except BaseException:
        vars(model).clear()
        vars(model).update(before)
        raise


def known_classes(y: np.ndarray, classes: Any) -> np.ndarray:
    """The sorted class list: ``classes`` if given, else the labels of y; at least two."""
    try:
        found = np.unique(y if classes is None else column_or_1d(classes))
    except (TypeError, ValueError) as error:
        raise InputError(f"classes must be a flat list of labels of one kind; {error}.") from error
    plain = all(isinstance(name, (str, int, float)) for name in found.tolist())
    if found.dtype.kind not in "biufUO" or not plain:
        raise InputError(
            f"Labels must be numbers or text, which a file can hold; got {found.dtype} values such as {found[:1].tolist()}. "
            "Convert them first, e.g. [str(label) for label in y]."
        )
    if found.dtype.kind == "U":
        found = np.array(found.tolist())  # no wider than the longest name
    if len(found) < 2:
        hint = "" if classes is not None else " Pass classes= if y lacks some."
        raise InputError(f"A classifier needs at least two classes; got one class, {found.tolist()}.{hint}")
    return found


def class_codes(y: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Number of each label in ``classes``; −1 where it is none of them."""
    if y.dtype.kind in "biuf" and classes.dtype.kind in "biuf":
        places = np.searchsorted(classes, y).clip(max=len(classes) - 1)
        return np.where(classes[places] == y, places, -1).astype(np.int64)
    number = {name: place for place, name in enumerate(classes.tolist())}
    return np.array([number.get(label, -1) for label in y.tolist()], dtype=np.int64)


def require_known(codes: np.ndarray, y: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """``codes`` themselves, if every label is a known class."""
    if (codes < 0).any():
        unknown = sorted(set(y[codes < 0].tolist()), key=repr)
        raise InputError(
            f"y has labels {unknown} that are not among the classes {classes.tolist()}. Name all classes when fitting "
            "first, by classes=."
        )
    return codes
