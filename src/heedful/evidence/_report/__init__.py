"""The evidence as one page: verdicts, figures, costs, settings, failures, machine, and how to run it again.

The page is a single HTML file that asks the network for nothing and works without JavaScript, which only sorts tables.
Names, settings and logs come from trials and are untrusted: the template escapes every value, and a content security
policy refuses any script but the page's own.
"""

import base64
import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from heedful._files import write_atomic
from heedful.errors import InputError
from heedful.evidence._report import _figures, _summary
from heedful.evidence._report._summary import result_to_json, to_markdown
from heedful.evidence._result import StudyResult, TrialRecord

__all__ = ["result_to_json", "to_markdown", "write_report"]

_CURVE_POINTS = 200  # of one line
_CURVE_POINTS_PAGE = 60_000  # of all lines: about 0.6 MB
_LOG_CHARACTERS = 4_000  # of one log, its end
_LOG_CHARACTERS_STUDY = 200_000  # of all logs of a study
_OPEN_TASKS = 3  # More tasks than this are folded, each under its name.
_OPEN_VERDICTS = 24  # More verdicts than this are folded, each claim's under its own.


def write_report(results: Sequence[StudyResult], path: str | os.PathLike) -> Path:
    """Write one self-contained HTML page about ``results``, atomically.

    Parameters
    ----------
    results : sequence of StudyResult
        One section each, in this order.
    path : path
        The file; replaced if it exists. Its folder must exist.

    Returns
    -------
    Path
        ``path``.

    Raises
    ------
    InputError
        If there are no results.

    Notes
    -----
    Curves are thinned evenly to at most 200 points a line, and further if there are thousands of them; every other number
    on the page is complete.
    """
    if not results:
        raise InputError("write_report needs at least one StudyResult; got none. Run a study first.")
    page = _render(results)
    with write_atomic(path) as temporary:
        temporary.write_bytes(page.encode("utf-8", errors="replace"))  # lone surrogates in a log are no reason to fail
    return Path(path)


def _render(results: Sequence[StudyResult]) -> str:
    loader = jinja2.PackageLoader(__name__)
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        name: getattr(_summary, name)
        for name in (
            "advantage",
            "cost_head",
            "interval",
            "machine_label",
            "mean_sd",
            "metric_head",
            "number",
            "p_value",
            "settings_text",
        )
    }
    environment.filters["key"] = lambda value: "" if value is None else f"{value:.6g}"
    script, style = (loader.get_source(environment, name)[0] for name in ("sort.js", "page.css"))
    n_lines = sum(len(trial.curves) for result in results for trial in result.trials)
    limit = min(_CURVE_POINTS, max(12, _CURVE_POINTS_PAGE // max(n_lines, 1)))
    return environment.get_template("page.html").render(
        studies=[_study(result, limit) for result in results],
        style=Markup(style),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        outcomes=_summary.OUTCOMES,
    )


def _study(result: StudyResult, curve_points: int) -> dict[str, Any]:
    """What the template needs of one study."""
    data = result_to_json(result)
    # The method's own colours come first, so that it looks the same beside any number of baselines.
    ranked = sorted(data["arms"], key=lambda arm: not data["arms"][arm]["aware"])
    pairs = list(zip(result.verdicts, data["verdicts"], strict=True))
    by_metric = _grouped(pairs, lambda pair: pair[1]["on"])
    folded = len(pairs) > _OPEN_VERDICTS
    panels = _grouped(pairs, lambda pair: pair[1]["claim"]) if folded else by_metric
    tasks = list(dict.fromkeys(cell["task"] for cell in data["results"]))
    confirmatory = [verdict["outcome"] for verdict in data["verdicts"] if not verdict["exploratory"]]
    started = sorted(trial.started for trial in result.trials + result.tuning if trial.started)
    return {
        "data": data,
        "tally": {outcome: confirmatory.count(outcome) for outcome in _summary.OUTCOMES if outcome in confirmatory},
        "looks": {arm: ranked.index(arm) % 8 for arm in ranked},
        "folded": folded,
        "forests": [(title, _figures.forest(group[0][1]["on"], group)) for title, group in panels.items()],
        "tasks": [_task(task, result, data, curve_points) for task in tasks],
        "open_tasks": len(tasks) <= _OPEN_TASKS,
        "costs": _summary.cost_names(data),
        "budget": _summary.budget_text(data),
        "logs": _logs(data["failures"], result.trials + result.tuning),
        "n_trials": len(result.trials) + len(result.tuning),
        "started": (started[0], started[-1]) if started else None,
    }


def _task(task: str, result: StudyResult, data: dict[str, Any], curve_points: int) -> dict[str, Any]:
    """Figures and numbers of one task."""
    trials = [trial for trial in result.trials if trial.task == task and trial.status == "done"]
    arms, metrics = list(data["arms"]), data["metrics"]
    plots = [_figures.tradeoff(metrics[0], trials, arms)]
    plots += [_figures.curve(name, trials, arms, limit=curve_points) for name in _figures.curve_names(trials)]
    return {
        "name": task,
        "cells": [cell for cell in data["results"] if cell["task"] == task],
        "verdicts": [verdict for verdict in data["verdicts"] if verdict["task"] == task and not verdict["exploratory"]],
        "strips": [strip for metric in metrics if (strip := _figures.strip(metric, trials, arms))],
        "plots": [plot for plot in plots if plot],
    }


def _grouped(items: Sequence[Any], key: Any) -> dict[Any, list[Any]]:
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _logs(failures: Sequence[dict[str, Any]], trials: Sequence[TrialRecord]) -> list[str]:
    """For every kind of failure the end of the first log."""
    limit = min(_LOG_CHARACTERS, _LOG_CHARACTERS_STUDY // max(len(failures), 1))
    first: dict[tuple, str] = {}
    for trial in trials:
        if trial.status == "failed":
            first.setdefault(_summary.failure_key(trial), trial.log)
    ends = (first[tuple(failure[name] for name in _summary.FAILURE_KEY)] for failure in failures)
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", log)[-limit:] for log in ends]  # without the colours of terminals


_CONTROLS = dict.fromkeys([*range(9), 11, 12, *range(14, 32), *range(127, 160)], "\ufffd")


def _printable(value: Any) -> Any:
    """Text without control characters, which HTML cannot carry."""
    return value.translate(_CONTROLS) if type(value) is str else value
