"""A trial as two weighted arms: outcomes, covariates on a common scale, and inverse-propensity weights."""

import warnings
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import sparse
from scipy.spatial.distance import cdist

from heedful._validation import require_choice, require_finite
from heedful.errors import HeedfulWarning, InputError

_NEAR = 0.01  # propensities this near to 0 or 1 give single units large weights


class Trial(NamedTuple):
    """Outcomes y, scaled covariates z and weights (each with sum 1) of the controls (0, a) and the treated (1, b)."""

    y0: Float[np.ndarray, "n dy"]
    y1: Float[np.ndarray, "m dy"]
    z0: Float[np.ndarray, "n dz"]
    z1: Float[np.ndarray, "m dz"]
    a: Float[np.ndarray, " n"]
    b: Float[np.ndarray, " m"]

    def take(self, rows: np.ndarray | slice, columns: np.ndarray | slice) -> "Trial":
        """Some controls and some treated units, in this order."""
        a, b = self.a[rows], self.b[columns]
        return Trial(self.y0[rows], self.y1[columns], self.z0[rows], self.z1[columns], a / a.sum(), b / b.sum())


def squared_distances(z0: Float[np.ndarray, "n dz"], z1: Float[np.ndarray, "m dz"]) -> Float[np.ndarray, "n m"]:
    """Squared distances of all pairs; without covariates a view of one zero."""
    if not z0.shape[1]:
        return np.broadcast_to(0.0, (len(z0), len(z1)))
    return cdist(z0, z1, "sqeuclidean")


def read_trial(
    outcome, treatment, covariates=None, *, propensity=None, covariate_scale=None, stacklevel: int = 1
) -> Trial:
    """Check what came and split it into arms, in which units keep their order; warnings point ``stacklevel`` calls up."""
    require_choice(covariate_scale, "covariate_scale", ("standardize", "mahalanobis", None))
    y = read_outcome(outcome)
    treated = read_treatment(treatment, len(y))
    z = (
        np.empty((len(y), 0))
        if covariates is None
        else _read_covariates(covariates, len(y), covariate_scale, stacklevel + 1)
    )
    a, b = _weights(propensity, treated, stacklevel + 1)
    return Trial(y[~treated], y[treated], z[~treated], z[treated], a, b)


def read_outcome(outcome) -> Float[np.ndarray, "units dy"]:
    """Outcomes as numbers, one row a unit."""
    if sparse.issparse(outcome):
        raise InputError("outcome is a sparse matrix. Pass a dense array, outcome.toarray().")
    y = _numbers(outcome, "outcome")
    if y.ndim not in (1, 2) or not y.size:
        raise InputError(f"outcome must have shape (n,) or (n, number of outcomes), n >= 2; got {y.shape}.")
    return require_finite(y.reshape(len(y), -1), "outcome")


def read_treatment(treatment, n: int) -> np.ndarray:
    """True for the treated units."""
    values = np.asarray(treatment)
    if values.shape != (n,):
        raise InputError(f"treatment must be one 0 or 1 a unit, {n} as in outcome; got shape {values.shape}.")
    if n < 2:
        raise InputError(f"Bounds need units in both arms, two at least; got {n} sample.")
    seen = _distinct(values)
    if not set(seen) <= {0, 1}:
        shown = ", ".join(map(repr, seen[:5])) + (", …" if len(seen) > 5 else "")
        raise InputError(f"treatment must be 0 or 1, or bool; its values are {shown}. Pass treatment == 'the treated'.")
    if len(seen) < 2:
        raise InputError(f"Bounds need units in both arms; all {n} values of treatment are {seen[0]!r}.")
    return values.astype(bool)


def _distinct(values: np.ndarray) -> list:
    try:
        return np.unique(values).tolist()
    except TypeError:  # no order between them
        return list(dict.fromkeys(values.tolist()))


def _numbers(values, name: str) -> np.ndarray:
    try:
        array = np.asarray(values)
        if np.iscomplexobj(array):
            raise TypeError("Complex data not supported")
        return array.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} must be numbers; {error}.") from error


def _weights(
    propensity, treated: np.ndarray, stacklevel: int
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " m"]]:
    """Weights ∝ 1/(1 − e) of controls and ∝ 1/e of treated units, each with sum 1."""
    e = np.array(0.5) if propensity is None else _numbers(propensity, "propensity")
    if e.shape not in ((), treated.shape):
        raise InputError(f"propensity must be one number, or one a unit, {len(treated)}; got shape {e.shape}.")
    outside = int((~((e > 0) & (e < 1))).sum())
    if outside:
        raise InputError(
            f"propensity must lie between 0 and 1; {outside} of {e.size} do not. Units that could be in one arm only "
            "have no counterpart: leave them out."
        )
    near = int(((e < _NEAR) | (e > 1 - _NEAR)).sum())
    if near:
        warnings.warn(
            f"{near} of {e.size} propensities are within {_NEAR} of 0 or 1: a few units carry most of the weight.",
            HeedfulWarning,
            stacklevel=stacklevel,
        )
    e = np.broadcast_to(e, treated.shape)
    a, b = 1 / (1 - e[~treated]), 1 / e[treated]
    return a / a.sum(), b / b.sum()


def _read_covariates(covariates, n: int, scale: str | None, stacklevel: int) -> Float[np.ndarray, "units dz"]:
    """Covariates whose squared distances are to be paid for: numbers scaled, categories at distance 1."""
    if sparse.issparse(covariates):
        raise InputError("covariates are a sparse matrix. Pass a dense array, covariates.toarray().")
    if hasattr(covariates, "to_frame"):  # a Series
        covariates = covariates.to_frame()
    if hasattr(covariates, "iloc"):
        names, numbers, categories = _read_frame(covariates)
    else:
        numbers, categories = _numbers(covariates, "covariates, unless categories in a pandas DataFrame,"), []
        if numbers.ndim == 1:
            numbers = numbers[:, None]
        if numbers.ndim != 2:
            raise InputError(f"covariates must have shape (n, number of covariates); got {numbers.shape}.")
        names = list(range(numbers.shape[1]))
    if not numbers.shape[1] and not categories:
        raise InputError(
            f"covariates have 0 feature(s) (shape=({len(numbers)}, 0)) while a minimum of 1 is required. Pass None for "
            "blind bounds."
        )
    if len(numbers) != n:
        raise InputError(f"covariates must have one row a unit, {n} as in outcome; got {len(numbers)}.")
    bad = ~np.isfinite(numbers).all(axis=0)
    if bad.any():
        raise InputError(
            f"covariates have NaN or infinite entries in column {_listed(np.array(names, dtype=object)[bad])}. "
            "Remove those rows or impute them."
        )
    constant = np.ptp(numbers, axis=0) <= 1e-12 * np.abs(numbers).max(axis=0, initial=0)  # rounding is no variation
    if constant.any():
        warnings.warn(
            f"covariates do not vary in column {_listed(np.array(names, dtype=object)[constant])}: dropped.",
            HeedfulWarning,
            stacklevel=stacklevel,
        )
    numbers = numbers[:, ~constant]
    if scale is not None and numbers.shape[1]:
        numbers = numbers / np.abs(numbers).max(axis=0)  # so that no square overflows or vanishes
        numbers = (numbers - numbers.mean(axis=0)) / numbers.std(axis=0)
    if scale == "mahalanobis" and numbers.shape[1]:
        values, vectors = np.linalg.eigh(numbers.T @ numbers / n)
        kept = values > 1e-10 * values[-1]  # combinations of columns that do not vary say nothing
        numbers = numbers @ (vectors[:, kept] / np.sqrt(values[kept]))
    return np.column_stack([numbers, *categories])


def _read_frame(frame: Any) -> tuple[list, np.ndarray, list[np.ndarray]]:
    """Names and values of the columns that hold numbers, and an indicator matrix / √2 of each that holds categories."""
    import pandas as pd

    names, numbers, categories = [], [], []
    for position, name in enumerate(frame.columns):
        column = frame.iloc[:, position]
        kind = pd.api.types.infer_dtype(column, skipna=True)
        if kind in ("string", "categorical"):
            codes, levels = pd.factorize(column, sort=True)
            if (codes < 0).any():
                raise InputError(
                    f"covariates have {int((codes < 0).sum())} missing entries in column {name!r}. Remove those rows, or "
                    "make missing a level of its own."
                )
            if len(levels) > 1:
                categories.append(np.eye(len(levels))[codes] / np.sqrt(2))  # any two levels are at distance 1
                continue
            numbers.append(np.zeros(len(column)))
        else:
            if kind.startswith(("datetime", "timedelta", "period", "date", "time")):
                raise InputError(f"covariates hold dates or times in column {name!r}. Make numbers of them.")
            try:
                numbers.append(column.to_numpy(dtype=np.float64, na_value=np.nan))
            except (TypeError, ValueError) as error:
                raise InputError(f"covariates must hold numbers or categories in column {name!r}; {error}.") from error
        names.append(name)
    return names, np.column_stack(numbers) if numbers else np.empty((len(frame), 0)), categories


def _listed(names) -> str:
    return ", ".join(map(repr, names))
