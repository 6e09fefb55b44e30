"""Labels as column numbers of a probability matrix."""

from collections.abc import Sequence

import numpy as np
import torch
from sklearn.utils import assert_all_finite
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d

from heedful.errors import InputError


def to_numpy(values) -> np.ndarray:
    """Arrays, data frames, lists and tensors (on any device, with or without gradient) as a NumPy array."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        return values.double().numpy() if values.is_floating_point() else values.numpy()
    return np.asarray(values)


def label_codes(
    y, n_classes: int, *, classes=None, column_names: Sequence[str] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The classes, in column order, and the column of each label.

    Parameters
    ----------
    y : array-like of shape (n,)
        Labels.
    n_classes : int
        Columns of the probability matrix.
    classes : array-like of shape (n_classes,), optional
        The class of each column. Default: the column names, if all labels are among them; else 0 to n_classes − 1, if
        all labels are such numbers; else the sorted distinct labels, if there are n_classes of them and the columns
        have no names.
    column_names : sequence of str, optional
        Names of the columns, where the matrix has any.

    Returns
    -------
    classes : array of shape (n_classes,)
    codes : int array of shape (n,)
    """
    y = to_numpy(y)
    if y.ndim == 2 and y.shape[1] == n_classes:
        raise InputError(
            f"y must be labels of shape (n,); got shape {y.shape}. If it is one-hot, pass y.argmax(axis=1)."
        )
    y = column_or_1d(y, warn=True)
    try:
        assert_all_finite(y, input_name="y")
        check_classification_targets(y)
    except ValueError as error:
        raise InputError(f"y must be class labels. {error}") from error
    found = np.unique(y)
    if classes is not None:
        classes = to_numpy(classes)
        if classes.shape != (n_classes,) or len(np.unique(classes)) < n_classes:
            raise InputError(f"classes must name each of the {n_classes} columns of P once; got {classes.tolist()!r}.")
    elif column_names is not None and np.isin(found, column_names).all():
        classes = np.asarray(column_names)
    elif y.dtype.kind in "iuf" and np.isin(found, np.arange(n_classes)).all():
        classes = np.arange(n_classes)
    elif len(found) == n_classes and (column_names is None or y.dtype.kind not in "OUST"):
        classes = found
    else:
        raise InputError(
            f"P has {n_classes} columns, and y holds {len(found)} distinct labels ({_some(found)}), so it is unclear which "
            "column is whose. Give labels as column numbers from 0, or name the class of each column: classes=[...]."
        )
    order = np.argsort(classes, kind="stable")
    places = np.minimum(np.searchsorted(classes[order], y), n_classes - 1)
    codes = order[places]
    strange = classes[codes] != y
    if strange.any():
        raise InputError(f"y holds labels that no column of P stands for: {_some(np.unique(y[strange]))}.")
    return classes, codes


def _some(labels: np.ndarray) -> str:
    shown = ", ".join(map(repr, labels[:5].tolist()))
    return shown + (", …" if len(labels) > 5 else "")
