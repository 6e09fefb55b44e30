"""What linear layers and convolutions cost: floating-point operations of training, and bytes of a stored weight."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

_INDEX_BYTES = 4


class Passes(NamedTuple):
    """A number for each of the three passes of a training step through a layer: forward, to its input, to its weight."""

    forward: float
    input_gradient: float
    weight_gradient: float


DENSE = Passes(1.0, 1.0, 1.0)


def mean_share(density: float, dense: float) -> float:
    """Share of the operations of a pass that is needed on average, if a share ``dense`` of the steps needs all of them."""
    return density + (1 - density) * dense


def layer_flops(model: nn.Module, example: Tensor) -> dict[str, int]:
    """Floating-point operations of one forward pass through each ``nn.Linear`` and ``nn.Conv2d``, by name.

    A multiplication and an addition count as two, biases do not count. The passes back to the input and to the weight
    cost as much each.

    Parameters
    ----------
    model : nn.Module
        It runs on tensors without content: nothing is computed, and nothing in it changes.
    example : Tensor
        Its input, a batch.
    """
    flops: dict[str, int] = {}

    def counting(name: str):
        def hook(layer: nn.Module, inputs: tuple, output: Tensor) -> None:
            weight: Tensor = layer.weight  # type: ignore[assignment]
            flops[name] = flops.get(name, 0) + 2 * output.numel() * weight[0].numel()

        return hook

    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]
    handles = [layer.register_forward_hook(counting(name)) for name, layer in layers]
    state = itertools.chain(model.named_parameters(), model.named_buffers())
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in state}
    try:
        with torch.no_grad():
            functional_call(model, shapes, (example.to("meta"),))
    finally:
        for handle in handles:
            handle.remove()
    return flops


def training_passes(flops: Mapping[str, float], shares: Mapping[str, Passes]) -> Passes:
    """Operations of each pass over all layers of ``flops``, of which those in ``shares`` need these shares only."""
    each = [Passes(*(flops[name] * share for share in shares.get(name, DENSE))) for name in flops]
    return Passes(*map(sum, zip(*each, strict=True)))


class StoredBytes(NamedTuple):
    """What a weight takes: its values, and where they belong."""

    values: int
    indices: int


def stored_bytes(
    shape: Sequence[int],
    active: int,
    *,
    layout: Literal["dense", "nm", "csr", "diagonal"],
    m: int = 1,
    itemsize: int = 4,
) -> StoredBytes:
    """Bytes of a weight of which ``active`` entries are not zero.

    Parameters
    ----------
    shape : sequence of int
        Outputs first.
    active : int
        What is stored, unless the layout is dense.
    layout : {"dense", "nm", "csr", "diagonal"}
        All entries; some of every ``m``, each with its place in ⌈log₂ m⌉ bits; compressed rows, with columns and starts of
        32 bits; whole diagonals, with offsets of 32 bits.
    m : int
        Length of the blocks of layout "nm".
    itemsize : int
        Bytes of a value.
    """
    rows, columns = shape[0], math.prod(shape[1:])
    if layout == "dense":
        return StoredBytes(rows * columns * itemsize, 0)
    indices = {
        "nm": math.ceil(active * (m - 1).bit_length() / 8),
        "csr": _INDEX_BYTES * (active + rows + 1),
        "diagonal": _INDEX_BYTES * (active // min(rows, columns)),
    }
    return StoredBytes(active * itemsize, indices[layout])
