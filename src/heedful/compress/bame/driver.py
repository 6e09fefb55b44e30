"""BAME: sparse training that changes the mask of a block only if a swap promises to lower the loss, and the block is calm."""

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal

from jaxtyping import Bool
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Optimizer

from heedful._results import Report
from heedful._validation import require_choice, require_number
from heedful.compress._sparsity import clear_moments
from heedful.compress.bame._compressed import compress_forward, require_compressible, restore_forward
from heedful.compress.bame._nm import DECAY, NMTraining, Rescale, nm_layers
from heedful.compress.bame.swaps import Gain, Oscillation, SwapScores, best_share, swap_scores, swapped_indices
from heedful.errors import HeedfulWarning

__all__ = ["BAME", "BAMEStats"]


@dataclasses.dataclass(frozen=True)
class BAMEStats(Report):
    """What BAME has done so far.

    Parameters
    ----------
    gain : str
        "sgd" or "adam": the expected gain of growing a weight is η G² or η |G|.
    rescaled : dict of str to float
        What the initial weights of each layer were multiplied by.
    adaptations, swaps : int
        How often masks were adapted, and how many weights changed places in all.
    swapped_fraction : float
        Swaps per block and adaptation.
    oscillating_fraction : float
        Share of the swaps that regrew a weight whose last change was being pruned.
    frozen_fraction, mean_oscillation : float
        Share of the blocks whose mask is frozen; oscillation events per block.
    expected_loss_change : float
        Sum of ΔL over all swaps: what they were expected to change the loss by, each at its time.
    """

    gain: str
    rescaled: dict[str, float]
    adaptations: int
    swaps: int
    swapped_fraction: float
    oscillating_fraction: float
    frozen_fraction: float
    mean_oscillation: float
    expected_loss_change: float


class BAME(NMTraining):
    """Train a network n:m sparse from start to end, and find its masks on the way.

    Every ``interval`` steps the dense gradient G is computed, and each block of m weights considers one swap: to prune its
    cheapest active weight i and to grow its most promising inactive weight j, from zero. The swap is made if it is expected
    to lower the loss, ΔL = |G_i W_i| − gain(G_j) < 0, and the block is not frozen. A block freezes when it has regrown
    weights that it had pruned twice or more, and in more than ``freeze_threshold`` of the adaptations so far.

    Parameters
    ----------
    model : nn.Module
        The model, new or pretrained. Its linear and convolutional layers become sparse along their inputs, in place.
    optimizer : Optimizer
        The optimizer that owns their weights. The driver works in its step hooks: just before a step it masks gradients
        and swaps, just after it clears pruned weights.
    n, m : int
        n of every m weights are active, 1 <= n <= m: 2:4 for sparse tensor cores. Blocks are m consecutive inputs of one
        output, for convolutions at one place of the kernel.
    total_steps : int
        Optimizer steps of the whole training.
    interval : int
        Steps from one adaptation to the next, >= 1; usually 10 to 100. The smaller, the more dense gradients.
    start, end : float
        Adapt within these fractions of ``total_steps`` only, both in [0, 1]. If ``start >= end``, masks stay as they are.
    freeze_threshold : float
        Oscillation events per adaptation above which a block freezes, >= 0. ``math.inf`` freezes none.
    max_fraction : float
        Largest share of a layer's blocks that may swap at once, in [0, 1]; those with the lowest ΔL do.
    swaps_per_block : int
        Largest number of swaps in a block at once, >= 1, at most n and m − n.
    warmup : {"fixed", "sr_ste"}
        What happens before ``start``: sparse training with the first mask, or SR-STE, whose backward pass is dense.
    rescale_init : bool or "auto"
        Multiply the first weights so that the sparse layer puts out about what the dense one did: by √(m / n), or
        ("auto") by what exactly keeps the norm of the weight. Pass False for a pretrained model.
    gain : {"auto", "sgd", "adam"}
        How the gain of growing weight j is estimated: η G_j² ("sgd"), or η |G_j| for optimizers whose step does not
        depend on the size of the gradient ("adam"). "auto" is "sgd" for ``torch.optim.SGD`` and ``ASGD``, else "adam".
    include, exclude : sequence of str
        Which layers become sparse: names, globs, ``"re:…"``, or ``"first"`` and ``"last"``, the first and last layer of
        the model that has a weight matrix.
    backend : {"masked", "compressed"}
        "compressed" multiplies by the active weights only (linear layers on the CPU). It is faster than dense for few
        active weights, say 1:16, and slower for 2:4.

    Raises
    ------
    ParameterError
        If a setting is out of its range, an entry of ``include`` or ``exclude`` matches no layer, or the optimizer does
        not own a weight.
    UnsupportedModelError
        If no layer is left, or one cannot be cut into blocks of m, shares its weight or is parametrized already.

    Notes
    -----
    *Loop.* ``loss.backward()``, ``optimizer.step()``, then ``driver.step()`` where ``scheduler.step()`` stands. Gradient
    accumulation, clipping, learning-rate schedules, parameter groups, ``torch.autocast`` with a ``GradScaler``,
    ``torch.compile`` (two graphs: with masked and with dense gradients) and ``DistributedDataParallel`` (all ranks see the
    same averaged gradients, so they swap alike) work as ever. Clip gradients as usual, before ``optimizer.step()``.

    *Cost.* Of a dense layer's three passes, (3 d + (1 − d) / interval) / 3 with d = n / m, where hardware and backend turn
    zeros into speed; the "masked" backend does not. Memory beside the weight: per weight one byte for the mask and one
    for its last change, per block three bytes.

    *Mixed precision.* Decisions are computed in float32 at least.

    *Checkpoints.* Masks are in the model's ``state_dict``, the rest in this driver's. Save both and the optimizer's.

    References
    ----------
    BAME: Block-Aware Mask Evolution for Efficient N:M Sparse Training, ICML 2025. What its paper leaves open is decided
    here: ΔL, the count of oscillations and the defaults are ours.

    Examples
    --------
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> driver = BAME(model, optimizer, 2, 4, total_steps=40, interval=10)
    >>> x = torch.randn(32, 6)
    >>> for _ in range(40):
    ...     optimizer.zero_grad()
    ...     nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
    ...     optimizer.step()
    ...     driver.step()
    >>> driver.stats().adaptations
    2
    >>> model = driver.finalize()
    >>> int((model[2].weight != 0).sum()), model[2].weight.numel()
    (128, 256)
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
        freeze_threshold: float = 0.1,
        max_fraction: float = 1.0,
        swaps_per_block: int = 1,
        warmup: Literal["fixed", "sr_ste"] = "fixed",
        rescale_init: Rescale = True,
        gain: Literal["auto", "sgd", "adam"] = "auto",
        include: Sequence[str] | None = None,
        exclude: Sequence[str] = ("first", "last"),
        backend: Literal["masked", "compressed"] = "masked",
    ):
        require_number(freeze_threshold, "freeze_threshold", low=0)
        require_number(max_fraction, "max_fraction", low=0, high=1)
        require_choice(warmup, "warmup", ("fixed", "sr_ste"))
        require_choice(gain, "gain", ("auto", "sgd", "adam"))
        require_choice(backend, "backend", ("masked", "compressed"))
        layers = nm_layers(model, n, m, include=include, exclude=exclude)
        if backend == "compressed":
            require_compressible(layers)
        require_number(swaps_per_block, "swaps_per_block", low=1, high=max(min(n, m - n), 1), integer=True)
        self.freeze_threshold, self.max_fraction = freeze_threshold, max_fraction
        self.swaps_per_block, self.warmup, self.backend = swaps_per_block, warmup, backend
        self.gain: Gain = gain if gain != "auto" else "sgd" if isinstance(optimizer, (SGD, ASGD)) else "adam"
        self._oscillating, self._expected = 0, 0.0
        super().__init__(
            model,
            optimizer,
            n,
            m,
            total_steps=total_steps,
            interval=interval,
            start=start,
            end=end,
            layers=layers,
            rescale_init=rescale_init,
        )
        self._oscillation = {name: Oscillation.none(mask, m) for name, mask in self.masks().items()}

    def stats(self) -> BAMEStats:
        """What has happened so far."""
        blocks, swaps = sum(state.events.numel() for state in self._oscillation.values()), int(self._swaps)
        return BAMEStats(
            gain=self.gain,
            rescaled=self._factors,
            adaptations=self._adaptations,
            swaps=swaps,
            swapped_fraction=swaps / max(blocks * self._adaptations, 1),
            oscillating_fraction=self._oscillating / max(swaps, 1),
            frozen_fraction=sum(int(state.frozen.sum()) for state in self._oscillation.values()) / blocks,
            mean_oscillation=sum(int(state.events.sum()) for state in self._oscillation.values()) / blocks,
            expected_loss_change=self._expected,
        )

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs beside the state of the model, which holds the masks, and of the optimizer."""
        return {
            **super().state_dict(),
            "oscillating": self._oscillating,
            "expected_loss_change": self._expected,
            "oscillation": {name: dataclasses.asdict(state) for name, state in self._oscillation.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._oscillating, self._expected = state_dict["oscillating"], state_dict["expected_loss_change"]
        for name, state in self._oscillation.items():
            for field, value in state_dict["oscillation"][name].items():
                getattr(state, field).copy_(value)

    def _adapt(self, gradients: dict[str, Tensor]) -> None:
        self._adaptations += 1
        weights = self.weights()
        if all(float(self._group(weights[name], name)["lr"]) == 0 for name in gradients):
            warnings.warn(
                f"BAME swapped nothing at step {self.steps_taken}: the learning rate is 0, and so is every gain. Let "
                "adaptations fall where it is not.",
                HeedfulWarning,
                stacklevel=2,
            )
        for name, gradient in gradients.items():
            lr = float(self._group(weights[name], name)["lr"])
            self._adapt_layer(name, weights[name], gradient, lr)

    def _adapt_layer(self, name: str, weight: Tensor, gradient: Tensor, lr: float) -> None:
        mask, state = self._masks[name].mask, self._oscillation[name]
        ranks = range(self.swaps_per_block if self.n < self.m else 0)
        # All are scored before the first is made: they share no weight.
        for scores in [
            swap_scores(weight, gradient, mask, self.n, self.m, lr=lr, gain=self.gain, rank=rank) for rank in ranks
        ]:
            blocks = self._select(scores, state).nonzero().squeeze(1)
            pruned, grown = swapped_indices(mask.shape, scores, blocks, self.m)
            self._flip(name, pruned)
            self._flip(name, grown)
            self._oscillating += int(state.record_(pruned, grown, blocks))
            self._swaps += len(blocks)
            self._expected += float(scores.delta[blocks].sum())
        state.freeze_(self._adaptations, self.freeze_threshold)

    def _select(self, scores: SwapScores, state: Oscillation) -> Bool[Tensor, " blocks"]:
        """The blocks that swap: those that gain and are not frozen, at most ``max_fraction`` of all."""
        return best_share(scores.delta, (scores.delta < 0) & ~state.frozen, self.max_fraction)

    def _attach(self, name: str, layer: nn.Module) -> None:
        if self.backend == "compressed":
            compress_forward(layer)
        super()._attach(name, layer)

    def _detach(self, layer: nn.Module) -> None:
        super()._detach(layer)
        restore_forward(layer)

    def _warming(self) -> bool:
        return self.warmup == "sr_ste" and self.steps_taken < self.start * self.total_steps

    def _needs_dense_gradient(self) -> bool:
        return self._warming() or super()._needs_dense_gradient()

    def _begin_step(self) -> None:
        super()._begin_step()
        if self.warmup == "sr_ste" and self.steps_taken == math.ceil(self.start * self.total_steps):
            for name, weight in self.weights().items():  # from here on, nothing is left of what SR-STE kept alive
                inactive = ~self._masks[name].mask
                weight.masked_fill_(inactive, 0)
                clear_moments(self.optimizer, weight, inactive)

    def _before_step(self) -> None:
        if self._warming():
            self._add_decay(DECAY)
        else:
            super()._before_step()

    def _after_step(self) -> None:
        if self._warming():
            self._keep_largest()
        else:
            super()._after_step()
