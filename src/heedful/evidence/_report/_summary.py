"""A study's result as JSON and as Markdown, and how its numbers are written everywhere.

The page, the console and the documentation show the same summary; what a number or an interval looks like is decided here
and nowhere else.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from heedful.evidence._result import StudyResult, TrialRecord
from heedful.evidence._verdicts import Verdict, rules

_FORMAT = 1
_MARKDOWN_ROWS = 60  # Longer result tables stay in the JSON file.
OUTCOMES = ("holds", "contradicted", "inconclusive")


def result_to_json(result: StudyResult) -> dict[str, Any]:
    """Everything about a result but its single trials, as JSON types.

    Numbers that do not exist are None. An interval is ``[low, high]`` with None for a bound at infinity. The time and place
    of single trials, their curves and logs are left out: the file is made to be kept under version control and rendered by
    ``to_markdown``.

    Parameters
    ----------
    result : StudyResult
        What running the study returned.

    Returns
    -------
    dict
        ``question``, ``answer``, ``budget``, ``unit``, ``rules``, ``arms``, ``metrics``, ``verdicts``, ``results`` (one entry
        per task and arm: settings chosen, mean and standard deviation of every metric and cost), ``failures``, ``code``,
        ``threads``, ``machine``, ``data`` and ``command``.
    """
    study, budget = result.study, result.budget
    trials = result.trials + result.tuning
    return {
        "format": _FORMAT,
        "study": study.slug,
        "question": study.question,
        "answer": answer(result.verdicts),
        "rules": rules(result.verdicts),
        "budget": {
            "name": result.budget_name,
            "seeds": budget.seeds,
            "tuning_seeds": budget.tuning_seeds,
            "timeout_s": budget.timeout_s,
            "spend": budget.spend,
        },
        "unit": study.unit,
        "tune_on": study.tune_on,
        "arms": {
            name: {"aware": arm.aware, "points": len(arm.points), "untuned": arm.untuned}
            for name, arm in study.arms.items()
        },
        "metrics": [{"name": m.name, "unit": m.unit, "better": m.better} for m in study.metrics],
        "verdicts": [_verdict(verdict) for verdict in result.verdicts],
        "results": [
            _cell(result, task, arm) for task in _tasks(result) for arm in study.arms if (task, arm) in result.chosen
        ],
        "failures": _failures(trials),
        "code": sorted({trial.code for trial in trials}),
        "threads": sorted({trial.threads for trial in trials}),
        "machine": dict(result.machine),
        "data": {task: dict(study.tasks[task].data) for task in _tasks(result)},
        "command": result.command,
    }


def _tasks(result: StudyResult) -> list[str]:
    return [task for task in result.study.tasks if any(task == chosen for chosen, _ in result.chosen)]


def _verdict(verdict: Verdict) -> dict[str, Any]:
    claim = verdict.claim
    return {
        "claim": str(claim),
        "arm": claim.arm,
        "beats": claim.beats,
        "on": claim.on,
        "margin": claim.margin,
        "exploratory": claim.exploratory,
        "task": verdict.task,
        "outcome": verdict.outcome,
        "reason": verdict.reason,
        "unit": verdict.unit,
        "effect": _finite(verdict.effect),
        "interval": [_finite(verdict.low), _finite(verdict.high)],
        "interval_alone": [_finite(verdict.low_alone), _finite(verdict.high_alone)],
        "p": _finite(verdict.p),
        "p_holm": _finite(verdict.p_holm),
        "p_rank": _finite(verdict.p_rank),
        "pairs": len(verdict.pairs),
        "missing": verdict.missing,
    }


def _cell(result: StudyResult, task: str, arm: str) -> dict[str, Any]:
    trials = [trial for trial in result.trials if (trial.task, trial.arm) == (task, arm)]
    done = [trial for trial in trials if trial.status == "done"]
    settings = result.chosen[task, arm]
    return {
        "task": task,
        "arm": arm,
        "settings": None if settings is None else dict(settings),
        "done": len(done),
        "failed": len(trials) - len(done),
        "metrics": _moments(trial.metrics for trial in done),
        "costs": _moments(trial.costs for trial in done),
    }


def _moments(rows: Iterable[Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    """Mean, standard deviation (None below two values) and count of the finite values of every name."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if math.isfinite(value):
                values.setdefault(name, []).append(float(value))
    return {
        name: {"mean": statistics.fmean(v), "sd": statistics.stdev(v) if len(v) > 1 else None, "n": len(v)}
        for name, v in values.items()
    }


FAILURE_KEY = ("task", "arm", "split", "settings", "reason")


def failure_key(trial: TrialRecord) -> tuple[str, ...]:
    """What trials that failed alike share, by the names in ``FAILURE_KEY``."""
    return trial.task, trial.arm, trial.split, settings_text(trial.settings), trial.reason


def _failures(trials: Iterable[TrialRecord]) -> list[dict[str, Any]]:
    """Failed trials, those that failed alike together."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for trial in trials:
        if trial.status == "failed":
            groups.setdefault(failure_key(trial), []).append(trial.seed)
    return [{**dict(zip(FAILURE_KEY, key, strict=True)), "seeds": seeds} for key, seeds in groups.items()]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def answer(verdicts: Sequence[Verdict]) -> str:
    """The plain answer: how many claims hold, are contradicted, or stay open."""
    confirmatory = [verdict for verdict in verdicts if not verdict.claim.exploratory]
    count: Counter[str] = Counter(verdict.outcome for verdict in confirmatory)
    total, n_claims = len(confirmatory), len({verdict.claim for verdict in confirmatory})
    extra = len(verdicts) - total
    parts = []
    if total:
        noun = "claim" if total == n_claims else "verdict"
        parts.append(
            f"{count['holds']} of {total} {noun}{'s' * (total > 1)} {'holds' if count['holds'] == 1 else 'hold'}"
        )
        parts += [f"{count[outcome]} {outcome}" for outcome in OUTCOMES[1:] if count[outcome]]
    else:
        parts.append("No claim was tested")
    sentence = ", ".join(parts)
    if total > n_claims:
        n_tasks = len({verdict.task for verdict in confirmatory} - {None})
        sentence += f" ({n_claims} claim{'s' * (n_claims > 1)}, {n_tasks} tasks)"
    if extra:
        sentence += f"; {extra} exploratory comparison{'s' * (extra > 1)} beside them"
    return sentence + "."


def number(value: float | None, spread: float | None = None, *, sign: bool = False) -> str:
    """``value`` with as many digits as show ``spread`` to two; four significant ones without a spread."""
    if value is None:
        return "–"
    value += 0.0  # no "−0"
    plus = "+" if sign else ""
    if not spread or not math.isfinite(spread):
        if value == int(value) or abs(value) >= 1000:
            text = f"{value:{plus},.0f}"
        else:
            text = f"{value:{plus}.3g}" if abs(value) < 1 else f"{value:{plus}.4g}"
    elif (decimals := 1 - math.floor(math.log10(spread))) > 5 and value:
        text = f"{value:{plus}.{max(decimals + math.floor(math.log10(abs(value))), 0)}e}"
    else:
        text = f"{value:{plus},.{max(decimals, 0)}f}"
    return text.replace("-", "−").replace(",", "\u202f")


def mean_sd(moments: Mapping[str, Any] | None) -> str:
    """``mean ± sd``, or the mean alone where there is no spread."""
    if moments is None:
        return "–"
    mean, sd = moments["mean"], moments["sd"]
    return f"{number(mean, sd)} ± {number(sd, sd)}" if sd else number(mean)


def difference_unit(unit: str) -> str:
    """Unit of a difference: of two percentages, it is percentage points."""
    return "pp" if unit == "%" else unit


def advantage(verdict: Mapping[str, Any]) -> str:
    """The effect with sign and unit; positive is in favour of the claim."""
    if verdict["effect"] is None:
        return "–"
    return f"{number(verdict['effect'], _spread(verdict), sign=True)} {difference_unit(verdict['unit'])}".strip()


def interval(verdict: Mapping[str, Any]) -> str:
    """The simultaneous interval as ``[low, high]``; a round bracket where the bound itself is not part of it."""
    low, high = verdict["interval"]
    edge = -verdict["margin"]  # A rejected claim's interval ends at the tested value without containing it.
    spread = _spread(verdict)
    left = "(−∞" if low is None else f"({number(edge)}" if low == edge else f"[{number(low, spread)}"
    right = "∞)" if high is None else f"{number(edge)})" if high == edge else f"{number(high, spread)}]"
    return f"{left}, {right}"


def _spread(verdict: Mapping[str, Any]) -> float | None:
    """Half the width of the narrowest finite interval: it sets the digits worth printing."""
    widths = [
        (high - low) / 2
        for low, high in (verdict["interval"], verdict["interval_alone"])
        if low is not None and high is not None and high > low
    ]
    return min(widths, default=None)


def p_value(p: float | None) -> str:
    """Three decimals at most."""
    return "–" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def settings_text(settings: Mapping[str, Any] | None) -> str:
    """``name=value`` pairs, or what it means that there are none."""
    if settings is None:
        return "none: every setting failed"
    return ", ".join(
        f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in settings.items()
    )


def to_markdown(data: Mapping[str, Any]) -> str:
    """Question, answer, verdicts, results and provenance as Markdown.

    Parameters
    ----------
    data : mapping
        What ``result_to_json`` returned, or the same read back from a file.
    """
    verdicts = [
        [
            v["claim"] + (" (exploratory)" if v["exploratory"] else ""),
            v["task"] or "all tasks",
            v["outcome"],
            advantage(v),
            interval(v),
            p_value(v["p"] if v["exploratory"] else v["p_holm"]),
            v["reason"],
        ]
        for v in data["verdicts"]
    ]
    costs = cost_names(data)
    results = [
        [cell["task"], cell["arm"]]
        + [mean_sd(cell["metrics"].get(metric["name"])) for metric in data["metrics"]]
        + [mean_sd(cell["costs"].get(cost)) for cost in costs]
        + [settings_text(cell["settings"]) or "–", f"{cell['failed']} of {cell['done'] + cell['failed']}"]
        for cell in data["results"]
    ]
    parts = [f"**{_escape(data['question'])}**", _escape(data["answer"])]
    parts.append(_table(["Claim", "Task", "Verdict", "Advantage", "Interval", "p", "Why"], verdicts))
    parts.append(_escape(data["rules"]))
    if len(results) <= _MARKDOWN_ROWS:
        heads = [metric_head(metric) for metric in data["metrics"]] + [cost_head(cost) for cost in costs]
        parts.append(_table(["Task", "Arm", *heads, "Settings", "Failed"], results))
    parts.append(
        _escape(f"Budget: {budget_text(data)}. Code {', '.join(data['code'])}. {machine_text(data['machine'])}.")
    )
    parts.append(f"```console\n{data['command'].replace('`', '')}\n```")
    return "\n\n".join(parts) + "\n"


def cost_names(data: Mapping[str, Any]) -> list[str]:
    """Costs that some arm has: the unit of equal budgets first, then seconds and memory, then the others."""
    found = dict.fromkeys(name for cell in data["results"] for name in cell["costs"])
    first = [name for name in (data["unit"], "seconds", "peak_mib") if name in found]
    return first + [name for name in found if name not in first]


def metric_head(metric: Mapping[str, Any]) -> str:
    """Name, unit and direction of a metric."""
    unit = f" ({metric['unit']})" if metric["unit"] else ""
    return f"{metric['name']}{unit} {'↑' if metric['better'] == 'higher' else '↓'}"


def cost_head(cost: str) -> str:
    """A cost as the head of a column."""
    return {"peak_mib": "peak memory (MiB)", "seconds": "time (s)"}.get(cost, cost)


def budget_text(data: Mapping[str, Any]) -> str:
    """The budget in words."""
    budget = data["budget"]
    spend = [f"{number(value)} {name}" for name, value in budget["spend"].items()]
    evaluation, tuning = (f"{n} %s seed{'s' * (n != 1)}" for n in (budget["seeds"], budget["tuning_seeds"]))
    parts = [evaluation % "evaluation", tuning % "tuning", *spend, f"at most {number(budget['timeout_s'])} s a trial"]
    return f"{budget['name']}: {', '.join(parts)}"


def machine_label(key: str) -> str:
    """The name of an entry about the machine, its unit in brackets."""
    return key.replace("_gib", " (GiB)").replace("_", " ")


def machine_text(machine: Mapping[str, Any]) -> str:
    """The machine in a line: its plain entries, then the packages."""
    plain = [f"{machine_label(key)} {value}" for key, value in machine.items() if not isinstance(value, Mapping)]
    nested = [
        f"{name} {version}"
        for value in machine.values()
        if isinstance(value, Mapping)
        for name, version in value.items()
    ]
    return ", ".join(plain + nested)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [[_escape(text) for text in row] for row in [head, *rows]]
    lines.insert(1, ["---"] * len(head))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


_SPECIAL = str.maketrans(
    {**{c: "\\" + c for c in "\\`*_[]|~#$"}, "<": "&lt;", ">": "&gt;", "&": "&amp;", "\n": " ", "\r": " "}
)


def _escape(text: str) -> str:
    """Text that Markdown and HTML show as it is, on one line."""
    return text.translate(_SPECIAL)
