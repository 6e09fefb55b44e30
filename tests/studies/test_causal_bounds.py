"""Every arm on a miniature trial, and what makes the comparison fair."""

import itertools
import pickle

import numpy as np
import pytest
from sklearn.neighbors import KNeighborsRegressor

from heedful import data
from heedful.data import synthetic
from heedful.errors import InputError
from heedful.evidence import Budget, Task
from heedful.studies import causal_bounds
from heedful.studies.causal_bounds import NeighbourMeans, Observed, Revealed, Trial, median_cells, study

pytest.importorskip("ot", reason='needs POT: pip install "heedful[causal]"')

BUDGET = Budget(seeds=1, units=120)
KINDS = ("linear", "two_covariates", "revealed", "observed", "binary")


def build(kind, *, split="test", seed=0):
    """Small trials of every kind."""
    if kind in study.tasks:
        return study.build_task(kind, split=split, seed=seed)
    made = synthetic.trial_linear(160, random_state=0)
    if kind == "revealed":
        return Revealed(made.y0, made.y1, made.X, split=split, seed=seed)
    outcome = made.y if kind == "observed" else (made.y > 0).astype(float)
    return Observed(outcome, made.treatment, made.X, split=split, seed=seed)


def run(arm, kind, **which):
    return study.arms[arm].run(build(kind, **which), budget=BUDGET, seed=which.get("seed", 0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arm", study.arms)
def test_arm_returns_the_metrics_of_the_task_and_repeats(arm, kind):
    first, again = (run(arm, kind, seed=3) for _ in range(2))
    known = {"linear": "linear", "two_covariates": "linear", "revealed": "acic"}.get(kind, "nsw")
    assert set(first.metrics) == set(study.metrics_of(known))
    assert all(np.isfinite(value) for value in first.metrics.values())
    assert first.metrics == again.metrics
    assert first.costs == {"units": 128 if kind in ("observed", "binary") and BUDGET.units > 128 else 120}


@pytest.mark.parametrize("kind", KINDS)
def test_transport_is_never_wider_than_blind_and_matching_never_wider_than_transport(kind):
    width = {
        arm: run(arm, kind).metrics["width_ratio"]
        for arm in ("blind", "causal_bounds", "causal_bounds_fixed", "matching")
    }
    assert width["blind"] == 1
    assert width["causal_bounds"] <= 1 + 1e-9
    assert width["matching"] <= width["causal_bounds_fixed"] + 1e-9 <= 1 + 2e-9


def test_a_telling_covariate_tightens_every_arm_that_sees_it():
    for arm in set(study.arms) - {"blind"}:
        assert run(arm, "linear").metrics["width_ratio"] < 0.9


def test_the_interval_is_drawn_against_the_price():
    curve = run("causal_bounds", "linear").curves["interval against eta"]
    price, lower, upper = np.array(curve).T
    assert (price > 0).all()
    assert (np.diff(lower) > -1e-9).all()
    assert (np.diff(upper) < 1e-9).all()
    flat = run("blind", "linear").curves["interval against eta"]
    assert {point[1:] for point in flat} == {flat[0][1:]}
    assert lower[0] >= flat[0][1] - 1e-9


def test_scores_by_hand():
    trial = Trial(np.zeros(2), np.array([True, False]), np.zeros((2, 1)), effect=5.0, sharp=2.0)
    assert trial.score(1.5, 6.0, blind_width=9.0) == {
        "width_ratio": 0.5,
        "interval_score": 0.5,
        "coverage": 100.0,
        "error": 0.5,
        "bias": -0.5 / 9,
        "overshoot": 0.0,
    }
    missed = trial.score(2.5, 4.0, blind_width=3.0)
    assert missed["interval_score"] == pytest.approx((1.5 + 40 * 1) / 3)
    assert (missed["coverage"], missed["bias"], missed["overshoot"]) == (0.0, 0.5 / 3, 0.5 / 3)
    assert set(Trial(trial.outcome, trial.treatment, trial.covariates).score(1, 2, blind_width=2)) == {"width_ratio"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_and_a_split_name_one_trial(kind):
    first, again, other, validation = (
        build(kind, seed=seed, split=split).trial(100)
        for seed, split in ((0, "test"), (0, "test"), (1, "test"), (0, "validation"))
    )
    np.testing.assert_array_equal(first.outcome, again.outcome)
    assert not np.array_equal(first.outcome, other.outcome)
    assert not np.array_equal(first.outcome, validation.outcome)


def test_an_observed_trial_draws_four_fifths_of_its_units_and_each_at_most_once():
    units = np.arange(50.0)
    task = Observed(units, units % 2 == 1, units[:, None], split="test", seed=0)
    trial = task.trial(1000)
    assert len(set(trial.outcome)) == len(trial.outcome) == 40
    np.testing.assert_array_equal(trial.treatment, trial.outcome % 2 == 1)
    np.testing.assert_array_equal(trial.covariates[:, 0], trial.outcome)
    assert len(task.trial(7).outcome) == 7


def test_a_revealed_trial_hides_one_outcome_of_each_unit_and_knows_the_truth_of_all():
    y0, y1 = np.arange(30.0), np.arange(30.0) + 100
    trial = Revealed(y0, y1, y0[:, None], split="test", seed=0).trial(20)
    assert trial.effect == 100.0**2
    assert trial.treatment.sum() == 10
    np.testing.assert_array_equal(trial.outcome, trial.covariates[:, 0] + 100 * trial.treatment)


def births(n=200):
    rng = np.random.default_rng(0)
    X, z = rng.normal(size=(n, 4)), rng.random((10, n)) < 0.5
    y0, y1 = (np.stack([X[:, arm] * 5 + k for k in range(10)]) for arm in (0, 1))
    return data.PotentialOutcomes(X, y0, y1, y0, y1, z, tuple("abcd"))


def test_prognostic_scores_are_learned_from_other_births_and_from_outcomes_that_were_seen(monkeypatch):
    form = births()
    monkeypatch.setattr(data, "load", lambda name: form)
    early, late = np.array_split(np.random.default_rng(0).permutation(200), 2)
    task = causal_bounds.acic(split="test", seed=13)
    np.testing.assert_allclose(task.y0, form.y0[3, late] / form.y0[3, early].std())
    # Each arm's outcome is a line in the covariates, so that its score is nearly the outcome.
    np.testing.assert_allclose(task.covariates, np.column_stack([form.y0[3, late], form.y1[3, late]]), atol=0.2)
    hidden = np.where(form.treatment, form.y1, form.y0)
    hidden[:, late] = -99.0
    y0, y1 = np.where(form.treatment, 7.0, hidden), np.where(form.treatment, hidden, 7.0)
    other = data.PotentialOutcomes(form.X, y0, y1, y0, y1, form.treatment, form.feature_names)
    monkeypatch.setattr(data, "load", lambda name: other)
    np.testing.assert_allclose(causal_bounds.acic(split="test", seed=13).covariates, task.covariates, atol=1e-12)


def test_units_of_a_real_trial_with_gaps_are_left_out(monkeypatch):
    X = np.array([[1.0, 9.0, 3.0], [np.nan, 9.0, 4.0], [5.0, np.nan, 6.0]])
    form = data.RandomizedTrial(X, np.array([True, False, True]), np.arange(3.0), ("a", "b", "c"))
    monkeypatch.setattr(data, "load", lambda name: form)
    task = causal_bounds.observed("nsw", ("c", "a"), split="test", seed=0)
    np.testing.assert_array_equal(task.covariates, [[3, 1], [6, 5]])
    np.testing.assert_allclose(task.outcome, [0, 2 / np.arange(3).std()])


@pytest.mark.parametrize(("n", "smallest", "cells"), [(100, 10, 8), (100, 60, 1), (7, 2, 3), (64, 1, 64)])
def test_cells_are_halved_while_they_keep_enough_units(n, smallest, cells):
    labels = median_cells(np.random.default_rng(0).normal(size=(n, 3)), smallest=smallest)
    sizes = np.bincount(labels)
    assert len(sizes) == cells
    assert sizes.min() >= smallest
    assert np.ptp(sizes) <= 1


def test_cells_lie_on_either_side_of_medians_and_ties_are_no_obstacle():
    z = np.random.default_rng(0).normal(size=(40, 1))
    labels = median_cells(z, smallest=10)
    ranges = sorted((z[labels == label].min(), z[labels == label].max()) for label in range(4))
    assert all(left[1] < right[0] for left, right in itertools.pairwise(ranges))
    assert np.bincount(median_cells(np.ones((40, 2)), smallest=10)).tolist() == [10] * 4


def test_the_number_of_neighbours_is_the_one_that_predicts_units_left_out_best():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 1))
    assert NeighbourMeans().fit(X, 10 * X[:, 0]).k_ == 5
    noise = NeighbourMeans().fit(X, rng.normal(size=300))
    assert noise.k_ >= 40
    peer = KNeighborsRegressor(noise.k_).fit(X, noise.y_)
    np.testing.assert_allclose(noise.predict(X[:5] + 0.1), peer.predict(X[:5] + 0.1))
    left_out = [
        KNeighborsRegressor(5).fit(np.delete(X, i, 0), np.delete(noise.y_, i)).predict(X[i : i + 1]) for i in (0, 7)
    ]
    neighbours = noise.nearest_.kneighbors(n_neighbors=5, return_distance=False)[[0, 7]]
    np.testing.assert_allclose(noise.y_[neighbours].mean(axis=1), np.ravel(left_out))
    assert NeighbourMeans().fit(X[:4], X[:4, 0]).k_ == 3


def test_nothing_is_tuned_by_the_truth_and_quick_needs_no_download():
    assert all(arm.grid is None and arm.untuned for arm in study.arms.values())
    quick = study.budgets["quick"].tasks
    assert all(not study.tasks[name].data for name in quick)
    assert all(task.data == data.checksums(*task.data) for task in study.tasks.values())
    assert study.budgets["full"].seeds >= 50
    pickle.loads(pickle.dumps(study))


@pytest.mark.parametrize("name", ["nsw", "thornton_hiv", "social_insure", "rand_hie"])
def test_real_trials_name_covariates_that_they_have(name):
    if not data.is_cached(name):
        pytest.skip(f"{name} is not cached here")
    trial = study.build_task(name, split="test", seed=0).trial(300)
    assert len(trial.outcome) == 300
    assert np.isfinite(trial.covariates).all()
    assert 0.2 < trial.treatment.mean() < 0.9


def test_a_trial_of_ones_own_takes_the_place_of_the_shipped_ones():
    own = study.with_task("own", Task(lambda *, split, seed: build("observed", split=split, seed=seed)))
    assert [metric.name for metric in own.metrics] == ["width_ratio"]
    outcome = own.arms["causal_bounds_fixed"].run(own.build_task("own", split="test", seed=0), budget=BUDGET, seed=0)
    assert set(outcome.metrics) == {"width_ratio"}
    with pytest.raises(InputError, match=r"(?s)must build an object with trial; .*class TrialTask"):
        study.with_task("own", Task(lambda *, split, seed: object())).build_task("own", split="test", seed=0)
