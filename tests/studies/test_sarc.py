"""Every arm on a miniature task, and what makes the comparison fair."""

import pickle

import numpy as np
import pytest
from sklearn.metrics import balanced_accuracy_score

from heedful import data
from heedful.errors import InputError
from heedful.evidence import Budget, Outcome, Task
from heedful.studies import sarc as module
from heedful.studies.sarc import Split, score, study
from heedful.timeseries import ReservoirClassifier

BUDGET = Budget(seeds=1)
# MiniRocket and warping compile for half a minute on a machine that never ran them.
RESERVOIRS = ["sarc", "sarc_no_cycle", "sarc_random_periods", "wide_biesn", "bianchi"]
ARMS = [*RESERVOIRS, *(pytest.param(arm, marks=pytest.mark.slow) for arm in ("minirocket", "dtw_1nn"))]

# Numba's, while it compiles aeon's code.
pytestmark = pytest.mark.filterwarnings("ignore:.*unsafe cast from uint64 to int64")


@pytest.fixture
def own_folder(monkeypatch, tmp_path_factory):
    """Nothing is kept in the user's cache; the sets come with aeon."""
    pytest.importorskip("aeon")
    monkeypatch.setenv("HEEDFUL_DATA", str(tmp_path_factory.getbasetemp() / "sarc"))


def waves(n, seed, *, channels=1, ragged=False):
    """Sines with a period of 6 or of 20 in noise."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(n) % 2)
    phase = rng.uniform(0, 6, (n, channels, 1))
    x = np.sin(2 * np.pi * np.arange(50) / np.array([6, 20])[y][:, None, None] + phase)
    x += 0.1 * rng.standard_normal(x.shape)
    return [case[:, i % 5 :] for i, case in enumerate(x)] if ragged else x, y


def build(*, split, seed, **kind):
    task = Split(*waves(24, 100 + seed, **kind), *waves(16, 1, **kind))
    return task if split == "test" else task.halves(seed)


@pytest.mark.parametrize("arm", ARMS)
def test_arm_returns_every_metric_and_repeats(arm):
    points = study.arms[arm].points
    for settings in (points[0], points[-1]):
        first, second = (
            study.arms[arm].run(build(split="test", seed=3), budget=BUDGET, seed=3, **settings) for _ in range(2)
        )
        assert set(first.metrics) == {metric.name for metric in study.metrics}
        assert all(np.isfinite(value) for value in first.metrics.values())
        for name in ("accuracy", "balanced_accuracy"):
            assert first.metrics[name] == second.metrics[name]
        assert first.costs == second.costs


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("kind", [{"channels": 2}, {"channels": 2, "ragged": True}], ids=["channels", "ragged"])
def test_every_arm_takes_channels_and_different_lengths(arm, kind):
    run = study.arms[arm].run
    metrics = run(build(split="test", seed=0, **kind), budget=BUDGET, seed=0, **study.arms[arm].points[0]).metrics
    assert metrics["accuracy"] >= 70  # two periods that every arm can tell apart; half of the cases by chance


@pytest.mark.parametrize("channels", [1, 3])
def test_every_reservoir_gives_as_many_features(channels):
    task = build(split="test", seed=0, channels=channels)
    features = {
        arm: study.arms[arm].run(task, budget=BUDGET, seed=0, **study.arms[arm].points[0]).costs["features"]
        for arm in RESERVOIRS
    }
    expected = len(module._periods(task)) * 10 * (4 * channels + 2)
    assert features.pop("bianchi") == pytest.approx(expected, rel=0.05)  # m (m + 1), m rounded
    assert set(features.values()) == {expected}


def test_a_network_has_at_least_as_many_states_as_components(monkeypatch):
    made = []
    monkeypatch.setattr(module, "_periods", lambda task: list(range(1, 101)))
    monkeypatch.setattr(module, "_measure", lambda task, make: made.append(make()) or Outcome({}))
    module.bianchi(build(split="test", seed=0, channels=30), budget=BUDGET, seed=0)
    assert 2 * made[0].n_units >= made[0].n_components == 349  # 349 * 350 is nearest to 100 * 10 * (4 * 30 + 2)


@pytest.mark.parametrize("spectral", [[2, 4, 6, 20, 40], [3, 6, 9, 100, 101, 340], [250]], ids=str)
def test_random_periods_are_as_many_and_as_long_and_others_for_another_seed(spectral, monkeypatch):
    seen = []
    monkeypatch.setattr(module, "_periods", lambda task: spectral)
    monkeypatch.setattr(module, "_measure", lambda task, make: seen.append(make.keywords["periods"]) or Outcome({}))
    for seed in (0, 0, 1):
        module.sarc_random_periods(build(split="test", seed=0), budget=BUDGET, seed=seed)
    assert seen[0] == seen[1] != seen[2]
    for periods in seen:
        assert len(set(periods)) == len(spectral)
        assert 1 <= min(periods) <= max(periods) <= max(spectral)
        assert sum(p <= 100 for p in periods) == sum(p <= 100 for p in spectral)


def test_only_the_blind_arms_are_blind(monkeypatch):
    made = {}
    monkeypatch.setattr(module, "_measure", lambda task, make: made.update({arm: make()}) or Outcome({}))
    task = build(split="test", seed=0)
    for arm in RESERVOIRS[:-1]:
        study.arms[arm].run(task, budget=BUDGET, seed=0, **study.arms[arm].points[0])
    assert {arm: (made[arm].cyclic, made[arm].periods == "spectral") for arm in made} == {
        "sarc": (True, True),
        "sarc_no_cycle": (False, True),
        "sarc_random_periods": (True, False),
        "wide_biesn": (False, False),
    }
    assert made["wide_biesn"].periods == [1]
    defaults = made["sarc"].__class__().get_params()
    assert defaults["extend_to"] == module.EXTEND_TO
    for arm, untold in (("sarc", defaults), ("bianchi", ReservoirClassifier().get_params())):
        given = study.arms[arm].points[0]
        assert given == {name: untold[name] for name in given}  # the first point is what a classifier does untold


def test_scores_by_hand():
    truth, predicted = np.array([0, 0, 0, 1]), np.array([0, 0, 2, 1])
    assert score(truth, predicted) == {"accuracy": 75.0, "balanced_accuracy": pytest.approx(100 * (2 / 3 + 1) / 2)}
    truth = np.arange(50) % 3
    predicted = np.random.default_rng(0).permutation(truth)
    assert score(truth, predicted)["balanced_accuracy"] == pytest.approx(
        100 * balanced_accuracy_score(truth, predicted)
    )


def test_halves_are_of_the_training_series_alone_with_every_class_in_both():
    task = build(split="test", seed=0, ragged=True)
    halves = task.halves(5)
    assert len(halves.x_train) == len(halves.x_test) == 12
    for y in (halves.y_train, halves.y_test):
        assert set(y) == {0, 1}
    found = [case.tobytes() for case in [*halves.x_train, *halves.x_test]]
    assert sorted(found) == sorted(case.tobytes() for case in task.x_train)
    assert [case.tobytes() for case in task.halves(6).x_train] != found[:12]


def test_thinning_averages_neighbours_and_drops_the_rest():
    cases = np.arange(14.0).reshape(2, 1, 7)
    np.testing.assert_array_equal(module._thin(cases, 3), [[[1, 4]], [[8, 11]]])
    assert module._thin(cases, 1) is cases


def test_stretching_keeps_ends_and_straight_lines():
    stretched = module._stretch([np.array([[0.0, 1, 2], [5, 5, 5]]), np.array([[0.0, 1], [2, 0]])], 5)
    np.testing.assert_allclose(
        stretched, [[[0, 0.5, 1, 1.5, 2], [5] * 5], [[0, 0.25, 0.5, 0.75, 1], [2, 1.5, 1, 0.5, 0]]]
    )


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize(
    ("name", "train", "test", "length"),
    [("gun_point", 50, 150, 150), ("osu_leaf", 200, 242, 213), ("acsf1", 100, 100, 486), ("long_memory", 60, 60, 400)],
)
def test_test_series_are_the_same_for_every_seed_and_never_tune(name, train, test, length):
    one, other = (study.build_task(name, split="test", seed=seed) for seed in (0, 1))
    assert one.x_train.shape == (train, 1, length)
    assert one.x_test.shape == (test, 1, length)
    np.testing.assert_array_equal(one.x_test, other.x_test)
    np.testing.assert_array_equal(one.y_test, other.y_test)
    tuning = study.build_task(name, split="validation", seed=1000)
    held_out = {case.tobytes() for case in one.x_test}
    assert not held_out & {case.tobytes() for case in [*tuning.x_train, *tuning.x_test]}
    again = study.build_task(name, split="validation", seed=1000)
    np.testing.assert_array_equal(tuning.x_train, again.x_train)


@pytest.mark.usefixtures("own_folder")
def test_series_of_different_lengths_stay_as_they_are():
    task = study.build_task("japanese_vowels", split="test", seed=0)
    published = data.load("ucr")["JapaneseVowels"]
    for case, expected in zip(task.x_test, published.x_test, strict=True):
        np.testing.assert_array_equal(case, expected)


def test_tuned_arms_have_equal_grids_and_accuracy_is_claimed_over_tasks():
    assert {len(arm.points) for arm in study.arms.values() if arm.grid is not None} == {6}
    assert {claim.pairs for claim in study.claims if claim.on == "accuracy"} == {"tasks"}
    assert all(task.data == data.checksums(*task.data) for task in study.tasks.values())
    pickle.loads(pickle.dumps(study))


def test_a_task_of_ones_own_takes_the_place_of_the_shipped_ones():
    own = study.with_task("own", Task(build))
    assert len(own.build_task("own", split="validation", seed=0).x_train) == 12
    with pytest.raises(InputError, match=r"(?s)must build an object with x_train, .*class SeriesTask"):
        study.with_task("own", Task(lambda *, split, seed: object())).build_task("own", split="test", seed=0)
