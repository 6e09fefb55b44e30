"""The Kronecker factors of BoA: what the output of attention feels when a query, key or value weight changes.

For one head, with inputs X (features × length), rotated queries Q and keys K (length × head_dim), rotations R_l at position
l, attention A and the columns W_out of the output projection that the head feeds,

    query: H_col = X Xᵀ,        H_row = mean_l R_lᵀ Kᵀ K R_l,
    key:   H_col = X Xᵀ,        H_row = mean_l R_lᵀ Qᵀ Q R_l,
    value: H_col = X Aᵀ A Xᵀ,   H_row = W_outᵀ W_out.

That of values is exact, ‖W_out ΔW X Aᵀ‖² = tr(H_row ΔW H_col ΔWᵀ); those of queries and keys bound the error through the
softmax. Under grouped queries a head of keys or values takes the mean over its queries' heads.

BoA: Attention-aware Post-training Quantization without Backpropagation, ICML 2025, table 1.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heedful.errors import InputError

__all__ = ["AttentionFactors", "Factor", "attention_factors"]

Rotation = tuple[Float[Tensor, "sequences length rotated"], Float[Tensor, "sequences length rotated"]]


class Factor(NamedTuple):
    """A loss tr(h_row ΔW h_col ΔWᵀ) of every head; ``h_row`` None is the identity.

    ``h_col`` is one matrix for all heads, or one each.
    """

    h_col: Float[Tensor, "*heads cols cols"]
    h_row: Float[Tensor, "heads rows rows"] | None


class AttentionFactors(NamedTuple):
    """The factors of the query, key and value projections of one layer, as means over tokens."""

    query: Factor
    key: Factor
    value: Factor


def attention_factors(
    query: Float[Tensor, "batch heads length head_dim"],
    key: Float[Tensor, "batch kv_heads length head_dim"],
    value_inputs: Float[Tensor, "batch length features"],
    attention_probs: Float[Tensor, "batch heads length length"],
    out_weight: Float[Tensor, "hidden inner"],
    *,
    rope: Rotation | None = None,
) -> AttentionFactors:
    """Factors of one layer from what its attention sees.

    Parameters
    ----------
    query, key : Float[Tensor, "batch heads length head_dim"]
        With bias, and after rotation. Keys may have fewer heads, each shared by as many query heads, in order.
    value_inputs : Float[Tensor, "batch length features"]
        What the three projections read.
    attention_probs : Float[Tensor, "batch heads length length"]
        Row l says what position l attends to; rows sum to one.
    out_weight : Float[Tensor, "hidden inner"]
        The weight of the output projection; inner = heads · head_dim.
    rope : pair of Float[Tensor, "sequences length rotated"], optional
        Cosines and sines of the rotation, ``sequences`` = batch, or 1 if all share them. The first ``rotated`` <= head_dim
        entries of a head are rotated, entry i with entry i + rotated / 2. If None, nothing is.

    Returns
    -------
    AttentionFactors
        In float32, or float64 if the inputs are. Their scale does not matter to ``kron_quantize``.

    Raises
    ------
    InputError
        Shapes that do not match, or no token.

    Notes
    -----
    O(batch · heads · length · (length + features) · features).
    """
    _require_shapes(query, key, value_inputs, attention_probs, out_weight, rope)
    statistics = AttentionStatistics()
    statistics.update(query, key, value_inputs, lambda head: attention_probs[:, head], rope=rope)
    return statistics.factors(out_weight)


def _require_shapes(
    query: Tensor, key: Tensor, value_inputs: Tensor, probs: Tensor, out_weight: Tensor, rope: Rotation | None
) -> None:
    """Raise ``InputError`` unless all are of one layer; some wrong shapes would broadcast without a sign."""
    if query.ndim != 4 or not query.numel():
        raise InputError(f"query must have shape (batch, heads, length, head_dim), none 0; got {tuple(query.shape)}.")
    n, heads, length, dim = query.shape
    kv_heads = key.shape[1] if key.ndim == 4 else "kv_heads"
    shapes: list[tuple[str, Tensor, tuple]] = [
        ("key", key, (n, kv_heads, length, dim)),
        ("value_inputs", value_inputs, (n, length, value_inputs.shape[-1])),
        ("attention_probs", probs, (n, heads, length, length)),
        ("out_weight", out_weight, (len(out_weight), heads * dim)),
        *(("rope", x, (1 if len(x) == 1 else n, length, min(x.shape[-1], dim) // 2 * 2)) for x in rope or ()),
    ]
    for name, x, needed in shapes:
        if tuple(x.shape) != needed:
            raise InputError(
                f"{name} must have shape {needed} beside a query of shape {tuple(query.shape)}; got {tuple(x.shape)}."
            )


class AttentionStatistics:
    """Running means, over tokens, of what ``AttentionFactors`` are made of.

    Parameters
    ----------
    value_hessian : {"per_head", "shared"}
        Whether values are measured through attention, at ``kv_heads · features²`` numbers, or by X Xᵀ.
    value_rows : {"out_proj", "identity"}
        Row metric of the values.

    Attributes
    ----------
    inputs : RunningGram
        Of what the projections read.
    """

    def __init__(
        self,
        *,
        value_hessian: Literal["per_head", "shared"] = "per_head",
        value_rows: Literal["out_proj", "identity"] = "out_proj",
    ):
        self._per_head, self._value_rows = value_hessian == "per_head", value_rows
        self.inputs = RunningGram()
        self._attended = self._key_metric = self._query_metric = torch.empty(0)
        self._group = 1

    def update(
        self,
        query: Float[Tensor, "batch heads length head_dim"],
        key: Float[Tensor, "batch kv_heads length head_dim"],
        value_inputs: Float[Tensor, "batch length features"],
        probs: Callable[[int], Float[Tensor, "batch length length"]],
        *,
        rope: Rotation | None = None,
    ) -> None:
        """Add some sequences. ``probs`` gives the attention of one query head: that of all would fill the memory."""
        (n, heads, length, _), kv_heads = query.shape, key.shape[1]
        if heads % kv_heads:
            raise InputError(f"{heads} query heads cannot share {kv_heads} heads of keys evenly.")
        self._group = heads // kv_heads
        query, key, x = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (query, key, value_inputs))
        if self.inputs.count == 0:
            width = x.shape[-1] if self._per_head else 0
            self._attended = x.new_zeros(kv_heads, width, width)
            self._key_metric = self._query_metric = x.new_zeros(kv_heads, query.shape[-1], query.shape[-1])
        self.inputs.update(x.flatten(0, 1))
        new = n * length / self.inputs.count  # weight of the new tokens
        own = (query.mT @ query / length).unflatten(1, (kv_heads, self._group)).mean(2)
        self._query_metric = self._query_metric.lerp(_rotated_back(own, rope).mean(0), new)
        self._key_metric = self._key_metric.lerp(_rotated_back(key.mT @ key / length, rope).mean(0), new)
        if not self._per_head:
            return
        self._attended.mul_(1 - new)
        for head in range(heads):
            seen = (probs(head).to(x.dtype) @ x).flatten(0, 1)
            self._attended[head // self._group].addmm_(seen.T, seen, alpha=new / (len(seen) * self._group))

    def factors(self, out_weight: Float[Tensor, "hidden inner"]) -> AttentionFactors:
        """The factors of all that was added, beside this output projection."""
        inputs, kv_heads = self.inputs.mean, len(self._key_metric)
        out = out_weight.detach().to(inputs.dtype)
        columns = out.unflatten(1, (kv_heads, self._group, -1)).movedim(0, 2)  # kv heads, group, hidden, head_dim
        value_row = (columns.mT @ columns).mean(1) if self._value_rows == "out_proj" else None
        return AttentionFactors(
            query=Factor(inputs, self._key_metric.repeat_interleave(self._group, 0)),
            key=Factor(inputs, self._query_metric),
            value=Factor(self._attended if self._per_head else inputs, value_row),
        )


def rotate(
    x: Float[Tensor, "batch heads length dim"], rope: Rotation | None
) -> Float[Tensor, "batch heads length dim"]:
    """R_l x_l at every position l."""
    if rope is None:
        return x
    cos, sin, turn = _parts(rope, x)
    return x * cos + (x @ turn.T) * sin


def _rotated_back(
    metric: Float[Tensor, "batch heads dim dim"], rope: Rotation | None
) -> Float[Tensor, "batch heads dim dim"]:
    """mean_l R_lᵀ M R_l, in O(L · dim²): with R_l = C_l + S_l P it needs only the means of products of cosines and sines."""
    if rope is None:
        return metric
    cos, sin, turn = _parts(rope, metric)
    both, mixed, none = (a.mT @ b / a.shape[-2] for a, b in ((cos, cos), (cos, sin), (sin, sin)))
    return metric * both + (metric * mixed) @ turn + turn.T @ (metric * mixed.mT) + turn.T @ (metric * none) @ turn


def _parts(rope: Rotation, like: Float[Tensor, "... dim"]) -> tuple[Tensor, Tensor, Tensor]:
    """Of R_l = C_l + S_l P the diagonals of C_l and S_l, 1 and 0 where nothing is rotated, and P, which swaps halves."""
    cos, sin = (part.to(like.dtype)[:, None] for part in rope)
    rotated, dim = cos.shape[-1], like.shape[-1]
    cos = nn.functional.pad(cos, (0, dim - rotated), value=1.0)
    sin = nn.functional.pad(sin, (0, dim - rotated))
    turn = like.new_zeros(dim, dim)
    lower = torch.arange(rotated // 2, device=like.device)
    turn[lower, lower + rotated // 2], turn[lower + rotated // 2, lower] = -1, 1
    return cos, sin, turn


class RunningGram:
    """Mean of x xᵀ over rows x, in float32 or better."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.empty(0)

    def update(self, rows: Float[Tensor, "n cols"]) -> None:
        """Add rows."""
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        if self.count == 0:
            self.mean = rows.new_zeros(rows.shape[1], rows.shape[1])
        total = self.count + len(rows)
        self.mean.addmm_(rows.T, rows, beta=self.count / total, alpha=1 / total)
        self.count = total
