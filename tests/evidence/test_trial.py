import dataclasses
import os
from functools import partial

import numpy as np
import pytest
import torch
from rich.text import Text

from heedful.errors import InputError
from heedful.evidence import Arm, Budget, Metric
from heedful.evidence._trial import Trial, code_version, execute, fixed_threads, tail
from tests.evidence import toys

TRIAL = Trial("toy", "small", "shifted", {"shift": 2.0}, 3, "test", {"steps": 7}, 1, "v", {"normal": "abc"})


@pytest.mark.parametrize(
    "change",
    [
        {"study": "other"},
        {"task": "large"},
        {"arm": "plain"},
        {"settings": {"shift": 2.5}},
        {"seed": 4},
        {"split": "validation"},
        {"spend": {"steps": 8}},
        {"threads": 2},
        {"code": "w"},
        {"data": {"normal": "abd"}},
    ],
)
def test_whatever_the_outcome_depends_on_makes_another_trial(change):
    assert dataclasses.replace(TRIAL, **change).key != TRIAL.key


def test_the_order_of_settings_does_not_make_another_trial():
    one = dataclasses.replace(TRIAL, settings={"a": 1, "b": 2})
    assert dataclasses.replace(TRIAL, settings={"b": 2, "a": 1}).key == one.key


def test_settings_that_cannot_be_kept_are_refused():
    with pytest.raises(InputError, match="must be numbers, strings, booleans, None, or lists and dicts"):
        _ = dataclasses.replace(TRIAL, settings={"f": print}).key


def test_code_version_changes_with_the_arms_settled_arguments_and_with_the_package(monkeypatch):
    study = toys.one_arm(toys.fail, how="nan")
    assert code_version(study) == code_version(toys.one_arm(toys.fail, how="nan"))
    assert code_version(study) != code_version(toys.one_arm(toys.fail, how="raise"))
    before = code_version(study)
    monkeypatch.setattr("heedful.__version__", "9.9.9")
    assert code_version(study) != before


def test_code_version_changes_with_the_source_of_an_arm(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_arm.py").write_text("def run(task, *, budget, seed):\n    return 1\n")
    import my_arm

    study = toys.study(arms={"mine": Arm(my_arm.run, untuned="no")}, claims=[])
    before = code_version(study)
    (tmp_path / "my_arm.py").write_text("def run(task, *, budget, seed):\n    return 2\n")
    assert code_version(study) != before


def test_a_trial_is_pure_whatever_the_global_generators_were_and_leaves_them_alone():
    def states():  # not Python's own: the type checker of the tests draws from it
        return np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    study = toys.one_arm(toys.multiply)
    trial = dataclasses.replace(TRIAL, arm="only", settings={})
    outcomes = []
    for seed in (1, 2):
        np.random.seed(seed)
        torch.manual_seed(seed)
        before = states()
        outcomes.append(execute(study, trial, Budget(seeds=1)).metrics)
        assert states() == before
    assert outcomes[0] == outcomes[1]


def test_threads_are_fixed_inside_and_restored_after():
    before = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    with fixed_threads(2):
        assert torch.get_num_threads() == 2
        assert os.environ["OMP_NUM_THREADS"] == "2"
    assert (torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")) == before


def test_costs_have_measured_seconds_and_memory_beside_the_arms_own():
    study = toys.one_arm(toys.sleep, seconds=0.05)
    result = execute(study, dataclasses.replace(TRIAL, arm="only", settings={}), Budget(seeds=1, steps=7))
    assert result.costs["steps"] == 7
    assert 0.05 <= result.costs["seconds"] < 5
    assert 0 <= result.costs["peak_mib"] < 1000


def unchecked(**wrong):
    """An outcome of wrong types, past the type checker of the tests, which users do not have."""
    outcome = toys.Outcome({"score": 1.0, "spent": 1.0})
    for name, value in wrong.items():
        object.__setattr__(outcome, name, value)
    return outcome


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        ({"score": 1.0}, "arm 'only' returned a dict; it must return an Outcome"),
        (toys.Outcome({"score": 1.0}), "the outcome lacks spent"),
        (
            toys.Outcome({"score": 1.0, "spent": 1.0, "speed": 2.0}),
            "metrics that the study does not declare of this task: speed",
        ),
        (toys.Outcome({"score": float("inf"), "spent": 1.0}), "score is inf"),
        (unchecked(metrics={"score": "high", "spent": 1.0}), "TypeError: must be real number, not str"),
        (unchecked(costs={"steps": "few"}), "ValueError: could not convert string to float"),
        (unchecked(metrics=None), "TypeError"),
    ],
)
def test_a_wrong_outcome_is_a_failure_with_its_reason(outcome, reason):
    study = toys.one_arm(lambda task, **_: outcome)
    result = execute(study, dataclasses.replace(TRIAL, arm="only", settings={}), Budget(seeds=1))
    assert (result.status, result.metrics) == ("failed", {})
    assert reason in result.reason


def test_a_validation_trial_needs_only_the_metric_that_settings_are_chosen_by():
    study = toys.one_arm(lambda task, **_: toys.Outcome({"score": 1.0}))
    trial = dataclasses.replace(TRIAL, arm="only", settings={}, split="validation")
    assert execute(study, trial, Budget(seeds=1)).status == "done"


def test_a_metric_of_other_tasks_is_neither_needed_nor_wanted():
    error = Metric("error", better="lower", tasks=["large"])
    trial = dataclasses.replace(TRIAL, arm="only", settings={})

    def run(outcome):
        arms = {"only": Arm(lambda task, **_: outcome, untuned="nothing to tune")}
        study = toys.study(arms=arms, metrics=[*toys.SCORE, error], claims=[])
        return [execute(study, dataclasses.replace(trial, task=task), Budget(seeds=1)).reason for task in study.tasks]

    small, large = run(toys.Outcome({"score": 1.0, "spent": 1.0}))
    assert (small, large) == ("", "the outcome lacks error")
    small, large = run(toys.Outcome({"score": 1.0, "spent": 1.0, "error": 0.5}))
    assert (small, large) == ("the outcome has metrics that the study does not declare of this task: error", "")


def test_of_long_output_the_end_is_kept_without_terminal_colours():
    assert tail("x" * 30_000 + "end").endswith("xend")
    assert tail("x" * 30_000).startswith("[… 10000 characters]")
    assert tail("\x1b[31mred\x1b[0m") == "red"


def bound(value):
    """An arm whose name and file do not tell its value."""

    def run(task, *, budget, seed):
        return value

    return run


class Bound:
    def __init__(self, value):
        self.value = value

    def run(self, task, *, budget, seed):
        return self.value

    def __call__(self, task, *, budget, seed):
        return self.value


def long_array(value):
    array = np.zeros(5000)  # NumPy shows its ends only
    array[2500] = value
    return partial(toys.plain, array=array)


@pytest.mark.parametrize("make", [bound, lambda value: Bound(value).run, Bound, long_array])
def test_code_version_covers_whatever_values_are_bound_to_an_arm(make):
    one, same, other = (
        code_version(toys.study(arms={"a": Arm(make(value), untuned="no")}, claims=[])) for value in (1, 1, 2)
    )
    assert one == same != other


def test_code_version_changes_with_the_metrics_that_an_outcome_must_have():
    assert code_version(toys.study()) != code_version(toys.study(tune_on="spent"))


def untidy(task, *, budget, seed):
    value = (torch.tensor(1.5).dtype == torch.float32) + torch.is_grad_enabled() + (os.environ.get("UNTIDY") is None)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    np.seterr(all="ignore")
    os.environ["UNTIDY"] = "1"
    os.chdir("/")
    return toys.Outcome({"score": float(value), "spent": 0.0})


def test_no_trial_sees_the_global_settings_of_another_or_of_the_caller():
    before = os.getcwd(), np.geterr()
    trial = dataclasses.replace(TRIAL, arm="only", settings={})
    torch.set_default_dtype(torch.float64)
    try:
        for _ in range(2):
            assert execute(toys.one_arm(untidy), trial, Budget(seeds=1)).metrics["score"] == 3
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.is_grad_enabled()
    assert (os.getcwd(), np.geterr()) == before
    assert "UNTIDY" not in os.environ


def test_a_copy_of_the_process_that_an_arm_forks_hands_over_nothing(tmp_path):
    def forks(task, *, budget, seed):
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
        return toys.Outcome({"score": 1.0, "spent": 0.0})

    execute(toys.one_arm(forks), dataclasses.replace(TRIAL, arm="only", settings={}), Budget(seeds=1))
    (tmp_path / str(os.getpid())).touch()
    assert len(list(tmp_path.iterdir())) == 1


def test_colours_of_very_long_output_are_not_read_through(monkeypatch):
    read = []
    from_ansi = Text.from_ansi
    monkeypatch.setattr(Text, "from_ansi", lambda text: read.append(len(text)) or from_ansi(text))
    assert "[31m" not in tail("\x1b[31mred\x1b[0m\n" * 1_000_000)[100:]
    assert sum(read) < 100_000
