"""What the harness costs: overhead of a trial, gain from a second worker, time to start the package and the command."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from heedful.evidence import Arm, Budget, Metric, Outcome, Study, Task, run_study
from measure import ratio, record, side_by_side


def build(*, split, seed):
    return seed


def nothing(task, *, budget, seed):
    return Outcome({"value": float(task)})


def spin(task, *, budget, seed):
    """Two seconds of this process's own processor time."""
    end = time.process_time() + 2.0
    while time.process_time() < end:
        pass
    return Outcome({"value": float(task)})


def study(run, seeds):
    return Study(
        slug="bench",
        question="What does the harness cost?",
        tasks={"only": Task(build)},
        arms={"only": Arm(run, untuned="nothing to tune")},
        metrics=[Metric("value", better="higher")],
        claims=[],
        budgets={"full": Budget(seeds=seeds)},
    )


def fresh_run(run, seeds, **options):
    with tempfile.TemporaryDirectory() as folder:
        return run_study(study(run, seeds), store=Path(folder) / "trials.sqlite", **options)


def python(code: str):
    return lambda: subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def main() -> None:
    fresh_run(nothing, 1, engine="inline")
    start = time.perf_counter()
    fresh_run(nothing, 200, engine="inline")
    overhead = (time.perf_counter() - start) / 200

    one = {t.seed: t.metrics for t in fresh_run(nothing, 4, engine="processes", workers=1).trials}
    assert one == {t.seed: t.metrics for t in fresh_run(nothing, 4, engine="processes", workers=2).trials}
    workers = side_by_side(
        {
            "one_worker": lambda: fresh_run(spin, 12, engine="processes", workers=1),
            "two_workers": lambda: fresh_run(spin, 12, engine="processes", workers=2),
        },
        rounds=3,
        warmup=0,
    )
    starts = side_by_side(
        {
            "python": python("pass"),
            "import_heedful": python("import heedful"),
            "heedful_help": python(
                "import sys; sys.argv = ['heedful', '--help']; from heedful.cli import main; main()"
            ),
        },
        rounds=15,
    )
    record(
        "evidence",
        {
            "seconds per trial beyond the trial itself, inline": overhead,
            "one worker / two workers, 12 equal trials of 2 s": ratio(workers, "one_worker", "two_workers"),
            "import heedful / bare python": ratio(starts, "import_heedful", "python"),
            "heedful --help / bare python": ratio(starts, "heedful_help", "python"),
        },
    )


if __name__ == "__main__":
    main()
