"""Tiny Llamas on disk, and mergekit beside us."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

HIDDEN, VOCABULARY, LAYERS = 24, 40, 3


def shapes(*, tied=False):
    """Names and shapes of the parameters of a Llama with three layers."""
    layer = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
        "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.up_proj": (2 * HIDDEN, HIDDEN),
        "mlp.gate_proj": (2 * HIDDEN, HIDDEN),
        "mlp.down_proj": (HIDDEN, 2 * HIDDEN),
    }
    inside = {f"model.layers.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in layer.items()}
    head = {} if tied else {"lm_head.weight": (VOCABULARY, HIDDEN)}
    return {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), **inside, "model.norm.weight": (HIDDEN,), **head}


def config(*, tied=False, dtype="float32"):
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": dtype,
    }


def write_llama(folder, *, seed=0, base=None, step=0.02, tied=False, dtype=torch.float32, config_extra=None):
    """A Llama with random weights, or with those of ``base`` and random steps away from them. Returns its state dict."""
    generator = torch.Generator().manual_seed(seed)
    state = {
        name: (
            0.3 * torch.randn(shape, generator=generator)
            if base is None
            else base[name].float() + step * torch.randn(shape, generator=generator)
        ).to(dtype)
        for name, shape in shapes(tied=tied).items()
    }
    write_state(folder, state, tied=tied, config_extra=config_extra)
    return state


def write_state(folder, state, *, tied=False, config_extra=None):
    folder = Path(folder)
    folder.mkdir(parents=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    dtype = str(next(iter(state.values())).dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config(tied=tied, dtype=dtype) | (config_extra or {}), indent=2))
    write_tokenizer(folder)


def write_tokenizer(folder, n_words=VOCABULARY):
    words = {f"w{i}": i for i in range(n_words)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w1", "eos_token": "w2", "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))


def read_tensors(folder):
    """Every tensor of a folder of shards."""
    return {
        name: tensor for file in sorted(Path(folder).glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


_MANY = """
import sys
import heedful.merge.mergekit
from mergekit.scripts.run_yaml import main
{first}
for recipe, out in zip(sys.argv[1::2], sys.argv[2::2]):
    main([recipe, out, "--quiet", "--lora-merge-cache", out + "-adapters"], standalone_mode=False)
"""


def mergekit(recipes, folder, *, first=""):
    """What mergekit makes of each recipe (name -> YAML text): name -> tensors. One process, for its imports are slow."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    pairs = []
    for name, text in recipes.items():
        (folder / f"{name}.yaml").write_text(text)
        pairs += [str(folder / f"{name}.yaml"), str(folder / name)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", _MANY.format(first=first), *pairs]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return {name: read_tensors(folder / name) for name in recipes}
