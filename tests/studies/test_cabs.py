"""Every arm on a miniature task, and what makes the comparison fair."""

import pickle

import numpy as np
import pytest
import torch

from heedful import data
from heedful.errors import InputError
from heedful.evidence import Budget, Task
from heedful.merge import merge_state_dicts
from heedful.studies import cabs
from heedful.studies.cabs import SCALES, Merging, study

BUDGET = Budget(seeds=1)


def draw(generator, scale):
    return {"w": scale * torch.randn(32, 32, generator=generator), "b": scale * torch.randn(10, generator=generator)}


def tiny(split="test", n_tasks=3, density=0.1):
    """Three models at random around a base; a merged one scores higher the closer it is to a task's own."""
    generator = torch.Generator().manual_seed(0)
    base = draw(generator, 1.0)
    models = {}
    for task in "abc"[:n_tasks]:
        delta = draw(generator, 0.1)
        models[task] = {name: tensor + delta[name] for name, tensor in base.items()}

    def score(state):
        return {
            task: 1 / (1 + sum(float((state[name] - model[name]).square().sum()) for name in base))
            for task, model in models.items()
        }

    return Merging(base, models, score, density, split=split)


def build(*, split, seed):
    return tiny(split)


@pytest.mark.parametrize("arm", study.arms)
def test_arm_merges_once_and_repeats(arm):
    run, settings = study.arms[arm].run, study.arms[arm].points[0]
    first, second = (run(tiny(), budget=BUDGET, seed=3, **settings) for _ in range(2))
    assert set(first.metrics) == {metric.name for metric in study.metrics}
    assert all(np.isfinite(value) for value in first.metrics.values())
    assert first == second
    assert first.costs == {"evaluations": 1}


@pytest.mark.parametrize("arm", study.arms)
def test_collisions_are_measured_on_the_test_split_alone(arm):
    run, settings = study.arms[arm].run, study.arms[arm].points[0]
    outcome = run(tiny("validation"), budget=BUDGET, seed=0, **settings)
    assert set(outcome.metrics) == {"normalised_accuracy", "worst_task"}


def collisions(arm, **changes):
    point = {"scale": 1.0} if study.arms[arm].grid else {}
    return study.arms[arm].run(tiny(**changes), budget=BUDGET, seed=0, **point).metrics


def test_cabs_alone_is_balanced_and_free_of_overlap():
    assert {arm for arm in study.arms if collisions(arm)["overlap"] == 0} == {"cabs", "cabs_m256", "ca_only"}
    assert collisions("task_arithmetic")["overlap"] == collisions("linear")["overlap"] == 1
    assert collisions("cabs")["imbalance"] < collisions("ca_only")["imbalance"]
    assert collisions("bs_only")["imbalance"] < collisions("magnitude")["imbalance"]


def test_pruning_arms_keep_the_share_that_the_task_names(monkeypatch):
    asked = {}
    monkeypatch.setattr(
        cabs, "merge_state_dicts", lambda *a, **k: asked.update({k["method"]: k}) or merge_state_dicts(*a, **k)
    )
    for arm in study.arms.values():
        arm.run(tiny(density=0.25), budget=BUDGET, seed=0, **arm.points[0])
    assert {method for method, given in asked.items() if "density" not in given} == {"linear", "task_arithmetic"}
    assert {given.get("density", 0.25) for given in asked.values()} == {0.25}


def test_the_seed_draws_which_model_comes_first(monkeypatch):
    task, firsts = tiny("validation"), []
    monkeypatch.setattr(
        cabs,
        "merge_state_dicts",
        lambda base, models, **k: firsts.append(models[0]) or merge_state_dicts(base, models, **k),
    )
    for seed in range(10):
        study.arms["cabs"].run(task, budget=BUDGET, seed=seed, scale=1.0)
    assert all(any(first is model for first in firsts) for model in task.models.values())


def test_scores_are_in_percent_of_the_models_own():
    task = tiny()
    relative = task.relative(task.models["b"])
    assert relative["b"] == 100
    assert relative["a"] < 100
    given = Merging(task.base, task.models, task.score, 0.1, split="test", own=dict.fromkeys("abc", 0.5))
    assert given.relative(task.models["b"])["b"] == 200


def test_scales_are_the_same_eight_for_every_arm_that_has_one():
    assert {name for name, arm in study.arms.items() if arm.grid is None} == {"linear"}
    assert all(arm.grid == {"scale": SCALES} for arm in study.arms.values() if arm.grid)
    assert len(SCALES) == 8


def test_the_study_travels_to_other_processes_and_claims_are_about_the_sparsest_tasks():
    assert list(pickle.loads(pickle.dumps(study)).tasks) == list(study.tasks)
    assert {task for claim in study.claims if not claim.exploratory for task in claim.tasks} == {
        "images_k2_d10",
        "images_k4_d10",
        "texts_k2_d10",
        "texts_k4_d10",
    }
    assert all(task.data == data.checksums(*task.data) for task in study.tasks.values())


def test_a_task_of_ones_own_takes_the_place_of_the_shipped_ones():
    own = study.with_task("own", Task(build))
    assert own.build_task("own", split="test", seed=0).density == 0.1
    with pytest.raises(
        InputError, match=r"(?s)must build an object with base, models, density, split, relative; .*Merging"
    ):
        study.with_task("own", Task(lambda *, split, seed: object())).build_task("own", split="test", seed=0)
