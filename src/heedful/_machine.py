"""The machine a number was measured on, and how long and how much memory a call takes."""

import contextlib
import dataclasses
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from heedful._results import Report
from heedful._validation import require_number

_PACKAGES = ("heedful", "torch", "numpy", "scipy", "scikit-learn", "pandas")


def fingerprint() -> dict[str, Any]:
    """What a reader must know to judge a measurement: processor, cores, memory, system, versions."""
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": versions,
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@dataclasses.dataclass(frozen=True)
class Timing(Report):
    """Seconds per call: median, fastest and slowest of ``n`` calls."""

    median: float
    fastest: float
    slowest: float
    n: int


def time_call(fn: Callable[[], Any], *, n_timings: int = 30, warmup: int = 10) -> Timing:
    """Time ``fn()`` by the wall clock, ``n_timings`` >= 1 times, after ``warmup`` calls that do not count."""
    require_number(n_timings, "n_timings", low=1, integer=True)
    for _ in range(warmup):
        fn()
    seconds = []
    for _ in range(n_timings):
        start = time.perf_counter()
        fn()
        seconds.append(time.perf_counter() - start)
    return Timing(statistics.median(seconds), min(seconds), max(seconds), n_timings)


class PeakMemory:
    """How far the resident memory of this process rose above its level at entry, in MiB (0 until the block ends)."""

    mib: float = 0.0


@contextlib.contextmanager
def peak_memory() -> Iterator[PeakMemory]:
    """Measure the peak of resident memory inside the block, relative to its start.

    Linux resets the process's high-water mark at entry, so the peak belongs to the block alone. Elsewhere the mark
    covers the life of the process, and a block that stays below an earlier peak reads 0. Blocks do not nest: an inner
    one resets the mark of the outer.
    """
    peak = PeakMemory()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before = psutil.Process().memory_info().rss
    try:
        yield peak
    finally:
        peak.mib = max(0.0, (_high_water() - before) / 2**20)


def _high_water() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
