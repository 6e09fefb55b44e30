"""A tiny Llama and tokenizer, written as GGUF, come back as what they were."""

import sys

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from heedful.data._gguf import convert_llama
from heedful.errors import FileFormatError, MissingExtraError

TEXTS = ["In 1995 the sea was blue", "  naïve 日本\n\n\tx**2", "<|end|>the<|pad|>"]


def tokenizer() -> Tokenizer:
    """One byte a token, "th" and "the" merged, two tokens of control."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate(["<|end|>", "<|pad|>", *letters, "th", "the"])}
    made = Tokenizer(models.BPE(vocab, [("t", "h"), ("th", "e")]))
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>", "<|pad|>"])
    return made


def llama(vocab_size: int) -> LlamaForCausalLM:
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=vocab_size, num_hidden_layers=2, tie_word_embeddings=True, **shape)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


def neighbours(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row i of a head's first half and row i of its second become rows 2i and 2i + 1: GGUF's order."""
    size = len(weight) // heads
    order = [head * size + half * size // 2 + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    return weight[order]


def write_gguf(path, model: LlamaForCausalLM, made: Tokenizer, *, pre: str = "smollm", quantized: bool = False) -> None:
    config, writer = model.config, GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    vocab = sorted(made.get_vocab(), key=made.get_vocab().get)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocab)
    writer.add_token_types([3, 3] + [1] * (len(vocab) - 2))
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(1)
    writer.add_chat_template("{{ messages[0].content }}")
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
    }
    weights = {"token_embd": model.model.embed_tokens.weight, "output_norm": model.model.norm.weight}
    for number, layer in enumerate(model.model.layers):
        for name, weight in layer.named_parameters():
            weights[f"blk.{number}.{names[name.split('.')[-2]]}"] = weight
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, weight in weights.items():
        values = weight.detach().numpy()
        if (part := name.rpartition(".")[2]) in heads:
            values = neighbours(values, heads[part])
        kind = GGMLQuantizationType.Q4_1
        if quantized and values.ndim == 2:
            writer.add_tensor(f"{name}.weight", quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_model_gives_the_same_logits(tmp_path):
    model = llama(len(tokenizer().get_vocab()))
    write_gguf(tmp_path / "tiny.gguf", model, tokenizer())
    convert_llama(tmp_path / "tiny.gguf", tmp_path / "model")
    back, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", local_files_only=True, output_loading_info=True
    )
    assert not any(loading.values())  # no weight is missing, unexpected or of another shape
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(back.eval()(ids).logits, model(ids).logits)  # the same weights, the same sums
    assert (back.config.eos_token_id, back.config.pad_token_id) == (0, 1)
    assert back.config.rms_norm_eps == model.config.rms_norm_eps  # which GGUF rounds to float32


def test_the_tokenizer_splits_alike_and_knows_its_chat_template(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", llama(len(tokenizer().get_vocab())), tokenizer())
    convert_llama(tmp_path / "tiny.gguf", tmp_path / "model")
    back = AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)
    for text in TEXTS:
        ids = back(text).input_ids
        assert ids == tokenizer().encode(text).ids
        assert back.decode(ids) == text
    assert back(TEXTS[2]).input_ids[0] == back.eos_token_id
    assert back.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_quantized_weights_are_those_that_gguf_itself_restores(tmp_path):
    model = llama(len(tokenizer().get_vocab()))
    write_gguf(tmp_path / "tiny.gguf", model, tokenizer(), quantized=True)
    convert_llama(tmp_path / "tiny.gguf", tmp_path / "model")
    weight = model.model.layers[1].mlp.up_proj.weight.detach().numpy()
    kind = GGMLQuantizationType.Q4_1
    restored = load_file(tmp_path / "model" / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    np.testing.assert_array_equal(restored, dequantize(quantize(weight, kind), kind))
    assert not np.array_equal(restored, weight)


def test_another_tokenizer_is_refused_before_anything_is_written(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", llama(len(tokenizer().get_vocab())), tokenizer(), pre="qwen2")
    with pytest.raises(FileFormatError) as error:
        convert_llama(tmp_path / "tiny.gguf", tmp_path / "model")
    assert str(error.value) == (
        "tiny.gguf holds a model and tokenizer of kind ('llama', 'qwen2'); needed is ('llama', 'smollm')."
    )
    assert not (tmp_path / "model").exists()


def test_without_gguf_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError) as error:
        convert_llama(tmp_path / "tiny.gguf", tmp_path / "model")
    assert str(error.value) == 'Reading a GGUF file needs: pip install "heedful[llm]".'
