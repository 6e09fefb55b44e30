"""Isotonic calibrators of probability matrices, as scikit-learn estimators."""

import warnings
from typing import ClassVar

import numpy as np
import torch
from sklearn.isotonic import IsotonicRegression

from heedful._validation import require_choice, require_number
from heedful.calibrate.isotonic._base import Calibrator
from heedful.calibrate.isotonic._maps import Interpolation, PerClassMap, PooledMap, SortedMap
from heedful.calibrate.isotonic._na_fir import fit_scores
from heedful.calibrate.isotonic._pooled import (
    assign_cells,
    at_true_class,
    cell_bounds,
    cell_weights,
    flattened_isotonic,
    monotone_frequencies,
    quantile_edges,
)
from heedful.calibrate.isotonic._sorted import fit_sorted
from heedful.errors import HeedfulWarning, InputError, ParameterError

_FULL_RESOLUTION = 20_000


class OneVsRestIsotonicCalibrator(Calibrator):
    """Blind baseline: an isotonic fit for each class alone, then rows divided by their sums.

    f_k is the isotonic regression of 1[y = k] on p_k, and q_ik = f_k(p_ik) / Σ_j f_j(p_ij); a row of zeros becomes
    uniform. The same as scikit-learn's ``CalibratedClassifierCV(method="isotonic")`` on a frozen classifier, up to
    ``smoothing``. It may reorder the classes of a row, and each f_k sees only n values.

    Parameters
    ----------
    smoothing : {"uniform"} or None
        "uniform" mixes 1/(n + 1) of the uniform distribution into every row, n being the size of the calibration set:
        an isotonic fit has exact zeros, whose log loss is infinite.
    input : {"proba", "logits"}
        What the matrices hold; never guessed. Logits pass through softmax first.

    Attributes
    ----------
    classes_ : array of shape (K,)
        The class of each column.
    optimality_gap_ : float
        0: the fit is exact.

    References
    ----------
    Zadrozny, Elkan: Transforming classifier scores into accurate multiclass probability estimates, KDD 2002.
    """

    _arrays = ("thresholds_", "values_")

    def __init__(self, *, n_bins=None, smoothing="uniform", input="proba"):
        self.n_bins, self.smoothing, self.input = n_bins, smoothing, input

    def _check_parameters(self):
        super()._check_parameters()
        if self.n_bins is not None:
            require_number(self.n_bins, "n_bins", low=1, integer=True)

    def _fit(self, P, codes, weight, n):
        fits = []
        for k in range(P.shape[1]):
            p, hits, mass = P[:, k], (codes == k).astype(float), weight
            if self.n_bins is not None:
                bins = np.searchsorted(quantile_edges(p, weight, self.n_bins), p, side="right")
                mass = np.bincount(bins, weights=weight)
                p, hits = (np.bincount(bins, weights=weight * values) / mass for values in (p, hits))
            fit = IsotonicRegression().fit(p, hits, sample_weight=mass)
            fits.append((fit.X_thresholds_, fit.y_thresholds_))
        longest = max(len(x) for x, _ in fits) + 1
        self.thresholds_ = np.stack([np.pad(x, (0, longest - len(x)), constant_values=np.inf) for x, _ in fits])
        self.values_ = np.stack([np.pad(v, (0, longest - len(v)), mode="edge") for _, v in fits])
        self.optimality_gap_, self.n_iter_ = 0.0, 1

    def _map(self, input):
        tables = torch.tensor(self.thresholds_), torch.tensor(self.values_)
        return PerClassMap(*tables, input=input, epsilon=self.epsilon_)


class _PooledCalibrator(Calibrator):
    """One function of the probability, whatever the class."""

    interpolation: Interpolation
    _log_scale: ClassVar[bool]

    def _set_map(self, P: np.ndarray, cells: np.ndarray, values: np.ndarray) -> None:
        """Knots of a function with these values on these cells of the calibration probabilities."""
        lower, upper = cell_bounds(P, cells, len(values))
        if self.interpolation == "linear":
            ends = np.column_stack([lower, upper]).ravel()
            different = np.r_[True, np.diff(ends) > 0]
            lower, values = ends[different], np.repeat(values, 2)[different]
        self.thresholds_, self.values_ = lower, values

    def _map(self, input):
        return PooledMap(
            torch.tensor(self.thresholds_),
            torch.tensor(self.values_),
            interpolation=self.interpolation,
            log_scale=self._log_scale,
            input=input,
            epsilon=self.epsilon_,
        )


class FlattenedIsotonicCalibrator(_PooledCalibrator):
    """FIR: one isotonic fit for all classes, then rows divided by their sums.

    All n·K pairs (p_ij, 1[y_i = j]) are pooled under one non-decreasing f, and q_ij = f(p_ij) / Σ_l f(p_il). The same
    score then means the same whatever the class, the order of classes inside a row stays, and f sees K times the data
    of one-vs-rest. Normalisation is still an afterthought. O(nK log n).

    Parameters
    ----------
    blocks : "all" or int
        Where f may rise: anywhere; or between this many blocks (at least 2) with equally many true classes.
    interpolation : {"linear", "step"}
        f between the calibration probabilities: straight lines between the ends of neighbouring blocks, or
        right-continuous.
    smoothing : {"uniform"} or None
        "uniform" mixes 1/(n + 1) of the uniform distribution into every row, n being the size of the calibration set:
        an isotonic fit has exact zeros, whose log loss is infinite.
    input : {"proba", "logits"}
        What the matrices hold; never guessed. Logits pass through softmax first.

    Attributes
    ----------
    classes_ : array of shape (K,)
        The class of each column.
    optimality_gap_ : float
        0: the fit is exact.
    thresholds_, values_ : arrays of shape (m,)
        The knots of f.

    References
    ----------
    Improving Multi-Class Calibration through Normalization-Aware Isotonic Techniques, ICML 2025, arXiv:2512.09054.
    """

    _arrays = ("thresholds_", "values_")
    _log_scale = False

    def __init__(self, *, blocks="all", interpolation="linear", smoothing="uniform", input="proba"):
        self.blocks, self.interpolation, self.smoothing, self.input = blocks, interpolation, smoothing, input

    def _check_parameters(self):
        super()._check_parameters()
        _check_blocks(self.blocks, ("all",))

    def _fit(self, P, codes, weight, n):
        if self.blocks == "all":
            edges, values = flattened_isotonic(P, codes, weight)
            cells = assign_cells(P, edges)
        else:
            edges = _block_edges(P, codes, weight, self.blocks)
            cells, m = assign_cells(P, edges), len(edges) + 1
            true = at_true_class(cells, codes)
            positives = np.bincount(true, weights=weight, minlength=m)
            values = monotone_frequencies(positives, cell_weights(cells, weight, m))
        self._set_map(P, cells, values)
        self.optimality_gap_, self.n_iter_ = 0.0, 1


class NormalizationAwareIsotonicCalibrator(_PooledCalibrator):
    """NA-FIR: the one non-decreasing f whose *normalised* output has the least log loss.

    Minimises −(1/n) Σ_i log( f(p_{i,y_i}) / Σ_j f(p_ij) ) over non-decreasing positive f. In u = log f this is convex;
    it is solved to a certified gap. The order of classes inside a row stays. The default choice for 200 calibration
    rows and more.

    Parameters
    ----------
    blocks : {"fir", "all"} or int
        Where f may rise: between the blocks of the pooled isotonic fit; anywhere; or between this many blocks (at least
        2) with equally many true classes, a coarser and smoother map for small calibration sets.
    interpolation : {"linear", "step"}
        log f between blocks: straight lines, or right-continuous. Constant inside blocks and beyond the data.
    floor : float, optional
        Least value of f relative to its greatest, in (0, 1). Default 1/(nK), the least frequency n·K pairs can show.
    max_iter : int
        Most Newton steps; 10 to 30 are usual.
    tol : float
        Certified distance to the optimum, in nats, at which to stop.
    smoothing : {"uniform"} or None
        "uniform" mixes 1/(n + 1) of the uniform distribution into every row, n being the size of the calibration set:
        an isotonic fit has exact zeros, whose log loss is infinite.
    input : {"proba", "logits"}
        What the matrices hold; never guessed. Logits pass through softmax first.

    Attributes
    ----------
    classes_ : array of shape (K,)
        The class of each column.
    optimality_gap_ : float
        Certified bound, in nats, on how far the training loss is from its least value over all f that ``blocks``
        allows.
    n_iter_ : int
        Newton steps.
    thresholds_, values_ : arrays of shape (m,)
        The knots of log f.

    Warns
    -----
    HeedfulWarning
        If ``max_iter`` steps do not reach ``tol``.

    References
    ----------
    Improving Multi-Class Calibration through Normalization-Aware Isotonic Techniques, ICML 2025, arXiv:2512.09054,
    whose objective this is; the convex form and its solver replace the search over monotone functions used there.

    Examples
    --------
    >>> import numpy as np
    >>> from heedful.calibrate import NormalizationAwareIsotonicCalibrator
    >>> rng = np.random.default_rng(0)
    >>> truth = rng.dirichlet([1, 1, 1], size=2000)
    >>> y = (truth.cumsum(axis=1) > rng.random((2000, 1))).argmax(axis=1)
    >>> overconfident = truth**2 / (truth**2).sum(axis=1, keepdims=True)
    >>> calibrator = NormalizationAwareIsotonicCalibrator().fit(overconfident, y)
    >>> bool(abs(calibrator.predict_proba(overconfident) - truth).mean() < 0.02 < abs(overconfident - truth).mean())
    True
    """

    _arrays = ("thresholds_", "values_")
    _log_scale = True

    def __init__(
        self,
        *,
        blocks="fir",
        interpolation="linear",
        floor=None,
        smoothing="uniform",
        max_iter=500,
        tol=1e-7,
        input="proba",
    ):
        self.blocks, self.interpolation, self.floor, self.smoothing = blocks, interpolation, floor, smoothing
        self.max_iter, self.tol, self.input = max_iter, tol, input

    def _check_parameters(self):
        super()._check_parameters()
        _check_blocks(self.blocks, ("fir", "all"))
        if self.floor is not None:
            require_number(self.floor, "floor", low=0, open_low=True)
            if self.floor >= 1:
                raise ParameterError(f"floor must be a share of f's greatest value, below 1; got {self.floor!r}.")

    def _fit(self, P, codes, weight, n):
        if self.blocks == "fir":
            edges = flattened_isotonic(P, codes, weight).edges
        else:
            edges = _block_edges(P, codes, weight, self.blocks)
        cells, m = assign_cells(P, edges), len(edges) + 1
        floor = 1 / (n * P.shape[1]) if self.floor is None else self.floor
        scores = fit_scores(cells, codes, weight, m, floor=floor, tol=self.tol, max_iter=self.max_iter)
        if scores.gap > self.tol:
            warnings.warn(
                f"NA-FIR stopped after {scores.n_iter} Newton steps with a gap of {scores.gap:.1e} nats, above "
                f"tol={self.tol:g}. Raise max_iter, or tol.",
                HeedfulWarning,
                stacklevel=4,
            )
        self._set_map(P, cells, scores.u)
        self.optimality_gap_, self.n_iter_ = scores.gap, scores.n_iter


class SortedCumulativeIsotonicCalibrator(Calibrator):
    """SCIR: an isotonic fit of cumulative sums over the sorted classes, which normalises by construction.

    With S_r the sum of the r largest probabilities of a row, g(S, r) is the least-squares fit of "the true class is
    among the r largest", non-decreasing in S and in r, and q_(r) = g(S_r, r) − g(S_{r−1}, r−1). The confidence of the
    predicted class is g(S_1, 1), fitted directly. The order of classes inside a row may change. The fit on the grid is
    exact.

    Parameters
    ----------
    n_bins : int or None
        Bins of S, with equal weight; fewer smooth more. None keeps every distinct sum, for n·K <= 20 000.
    max_rank : int
        Ranks fitted; classes beyond share the remaining mass in proportion to their probabilities.
    interpolation : {"linear", "step"}
        g in S: straight lines between the bins' means, or constant in each bin.
    smoothing : {"uniform"} or None
        "uniform" mixes 1/(n + 1) of the uniform distribution into every row, n being the size of the calibration set:
        an isotonic fit has exact zeros, whose log loss is infinite.
    input : {"proba", "logits"}
        What the matrices hold; never guessed. Logits pass through softmax first.

    Attributes
    ----------
    classes_ : array of shape (K,)
        The class of each column.
    optimality_gap_ : float
        Certified bound on how far half the squared error of g, a row's mean, is from its least value; rounding alone
        keeps it from 0.
    n_iter_ : int
        Cuts of the exact recursive partitioning.
    knots_ : array of shape (bins,)
        Where g is known in S: bin means ("linear") or their lower ends ("step").
    values_ : array of shape (ranks, bins)
        g there.

    References
    ----------
    Improving Multi-Class Calibration through Normalization-Aware Isotonic Techniques, ICML 2025, arXiv:2512.09054. The
    treatment of many classes and of empty cells is ours.
    """

    _arrays = ("knots_", "values_")

    def __init__(
        self,
        *,
        n_bins=20,
        max_rank=25,
        interpolation="linear",
        smoothing="uniform",
        input="proba",
    ):
        self.n_bins, self.max_rank, self.interpolation = n_bins, max_rank, interpolation
        self.smoothing, self.input = smoothing, input

    def _check_parameters(self):
        super()._check_parameters()
        require_number(self.max_rank, "max_rank", low=1, integer=True)
        if self.n_bins is not None:
            require_number(self.n_bins, "n_bins", low=1, integer=True)

    def _fit(self, P, codes, weight, n):
        if self.n_bins is None and P.size > _FULL_RESOLUTION:
            raise InputError(
                f"n_bins=None keeps every distinct sum, for n·K <= {_FULL_RESOLUTION}; got n·K = {P.size}. Give n_bins, "
                "e.g. 30."
            )
        fit = fit_sorted(P, codes, weight, n_bins=self.n_bins, max_rank=self.max_rank)
        self.knots_ = fit.centers if self.interpolation == "linear" else np.r_[0.0, fit.edges]
        self.values_, self.optimality_gap_, self.n_iter_ = fit.values, fit.gap, fit.n_iter

    def _map(self, input):
        tables = torch.tensor(self.knots_), torch.tensor(self.values_)
        return SortedMap(*tables, interpolation=self.interpolation, input=input, epsilon=self.epsilon_)


def _check_blocks(blocks, words: tuple[str, ...]) -> None:
    if isinstance(blocks, str):
        require_choice(blocks, "blocks", words)
    else:
        require_number(blocks, "blocks", low=2, integer=True)


def _block_edges(P: np.ndarray, codes: np.ndarray, weight: np.ndarray, blocks) -> np.ndarray:
    """Lower ends of the cells of pairs, but for the first: all true probabilities, or quantiles of them."""
    true = at_true_class(P, codes)
    edges = np.unique(true) if blocks == "all" else quantile_edges(true, weight, blocks)
    return edges[edges > P.min()]
