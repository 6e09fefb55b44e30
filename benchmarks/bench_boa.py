"""GPTQ and BoA solved beside llm-compressor's GPTQ, the search for grids, and memory.

python benchmarks/bench_boa.py --peer-python PEER/bin/python

PEER is a virtual environment with llmcompressor (0.14), which pins other versions than heedful does; without it there are no
figures beside it.
"""

import argparse
import dataclasses
import subprocess
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from heedful._machine import peak_memory
from heedful.compress import QuantConfig, QuantizedWeight, find_grid, kron_quantize, quantize
from measure import ratio, record, side_by_side

HEAD = {1024: 64, 2048: 64, 4096: 128}  # width of a model -> width of its heads
ROUNDS = {1024: 9, 2048: 5, 4096: 3}
CONFIG = QuantConfig(bits=3, grid="minmax")


class Problem:
    """A projection of a transformer: heavy-tailed weights, and inputs with a mean and a spectrum that falls off."""

    def __init__(self, width: int, *, per_head: bool = False):
        generator = torch.Generator().manual_seed(0)

        def moments(*shape: int) -> torch.Tensor:
            x = torch.randn(*shape, 2 * shape[-1], generator=generator) + 0.5
            x *= torch.linspace(2, 0.2, shape[-1])[:, None]
            return x @ x.mT / x.shape[-1]

        heads = width // HEAD[width]
        self.weight = torch.randn(heads, HEAD[width], width, generator=generator) ** 3
        self.h_col = torch.stack([moments(width) for _ in range(heads)]) if per_head else moments(width)
        self.h_row = moments(heads, HEAD[width])
        self.grid = find_grid(self.weight, self.h_col, config=CONFIG)

    def gptq(self) -> QuantizedWeight:
        return kron_quantize(self.weight, self.h_col, config=CONFIG, grid=self.grid)

    def boa(self, rows_per_step: int = 1) -> QuantizedWeight:
        config = dataclasses.replace(CONFIG, rows_per_step=rows_per_step)
        return kron_quantize(self.weight, self.h_col, self.h_row, config=config, grid=self.grid)

    def search(self) -> None:
        find_grid(self.weight, self.h_col, config=dataclasses.replace(CONFIG, grid="hessian"))

    def loss(self, weight: torch.Tensor) -> float:
        delta = (weight - self.weight).flatten(0, 1).double()
        return float(((delta @ self.h_col.double()) * delta).sum())


class Peer:
    """llm-compressor's solver, on one problem, in a process of its own."""

    def __init__(self, python: Path, problem: Problem, folder: str):
        self._file = Path(folder) / "problem.safetensors"
        given = {"weight": problem.weight, "scale": problem.grid.scale, "zero": problem.grid.zero}
        given = {name: tensor.flatten(0, 1) for name, tensor in given.items()}
        save_file(given | {"hessian": problem.h_col, "bits": torch.tensor(CONFIG.bits)}, self._file)
        command = [str(python), "-W", "ignore", str(Path(__file__).with_name("gptq_of_llmcompressor.py"))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._ask(str(self._file), "ready")

    def solve(self) -> None:
        self._ask("solve", "solved")

    def quantized(self) -> torch.Tensor:
        """What the last solve came to; the process ends."""
        self._process.communicate()
        return load_file(f"{self._file}.quantized")["quantized"]

    def _ask(self, line: str, answer: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        for said in self._process.stdout:  # which it logs to as well
            if said.strip() == answer:
                return
        raise RuntimeError(f"llm-compressor's process ended before it said {answer!r}.")


def agreement(problem: Problem, theirs: torch.Tensor) -> dict[str, float]:
    """Both solve in float32, where a rounding error may move a weight to the next code, and through it those that follow."""
    ours = problem.gptq()
    same = (theirs.view(ours.codes.shape) - ours.dequantize()).abs() < problem.grid.scale / 2
    share = float(same.double().mean())
    losses = problem.loss(ours.dequantize()) / problem.loss(theirs.view(ours.codes.shape))
    assert share > 0.99, share
    assert abs(losses - 1) < 1e-3, losses
    return {"share of equal codes": share, "loss to theirs": losses}


def measure(width: int, peer_python: Path | None) -> dict:
    problem, name = Problem(width), f"{width} x {width}, heads of {HEAD[width]}"
    contestants = {
        "gptq": problem.gptq,
        "boa": problem.boa,
        "boa_16": lambda: problem.boa(16),
    }
    if searched := width < 4096:  # it takes as long as ten solves
        contestants["grid"] = problem.search
    with tempfile.TemporaryDirectory() as folder:
        if peer_python is not None:
            peer = Peer(peer_python, problem, folder)
            contestants["llmcompressor"] = peer.solve
        seconds = side_by_side(contestants, rounds=ROUNDS[width], warmup=1)
        figures = {
            "boa to gptq": ratio(seconds, "boa", "gptq"),
            "boa with 16 rows a step to gptq": ratio(seconds, "boa_16", "gptq"),
            "boa to boa with 16 rows a step": ratio(seconds, "boa", "boa_16"),
        }
        if searched:
            figures["search for the grid to gptq"] = ratio(seconds, "grid", "gptq")
        if peer_python is not None:
            figures["gptq to llm-compressor's gptq"] = ratio(seconds, "gptq", "llmcompressor")
            figures["gptq and llm-compressor's gptq"] = agreement(problem, peer.quantized())
    return {f"{name}: {key}": figure for key, figure in figures.items()}


def measure_values(width: int) -> dict:
    """Values have a column factor for each head, to be decomposed each."""
    problem, shared = Problem(width, per_head=True), Problem(width)
    contestants = {"gptq": shared.gptq, "values": problem.boa, "values_16": lambda: problem.boa(16)}
    seconds = side_by_side(contestants, rounds=ROUNDS[width] // 2, warmup=1)
    name = f"{width} x {width}, heads of {HEAD[width]}: boa of values"
    return {
        f"{name} to gptq": ratio(seconds, "values", "gptq"),
        f"{name} with 16 rows a step to gptq": ratio(seconds, "values_16", "gptq"),
    }


def measure_memory(hidden: int = 1024) -> dict:
    """Two blocks of a Llama in float32, beside the factors of the values of one block: heads · hidden² numbers."""
    sizes = {"intermediate_size": 2816, "num_hidden_layers": 2, "vocab_size": 256}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        small = LlamaForCausalLM(LlamaConfig(hidden_size=64, num_attention_heads=1, **sizes)).eval()
        model = LlamaForCausalLM(LlamaConfig(hidden_size=hidden, num_attention_heads=hidden // 64, **sizes)).eval()
    tokens = torch.randint(256, (8, 512), generator=torch.Generator().manual_seed(0))
    quantize(small, tokens, CONFIG)  # what libraries need once
    factors = hidden // 64 * hidden**2 * 4 / 2**20
    block = sum(p.numel() for p in model.model.layers[0].parameters()) * 4 / 2**20
    with peak_memory() as used:
        quantize(model, tokens, CONFIG)
    return {
        f"Llama of width {hidden}, two blocks: peak memory of quantize beside the model": {
            "MiB": used.mib,
            "one block and its value factors": used.mib / (block + factors),
        }
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", type=Path, help="python of an environment that has llmcompressor")
    parser.add_argument("--widths", type=int, nargs="+", choices=HEAD, default=list(HEAD))
    options = parser.parse_args()
    if options.peer_python is None:
        print("No --peer-python: nothing is measured beside llm-compressor.")
    torch.set_num_threads(1)
    figures = measure_memory()
    for width in options.widths:
        figures |= measure(width, options.peer_python)
    record("boa", figures | measure_values(min(options.widths)))
