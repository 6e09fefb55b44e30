"""Who is kept: rows whose direction is still new, chosen without a look at labels.

With A = λI + Σ_Q x xᵀ over the rows kept so far, an arriving row is kept if its leverage xᵀ A⁻¹ x exceeds T^(−κ). More
rows in A only lower leverages. Two things follow. A core set is monotone: without some of its rows it would be chosen
again. And a row whose leverage is too low at the start of a block stays so to its end, which is why one matrix product
can dismiss most of a block.
"""

import math
import sys
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int
from scipy import sparse
from scipy.linalg import cholesky
from scipy.linalg.blas import dtrmm
from scipy.linalg.lapack import dtrtri
from sklearn.utils import check_array

from heedful._validation import require_number
from heedful.errors import ConvergenceError, InputError, ParameterError

Normalize = Literal["sample", "unit"] | None
MAX_SPARSE_FEATURES = 5000
_BLOCK = 512  # rows, or d if that is more, whose leverages one matrix product gives
_DENSE_BLOCK = 4096  # rows that are dense at a time while A is summed


def select_core_set(X, *, kappa: float, horizon: int | None = None, ridge: float = 1.0) -> Int[np.ndarray, " m"]:
    """Row numbers of the core set of X, in order of arrival.

    Parameters
    ----------
    X : array-like or sparse matrix of shape (n, d)
        Rows as they arrive, of norm at most 1 for the theory to hold; used as they are.
    kappa : float
        Exponent κ in (0, 1]; usual values 0.1 to 0.3. Larger keeps more.
    horizon : int, optional
        Number T >= 1 of rows expected in all, declared in advance; None takes n.
    ridge : float
        λ > 0.

    Returns
    -------
    rows : int array of shape (m,)
        Ascending. Rows 0, 1, … are tested in order against those kept before them.

    Raises
    ------
    ParameterError
        If a setting is out of range.
    InputError
        If X is no finite matrix, or is sparse with more than 5000 columns.

    Notes
    -----
    O(n d² + m d²) time, O(d²) memory beside X. The same rows as a loop that updates A⁻¹ row by row, up to ties within
    rounding of the threshold.

    References
    ----------
    Cesa-Bianchi, Gentile, Orabona: Robust bounds for classification via selective sampling, ICML 2009.

    Examples
    --------
    >>> import numpy as np
    >>> from heedful.unlearn import select_core_set
    >>> X = np.repeat(np.eye(2), 10, axis=0)  # ten times the same row, then ten times another
    >>> select_core_set(X, kappa=0.25, horizon=20)  # the third copy has leverage 1/3, and 20^(-1/4) is 0.47
    array([ 0,  1, 10, 11])
    """
    require_selection_settings(kappa, horizon, ridge)
    try:
        X = check_array(X, accept_sparse="csr", dtype=np.float64)
    except ValueError as error:
        raise InputError(str(error)) from error
    require_few_columns(X)
    threshold = float(len_of(X) if horizon is None else horizon) ** -kappa
    return grow_selection(len_of(X), lambda rows: dense(X[rows]), ridge * np.eye(X.shape[1]), threshold)


def grow_selection(
    n_rows: int,
    features: Callable[[slice], Float[np.ndarray, "block d"]],
    A: Float[np.ndarray, "d d"],
    threshold: float,
) -> Int[np.ndarray, " m"]:
    """Numbers of the rows to keep, where A is λI + Σ z zᵀ over what is kept already; ``features`` gives a block of rows.

    With A = L Lᵀ at the start of a block and V = L⁻¹ Zᵀ, leverages are the squared norms of V's columns v. Inside of the
    block A⁻¹ is L⁻ᵀ (I − Σ u uᵀ) L⁻¹: a kept row adds u = b/√(1 + q) with b = (I − Σ u uᵀ) v and leverage q = vᵀb
    (Sherman and Morrison), and lowers the leverage of a later row v′ by (v′ᵀu)².
    """
    A, whiten = A.copy(), None
    block = max(_BLOCK, len(A))
    kept: list[int] = []
    for start in range(0, n_rows, block):
        Z = features(slice(start, start + block))
        if whiten is None:  # L⁻¹: eigenvalues of A are at least λ, and a product is twice as fast as a solve
            whiten = dtrtri(np.asfortranarray(cholesky_factor(A)), lower=1, overwrite_c=1)[0]
        V = dtrmm(1.0, whiten, Z.T, lower=1).T
        leverage = np.einsum("ij,ij->i", V, V)
        places = np.flatnonzero(leverage > threshold)
        V, leverage = V[places], leverage[places]
        U = np.empty((len(places), len(A)))
        new: list[int] = []
        for i, place in enumerate(places.tolist()):
            if leverage[i] > threshold:
                u = V[i] - (U[: len(new)] @ V[i]) @ U[: len(new)]
                u /= math.sqrt(1 + leverage[i])
                leverage[i:] -= np.square(V[i:] @ u)
                U[len(new)] = u
                new.append(place)
        if new:
            A += Z[new].T @ Z[new]
            whiten = None
            kept += [start + place for place in new]
    return np.array(kept, dtype=np.int64)


def moments(
    X, targets: Float[np.ndarray, "n k"], features: Callable[[Any], Float[np.ndarray, "block d"]], *, ridge: float
) -> tuple[Float[np.ndarray, "d d"], Float[np.ndarray, "d k"]]:
    """A = λI + Σ z zᵀ and B = Σ z tᵀ over the rows z = features(x) and their targets t; no rows give λI and 0.

    The same operations on the same blocks whatever led to these rows, so that equal rows give equal bits.
    """
    d = features(X[:1]).shape[1]
    A, B = ridge * np.eye(d), np.zeros((d, targets.shape[1]))
    for start in range(0, len_of(X), _DENSE_BLOCK):
        Z = features(X[start : start + _DENSE_BLOCK])
        A += Z.T @ Z
        B += Z.T @ targets[start : start + _DENSE_BLOCK]
    return A, B


def cholesky_factor(A: Float[np.ndarray, "d d"]) -> Float[np.ndarray, "d d"]:
    """L with A = L Lᵀ, lower triangular."""
    try:
        return cholesky(A, lower=True)
    except ValueError as error:  # not definite, or not finite
        raise ConvergenceError(
            "ridge is so small beside the norms of the samples that it is lost to rounding, and A = ridge·I + Σ z zᵀ has no "
            "Cholesky factor. Choose a larger ridge, or normalize the samples."
        ) from error


def core_size_estimate(n_features: int, horizon: int, kappa: float) -> float:
    """About how many rows are kept: d·T^κ, at most T.

    Right within a factor of two for unit vectors without preferred directions at λ = 1; rows that lie near a subspace
    are kept in fewer numbers. The proven bound is O(d T^κ log T).

    Parameters
    ----------
    n_features : int
        d >= 1, the constant feature of an intercept included.
    horizon : int
        T >= 1.
    kappa : float
        κ in (0, 1].
    """
    require_number(n_features, "n_features", low=1, integer=True)
    require_number(horizon, "horizon", low=1, high=sys.maxsize, integer=True)
    require_number(kappa, "kappa", low=0, high=1, open_low=True)
    return min(float(horizon), n_features * float(horizon) ** kappa)


def kappa_for_budget(n_features: int, horizon: int, max_points: int) -> float:
    """The κ whose core set holds about ``max_points`` rows: log(m/d) / log T, at most 1.

    Raises ``ParameterError`` unless n_features < max_points and horizon >= 2: with T^κ > 1, more than d rows are kept.
    """
    require_number(n_features, "n_features", low=1, integer=True)
    require_number(horizon, "horizon", low=2, integer=True)
    require_number(max_points, "max_points", low=1, integer=True)
    if max_points <= n_features:
        raise ParameterError(
            f"max_points must be larger than n_features, since some {n_features} rows are kept at the smallest kappa; got "
            f"max_points={max_points}. Allow more, or project the features to fewer dimensions."
        )
    return min(1.0, math.log(max_points / n_features) / math.log(horizon))


def divisors(squares: Float[np.ndarray, " n"], *, fit_intercept: bool, normalize: Normalize) -> Float[np.ndarray, " n"]:
    """By what each row, with the constant 1 appended if ``fit_intercept``, is divided so that its norm is at most 1.

    ``squares`` holds the squared norms of the rows as given. The constant comes at the price of 1/√2, which leaves rows
    of norm 1 at norm 1. Each row stands for itself, so that no row says anything of another.
    """
    if not np.isfinite(squares).all():
        raise InputError(
            "The squared norms of some samples exceed the range of float64. Scale all samples by one number."
        )
    scale = math.sqrt(2) if fit_intercept else 1.0
    norms = np.sqrt(squares + 1) / scale if fit_intercept else np.sqrt(squares)
    if normalize == "sample":
        return scale * np.maximum(norms, 1)
    if normalize == "unit":
        return scale * np.where(norms > 0, norms, 1)
    return np.full(len(norms), scale)


def feature_rows(X, *, fit_intercept: bool, normalize: Normalize) -> Float[np.ndarray, "n d"]:
    """Rows as they are learned from: dense, with the constant, divided by their divisor."""
    require_few_columns(X)
    by = divisors(squared_norms(X), fit_intercept=fit_intercept, normalize=normalize)
    Z = dense(X)
    if fit_intercept:
        Z = np.column_stack([Z, np.ones(len(Z))])
    return Z / by[:, None]


def squared_norms(X) -> Float[np.ndarray, " n"]:
    """‖x‖² of each row; a row's value does not depend on the other rows."""
    with np.errstate(over="ignore"):  # infinity will be refused
        if sparse.issparse(X):
            return np.asarray(X.multiply(X).sum(axis=1), dtype=np.float64).ravel()
        return np.square(X).sum(axis=1)


def dense(X) -> Float[np.ndarray, "n d"]:
    """X as an array."""
    return X.toarray() if sparse.issparse(X) else X


def len_of(X) -> int:
    """Number of rows, of sparse matrices too."""
    return int(X.shape[0])


def require_selection_settings(kappa: Any, horizon: Any, ridge: Any) -> None:
    """Raise ``ParameterError`` unless κ is in (0, 1], T is None or an int >= 1, and λ > 0."""
    require_number(kappa, "kappa", low=0, high=1, open_low=True)
    if horizon is not None:
        require_number(horizon, "horizon", low=1, high=sys.maxsize, integer=True)
    require_number(ridge, "ridge", low=0, high=sys.float_info.max, open_low=True)


def require_few_columns(X) -> None:
    """Selection holds a dense d × d matrix: refuse sparse rows that are too wide for it."""
    if sparse.issparse(X) and X.shape[1] > MAX_SPARSE_FEATURES:
        raise InputError(
            f"X is sparse with {X.shape[1]} columns, and selection holds a dense matrix of columns by columns: at most "
            f"{MAX_SPARSE_FEATURES} are possible. Hash the features to fewer, or project them at random, with a seed that "
            "may be known, e.g. sklearn.random_projection.SparseRandomProjection(200, random_state=0)."
        )
