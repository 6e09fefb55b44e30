"""Results of studies that never ran, for whatever shows results."""

import math

import numpy as np

from heedful.evidence import Arm, Budget, Claim, Metric, Outcome, Study, Task
from heedful.evidence._result import StudyResult, TrialRecord
from heedful.evidence._verdicts import judge

MACHINE = {
    "processor": "Example CPU @ 2.50GHz",
    "cores": 2,
    "memory_gib": 7.8,
    "system": "Linux x86_64",
    "python": "3.11.2",
    "packages": {"heedful": "0.1.0", "torch": "2.6.0", "numpy": "2.1.0"},
}


def never_run(task, *, budget, seed, **settings) -> Outcome:
    raise AssertionError("a fake result needs no trial")


def never_built(*, split, seed):
    raise AssertionError("a fake result needs no task")


def make_result(
    study: Study, score, *, budget="quick", failed=None, curve=None, settings=None, cost=None, log="", command=None
) -> StudyResult:
    """The result of ``study`` if its trials had scored ``score(task, arm, seed) -> metrics``.

    ``failed`` maps (task, arm, seed) to a reason, ``curve(task, arm, seed)`` gives curves, ``cost(task, arm, seed)`` costs,
    ``settings(task, arm)`` the settings chosen, None if every setting failed.
    """
    spend, failed, trials = study.budgets[budget], failed or {}, []
    tasks = spend.tasks or tuple(study.tasks)
    chosen = {(task, arm): (settings or (lambda *_: {}))(task, arm) for task in tasks for arm in study.arms}
    for task in tasks:
        for arm in study.arms:
            for seed in range(spend.seeds if chosen[task, arm] is not None else 0):
                reason = failed.get((task, arm, seed))
                trials.append(
                    TrialRecord(
                        key=f"{task}/{arm}/{seed}",
                        study=study.slug,
                        task=task,
                        arm=arm,
                        settings=chosen[task, arm],
                        seed=seed,
                        split="test",
                        status="failed" if reason else "done",
                        reason=reason or "",
                        log=log if reason else "",
                        metrics={} if reason else score(task, arm, seed),
                        costs={}
                        if reason
                        else (cost or (lambda *_: {"seconds": 1.0, "peak_mib": 50.0}))(task, arm, seed),
                        curves={} if reason or curve is None else curve(task, arm, seed),
                        code="0.1.0+0123456789ab",
                        started="2026-02-03T04:05:06+00:00",
                        machine=MACHINE,
                    )
                )
    return StudyResult(
        study=study,
        budget_name=budget,
        budget=spend,
        trials=tuple(trials),
        tuning=(),
        chosen=chosen,
        verdicts=judge(study, trials, budget=spend),
        machine=MACHINE,
        command=command or f"heedful study {study.slug} --budget {budget}",
    )


def small_study(
    *, arms=("tsam", "sam", "sgd"), tasks=("digits", "fashion"), claims=None, seeds=5, slug="tsam"
) -> Study:
    """Two tasks, three arms, an accuracy and a curvature."""
    aware, *blind = arms
    points = [{"lr": lr, "rho": rho} for lr in (0.01, 0.03) for rho in (0.05, 0.1)]
    return Study(
        slug=slug,
        question="Does averaging over the whole neighbourhood find flatter minima that test better than SAM’s worst point?",
        tasks=dict.fromkeys(tasks, Task(never_built)),
        arms={
            aware: Arm(never_run, points, aware=True),
            **{arm: Arm(never_run, points) for arm in blind[:-1]},
            blind[-1]: Arm(never_run, untuned="plain steps have no radius"),
        },
        metrics=[
            Metric("accuracy", "%", better="higher"),
            Metric("curvature", better="lower"),
        ],
        claims=claims
        or [
            Claim(aware, beats=blind[0], on="accuracy"),
            Claim(aware, beats=blind[-1], on="accuracy", margin=0.5),
            Claim(aware, beats=blind[-1], on="curvature"),
            Claim(aware, beats=blind[0], on="curvature", exploratory=True),
        ],
        budgets={"quick": Budget(seeds=seeds, gradients=4000)},
        unit="gradients",
    )


def small_result(*, failures=True, seed=0, **kwargs) -> StudyResult:
    """A plausible result with claims that hold, are contradicted and stay open, and with failed trials."""
    study = small_study(**kwargs)
    arms, tasks = list(study.arms), list(study.tasks)
    rng = np.random.default_rng(seed)
    noise = {key: rng.normal(size=6) for key in _cells(study)}
    shared = {(task, s): rng.normal() for task in tasks for s in range(100)}
    level = {arm: 1.0 - i / (len(arms) - 1) for i, arm in enumerate(arms)}  # 1 for the aware arm, 0 for the last

    def score(task, arm, s):
        a, b, *_ = noise[task, arm, s]
        harder = tasks.index(task)
        accuracy = 95 - 9 * harder + (1.1 - 1.7 * harder) * level[arm] + 0.3 * a + 0.6 * shared[task, s]
        return {"accuracy": accuracy, "curvature": math.exp(3 - 2.2 * level[arm] + 0.25 * b + harder)}

    def cost(task, arm, s):
        seconds = (2.0 if level[arm] else 1.0) * (3.1 + tasks.index(task)) * math.exp(0.05 * noise[task, arm, s][2])
        return {"seconds": seconds, "peak_mib": 61.0 + 24 * level[arm] + noise[task, arm, s][3], "gradients": 4000.0}

    def curve(task, arm, s):
        a = noise[task, arm, s][4]
        step = np.linspace(0, 4000, 400)
        loss = 2.3 * np.exp(-step / (500 + 300 * level[arm] + 40 * a)) + 0.05 + 0.03 * level[arm]
        return {
            "training loss": list(zip(step.tolist(), (loss * (1 + 0.05 * np.sin(step / 90 + a))).tolist(), strict=True))
        }

    def settings(task, arm):
        return {"lr": 0.03, "rho": 0.1 if tasks.index(task) else 0.05} if level[arm] else {}

    failed = {(tasks[0], arms[1], 4): "passed its time limit of 600 s", (tasks[-1], arms[1], 1): "curvature is nan"}
    log = (
        'Traceback (most recent call last):\n  File "train.py", line 12, in step\nFloatingPointError: overflow in exp\n'
    )
    return make_result(
        study, score, cost=cost, curve=curve, settings=settings, failed=failed if failures else {}, log=log
    )


def many_tasks_result(*, n_tasks=75, n_arms=7, seeds=10, slug="isotonic") -> StudyResult:
    """As large as studies get: dozens of tasks, seven arms, ten seeds, a curve in every trial."""
    blind = ["raw", "ovr", "fir", "scir", "temperature", "dirichlet"][: n_arms - 1]
    models = ["naive_bayes", "forest", "mlp", "logistic", "neighbours"]
    tasks = [
        f"{('digits', 'fashion', 'news')[i % 3]}-{models[i // 3 % 5]}-{200 * 3 ** (i // 15)}" for i in range(n_tasks)
    ]
    rng = np.random.default_rng(1)
    study = Study(
        slug=slug,
        question="Does knowing that probabilities add up to one make isotonic calibration better than one-vs-rest?",
        tasks=dict.fromkeys(tasks, Task(never_built)),
        arms={
            "na_fir": Arm(never_run, untuned="its partition is the data’s", aware=True),
            **{arm: Arm(never_run, untuned="no settings") for arm in blind},
        },
        metrics=[
            Metric("nll", "nats", better="lower"),
            *(Metric(name, better="lower") for name in ("ece", "classwise_ece", "brier")),
            Metric("accuracy", "%", better="higher"),
        ],
        claims=[
            Claim("na_fir", beats="ovr", on="nll", pairs="tasks"),
            Claim("na_fir", beats="ovr", on="ece", pairs="tasks"),
            Claim("na_fir", beats="fir", on="nll", margin=0.002, pairs="tasks"),
            Claim("na_fir", beats="ovr", on="brier"),
        ],
        budgets={"quick": Budget(seeds=seeds, calibration_points=600)},
    )
    penalty = {arm: 0.02 * i for i, arm in enumerate(study.arms)}
    base = {task: rng.uniform(0.4, 1.4) for task in tasks}

    def score(task, arm, s):
        nll = base[task] + penalty[arm] + rng.normal(scale=0.02)
        return {
            "nll": nll,
            "ece": nll / 20,
            "classwise_ece": nll / 90,
            "brier": nll / 3,
            "accuracy": 100 * math.exp(-nll),
        }

    def curve(task, arm, s):
        return {
            "gap": [(float(i), float(v)) for i, v in enumerate(np.exp(-np.arange(100) / 9) + rng.uniform(0, 0.01, 100))]
        }

    return make_result(study, score, curve=curve)


def _cells(study: Study):
    return [(task, arm, seed) for task in study.tasks for arm in study.arms for seed in range(100)]
