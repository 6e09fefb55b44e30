import dataclasses
import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import heedful.compress.boa.model
from heedful.cli import app
from heedful.compress import QuantConfig, load_compressed, quantize, rotate_model
from heedful.compress._texts import calibration_tokens
from heedful.errors import FileFormatError, InputError, ParameterError
from tests.merge.llamas import VOCABULARY, read_tensors, write_llama

CALIBRATION = ("--n-samples", 8, "--length", 16)
FAST = ("--grid", "minmax")  # the search for a grid is most of the time, and not what is tested here


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A tiny Llama, and texts of its words."""
    folder = tmp_path_factory.mktemp("quantize")
    write_llama(folder / "llama")
    words = torch.randint(VOCABULARY, (10, 40), generator=torch.Generator().manual_seed(0)).tolist()
    texts = [" ".join(f"w{word}" for word in text) for text in words]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "texts.txt").write_text("\n".join(texts))
    return folder


def run(*arguments):
    command = ["quantize", *map(str, arguments)]
    return CliRunner().invoke(app, command, catch_exceptions=False, env={"COLUMNS": "120"})


def quantized_in_python(files, config, *, random_state=0, rotate=False, texts="texts.jsonl"):
    model = AutoModelForCausalLM.from_pretrained(files / "llama", dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(files / "llama")
    tokens = calibration_tokens(files / texts, tokenizer, n_samples=8, length=16, random_state=random_state)
    if rotate:
        rotate_model(model, random_state=random_state)
    return quantize(model, tokens, config)


def same(state, other):
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


def test_quantize_writes_what_python_does_and_shows_what_each_block_loses(files, tmp_path):
    out = tmp_path / "out"
    done = run(files / "llama", "-o", out, "--calibration", files / "texts.jsonl", *CALIBRATION, *FAST, "--bits", 3)
    assert done.exit_code == 0
    expected = quantized_in_python(files, QuantConfig(bits=3, grid="minmax"))
    assert same(load_compressed(out).state_dict(), expected.model.state_dict())
    head, *blocks, last = done.stdout.splitlines()
    assert head.split() == ["block", "boa", "gptq", "rtn"]
    assert last.startswith("boa: 21 layers in 3 bits, ")
    assert last.endswith(f" s, written to {out}")
    for number, line in enumerate(blocks):
        layers = [layer for layer in expected.report.layers if layer.block == number]
        means = [
            sum(getattr(layer, name) for layer in layers) / len(layers) for name in ("loss", "loss_gptq", "loss_rtn")
        ]
        assert line.split() == [str(number), *(f"{mean:.3%}" for mean in means)]
    assert len(blocks) == 3


def test_the_report_lies_in_the_folder_and_can_be_had_as_json(files, tmp_path):
    out = tmp_path / "out"
    options = (*CALIBRATION, *FAST, "--bits", 2, "--group-size", 12, "--method", "gptq", "--json", "--quiet")
    done = run(files / "llama", "-o", out, "--calibration", files / "texts.txt", *options)
    report = json.loads(done.stdout)
    assert json.loads((out / "quantize_report.json").read_text()) == report
    assert report["config"] == {
        **dataclasses.asdict(QuantConfig(bits=2, group_size=12, method="gptq", grid="minmax")),
        "exclude": ["lm_head"],
    }
    config = QuantConfig(bits=2, group_size=12, method="gptq", grid="minmax")
    expected = quantized_in_python(files, config, texts="texts.txt").report.to_dict()
    for one in (report, expected):
        one.pop("seconds")
        for layer in one["layers"]:
            layer.pop("seconds")
    assert {name: report[name] for name in expected} == expected
    assert done.stderr == ""


def test_a_rotated_model_can_be_written_as_plain_weights(files, tmp_path):
    out = tmp_path / "out"
    options = (*CALIBRATION, *FAST, "--bits", 4, "--rotate", "--seed", 3, "--format", "dequantized", "--quiet")
    done = run(files / "llama", "-o", out, "--calibration", files / "texts.jsonl", *options)
    assert done.exit_code == 0
    expected = quantized_in_python(files, QuantConfig(bits=4, grid="minmax"), random_state=3, rotate=True)
    assert same(AutoModelForCausalLM.from_pretrained(out).state_dict(), expected.model.state_dict())
    assert json.loads((out / "quantize_report.json").read_text())["rotated"] is True


def test_excluded_layers_stay_as_they_are(files, tmp_path):
    options = (*CALIBRATION, *FAST, "--exclude", "lm_head,*.mlp.*", "--method", "rtn", "--format", "dequantized")
    done = run(files / "llama", "-o", tmp_path / "out", "--calibration", files / "texts.jsonl", *options)
    assert done.stdout.splitlines()[0].split() == ["block", "rtn"]
    before, after = read_tensors(files / "llama"), read_tensors(tmp_path / "out")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(changed) == 12
    assert all(".self_attn." in name for name in changed)


def test_an_interrupted_run_goes_on_from_the_blocks_that_are_done(files, tmp_path, monkeypatch):
    options = (*CALIBRATION, *FAST, "--calibration", files / "texts.jsonl", "--work", tmp_path / "work", "--quiet")
    run(files / "llama", "-o", tmp_path / "out", *options)

    def interrupted(*arguments, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(heedful.compress.boa.model, "kron_quantize", interrupted)
    assert run(files / "llama", "-o", tmp_path / "again", *options).exit_code == 0
    assert same(read_tensors(tmp_path / "out"), read_tensors(tmp_path / "again"))
    assert run(files / "llama", "-o", tmp_path / "fresh", *options, "--fresh").exit_code == 130  # as after Ctrl-C
    assert not (tmp_path / "fresh").exists()


def test_what_is_there_stays_unless_it_may_be_replaced(files, tmp_path):
    shutil.copytree(files / "llama", tmp_path / "out")
    options = ("--calibration", files / "texts.jsonl", *CALIBRATION, *FAST, "--quiet")
    with pytest.raises(FileExistsError, match=r"out exists\. Choose another name, or say --overwrite"):
        run(files / "llama", "-o", tmp_path / "out", *options)
    assert run(files / "llama", "-o", tmp_path / "out", *options, "--overwrite").exit_code == 0
    assert "quantization_config" in json.loads((tmp_path / "out" / "config.json").read_text())


def test_wrong_requests_are_refused_before_any_work(files, tmp_path):
    def refuses(error, message, *options, model="llama", texts="texts.jsonl"):
        with pytest.raises(error, match=message):
            run(files / model, "-o", tmp_path / "out", "--calibration", files / texts, *CALIBRATION, *options)
        assert not (tmp_path / "out").exists()

    refuses(ParameterError, "bits must be an int >= 2 and <= 8; got 9", "--bits", 9)
    refuses(ParameterError, "format must be one of 'compressed-tensors', 'dequantized'; got 'gguf'", "--format", "gguf")
    refuses(ParameterError, "--device: there is no 'abacus' here", "--device", "abacus")
    refuses(ParameterError, "group_size must divide the number of inputs, 24; got 7", "--group-size", 7)
    refuses(FileNotFoundError, "nowhere does not exist", model="nowhere")
    refuses(FileFormatError, "holds no model: it has no config.json", model=".")
    refuses(FileNotFoundError, "nothing.txt", texts="nothing.txt")
    refuses(InputError, "8 samples of 999 need 7,992", "--length", 999)


def test_a_model_of_an_unknown_family_is_refused(files, tmp_path):
    shutil.copytree(files / "llama", tmp_path / "odd")
    config = json.loads((tmp_path / "odd" / "config.json").read_text())
    (tmp_path / "odd" / "config.json").write_text(json.dumps(config | {"model_type": "odd"}))
    with pytest.raises(FileFormatError, match="odd cannot be loaded"):
        run(tmp_path / "odd", "-o", tmp_path / "out", "--calibration", files / "texts.jsonl")
