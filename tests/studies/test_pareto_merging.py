"""Every arm on miniature models, and what makes the comparison fair."""

import pickle

import numpy as np
import pytest
import torch
from torch import nn

from heedful import data
from heedful.evidence import Budget
from heedful.merge import fit_pareto_set, hypervolume, merge_state_dicts
from heedful.studies import pareto_merging
from heedful.studies._merge_suite import IMAGE_SOURCES, TEXT_SOURCES
from heedful.studies.pareto_merging import Tradeoff, study

TINY = Budget(seeds=1, steps=3, divisions=4)
LEARNERS = ("adamerging", "adamerging_per_preference", "pareto_merging")
BLIND = ("task_arithmetic", "ties", "adamerging")


def body():
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))


def tiny(split="test", n_tasks=2):
    """Bodies near a random one, and heads that tell signs of features."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base = {name: tensor.clone() for name, tensor in body().state_dict().items()}
        models = {
            f"task{k}": {name: tensor + 0.2 * torch.randn(tensor.shape) for name, tensor in base.items()}
            for k in range(n_tasks)
        }
        heads = {name: nn.Linear(16, 3) for name in models}
        rows = torch.randn(60, 16)
        inputs = {name: torch.randn(40, 16) for name in models}

    @torch.no_grad()
    def predict(state, task):
        return heads[task](torch.func.functional_call(body(), state, (rows,))).argmax(1)

    labels = {task: predict(model, task) for task, model in models.items()}  # what the task's own model says

    def score(state):
        return {task: 100 * (predict(state, task) == labels[task]).double().mean().item() for task in models}

    return Tradeoff(base, models, body, heads, inputs.__getitem__, score, split=split)


@pytest.mark.parametrize("n_tasks", [2, 3])
@pytest.mark.parametrize("arm", study.arms)
def test_arm_measures_everything_and_repeats(arm, n_tasks):
    run, settings = study.arms[arm].run, study.arms[arm].points[0]
    first, second = (run(tiny(n_tasks=n_tasks), budget=TINY, seed=3, **settings) for _ in range(2))
    assert set(first.metrics) == {metric.name for metric in study.metrics}
    assert all(np.isfinite(value) for value in first.metrics.values())
    assert first == second
    runs = {"adamerging_per_preference": 2 * n_tasks + 1}.get(arm, int(arm in LEARNERS))
    assert first.costs == {"steps": runs * TINY.steps}
    if arm in BLIND:
        assert first.metrics["response"] == 0
        assert first.metrics["storage"] == 1
        assert first.metrics["equal_accuracy"] == pytest.approx(first.metrics["priority_accuracy"])


@pytest.mark.parametrize("arm", study.arms)
def test_only_the_hypervolume_is_measured_while_settings_are_chosen(arm):
    outcome = study.arms[arm].run(tiny("validation"), budget=TINY, seed=0, **study.arms[arm].points[0])
    assert set(outcome.metrics) == {study.tune_on} == {"hypervolume"}


def test_models_of_corners_are_the_models_themselves_for_the_average():
    task = tiny()
    outcome = pareto_merging.weighted_average(task, budget=TINY, seed=0)
    corners = [task.accuracy(model) for model in task.models.values()]
    assert [corners[0]["task0"], corners[1]["task1"]] == [100, 100]  # labels are their own predictions
    assert outcome.metrics["storage"] == 2
    base = list(task.accuracy(task.base).values())
    lattice = [merge_state_dicts(None, task.models, method="linear", weight=[w / 4, 1 - w / 4]) for w in range(5)]
    expected = hypervolume([list(task.accuracy(state).values()) for state in lattice], base)
    assert outcome.metrics["hypervolume"] == pytest.approx(100 * expected / np.prod(100 - np.array(base)))


def test_a_set_of_the_weights_at_full_rank_is_the_average():
    """Where no smoothing refines it: so what separates the two arms is rank, and the smooth Tchebycheff form."""
    task = tiny()
    pareto = fit_pareto_set(task.base, task.models, rank=16, scalarization="linear", include=["*.weight"])
    merged = merge_state_dicts(None, task.models, method="linear", weight=[0.3, 0.7])
    for name in ("0.weight", "2.weight"):
        torch.testing.assert_close(pareto.state_dict([0.3, 0.7])[name], merged[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n_tasks", [2, 3])
def test_at_equal_preference_scaled_task_arithmetic_is_task_arithmetic(n_tasks):
    task = tiny(n_tasks=n_tasks)
    blind, follows = (
        study.arms[arm].run(task, budget=TINY, seed=0, scale=0.6)
        for arm in ("task_arithmetic", "preference_scaled_task_arithmetic")
    )
    assert follows.metrics["equal_accuracy"] == pytest.approx(blind.metrics["equal_accuracy"])
    assert follows.metrics["storage"] == n_tasks + 1


def test_a_set_is_stored_as_one_model_and_its_factors():
    outcome = pareto_merging.pareto_merging_data_free(tiny(), budget=TINY, seed=0, rank=4, target_scale=1.0)
    # Two matrices of 16 × 16 with r (c + d) + K r² numbers each, beside their own and 16 biases.
    assert outcome.metrics["storage"] == pytest.approx(1 + 2 * (4 * 32 + 2 * 16) / (2 * (16 * 16 + 16)))


def test_adamerging_per_preference_learns_for_the_preferences_it_is_measured_at(monkeypatch):
    learn, told = pareto_merging.learn_coefficients, []

    def spy(**settings):
        told.append(settings["preference"].tolist())
        return learn(**settings)

    monkeypatch.setattr(pareto_merging, "learn_coefficients", spy)
    pareto_merging.adamerging_per_preference(tiny(), budget=TINY, seed=0, lr=0.01)
    assert told == [[1, 0], [0, 1], [0.5, 0.5], [0.75, 0.25], [0.25, 0.75]]


def test_learners_see_the_same_batches_and_other_seeds_other_orders():
    task = tiny()
    one, same, other = (pareto_merging._unlabelled(task, seed)["batches"] for seed in (0, 0, 1))
    for name in task.models:
        assert all(torch.equal(a, b) for a, b in zip(one[name], same[name], strict=True))
        assert not torch.equal(one[name][0], other[name][0])
        assert torch.equal(torch.cat(one[name]).sort(0).values, torch.cat(other[name]).sort(0).values)
        assert [len(batch) for batch in one[name]] == [16, 16, 8]


def test_preferences_measured_are_those_declared():
    assert len(pareto_merging._lattice(2, 20)) == 21
    assert len(pareto_merging._lattice(3, 20)) == 66
    np.testing.assert_allclose(pareto_merging._priorities(2), [[0.75, 0.25], [0.25, 0.75]])
    np.testing.assert_allclose(pareto_merging._priorities(3)[1], [0.25, 0.5, 0.25])


def test_response_is_the_rank_correlation_and_zero_where_nothing_moves():
    assert pareto_merging._rank_correlation(np.arange(5.0), np.arange(5.0) ** 3) == pytest.approx(1)
    assert pareto_merging._rank_correlation(np.arange(5.0), -np.arange(5.0)) == pytest.approx(-1)
    assert pareto_merging._rank_correlation(np.arange(5.0), np.ones(5)) == 0


def test_the_study_travels_to_other_processes_and_tunes_every_arm_alike():
    copy = pickle.loads(pickle.dumps(study))
    assert list(copy.arms) == list(study.arms)
    assert {len(arm.points) for arm in study.arms.values() if arm.grid is not None} == {3}
    assert study.arms[study.slug].aware
    with_own = study.with_task("mine", pareto_merging.Task(lambda *, split, seed: tiny(split)))
    assert isinstance(with_own.build_task("mine", split="test", seed=0), Tradeoff)
    assert "Tradeoff(" in study.protocol.__doc__


@pytest.mark.slow
@pytest.mark.parametrize("build", [*[task.build for task in study.tasks.values()], pareto_merging.text_pair])
def test_tasks_keep_what_is_scored_apart_from_what_is_learned_on(build):
    sources = TEXT_SOURCES if build is pareto_merging.text_pair else IMAGE_SOURCES
    for source in sources:
        if not data.is_cached(source):
            pytest.skip(f"the data set {source} is not in the cache of this machine, and tests fetch nothing")
    task = build(split="validation", seed=1000)
    assert task.split == "validation"
    for name in task.models:
        assert len(task.unlabelled(name)) == 500
    accuracy = task.accuracy(task.base)
    assert accuracy.keys() == task.models.keys() == task.heads.keys()
    outcome = pareto_merging.pareto_merging_data_free(task, budget=TINY, seed=0, rank=4, target_scale=1.0)
    assert np.isfinite(outcome.metrics["hypervolume"])
