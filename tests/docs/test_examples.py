"""What the documentation shows is what happens: examples, console sessions and docstrings are executed."""

import doctest
import importlib
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest

import heedful
from heedful.catalog import methods

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LOOSE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def blocks(page):
    return _BLOCK.findall(page.read_text())


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_of_a_page_run_in_the_order_of_reading(page, tmp_path, monkeypatch):
    """Python blocks of a page share their names; a console session runs where they ran and prints what it shows."""
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEEDFUL_STORE", str(tmp_path / "trials.sqlite"))
    names: dict = {"__name__": "example"}
    for language, text in blocks(page):
        if language == "python":
            exec(compile(text, f"{page.name}, python block", "exec"), names)
        else:
            run_session(text)


def run_session(text):
    for command, shown in re.findall(r"^\$ (heedful .*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE):
        if needs_a_users_module(command):
            continue
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": "120",
        }
        done = subprocess.run(shlex.split(command, comments=True), capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        if shown.strip():
            assert doctest.OutputChecker().check_output(shown, done.stdout, _LOOSE), done.stdout


def needs_a_users_module(command):
    return "--task" in command


MODULES = [name for _, name, _ in pkgutil.walk_packages(heedful.__path__, "heedful.") if not name.endswith("__main__")]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = doctest.testmod(importlib.import_module(name), optionflags=_LOOSE)
    assert found.failed == 0


def test_every_placeholder_of_the_pages_is_one_that_the_site_fills():
    filled = set(re.findall(r"FILLERS = .*?\(([^)]*)\)", (ROOT / "docs" / "hooks.py").read_text())[0].split(", "))
    used = {name for page in PAGES for name in re.findall(r"^\{\{ (\w+)\(", page.read_text(), re.MULTILINE)}
    assert used <= filled


def test_the_table_of_methods_in_the_readme_is_that_of_the_catalogue():
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| \[.*$", readme, re.MULTILINE)
    assert rows == [
        f"| [{m.title}](docs/methods/{m.slug}.md) | `heedful.{m.room}.{m.names[0]}` | {m.replaces} | {m.heeds} |"
        for m in methods.values()
    ]
