"""What the drivers of N:M training share: their layers, how weights begin, and the rules of SR-STE."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from torch.optim import Optimizer

from heedful._masks import nm_mask, require_pattern
from heedful._validation import require_choice, require_number
from heedful.compress._sparsity import MaskedTraining, own_weight, select_layers
from heedful.errors import ParameterError, UnsupportedModelError

KINDS = (nn.Linear, nn.Conv2d)
DECAY = 2e-4  # λ_w of SR-STE

Rescale = Literal[True, False, "auto"]


class NMTraining(MaskedTraining):
    """Base of the drivers whose layers keep n of every m weights, at first the largest."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        n: int,
        m: int,
        *,
        total_steps: int,
        interval: int | None = None,
        start: float = 0.0,
        end: float = 1.0,
        layers: Mapping[str, nn.Module],
        rescale_init: Rescale,
        generator: torch.Generator | None = None,
    ):
        masks = {name: nm_mask(own_weight(layer), n, m, dim=1) for name, layer in layers.items()}
        self.n, self.m = n, m
        self._factors = rescale_factors(layers, masks, rescale_init)
        self._adaptations = 0
        self._swaps: int | Tensor = 0  # a tensor where a step must not wait for the device
        super().__init__(
            model,
            optimizer,
            total_steps=total_steps,
            layers=layers,
            masks=masks,
            interval=interval,
            start=start,
            end=end,
            generator=generator,
        )
        rescale_(self.weights(), self._factors)

    def state_dict(self) -> dict[str, Any]:
        counts = {"adaptations": self._adaptations, "swaps": int(self._swaps)}
        return {**super().state_dict(), **counts, "rescaled": self._factors}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._adaptations, self._swaps = state_dict["adaptations"], state_dict["swaps"]
        self._factors = dict(state_dict["rescaled"])

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "pattern": f"{self.n}:{self.m}"}

    def _add_decay(self, decay: float) -> None:
        """SR-STE: add ``decay`` · (1 − mask) ⊙ W to gradients, so that what is pruned fades and masks settle."""
        scale, weights = self._grad_scale(), self.weights()
        for name, gradient in self._gradients().items():
            pull = weights[name] * ~self._masks[name].mask * decay
            gradient.add_(pull if scale is None else pull * scale)

    def _keep_largest(self) -> None:
        """SR-STE: keep the n largest weights of every block."""
        for name, weight in self.weights().items():
            self._masks[name].mask.copy_(nm_mask(weight, self.n, self.m, dim=1))


def parse_pattern(pattern: str) -> tuple[int, int]:
    """The n and m of a text such as "2:4"."""
    n, colon, m = pattern.partition(":")
    if not (colon and n.isdecimal() and m.isdecimal()):
        raise ParameterError(f'a pattern reads n:m, such as "2:4": n of every m weights are kept; got {pattern!r}.')
    require_pattern(int(n), int(m))
    require_number(int(n), "n", low=1, integer=True)
    return int(n), int(m)


def nm_layers(
    model: nn.Module, n: int, m: int, *, include: Sequence[str] | None, exclude: Sequence[str]
) -> dict[str, nn.Module]:
    """The linear and convolutional layers to make n:m sparse along their inputs."""
    require_pattern(n, m)
    require_number(n, "n", low=1, integer=True)
    layers = select_layers(model, KINDS, include=include, exclude=exclude)
    inputs = {name: own_weight(layer).shape[1] for name, layer in layers.items()}
    uneven = [f"{name!r} ({width})" for name, width in inputs.items() if width % m]
    if uneven:
        raise UnsupportedModelError(
            f"{n}:{m} sparsity needs layers whose number of inputs is a multiple of {m}; these are not: "
            f"{', '.join(uneven)}. Exclude them, or include others only."
        )
    return layers


def rescale_factors(
    layers: Mapping[str, nn.Module], masks: Mapping[str, Bool[Tensor, "..."]], rescale_init: Rescale
) -> dict[str, float]:
    """What to multiply the weights by, so that masked layers put out about what dense ones do.

    True: √(1 / density), right for masks that are independent of the weights. "auto": ‖W‖ / ‖W ⊙ mask‖, right for any.
    """
    require_choice(rescale_init, "rescale_init", (True, False, "auto"))
    if rescale_init is False:
        return dict.fromkeys(layers, 1.0)
    if rescale_init is True:
        return {name: math.sqrt(mask.numel() / max(int(mask.sum()), 1)) for name, mask in masks.items()}
    weights = {name: own_weight(layer).detach() for name, layer in layers.items()}
    kept = {name: float((weight * masks[name]).norm()) for name, weight in weights.items()}
    return {name: float(weight.norm()) / kept[name] if kept[name] else 1.0 for name, weight in weights.items()}


@torch.no_grad()
def rescale_(weights: Mapping[str, Tensor], factors: Mapping[str, float]) -> None:
    for name, weight in weights.items():
        weight.mul_(factors[name])
