import json
import os
import signal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import sparse

import heedful
from heedful._files import load_arrays, save_arrays
from heedful.errors import FileFormatError, InputError
from heedful.unlearn import KernelSelectiveSamplingClassifier, SelectiveSamplingClassifier
from tests.conformance.files import count_lines, exit_code, run_until_line

KINDS = {
    "rebuild": lambda **settings: SelectiveSamplingClassifier(kappa=0.3, **settings),
    "downdate": lambda **settings: SelectiveSamplingClassifier(kappa=0.3, update="downdate", **settings),
    "kernel": lambda **settings: KernelSelectiveSamplingClassifier(kappa=0.2, **settings),
}


@pytest.fixture(params=KINDS)
def make(request):
    return KINDS[request.param]


@pytest.mark.parametrize("horizon", [None, 400])
@pytest.mark.parametrize("layout", [np.asarray, sparse.csr_matrix])
@pytest.mark.parametrize("names", [None, np.arange(400), np.array([f"p{row}é" for row in range(400)])])
def test_what_is_loaded_is_what_was_saved(draw, make, tmp_path, horizon, layout, names):
    X, y = draw(400, 5, 0)
    y = np.array(["no", "perhaps", "yes"])[y + (X[:, 0] > 0.3)]
    model = make(horizon=horizon).fit(layout(X), y, ids=names)
    if names is not None:
        model.unlearn(model.core_ids_[:3])
    model.save(tmp_path / "model.safetensors")
    for loaded in (heedful.load(tmp_path / "model.safetensors"), type(model).load(tmp_path / "model.safetensors")):
        assert loaded.state_digest() == model.state_digest()
        assert loaded.get_params() == model.get_params()
        np.testing.assert_array_equal(loaded.decision_function(X), model.decision_function(X))
        np.testing.assert_array_equal(loaded.predict(X), model.predict(X))
        assert loaded.audit().passed
        if names is not None:
            assert loaded.core_ids_.dtype == model.core_ids_.dtype
            assert loaded.unlearn(model.core_ids_[:2]).removed == 2
            assert loaded.audit().passed


def test_names_of_columns_and_an_empty_core_come_back(draw, make, tmp_path):
    X, y = draw(400, 3, 0)
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    model = make(horizon=400).fit(frame, y.astype(bool), ids=np.arange(400))
    model.unlearn(model.core_ids_)
    model.save(tmp_path / "model.safetensors")
    loaded = type(model).load(tmp_path / "model.safetensors")
    assert loaded.feature_names_in_.tolist() == ["a", "b", "c"]
    assert loaded.classes_.tolist() == [False, True]
    assert len(loaded.core_ids_) == 0
    assert loaded.state_digest() == model.state_digest()
    loaded.partial_fit(frame, y.astype(bool), ids=np.arange(400))
    assert loaded.score(frame, y.astype(bool)) > 0.8


def test_parameters_may_be_numpy_scalars(draw, tmp_path):
    X, y = draw(100, 3, 0)
    model = SelectiveSamplingClassifier(kappa=np.float64(0.3), horizon=np.int64(100)).fit(X, y)
    model.save(tmp_path / "model.safetensors")
    assert heedful.load(tmp_path / "model.safetensors").state_digest() == model.state_digest()


def test_the_file_after_a_deletion_is_that_of_a_system_that_never_saw_the_samples(draw, tmp_path):
    """Byte for byte: no time, no machine, no count, no order of requests, no room left where something was."""
    X, y = draw(400, 5, 0)
    for make in (KINDS["rebuild"], KINDS["kernel"]):
        model = make(horizon=400).fit(X, y, ids=[f"person {row}" for row in range(400)])
        keep = np.arange(len(model.core_ids_)) % 3 > 0
        gone, name = model.core_ids_[~keep], tmp_path / "model.safetensors"
        never = make(horizon=400).fit(model.core_X_[keep], model.core_y_[keep], ids=model.core_ids_[keep])
        never.save(tmp_path / "never.safetensors")
        model.save(name)
        before = name.read_bytes()
        model = type(model).load(name)
        row = model.core_X_[~keep][0]
        assert before.count(gone[0].encode()) == before.count(row.tobytes()) == 1
        for person in gone[::-1]:
            model.unlearn([person])
        model.save(name)
        content = name.read_bytes()
        assert content == (tmp_path / "never.safetensors").read_bytes()
        assert not any(f'"{person}\\"'.encode() in content for person in gone)
        assert row.tobytes() not in content
        assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "never.safetensors"]


def test_the_metadata_are_public_parameters_and_names_of_the_stored(draw, tmp_path):
    X, y = draw(400, 5, 0)
    model = SelectiveSamplingClassifier(horizon=1000).fit(X, y, ids=[f"p{row}" for row in range(400)])
    model.save(tmp_path / "model.safetensors")
    arrays, meta = load_arrays(tmp_path / "model.safetensors")
    assert set(arrays) == {"core_X", "core_y", "coef", "intercept"}
    assert set(meta) == {
        *("class", "format", "parameters", "horizon", "classes", "classes_dtype"),
        *("n_features", "feature_names", "ids", "digest"),
    }
    assert meta["ids"] == model.core_ids_.tolist()
    assert meta["digest"] == model.state_digest()
    assert "400" not in json.dumps({key: value for key, value in meta.items() if key not in ("ids", "digest")})


def test_a_file_that_was_altered_is_refused(draw, make, tmp_path):
    X, y = draw(400, 5, 0)
    path = tmp_path / "model.safetensors"
    make(horizon=400).fit(X, y, ids=np.arange(400)).save(path)
    arrays, meta = load_arrays(path)
    learned = "dual_coef" if "dual_coef" in arrays else "coef"
    changes = [
        ({learned: np.nextafter(arrays[learned], 9)}, {}),
        ({"core_y": 1 - arrays["core_y"]}, {}),
        ({"core_ids": arrays["core_ids"] + 1}, {}),
        ({}, {"classes": [0, 2]}),
        ({}, {"parameters": {**meta["parameters"], "horizon": 401}}),
        ({}, {"parameters": {**meta["parameters"], "kappa": 0.31}}),
    ]
    for some, other in changes:
        save_arrays(path, arrays | some, meta | other)
        with pytest.raises(FileFormatError, match=r"model\.safetensors.*the digest does not match what the file holds"):
            heedful.load(path)
    planted = [
        ({"deleted_people": np.arange(3)}, {}),
        ({"core_y": arrays["core_y"].astype(np.int8)}, {}),
        ({}, {"log": ["p7 left"]}),
        ({}, {"horizon": 401}),
    ]
    for some, other in planted:
        save_arrays(path, arrays | some, meta | other)
        with pytest.raises(FileFormatError, match=r"the file holds more, or other, than a .*Classifier is made of"):
            heedful.load(path)
    broken = [
        ({}, {"horizon": 0}, "horizon must be an int >= 1"),
        ({}, {"parameters": {"kapa": 1}}, "kapa"),
        ({}, {"parameters": {"kappa": 7}}, "kappa must be a number"),
        ({}, {"n_features": 6}, r"core samples of shape .* for 6 features"),
        ({"core_y": arrays["core_y"][1:]}, {}, "core samples of shape"),
    ]
    for some, other, message in broken:
        save_arrays(path, arrays | some, meta | other)
        with pytest.raises(FileFormatError, match=message):
            heedful.load(path)
    del arrays[learned]
    save_arrays(path, arrays, meta)
    with pytest.raises(FileFormatError, match=f"lacks or garbles a part .*{learned}"):
        heedful.load(path)


def test_a_threshold_of_another_kappa_is_not_laundered_by_a_file(draw, make, tmp_path):
    X, y = draw(400, 5, 0)
    model = make(horizon=400).fit(X, y, ids=np.arange(400))
    model.set_params(kappa=0.5).save(tmp_path / "model.safetensors")
    assert model.audit().findings == ("threshold_ is not what learning from the core gives.",)
    with pytest.raises(FileFormatError, match="the digest does not match what the file holds"):
        heedful.load(tmp_path / "model.safetensors")


def test_only_safetensors_are_written(draw, make, tmp_path):
    X, y = draw(100, 3, 0)
    with pytest.raises(InputError, match=r"needs a path ending in \.safetensors"):
        make().fit(X, y).save(tmp_path / "model.pkl")
    path = tmp_path / "model.safetensors"
    KernelSelectiveSamplingClassifier().fit(X, y).save(path)
    with pytest.raises(FileFormatError, match="holds a KernelSelectiveSamplingClassifier, not a SelectiveSampling"):
        SelectiveSamplingClassifier.load(path)


# A deletion in a file: load, unlearn, save over it.


def delete_in_file(path):
    model = heedful.load(path)
    model.unlearn(["p0", "p1", "p2"])
    model.save(path)


@pytest.fixture
def stored(draw, tmp_path):
    """A file, its digest, and its digest after the deletion."""
    X, y = draw(400, 5, 0)
    model = SelectiveSamplingClassifier(horizon=400).fit(X, y, ids=[f"p{row}" for row in range(400)])
    model.save(tmp_path / "model.safetensors")
    before = model.state_digest()
    assert model.unlearn(["p0", "p1", "p2"]).removed == 3
    return tmp_path / "model.safetensors", before, model.state_digest()


@pytest.mark.parametrize("step", [(Path, "write_bytes"), (os, "replace"), (os, "fsync")], ids=lambda step: step[1])
def test_a_write_that_fails_leaves_the_old_file_whole(stored, monkeypatch, step):
    path, before, _ = stored
    content = path.read_bytes()

    def fails(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(*step, fails)
        with pytest.raises(OSError, match="No space left"):
            delete_in_file(path)
    assert path.read_bytes() == content
    assert os.listdir(path.parent) == [path.name]
    assert heedful.load(path).state_digest() == before


def test_a_deletion_that_is_killed_leaves_the_old_file_or_the_new(stored, tmp_path):
    path, before, after = stored
    content, seen = path.read_bytes(), set()
    lines = count_lines(tmp_path / "lines", delete_in_file, path)
    new = path.read_bytes()
    assert heedful.load(path).state_digest() == after
    for n in sorted({*range(1, lines, 1 + lines // 8), *range(lines - 8, lines + 1)}):
        path.write_bytes(content)
        assert exit_code(run_until_line, n, delete_in_file, path) == -signal.SIGKILL
        assert path.read_bytes() in (content, new), f"killed before line {n} of {lines}"
        model = heedful.load(path)
        assert model.audit()
        seen.add(model.state_digest())
    assert seen == {before, after}
