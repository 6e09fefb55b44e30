"""Dynamic sparse training blind to structure, or aware of it by heuristics: RigL, SET, and RigL of whole diagonals.

Every T steps each layer drops a share f of its active weights, those of smallest magnitude, and grows as many elsewhere:

    f(t) = ½ f₀ (1 + cos(π t / t_end)),    RigL: where |∂L/∂W| is largest,    SET: at random.

RigL: Evci, Gale, Menick, Castro, Elsen: Rigging the Lottery: Making All Tickets Winners, ICML 2020.
SET: Mocanu et al.: Scalable Training of Artificial Neural Networks with Adaptive Sparse Connectivity, Nature Communications
2018.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.optim import Optimizer

from heedful._masks import top_mask
from heedful._results import Report
from heedful._validation import require_choice, require_number
from heedful.compress._patterns import diagonal_mask, random_diagonals, random_mask, require_sparsity
from heedful.compress._sparsity import MaskedTraining, anneal, erk_densities, select_layers
from heedful.compress.dynadiag.pattern import indices

__all__ = ["SET", "DiagonalRigL", "RigL"]


def drop_and_grow(
    magnitude: Float[Tensor, "..."], growth: Float[Tensor, "..."], active: Bool[Tensor, "..."], n: int
) -> Bool[Tensor, "..."]:
    """What is active when the ``n`` of smallest ``magnitude`` are dropped, and the ``n`` of largest ``growth`` grown.

    What was just dropped may be grown again: then it stays as it is. As many are active as before, 0 <= n <= that; of
    equal ones the lowest index is kept, or grown.
    """
    kept = active.clone()
    kept[active] = top_mask(magnitude[active], int(active.sum()) - n)
    chosen = kept.clone()
    chosen[~kept] = top_mask(growth[~kept], n)
    return chosen


@dataclasses.dataclass(frozen=True)
class DropAndGrowStats(Report):
    """What a driver has done so far.

    Parameters
    ----------
    adaptations : int
        How often masks were adapted.
    exchanged_fraction : float
        Share of the active weights that an adaptation replaced, on average over adaptations.
    density : float
        Share of the weights of the sparse layers that is active.
    """

    adaptations: int
    exchanged_fraction: float
    density: float


class RigL(MaskedTraining):
    """Train with unstructured masks that grow where the gradient is largest.

    Masks begin at random. A grown weight begins at zero, without momentum, and takes its first step at once.

    Parameters
    ----------
    model : nn.Module
        The model; its linear layers and convolutions become sparse, in place.
    optimizer : Optimizer
        It owns their weights. Its hooks do the work: loop as ever, and call ``step`` after ``optimizer.step()``.
    sparsity : float
        Share of zeros, in [0, 1).
    total_steps : int
        Optimizer steps of the whole training.
    distribution : {"uniform", "erk"}
        The same sparsity in every layer, or Erdős-Rényi-kernel: denser where a layer is small.
    interval : int
        Steps from one adaptation to the next, >= 1.
    drop_fraction : float
        f₀, the share of the active weights that is dropped at first, in [0, 1].
    end : float
        When adaptations end and f is zero, as a fraction of ``total_steps``.
    rescale_init : bool
        Divide the weights by the square root of their density, so that outputs keep the variance of the dense start.
        False for weights that are trained already.
    include, exclude : sequence of str
        Names of layers, globs, ``"re:…"``, or ``"first"`` and ``"last"``.
    generator : torch.Generator, optional
        Draws the masks, on the CPU. If None, torch's default one does.

    Raises
    ------
    ParameterError
        If a setting is out of range, or the optimizer does not own a weight.
    UnsupportedModelError
        If no layer is left, weights are shared, or a layer is sparse already.

    Notes
    -----
    All passes are sparse, but for the weight gradient of every ``interval``-th step.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> driver = RigL(model, optimizer, sparsity=0.9, total_steps=8, interval=2)
    >>> for _ in range(8):
    ...     optimizer.zero_grad()
    ...     model(torch.randn(4, 8)).square().mean().backward()
    ...     optimizer.step()
    ...     driver.step()
    >>> int(driver.finalize()[2].weight.count_nonzero()) <= 40
    True
    """

    _kinds: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv2d)

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        sparsity: float = 0.9,
        total_steps: int,
        distribution: Literal["uniform", "erk"] = "uniform",
        interval: int = 100,
        drop_fraction: float = 0.3,
        end: float = 0.75,
        rescale_init: bool = True,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] = ("first", "last"),
        generator: torch.Generator | None = None,
    ):
        require_sparsity(sparsity)
        require_choice(distribution, "distribution", ("uniform", "erk"))
        require_number(drop_fraction, "drop_fraction", low=0, high=1)
        self.sparsity, self.distribution, self.drop_fraction = sparsity, distribution, drop_fraction
        self._adaptations, self._exchanged = 0, 0.0
        layers = select_layers(model, self._kinds, include=include, exclude=exclude)
        dense: dict[str, Tensor] = {name: layer.weight for name, layer in layers.items()}  # type: ignore[misc]
        shapes = {name: tuple(weight.shape) for name, weight in dense.items()}
        uniform = dict.fromkeys(shapes, 1 - sparsity)
        densities = uniform if distribution == "uniform" else erk_densities(shapes, sparsity)
        masks = {
            name: self._first_mask(shape, densities[name], generator).to(dense[name].device)
            for name, shape in shapes.items()
        }
        super().__init__(
            model,
            optimizer,
            total_steps=total_steps,
            layers=layers,
            masks=masks,
            interval=interval,
            end=end,
            generator=generator,
        )
        if rescale_init:
            with torch.no_grad():
                for name, weight in self.weights().items():
                    weight.mul_(masks[name].double().mean() ** -0.5)

    def stats(self) -> DropAndGrowStats:
        """What has happened so far."""
        masks = self.masks().values()
        active, total = sum(int(mask.sum()) for mask in masks), sum(mask.numel() for mask in masks)
        return DropAndGrowStats(self._adaptations, self._exchanged / max(1, self._adaptations), active / total)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"adaptations": self._adaptations, "exchanged": self._exchanged}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._adaptations, self._exchanged = state_dict["adaptations"], state_dict["exchanged"]

    def _identity(self) -> dict[str, Any]:
        return super()._identity() | {"sparsity": self.sparsity, "distribution": self.distribution}

    def _adapt(self, gradients: dict[str, Tensor]) -> None:
        share = anneal(self.steps_taken / (self.end * self.total_steps), self.drop_fraction, 0.0)
        weights, masks = self.weights(), self.masks()
        exchanged = active = 0
        for name, gradient in gradients.items():
            old = masks[name]
            new = self._exchange(weights[name].detach(), gradient, old, share)
            exchanged += int((new & ~old).sum())
            active += int(old.sum())
            self._activate(name, new)
        self._adaptations += 1
        self._exchanged += exchanged / active

    def _first_mask(self, shape: Sequence[int], density: float, generator: torch.Generator | None) -> Tensor:
        return random_mask(shape, density, generator=generator)

    def _exchange(self, weight: Tensor, gradient: Tensor, mask: Tensor, share: float) -> Tensor:
        """The new mask, when ``share`` of what is active is dropped."""
        return drop_and_grow(weight, self._growth(gradient), mask, round(share * int(mask.sum())))

    def _growth(self, gradient: Tensor) -> Tensor:
        """What is grown where it is largest."""
        return gradient


class SET(RigL):
    """Train with unstructured masks that grow at random: ``RigL``, and never a dense gradient.

    Parameters and schedule are those of ``RigL``, so that the two differ in where they grow alone; the paper drops 30 % of
    the weights after every epoch, to the end (``interval`` = steps per epoch).
    """

    def _growth(self, gradient: Tensor) -> Tensor:
        return torch.rand(gradient.shape, generator=self.generator).to(gradient.device)


class DiagonalRigL(RigL):
    """Train linear layers with whole wrapped diagonals that are dropped and grown as RigL does single weights.

    The diagonals with the smallest mean |W| make way for those with the largest mean |∂L/∂W|: the heuristic beside
    ``DynaDiag``, which learns what to select. Parameters are those of ``RigL``; convolutions stay dense. Each layer keeps
    ⌈(1 − sparsity) · max(out, in)⌉ diagonals, as many as ``DynaDiag``.
    """

    _kinds = (nn.Linear,)

    def _first_mask(self, shape: Sequence[int], density: float, generator: torch.Generator | None) -> Tensor:
        return random_diagonals(shape, density, generator=generator)

    def _exchange(self, weight: Tensor, gradient: Tensor, mask: Tensor, share: float) -> Tensor:
        out, inputs = mask.shape
        offsets = torch.arange(max(out, inputs), device=mask.device)
        rows, cols = indices(out, inputs, offsets, tall=out >= inputs)
        active = mask[rows[:, 0], cols[:, 0]]
        magnitude, growth = (x.abs()[rows, cols].mean(dim=1) for x in (weight, gradient))
        chosen = drop_and_grow(magnitude, growth, active, round(share * int(active.sum())))
        return diagonal_mask(mask.shape, offsets[chosen])
