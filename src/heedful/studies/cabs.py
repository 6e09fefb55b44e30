"""Does pruning that avoids conflicts and keeps balance merge better than pruning each task vector alone?

Every arm merges the same fine-tunes of one base at the same density; they differ in which entries of the task vectors they
keep. A merge has one scale λ, chosen for each task and arm from the same eight values. Each model keeps its own head. What
is spent are evaluations of merged models: eight to choose the scale, one afterwards.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from heedful import data
from heedful._random import torch_generator
from heedful.evidence import Arm, Budget, Claim, Metric, Outcome, Study, Task
from heedful.merge import MergeMethod, available_methods, merge_state_dicts, sparsity_report
from heedful.studies._language_suite import news_and_fiction
from heedful.studies._merge_suite import IMAGE_SOURCES, TEXT_SOURCES, MergeSuite, images, texts

SCALES = [0.3, 0.45, 0.65, 1.0, 1.5, 2.2, 3.2, 4.6]


@runtime_checkable
class MergeTask(Protocol):
    """What the arms merge, and are scored by.

    For state dicts in memory, ``Merging`` is one already::

        # my_tasks.py
        from heedful.studies.cabs import Merging


        def build(*, split, seed):
            base = my_base()
            models = {"law": my_law_model(seed), "code": my_code_model(seed)}
            rows = my_validation() if split == "validation" else my_test()

            def score(state):  # higher is better, 0 is the floor; heads, which are not merged, are yours to attach
                return {task: my_accuracy(state, task, rows) for task in models}

            return Merging(base, models, score, density=0.1, split=split)

    ``base`` is a state dict and ``models`` maps each task to one of the same tensors, ``density`` is the share that pruning
    methods keep, and ``relative(state)`` gives, for each task, the score of a merged state in % of what the task's own
    model scores. All of them are the same for the same seed. ``split`` is what ``build`` was asked for: on "validation",
    where scales are chosen, scores are all that is measured.
    """

    base: Mapping[str, Tensor]
    models: Mapping[str, Mapping[str, Tensor]]
    density: float
    split: str

    def relative(self, state: Mapping[str, Tensor]) -> Mapping[str, float]: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Merging:
    """A ``MergeTask`` on state dicts in memory.

    Parameters
    ----------
    base : dict of str to Tensor
    models : dict of str to dict of str to Tensor
        By task, a fine-tune of the base.
    score : callable
        From a state dict to a score for each task; higher is better and 0 the floor.
    density : float
        The share of each task vector that pruning methods keep, in (0, 1].
    own : mapping of str to float, optional
        What each task's own model scores; by default found by ``score``.
    split : {"validation", "test"}
        What was asked for; collisions are measured on "test" alone.
    """

    base: Mapping[str, Tensor]
    models: Mapping[str, Mapping[str, Tensor]]
    score: Callable[[Mapping[str, Tensor]], Mapping[str, float]]
    density: float
    _: dataclasses.KW_ONLY
    split: str
    own: Mapping[str, float] | None = None

    def relative(self, state: Mapping[str, Tensor]) -> dict[str, float]:
        """Score of ``state`` on each task, in % of what the task's own model scores."""
        own = self.own or {task: self.score(model)[task] for task, model in self.models.items()}
        return {task: 100 * score / own[task] for task, score in self.score(state).items()}


def merge(task: MergeTask, *, budget: Budget, seed: int, method: str, **settings: Any) -> Outcome:
    """The arm of every method: merge once, score once. The seed draws what is random, and which model comes first."""
    merger = available_methods()[method]
    if "density" in merger.model_defaults:
        settings["density"] = task.density
    order = np.random.default_rng(seed).permutation(len(task.models))
    models = [list(task.models.values())[i] for i in order]
    merged = merge_state_dicts(task.base, models, method=method, random_state=seed, **settings)
    relative = list(task.relative(merged).values())
    metrics = {"normalised_accuracy": float(np.mean(relative)), "worst_task": float(min(relative))}
    if task.split == "test":
        metrics |= _collisions(task.base, models, merger, merger.settings(len(models), **settings), seed)
    return Outcome(metrics=metrics, costs={"evaluations": 1})


def _collisions(
    base: Mapping[str, Tensor],
    models: Sequence[Mapping[str, Tensor]],
    merger: MergeMethod,
    settings: Mapping[str, Any],
    seed: int,
) -> dict[str, float]:
    """How much of what is kept of the task vectors overlaps, and how unevenly it lies in blocks of 256."""
    masks: list[dict[str, Tensor]] | None = None
    if merger.prune is not None:
        masks = [{} for _ in models]
        generator = torch_generator(seed)
        for name, start in base.items():
            vectors = merger.prune(start, [model[name] for model in models], generator=generator, **settings)
            for mask, vector in zip(masks, vectors, strict=True):
                mask[name] = vector != 0
    total = sparsity_report(base, models, masks=masks).iloc[-1]
    return {"overlap": float(total["overlap"]), "imbalance": float(total["block_imbalance"])}


# Tasks: images or texts × how many models × density.


def _task(
    build: Callable[..., MergeSuite], n_tasks: int, density: float, *, split: Literal["validation", "test"], seed: int
) -> Merging:
    suite = build(split=split, seed=seed, n_tasks=n_tasks)
    return Merging(suite.base, suite.models, suite.accuracy, density, split=split, own=suite.fine_tuned)


def smollm2(*, split: Literal["validation", "test"], seed: int) -> Merging:
    """A language model's fine-tunes to news and to fiction, at density 0.1; what is compared are inverse perplexities.

    No task of the study itself, because it takes longer than that may. Run it with
    ``heedful study cabs --quick --task heedful.studies.cabs:smollm2``.
    """
    suite = news_and_fiction(split=split, seed=seed)
    return Merging(suite.base, suite.models, suite.score, 0.1, split=split, own=suite.own)


_TASKS = {
    f"{kind}_k{n_tasks}_d{round(100 * density)}": Task(
        functools.partial(_task, build, n_tasks, density), data=data.checksums(*sources)
    )
    for build, kind, sources, n_tasks, density in (
        (images, "images", IMAGE_SOURCES, 2, 0.1),
        (images, "images", IMAGE_SOURCES, 4, 0.1),
        (images, "images", IMAGE_SOURCES, 4, 0.25),
        (texts, "texts", TEXT_SOURCES, 2, 0.1),
        (texts, "texts", TEXT_SOURCES, 4, 0.1),
    )
}
_SPARSE = tuple(name for name in _TASKS if name.endswith("_d10"))


def _arm(method: str, *, aware: bool = False, **fixed: Any) -> Arm:
    return Arm(functools.partial(merge, method=method, **fixed), grid={"scale": SCALES}, aware=aware)


study = Study(
    slug="cabs",
    question="Does pruning that avoids conflicts and keeps balance merge better than pruning each task vector alone?",
    tasks=_TASKS,
    arms={
        "linear": Arm(functools.partial(merge, method="linear"), untuned="an average of models has no scale"),
        "task_arithmetic": _arm("task_arithmetic"),
        "magnitude": _arm("magnitude"),
        "breadcrumbs": _arm("breadcrumbs"),
        "ties": _arm("ties"),
        "dare_linear": _arm("dare_linear"),
        "bs_only": _arm("bs_only", m=32),
        "ca_only": _arm("ca_only"),
        "cabs": _arm("cabs", m=32, aware=True),
        "cabs_m256": _arm("cabs", m=256, aware=True),
    },
    metrics=[
        Metric("normalised_accuracy", "%", better="higher"),
        Metric("worst_task", "%", better="higher"),
        Metric("overlap", better="lower"),
        Metric("imbalance", better="lower"),
    ],
    claims=[
        *(
            Claim("cabs", beats=other, on="normalised_accuracy", tasks=_SPARSE)
            for other in ("magnitude", "dare_linear", "ties", "bs_only", "ca_only")
        ),
        *(
            Claim("cabs", beats=other, on="worst_task", tasks=_SPARSE, exploratory=True)
            for other in ("magnitude", "dare_linear", "ties")
        ),
        *(
            Claim("cabs", beats=other, on="normalised_accuracy", exploratory=True)
            for other in ("task_arithmetic", "breadcrumbs", "cabs_m256")
        ),
    ],
    budgets={
        "quick": Budget(seeds=3, tasks=("images_k2_d10",)),
        "full": Budget(seeds=5, tuning_seeds=2),
    },
    protocol=MergeTask,
    unit="evaluations of merged models",
)
