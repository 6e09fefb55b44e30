"""Verdicts: what the paired differences of a study say about each of its claims.

A pair is what ``claim.arm`` and ``claim.beats`` scored on the same task and seed; its difference d is oriented so that
positive is in the claimed direction. With the boundary −margin (0 for superiority) two one-sided hypotheses are tested
by the paired t statistic, each in a family of its own over the m confirmatory verdicts of the study::

    H_i: E d_i <= −margin_i   rejected: "holds"          K_i: E d_i >= −margin_i   rejected: "contradicted"

Each family is corrected by Holm's step-down [1]_ at α = 2.5 %, so a study makes any false decision with probability at
most 5 %. The interval of a verdict inverts that very procedure [2]_ [3]_, one bound from each family. With r of the m
hypotheses H rejected, the lower bounds are

* of a hypothesis not rejected: the t bound at level α/(m − r). It is below −margin, for Holm stopped at p > α/(m − r);
* of a rejected one while others are not: −margin itself, excluded. The level was spent on deciding *that* the effect is
  above it, none is left to say by how much; a Bonferroni bound here would break the joint coverage;
* of all m, once all are rejected: the t bound at level α/m, or −margin where that is higher.

The upper bounds mirror them in the family K. All m intervals together cover all m effects with probability at least
95 %, and an interval excludes its boundary exactly when the verdict is decided. For m = 1 it is the usual t interval.

References
----------
.. [1] S. Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6, 1979.
.. [2] K. Strassburger, F. Bretz, "Compatible simultaneous lower confidence bounds for the Holm procedure and other
   Bonferroni-based closed tests", Statistics in Medicine 27, 2008.
.. [3] O. Guilbaud, "Simultaneous confidence regions corresponding to Holm's step-down procedure and other
   closed-testing procedures", Biometrical Journal 50, 2008.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import scipy  # its stats load on first use: worker processes import this room and judge nothing
from jaxtyping import Float

from heedful._results import Report
from heedful.errors import InputError
from heedful.evidence._study import Budget, Claim, Study

__all__ = ["Pair", "Verdict", "judge", "rules"]

LEVEL = 0.05
"""Chance of any false decision in a study: half of it for "holds", half for "contradicted"."""

MIN_PAIRS = 3
"""Fewer pairs are not a test: two differences agree in sign half of the time by luck."""

MIN_RANK_PAIRS = 6
"""Fewer pairs cannot reach p <= 5 % in a two-sided signed-rank test, whatever they are: 2 / 2⁵ > 5 % >= 2 / 2⁶."""

ROUNDING = 1e-6
"""Differences closer than this share of the largest score are equal: a few roundings of single precision."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two scores that differ in the arm alone.

    Parameters
    ----------
    task : str
        The task of both.
    seed : int or None
        The evaluation seed of both; None where the scores are means over a task's seeds.
    aware, blind : float
        The scores of ``claim.arm`` and of ``claim.beats``, in the unit of the metric.
    difference : float
        aware − blind, its sign turned for a metric of which less is better: positive is in the claimed direction.
    """

    task: str
    seed: int | None
    aware: float
    blind: float
    difference: float


@dataclasses.dataclass(frozen=True)
class Verdict(Report):
    """What the pairs say about one claim.

    Parameters
    ----------
    claim : Claim
        The claim.
    task : str or None
        The task it was judged on; None: over all tasks (``claim.pairs == "tasks"``).
    outcome : {"holds", "contradicted", "inconclusive"}
        Whether the interval excludes ``-claim.margin`` and lies above it, below it, or does not.
    reason : str
        The outcome in one plain sentence.
    unit : str
        Unit of ``effect``, the intervals and the pairs.
    effect : float
        Mean difference, positive in the claimed direction; NaN without pairs.
    low, high : float
        The interval that matches the outcome, simultaneous with those of all confirmatory verdicts of the study. A
        bound equal to ``-claim.margin`` is itself excluded. (−inf, inf) where there was no test.
    low_alone, high_alone : float
        This verdict's own 95 % t interval, as if it were the only one. (−inf, inf) where there was no test.
    p : float
        Two-sided paired t test of ``effect`` against ``-claim.margin``, uncorrected; NaN where there was no test.
    p_holm : float
        The same after Holm: at most 5 % exactly when the outcome is decided. NaN if exploratory or without a test.
    p_rank : float
        Two-sided Wilcoxon signed-rank test against ``-claim.margin``, uncorrected: a second opinion that decides
        nothing. NaN below six pairs or where there was no test.
    pairs : tuple of Pair
        What it rests on, in the order of tasks and seeds.
    missing : int
        Pairs lost because a trial failed or is missing.
    """

    claim: Claim
    task: str | None
    outcome: Literal["holds", "contradicted", "inconclusive"]
    reason: str
    unit: str
    effect: float
    low: float
    high: float
    low_alone: float
    high_alone: float
    p: float
    p_holm: float
    p_rank: float
    pairs: tuple[Pair, ...]
    missing: int


@runtime_checkable
class Trial(Protocol):
    """What ``judge`` reads of a trial."""

    @property
    def task(self) -> str: ...
    @property
    def arm(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def split(self) -> str: ...
    @property
    def status(self) -> str: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...


class Estimate(NamedTuple):
    """Mean differences, their standard errors (NaN where there is no test) and degrees of freedom."""

    mean: Float[np.ndarray, "*verdicts"]
    se: Float[np.ndarray, "*verdicts"]
    df: Float[np.ndarray, "*verdicts"]

    @property
    def mirrored(self) -> "Estimate":
        """The estimate of −d, by which everything said of one side serves the other."""
        return self._replace(mean=-self.mean)


class Decision(NamedTuple):
    """What the two Holm families say of the same verdicts: simultaneous intervals, two-sided adjusted p, decisions."""

    low: Float[np.ndarray, "*families m"]
    high: Float[np.ndarray, "*families m"]
    p_holm: Float[np.ndarray, "*families m"]
    holds: np.ndarray
    contradicted: np.ndarray


def paired_t(d: Float[np.ndarray, "*verdicts n"], rounding: float | Float[np.ndarray, "*verdicts"] = 0.0) -> Estimate:
    """Mean and standard error of n differences each; no test below ``MIN_PAIRS`` or if all lie within ``rounding``."""
    n = d.shape[-1]
    df = np.full(d.shape[:-1], n - 1.0)
    if n < MIN_PAIRS:
        mean = d.mean(axis=-1) if n else np.full(d.shape[:-1], np.nan)
        return Estimate(np.asarray(mean), np.full(d.shape[:-1], np.nan), df)
    # By the range: the standard deviation of equal numbers is a rounding error, not 0, and would make t enormous.
    span = np.ptp(d, axis=-1)
    varies = span > rounding
    unit = np.where(varies, span, 1.0)  # squares of tiny differences would vanish, and noise look like certainty
    se = np.where(varies, unit * (d / unit[..., None]).std(axis=-1, ddof=1) / math.sqrt(n), np.nan)
    return Estimate(np.asarray(d.mean(axis=-1)), se, df)


def p_above(estimate: Estimate, boundary: float | np.ndarray) -> np.ndarray:
    """One-sided p of E d <= boundary. 1 where there is no test.

    Such a verdict stays in the family and is never rejected. That is the conservative choice: left out, it would hand
    its share of the level to the others, and whether it is left out would depend on the data (a crash, a tie).
    """
    p = scipy.stats.t.sf((estimate.mean - boundary) / estimate.se, estimate.df)
    return np.where(np.isnan(p), 1.0, p)


def lower_bound(estimate: Estimate, level: float | np.ndarray) -> np.ndarray:
    """Lower confidence bounds of E d, each missed with probability ``level``. −inf where there is no test."""
    bound = estimate.mean - scipy.stats.t.isf(level, estimate.df) * estimate.se
    return np.where(np.isnan(bound), -np.inf, bound)


def holm(p: Float[np.ndarray, "*families m"]) -> Float[np.ndarray, "*families m"]:
    """Holm's adjusted p-values of families of m [1]_: the i-th smallest (from 0) times m − i, made monotone."""
    m = p.shape[-1]
    order = np.argsort(p, axis=-1, kind="stable")
    steps = np.take_along_axis(p, order, axis=-1) * np.arange(m, 0, -1)
    adjusted = np.empty_like(p)
    np.put_along_axis(adjusted, order, np.minimum(np.maximum.accumulate(steps, axis=-1), 1.0), axis=-1)
    return adjusted


def holm_lower_bounds(estimate: Estimate, boundary: float | np.ndarray, level: float) -> tuple[np.ndarray, np.ndarray]:
    """Adjusted p of E d <= boundary over families on the last axis, and the lower bounds compatible with Holm [2]_."""
    adjusted = holm(p_above(estimate, boundary))
    rejected = adjusted <= level
    m = rejected.shape[-1]
    left = m - rejected.sum(axis=-1, keepdims=True)
    bound = lower_bound(estimate, level / np.where(left == 0, m, left))
    some = np.where(rejected, boundary, bound)
    return adjusted, np.where(left == 0, np.maximum(boundary, bound), some)


def decide(estimate: Estimate, boundary: float | np.ndarray) -> Decision:
    """Both one-sided families at half of ``LEVEL`` each; families lie along the last axis of ``estimate``."""
    side = LEVEL / 2
    p_holds, low = holm_lower_bounds(estimate, boundary, side)
    p_contradicted, minus_high = holm_lower_bounds(estimate.mirrored, -boundary, side)
    p_holm = np.minimum(1.0, 2 * np.minimum(p_holds, p_contradicted))
    return Decision(low, -minus_high, p_holm, p_holds <= side, p_contradicted <= side)


def judge(study: Study, trials: Iterable[Trial], *, budget: Budget) -> tuple[Verdict, ...]:
    """Judge the claims of ``study`` by its evaluation trials.

    Parameters
    ----------
    study : Study
        Its claims, in whose order the verdicts come; one per task, or one over all tasks if ``claim.pairs == "tasks"``.
    trials : iterable of TrialRecord
        In any order. Only the test split is read, and only the evaluation seeds of ``budget``.
    budget : Budget
        Its seeds and tasks are the pairs that should exist. Claims about none of its tasks are left out.

    Returns
    -------
    tuple of Verdict

    Raises
    ------
    InputError
        If two test trials are of the same task, arm and seed, so that a pair would be a matter of choice.
    """
    scores = _scores(trials)
    samples = [sample for claim in study.claims for sample in _samples(study, claim, scores, budget)]
    family = iter(_judge_family([sample for sample in samples if not sample.claim.exploratory]))
    # An exploratory claim is a family of one, for which all of this is the ordinary two-sided t test.
    return tuple(_judge_family([sample])[0] if sample.claim.exploratory else next(family) for sample in samples)


def rules(verdicts: Sequence[Verdict]) -> str:
    """The rules that ``judge`` applied to ``verdicts``, in words, from the constants it applies."""
    family = sum(not verdict.claim.exploratory for verdict in verdicts)
    side, cover = f"{50 * LEVEL:g} %", f"{100 * (1 - LEVEL):g} %"
    return (
        "Pairs share task and seed; a difference is positive in the claimed direction, and a paired t test compares "
        "their mean with 0, or with minus the margin of a claim that has one. "
        f"The confirmatory verdicts of this study ({family} here) are corrected together by Holm, at {side} for holds "
        f"and {side} for contradicted, and their intervals are those that match: together they cover all the true "
        f"differences with {cover} confidence. A verdict is decided when its interval excludes the value it is compared with. "
        f"Exploratory claims stand outside, each with its own {cover} interval. "
        f"Fewer than {MIN_PAIRS} pairs, or the same difference in all of them, are not a test and inconclusive. "
        f"From {MIN_RANK_PAIRS} pairs on a Wilcoxon signed-rank test gives a second opinion, which decides nothing."
    )


@dataclasses.dataclass(frozen=True)
class _Sample:
    """The pairs of one verdict, and how many of them (and of the seeds they average) there should be."""

    claim: Claim
    task: str | None
    unit: str
    pairs: tuple[Pair, ...]
    planned: int
    lost_seeds: str = ""

    @property
    def differences(self) -> Float[np.ndarray, " n"]:
        return np.array([pair.difference for pair in self.pairs], dtype=np.float64)

    @property
    def rounding(self) -> float:
        """How far apart differences may be and still be equal: a share of the scores, for it is scores that round."""
        return ROUNDING * max((max(abs(pair.aware), abs(pair.blind)) for pair in self.pairs), default=0.0)


def _scores(trials: Iterable[Trial]) -> dict[tuple[str, str, int], Mapping[str, float]]:
    """Metrics by task, arm and seed; none for a failed trial."""
    scores: dict[tuple[str, str, int], Mapping[str, float]] = {}
    for trial in trials:
        if trial.split != "test":
            continue
        key = (trial.task, trial.arm, trial.seed)
        if key in scores:
            raise InputError(
                f"Two test trials are of task {trial.task!r}, arm {trial.arm!r} and seed {trial.seed}; a verdict takes "
                "one of each. Give the trials of one run, with one setting per task and arm."
            )
        scores[key] = trial.metrics if trial.status == "done" else {}
    return scores


def _samples(
    study: Study, claim: Claim, scores: Mapping[tuple[str, str, int], Mapping[str, float]], budget: Budget
) -> list[_Sample]:
    """The samples of ``claim``: one per task within the budget, or one over them."""
    metric = study.metric(claim.on)
    tasks = [task for task in claim.tasks or study.tasks if budget.tasks is None or task in budget.tasks]

    def pair(task: str, seed: int | None, aware: float, blind: float) -> Pair:
        return Pair(task, seed, aware, blind, metric.sign * (aware - blind))

    by_task: dict[str, list[Pair]] = {task: [] for task in tasks}
    for task in tasks:
        for seed in range(budget.seeds):
            aware, blind = (
                float(scores.get((task, arm, seed), {}).get(claim.on, math.nan)) for arm in (claim.arm, claim.beats)
            )
            if math.isfinite(aware) and math.isfinite(blind):
                by_task[task].append(pair(task, seed, aware, blind))

    if claim.pairs == "seeds":
        return [_Sample(claim, task, metric.unit, tuple(by_task[task]), budget.seeds) for task in tasks]
    means = tuple(
        pair(task, None, statistics.fmean(p.aware for p in pairs), statistics.fmean(p.blind for p in pairs))
        for task, pairs in by_task.items()
        if pairs
    )
    planned = len(means) * budget.seeds
    lost = planned - sum(map(len, by_task.values()))
    lost_seeds = f"{lost} of the {planned} seeds they average lost" if lost else ""
    return [_Sample(claim, None, metric.unit, means, len(tasks), lost_seeds)] if tasks else []


def _judge_family(members: Sequence[_Sample]) -> list[Verdict]:
    """Verdicts corrected together, in the order of their samples."""
    if not members:
        return []
    own = [paired_t(sample.differences, sample.rounding) for sample in members]
    together = Estimate(*(np.stack(values) for values in zip(*own, strict=True)))
    decision = decide(together, np.array([0.0 - sample.claim.margin for sample in members]))  # 0, not −0, without one
    by_member = (Decision(*values) for values in zip(*decision, strict=True))
    return [_verdict(*args, family=len(members)) for args in zip(members, own, by_member, strict=True)]


def _verdict(sample: _Sample, estimate: Estimate, decision: Decision, *, family: int) -> Verdict:
    claim, boundary = sample.claim, -sample.claim.margin
    tested = not np.isnan(estimate.se)
    low_alone = float(lower_bound(estimate, LEVEL / 2))
    high_alone = -float(lower_bound(estimate.mirrored, LEVEL / 2))
    outcome: Literal["holds", "contradicted", "inconclusive"] = (
        "holds" if decision.holds else "contradicted" if decision.contradicted else "inconclusive"
    )
    p = 2 * min(float(p_above(estimate, boundary)), float(p_above(estimate.mirrored, -boundary)))
    p_rank = math.nan
    if tested and len(sample.pairs) >= MIN_RANK_PAIRS:
        # In steps of the rounding, so that equal differences are ties and differences at the boundary are zeros.
        steps = np.round((sample.differences - boundary) / sample.rounding)
        p_rank = float(scipy.stats.wilcoxon(steps).pvalue)
    return Verdict(
        claim=claim,
        task=sample.task,
        outcome=outcome,
        reason=_reason(sample, estimate, outcome, alone=not low_alone <= boundary <= high_alone, family=family),
        unit=sample.unit,
        effect=float(estimate.mean),
        low=float(decision.low),
        high=float(decision.high),
        low_alone=low_alone,
        high_alone=high_alone,
        p=min(p, 1.0) if tested else math.nan,
        p_holm=float(decision.p_holm) if tested and not claim.exploratory else math.nan,
        p_rank=p_rank,
        pairs=sample.pairs,
        missing=sample.planned - len(sample.pairs),
    )


def _reason(sample: _Sample, estimate: Estimate, outcome: str, *, alone: bool, family: int) -> str:
    """One sentence: the pairs there are, those that are not, and what they say. ``alone``: own interval decides."""
    n, unit = len(sample.pairs), f" {sample.unit}" if sample.unit else ""
    parts = [f"{n} of {sample.planned} pairs"]
    if n < sample.planned:
        parts = [f"{sample.planned - n} of {sample.planned} pairs lost: trials failed or are missing"]
    if sample.lost_seeds:
        parts.append(sample.lost_seeds)
    boundary = f"-{sample.claim.margin:g}{unit}, the margin" if sample.claim.margin else "0"
    if n < MIN_PAIRS:
        parts.append(f"fewer than {MIN_PAIRS} pairs are not a test")
    elif np.isnan(estimate.se):
        each = "seed" if sample.claim.pairs == "seeds" else "task"
        parts.append(f"not a test: the difference is {float(estimate.mean):+.3g}{unit} on every {each}")
    elif outcome == "inconclusive":
        corrected = f", though only after correction for {family} verdicts" if alone else ""
        parts.append(f"the interval includes {boundary}{corrected}")
    else:
        parts.append(f"the interval lies {'above' if outcome == 'holds' else 'below'} {boundary}")
    return "; ".join(parts) + "."
