"""Folders of packed codes: what compressed-tensors reads and writes, bit for bit, and what is refused."""

import json
import logging
import math
import re
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

from heedful.compress import QuantConfig, load_compressed, quantize  # noqa: E402
from heedful.compress.boa.packing import pack_codes, read_folder, unpack_codes, write_folder  # noqa: E402
from heedful.errors import FileFormatError, InputError  # noqa: E402
from tests.decoders import FAMILIES, decoder, tokens  # noqa: E402


def quantized(family="llama", *, seed=0, dtype=torch.float32, config=None, changes=None):
    model = decoder(family, seed=seed, dtype=dtype, **{"num_hidden_layers": 1} | (changes or {}))
    model.config.dtype = dtype
    n = -(-model.config.hidden_size // 5)  # as many tokens as the widest layer has inputs
    return quantize(model, tokens(n), config or QuantConfig(method="rtn", grid="minmax"))


def logits(model):
    with torch.no_grad():
        return model(input_ids=tokens(2, 8)).logits


@given(
    bits=st.integers(1, 8),
    rows=st.integers(1, 9),
    cols=st.integers(1, 70),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_codes_are_packed_and_unpacked_as_compressed_tensors_does(bits, rows, cols, seed):
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(2**bits, (rows, cols), generator=generator, dtype=torch.uint8)
    signed = (codes.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)  # theirs, around zero
    words = pack_codes(codes, bits)
    assert torch.equal(words, pack_to_int32(signed, bits))
    assert torch.equal(pack_codes(codes.T, bits).T, pack_to_int32(signed, bits, packed_dim=0))
    assert torch.equal(unpack_codes(words, bits, cols), codes)
    assert torch.equal(unpack_from_int32(words, bits, (rows, cols)), signed)


def test_rows_are_packed_one_by_one_however_many_there_are(monkeypatch):
    codes = torch.randint(8, (37, 11), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    whole = pack_codes(codes, 3)
    monkeypatch.setattr("heedful.compress.boa.packing._ROWS", 5)
    assert torch.equal(pack_codes(codes, 3), whole)
    assert torch.equal(unpack_codes(whole, 3, 11), codes)


def written_by_compressed_tensors(result, bits, symmetric, group_size, out):
    """The same codes and grids, put into a model and saved by compressed-tensors itself."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    strategy = {"strategy": "channel"} if group_size == -1 else {"strategy": "group", "group_size": group_size}
    weights = QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, **strategy)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    model = result.model
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    with torch.no_grad():
        for name, weight in result.layers.items():
            module = model.get_submodule(name)
            module.weight_scale.copy_(weight.grid.scale)
            if not symmetric:
                module.weight_zero_point.copy_(weight.grid.zero - 2 ** (bits - 1))
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format="pack-quantized")
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(out)


@pytest.mark.parametrize(
    ("bits", "symmetric", "group_size"),
    [(4, True, -1), (4, False, 16), (4, True, 16), (8, True, -1), (8, False, 16), (3, False, -1), (2, True, 16)],
)
def test_files_are_those_that_compressed_tensors_writes(tmp_path, bits, symmetric, group_size):
    config = QuantConfig(bits=bits, symmetric=symmetric, group_size=group_size, method="rtn", grid="minmax")
    result = quantized(config=config)
    write_folder(result.model, result.layers, tmp_path / "ours")
    written_by_compressed_tensors(result, bits, symmetric, group_size, tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert tensor.dtype == ours[name].dtype
        assert torch.equal(tensor, ours[name]), name
    ours, theirs = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "theirs"))
    # What makes transformers open asymmetric codes, theirs too, is the one addition.
    assert ours["quantization_config"].pop("dequantize", False) == (not symmetric)
    assert ours == theirs


@pytest.mark.parametrize(
    ("dtype", "bits", "symmetric", "group_size"),
    [
        (torch.float32, 4, False, -1),
        (torch.float32, 4, True, 16),
        (torch.float32, 3, False, 16),
        (torch.bfloat16, 4, False, 16),
        (torch.bfloat16, 8, True, -1),
        (torch.float16, 8, False, 16),
        (torch.bfloat16, 2, False, -1),
    ],
)
def test_transformers_and_we_load_the_very_weights(tmp_path, dtype, bits, symmetric, group_size):
    config = QuantConfig(bits=bits, symmetric=symmetric, group_size=group_size, method="rtn", grid="minmax")
    result = quantized(dtype=dtype, config=config)
    result.save_pretrained(tmp_path / "out")
    for load in (transformers.AutoModelForCausalLM.from_pretrained, load_compressed):
        model = load(tmp_path / "out").eval()
        assert type(model) is type(result.model)
        assert model.dtype == dtype
        # The one rotates in float32, the other was cast: give both the same table of frequencies.
        model.model.rotary_emb.inv_freq = result.model.model.rotary_emb.inv_freq
        assert torch.equal(logits(model), logits(result.model))
    for name, weight in result.layers.items():
        assert torch.equal(model.get_submodule(name).weight, weight.dequantize())
        assert model.get_submodule(name).quantized_bits == bits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("format", ["compressed-tensors", "dequantized"])
def test_every_family_comes_back(tmp_path, family, format):
    result = quantized(family, config=QuantConfig(bits=4, group_size=16, method="rtn", grid="minmax"))
    result.save_pretrained(tmp_path / "out", format=format)
    models = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()]
    if format == "compressed-tensors":
        models.append(load_compressed(tmp_path / "out"))
    for model in models:
        assert torch.equal(logits(model), logits(result.model))


def test_a_tied_head_stays_tied(tmp_path):
    result = quantized(changes={"tie_word_embeddings": True})
    result.save_pretrained(tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    for load in (transformers.AutoModelForCausalLM.from_pretrained, load_compressed):
        model = load(tmp_path / "out")
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.equal(logits(model.eval()), logits(result.model))


def test_what_was_left_out_stays_plain_and_is_named(tmp_path):
    config = QuantConfig(method="rtn", grid="minmax", exclude=("lm_head", "*.down_proj"))
    result = quantized(config=config, changes={"num_hidden_layers": 2})
    result.save_pretrained(tmp_path / "out")
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignored == ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj", "lm_head"]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(logits(model), logits(result.model))


@pytest.mark.parametrize(("bits", "group_size"), [(2, -1), (3, 32), (4, 32), (8, -1)])
def test_the_disk_holds_the_bits_that_were_promised(tmp_path, bits, group_size):
    changes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    result = quantized(
        config=QuantConfig(bits=bits, group_size=group_size, method="rtn", grid="minmax"), changes=changes
    )
    result.save_pretrained(tmp_path / "out")
    plain = sum(p.numel() for n, p in result.model.named_parameters() if n.removesuffix(".weight") not in result.layers)
    codes, grids = 0, 0
    for weight in result.layers.values():
        rows, cols = weight.codes.shape
        groups = 1 if group_size == -1 else cols // group_size
        codes += rows * cols * bits / 8
        grids += rows * groups * (4 + bits / 8) + 16  # scales in float32, zero points, the shape
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert abs(size - (codes + grids + 4 * plain)) < 6000  # the header, and bits up to a whole word


def test_tokenizer_and_generation_settings_go_along(tmp_path):
    from tokenizers import Tokenizer, models

    source = tmp_path / "source"
    model = decoder("llama")
    model.generation_config.temperature = 0.7
    model.generation_config.do_sample = True
    model.save_pretrained(source)
    core = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]").save_pretrained(source)
    (source / "training_args.bin").write_bytes(b"not for us")
    model = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
    quantize(model, tokens(), QuantConfig(method="rtn", grid="minmax")).save_pretrained(tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    again = load_compressed(tmp_path / "out")
    assert again.generation_config.temperature == 0.7
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").vocab == {"[UNK]": 0, "a": 1}


@pytest.mark.parametrize("name", ["", None])
def test_a_model_that_came_from_no_folder_takes_no_files_along(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    result = quantized()
    result.model.config._name_or_path = name
    result.save_pretrained("out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }


def test_codes_that_servers_may_not_run_are_noted_in_the_log(tmp_path, caplog):
    for bits, symmetric, note in (
        (4, False, None),
        (8, True, None),
        (3, True, "no kernel for symmetric codes of 3 bits"),
        (8, False, "no kernel for asymmetric codes of 8 bits"),
    ):
        caplog.clear()
        config = QuantConfig(bits=bits, symmetric=symmetric, method="rtn", grid="minmax")
        with caplog.at_level(logging.WARNING, logger="heedful"):
            quantized(config=config).save_pretrained(tmp_path / f"{bits}-{symmetric}")
        assert (note or "") in caplog.text
        assert ("kernel" in caplog.text) == (note is not None)


def test_a_folder_is_not_replaced_unless_asked(tmp_path):
    result = quantized()
    result.save_pretrained(tmp_path / "out")
    with pytest.raises(FileExistsError):
        result.save_pretrained(tmp_path / "out")
    result.save_pretrained(tmp_path / "out", format="dequantized", overwrite=True)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert not list(tmp_path.glob(".*"))


def test_a_model_that_was_changed_since_is_not_saved(tmp_path):
    result = quantized()
    name = "model.layers.0.mlp.up_proj"
    with torch.no_grad():
        result.model.get_submodule(name).weight[0, 0] += 1
    message = f"{name} does not hold the weight that its codes stand for: it was changed after it was quantized."
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        result.save_pretrained(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_layers_of_different_widths_are_not_packed_together(tmp_path):
    result, other = quantized(), quantized(config=QuantConfig(bits=3, method="rtn", grid="minmax"))
    name = "model.layers.0.mlp.up_proj"
    result.model.get_submodule(name).weight.data = other.layers[name].dequantize()
    layers = result.layers | {name: other.layers[name]}
    with pytest.raises(InputError, match="got 2 kinds of grids"):
        write_folder(result.model, layers, tmp_path / "out")
    write_folder(result.model, layers, tmp_path / "out", format="dequantized")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("packed") / "out"
    config = QuantConfig(bits=4, group_size=16, method="rtn", grid="minmax")
    quantized(config=config, changes={"num_hidden_layers": 2}).save_pretrained(path)
    return path


LAYER = "model.layers.0.self_attn.q_proj"


def with_tensors(folder, copy, **parts):
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    for part, change in parts.items():
        name = f"{LAYER}.weight_{part}"
        value = change(tensors.pop(name)) if name in tensors else change(None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, copy / "model.safetensors")
    return copy


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"packed": lambda x: x[:, :-1].contiguous()},
            f"the parts of {LAYER} do not fit a weight of shape (48, 32) in 4 bits",
        ),
        ({"packed": lambda x: x.to(torch.int64)}, f"the parts of {LAYER} do not fit"),
        ({"packed": lambda x: x.flatten()}, f"the parts of {LAYER} do not fit"),
        ({"scale": lambda x: x[:-1].clone()}, f"the parts of {LAYER} do not fit"),
        ({"scale": lambda x: None}, f"has codes for {LAYER}, but no weight_scale"),
        ({"scale": lambda x: x * math.nan}, f"{LAYER}.weight_scale must hold finite numbers > 0"),
        ({"scale": lambda x: -x}, f"{LAYER}.weight_scale must hold finite numbers > 0"),
        ({"scale": lambda x: x.to(torch.int32)}, f"{LAYER}.weight_scale must hold finite numbers > 0"),
        ({"zero_point": lambda x: None}, f"has codes for {LAYER}, but no weight_zero_point"),
        ({"zero_point": lambda x: x[:-1].clone()}, f"the parts of {LAYER} do not fit"),
        ({"shape": lambda x: x + 1}, f"the parts of {LAYER} do not fit"),
        ({"shape": lambda x: -x}, f"the parts of {LAYER} do not fit"),
        ({"shape": lambda x: x * 2**31}, f"the parts of {LAYER} do not fit"),
        ({"shape": lambda x: x.float()}, f"{LAYER}.weight_shape must be two int64"),
        ({"shape": lambda x: x[:1].clone()}, f"{LAYER}.weight_shape must be two int64"),
        ({"g_idx": lambda x: torch.arange(32)}, f"holds {LAYER}.weight_g_idx, which is not read here"),
    ],
)
def test_tensors_that_do_not_fit_each_other_are_refused(folder, tmp_path, parts, message):
    with pytest.raises(FileFormatError, match=re.escape(message)):
        load_compressed(with_tensors(folder, tmp_path / "bad", **parts))


def with_config(folder, copy, change):
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    change(config)
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def weights(config):
    return config["quantization_config"]["config_groups"]["group_0"]["weights"]


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.pop("quantization_config"),
        lambda c: c.update(quantization_config=[1]),
        lambda c: c["quantization_config"].update(quant_method="gptq"),
        lambda c: c["quantization_config"].update(format="int-quantized"),
        lambda c: c["quantization_config"].update(config_groups={}),
        lambda c: c["quantization_config"].update(config_groups={"a": {"weights": None}}),
        lambda c: c["quantization_config"]["config_groups"].update(other={}),
        lambda c: c["quantization_config"].update(kv_cache_scheme={"num_bits": 8}),
        lambda c: c["quantization_config"]["config_groups"]["group_0"].update(input_activations={"num_bits": 8}),
        lambda c: weights(c).update(num_bits=9),
        lambda c: weights(c).update(num_bits=0),
        lambda c: weights(c).update(num_bits="4"),
        lambda c: weights(c).update(type="float"),
        lambda c: weights(c).update(symmetric=None),
        lambda c: weights(c).update(dynamic=True),
        lambda c: weights(c).update(actorder="group"),
        lambda c: weights(c).update(strategy="block"),
        lambda c: weights(c).update(group_size=0),
    ],
)
def test_settings_that_are_not_read_are_refused(folder, tmp_path, change):
    with pytest.raises(
        FileFormatError, match=r"the quantization_config in config\.json must be that of packed integer"
    ):
        read_folder(with_config(folder, tmp_path / "bad", change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(architectures=["Evil"]), "which transformers does not have"),
        (lambda c: c.update(architectures=["AutoModel"]), "which transformers does not have"),
        (
            lambda c: c.update(architectures=None, auto_map={"AutoModel": "x.py--Evil"}),
            "which transformers does not have",
        ),
        (lambda c: c.update(model_type="opt"), "which transformers does not have"),
        (lambda c: c.update(hidden_size="wide"), "has a configuration that LlamaForCausalLM does not take"),
        (lambda c: c.update(vocab_size=10**12), "has shape (50, 32) for lm_head.weight, and a LlamaForCausalLM of its"),
        (lambda c: c.update(num_hidden_layers=1), "has shape (32,) for model.layers.1.input_layernorm.weight, and"),
        (lambda c: c.update(num_hidden_layers=3), "has no tensor for model.layers.2.input_layernorm.weight, and"),
        (lambda c: weights(c).update(group_size=32), "do not fit a weight of shape (48, 32)"),
        (lambda c: weights(c).update(num_bits=3), "do not fit a weight of shape (48, 32)"),
        (lambda c: weights(c).update(symmetric=True), ".weight_zero_point, which is not read here"),
    ],
)
def test_configurations_that_contradict_the_tensors_are_refused(folder, tmp_path, change, message):
    with pytest.raises(FileFormatError, match=re.escape(message)):
        load_compressed(with_config(folder, tmp_path / "bad", change))


def test_a_damaged_file_is_refused(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "bad")
    content = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(content[:-3])
    with pytest.raises(FileFormatError, match="not a readable checkpoint file"):
        load_compressed(copy)
    (copy / "model.safetensors").write_bytes(content)
    (copy / "generation_config.json").write_text("{")
    with pytest.raises(FileFormatError, match=r"generation_config\.json that cannot be used"):
        load_compressed(copy)
