"""Decoders taken apart: parts by name, what attention receives, blocks by themselves."""

import gc
import sys
import weakref

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from heedful._decoders import LAYOUTS, describe_decoder, record_attention, run_by_block
from heedful.errors import InputError, MissingExtraError, UnsupportedModelError
from tests.decoders import FAMILIES, decoder, tokens

TINY = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}


def recorded(model, ids):
    with torch.no_grad(), record_attention(model) as calls:
        model(ids, use_cache=False)
    return list(calls)


# ---- parts


@pytest.mark.parametrize("family", FAMILIES)
def test_projections_make_what_attention_receives(family):
    model = decoder(family, dtype=torch.float64)
    layer = describe_decoder(model).layers[1]
    inputs = {}
    for role in "qkv":
        getattr(layer, role).linear.register_forward_pre_hook(lambda _, args, role=role: inputs.update({role: args[0]}))
    call = recorded(model, tokens(2))[1]
    assert call.module is layer.attention
    made = {}
    for role in "qkv":
        part = getattr(layer, role)
        out = torch.nn.functional.linear(inputs[role], part.weight, part.bias)
        made[role] = out.unflatten(-1, (part.n_heads, -1)).transpose(1, 2)
    torch.testing.assert_close(
        made["v"], call.value, rtol=0, atol=1e-12
    )  # another order of sums, where rows are picked
    # Rotation keeps the length of a head's vector, scaling and norms do not.
    if family not in ("opt", "qwen3"):
        torch.testing.assert_close(
            made["q"].norm(dim=-1), call.query.norm(dim=-1), rtol=1e-6, atol=0
        )  # float32 cosines
        torch.testing.assert_close(made["k"].norm(dim=-1), call.key.norm(dim=-1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_layer_of_a_block_has_a_role(family):
    decoder_ = describe_decoder(decoder(family))
    for layer in decoder_.layers:
        parts = [layer.q, layer.k, layer.v, layer.o, layer.up, layer.down] + [layer.gate] * (layer.gate is not None)
        linears = {name: m for name, m in layer.module.named_modules() if isinstance(m, torch.nn.Linear)}
        assert {part.name for part in parts} == {f"{layer.name}.{name}" for name in linears}
        assert all(decoder_.model.get_submodule(part.name) is part.linear for part in parts)
        assert (layer.gate is None) == (family in ("opt", "gpt_neox"))
        assert (layer.q_norm is not None) == (layer.k_norm is not None) == (family == "qwen3")


def test_sizes_come_from_the_configuration_and_not_from_hidden_over_heads():
    llama = describe_decoder(decoder("llama"))
    assert (llama.n_heads, llama.n_kv_heads, llama.head_dim, llama.hidden) == (4, 2, 12, 32)
    assert llama.layers[0].q.weight.shape == (48, 32)
    assert llama.layers[0].k.n_heads == 2


def test_what_is_outside_of_blocks_is_found_with_and_without_a_head():
    for family in FAMILIES:
        model = decoder(family)
        whole, base = describe_decoder(model), describe_decoder(model.base_model)
        assert whole.head is model.lm_head
        assert base.head is None
        assert whole.final_norm is base.final_norm is not None
        assert whole.embedding is base.embedding is model.get_input_embeddings()
        assert (whole.positions is None) == (family != "opt")
        assert whole.rotary == (family != "opt")
        assert [layer.module for layer in whole.layers] == [layer.module for layer in base.layers]
    assert not describe_decoder(decoder("opt", do_layer_norm_before=False)).pre_norm
    assert describe_decoder(decoder("opt", do_layer_norm_before=False)).final_norm is None


def test_unknown_families_are_refused_with_the_way_to_describe_them():
    with pytest.raises(UnsupportedModelError) as refused:
        describe_decoder(BertModel(BertConfig(**TINY, intermediate_size=8)))
    for word in ("'bert'", *LAYOUTS, "layout=", "self_attn.q_proj"):
        assert word in str(refused.value)
    with pytest.raises(UnsupportedModelError, match="has an encoder"):
        describe_decoder(
            T5ForConditionalGeneration(T5Config(vocab_size=50, d_model=8, d_ff=8, num_layers=1, num_heads=2))
        )
    with pytest.raises(UnsupportedModelError, match="a PreTrainedModel"):
        describe_decoder(torch.nn.Linear(2, 2))


def test_a_wrapping_that_passes_for_a_model_is_refused():
    """A compiled model hands out the attributes of the one inside, but names modules otherwise."""

    class Wrapping(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self._orig_mod, self.config, self.base_model = model, model.config, model.base_model

    with pytest.raises(
        UnsupportedModelError, match=r"is needed; got a Wrapping\. Compile it, or add adapters, later\."
    ):
        describe_decoder(Wrapping(decoder("llama")))


def test_a_layout_describes_an_unknown_family():
    model = decoder("llama")
    model.config.model_type = "somebodys_llama"
    with pytest.raises(UnsupportedModelError, match="'somebodys_llama'"):
        describe_decoder(model)
    found = describe_decoder(model, layout=LAYOUTS["llama"])
    model.config.model_type = "llama"
    assert found == describe_decoder(model)


def test_layouts_that_do_not_fit_are_refused():
    model = decoder("llama")
    for changed, message in (
        ({"o": "self_attn.dense"}, "model.layers.0 has no module 'self_attn.dense' \\(o\\)"),
        ({"o": "self_attn"}, r"model.layers.0.self_attn \(o\) is a LlamaAttention, and a torch.nn.Linear is needed"),
        (
            {"q": "mlp.up_proj", "k": "mlp.up_proj"},
            "has 48 outputs, and heads and head_dim of the configuration need 24",
        ),
        ({"query": "q_proj"}, r"has \['query'\] besides"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            describe_decoder(model, layout=LAYOUTS["llama"] | changed)
    with pytest.raises(UnsupportedModelError, match=r"lacks \['k'\]"):
        describe_decoder(model, layout={role: name for role, name in LAYOUTS["llama"].items() if role != "k"})


def test_mixtures_of_experts_and_other_kinds_of_layers_are_refused():
    mixtral = MixtralForCausalLM(MixtralConfig(**TINY, intermediate_size=8, num_key_value_heads=2, num_local_experts=2))
    with pytest.raises(UnsupportedModelError, match="'mixtral'; supported are llama"):
        describe_decoder(mixtral)
    with pytest.raises(UnsupportedModelError, match=r"no module 'mlp\.gate_proj'"):
        describe_decoder(mixtral, layout=LAYOUTS["llama"])
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_head=4, n_layer=1, n_positions=16))
    layout = {"blocks": "h", "attention": "attn", "qkv": "attn.c_attn", "o": "attn.c_proj", "up": "mlp.c_fc"}
    layout |= {"down": "mlp.c_proj", "attention_norm": "ln_1", "mlp_norm": "ln_2"}
    with pytest.raises(UnsupportedModelError, match=r"c_attn \(qkv\) is a Conv1D, and a torch.nn.Linear is needed"):
        describe_decoder(gpt2, layout=layout)


# ---- attention


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_attention_is_that_of_the_model(family):
    model, ids = decoder(family, dtype=torch.float64), tokens(2)
    calls = recorded(model, ids)
    model.set_attn_implementation("eager")
    expected = model(ids, output_attentions=True).attentions
    assert len(calls) == len(expected) == 2
    for call, attention in zip(calls, expected, strict=True):
        for head in range(4):
            # The model's own softmax is in float32.
            torch.testing.assert_close(call.probs(head), attention[:, head].double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_attention_never_looks_ahead_and_sums_to_one(family):
    for call in recorded(decoder(family), tokens(2)):
        for head in range(4):
            probs = call.probs(head)
            assert not probs.triu(1).any()
            torch.testing.assert_close(probs.sum(-1), torch.ones(2, 12), rtol=0, atol=1e-6)


def test_a_sliding_window_is_recorded():
    (call, _) = recorded(decoder("mistral"), tokens(1))
    assert not call.probs(0).tril(-6).any()
    assert call.probs(0).tril(-5).any()


def test_asking_for_attentions_does_not_lift_the_mask():
    model = decoder("opt")
    with torch.no_grad(), record_attention(model) as calls:
        model(tokens(2), output_attentions=True)
    assert all(not call.probs(0).triu(1).any() for call in calls)


def test_attention_that_looks_ahead_is_refused():
    model = decoder("llama", is_causal=False)
    with pytest.raises(UnsupportedModelError, match="LlamaAttention has attention that looks ahead"):
        recorded(model, tokens(2))
    # A block that was given no mask, because its inputs were made before recording began.
    model = decoder("llama")
    block = next(run_by_block(model, [tokens(2)]))
    with record_attention(model), pytest.raises(UnsupportedModelError, match="whose mask is unknown"):
        list(block.run())


def test_recording_changes_no_output_and_ends_with_the_block():
    model, ids = decoder("qwen2"), tokens(2)
    with torch.no_grad():
        expected = model(ids).logits
        with record_attention(model, keep=1) as calls:
            torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)  # another kernel
            assert len(calls) == 1
        assert model.config._attn_implementation == "sdpa"
        with pytest.raises(ZeroDivisionError), record_attention(model):
            1 / 0  # noqa: B018
        assert model.config._attn_implementation == "sdpa"
        torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=0)


def test_recordings_nest():
    outer, inner = decoder("llama"), decoder("opt")
    with record_attention(outer) as calls:
        assert len(recorded(inner, tokens(1))) == 2
        outer(tokens(1))
    assert [type(call.module).__name__ for call in calls] == ["LlamaAttention"] * 2


# ---- blocks


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_by_themselves_make_what_the_model_makes(family):
    model = decoder(family)
    batches = [tokens(2, 12), tokens(3, 7, seed=1), tokens(2, 12, seed=2)]
    *_, last = run_by_block(model, batches)
    described = describe_decoder(model)
    with torch.no_grad():
        for (out, _), ids in zip(last.run(), batches, strict=True):
            torch.testing.assert_close(described.head(described.final_norm(out)), model(ids).logits, rtol=0, atol=0)


def test_each_block_gets_its_own_mask():
    options = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    model = decoder("qwen2", **options)
    assert model.config.layer_types == ["full_attention", "sliding_attention"]
    with record_attention(model) as calls:
        for block in run_by_block(model, [tokens(1)]):
            calls.clear()
            list(block.run())
            assert bool(calls[0].probs(0).tril(-4).any()) == (block.layer.name == "model.layers.0")
    described = describe_decoder(model)
    *_, last = run_by_block(model, [tokens(1)])
    (out, _) = next(last.run())
    with torch.no_grad():
        torch.testing.assert_close(described.head(described.final_norm(out)), model(tokens(1)).logits, rtol=0, atol=0)


def test_a_changed_block_changes_what_the_next_one_gets():
    model, ids = decoder("llama"), tokens(2)
    for block in run_by_block(model, [ids]):
        with torch.no_grad():
            block.layer.up.linear.weight.mul_(2)
        (out, _) = next(block.run())
    described = describe_decoder(model)
    with torch.no_grad():
        torch.testing.assert_close(described.head(described.final_norm(out)), model(ids).logits, rtol=0, atol=0)


def test_blocks_nobody_asks_for_are_not_run_and_forward_is_given_back():
    model = decoder("llama", num_hidden_layers=3)
    runs = []
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_hook(lambda *_, i=i: runs.append(i))
    blocks = run_by_block(model, [tokens(1), tokens(1)])
    next(blocks)
    assert runs == []
    next(blocks)
    blocks.close()
    assert runs == [0, 0]
    assert all("forward" not in vars(layer) for layer in model.model.layers)
    with pytest.raises(IndexError):
        next(run_by_block(model, [tokens(1) + 1000]))
    assert all("forward" not in vars(layer) for layer in model.model.layers)


def test_a_forward_that_was_set_before_comes_back():
    model = decoder("llama")
    layer = model.model.layers[0]
    original, ran = layer.forward, []

    def set_before(*args, **kwargs):
        ran.append(True)
        return (original(*args, **kwargs), "more than the states")

    layer.forward = set_before
    blocks = run_by_block(model, [tokens(1)])
    next(blocks)
    assert layer.forward is set_before
    assert isinstance(next(next(blocks).run())[0], torch.Tensor)
    assert ran == [True]


def test_without_transformers_recording_says_what_to_install(monkeypatch):
    model = decoder("llama")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r'^recording attention needs: pip install "heedful\[llm\]"\.$'):
        recorded(model, tokens(1))


def test_inputs_of_a_block_are_let_go_when_the_next_is_reached():
    model = decoder("llama", num_hidden_layers=3)
    seen = []
    model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(weakref.ref(args[0])))
    blocks = run_by_block(model, [tokens(2, seed=i) for i in range(3)])
    first = next(blocks)
    assert len(list(first.run())) == 3
    next(blocks)
    gc.collect()
    assert len(seen) == 9  # also when they were made
    assert not any(ref() is not None for ref in seen)


def test_a_model_in_training_mode_is_refused():
    model = decoder("opt").train()
    with pytest.raises(InputError, match=r"OPTForCausalLM is in training mode.*model.eval\(\)"):
        next(run_by_block(model, [tokens(1)]))
