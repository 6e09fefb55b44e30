"""Every arm on a miniature task, and what makes the comparison fair."""

import pickle

import numpy as np
import pytest
import torch

from heedful import data
from heedful.evidence import Budget
from heedful.optim import closure_step
from heedful.studies import tsam
from heedful.studies._small_nets import mlp
from heedful.studies.tsam import Classification, study

TINY = Budget(seeds=1, steps=4, gradients=12, neighbours=2)
PER_STEP = {"sgd": 1, "sam": 2, "average_perturbation": 3, "rsam": 2, "tsam": 6}


def tiny(equal="steps", split="test"):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 4, generator=generator), torch.randint(3, (30,), generator=generator)
    return Classification(x[:20], y[:20], x[20:], y[20:], batch_size=8, equal=equal, split=split, hidden=(5,))


@pytest.mark.parametrize("equal", ["steps", "gradients"])
@pytest.mark.parametrize("arm", study.arms)
def test_arm_spends_the_budget_and_repeats(arm, equal):
    run, settings = study.arms[arm].run, study.arms[arm].points[0]
    first, second = (run(tiny(equal), budget=TINY, seed=3, **settings) for _ in range(2))
    assert set(first.metrics) == {metric.name for metric in study.metrics}
    assert all(np.isfinite(value) for value in first.metrics.values())
    assert first == second
    assert first.costs["gradients"] == (TINY.steps * PER_STEP[arm] if equal == "steps" else TINY.gradients)


def test_flatness_is_measured_on_the_test_split_alone():
    outcome = tsam.sgd(tiny(split="validation"), budget=TINY, seed=0, lr=0.1)
    assert set(outcome.metrics) == {"accuracy"}


@pytest.mark.parametrize("arm", study.arms)
def test_costs_count_the_gradients_in_fact_taken(arm, monkeypatch):
    taken = []

    def counted(model, batch, loss_fn):
        closure = closure_step(model, batch, loss_fn)
        return lambda: taken.append(None) or closure()

    monkeypatch.setattr(tsam, "closure_step", counted)
    outcome = study.arms[arm].run(tiny(), budget=TINY, seed=0, **study.arms[arm].points[0])
    assert len(taken) == outcome.costs["gradients"]


def test_every_arm_starts_from_the_same_weights_and_sees_the_same_batches():
    task = tiny()
    for left, right in zip(task.network(1).parameters(), task.network(1).parameters(), strict=True):
        assert torch.equal(left, right)
    one, other = (list(task.batches(7, seed=1)) for _ in range(2))
    assert len(one) == 7
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(one, other, strict=True))
    assert not torch.equal(one[0][0], next(iter(task.batches(1, seed=2)))[0])


def test_an_epoch_shows_no_example_twice():
    x, y = torch.arange(20.0)[:, None], torch.zeros(20, dtype=torch.long)
    task = Classification(x, y, x, y, batch_size=8, equal="steps", split="test")
    seen = torch.cat([x for x, _ in task.batches(2, seed=0)]).flatten()
    assert len(seen.unique()) == 16


@pytest.mark.parametrize("name", ["noisy_digits_epochs", "noisy_digits_gradients"])
def test_digits_are_split_and_relabelled_as_declared(name):
    build = study.tasks[name].build
    validation, test = build(split="validation", seed=0), build(split="test", seed=0)
    assert torch.equal(validation.inputs, test.inputs)
    assert torch.equal(validation.targets, test.targets)
    assert (len(test.inputs), len(validation.held_out_inputs), len(test.held_out_inputs)) == (600, 400, 797)
    rows = torch.cat([test.inputs, validation.held_out_inputs, test.held_out_inputs])
    assert len(rows.unique(dim=0)) == 1797  # no image in two parts
    assert validation.equal == test.equal == ("steps" if name.endswith("epochs") else "gradients")
    assert not torch.equal(build(split="test", seed=1).inputs, test.inputs)


def test_no_test_image_of_any_seed_trains_or_validates_in_another():
    build = study.tasks["noisy_digits_epochs"].build
    tested = {row.numpy().tobytes() for seed in (0, 1) for row in build(split="test", seed=seed).held_out_inputs}
    assert len(tested) == 797
    for seed in (0, 1000):
        task = build(split="validation", seed=seed)
        used = {row.numpy().tobytes() for row in torch.cat([task.inputs, task.held_out_inputs])}
        assert not used & tested


@pytest.mark.parametrize(
    ("name", "sizes", "width", "wrong"),
    [
        ("fashion_epochs", (1500, 1000, 10_000), 14 * 14, 0),
        ("fashion_noisy_gradients", (1500, 1000, 10_000), 14 * 14, 450),
        ("sentiment_epochs", (3000, 1000, 6568), 256, 0),
    ],
)
def test_larger_tasks_are_split_as_declared(name, sizes, width, wrong):
    for source in study.tasks[name].data:
        if not data.is_cached(source):
            pytest.skip(f"the data set {source} is not in the cache of this machine, and tests fetch nothing")
    validation, test = (study.build_task(name, split=split, seed=0) for split in ("validation", "test"))
    assert (len(test.inputs), len(validation.held_out_inputs), len(test.held_out_inputs)) == sizes
    assert test.inputs[0].numel() == width
    assert test.inputs.mean() == pytest.approx(0, abs=0.1)
    assert test.inputs.std() == pytest.approx(1, abs=0.1)
    clean = study.build_task(name.replace("_noisy", ""), split="test", seed=0)
    assert (test.targets != clean.targets).sum() == wrong


def test_label_noise_replaces_the_share_asked_for_by_other_classes():
    y = torch.arange(1000) % 10
    noisy = tsam._relabelled(y, 0.4, n_classes=10, seed=0)
    assert (noisy != y).sum() == 400
    assert set(noisy.tolist()) == set(range(10))
    assert torch.equal(tsam._relabelled(y, 0.0, n_classes=10, seed=0), y)


def test_wrong_labels_are_spread_over_the_first_epoch():
    y = torch.zeros(600, dtype=torch.long)
    noisy = tsam._relabelled(y, 0.4, n_classes=10, seed=0)
    task = Classification(y[:, None], noisy, y, y, batch_size=30, equal="steps", split="test")
    wrong = torch.stack([(targets != 0).double().mean() for _, targets in task.batches(20, seed=0)])
    assert wrong.mean() == pytest.approx(0.4)
    assert 0.05 < wrong.min() <= wrong.max() < 0.75  # four standard deviations of a batch of 30, 0.09 each


def test_accuracy_is_in_percent_of_the_held_out_part():
    x = torch.eye(4)
    task = Classification(x, torch.arange(4), x, torch.tensor([0, 1, 2, 0]), batch_size=2, equal="steps", split="test")
    assert task.accuracy(torch.nn.Identity()) == 75.0


def test_the_study_travels_to_other_processes_and_its_claims_name_its_tasks():
    copy = pickle.loads(pickle.dumps(study))
    assert list(copy.tasks) == list(study.tasks)
    assert {len(arm.points) for arm in study.arms.values()} == {6}
    epochs = {task for claim in study.claims if not claim.exploratory for task in claim.tasks}
    assert epochs == {name for name in study.tasks if name.endswith("_epochs")}


def test_the_task_shown_to_users_follows_the_protocol():
    with_own = study.with_task("mine", tsam.Task(lambda *, split, seed: tiny()))
    assert isinstance(with_own.build_task("mine", split="test", seed=0), Classification)
    assert "Classification(" in study.protocol.__doc__


def test_mlp_has_the_widths_asked_for_and_repeats():
    net = mlp((6, 5, 2), seed=1)
    assert [tuple(p.shape) for p in net.parameters()] == [(5, 6), (5,), (2, 5), (2,)]
    assert net(torch.zeros(3, 2, 3)).shape == (3, 2)
    state = torch.get_rng_state()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), mlp((6, 5, 2), seed=1).parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())
