"""One trial: what identifies it, and running it.

A trial is a pure function of its study, task, arm, settings, seed, split, spend, threads, code and data. All of that is in
its key, so the same trial is never computed twice and different ones are never mixed.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import platform
import random
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import threadpoolctl
import torch

import heedful
from heedful._machine import fingerprint, peak_memory
from heedful.errors import InputError
from heedful.evidence._study import Budget, Outcome, Split, Study

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_LOG_LIMIT = 20_000  # characters of a trial's output that are kept, its end


@dataclasses.dataclass(frozen=True)
class Trial:
    """Everything the outcome of one trial depends on."""

    study: str
    task: str
    arm: str
    settings: Mapping[str, Any]
    seed: int
    split: Split
    spend: Mapping[str, int | float]
    threads: int
    code: str
    data: Mapping[str, str]

    @functools.cached_property
    def key(self) -> str:
        """SHA-256 of all fields."""
        try:
            text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        except TypeError as error:
            raise InputError(
                f"Study {self.study!r}: the settings of arm {self.arm!r} must be numbers, strings, booleans, None, or "
                f"lists and dicts of them, so that they can be kept and compared; got {self.settings!r} ({error})."
            ) from error
        return hashlib.sha256(text.encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Result:
    """How a trial ended."""

    status: Literal["done", "failed"]
    reason: str = ""
    log: str = ""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    costs: Mapping[str, float] = dataclasses.field(default_factory=dict)
    curves: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def execute(study: Study, trial: Trial, budget: Budget) -> Result:
    """Run the trial here and now; whatever it raises becomes its recorded failure."""
    try:
        with fixed_threads(trial.threads), _own_randomness(trial.seed):
            task = study.build_task(trial.task, split=trial.split, seed=trial.seed)
            with peak_memory() as peak:
                start = time.perf_counter()
                outcome = study.arms[trial.arm].run(task, budget=budget, seed=trial.seed, **trial.settings)
                seconds = time.perf_counter() - start
    except Exception as error:
        return Result("failed", f"{type(error).__name__}: {error}", log=traceback.format_exc())
    if problem := _problem(study, trial, outcome):
        return Result("failed", problem)
    return Result(
        "done",
        metrics={name: float(value) for name, value in outcome.metrics.items()},
        costs={**{k: float(v) for k, v in outcome.costs.items()}, "seconds": seconds, "peak_mib": peak.mib},
        curves={name: [(float(x), float(y)) for x, y in points] for name, points in outcome.curves.items()},
    )


def _problem(study: Study, trial: Trial, outcome: Any) -> str:
    """What is wrong with an outcome; empty if nothing is."""
    if not isinstance(outcome, Outcome):
        return (
            f"arm {trial.arm!r} returned a {type(outcome).__name__}; it must return an Outcome(metrics=..., costs=...)"
        )
    needed = [study.tune_on] if trial.split == "validation" else [metric.name for metric in study.metrics]
    if missing := [name for name in needed if name not in outcome.metrics]:
        return f"the outcome lacks {', '.join(missing)}"
    if unknown := set(outcome.metrics) - {metric.name for metric in study.metrics}:
        return f"the outcome has metrics that the study does not declare: {', '.join(sorted(unknown))}"
    for name, value in outcome.metrics.items():
        if not math.isfinite(value):
            return f"{name} is {float(value)}"
    return ""


@contextlib.contextmanager
def fixed_threads(n: int) -> Iterator[None]:
    """Give torch, BLAS and OpenMP ``n`` threads, also in libraries that are loaded inside the block."""
    before = {name: os.environ.get(name) for name in _THREAD_VARIABLES}
    torch_before = torch.get_num_threads()
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(n)))
    torch.set_num_threads(n)
    try:
        with threadpoolctl.threadpool_limits(n):
            yield
    finally:
        torch.set_num_threads(torch_before)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _own_randomness(seed: int) -> Iterator[None]:
    """Global generators start at ``seed`` inside the block and are afterwards what they were before it."""
    # The legacy NumPy generator counts too: arms may use libraries that draw from it.
    python, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng():
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)  # noqa: NPY002


def tail(text: str) -> str:
    """The end of a trial's output, as much as is kept, without terminal colours."""
    if "\x1b" in text:
        from rich.text import Text

        text = Text.from_ansi(text).plain
    return text if len(text) <= _LOG_LIMIT else f"[… {len(text) - _LOG_LIMIT} characters]\n{text[-_LOG_LIMIT:]}"


def code_version(study: Study) -> str:
    """Version of all code and packages that a trial of ``study`` may run.

    Covered are heedful's ground floor, rooms and data, the modules in which the study's arms and tasks are written, and
    the versions of Python and of the numerical packages. A study with claims about time adds the machine. What only runs,
    stores and shows trials (evidence, cli) is left out.
    """
    package = Path(heedful.__file__).parent
    files = [
        path
        for path in package.rglob("*.py")
        if not {"cli", "evidence"} & set(path.relative_to(package).parts[:1])
        and (path.parent.name != "studies" or path.name.startswith("_"))
        and path.name != "catalog.py"
    ]
    functions = {name: arm.run for name, arm in study.arms.items()}
    functions |= {name: task.build for name, task in study.tasks.items()}
    files += [path for function in functions.values() if (path := _source_file(function))]
    digest = hashlib.sha256(repr({name: _describe(function) for name, function in functions.items()}).encode())
    for path in sorted(set(files)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    versions = {name: metadata.version(name) for name in ("torch", "numpy", "scipy", "scikit-learn")}
    digest.update(json.dumps([platform.python_version(), versions], sort_keys=True).encode())
    if study.timed:
        digest.update(json.dumps(fingerprint(), sort_keys=True).encode())
    return f"{heedful.__version__}+{digest.hexdigest()[:12]}"


def _describe(function: Any) -> Any:
    """Name of a function, with the arguments that a ``functools.partial`` has fixed."""
    if isinstance(function, functools.partial):
        keywords = {name: _describe(value) for name, value in function.keywords.items()}
        return [_describe(function.func), [_describe(value) for value in function.args], keywords]
    return f"{function.__module__}.{function.__qualname__}" if hasattr(function, "__qualname__") else repr(function)


def _source_file(function: Any) -> Path | None:
    while isinstance(function, functools.partial):
        function = function.func
    module = sys.modules.get(getattr(function, "__module__", ""))
    file = getattr(module, "__file__", None)
    return Path(file) if file else None
