"""Side-by-side timing: a figure is a ratio of two things measured in turns in one run, never a time by itself."""

import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from heedful._machine import fingerprint

RESULTS = Path(__file__).parent.parent / "docs" / "evidence" / "benchmarks"


def side_by_side(
    contestants: Mapping[str, Callable[[], Any]], *, rounds: int = 15, warmup: int = 2
) -> dict[str, list[float]]:
    """Seconds of each contestant in each round; a round calls every one once, in an order that rotates."""
    names = list(contestants)
    for _ in range(warmup):
        for name in names:
            contestants[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.perf_counter()
            contestants[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: Mapping[str, list[float]], of: str, to: str) -> dict[str, float]:
    """Median and quartiles of the per-round ratio ``of`` / ``to``, with both medians in seconds."""
    rounds = [a / b for a, b in zip(seconds[of], seconds[to], strict=True)]
    low, middle, high = statistics.quantiles(rounds, n=4)
    return {
        "ratio": middle,
        "quartiles": [low, high],
        f"{of}_s": statistics.median(seconds[of]),
        f"{to}_s": statistics.median(seconds[to]),
        "rounds": len(rounds),
    }


def record(slug: str, figures: Mapping[str, Any]) -> None:
    """Write the figures with the machine they were measured on, and print them."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    result = {"slug": slug, "machine": fingerprint(), "figures": figures}
    (RESULTS / f"{slug}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(figures, indent=2))
