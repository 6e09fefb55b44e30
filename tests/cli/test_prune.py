import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from heedful.cli import app
from heedful.compress import check_nm, prune_diagonal, prune_nm
from heedful.errors import InputError, ParameterError
from tests.merge.llamas import read_tensors, write_llama

BLOCKS = {f"model.layers.{i}" for i in range(3)}


@pytest.fixture
def llama(tmp_path):
    write_llama(tmp_path / "llama")
    return tmp_path / "llama"


def run(*arguments):
    command = ["prune", *map(str, arguments), "--quiet"]
    return CliRunner().invoke(app, command, catch_exceptions=False, env={"COLUMNS": "120"})


def load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("how", ["2:4", "diagonal"])
def test_files_become_what_pruning_the_model_gives(llama, tmp_path, how):
    options = ["--pattern", how] if how == "2:4" else ["--method", "diagonal", "--sparsity", "0.75"]
    done = run(llama, "-o", tmp_path / "out", *options)
    assert done.exit_code == 0
    assert done.stdout.startswith("21 of 30 tensors pruned: ")
    expected = load(llama)
    layers = ["model.layers.*"]
    if how == "2:4":
        prune_nm(expected, 2, 4, include=layers, exclude=())
    else:
        prune_diagonal(expected, sparsity=0.75, include=layers, exclude=())
    ours = load(tmp_path / "out").state_dict()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(ours[name], tensor), name


def test_the_report_says_how_much_is_zero_and_how_much_energy_is_left(llama, tmp_path):
    report = json.loads(run(llama, "-o", tmp_path / "out", "--pattern", "1:4", "--json").stdout)
    before, after = read_tensors(llama), read_tensors(tmp_path / "out")
    pruned = [name for name in before if not torch.equal(before[name], after[name])]
    assert report["n_pruned"] == len(pruned) == 21
    assert report["sparsity"] == 0.75
    energy = [sum(float(state[name].double().square().sum()) for name in pruned) for state in (after, before)]
    assert report["kept_energy"] == pytest.approx(energy[0] / energy[1])


def test_excluded_layers_embeddings_and_heads_stay(llama, tmp_path):
    run(llama, "-o", tmp_path / "out", "--pattern", "2:4", "--exclude", "*.down_proj,model.layers.0.*")
    before, after = read_tensors(llama), read_tensors(tmp_path / "out")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(changed) == 2 * 6
    assert not any("down_proj" in name or "layers.0." in name or "embed" in name or "head" in name for name in changed)


def test_the_matrices_of_gpt2_are_cut_along_their_inputs(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    settings = GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    GPT2LMHeadModel(settings).save_pretrained(tmp_path / "gpt2")
    run(tmp_path / "gpt2", "-o", tmp_path / "out", "--pattern", "2:4")
    weight = read_tensors(tmp_path / "out")["transformer.h.0.mlp.c_fc.weight"]
    assert weight.shape == (8, 32)
    assert check_nm(weight, 2, 4, dim=0)
    assert not check_nm(weight, 2, 4, dim=1)


def test_a_single_file_of_weights_will_do(tmp_path):
    save_file({"0.weight": torch.arange(8.0).view(2, 4), "0.bias": torch.ones(2)}, tmp_path / "net.safetensors")
    run(tmp_path / "net.safetensors", "-o", tmp_path / "out", "--pattern", "1:4")
    pruned = load_file(tmp_path / "out" / "model.safetensors")
    assert pruned["0.weight"].tolist() == [[0, 0, 0, 3], [0, 0, 0, 7]]
    assert pruned["0.bias"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "say how"),
        (["--pattern", "2:4", "--sparsity", "0.5"], "say how"),
        (["--method", "diagonal"], "say how"),
        (["--method", "diagonal", "--sparsity", "1"], "sparsity must be below 1"),
        (["--pattern", "2-4"], 'a pattern reads n:m, such as "2:4"'),
        (["--pattern", "5:4"], "n must be at most m"),
        (["--pattern", "2:4", "--exclude", "nothing"], "'nothing' matches no layer"),
    ],
)
def test_what_cannot_be_done_is_refused(llama, tmp_path, options, says):
    with pytest.raises(ParameterError, match=says):
        run(llama, "-o", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_weights_that_are_not_finite_are_named_and_nothing_is_left(llama, tmp_path):
    state = read_tensors(llama)
    state["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    for file in llama.glob("*.safetensors*"):
        file.unlink()
    save_file(state, llama / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.up_proj\.weight has entries that are NaN"):
        run(llama, "-o", tmp_path / "out", "--pattern", "2:4")
    assert not (tmp_path / "out").exists()


def test_inputs_that_cannot_be_cut_are_named_before_anything_is_read(llama, tmp_path):
    with pytest.raises(InputError, match=r"has 24 inputs, which cannot be cut into blocks of 16.*--exclude"):
        run(llama, "-o", tmp_path / "out", "--pattern", "1:16")


def test_a_checkpoint_that_is_there_is_kept_unless_told(llama, tmp_path):
    run(llama, "-o", tmp_path / "out", "--pattern", "2:4")
    before = read_tensors(tmp_path / "out")
    with pytest.raises(FileExistsError):
        run(llama, "-o", tmp_path / "out", "--pattern", "1:4")
    assert all(torch.equal(before[name], tensor) for name, tensor in read_tensors(tmp_path / "out").items())
    run(llama, "-o", tmp_path / "out", "--pattern", "1:4", "--overwrite")
    assert check_nm(read_tensors(tmp_path / "out")["model.layers.0.mlp.up_proj.weight"], 1, 4, dim=1)


def test_a_quantized_model_is_refused(llama, tmp_path):
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(InputError, match="is quantized"):
        run(llama, "-o", tmp_path / "out", "--pattern", "2:4")
