"""Arrays as methods need them, and messages that say what came, what is needed and what to do."""

import numbers
import warnings
from collections.abc import Hashable
from typing import Any, Literal

import numpy as np

from heedful.errors import HeedfulWarning, InputError, NotFittedError, ParameterError


def require_finite(x: np.ndarray, name: str) -> np.ndarray:
    """``x`` itself if every entry is finite, else an ``InputError`` that counts and locates what is not."""
    bad = ~np.isfinite(x)
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        raise InputError(
            f"{name} has {int(bad.sum())} entries that are NaN or infinite, the first at {first}. "
            "Remove those rows or impute them."
        )
    return x


def as_probabilities(
    values, name: str = "P", *, input: Literal["proba", "logits"] = "proba", tolerance: float = 1e-3
) -> np.ndarray:
    """Rows of class probabilities as float64, shape (n, K), each summing to one; ``values`` itself if that is what it is.

    Parameters
    ----------
    values : array-like of shape (n, K), K >= 2
        Probabilities, or logits when ``input="logits"`` (a stable softmax is applied).
    name : str
        What messages call it.
    input : {"proba", "logits"}
        What ``values`` holds. It is never guessed.
    tolerance : float
        Row sums off 1 by more than 1e-6 are renormalised with a warning; by more than ``tolerance`` they are an error.
    """
    require_choice(input, "input", ("proba", "logits"))
    try:
        P = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} must be an array of numbers of shape (n, K); {error}.") from error
    if P.ndim != 2 or P.shape[1] < 2:
        hint = "give both columns, e.g. np.column_stack([1 - p, p])" if P.ndim == 1 else "give one column per class"
        raise InputError(f"{name} must have shape (n, K) with K >= 2 columns; got shape {P.shape}: {hint}.")
    require_finite(P, name)
    if input == "logits":
        P = np.exp(P - P.max(axis=1, keepdims=True))
        return P / P.sum(axis=1, keepdims=True)
    sums = P.sum(axis=1)
    off = np.abs(sums - 1.0)
    if P.size and (P.min() < 0 or off.max() > tolerance):
        row = int(np.argmax(np.where((P < 0).any(axis=1), np.inf, off)))
        raise InputError(
            f"{name} must hold probabilities; row {row} has minimum {P[row].min():.4g} and sum {sums[row]:.4g}. "
            "Are these logits? Pass input='logits'."
        )
    if P.size and off.max() > 1e-6:
        warnings.warn(
            f"{name}: {int((off > 1e-6).sum())} rows sum to 1 only within {off.max():.1e}; they were renormalised.",
            HeedfulWarning,
            stacklevel=3,
        )
    # Rows that are right but for rounding stay as they are: dividing would part equal scores by a last bit.
    wrong = off > 1e-6
    return np.where(wrong[:, None], P / sums[:, None], P) if wrong.any() else P


def require_fitted(estimator: Any) -> None:
    """Raise heedful's ``NotFittedError``, which is scikit-learn's too, unless ``estimator`` has been fitted."""
    from sklearn.exceptions import NotFittedError as SklearnNotFittedError
    from sklearn.utils.validation import check_is_fitted

    try:
        check_is_fitted(estimator)
    except SklearnNotFittedError as error:
        raise NotFittedError(str(error)) from None


def require_number(
    value: Any, name: str, *, low: float = -np.inf, high: float = np.inf, open_low: bool = False, integer: bool = False
) -> None:
    """Raise ``ParameterError`` unless ``value`` is a real number (an int if ``integer``) in [low, high]."""
    kind = numbers.Integral if integer else numbers.Real
    right = isinstance(value, kind) and not isinstance(value, (bool, np.bool_))
    if not right or not (low < value if open_low else low <= value) or not value <= high:
        noun = "an int" if integer else "a number"
        bounds = [f"{'>' if open_low else '>='} {low:g}"] * (low > -np.inf) + [f"<= {high:g}"] * (high < np.inf)
        raise ParameterError(f"{name} must be {noun}{' ' if bounds else ''}{' and '.join(bounds)}; got {value!r}.")


def require_choice(value: Any, name: str, choices: tuple) -> None:
    """Raise ``ParameterError`` unless ``value`` is one of ``choices``."""
    if not isinstance(value, Hashable) or value not in choices:  # an array compares entry by entry
        raise ParameterError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}.")
