"""Merging checkpoints beside mergekit and beside copying the same files, and how much memory it takes.

python benchmarks/bench_cabs.py
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from safetensors.torch import load_file, save_file

from heedful._machine import peak_memory
from heedful.merge import merge_checkpoints
from measure import ratio, record, side_by_side

SIZES = {"0.1B": (768, 2048, 12, 32_000), "1B": (2048, 5632, 20, 32_000)}  # hidden, intermediate, layers, vocabulary


MODELS = ("base", "a", "b")
SHARD = 24  # tensors in a file


def shapes(hidden: int, intermediate: int, layers: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """A Llama's tensors."""
    layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, hidden),
        "self_attn.v_proj": (hidden, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    inside = {f"model.layers.{i}.{name}.weight": shape for i in range(layers) for name, shape in layer.items()}
    outside = {"model.embed_tokens.weight": (vocabulary, hidden), "lm_head.weight": (vocabulary, hidden)}
    return inside | outside | {"model.norm.weight": (hidden,)}


def write_models(folder: Path, size: str) -> None:
    """A base and two models that were "fine-tuned" from it, in bfloat16 and several files."""
    hidden, intermediate, layers, vocabulary = SIZES[size]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "vocab_size": vocabulary,
        "torch_dtype": "bfloat16",
    }
    generator = torch.Generator().manual_seed(0)
    names = list(shapes(*SIZES[size]).items())
    homes = {}
    for model in MODELS:
        (folder / model).mkdir(parents=True)
    for start in range(0, len(names), SHARD):
        file = f"model-{start // SHARD + 1:05d}-of-{-(-len(names) // SHARD):05d}.safetensors"
        states: dict[str, dict[str, torch.Tensor]] = {model: {} for model in MODELS}
        for name, shape in names[start : start + SHARD]:
            base = 0.02 * torch.randn(shape, generator=generator)
            homes[name] = file
            for model in MODELS:
                step = 0.0 if model == "base" else 2e-3
                states[model][name] = base.add(torch.randn(shape, generator=generator), alpha=step).bfloat16()
        for model, state in states.items():
            save_file(state, folder / model / file, metadata={"format": "pt"})
    for model in MODELS:
        (folder / model / "config.json").write_text(json.dumps(config))
        (folder / model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))


def recipe(folder: Path, method: str, **more: str) -> dict:
    models = [{"model": str(folder / name), "parameters": {"weight": 0.5}} for name in MODELS[1:]]
    return {"models": models, "merge_method": method, "base_model": str(folder / "base"), **more}


def merge_with_heedful(folder: Path, method: str, **more: str) -> None:
    merge_checkpoints(recipe(folder, method, **more), folder / "heedful", overwrite=True, fresh=True)


def merge_with_mergekit(folder: Path, method: str, **more: str) -> None:
    """mergekit flushes nothing to the disk, and we do: its files are flushed here, so that both have done the same."""
    options = MergeOptions(quiet=True, copy_tokenizer=False)
    run_merge(MergeConfiguration.model_validate(recipe(folder, method, **more)), str(folder / "mergekit"), options)
    for file in (folder / "mergekit").glob("*.safetensors"):
        flush(file)


def copy_models(folder: Path) -> None:
    """What a merge reads, copied: the yardstick of how fast files can be read and written here."""
    for model in MODELS:
        shutil.copytree(folder / model, folder / "copy" / model, dirs_exist_ok=True)
        for file in (folder / "copy" / model).glob("*.safetensors"):
            flush(file)


def flush(file: Path) -> None:
    with file.open("rb+") as opened:
        os.fsync(opened.fileno())


def assert_equal_results(folder: Path, size: str) -> None:
    """In float32, rounded once: the two add in different orders, which seldom changes the bfloat16 that comes out."""
    write_models(folder, size)
    precise = {"dtype": "float32", "out_dtype": "bfloat16"}
    merge_with_heedful(folder, "task_arithmetic", **precise)
    merge_with_mergekit(folder, "task_arithmetic", **precise)
    ours, theirs = (
        {name: x for file in (folder / made).glob("*.safetensors") for name, x in load_file(file).items()}
        for made in ("heedful", "mergekit")
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=2**-7, atol=1e-8)
    shutil.rmtree(folder)


def peak(folder: Path, method: str) -> dict[str, float]:
    """Memory of a merge, also in float32 copies of the largest tensor."""
    largest = max(torch.Size(shape).numel() for shape in shapes(*SIZES[folder.name]).values()) * 4 / 2**20
    with peak_memory() as used:
        merge_with_heedful(folder, method)
    return {"MiB": used.mib, "largest tensors": used.mib / largest}


def measure(folder: Path, size: str, *, rounds: int, warmup: int) -> dict:
    write_models(folder, size)
    contestants = {
        "heedful": lambda: merge_with_heedful(folder, "task_arithmetic"),
        "mergekit": lambda: merge_with_mergekit(folder, "task_arithmetic"),
        "cabs": lambda: merge_with_heedful(folder, "cabs"),
        "copying": lambda: copy_models(folder),
    }
    seconds = side_by_side(contestants, rounds=rounds, warmup=warmup)
    figures = {
        "task_arithmetic to mergekit's": ratio(seconds, "heedful", "mergekit"),
        "task_arithmetic to copying the three models": ratio(seconds, "heedful", "copying"),
        "cabs to mergekit's task_arithmetic": ratio(seconds, "cabs", "mergekit"),
        "cabs to copying the three models": ratio(seconds, "cabs", "copying"),
        "peak memory of cabs": peak(folder, "cabs"),
        "peak memory of ties": peak(folder, "ties"),
    }
    shutil.rmtree(folder)
    return {f"{size} parameters: {name}": figure for name, figure in figures.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        assert_equal_results(Path(folder) / "0.1B", "0.1B")
        for size, rounds, warmup in (("0.1B", 7, 1), ("1B", 3, 0)):
            figures |= measure(Path(folder) / size, size, rounds=rounds, warmup=warmup)
    record("cabs", figures)
