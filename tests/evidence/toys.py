"""A study small enough to know by heart, and arms that misbehave. Module level, so that worker processes can load it."""

import os
import signal
import time
from functools import partial
from typing import Protocol

import numpy as np
import torch

from heedful.evidence import Arm, Budget, Claim, Metric, Outcome, Study, Task


class Numbers(Protocol):
    """numbers: float array (100,), what is averaged; split: "validation" or "test"."""

    numbers: np.ndarray
    split: str


class Drawn:
    def __init__(self, level, split, seed):
        self.numbers = np.random.default_rng([seed, split == "test"]).normal(level, 1.0, size=100)
        self.split = split


def build(level, *, split, seed):
    return Drawn(level, split, seed)


def add(task, *, budget, seed, shift):
    """Score = mean + shift on the test split; on validation shift 2 looks best."""
    score = float(task.numbers.mean()) + (shift if task.split == "test" else -abs(shift - 2))
    return Outcome(
        metrics={"score": score, "spent": budget.steps},
        costs={"steps": budget.steps},
        curves={"score": [(0, 0.0), (1, score)]},
    )


def plain(task, *, budget, seed):
    return Outcome({"score": float(task.numbers.mean()), "spent": budget.steps}, {"steps": budget.steps})


def multiply(task, *, budget, seed):
    """Something whose last bits depend on threads and kernels: a product of float32 matrices, and global randomness."""
    x = torch.from_numpy(np.outer(task.numbers, task.numbers)).float()
    drawn = torch.randn(100, 100)
    value = float(torch.linalg.svdvals((x @ drawn) / 100).sum()) + float(np.random.random())
    return Outcome({"score": value, "spent": 0.0})


def fail(task, *, budget, seed, how="raise", on=(1,)):
    if seed in on:
        print("about to fail", flush=True)
        if how == "raise":
            raise ValueError("no luck today")
        if how == "nan":
            return Outcome({"score": float("nan"), "spent": 0.0})
        if how == "hang":
            time.sleep(60)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "wrong":
            return {"score": 1.0}
    return plain(task, budget=budget, seed=seed)


def sleep(task, *, budget, seed, seconds=0.3):
    time.sleep(seconds)
    return plain(task, budget=budget, seed=seed)


def note(task, *, budget, seed, folder, seconds=0.0):
    """Leave a file per run of this trial, to count how often it ran."""
    name = f"{task.split}-{seed}-{os.getpid()}-{time.monotonic_ns()}"
    open(os.path.join(folder, name), "w").close()
    time.sleep(seconds)
    return plain(task, budget=budget, seed=seed)


SCORE = (Metric("score", "points", better="higher"), Metric("spent", better="lower"))


def study(**changes):
    """``shifted`` adds 2 when tuned on validation (its grid also has 1 and 3), ``plain`` adds nothing."""
    options = {
        "slug": "toy",
        "question": "Does adding two make a number larger?",
        "tasks": {"small": Task(partial(build, 0.0), data={"normal": "abc"}), "large": Task(partial(build, 10.0))},
        "arms": {
            "plain": Arm(plain, untuned="a mean has no setting"),
            "shifted": Arm(add, grid={"shift": [1.0, 2.0, 3.0]}, aware=True),
        },
        "metrics": SCORE,
        "claims": [Claim("shifted", beats="plain", on="score")],
        "budgets": {
            "quick": Budget(seeds=3, steps=7, tasks=("small",)),
            "full": Budget(seeds=5, tuning_seeds=2, timeout_s=30, steps=70),
        },
        "protocol": Numbers,
        "unit": "steps",
    }
    return Study(**(options | changes))


def one_arm(run, *, seeds=3, timeout_s=30.0, slug="toy", **settings):
    """A study of one arm on one task, without tuning."""
    arm = Arm(partial(run, **settings), untuned="nothing to tune")
    return study(
        slug=slug,
        tasks={"small": Task(partial(build, 0.0))},
        arms={"only": arm},
        claims=[],
        budgets={"full": Budget(seeds=seeds, timeout_s=timeout_s, steps=1)},
    )
