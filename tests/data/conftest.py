import pytest

from heedful import data
from tests.data import toys


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty cache whose only data set is the toy, on a machine whose only client is the stand-in for npm."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEEDFUL_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(data, "datasets", {"toy": toys.dataset()})
    toys.serve(tmp_path)
    data._load.cache_clear()
    yield tmp_path
    data._load.cache_clear()


@pytest.fixture
def without_npm(home):
    (home / "bin" / "npm").unlink()
    return home
