import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from heedful.causal import covariate_bounds
from heedful.cli import _tables, app
from heedful.errors import InputError, ParameterError

pytest.importorskip("ot", reason='needs POT: pip install "heedful[causal]"')

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = "<script>alert(1)</script>"


def trial(n=80):
    """A trial whose covariate tells much; ``town`` is a category, ``e`` a propensity."""
    rng = np.random.default_rng(0)
    z, w = rng.normal(size=n), rng.permutation(n) < n // 2
    y = np.where(w, 1.6 * z + 1, 0.6 * z) + rng.normal(size=n) / 2
    return pd.DataFrame({"y": y, "w": w.astype(int), "z": z, "town": np.where(z > 0, "a", "b"), "e": np.full(n, 0.5)})


@pytest.fixture
def table(tmp_path):
    trial().to_csv(tmp_path / "trial.csv", index=False)
    return tmp_path / "trial.csv"


def run(table, *arguments, outcome="y", treatment="w"):
    command = ["bounds", table, "--outcome", outcome, "--treatment", treatment, "--quiet", *arguments]
    return CliRunner().invoke(app, list(map(str, command)), catch_exceptions=False, env={"COLUMNS": "200"})


def found(table, *arguments, **columns):
    return json.loads(run(table, "--json", *arguments, **columns).stdout)


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".npz"])
def test_the_command_does_what_python_does(tmp_path, suffix):
    frame, path = trial(), tmp_path / f"trial{suffix}"
    _tables.write_table(frame.drop(columns="town"), path, overwrite=False)
    expected = covariate_bounds(frame.y, frame.w, frame[["z"]], random_state=3).to_dict()
    result = found(path, "--covariates", "z", "--seed", "3")
    for name in ("lower", "upper", "eta_lower", "lower_blind", "upper_blind", "n_control", "estimand", "notes"):
        assert result[name] == pytest.approx(expected[name]) if name != "notes" else result[name] == expected[name]
    np.testing.assert_allclose(result["path"]["lower"], expected["path"]["lower"])
    assert result["width"] == pytest.approx(expected["upper"] - expected["lower"])
    assert result["width_blind"] == pytest.approx(expected["upper_blind"] - expected["lower_blind"])
    assert result["width_ratio"] == pytest.approx(result["width"] / result["width_blind"])
    assert result["plot"] is None


def test_spaces_between_names_are_no_part_of_them(table):
    frame = pd.read_csv(table).assign(age=1.0 * np.arange(80))
    frame.to_csv(table, index=False)
    spaced, plain = (found(table, "--covariates", names, "--eta", "1") for names in ("z, age", "z,age"))
    assert spaced == plain


def test_blind_and_aware_bounds_stand_side_by_side(table):
    result = found(table, "--covariates", "z")
    lines = run(table, "--covariates", "z").stdout.splitlines()
    assert lines[0].split() == ["effect_variance", "lower", "upper", "width", "η", "of", "lower", "η", "of", "upper"]
    assert lines[1].split()[:4] == [
        "blind",
        *(f"{result[k]:.4g}" for k in ("lower_blind", "upper_blind", "width_blind")),
    ]
    assert lines[2].split()[:4] == ["covariate-aware", *(f"{result[k]:.4g}" for k in ("lower", "upper", "width"))]
    assert lines[3] == f"{result['width_ratio']:.3f} of the blind width, from 40 control and 40 treated units"
    assert result["width_ratio"] < 0.8
    assert "No propensity was given" in lines[4]


def test_without_covariates_the_bounds_are_blind(table):
    result = found(table)
    assert (result["lower"], result["upper"]) == (result["lower_blind"], result["upper_blind"])
    assert result["width_ratio"] == 1


def test_prices_are_a_number_or_several(table):
    frame = trial()
    assert found(table, "--covariates", "z", "--eta", "20")["eta_upper"] == 20
    several = found(table, "--covariates", "z", "--eta", "5,0,1")
    assert several["path"]["eta"] == [0, 1, 5]
    expected = covariate_bounds(frame.y, frame.w, frame.z, eta=[0, 1, 5], random_state=0)
    assert several["lower"] == pytest.approx(expected.lower)


def test_an_infinite_price_is_valid_json(table):
    text = run(table, "--covariates", "z", "--eta", "inf", "--json").stdout
    result = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert result["eta_lower"] == result["path"]["eta"][0] == "Infinity"


def test_every_option_reaches_the_bounds(table):
    frame = trial()
    result = found(
        table, "--covariates", "z,town", "--estimand", "effect-cdf", "--threshold", "0.5", "--eta", "2",
        "--propensity", "e", "--covariate-scale", "none", "--confidence", "0.9",
    )  # fmt: skip
    expected = covariate_bounds(
        frame.y,
        frame.w,
        frame[["z", "town"]],
        estimand="effect_cdf",
        threshold=0.5,
        eta=2.0,
        propensity=frame.e,
        covariate_scale=None,
        confidence=0.9,
        random_state=0,
    )
    assert (result["lower"], result["upper"]) == pytest.approx((expected.lower, expected.upper))
    assert result["confidence_interval"] == pytest.approx(expected.confidence_interval)
    assert found(table, "--covariates", "z", "--eta", "2", "--propensity", "0.5")["notes"] == []
    shown = run(table, "--covariates", "z", "--eta", "2", "--confidence", "0.9").stdout
    assert "90% confidence" in shown
    assert "97.5% confidence" in run(table, "--covariates", "z", "--eta", "2", "--confidence", "0.975").stdout


def test_several_outcomes_are_bounded_together(table):
    frame = trial()
    result = found(table, "--covariates", "town", "--eta", "1", outcome="y,z")
    expected = covariate_bounds(frame[["y", "z"]], frame.w, frame[["town"]], eta=1.0)
    assert result["upper"] == pytest.approx(expected.upper)


@pytest.mark.parametrize(
    ("arguments", "columns", "error", "message"),
    [
        ([], {"outcome": "gpa"}, InputError, r"lacks the columns gpa; it has y, w, z, town, e"),
        (["--covariates", "z,age"], {}, InputError, "lacks the columns age"),
        (
            [],
            {"treatment": "town"},
            InputError,
            "'town' must be 1 of treated units and 0 of others; its values are [ab], [ab]",
        ),
        ([], {"treatment": "z"}, InputError, r"1 of treated units and 0 of others; its values are .*, …\.$"),
        ([], {"outcome": "town"}, InputError, "outcome must be numbers"),
        (["--covariates", "z,y,w"], {}, ParameterError, "^--covariates must be known before treatment; w, y is not"),
        (["--propensity", "p"], {}, InputError, "lacks the columns p"),
        (["--eta", "big"], {}, ParameterError, r"--eta must be auto, a number, or numbers with commas; got 'big'"),
        (["--eta", "-1"], {}, ParameterError, "eta must be a number >= 0"),
        (["--estimand", "median"], {}, ParameterError, "estimand must be one of 'effect_variance'"),
        (
            ["--plot", "x.html"],
            {},
            ParameterError,
            r"^--plot draws bounds against η: it needs --covariates, and --eta auto",
        ),
        (["--plot", "x.html", "--covariates", "z", "--eta", "2"], {}, ParameterError, "or several numbers > 0"),
        (["--plot", "x.html", "--covariates", "z", "--eta", "0,2,inf"], {}, ParameterError, "or several numbers > 0"),
        (["--plot", "x.png", "--covariates", "z"], {}, ParameterError, r"whose name ends in \.html; got x\.png"),
        (["--plot", "x.html", "--covariates", "z"], {"outcome": "e"}, InputError, "outcomes or covariates do not vary"),
    ],
)
def test_wrong_requests_are_refused(table, arguments, columns, error, message):
    with pytest.raises(error, match=message):
        run(table, *arguments, **columns)


def test_missing_covariates_are_named(tmp_path):
    frame = trial()
    frame.loc[3, "z"] = np.nan
    frame.to_csv(tmp_path / "gaps.csv", index=False)
    with pytest.raises(InputError, match="covariates have NaN or infinite entries in column 'z'"):
        run(tmp_path / "gaps.csv", "--covariates", "z")


@pytest.fixture
def page(table, tmp_path):
    done = run(table, "--covariates", "z,town", "--confidence", "0.9", "--plot", tmp_path / "bounds.html")
    assert f"The bounds against η, written to {tmp_path / 'bounds.html'}" in done.stdout.replace("\n", "")
    return (tmp_path / "bounds.html").read_text("utf-8")


def test_the_page_shows_the_bounds_and_all_prices(page, table):
    result = found(table, "--covariates", "z,town", "--confidence", "0.9")
    low, high = result["confidence_interval"]
    assert re.search(f'90% confidence</th><td class="n">{low:.4g}</td><td class="n">{high:.4g}</td>', page)
    figure = re.search(r'<svg class="canvas" role="img" aria-label="([^"]*)"', page)[1]
    assert figure.startswith("effect_variance: bounds against η: lower bound ")
    for value in (result["lower"], result["upper"], result["lower_blind"]):
        assert f"{value:.4g}" in page or f"{value:.3g}" in page
    assert page.count('<path class="mean') == 3
    (rows,) = re.findall(r"<details>.*?<tbody>(.*?)</tbody>", page, re.DOTALL)
    assert rows.count("<tr>") == len(result["path"]["eta"])
    assert "(z, town)" in page


def test_the_page_asks_the_network_for_nothing_and_runs_nothing(page):
    assert "<script" not in page
    assert "default-src 'none'" in page
    assert not re.findall(r"https?://|src=|url\(", page)


def test_names_from_the_table_are_text_on_the_page(tmp_path):
    trial().rename(columns={"z": HOSTILE, "y": "<b>"}).to_csv(tmp_path / "a&b.csv", index=False)
    run(tmp_path / "a&b.csv", "--covariates", HOSTILE, "--plot", tmp_path / "p.html", outcome="<b>")
    page = (tmp_path / "p.html").read_text("utf-8")
    assert HOSTILE not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "of &lt;b&gt;</h1>" in page
    assert "a&amp;b.csv" in page


def test_a_page_that_is_there_is_refused_before_any_work_unless_told(table, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("mine")
    with pytest.raises(FileExistsError, match=r"page.html exists. Choose another name, or say --overwrite"):
        run(tmp_path / "missing.csv", "--covariates", "z", "--plot", page)
    assert page.read_text() == "mine"
    run(table, "--covariates", "z", "--plot", page, "--overwrite")
    assert "<!doctype html>" in page.read_text("utf-8")


def test_prices_chosen_at_the_ends_of_the_grid_stay_inside_of_the_drawing(table, tmp_path):
    run(table, "--covariates", "z", "--eta", "0,1,2", "--plot", tmp_path / "few.html")
    run(table, "--covariates", "z", "--eta", "0,1,100,inf", "--plot", tmp_path / "inf.html")
    for name in ("few", "inf"):
        places = re.findall(
            r'<svg class="big[^>]* x="([-\d.]+)%" y="([-\d.]+)%"', (tmp_path / f"{name}.html").read_text("utf-8")
        )
        assert len(places) == 3
        assert all(0 <= float(at) <= 100 for place in places for at in place)


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone_in_both_colour_schemes(page, tmp_path, scheme):
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--headless", "--no-sandbox"])
        opened = browser.new_page(viewport={"width": 375, "height": 800}, color_scheme=scheme)
        complaints = []
        opened.on("console", lambda message: complaints.append(message.text))
        opened.goto((tmp_path / "bounds.html").as_uri())
        assert opened.evaluate("document.documentElement.scrollWidth") <= 375
        box = opened.evaluate(
            "(({width, height}) => [width, height])(document.querySelector('.canvas').getBoundingClientRect())"
        )
        assert min(box) > 100
        paper, ink = opened.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        )
        assert (sum(map(int, re.findall(r"\d+", paper))) > sum(map(int, re.findall(r"\d+", ink)))) == (
            scheme == "light"
        )
        browser.close()
    assert complaints == []


def test_a_wrong_request_ends_with_status_2_and_one_message():
    command = [
        sys.executable,
        "-m",
        "heedful.cli",
        "bounds",
        "t.csv",
        "--outcome",
        "y",
        "--treatment",
        "w",
        "--eta",
        "big",
    ]
    wrong = subprocess.run(command, capture_output=True, text=True)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "heedful: --eta must be auto, a number, or numbers with commas; got 'big'.\n"
