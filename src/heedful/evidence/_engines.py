"""Where trials run: in this process, on a pool of processes, or on a Ray cluster.

An engine turns a trial into a future of its ``Result``. All fix the same threads per trial, so the metrics are equal
bit for bit. The runner keeps at most ``workers`` trials in flight.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from heedful.errors import InputError, MissingExtraError, ParameterError
from heedful.evidence._study import Budget, Study
from heedful.evidence._trial import Result, TimeIsUp, Trial, execute, tail

_RAY_START_S = 60.0  # what a Ray worker may take to start and import before its trial counts as stuck

EngineName = Literal["inline", "processes", "ray"]


@runtime_checkable
class Engine(Protocol):
    """Runs trials, up to ``workers`` at a time."""

    workers: int

    def submit(self, study: Study, trial: Trial, budget: Budget) -> "Future[Result]":
        """Start a trial. Whatever happens to it is its result; the future raises only if the engine itself is broken."""
        ...

    def close(self) -> None:
        """Stop everything, running trials included."""
        ...


@contextlib.contextmanager
def open_engine(name: EngineName, *, workers: int | None, threads: int, address: str | None) -> Iterator[Engine]:
    """The engine called ``name``, closed when the block ends."""
    if address is not None and name != "ray":
        raise ParameterError(f"address={address!r} goes with engine='ray' only; the engine is {name!r}.")
    if workers is not None and workers < 1:
        raise ParameterError(f"workers must be >= 1; got {workers}.")
    engine: Engine
    if name == "inline":
        engine = _Inline()
    elif name == "processes":
        engine = _Processes(workers or max(1, (os.cpu_count() or 1) // threads))
    elif name == "ray":
        engine = _Ray(workers, threads, address)
    else:
        raise ParameterError(f"engine must be 'inline', 'processes' or 'ray'; got {name!r}.")
    try:
        yield engine
    finally:
        engine.close()


class _Inline:
    """One trial at a time, here. A trial that kills its process takes this one along; it is run again next time."""

    workers = 1

    def submit(self, study: Study, trial: Trial, budget: Budget) -> "Future[Result]":
        # A file, so that arms may write bytes to sys.stdout.buffer here as on the other engines.
        with tempfile.TemporaryDirectory(prefix="heedful-") as folder:
            log = Path(folder) / "log"
            with (
                log.open("w", encoding="utf-8", errors="replace") as output,
                contextlib.redirect_stdout(output),
                contextlib.redirect_stderr(output),
            ):
                result = _execute_in_time(study, trial, budget)
            future: Future[Result] = Future()
            future.set_result(_with_log(result, log))
        return future

    def close(self) -> None:
        pass


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise in the block after ``seconds``, where alarms exist and this is the main thread; elsewhere there is no limit."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(signum, frame):
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _execute_in_time(study: Study, trial: Trial, budget: Budget) -> Result:
    try:
        with _time_limit(budget.timeout_s):
            return execute(study, trial, budget)
    except TimeIsUp:
        return _timed_out(budget)


class _Processes:
    """A pool of spawned processes, a trial at a time each; one that hangs or dies takes nothing along but its trial."""

    def __init__(self, workers: int):
        from pebble import ProcessPool

        self.workers = workers
        self._pool = ProcessPool(max_workers=workers, context=get_context("spawn"))
        self._logs = tempfile.TemporaryDirectory(prefix="heedful-")

    def submit(self, study: Study, trial: Trial, budget: Budget) -> "Future[Result]":
        try:
            pickle.dumps(study)
        except Exception as error:
            raise InputError(
                f"Study {study.slug!r} cannot be sent to worker processes ({error}). Write its arms and tasks as functions "
                'of a module, with functools.partial for their settings, or choose engine="inline".'
            ) from error
        log = Path(self._logs.name) / trial.key
        arguments = [execute, study, trial, budget, log]
        try:
            inner = self._pool.schedule(_logged, args=arguments, timeout=budget.timeout_s)
        except RuntimeError as error:
            raise _broken(error) from error
        outer: Future[Result] = Future()

        def finish(future: Future) -> None:
            try:
                outer.set_result(self._result(future, budget, log))
            except BaseException as error:  # Without it the runner would wait forever.
                outer.set_exception(error)

        inner.add_done_callback(finish)
        return outer

    def _result(self, future: Future, budget: Budget, log: Path) -> Result:
        from pebble import ProcessExpired

        try:
            result = future.result()
        except (TimeoutError, concurrent.futures.TimeoutError):
            result = _timed_out(budget)
        except ProcessExpired as death:
            result = Result("failed", _death(death.exitcode))
        except BrokenProcessPool as error:
            raise _broken(error) from error
        except BaseException as error:
            result = Result("failed", f"{type(error).__name__}: {error}")
        result = _with_log(result, log)
        log.unlink(missing_ok=True)
        return result

    def close(self) -> None:
        self._pool.stop()
        self._pool.join()
        self._logs.cleanup()


def _broken(error: BaseException) -> ChildProcessError:
    return ChildProcessError(
        f"The worker processes do not start, or die without a trial ({error}). A script must call run_study under "
        '`if __name__ == "__main__":`, and they must be able to import what it imports. engine="inline" needs none.'
    )


def _logged(run: Callable, study: Study, trial: Trial, budget: Budget, log: Path) -> Result:
    """``run`` the trial with all output of this process, C libraries' too, in ``log``, which outlives the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        return run(study, trial, budget)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, saved in zip((1, 2), kept, strict=True):
            os.dup2(saved, descriptor)
            os.close(saved)


class _Ray:
    """Ray Core tasks, on a local Ray of ``workers`` CPUs × ``threads``, or on the cluster at ``address``."""

    def __init__(self, workers: int | None, threads: int, address: str | None):
        try:
            import ray
        except ImportError as error:
            raise MissingExtraError('engine="ray" needs Ray: pip install "heedful[ray]".') from error
        self._ray = ray
        self._mine = not ray.is_initialized()
        if self._mine:
            options: dict = {"address": address, "log_to_driver": False, "logging_level": "error"}
            if address is None:  # A local Ray sees the modules that this process sees; a cluster has its own.
                options["num_cpus"] = threads * (workers or max(1, (os.cpu_count() or 1) // threads))
                options["include_dashboard"] = False
                options["runtime_env"] = {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}}
            ray.init(**options)
        self.workers = workers or max(1, int(ray.cluster_resources().get("CPU", 1)) // threads)
        self._task = ray.remote(num_cpus=threads, max_retries=0)(_execute_captured)

    def submit(self, study: Study, trial: Trial, budget: Budget) -> "Future[Result]":
        reference = self._task.remote(study, trial, budget)
        outer: Future[Result] = Future()
        # The worker keeps the limit itself; this one is for a trial stuck outside of Python, and allows for start-up.
        patience = budget.timeout_s + _RAY_START_S
        limit = threading.Timer(patience, lambda: self._ray.cancel(reference, force=True))
        limit.daemon = True
        limit.start()

        def finish(future: Future) -> None:
            over = not limit.is_alive()
            limit.cancel()
            outer.set_result(self._result(future, budget, over))

        reference.future().add_done_callback(finish)
        return outer

    def _result(self, future: Future, budget: Budget, over: bool) -> Result:
        try:
            return future.result()
        except BaseException as error:
            if over:
                return _timed_out(budget)
            if isinstance(error, self._ray.exceptions.WorkerCrashedError):
                return Result("failed", _death(None))
            return Result(
                "failed", f"Ray could not run it: {str(error).strip().splitlines()[-1]}", log=tail(str(error))
            )

    def close(self) -> None:
        if self._mine:
            self._ray.shutdown()


def _execute_captured(study: Study, trial: Trial, budget: Budget) -> Result:
    with tempfile.TemporaryDirectory(prefix="heedful-") as folder:
        log = Path(folder) / "log"
        return _with_log(_logged(_execute_in_time, study, trial, budget, log), log)


def _with_log(result: Result, log: Path) -> Result:
    """The result with what the trial printed, as far as there is a file of it, before its traceback."""
    output = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return dataclasses.replace(result, log=tail(output + result.log))


def _timed_out(budget: Budget) -> Result:
    return Result("failed", f"passed its time limit of {budget.timeout_s:g} s")


def _death(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        known = -exitcode in set(signal.Signals)  # real-time signals have no name
        name = signal.Signals(-exitcode).name if known else f"signal {-exitcode}"
        hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
        return f"its process was killed by {name}{hint}"
    return f"its process ended{'' if exitcode is None else f' with exit status {exitcode}'} before the trial did"
