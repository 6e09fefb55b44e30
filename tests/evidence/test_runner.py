import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from heedful import progress
from heedful.errors import InputError
from heedful.evidence import Arm, Budget, Claim, Metric, Store, run_study, stored_result
from heedful.evidence._runner import FIRST_TUNING_SEED
from tests.evidence import toys


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trials.sqlite"


def test_settings_are_chosen_on_validation_by_tuning_seeds_and_evaluated_once_per_seed(path):
    result = run_study(toys.study(), engine="inline", store=path)
    assert result.chosen["small", "shifted"] == {"shift": 2.0}  # 3 would win on the test split
    assert {t.seed for t in result.tuning} == {FIRST_TUNING_SEED, FIRST_TUNING_SEED + 1}
    assert {t.split for t in result.tuning} == {"validation"}
    assert {t.split for t in result.trials} == {"test"}
    keys = [(t.task, t.arm, t.seed) for t in result.trials]
    assert len(keys) == len(set(keys)) == 2 * 2 * 5
    assert all(t.settings == {"shift": 2.0} for t in result.trials if t.arm == "shifted")


def test_every_arm_sees_the_same_seeds_and_data(path):
    result = run_study(toys.study(), engine="inline", store=path)
    scores = {(t.task, t.arm, t.seed): t.metrics["score"] for t in result.trials}
    for task, seed in {(t.task, t.seed) for t in result.trials}:
        assert scores[task, "shifted", seed] - scores[task, "plain", seed] == pytest.approx(2.0, abs=1e-12)


def test_arms_are_interleaved(path):
    result = run_study(toys.study(), engine="inline", store=path)
    assert [t.arm for t in result.trials] == ["plain", "shifted"] * 10


def test_a_budget_runs_its_own_tasks_with_its_own_spend(path):
    result = run_study(toys.study(), budget="quick", engine="inline", store=path)
    assert {t.task for t in result.trials} == {"small"}
    assert all(t.costs["steps"] == 7 for t in result.trials)
    with pytest.raises(InputError, match="has budgets quick, full; got 'huge'"):
        run_study(toys.study(), budget="huge", store=path)


def test_nothing_runs_twice_and_more_seeds_add_only_what_is_new(path, tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    study = toys.one_arm(toys.note, folder=str(folder))
    first = run_study(study, engine="inline", store=path)
    assert run_study(study, engine="inline", store=path).trials == first.trials
    assert len(list(folder.iterdir())) == 3
    more = dataclasses.replace(study, budgets={"full": Budget(seeds=5, timeout_s=30, steps=1)})
    run_study(more, engine="inline", store=path)
    assert len(list(folder.iterdir())) == 5


def test_failed_settings_are_never_chosen_and_an_arm_without_any_is_left_out(path):
    study = toys.study(
        tasks={"small": toys.study().tasks["small"]},
        arms={
            "plain": Arm(toys.plain, untuned="no"),
            "some": Arm(picky, grid={"bad": [True, False]}),
            "none": Arm(picky, grid=[{"bad": True}, {"bad": True, "worse": True}]),
        },
        claims=[Claim("none", beats="plain", on="score"), Claim("some", beats="plain", on="score")],
        budgets={"full": Budget(seeds=3, steps=1)},
    )
    result = run_study(study, engine="inline", store=path)
    assert result.chosen == {("small", "plain"): {}, ("small", "some"): {"bad": False}, ("small", "none"): None}
    assert {t.arm for t in result.trials} == {"plain", "some"}
    assert result.verdicts[0].outcome == "inconclusive"
    assert len(result.verdicts[1].pairs) == 3


def picky(task, *, budget, seed, bad, worse=False):
    if bad:
        raise ValueError("bad setting")
    return toys.plain(task, budget=budget, seed=seed)


def test_a_stored_result_is_the_run_without_the_running_and_never_mixes_versions(path, monkeypatch):
    run = run_study(toys.study(), engine="inline", store=path)
    with Store(path) as store:
        shown = stored_result(toys.study(), store=store)
        assert (shown.trials, shown.chosen, shown.verdicts) == (run.trials, run.chosen, run.verdicts)
        with pytest.raises(
            InputError, match=r"no trial of 'toy' with budget 'full', 2 thread.* Code versions seen there: 0"
        ):
            stored_result(toys.study(), store=store, threads=2)
        monkeypatch.setattr("heedful.__version__", "9.9.9")
        with pytest.raises(InputError, match=r"code version 9\.9\.9\+.*Run: heedful study toy"):
            stored_result(toys.study(), store=store)


def test_settings_of_an_unfinished_choice_are_not_shown_as_chosen(path):
    run_study(toys.study(), engine="inline", store=path)
    with Store(path) as store:
        store._db.execute("DELETE FROM trials WHERE split = 'validation' AND task = 'small' AND seed = 1001")
        shown = stored_result(toys.study(), store=store)
    assert shown.chosen["small", "shifted"] is None
    assert shown.chosen["large", "shifted"] == {"shift": 2.0}


def test_progress_is_reported_up_to_the_last_trial(path):
    events = []
    with progress(events.append):
        run_study(toys.study(), budget="quick", engine="inline", store=path)
    assert [(e.done, e.total) for e in events if e.phase == "toy: evaluating"][-1] == (6, 6)


def test_a_study_with_a_claim_about_time_runs_one_trial_at_a_time(path):
    metrics = [Metric("score", better="higher"), Metric("spent", "s", better="lower", timing=True)]
    study = dataclasses.replace(
        toys.one_arm(toys.sleep, seconds=0.1),
        metrics=metrics,
        claims=[Claim("only", beats="only", on="spent")],
    )
    result = run_study(study, engine="processes", workers=2, store=path)
    with Store(path) as store:
        rows = store.to_frame().sort_values("started")
    assert len(result.trials) == 3
    assert all(rows["started"].iloc[1:].to_numpy() >= rows["ended"].iloc[:-1].to_numpy())


def test_a_coordinator_waits_for_a_trial_that_another_one_runs(path, tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    study = toys.one_arm(toys.note, folder=str(folder), seconds=0.3)
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(run_study(study, engine="inline", store=path))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(folder.iterdir())) == 3
    assert [t.metrics for t in results[0].trials] == [t.metrics for t in results[1].trials]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_coordinator_loses_nothing_finished_and_the_next_call_resumes(path, tmp_path, how):
    folder = tmp_path / "runs"
    folder.mkdir()
    script = (
        "import sys\nfrom tests.evidence import toys\nfrom heedful.evidence import run_study\n"
        "if __name__ == '__main__':\n"
        f"    study = toys.one_arm(toys.note, seeds=6, folder={str(folder)!r}, seconds=0.4)\n"
        f"    run_study(study, engine='processes', workers=1, store={str(path)!r})\n"
    )
    (tmp_path / "script.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen([sys.executable, tmp_path / "script.py"], env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(list(folder.iterdir())) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(how)
    process.wait(30)
    with Store(path) as store:
        finished = set(store.to_frame().query("status == 'done'")["key"])
    assert 2 <= len(finished) < 6
    study = toys.one_arm(toys.note, seeds=6, folder=str(folder), seconds=0.4)
    result = run_study(study, engine="inline", store=path)
    assert [t.status for t in result.trials] == ["done"] * 6
    with Store(path) as store:
        rows = store.to_frame()
    assert not rows[rows["key"].isin(finished)]["key"].duplicated().any()


def test_after_an_interrupt_the_same_process_may_run_the_study_again(path):
    study = toys.one_arm(interrupted, path=str(path))
    with pytest.raises(KeyboardInterrupt):
        run_study(study, engine="inline", store=path)
    assert {t.status for t in run_study(study, engine="inline", store=path).trials} == {"done"}


def interrupted(task, *, budget, seed, path):
    with Store(path) as store:
        if len(store.to_frame()) == 1:
            raise KeyboardInterrupt
    return toys.plain(task, budget=budget, seed=seed)


def test_seeds_that_would_both_choose_and_evaluate_are_refused(path):
    with pytest.raises(InputError, match="has 1001 seeds, but settings are chosen with the seeds from 1000 on"):
        run_study(toys.one_arm(toys.plain, seeds=1001), store=path)
