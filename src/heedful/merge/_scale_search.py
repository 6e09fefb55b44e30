"""The scales of a merge, searched by what a user measures: one for all models, coarse to fine, then model by model."""

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from heedful._random import spawn
from heedful._results import Event, Report, report_progress
from heedful._validation import require_number
from heedful.errors import InputError, ParameterError
from heedful.merge._methods import MergeMethod, merge_state_dicts

__all__ = ["ScaleSearch", "search_scale"]


@dataclasses.dataclass(frozen=True, eq=False)
class ScaleSearch(Report):
    """What ``search_scale`` found; all evaluations in their order.

    Parameters
    ----------
    best : tuple of float
        A scale for each model, as ``merge_state_dicts(..., scale=search.best)`` takes it: the first of those with the
        largest score.
    scales : Float[np.ndarray, "n K"]
        What was evaluated: n is what the search has cost.
    scores : Float[np.ndarray, " n"]
        The scores; larger is better.
    parts : mapping of str to Float[np.ndarray, " n"]
        What the scores are means of, if ``evaluate`` returned several numbers by name.
    """

    best: tuple[float, ...]
    scales: Float[np.ndarray, "n K"]
    scores: Float[np.ndarray, " n"]
    parts: Mapping[str, Float[np.ndarray, " n"]]

    @property
    def evaluations(self) -> int:
        """How many merged models were evaluated."""
        return len(self.scores)

    @property
    def table(self):
        """A DataFrame with a row for each evaluation: ``scale_0``, …, ``score``, and the parts by name."""
        import pandas as pd

        scales = {f"scale_{k}": column for k, column in enumerate(self.scales.T)}
        return pd.DataFrame({**scales, "score": self.scores, **self.parts})


def search_scale(
    evaluate: Callable[[dict[str, Tensor]], float | Mapping[str, float]],
    base: Mapping[str, Tensor],
    models: Sequence[Mapping[str, Tensor]] | Mapping[str, Mapping[str, Tensor]],
    *,
    grid: Sequence[float] = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0),
    refine: int = 2,
    method: str | MergeMethod = "cabs",
    random_state=None,
    **params: Any,
) -> ScaleSearch:
    """Find the scale λ of each model by evaluating merged models.

    First every value of ``grid`` for all models alike; then, ``refine`` times, each model's scale one step up and down
    with the others at the best so far. The first step is the mean spacing of the grid, and each round halves it.

    Parameters
    ----------
    evaluate : callable
        Takes a merged state dict and returns a score, larger is better, or scores by name (of tasks), whose mean counts.
        It should measure on rows that are kept for this, not on test rows.
    base, models, method, **params
        As in ``merge_state_dicts``; the method is one that has a ``scale``.
    grid : sequence of float
        At least one scale.
    refine : int
        Rounds of refinement, >= 0; with a grid of one value there are none.
    random_state : int, RandomState, Generator or None
        For methods that draw at random: all evaluations see the same draws.

    Notes
    -----
    At most len(grid) + 2 · K · refine evaluations, each with a merge of its own.

    Examples
    --------
    >>> import torch
    >>> base, models = {"w": torch.zeros(2)}, [{"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 1.0])}]
    >>> goal = torch.tensor([0.5, 0.9])
    >>> search = search_scale(lambda merged: -float((merged["w"] - goal).square().sum()), base, models, n=1, m=2)
    >>> search.best, search.evaluations
    ((0.5, 0.9), 17)
    """
    require_number(refine, "refine", low=0, integer=True)
    if not len(grid):
        raise ParameterError("grid is empty. Give at least one scale, such as 1.0.")
    for value in grid:
        require_number(value, "each value of grid")
    if "scale" in params:
        raise ParameterError("scale is what search_scale looks for. Give the values to try as grid.")
    seed = spawn(random_state, 1)[0]
    results: dict[tuple[float, ...], tuple[float, dict[str, float]]] = {}
    budget = len(grid) + 2 * len(models) * refine

    def score(scales: tuple[float, ...]) -> float:
        if scales not in results:
            merged = merge_state_dicts(base, models, method=method, random_state=seed, scale=scales, **params)
            results[scales] = _score(evaluate(merged))
            known = next(iter(results.values()))[1]
            if results[scales][1].keys() != known.keys():
                raise InputError(
                    f"evaluate must return the same names each time; got {list(results[scales][1])} after {list(known)}."
                )
            report_progress(Event("search", len(results), budget, {"score": results[scales][0]}))
        return -math.inf if math.isnan(results[scales][0]) else results[scales][0]

    # Rounded, so that a scale that is reached in two ways is evaluated once.
    best = max(((round(float(value), 10),) * len(models) for value in grid), key=score)
    step = (max(grid) - min(grid)) / max(len(grid) - 1, 1)
    for _ in range(refine if step else 0):
        for k in range(len(models)):
            values = (best[k], round(best[k] - step, 10), round(best[k] + step, 10))
            best = max(((*best[:k], value, *best[k + 1 :]) for value in values), key=score)
        step /= 2
    names = next(iter(results.values()))[1]
    return ScaleSearch(
        best=best,
        scales=np.array(list(results)),
        scores=np.array([value for value, _ in results.values()]),
        parts={name: np.array([parts[name] for _, parts in results.values()]) for name in names},
    )


def _score(result: Any) -> tuple[float, dict[str, float]]:
    """What ``evaluate`` returned as one number, and its parts by name, if it has any."""
    parts = {str(name): value for name, value in result.items()} if isinstance(result, Mapping) else {}
    values = list(parts.values()) if isinstance(result, Mapping) else [result]
    if not values or not all(isinstance(value, numbers.Real) for value in values):
        raise InputError(f"evaluate must return a number, or numbers by name; got {result!r}.")
    return sum(map(float, values)) / len(values), {name: float(value) for name, value in parts.items()}
