"""Every arm on a miniature task, and what makes the comparison fair."""

import functools
import pickle

import numpy as np
import pytest
from sklearn.linear_model import RidgeClassifier

from heedful import data
from heedful.data import synthetic
from heedful.errors import InputError
from heedful.evidence import Budget, Task
from heedful.studies import system_aware_unlearning as module
from heedful.studies.system_aware_unlearning import BATCHES, Requests, deletion_batches, study

BUDGET = Budget(seeds=1)
TIMES = {"deletion_seconds", "fit_seconds"}


def build(*, split, seed):
    """A quarter of the labels is wrong, so that each deletion moves the accuracy."""
    test = synthetic.margin(200, 8, random_state=0)
    own = synthetic.margin(500, 8, direction=test.direction, random_state=seed + 1)
    y = own.y * np.random.default_rng(seed).choice([1, 1, 1, -1], 500)
    scored = (own.X[400:], y[400:]) if split == "validation" else (test.X, test.y)
    return Requests(own.X[:400], y[:400], deletion_batches(np.zeros(400), seed=seed), *scored)


@pytest.fixture(autouse=True)
def no_cache():
    module._projected_fashion.cache_clear()
    module._projected_mails.cache_clear()


@pytest.mark.parametrize("split", ["validation", "test"])
@pytest.mark.parametrize("arm", study.arms)
def test_arm_returns_every_metric_and_repeats(arm, split):
    run = functools.partial(study.arms[arm].run, budget=BUDGET, seed=3)
    outcomes = [run(build(split=split, seed=3), **settings) for settings in study.arms[arm].points]
    for outcome in outcomes:
        assert set(outcome.metrics) == {metric.name for metric in study.metrics}
        assert all(np.isfinite(value) for value in outcome.metrics.values())
        assert outcome.costs["deleted_rows"] == 160
        (course,) = outcome.curves.values()
        assert [x for x, _ in course] == [2.0 * i for i in range(BATCHES + 1)]
    again = run(build(split=split, seed=3), **study.arms[arm].points[0])
    left, right = ({k: v for k, v in o.metrics.items() if k not in TIMES} for o in (outcomes[0], again))
    assert left == right


def test_retraining_equals_ridge_regression_on_the_rows_that_remain():
    task = build(split="test", seed=1)
    outcome = study.arms["retrain"].run(task, budget=BUDGET, seed=1, ridge=1.0)
    remain = np.arange(400)
    expected = []
    for batch in [np.array([], int), *task.batches]:
        remain = np.setdiff1d(remain, batch)
        expected.append(
            100 * RidgeClassifier(1.0).fit(task.X[remain], task.y[remain]).score(task.X_score, task.y_score)
        )
    (course,) = outcome.curves.values()
    assert len(set(expected)) > 5
    assert [value for _, value in course] == pytest.approx(expected)
    assert outcome.metrics["last_accuracy"] == pytest.approx(expected[-1])
    assert outcome.metrics["accuracy"] == pytest.approx((sum(expected) - (expected[0] + expected[-1]) / 2) / BATCHES)


def test_both_cores_are_of_one_size_and_only_sisa_and_retraining_store_everything():
    task = build(split="test", seed=2)
    for kappa in (0.1, 0.3):
        heeded, blind = (
            study.arms[arm].run(task, budget=BUDGET, seed=2, kappa=kappa)
            for arm in ("system_aware_unlearning", "random_core")
        )
        assert heeded.costs["stored_rows"] == blind.costs["stored_rows"] < 400
        assert heeded.metrics["stored"] == heeded.costs["stored_rows"] / 4
    for arm in ("sisa", "retrain"):
        assert study.arms[arm].run(task, budget=BUDGET, seed=2, ridge=1.0).metrics["stored"] == 100


def test_the_blind_core_is_drawn_anew_with_every_seed(monkeypatch):
    drawn, forget = [], module._forget
    monkeypatch.setattr(module, "_forget", lambda *given: drawn.append(set(given[2])) or forget(*given))
    task = build(split="test", seed=0)
    for seed in (0, 0, 1):
        study.arms["random_core"].run(task, budget=BUDGET, seed=seed, kappa=0.2)
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == len(drawn[2]) > max(len(rows & set(range(len(rows)))) for rows in drawn)


def test_patients_who_give_the_scale_are_neither_learned_from_nor_scored():
    table = data.load("breast_cancer")
    tasks = [study.build_task("breast_cancer_uniform", split=split, seed=0) for split in ("validation", "test")]
    used = {row.tobytes() for task in tasks for X in (task.X, task.X_score) for row in X}
    assert len(used) == len(table.y) - 69
    public = np.random.default_rng(0).permutation(len(table.y))[:69]
    scaled = (table.X - table.X[public].mean(axis=0)) / table.X[public].std(axis=0)
    unit = scaled / np.linalg.norm(scaled, axis=1, keepdims=True)
    assert used == {row.tobytes() for row in np.delete(unit, public, axis=0)}


def test_batches_delete_two_fifths_lower_ranks_first():
    rank = np.repeat([2, 0, 1], 50)
    batches = deletion_batches(rank, seed=0)
    deleted = np.concatenate(batches)
    assert len(batches) == BATCHES
    assert {len(batch) for batch in batches} == {3}
    assert len(set(deleted)) == 60
    assert rank[deleted].tolist() == [0] * 50 + [1] * 10
    assert set(rank[np.concatenate(deletion_batches(np.zeros(150), seed=0))]) == {0, 1, 2}
    assert not np.array_equal(np.concatenate(deletion_batches(rank, seed=1)), deleted)


@pytest.mark.parametrize("name", ["margin_5k_uniform", "breast_cancer_label", "digits_group", "digits_binary_label"])
def test_shipped_task_has_new_rows_for_every_seed_and_one_test(name):
    first, again, other = (study.build_task(name, split="test", seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.X, again.X)
    np.testing.assert_array_equal(np.concatenate(first.batches), np.concatenate(again.batches))
    assert not np.array_equal(first.X, other.X)
    np.testing.assert_array_equal(first.X_score, other.X_score)
    np.testing.assert_allclose(np.linalg.norm(first.X, axis=1), 1, atol=1e-9)
    validation = study.build_task(name, split="validation", seed=0)
    np.testing.assert_array_equal(validation.X, first.X)
    rows = [{row.tobytes() for row in X} for X in (first.X, first.X_score, validation.X_score)]
    assert not rows[0] & rows[1] | rows[0] & rows[2] | rows[1] & rows[2]
    assert np.concatenate(first.batches).size == round(0.4 * len(first.y))


def test_streams_take_the_larger_class_first_or_whole_groups():
    task = study.build_task("digits_binary_label", split="test", seed=0)
    larger = np.bincount(task.y).argmax()
    assert all((task.y[batch] == larger).all() for batch in task.batches)  # which has more than two fifths of the rows
    rows = module._LOADERS["digits"][0](0)
    rank = module._rank(rows, "group", seed=0)
    by_group = [np.unique(rank[rows.groups == group]) for group in np.unique(rows.groups)]
    assert all(len(ranks) == 1 for ranks in by_group)
    assert len(np.unique(np.concatenate(by_group))) == len(by_group)


def test_mails_are_words_of_subject_and_body_and_groups_are_domains(monkeypatch, tmp_path):
    monkeypatch.setenv("HEEDFUL_DATA", str(tmp_path))
    head = "From list Thu Aug 22 2002\nFrom: {}\nSubject: {}\nX-List: {}\n\n{}\n"
    mails = [
        head.format("Ann <ann@A.org>", "cheap", "one", "buy now"),
        head.format("bob@a.org (Bob)", "cheap", "two", "buy now"),
        head.format("eve@b.net", "cheap", "one", "meeting tomorrow"),
        "no head at all",
    ]
    form = data.Texts(tuple(mails), np.array([1, 1, 0, 0]), ("ham", "spam"))
    monkeypatch.setattr(data, "load", lambda name: form)
    made = module._projected_mails()
    assert made["X"].shape == (4, 200)
    np.testing.assert_array_equal(made["X"][0], made["X"][1])  # other lists and names, the same words
    assert not np.array_equal(made["X"][0], made["X"][2])
    assert made["groups"][0] == made["groups"][1] != made["groups"][2]
    assert made["y"].tolist() == [1, 1, 0, 0]


def test_fashion_is_seen_through_one_projection(monkeypatch):
    rng = np.random.default_rng(0)
    draw = functools.partial(rng.integers, 0, 256, dtype=np.uint8)
    images = data.Images(
        draw(size=(12_000, 28, 28)),
        np.arange(12_000) % 10,
        draw(size=(30, 28, 28)),
        np.arange(30) % 10,
        tuple("abcdefghij"),
    )
    monkeypatch.setattr(data, "load", lambda name: images)
    task = study.build_task("fashion_binary_label", split="test", seed=0)
    assert task.X.shape == (10_000, 100)
    assert task.X_score.shape == (30, 100)
    assert set(task.y) == {0, 1}
    assert study.build_task("fashion_uniform", split="validation", seed=0).X_score.shape == (2_000, 100)


def test_arms_have_equal_grids_and_claims_name_tasks_that_exist():
    assert {len(arm.points) for arm in study.arms.values()} == {3}
    assert all(task.data == data.checksums(*task.data) for task in study.tasks.values())
    assert set().union(*(study.tasks[name].data for name in study.budgets["quick"].tasks)) <= {
        "digits",
        "breast_cancer",
    }
    assert study.timed
    pickle.loads(pickle.dumps(study))


def test_a_task_of_ones_own_takes_the_place_of_the_shipped_ones():
    own = study.with_task("own", Task(build))
    assert len(own.build_task("own", split="test", seed=0).batches) == BATCHES
    with pytest.raises(InputError, match=r"(?s)must build an object with X, y, batches, .*class UnlearningTask"):
        study.with_task("own", Task(lambda *, split, seed: object())).build_task("own", split="test", seed=0)
