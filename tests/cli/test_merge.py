import json
import shutil
import subprocess
import sys

import pandas as pd
import pytest
import torch
import yaml
from typer.testing import CliRunner

from heedful.cli import app
from heedful.errors import FileFormatError, ParameterError
from heedful.merge import merge_checkpoints, merge_state_dicts, sparsity_report
from tests.merge.llamas import read_tensors, write_llama


@pytest.fixture
def recipe(tmp_path):
    base = write_llama(tmp_path / "base")
    write_llama(tmp_path / "math", seed=1, base=base)
    write_llama(tmp_path / "code", seed=2, base=base)
    models = [{"model": str(tmp_path / name), "parameters": {"weight": 0.5}} for name in ("math", "code")]
    write(tmp_path, {"models": models, "merge_method": "cabs", "base_model": str(tmp_path / "base")})
    return tmp_path / "recipe.yaml"


def write(folder, recipe):
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))


def change(recipe, **changes):
    write(recipe.parent, yaml.safe_load(recipe.read_text()) | changes)


def run(*arguments):
    command = ["merge", *map(str, arguments)]
    return CliRunner().invoke(app, command, catch_exceptions=False, env={"COLUMNS": "120"})


def states(folder):
    base, *models = (read_tensors(folder / name) for name in ("base", "math", "code"))
    return base, models


def test_merge_writes_what_python_does_and_says_what_it_wrote(recipe, tmp_path):
    done = run(recipe, "-o", tmp_path / "out", "--shard-size", "20KB", "--dtype", "bfloat16")
    assert done.exit_code == 0
    assert done.stdout == f"cabs of 2 models: 30 tensors, 17,640 parameters, 35.3 kB, written to {tmp_path / 'out'}\n"
    merge_checkpoints(recipe, tmp_path / "python", dtype="bfloat16")
    ours, expected = read_tensors(tmp_path / "out"), read_tensors(tmp_path / "python")
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in ours)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


def test_the_report_can_be_had_as_json(recipe, tmp_path):
    done = run(recipe, "-o", tmp_path / "out", "--json", "--quiet", "--seed", "7")
    expected = {
        "method": "cabs",
        "models": [str(tmp_path / "math"), str(tmp_path / "code")],
        "out": str(tmp_path / "out"),
    }
    expected |= {"n_tensors": 30, "n_merged": 30, "n_parameters": 17640, "n_bytes": 70560}
    assert json.loads(done.stdout) == expected
    assert done.stderr == ""


def test_the_seed_draws_what_is_dropped(recipe, tmp_path):
    change(recipe, merge_method="dare_linear", parameters={"density": 0.5})
    merged = {}
    for name, seed in {"one": 1, "again": 1, "two": 2}.items():
        run(recipe, "-o", tmp_path / name, "--seed", seed, "--quiet")
        merged[name] = read_tensors(tmp_path / name)["model.norm.weight"]
    assert torch.equal(merged["one"], merged["again"])
    assert not torch.equal(merged["one"], merged["two"])


def test_a_dry_run_reports_on_the_pruned_vectors_and_writes_nothing(recipe, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    change(recipe, parameters={"n": 160})
    frame = pd.DataFrame(json.loads(run(recipe, "--dry-run", "--json").stdout))
    base, models = states(tmp_path)
    alone = [merge_state_dicts(base, models, weight=weight, n=160) for weight in ([1, 0], [0, 1])]
    masks = [{name: state[name] != base[name] for name in base} for state in alone]
    expected = sparsity_report(base, models, masks=masks)
    assert frame["tensor"].tolist()[-1] == "total"
    # the masks above miss entries whose change is lost in rounding
    frame, expected = (x.set_index("tensor").sort_index().astype(float) for x in (frame, expected))
    pd.testing.assert_frame_equal(frame, expected, rtol=1e-3, atol=1e-3)
    shown = run(recipe, "--dry-run", "--quiet").stdout
    assert shown.splitlines()[0].split() == ["tensor", "entries", "density", "overlap", "conflict", "blocks", "rows"]
    assert shown.splitlines()[-1].split()[:3] == ["total", "17,640", "0.625"]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_narrow_screen_cuts_no_names(recipe):
    arguments = ["merge", str(recipe), "--dry-run", "--quiet"]
    shown = CliRunner().invoke(app, arguments, catch_exceptions=False, env={"COLUMNS": "70"}).stdout
    assert "…" not in shown
    assert "".join(line[:20].strip() for line in shown.splitlines()).count("mlp.down_proj.weight") == 3


def test_a_dry_run_needs_vectors(recipe, tmp_path):
    change(recipe, merge_method="linear", parameters={"weight": 1})
    with pytest.raises(ParameterError, match="merge_method linear prunes no task vectors: there is nothing to report"):
        run(recipe, "--dry-run")
    for nothing in ({"exclude": ["*"]}, {"models": [{"model": str(tmp_path / "base")}]}):
        change(recipe, merge_method="cabs", **nothing)
        with pytest.raises(ParameterError, match="no tensor is merged: every model is the base, or everything is excl"):
            run(recipe, "--dry-run")


def test_a_pareto_set_is_fitted_by_a_recipe_and_asked_by_preference(recipe, tmp_path):
    change(recipe, merge_method="pareto", parameters={"rank": 4, "lambda": 0.4, "refine_steps": 5})
    models = yaml.safe_load(recipe.read_text())["models"]
    change(recipe, models=[{"model": model["model"]} for model in models])
    done = run(recipe, "-o", tmp_path / "set", "--json", "--quiet")
    assert json.loads(done.stdout)["method"] == "pareto"
    assert (tmp_path / "set" / "pareto.safetensors").is_file()
    picked = run(tmp_path / "set", "--prefer", "math=.7,code=.3", "-o", tmp_path / "picked", "--quiet")
    assert picked.stdout == f"The model for math=.7,code=.3, written to {tmp_path / 'picked'}\n"
    weights, expected = read_tensors(tmp_path / "picked"), read_tensors(tmp_path / "set")
    assert weights.keys() <= expected.keys()
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(weights[name], expected[name])
    result = run(tmp_path / "set", "--prefer", "math=1", "-o", tmp_path / "picked", "--overwrite", "--json", "--quiet")
    assert json.loads(result.stdout) == {"preference": {"math": 1.0}, "out": str(tmp_path / "picked")}


def test_pareto_takes_one_value_for_the_whole_model(recipe, tmp_path):
    change(recipe, merge_method="pareto", parameters={"rank": [4, 8]})
    with pytest.raises(ParameterError, match="parameters: pareto takes one value for the whole model"):
        run(recipe, "-o", tmp_path / "set")
    change(recipe, parameters={})
    with pytest.raises(ParameterError, match="merge_method pareto computes on the CPU; got device='meta'"):
        run(recipe, "-o", tmp_path / "set", "--device", "meta")


def test_wrong_requests_are_refused(recipe, tmp_path):
    with pytest.raises(ParameterError, match="say where the model goes, -o DIR, or --dry-run: one of them"):
        run(recipe)
    with pytest.raises(ParameterError, match="say where the model goes"):
        run(recipe, "--dry-run", "-o", tmp_path / "out")
    with pytest.raises(ParameterError, match="is a folder: if it is a Pareto set, say what you prefer"):
        run(tmp_path, "-o", tmp_path / "out")
    with pytest.raises(ParameterError, match="--prefer chooses from a Pareto set: give its folder as SOURCE"):
        run(recipe, "--prefer", "a=1", "-o", tmp_path / "out")
    with pytest.raises(ParameterError, match=r"--prefer must be like math=.7,code=.3; got 'math'"):
        run(tmp_path / "base", "--prefer", "math", "-o", tmp_path / "out")
    with pytest.raises(ParameterError, match=r"--prefer names math twice; got 'math=.7, math=.3'"):
        run(tmp_path / "base", "--prefer", "math=.7, math=.3", "-o", tmp_path / "out")
    with pytest.raises(FileNotFoundError, match=r"none.yaml does not exist"):
        run(tmp_path / "none.yaml", "-o", tmp_path / "out")
    recipe.write_text("models: [")
    with pytest.raises(FileFormatError, match=r"recipe.yaml is not the YAML of a recipe"):
        run(recipe, "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_outputs_are_refused_when_present_unless_told(recipe, tmp_path):
    run(recipe, "-o", tmp_path / "out")
    with pytest.raises(FileExistsError, match="out exists"):
        run(recipe, "-o", tmp_path / "out")
    assert run(recipe, "-o", tmp_path / "out", "--overwrite").exit_code == 0


@pytest.mark.slow
def test_exit_status_and_streams_of_the_command_itself(recipe, tmp_path):
    change(recipe, parameters={"rescale": True})
    command = [sys.executable, "-m", "heedful.cli", "merge", str(recipe)]
    done = subprocess.run([*command, "-o", "out"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("cabs of 2 models: 30 tensors")
    assert "heedful: parameters.rescale has no effect: cabs has no such setting." in done.stderr.splitlines()
    assert "merge" in done.stderr  # the bar
    shutil.rmtree(tmp_path / "code")
    wrong = subprocess.run([*command, "-o", "out2", "--quiet"], capture_output=True, text=True, cwd=tmp_path)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "code is neither a folder nor a model in the local Hugging Face cache" in wrong.stderr
    assert "Traceback" not in wrong.stderr
