"""The decisions of BAME: in every block the best swap and what it is expected to do to the loss, and which masks oscillate.

A block is m consecutive entries along the reduction dimension; blocks are numbered line by line, as ``nm_mask`` cuts them.
"""

import dataclasses
import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful._masks import require_pattern
from heedful._validation import require_choice, require_number
from heedful.compress._sparsity import numbers
from heedful.errors import InputError

__all__ = ["SwapScores", "swap_scores"]

Gain = Literal["sgd", "adam"]
Index = tuple[Tensor, ...]  # one integer tensor per dimension

_CHUNK = 1 << 16  # entries that a CPU thread looks at together: what is made of them stays in the cache of its core


class SwapScores(NamedTuple):
    """The best swap of each block.

    Attributes
    ----------
    prune : Int[Tensor, " blocks"]
        Position in the block, 0 to m − 1, of the active weight that is cheapest to prune.
    grow : Int[Tensor, " blocks"]
        Position in the block of the inactive weight that promises most.
    delta : Float[Tensor, " blocks"]
        The expected change of the loss if the one takes the place of the other; < 0 is a gain.
    """

    prune: Int[Tensor, " blocks"]
    grow: Int[Tensor, " blocks"]
    delta: Float[Tensor, " blocks"]


def swap_scores(
    weight: Float[Tensor, "..."],
    grad: Float[Tensor, "..."],
    mask: Bool[Tensor, "..."],
    n: int,
    m: int,
    *,
    lr: float,
    gain: Gain = "sgd",
    dim: int = 1,
    rank: int = 0,
) -> SwapScores:
    """ΔL = |G_i W_i| − gain(G_j) of every block: i its cheapest active weight, j its most promising inactive one.

    |G_i W_i| is the first-order size of what pruning W_i does to the loss. The gain is the first-order fall of the loss by
    the optimizer's first step of W_j from zero.

    Parameters
    ----------
    weight, grad : Float[Tensor, "..."]
        The weights, and the gradient of the loss in all of them, also in the inactive ones.
    mask : Bool[Tensor, "..."]
        True where a weight is active: n in every block.
    n, m : int
        1 <= n <= m. With n = m there is nothing to grow, and every ΔL is infinite.
    lr : float
        Learning rate η, >= 0.
    gain : {"sgd", "adam"}
        η G² for SGD, with or without momentum; η |G| for optimizers whose first step has the length η whatever the
        gradient: the Adam family.
    dim : int
        The reduction dimension, 1 for the weights of linear and convolutional layers.
    rank : int
        0 for the best swap, 1 for the second best (which shares no weight with it), and so on; < min(n, m − n).

    Returns
    -------
    SwapScores
        Equal candidates are told apart by their position: the lowest wins. ``delta`` is float32 at least.

    Raises
    ------
    ParameterError
        If a setting is out of its range.
    InputError
        If shapes differ, cannot be cut into blocks of m, or the mask does not keep n of every m.

    Notes
    -----
    O(N) for N weights, in pieces that stay in the cache.

    Examples
    --------
    >>> weight = torch.tensor([[0.8, 0.0, -0.1, 0.0]])
    >>> grad = torch.tensor([[0.2, 1.5, -0.5, 0.3]])
    >>> scores = swap_scores(weight, grad, weight != 0, 2, 4, lr=0.1)
    >>> scores.prune.item(), scores.grow.item(), round(scores.delta.item(), 3)
    (2, 1, -0.175)
    """
    _check_scored(weight, grad, mask, n, m, dim)
    require_number(lr, "lr", low=0)
    require_choice(gain, "gain", ("sgd", "adam"))
    require_number(rank, "rank", low=0, high=max(min(n, m - n) - 1, 0), integer=True)
    weights, grads, active = (to_blocks(x, m, dim) for x in (weight, grad, mask))
    _require_n_active(active, n)
    together = _CHUNK * torch.get_num_threads() if weight.device.type == "cpu" else weight.numel()
    rows = max(1, together // m)
    parts = [
        _score_blocks(weights[i : i + rows], grads[i : i + rows], active[i : i + rows], lr, gain, rank)
        for i in range(0, max(len(weights), 1), rows)
    ]
    prune, grow, delta = (torch.cat(columns) for columns in zip(*parts, strict=True))
    if n == m:
        delta.fill_(math.inf)
    return SwapScores(prune, grow, delta)


def swapped_indices(
    shape: torch.Size, scores: SwapScores, blocks: Int[Tensor, " swaps"], m: int, *, dim: int = 1
) -> tuple[Index, Index]:
    """Where the given blocks of a tensor of this shape prune, and where they grow, as indices into it."""
    lines = list(shape)
    length = lines.pop(dim)

    def place(offset: Tensor) -> Index:
        *line, entry = torch.unravel_index(blocks * m + offset[blocks], (*lines, length))
        line.insert(dim % len(shape), entry)
        return tuple(line)

    return place(scores.prune), place(scores.grow)


@dataclasses.dataclass
class Oscillation:
    """What has happened to the mask of one layer.

    Attributes
    ----------
    last_change : Int[Tensor, "..."]
        Of each weight, as int8: 1 if it was grown last, −1 if it was pruned last, 0 if it never changed.
    events : Int[Tensor, " blocks"]
        Of each block, as int16: how often it regrew a weight whose last change was being pruned.
    frozen : Bool[Tensor, " blocks"]
        Blocks whose mask changes no more.
    """

    last_change: Int[Tensor, "..."]
    events: Int[Tensor, " blocks"]
    frozen: Bool[Tensor, " blocks"]

    @classmethod
    def none(cls, mask: Bool[Tensor, "..."], m: int) -> "Oscillation":
        """The state of a layer whose mask has never changed."""
        blocks = mask.numel() // m
        return cls(
            torch.zeros(mask.shape, dtype=torch.int8, device=mask.device),
            torch.zeros(blocks, dtype=torch.int16, device=mask.device),
            torch.zeros(blocks, dtype=torch.bool, device=mask.device),
        )

    def record_(self, pruned: Index, grown: Index, blocks: Int[Tensor, " swaps"]) -> Int[Tensor, ""]:
        """Take note of swaps in ``blocks``, as ``swapped_indices`` places them; how many were oscillation events."""
        again = self.last_change[grown] == -1
        self.events[blocks] += again
        self.last_change[pruned] = -1
        self.last_change[grown] = 1
        return again.sum()

    def freeze_(self, adaptations: int, threshold: float) -> None:
        """Freeze the blocks with at least two events that had them in more than ``threshold`` of the adaptations."""
        self.frozen |= (self.events >= 2) & (self.events > threshold * adaptations)


def best_share(delta: Float[Tensor, " blocks"], candidates: Bool[Tensor, " blocks"], share: float) -> Tensor:
    """The candidates, but at most ``share`` of all blocks (rounded up), those of the lowest ``delta``."""
    limit = math.ceil(share * len(delta))
    if limit >= len(delta):
        return candidates
    order = delta.masked_fill(~candidates, math.inf).sort(stable=True).indices[:limit]
    return torch.zeros_like(candidates).index_fill_(0, order, True) & candidates


def best_pairs(cost: Tensor, worth: Tensor, active: Tensor, rank: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each row the active entry of lowest ``cost`` and the inactive one of highest ``worth``, and these values.

    Costs and worths are >= 0; both tensors are overwritten. With ``rank`` > 0, the pair that comes next in order.

    Returns
    -------
    prune, grow, cost, worth
        Each of one entry per row. ``worth`` is −inf where no entry is inactive.
    """
    kept = numbers(active, cost.dtype)  # arithmetic on these is several times as fast as filling by a mask
    cost += kept.reciprocal() - 1  # inf where inactive, 0 where active
    worth -= (1 - kept).reciprocal_() - 1
    if rank == 0:
        (least, prune), (most, grow) = cost.min(dim=1), worth.max(dim=1)
        return prune, grow, least, most
    costs, cheap = cost.sort(dim=1, stable=True)
    worths, dear = worth.sort(dim=1, stable=True, descending=True)
    return cheap[:, rank], dear[:, rank], costs[:, rank], worths[:, rank]


def to_blocks(x: Tensor, m: int, dim: int = 1) -> Tensor:
    """The blocks as rows, (blocks, m); a view if ``dim`` is the last dimension of a contiguous tensor."""
    return x.detach().movedim(dim, -1).reshape(-1, m)


def _score_blocks(weight: Tensor, grad: Tensor, active: Tensor, lr: float, gain: Gain, rank: int) -> SwapScores:
    if weight.element_size() < 4:
        weight, grad = weight.float(), grad.float()
    prune, grow, cost, slope = best_pairs((grad * weight).abs_(), grad.abs(), active, rank)
    return SwapScores(prune, grow, cost - lr * (slope.square() if gain == "sgd" else slope))


def _check_scored(weight: Tensor, grad: Tensor, mask: Tensor, n: int, m: int, dim: int) -> None:
    require_pattern(n, m)
    require_number(n, "n", low=1, integer=True)
    if not weight.shape == grad.shape == mask.shape:
        raise InputError(
            f"weight, grad and mask must have one shape; got {tuple(weight.shape)}, {tuple(grad.shape)} and "
            f"{tuple(mask.shape)}."
        )
    require_number(dim, "dim", low=-weight.ndim, high=weight.ndim - 1, integer=True)
    if weight.shape[dim] % m:
        raise InputError(f"{weight.shape[dim]} entries along dimension {dim} cannot be cut into blocks of m={m}.")


def _require_n_active(active: Bool[Tensor, "blocks m"], n: int) -> None:
    counts = torch.zeros(len(active), dtype=torch.int16, device=active.device)
    for column in active.view(torch.uint8).unbind(1):  # several times as fast as torch's sum over short rows
        counts += column
    wrong = counts != n
    if wrong.any():
        m, k = active.shape[1], int(wrong.nonzero()[0])
        raise InputError(f"mask must have n={n} of every m={m} entries True; block {k} has {int(counts[k])}.")
