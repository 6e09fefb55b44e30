import json

import pytest
from typer.testing import CliRunner

from heedful import data
from heedful.cli.data import app
from heedful.data._cache import cached_path
from heedful.errors import DataUnavailableError, ParameterError
from tests.data import toys


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEEDFUL_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(data, "datasets", {"toy": toys.dataset(), "digits": data.datasets["digits"]})
    toys.serve(tmp_path)
    data._load.cache_clear()
    yield tmp_path
    data._load.cache_clear()


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def test_list_shows_what_is_here_and_what_is_not(home):
    lines = run("list").stdout.splitlines()
    assert lines[0].split() == ["name", "here", "what", "shapes", "source", "licence"]
    assert lines[1].split()[:2] == ["toy", "no"]
    assert lines[2].split()[:2] == ["digits", "yes"]


def test_list_as_json_carries_the_declarations(home):
    rows = json.loads(run("list", "--json").stdout)
    assert rows[0] == {**data.info("toy").to_dict(), "cached": False}
    assert [row["cached"] for row in rows] == [False, True]


def test_get_fetches_and_says_what_came(home):
    result = run("get", "toy")
    assert result.exit_code == 0
    assert result.stdout == "toy is here and sound: Images of 6 + 2 x 3 x 3\n"
    assert data.check("toy") == "sound"
    assert json.loads(run("get", "toy", "--json").stdout)["folder"] == str(data.folder())


def test_get_lets_the_errors_of_the_library_through(home):
    assert isinstance(run("get", "mnits").exception, ParameterError)
    (home / "bin" / "npm").unlink()
    assert isinstance(run("get", "toy").exception, DataUnavailableError)


def test_check_passes_over_what_is_absent(home):
    result = run("check")
    assert result.exit_code == 0
    assert result.stdout == "absent   toy\nsound    digits\n"


def test_check_exits_with_1_when_one_is_damaged(home):
    data.load("toy")
    cached_path(toys.dataset(), data.folder()).write_bytes(b"rust")
    result = run("check", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {"toy": "damaged", "digits": "sound"}
