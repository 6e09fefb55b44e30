"""Verdicts against hand-made numbers, statsmodels, brute force over the closed test, and simulation."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import DescrStatsW, ttost_paired

from heedful.errors import InputError
from heedful.evidence import _verdicts
from heedful.evidence._result import TrialRecord
from heedful.evidence._study import Arm, Budget, Claim, Metric, Study, Task
from heedful.evidence._verdicts import Decision, Estimate, decide, holm, judge, paired_t, rules

FAMILIES = 20_000
NOISE = 4 * math.sqrt(0.025 * 0.975 / FAMILIES)  # four standard errors of a rate of 2.5 %: 0.0044


def never_run(task, *, budget, seed):
    raise AssertionError("judging runs nothing")


@dataclasses.dataclass(frozen=True)
class Trial:
    task: str
    arm: str
    seed: int
    metrics: dict
    split: str = "test"
    status: str = "done"


def a_study(*claims: Claim, tasks=("digits",), better="higher", **budget) -> Study:
    return Study(
        slug="made_up",
        question="Does it?",
        tasks=dict.fromkeys(tasks, Task(never_run)),
        arms={name: Arm(never_run, untuned="hand-made scores") for name in ("aware", "blind", "other")},
        metrics=[Metric("accuracy", "%", better=better)],
        claims=claims,
        budgets={"full": Budget(**{"seeds": 5, **budget})},
    )


def superior(**settings) -> Claim:
    return Claim("aware", **{"beats": "blind", "on": "accuracy", **settings})


def trials_of(task="digits", **scores) -> list[Trial]:
    """Trials of each arm with seeds 0, 1, …; None is a failed one."""
    return [
        Trial(task, arm, seed, {} if x is None else {"accuracy": x}, status="failed" if x is None else "done")
        for arm, values in scores.items()
        for seed, x in enumerate(values)
    ]


def verdicts_of(study: Study, trials):
    return judge(study, trials, budget=study.budgets["full"])


def verdict_on(differences, *, blind=50.0, **settings):
    """The one verdict on these differences, over as many seeds."""
    study = a_study(superior(**settings), seeds=len(differences))
    scores = {"aware": [blind + d for d in differences], "blind": [blind] * len(differences)}
    (verdict,) = verdicts_of(study, trials_of(**scores))
    return verdict


# Hand-made numbers


def test_five_pairs_by_hand():
    # d = 1..5: mean 3, variance 10/4, standard error sqrt(2.5 / 5) = sqrt(0.5), t = 3 / sqrt(0.5) = 4.2426, df = 4.
    # Student's t with 4 degrees of freedom has F(t) = 1/2 + (3/8) s (1 - s²/12 · …) in closed form:
    # two-sided p = 1 - s (1 + (1 - s²) / 2), s = t / sqrt(4 + t²).
    verdict = verdict_on([1, 2, 3, 4, 5])
    s = 18**0.5 / 22**0.5
    assert verdict.p == pytest.approx(1 - s * (1 + (1 - s**2) / 2), rel=1e-12)
    assert verdict.effect == 3
    # The 97.5 % point of that t, 2.776, is in every table to three digits.
    assert (verdict.low, verdict.high) == pytest.approx((3 - 2.776 * 0.5**0.5, 3 + 2.776 * 0.5**0.5), abs=5e-4)
    assert (verdict.low, verdict.high) == (verdict.low_alone, verdict.high_alone)
    assert verdict.p_holm == verdict.p
    assert (verdict.outcome, verdict.unit) == ("holds", "%")
    assert verdict.reason == "5 of 5 pairs; the interval lies above 0."


def test_the_other_direction_contradicts():
    verdict = verdict_on([-1, -2, -3, -4, -5])
    assert verdict.outcome == "contradicted"
    assert verdict.reason == "5 of 5 pairs; the interval lies below 0."
    assert verdict.high < 0


def test_neither_direction_is_inconclusive():
    verdict = verdict_on([-1, 2, -1, 2, 0.5])
    assert verdict.outcome == "inconclusive"
    assert verdict.reason == "5 of 5 pairs; the interval includes 0."


def test_a_margin_turns_the_same_pairs_into_non_inferiority():
    differences = [-0.4, 0.2, -0.1, 0.3, -0.2]
    assert verdict_on(differences).outcome == "inconclusive"
    verdict = verdict_on(differences, margin=1.0)
    assert verdict.outcome == "holds"
    assert verdict.reason == "5 of 5 pairs; the interval lies above -1 %, the margin."
    assert verdict.low > -1
    assert str(verdict.claim) == "aware not worse than blind within 1 on accuracy"
    worse = verdict_on([d - 2 for d in differences], margin=1.0)
    assert worse.outcome == "contradicted"
    assert worse.reason == "5 of 5 pairs; the interval lies below -1 %, the margin."
    assert verdict_on([d - 1 for d in differences], margin=1.0).outcome == "inconclusive"


@pytest.mark.parametrize("n", [0, 1, 2])
def test_fewer_than_three_pairs_are_inconclusive_however_large(n):
    study = a_study(superior(), seeds=max(n, 1))
    trials = trials_of(aware=[99.0, 98.0][:n], blind=[1.0, 2.5][:n])
    (verdict,) = verdicts_of(study, trials)
    assert verdict.outcome == "inconclusive"
    assert verdict.reason.endswith("fewer than 3 pairs are not a test.")
    assert len(verdict.pairs) == n
    assert (verdict.low, verdict.high, verdict.low_alone, verdict.high_alone) == (-math.inf, math.inf) * 2
    assert np.isnan([verdict.p, verdict.p_holm, verdict.p_rank]).all()
    assert math.isnan(verdict.effect) == (n == 0)


@pytest.mark.parametrize("step", [0.0, 0.1, -0.3])  # 50 + 0.1 − 50 is not 0.1: equal only up to rounding
def test_equal_differences_are_not_a_test(step):
    aware = [50 + step, 60 + step, 70.1 + step, 0.7 + step, 33.3 + step, 12.3 + step]
    study = a_study(superior(), seeds=6)
    (verdict,) = verdicts_of(study, trials_of(aware=aware, blind=[50, 60, 70.1, 0.7, 33.3, 12.3]))
    assert verdict.outcome == "inconclusive"
    assert verdict.reason == f"6 of 6 pairs; not a test: the difference is {step:+.3g} % on every seed."
    assert verdict.effect == pytest.approx(step, abs=1e-12)
    assert np.isnan([verdict.p, verdict.p_holm, verdict.p_rank]).all()


def test_scores_of_single_precision_count_as_equal_when_they_round_alike():
    blind = np.array([0.11, 0.52, 0.93, 0.75], dtype=np.float32)
    aware = (blind + np.float32(0.01)).astype(np.float32)
    differences = aware.astype(float) - blind.astype(float)
    assert np.ptp(differences) > 0  # or the test would say nothing
    study = a_study(superior(), seeds=4)
    (verdict,) = verdicts_of(study, trials_of(aware=aware.tolist(), blind=blind.tolist()))
    assert "not a test" in verdict.reason
    aware[3] += 0.001
    (verdict,) = verdicts_of(study, trials_of(aware=aware.tolist(), blind=blind.tolist()))
    assert "not a test" not in verdict.reason


def test_failed_trials_lose_their_pairs_and_the_others_are_joined_by_seed():
    aware = [51, None, 53, 54, 55, 56, 57, 58, 59, 60]
    blind = [50, 1000, 50, None, 50, 50, 50, 50, 50, 50]
    (verdict,) = verdicts_of(a_study(superior(), seeds=10), trials_of(aware=aware, blind=blind))
    assert verdict.missing == 2
    assert verdict.reason == "2 of 10 pairs lost: trials failed or are missing; the interval lies above 0."
    assert {pair.seed: pair.difference for pair in verdict.pairs} == {s: s + 1 for s in (0, 2, 4, 5, 6, 7, 8, 9)}


def test_a_score_that_is_not_a_number_or_not_there_loses_the_pair():
    trials = trials_of(aware=[1, 2, math.nan, 4, math.inf], blind=[0, 0, 0, 0, 0])
    trials[5] = dataclasses.replace(trials[5], metrics={"another": 1.0})
    (verdict,) = verdicts_of(a_study(superior()), trials)
    assert [pair.seed for pair in verdict.pairs] == [1, 3]
    assert verdict.reason == "3 of 5 pairs lost: trials failed or are missing; fewer than 3 pairs are not a test."


def test_validation_trials_and_seeds_beyond_the_budget_are_not_read():
    trials = trials_of(aware=[1, 2, 3, 4, 5, -500], blind=[0, 0, 0, 0, 0, 0])
    trials += [dataclasses.replace(t, split="validation", metrics={"accuracy": -500.0}) for t in trials]
    (verdict,) = verdicts_of(a_study(superior()), trials)
    assert verdict.effect == 3


def test_two_trials_for_one_place_are_refused():
    trials = trials_of(aware=[1, 2, 3], blind=[0, 0, 0])
    with pytest.raises(InputError) as error:
        verdicts_of(a_study(superior()), [*trials, trials[1]])
    assert str(error.value) == (
        "Two test trials are of task 'digits', arm 'aware' and seed 1; a verdict takes one of each. Give the trials of "
        "one run, with one setting per task and arm."
    )


def test_pairs_of_tasks_are_means_over_the_seeds_that_both_sides_have():
    study = a_study(superior(pairs="tasks"), tasks="abcd", seeds=2)
    trials = [
        *trials_of("a", aware=[2, 4], blind=[1, 1]),  # +2
        *trials_of("b", aware=[5, 100], blind=[2, None]),  # +3, by the first seed alone
        *trials_of("c", aware=[5, 5], blind=[1, 1]),  # +4
        *trials_of("d", aware=[None, 1], blind=[1, None]),  # no seed on both sides
    ]
    (verdict,) = verdicts_of(study, trials)
    assert verdict.task is None
    assert [(pair.task, pair.seed, pair.difference) for pair in verdict.pairs] == [
        ("a", None, 2),
        ("b", None, 3),
        ("c", None, 4),
    ]
    assert verdict.missing == 1
    # t = 3 / (1 / sqrt 3) with 2 degrees of freedom: p = 1 − t / sqrt(2 + t²).
    assert verdict.p == pytest.approx(1 - 27**0.5 / 29**0.5, rel=1e-12)
    assert verdict.reason == (
        "1 of 4 pairs lost: trials failed or are missing; 1 of the 6 seeds they average lost; "
        "the interval lies above 0."
    )


def test_equal_differences_over_tasks_say_task():
    trials = [trial for task in "abc" for trial in trials_of(task, aware=[2], blind=[1])]
    (verdict,) = verdicts_of(a_study(superior(pairs="tasks"), tasks="abc", seeds=1), trials)
    assert verdict.reason == "3 of 3 pairs; not a test: the difference is +1 % on every task."


def test_claims_wait_for_a_budget_with_their_tasks():
    study = a_study(
        superior(), superior(tasks=("b",)), superior(pairs="tasks"), superior(tasks=("c",)), tasks="abc", seeds=3
    )
    trials = [trial for task in "abc" for trial in trials_of(task, aware=[1, 2, 3], blind=[0, 0, 0])]
    assert [v.task for v in verdicts_of(study, trials)] == ["a", "b", "c", "b", None, "c"]
    small = judge(study, trials, budget=Budget(seeds=3, tasks=["a", "b"]))
    assert [(v.task, len(v.pairs)) for v in small] == [("a", 3), ("b", 3), ("b", 3), (None, 2)]
    nothing = judge(a_study(superior(tasks=("c",)), tasks="abc"), trials, budget=Budget(seeds=3, tasks=["a"]))
    assert nothing == ()


def test_exploratory_claims_are_ordinary_t_tests_outside_the_family():
    scores = {"aware": [3.0, 4.1, 4.9, 6.2, 4.0], "blind": [0.0] * 5, "other": [0.9, 1.1, 1.0, 0.8, 1.3]}
    claim, explored = superior(), superior(beats="other", exploratory=True)
    (alone,) = verdicts_of(a_study(claim), trials_of(**scores))
    first, second = verdicts_of(a_study(claim, explored), trials_of(**scores))
    assert first == alone
    expected = DescrStatsW(np.subtract(scores["aware"], scores["other"]))
    assert second.p == pytest.approx(expected.ttest_mean(0)[1], rel=1e-12)
    assert (second.low, second.high) == pytest.approx(expected.tconfint_mean(), rel=1e-12)
    assert (second.low, second.high) == (second.low_alone, second.high_alone)
    assert math.isnan(second.p_holm)
    assert second.outcome == "holds"
    assert verdict_on([-1, -2, -3, -4, -5], exploratory=True).outcome == "contradicted"


def test_holm_and_its_interval_by_hand():
    # Two degrees of freedom: F(t) = 1/2 + t / (2 sqrt(2 + t²)), with the upper q point (1 − 2q) / sqrt(2 q (1 − q)).
    def point(q):
        return (1 - 2 * q) / math.sqrt(2 * q * (1 - q))

    a, b, c = [9.9, 10.0, 10.1], [0.7, 1.0, 1.3], [-1.0, 0.0, 1.3]  # standard errors s / sqrt 3, s = 0.1, 0.3, 1.15
    trials = [t for task, d in zip("abc", (a, b, c), strict=True) for t in trials_of(task, aware=d, blind=[0.0] * 3)]
    va, vb, vc = verdicts_of(a_study(superior(), tasks="abc", seeds=3), trials)
    # One-sided p: a 1.7e-5 <= 2.5 %/3; b (t = 5.77) 0.0144 > 2.5 %/2, although <= 2.5 %; c more.
    assert [v.outcome for v in (va, vb, vc)] == ["holds", "inconclusive", "inconclusive"]
    assert va.low == 0  # decided, with nothing left to say by how much: the boundary itself
    assert vb.low == pytest.approx(1 - point(0.0125) * 0.3 / 3**0.5, rel=1e-9)
    assert vc.low == pytest.approx(0.1 - point(0.0125) * np.std(c, ddof=1) / 3**0.5, rel=1e-9)
    assert [v.high for v in (va, vb, vc)] == pytest.approx(  # nothing contradicted: all at 2.5 %/3
        [np.mean(d) + point(0.025 / 3) * np.std(d, ddof=1) / 3**0.5 for d in (a, b, c)], rel=1e-9
    )
    assert vb.low_alone > 0
    assert vb.reason == "3 of 3 pairs; the interval includes 0, though only after correction for 3 verdicts."
    assert va.p_holm == pytest.approx(3 * va.p, rel=1e-12)
    assert vb.p_holm == pytest.approx(2 * vb.p, rel=1e-12)
    # Without c both hold, b at 2.5 %/1, and the bounds speak again: Bonferroni's, but never from below the boundary.
    va, vb = verdicts_of(a_study(superior(tasks=("a", "b")), tasks="abc", seeds=3), trials)
    assert [v.outcome for v in (va, vb)] == ["holds", "holds"]
    assert va.low == pytest.approx(10 - point(0.0125) * 0.1 / 3**0.5, rel=1e-9)
    assert 1 - point(0.0125) * 0.3 / 3**0.5 < 0
    assert vb.low == 0


def test_what_is_not_a_test_keeps_its_place_in_the_family():
    differences = [0.7, 1.0, 1.3]  # one-sided p = 0.0144: rejected alone, not in a family of two
    trials = trials_of("a", aware=differences, blind=[0.0] * 3) + trials_of("b", aware=[1.0] * 3, blind=[0.0] * 3)
    study = a_study(superior(), tasks="ab", seeds=3)
    assert [v.outcome for v in verdicts_of(study, trials)] == ["inconclusive", "inconclusive"]
    assert [v.outcome for v in judge(study, trials, budget=Budget(seeds=3, tasks=["a"]))] == ["holds"]


def test_rank_test_by_hand_from_six_pairs():
    assert math.isnan(verdict_on([1, 2, 3, 4, 5]).p_rank)
    assert verdict_on([1, 2, 3, 4, 5, 6]).p_rank == pytest.approx(2 / 2**6)  # all of one sign: 2 of 64 arrangements
    # Rank sum of the negatives 1 + 2 = 3: the subsets of {1..6} with sum <= 3 are {}, 1, 2, 3, 12, that is 5 of 64.
    assert verdict_on([-1, -2, 3, 4, 5, 6]).p_rank == pytest.approx(2 * 5 / 64)
    assert verdict_on([0.5, 1.5, 2.5, 3.5, 4.5, -0.75], margin=1.0).p_rank == pytest.approx(2 / 2**6)


def test_rank_test_takes_differences_equal_up_to_rounding_as_ties():
    tied = [1, 1, 1, -1, 2, 4, 4]
    aware, blind = (
        [2.1, 3.2, 4.3, 5.2, 6.5, 7.8, 8.9],
        [2.0, 3.1, 4.2, 5.3, 6.3, 7.4, 8.5],
    )  # a tenth of that, in floats
    study = a_study(superior(), seeds=7)
    (verdict,) = verdicts_of(study, trials_of(aware=aware, blind=blind))
    assert len({abs(pair.difference) for pair in verdict.pairs}) > 3  # or the test would say nothing
    assert verdict.p_rank == verdict_on(tied).p_rank


def test_rank_test_never_decides():
    # Seven of one sign with one far out: p_rank 1.6 %, and the t test, which decides, says 35 %.
    verdict = verdict_on([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 40])
    assert verdict.p_rank < 0.05 < verdict.p
    assert verdict.outcome == "inconclusive"


@settings(max_examples=40)  # SciPy enumerates the signs of tied ranks in Python
@given(
    st.lists(st.integers(-4, 4), min_size=6, max_size=7).filter(lambda d: len(set(d)) > 1),
    st.sampled_from([0.0, 1.0]),
)
def test_rank_test_takes_any_ties_and_zeros(differences, margin):
    assert 0 < verdict_on(differences, margin=margin).p_rank <= 1


def test_verdicts_become_json():
    record = verdict_on([1, 2, 3]).to_dict()
    assert record["claim"]["arm"] == "aware"
    assert record["pairs"][2] == {"task": "digits", "seed": 2, "aware": 53, "blind": 50, "difference": 3}


def test_a_kept_trial_has_all_that_judging_reads():
    reads = {name for name in vars(_verdicts.Trial) if not name.startswith("_")}
    assert reads <= {field.name for field in dataclasses.fields(TrialRecord)}


# An independent library


@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 13])
def test_holm_is_that_of_statsmodels(m, seed):
    p = np.random.default_rng([seed, m]).uniform(0, 0.1, size=m).round(2)  # rounded: ties
    rejected, adjusted, *_ = multipletests(p, alpha=0.025, method="holm")
    ours = holm(p)
    np.testing.assert_allclose(ours, adjusted, rtol=1e-12)  # the same products in another order
    clear = np.abs(adjusted - 0.025) > 1e-12  # m·p <= α and p <= α/m may round differently
    np.testing.assert_array_equal((ours <= 0.025)[clear], rejected[clear])
    np.testing.assert_array_equal(holm(np.stack([p, p[::-1]])), [ours, ours[::-1]])  # a family is a row


@pytest.mark.parametrize("margin", [0.0, 0.5])
@pytest.mark.parametrize("n", [3, 5, 10, 40])
def test_t_tests_and_intervals_are_those_of_statsmodels(n, margin, seed):
    aware, blind = 70 + np.random.default_rng([seed, n]).normal(size=(2, n))
    (verdict,) = verdicts_of(a_study(superior(margin=margin), seeds=n), trials_of(aware=aware, blind=blind))
    described = DescrStatsW(aware - blind)
    assert verdict.p == pytest.approx(described.ttest_mean(-margin)[1], rel=1e-9)
    assert (verdict.low, verdict.high) == pytest.approx(described.tconfint_mean(0.05), rel=1e-9)
    # Non-inferiority is the lower half of a test of equivalence.
    _, (_, p_lower, _), _ = ttost_paired(aware, blind, -margin, 1e3)
    assert (verdict.outcome == "holds") == (p_lower <= 0.025)
    assert float(_verdicts.p_above(paired_t(aware - blind), -margin)) == pytest.approx(p_lower, rel=1e-9)


@pytest.mark.parametrize("better", ["higher", "lower"])
def test_a_whole_study_is_decided_as_statsmodels_decides_it(better, seed):
    rng, tasks = np.random.default_rng(seed), "abcdef"
    sign = 1 if better == "higher" else -1
    scores = {task: rng.normal([[sign * 0.6 * i], [0.0]], 1.0, size=(2, 6)) for i, task in enumerate(tasks)}
    trials = [t for task in tasks for t in trials_of(task, aware=scores[task][0], blind=scores[task][1])]
    verdicts = verdicts_of(a_study(superior(), tasks=tasks, better=better, seeds=6), trials)
    described = [DescrStatsW(sign * (scores[task][0] - scores[task][1])) for task in tasks]
    for name, alternative in (("holds", "larger"), ("contradicted", "smaller")):
        p = [d.ttest_mean(0, alternative=alternative)[1] for d in described]
        rejected, *_ = multipletests(p, alpha=0.025, method="holm")
        assert [v.outcome == name for v in verdicts] == list(rejected)
    pairs = [[pair.difference for pair in v.pairs] for v in verdicts]
    together = decide(paired_t(np.array(pairs)), 0.0)  # the arrays of the simulations below are what judge computes
    np.testing.assert_array_equal([v.low for v in verdicts], together.low)
    np.testing.assert_array_equal([v.high for v in verdicts], together.high)


# The definition: Holm is the closed test by Bonferroni, and the region is what the tests of all parts leave


def lower_bounds_by_definition(estimate: Estimate, boundary: np.ndarray, level: float) -> list[float]:
    """Least i-th coordinate of the effects that no test of the partition rejects, found part by part.

    Part J holds the effects with ``effect_j <= boundary_j`` for j in J alone. It is tested by Bonferroni over J, and
    J = {} by Bonferroni over all: what lies below one of the bounds at level / |J| is rejected.
    """
    m = len(boundary)
    lowest = [math.inf] * m
    for size in range(m + 1):
        bounds = estimate.mean - scipy.stats.t.ppf(1 - level / (size or m), estimate.df) * estimate.se
        for part in itertools.combinations(range(m), size):
            if all(bounds[j] < boundary[j] for j in part):  # some effect of this part is left
                for i in range(m):
                    outside = max(boundary[i], bounds[i]) if size == 0 else boundary[i]
                    lowest[i] = min(lowest[i], bounds[i] if i in part else outside)
    return lowest


@pytest.mark.parametrize("m", [1, 2, 3, 5])
def test_intervals_are_the_projections_of_the_closed_test(m, seed):
    rng = np.random.default_rng([seed, m])
    decided = set()
    for effects in [[0.0], [3.0], [-3.0, 0.0, 1.0, 3.0]] * 30:
        boundary = -rng.choice([0.0, 0.5], size=m)
        estimate = paired_t(rng.normal(rng.choice(effects, size=(m, 1)), 1.0, size=(m, 6)))
        decision = decide(estimate, boundary)
        np.testing.assert_allclose(decision.low, lower_bounds_by_definition(estimate, boundary, 0.025), rtol=1e-9)
        high = -np.array(lower_bounds_by_definition(estimate.mirrored, -boundary, 0.025))
        np.testing.assert_allclose(decision.high, high, rtol=1e-9)
        decided.add(int(decision.holds.sum()))
    assert {0, m} <= decided  # all the cases of the rule were met


# Simulation, by the functions that judge applies


def simulate(seed: int, effects, n: int, *, shared: float = 0.0) -> Decision:
    """``FAMILIES`` families with these true effects over n seeds; a share of the noise is common to a family."""
    rng = np.random.default_rng([seed, n, len(effects)])
    own = rng.normal(size=(FAMILIES, len(effects), n))
    common = rng.normal(size=(FAMILIES, 1, n))
    return decide(paired_t(np.array(effects)[:, None] + math.sqrt(1 - shared) * own + math.sqrt(shared) * common), 0.0)


@pytest.mark.parametrize("n", [3, 5, 10])
def test_without_effect_each_side_errs_at_its_nominal_level(n, seed):
    decision = simulate(seed, [0.0], n)
    assert abs(decision.holds.mean() - 0.025) < NOISE  # for one verdict the level is exact, not only an upper bound
    assert abs(decision.contradicted.mean() - 0.025) < NOISE


@pytest.mark.parametrize("n", [3, 5, 10])
@pytest.mark.parametrize("shared", [0.0, 0.9])  # claims of a study share the aware arm
def test_without_effect_a_family_errs_at_most_at_its_nominal_level(n, shared, seed):
    decision = simulate(seed, [0.0] * 5, n, shared=shared)
    assert decision.holds.any(axis=-1).mean() < 0.025 + NOISE
    assert decision.contradicted.any(axis=-1).mean() < 0.025 + NOISE


@pytest.mark.parametrize("n", [3, 5, 10])
def test_true_effects_in_a_family_do_not_make_the_others_err_more(n, seed):
    decision = simulate(seed, [5.0, 5.0, 0.0, 0.0], n)
    assert decision.holds[:, 2:].any(axis=-1).mean() < 0.025 + NOISE
    if n == 10:  # and Holm spends what they free: with both decided, 2.5 % are left for two, not for four
        assert decision.holds[:, :2].all(axis=-1).mean() > 0.999
        assert decision.holds[:, 2:].any(axis=-1).mean() > 0.025 - NOISE


@pytest.mark.parametrize("n", [3, 5, 10])
@pytest.mark.parametrize("effect", [-1.0, 0.3, 2.0])
def test_the_interval_of_one_verdict_covers_its_effect_at_95_percent(effect, n, seed):
    decision = simulate(seed, [effect], n)
    covered = ((decision.low < effect) & (effect < decision.high)).mean()
    assert abs(covered - 0.95) < 0.015


@pytest.mark.parametrize("n", [3, 5, 10])
@pytest.mark.parametrize(
    "effects", [[0.0] * 4, [3.0, 1.0, 0.0, -1.0], [3.0, 3.0, 3.0], [1.2, 0.8, 0.4, 0.0, 0.0], [-2.0, -2.0]]
)
def test_simultaneous_intervals_cover_all_effects_at_once(effects, n, seed):
    decision = simulate(seed, effects, n)
    effects = np.array(effects)
    # An end at the boundary is open: an effect of exactly 0 in (0, …) is not covered.
    covered = ((decision.low < effects) & (effects < decision.high)).all(axis=-1).mean()
    assert covered > 0.95 - 4 * math.sqrt(0.05 * 0.95 / FAMILIES)


def test_bonferroni_bounds_beside_holm_decisions_would_not_cover(seed):
    """Why a decided verdict states its boundary only: with the obvious bounds instead, coverage is lost."""
    effects = np.array([0.9, 0.9, 0.0, 0.0])
    rng = np.random.default_rng(seed)
    estimate = paired_t(effects[:, None] + rng.normal(size=(FAMILIES, 4, 10)))
    decision = decide(estimate, 0.0)
    naive = _verdicts.lower_bound(estimate, 0.025 / np.maximum(1, 4 - decision.holds.sum(axis=-1, keepdims=True)))
    assert (decision.low < effects).all(axis=-1).mean() > 0.975 - NOISE
    assert (naive < effects).all(axis=-1).mean() < 0.975 - NOISE


# Properties

SCORES = st.lists(st.integers(-6, 9), min_size=1, max_size=6)  # whole numbers: ties are common
FAMILY = st.lists(SCORES, min_size=1, max_size=4)
# SciPy enumerates signs in Python when ranks tie, some 30 ms for six pairs: hence fewer examples than usual.
few = settings(max_examples=40)
MARGINS = st.sampled_from([0.0, 1.0, 2.5])


def family_of(scores, *, margin=0.0, scale=1.0, sign=1, better="higher", shuffled=None):
    tasks = [f"t{i}" for i in range(len(scores))]
    blind = [3.0, -1.0, 4.0, 1.0, 5.0, 9.0]
    trials = []
    for task, differences in zip(tasks, scores, strict=True):
        aware = [sign * scale * (b + d) for b, d in zip(blind, differences, strict=False)]
        trials += trials_of(task, aware=aware, blind=[sign * scale * b for b in blind])
    if shuffled is not None:
        shuffled.shuffle(trials)
    study = a_study(
        superior(margin=scale * margin),
        superior(margin=scale * margin, exploratory=True, pairs="tasks"),
        tasks=tasks,
        better=better,
        seeds=6,
    )
    return verdicts_of(study, trials)


@few
@given(FAMILY, MARGINS)
def test_the_interval_excludes_the_boundary_exactly_when_the_verdict_is_decided(scores, margin):
    for verdict in family_of(scores, margin=margin):
        assert (verdict.outcome == "holds") == (verdict.low >= -margin)
        assert (verdict.outcome == "contradicted") == (verdict.high <= -margin)
        assert math.isnan(verdict.effect) or verdict.low <= verdict.effect <= verdict.high
        if not math.isnan(verdict.p_holm):
            assert (verdict.p_holm <= 0.05) == (verdict.outcome != "inconclusive")
            assert verdict.p_holm >= verdict.p * (1 - 1e-12)
        if verdict.outcome == "inconclusive":  # a decided one may say less than it could alone, the others never more
            assert verdict.low <= verdict.low_alone
            assert verdict.high >= verdict.high_alone


@few
@given(FAMILY, MARGINS, st.randoms(use_true_random=False))
def test_the_order_of_trials_changes_nothing(scores, margin, shuffled):
    # Compared as text: NaN is not equal to itself, and repr gives every digit.
    assert repr(family_of(scores, margin=margin, shuffled=shuffled)) == repr(family_of(scores, margin=margin))


@few
@given(FAMILY, MARGINS)
def test_a_metric_of_which_less_is_better_gives_the_same_verdicts_on_negated_scores(scores, margin):
    plain, flipped = family_of(scores, margin=margin), family_of(scores, margin=margin, sign=-1, better="lower")
    for one, other in zip(plain, flipped, strict=True):
        assert [-p.aware for p in one.pairs] == [p.aware for p in other.pairs]
        assert repr(one) == repr(dataclasses.replace(other, pairs=one.pairs))


@few
@given(FAMILY, MARGINS, st.integers(-40, 40).map(lambda k: 2.0**k))  # powers of two scale without rounding
def test_the_unit_scales_effect_and_interval_and_nothing_else(scores, margin, scale):
    for one, other in zip(family_of(scores, margin=margin), family_of(scores, margin=margin, scale=scale), strict=True):
        assert (one.outcome, one.missing) == (other.outcome, other.missing)
        numbers = ("effect", "low", "high", "low_alone", "high_alone")
        scaled = [scale * getattr(one, name) for name in numbers]
        np.testing.assert_array_equal(scaled, [getattr(other, name) for name in numbers])
        same = ("p", "p_holm", "p_rank")
        np.testing.assert_array_equal([getattr(one, n) for n in same], [getattr(other, n) for n in same])


# The rules in words


def test_rules_say_how_many_verdicts_were_corrected_together():
    verdicts = family_of([[1, 2, 3], [2, 3, 4]])  # two confirmatory ones and an exploratory one
    text = rules(verdicts)
    assert "confirmatory verdicts of this study (2 here) are corrected together by Holm" in text
    assert "at 2.5 % for holds and 2.5 % for contradicted" in text
    assert "cover all the true differences with 95 %" in text
    assert "Fewer than 3 pairs" in text
    assert "From 6 pairs on a Wilcoxon" in text


@pytest.mark.parametrize(
    ("constant", "value", "says"),
    [
        ("LEVEL", 0.01, "at 0.5 % for holds and 0.5 % for contradicted"),
        ("LEVEL", 0.01, "own 99 % interval"),
        ("MIN_PAIRS", 6, "Fewer than 6 pairs"),
        ("MIN_RANK_PAIRS", 7, "From 7 pairs on"),
    ],
)
def test_a_changed_constant_changes_the_rules_in_words_and_in_deed(constant, value, says, monkeypatch):
    before = family_of([[1, 2, 3.5, 4, 8, 1]])  # 6 pairs; p between 1 and 5 %
    monkeypatch.setattr(_verdicts, constant, value)
    after = family_of([[1, 2, 3.5, 4, 8, 1]])
    assert says in rules(after)
    monkeypatch.undo()
    assert says not in rules(before)
    fields = {"LEVEL": ("outcome", "low_alone"), "MIN_PAIRS": (), "MIN_RANK_PAIRS": ("p_rank",)}[constant]
    for name in fields:
        assert getattr(before[0], name) != getattr(after[0], name)


def test_the_least_number_of_pairs_is_the_constant(monkeypatch):
    assert verdict_on([1, 2, 3, 4]).outcome == "holds"
    monkeypatch.setattr(_verdicts, "MIN_PAIRS", 5)
    assert verdict_on([1, 2, 3, 4]).reason == "4 of 4 pairs; fewer than 5 pairs are not a test."


@pytest.mark.parametrize("scale", [1e-200, 1e-160, 1e160])
def test_the_t_statistic_does_not_depend_on_the_unit_however_small_or_large(scale):
    d = np.array([0.3, -0.2, 0.9, -0.4, 0.1])
    one, scaled = paired_t(d), paired_t(d * scale)
    assert scaled.mean / scaled.se == pytest.approx(one.mean / one.se, rel=1e-12)
