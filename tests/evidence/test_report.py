import base64
import dataclasses
import hashlib
import io
import json
import math
import re
import statistics
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from heedful.errors import InputError
from heedful.evidence import Budget, Claim, Metric
from heedful.evidence._console import verdict_table
from heedful.evidence._report import _figures, _summary, result_to_json, to_markdown, write_report
from heedful.evidence._report._figures import Axis
from heedful.evidence._verdicts import Pair, Verdict
from tests.evidence.fakes import make_result, many_tasks_result, small_result, small_study

HOSTILE = "<script>alert(1)</script>|*`[red]"


def verdict(outcome="holds", *, task="digits", arm="tsam", low=0.0, high=3.0, alone=(0.5, 2.5), effect=1.5, **claim):
    """A verdict made by hand, with three pairs around its effect."""
    pairs = tuple(Pair("digits", s, 90.0 + d, 90.0, d) for s, d in enumerate((effect - 0.2, effect, effect + 0.2)))
    return Verdict(
        claim=Claim(arm, beats="sam", on="accuracy", **claim),
        task=task,
        outcome=outcome,
        reason="By hand.",
        unit="%",
        effect=effect,
        low=low,
        high=high,
        low_alone=alone[0],
        high_alone=alone[1],
        p=0.01,
        p_holm=0.02,
        p_rank=math.nan,
        pairs=pairs,
        missing=0,
    )


class Page(HTMLParser):
    """Elements, attributes and text of a page."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.text = [], ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def count(self, tag):
        return sum(name == tag for name, _ in self.elements)


@pytest.fixture
def page(tmp_path):
    """Write a report and parse it."""

    def write(*results):
        return Page(write_report(results, tmp_path / "report.html").read_text(encoding="utf-8"))

    return write


# ---- the answer and the numbers


def test_the_answer_counts_claims():
    outcomes = ["holds", "holds", "contradicted", "inconclusive", "inconclusive"]
    verdicts = [verdict(outcome, arm=f"a{i}") for i, outcome in enumerate(outcomes)]
    assert _summary.answer(verdicts) == "2 of 5 claims hold, 1 contradicted, 2 inconclusive."


def test_the_answer_says_when_a_claim_has_several_verdicts():
    verdicts = [verdict("holds", task="a"), verdict("contradicted", task="b")]
    assert _summary.answer(verdicts) == "1 of 2 verdicts holds, 1 contradicted (1 claim, 2 tasks)."


def test_exploratory_comparisons_are_outside_the_count():
    verdicts = [verdict("holds"), verdict("contradicted", exploratory=True)]
    assert _summary.answer(verdicts) == "1 of 1 claim holds; 1 exploratory comparison beside them."


def test_the_answer_to_no_claim():
    assert _summary.answer([]) == "No claim was tested."


@given(value=st.floats(-1e6, 1e6), spread=st.floats(1e-9, 1e3))
def test_a_number_is_rounded_by_less_than_a_tenth_of_its_spread(value, spread):
    text = _summary.number(value, spread).replace("−", "-").replace("\u202f", "")
    # Half a unit of the second digit of the spread is at most 5 % of it; the rest is float64.
    assert abs(float(text) - value) <= 0.051 * spread + 1e-12 * abs(value)


@pytest.mark.parametrize(
    ("value", "spread", "text"),
    [
        (0.83214, 0.0234, "0.832"),
        (-1.0, 0.5, "−1.00"),
        (4000.0, None, "4\u202f000"),
        (0.0123456, None, "0.0123"),
        (None, None, "–"),
        (-0.0, None, "0"),
        (1.2346e-7, 3e-9, "1.235e−07"),
    ],
)
def test_number(value, spread, text):
    assert _summary.number(value, spread) == text


@pytest.mark.parametrize(
    ("low", "high", "margin", "text"),
    [
        (0.0, 3.21, 0.0, "(0, 3.2]"),
        (-1.5, 0.0, 0.0, "[−1.50, 0)"),
        (-math.inf, math.inf, 0.0, "(−∞, ∞)"),
        (-0.5, 2.0, 0.5, "(−0.5, 2.0]"),
        (-math.inf, 2.0, 0.0, "(−∞, 2.0]"),
    ],
)
def test_an_interval_shows_which_of_its_ends_belong_to_it(low, high, margin, text):
    made = verdict(low=low, high=high, margin=margin, alone=(-1.0, 1.0))  # half of the narrower one sets the digits
    assert _summary.interval(_summary._verdict(made)) == text


def test_a_difference_of_percentages_is_in_percentage_points():
    assert _summary.advantage(_summary._verdict(verdict(effect=1.5, alone=(0.5, 2.5)))) == "+1.5 pp"


# ---- JSON and Markdown


def test_the_summary_is_strict_json_and_renders_alike_after_a_round_trip():
    data = result_to_json(small_result())
    text = json.dumps(data, allow_nan=False)
    assert to_markdown(json.loads(text)) == to_markdown(data)


def test_the_summary_has_mean_and_standard_deviation_of_the_finished_trials():
    result = small_result()
    scores = [t.metrics["accuracy"] for t in result.trials if (t.task, t.arm, t.status) == ("digits", "sam", "done")]
    cell = next(c for c in result_to_json(result)["results"] if (c["task"], c["arm"]) == ("digits", "sam"))
    assert cell["metrics"]["accuracy"] == {"mean": statistics.fmean(scores), "sd": statistics.stdev(scores), "n": 4}
    assert (cell["done"], cell["failed"], cell["settings"]) == (4, 1, {"lr": 0.03, "rho": 0.05})


def test_one_seed_has_a_mean_but_no_deviation():
    result = make_result(small_study(seeds=1), lambda *_: {"accuracy": 90.0, "curvature": 1.0})
    cell = result_to_json(result)["results"][0]
    assert cell["metrics"]["accuracy"] == {"mean": 90.0, "sd": None, "n": 1}
    assert _summary.mean_sd(cell["metrics"]["accuracy"]) == "90"


def test_trials_that_failed_alike_are_told_once_with_all_their_seeds():
    failed = {("digits", "sam", 1): "died", ("digits", "sam", 3): "died", ("digits", "sam", 4): "curvature is nan"}
    result = make_result(small_study(), lambda *_: {"accuracy": 90.0, "curvature": 1.0}, failed=failed)
    told = [(f["reason"], f["seeds"]) for f in result_to_json(result)["failures"]]
    assert told == [("died", [1, 3]), ("curvature is nan", [4])]


def test_the_markdown_table_has_a_row_for_every_verdict_and_result():
    result = small_result()
    lines = to_markdown(result_to_json(result)).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 2 + len(result.verdicts) + 2 + len(result.chosen)
    assert "| tsam beats sam on accuracy | digits | inconclusive | +0.56 pp | [−0.58, 2.03] |" in "\n".join(
        rows
    ).replace("\\[", "[").replace("\\]", "]")


def test_markdown_shows_hostile_names_literally():
    text = to_markdown(result_to_json(small_result(arms=(HOSTILE, "sam", "sgd"))))
    assert "<script" not in text
    assert r"&lt;script&gt;alert(1)&lt;/script&gt;\|\*\`\[red\]" in text
    widths = {len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("|")}
    assert widths == {8, 10}  # a pipe inside a name opens no further column in either table


# ---- the page


def test_the_page_has_the_answer_the_rules_and_how_to_run_it_again(page):
    result = small_result()
    text = page(result).text
    data = result_to_json(result)
    for part in (data["question"], data["answer"], data["rules"], data["command"], *data["code"], "Example CPU"):
        assert part in text
    for told in data["verdicts"]:
        assert told["reason"] in text
        assert _summary.interval(told) in text


def test_the_page_tells_failures_with_reason_and_log(page):
    text = page(small_result()).text
    assert "2 of 30 trials failed" in text
    assert "passed its time limit of 600 s" in text
    assert "FloatingPointError: overflow in exp" in text


def test_settings_costs_and_reasons_for_not_tuning_are_on_the_page(page):
    text = page(small_result()).text
    for part in (
        "lr=0.03, rho=0.05",
        "plain steps have no radius",
        "time (s)",
        "peak memory (MiB)",
        "gradients",
        "4\u202f000",
    ):
        assert part in text


def test_hostile_text_becomes_no_element_anywhere(page):
    result = small_result(arms=(HOSTILE, "sam", "sgd"), tasks=("digits", HOSTILE))
    trials = [
        dataclasses.replace(t, log=HOSTILE, settings={HOSTILE: HOSTILE}, reason=HOSTILE) if t.status == "failed" else t
        for t in result.trials
    ]
    curves = [dataclasses.replace(t, curves={HOSTILE: [(0.0, 1.0), (1.0, 2.0)]}) for t in trials]
    chosen = {key: {HOSTILE: HOSTILE} for key in result.chosen}
    machine = {HOSTILE: HOSTILE, "packages": {HOSTILE: HOSTILE}}
    study = dataclasses.replace(result.study, question=HOSTILE, unit=HOSTILE)
    hostile = dataclasses.replace(
        result, study=study, trials=tuple(curves), chosen=chosen, machine=machine, command=HOSTILE, budget_name=HOSTILE
    )
    parsed, tame = page(hostile), page(small_result())
    assert parsed.count("script") == tame.count("script") == 1
    known = {tag for tag, _ in tame.elements}
    assert {tag for tag, _ in parsed.elements} <= known
    attributes = {name for _, attrs in tame.elements for name in attrs}
    assert {name for _, attrs in parsed.elements for name in attrs} <= attributes
    assert parsed.text.count(HOSTILE) > 30


def test_control_characters_and_terminal_colours_of_a_log_are_not_on_the_page(page):
    result = small_result()
    trials = [
        dataclasses.replace(t, log="\x1b[31mred\x1b[0m \x00nul \ud800lone") if t.log else t for t in result.trials
    ]
    text = page(dataclasses.replace(result, trials=tuple(trials))).text
    assert "red \ufffdnul ?lone" in text


def test_the_page_refers_to_nothing_outside_itself_and_allows_its_own_script_only(page):
    parsed = page(small_result(), many_tasks_result(n_tasks=4))
    targets = [
        value for _, attrs in parsed.elements for name, value in attrs.items() if name in ("src", "href", "srcset")
    ]
    assert all(target.startswith("#") or target == "data:," for target in targets)
    policy = next(
        attrs["content"] for _, attrs in parsed.elements if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    script = re.search(r"for \(const head .*?\n}\n", parsed.text, re.DOTALL).group()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


def test_every_figure_says_what_it_shows(page):
    drawings = [attrs for tag, attrs in page(small_result()).elements if tag == "svg"]
    assert all(attrs.get("aria-label") for attrs in drawings if attrs.get("role") == "img")
    assert sum(attrs.get("role") == "img" for attrs in drawings) == 8 + 2 * (
        2 * 3 + 2
    )  # forest, strips, two plots a task


@pytest.mark.slow
def test_the_largest_study_stays_below_three_megabytes(tmp_path):
    path = write_report([many_tasks_result()], tmp_path / "report.html")
    assert path.stat().st_size < 3_000_000


def test_many_curves_and_long_logs_stay_below_three_megabytes(tmp_path):
    line = [(float(i), math.sin(i)) for i in range(800)]
    failed = {(f"t{i}", "sam", s): f"reason {i} {s}" for i in range(40) for s in range(5)}
    study = small_study(tasks=[f"t{i}" for i in range(40)])
    result = make_result(
        study,
        lambda *_: {"accuracy": 90.0, "curvature": 1.0},
        failed=failed,
        curve=lambda *_: {f"curve {i}": line for i in range(6)},
        log="x" * 20_000,
    )
    assert write_report([result], tmp_path / "report.html").stat().st_size < 3_000_000


def test_a_study_in_which_everything_failed_still_has_a_page(page):
    text = page(make_result(small_study(), lambda *_: {}, settings=lambda *_: None)).text
    assert "0 of 6 verdicts hold, 6 inconclusive" in text
    assert "none: every setting failed" in text


def test_a_budget_without_any_claims_task_has_a_page_without_verdicts(page):
    study = small_study(claims=[Claim("tsam", beats="sam", on="accuracy", tasks=("fashion",))])
    study = dataclasses.replace(study, budgets={"quick": Budget(seeds=3, tasks=("digits",))})
    parsed = page(make_result(study, lambda *_: {"accuracy": 90.0, "curvature": 1.0}))
    assert "No claim was tested." in parsed.text
    assert "fashion" not in parsed.text


def test_the_same_results_make_the_same_page(tmp_path):
    paths = [write_report([small_result()], tmp_path / name) for name in ("a.html", "b.html")]
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_no_results_are_refused_and_the_old_page_stays(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")
    with pytest.raises(InputError, match=r"needs at least one StudyResult; got none\. Run a study first\."):
        write_report([], path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


# ---- figures


def test_right_of_the_zero_line_is_in_favour_of_the_claim():
    result = small_result(failures=False)
    pairs = list(zip(result.verdicts, result_to_json(result)["verdicts"], strict=True))
    panel = _figures.forest("curvature", [p for p in pairs if p[0].claim.on == "curvature"])
    for row in panel.rows:  # the aware arm has the smaller curvature, and smaller is better
        assert row.verdict.pairs[0].aware < row.verdict.pairs[0].blind
        assert row.dots[0] > panel.zero
        assert row.effect > panel.zero


def test_infinite_and_far_bounds_become_arrows_and_near_ones_do_not():
    made = [verdict(low=0.0, high=math.inf), verdict("inconclusive", low=-400.0, high=3.0)]
    rows = _figures.forest("accuracy", [(v, _summary._verdict(v)) for v in made]).rows
    assert [(row.bar.to_left, row.bar.to_right) for row in rows] == [(False, True), (True, False)]
    assert (rows[0].bar.high, rows[1].bar.low) == (100.0, 0.0)
    assert rows[0].bar.low == rows[0].boundary


@example(values=[2.0, 1.1125369292536007e-308], log=True)
@given(values=st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=5), log=st.booleans())
def test_an_axis_shows_all_its_values_in_order_with_ticks_inside(values, log):
    axis = Axis.over(values, log=log)
    places = [axis.at(value) for value in sorted(values)]
    assert places == sorted(places)
    assert all(0 <= place <= 100 for place in places)
    assert all(0 <= at <= 100 for at, _ in axis.ticks)


def test_an_axis_of_equal_values_puts_them_in_the_middle():
    assert Axis.over([3.0, 3.0]).at(3.0) == 50.0
    assert Axis.over([0.0]).at(0.0) == 50.0
    assert Axis.over([math.nan]).at(0.0) == 50.0


def test_tick_labels_are_distinct_and_round():
    labels = [label for _, label in Axis.over([0.01, 0.05]).ticks]
    assert labels == ["0.01", "0.02", "0.03", "0.04", "0.05"]
    assert [label for _, label in Axis.over([1.0, 5000.0], log=True).ticks] == ["1", "10", "100", "1000"]


def test_the_mean_curve_is_the_mean_where_all_seeds_have_values():
    early = np.array([[0.0, 0.0], [2.0, 2.0]])
    late = np.array([[1.0, 10.0], [3.0, 10.0]])
    mean = _figures._mean_line([early, late], limit=200)
    np.testing.assert_allclose(mean, [[1.0, 5.5], [2.0, 6.0]])  # exact halves


def test_thinning_keeps_both_ends_and_the_limit():
    points = np.column_stack([np.arange(1000.0), np.arange(1000.0)])
    thin = _figures._thin(points, 200)
    assert len(thin) == 200
    assert (thin[0, 0], thin[-1, 0]) == (0.0, 999.0)
    assert _figures._thin(points[:7], 200) is not None
    assert len(_figures._thin(points[:7], 200)) == 7


def test_curve_points_that_are_not_finite_are_left_out():
    result = make_result(
        small_study(seeds=1),
        lambda *_: {"accuracy": 90.0, "curvature": 1.0},
        curve=lambda *_: {"loss": [(0.0, 1.0), (1.0, math.nan), (2.0, math.inf), (3.0, 0.5)]},
    )
    plot = _figures.curve("loss", [t for t in result.trials if t.task == "digits"], ["tsam"], limit=200)
    assert len(plot.mean_lines["tsam"].split()) == 4  # two points


def test_a_curve_against_something_says_so_and_may_have_several_lines():
    name = "interval against eta"
    result = make_result(
        small_study(seeds=2),
        lambda *_: {"accuracy": 90.0, "curvature": 1.0},
        curve=lambda task, arm, seed: {name: [(0.1, 1.0 + seed, 3.0 + seed), (100.0, 2.0 + seed, 2.5 + seed)]},
    )
    plot = _figures.curve(name, [t for t in result.trials if t.task == "digits"], ["tsam"], limit=200)
    assert plot.x_label == "eta"
    assert plot.x.log
    assert plot.mean_lines["tsam"].count("M") == 2
    assert plot.seed_lines["tsam"].count("M") == 4
    assert plot.description == "interval against eta; the means end at tsam 2.5 to 3."


# ---- the console


def test_the_console_table_says_every_outcome_and_the_answer():
    result = small_result()
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(verdict_table([result]))
    text = console.export_text()
    assert text.count("holds") + text.count("inconclusive") + text.count("contradicted") >= len(result.verdicts)
    assert result_to_json(result)["answer"] in text
    assert "(−0.5, 2.35]" in text


def test_the_console_shows_names_literally():
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(verdict_table([small_result(arms=("[red]tsam[/red]", "sam", "sgd"))]))
    assert "[red]tsam[/red] beats sam on accuracy" in console.export_text()


def test_costs_stand_in_the_order_unit_time_memory():
    assert _summary.cost_names(result_to_json(small_result())) == ["gradients", "seconds", "peak_mib"]


def test_metric_heads_have_unit_and_direction():
    heads = [
        _summary.metric_head(dataclasses.asdict(m))
        for m in (Metric("a", "%", better="higher"), Metric("b", better="lower"))
    ]
    assert heads == ["a (%) ↑", "b ↓"]
