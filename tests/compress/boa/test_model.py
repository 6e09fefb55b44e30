"""Whole models: block by block, in place, on what the quantized blocks before make of the texts."""

import copy
import dataclasses
import functools
import json
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import heedful.compress.boa.model as module_under_test
from heedful import progress
from heedful._decoders import LAYOUTS, describe_decoder
from heedful.compress import QuantConfig, attention_factors, find_grid, kron_quantize, quantize
from heedful.compress.boa.factors import AttentionStatistics, rotate
from heedful.compress.boa.solve import _kron_loss as kron_loss
from heedful.errors import ConvergenceError, HeedfulWarning, InputError, ParameterError, UnsupportedModelError
from tests.conformance.typechecks import as_users_have_it
from tests.decoders import FAMILIES, decoder, tokens

FAST = QuantConfig(bits=3, grid="minmax")  # the search for a grid is most of the time, and not what is tested here
ATTENTION = dataclasses.replace(FAST, exclude=("*.mlp.*",))
TEXTS = tokens(8, 12)


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def codes(quantized):
    return {name: layer.codes for name, layer in quantized.layers.items()}


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


# ---- what comes out


@pytest.mark.filterwarnings("ignore:Between:heedful.errors.HeedfulWarning")  # qwen3's norms
@pytest.mark.parametrize("method", ["boa", "gptq", "rtn"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_what_the_codes_stand_for_and_nothing_else_changes(family, method):
    model = decoder(family)
    before = state(model)
    quantized = quantize(model, TEXTS, dataclasses.replace(FAST, method=method))
    assert quantized.model is model
    linears = {name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)} - {"lm_head"}
    assert set(quantized.layers) == linears
    for name, layer in quantized.layers.items():
        weight = model.get_submodule(name).weight
        assert torch.equal(layer.dequantize(), weight)
        assert layer.codes.dtype == torch.uint8
        assert layer.codes.shape == weight.shape
        assert layer.codes.max() <= 7
        on_grid = weight / layer.grid.scale + layer.grid.zero  # one scale a row
        torch.testing.assert_close(on_grid, layer.codes.float(), rtol=0, atol=1e-4)
    after = state(model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"{name}.weight" for name in linears}  # no bias, norm, embedding or head


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_stay_so_bit_for_bit(dtype):
    model = decoder("llama", dtype=dtype)
    before = state(model)
    quantized = quantize(model, TEXTS, QuantConfig(bits=8, grid="minmax"))
    assert {p.dtype for p in model.parameters()} == {dtype}
    for name, layer in quantized.layers.items():
        assert torch.equal(layer.dequantize(), model.get_submodule(name).weight)
        # Eight bits of a range of about 5 deviations, errors of a few entries moved to others.
        assert (layer.dequantize() - before[f"{name}.weight"]).abs().max() < 0.05


def test_tied_embeddings_stay_tied_and_untouched():
    model = decoder("llama", tie_word_embeddings=True)
    before = model.lm_head.weight.clone()
    quantize(model, TEXTS, FAST)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert torch.equal(model.lm_head.weight, before)


def test_more_bits_lose_less():
    configs = (dataclasses.replace(FAST, bits=bits) for bits in (2, 4, 8))
    losses = [quantize(decoder("llama", num_hidden_layers=1), TEXTS, config).report.layers for config in configs]
    for two, four, eight in zip(*losses, strict=True):
        assert two.loss > four.loss > eight.loss >= 0


def test_the_same_texts_give_the_same_codes_in_whatever_form():
    model = decoder("llama", dtype=torch.float64)
    runs = [
        quantize(copy.deepcopy(model), texts, ATTENTION) for texts in (TEXTS, TEXTS, list(TEXTS), iter(TEXTS.split(3)))
    ]
    assert all(same(codes(runs[0]), codes(run)) for run in runs[1:])


def test_sequences_may_differ_in_length():
    texts = [tokens(1, n)[0] for n in (2, 30, 17)]
    assert quantize(decoder("opt"), texts, FAST).report.tokens == 49


# ---- the method


@torch.no_grad()
def naive_factors(model, ids):
    """Of the first block of a Llama in float64: XXᵀ and the factors, from the model's own eager attention."""
    part = describe_decoder(model).layers[0]
    seen = {}
    hook = part.q.linear.register_forward_pre_hook(lambda _, args: seen.update(x=args[0]))
    model.set_attn_implementation("eager")
    probs = model(ids, output_attentions=True).attentions[0].double()
    hook.remove()
    model.set_attn_implementation("sdpa")
    x = seen["x"]
    rope = model.model.rotary_emb(x, torch.arange(ids.shape[1])[None])
    query = rotate((x @ part.q.weight.T).unflatten(-1, (4, -1)).transpose(1, 2), rope)
    key = rotate((x @ part.k.weight.T).unflatten(-1, (2, -1)).transpose(1, 2), rope)
    return attention_factors(query, key, x, probs, part.o.weight, rope=rope)


def test_attention_is_quantized_by_its_factors():
    model = decoder("llama", dtype=torch.float64, num_hidden_layers=1)
    part = describe_decoder(model).layers[0]
    factors = naive_factors(model, TEXTS)
    # The eager softmax is in float32: losses agree to that, while a code may flip on the edge between two.
    weights = {role: getattr(part, role).weight.detach().clone() for role in "qkv"}
    quantized = quantize(model, TEXTS, FAST)
    for report, factor in zip(quantized.report.layers[:3], factors, strict=True):
        heads = getattr(part, report.part).n_heads
        weight = weights[report.part].unflatten(0, (heads, -1))
        alone = kron_quantize(weight, *factor, config=FAST)
        found = quantized.layers[report.name].dequantize().unflatten(0, (heads, -1))
        whole = kron_loss(weight, *factor).sum()
        losses = [float(kron_loss(w - weight, *factor).sum() / whole) for w in (found, alone.dequantize())]
        assert losses[0] == pytest.approx(report.loss, rel=1e-5)
        assert losses[1] == pytest.approx(report.loss, rel=0.02)
        agree = (quantized.layers[report.name].codes == alone.codes.flatten(0, 1)).double().mean()
        assert agree > 0.95


def test_rounding_and_gptq_are_compared_on_the_grid_that_they_would_choose():
    model = decoder("llama", dtype=torch.float64, num_hidden_layers=1)
    config = QuantConfig(bits=2)
    factors = naive_factors(model, TEXTS)
    value, inputs = factors.value, factors.query.h_col
    weight = describe_decoder(model).layers[0].v.weight.detach().clone().unflatten(0, (2, -1))
    report = next(r for r in quantize(model, TEXTS, config).report.layers if r.part == "v")
    rounded = find_grid(weight, inputs, config=config).fake_quantize(weight)
    expected = kron_loss(rounded - weight, *value).sum() / kron_loss(weight, *value).sum()
    assert report.loss_rtn == pytest.approx(float(expected), rel=1e-5)  # the eager softmax is in float32


def test_rows_of_a_fused_projection_stay_in_their_places():
    model = decoder("gpt_neox")
    before = state(model)
    for name, layer in quantize(model, TEXTS, QuantConfig(bits=8, grid="minmax")).layers.items():
        assert (layer.dequantize() - before[f"{name}.weight"]).abs().max() < 0.05  # as in half precision above


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_gptq_knows_nothing_but_the_inputs(family):
    model = decoder(family, dtype=torch.float64)
    inputs, hooks = {}, []
    for name, m in model.named_modules():
        if isinstance(m, torch.nn.Linear) and ".0." in name:
            keep = functools.partial(lambda name, _, args: inputs.update({name: args[0].flatten(0, -2)}), name)
            hooks.append(m.register_forward_pre_hook(keep))
    weights = state(model)
    with torch.no_grad():
        model(TEXTS)
    for hook in hooks:
        hook.remove()
    config = dataclasses.replace(FAST, method="gptq")
    quantized = quantize(model, TEXTS, config)
    for name, x in inputs.items():
        expected = kron_quantize(weights[f"{name}.weight"], x.T @ x, config=config)
        assert (quantized.layers[name].codes == expected.codes).double().mean() > 0.99  # flips on the edge between two


def test_layers_outside_of_attention_are_quantized_as_by_gptq():
    boa, gptq = (
        quantize(decoder("opt", dtype=torch.float64), TEXTS, dataclasses.replace(FAST, method=m))
        for m in ("boa", "gptq")
    )
    for name in ("out_proj", "fc1", "fc2"):  # of the first block: the next one gets other inputs
        name = f"model.decoder.layers.0.{'self_attn.' * (name == 'out_proj')}{name}"
        assert torch.equal(boa.layers[name].codes, gptq.layers[name].codes)
    for report in boa.report.layers:
        assert (report.part is None) == (report.loss == report.loss_gptq)
    assert all(report.loss == report.loss_gptq and report.part is None for report in gptq.report.layers)


def test_without_row_factors_and_attention_in_the_columns_it_is_gptq():
    """With norms between projection and attention, queries and keys have no row factor; values can go without, too."""
    config = dataclasses.replace(FAST, value_rows="identity", value_hessian="shared")
    with pytest.warns(HeedfulWarning) as caught:
        boa = quantize(decoder("qwen3"), TEXTS, config)
    for i, warning in enumerate(caught):
        assert f"Between model.layers.{i}.self_attn.q_proj, model.layers.{i}.self_attn.k_proj and" in str(
            warning.message
        )
    assert len(caught) == 2
    gptq = quantize(decoder("qwen3"), TEXTS, dataclasses.replace(config, method="gptq"))
    assert same(codes(boa), codes(gptq))


def test_a_rotation_that_the_layout_does_not_know_is_seen_and_said(monkeypatch):
    from transformers.models.llama import modeling_llama

    def interleaved(q, k, cos, sin, unsqueeze_dim=1):
        def turn(x):
            return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)

        cos, sin = (part.unflatten(-1, (2, -1))[..., 0, :].repeat_interleave(2, -1)[:, None] for part in (cos, sin))
        return q * cos + turn(q) * sin, k * cos + turn(k) * sin

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", interleaved)
    with pytest.warns(HeedfulWarning, match="stands more than a rotation"):
        quantized = quantize(decoder("llama", num_hidden_layers=1), TEXTS, FAST)
    assert [report.loss == report.loss_gptq for report in quantized.report.layers[:3]] == [True, True, False]


def test_keys_that_are_all_zero_are_no_norm():
    model = decoder("llama", num_hidden_layers=1)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.zero_()
    quantize(model, TEXTS, ATTENTION)  # and nothing is warned of
    assert not model.model.layers[0].self_attn.k_proj.weight.any()


def test_attention_heeded_loses_less_of_attention_than_gptq():
    reports = [
        r for seed in range(4) for r in quantize(decoder("llama", seed=seed), TEXTS, FAST).report.layers if r.part
    ]
    for part in "qkv":
        some = [r for r in reports if r.part == part]
        boa, gptq, rtn = (sum(getattr(r, name) for r in some) for name in ("loss", "loss_gptq", "loss_rtn"))
        assert boa < gptq < rtn


def test_every_block_is_calibrated_on_the_blocks_quantized_before_it():
    at_once, in_turn, alone = (decoder("llama", dtype=torch.float64) for _ in range(3))
    together = quantize(at_once, TEXTS, ATTENTION)
    first = quantize(in_turn, TEXTS, dataclasses.replace(FAST, exclude=("*.mlp.*", "model.layers.1.*")))
    rest = dataclasses.replace(FAST, exclude=("*.mlp.*", "model.layers.0.*"))
    second = quantize(in_turn, TEXTS, rest)
    assert same(codes(together), codes(first) | codes(second))
    assert same(state(at_once), state(in_turn))
    assert not same(codes(second), codes(quantize(alone, TEXTS, rest)))


def test_automatic_order_is_the_best_of_the_four():
    def losses(order):
        config = dataclasses.replace(ATTENTION, act_order=order)
        quantized = quantize(decoder("llama", num_hidden_layers=1), TEXTS, config)
        return quantized.report.layers

    auto, *fixed = (losses(order) for order in ("auto", "off", "rows", "columns", "both"))
    for chosen, *others in zip(auto, *fixed, strict=True):
        assert chosen.loss == pytest.approx(min(other.loss for other in others), rel=1e-5)
        named = next(other for other in others if other.act_order == chosen.act_order)
        assert named.loss == pytest.approx(chosen.loss, rel=1e-5)
    assert {report.act_order for report in auto} - {"off"}


def test_groups_are_quantized_by_groups():
    config = dataclasses.replace(FAST, group_size=8)
    quantized = quantize(decoder("llama", num_hidden_layers=1), TEXTS, config)
    assert quantized.layers["model.layers.0.mlp.down_proj"].grid.scale.shape == (32, 6)


def test_a_layout_quantizes_an_unknown_family_alike():
    known, unknown = decoder("llama"), decoder("llama")
    unknown.config.model_type = "somebodys_llama"
    with pytest.raises(UnsupportedModelError, match="'somebodys_llama'; supported are llama"):
        quantize(unknown, TEXTS, FAST)
    by_layout = quantize(unknown, TEXTS, ATTENTION, layout=LAYOUTS["llama"])
    assert same(codes(quantize(known, TEXTS, ATTENTION)), codes(by_layout))


# ---- which layers


def test_excluded_layers_stay_and_blocks_after_the_last_target_are_not_run():
    model = decoder("llama", num_hidden_layers=4)
    ran = []
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_hook(lambda *_, i=i: ran.append(i))
    before = state(model)
    config = dataclasses.replace(FAST, exclude=(r"re:model\.layers\.(?![01]\.).*", "*.mlp.*", "lm_head"))
    quantized = quantize(model, TEXTS, config)
    names = {f"model.layers.{i}.self_attn.{role}_proj" for i in (0, 1) for role in "qkvo"}
    assert set(quantized.layers) == names
    assert {name for name, w in state(model).items() if not torch.equal(w, before[name])} == {
        f"{n}.weight" for n in names
    }
    assert set(ran) == {0, 1}
    with pytest.raises(ParameterError, match=r"exclude: '\*\.mpl\.\*' matches no layer"):
        quantize(decoder("llama"), TEXTS, dataclasses.replace(FAST, exclude=("*.mpl.*",)))


def test_a_model_without_a_head_is_quantized_alike():
    whole, base = decoder("llama"), decoder("llama").model
    quantized = {f"model.{name}": c for name, c in codes(quantize(base, TEXTS, ATTENTION)).items()}
    assert same(quantized, codes(quantize(whole, TEXTS, ATTENTION)))


# ---- report and files


def test_the_report_is_plain_and_ordered():
    events = []
    with progress(events.append):
        quantized = quantize(decoder("llama"), TEXTS, FAST)
    report = quantized.report
    assert json.loads(json.dumps(report.to_dict()))["layers"][0]["name"] == "model.layers.0.self_attn.q_proj"
    assert (report.method, report.bits, report.tokens) == ("boa", 3, 96)
    assert [layer.block for layer in report.layers] == [0] * 7 + [1] * 7
    assert 0 < sum(layer.seconds for layer in report.layers) < report.seconds
    assert [(event.phase, event.done, event.total) for event in events] == [("quantize", 1, 2), ("quantize", 2, 2)]
    mean = sum(layer.loss for layer in report.layers[:7]) / 7
    assert events[0].values["loss"] == pytest.approx(mean)
    rounded = quantize(decoder("llama"), TEXTS, dataclasses.replace(FAST, method="rtn")).report
    assert all(layer.loss == layer.loss_rtn and layer.loss_gptq is None for layer in rounded.layers)


class Killed(Exception):
    pass


@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.bfloat16), ("gpt_neox", torch.float32)])
def test_a_killed_run_resumes_with_the_same_bytes(tmp_path, monkeypatch, family, dtype):
    def stop(event):
        if event.done == 2:
            raise Killed

    make = {"family": family, "dtype": dtype, "num_hidden_layers": 3}
    whole = quantize(decoder(**make), TEXTS, FAST)
    model = decoder(**make)
    with pytest.raises(Killed), progress(stop):
        quantize(model, TEXTS, FAST, work_dir=tmp_path / "new" / "work")
    with pytest.raises(InputError, match=r"\.0\..* was quantized before, to 3 bits\. Load the original model"):
        quantize(model, TEXTS, FAST, work_dir=tmp_path / "new" / "work")

    calibrated = []
    original = module_under_test._quantize_block
    monkeypatch.setattr(
        module_under_test, "_quantize_block", lambda *args: (calibrated.append(args[1]), original(*args))[1]
    )
    resumed = quantize(decoder(**make), TEXTS, FAST, work_dir=tmp_path / "new" / "work")
    assert calibrated == [2]
    assert same(codes(resumed), codes(whole))
    assert same(state(resumed.model), state(whole.model))
    for name, layer in whole.layers.items():
        assert torch.equal(resumed.layers[name].dequantize(), layer.dequantize())
    losses = [[layer.loss for layer in run.report.layers] for run in (resumed, whole)]
    assert losses[0] == losses[1]


def test_pieces_of_another_run_or_damaged_ones_are_of_no_use(tmp_path):
    make = {"family": "llama", "num_hidden_layers": 1}
    expected = codes(quantize(decoder(**make), TEXTS, ATTENTION, work_dir=tmp_path))
    (piece,) = tmp_path.iterdir()
    whole = piece.read_bytes()
    for damaged in (whole[:100], whole[:-9], b""):
        piece.write_bytes(damaged)
        assert same(codes(quantize(decoder(**make), TEXTS, ATTENTION, work_dir=tmp_path)), expected)
        assert len(piece.read_bytes()) > len(whole) / 2  # it was replaced
    for config, model, texts in (
        (dataclasses.replace(ATTENTION, bits=2), decoder(**make), TEXTS),
        (ATTENTION, decoder(**make, seed=1), TEXTS),
        (ATTENTION, decoder(**make), TEXTS.flip(1)),
        (ATTENTION, decoder(**make, rms_norm_eps=0.1), TEXTS),
    ):
        expected = codes(quantize(copy.deepcopy(model), texts, config))
        assert same(codes(quantize(model, texts, config, work_dir=tmp_path)), expected)


def test_what_is_saved_opens_as_the_same_model(tmp_path):
    quantized = quantize(decoder("llama"), TEXTS, FAST)
    quantized.save_pretrained(tmp_path / "plain", format="dequantized")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "plain", local_files_only=True)
    assert same(state(loaded), state(quantized.model))


def test_factors_of_one_block_exist_at_a_time(monkeypatch):
    instances, alive = weakref.WeakSet(), []

    class Counted(AttentionStatistics):
        def __init__(self, **options):
            super().__init__(**options)
            instances.add(self)
            alive.append(len(instances))

    monkeypatch.setattr(module_under_test, "AttentionStatistics", Counted)
    quantize(decoder("opt", num_hidden_layers=3), TEXTS, dataclasses.replace(FAST, exclude=("*fc*", "*out_proj")))
    assert alive == [1, 1, 1]
    assert not instances


# ---- what is refused, before anything changes


def refused(error, message, model, calibration=TEXTS, config=FAST, **options):
    before = state(model)
    with pytest.raises(error, match=message):
        quantize(model, calibration, config, **options)
    assert same(before, state(model))


def test_calibration_that_the_model_cannot_take_is_refused():
    model = decoder("opt")
    for texts, message in (
        (TEXTS[:, :1], "a sequence of 1 tokens; attention needs at least 2"),
        (TEXTS[:0], "calibration is empty"),
        ([], "calibration is empty"),
        (TEXTS + 50, "ids from 50 to 99; the model's vocabulary goes from 0 to 49"),
        (TEXTS - 100, "ids from -100 to"),
        (TEXTS.float(), r"integers of shape \(n, length\); got torch.float32"),
        ([TEXTS[None]], r"got torch.int64 of \(1, 8, 12\)"),
        (TEXTS[0], r"got torch.int64 of \(\)\. One sequence alone goes in as ids\[None\]"),
        (tokens(1, 65), "a sequence of 65 tokens; the model has 64 positions"),
    ):
        refused(InputError, message, model, texts)
    quantize(decoder("llama", num_hidden_layers=1), tokens(1, 65), ATTENTION)  # rotations have no end


@pytest.mark.parametrize("texts", ["a text", ["a text"], {"input_ids": TEXTS}, [{"input_ids": TEXTS}], None, 3])
def test_texts_that_are_not_tokens_are_refused(texts):
    with as_users_have_it():
        refused(
            InputError,
            "must hold token ids, .* as the model's tokenizer makes them of texts; got a",
            decoder("opt"),
            texts,
        )


def test_settings_that_are_none_are_refused():
    with as_users_have_it():
        refused(
            ParameterError, r"^config must be a QuantConfig; got \{'bits': 3\}\.$", decoder("opt"), config={"bits": 3}
        )


def test_unsigned_ids_are_tokens():
    texts = TEXTS.numpy().astype("uint16")
    with as_users_have_it():
        found = quantize(decoder("llama", dtype=torch.float64), texts, ATTENTION)
    assert same(codes(found), codes(quantize(decoder("llama", dtype=torch.float64), TEXTS, ATTENTION)))


def test_few_tokens_are_warned_of():
    with pytest.warns(HeedfulWarning, match=r"16 tokens of calibration are fewer than the 48 inputs of .*o_proj"):
        quantize(decoder("llama"), TEXTS[:2, :8], FAST)


@pytest.mark.parametrize(
    ("damaged", "value", "named"),
    [
        ("model.embed_tokens", torch.nan, "model.layers.0.self_attn.q_proj"),
        ("model.embed_tokens", torch.inf, "model.layers.0.self_attn.q_proj"),
        ("model.layers.1.self_attn.v_proj", 3e38, "model.layers.1.self_attn.o_proj"),
        ("model.layers.1.mlp.up_proj", 3e38, "model.layers.1.mlp.down_proj"),
    ],
)
def test_activations_that_are_not_finite_are_refused_by_name(damaged, value, named):
    model = decoder("llama")
    with torch.no_grad():
        model.get_submodule(damaged).weight[0] = value
    texts = TEXTS.clone()
    texts[:, 0] = 0
    with pytest.raises(InputError, match=f"the activations at {named} are NaN or infinite"):
        quantize(model, texts, FAST)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_weights_that_are_not_finite_are_refused_by_name(value):
    model = decoder("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 3] = value
    with pytest.raises(
        InputError, match=r"the weight of model\.layers\.1\.mlp\.down_proj has entries that are NaN or infinite"
    ):
        quantize(model, TEXTS, FAST)
    assert not hasattr(model.model.layers[0].mlp.down_proj, "quantized_bits")  # nothing was begun


def test_excluding_everything_is_refused_in_few_words():
    with pytest.raises(UnsupportedModelError) as caught:
        quantize(decoder("llama", num_hidden_layers=8), TEXTS, dataclasses.replace(FAST, exclude=("*",)))
    assert "included are 'model.layers.*', excluded '*'" in str(caught.value)


def test_groups_that_do_not_divide_are_refused():
    message = "group_size must divide the number of inputs, 32; got 12"
    refused(ParameterError, message, decoder("llama"), config=dataclasses.replace(FAST, group_size=12))


def test_quantized_models_are_refused():
    model = decoder("llama")
    quantize(model, TEXTS, dataclasses.replace(ATTENTION, method="rtn"))
    refused(InputError, r"q_proj was quantized before, to 3 bits", model)
    model = decoder("llama")
    model.config.quantization_config = {"quant_method": "compressed-tensors"}
    refused(InputError, r"is quantized already \(its config has a quantization_config\)", model)


def test_a_model_whose_codes_were_unpacked_while_it_was_loaded_is_refused(tmp_path, monkeypatch):
    quantize(decoder("llama"), TEXTS, dataclasses.replace(FAST, method="rtn")).save_pretrained(tmp_path / "packed")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", local_files_only=True)
    assert getattr(model.config, "quantization_config", None) is None  # it looks like any other
    monkeypatch.chdir(tmp_path / "packed")
    quantize(decoder("llama"), TEXTS, ATTENTION)  # built in memory, wherever that is
    refused(InputError, r"is quantized already \(its config has a quantization_config\)", model)
    decoder("llama").save_pretrained(tmp_path / "plain")
    quantize(LlamaForCausalLM.from_pretrained(tmp_path / "plain", local_files_only=True), TEXTS, ATTENTION)


def test_a_factor_that_is_singular_is_refused_by_name():
    texts = torch.ones(2, 3, dtype=torch.long)
    with pytest.warns(HeedfulWarning, match="6 tokens"), pytest.raises(ConvergenceError) as caught:
        quantize(decoder("llama"), texts, dataclasses.replace(FAST, damping=0))
    assert str(caught.value).startswith("model.layers.0.self_attn.q_proj: a 32 x 32 matrix is not positive definite")


def test_tensors_that_are_not_loaded_are_refused():
    with torch.device("meta"):
        model = LlamaForCausalLM(decoder("llama").config)
    with pytest.raises(InputError, match=r"embed_tokens\.weight is not loaded .*LlamaForCausalLM\.from_pretrained"):
        quantize(model, TEXTS, FAST)


def test_weights_shared_between_layers_are_refused():
    model = decoder("llama")
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    refused(UnsupportedModelError, "up_proj", model)


def test_attention_that_looks_ahead_is_refused():
    refused(UnsupportedModelError, "attention that looks ahead", decoder("llama", is_causal=False))
    model = decoder("llama")
    model.set_attn_implementation("eager")
    quantize(model, TEXTS, ATTENTION)
    assert model.config._attn_implementation == "eager"


def test_attention_that_is_not_the_layouts_is_refused():
    layout = LAYOUTS["llama"] | {"attention": "mlp"}
    refused(
        UnsupportedModelError, "its attention is not that of the layout, a LlamaMLP", decoder("llama"), layout=layout
    )


def test_the_mode_of_every_module_is_given_back():
    model = decoder("opt", dropout=0.5, attention_dropout=0.5).train()
    model.lm_head.eval()
    quantized = quantize(model, TEXTS, FAST)
    assert model.training
    assert not model.lm_head.training
    assert same(codes(quantized), codes(quantize(decoder("opt"), TEXTS, FAST)))  # nothing was dropped
