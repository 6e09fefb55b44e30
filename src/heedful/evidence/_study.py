"""The vocabulary of a study: tasks, arms, metrics, claims, budgets, and what one trial returns.

A study asks one question of one method. It is data plus plain functions; nothing here runs anything.
"""

import dataclasses
import inspect
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from heedful.errors import InputError

Split = Literal["validation", "test"]


@dataclasses.dataclass(frozen=True)
class Metric:
    """A number that every evaluation trial returns.

    Parameters
    ----------
    name : str
        Its key in ``Outcome.metrics``.
    unit : str
        Shown beside it; "" for a bare number.
    better : {"higher", "lower"}
        The direction of improvement.
    timing : bool
        A measured time. A study with a claim about one runs alone on the machine: one trial at a time, arms interleaved.
    tasks : sequence of str, optional
        The tasks that have it, such as those whose truth is known; default all.
    """

    name: str
    unit: str = ""
    _: dataclasses.KW_ONLY
    better: Literal["higher", "lower"]
    timing: bool = False
    tasks: Sequence[str] | None = None

    def __post_init__(self):
        if self.tasks is not None:
            object.__setattr__(self, "tasks", tuple(self.tasks))

    @property
    def sign(self) -> int:
        """+1 if higher is better, −1 if lower is."""
        return 1 if self.better == "higher" else -1


@dataclasses.dataclass(frozen=True)
class Claim:
    """``arm`` beats the arm ``beats`` on the metric ``on``.

    Parameters
    ----------
    arm, beats, on : str
        Names of two arms and a metric of the study.
    margin : float
        Non-inferiority: the claim holds if ``arm`` is worse by less than ``margin`` (unit of the metric). 0: superiority.
    exploratory : bool
        Not claimed by the paper: reported two-sided, without correction, outside of the family.
    tasks : sequence of str, optional
        The tasks it speaks of; default all.
    pairs : {"seeds", "tasks"}
        "seeds": one verdict per task, a pair per evaluation seed. "tasks": one verdict over all tasks, a pair per task,
        each the mean over that task's seeds.
    """

    arm: str
    _: dataclasses.KW_ONLY
    beats: str
    on: str
    margin: float = 0.0
    exploratory: bool = False
    tasks: Sequence[str] | None = None
    pairs: Literal["seeds", "tasks"] = "seeds"

    def __post_init__(self):
        if not 0 <= self.margin < math.inf:
            raise InputError(f"Claim margin must be a finite number >= 0; got {self.margin!r}.")
        if self.tasks is not None:
            object.__setattr__(self, "tasks", tuple(self.tasks))

    def __str__(self) -> str:
        within = f" within {self.margin:g}" if self.margin else ""
        return f"{self.arm} {'not worse than' if self.margin else 'beats'} {self.beats}{within} on {self.on}"


class Budget:
    """What every arm may spend, in the unit that costs, and how often the comparison is repeated.

    Parameters
    ----------
    seeds : int
        Evaluation seeds, numbered from 0.
    tuning_seeds : int
        Seeds used to choose settings; they are numbered from 1000 and never evaluate anything.
    timeout_s : float
        Limit of one trial, in seconds.
    tasks : sequence of str, optional
        The tasks of the study that this budget runs; default all. A claim about another task waits for a larger budget.
    **spend : int or float
        The spend, by the study's own names: ``Budget(seeds=5, gradients=4000)`` has ``budget.gradients == 4000``.
    """

    def __init__(
        self,
        *,
        seeds: int,
        tuning_seeds: int = 1,
        timeout_s: float = 600.0,
        tasks: Sequence[str] | None = None,
        **spend: int | float,
    ):
        if seeds < 1 or tuning_seeds < 1 or timeout_s <= 0:
            raise InputError(
                f"A budget needs seeds, tuning_seeds >= 1 and timeout_s > 0; got {seeds}, {tuning_seeds}, {timeout_s}."
            )
        self.tasks = None if tasks is None else tuple(tasks)
        self.seeds, self.tuning_seeds, self.timeout_s = seeds, tuning_seeds, timeout_s
        self.spend = dict(spend)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["spend"][name]
        except KeyError:
            raise AttributeError(
                f"this budget has no {name!r}; it has {sorted(self.__dict__.get('spend', {}))}"
            ) from None

    def without_tasks(self) -> "Budget":
        """The same budget for every task."""
        same = Budget(seeds=self.seeds, tuning_seeds=self.tuning_seeds, timeout_s=self.timeout_s)
        same.spend = dict(self.spend)
        return same

    def __eq__(self, other) -> bool:
        return isinstance(other, Budget) and self.__dict__ == other.__dict__

    def __repr__(self) -> str:
        spend = "".join(f", {key}={value}" for key, value in self.spend.items())
        return f"Budget(seeds={self.seeds}, tuning_seeds={self.tuning_seeds}, timeout_s={self.timeout_s:g}{spend})"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a trial returns.

    Parameters
    ----------
    metrics : mapping of str to float
        On the test split every metric of the study; on validation at least the one that settings are chosen by.
    costs : mapping of str to float
        What was spent, by the study's own names (``gradients``, ``tokens``); seconds and memory are measured for you.
    curves : mapping of str to sequence of (x, y) or (x, y, …)
        Anything worth drawing against progress, e.g. ``{"training loss": [(step, loss), …]}``, or against something else,
        which the name then says: ``{"interval against eta": [(eta, lower, upper), …]}``. Several values of y make
        several lines of one drawing.
    """

    metrics: Mapping[str, float]
    costs: Mapping[str, float] = dataclasses.field(default_factory=dict)
    curves: Mapping[str, Sequence[tuple[float, ...]]] = dataclasses.field(default_factory=dict)


class TrialFunction(Protocol):
    """How an arm is called; the settings of its grid come as further keywords."""

    def __call__(self, task: Any, *, budget: Budget, seed: int, **settings: Any) -> Outcome: ...


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way of doing the job.

    Parameters
    ----------
    run : callable
        ``run(task, *, budget, seed, **settings) -> Outcome``. Pure: the same arguments give the same outcome.
    grid : mapping of str to sequence, or sequence of mappings
        The settings to choose from: all combinations of a mapping of lists, or the listed points themselves. Every tuned
        arm of a study has the same number of points.
    untuned : str
        For an arm without a grid: why it has nothing to tune. The report prints it.
    aware : bool
        The method in question, as opposed to its blind baselines.
    """

    run: Callable[..., Outcome]
    grid: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]] | None = None
    _: dataclasses.KW_ONLY
    untuned: str = ""
    aware: bool = False

    @property
    def points(self) -> list[dict[str, Any]]:
        """The settings to choose from, in order; ``[{}]`` if there is nothing to tune."""
        if self.grid is None:
            return [{}]
        if isinstance(self.grid, Mapping):
            return [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]
        return [dict(point) for point in self.grid]


@dataclasses.dataclass(frozen=True)
class Task:
    """Real data in the form the arms of a study take.

    Parameters
    ----------
    build : callable
        ``build(*, split, seed) -> object``: the task for one trial. ``split`` is "validation" while settings are chosen
        and "test" afterwards, so only the task knows which split is scored. The same arguments give the same data.
    data : mapping of str to str
        Names and checksums of the data sets it reads; a trial on other data is another trial.
    """

    build: Callable[..., Any]
    data: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Study:
    """One question asked of one method.

    Parameters
    ----------
    slug : str
        The method's name.
    question : str
        The question, as a sentence.
    tasks : mapping of str to Task
        Where it is asked.
    arms : mapping of str to Arm
        The method and its baselines. Tuned arms have grids of equal size.
    metrics : sequence of Metric
        The first is the primary one, by which settings are chosen unless ``tune_on`` names another.
    claims : sequence of Claim
        What the paper says, corrected together.
    budgets : mapping of str to Budget
        "quick" (all arms and seeds within 60 s on two cores) and "full" (within 10 minutes).
    protocol : type, optional
        A ``typing.Protocol`` (or a class with annotations) that every task object follows. Its docstring shows a user how
        to write one.
    unit : str
        The cost in which the arms' budgets are equal, as the study's own docstring explains.
    """

    slug: str
    question: str
    tasks: Mapping[str, Task]
    arms: Mapping[str, Arm]
    metrics: Sequence[Metric]
    claims: Sequence[Claim]
    budgets: Mapping[str, Budget]
    _: dataclasses.KW_ONLY
    protocol: type | None = None
    tune_on: str = ""
    unit: str = ""

    def __post_init__(self):
        set_ = object.__setattr__
        set_(self, "metrics", tuple(self.metrics))
        set_(self, "claims", tuple(self.claims))
        set_(self, "tune_on", self.tune_on or (self.metrics[0].name if self.metrics else ""))
        self._check()

    def _check(self) -> None:
        where = f"Study {self.slug!r}"
        if not (self.tasks and self.arms and self.metrics and self.budgets):
            raise InputError(f"{where} needs at least one task, arm, metric and budget.")
        sizes = {}
        for name, arm in self.arms.items():
            if arm.grid is None and not arm.untuned:
                raise InputError(
                    f"{where}: arm {name!r} has no grid. A default that was never tuned is not a baseline: give it as many "
                    "points as the others, or say in untuned=... why there is nothing to tune."
                )
            if arm.grid is not None:
                sizes[name] = len(arm.points)
                if len({json.dumps(point, sort_keys=True, default=repr) for point in arm.points}) < len(arm.points):
                    raise InputError(f"{where}: the grid of arm {name!r} has a point twice; got {arm.points}.")
                if taken := {"task", "budget", "seed"} & {key for point in arm.points for key in point}:
                    raise InputError(
                        f"{where}: the grid of arm {name!r} sets {sorted(taken)}, which the study gives to every trial."
                    )
        if len(set(sizes.values())) > 1 or 0 in sizes.values():
            raise InputError(f"{where}: tuned arms need grids of equal size; got {sizes}.")
        names = {metric.name for metric in self.metrics}
        if len(names) < len(self.metrics):
            raise InputError(f"{where}: two metrics share a name.")
        if self.tune_on not in names:
            raise InputError(f"{where}: tune_on={self.tune_on!r} is not one of its metrics {sorted(names)}.")
        for metric in self.metrics:
            if unknown := set(metric.tasks or ()) - set(self.tasks):
                raise InputError(
                    f"{where}: metric {metric.name!r} names tasks {sorted(unknown)} that it does not have."
                )
        if self.metric(self.tune_on).tasks is not None:
            raise InputError(f"{where}: tune_on={self.tune_on!r} must be a metric of all tasks.")
        for budget_name, budget in self.budgets.items():
            if unknown := set(budget.tasks or ()) - set(self.tasks):
                raise InputError(
                    f"{where}: budget {budget_name!r} names tasks {sorted(unknown)} that it does not have."
                )
        for claim in self.claims:
            unknown = (
                {claim.arm, claim.beats} - set(self.arms)
                | {claim.on} - names
                | set(claim.tasks or ()) - set(self.tasks)
            )
            if unknown:
                raise InputError(
                    f"{where}: the claim '{claim}' speaks of {sorted(unknown)}, which the study does not have."
                )
            if without := set(claim.tasks or self.tasks) - set(self.metric(claim.on).tasks or self.tasks):
                raise InputError(f"{where}: the claim '{claim}' speaks of tasks {sorted(without)} without {claim.on}.")

    def metric(self, name: str) -> Metric:
        """The metric called ``name``."""
        return next(metric for metric in self.metrics if metric.name == name)

    def metrics_of(self, task: str) -> list[str]:
        """Names of the metrics that ``task`` has."""
        return [metric.name for metric in self.metrics if metric.tasks is None or task in metric.tasks]

    @property
    def timed(self) -> bool:
        """Whether a claim is about time, so that trials must run alone and interleaved."""
        return any(self.metric(claim.on).timing for claim in self.claims)

    def with_task(self, name: str, task: Task) -> "Study":
        """This study on ``task`` alone, by the metrics that all tasks have; its claims on them then speak of that task."""
        metrics = [metric for metric in self.metrics if metric.tasks is None]
        kept = [claim for claim in self.claims if self.metric(claim.on).tasks is None]
        claims = [dataclasses.replace(claim, tasks=None, pairs="seeds") for claim in kept]
        budgets = {key: budget.without_tasks() for key, budget in self.budgets.items()}
        return dataclasses.replace(
            self, tasks={name: task}, metrics=metrics, claims=list(dict.fromkeys(claims)), budgets=budgets
        )

    def build_task(self, name: str, *, split: Split, seed: int) -> Any:
        """The task object for one trial, checked against the study's protocol.

        Raises
        ------
        InputError
            If the object lacks a member of the protocol; the message shows the protocol.
        """
        task = self.tasks[name].build(split=split, seed=seed)
        if self.protocol is not None:
            missing = [member for member in _members(self.protocol) if not hasattr(task, member)]
            if missing:
                raise InputError(
                    f"Task {name!r} of study {self.slug!r} must build an object with {', '.join(_members(self.protocol))}; "
                    f"the {type(task).__name__} it built lacks {', '.join(missing)}. The right form:\n\n"
                    f"{inspect.getsource(self.protocol)}"
                )
        return task


def _members(protocol: type) -> list[str]:
    """Public attributes and methods that ``protocol`` asks for, in the order they are written."""
    named = [*getattr(protocol, "__annotations__", {}), *vars(protocol)]
    return [name for name in dict.fromkeys(named) if not name.startswith("_")]
