import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import log_loss
from typer.testing import CliRunner

import heedful
from heedful.calibrate import NormalizationAwareIsotonicCalibrator, expected_calibration_error
from heedful.cli import _tables
from heedful.cli.calibrate import app
from heedful.errors import FileFormatError, InputError, MissingExtraError, ParameterError

CLASSES = np.array(["fox", "cat", "owl"])  # not in sorted order


@pytest.fixture
def problem():
    rng = np.random.default_rng(0)
    truth = rng.dirichlet(np.ones(3), size=300)
    y = (truth.cumsum(axis=1) > rng.random((300, 1))).argmax(axis=1)
    P = truth**2
    return P / P.sum(axis=1, keepdims=True), y


@pytest.fixture
def table(problem, tmp_path):
    P, y = problem
    frame = pd.DataFrame(P, columns=[f"p_{name}" for name in CLASSES]).assign(y=CLASSES[y], note="kept")
    frame.to_csv(tmp_path / "held_out.csv", index=False)
    return tmp_path / "held_out.csv"


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False, env={"COLUMNS": "200"})


def fit(table, *more, name="cal.safetensors"):
    model = table.with_name(name)
    return model, run("fit", table, "--label", "y", "--prob-prefix", "p_", "--save", model, *more)


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".npz"])
def test_fit_and_apply_do_what_python_does(problem, table, tmp_path, suffix):
    P, y = problem
    model, done = fit(table, "--method", "na-fir")
    assert done.exit_code == 0
    assert "NormalizationAwareIsotonicCalibrator of 300 rows and 3 classes" in done.stdout
    frame = pd.read_csv(table)
    new, out = tmp_path / f"new{suffix}", tmp_path / f"out{suffix}"
    _tables.write_table(frame, new, overwrite=False)
    assert run("apply", new, "--model", model, "-o", out).stdout == f"300 rows calibrated, written to {out}\n"
    written = _tables.read_table(out)
    expected = NormalizationAwareIsotonicCalibrator().fit(P, y).predict_proba(P)
    np.testing.assert_allclose(written[["p_fox", "p_cat", "p_owl"]], expected, atol=1e-12)
    assert written["note"].tolist() == ["kept"] * 300
    assert list(written) == list(frame)
    assert heedful.load(model).classes_.tolist() == CLASSES.tolist()


def test_other_columns_of_a_csv_come_out_as_they_stand(table, tmp_path):
    model, _ = fit(table)
    frame = pd.read_csv(table).head(2).assign(user=["007", "NA"])
    new, out = tmp_path / "new.csv", tmp_path / "out.csv"
    frame.to_csv(new, index=False)
    run("apply", new, "--model", model, "-o", out)
    assert [line.rsplit(",", 1)[1] for line in out.read_text().splitlines()] == ["user", "007", "NA"]


@pytest.mark.parametrize("method", ["scir", "fir", "ovr", "temperature", "vector", "dirichlet"])
def test_every_method_can_be_named(table, method):
    model, done = fit(table, "--method", method, "--json")
    result = json.loads(done.stdout)
    assert result["calibrator"] == type(heedful.load(model)).__name__
    assert result["classes"] == CLASSES.tolist()
    assert result["rows"] == 300


def test_report_measures_what_it_says(problem, table):
    P, y = problem
    done = run("report", table, "--label", "y", "--prob-prefix", "p_", "--json")
    result = json.loads(done.stdout)
    assert result["nll"] == pytest.approx(log_loss(y, P))
    assert result["brier"] == pytest.approx(((P - np.eye(3)[y]) ** 2).sum(axis=1).mean())
    assert result["ece"] == pytest.approx(expected_calibration_error(y, P))
    assert result["classwise_ece"] == pytest.approx(expected_calibration_error(y, P, kind="classwise"))
    assert result["accuracy"] == pytest.approx(100 * (P.argmax(axis=1) == y).mean())
    assert sum(result["reliability"]["counts"]) == 300
    shown = run("report", table, "--label", "y", "--prob-prefix", "p_").stdout
    assert f"{result['nll']:.4f}" in shown
    assert "confidence from" in shown


def test_calibration_lowers_the_reported_errors(table, tmp_path):
    model, _ = fit(table)
    run("apply", table, "--model", model, "-o", tmp_path / "out.csv")
    reports = [
        json.loads(run("report", path, "--label", "y", "--prob-prefix", "p_", "--json").stdout)
        for path in (table, tmp_path / "out.csv")
    ]
    assert reports[1]["nll"] < reports[0]["nll"]
    assert reports[1]["ece"] < reports[0]["ece"]


def test_without_a_prefix_all_other_columns_are_probabilities_and_numbers_name_columns(problem, tmp_path):
    P, y = problem
    pd.DataFrame(P, columns=["a", "b", "c"]).assign(y=y).to_csv(tmp_path / "numbers.csv", index=False)
    np.savez(tmp_path / "matrix.npz", p=P, y=y)
    results = [
        json.loads(run("report", tmp_path / name, "--label", "y", "--json").stdout)
        for name in ("numbers.csv", "matrix.npz")
    ]
    assert results[0]["nll"] == pytest.approx(results[1]["nll"]) == pytest.approx(log_loss(y, P))


def test_class_names_that_look_like_values_stay_names(problem, tmp_path):
    P, y = problem
    names = np.array(["NA", "01", "1"])
    table = pd.DataFrame(P, columns=[f"p_{name}" for name in names]).assign(y=names[y])
    table.to_csv(tmp_path / "names.csv", index=False)
    result = json.loads(run("report", tmp_path / "names.csv", "--label", "y", "--prob-prefix", "p_", "--json").stdout)
    assert result["nll"] == pytest.approx(log_loss(y, P))


def test_logits_are_taken_when_told(problem, tmp_path):
    P, y = problem
    pd.DataFrame(np.log(P), columns=["a", "b", "c"]).assign(y=y).to_csv(tmp_path / "logits.csv", index=False)
    result = run("report", tmp_path / "logits.csv", "--label", "y", "--input", "logits", "--json")
    assert json.loads(result.stdout)["nll"] == pytest.approx(log_loss(y, P))
    with pytest.raises(InputError, match="Are these logits"):
        run("report", tmp_path / "logits.csv", "--label", "y")


def test_outputs_are_refused_when_present_unless_told(table, tmp_path):
    model, _ = fit(table)
    with pytest.raises(FileExistsError, match=r"cal.safetensors exists. Choose another name, or say --overwrite"):
        fit(table)
    assert fit(table, "--overwrite")[1].exit_code == 0
    out = tmp_path / "out.csv"
    out.write_text("old")
    with pytest.raises(FileExistsError, match=r"out.csv exists"):
        run("apply", table, "--model", model, "-o", out)
    assert out.read_text() == "old"
    assert run("apply", table, "--model", model, "-o", out, "--overwrite").exit_code == 0


def test_wrong_requests_are_refused(problem, table, tmp_path):
    P, y = problem
    with pytest.raises(FileNotFoundError, match=r"missing.csv does not exist"):
        run("report", tmp_path / "missing.csv", "--label", "y")
    with pytest.raises(InputError, match=r"tables are read and written as .csv, .parquet, .npz; got .xlsx"):
        run("report", tmp_path / "table.xlsx", "--label", "y")
    with pytest.raises(InputError, match="lacks the columns truth; it has p_fox, p_cat, p_owl, y, note"):
        run("report", table, "--label", "truth")
    with pytest.raises(InputError, match=r"of which note hold no numbers.* --prob-prefix p_"):
        run("report", table, "--label", "y")
    with pytest.raises(ParameterError, match=r"--method must be one of 'na_fir', .*; got 'platt'"):
        fit(table, "--method", "platt")
    pd.DataFrame(P, columns=["1", "2", "3"]).assign(y=y).to_csv(tmp_path / "shifted.csv", index=False)
    with pytest.raises(InputError, match="labels 0 of column 'y' are none of the classes 1, 2, 3"):
        run("report", tmp_path / "shifted.csv", "--label", "y")
    pd.DataFrame(P, columns=list("abc")).assign(y=[None, *y[1:]]).to_csv(tmp_path / "unlabelled.csv", index=False)
    with pytest.raises(InputError, match="1 rows have no label in column 'y'"):
        run("report", tmp_path / "unlabelled.csv", "--label", "y")
    model, _ = fit(table)
    pd.DataFrame(P, columns=["p_fox", "p_cat", "p_dog"]).to_csv(tmp_path / "other.csv", index=False)
    with pytest.raises(InputError, match="lacks the columns p_owl"):
        run("apply", tmp_path / "other.csv", "--model", model, "-o", tmp_path / "out.csv")
    assert not (tmp_path / "out.csv").exists()


def test_damaged_files_and_nameless_models_are_refused(problem, table, tmp_path):
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 not much of a zip")
    with pytest.raises(FileFormatError, match=r"broken.npz cannot be read as npz"):
        run("report", tmp_path / "broken.npz", "--label", "y")
    np.savez(tmp_path / "pickled.npz", y=np.array([{}], dtype=object))
    with pytest.raises(FileFormatError, match=r"pickled.npz cannot be read as npz"):
        run("report", tmp_path / "pickled.npz", "--label", "y")
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(FileFormatError, match=r"empty.csv cannot be read as csv"):
        run("report", tmp_path / "empty.csv", "--label", "y")
    NormalizationAwareIsotonicCalibrator().fit(*problem).save(tmp_path / "nameless.safetensors")
    with pytest.raises(InputError, match="does not know the names of its columns"):
        run("apply", table, "--model", tmp_path / "nameless.safetensors", "-o", tmp_path / "out.csv")


def test_parquet_without_pyarrow_names_the_extra(table, monkeypatch):
    monkeypatch.setattr(_tables.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r'pip install "heedful\[tables\]"'):
        run("report", table.with_suffix(".parquet"), "--label", "y")


def test_exit_status_and_streams_of_the_command_itself(table):
    command = [sys.executable, "-m", "heedful.cli", "calibrate", "report", str(table), "--label"]
    done = subprocess.run([*command, "y", "--prob-prefix", "p_", "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["rows"] == 300
    wrong = subprocess.run([*command, "truth"], capture_output=True, text=True)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "lacks the columns truth" in wrong.stderr
    assert "Traceback" not in wrong.stderr
