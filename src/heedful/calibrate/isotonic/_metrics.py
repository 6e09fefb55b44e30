"""How far probabilities are from meaning what they say."""

import dataclasses

import numpy as np
from jaxtyping import Float, Int

from heedful._results import Report
from heedful._validation import as_probabilities, require_choice, require_number
from heedful.calibrate.isotonic._labels import label_codes, to_numpy
from heedful.errors import InputError


def expected_calibration_error(
    y,
    P,
    *,
    n_bins: int = 15,
    kind: str = "confidence",
    strategy: str = "uniform",
    norm: float = 1,
) -> float:
    """Mean distance between stated and observed frequency, over bins of the stated one.

    With n_b of n predictions in bin b, c_b their mean stated and a_b their observed frequency, the result is
    (Σ_b n_b/n |a_b − c_b|^norm)^(1/norm); empty bins do not count.

    Parameters
    ----------
    y : array-like of shape (n,)
        Labels: column numbers from 0, or K distinct values that stand for the columns in sorted order.
    P : array-like or tensor of shape (n, K)
        Probabilities.
    n_bins : int
        Number of bins; 10 to 20 are usual. A value on an edge belongs to the lower bin, (a, b].
    kind : {"confidence", "classwise"}
        Stated frequency: the largest probability of each row, against "the prediction is right"; or each class's
        probability, against "it is this class", averaged over the classes.
    strategy : {"uniform", "quantile"}
        Bins of equal width, or with equally many predictions.
    norm : float
        At least 1; ``numpy.inf`` gives the largest distance of any bin (maximum calibration error).

    Returns
    -------
    float
        0 (perfect) to 1. Finite samples and bins bias it: compare at equal n and bins only.

    References
    ----------
    Naeini, Cooper, Hauskrecht: Obtaining well calibrated probabilities using Bayesian binning, AAAI 2015. Kull et al.:
    Beyond temperature scaling, NeurIPS 2019 (classwise).

    Examples
    --------
    >>> from heedful.calibrate import expected_calibration_error
    >>> round(
    ...     expected_calibration_error([0, 1, 1], [[0.8, 0.2], [0.8, 0.2], [0.2, 0.8]]), 4
    ... )  # sure to 0.8, right in 2/3
    0.1333
    """
    require_number(n_bins, "n_bins", low=1, integer=True)
    require_number(norm, "norm", low=1)
    require_choice(kind, "kind", ("confidence", "classwise"))
    require_choice(strategy, "strategy", ("uniform", "quantile"))
    matrix, codes = _checked(y, P)
    pairs = [_top(matrix, codes)] if kind == "confidence" else [(p, codes == k) for k, p in enumerate(matrix.T)]
    errors = []
    for stated, hit in pairs:
        bins = _Bins.of(stated, hit, _edges(stated, n_bins, strategy))
        distance = np.abs(bins.stated - bins.observed)
        if np.isinf(norm):
            errors.append(distance.max())
        else:
            errors.append((bins.counts / len(codes) @ distance**norm) ** (1 / norm))
    return float(np.mean(errors))


@dataclasses.dataclass(frozen=True)
class ReliabilityCurve(Report):
    """Confidence against accuracy, by bins of the confidence; empty bins are left out.

    Attributes
    ----------
    lower, upper : arrays of shape (bins,)
        Ends of each bin, (lower, upper].
    confidence, accuracy : arrays of shape (bins,)
        Mean largest probability, and share of rows whose predicted class is right.
    counts : int array of shape (bins,)
        Rows in each bin.
    """

    lower: Float[np.ndarray, " bins"]
    upper: Float[np.ndarray, " bins"]
    confidence: Float[np.ndarray, " bins"]
    accuracy: Float[np.ndarray, " bins"]
    counts: Int[np.ndarray, " bins"]

    def plot(self, ax=None):
        """Draw the curve with the diagonal it should follow, areas of points as counts; returns the matplotlib axes."""
        if ax is None:
            import matplotlib.pyplot as plt

            ax = plt.figure().subplots()
        ax.plot([0, 1], [0, 1], color="0.6", linewidth=1, linestyle="--", label="calibrated")
        ax.plot(self.confidence, self.accuracy, color="C0", linewidth=1)
        ax.scatter(self.confidence, self.accuracy, s=10 + 190 * self.counts / self.counts.max(), color="C0", alpha=0.7)
        ax.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1), aspect="equal")
        return ax


def reliability_curve(y, P, *, n_bins: int = 15) -> ReliabilityCurve:
    """Confidence and accuracy in ``n_bins`` bins of equal width; ``y`` and ``P`` as in `expected_calibration_error`."""
    require_number(n_bins, "n_bins", low=1, integer=True)
    confidence, right = _top(*_checked(y, P))
    edges = _edges(confidence, n_bins, "uniform")
    bins = _Bins.of(confidence, right, edges)
    return ReliabilityCurve(edges[bins.index], edges[bins.index + 1], bins.stated, bins.observed, bins.counts)


@dataclasses.dataclass(frozen=True)
class _Bins:
    """The non-empty bins: their number, predictions in each, mean stated and observed frequency."""

    index: Int[np.ndarray, " bins"]
    counts: Int[np.ndarray, " bins"]
    stated: Float[np.ndarray, " bins"]
    observed: Float[np.ndarray, " bins"]

    @classmethod
    def of(cls, stated, hit, edges) -> "_Bins":
        bins = np.searchsorted(edges[1:-1], stated, side="left")  # an edge belongs to the bin below it
        index, place, counts = np.unique(bins, return_inverse=True, return_counts=True)
        return cls(
            index,
            counts,
            np.bincount(place, weights=stated) / counts,
            np.bincount(place, weights=hit.astype(float)) / counts,
        )


def _edges(stated: np.ndarray, n_bins: int, strategy: str) -> np.ndarray:
    if strategy == "uniform":
        return np.linspace(0, 1, n_bins + 1)
    return np.r_[0.0, np.unique(np.quantile(stated, np.arange(1, n_bins) / n_bins)), 1.0]


def _top(matrix: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Largest probability of each row, and whether its (first) class is the true one."""
    return matrix.max(axis=1), matrix.argmax(axis=1) == codes


def _checked(y, P) -> tuple[np.ndarray, np.ndarray]:
    matrix = as_probabilities(to_numpy(P))
    _, codes = label_codes(y, matrix.shape[1])
    if len(codes) != len(matrix) or not len(codes):
        raise InputError(f"y and P need equally many rows, at least one; got {len(codes)} and {len(matrix)}.")
    return matrix, codes
