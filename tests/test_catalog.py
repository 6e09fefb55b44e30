import dataclasses
import importlib
import re
import tomllib
from pathlib import Path

import pytest

from heedful.catalog import Method, methods
from heedful.evidence import Study

ROOT = Path(__file__).parents[1]
METHODS = [pytest.param(method, id=slug) for slug, method in methods.items()]
ROOMS = sorted(path.parent.name for path in (ROOT / "src/heedful").glob("[a-z]*/__init__.py"))
FLOORS = {"cli", "data", "evidence", "studies"}  # subpackages that are no rooms


@pytest.mark.parametrize("method", METHODS)
def test_its_room_exists_and_exports_its_names(method):
    assert method.room in set(ROOMS) - FLOORS
    room = importlib.import_module(f"heedful.{method.room}")
    assert len(set(method.names)) == len(method.names) > 0
    for name in method.names:
        assert name in room.__all__
        assert getattr(room, name).__doc__, f"{name} has no docstring"


@pytest.mark.parametrize("method", METHODS)
def test_its_module_is_named_by_its_slug_and_declares_some_of_its_names(method):
    module = importlib.import_module(method.module)
    assert module.__doc__
    assert set(module.__all__) & set(method.names)
    assert method.slug not in method.names


@pytest.mark.parametrize("method", METHODS)
def test_its_study_has_its_slug_and_an_aware_arm(method):
    module, attribute = method.study.split(":")
    study = getattr(importlib.import_module(module), attribute)
    assert isinstance(study, Study)
    assert study.slug == method.slug
    assert any(arm.aware for arm in study.arms.values())


@pytest.mark.parametrize("method", METHODS)
def test_its_tests_page_and_benchmark_exist(method):
    tests = ROOT / "tests" / method.room
    assert (tests / f"test_{method.slug}.py").is_file() or list((tests / method.slug).glob("test_*.py"))
    for path in (f"docs/methods/{method.slug}.md", f"benchmarks/bench_{method.slug}.py"):
        assert (ROOT / path).is_file(), f"{path} is missing"
    assert (ROOT / "tests/studies" / f"test_{method.slug}.py").is_file()


@pytest.mark.parametrize("method", METHODS)
def test_its_texts_are_filled_and_its_extras_exist(method):
    for field in dataclasses.fields(Method):
        value = getattr(method, field.name)
        if isinstance(value, str):
            assert value == value.strip() != ""
    assert re.fullmatch("[a-z0-9_]+", method.slug)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(method.needs) <= project["optional-dependencies"].keys()


def test_slugs_are_the_keys_and_public_names_are_unique():
    assert [method.slug for method in methods.values()] == list(methods)
    names = [name for method in methods.values() for name in method.names]
    assert len(set(names)) == len(names)


def test_no_room_no_study_is_missing_from_the_catalog():
    assert {method.room for method in methods.values()} == set(ROOMS) - FLOORS
    studies = {path.stem for path in (ROOT / "src/heedful/studies").glob("[a-z]*.py")}
    assert studies == methods.keys()


def test_the_catalog_cannot_be_changed():
    with pytest.raises(TypeError):
        methods["new"] = next(iter(methods.values()))
    with pytest.raises(dataclasses.FrozenInstanceError):
        next(iter(methods.values())).slug = "other"
