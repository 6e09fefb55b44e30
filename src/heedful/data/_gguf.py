"""A language model of one GGUF file, written as the folder that the ``transformers`` library opens.

The weights are dequantised to float32, exactly; the tokenizer and configuration follow from the file's metadata. What is
written depends on the file alone, not on the version of any library, so that it has one checksum.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from heedful.errors import FileFormatError, MissingExtraError

_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attn_output": "self_attn.o_proj",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
_NAMED_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding"}
_CONTROL = 3  # the kind of token that text cannot spell


def convert_llama(file: Path, folder: Path) -> None:
    """Write the model of ``file``, a Llama with tied embeddings and SmolLM's tokenizer, to the new ``folder``.

    Raises
    ------
    FileFormatError
        If the file holds another kind of model.
    MissingExtraError
        If the package ``gguf`` is not installed.
    """
    try:
        from gguf import GGUFReader, dequantize
    except ImportError as error:
        raise MissingExtraError('Reading a GGUF file needs: pip install "heedful[llm]".') from error
    reader = GGUFReader(file)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    kind = meta.get("general.architecture"), meta.get("tokenizer.ggml.pre")
    if kind != ("llama", "smollm"):
        raise FileFormatError(f"{file.name} holds a model and tokenizer of kind {kind}; needed is ('llama', 'smollm').")
    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        *block, name = tensor.name.removeprefix("blk.").removesuffix(".weight").split(".")
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        if name in heads:
            values = _half_rotated(values, heads[name])
        layer = f"layers.{block[0]}." if block else ""
        weights[f"model.{layer}{_NAMES[name]}.weight"] = values
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name, contents in (
        ("config.json", _config(meta)),
        ("tokenizer.json", _tokenizer(meta)),
        ("tokenizer_config.json", _tokenizer_config(meta)),
    ):
        (folder / name).write_text(json.dumps(contents, indent=1, ensure_ascii=False), "utf-8")


def _half_rotated(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF rotates neighbouring coordinates of a head, ``transformers`` those of its two halves."""
    return np.ascontiguousarray(weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2)).reshape(weight.shape)


def _config(meta: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "vocab_size": meta["llama.vocab_size"],
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # it was rounded to float32
        "rope_parameters": {"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        "tie_word_embeddings": True,
        **{f"{name}_token_id": number for name, number in _named_tokens(meta).items()},
    }


def _tokenizer(meta: dict[str, Any]) -> dict[str, Any]:
    """Byte-pair encoding after digits were set apart, as SmolLM's authors trained it."""
    tokens = meta["tokenizer.ggml.tokens"]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": number, "content": token, **flags, "special": True}
            for number, (token, kind) in enumerate(zip(tokens, meta["tokenizer.ggml.token_type"], strict=True))
            if kind == _CONTROL
        ],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in meta["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": meta["llama.context_length"],
        "chat_template": meta["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        **{f"{name}_token": tokens[number] for name, number in _named_tokens(meta).items()},
    }


def _named_tokens(meta: dict[str, Any]) -> dict[str, int]:
    return {name: meta[f"tokenizer.ggml.{full}_token_id"] for name, full in _NAMED_TOKENS.items()}
