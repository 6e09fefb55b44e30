"""Sparse training that is blind to blocks: SR-STE, N:M RigL, Bi-Mask, and masks that never change.

SR-STE: Zhou et al.: Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch, ICLR 2021.
RigL: Evci, Gale, Menick, Castro, Elsen: Rigging the Lottery: Making All Tickets Winners, ICML 2020.
Bi-Mask: Zhang et al.: Bi-directional Masks for Efficient N:M Sparse Training, ICML 2023.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.optim import Optimizer

from heedful._masks import nm_mask, top_mask
from heedful._results import Report
from heedful._validation import require_choice, require_number
from heedful.compress._patterns import (
    active_weights,
    diagonal_mask,
    random_diagonals,
    random_mask,
    require_sparsity,
)
from heedful.compress._sparsity import MaskedTraining, anneal, own_weight, select_layers
from heedful.compress.bame._nm import (
    DECAY,
    KINDS,
    NMTraining,
    Rescale,
    nm_layers,
    parse_pattern,
    rescale_,
    rescale_factors,
)
from heedful.compress.bame.swaps import SwapScores, best_pairs, best_share, swapped_indices, to_blocks
from heedful.compress.dynadiag.pattern import active_diagonals, diagonal_indices
from heedful.errors import ParameterError

__all__ = ["SRSTE", "BiMask", "MaskStats", "NMRigL", "StaticMask"]


@dataclasses.dataclass(frozen=True)
class MaskStats(Report):
    """What a driver has done so far.

    Parameters
    ----------
    density : float
        Share of the weights of the sparse layers that is active.
    adaptations, swaps : int
        How often masks were looked at, and how many weights changed places in all.
    rescaled : dict of str to float
        What the initial weights of each layer were multiplied by.
    """

    density: float
    adaptations: int
    swaps: int
    rescaled: dict[str, float]


class SRSTE(NMTraining):
    """SR-STE: before every step keep the n largest weights of each block, and give all of them the gradient.

    The gradient goes straight through to pruned weights, which live on unseen, decayed by ``decay``: λ_w (1 − mask) ⊙ W is
    added to it. The backward pass to the weights is dense throughout. The decay is added after any clipping of gradients.

    Parameters
    ----------
    model, optimizer, n, m, total_steps, include, exclude
        As in ``BAME``.
    decay : float
        λ_w, >= 0.
    rescale_init : bool or "auto"
        As in ``BAME``.

    References
    ----------
    Zhou et al.: Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch, ICLR 2021.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        n: int = 2,
        m: int = 4,
        *,
        total_steps: int,
        decay: float = DECAY,
        rescale_init: Rescale = False,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] = ("first", "last"),
    ):
        require_number(decay, "decay", low=0)
        self.decay = decay
        super().__init__(
            model,
            optimizer,
            n,
            m,
            total_steps=total_steps,
            layers=nm_layers(model, n, m, include=include, exclude=exclude),
            rescale_init=rescale_init,
        )

    def stats(self) -> MaskStats:
        return _stats(self, self.steps_taken)

    def _needs_dense_gradient(self) -> bool:
        return True

    def _before_step(self) -> None:
        self._add_decay(self.decay)

    def _after_step(self) -> None:
        before = {name: mask.clone() for name, mask in self.masks().items()}
        self._keep_largest()
        self._swaps += sum((mask & ~before[name]).sum() for name, mask in self.masks().items())


class NMRigL(NMTraining):
    """RigL within blocks: now and then prune the smallest active weight of a block and grow where |G| is largest.

    Whether that lowers the loss is not asked. At step t a share f(t) of the active weights is replaced, at most one in a
    block, the smallest of the layer first; f falls from ``drop_fraction`` to 0 at ``end`` by half a cosine.

    Parameters
    ----------
    model, optimizer, n, m, total_steps, interval, start, end, rescale_init, include, exclude
        As in ``BAME``.
    drop_fraction : float
        f at the start, in [0, 1].

    References
    ----------
    Evci, Gale, Menick, Castro, Elsen: Rigging the Lottery: Making All Tickets Winners, ICML 2020.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        n: int = 2,
        m: int = 4,
        *,
        total_steps: int,
        interval: int = 100,
        start: float = 0.0,
        end: float = 0.75,
        drop_fraction: float = 0.3,
        rescale_init: Rescale = True,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] = ("first", "last"),
    ):
        require_number(drop_fraction, "drop_fraction", low=0, high=1)
        self.drop_fraction = drop_fraction
        super().__init__(
            model,
            optimizer,
            n,
            m,
            total_steps=total_steps,
            interval=interval,
            start=start,
            end=end,
            layers=nm_layers(model, n, m, include=include, exclude=exclude),
            rescale_init=rescale_init,
        )

    def stats(self) -> MaskStats:
        return _stats(self, self._adaptations)

    def _adapt(self, gradients: dict[str, Tensor]) -> None:
        self._adaptations += 1
        if self.n == self.m:
            return
        weights = self.weights()
        share = self.n * anneal(self.steps_taken / (self.end * self.total_steps), self.drop_fraction, 0.0)
        for name, gradient in gradients.items():
            mask = self._masks[name].mask
            sizes, slopes, active = (to_blocks(x, self.m) for x in (weights[name].abs(), gradient.abs(), mask))
            prune, grow, size, _ = best_pairs(sizes.clone(), slopes.clone(), active)
            blocks = best_share(size, torch.ones_like(size, dtype=torch.bool), min(share, 1.0)).nonzero().squeeze(1)
            for where in swapped_indices(mask.shape, SwapScores(prune, grow, size), blocks, self.m):
                self._flip(name, where)
            self._swaps += len(blocks)


class BiMask(SRSTE):
    """Bi-Mask: SR-STE whose pass back to the input is n:m sparse along the other dimension too.

    That pass uses W ⊙ mask ⊙ backward mask; the backward mask keeps the n largest of every m outputs (rows of W) in an
    order of the rows. Every ``interval`` steps that order is chosen anew: of ``n_permutations`` random ones, the one in
    which most active weights survive.

    Parameters
    ----------
    model, optimizer, n, m, total_steps, decay, rescale_init, include, exclude
        As in ``SRSTE``.
    interval : int
        Steps from one choice to the next, >= 1.
    n_permutations : int
        Orders to choose from, >= 1.
    generator : torch.Generator, optional
        They are drawn from this CPU generator. If None, from torch's default one.

    Notes
    -----
    The two weights of a layer are applied one after the other, which costs one forward pass of the layer more than
    the method needs.

    References
    ----------
    Zhang et al.: Bi-directional Masks for Efficient N:M Sparse Training, ICML 2023.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        n: int = 2,
        m: int = 4,
        *,
        total_steps: int,
        interval: int = 100,
        n_permutations: int = 100,
        decay: float = DECAY,
        rescale_init: Rescale = False,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] = ("first", "last"),
        generator: torch.Generator | None = None,
    ):
        require_number(interval, "interval", low=1, integer=True)
        require_number(n_permutations, "n_permutations", low=1, integer=True)
        self.permute_every, self.n_permutations = interval, n_permutations
        super().__init__(
            model,
            optimizer,
            n,
            m,
            total_steps=total_steps,
            decay=decay,
            rescale_init=rescale_init,
            include=include,
            exclude=exclude,
        )
        self.generator = generator
        self._permute()

    def _attach(self, name: str, layer: nn.Module) -> None:
        # Before it is parametrized, which makes a subclass of its class.
        layer.__class__ = type(f"TwoWay{type(layer).__name__}", (_TwoWay, type(layer)), {})
        super()._attach(name, layer)
        mask = self._masks[name]
        mask.register_buffer("backward_mask", mask.mask.clone())
        mask.register_buffer("rows", torch.arange(len(mask.mask), device=mask.mask.device))

    def _detach(self, layer: nn.Module) -> None:
        super()._detach(layer)
        layer.__class__ = type(layer).__bases__[1]

    def _begin_step(self) -> None:
        super()._begin_step()
        if self.steps_taken and self.steps_taken % self.permute_every == 0:
            self._permute()

    def _after_step(self) -> None:
        super()._after_step()
        self._mask_backward()

    def _permute(self) -> None:
        """Choose the order of the rows of every layer."""
        for module in self._masks.values():
            mask = module.mask
            orders = [torch.randperm(len(mask), generator=self.generator) for _ in range(self.n_permutations)]
            counts = torch.stack([surviving(mask[order.to(mask.device)], self.n, self.m) for order in orders])
            module.get_buffer("rows").copy_(orders[int(counts.argmax())])
        self._mask_backward()

    @torch.no_grad()
    def _mask_backward(self) -> None:
        for name, weight in self.weights().items():
            module = self._masks[name]
            rows = module.get_buffer("rows")
            kept = whole_blocks((weight * module.mask)[rows], self.m)
            module.get_buffer("backward_mask")[rows] = nm_mask(kept, self.n, self.m, dim=0)[: len(weight)]


def surviving(mask: Bool[Tensor, "out ..."], n: int, m: int) -> Int[Tensor, ""]:
    """How many True entries are left when at most n of every m rows may keep theirs."""
    return whole_blocks(mask, m).unflatten(0, (-1, m)).sum(dim=1).clamp(max=n).sum()


def whole_blocks(x: Tensor, m: int) -> Tensor:
    """``x`` with rows of zeros after the last, up to a multiple of m."""
    return nn.functional.pad(x, (0, 0) * (x.ndim - 1) + (0, -len(x) % m))


class _TwoWay:
    """Mix-in of a masked layer that passes gradients back to its input through another weight."""

    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input.detach())  # type: ignore[misc]
        if not input.requires_grad:
            return y
        module: Any = self.parametrizations.weight  # type: ignore[attr-defined]
        back = module.original.detach() * (module[0].mask & module[0].backward_mask)
        z = self._conv_forward(input, back, None) if isinstance(self, nn.Conv2d) else nn.functional.linear(input, back)
        return y + (z - z.detach())  # the value of y, and the gradient of z


class StaticMask(MaskedTraining):
    """Train with masks that are chosen once and never change.

    Parameters
    ----------
    model, optimizer, total_steps, include, exclude
        As in ``BAME``. Diagonals are laid into linear layers only.
    pattern : str
        ``"2:4"`` or any other n:m, ``"unstructured"``, or ``"diagonal"``: whole wrapped diagonals.
    sparsity : float, optional
        Share of zeros of each layer, in [0, 1); needed by the patterns without numbers.
    selection : {"random", "magnitude"}
        Which weights, or diagonals, stay: random ones, or those of largest absolute value, or norm.
    rescale_init : bool or "auto"
        As in ``BAME``.
    generator : torch.Generator, optional
        Random choices are drawn from this CPU generator. If None, from torch's default one.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        pattern: str,
        total_steps: int,
        sparsity: float | None = None,
        selection: Literal["random", "magnitude"] = "random",
        rescale_init: Rescale = True,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] = ("first", "last"),
        generator: torch.Generator | None = None,
    ):
        require_choice(selection, "selection", ("random", "magnitude"))
        free = pattern in ("unstructured", "diagonal")
        if free == (sparsity is None):
            raise ParameterError(
                f"pattern={pattern!r} {'needs' if free else 'says all, and takes no'} sparsity; got sparsity={sparsity!r}."
            )
        if sparsity is not None:
            require_sparsity(sparsity)
            kinds = (nn.Linear,) if pattern == "diagonal" else KINDS
            layers = select_layers(model, kinds, include=include, exclude=exclude)
        else:
            layers = nm_layers(model, *parse_pattern(pattern), include=include, exclude=exclude)
        draw = generator if selection == "random" else None
        masks = {
            name: static_mask(own_weight(layer).detach(), pattern, sparsity, selection, draw)
            for name, layer in layers.items()
        }
        self.pattern = pattern
        self._swaps = 0
        self._factors = rescale_factors(layers, masks, rescale_init)
        super().__init__(model, optimizer, total_steps=total_steps, layers=layers, masks=masks, generator=generator)
        rescale_(self.weights(), self._factors)

    def stats(self) -> MaskStats:
        return _stats(self, 0)

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "pattern": self.pattern}


def static_mask(
    weight: Tensor,
    pattern: str,
    sparsity: float | None,
    selection: Literal["random", "magnitude"],
    generator: torch.Generator | None,
) -> Bool[Tensor, "..."]:
    """The mask of one layer."""
    if sparsity is None:
        scores = weight if selection == "magnitude" else torch.rand(weight.shape, generator=generator)
        return nm_mask(scores, *parse_pattern(pattern), dim=1).to(weight.device)
    if pattern == "unstructured":
        if selection == "random":
            return random_mask(weight.shape, 1 - sparsity, generator=generator).to(weight.device)
        return top_mask(weight, active_weights(weight.shape, 1 - sparsity))
    if selection == "random":
        return random_diagonals(weight.shape, 1 - sparsity, generator=generator).to(weight.device)
    outputs, inputs = weight.shape
    rows, columns = diagonal_indices(outputs, inputs, range(max(outputs, inputs)))
    norms = weight[rows, columns].norm(dim=1)
    kept = top_mask(norms, active_diagonals(len(norms), sparsity))
    return diagonal_mask(weight.shape, kept.nonzero().squeeze(1))


def _stats(driver: NMTraining | StaticMask, adaptations: int) -> MaskStats:
    masks = driver.masks().values()
    active, size = sum(int(mask.sum()) for mask in masks), sum(mask.numel() for mask in masks)
    return MaskStats(active / size, adaptations, int(driver._swaps), driver._factors)
