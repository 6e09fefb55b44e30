import contextlib
import io
import json
import subprocess
import sys
import time

import pandas as pd
import pytest
from typer.testing import CliRunner

from heedful import cli
from heedful._results import Event, report_progress
from heedful.catalog import methods
from heedful.cli import _studies
from heedful.cli._progress import bars
from heedful.errors import InputError, ParameterError
from heedful.evidence import Store
from tests.evidence import toys


@pytest.fixture
def run(monkeypatch, tmp_path):
    """The command in an empty folder, with the toy study in the place of every method's."""
    monkeypatch.setattr(_studies, "_load", lambda method: toys.study(slug=method.slug))
    monkeypatch.setenv("HEEDFUL_STORE", str(tmp_path / "trials.sqlite"))
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments, error=None):
        result = CliRunner().invoke(cli.app, [str(a) for a in arguments])
        if error is None:
            assert result.exit_code == 0, result.output
        else:
            assert isinstance(result.exception, error), result.output
        return result

    return invoke


def test_list_and_show_tell_of_every_method(run):
    listed = json.loads(run("list", "--json").stdout)
    assert [row["slug"] for row in listed] == list(methods)
    assert "isotonic" in run("list", "--room", "calibrate").stdout
    assert "tsam" not in run("list", "--room", "calibrate").stdout
    shown = run("show", "isotonic").stdout
    assert "from heedful.calibrate import CalibratedClassifier" in shown
    assert "arXiv:2512.09054" in shown
    assert json.loads(run("show", "tsam", "--json").stdout)["study"] == "heedful.studies.tsam:study"


def test_unknown_names_are_answered_with_the_known_ones(run):
    assert "there are tsam, isotonic" in str(run("show", "sam", error=InputError).exception)
    assert "there are calibrate, causal, compress, merge, optim, timeseries, unlearn" in str(
        run("list", "--room", "kitchen", error=InputError).exception
    )
    assert "There is no method 'x'" in str(run("study", "x", error=InputError).exception)


def test_study_prints_the_verdicts_and_the_path_of_the_report(run, tmp_path):
    result = run("study", "tsam", "isotonic", "--quick", "--engine", "inline", "--quiet")
    assert "shifted beats plain" in " ".join(result.stdout.split())
    assert result.stdout.strip().endswith(str(tmp_path / "report.html"))
    assert "Does adding two make a number larger?" in (tmp_path / "report.html").read_text()


def test_json_is_all_of_standard_output_and_progress_goes_to_standard_error(run):
    result = run("study", "tsam", "--quick", "--engine", "inline", "--json")
    data = json.loads(result.stdout)
    assert data["report"] == "report.html"
    assert [study["study"] for study in data["studies"]] == ["tsam"]
    assert "tsam: evaluating" in result.stderr


def test_report_shows_what_is_kept_and_says_what_to_run_if_nothing_is(run, tmp_path):
    assert "Run: heedful study tsam" in str(run("report", "tsam", "--quick", error=InputError).exception)
    first = json.loads(run("study", "tsam", "--quick", "--engine", "inline", "--json").stdout)
    again = json.loads(run("report", "tsam", "--quick", "-o", "other.html", "--json").stdout)
    assert again["studies"][0]["results"] == first["studies"][0]["results"]
    assert (tmp_path / "other.html").exists()


def test_collect_and_export_move_trials_between_stores_and_tables(run, tmp_path):
    run("study", "tsam", "--quick", "--engine", "inline", "--quiet", "--store", "a.sqlite")
    result = run(
        "study", "tsam", "--quick", "--engine", "inline", "--quiet", "--collect", "a.sqlite", "--export", "t.parquet"
    )
    assert "a.sqlite: 9 trials added" in result.stderr
    assert len(pd.read_parquet(tmp_path / "t.parquet")) == 9


def test_fresh_runs_again_and_retry_only_what_failed(run, tmp_path):
    options = ("study", "tsam", "--quick", "--engine", "inline", "--quiet")
    for extra, rows in (((), 9), ((), 9), (("--retry",), 9), (("--fresh",), 18)):
        run(*options, *extra)
        with Store(tmp_path / "trials.sqlite") as store:
            assert len(store.to_frame()) == rows


def test_wrong_requests_are_refused_before_any_work(run, tmp_path):
    assert "--task goes with one SLUG" in str(run("study", "--task", "a:b", error=InputError).exception)
    assert "a bare path" in str(run("study", "--mlflow", "runs", error=ParameterError).exception).lower()
    assert not (tmp_path / "trials.sqlite").exists()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["show", "sam"], 2, "heedful: There is no method 'sam'; there are tsam, isotonic"),
        (["study", "tsam", "--store", "nowhere/x.sqlite"], 2, "does not exist. Create it first"),
        (["study", "tsam", "--engine", "warp"], 2, "Invalid value for '--engine'"),
        (["list"], 0, ""),
        (["--version"], 0, ""),
    ],
)
def test_exit_status_and_message_of_the_real_command(arguments, status, message, tmp_path):
    command = [sys.executable, "-m", "heedful.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == status
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_help_shows_examples_and_loads_nothing_heavy():
    script = (
        "import sys; sys.argv = ['heedful', 'study', '--help']\n"
        "from heedful.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'sklearn', 'pandas', 'scipy', 'numpy', 'matplotlib'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "heedful study tsam --task my_tasks:cifar" in done.stdout
    assert done.stderr.strip().splitlines()[-1] == "[]"


def test_what_could_not_be_written_is_refused_before_any_work(run, tmp_path):
    for options in (("-o", "nowhere/r.html"), ("--export", "nowhere/t.parquet")):
        assert "Create it" in str(run("study", "tsam", *options, error=FileNotFoundError).exception)
    assert "is a folder" in str(run("study", "tsam", "-o", tmp_path, error=IsADirectoryError).exception)
    assert not (tmp_path / "trials.sqlite").exists()


def test_report_makes_no_store(run, tmp_path):
    error = run("report", "tsam", "--store", "typo.sqlite", error=InputError).exception
    assert "There is no store of trials at typo.sqlite. Run: heedful study tsam" in str(error)
    assert not (tmp_path / "typo.sqlite").exists()


def test_bars_stay_out_of_what_a_trial_prints_in_this_process(monkeypatch):
    def show_while_a_trial_prints():
        with bars(), contextlib.redirect_stderr(io.StringIO()) as trial:
            report_progress(Event("phase", 1, 2))
            time.sleep(0.3)  # the bars are drawn ten times a second
        return trial.getvalue()

    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert show_while_a_trial_prints() == ""
    assert "phase" in terminal.getvalue()
