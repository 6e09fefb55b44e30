"""Does transport that pays for unlike covariates tighten what a trial says of effects on individuals, and stay valid?

Every arm bounds the second moment of the effect, E[(Y1 − Y0)²], from the same units: they are what is spent. In
simulations the sharp bound V_c that the covariates allow is known, and the error of the lower bound is its distance from
it; ``bias`` is that distance with its sign, and ``overshoot`` what of it lies above, where a valid bound lies by chance
alone. In ``acic`` both outcomes of every unit are known, and so is what the interval should contain; its score is its
width, plus 40 times the distance by which it misses (the interval score of level 5 %). Of real trials nobody knows
either, and widths are all there is. All but the error are shares of the width of the blind interval.

The harness tunes nothing: nobody who has a trial knows the truth to tune by, so each arm settles what it has to settle
from the trial that it is given.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.linear_model import RidgeCV
from sklearn.neighbors import NearestNeighbors

from heedful import data
from heedful.causal import conditional_bounds, covariate_bounds
from heedful.data import synthetic
from heedful.evidence import Arm, Budget, Claim, Metric, Outcome, Study, Task
from heedful.studies._dual_bounds import dual_bounds

ESTIMAND = "effect_second_moment"
CELL = 20  # units an arm, about, that a stratum keeps


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """What one trial observed, and what is known besides.

    Parameters
    ----------
    outcome : array of shape (n,)
    treatment : bool array of shape (n,)
        Assigned completely at random.
    covariates : array of shape (n, d)
        Known before treatment, without missing entries.
    effect : float, optional
        The true E[(Y1 − Y0)²].
    sharp : float, optional
        The sharp lower bound V_c of it.
    """

    outcome: Float[np.ndarray, " n"]
    treatment: Bool[np.ndarray, " n"]
    covariates: Float[np.ndarray, "n d"]
    effect: float | None = None
    sharp: float | None = None

    def score(self, lower: float, upper: float, *, blind_width: float) -> dict[str, float]:
        """What an interval is worth, as far as can be told."""
        metrics = {"width_ratio": (upper - lower) / blind_width}
        if self.effect is not None:
            miss = max(lower - self.effect, self.effect - upper, 0.0)
            score = (upper - lower + 2 / 0.05 * miss) / blind_width
            metrics |= {"interval_score": score, "coverage": 100.0 * (miss == 0)}
        if self.sharp is not None:
            bias = (lower - self.sharp) / blind_width
            metrics |= {"error": abs(lower - self.sharp), "bias": bias, "overshoot": max(bias, 0.0)}
        return metrics


@runtime_checkable
class TrialTask(Protocol):
    """What the arms bound: ``trial(n)``, a ``Trial`` of at most n units.

    For a trial in memory, ``Observed`` is one already::

        # my_tasks.py
        import numpy as np
        from heedful.studies.causal_bounds import Observed


        def build(*, split, seed):
            mine = np.load("trial.npz")  # one entry a unit: y, w (0 or 1), X (n, d) known before treatment, no gaps
            return Observed(mine["y"], mine["w"] == 1, mine["X"], split=split, seed=seed)

    The same seed must give the same trial. It is judged by the widths of the intervals.
    """

    def trial(self, n: int) -> Trial: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Observed:
    """Other units of one observed trial for every seed: a random four fifths of them, or n if that is fewer."""

    outcome: Float[np.ndarray, " units"]
    treatment: Bool[np.ndarray, " units"]
    covariates: Float[np.ndarray, "units d"]
    _: dataclasses.KW_ONLY
    split: str
    seed: int

    def trial(self, n: int) -> Trial:
        units = len(self.outcome)
        drawn = _generator(self.split, self.seed).choice(units, min(n, 4 * units // 5), replace=False)
        return Trial(self.outcome[drawn], self.treatment[drawn], self.covariates[drawn])


@dataclasses.dataclass(frozen=True, eq=False)
class Simulated:
    """Another sample of a known law for every seed; ``draw(n, random_state=...)`` gives a ``SimulatedTrial``."""

    draw: Callable[..., synthetic.SimulatedTrial]
    _: dataclasses.KW_ONLY
    split: str
    seed: int

    def trial(self, n: int) -> Trial:
        drawn = self.draw(n, random_state=_generator(self.split, self.seed))
        # The noises of both outcomes are independent: the truth is halfway between the sharp bounds.
        effect = (drawn.lower + drawn.upper) / 2
        return Trial(drawn.y, drawn.treatment, drawn.X, effect=effect, sharp=drawn.lower)


@dataclasses.dataclass(frozen=True, eq=False)
class Revealed:
    """Units whose outcomes are both known: a trial draws n of them, treats half, and hides one outcome of each."""

    y0: Float[np.ndarray, " units"]
    y1: Float[np.ndarray, " units"]
    covariates: Float[np.ndarray, "units d"]
    _: dataclasses.KW_ONLY
    split: str
    seed: int

    def trial(self, n: int) -> Trial:
        drawn = _generator(self.split, self.seed).permutation(len(self.y0))[:n]
        treated = np.arange(len(drawn)) < len(drawn) // 2
        outcome = np.where(treated, self.y1[drawn], self.y0[drawn])
        return Trial(outcome, treated, self.covariates[drawn], effect=float(np.square(self.y1 - self.y0).mean()))


# Arms: from a trial to an interval.


def blind(task: TrialTask, *, budget: Budget, seed: int) -> Outcome:
    """The two distributions of outcomes alone."""

    def bound(trial: Trial):
        found = covariate_bounds(trial.outcome, trial.treatment, estimand=ESTIMAND)
        flat = [(price, found.lower, found.upper) for price in (0.1, 1000.0)]
        return found.lower, found.upper, {"interval against eta": flat}

    return _interval(task, budget, bound)


def strata(task: TrialTask, *, budget: Budget, seed: int) -> Outcome:
    """Exact transport within cells of the covariates."""

    def bound(trial: Trial):
        cells = median_cells(trial.covariates, smallest=CELL * len(trial.outcome) // _smaller_arm(trial))
        found = conditional_bounds(trial.outcome, trial.treatment, cells, estimand=ESTIMAND)
        return found.lower, found.upper, {}

    return _interval(task, budget, bound)


def causal_bounds(task: TrialTask, *, budget: Budget, seed: int) -> Outcome:
    """Transport at the price that the cross-fitted dual value chooses."""
    return _interval(task, budget, lambda trial: _priced(trial, eta="auto", random_state=seed))


def causal_bounds_fixed(task: TrialTask, *, budget: Budget, seed: int) -> Outcome:
    """Transport at one price for all trials."""
    return _interval(task, budget, lambda trial: _priced(trial, eta=20.0))


def matching(task: TrialTask, *, budget: Budget, seed: int) -> Outcome:
    """Transport at an infinite price: neighbours are paired, whatever their outcomes."""
    return _interval(task, budget, lambda trial: _priced(trial, eta=np.inf))


def dual_ridge(task: TrialTask, *, budget: Budget, seed: int) -> Outcome:
    """Dual bounds by ridge regressions."""
    return _interval(task, budget, lambda trial: _dual(trial, lambda: RidgeCV(np.logspace(-3, 4, 15)), seed))


def dual_knn(task: TrialTask, *, budget: Budget, seed: int) -> Outcome:
    """Dual bounds by means of nearest neighbours."""
    return _interval(task, budget, lambda trial: _dual(trial, NeighbourMeans, seed))


def _interval(
    task: TrialTask, budget: Budget, bound: Callable[[Trial], tuple[float, float, Mapping[str, Any]]]
) -> Outcome:
    trial = task.trial(budget.units)
    without = covariate_bounds(trial.outcome, trial.treatment, estimand=ESTIMAND)
    lower, upper, curves = bound(trial)
    metrics = trial.score(lower, upper, blind_width=without.width)
    return Outcome(metrics=metrics, costs={"units": len(trial.outcome)}, curves=curves)


def _priced(trial: Trial, **settings: Any) -> tuple[float, float, dict[str, Any]]:
    found = covariate_bounds(trial.outcome, trial.treatment, trial.covariates, estimand=ESTIMAND, **settings)
    points = zip(*(found.path[name].tolist() for name in ("eta", "lower", "upper")), strict=True)
    path = [point for point in points if 0 < point[0] < np.inf]
    return found.lower, found.upper, {"interval against eta": path} if len(path) > 1 else {}


def _dual(trial: Trial, make_model: Callable[[], Any], seed: int) -> tuple[float, float, dict[str, Any]]:
    z = trial.covariates - trial.covariates.mean(axis=0)
    z /= np.maximum(z.std(axis=0), 1e-12)
    return *dual_bounds(trial.outcome, trial.treatment, z, make_model=make_model, seed=seed), {}


def median_cells(covariates: Float[np.ndarray, "n d"], *, smallest: int) -> np.ndarray:
    """A label for each unit: halved at the median of the covariate that varies most, while halves keep ``smallest``."""
    z = (covariates - covariates.mean(axis=0)) / np.maximum(covariates.std(axis=0), 1e-12)
    cells, waiting = np.zeros(len(z), dtype=np.int64), [np.arange(len(z))]
    label = 0
    while waiting:
        units = waiting.pop()
        if len(units) < 2 * smallest:
            cells[units], label = label, label + 1
            continue
        axis = np.argmax(z[units].var(axis=0))
        waiting += np.array_split(units[np.argsort(z[units, axis], kind="stable")], 2)
    return cells


def _smaller_arm(trial: Trial) -> int:
    return int(min(trial.treatment.sum(), (~trial.treatment).sum()))


class NeighbourMeans(RegressorMixin, BaseEstimator):
    """Mean outcome of the k nearest neighbours, with the k of least leave-one-out error."""

    def fit(self, X: Float[np.ndarray, "n d"], y: Float[np.ndarray, " n"]) -> "NeighbourMeans":
        ks = np.array([k for k in (5, 10, 20, 40, 80) if k < len(y)] or [len(y) - 1])
        self.y_, self.nearest_ = y, NearestNeighbors().fit(X)
        neighbours = self.nearest_.kneighbors(n_neighbors=int(ks[-1]), return_distance=False)  # of others alone
        means = y[neighbours].cumsum(axis=1)[:, ks - 1] / ks
        self.k_ = int(ks[np.argmin(np.square(means - y[:, None]).mean(axis=0))])
        return self

    def predict(self, X: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " n"]:
        return self.y_[self.nearest_.kneighbors(X, n_neighbors=self.k_, return_distance=False)].mean(axis=1)


# Tasks: simulated laws, real units with simulated outcomes, and real trials.


def _simulated(draw: Callable[..., synthetic.SimulatedTrial], *, split: str, seed: int) -> Simulated:
    return Simulated(draw, split=split, seed=seed)


def acic(*, split: str, seed: int) -> Revealed:
    """Half of the births are an earlier study, from which two prognostic scores are learned; trials draw on the others.

    The scores are what ridge regressions predict without treatment and with it, each learned from the units that the
    earlier study showed so. Every seed takes the next of the ten simulations. The unit of outcomes is their standard
    deviation without treatment, so that a price means the same in all of them.
    """
    births = data.load("acic2016")
    early, late = np.array_split(np.random.default_rng(0).permutation(len(births.X)), 2)
    X = (births.X - births.X[early].mean(axis=0)) / np.maximum(births.X[early].std(axis=0), 1e-12)
    y0, y1, treated = (arrays[seed % len(births.y0)] for arrays in (births.y0, births.y1, births.treatment))
    scores = [
        RidgeCV(np.logspace(-1, 5, 13)).fit(X[early][seen], y[early][seen]).predict(X[late])
        for y, seen in ((y0, ~treated[early]), (y1, treated[early]))
    ]
    unit = y0[early].std()
    return Revealed(y0[late] / unit, y1[late] / unit, np.column_stack(scores), split=split, seed=seed)


def observed(name: str, covariates: Sequence[str], *, split: str, seed: int) -> Observed:
    """A real trial: units with all the covariates, and outcomes in units of their standard deviation."""
    form = data.load(name)
    X = form.X[:, [form.feature_names.index(covariate) for covariate in covariates]]
    known = ~np.isnan(X).any(axis=1)
    return Observed(form.y[known] / form.y.std(), form.treatment[known], X[known], split=split, seed=seed)


def _generator(split: str, seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, split == "test"])


_SIMULATIONS: dict[str, Callable[..., synthetic.SimulatedTrial]] = {
    "linear": synthetic.trial_linear,
    "square": synthetic.trial_square,
    "scale": synthetic.trial_scale,
    "two_covariates": functools.partial(synthetic.trial_linear, slopes=((-0.6, 0.3), (1.6, -0.8))),
}
# What may be told to predict each outcome, chosen by subject and not by result.
_TRIALS = {
    "nsw": ("re74", "re75"),
    "thornton_hiv": ("age", "distvct", "hiv2004"),
    "social_insure": ("default", "risk_averse", "literacy", "pre_takeup_rate"),
    "rand_hie": ("xage", "female", "mhi", "disea"),
}

_SIMULATED, _REAL = tuple(_SIMULATIONS), tuple(_TRIALS)
_TRUE = (*_SIMULATED, "acic")

study = Study(
    slug="causal_bounds",
    question="Does transport that pays for unlike covariates tighten what a trial says of effects on individuals, and "
    "stay valid?",
    tasks={
        **{name: Task(functools.partial(_simulated, draw)) for name, draw in _SIMULATIONS.items()},
        "acic": Task(acic, data=data.checksums("acic2016")),
        **{
            name: Task(functools.partial(observed, name, covariates), data=data.checksums(name))
            for name, covariates in _TRIALS.items()
        },
    },
    arms={
        "blind": Arm(blind, untuned="outcomes alone leave nothing to choose"),
        "strata": Arm(strata, untuned=f"cells are cut at medians while each keeps about {CELL} units an arm"),
        "causal_bounds": Arm(
            causal_bounds, untuned="its dual value on other folds of the same trial chooses the price", aware=True
        ),
        "causal_bounds_fixed": Arm(causal_bounds_fixed, untuned="the price is 20 everywhere", aware=True),
        "matching": Arm(matching, untuned="the price is infinite"),
        "dual_ridge": Arm(dual_ridge, untuned="cross-validation on the same trial chooses the penalty"),
        "dual_knn": Arm(dual_knn, untuned="leave-one-out errors on the same trial choose the number of neighbours"),
    },
    metrics=[
        Metric("width_ratio", "of blind", better="lower"),
        Metric("error", better="lower", tasks=_SIMULATED),
        Metric("bias", "of blind", better="lower", tasks=_SIMULATED),
        Metric("overshoot", "of blind", better="lower", tasks=_SIMULATED),
        Metric("interval_score", "of blind", better="lower", tasks=_TRUE),
        Metric("coverage", "%", better="higher", tasks=_TRUE),
    ],
    claims=[
        Claim("causal_bounds", beats="blind", on="error", tasks=_SIMULATED),
        Claim("causal_bounds", beats="dual_ridge", on="error", tasks=("square", "scale")),
        # Over tasks: where the bound never lies above V_c, seeds have no variance to test with.
        Claim("causal_bounds", beats="blind", on="overshoot", margin=0.05, tasks=_SIMULATED, pairs="tasks"),
        Claim("causal_bounds", beats="blind", on="interval_score", tasks=("acic",)),
        Claim("causal_bounds", beats="blind", on="width_ratio", tasks=_REAL),
        Claim("causal_bounds_fixed", beats="dual_ridge", on="error", exploratory=True, tasks=("square", "scale")),
        Claim("causal_bounds", beats="strata", on="error", exploratory=True, tasks=_SIMULATED),
        Claim("causal_bounds", beats="dual_knn", on="error", exploratory=True, tasks=_SIMULATED),
        Claim("causal_bounds", beats="matching", on="overshoot", exploratory=True, tasks=_SIMULATED),
    ],
    budgets={
        "quick": Budget(seeds=20, tasks=("linear", "square", "scale"), units=400),
        "full": Budget(seeds=50, units=1000),
    },
    protocol=TrialTask,
    unit="units",
)
