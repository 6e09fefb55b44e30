"""Every arm on a miniature task, and what makes the comparison fair."""

import dataclasses
import functools
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from heedful import data
from heedful.compress._patterns import diagonal_mask
from heedful.errors import InputError
from heedful.evidence import Budget, Task
from heedful.studies import dynadiag
from heedful.studies._small_nets import mlp
from heedful.studies.dynadiag import DiagonalTraining, study

TINY = Budget(seeds=1, portion=0.5, adaptations=4)
COUNTS = {"accuracy", "bits"}
LAYOUT = dict.fromkeys(study.arms, "diagonal") | {"dense": "dense"}
LAYOUT |= dict.fromkeys(("static_unstructured", "rigl", "set"), "csr")


def tiny(split="test", **changes):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 4, generator=generator), torch.randint(3, (30,), generator=generator)
    return DiagonalTraining(
        build_network=functools.partial(mlp, (4, 10, 20, 3)),
        inputs=x[:20],
        targets=y[:20],
        held_out_inputs=x[20:],
        held_out_targets=y[20:],
        batch_size=8,
        split=split,
        **{"sparsity": 0.8, "steps": 16} | changes,
    )


@pytest.fixture(autouse=True)
def _few_timings(monkeypatch):
    monkeypatch.setattr(dynadiag, "TIMINGS", dict.fromkeys(dynadiag.TIMINGS, 1))


def run(arm, split="test", seed=3, **changes):
    return study.arms[arm].run(tiny(split, **changes), budget=TINY, seed=seed, lr=0.01)


@pytest.mark.parametrize("arm", study.arms)
def test_arm_measures_everything_and_repeats(arm):
    first, second = (run(arm) for _ in range(2))
    assert set(first.metrics) == {metric.name for metric in study.metrics}
    assert all(np.isfinite(value) for value in first.metrics.values())
    assert {name: first.metrics[name] for name in COUNTS} == {name: second.metrics[name] for name in COUNTS}
    assert (first.costs, first.curves) == (second.costs, second.curves)


def test_nothing_is_timed_on_the_validation_split():
    assert set(run("dynadiag", "validation").metrics) == COUNTS


@pytest.fixture
def finals(monkeypatch):
    """The final models, in the order in which arms train them."""
    models, train = [], dynadiag.train

    def recorded(*args, **settings):
        models.append(train(*args, **settings).model)
        return train(*args, **settings)

    monkeypatch.setattr(dynadiag, "train", recorded)
    return models


def dense_weight(layer):
    return layer.weight if isinstance(layer, nn.Linear) else layer.dense_weight()


@pytest.mark.parametrize("arm", study.arms)
def test_sparse_arms_end_with_equally_many_weights_of_their_pattern(arm, finals):
    run(arm, "validation")
    weight = dense_weight(finals[0][3])
    assert weight.shape == (20, 10)
    nonzero = weight != 0
    if LAYOUT[arm] == "dense":
        assert nonzero.all()
        return
    assert 30 <= nonzero.sum() <= 40  # 4 diagonals of 10; a weight that was just grown may still be zero
    offsets = torch.nonzero(
        torch.tensor([bool(nonzero[diagonal_mask((20, 10), torch.tensor([o]))].any()) for o in range(20)])
    )
    assert (len(offsets) <= 4) == (LAYOUT[arm] == "diagonal")


@pytest.mark.parametrize("layout", ["dense", "csr", "diagonal"])
@pytest.mark.parametrize("batch_size", [1, 7])
def test_timed_products_are_those_of_the_layer(layout, batch_size):
    layer = nn.Linear(10, 20, bias=False)
    with torch.no_grad():
        layer.weight *= diagonal_mask((20, 10), torch.tensor([1, 5, 6, 19]))
    x = torch.randn(batch_size, 10, generator=torch.Generator().manual_seed(0))
    y = dynadiag._product(layer, layout, 0.8)(x)
    y = y.reshape(20, batch_size).mT if layout == "csr" else y
    torch.testing.assert_close(y, layer(x).detach())


def test_costs_by_hand():
    """Of a step with 8 examples; 40 + 60 dense weights at the ends, and 40 of 200 between them; 8 steps in all."""
    costs = {arm: run(arm, "validation").costs for arm in study.arms}
    assert {cost["steps"] for cost in costs.values()} == {8}
    per_pass = 8 * 2 / 1e9
    sparse, full = 3 * per_pass * (100 + 40), 3 * per_pass * (100 + 200)
    expected = dict.fromkeys(study.arms, sparse) | {"dense": full}
    expected["dynadiag_soft"] = 0.75 * full + 0.25 * sparse
    expected |= dict.fromkeys(("rigl", "diag_heuristic"), sparse + per_pass * 160 / 8)  # adapts at step 5 of 8 alone
    assert {arm: cost["gflop_a_step"] for arm, cost in costs.items()} == pytest.approx(expected)
    assert {arm: cost["weights_kib"] for arm, cost in costs.items()} == dict.fromkeys(study.arms, 160 / 1024) | {
        "dense": 800 / 1024
    }
    indices = {"dense": 0, "csr": 4 * (40 + 21) / 1024, "diagonal": 4 * 4 / 1024}
    assert {arm: cost["indices_kib"] for arm, cost in costs.items()} == {arm: indices[LAYOUT[arm]] for arm in costs}


def test_a_sparsity_that_cuts_a_diagonal_is_refused():
    with pytest.raises(
        InputError, match=r"Sparsity 0\.88 leaves 2\.4 diagonals of the \(20, 10\) weight of layer '3'\. Choose a width"
    ):
        run("rigl", sparsity=0.88)


def test_every_shipped_task_leaves_whole_diagonals():
    for name, task in study.tasks.items():
        sparsity, build = task.build.keywords["sparsity"], task.build.func.__name__
        network = {
            "fashion_mixer": dynadiag._MIXER,
            "fashion_wide": dynadiag._WIDE,
            "digits_mlp": dynadiag._MLP,
            "sotu_gpt": dynadiag._GPT,
        }[build]
        ends = ("last",) if build == "sotu_gpt" else ("first", "last")
        like_it = dataclasses.replace(tiny(), build_network=network, sparsity=sparsity, dense_layers=ends)
        assert dynadiag._sparse_layers(like_it, like_it.network(0))
        assert name.startswith(build)


def test_patches_hold_neighbouring_pixels():
    image = torch.arange(28 * 28.0).view(1, 28, 28)
    patches = dynadiag._patches(image)
    assert patches.shape == (1, 16, 49)
    assert torch.equal(patches[0, 6].view(7, 7), image[0, 7:14, 14:21])


@pytest.mark.parametrize(
    ("name", "inputs", "held_out"),
    [
        ("digits_mlp_90", (700, 64), {"validation": (300, 64), "test": (797, 64)}),
        ("fashion_mixer_90", (4800, 16, 49), {"validation": (2000, 16, 49), "test": (4000, 16, 49)}),
        ("fashion_wide_90", (960, 196), {"validation": (2000, 196), "test": (4000, 196)}),
        ("sotu_gpt_90", (1000, 64), {"validation": (250, 64), "test": (250, 64)}),
    ],
)
def test_tasks_are_split_as_declared(name, inputs, held_out):
    for source in study.tasks[name].data:
        if not data.is_cached(source):
            pytest.skip(f"the data set {source} is not in the cache of this machine, and tests fetch nothing")
    for split, shape in held_out.items():
        task = study.build_task(name, split=split, seed=0)
        assert (task.inputs.shape, task.held_out_inputs.shape) == (inputs, shape)
        logits = task.network(0)(task.inputs[:2])
        assert logits.shape[:-1] == task.targets[:2].shape
    other = study.build_task(name, split="test", seed=1)
    assert torch.equal(other.held_out_inputs, task.held_out_inputs)
    assert not torch.equal(other.inputs, task.inputs)


def test_targets_of_a_text_are_its_next_bytes():
    if not data.is_cached("sotu"):
        pytest.skip("the data set sotu is not in the cache of this machine, and tests fetch nothing")
    task = study.build_task("sotu_gpt_90", split="test", seed=0)
    assert torch.equal(task.inputs[:, 1:], task.targets[:, :-1])


def test_the_study_travels_to_other_processes_and_runs_alone():
    copy = pickle.loads(pickle.dumps(study))
    assert list(copy.tasks) == list(study.tasks)
    assert {len(arm.points) for arm in study.arms.values()} == {3}
    assert study.timed


def test_a_task_of_ones_own_takes_the_place_of_the_shipped_ones():
    own = study.with_task("own", Task(lambda *, split, seed: tiny(split)))
    assert own.build_task("own", split="test", seed=0).sparsity == 0.8
    with pytest.raises(
        InputError,
        match=r"(?s)an object with split, dense_layers, sparsity, steps, network, batches, score; .*DiagonalTraining",
    ):
        study.with_task("own", Task(lambda *, split, seed: object())).build_task("own", split="test", seed=0)
