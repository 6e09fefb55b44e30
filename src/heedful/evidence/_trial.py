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
import types
import warnings
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
_REASON_LIMIT = 2_000  # characters of an exception's message that are kept


class TimeIsUp(BaseException):
    """Raised into a trial that is over its limit; no ``except Exception`` of an arm may swallow it."""


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
    """Run the trial here and now; whatever it raises, even ``SystemExit``, becomes its recorded failure."""
    process = os.getpid()
    try:
        return _execute(study, trial, budget)
    except (KeyboardInterrupt, TimeIsUp):  # not of its own doing
        raise
    except BaseException as error:
        return Result("failed", f"{type(error).__name__}: {error}"[:_REASON_LIMIT], log=traceback.format_exc())
    finally:
        if os.getpid() != process:  # A copy that the arm forked came back too; only the original hands over a result.
            os._exit(0)


def _execute(study: Study, trial: Trial, budget: Budget) -> Result:
    with _own_settings(), fixed_threads(trial.threads), _own_randomness(trial.seed):
        task = study.build_task(trial.task, split=trial.split, seed=trial.seed)
        with peak_memory() as peak:
            start = time.perf_counter()
            outcome = study.arms[trial.arm].run(task, budget=budget, seed=trial.seed, **trial.settings)
            seconds = time.perf_counter() - start
    if problem := _problem(study, trial, outcome):
        return Result("failed", problem)
    return Result(
        "done",
        metrics={name: float(value) for name, value in outcome.metrics.items()},
        costs={**{k: float(v) for k, v in outcome.costs.items()}, "seconds": seconds, "peak_mib": peak.mib},
        curves={name: [tuple(map(float, point)) for point in points] for name, points in outcome.curves.items()},
    )


def _problem(study: Study, trial: Trial, outcome: Any) -> str:
    """What is wrong with an outcome; empty if nothing is."""
    if not isinstance(outcome, Outcome):
        return (
            f"arm {trial.arm!r} returned a {type(outcome).__name__}; it must return an Outcome(metrics=..., costs=...)"
        )
    own = study.metrics_of(trial.task)
    needed = [study.tune_on] if trial.split == "validation" else own
    if missing := [name for name in needed if name not in outcome.metrics]:
        return f"the outcome lacks {', '.join(missing)}"
    if unknown := set(outcome.metrics) - set(own):
        return f"the outcome has metrics that the study does not declare of this task: {', '.join(sorted(unknown))}"
    for name, value in outcome.metrics.items():
        if not math.isfinite(value):
            return f"{name} is {float(value)}"
    return ""


@contextlib.contextmanager
def _own_settings() -> Iterator[None]:
    """Global settings start at their defaults inside the block and are afterwards what they were before it.

    One process runs many trials, and what an arm sets must not reach the next. Covered are torch's dtype, device,
    gradients, determinism and precision, NumPy's handling of errors, filters of warnings, the folder and the environment.
    """
    folder, environment = os.getcwd(), dict(os.environ)
    dtype, device, precision = (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_float32_matmul_precision(),
    )
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    def choose(dtype, device, precision, deterministic, warn_only):
        torch.set_default_dtype(dtype)
        torch.set_default_device(None if device == torch.device("cpu") else device)
        torch.set_float32_matmul_precision(precision)
        now = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        if now != (deterministic, warn_only):  # Setting it imports torch's compiler, which takes seconds.
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)

    choose(torch.float32, torch.device("cpu"), "highest", False, False)
    try:
        with (
            torch.enable_grad(),
            np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"),
            warnings.catch_warnings(),
        ):
            yield
    finally:
        choose(dtype, device, precision, *deterministic)
        os.chdir(folder)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in environment.items() if os.environ.get(name) != value})


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
    left_out, text = max(0, len(text) - _LOG_LIMIT), text[-_LOG_LIMIT:]  # cut first: colours take long to remove
    if "\x1b" in text:
        from rich.text import Text

        text = Text.from_ansi(text).plain
    return f"[… {left_out} characters]\n{text}" if left_out else text


def code_version(study: Study) -> str:
    """Version of all code and packages that a trial of ``study`` may run.

    Covered are heedful's ground floor, rooms and data, the modules in which the study's arms and tasks are written, and
    the versions of Python and of the numerical packages. So are the metrics, which say what a valid outcome is. A study
    with claims about time adds the machine. What only runs, stores and shows trials (evidence, cli) is left out.
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
    own: set[Path] = set()
    digest = hashlib.sha256(repr({name: _describe(function, own) for name, function in functions.items()}).encode())
    for path in sorted({*files, *own}):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    versions = {name: metadata.version(name) for name in ("torch", "numpy", "scipy", "scikit-learn")}
    digest.update(json.dumps([platform.python_version(), versions], sort_keys=True).encode())
    digest.update(
        json.dumps([study.tune_on, [[m.name, *m.tasks] if m.tasks else m.name for m in study.metrics]]).encode()
    )
    if study.timed:
        digest.update(json.dumps(fingerprint(), sort_keys=True).encode())
    return f"{heedful.__version__}+{digest.hexdigest()[:12]}"


def _describe(value: Any, files: set[Path], inside: tuple[int, ...] = ()) -> Any:
    """What tells a function from another: its name and all values bound to it; the source files met go to ``files``.

    Values are bound by ``functools.partial``, a closure, defaults, or the object of a method. Of a function without a
    file, as notebooks have them, the bytecode is part of it.
    """
    if id(value) in inside:
        return "itself"

    def describe(*values: Any) -> list[Any]:
        return [_describe(item, files, (*inside, id(value))) for item in values]

    match value:
        case functools.partial():
            return describe(value.func, *value.args, value.keywords)
        case types.MethodType():
            return describe(value.__func__, value.__self__)
        case types.FunctionType():
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
            file = Path(getattr(sys.modules.get(value.__module__), "__file__", None) or "")
            if file.is_file():
                files.add(file)
            name = f"{value.__module__}.{value.__qualname__}"
            bound = describe(*cells, *(value.__defaults__ or ()), value.__kwdefaults__ or {})
            return [name, bound, None if file.is_file() else _bytecode(value.__code__)]
        case dict():
            return describe(*(item for pair in value.items() for item in pair))
        case list() | tuple():
            return [type(value).__name__, *describe(*value)]
        case np.ndarray() | torch.Tensor():
            array = np.ascontiguousarray(value if isinstance(value, np.ndarray) else value.detach().cpu().numpy())
            return [str(array.dtype), array.shape, hashlib.sha256(array.tobytes()).hexdigest()]
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    kind: Any = type(value)
    if kind.__repr__ is object.__repr__:  # It tells where in memory an object is, not what it is.
        call = [kind.__call__] if callable(value) else []
        return describe(kind, *call, getattr(value, "__dict__", None))
    return repr(value)


def _bytecode(code: types.CodeType) -> list[Any]:
    constants = [_bytecode(item) if isinstance(item, types.CodeType) else repr(item) for item in code.co_consts]
    return [code.co_code.hex(), code.co_names, constants]
