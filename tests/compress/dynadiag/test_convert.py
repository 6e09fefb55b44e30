"""Whole models: transformers become diagonal and dense again, and projections are the closest there are."""

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.pytorch_utils import Conv1D

from heedful.compress import (
    DiagonalLinear,
    add_lora_fa,
    convert_to_diagonal,
    diagonal_indices,
    diagonal_to_dense,
    prune_diagonal,
)
from heedful.compress.dynadiag.convert import (
    _diagonal_state,
    _has_diagonals,
    _load_diagonals,
    project_to_diagonals,
)
from heedful.errors import FileFormatError, InputError, ParameterError, UnsupportedModelError

TOKENS = torch.tensor([[1, 5, 9, 3], [2, 7, 7, 0]])
SIZES = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=8, n_embd=16, n_layer=2, n_head=2))


def llama():
    return LlamaForCausalLM(LlamaConfig(vocab_size=40, num_key_value_heads=1, **SIZES))


def vit():
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=3, **SIZES))


def small(make):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().eval()


def output(model):
    if isinstance(model, ViTForImageClassification):
        return model(torch.linspace(-1, 1, 128).view(2, 1, 8, 8)).logits
    return model(TOKENS).logits


def n_diagonals_used(weight):
    """In how many wrapped diagonals a matrix has an entry that is not zero."""
    rows, cols = diagonal_indices(*weight.shape, range(max(weight.shape)))
    return int((weight[rows, cols] != 0).any(dim=1).sum())


# --- projection


@pytest.mark.parametrize("shape", [(4, 6), (8, 3), (5, 5), (7, 7), (1, 6), (6, 1)])
def test_the_projection_is_the_closest_matrix_with_k_diagonals(shape, seed):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows, cols = diagonal_indices(*shape, range(max(shape)))
    for k in range(1, max(shape) + 1):
        projected = project_to_diagonals(weight, sparsity=1 - k / max(shape))
        assert n_diagonals_used(projected) == k
        errors = []
        for chosen in itertools.combinations(range(max(shape)), k):
            candidate = torch.zeros_like(weight)
            entries = rows[list(chosen)], cols[list(chosen)]
            candidate[entries] = weight[entries]
            errors.append(float((weight - candidate).norm()))
        assert float((weight - projected).norm()) == pytest.approx(min(errors), rel=1e-12)


@given(st.integers(1, 7), st.integers(1, 7), st.floats(0, 0.99), st.integers(0, 1000))
def test_a_transposed_weight_has_the_transposed_projection(out, inputs, sparsity, seed):
    weight = torch.randn(out, inputs, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(
        project_to_diagonals(weight.T, sparsity=sparsity), project_to_diagonals(weight, sparsity=sparsity).T
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_energies_are_summed_in_float32(dtype):
    weight = torch.full((2, 70000), 1.0, dtype=dtype)  # 65504 is the largest float16, and bfloat16 cannot count to 512
    weight[0, 1] = weight[1, 2] = 1.5
    kept = project_to_diagonals(weight, sparsity=1 - 1 / 70000)
    assert kept.dtype == dtype
    assert kept.nonzero().tolist() == [[0, 1], [1, 2]]
    tall = torch.full((700, 700), 20.0, dtype=dtype)  # energies of 280,000
    tall[torch.arange(700) - 5, torch.arange(700)] = 20.125
    assert int((project_to_diagonals(tall, sparsity=1 - 1 / 700) == 20.125).sum()) == 700


def test_weights_that_are_not_finite_are_refused():
    with pytest.raises(InputError, match=r"^a weight of shape \(2, 3\) has 2 entries that are NaN or infinite"):
        project_to_diagonals(torch.tensor([[1.0, math.nan, 2.0], [0.0, math.inf, 1.0]]), sparsity=0.5)
    with pytest.raises(ParameterError, match="sparsity must be below 1"):
        project_to_diagonals(torch.zeros(2, 2), sparsity=1.0)


# --- models of transformers


def test_conv1d_is_linear_transposed():
    conv = Conv1D(10, 6)
    layer = DiagonalLinear.from_linear(conv, sparsity=0.0, mask_values="ste", backend="dense")
    x = torch.randn(3, 6)
    torch.testing.assert_close(layer(x), conv(x))
    assert type(layer.to_linear()) is Conv1D


@pytest.mark.parametrize(
    ("make", "excluded", "n_layers", "kind"),
    [
        (gpt2, {"lm_head"}, 8, Conv1D),
        (llama, {"lm_head"}, 14, nn.Linear),
        (vit, {"classifier"}, 12, nn.Linear),
    ],
)
def test_a_transformer_becomes_diagonal_and_dense_again(make, excluded, n_layers, kind, tmp_path):
    model = small(make)
    dense = copy.deepcopy(model)
    names = {name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))} - excluded
    assert convert_to_diagonal(model, sparsity=0.75, backend="dense") is model
    layers = {name: module for name, module in model.named_modules() if isinstance(module, DiagonalLinear)}
    assert set(layers) == names
    assert len(layers) == n_layers
    converted = output(model)
    prune_diagonal(dense, sparsity=0.75)
    torch.testing.assert_close(converted, output(dense))  # both keep the strongest diagonals
    output(model).square().mean().backward()
    assert all(p.grad is not None for p in layers[min(layers)].parameters())

    diagonal_to_dense(model)
    assert {type(model.get_submodule(name)) for name in names} == {kind}
    torch.testing.assert_close(output(model), converted)
    assert model.state_dict().keys() == dense.state_dict().keys()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(output(loaded), converted)


def test_pruning_zeroes_all_but_k_diagonals_of_the_chosen_layers():
    model = small(gpt2)
    before = copy.deepcopy(model.state_dict())
    assert prune_diagonal(model, sparsity=0.8, include=["*.mlp.*"]) is model
    for name, weight in model.state_dict().items():
        if ".mlp." in name and name.endswith("weight"):
            assert n_diagonals_used(weight) == math.ceil(round(0.2 * max(weight.shape), 6))
            kept = weight != 0
            assert torch.equal(weight[kept], before[name][kept])
        else:
            assert torch.equal(weight, before[name])


def test_pruned_layers_keep_their_diagonals_when_they_are_converted():
    model = prune_diagonal(small(llama), sparsity=0.75)
    pruned = output(model)
    torch.testing.assert_close(output(convert_to_diagonal(model, sparsity=0.75, backend="dense")), pruned)


def test_what_is_left_alone_is_logged(caplog):
    with caplog.at_level("INFO", logger="heedful"):
        convert_to_diagonal(small(vit), sparsity=0.5, exclude=("last",))
    assert caplog.messages[-1].startswith("12 layers became diagonal; left alone: vit.embeddings.")


def test_converting_twice_is_refused():
    model = convert_to_diagonal(small(llama), sparsity=0.5, include=["*.q_proj"])
    with pytest.raises(
        UnsupportedModelError, match=r"^The model has diagonal layers already: 'model\.layers\.0\.self_attn\.q_proj'"
    ):
        convert_to_diagonal(model, sparsity=0.5)


def test_tied_weights_are_refused_with_the_names_of_both():
    model = small(llama)
    first, second = (layer.mlp for layer in model.model.layers)
    second.up_proj.weight = first.up_proj.weight
    with pytest.raises(
        UnsupportedModelError,
        match=r"^Modules 'model\.layers\.0\.mlp\.up_proj', 'model\.layers\.1\.mlp\.up_proj' share one weight\.",
    ):
        convert_to_diagonal(model, sparsity=0.5)


def test_a_model_without_a_layer_that_can_become_diagonal_is_refused():
    attention = nn.Sequential(nn.MultiheadAttention(8, 2))
    with pytest.raises(UnsupportedModelError, match=r"^None of '0\.out_proj' can become diagonal"):
        convert_to_diagonal(attention, sparsity=0.5, exclude=())
    with pytest.raises(UnsupportedModelError, match=r"^The model is itself a linear layer"):
        convert_to_diagonal(nn.Linear(4, 4), sparsity=0.5, exclude=())


# --- states for files


def diagonal_model():
    model = small(gpt2)
    convert_to_diagonal(model, sparsity=0.75, backend="dense")
    model.transformer.h[0].mlp.c_fc.freeze()
    model.transformer.h[1].mlp.c_fc.freeze(compact=False)
    model.transformer.h[0].mlp.c_proj.freeze()
    with torch.no_grad():
        add_lora_fa(model.transformer.h[0].mlp.c_proj, 2).lora_b.normal_()
    return model


@pytest.mark.parametrize("target", [gpt2, diagonal_model])
def test_a_model_comes_back_from_its_state_with_frozen_layers(target):
    model = diagonal_model()
    before = copy.deepcopy(model.state_dict())
    tensors, meta = _diagonal_state(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert tensors["transformer.h.0.attn.c_attn.values"].shape == (12, 16)
    assert not any(name.endswith("scores") for name in tensors)
    other = small(target)
    assert _has_diagonals(other) == (target is diagonal_model)
    loaded = _load_diagonals(other, tensors, meta)
    assert loaded is other
    assert all(m.frozen for m in loaded.modules() if isinstance(m, DiagonalLinear))
    torch.testing.assert_close(output(loaded), output(model))
    again, _ = _diagonal_state(loaded)
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    assert type(diagonal_to_dense(loaded).transformer.h[0].mlp.c_fc) is Conv1D


NAME = "transformer.h.0.mlp.c_fc"


def without(key):
    return lambda tensors, meta: tensors.pop(key)


def put(key, tensor):
    return lambda tensors, meta: tensors.update({key: tensor})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tensors, meta: meta.clear(), r"^The file does not say which layers are diagonal"),
        (lambda tensors, meta: meta.update(layers={NAME: 3}), r"^The file does not say which layers are diagonal"),
        (lambda tensors, meta: meta["layers"].update(nowhere={}), r"^The file has a diagonal layer 'nowhere'"),
        (
            lambda tensors, meta: meta["layers"].update({"lm_head.x": {}}),
            r"^The file has a diagonal layer 'lm_head\.x'",
        ),
        (
            lambda tensors, meta: meta["layers"][NAME].update(in_features=9),
            rf"^Layer '{NAME}' is 64 × 16 in this model",
        ),
        (without(f"{NAME}.values"), rf"^Layer '{NAME}' lacks its values"),
        (put(f"{NAME}.values", torch.zeros(16, 16).long()), rf"^Layer '{NAME}' lacks its values"),
        (put(f"{NAME}.bias", torch.zeros(64).long()), rf"^Layer '{NAME}' lacks its values"),
        (without(f"{NAME}.bias"), rf"^Layer '{NAME}' has a bias either in this model or in the file"),
        (without(f"{NAME}.frozen_offsets"), rf"^Layer '{NAME}' lacks its offsets"),
        (without(f"{NAME}.temperature"), rf"^Layer '{NAME}' cannot be rebuilt: .*temperature"),
        (put(f"{NAME}.values", torch.zeros(16, 5)), rf"^Layer '{NAME}' cannot be rebuilt: values have shape \(16, 5\)"),
        (put(f"{NAME}.frozen_offsets", torch.arange(16.0)), rf"^Layer '{NAME}' lacks its offsets"),
        (put(f"{NAME}.frozen_offsets", torch.arange(16) + 50), rf"^Layer '{NAME}' cannot be rebuilt: offsets run from"),
        (
            put(f"{NAME}.frozen_offsets", torch.zeros(16).long()),
            rf"^Layer '{NAME}' cannot be rebuilt: offset 0 is given",
        ),
        (put(f"{NAME}.frozen_offsets", torch.arange(0)), rf"^Layer '{NAME}' lacks its offsets"),
        (put(f"{NAME}.bias", torch.zeros(3)), rf"^Layer '{NAME}' cannot be rebuilt: .*bias"),
        (put(f"{NAME}.more", torch.zeros(3)), rf"^Layer '{NAME}' cannot be rebuilt: .*more"),
        (
            without("transformer.ln_f.weight"),
            r"^transformer\.ln_f\.weight: this model has shape \(16,\), the file none",
        ),
        (
            put("more", torch.zeros(3)),
            r"^more: this model has none, the file shape \(3,\)\. Give the model that was saved",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_the_model_stays(damage, message):
    tensors, meta = _diagonal_state(diagonal_model())
    damage(tensors, meta)
    model = small(gpt2)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(FileFormatError, match=message):
        _load_diagonals(model, tensors, meta)
    assert not _has_diagonals(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
