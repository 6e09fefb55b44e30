"""CABS inside of mergekit."""

import subprocess
import sys

import pytest
import torch
import yaml

from heedful.errors import MissingExtraError
from heedful.merge import merge_checkpoints, mergekit
from tests.merge import llamas

_RULES = [{"filter": "mlp", "value": [0.2, 0.9]}, {"value": 0.7}]
RECIPES = {
    "counts": ({"n": 32, "weight": _RULES}, {"n": 64, "weight": 0.4}, {"m": 128, "lambda": 1.2}),
    "density": ({"density": [0.1, 0.3]}, {"density": 0.5}, {"weight": 0.5, "tail": "keep"}),
    "overlapping": ({}, {"lambda": 0.5}, {"n": [200, 150], "overlap": "ties"}),
}


@pytest.fixture(scope="module")
def recipes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llamas")
    base = llamas.write_llama(folder / "base")
    for seed, name in enumerate(("math", "code"), start=1):
        llamas.write_llama(folder / name, seed=seed, base=base)
    made = {}
    for name, (math, code, whole) in RECIPES.items():
        models = [
            {"model": str(folder / "math"), "parameters": math},
            {"model": str(folder / "code"), "parameters": code},
        ]
        recipe = {"models": models, "merge_method": "cabs", "base_model": str(folder / "base"), "parameters": whole}
        made[name] = yaml.safe_dump(recipe | {"dtype": "float32"}, sort_keys=False)
    return made


@pytest.fixture(scope="module")
def theirs(recipes, tmp_path_factory):
    return llamas.mergekit(recipes, tmp_path_factory.mktemp("mergekit"), first="heedful.merge.mergekit.register()")


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_cabs_in_mergekit_gives_the_tensors_of_heedful(name, recipes, theirs, tmp_path):
    (tmp_path / "recipe.yaml").write_text(recipes[name])
    merge_checkpoints(tmp_path / "recipe.yaml", tmp_path / "out")
    ours = llamas.read_tensors(tmp_path / "out")
    assert ours.keys() == theirs[name].keys()
    assert [tensor for tensor in ours if not torch.equal(ours[tensor], theirs[name][tensor])] == []


@pytest.mark.slow
def test_the_module_is_mergekits_command(recipes, theirs, tmp_path):
    (tmp_path / "recipe.yaml").write_text(recipes["counts"])
    command = [sys.executable, "-W", "ignore", "-m", "heedful.merge.mergekit", "recipe.yaml", "out", "--quiet"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ours = llamas.read_tensors(tmp_path / "out")
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs["counts"].items())
    assert "[CABS](https://arxiv.org/abs/2503.01874)" in (tmp_path / "out" / "README.md").read_text()


def test_without_mergekit_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mergekit.merge_methods", None)
    with pytest.raises(MissingExtraError, match=r'needs mergekit 0.1.5 or later. .* pip install "heedful\[bench\]"'):
        mergekit.register()
