import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import heedful
from heedful._files import leftovers
from heedful.calibrate import NormalizationAwareIsotonicCalibrator
from heedful.cli import unlearn as verb
from heedful.cli._tables import read_table, write_table
from heedful.cli.unlearn import app
from heedful.errors import FileFormatError, InputError, ParameterError
from heedful.unlearn import KernelSelectiveSamplingClassifier, SelectiveSamplingClassifier

PEOPLE = 40


@pytest.fixture
def rows():
    """Three rows of each person, whose ids would be equal to others if they were read as numbers."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((3 * PEOPLE, 5))
    owner = np.tile([f"{i:03d}" if i % 2 else f"{i - 1}" for i in range(1, PEOPLE + 1)], 3)
    y = np.where(X[:, 0] + 0.1 * rng.standard_normal(len(X)) > 0, "yes", "NA")
    return pd.DataFrame(X, columns=[f"x{j}" for j in range(5)]).assign(user=owner, y=y)


@pytest.fixture
def table(rows, tmp_path):
    rows.to_csv(tmp_path / "users.csv", index=False)
    return tmp_path / "users.csv"


@pytest.fixture
def model(table):
    fit(table, "--kappa", "0.6")  # about half of the rows are stored
    return table.with_name("model.safetensors")


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False, env={"COLUMNS": "200"})


def fit(table, *more, name="model.safetensors"):
    return run("fit", table, "--label", "y", "--id", "user", "--save", table.with_name(name), *more)


def requests(folder, ids, *, column="user", name="requests.csv"):
    (folder / name).write_text("\n".join([column, *map(str, ids)]) + "\n")
    return folder / name


def stored(model):
    return set(map(str, heedful.load(model).core_ids_))


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".npz"])
def test_fit_and_apply_do_what_python_does(rows, tmp_path, suffix):
    table, out = tmp_path / f"users{suffix}", tmp_path / f"out{suffix}"
    write_table(rows, table, overwrite=False)
    done = fit(table, "--kappa", "0.3", "--horizon", "500", "--ridge", "0.5", "--normalize", "unit")
    assert done.exit_code == 0
    X = read_table(table)[[f"x{j}" for j in range(5)]]  # parsing a CSV may round
    python = SelectiveSamplingClassifier(kappa=0.3, horizon=500, ridge=0.5, normalize="unit", unique_ids=False)
    python.fit(X, rows.y.to_numpy(str), ids=rows.user.to_numpy(str))
    model = heedful.load(tmp_path / "model.safetensors")
    assert model.state_digest() == python.state_digest()
    assert f"{len(python.core_X_)} of {len(rows)} rows stored, of " in done.stdout
    assert run("apply", table, "--model", tmp_path / "model.safetensors", "-o", out).stdout == (
        f"{len(rows)} rows classified, written to {out}\n"
    )
    written = read_table(out, text=("user", "y", "prediction"))
    assert written.prediction.tolist() == python.predict(X).tolist()
    assert list(written) == [*rows, "prediction"]
    assert written.user.tolist() == rows.user.tolist()


def test_fit_says_what_is_stored(table, rows):
    result = json.loads(fit(table, "--json").stdout)
    model = heedful.load(table.with_name("model.safetensors"))
    assert result["rows"] == len(rows)
    assert result["stored_rows"] == len(model.core_ids_) < len(rows)
    assert result["ids"] == PEOPLE
    assert result["stored_ids"] == len(set(model.core_ids_))
    assert result["classes"] == ["NA", "yes"]
    assert result["features"] == [f"x{j}" for j in range(5)]


def test_delete_removes_every_row_of_a_person_and_leaves_what_a_fit_to_the_others_gives(model, table, rows):
    before = heedful.load(model)
    people = ["001", "1", "017"]
    done = run("delete", model, "--ids", requests(table.parent, people), "--json")
    assert done.exit_code == 0
    after = heedful.load(model)
    gone = np.isin(list(map(str, before.core_ids_)), people)
    assert gone.sum() > len(set(before.core_ids_[gone]))  # of somebody several rows were stored
    assert json.loads(done.stdout)["removed"] == gone.sum()
    assert not stored(model) & set(people)
    X = pd.DataFrame(before.core_X_[~gone], columns=before.feature_names_in_)
    fresh = SelectiveSamplingClassifier(kappa=0.6, horizon=len(rows), unique_ids=False)
    fresh.fit(X, before.core_y_[~gone], ids=before.core_ids_[~gone], classes=before.classes_)
    assert after.state_digest() == fresh.state_digest()
    assert run("audit", model).exit_code == 0


def test_ids_are_text_a_zero_in_front_counts_and_spaces_around_do_not(model, tmp_path):
    assert {"1", "001"} <= stored(model)
    run("delete", model, "--ids", requests(tmp_path, ["  001 "]))
    assert "001" not in stored(model)
    assert "1" in stored(model)


@pytest.mark.parametrize("suffix", [".parquet", ".npz"])
def test_whole_numbers_in_other_tables_are_the_ids_that_a_csv_spells(rows, tmp_path, suffix):
    numbered = rows.assign(user=np.arange(len(rows)) % PEOPLE)
    write_table(numbered, tmp_path / f"users{suffix}", overwrite=False)
    fit(tmp_path / f"users{suffix}")
    model = tmp_path / "model.safetensors"
    assert {"0", "7"} <= stored(model)
    run("delete", model, "--ids", requests(tmp_path, [7]))
    write_table(pd.DataFrame({"user": [0, 3]}), tmp_path / f"more{suffix}", overwrite=False)
    run("delete", model, "--ids", tmp_path / f"more{suffix}")
    assert not {"0", "3", "7"} & stored(model)


def test_nothing_of_the_requests_is_kept(model, tmp_path):
    """However the same people are asked for, in however many batches, with people of whom nothing is stored: one file."""
    contents = model.read_bytes()
    people = sorted(stored(model))[:6]
    run("delete", model, "--ids", requests(tmp_path, people))
    expected = model.read_bytes()
    assert expected != contents
    for batches in ([people[:2], people[2:]], [people[::-1]], [[*people, *people, "nobody", "nobody else"]]):
        model.write_bytes(contents)
        for batch in batches:
            run("delete", model, "--ids", requests(tmp_path, batch))
        assert model.read_bytes() == expected
    for path in tmp_path.iterdir():
        if path.suffix != ".csv":
            assert b"nobody" not in path.read_bytes()


def test_whom_the_model_does_not_hold_is_deleted_by_leaving_the_file_alone(model, tmp_path):
    old = model.stat()
    done = run("delete", model, "--ids", requests(tmp_path, ["nobody", "nobody", "1001"]), "--json")
    assert json.loads(done.stdout)["touched"] is False
    assert "0 of 2 ids had rows in the model: 0 rows removed" in done.stderr
    assert (model.stat().st_ino, model.stat().st_mtime_ns) == (old.st_ino, old.st_mtime_ns)


def test_everybody_can_be_deleted(model, tmp_path, table):
    done = run("delete", model, "--ids", requests(tmp_path, stored(model)))
    assert done.exit_code == 0
    assert stored(model) == set()
    assert run("audit", model).exit_code == 0
    assert run("apply", table, "--model", model, "-o", tmp_path / "out.csv").exit_code == 0


def test_a_new_file_leaves_the_old_one_and_says_so(model, tmp_path):
    contents, people = model.read_bytes(), sorted(stored(model))[:3]
    new = tmp_path / "new.safetensors"
    done = run("delete", model, "--ids", requests(tmp_path, people), "-o", new)
    assert model.read_bytes() == contents
    assert not stored(new) & set(people)
    assert "model.safetensors still holds what it held: delete it, and copies of it" in done.stderr
    assert done.stdout == ""
    with pytest.raises(FileExistsError, match=r"new.safetensors exists. Choose another name, or say --overwrite"):
        run("delete", model, "--ids", requests(tmp_path, people), "-o", new)
    untouched = tmp_path / "untouched.safetensors"
    run("delete", model, "--ids", requests(tmp_path, ["nobody"]), "-o", untouched)
    assert untouched.read_bytes() == contents


def test_requests_with_more_columns_need_the_name_of_one(model, tmp_path):
    path = tmp_path / "tickets.csv"
    path.write_text("ticket,user\n1,001\n2,003\n")
    with pytest.raises(InputError, match=r"has the columns ticket, user. Say which of them holds ids: --id COLUMN"):
        run("delete", model, "--ids", path)
    run("delete", model, "--ids", path, "--id", "user")
    assert not stored(model) & {"001", "003"}
    assert {"1"} <= stored(model)
    with pytest.raises(InputError, match="lacks the columns person; it has ticket, user"):
        run("delete", model, "--ids", path, "--id", "person")


def test_a_request_is_not_mistaken_for_a_header(model, tmp_path):
    contents = model.read_bytes()
    headless = tmp_path / "headless.csv"
    headless.write_text("001\n003\n")
    with pytest.raises(InputError, match=r"headless.csv begins with '001', the id of a stored row, where the name"):
        run("delete", model, "--ids", headless)
    assert model.read_bytes() == contents
    run("delete", model, "--ids", headless, "--id", "001")  # an odd name of a column, but that was said
    assert "003" not in stored(model)
    assert "001" in stored(model)


def test_a_request_without_an_id_is_refused_before_any_other_is_granted(model, tmp_path):
    contents = model.read_bytes()
    for text in ('user\n001\n""\n', "user,x\n001,1\n,2\n"):
        (tmp_path / "gaps.csv").write_text(text)
        with pytest.raises(
            InputError, match=r"gaps.csv: 1 rows have no id in column 'user'. Give one, or remove them."
        ):
            run("delete", model, "--ids", tmp_path / "gaps.csv", "--id", "user")
    write_table(pd.DataFrame({"user": [1.0, np.nan]}), tmp_path / "floats.npz", overwrite=False)
    with pytest.raises(InputError, match=r"the column 'user' must hold ids, text or whole numbers; it holds floating"):
        run("delete", model, "--ids", tmp_path / "floats.npz")
    assert model.read_bytes() == contents


def test_what_python_fitted_and_saved_is_served_too(rows, table, tmp_path):
    X, path = rows[[f"x{j}" for j in range(5)]], tmp_path / "python.safetensors"
    KernelSelectiveSamplingClassifier(kappa=0.6).fit(X, rows.y.to_numpy(str), ids=np.arange(len(X))).save(path)
    assert {1, 7} <= set(heedful.load(path).core_ids_)
    beyond = [str(2**63), str(-(2**63) - 1), "9" * 5000]
    done = run("delete", path, "--ids", requests(tmp_path, ["1", "007", "nobody", "1e9", *beyond]))
    assert "2 of 7 ids had rows in the model: 2 rows removed" in done.stderr
    assert not {1, 7} & set(heedful.load(path).core_ids_)
    assert run("audit", path).exit_code == 0
    assert run("apply", table, "--model", path, "-o", tmp_path / "out.csv").exit_code == 0
    SelectiveSamplingClassifier().fit(X.to_numpy(), rows.y.to_numpy(str)).save(path)
    with pytest.raises(InputError, match="was fitted without ids"):
        run("delete", path, "--ids", requests(tmp_path, ["1"]))
    with pytest.raises(InputError, match=r"does not know the names of its columns. Fit it with: heedful unlearn fit"):
        run("apply", table, "--model", path, "-o", tmp_path / "new.csv")


def test_more_rows_than_were_declared_are_warned_of_on_standard_error(table):
    done = fit(table, "--horizon", "100")
    assert done.exit_code == 0
    assert "heedful: 120 samples came where horizon=100 were expected" in done.stderr
    assert "heedful:" not in done.stdout


def test_a_strict_audit_wants_the_horizon_declared(table, model):
    done = run("audit", model, "--strict")
    assert done.exit_code == 1
    assert "failed: horizon was not declared" in done.stdout
    fit(table, "--horizon", "1000", "--overwrite")
    assert run("audit", model, "--strict").exit_code == 0


def test_no_requests_change_nothing(model, tmp_path):
    contents = model.read_bytes()
    assert run("delete", model, "--ids", requests(tmp_path, [])).exit_code == 0
    assert model.read_bytes() == contents


DIE = """
import os, signal, sys
from heedful.cli.unlearn import delete
from pathlib import Path

def die(*arguments, **named):
    os.kill(os.getpid(), signal.SIGKILL)

def half(path, content):
    write(path, content[: len(content) // 2])
    die()

write, replace = Path.write_bytes, os.replace
match sys.argv[1]:
    case "while writing":
        Path.write_bytes = half
    case "before the exchange":
        os.replace = die
    case "after the exchange":
        os.replace = lambda *paths: (replace(*paths), die())
delete(Path(sys.argv[2]), Path(sys.argv[3]))
"""


@pytest.mark.parametrize("moment", ["while writing", "before the exchange", "after the exchange"])
def test_a_kill_leaves_the_old_file_or_the_new_one(model, tmp_path, moment):
    people = sorted(stored(model))[:5]
    asked, old = requests(tmp_path, people), model.read_bytes()
    run("delete", model, "--ids", asked)
    new = model.read_bytes()
    model.write_bytes(old)
    killed = subprocess.run([sys.executable, "-c", DIE, moment, model, asked], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert model.read_bytes() == (new if moment == "after the exchange" else old)
    assert len(leftovers(model)) == (moment != "after the exchange")
    assert run("delete", model, "--ids", requests(tmp_path, ["nobody"], name="other.csv")).exit_code == 0
    assert not leftovers(model)  # it held rows of people who may ask later
    assert run("delete", model, "--ids", asked).exit_code == 0
    assert model.read_bytes() == new


def test_a_full_disk_leaves_the_old_file_and_nothing_beside_it(model, tmp_path, monkeypatch):
    asked, old = requests(tmp_path, sorted(stored(model))[:5]), model.read_bytes()
    before = set(tmp_path.iterdir())

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left on device"):
        run("delete", model, "--ids", asked)
    assert model.read_bytes() == old
    assert set(tmp_path.iterdir()) - before <= {tmp_path / ".model.safetensors.lock"}


def test_an_output_that_is_the_model_itself_is_a_deletion_in_place(model, tmp_path):
    person = min(stored(model))
    (tmp_path / "link.safetensors").symlink_to(model)
    for out in (model, tmp_path / "link.safetensors"):
        done = run("delete", model, "--ids", requests(tmp_path, [person]), "-o", out, "--overwrite")
        assert "still holds what it held" not in done.stderr
        assert person not in stored(model)


def test_where_no_model_can_be_written_nothing_is_read(model, tmp_path):
    absent = tmp_path / "absent.csv"  # would be missed if anything were read
    for out, error, words in [
        (tmp_path / "model.pkl", InputError, r"Models are .safetensors files; got .*model.pkl"),
        (tmp_path / "no" / "model.safetensors", FileNotFoundError, "the folder .*no does not exist. Create it"),
    ]:
        with pytest.raises(error, match=words):
            run("fit", absent, "--label", "y", "--id", "user", "--save", out)
        with pytest.raises(error, match=words):
            run("delete", model, "--ids", absent, "-o", out)
    assert not (tmp_path / "no").exists()


def test_deletions_at_the_same_time_are_both_done(model, tmp_path, monkeypatch):
    people = sorted(stored(model))[:2]
    save = SelectiveSamplingClassifier.save

    def slowly(self, path):
        time.sleep(0.2)  # long enough for the other to read the file that this one replaces
        save(self, path)

    monkeypatch.setattr(SelectiveSamplingClassifier, "save", slowly)
    asked = [requests(tmp_path, [person], name=f"{person}.csv") for person in people]
    threads = [threading.Thread(target=verb.delete, args=(model, path)) for path in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not stored(model) & set(people)


def test_audit_fails_with_status_1_where_the_model_holds_more_than_its_rows(model):
    done = run("audit", model, "--json")
    assert (done.exit_code, json.loads(done.stdout)["passed"]) == (0, True)
    tampered = heedful.load(model)
    tampered.coef_ = tampered.coef_ * (1 + 1e-6)
    tampered.save(model)
    assert run("audit", model).exit_code == 1
    assert json.loads(run("audit", model, "--json").stdout)["passed"] is False


def test_columns_are_named_and_others_are_left_out(rows, table):
    rows.assign(note="text").to_csv(table, index=False)
    with pytest.raises(
        InputError, match=r"the columns note hold no numbers. Name the columns to learn from: --features a,b"
    ):
        fit(table)
    assert json.loads(fit(table, "--features", "x1, x3", "--json").stdout)["features"] == ["x1", "x3"]
    with pytest.raises(InputError, match="lacks the columns x9"):
        fit(table, "--features", "x1,x9", "--overwrite")


def test_wrong_requests_are_refused(rows, table, model, tmp_path):
    with pytest.raises(FileExistsError, match=r"model.safetensors exists. Choose another name, or say --overwrite"):
        fit(table)
    with pytest.raises(ParameterError, match="kappa"):
        fit(table, "--kappa", "1.5", "--overwrite")
    with pytest.raises(InputError, match="lacks the columns person"):
        run("fit", table, "--label", "y", "--id", "person", "--save", tmp_path / "x.safetensors")
    with pytest.raises(InputError, match="--label and --id both name 'user', and the list of classes is public"):
        run("fit", table, "--label", "user", "--id", "user", "--save", tmp_path / "x.safetensors")
    rows.assign(y=[None, *rows.y[1:]]).to_csv(tmp_path / "gaps.csv", index=False)
    with pytest.raises(InputError, match="1 rows have no class in column 'y'"):
        fit(tmp_path / "gaps.csv", name="x.safetensors")
    rows.assign(x0=[np.nan, *rows.x0[1:]]).to_csv(tmp_path / "nan.csv", index=False)
    with pytest.raises(InputError, match="NaN"):
        fit(tmp_path / "nan.csv", name="x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()
    for verb_ in (["audit"], ["delete", "--ids", requests(tmp_path, ["001"])]):
        with pytest.raises(FileNotFoundError, match=r"absent.safetensors does not exist or is not a file"):
            run(*verb_, tmp_path / "absent.safetensors")
    rows.drop(columns="x4").to_csv(tmp_path / "narrow.csv", index=False)
    with pytest.raises(InputError, match="lacks the columns x4"):
        run("apply", tmp_path / "narrow.csv", "--model", model, "-o", tmp_path / "out.csv")
    rows.assign(prediction=1).to_csv(tmp_path / "taken.csv", index=False)
    with pytest.raises(InputError, match=r"has a column 'prediction', where the classes would go. Rename it."):
        run("apply", tmp_path / "taken.csv", "--model", model, "-o", tmp_path / "out.csv")
    assert not (tmp_path / "out.csv").exists()


def test_other_and_damaged_files_are_refused_and_stay(model, tmp_path):
    other = tmp_path / "other.safetensors"
    NormalizationAwareIsotonicCalibrator().fit(np.full((4, 2), 0.5), [0, 1, 0, 1]).save(other)
    with pytest.raises(
        InputError, match="holds a NormalizationAwareIsotonicCalibrator; give a file that heedful unlearn fit"
    ):
        run("audit", other)
    damaged = bytearray(model.read_bytes())
    damaged[-5] ^= 1
    model.write_bytes(damaged)
    with pytest.raises(FileFormatError):
        run("delete", model, "--ids", requests(tmp_path, ["001"]))
    assert model.read_bytes() == damaged


def test_exit_status_and_streams_of_the_command_itself(model, tmp_path):
    command = [sys.executable, "-m", "heedful.cli", "unlearn", "delete", str(model), "--ids"]
    done = subprocess.run([*command, requests(tmp_path, ["001"]), "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["touched"] is True
    assert "1 of 1 ids had rows in the model: " in done.stderr
    wrong = subprocess.run([*command, tmp_path / "missing.csv"], capture_output=True, text=True)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "missing.csv does not exist" in wrong.stderr
    assert "Traceback" not in wrong.stderr
