"""Every arm on a miniature task, and what makes the comparison fair."""

import functools
import pickle

import numpy as np
import pytest
import torch

from heedful import data
from heedful.compress import check_nm, training_flops
from heedful.errors import InputError
from heedful.evidence import Budget, Task
from heedful.studies import bame
from heedful.studies._small_nets import mlp
from heedful.studies.bame import NMTraining, study

TINY = Budget(seeds=1, steps=8, dense_steps=12, interval=2)


def tiny(split="test", **changes):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 4, generator=generator), torch.randint(3, (30,), generator=generator)
    return NMTraining(
        build_network=functools.partial(mlp, (4, 8, 16, 8, 3)),
        inputs=x[:20],
        targets=y[:20],
        held_out_inputs=x[20:],
        held_out_targets=y[20:],
        batch_size=8,
        split=split,
        **{"n": 2, "m": 8, "equal": "steps"} | changes,
    )


def run(arm, split="test", seed=3, **changes):
    return study.arms[arm].run(tiny(split, **changes), budget=TINY, seed=seed, lr=0.05)


@pytest.mark.parametrize("equal", ["steps", "flops"])
@pytest.mark.parametrize("arm", study.arms)
def test_arm_measures_everything_and_repeats(arm, equal):
    first, second = (run(arm, equal=equal) for _ in range(2))
    assert set(first.metrics) == {metric.name for metric in study.metrics}
    assert all(np.isfinite(value) for value in first.metrics.values())
    assert first == second


def test_masks_are_not_watched_on_the_validation_split():
    assert set(run("bame", "validation").metrics) == {"accuracy"}


@pytest.mark.parametrize("arm", study.arms)
def test_all_arms_but_dense_end_with_the_pattern(arm, monkeypatch):
    models, train = [], bame.train
    monkeypatch.setattr(bame, "train", lambda *a, **k: models.append(train(*a, **k)) or models[-1])
    run(arm, "validation")
    layers = [models[0].model[i].weight for i in (3, 5)]
    assert all(check_nm(weight, 2, 8, dim=1) == (arm != "dense") for weight in layers)
    assert not check_nm(models[0].model[1].weight, 2, 8, dim=1)


def test_equal_steps_or_equal_operations():
    for arm in study.arms:
        assert run(arm, "validation").costs["steps"] == TINY.steps
    spent = {arm: run(arm, "validation", equal="flops").costs for arm in study.arms}
    dense = TINY.dense_steps * 8 * 3 * 2 * (4 * 8 + 8 * 16 + 16 * 8 + 8 * 3) / 1e9
    for arm, costs in spent.items():  # to within half a step
        half_a_step = costs["gflop_dense_dx"] / costs["steps"] / 2
        assert costs["gflop_dense_dx"] == pytest.approx(dense, abs=1.001 * half_a_step), arm
        assert costs["gflop"] <= costs["gflop_dense_dx"]
    steps = [spent[arm]["steps"] for arm in ("dense", "sr_ste", "bame_warm25", "bame", "static")]
    assert steps == sorted(set(steps))


def test_costs_of_a_schedule_are_those_of_its_phases():
    costs = run("bame_warm25", "validation").costs
    count = functools.partial(training_flops, tiny().network(0), (4,), n=2, m=8, interval=2, dx="sparse")
    phases = {"sr_ste": 0.25, "bame": 0.5, "static": 0.25}
    expected = sum(share * count(method=method).total for method, share in phases.items())
    assert costs["gflop"] == pytest.approx(8 * 8 * expected / 1e9)
    assert run("bame", "validation").costs["gflop"] < costs["gflop"] < run("sr_ste", "validation").costs["gflop"]


def test_revivals_count_what_had_been_active_before():
    revivals, masks = bame._Revivals(), {}

    class Driver:
        def masks(self):
            return masks

    for active in ([0, 1], [0, 2], [0, 1], [2, 1], [2, 0]):
        # 2 is grown; then 1, which was pruned before; then 2, again; then 0, again
        masks["layer"] = torch.zeros(4, dtype=torch.bool).index_fill(0, torch.tensor(active), True)
        revivals.watch(Driver())
    assert revivals.percent == 75
    assert bame._Revivals().percent == 0


def test_without_obf_no_block_may_freeze(monkeypatch):
    thresholds, train = [], bame.train
    monkeypatch.setattr(
        bame, "train", lambda *a, **k: thresholds.append((t := train(*a, **k)).driver.freeze_threshold) or t
    )
    run("bame", "validation")
    run("bame_no_obf", "validation")
    assert thresholds == [0.1, float("inf")]


def test_fixed_masks_do_not_oscillate():
    assert {arm: run(arm).metrics["oscillating"] for arm in ("dense", "static")} == {"dense": 0, "static": 0}


def test_without_the_gate_every_block_swaps_and_with_it_none_that_would_lose():
    model = tiny().network(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    made = {}
    for kind in (bame.BAME, bame._Ungated):
        model = tiny().network(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)  # no gain is worth a weight
        driver = kind(model, optimizer, 2, 8, total_steps=4, interval=1, freeze_threshold=9.0)
        for x, y in tiny().batches(2, 0):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            driver.step()
        made[kind] = driver.stats().swapped_fraction
    assert made[bame._Ungated] == 1
    assert made[bame.BAME] < 0.5  # where a neuron is dead, a swap costs and gains nothing


@pytest.mark.parametrize(("name", "shape"), [("digits_mlp", (64,)), ("fashion_cnn", (1, 14, 14))])
def test_tasks_take_their_patterns(name, shape):
    for task_name, task in study.tasks.items():
        if not task_name.startswith(name):
            continue
        for source in task.data:
            if not data.is_cached(source):
                pytest.skip(f"the data set {source} is not in the cache of this machine, and tests fetch nothing")
        built = study.build_task(task_name, split="test", seed=0)
        assert built.inputs.shape[1:] == shape
        report = training_flops(built.network(0), shape, n=built.n, m=built.m, method="static")
        assert len(report.sparse_layers) == {"digits_mlp": 2, "fashion_cnn": 6}[name]
        assert task_name == f"{name}_{built.n}_{built.m}_{built.equal}"


def test_the_study_travels_to_other_processes_and_claims_name_its_tasks():
    copy = pickle.loads(pickle.dumps(study))
    assert list(copy.tasks) == list(study.tasks)
    assert {len(arm.points) for arm in study.arms.values()} == {3}
    assert not study.timed
    equal_steps = {task for claim in study.claims if claim.beats == "static" for task in claim.tasks}
    assert equal_steps == {name for name in study.tasks if name.endswith("_steps")}


def test_a_task_of_ones_own_takes_the_place_of_the_shipped_ones():
    own = study.with_task("own", Task(lambda *, split, seed: tiny(split)))
    assert own.build_task("own", split="test", seed=0).m == 8
    with pytest.raises(
        InputError,
        match=r"(?s)must build an object with split, dense_layers, n, m, equal, network, batches, score; .*NMTraining",
    ):
        study.with_task("own", Task(lambda *, split, seed: object())).build_task("own", split="test", seed=0)
