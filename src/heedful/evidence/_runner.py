"""Run a study: choose settings, evaluate them, judge.

Settings are chosen once per task and arm on the validation split with tuning seeds of their own. Only then is each arm
evaluated, with the setting chosen, on the test split with the evaluation seeds. Everything goes through the store, so
whatever ended before is not run again.
"""

import contextlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import numpy as np

from heedful._machine import fingerprint
from heedful._results import Event, report_progress
from heedful.errors import InputError
from heedful.evidence._engines import Engine, EngineName, open_engine
from heedful.evidence._result import StudyResult, TrialRecord
from heedful.evidence._store import Store
from heedful.evidence._study import Budget, Split, Study
from heedful.evidence._trial import Result, Trial, code_version
from heedful.evidence._verdicts import judge

FIRST_TUNING_SEED = 1000
_POLL_S = 0.5  # how often a trial that another coordinator runs is looked at


def run_study(
    study: Study,
    *,
    budget: str = "full",
    store: Store | str | os.PathLike | None = None,
    engine: EngineName = "processes",
    workers: int | None = None,
    threads: int = 1,
    address: str | None = None,
    command: str = "",
) -> StudyResult:
    """Run what has not been run of ``study`` and return its result.

    Parameters
    ----------
    study : Study
        The study.
    budget : str
        One of its budgets, "quick" or "full".
    store : Store or path, optional
        Where trials are kept; default the user's own store.
    engine : {"processes", "inline", "ray"}
        Where trials run. The metrics are the same bit for bit.
    workers : int, optional
        Trials at a time; default all cores. A study with a claim about time always runs one at a time.
    threads : int
        Threads per trial. Another number makes it another trial.
    address : str, optional
        An existing Ray cluster, e.g. "auto"; with ``engine="ray"`` only.
    command : str
        How to run this again, as the report shows it.

    Returns
    -------
    StudyResult
        Trials, chosen settings and verdicts. Failed trials are part of it.
    """
    plan = _Plan(study, budget, threads)
    with contextlib.ExitStack() as stack:
        store = store if isinstance(store, Store) else stack.enter_context(Store(store))
        with open_engine(engine, workers=1 if study.timed else workers, threads=threads, address=address) as opened:
            tuning = plan.tuning()
            _run_all(study, plan.budget, tuning, store, opened, phase=f"{study.slug}: choosing settings")
            evaluation = plan.evaluation(plan.choose(tuning, store))
            _run_all(study, plan.budget, evaluation, store, opened, phase=f"{study.slug}: evaluating")
        return plan.result(store, command)


def stored_result(
    study: Study, *, budget: str = "full", store: Store, threads: int = 1, command: str = ""
) -> StudyResult:
    """The result of ``study`` from what the store holds, without running anything.

    Raises
    ------
    InputError
        If the store has no ended evaluation trial of this study under the present code, data, budget and threads.
    """
    result = _Plan(study, budget, threads).result(store, command)
    if not result.trials:
        others = store.codes(study.slug)
        seen = ", ".join(f"{code} ({n} trials)" for code, n in others.items()) or "none"
        raise InputError(
            f"{store.path} has no trial of {study.slug!r} with budget {budget!r}, {threads} thread(s) and code version "
            f"{code_version(study)}. Code versions seen there: {seen}. Run: heedful study {study.slug}"
        )
    return result


class _Plan:
    """The trials of a study under one budget."""

    def __init__(self, study: Study, budget: str, threads: int):
        if budget not in study.budgets:
            raise InputError(f"Study {study.slug!r} has budgets {', '.join(study.budgets)}; got {budget!r}.")
        if threads < 1:
            raise InputError(f"threads must be >= 1; got {threads}.")
        self.study, self.name, self.threads = study, budget, threads
        self.budget: Budget = study.budgets[budget]
        if self.budget.seeds > FIRST_TUNING_SEED:
            raise InputError(
                f"Study {study.slug!r}: budget {budget!r} has {self.budget.seeds} seeds, but settings are chosen with the "
                f"seeds from {FIRST_TUNING_SEED} on. Give at most {FIRST_TUNING_SEED}, so that none does both."
            )
        self.tasks: Sequence[str] = self.budget.tasks or tuple(study.tasks)
        self.code = code_version(study)

    def trial(self, task: str, arm: str, settings: Mapping[str, Any], seed: int, split: Split) -> Trial:
        return Trial(
            study=self.study.slug,
            task=task,
            arm=arm,
            settings=dict(settings),
            seed=seed,
            split=split,
            spend=dict(self.budget.spend),
            threads=self.threads,
            code=self.code,
            data=dict(self.study.tasks[task].data),
        )

    def tuning(self) -> list[Trial]:
        """Validation trials, arms interleaved; none for an arm with a single point."""
        seeds = range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + self.budget.tuning_seeds)
        size = max(len(arm.points) for arm in self.study.arms.values())
        return [
            self.trial(task, name, arm.points[point], seed, "validation")
            for seed in seeds
            for task in self.tasks
            for point in range(size)
            for name, arm in self.study.arms.items()
            if 1 < len(arm.points) > point
        ]

    def choose(self, tuning: Sequence[Trial], store: Store) -> dict[tuple[str, str], dict[str, Any] | None]:
        """The point with the best mean over tuning seeds, by (task, arm); the first of equals.

        A point that failed with any seed is out. None if every point is, or if a tuning trial has not ended.
        """
        sign = self.study.metric(self.study.tune_on).sign
        scores: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for trial in tuning:
            record = store.record(trial)
            if record is None:
                score = np.nan
            else:
                score = sign * record.metrics[self.study.tune_on] if record.status == "done" else -np.inf
            scores[trial.task, trial.arm][json.dumps(trial.settings)].append(score)
        chosen: dict[tuple[str, str], dict[str, Any] | None] = {}
        for task in self.tasks:
            for name, arm in self.study.arms.items():
                means = [float(np.mean(values)) for values in scores[task, name].values()] or [0.0]
                best = int(np.argmax(means))  # NaN, a trial that has not ended, comes first
                chosen[task, name] = arm.points[best] if np.isfinite(means[best]) else None
        return chosen

    def evaluation(self, chosen: Mapping[tuple[str, str], Mapping[str, Any] | None]) -> list[Trial]:
        """Test trials, arms interleaved."""
        return [
            self.trial(task, arm, settings, seed, "test")
            for seed in range(self.budget.seeds)
            for task in self.tasks
            for arm in self.study.arms
            if (settings := chosen[task, arm]) is not None
        ]

    def result(self, store: Store, command: str) -> StudyResult:
        tuning = self.tuning()
        chosen = self.choose(tuning, store)
        trials = _records(store, self.evaluation(chosen))
        return StudyResult(
            study=self.study,
            budget_name=self.name,
            budget=self.budget,
            trials=trials,
            tuning=_records(store, tuning),
            chosen=chosen,
            verdicts=judge(self.study, trials, budget=self.budget),
            machine=fingerprint(),
            command=command,
        )


def _records(store: Store, trials: Sequence[Trial]) -> tuple[TrialRecord, ...]:
    return tuple(record for trial in trials if (record := store.record(trial)) is not None)


def _run_all(
    study: Study, budget: Budget, trials: Sequence[Trial], store: Store, engine: Engine, *, phase: str
) -> None:
    """Run every trial that has not ended, at most ``engine.workers`` at a time; wait for those of other coordinators."""
    try:
        _run_each(study, budget, trials, store, engine, phase)
    except BaseException:
        store.release()  # A notebook lives on after an interrupt: it would wait for its own trials forever.
        raise


def _run_each(study: Study, budget: Budget, trials: Sequence[Trial], store: Store, engine: Engine, phase: str) -> None:
    waiting = list(trials)
    running: dict[Future[Result], Trial] = {}
    done = 0
    while waiting or running:
        busy = []
        while waiting and len(running) < engine.workers:
            trial = waiting.pop(0)
            state = store.claim(trial)
            if state == "mine":
                running[engine.submit(study, trial, budget)] = trial
            elif state == "busy":
                busy.append(trial)
            else:
                done += 1
        waiting += busy
        for future in wait(running, timeout=_POLL_S, return_when=FIRST_COMPLETED).done:
            store.finish(running.pop(future), future.result())
            done += 1
            report_progress(Event(phase, done, len(trials)))
        if busy and not running:
            time.sleep(_POLL_S)
    report_progress(Event(phase, done, len(trials)))
