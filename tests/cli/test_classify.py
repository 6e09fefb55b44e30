import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import typer
from typer.testing import CliRunner

import heedful
from heedful.cli._series_files import read_series
from heedful.cli.classify import classify
from heedful.errors import FileFormatError, InputError, ParameterError
from heedful.timeseries import SARCClassifier

app = typer.Typer()
app.command()(classify)

NAMES = np.array(["slow", "fast"])


def waves(n, length=40, channels=1, seed=0):
    """Sines of two periods, and the names of their classes."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(n) % 2)
    t, phase = np.arange(length), rng.uniform(0, 6, (n, channels, 1))
    X = np.sin(2 * np.pi * t / np.array([20, 8])[y][:, None, None] + phase)
    return X + 0.1 * rng.standard_normal(X.shape), NAMES[y]


def write(path, X, y=None):
    """The cases as a file of the kind that its suffix says; ``y`` None leaves labels out where that can be."""
    rows = [[",".join(map(repr, channel.tolist())) for channel in case] for case in X]
    match path.suffix:
        case ".ts":
            labels = [""] * len(X) if y is None else [f":{name}" for name in y]
            lines = [":".join(row) + name for row, name in zip(rows, labels, strict=True)]
            head = [
                "# sines",
                "@problemName waves",
                "@univariate false",
                f"@classLabel {'false' if y is None else 'true a'}",
            ]
            text = "\n".join([*head, "@data", *lines, ""])
        case ".arff":
            labels = ["?"] * len(X) if y is None else y
            lines = ["'" + "\\n".join(row) + f"',{name}" for row, name in zip(rows, labels, strict=True)]
            text = "\n".join(["% sines", "@relation waves", "@attribute bag relational", "@data", *lines, ""])
        case ".tsv" | ".txt":
            gap = "\t" if path.suffix == ".tsv" else "   "
            text = "".join(f"{name}{gap}{row[0].replace(',', gap)}\n" for row, name in zip(rows, y, strict=True))
        case ".npz":
            np.savez(path, X=X, **({} if y is None else {"y": y}))
            return path
        case suffix:
            frame = pd.DataFrame(X[:, 0]).rename(columns="t{}".format)
            if y is not None:
                frame.insert(1, "y", y)
            frame.to_csv(path, index=False) if suffix == ".csv" else frame.to_parquet(path)
            return path
    path.write_text(text)
    return path


def run(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments), "--quiet"], catch_exceptions=False, env={"COLUMNS": "200"})


def refusal(kind, *arguments):
    with pytest.raises(kind) as error:
        run(*arguments)
    return str(error.value)


@pytest.fixture
def files(tmp_path):
    X, y = waves(40)
    X_test, y_test = waves(20, seed=1)
    return write(tmp_path / "train.ts", X, y), write(tmp_path / "test.ts", X_test, y_test)


# The command.


def test_it_does_what_python_does(files, tmp_path):
    train, test = files
    out, saved = tmp_path / "out.csv", tmp_path / "sarc.safetensors"
    done = run(test, "--train", train, "-o", out, "--save", saved, "--seed", 3)
    X, y = waves(40)
    X_test, y_test = waves(20, seed=1)
    fitted = SARCClassifier(random_state=3).fit(X, y)
    table = pd.read_csv(out)
    assert list(table) == ["label", "predicted", "p_fast", "p_slow"]
    assert table["label"].tolist() == y_test.tolist()
    assert table["predicted"].tolist() == fitted.predict(X_test).tolist()
    np.testing.assert_allclose(table[["p_fast", "p_slow"]], fitted.predict_proba(X_test), atol=1e-12)
    accuracy = 100 * (table["predicted"] == y_test).mean()
    assert done.stdout == (
        f"20 cases classified, {accuracy:.2f} % of them correctly, written to {out}; the classifier is saved as {saved}\n"
    )
    assert accuracy > 80  # two sines apart by more than an octave


def test_a_saved_classifier_says_the_same(files, tmp_path):
    train, test = files
    saved = tmp_path / "sarc.safetensors"
    run(test, "--train", train, "-o", tmp_path / "once.csv", "--save", saved)
    run(test, "--model", saved, "-o", tmp_path / "again.csv")
    assert (tmp_path / "once.csv").read_text() == (tmp_path / "again.csv").read_text()
    assert heedful.load(saved).classes_.tolist() == ["fast", "slow"]


def test_json_has_both_accuracies_in_percent(files, tmp_path):
    train, test = files
    result = json.loads(run(test, "--train", train, "-o", tmp_path / "out.parquet", "--json").stdout)
    table = pd.read_parquet(tmp_path / "out.parquet")
    right = table["label"] == table["predicted"]
    assert result.pop("accuracy") == pytest.approx(100 * right.mean())
    assert result.pop("balanced_accuracy") == pytest.approx(100 * right.groupby(table["label"]).mean().mean())
    assert result == {
        "method": "sarc",
        "cases": 20,
        "classes": ["fast", "slow"],
        "written": str(tmp_path / "out.parquet"),
    }


def test_without_labels_classes_are_written_and_no_accuracy(files, tmp_path):
    X, _ = waves(6, seed=2)
    done = run(write(tmp_path / "new.ts", X), "--train", files[0], "-o", tmp_path / "out.csv")
    assert list(pd.read_csv(tmp_path / "out.csv")) == ["predicted", "p_fast", "p_slow"]
    assert done.stdout == f"6 cases classified, written to {tmp_path / 'out.csv'}\n"


def test_settings_can_be_tuned(files, tmp_path):
    train, test = files
    saved = tmp_path / "sarc.safetensors"
    run(test, "--train", train, "-o", tmp_path / "out.csv", "--tune", "random", "--save", saved)
    assert heedful.load(saved).best_params_


def test_cases_of_different_lengths_and_several_channels_are_classified(tmp_path):
    parts = [waves(20, length, channels=2, seed=length) for length in (40, 33)]
    X, y = [case for X, _ in parts for case in X], np.concatenate([y for _, y in parts])
    train = write(tmp_path / "train.ts", X, y)
    result = json.loads(run(train, "--train", train, "-o", tmp_path / "out.csv", "--json").stdout)
    assert result["accuracy"] > 80


def test_what_cannot_be_meant_is_refused_before_any_work(files, tmp_path):
    train, test = files
    out = tmp_path / "out.csv"
    assert refusal(ParameterError, test, "-o", out).startswith("say what to predict by: --train TRAIN")
    assert refusal(ParameterError, test, "-o", out, "--train", train, "--model", train).startswith(
        "say what to predict by"
    )
    assert refusal(ParameterError, test, "-o", out, "--model", train, "--tune", "random").startswith(
        "--save and --tune"
    )
    assert refusal(ParameterError, test, "-o", out, "--train", train, "--jobs", 0).startswith("--jobs must be a number")
    assert "tables are read and written as" in refusal(InputError, test, "-o", tmp_path / "out.doc", "--train", train)
    model = tmp_path / "model.pkl"
    assert refusal(InputError, test, "-o", out, "--train", train, "--save", model) == (
        f"{model}: a classifier is saved as .safetensors; got .pkl."
    )
    for options in (["-o", tmp_path / "none" / "out.csv"], ["-o", out, "--save", tmp_path / "none" / "m.safetensors"]):
        message = refusal(FileNotFoundError, tmp_path / "absent.ts", *options, "--train", train)  # TEST is not read yet
        assert f"the folder {tmp_path / 'none'} does not exist. Create it" in message
    out.write_text("kept")
    assert refusal(FileExistsError, test, "-o", out, "--train", train).startswith(f"{out} exists.")
    assert out.read_text() == "kept"
    assert run(test, "-o", out, "--train", train, "--overwrite").exit_code == 0


def test_no_table_is_written_when_the_labels_are_of_other_classes(files, tmp_path):
    X, y = waves(6)
    odd = write(tmp_path / "odd.ts", X, [f"{name}er" for name in y])
    message = refusal(
        InputError, odd, "--train", files[0], "-o", tmp_path / "out.csv", "--save", tmp_path / "m.safetensors"
    )
    assert message == (
        f"the labels of {odd} (faster, slower) are none of the classes that were learnt: fast, slow. Is it the right column?"
    )
    assert not (tmp_path / "out.csv").exists()
    assert heedful.load(tmp_path / "m.safetensors").classes_.tolist() == ["fast", "slow"]  # not learnt in vain


def test_errors_of_the_method_name_the_file(files, tmp_path):
    train, test = files
    X, y = waves(6, length=50)
    longer = write(tmp_path / "longer.ts", X, y)
    assert refusal(InputError, longer, "--train", train, "-o", tmp_path / "out.csv").startswith(
        f"{longer}: case 0 of X has 50"
    )
    one = write(tmp_path / "one.ts", X, ["a"] * 6)
    assert refusal(InputError, test, "--train", one, "-o", tmp_path / "out.csv").startswith(f"{one}: ")
    bare = write(tmp_path / "bare.ts", X)
    assert refusal(InputError, test, "--train", bare, "-o", tmp_path / "out.csv") == (
        f"{bare} has no labels to learn from. In a table they are the column 'y': see --label."
    )


def test_a_model_of_another_method_is_refused(files, tmp_path):
    from heedful.calibrate import TemperatureCalibrator

    P = np.tile([[0.7, 0.3], [0.4, 0.6]], (5, 1))
    TemperatureCalibrator().fit(P, np.array([0, 1] * 5)).save(tmp_path / "t.safetensors")
    assert "holds a TemperatureCalibrator; give a file that heedful classify --save wrote." in refusal(
        InputError, files[1], "--model", tmp_path / "t.safetensors", "-o", tmp_path / "out.csv"
    )


def test_help_loads_nothing_heavy():
    code = "import sys, heedful.cli.classify; print(sorted({'numpy', 'torch', 'pandas', 'sklearn'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# The files.


@pytest.mark.parametrize("suffix", [".ts", ".arff", ".tsv", ".txt", ".csv", ".parquet", ".npz"])
def test_every_kind_of_file_gives_the_same_cases(tmp_path, suffix):
    X, y = waves(5)
    read = read_series(write(tmp_path / f"a{suffix}", X, y), label="y")
    np.testing.assert_allclose(np.stack(read.series), X, atol=1e-15)  # pandas may miss the last bit of a CSV
    assert read.labels == y.tolist()


@pytest.mark.parametrize("suffix", [".ts", ".arff", ".npz"])
def test_channels_are_kept_apart(tmp_path, suffix):
    X, y = waves(5, channels=3)
    read = read_series(write(tmp_path / f"a{suffix}", X, y), label="y")
    np.testing.assert_array_equal(np.stack(read.series), X)


@pytest.mark.parametrize("suffix", [".ts", ".arff", ".csv", ".parquet", ".npz"])
def test_labels_may_be_absent(tmp_path, suffix):
    X, _ = waves(5)
    read = read_series(write(tmp_path / f"a{suffix}", X), label="y")
    np.testing.assert_allclose(np.stack(read.series), X, atol=1e-15)
    assert read.labels is None


@pytest.mark.parametrize("suffix", [".tsv", ".csv", ".parquet", ".npz"])
def test_missing_ends_make_a_case_shorter(tmp_path, suffix):
    X, y = waves(3, length=9)
    X[1, :, 6:] = np.nan
    X[2, :, :2] = np.nan
    read = read_series(write(tmp_path / f"a{suffix}", X, y), label="y")
    for case, expected in zip(read.series, (X[0], X[1, :, :6], X[2, :, 2:]), strict=True):
        np.testing.assert_allclose(case, expected, atol=1e-15)


@pytest.mark.parametrize("name", ["ArrowHead", "BasicMotions", "GunPoint", "JapaneseVowels"])
def test_agrees_with_aeon_on_its_own_files(name):
    pytest.importorskip("aeon")
    from pathlib import Path

    import aeon.datasets
    from aeon.datasets import load_from_arff_file, load_from_ts_file, load_from_tsv_file

    stem = Path(aeon.datasets.__file__).parent / "data" / name / f"{name}_TRAIN"
    readers = {".ts": load_from_ts_file, ".arff": load_from_arff_file, ".tsv": load_from_tsv_file}
    found = 0
    for suffix, theirs in readers.items():
        if (path := stem.with_suffix(suffix)).is_file():
            X, y = theirs(str(path))
            ours = read_series(path, label="y")
            assert len(ours.series) == len(X)
            for case, expected in zip(ours.series, X, strict=True):
                np.testing.assert_array_equal(case, expected)
            assert [label.lower() for label in ours.labels] == [str(label).lower() for label in y]  # it lowers some
            found += 1
    assert found


def test_ucr_labels_that_are_whole_numbers_are_written_one_way(tmp_path):
    (tmp_path / "a.txt").write_text("  1.0000000e+00  0.5  1  2\n 2,0.5,1,2\n-1\t0.5\t1\t2\n1.5 1 2 3\n")
    assert read_series(tmp_path / "a.txt", label="y").labels == ["1", "2", "-1", "1.5"]


@pytest.mark.parametrize("gap", ["\t", ",", ", "])
def test_empty_fields_of_ucr_files_are_missing_values(tmp_path, gap):
    path = tmp_path / "a.txt"
    path.write_text("1,,0.5,1,2\n2,0.5,1,2,,\n".replace(",", gap))
    read = read_series(path, label="y")
    assert read.labels == ["1", "2"]
    np.testing.assert_array_equal(read.series, [[[0.5, 1, 2]]] * 2)
    path.write_text(",0.5,1,2\n".replace(",", gap))
    read = read_series(path, label="y")
    assert read.labels is None
    np.testing.assert_array_equal(read.series, [[[0.5, 1, 2]]])


def test_the_index_of_pandas_is_no_time_point(tmp_path):
    frame = pd.DataFrame({"a": [1, 2], "b": [3, 4], "c": [5, 6], "y": ["k", "l"]})
    frame.to_csv(tmp_path / "a.csv")
    pd.read_csv(tmp_path / "a.csv").to_parquet(tmp_path / "a.parquet")
    for name in ("a.csv", "a.parquet"):
        with pytest.raises(FileFormatError, match=r"column 'Unnamed: 0' has no name.* index=False, or rename"):
            read_series(tmp_path / name, label="y")


@pytest.mark.parametrize("head", ["@attribute bag relational\n@attribute t real\n@end bag\n", "@attribute t real\n"])
def test_arff_without_classes_keeps_its_last_time_point(tmp_path, head):
    case = "'1,2,3'" if "bag" in head else "1,2,3,?"
    (tmp_path / "a.arff").write_text(f"@relation r\n{head}@data\n{case}\n")
    read = read_series(tmp_path / "a.arff", label="y")
    assert read.labels is None
    np.testing.assert_array_equal(read.series, [[[1, 2, 3]]])


def test_columns_of_labels_stay_text_in_csv_and_may_have_any_name(tmp_path):
    (tmp_path / "a.csv").write_text("a,kind,b,c\n1,01,2,3\n4,NA,5,6\n")
    read = read_series(tmp_path / "a.csv", label="kind")
    assert read.labels == ["01", "NA"]
    np.testing.assert_array_equal(read.series[1], [[4, 5, 6]])


def test_comments_in_other_encodings_do_no_harm(tmp_path):
    (tmp_path / "a.ts").write_bytes("# für\n@classlabel true a\n@DATA\n1,2,3:a\n".encode("latin-1"))
    assert read_series(tmp_path / "a.ts", label="y").labels == ["a"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.ts", "@classLabel true a\n@data\n1,2,3:a\n1,x,3:a\n", ", line 4: numbers are needed; could not convert"),
        ("a.ts", "@classLabel true a\n@data\n1,2,3:4,5:a\n", ", line 3: the channels have different lengths: 3, 2."),
        (
            "a.ts",
            "@classLabel true a\n@data\n1,2,3:a\n1,2,3:4,5,6:a\n",
            ", line 4: 2 channels, but the case before has 1.",
        ),
        ("a.ts", "@classLabel true a\n@data\n1,2,3:a\n\n1,2,3:?\n", ", line 5: no label, unlike the case before."),
        (
            "a.ts",
            "@classLabel true a\n@data\n1,?,3,4:a\n",
            ", line 3: time point 2 of channel 1 is missing or infinite.",
        ),
        (
            "a.ts",
            "@classLabel true a\n@data\n?,1,2,inf,4:a\n",
            ", line 3: time point 4 of channel 1 is missing or infinite.",
        ),
        ("a.ts", "@classLabel true a\n@data\n1,2:a\n", ", line 3: a case needs at least 3 time points; got 2."),
        ("a.ts", "@classLabel true a\n@data\n?,?,?,?:a\n", ", line 3: a case needs at least 3 time points; got 0."),
        ("a.ts", "@timestamps true\n@data\n(0,1),(1,2):a\n", ", line 1: files with time stamps are not read."),
        (
            "a.ts",
            "@targetlabel true\n@data\n1,2,3:4\n",
            ", line 1: files with numbers as targets, not classes, are not read.",
        ),
        ("a.ts", "1,2,3:a\n", ", line 1: lines before @data begin with @; got '1,2,3:a'."),
        ("a.ts", "@classLabel true a\n@data\n", " holds no cases."),
        ("a.arff", "@relation r\n@data\n'1,2,3\\n1,2',a\n", ", line 3: the channels have different lengths: 3, 2."),
        ("a.arff", "@relation r\n@data\n1,2,3,a\n1,b,3,a\n", ", line 4: numbers are needed; could not convert"),
        (
            "a.arff",
            "@relation r\n@attribute a {x}\n@attribute b Real\n@data\n1,2,3,4\n",
            ", line 3: the last attribute is a number, and no class. Declare a class attribute last",
        ),
        ("a.txt", "1,0.5,,2,3\n", ", line 1: time point 2 of channel 1 is missing or infinite."),
        ("a.tsv", "1\t0.5\t\t2\t3\n", ", line 1: time point 2 of channel 1 is missing or infinite."),
        ("a.tsv", "1\t1\t2\t3\n\t0.5\t1\t2\n", ", line 2: no label, unlike the case before."),
        ("a.tsv", "1\t1\t2\t3\n2\t1\tNaN\t3\n", ", line 2: time point 2 of channel 1 is missing or infinite."),
        ("a.tsv", "1\t1\t2\t3\n2\n", ", line 2: a case needs at least 3 time points; got 0."),
        ("a.csv", "a,b,c,y\n1,2,3,k\n1,,3,k\n", ", line 3: time point 2 of channel 1 is missing or infinite."),
        ("a.csv", "id,b,c,d,y\nu1,2,3,4,k\n", ": every column but the labels is a time point, and id hold no numbers."),
        ("a.csv", "a,b,c,y\n", " holds no cases."),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(FileFormatError) as error:
        read_series(tmp_path / name, label="y")
    assert str(error.value).startswith(f"{tmp_path / name}{message}")


def test_wrong_arrays_are_named(tmp_path):
    def refused(**arrays):
        np.savez(tmp_path / "a.npz", **arrays)
        with pytest.raises(FileFormatError) as error:
            read_series(tmp_path / "a.npz", label="kind")
        return str(error.value).removeprefix(str(tmp_path / "a.npz"))

    assert refused(series=np.ones((2, 5))) == (
        ": an array X of numbers, (cases, time points) or (cases, channels, time points), is needed; it has series."
    )
    assert refused(X=np.ones(5)).endswith("is needed; it is float64 of shape (5,).")
    assert refused(X=np.array(["a", "b"])).endswith("is needed; it is <U1 of shape (2,).")
    assert refused(X=np.ones((2, 5)), kind=np.ones(3)) == (
        ": kind must hold a label for each of the 2 cases; its shape is (3,)."
    )
    assert refused(X=np.array([{}])).startswith(" cannot be read as npz: Object arrays cannot be loaded")
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04")
    with pytest.raises(FileFormatError, match="cannot be read as npz"):
        read_series(tmp_path / "a.npz", label="y")


def test_unknown_suffixes_and_absent_files_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"series are read as \.ts, \.arff, .*; got \.mat\."):
        read_series(tmp_path / "a.mat", label="y")
    with pytest.raises(FileNotFoundError, match="does not exist or is not a file"):
        read_series(tmp_path / "a.ts", label="y")
