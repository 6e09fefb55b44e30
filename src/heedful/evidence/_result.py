"""What a study found: every trial, the settings chosen, and the verdicts."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from heedful._results import Report
from heedful.evidence._study import Budget, Split, Study
from heedful.evidence._verdicts import Verdict


@dataclasses.dataclass(frozen=True)
class TrialRecord(Report):
    """One trial as the store keeps it.

    ``key`` is the digest of all that the outcome depends on.
    ``status`` is "done", or "failed" with a ``reason`` (it raised, returned NaN, passed its time limit, was killed) and
    the end of its output in ``log``. ``costs`` has what the arm reported and the measured ``seconds`` and ``peak_mib``.
    """

    key: str
    study: str
    task: str
    arm: str
    settings: Mapping[str, Any]
    seed: int
    split: Split
    status: Literal["done", "failed"]
    reason: str = ""
    log: str = ""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    costs: Mapping[str, float] = dataclasses.field(default_factory=dict)
    curves: Mapping[str, Sequence[tuple[float, ...]]] = dataclasses.field(default_factory=dict)
    threads: int = 1
    code: str = ""
    started: str = ""
    machine: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StudyResult:
    """The answer to a study's question under one budget.

    ``trials`` are the evaluation trials, ``tuning`` those that chose the settings, ``chosen`` the settings by (task, arm),
    None where every setting failed.
    """

    study: Study
    budget_name: str
    budget: Budget
    trials: tuple[TrialRecord, ...]
    tuning: tuple[TrialRecord, ...]
    chosen: Mapping[tuple[str, str], Mapping[str, Any] | None]
    verdicts: tuple[Verdict, ...]
    machine: Mapping[str, Any]
    command: str
