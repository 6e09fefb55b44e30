"""Every arm on a miniature task, and what makes the comparison fair."""

import functools
import pickle

import numpy as np
import pytest
from sklearn.metrics import log_loss

from heedful import data
from heedful.errors import InputError
from heedful.evidence import Budget, Task
from heedful.studies import isotonic
from heedful.studies.isotonic import Probabilities, base_probabilities, score, study

BUDGET = Budget(seeds=1)


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path_factory):
    """Nothing is kept in the user's cache; digits come with scikit-learn."""
    monkeypatch.setenv("HEEDFUL_DATA", str(tmp_path_factory.getbasetemp() / "isotonic"))
    base_probabilities.cache_clear()


def build(*, split, seed):
    rng = np.random.default_rng(seed)
    truth = rng.dirichlet(np.ones(4), size=200)
    y = (truth.cumsum(axis=1) > rng.random((200, 1))).argmax(axis=1)
    P = truth**2 / (truth**2).sum(axis=1, keepdims=True)
    return Probabilities(P[:120], y[:120], P[120:], y[120:], split=split, seed=seed)


@pytest.mark.parametrize("split", ["validation", "test"])
@pytest.mark.parametrize("arm", study.arms)
def test_arm_returns_every_metric_and_repeats(arm, split):
    for settings in study.arms[arm].points:
        first, second = (
            study.arms[arm].run(build(split=split, seed=3), budget=BUDGET, seed=3, **settings) for _ in range(2)
        )
        assert set(first.metrics) == {metric.name for metric in study.metrics}
        assert all(np.isfinite(value) for value in first.metrics.values())
        left, right = ({k: v for k, v in o.metrics.items() if k != "fit_seconds"} for o in (first, second))
        assert left == right


@pytest.mark.parametrize("arm", set(study.arms) - {"raw"})
def test_every_fitted_arm_spends_the_same_calibration_rows(arm):
    settings = study.arms[arm].points[0]
    run = functools.partial(study.arms[arm].run, budget=BUDGET, seed=0, **settings)
    assert run(build(split="test", seed=0)).costs == {"calibration_rows": 120}
    assert run(build(split="validation", seed=0)).costs == {"calibration_rows": 5 * 96}


def test_raw_scores_the_probabilities_as_they_are():
    task = build(split="test", seed=0)
    metrics = study.arms["raw"].run(task, budget=BUDGET, seed=0).metrics
    assert metrics["nll"] == pytest.approx(log_loss(task.y_test, task.P_test))
    assert metrics["accuracy"] == pytest.approx(100 * (task.P_test.argmax(axis=1) == task.y_test).mean())


def test_folds_score_each_calibration_row_once_and_no_test_row():
    task = build(split="validation", seed=1)
    scored = np.concatenate([piece.P_score for piece in task.pieces()])
    assert len(scored) == 120
    np.testing.assert_array_equal(np.sort(scored, axis=0), np.sort(task.P, axis=0))
    for piece in task.pieces():
        assert not {row.tobytes() for row in piece.P_fit} & {row.tobytes() for row in piece.P_score}
    (piece,) = build(split="test", seed=1).pieces()
    assert piece.P_score is not task.P_test
    np.testing.assert_array_equal(piece.P_score, task.P_test)


def test_scores_by_hand():
    metrics = score(np.array([0, 1]), np.array([[0.8, 0.2], [0.6, 0.4]]))
    assert metrics["nll"] == pytest.approx(-(np.log(0.8) + np.log(0.4)) / 2)
    assert metrics["brier"] == pytest.approx((2 * 0.04 + 2 * 0.36) / 2)
    assert metrics["accuracy"] == 50


def test_shipped_task_is_the_same_for_every_arm_and_another_for_another_seed():
    first, again = (study.build_task("digits_bayes_200", split="test", seed=0) for _ in range(2))
    np.testing.assert_array_equal(first.P, again.P)
    larger = study.build_task("digits_bayes_600", split="test", seed=0)
    np.testing.assert_array_equal(larger.P[:200], first.P)
    np.testing.assert_array_equal(larger.P_test, first.P_test)
    other = study.build_task("digits_bayes_200", split="test", seed=1)
    assert not np.array_equal(other.P, first.P)
    np.testing.assert_allclose(first.P.sum(axis=1), 1, atol=1e-9)
    assert (len(first.P), len(first.P_test)) == (200, 697)


def test_base_models_are_fitted_once_and_kept(monkeypatch):
    fits = []
    fit = isotonic._fit_base
    monkeypatch.setattr(isotonic, "_fit_base", lambda *arguments: fits.append(None) or fit(*arguments))
    first = base_probabilities("digits", "knn", 5)
    base_probabilities.cache_clear()  # as another process
    again = base_probabilities("digits", "knn", 5)
    assert len(fits) == 1
    for left, right in zip(first, again, strict=True):
        np.testing.assert_array_equal(left, right)
    (kept,) = (data.folder() / "base_probabilities").glob("digits-knn-5-*.safetensors")
    kept.write_bytes(b"damaged")
    base_probabilities.cache_clear()
    np.testing.assert_array_equal(base_probabilities("digits", "knn", 5)[0], first[0])
    assert len(fits) == 2


@pytest.mark.parametrize("model", ["bayes", "forest", "mlp", "logistic", "knn"])
def test_every_base_model_gives_probabilities_of_all_classes(model):
    P, y, P_test, y_test = base_probabilities("digits", model, 0)
    assert P.shape == (600, 10)
    assert P_test.shape == (697, 10)
    assert set(y) == set(range(10))
    np.testing.assert_allclose(P_test.sum(axis=1), 1, atol=1e-6)
    assert 0.5 < (P_test.argmax(axis=1) == y_test).mean() < 0.95  # noisy enough to be wrong sometimes


def test_texts_are_seen_through_the_words_of_the_rows_that_the_base_model_is_fitted_on(monkeypatch):
    form = data.Texts(tuple(f"word{i % 30} rare{i}" for i in range(60)), np.arange(60) % 3, ("a", "b", "c"))
    monkeypatch.setattr(data, "load", lambda name: form)
    split = isotonic._texts("bbc_news", (20, 20), np.random.default_rng(0))
    parts = isotonic._three_parts(np.array(form.texts), form.y, (20, 20), np.random.default_rng(0))
    words = [text.split()[0] for text in parts.X]
    shared = {word for word in words if words.count(word) > 1}  # a word of one document says nothing
    assert split.X.shape == split.X_calibration.shape == split.X_test.shape == (20, len(shared))
    np.testing.assert_array_equal(split.y_test, parts.y_test)


def test_tuned_arms_have_equal_grids_and_claims_are_over_tasks():
    assert {len(arm.points) for arm in study.arms.values() if arm.grid is not None} == {3}
    assert {claim.pairs for claim in study.claims} == {"tasks"}
    assert all(task.data == data.checksums(*task.data) for task in study.tasks.values())
    assert set(study.budgets["quick"].tasks) <= {
        name for name, task in study.tasks.items() if set(task.data) == {"digits"}
    }
    pickle.loads(pickle.dumps(study))


def test_a_task_of_ones_own_takes_the_place_of_the_shipped_ones():
    own = study.with_task("own", Task(build))
    assert own.build_task("own", split="test", seed=0).pieces()
    with pytest.raises(InputError, match=r"(?s)must build an object with pieces; .*class CalibrationTask"):
        study.with_task("own", Task(lambda *, split, seed: object())).build_task("own", split="test", seed=0)
