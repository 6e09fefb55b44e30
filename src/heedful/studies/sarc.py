"""Does looking one cycle back classify better than an equally large reservoir that does not?

The arms but the last two describe a series by random reservoirs and give as many features to the same ridge classifier:

* ``sarc``: a reservoir for each prominent period, whose states also look back one full period;
* ``sarc_no_cycle``: the same periods in the readout alone; the states are then those of one network, and their maxima, as
  features, the same for every period;
* ``sarc_random_periods``: as many periods, drawn at random: as many as the aware arm has up to the limit of multiples, and as
  many beyond it. Drawn from the whole span they would be longer, hence worse for a reason that is not the spectrum;
* ``wide_biesn``: one bidirectional echo-state network, as many times wider, with the same readout, for which a cycle is one
  step: a third of its features therefore repeats another third;
* ``bianchi``: the reservoir model space of Bianchi et al.: 200 states, reduced to principal components, and the ridge model
  that predicts the next of them, of so many components that features are as many, up to rounding;
* ``minirocket``: MiniRocket's 10,000 random convolutions and a ridge classifier, as aeon has them;
* ``dtw_1nn``: the nearest neighbour by dynamic time warping, aeon's too, within a window of a tenth of the length, which is
  usually as accurate as no window, and several times faster.

Series have the published splits. Settings are chosen on a half of the training series for the other half, among as many
points for each reservoir: the usual ones, and five drawn once from the grid of the paper, for ``bianchi`` from one like it with
the larger penalties that its model needs. The seed draws reservoirs and
convolutions; the nearest neighbour knows no chance. Time is that of fit and predict, after numba has compiled.

The longest series are averaged over neighbouring points, so that all fits into the budget: OSULeaf over two (213 points of
427), ACSF1 over three (486 of 1460), PigCVP over eight (250 of 2000). MiniRocket takes no series of different lengths: those
of JapaneseVowels are stretched for it to one length. The class of ``long_memory`` is whether a motif recurs after 60 or after
75 steps, in noise.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int
from sklearn.metrics import recall_score
from sklearn.model_selection import StratifiedShuffleSplit

from heedful import data
from heedful.data import synthetic
from heedful.errors import MissingExtraError
from heedful.evidence import Arm, Budget, Claim, Metric, Outcome, Study, Task
from heedful.timeseries import ReservoirClassifier, SARCClassifier, SpectralReservoir

Cases = Float[np.ndarray, "_ _ _"] | list[Float[np.ndarray, "_ _"]]

UNITS = 10
EXTEND_TO = 100  # where multiples of the shorter periods end, as the classifier has it untold
WINDOW = 0.1  # of the length


@runtime_checkable
class SeriesTask(Protocol):
    """Labelled series to learn from, and others to be scored by.

    ``Split`` is one already::

        # my_tasks.py
        import numpy as np
        from heedful.studies.sarc import Split


        def build(*, split, seed):
            arrays = np.load("mine.npz")  # X: float (n, channels, time points); y: int (n,)
            X, y = arrays["X"], arrays["y"]
            test = np.arange(len(y)) % 4 == 0  # the same for every seed
            if split == "test":
                return Split(X[~test], y[~test], X[test], y[test])
            return Split(X[~test], y[~test], X[test], y[test]).halves(seed)

    ``x_train`` and ``x_test`` may be lists of arrays (channels, time points) where lengths differ. With
    ``split="validation"`` the test series must not be touched.
    """

    x_train: Cases
    y_train: Int[np.ndarray, " n"]
    x_test: Cases
    y_test: Int[np.ndarray, " m"]


@dataclasses.dataclass(eq=False)
class Split:
    """A ``SeriesTask``."""

    x_train: Cases
    y_train: Int[np.ndarray, " n"]
    x_test: Cases
    y_test: Int[np.ndarray, " m"]

    def halves(self, seed: int) -> "Split":
        """The training series alone, one half against the other, with every class in both."""
        cut = StratifiedShuffleSplit(1, test_size=0.5, random_state=seed)
        rows = next(cut.split(self.y_train, self.y_train))
        (x_fit, y_fit), (x_score, y_score) = ((_take(self.x_train, part), self.y_train[part]) for part in rows)
        return Split(x_fit, y_fit, x_score, y_score)


# Arms.


def sarc(task: SeriesTask, *, budget: Budget, seed: int, **settings: Any) -> Outcome:
    return _measure(task, functools.partial(SARCClassifier, UNITS, random_state=seed, **settings))


def sarc_no_cycle(task: SeriesTask, *, budget: Budget, seed: int, **settings: Any) -> Outcome:
    return _measure(task, functools.partial(SARCClassifier, UNITS, cyclic=False, random_state=seed, **settings))


def sarc_random_periods(task: SeriesTask, *, budget: Budget, seed: int, **settings: Any) -> Outcome:
    periods = _others(_periods(task), seed)
    return _measure(task, functools.partial(SARCClassifier, UNITS, periods=periods, random_state=seed, **settings))


def wide_biesn(task: SeriesTask, *, budget: Budget, seed: int, **settings: Any) -> Outcome:
    units = UNITS * len(_periods(task))
    make = functools.partial(SARCClassifier, units, periods=[1], cyclic=False, random_state=seed, **settings)
    return _measure(task, make)


def bianchi(task: SeriesTask, *, budget: Budget, seed: int, **settings: Any) -> Outcome:
    n_features = len(_periods(task)) * UNITS * (4 * len(task.x_train[0]) + 2)
    m = round((math.sqrt(1 + 4 * n_features) - 1) / 2)  # m (m + 1) features
    units = max(100, math.ceil(m / 2))  # in each direction; the default, unless components are more
    make = functools.partial(ReservoirClassifier, n_units=units, n_components=m, random_state=seed, **settings)
    return _measure(task, make)


def minirocket(task: SeriesTask, *, budget: Budget, seed: int) -> Outcome:
    try:
        from aeon.classification.convolution_based import MiniRocketClassifier
    except ImportError as error:
        raise MissingExtraError('MiniRocket is aeon\'s: pip install "heedful[timeseries]".') from error

    longest = max(case.shape[1] for case in task.x_train)
    if any(case.shape[1] != longest for cases in (task.x_train, task.x_test) for case in cases):
        task = Split(_stretch(task.x_train, longest), task.y_train, _stretch(task.x_test, longest), task.y_test)
    return _measure(task, functools.partial(MiniRocketClassifier, random_state=seed), warm_up=True)


def dtw_1nn(task: SeriesTask, *, budget: Budget, seed: int) -> Outcome:
    try:
        from aeon.classification.distance_based import KNeighborsTimeSeriesClassifier
    except ImportError as error:
        raise MissingExtraError('Dynamic time warping is aeon\'s: pip install "heedful[timeseries]".') from error

    if isinstance(task.x_train, list) or isinstance(task.x_test, list):  # numba's lists take one layout of memory
        x_train, x_test = (list(map(np.ascontiguousarray, cases)) for cases in (task.x_train, task.x_test))
        task = Split(x_train, task.y_train, x_test, task.y_test)
    make = functools.partial(
        KNeighborsTimeSeriesClassifier, distance="dtw", n_neighbors=1, distance_params={"window": WINDOW}
    )
    return _measure(task, make, warm_up=True)


def _measure(task: SeriesTask, make: Callable[[], Any], *, warm_up: bool = False) -> Outcome:
    """Fit to the training series, predict the others; before, on two of them, if something compiles at first use."""
    if warm_up:
        lengths = [case.shape[1] for case in task.x_train]
        two = _take(task.x_train, np.argsort(lengths)[[0, -1]])
        make().fit(two, np.array([0, 1])).predict(two)
    start = time.perf_counter()
    classifier = make().fit(task.x_train, task.y_train)
    predicted = classifier.predict(task.x_test)
    seconds = time.perf_counter() - start
    linear: Any = getattr(classifier, "estimator_", None)  # of the reservoirs
    return Outcome(
        metrics={**score(task.y_test, predicted), "fit_predict_seconds": seconds},
        costs={"features": linear.coef_.shape[-1]} if hasattr(linear, "coef_") else {},
    )


def score(truth: Int[np.ndarray, " m"], predicted: Int[np.ndarray, " m"]) -> dict[str, float]:
    """Accuracies in %: over all cases, and the mean over classes."""
    recalls = recall_score(truth, predicted, labels=np.unique(truth), average="macro")
    return {"accuracy": 100 * float((predicted == truth).mean()), "balanced_accuracy": 100 * float(recalls)}


def _periods(task: SeriesTask) -> list[int]:
    """Those that the aware arm finds in these training series."""
    return SpectralReservoir(1, random_state=0).fit(task.x_train).periods_


def _others(spectral: list[int], seed: int) -> list[int]:
    """As many periods at random, as many of them short, where the spectrum's multiples crowd, and as many long."""
    rng = np.random.default_rng(seed)
    limit = min(max(spectral), EXTEND_TO)
    n_short = sum(p <= limit for p in spectral)
    short = rng.choice(np.arange(1, limit + 1), n_short, replace=False)
    long = rng.choice(np.arange(limit + 1, max(spectral) + 1), len(spectral) - n_short, replace=False)
    return [*short.tolist(), *long.tolist()]


def _take(cases: Cases, rows: Int[np.ndarray, " r"]) -> Cases:
    return [cases[row] for row in rows] if isinstance(cases, list) else cases[rows]


def _stretch(cases: Cases, length: int) -> Float[np.ndarray, "n d {length}"]:
    """Each channel interpolated to so many points."""
    grid = np.linspace(0, 1, length)
    return np.array([[np.interp(grid, np.linspace(0, 1, len(c)), c) for c in case] for case in cases])


# Tasks.


def _archive(*, source: str, name: str, every: int, split: str, seed: int) -> Split:
    one = data.load(source)[name]
    whole = Split(_thin(one.x_train, every), one.y_train, _thin(one.x_test, every), one.y_test)
    return whole if split == "test" else whole.halves(seed)


def _thin(cases: Cases, every: int) -> Cases:
    """Means of so many neighbouring points each."""
    if every == 1 or isinstance(cases, list):
        return cases
    n, d, length = cases.shape
    return cases[..., : length // every * every].reshape(n, d, -1, every).mean(axis=3)


def _long_memory(*, split: str, seed: int) -> Split:
    """Other training series for every seed; the test series have a number that no seed has."""
    draw = functools.partial(synthetic.long_memory, n_timepoints=400)
    x, y = draw(60, random_state=np.random.default_rng([0, seed]))
    held_out = np.random.default_rng([1, seed] if split == "validation" else [2])
    x_other, y_other = draw(60, random_state=held_out)
    return Split(x[:, None], y, x_other[:, None], y_other)


# Task, set, data, and over how many points is averaged.
_SETS = (
    ("gun_point", "GunPoint", "ucr", 1),
    ("italy_power_demand", "ItalyPowerDemand", "ucr", 1),
    ("coffee", "Coffee", "ucr_coffee_pigcvp", 1),
    ("arrow_head", "ArrowHead", "ucr", 1),
    ("trace", "Trace", "ucr_trace", 1),
    ("basic_motions", "BasicMotions", "ucr", 1),
    ("japanese_vowels", "JapaneseVowels", "ucr", 1),
    ("osu_leaf", "OSULeaf", "ucr", 2),
    ("acsf1", "ACSF1", "ucr", 3),
    ("pig_cvp", "PigCVP", "ucr_coffee_pigcvp", 8),
)
_LONG = ("acsf1", "long_memory")  # 400 points and more

# In both lists the first is what the classifier does untold; the others were drawn once.
_POINTS = [
    dict(zip(("input_scaling", "spectral_radius", "cycle_radius", "leak", "ridge"), point, strict=True))
    for point in (
        (1.0, 0.8, 0.8, 0.0, 1.0),
        (2.0, 0.6, 0.6, 0.6, 1.0),
        (2.0, 0.4, 0.4, 0.2, 0.5),
        (1.0, 0.4, 0.4, 0.6, 0.5),
        (1.0, 0.4, 0.8, 0.0, 0.5),
        (4.0, 0.6, 0.4, 0.2, 0.5),
    )
]
_BLIND_POINTS = [{name: value for name, value in point.items() if name != "cycle_radius"} for point in _POINTS]
_BIANCHI_POINTS = [
    dict(zip(("input_scaling", "spectral_radius", "leak", "ridge"), point, strict=True))
    for point in (
        (1.0, 0.8, 0.0, 10.0),
        (1.0, 0.4, 0.6, 100.0),
        (0.5, 0.4, 0.0, 1.0),
        (0.5, 0.8, 0.2, 1.0),
        (1.0, 0.8, 0.4, 10.0),
        (0.5, 0.6, 0.6, 10.0),
    )
]

study = Study(
    slug="sarc",
    question="Does looking one cycle back classify better than an equally large reservoir that does not?",
    tasks={
        **{
            task: Task(functools.partial(_archive, source=source, name=name, every=every), data=data.checksums(source))
            for task, name, source, every in _SETS
        },
        "long_memory": Task(_long_memory),
    },
    arms={
        "sarc": Arm(sarc, grid=_POINTS, aware=True),
        "sarc_no_cycle": Arm(sarc_no_cycle, grid=_BLIND_POINTS),
        "sarc_random_periods": Arm(sarc_random_periods, grid=_POINTS),
        "wide_biesn": Arm(wide_biesn, grid=_BLIND_POINTS),
        "bianchi": Arm(bianchi, grid=_BIANCHI_POINTS),
        "minirocket": Arm(
            minirocket, untuned="its convolutions are meant to need no tuning, and its penalty tunes itself"
        ),
        "dtw_1nn": Arm(dtw_1nn, untuned="nothing is fitted; the window is the usual tenth"),
    },
    metrics=[
        Metric("accuracy", "%", better="higher"),
        Metric("balanced_accuracy", "%", better="higher"),
        Metric("fit_predict_seconds", "s", better="lower", timing=True),
    ],
    claims=[
        Claim("sarc", beats="wide_biesn", on="accuracy", pairs="tasks"),
        Claim("sarc", beats="sarc_no_cycle", on="accuracy", pairs="tasks"),
        Claim("sarc", beats="sarc_random_periods", on="accuracy", pairs="tasks"),
        Claim("sarc", beats="minirocket", on="accuracy", exploratory=True, pairs="tasks"),
        Claim("sarc", beats="dtw_1nn", on="fit_predict_seconds", tasks=_LONG),
    ],
    budgets={
        "quick": Budget(seeds=2, tasks=("gun_point", "italy_power_demand", "coffee")),
        "full": Budget(seeds=5),
    },
    protocol=SeriesTask,
    unit="features",
)
