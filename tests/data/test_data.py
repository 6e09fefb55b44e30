import json

import numpy as np
import pytest

from heedful import data
from heedful.data._registry import Bundled
from heedful.errors import FileFormatError, ParameterError


def test_an_unknown_name_lists_the_known_ones():
    for ask in (data.load, data.info, data.check, data.checksums, data.is_cached):
        with pytest.raises(ParameterError) as error:
            ask("mnits")
        assert str(error.value) == f"there is no data set 'mnits'. There are: {', '.join(data.names())}."


def test_declarations_touch_no_file(monkeypatch, tmp_path):
    monkeypatch.setenv("HEEDFUL_DATA", str(tmp_path / "nowhere"))
    declared = data.checksums("mnist", "digits")
    assert declared == {name: data.info(name).checksum for name in ("mnist", "digits")}
    assert not data.is_cached("mnist")
    assert not (tmp_path / "nowhere").exists()


def test_what_is_declared_is_plain_json_and_complete():
    for name in data.names():
        facts = json.loads(json.dumps(data.info(name).to_dict()))
        assert facts["name"] == name
        assert all(facts[key] for key in ("what", "form", "shapes", "licence", "source", "checksum"))
        assert hasattr(data, facts["form"])


def test_loading_twice_gives_the_same_object_and_reads_once(home, monkeypatch):
    first = data.load("toy")
    monkeypatch.setattr("heedful.data.read_cached", lambda *_: pytest.fail("read again"))
    assert data.load("toy") is first


def test_another_folder_is_another_cache(home, monkeypatch):
    first = data.load("toy")
    monkeypatch.setenv("HEEDFUL_DATA", str(home / "second"))
    assert data.check("toy") == "absent"
    assert data.load("toy") is not first
    assert data.check("toy") == "sound"


@pytest.mark.parametrize(("name", "shape", "classes"), [("digits", (1797, 64), 10), ("breast_cancer", (569, 30), 2)])
def test_data_of_a_dependency_load_without_a_cache(monkeypatch, tmp_path, name, shape, classes):
    monkeypatch.setenv("HEEDFUL_DATA", str(tmp_path / "nowhere"))
    table = data.load(name)
    assert table.X.shape == shape
    assert len(table.feature_names) == shape[1]
    assert len(table.class_names) == classes
    assert set(np.unique(table.y)) == set(range(classes))
    assert not table.X.flags.writeable
    assert data.is_cached(name)
    assert data.check(name) == "sound"
    assert not (tmp_path / "nowhere").exists()


def test_a_dependency_whose_data_changed_is_refused(monkeypatch):
    row = data.datasets["digits"]
    table = row.source.read()
    other = data.Table(table.X + 1, table.y, table.feature_names, table.class_names)
    changed = type(row)(**(vars(row) | {"source": Bundled("scikit-learn", lambda: other)}))
    monkeypatch.setattr(data, "datasets", {"digits": changed})
    monkeypatch.setenv("HEEDFUL_DATA", "elsewhere")
    with pytest.raises(
        FileFormatError, match=r"^the content read for digits has checksum \w{64}, but \w{64} is declared: "
    ):
        data.load("digits")
    assert data.check("digits") == "damaged"
