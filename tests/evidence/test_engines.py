import pytest

from heedful.errors import ParameterError
from heedful.evidence import Budget, run_study
from tests.evidence import toys


def scores(study, path, **options):
    return [trial.metrics for trial in run_study(study, store=path, **options).trials]


@pytest.fixture(scope="module")
def ray_of_two_workers():
    """One local Ray for the module: it takes seconds to start."""
    import os
    import sys

    ray = pytest.importorskip("ray", reason='Ray is not installed: pip install "heedful[ray]"')
    path = os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    yield ray
    ray.shutdown()


def test_processes_and_inline_give_bitwise_equal_metrics(tmp_path):
    study = toys.one_arm(toys.multiply)
    inline = scores(study, tmp_path / "a.sqlite", engine="inline")
    assert inline == scores(study, tmp_path / "b.sqlite", engine="processes", workers=2)
    assert len({metrics["score"] for metrics in inline}) == 3


@pytest.mark.slow
def test_ray_and_inline_give_bitwise_equal_metrics(tmp_path, ray_of_two_workers):
    study = toys.one_arm(toys.multiply)
    inline = scores(study, tmp_path / "a.sqlite", engine="inline")
    assert inline == scores(study, tmp_path / "b.sqlite", engine="ray", workers=2)


def test_another_number_of_threads_is_another_trial(tmp_path):
    study = toys.one_arm(toys.multiply)
    one = run_study(study, engine="inline", store=tmp_path / "a.sqlite")
    two = run_study(study, engine="inline", store=tmp_path / "a.sqlite", threads=2)
    assert {t.key for t in one.trials}.isdisjoint(t.key for t in two.trials)
    assert {t.threads for t in two.trials} == {2}


FAILURES = {
    "raise": "ValueError: no luck today",
    "nan": "score is nan",
    "hang": "passed its time limit of 2 s",
    "kill": "its process was killed by SIGKILL, as the system does when memory runs out",
    "wrong": "arm 'only' returned a dict; it must return an Outcome(metrics=..., costs=...)",
}


@pytest.mark.parametrize("how", FAILURES)
def test_on_processes_a_bad_trial_is_recorded_with_reason_and_log_and_the_others_finish(tmp_path, how):
    study = toys.one_arm(toys.fail, how=how, seeds=4, timeout_s=2.0 if how == "hang" else 60.0)
    trials = run_study(study, engine="processes", workers=2, store=tmp_path / "a.sqlite").trials
    assert [t.status for t in trials] == ["done", "failed", "done", "done"]
    assert trials[1].reason == FAILURES[how]
    assert trials[1].log.startswith("about to fail")
    assert ("Traceback" in trials[1].log) == (how == "raise")


@pytest.mark.parametrize("how", ["raise", "nan", "hang", "wrong"])
def test_inline_a_bad_trial_is_recorded_with_reason_and_log_and_the_others_finish(tmp_path, how, capsys):
    study = toys.one_arm(toys.fail, how=how, timeout_s=2.0 if how == "hang" else 60.0)
    trials = run_study(study, engine="inline", store=tmp_path / "a.sqlite").trials
    assert [t.status for t in trials] == ["done", "failed", "done"]
    assert trials[1].reason == FAILURES[how]
    assert trials[1].log.startswith("about to fail")
    assert capsys.readouterr().out == ""


@pytest.mark.slow
@pytest.mark.parametrize("how", FAILURES)
def test_on_ray_a_bad_trial_is_recorded_with_its_reason_and_the_others_finish(tmp_path, how, ray_of_two_workers):
    study = toys.one_arm(toys.fail, how=how, seeds=4, timeout_s=2.0 if how == "hang" else 60.0)
    trials = run_study(study, engine="ray", workers=2, store=tmp_path / "a.sqlite").trials
    assert [t.status for t in trials] == ["done", "failed", "done", "done"]
    if how == "kill":
        assert trials[1].reason == "its process ended before the trial did"
    else:
        assert trials[1].reason == FAILURES[how]
        assert trials[1].log.startswith("about to fail")


def test_wrong_engine_settings_are_refused(tmp_path):
    study = toys.one_arm(toys.plain)
    for options, message in [
        ({"engine": "processes", "workers": 0}, "workers must be >= 1; got 0"),
        ({"engine": "inline", "address": "auto"}, "address='auto' goes with engine='ray' only; the engine is 'inline'"),
    ]:
        with pytest.raises(ParameterError, match=message):
            run_study(study, store=tmp_path / "a.sqlite", **options)


def test_a_timeout_leaves_the_next_trial_its_whole_time(tmp_path):
    study = toys.one_arm(toys.fail, how="hang", seeds=3, timeout_s=1.0)
    trials = run_study(study, engine="inline", store=tmp_path / "a.sqlite").trials
    assert [t.status for t in trials] == ["done", "failed", "done"]
    assert Budget(seeds=1).timeout_s == 600.0
