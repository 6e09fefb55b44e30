"""Transforms keep what a model computes, and do to its channels what they promise."""

import copy
import inspect
import re

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from heedful._decoders import describe_decoder, record_attention  # noqa: E402
from heedful.compress import QuantConfig, fake_quantize_activations, quantize, rotate_model, smooth_model  # noqa: E402
from heedful.compress.boa.transforms import _keep_mean, _random_rotation, round_tokens  # noqa: E402
from heedful.errors import InputError, ParameterError, UnsupportedModelError  # noqa: E402

TOKENS = torch.randint(64, (3, 12), generator=torch.Generator().manual_seed(0))

SIZES = {"vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "use_cache": False}
MLP = {"intermediate_size": 96, "max_position_embeddings": 64}
FAMILIES = {
    "llama": ("Llama", SIZES | MLP | {"num_key_value_heads": 2}),
    "llama_tied": ("Llama", SIZES | MLP | {"num_key_value_heads": 1, "tie_word_embeddings": True, "head_dim": 8}),
    "llama_biased": ("Llama", SIZES | MLP | {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", SIZES | MLP | {"num_key_value_heads": 2, "head_dim": 12}),
    "qwen2": ("Qwen2", SIZES | MLP | {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3", SIZES | MLP | {"num_key_value_heads": 2, "head_dim": 16}),
    "opt": ("OPT", SIZES | {"ffn_dim": 96, "word_embed_proj_dim": 48, "max_position_embeddings": 64}),
    "opt_no_final_norm": (
        "OPT",
        SIZES
        | {"ffn_dim": 96, "word_embed_proj_dim": 48, "max_position_embeddings": 64, "_remove_final_layer_norm": True},
    ),
    "opt_gelu": (
        "OPT",
        SIZES
        | {"ffn_dim": 96, "word_embed_proj_dim": 48, "max_position_embeddings": 64, "activation_function": "gelu"},
    ),
    "gpt_neox": ("GPTNeoX", SIZES | MLP),
    "gpt_neox_sequential": ("GPTNeoX", SIZES | MLP | {"use_parallel_residual": False, "attention_bias": False}),
}


def build(family, *, seed=0, **changes):
    """A small random model whose norms, biases and channels are as uneven as those of trained ones."""
    name, sizes = FAMILIES[family]
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**sizes | changes)
    ).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.25)
            elif key.endswith("bias"):
                parameter.normal_(std=0.3)
            else:
                parameter.uniform_(0.3, 1.5)
        model.get_input_embeddings().weight[:, 5] *= 5  # an outlier channel
    return model


def logits(model, tokens=TOKENS, **kwargs):
    with torch.no_grad():
        return model(input_ids=tokens, **kwargs).logits


def assert_same(after, before):
    """Up to 1e-4 in float32, for logits of up to 10, which most of these models have; rounding grows with them."""
    torch.testing.assert_close(after, before, rtol=0, atol=1e-4 * max(1.0, float(before.abs().max()) / 10))


@pytest.mark.parametrize("family", FAMILIES)
def test_rotation_keeps_logits_and_changes_every_weight(family, seed):
    model = build(family, seed=seed)
    before, weights = logits(model), {n: p.detach().clone() for n, p in model.named_parameters() if p.ndim == 2}
    assert rotate_model(model, random_state=seed) is model
    assert_same(logits(model), before)
    assert all((weights[name] - dict(model.named_parameters())[name]).abs().max() > 0.01 for name in weights)


@pytest.mark.parametrize("mix", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_smoothing_keeps_logits(family, mix, seed):
    model = build(family, seed=seed)
    before, weights = logits(model), copy.deepcopy(model.state_dict())
    assert smooth_model(model, TOKENS, mix=mix) is model
    assert_same(logits(model), before)
    assert any(not torch.equal(weights[name], weight) for name, weight in model.state_dict().items())


def test_both_together_keep_logits():
    model = build("llama_tied")
    before = logits(model)
    rotate_model(smooth_model(model, TOKENS))
    assert_same(logits(model), before)


def test_a_rotated_tied_model_is_loaded_again_with_a_head_of_its_own(tmp_path):
    model = build("llama_tied")
    before = logits(model)
    rotate_model(model)
    assert model.config.tie_word_embeddings is False
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert_same(logits(again), before)


def test_rotation_folds_gains_and_spreads_an_outlier_channel():
    model = build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 5] *= 5
    peak = {}
    for moment in ("before", "after"):
        with torch.no_grad():
            x = model.model.layers[0].input_layernorm(model.model.embed_tokens(TOKENS)).flatten(0, 1)
        peak[moment] = float(x.abs().max() / x.square().mean().sqrt())
        if moment == "before":
            rotate_model(model)
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    assert all((gains == 1).all() for gains in norms)
    assert peak["before"] > 5  # nearly all of the row's size is in one of 48 channels
    assert peak["after"] < peak["before"] / 2


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_values_of_every_head_are_rotated_and_queries_and_keys_are_not(family):
    model = build(family)
    with record_attention(model) as before:
        logits(model)
    rotate_model(model)
    with record_attention(model) as after:
        logits(model)
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new.query, old.query, rtol=0, atol=1e-4)
        torch.testing.assert_close(new.key, old.key, rtol=0, atol=1e-4)
        torch.testing.assert_close(new.value.norm(dim=-1), old.value.norm(dim=-1), rtol=1e-4, atol=1e-4)
        turns = [torch.linalg.lstsq(old.value[0, head], new.value[0, head]).solution for head in (0, 1)]
        assert all((turn - torch.eye(12)).abs().max() > 0.1 for turn in turns)
        assert (turns[0] - turns[1]).abs().max() > 0.1  # each head by its own


def test_the_same_random_state_rotates_alike_and_another_differently():
    one, two, other = (rotate_model(build("opt"), random_state=state) for state in (3, 3, 4))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


@pytest.mark.parametrize("n", [1, 2, 3, 16, 48, 63, 64, 576])
def test_rotations_are_orthogonal_and_spread_unit_vectors(n, seed):
    q = _random_rotation(n, torch.Generator().manual_seed(seed))
    torch.testing.assert_close(q @ q.T, torch.eye(n, dtype=torch.float64), rtol=0, atol=1e-12)
    power = n & -n
    assert q.abs().max() <= power**-0.5 + 1e-12  # the Hadamard factor; entries of the other are at most 1
    if power == n:
        torch.testing.assert_close(q.abs(), torch.full_like(q, n**-0.5))


def test_a_rotation_that_keeps_the_mean_is_orthogonal_and_commutes_with_layer_norm(seed):
    generator = torch.Generator().manual_seed(seed)
    q = _keep_mean(_random_rotation(24, generator))
    ones = torch.ones(24, dtype=torch.float64)
    torch.testing.assert_close(q @ ones, ones)
    torch.testing.assert_close(q @ q.T, torch.eye(24, dtype=torch.float64), rtol=0, atol=1e-12)
    x = torch.randn(5, 24, generator=generator, dtype=torch.float64)
    norm = torch.nn.functional.layer_norm
    torch.testing.assert_close(norm(x @ q.T, (24,)), norm(x, (24,)) @ q.T)
    same = torch.eye(24, dtype=torch.float64)
    assert torch.equal(_keep_mean(same), same)


def test_half_precision_rotates_within_the_rounding_of_its_weights():
    model = build("llama").to(torch.bfloat16)
    before = logits(model).float()
    rotate_model(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    # Relative rounding of bfloat16 is 2^-9 each time, over some ten layers; 3 % of the size of the logits.
    assert (logits(model).float() - before).norm() < 0.03 * before.norm()


def largest_inputs(model, linears, tokens=TOKENS):
    found = {}

    def keep(module, args):
        found[module] = args[0].detach().abs().flatten(0, -2).amax(0)

    hooks = [linear.register_forward_pre_hook(keep) for linear in linears]
    logits(model, tokens)
    for hook in hooks:
        hook.remove()
    return [found[linear] for linear in linears]


@pytest.mark.parametrize("mix", [0.3, 0.5])
def test_smoothing_moves_the_share_of_the_formula(mix, seed):
    """From x and w to x/s and w s with s = x^mix / w^(1-mix): then (x/s)^mix = (w s)^(1-mix), channel by channel."""
    model = build("llama", seed=seed)
    smooth_model(model, TOKENS, mix=mix)
    for layer in describe_decoder(model).layers:
        o, down = layer.o.linear, layer.down.linear
        x, _ = sizes = largest_inputs(model, [o, down])
        w = o.weight.abs().amax(0)
        # Two query heads share a value head of 12 channels, and so its scales.
        x, w = (part.view(2, 2, 12).amax(1).flatten() for part in (x, w))
        torch.testing.assert_close(x**mix, w ** (1 - mix), rtol=1e-4, atol=0)
        torch.testing.assert_close(sizes[1] ** mix, down.weight.abs().amax(0) ** (1 - mix), rtol=1e-4, atol=0)


def test_smoothing_of_a_norm_heeds_all_that_read_it(seed):
    model, mix = build("opt_gelu", seed=seed), 0.5
    before = copy.deepcopy(model)
    smooth_model(model, TOKENS, mix=mix)
    old, new = (m.model.decoder.layers[1] for m in (before, model))
    read = [old.self_attn.q_proj, old.self_attn.k_proj, old.self_attn.v_proj]
    (x,) = largest_inputs(before, read[:1])
    scales = x**mix / torch.cat([linear.weight for linear in read]).abs().amax(0) ** (1 - mix)
    torch.testing.assert_close(new.self_attn.q_proj.weight, old.self_attn.q_proj.weight * scales)
    torch.testing.assert_close(new.self_attn_layer_norm.weight, old.self_attn_layer_norm.weight / scales)
    torch.testing.assert_close(new.self_attn_layer_norm.bias, old.self_attn_layer_norm.bias / scales)


def test_smoothing_leaves_the_middle_of_an_mlp_alone_where_it_would_not_be_exact():
    model = build("gpt_neox")
    before = model.gpt_neox.layers[0].mlp.dense_4h_to_h.weight.clone()
    smooth_model(model, TOKENS)
    assert torch.equal(model.gpt_neox.layers[0].mlp.dense_4h_to_h.weight, before)


def test_channels_that_are_never_used_are_not_scaled():
    model = build("llama")
    mlp = model.model.layers[0].mlp
    with torch.no_grad():
        mlp.up_proj.weight[7] = 0  # its input to down is always zero
        mlp.down_proj.weight[:, 9] = 0
    up, down = mlp.up_proj.weight.clone(), mlp.down_proj.weight.clone()
    gains = model.model.layers[0].post_attention_layernorm.weight
    before = gains.clone()
    smooth_model(model, TOKENS)
    torch.testing.assert_close(mlp.up_proj.weight[9] * gains, up[9] * before)  # no more than the norm's share
    assert torch.equal(mlp.down_proj.weight[:, [7, 9]], down[:, [7, 9]])
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_calibration_may_come_in_batches():
    whole, parts = build("llama"), build("llama")
    smooth_model(whole, TOKENS)
    smooth_model(parts, (TOKENS[i : i + 1] for i in range(3)))
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_rounded_tokens_are_on_a_grid_of_their_own(seed):
    x = torch.randn(4, 7, 33, generator=torch.Generator().manual_seed(seed)) * 3
    for bits in (2, 4, 8):
        rounded = round_tokens(x, bits)
        steps = (x.amax(-1).clamp(min=0) - x.amin(-1).clamp(max=0)) / (2**bits - 1)
        # Half a step, or a whole one at the ends, where the rounded zero point shifts the grid.
        assert ((rounded - x).abs() <= steps[..., None] * 1.0001).all()
        assert max(len(row.unique()) for row in rounded.flatten(0, 1)) <= 2**bits
        assert torch.equal(round_tokens(-x.abs(), bits).amax(-1), torch.zeros(4, 7)) or bits > 2
        torch.testing.assert_close(round_tokens(x * 8, bits), rounded * 8)
    assert torch.equal(round_tokens(torch.zeros(2, 3), 4), torch.zeros(2, 3))


def test_rounded_activations_lose_less_with_more_bits_and_the_handle_takes_them_off():
    model = build("llama")
    before = logits(model)
    errors = []
    for bits in (3, 5, 8, 16):
        with fake_quantize_activations(model, bits):
            errors.append(float((logits(model) - before).norm()))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 100 * errors[-1]
    assert torch.equal(logits(model), before)
    handle = fake_quantize_activations(model, 3)
    assert not torch.equal(logits(model), before)
    handle.remove()
    handle.remove()
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt", "gpt_neox"])
def test_linear_layers_and_heads_see_rounded_tokens(family):
    model = build(family)
    kinds = {"input": [], "key": [], "value": []}
    handle = fake_quantize_activations(model, 4, kv_bits=3)
    for layer in describe_decoder(model).layers:
        for linear in {layer.q.linear, layer.v.linear, layer.o.linear, layer.up.linear, layer.down.linear}:
            linear.register_forward_pre_hook(lambda module, args: kinds["input"].append(args[0]))
    with record_attention(model) as calls:
        logits(model)
    for call in calls:
        kinds["key"].append(call.key)
        kinds["value"].append(call.value)
    for kind, tensors in kinds.items():
        values = max(len(row.unique()) for x in tensors for row in x.flatten(0, -2))
        assert 4 < values <= (16 if kind == "input" else 8)
    handle.remove()
    with record_attention(model) as calls:
        logits(model)
    assert max(len(row.unique()) for row in calls[0].key.flatten(0, -2)) > 8


def test_a_cache_holds_rounded_keys_and_decodes_as_without():
    model = build("llama", use_cache=True)
    cache = transformers.DynamicCache(config=model.config)
    name = next(n for n in ("cache", "past_key_values") if n in inspect.signature(model.forward).parameters)
    with fake_quantize_activations(model, 8, kv_bits=3):
        full = logits(model, use_cache=False)
        parts = [logits(model, part, **{name: cache}) for part in (TOKENS[:, :8], TOKENS[:, 8:])]
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=0, atol=1e-4)
    assert max(len(row.unique()) for row in cache.layers[0].keys.flatten(0, -2)) <= 8


def test_what_cannot_be_rotated_is_refused():
    post = build("opt", do_layer_norm_before=False)
    before = copy.deepcopy(post.state_dict())
    message = (
        "OPTForCausalLM has its norms after attention and MLP, in the residual stream itself, where neither a rotation nor a "
        "scale can pass. Quantize it as it is."
    )
    for refused in (lambda: rotate_model(post), lambda: smooth_model(post, TOKENS)):
        with pytest.raises(UnsupportedModelError, match=f"^{re.escape(message)}$"):
            refused()
    assert all(torch.equal(before[name], weight) for name, weight in post.state_dict().items())
    with pytest.raises(UnsupportedModelError, match="projects embeddings of width 32 to a stream of 48"):
        rotate_model(build("opt", word_embed_proj_dim=32))
    with pytest.raises(UnsupportedModelError, match="LlamaModel has no head that could undo the rotation"):
        rotate_model(build("llama").model)


class ShiftedNorm(nn.Module):
    """Gemma's: gains of 1 + weight."""

    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.full((n,), 0.5))

    def forward(self, x):
        return torch.nn.functional.rms_norm(x, (x.shape[-1],)) * (1 + self.weight)


def test_norms_that_would_be_folded_wrongly_are_refused():
    model = build("llama")
    model.model.layers[1].input_layernorm = ShiftedNorm(48)
    for refused in (rotate_model, lambda model: smooth_model(model, TOKENS)):
        with pytest.raises(
            UnsupportedModelError, match="ShiftedNorm is neither a LayerNorm nor an RMSNorm with plain gains"
        ):
            refused(model)
    model = build("opt")
    with torch.no_grad():
        model.model.decoder.final_layer_norm.weight[3] = 0
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        UnsupportedModelError, match="OPTForCausalLM has a norm with gains of zero, and its bias can go"
    ):
        rotate_model(model)
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    with torch.no_grad():
        model.model.decoder.final_layer_norm.bias.zero_()
    assert_same(logits(rotate_model(copy.deepcopy(model))), logits(model))


def test_norms_without_gains_rotate_but_cannot_smooth():
    model = build("opt", layer_norm_elementwise_affine=False)
    before = logits(model)
    assert_same(logits(rotate_model(model)), before)
    with pytest.raises(UnsupportedModelError, match=r"model\.decoder\.layers\.0 has a norm without gains"):
        smooth_model(model, TOKENS)


def test_models_that_are_quantized_or_not_loaded_are_refused():
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(transformers.LlamaConfig(**FAMILIES["llama"][1]))
    model = build("llama")
    model.model.layers[1].mlp.up_proj.quantized_bits = 4
    for refused in (rotate_model, lambda model: smooth_model(model, TOKENS)):
        with pytest.raises(
            InputError, match=r"model\.layers\.1 of this LlamaForCausalLM is quantized, and its weights"
        ):
            refused(model)
        with pytest.raises(InputError, match="is not loaded"):
            refused(empty)


def test_smoothing_refuses_tokens_that_the_model_cannot_take():
    model = build("llama")
    with pytest.raises(InputError, match=r"ids from 0 to 64; the model's vocabulary goes from 0 to 63"):
        smooth_model(model, torch.arange(65)[None])
    with pytest.raises(InputError, match="calibration is empty"):
        smooth_model(model, torch.zeros(0, 5, dtype=torch.int64))


def test_smoothing_looks_at_the_model_without_dropout_and_leaves_its_mode():
    trained, evaluated = build("opt", dropout=0.5), build("opt", dropout=0.5)
    smooth_model(trained.train(), TOKENS)
    smooth_model(evaluated, TOKENS)
    assert trained.training
    assert torch.equal(trained.model.decoder.layers[0].fc1.weight, evaluated.model.decoder.layers[0].fc1.weight)


def test_rotating_and_calibrating_twice_with_one_seed_gives_the_same_integers():
    config = QuantConfig(bits=3, grid="minmax")
    calibration = torch.randint(64, (10, 12), generator=torch.Generator().manual_seed(1))
    one, two = (quantize(rotate_model(build("llama"), random_state=3), calibration, config) for _ in range(2))
    assert one.layers.keys() == two.layers.keys()
    assert all(torch.equal(one.layers[name].codes, two.layers[name].codes) for name in one.layers)


def test_wrong_settings_and_activations_are_refused():
    model = build("llama")
    with pytest.raises(ParameterError, match=r"mix must be a number >= 0 and <= 1; got 1\.5"):
        smooth_model(model, TOKENS, mix=1.5)
    with pytest.raises(ParameterError, match=r"bits must be an int >= 2 and <= 16; got 1"):
        fake_quantize_activations(model, 1)
    with pytest.raises(ParameterError, match=r"kv_bits must be an int >= 2 and <= 16; got 17"):
        fake_quantize_activations(model, 4, kv_bits=17)
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[0] = float("nan")
    with pytest.raises(InputError, match=r"what comes into model\.layers\.1\.self_attn\.q_proj is NaN or infinite"):
        smooth_model(model, TOKENS)
