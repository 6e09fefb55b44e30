"""Every arm on a miniature task, and what makes the comparison fair."""

import functools
import pickle

import numpy as np
import pytest
import torch

from heedful import data
from heedful.evidence import Budget, TrialRecord
from heedful.merge.tal import TaskAwareLearngene
from heedful.studies import _features, tal
from heedful.studies._features import N_FEATURES
from heedful.studies.tal import HELD_OUT, SEEN, ImageTask, study

TINY = Budget(seeds=1, passes=5, steps=12, tasks=("mnist", "mnist_200", "rotated_mnist_200"))
HYPERNETWORK_ARMS = ("logah_per_task", "tal_no_task", "tal_no_teacher", "tal")


@pytest.fixture
def toys(tmp_path, monkeypatch):
    """Images of noise under the names of the real ones, and a teacher that is none."""

    @functools.cache
    def load(name):
        rng = np.random.default_rng(len(name))
        shape = (32, 32, 3) if name == "cifar10" else (28, 28)
        return data.Images(
            x_train=rng.integers(0, 256, (1700, *shape), np.uint8),
            y_train=np.arange(1700) % 10,
            x_test=rng.integers(0, 256, (100, *shape), np.uint8),
            y_test=np.arange(100) % 10,
            class_names=tuple("0123456789"),
        )

    def compute(images):
        return np.random.default_rng(0).random((len(images), N_FEATURES), np.float32)

    monkeypatch.setenv("HEEDFUL_DATA", str(tmp_path))
    monkeypatch.setattr(data, "load", load)
    monkeypatch.setattr(_features, "_compute", compute)
    small = [{"depth": 1, "width": width, "n_heads": 4} for width in (8, 16, 24)]
    for name, value in {
        "POOL": small[:2],
        "UNSEEN": small,
        "LARGE": {**small[-1], "depth": 2},
        "HYPERNETWORK": {**tal.HYPERNETWORK, "hidden": 16, "rank": 4},
        "N_VALIDATION": 60,
        "N_TEST": 60,
    }.items():
        monkeypatch.setattr(tal, name, value)
    tal._pool.cache_clear()
    tal._rows.cache_clear()
    yield
    tal._rows.cache_clear()
    tal._pool.cache_clear()


@pytest.mark.parametrize("arm", study.arms)
def test_arm_runs_and_repeats(toys, arm):
    task = tal.image_task("rotated_mnist_200", split="test", seed=3)
    run, settings = study.arms[arm].run, study.arms[arm].points[0]
    first, second = (run(task, budget=TINY, seed=3, **settings) for _ in range(2))
    assert set(first.metrics) == {metric.name for metric in study.metrics}
    assert all(np.isfinite(value) for value in first.metrics.values())
    assert first == second
    assert first.costs["passes of fine-tuning"] == TINY.steps
    assert [step for step, _ in first.curves["accuracy"]] == [0, 10, 12]


@pytest.mark.parametrize("arm", HYPERNETWORK_ARMS)
def test_hypernetworks_take_the_passes_that_are_declared(toys, arm, monkeypatch):
    taken = []

    def counted(method):
        original = getattr(TaskAwareLearngene, method)

        def run(self, *args, steps, **options):
            taken.append(steps)
            return original(self, *args, steps=steps, **options)

        monkeypatch.setattr(TaskAwareLearngene, method, run)

    counted("pretrain")
    counted("tune")
    task = tal.image_task("mnist", split="validation", seed=0)
    outcome = study.arms[arm].run(task, budget=TINY, seed=0, **study.arms[arm].points[0])
    seen = 2  # mnist and mnist_200; the third task of the budget is held out
    assert sum(taken) == (TINY.passes // seen if arm == "logah_per_task" else TINY.passes)
    assert outcome.costs["passes before"] == TINY.passes


def test_hypernetworks_are_trained_once_and_pretraining_is_shared(toys, monkeypatch):
    trained = []
    for method in ("pretrain", "tune"):
        original = getattr(TaskAwareLearngene, method)

        def run(self, *args, original=original, method=method, **options):
            trained.append(method)
            return original(self, *args, **options)

        monkeypatch.setattr(TaskAwareLearngene, method, run)
    for arm in ("tal", "tal", "tal_no_task", "tal_no_teacher"):
        for name in ("mnist", "rotated_mnist_200"):
            task = tal.image_task(name, split="validation", seed=0)
            study.arms[arm].run(task, budget=TINY, seed=0, lr=1e-3)
    assert trained == ["pretrain", "tune", "tune", "pretrain", "tune"]


def test_no_hypernetwork_is_tuned_on_a_task_that_is_held_out(toys, monkeypatch):
    told = []
    monkeypatch.setattr(
        TaskAwareLearngene, "tune", lambda self, pool, tasks, **options: told.append(set(tasks)) or self
    )
    tal._tuned(0, TINY, teacher=False, embedded=False)
    tal._tuned(0, Budget(seeds=1, passes=5, steps=12), teacher=False, embedded=False)
    assert told == [{"mnist", "mnist_200"}, set(SEEN)]
    assert not set(SEEN) & set(HELD_OUT)
    assert set(SEEN) | set(HELD_OUT) == set(study.tasks)


def test_unseen_architectures_are_deeper_or_wider_than_any_of_the_pool():
    deepest, widest = (max(member[size] for member in tal.POOL) for size in ("depth", "width"))
    assert all(network["depth"] > deepest or network["width"] > widest for network in tal.UNSEEN)


def test_every_arm_is_given_the_same_network_and_the_same_batches(toys):
    task = tal.image_task("mnist_200", split="validation", seed=0)
    networks = [tal._network(tal.UNSEEN[0], 10, seed=5).state_dict() for _ in range(2)]
    assert all(torch.equal(networks[0][name], networks[1][name]) for name in networks[0])
    one, other = (list(task.batches(8, seed=1)) for _ in range(2))
    assert len(one) == 8
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", study.tasks)
def test_tasks_are_built_as_declared(toys, name):
    validation, test = (tal.image_task(name, split=split, seed=0) for split in ("validation", "test"))
    assert torch.equal(validation.images, test.images)
    n_classes = {"animals": 6, "vehicles": 4}.get(name.removesuffix("_200"), 10)
    assert validation.n_classes == test.n_classes == n_classes
    assert set(test.labels.tolist()) == set(range(n_classes))
    assert len(test.held_out_images) == pytest.approx(tal.N_TEST * n_classes / 10, rel=0.5)
    assert len(test.images) == 200 or not name.endswith("_200")
    assert test.embedding.shape == (N_FEATURES,)
    later = tal.image_task(name, split="test", seed=1)
    assert torch.equal(later.held_out_images, test.held_out_images)
    if name.endswith("_200"):
        assert not torch.equal(later.images, test.images)
    rows = torch.cat([test.images, validation.held_out_images, test.held_out_images]).flatten(1)
    assert len(rows.unique(dim=0)) == len(rows)  # no image in two parts


def test_changed_tasks_show_the_same_images_changed(toys):
    build = functools.partial(tal.image_task, split="test", seed=0)
    plain, turned = build("mnist"), build("rotated_mnist")
    torch.testing.assert_close(turned.images, plain.images.rot90(1, (2, 3)))
    torch.testing.assert_close(build("inverted_fashion").images, -build("fashion").images, rtol=1e-5, atol=1e-5)
    cifar, animals = build("cifar10"), build("animals")
    assert torch.equal(animals.images, cifar.images[(cifar.labels >= 2) & (cifar.labels <= 7)])


class Numbered(torch.nn.Module):
    """Says class i of the ith image."""

    def forward(self, x):
        return torch.eye(len(x))


def test_a_task_in_memory_is_standardised_and_scored_in_percent(toys):
    images = np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3), np.uint8)
    labels = np.arange(40) % 4
    task = ImageTask.of(images, labels, images[:4], np.array([0, 1, 2, 0]), split="test")
    assert task.n_classes == 4
    assert task.images.mean() == pytest.approx(0, abs=1e-5)
    assert task.images.std() == pytest.approx(1, abs=1e-3)
    assert torch.equal(task.images[:4], task.held_out_images)
    assert task.accuracy(Numbered()) == 75.0
    fewer = ImageTask.of(images[:9], labels[:9], images[:4], labels[:4], split="test")
    assert [len(y) for _, y in fewer.batches(3, seed=0)] == [9, 9, 9]  # fewer than a batch


def test_the_study_travels_to_other_processes_and_its_claims_name_its_tasks():
    copy = pickle.loads(pickle.dumps(study))
    assert list(copy.tasks) == list(study.tasks)
    assert {task for claim in study.claims for task in claim.tasks or ()} == set(study.tasks)
    assert {len(arm.points) for arm in study.arms.values()} == {2}


def test_a_users_own_task_is_one_that_nothing_was_tuned_on(toys):
    images = np.random.default_rng(0).integers(0, 256, (64, 32, 32, 3), np.uint8)

    def build(*, split, seed):
        return ImageTask.of(images, np.arange(64) % 3, images, np.arange(64) % 3, split=split)

    mine = study.with_task("mine", tal.Task(build))
    task = mine.build_task("mine", split="test", seed=0)
    outcome = tal.tal(task, budget=TINY, seed=0, lr=1e-3)
    assert np.isfinite(outcome.metrics["area"])


def record(arm, seed, *accuracies, passes=0):
    return TrialRecord(
        key=f"{arm}-{seed}",
        study="tal",
        task="mnist",
        arm=arm,
        settings={},
        seed=seed,
        split="test",
        status="done",
        costs={"passes before": passes},
        curves={"accuracy": list(zip((0, 10, 50), accuracies, strict=True))},
    )


def test_networks_to_recover_are_passes_over_the_steps_that_a_start_saves():
    trials = [
        record("random", 0, 10.0, 30.0, 70.0),
        record("tal", 0, 30.0, 60.0, 90.0, passes=300),  # 70 % after 10 + 40/3 steps, random after 50
        record("random", 1, 10.0, 50.0, 60.0),
        record("tal", 1, 10.0, 5.0, 50.0, passes=300),  # 50 % after 50 steps, random after 10
    ]
    assert tal.networks_to_recover(trials[:2]) == pytest.approx(300 / (40 - 40 / 3))
    assert tal.networks_to_recover(trials) == np.inf  # (26.7 − 40) / 2 steps are lost
    assert tal.networks_to_recover(trials, arm="random") == np.inf


def test_weight_selection_leaves_the_head_and_takes_from_a_trained_network(toys):
    large = tal._large(0, TINY)
    task = tal.image_task("vehicles_200", split="validation", seed=0)
    network = tal._network(tal.UNSEEN[0], task.n_classes, seed=0)
    head = network.head.weight.clone()
    tal.select_weights(network, large, exclude=["head.*"])
    assert torch.equal(network.head.weight, head)
    untrained = tal._network(tal.LARGE, 10, seed=0)
    assert not torch.equal(large.norm.weight, untrained.norm.weight)
    again = tal._large(0, TINY)  # from the disk
    assert all(torch.equal(a, b) for a, b in zip(large.parameters(), again.parameters(), strict=True))
