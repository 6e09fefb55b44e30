import os
import signal
import subprocess
import sys

import pytest

from heedful.errors import InputError, ParameterError
from heedful.evidence import Budget, Store, run_study
from tests.evidence import toys


def scores(study, path, **options):
    return [trial.metrics for trial in run_study(study, store=path, **options).trials]


@pytest.fixture(scope="module")
def ray_of_two_workers():
    """One local Ray for the module: it takes seconds to start."""
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


def misbehave(task, *, budget, seed, how):
    if how == "exit":
        sys.exit(0)
    if how == "half a character":
        raise ValueError("no file \udcff")
    if how == "unnamed signal":
        os.kill(os.getpid(), signal.SIGRTMIN + 3)
    sys.stdout.buffer.write(b"\xff\xfe")
    return toys.plain(task, budget=budget, seed=seed)


@pytest.mark.parametrize("engine", ["inline", "processes"])
@pytest.mark.parametrize(
    ("how", "reason"), [("exit", "SystemExit: 0"), ("half a character", "ValueError: no file ?"), ("bytes", "")]
)
def test_what_an_arm_does_to_its_process_ends_its_trial_alone_and_alike(tmp_path, engine, how, reason):
    study = toys.one_arm(misbehave, how=how, seeds=2)
    trials = run_study(study, engine=engine, workers=1, store=tmp_path / "a.sqlite").trials
    assert [t.reason for t in trials] == [reason] * 2


@pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="this system has no real-time signals")
def test_a_death_by_a_signal_without_a_name_is_recorded(tmp_path):
    study = toys.one_arm(misbehave, how="unnamed signal", seeds=1)
    trials = run_study(study, engine="processes", workers=1, store=tmp_path / "a.sqlite").trials
    assert trials[0].reason == f"its process was killed by signal {signal.SIGRTMIN + 3}"


def test_a_study_that_cannot_be_sent_is_refused_and_nothing_is_recorded_of_it(tmp_path):
    study = toys.one_arm(lambda task, *, budget, seed: toys.plain(task, budget=budget, seed=seed))
    with pytest.raises(InputError, match="cannot be sent to worker processes"):
        run_study(study, engine="processes", workers=1, store=tmp_path / "a.sqlite")
    trials = run_study(study, engine="inline", store=tmp_path / "a.sqlite").trials
    assert {t.status for t in trials} == {"done"}


def test_workers_that_cannot_start_are_an_error_and_no_outcome(tmp_path):
    (tmp_path / "script.py").write_text(
        "from tests.evidence import toys\nfrom heedful.evidence import run_study\n"
        f"run_study(toys.one_arm(toys.plain), workers=1, store={str(tmp_path / 'a.sqlite')!r})\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, tmp_path / "script.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert "ChildProcessError: The worker processes do not start" in done.stderr
    with Store(tmp_path / "a.sqlite") as store:
        assert set(store.to_frame()["status"]) == {"started"}
