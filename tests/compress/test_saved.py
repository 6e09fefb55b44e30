"""One door in and out: what was compressed comes back as it was, and files that claim otherwise are refused."""

import json
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from heedful.compress import (
    DiagonalLinear,
    QuantConfig,
    convert_to_diagonal,
    diagonal_to_dense,
    load_compressed,
    quantize,
    save_compressed,
)
from heedful.errors import FileFormatError, InputError

transformers = pytest.importorskip("transformers")

from tests.decoders import decoder, tokens  # noqa: E402


def network(*, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 3)).to(dtype)


def diagonal_network(**kwargs):
    generator = torch.Generator().manual_seed(0)
    return convert_to_diagonal(network(**kwargs), sparsity=0.75, exclude=("last",), generator=generator)


X = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_diagonals_come_back_as_diagonals(tmp_path, dtype):
    model, path = diagonal_network(dtype=dtype).eval(), tmp_path / "model.safetensors"
    save_compressed(model, path)
    again = load_compressed(path, model=network(seed=1, dtype=dtype))
    assert isinstance(again[0], DiagonalLinear)
    assert isinstance(again[4], nn.Linear)
    with torch.no_grad():
        x = X.to(dtype)
        torch.testing.assert_close(again(x), model(x))
        torch.testing.assert_close(diagonal_to_dense(again)(x), model(x))


def test_a_file_of_diagonals_has_the_size_of_the_diagonals(tmp_path):
    model = convert_to_diagonal(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)), sparsity=0.9, exclude=())
    save_compressed(model, tmp_path / "m.safetensors")
    kept = 26 * 256  # ⌈0.1 · 256⌉ diagonals
    assert (tmp_path / "m.safetensors").stat().st_size < 4 * 2 * (kept + 256) + 2000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transformer_of_diagonals_is_built_from_its_file(tmp_path, dtype):
    model = decoder("llama", dtype=dtype, tie_word_embeddings=True)
    convert_to_diagonal(model, sparsity=0.5, include=["*_proj"], exclude=())
    save_compressed(model, tmp_path / "m.safetensors")
    assert "lm_head.weight" not in load_file(tmp_path / "m.safetensors")
    again = load_compressed(tmp_path / "m.safetensors")
    assert type(again) is type(model)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert again.dtype == dtype
    again.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq  # cast with the model here, in float32 there
    with torch.no_grad():
        torch.testing.assert_close(again(tokens()).logits, model(tokens()).logits)


def test_codes_come_back_as_weights_into_a_new_model_or_a_given_one(tmp_path):
    config = QuantConfig(bits=3, group_size=16, method="rtn", grid="minmax")
    result = quantize(decoder("qwen2", num_hidden_layers=1), tokens(), config)
    save_compressed(result, tmp_path / "out")
    given = decoder("qwen2", seed=5, num_hidden_layers=1)
    assert load_compressed(tmp_path / "out", model=given) is given
    for model in (given, load_compressed(tmp_path / "out")):
        with torch.no_grad():
            assert torch.equal(model(tokens()).logits, result.model(tokens()).logits)
        with pytest.raises(InputError, match="quantized"):
            quantize(model, tokens(), config)
    other = decoder("qwen2", num_hidden_layers=2)
    with pytest.raises(
        FileFormatError, match=r"has no tensor for model\.layers\.1\.input_layernorm\.weight, and a Qwen2"
    ):
        load_compressed(tmp_path / "out", model=other)


def test_loading_needs_neither_compressed_tensors_nor_a_config_for_a_given_model(tmp_path, monkeypatch):
    result = quantize(decoder("llama", num_hidden_layers=1), tokens(), QuantConfig(method="rtn", grid="minmax"))
    save_compressed(result, tmp_path / "out")
    monkeypatch.setitem(__import__("sys").modules, "compressed_tensors", None)
    load_compressed(tmp_path / "out")


def test_nothing_is_replaced_unless_asked(tmp_path):
    path = tmp_path / "m.safetensors"
    save_compressed(diagonal_network(), path)
    with pytest.raises(FileExistsError):
        save_compressed(diagonal_network(), path)
    save_compressed(diagonal_network(), path, overwrite=True)


def test_what_is_not_compressed_is_not_saved(tmp_path):
    message = (
        "a Sequential without quantized or diagonal layers has nothing to save in compressed form. Give what quantize "
        "returned, or a model with DiagonalLinear layers; save others as ever."
    )
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        save_compressed(network(), tmp_path / "m.safetensors")
    with pytest.raises(InputError, match=r"diagonals are saved to a path ending in \.safetensors; got "):
        save_compressed(diagonal_network(), tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_a_model_is_asked_for_where_the_file_cannot_build_one(tmp_path):
    save_compressed(diagonal_network(), tmp_path / "m.safetensors")
    with pytest.raises(InputError, match=r"does not say how to build its model\. Give one by model="):
        load_compressed(tmp_path / "m.safetensors")
    with pytest.raises(FileNotFoundError, match=r"none\.safetensors does not exist"):
        load_compressed(tmp_path / "none.safetensors")


def rewrite(path, *, meta=None, tensors=None):
    with safe_open(path, framework="pt") as file:
        old = json.loads(file.metadata()["heedful"])
    text = meta(old) if meta else old
    text = text if isinstance(text, str) else json.dumps(text)
    save_file(tensors(load_file(path)) if tensors else load_file(path), path, metadata={"heedful": text})


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        (lambda m: "{", "has metadata that cannot be read"),
        (lambda m: "[" * 100_000, "has metadata that cannot be read"),
        (lambda m: [m], "holds no diagonals that this heedful reads"),
        (lambda m: m | {"class": "CapClassifier"}, "holds no diagonals that this heedful reads"),
        (lambda m: m | {"format": 2}, "holds no diagonals that this heedful reads"),
        (lambda m: m | {"tied": {"a": "b"}}, "says of names that share a tensor what it does not hold"),
        (lambda m: m | {"tied": {"a": 3}}, "says of names that share a tensor what it does not hold"),
        (lambda m: m | {"tied": None}, "says of names that share a tensor what it does not hold"),
        (lambda m: m | {"layers": {}}, "does not say which layers are diagonal"),
        (lambda m: m | {"layers": {"9": {}}}, "has a diagonal layer '9'"),
        (lambda m: m | {"tied": {"9.weight": "4.weight"}}, r"9\.weight"),
    ],
)
def test_metadata_that_lie_are_refused(tmp_path, meta, message):
    path = tmp_path / "m.safetensors"
    save_compressed(diagonal_network(), path)
    rewrite(path, meta=meta)
    with pytest.raises(FileFormatError, match=message):
        load_compressed(path, model=network())


@pytest.mark.parametrize(
    "tensors",
    [
        lambda t: {name: x for name, x in t.items() if not name.endswith("values")},
        lambda t: t | {"0.frozen_offsets": t["0.frozen_offsets"] + 100},
        lambda t: t | {"0.frozen_offsets": t["0.frozen_offsets"].float()},
        lambda t: t | {"0.values": t["0.values"][:-1].clone()},
        lambda t: t | {"4.weight": t["4.weight"][:2].clone()},
        lambda t: t | {"more": torch.zeros(1)},
    ],
)
def test_tensors_that_do_not_fit_are_refused_and_the_model_stays_as_it_was(tmp_path, tensors):
    path = tmp_path / "m.safetensors"
    save_compressed(diagonal_network(), path)
    rewrite(path, tensors=tensors)
    model = network(seed=3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(FileFormatError):
        load_compressed(path, model=model)
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_files_of_other_kinds_are_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(FileFormatError, match="holds no diagonals that this heedful reads"):
        load_compressed(path, model=network())
    path.write_bytes(b"PK\3\4 a pickle in a zip")
    with pytest.raises(FileFormatError, match="not a readable checkpoint file"):
        load_compressed(path, model=network())
    pickled = tmp_path / "m.bin"
    torch.save({"weight": torch.zeros(2)}, pickled)
    with pytest.raises(FileFormatError):
        load_compressed(pickled, model=network())
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileFormatError, match="holds no checkpoint"):
        load_compressed(tmp_path / "empty")


def test_a_configuration_in_a_file_builds_models_of_transformers_only(tmp_path):
    model = decoder("llama", num_hidden_layers=1)
    convert_to_diagonal(model, sparsity=0.5, include=["*_proj"], exclude=())
    path = tmp_path / "m.safetensors"
    save_compressed(model, path)
    for change in ({"architectures": ["Evil"]}, {"architectures": "LlamaForCausalLM"}, {"model_type": ["llama"]}):
        rewrite(path, meta=lambda m, change=change: m | {"config": m["config"] | change})
        with pytest.raises(FileFormatError, match="which transformers does not have"):
            load_compressed(path)
        save_compressed(model, path, overwrite=True)
    rewrite(path, meta=lambda m: m | {"config": m["config"] | {"vocab_size": 10**12}})
    with pytest.raises(FileFormatError, match=r"lm_head\.weight: this model has shape \(1000000000000, 32\), the file"):
        load_compressed(path)
