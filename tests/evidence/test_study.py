import pytest

from heedful.errors import InputError
from heedful.evidence import Arm, Budget, Claim, Metric, Task
from tests.evidence import toys


def test_a_mapping_grid_is_all_combinations_and_a_list_grid_is_its_points():
    assert Arm(toys.add, grid={"a": [1, 2], "b": ["x", "y"]}).points == [
        {"a": 1, "b": "x"},
        {"a": 1, "b": "y"},
        {"a": 2, "b": "x"},
        {"a": 2, "b": "y"},
    ]
    assert Arm(toys.add, grid=[{"a": 1}, {"a": 5}]).points == [{"a": 1}, {"a": 5}]
    assert Arm(toys.plain, untuned="why").points == [{}]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": {}}, "at least one task"),
        ({"arms": {"plain": Arm(toys.plain)}, "claims": []}, "A default that was never tuned is not a baseline"),
        (
            {
                "arms": {"a": Arm(toys.add, grid={"shift": [1.0]}), "b": Arm(toys.add, grid={"shift": [1.0, 2.0]})},
                "claims": [],
            },
            r"grids of equal size; got \{'a': 1, 'b': 2\}",
        ),
        ({"arms": {"a": Arm(toys.add, grid=[])}, "claims": []}, "grids of equal size; got"),
        (
            {"metrics": [Metric("x", better="lower"), Metric("x", better="lower")], "claims": []},
            "two metrics share a name",
        ),
        ({"tune_on": "speed"}, "tune_on='speed' is not one of its metrics"),
        (
            {"claims": [Claim("shifted", beats="magic", on="score")]},
            "'shifted beats magic on score' speaks of \\['magic'\\]",
        ),
        ({"claims": [Claim("shifted", beats="plain", on="score", tasks=["tiny"])]}, r"speaks of \['tiny'\]"),
        ({"budgets": {"quick": Budget(seeds=1, tasks=["tiny"])}}, r"budget 'quick' names tasks \['tiny'\]"),
        (
            {"metrics": [*toys.SCORE, Metric("error", better="lower", tasks=["tiny"])]},
            r"'error' names tasks \['tiny'\]",
        ),
        (
            {"metrics": [*toys.SCORE, Metric("error", better="lower", tasks=["small"])], "tune_on": "error"},
            "tune_on='error' must be a metric of all tasks",
        ),
        (
            {
                "metrics": [*toys.SCORE, Metric("error", better="lower", tasks=["small"])],
                "claims": [Claim("shifted", beats="plain", on="error")],
            },
            r"'shifted beats plain on error' speaks of tasks \['large'\] without error",
        ),
    ],
)
def test_a_wrongly_declared_study_is_refused_when_it_is_made(changes, message):
    with pytest.raises(InputError, match=message):
        toys.study(**changes)


def test_budget_spend_is_read_by_name_and_unknown_names_say_what_there_is():
    budget = Budget(seeds=2, gradients=10)
    assert budget.gradients == 10
    assert not hasattr(budget, "tokens")
    with pytest.raises(AttributeError, match=r"no 'tokens'; it has \['gradients'\]"):
        _ = budget.tokens
    with pytest.raises(InputError, match="seeds, tuning_seeds >= 1 and timeout_s > 0; got 0, 1, 600"):
        Budget(seeds=0)


def test_a_margin_must_be_finite_and_not_negative():
    with pytest.raises(InputError, match="margin must be a finite number >= 0; got -1"):
        Claim("a", beats="b", on="c", margin=-1.0)


def test_a_task_of_the_wrong_form_gets_an_error_that_shows_the_right_one():
    study = toys.study(tasks={"bad": Task(wrong_task), "small": toys.study().tasks["small"], "large": Task(wrong_task)})
    with pytest.raises(InputError) as caught:
        study.build_task("bad", split="test", seed=0)
    message = str(caught.value)
    assert "must build an object with numbers, split; the complex it built lacks numbers, split" in message
    assert 'numbers: float array (100,), what is averaged; split: "validation" or "test".' in message


def wrong_task(*, split, seed):
    return 1j


def test_only_a_claim_about_a_timing_metric_makes_a_study_timed():
    metrics = [*toys.SCORE, Metric("seconds", "s", better="lower", timing=True)]
    assert not toys.study(metrics=metrics).timed
    assert toys.study(metrics=metrics, claims=[Claim("shifted", beats="plain", on="seconds")]).timed


def test_with_task_moves_claims_and_budgets_to_the_new_task():
    claims = [Claim("shifted", beats="plain", on="score", tasks=["small"], pairs="tasks")]
    moved = toys.study(claims=claims).with_task("mine", toys.study().tasks["small"])
    assert list(moved.tasks) == ["mine"]
    assert moved.claims == (Claim("shifted", beats="plain", on="score"),)
    assert moved.budgets["quick"].tasks is None
    assert moved.budgets["quick"].steps == 7


def test_with_task_leaves_metrics_of_other_tasks_behind_and_the_claims_on_them():
    error = Metric("error", better="lower", tasks=["small"])
    claims = [Claim("shifted", beats="plain", on=name, tasks=["small"]) for name in ("error", "score")]
    moved = toys.study(metrics=[*toys.SCORE, error], claims=claims).with_task("mine", toys.study().tasks["small"])
    assert error not in moved.metrics
    assert moved.claims == (Claim("shifted", beats="plain", on="score"),)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"shift": [1.0, 1.0, 2.0]}, "the grid of arm 'a' has a point twice"),
        ([{"shift": (1, 2)}, {"shift": [1, 2]}], "the grid of arm 'a' has a point twice"),  # one and the same trial
        ({"seed": [1, 2]}, r"the grid of arm 'a' sets \['seed'\], which the study gives to every trial"),
    ],
)
def test_a_grid_whose_points_are_no_settings_of_their_own_is_refused(grid, message):
    with pytest.raises(InputError, match=message):
        toys.study(arms={"a": Arm(toys.add, grid=grid)}, claims=[])
    assert len(toys.study(arms={"a": Arm(toys.add, grid={"shift": [1, 1.0, True]})}, claims=[]).arms["a"].points) == 3
