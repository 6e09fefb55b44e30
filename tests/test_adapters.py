import json
import re
import warnings

import pytest
import safetensors.torch
import torch
from torch import nn

from heedful._checkpoints import open_checkpoint
from heedful.errors import FileFormatError, InputError

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


def tiny_llama():
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)


def tiny_gpt2():
    config = transformers.GPT2Config(vocab_size=40, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


class Convolutions(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv1d(3, 4, 3), nn.Conv1d(4, 5, 1), nn.Flatten(), nn.Linear(5, 5))


def adapted(folder, model, dtype=torch.float32, **settings):
    """The state of ``model`` before, and after PEFT has merged an adapter, which is saved in ``folder``."""
    model = model.to(dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, about settings that it corrects
        wrapped = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "init_lora_weights": False, **settings}))
        for name, parameter in wrapped.named_parameters():
            if "modules_to_save" in name:
                parameter.data.normal_(generator=torch.Generator().manual_seed(1))
        wrapped.save_pretrained(folder)
        after = wrapped.merge_and_unload().state_dict()
    return before, after


CASES = {
    "attention": (tiny_llama, {"target_modules": ["q_proj", "v_proj"], "lora_alpha": 16}),
    "all linear": (tiny_llama, {"target_modules": "all-linear"}),
    "rank stabilised": (tiny_llama, {"target_modules": ["q_proj"], "use_rslora": True, "lora_alpha": 3}),
    "patterns": (
        tiny_llama,
        {
            "target_modules": ["q_proj", "k_proj", "down_proj"],
            "rank_pattern": {"q_proj": 2, r"layers\.1\.self_attn\.k_proj": 3},
            "alpha_pattern": {"^model.layers.0.mlp.down_proj": 32, "proj": 5},
        },
    ),
    "embedding": (tiny_llama, {"target_modules": ["embed_tokens", "o_proj"]}),
    "whole modules": (tiny_llama, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "transposed": (tiny_gpt2, {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "transposed, told by PEFT": (tiny_gpt2, {"target_modules": ["c_attn", "c_proj"]}),
    "convolutions": (Convolutions, {"target_modules": ["0", "1", "3"]}),
}


@pytest.mark.parametrize(("build", "settings"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_is_the_one_that_peft_merges(tmp_path, build, settings, dtype):
    before, after = adapted(tmp_path, build(), dtype, **settings)
    base = open_checkpoint(before)
    source = open_checkpoint(tmp_path, base=base)
    assert set(source.names) == set(base.names)
    assert source.folder == tmp_path
    # In float32 both round once or twice; in bfloat16 PEFT rounds the change before it adds it, and we do not.
    eps = torch.finfo(dtype).eps
    changed = 0
    for name in source:
        tensor = source.get(name)
        assert source.info(name) == (tuple(after[name].shape), dtype)
        assert (tensor.dtype, tensor.shape) == (dtype, after[name].shape)
        torch.testing.assert_close(tensor, after[name], rtol=4 * eps, atol=4 * eps)
        changed += not torch.equal(tensor, before[name])
        assert torch.equal(base.get(name), before[name]), "the base was written to"
    assert changed == sum(not torch.equal(after[name], before[name]) for name in before) >= 2


def test_the_change_is_rounded_once(tmp_path):
    before, _ = adapted(tmp_path, tiny_llama(), torch.bfloat16, target_modules=["q_proj"], lora_alpha=7)
    factors = safetensors.torch.load_file(tmp_path / "adapter_model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    a, b = (factors[f"base_model.model.{name}.lora_{factor}.weight"].float() for factor in "AB")
    expected = (before[f"{name}.weight"].float() + (b @ a) * (7 / 4)).bfloat16()
    assert torch.equal(open_checkpoint(tmp_path, base=open_checkpoint(before)).get(f"{name}.weight"), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_of_the_base_are_kept(tmp_path, dtype):
    before, _ = adapted(tmp_path, tiny_llama(), target_modules=["q_proj"])
    before = {name: tensor.to(dtype) for name, tensor in before.items()}
    source = open_checkpoint(tmp_path, base=open_checkpoint(before))
    assert {source.get(name).dtype for name in source} == {dtype}


@pytest.mark.parametrize(
    "rename",
    [lambda name: name.removeprefix("model."), lambda name: f"language_model.{name}"],
    ids=["shorter", "longer"],
)
def test_the_base_may_have_another_prefix(tmp_path, rename):
    before, after = adapted(tmp_path, tiny_llama(), target_modules=["q_proj", "down_proj"], modules_to_save=["norm"])
    source = open_checkpoint(tmp_path, base=open_checkpoint({rename(name): t for name, t in before.items()}))
    assert set(source.names) == set(map(rename, before))
    for name in after:
        torch.testing.assert_close(source.get(rename(name)), after[name])


def test_what_a_task_added_is_there_under_its_own_name(tmp_path):
    before, after = adapted(tmp_path, tiny_llama(), target_modules=["q_proj"], modules_to_save=["lm_head"])
    del before["lm_head.weight"]
    source = open_checkpoint(tmp_path, base=open_checkpoint(before))
    assert source.names == (*before, "lm_head.weight")
    assert torch.equal(source.get("lm_head.weight"), after["lm_head.weight"])


def test_tied_weights_of_the_base_stay_tied(tmp_path):
    model = tiny_gpt2()
    model.save_pretrained(tmp_path / "base")
    _, after = adapted(tmp_path / "adapter", model, target_modules=["wte"])
    base = open_checkpoint(model.state_dict())
    source = open_checkpoint(tmp_path / "adapter", base=base)
    assert source.tied == base.tied == {"lm_head.weight": "transformer.wte.weight"}
    assert "lm_head.weight" not in source
    on_disk = open_checkpoint(tmp_path / "adapter", base=open_checkpoint(tmp_path / "base"))
    torch.testing.assert_close(on_disk.get("transformer.wte.weight"), after["transformer.wte.weight"])


# --- what is refused


@pytest.fixture
def adapter(tmp_path):
    """A folder with an adapter, a function that changes its settings, and the state of the base."""
    before, _ = adapted(tmp_path, tiny_llama(), target_modules=["q_proj"])
    path = tmp_path / "adapter_config.json"

    def change(**settings):
        path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))

    return tmp_path, change, before


REFUSED = {
    "another kind": ({"peft_type": "LOHA"}, r"is a 'LOHA' adapter; only 'LORA' is read"),
    "no kind": ({"peft_type": None}, r"is a None adapter"),
    "DoRA": ({"use_dora": True}, r"is no plain LoRA: it sets use_dora=True\. Merge it into its model with PEFT"),
    "biases": ({"bias": "all"}, r"it sets bias='all'"),
    "PiSSA": ({"init_lora_weights": "pissa"}, r"it sets init_lora_weights='pissa'"),
    "parameters": ({"target_parameters": ["experts"]}, r"it sets target_parameters="),
    "tokens": (
        {"trainable_token_indices": [1], "lora_bias": True},
        r"it sets lora_bias=True, trainable_token_indices=\[1\]",
    ),
    "what is to come": ({"use_magic": 0.5}, r"it sets use_magic=0\.5"),
    "another rank": ({"r": 5}, r"adapter_config\.json does not fit .*: r is 5, and A has 4 rows"),
    "rank in words": ({"r": "four"}, r"r is 'four'"),
    "no scale": ({"lora_alpha": None}, r"lora_alpha is None"),
    "infinite scale": ({"lora_alpha": float("inf")}, r"lora_alpha is inf"),
    "no pattern": ({"alpha_pattern": {"(": 1}}, r"adapter_config\.json does not fit"),
    "no patterns": ({"rank_pattern": [1]}, r"adapter_config\.json does not fit"),
}


@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED)
def test_adapters_that_are_no_plain_lora_are_refused_by_name(adapter, settings, message):
    folder, change, before = adapter
    change(**settings)
    with pytest.raises(FileFormatError, match=message):
        open_checkpoint(folder, base=open_checkpoint(before))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("base_model.model.x.lora_magnitude_vector", "x.lora_magnitude_vector, which is no part of a plain LoRA"),
        ("base_model.model.x.lora_A.weight", "has only A for x, where A and B are needed"),
        ("lora_unet_x.lora_down.weight", "and what PEFT saves starts with base_model.model."),
    ],
)
def test_tensors_that_are_no_part_of_an_adapter_are_refused_by_name(adapter, name, message):
    folder, _, before = adapter
    path = folder / "adapter_model.safetensors"
    safetensors.torch.save_file({**safetensors.torch.load_file(path), name: torch.ones(4, 4)}, path)
    with pytest.raises(FileFormatError, match=re.escape(message)):
        open_checkpoint(folder, base=open_checkpoint(before))


def test_another_base_is_refused(adapter):
    folder, _, before = adapter
    name = "model.layers.1.self_attn.q_proj.weight"
    with pytest.raises(InputError, match=f"changes {name}, which the state dict does not have. Give the base that"):
        open_checkpoint(folder, base=open_checkpoint({n: t for n, t in before.items() if n != name}))
    with pytest.raises(InputError, match=r"do not make the change of a weight of shape \(16, 17\)"):
        open_checkpoint(folder, base=open_checkpoint({**before, name: torch.ones(16, 17)}))
    twice = {f"{side}.{n}": t.clone() for n, t in before.items() for side in ("student", "teacher")}
    with pytest.raises(InputError, match="which the state dict has more than once"):
        open_checkpoint(folder, base=open_checkpoint(twice))


def test_a_square_weight_whose_layout_nothing_tells_is_refused(tmp_path):
    before, _ = adapted(tmp_path, tiny_gpt2(), target_modules=["c_attn", "c_proj"])
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "fan_in_fan_out": False}))
    with pytest.raises(
        FileFormatError, match=r"fan_in_fan_out=False is wrong for some modules, so that it cannot say how"
    ):
        open_checkpoint(tmp_path, base=open_checkpoint(before))


def test_an_adapter_without_weights_is_refused(adapter):
    folder, _, before = adapter
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(FileFormatError, match=r"has an adapter_config\.json but no adapter_model\.safetensors"):
        open_checkpoint(folder, base=open_checkpoint(before))
