"""GPTQ as llm-compressor solves it, for bench_boa.py: run by the interpreter of an environment that has it.

Reads the path of a .safetensors file with weight, hessian, scale, zero and bits from standard input. For every line that
follows it solves the problem once, on a copy, since it overwrites what it is given. At the end of the input it writes the
quantized weight beside the file.
"""

import sys

import torch
from compressed_tensors.quantization import QuantizationArgs
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
from safetensors.torch import load_file, save_file

if __name__ == "__main__":
    torch.set_num_threads(1)
    path = sys.stdin.readline().strip()
    given = load_file(path)
    bits = int(given["bits"])
    settings = QuantizationArgs(num_bits=bits, type="int", symmetric=False, strategy="channel")
    zero = given["zero"].float() - 2 ** (bits - 1)  # its codes are signed, ours count from 0
    print("ready", flush=True)
    for _ in sys.stdin:
        weight, hessian = given["weight"].clone(), given["hessian"].clone()
        quantized, *_ = quantize_weight(weight[None], hessian[None], given["scale"][None], zero[None], None, settings)
        print("solved", flush=True)
    save_file({"quantized": quantized[0].contiguous()}, f"{path}.quantized")
