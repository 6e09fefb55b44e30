"""Covariate-aware bounds of an estimand, and how the price η of unlike covariates is chosen.

Every η gives a valid bound in the population: V(η) rises from the blind bound at 0 to the conditional one. In a finite
sample it goes on rising beyond, as pairs are matched on covariates so well that their outcomes pair up at random. The
dual value D(η) of units that did not fit the dual variables is not fooled: it rises, peaks and falls. η is taken where D
less half its standard error is largest, since covariates with heavy tails can lift a value that is all error.
"""

import dataclasses
import warnings
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import sparse
from scipy.special import ndtri
from sklearn.base import BaseEstimator
from sklearn.utils.validation import validate_data

from heedful._random import numpy_generator
from heedful._results import Report, track
from heedful._validation import require_choice, require_number
from heedful.causal.causal_bounds.duals import Problem, cross_fitted_dual, dual_values
from heedful.causal.causal_bounds.estimands import Estimand, Sortable, make_estimand, require_design
from heedful.causal.causal_bounds.transport import (
    Transport,
    TransportValue,
    import_pot,
    sorted_coupling,
    spread,
)
from heedful.causal.causal_bounds.trial import Trial, read_trial, squared_distances
from heedful.errors import HeedfulWarning, InputError, ParameterError

_GRID = np.concatenate([[0.0], np.geomspace(0.1, 1000, 13)])  # in units of the spread of h by that of d²
_CAUTION = 0.5  # standard errors that a dual value gives away before η is chosen by it
_SMALLEST_ARM = 10  # units, for folds to say anything
_REPEATS = 5  # subsamples whose bounds are averaged
_SIDES = (1, -1)  # lower bounds minimise h, upper bounds −h


@dataclasses.dataclass(frozen=True, eq=False)
class Bounds(Report):
    """What the data say of an estimand: it lies between ``lower`` and ``upper``.

    Valid for trials randomised given the covariates, with the propensities given, or by complete randomisation where none
    were given. Nothing in the data can tell whether that is so: with observational data the bounds are about the units'
    selection as much as about the effect.

    Parameters
    ----------
    lower, upper : float
        Covariate-aware bounds, at ``eta_lower`` and ``eta_upper``.
    eta_lower, eta_upper : float
        The price of a unit of squared covariate distance that either bound was computed at.
    lower_blind, upper_blind : float
        Bounds from the outcomes alone (η = 0).
    path : dict
        Arrays over all η that were looked at: ``eta``; bounds ``lower`` and ``upper``; mean squared covariate distance
        of the coupled units, ``mismatch_lower`` and ``mismatch_upper``; and, None where there was nothing to choose, the
        cross-fitted dual bounds ``dual_lower`` and ``dual_upper`` with their standard errors ``error_lower`` and
        ``error_upper``: η is where the dual bound is tightest after half an error is given away.
    confidence_interval : tuple of two floats, or None
        Contains both bounds, hence the estimand, with about the confidence asked for.
    estimand : str
        What is bounded.
    n_control, n_treated : int
        Units in the arms.
    notes : tuple of str
        What to know of how these numbers came about.
    """

    lower: float
    upper: float
    eta_lower: float
    eta_upper: float
    lower_blind: float
    upper_blind: float
    path: dict[str, Any]
    confidence_interval: tuple[float, float] | None
    estimand: str
    n_control: int
    n_treated: int
    notes: tuple[str, ...] = ()

    @property
    def width(self) -> float:
        """Of the covariate-aware interval."""
        return self.upper - self.lower

    def plot(self, ax=None):
        """Draw the bounds against η, with the blind interval and the chosen points; returns the matplotlib axes."""
        if ax is None:
            import matplotlib.pyplot as plt

            ax = plt.figure().subplots()
        eta = self.path["eta"]
        positive = eta[(eta > 0) & np.isfinite(eta)]
        ax.axhspan(self.lower_blind, self.upper_blind, color="0.92", zorder=0, label="blind")
        ax.axhspan(self.lower, self.upper, color="C0", alpha=0.15, linewidth=0, zorder=1, label="covariate-aware")
        for side in ("lower", "upper"):
            ax.plot(eta, self.path[side], color="C0", linewidth=1)
            ax.plot([getattr(self, f"eta_{side}")], [getattr(self, side)], "o", color="C0")
        if len(positive) > 1:
            ax.set_xscale("symlog", linthresh=float(positive.min()))
        ax.set(xlabel="η", ylabel=self.estimand)
        ax.legend()
        return ax


def covariate_bounds(
    outcome,
    treatment,
    covariates=None,
    *,
    estimand="effect_variance",
    threshold=0.0,
    eta="auto",
    propensity=None,
    covariate_scale="standardize",
    confidence=None,
    solver="emd",
    reg=None,
    max_points=5000,
    random_state=None,
) -> Bounds:
    """Bound what depends on both potential outcomes, coupling only units whose covariates are alike.

    Parameters
    ----------
    outcome : array-like of shape (n,) or (n, dy)
        The outcome of each unit, or several.
    treatment : array-like of shape (n,)
        0 or False for the control arm, 1 or True for the treated one.
    covariates : array-like of shape (n,) or (n, dz), DataFrame, or None
        What is known of each unit before treatment. In a DataFrame, strings and categories are told from numbers: any
        two levels are at distance 1. None gives the blind bounds.
    estimand : str or callable
        ``"effect_variance"``, Var(Y1 − Y0); ``"effect_second_moment"``, E(Y1 − Y0)²; ``"correlation"`` of Y0 and Y1;
        ``"prob_benefit"``, P(Y1 > Y0); ``"prob_harm"``, P(Y1 < Y0); ``"effect_cdf"``, P(Y1 − Y0 ≤ ``threshold``);
        ``"neyman_variance"`` of the difference in means of a completely randomised trial; ``"product"``, E[Y0 Y1]. Of
        several outcomes the first two and the last are sums over outcomes, and the others do not exist. A callable
        h(y0, y1) that broadcasts over arrays of shapes (n, 1) and (1, m), or (n, 1, dy) and (1, m, dy), bounds
        E[h(Y0, Y1)].
    threshold : float
        t of ``"effect_cdf"``.
    eta : float, sequence of floats, or "auto"
        Price of a unit of squared covariate distance, ≥ 0, in units of h (that of the variance for Neyman's, of the
        product for the correlation). A number is taken as it is; ``inf`` couples by covariates alone. Of several, each
        bound takes the one whose cross-fitted dual value, less half its standard error, is best; "auto" does so among 0
        and 13 prices over four decades, scaled to the spreads of h and of the distances.
    propensity : float, array-like of shape (n,), or None
        Probability of treatment given the covariates. None: the same for all units.
    covariate_scale : {"standardize", "mahalanobis"} or None
        Numbers are divided by their standard deviation over all units, or made uncorrelated besides, or left alone.
    confidence : float, optional
        Of an interval that contains both bounds, e.g. 0.95: dual values of units that fitted neither the dual variables
        nor η, with normal limits, half of the error on either side.
    solver : {"emd", "sinkhorn"}
        Exact, or entropic with extrapolation to zero entropy, for arms of more than about 5000 units.
    reg : float, optional
        Strength of the entropy of "sinkhorn" in units of h, > 0. Default: 10 % of the spread of h, more where η d² dwarfs h.
    max_points : int or None
        With more than ``max_points``² pairs, bounds of five random subsamples of that size are averaged, with a warning.
        None: never.
    random_state : int, RandomState, Generator or None
        Folds, where there are any, and subsamples. Results for one η and no confidence do not depend on it.

    Returns
    -------
    Bounds

    Raises
    ------
    InputError
        If the data are no trial: no two arms, entries missing, shapes that do not fit, or arms too small for folds.
    ParameterError
        If a setting is none.
    ConvergenceError
        If a transport problem was not solved.
    MissingExtraError
        If POT is not installed.

    Notes
    -----
    Each η and side costs one transport problem, about 0.1 s for arms of 1000 and 1 s for arms of 2000 to 3000 units, and
    choosing η nearly as much again. Memory: four arrays of n0 · n1 numbers, eight with Sinkhorn. Without covariates,
    variances, products and correlations of a single outcome are sorted for, in O(n log n).

    References
    ----------
    Lin, Gao, Blanchet, Glynn: Tightening Causal Bounds via Covariate-Aware Optimal Transport, ICML 2025,
    arXiv:2502.01164. The choice of η and the confidence interval are this library's.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=400)
    >>> treated = rng.permutation(400) < 200
    >>> y = np.where(treated, 1.6 * z, 0.6 * z) + 0.3 * rng.normal(size=400)  # the variance of the effect is 1 to 1.36
    >>> bounds = covariate_bounds(y, treated, z, random_state=0)
    >>> blind = bounds.upper_blind - bounds.lower_blind
    >>> bounds.width < blind / 3
    True
    """
    analysis = _Analysis(
        outcome,
        treatment,
        covariates,
        propensity=propensity,
        covariate_scale=covariate_scale,
        estimand=estimand,
        threshold=threshold,
        eta=eta,
        confidence=confidence,
        solver=solver,
        reg=reg,
        max_points=max_points,
        random_state=random_state,
    )
    return analysis.bounds()


class CovariateAwareBounds(BaseEstimator):
    """Covariate-aware bounds as a scikit-learn estimator, with the couplings that attain them.

    The parameters are those of ``covariate_bounds``. ``fit`` takes covariates as X, outcomes as y, and the treatment by
    keyword.

    Parameters
    ----------
    estimand, threshold, eta, covariate_scale, confidence, solver, reg, max_points, random_state
        See ``covariate_bounds``.

    Attributes
    ----------
    bounds_ : Bounds
        The result.
    plan_lower_, plan_upper_ : sparse arrays of shape (n_control, n_treated)
        Couplings of control with treated units, each in their order in the data, that attain the two bounds.
    n_features_in_, feature_names_in_
        Covariates, and their names if X is a DataFrame.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(100, 2))
    >>> treated = np.arange(100) % 2
    >>> y = X[:, 0] + treated
    >>> fitted = CovariateAwareBounds(eta=10.0).fit(X, y, treatment=treated)
    >>> fitted.plan_lower_.shape
    (50, 50)
    """

    def __init__(
        self,
        *,
        estimand="effect_variance",
        threshold=0.0,
        eta="auto",
        covariate_scale="standardize",
        confidence=None,
        solver="emd",
        reg=None,
        max_points=5000,
        random_state=None,
    ):
        self.estimand = estimand
        self.threshold = threshold
        self.eta = eta
        self.covariate_scale = covariate_scale
        self.confidence = confidence
        self.solver = solver
        self.reg = reg
        self.max_points = max_points
        self.random_state = random_state

    def fit(self, X, y, *, treatment, propensity=None):
        """Bound the estimand.

        Parameters
        ----------
        X : array-like of shape (n, dz), or DataFrame
            Covariates.
        y : array-like of shape (n,) or (n, dy)
            Outcomes.
        treatment : array-like of shape (n,)
            0 or False, 1 or True.
        propensity : float, array-like of shape (n,), or None
            Probability of treatment given the covariates.

        Returns
        -------
        self
        """
        if len(np.shape(X)) != 2:
            raise InputError(
                f"X must have shape (n, number of covariates); got {np.shape(X)}. Reshape one as X[:, None]."
            )
        validate_data(self, X, skip_check_array=True)
        analysis = _Analysis(y, treatment, X, propensity=propensity, **self.get_params(deep=False))
        self.bounds_ = analysis.bounds()
        self.plan_lower_ = analysis.plan(self.bounds_.eta_lower, sign=1)
        self.plan_upper_ = analysis.plan(self.bounds_.eta_upper, sign=-1)
        return self


class _Run(NamedTuple):
    """Of one sample of the units, lower and upper in this order: E[h], mismatch and dual value with its error for each
    η, blind E[h], and the ends of the confidence interval.
    """

    etas: Float[np.ndarray, " k"]
    means: Float[np.ndarray, "2 k"]
    mismatch: Float[np.ndarray, "2 k"]
    duals: Float[np.ndarray, "2 k 2"]
    blind: Float[np.ndarray, " 2"]
    limits: Float[np.ndarray, " 2"]


class _Analysis:
    """One question about one trial, with its settings checked."""

    def __init__(
        self,
        outcome,
        treatment,
        covariates,
        *,
        propensity,
        covariate_scale,
        estimand,
        threshold,
        eta,
        confidence,
        solver,
        reg,
        max_points,
        random_state,
    ):
        self.etas = _read_eta(eta)
        if confidence is not None:
            require_number(confidence, "confidence", low=0, high=1, open_low=True)
            if confidence == 1 or (self.etas is not None and np.isinf(self.etas).any()):
                raise ParameterError(
                    f"confidence must be below 1 and eta finite; got confidence={confidence!r} and eta={eta!r}."
                )
        require_choice(solver, "solver", ("emd", "sinkhorn"))
        if reg is not None:
            require_number(reg, "reg", low=0, high=1e300, open_low=True)
            if solver != "sinkhorn":
                raise ParameterError(f"reg is of solver='sinkhorn' alone; got reg={reg!r} for {solver!r}.")
        if max_points is not None:
            require_number(max_points, "max_points", low=2, integer=True)
        self.trial = read_trial(
            outcome, treatment, covariates, propensity=propensity, covariate_scale=covariate_scale, stacklevel=4
        )
        y0, y1, z0, _, a, b = self.trial
        require_design(estimand, a, b)
        self.estimand: Estimand = make_estimand(estimand, y0, y1, a, b, threshold=threshold)
        self.confidence, self.solver, self.reg = confidence, solver, reg
        if not z0.shape[1]:  # nothing to pay for
            self.etas = np.zeros(1)
        self.sorts = self.estimand.sortable is not None and not z0.shape[1] and confidence is None
        self.notes: tuple[str, ...] = ()
        if propensity is None:
            self.notes += (
                "No propensity was given: treatment is taken to be assigned completely at random. If it was chosen, the "
                "bounds are about who chose, too.",
            )
        if solver == "sinkhorn" and not self.sorts:
            self.notes += (
                "Values of entropic plans, extrapolated to zero entropy, approximate those of the cheapest plan: bounds may "
                "come out a little too wide or too narrow.",
            )
        self.samples = self._draw_samples(max_points, numpy_generator(random_state))

    def bounds(self) -> Bounds:
        runs: list[_Run] = []
        for rows, columns in self.samples:
            runs.append(self._run(rows, columns, runs[0].etas if runs else self.etas))
        etas = runs[0].etas
        means, mismatch, duals, blind, limits = (
            np.mean([getattr(run, name) for run in runs], axis=0)
            for name in ("means", "mismatch", "duals", "blind", "limits")
        )
        low, high = np.argmax(duals[..., 0] - _CAUTION * duals[..., 1], axis=1)
        value = self.estimand.value
        dual, error = 2 * [None], 2 * [None]
        if len(etas) > 1:
            dual = np.array(_SIDES)[:, None] * self.estimand.scale * duals[..., 0]
            error = self.estimand.scale * duals[..., 1]
        return Bounds(
            lower=value(means[0, low]),
            upper=value(means[1, high]),
            eta_lower=float(etas[low]),
            eta_upper=float(etas[high]),
            lower_blind=value(blind[0]),
            upper_blind=value(blind[1]),
            path={
                "eta": etas,
                "lower": np.array([value(mean) for mean in means[0]]),
                "upper": np.array([value(mean) for mean in means[1]]),
                "mismatch_lower": mismatch[0],
                "mismatch_upper": mismatch[1],
                "dual_lower": dual[0],
                "dual_upper": dual[1],
                "error_lower": error[0],
                "error_upper": error[1],
            },
            confidence_interval=None if self.confidence is None else (float(limits[0]), float(limits[1])),
            estimand=self.estimand.name,
            n_control=len(self.trial.a),
            n_treated=len(self.trial.b),
            notes=self.notes,
        )

    def plan(self, eta: float, *, sign: int) -> sparse.csr_array:
        """The optimal coupling at η, averaged over the samples."""
        shape = (len(self.trial.a), len(self.trial.b))
        total = sparse.csr_array(shape)
        for rows, columns in self.samples:
            trial = self.trial.take(rows, columns)
            if eta == 0 and (how := self.estimand.sortable):
                solved = sorted_value(how, trial, sign=sign)
            else:
                solved = self._problem(trial).transport.solve(eta, sign=sign)
            plan = solved.plan.tocoo()
            total += sparse.csr_array((plan.data, (rows[plan.row], columns[plan.col])), shape=shape)
        return total / len(self.samples)

    def _smallest_arm(self) -> int:
        """Units that an arm needs: folds say nothing with fewer, and folds of folds still less."""
        n, m = len(self.trial.a), len(self.trial.b)
        if self.confidence is not None:
            if min(n, m) < 2 * _SMALLEST_ARM:
                raise InputError(f"confidence takes at least {2 * _SMALLEST_ARM} units in each arm; got {n} and {m}.")
            return 2 * _SMALLEST_ARM
        if self.etas is None or len(self.etas) > 1:
            if min(n, m) < _SMALLEST_ARM:
                raise InputError(
                    f"Choosing eta takes at least {_SMALLEST_ARM} units in each arm; got {n} and {m}. Pass one number as "
                    "eta."
                )
            return _SMALLEST_ARM
        return 1

    def _draw_samples(self, max_points: int | None, rng: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
        """The units to solve for, in an order whose halves are folds: all of them, or a few random subsamples."""
        n, m, smallest = len(self.trial.a), len(self.trial.b), self._smallest_arm()
        if max_points is None or n * m <= max_points**2 or self.sorts:
            if smallest == 1:  # no folds
                return [(np.arange(n), np.arange(m))]
            return [(rng.permutation(n), rng.permutation(m))]
        share = max_points / np.sqrt(n * m)
        sizes = max(smallest, int(share * n)), max(smallest, int(share * m))
        said = f"{_REPEATS} subsamples of {sizes[0]} of {n} control and {sizes[1]} of {m} treated units"
        warnings.warn(
            f"{n} by {m} units are more than max_points={max_points} squared: bounds are averages over {said}.",
            HeedfulWarning,
            stacklevel=4,
        )
        self.notes += (f"Averages over {said}.",)
        return [(rng.permutation(n)[: sizes[0]], rng.permutation(m)[: sizes[1]]) for _ in range(_REPEATS)]

    def _problem(self, trial: Trial) -> Problem:
        import_pot()  # before work starts
        h, d2 = self.estimand.cost(trial.y0, trial.y1), squared_distances(trial.z0, trial.z1)
        transport = Transport(h, d2, trial.a, trial.b, solver=self.solver, reg=self.reg)
        return Problem(trial, self.estimand.cost, transport)

    def _run(self, rows: np.ndarray, columns: np.ndarray, etas: np.ndarray | None) -> _Run:
        trial = self.trial.take(rows, columns)
        blind = self._sorted(trial)
        if self.sorts:
            means = np.array([solved.value for solved in blind])
            return _Run(np.zeros(1), means[:, None], np.zeros((2, 1)), np.zeros((2, 1, 2)), means, np.zeros(2))
        problem = self._problem(trial)
        transport = problem.transport
        if etas is None:
            etas = _grid(transport)
        blind = blind or [transport.solve(0.0, sign=sign) for sign in _SIDES]
        path = np.empty((2, len(etas), 2))  # of a plan the two costs stay
        for side, sign in enumerate(_SIDES):
            for i, eta in enumerate(track(etas, "transport")):
                path[side, i] = (blind[side] if eta == 0 else transport.solve(eta, sign=sign))[:2]
        duals, limits = np.zeros((2, len(etas), 2)), np.zeros(2)
        if len(etas) > 1:
            for side, sign in enumerate(_SIDES):
                for i, eta in enumerate(track(etas, "dual values")):
                    duals[side, i] = cross_fitted_dual(problem, eta, sign=sign)
        if self.confidence is not None:
            limits = np.array([self._limit(problem, etas, self.confidence, sign) for sign in _SIDES])
        return _Run(etas, path[..., 0], path[..., 1], duals, np.array([solved.value for solved in blind]), limits)

    def _sorted(self, trial: Trial) -> list[TransportValue]:
        """Both couplings at η = 0, if sorting finds them."""
        if (how := self.estimand.sortable) is None:
            return []
        return [sorted_value(how, trial, sign=sign) for sign in _SIDES]

    def _limit(self, problem: Problem, etas: np.ndarray, level: float, sign: int) -> float:
        """End of the confidence interval on one side, from dual values of units that fitted neither them nor η."""
        quantile = float(ndtri((1 + level) / 2))
        scale, normed = self.estimand.scale, self.estimand.normed
        values, variance = [], 0.0
        for fit, on in problem.halves():
            dual = dual_values(problem, _safest(problem.block(*fit), etas, quantile, sign), fit, on, sign=sign)
            value, own = dual.value(), (0.0, 0.0)
            if normed is not None:
                own = normed(problem.trial.y0[on[0]], problem.trial.y1[on[1]])
            variance += dual.variance(value * own[0], value * own[1])
            values.append(value)
        limit = sign * scale * float(np.mean(values) - quantile * np.sqrt(variance) / len(values))
        return float(min(max(limit, self.estimand.low), self.estimand.high))


def _safest(problem: Problem, etas: np.ndarray, quantile: float, sign: int) -> float:
    """The η whose dual value less its error is largest: what a confidence limit is made of."""
    if len(etas) == 1:
        return float(etas[0])
    duals = [cross_fitted_dual(problem, eta, sign=sign) for eta in etas]
    return float(etas[np.argmax([value - quantile * error for value, error in duals])])


def _grid(transport: Transport) -> Float[np.ndarray, " k"]:
    """0 and thirteen prices around that at which outcomes and covariates weigh alike: no unit of measurement matters."""
    of_h, of_d2 = (spread(costs, transport.a, transport.b) for costs in (transport.h, transport.d2))
    return _GRID * (of_h / of_d2) if of_h > 0 and of_d2 > 0 else np.zeros(1)


def _read_eta(eta: Any) -> Float[np.ndarray, " k"] | None:
    """The prices, in increasing order; None for "auto"."""
    if isinstance(eta, str) and eta == "auto":
        return None
    prices = np.ravel(eta).tolist() if np.ndim(eta) < 2 and not isinstance(eta, str) else []
    if not prices:
        raise ParameterError(f"eta must be 'auto', a number >= 0 or a sequence of such; got {eta!r}.")
    for price in prices:
        require_number(price, "eta", low=0)
    return np.unique(np.array(prices, dtype=np.float64))


def sorted_value(how: Sortable, trial: Trial, *, sign: int = 1) -> TransportValue:
    """The coupling with the least ``sign`` · E[h]: quantiles with quantiles, in O(n log n) and without any matrix."""
    (y0, y1, z0, z1, a, b), (pair, pairing) = trial, how
    rows, columns, mass = sorted_coupling(y0[:, 0], y1[:, 0], a, b, pairing=sign * pairing)
    mismatch = mass @ ((z0[rows] - z1[columns]) ** 2).sum(axis=1)
    plan = sparse.csr_array((mass, (rows, columns)), shape=(len(a), len(b)))
    return TransportValue(float(mass @ pair(y0[rows], y1[columns])), float(mismatch), plan)
