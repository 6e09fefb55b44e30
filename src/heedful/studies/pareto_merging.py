"""Does one learned Pareto set trade tasks better than one merge, and than averaging the models by preference?

Every arm gets the same fine-tunes of one base and makes merged models for given preferences; arms that are blind to
preferences have one model for all. Those that learn do so on the same 500 unlabelled inputs a task, with the same number of
steps of Adam on batches of 16 for each set or model that they learn, and choose among as many learning rates as the others
among scales. ``adamerging_per_preference`` learns a model anew for each preference, so it is measured at few of them: every
task alone, equal, and each task in favour. It is what a set would cost many times the steps to do without.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from heedful import data
from heedful.evidence import Arm, Budget, Claim, Metric, Outcome, Study, Task
from heedful.merge import ParetoSet, fit_pareto_set, fit_pareto_set_unlabelled, hypervolume, merge_state_dicts
from heedful.merge.pareto_merging._scalarization import simplex_lattice
from heedful.merge.pareto_merging._unlabelled import adamerging as learn_coefficients
from heedful.studies._merge_suite import IMAGE_SOURCES, MergeSuite, images, texts

_State = Mapping[str, Tensor]
_Split = Literal["validation", "test"]

RANK, BATCH_SIZE, TIES_DENSITY = 16, 16, 0.2


@runtime_checkable
class PreferenceTask(Protocol):
    """What the arms merge, learn on, and are scored by.

    For models in memory, ``Tradeoff`` is one already::

        # my_tasks.py
        from heedful.studies.pareto_merging import Tradeoff


        def build(*, split, seed):
            base, models = (
                my_base(),
                {"law": my_law_model(seed), "code": my_code_model(seed)},
            )  # state dicts of one shape
            rows = my_validation() if split == "validation" else my_test()

            def score(state):  # accuracy in % for each task, of a merged body under the task's own head
                return {task: my_accuracy(state, my_heads[task], rows[task]) for task in models}

            return Tradeoff(base, models, my_body, my_heads, my_unlabelled_inputs, score, split=split)

    ``base`` is a state dict, ``models`` maps each task to a fine-tuned one, ``heads`` each task to a frozen module from the
    body's output to logits. ``body()`` is a new module that takes such states, ``unlabelled(task)`` a tensor of inputs that
    neither train nor are scored, ``accuracy(state)`` a mapping from task to accuracy in %. All of them are the same for the
    same seed. ``split`` is what ``build`` was asked for: on "validation" the hypervolume alone is measured, coarsely.
    """

    base: _State
    models: Mapping[str, _State]
    heads: Mapping[str, nn.Module]
    split: _Split

    def body(self) -> nn.Module: ...
    def unlabelled(self, task: str) -> Tensor: ...
    def accuracy(self, state: _State) -> Mapping[str, float]: ...


# Arms that are blind to preferences: one model for all.


def task_arithmetic(task: PreferenceTask, *, budget: Budget, seed: int, scale: float) -> Outcome:
    """θ_0 + λ Σ V_k."""
    merged = merge_state_dicts(task.base, task.models, method="task_arithmetic", scale=scale)
    return _measure(task, budget, lambda _: merged, blind=True)


def ties(task: PreferenceTask, *, budget: Budget, seed: int, scale: float) -> Outcome:
    """The same of task vectors that are trimmed to their largest fifth and reduced to the elected signs."""
    settings: dict[str, Any] = {"density": TIES_DENSITY, "normalize": False}
    merged = merge_state_dicts(task.base, task.models, method="ties", scale=scale, **settings)
    return _measure(task, budget, lambda _: merged, blind=True)


def adamerging(task: PreferenceTask, *, budget: Budget, seed: int, lr: float) -> Outcome:
    """λ of each tensor learned, for the sum of entropies."""
    merged = learn_coefficients(**_unlabelled(task, seed), steps=budget.steps, lr=lr)
    return _measure(task, budget, lambda _: merged, blind=True, steps=budget.steps)


# Arms that follow a preference.


def weighted_average(task: PreferenceTask, *, budget: Budget, seed: int) -> Outcome:
    """Σ γ_k θ_k: rewarded soups. All models are kept."""

    def model_for(preference: np.ndarray) -> _State:
        return merge_state_dicts(None, task.models, method="linear", weight=preference.tolist())

    return _measure(task, budget, model_for, storage=len(task.models))


def preference_scaled_task_arithmetic(task: PreferenceTask, *, budget: Budget, seed: int, scale: float) -> Outcome:
    """θ_0 + K λ Σ γ_k V_k. All models and the base are kept."""

    def model_for(preference: np.ndarray) -> _State:
        scales = (len(preference) * scale * preference).tolist()
        return merge_state_dicts(task.base, task.models, method="task_arithmetic", scale=scales)

    return _measure(task, budget, model_for, storage=len(task.models) + 1)


def adamerging_per_preference(task: PreferenceTask, *, budget: Budget, seed: int, lr: float) -> Outcome:
    """AdaMerging anew for each preference, whose weights its objective takes."""

    def model_for(preference: np.ndarray) -> _State:
        return learn_coefficients(**_unlabelled(task, seed), preference=preference, steps=budget.steps, lr=lr)

    k = len(task.models)
    few = _equal(k) if task.split == "validation" else np.vstack([np.eye(k), _equal(k), _priorities(k)])
    return _measure(task, budget, model_for, preferences=few, storage=len(few), steps=budget.steps)


def pareto_merging_data_free(
    task: PreferenceTask, *, budget: Budget, seed: int, rank: int, target_scale: float
) -> Outcome:
    """A Pareto set of the weights alone."""
    settings: dict[str, Any] = {"rank": rank, "target_scale": target_scale, "include": ["*"], "random_state": seed}
    return _measure_set(task, budget, fit_pareto_set(task.base, task.models, **settings))


def pareto_merging(task: PreferenceTask, *, budget: Budget, seed: int, lr: float, base_lr: float) -> Outcome:
    """A Pareto set learned on unlabelled inputs."""
    settings: dict[str, Any] = {"lr": lr, "base_lr": base_lr, "rank": RANK, "include": ["*"], "random_state": seed}
    learned = fit_pareto_set_unlabelled(**_unlabelled(task, seed), steps=budget.steps, **settings)
    return _measure_set(task, budget, learned, steps=budget.steps)


def _unlabelled(task: PreferenceTask, seed: int) -> dict[str, Any]:
    """What learners are given: the same batches in the same order, whatever the arm."""
    generator = torch.Generator().manual_seed(seed)
    batches = {}
    for name in task.models:
        inputs = task.unlabelled(name)
        batches[name] = inputs[torch.randperm(len(inputs), generator=generator)].split(BATCH_SIZE)
    return {
        "model": task.body(),
        "base": task.base,
        "models": task.models,
        "batches": batches,
        "heads": task.heads,
    }


# Measurement.


def _measure_set(task: PreferenceTask, budget: Budget, pareto: ParetoSet, *, steps: int = 0) -> Outcome:
    size = sum(tensor.numel() for tensor in task.base.values())
    return _measure(task, budget, pareto.state_dict, storage=1 + pareto.n_extra_parameters / size, steps=steps)


def _measure(
    task: PreferenceTask,
    budget: Budget,
    model_for: Callable[[np.ndarray], _State],
    *,
    blind: bool = False,
    preferences: np.ndarray | None = None,
    storage: float = 1.0,
    steps: int = 0,
) -> Outcome:
    """Score the models for a lattice of preferences (or those given), for equal preference and for each priority.

    ``steps`` are those of one call of ``model_for`` if that is where an arm learns, which ``preferences`` then tell.
    """
    calls = []

    @functools.cache
    def scores(preference: tuple[float, ...]) -> list[float]:
        calls.append(preference)
        accuracy = task.accuracy(model_for(np.array(preference)))
        return [accuracy[name] for name in task.models]

    def scored(rows: np.ndarray) -> np.ndarray:
        return np.array([scores(() if blind else tuple(row.tolist())) for row in rows])

    k = len(task.models)
    spread = _lattice(k, 5 if task.split == "validation" else budget.divisions) if preferences is None else preferences
    reference = task.accuracy(task.base)
    corner = np.array([reference[name] for name in task.models])
    values = scored(spread)
    metrics = {"hypervolume": 100 * hypervolume(values, corner) / float(np.prod(100 - corner))}
    if task.split == "test":
        metrics |= {
            "equal_accuracy": float(scored(_equal(k)).mean()),
            "priority_accuracy": float(np.diagonal(scored(_priorities(k))).mean()),
            "response": float(np.mean([_rank_correlation(spread[:, i], values[:, i]) for i in range(k)])),
            "storage": float(storage),
        }
    return Outcome(metrics=metrics, costs={"steps": steps * (len(calls) if preferences is not None else 1)})


def _lattice(k: int, divisions: int) -> np.ndarray:
    """Preferences in steps of 1/``divisions`` for two tasks, and of twice that for three."""
    parts = max(1, round(divisions / (k - 1)))
    return simplex_lattice(k, math.comb(parts + k - 1, k - 1))


def _equal(k: int) -> np.ndarray:
    return np.full((1, k), 1 / k)


def _priorities(k: int) -> np.ndarray:
    """Row i is in favour of task i: half of the weight, and the rest shared equally; for two tasks 3/4."""
    share = 0.5 if k > 2 else 0.75
    return np.where(np.eye(k, dtype=bool), share, (1 - share) / (k - 1))


def _rank_correlation(preferences: np.ndarray, values: np.ndarray) -> float:
    """Spearman's; 0 for what does not respond at all."""
    return float(spearmanr(preferences, values).statistic) if np.ptp(values) > 0 and np.ptp(preferences) > 0 else 0.0


# Tasks.


@dataclasses.dataclass(frozen=True, eq=False)
class Tradeoff:
    """A ``PreferenceTask`` in memory.

    Parameters
    ----------
    base : dict of str to Tensor
    models : dict of str to dict of str to Tensor
        By task, a fine-tune of the base.
    new_body : callable
        ``new_body()`` is a new module that such states can be loaded into.
    heads : mapping of str to Module
        By task, from the body's output to logits.
    inputs_of : callable
        From a task to its unlabelled inputs.
    score : callable
        From a state dict to an accuracy in % for each task.
    split : {"validation", "test"}
        What was asked for.
    """

    base: _State
    models: Mapping[str, _State]
    new_body: Callable[[], nn.Module]
    heads: Mapping[str, nn.Module]
    inputs_of: Callable[[str], Tensor]
    score: Callable[[_State], Mapping[str, float]]
    _: dataclasses.KW_ONLY
    split: _Split

    def body(self) -> nn.Module:
        return self.new_body()

    def unlabelled(self, task: str) -> Tensor:
        return self.inputs_of(task)

    def accuracy(self, state: _State) -> Mapping[str, float]:
        return self.score(state)


def _task(build: Callable[..., MergeSuite], n_tasks: int, *, split: _Split, seed: int) -> Tradeoff:
    suite = build(split=split, seed=seed, n_tasks=n_tasks)
    return Tradeoff(suite.base, suite.models, suite.body, suite.heads, suite.unlabelled, suite.accuracy, split=split)


def text_pair(*, split: _Split, seed: int) -> Tradeoff:
    """Film reviews and BBC subjects: ``heedful study pareto_merging --task heedful.studies.pareto_merging:text_pair``.

    Left out of the budgets of the study, which it would exceed by itself.
    """
    return _task(texts, 2, split=split, seed=seed)


# The study.

_SCALES = {"scale": [0.3, 0.6, 0.9]}
_COEFFICIENT_RATES = {"lr": [0.001, 0.003, 0.01]}

study = Study(
    slug="pareto_merging",
    question=(
        "Does one learned Pareto set trade tasks better than one merge, and than averaging the models by preference?"
    ),
    tasks={
        f"images_k{n_tasks}": Task(functools.partial(_task, images, n_tasks), data=data.checksums(*IMAGE_SOURCES))
        for n_tasks in (2, 3)
    },
    arms={
        "task_arithmetic": Arm(task_arithmetic, grid=_SCALES),
        "ties": Arm(ties, grid={"scale": [0.6, 1.2, 2.0]}),
        "adamerging": Arm(adamerging, grid=_COEFFICIENT_RATES),
        "weighted_average": Arm(weighted_average, untuned="an average of the models has no setting"),
        "preference_scaled_task_arithmetic": Arm(preference_scaled_task_arithmetic, grid=_SCALES),
        "adamerging_per_preference": Arm(adamerging_per_preference, grid=_COEFFICIENT_RATES),
        "pareto_merging_data_free": Arm(
            pareto_merging_data_free,
            grid=[
                {"rank": rank, "target_scale": target_scale}
                for rank, target_scale in ((4, 1.0), (RANK, 1.0), (RANK, 1.4))
            ],
            aware=True,
        ),
        "pareto_merging": Arm(
            pareto_merging,
            grid=[
                {"lr": lr, "base_lr": base_lr}  # of factors, and of coefficients
                for lr, base_lr in ((0.0001, 0.003), (0.0001, 0.01), (0.0003, 0.01))
            ],
            aware=True,
        ),
    },
    metrics=[
        Metric("hypervolume", "%", better="higher"),
        Metric("equal_accuracy", "%", better="higher"),
        Metric("priority_accuracy", "%", better="higher"),
        Metric("response", better="higher"),
        Metric("storage", "models", better="lower"),
    ],
    claims=[
        Claim("pareto_merging", beats="adamerging", on="equal_accuracy"),
        Claim("pareto_merging", beats="weighted_average", on="hypervolume"),
        Claim("pareto_merging_data_free", beats="task_arithmetic", on="priority_accuracy"),
        *(
            Claim("pareto_merging", beats=other, on="hypervolume", exploratory=True)
            for other in ("preference_scaled_task_arithmetic", "adamerging_per_preference")
        ),
        Claim("pareto_merging_data_free", beats="weighted_average", on="hypervolume", exploratory=True),
    ],
    budgets={
        "quick": Budget(seeds=3, tasks=("images_k2",), steps=40, divisions=10),
        "full": Budget(seeds=4, steps=100, divisions=20),
    },
    protocol=PreferenceTask,
    unit="optimisation steps for each model or set that is learned",
)
