"""The geometry of the page's figures: positions in per cent of the drawing, paths in thousandths.

Drawings have no fixed width. The template places marks by percentages and writes all text as HTML beside them, so that a
figure fills its column on any screen while letters and marks keep their size.
"""

import dataclasses
import math
import sys
from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.ticker import LogLocator, MaxNLocator

from heedful.evidence._report._summary import advantage, difference_unit, interval, metric_head, number
from heedful.evidence._result import TrialRecord
from heedful.evidence._verdicts import Verdict

_LOG_FROM = 30.0  # An axis of positive values that spans more than this factor is logarithmic.
_REACH = 1.0  # A simultaneous interval is drawn at most this many spans beyond everything else.


@dataclasses.dataclass(frozen=True)
class Axis:
    """A linear or logarithmic scale from data to per cent."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def over(cls, values: Iterable[float], *, log: bool = False) -> "Axis":
        """The scale that shows all finite ``values`` with a little room at both ends."""
        finite = [value for value in values if math.isfinite(value)] or [0.0]
        low, high = min(finite), max(finite)
        if log and low > 0 and high > _LOG_FROM * low:
            room = (high / low) ** 0.05
            if low / room >= sys.float_info.min and high * room <= sys.float_info.max:  # else no logarithm of the ends
                return cls(low / room, high * room, log=True)
        # Equal values: a scale of their own size around them, wide enough to survive float64.
        room = 0.05 * (high - low) or 0.1 * abs(high) or 1.0
        return cls(low - room, high + room)

    def at(self, value: float) -> float:
        """Where ``value`` lies, in per cent, clipped to the drawing."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        share = ((math.log(value) if self.log else value) - low) / (high - low)
        return round(100 * min(max(share, 0.0), 1.0), 1)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Places and labels of about five round values."""
        if self.log:
            many = math.log10(self.high / self.low) > 1.5
            values = LogLocator(subs=(1.0,) if many else (1.0, 2.0, 5.0), numticks=6).tick_values(self.low, self.high)
        else:
            values = MaxNLocator(nbins=5, steps=[1, 2, 5, 10]).tick_values(self.low, self.high)
        values = [float(value) for value in values if self.low <= value <= self.high]
        step = None if self.log or len(values) < 2 else values[1] - values[0]
        return [(self.at(value), _tick(value, step)) for value in values]


def _tick(value: float, step: float | None) -> str:
    if step is None or not 1e-5 < step < 1e5:
        return f"{value:g}".replace("-", "−").replace("e+0", "e").replace("e−0", "e−")
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value + 0.0 if abs(value) > step / 1e6 else 0.0:.{decimals}f}".replace("-", "−")


@dataclasses.dataclass(frozen=True)
class Bar:
    """An interval as drawn; ``to_left`` and ``to_right`` say that it goes on beyond the drawing."""

    low: float
    high: float
    to_left: bool
    to_right: bool

    @classmethod
    def of(cls, low: float, high: float, axis: Axis) -> "Bar":
        return cls(axis.at(low), axis.at(high), low < axis.low, high > axis.high)


@dataclasses.dataclass(frozen=True)
class ForestRow:
    """One verdict: its effect, both intervals and its pairs."""

    verdict: Verdict
    text: str
    interval: str
    boundary: float
    effect: float | None
    bar: Bar
    bar_alone: Bar
    dots: list[float]


@dataclasses.dataclass(frozen=True)
class Forest:
    """The verdicts on one metric, on one scale."""

    metric: str
    unit: str
    axis: Axis
    zero: float
    rows: list[ForestRow]


def forest(metric: str, verdicts: Sequence[tuple[Verdict, dict]]) -> Forest:
    """Rows for ``verdicts`` on ``metric``, each with its summary; right is in favour of the claim."""
    unit = difference_unit(verdicts[0][0].unit)
    core = [0.0]
    for verdict, _ in verdicts:
        core += [-verdict.claim.margin, verdict.effect, verdict.low_alone, verdict.high_alone]
        core += [pair.difference for pair in verdict.pairs]
    core = [value for value in core if math.isfinite(value)]
    span = (max(core) - min(core)) * _REACH
    bounds = [b for verdict, _ in verdicts for b in (verdict.low, verdict.high) if math.isfinite(b)]
    axis = Axis.over([*core, *(min(max(bound, min(core) - span), max(core) + span) for bound in bounds)])
    rows = [
        ForestRow(
            verdict=verdict,
            text=advantage(summary),
            interval=interval(summary),
            boundary=axis.at(-verdict.claim.margin),
            effect=axis.at(verdict.effect) if math.isfinite(verdict.effect) else None,
            bar=Bar.of(verdict.low, verdict.high, axis),
            bar_alone=Bar.of(verdict.low_alone, verdict.high_alone, axis),
            dots=[axis.at(pair.difference) for pair in verdict.pairs],
        )
        for verdict, summary in verdicts
    ]
    return Forest(metric, unit, axis, axis.at(0.0), rows)


@dataclasses.dataclass(frozen=True)
class Strip:
    """Every seed's value of one metric on one task: a row per arm with its values and their mean."""

    head: str
    axis: Axis
    rows: list[tuple[str, list[float], float]]


def strip(metric: dict, trials: Sequence[TrialRecord], arms: Iterable[str]) -> Strip | None:
    """The strip of ``metric``; None if no trial has it."""
    values = {
        arm: [t.metrics[metric["name"]] for t in trials if t.arm == arm and metric["name"] in t.metrics] for arm in arms
    }
    values = {arm: numbers for arm, numbers in values.items() if numbers}
    if not values:
        return None
    axis = Axis.over((number for numbers in values.values() for number in numbers), log=True)
    rows = [(arm, [axis.at(v) for v in numbers], axis.at(float(np.mean(numbers)))) for arm, numbers in values.items()]
    return Strip(metric_head(metric), axis, rows)


@dataclasses.dataclass(frozen=True)
class Plot:
    """Marks and lines over two axes.

    By arm: ``seeds`` are the marks of single trials and ``means`` one mark, (x, y) from the top left; ``seed_lines`` and
    ``mean_lines`` are paths in a box of 1000 × 1000.
    """

    title: str
    x_label: str
    x: Axis
    y: Axis
    means: dict[str, tuple[float, float]]
    description: str
    seeds: dict[str, list[tuple[float, float]]] = dataclasses.field(default_factory=dict)
    seed_lines: dict[str, str] = dataclasses.field(default_factory=dict)
    mean_lines: dict[str, str] = dataclasses.field(default_factory=dict)


def tradeoff(metric: dict, trials: Sequence[TrialRecord], arms: Iterable[str], *, cost: str = "seconds") -> Plot | None:
    """Quality against what it cost: every seed, and every arm's mean."""
    name = metric["name"]
    paid = [t for t in trials if name in t.metrics and math.isfinite(t.costs.get(cost, math.nan))]
    points = {arm: pairs for arm in arms if (pairs := [(t.costs[cost], t.metrics[name]) for t in paid if t.arm == arm])}
    if not points:
        return None
    flat = np.array([pair for pairs in points.values() for pair in pairs])
    x, y = Axis.over(flat[:, 0], log=True), Axis.over(flat[:, 1], log=True)
    means = {arm: np.mean(pairs, axis=0).tolist() for arm, pairs in points.items()}
    words = ", ".join(f"{arm} {number(b)} at {number(a)} s" for arm, (a, b) in means.items())
    title = f"{metric_head(metric)} against time"
    return Plot(
        title=title,
        x_label="seconds a trial",
        x=x,
        y=y,
        means={arm: _place(mean, x, y) for arm, mean in means.items()},
        description=f"{title}; means: {words}.",
        seeds={arm: [_place(pair, x, y) for pair in pairs] for arm, pairs in points.items()},
    )


def _place(point: Sequence[float], x: Axis, y: Axis) -> tuple[float, float]:
    return x.at(point[0]), round(100 - y.at(point[1]), 1)


def curve_names(trials: Iterable[TrialRecord]) -> list[str]:
    """Names of all curves, in the order in which they appear."""
    return list(dict.fromkeys(name for trial in trials for name in trial.curves))


def curve(name: str, trials: Sequence[TrialRecord], arms: Iterable[str], *, limit: int) -> Plot | None:
    """The curve ``name`` of every trial, and the mean over the seeds of each arm; at most ``limit`` points a line."""
    lines = {}
    for arm in arms:
        raw = [
            np.asarray(t.curves[name], dtype=float) for t in trials if t.arm == arm and len(t.curves.get(name, ())) > 1
        ]
        kept = [points[np.isfinite(points).all(axis=1)] for points in raw]
        if kept := [
            _thin(points[np.argsort(points[:, 0], kind="stable")], limit) for points in kept if len(points) > 1
        ]:
            lines[arm] = kept
    if not lines:
        return None
    flat = np.concatenate([points for seeds in lines.values() for points in seeds])
    x_label = name.partition(" against ")[2]
    x = Axis.over(flat[:, 0], log=bool(x_label))
    y = Axis.over(flat[:, 1:].ravel(), log=True)
    means = {arm: _mean_line(seeds, limit) for arm, seeds in lines.items()}
    ends = {arm: " to ".join(number(y) for y in points[-1, 1:].tolist()) for arm, points in means.items()}
    words = ", ".join(f"{arm} {end}" for arm, end in ends.items())
    return Plot(
        title=name,
        x_label=x_label or "progress",
        x=x,
        y=y,
        means={arm: _place(points[-1].tolist(), x, y) for arm, points in means.items()},
        description=f"{name}{'' if x_label else ' against progress'}; the means end at {words}.",
        seed_lines={arm: "".join(_path(points, x, y) for points in seeds) for arm, seeds in lines.items()},
        mean_lines={arm: _path(points, x, y) for arm, points in means.items()},
    )


def _thin(points: np.ndarray, limit: int) -> np.ndarray:
    """At most ``limit`` of the points, evenly spaced in order, the first and the last among them."""
    if len(points) <= limit:
        return points
    return points[np.linspace(0, len(points) - 1, limit).round().astype(int)]


def _mean_line(seeds: Sequence[np.ndarray], limit: int) -> np.ndarray:
    """The mean over ``seeds`` where all of them have values, by linear interpolation."""
    low, high = max(points[0, 0] for points in seeds), min(points[-1, 0] for points in seeds)
    grid = np.unique(np.concatenate([points[:, 0] for points in seeds]))
    grid = grid[(grid >= low) & (grid <= high)]
    if not len(grid):  # Seeds that share no stretch have no mean; the first stands for the arm.
        return seeds[0]
    lines = [[np.interp(grid, points[:, 0], y) for y in points[:, 1:].T] for points in seeds]
    return _thin(np.column_stack([grid, *np.mean(lines, axis=0)]), limit)


def _path(points: np.ndarray, x: Axis, y: Axis) -> str:
    return "".join(
        "M" + " ".join(f"{10 * x.at(a):.0f} {1000 - 10 * y.at(b):.0f}" for a, b in zip(points[:, 0], line, strict=True))
        for line in points[:, 1:].T
    )
