"""The search for scales on scores whose best is known."""

import math

import numpy as np
import pytest
import torch

from heedful import progress
from heedful.errors import InputError, ParameterError
from heedful.merge import search_scale
from tests.conformance.typechecks import as_users_have_it

BASE = {"w": torch.zeros(2, dtype=torch.float64)}
MODELS = [{"w": torch.tensor([1.0, 0.0], dtype=torch.float64)}, {"w": torch.tensor([0.0, 1.0], dtype=torch.float64)}]


def search(evaluate, **settings):
    """Over models whose scales are the two entries of the merged tensor."""
    return search_scale(evaluate, BASE, MODELS, **({"n": 1, "m": 2} | settings))


def near(*goal):
    return lambda merged: -float((merged["w"] - torch.tensor(goal)).square().sum())


def test_grid_finds_the_best_common_scale_and_refinement_each_models_own():
    common = search(near(0.55, 0.9), refine=0)
    assert common.best == (0.8, 0.8)
    assert common.evaluations == 10
    # Steps of 0.2, then 0.1, from there: 0.6 and 0.8 (or 1.0), then 0.5 or 0.6, and 0.9.
    fine = search(near(0.55, 0.91))
    assert fine.best[1] == 0.9
    assert abs(fine.best[0] - 0.55) < 0.0501
    assert fine.evaluations <= 10 + 2 * 2 * 2


def test_no_round_makes_it_worse_and_the_best_is_in_the_table():
    scores = [search(near(0.33, 1.71), refine=rounds).scores.max() for rounds in range(5)]
    assert scores == sorted(scores)
    found = search(near(0.33, 1.71))
    table = found.table
    assert list(table.columns) == ["scale_0", "scale_1", "score"]
    assert len(table) == found.evaluations == len(set(map(tuple, found.scales.tolist())))
    assert tuple(table.loc[table.score.idxmax(), ["scale_0", "scale_1"]]) == found.best


def test_scores_by_name_are_averaged_and_kept():
    found = search(lambda merged: {"math": float(merged["w"][0]), "code": 1 - float(merged["w"][1])}, grid=[0.5, 1.0])
    assert found.best == (1.25, -0.25)  # the grid says nothing, so from its first value steps of 0.5 and 0.25
    np.testing.assert_allclose(found.scores, (found.parts["math"] + found.parts["code"]) / 2)
    assert found.to_dict()["parts"].keys() == {"math", "code"}
    assert {"math", "code"} <= set(found.table.columns)


def test_ties_go_to_the_first_and_scores_that_are_no_number_lose():
    assert search(lambda merged: 1.0).best == (0.2, 0.2)
    found = search(lambda merged: math.nan if merged["w"][0] < 0.5 else 0.0, refine=0)
    assert found.best == (0.6, 0.6)
    assert np.isnan(found.scores[0])


def test_one_value_is_evaluated_once():
    assert search(near(1.0, 1.0), grid=[0.7]).scales.tolist() == [[0.7, 0.7]]


def test_every_evaluation_sees_the_same_draws():
    seen = []
    settings = {"method": "dare_linear", "n": None, "m": None, "density": 0.5, "refine": 0}
    params = {name: value for name, value in settings.items() if value is not None}
    base, model = {"w": torch.zeros(64)}, {"w": torch.ones(64)}
    search_scale(lambda merged: seen.append(merged["w"] != 0) or 0.0, base, [model], random_state=None, **params)
    assert all(torch.equal(mask, seen[0]) for mask in seen)


def test_progress_is_told():
    events = []
    with progress(events.append):
        found = search(near(1.0, 1.0))
    assert [event.done for event in events if event.phase == "search"] == list(range(1, found.evaluations + 1))


def test_bad_requests_are_refused():
    with pytest.raises(ParameterError, match=r"^grid is empty\. Give at least one scale, such as 1\.0\.$"):
        search(near(1.0, 1.0), grid=[])
    for value in ("1.0", math.nan):
        with as_users_have_it(), pytest.raises(ParameterError, match=r"^each value of grid must be a number; got "):
            search(near(1.0, 1.0), grid=[0.5, value])
    with pytest.raises(
        ParameterError, match=r"^scale is what search_scale looks for\. Give the values to try as grid\.$"
    ):
        search(near(1.0, 1.0), scale=0.5)
    parts = iter([{"math": 1.0}, {"math": 1.0, "code": 0.5}])
    with pytest.raises(
        InputError, match=r"^evaluate must return the same names each time; got \['math', 'code'\] after"
    ):
        search(lambda merged: next(parts))
    with pytest.raises(ParameterError, match=r"^refine must be an int >= 0; got -1\.$"):
        search(near(1.0, 1.0), refine=-1)
    with pytest.raises(ParameterError, match=r"^linear has no setting scale\. It has normalize, weight\.$"):
        search_scale(near(1.0, 1.0), BASE, MODELS, method="linear")
    for result in ("good", {}, {"math": "good"}, None):
        with pytest.raises(InputError, match=r"^evaluate must return a number, or numbers by name; got "):
            search(lambda merged, result=result: result)
