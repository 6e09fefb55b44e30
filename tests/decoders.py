"""Tiny decoders with random weights, one of each family."""

import torch
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 50
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_OPT = {name: size for name, size in _SIZES.items() if name != "intermediate_size"}
_MADE = {
    # Heads wider than hidden / heads: only head_dim says so.
    "llama": (LlamaForCausalLM, LlamaConfig, _GROUPED | {"head_dim": 12}),
    "mistral": (MistralForCausalLM, MistralConfig, _GROUPED | {"sliding_window": 6, "head_dim": 8}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, _GROUPED),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, _GROUPED | {"head_dim": 8}),
    "opt": (OPTForCausalLM, OPTConfig, _OPT | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig, _SIZES | {"rotary_pct": 0.5}),
}
FAMILIES = tuple(_MADE)


def decoder(family, *, seed=0, dtype=torch.float32, **changes):
    """A decoder in evaluation mode. Weights are large enough for attention to have preferences, and biases are not zero."""
    kind, config, sizes = _MADE[family]
    generator = torch.Generator().manual_seed(seed)
    model = kind(config(**sizes | changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                continue
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.25 if parameter.ndim > 1 else 0.1))
    return model.to(dtype)


def tokens(n=8, length=12, *, seed=0):
    return torch.randint(VOCABULARY, (n, length), generator=torch.Generator().manual_seed(seed))
