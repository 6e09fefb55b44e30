"""Transformer decoders taken apart: where their layers are, what their attention sees, and how to run them block by block.

Nothing here models an architecture. ``LAYOUTS`` says by what names the parts of a family go; what attention receives is
recorded by an attention function that transformers calls in the place of its own; blocks are run by themselves on what
came in.
"""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from heedful.errors import InputError, MissingExtraError, UnsupportedModelError

__all__ = ["LAYOUTS", "AttentionCall", "BlockRun", "Decoder", "DecoderLayer", "Projection"]
__all__ += ["describe_decoder", "record_attention", "run_by_block"]

_LLAMA = {
    "blocks": "layers",
    "attention": "self_attn",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "final_norm": "norm",
}
LAYOUTS: Mapping[str, Mapping[str, str]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA | {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"},
    "opt": {
        "blocks": "decoder.layers",
        "attention": "self_attn",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.out_proj",
        "up": "fc1",
        "down": "fc2",
        "attention_norm": "self_attn_layer_norm",
        "mlp_norm": "final_layer_norm",
        "final_norm": "decoder.final_layer_norm",
        "positions": "decoder.embed_positions",
    },
    "gpt_neox": {
        "blocks": "layers",
        "attention": "attention",
        "qkv": "attention.query_key_value",
        "o": "attention.dense",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "final_norm": "final_layer_norm",
    },
}
"""By ``config.model_type``: the name of the blocks in the base model, and the names of the parts of a block in it.

``qkv`` stands for ``q``, ``k`` and ``v`` where one layer makes all three, head after head. ``gate``, ``q_norm`` and
``k_norm`` (between projection and rotation), ``final_norm`` and ``positions`` (learned ones) are left out where there are none.
"""

_OPTIONAL = ("gate", "q_norm", "k_norm", "final_norm", "positions")
_MISSING = object()


@dataclass(frozen=True)
class Projection:
    """A linear layer, or some rows of one that does several jobs.

    Attributes
    ----------
    name : str
        Of the layer, in the model.
    linear : nn.Linear
        The layer.
    rows : LongTensor or None
        Which of its outputs these are; None for all of them.
    n_heads : int or None
        The heads that they fall into, one after the other; None if they do not.
    """

    name: str
    linear: nn.Linear
    rows: Tensor | None = None
    n_heads: int | None = None

    @property
    def weight(self) -> Float[Tensor, "rows cols"]:
        """The weight itself, or a copy of the rows."""
        return self.linear.weight if self.rows is None else self.linear.weight[self.rows]

    @property
    def bias(self) -> Float[Tensor, " rows"] | None:
        """The bias, or a copy of the rows, or None if there is none."""
        bias: Tensor | None = self.linear.bias
        return bias if bias is None or self.rows is None else bias[self.rows]


@dataclass(frozen=True)
class DecoderLayer:
    """One block: its attention, MLP and norms. ``gate``, ``q_norm`` and ``k_norm`` are None where there are none."""

    name: str
    module: nn.Module
    attention: nn.Module
    q: Projection
    k: Projection
    v: Projection
    o: Projection
    gate: Projection | None
    up: Projection
    down: Projection
    attention_norm: nn.Module
    mlp_norm: nn.Module
    q_norm: nn.Module | None
    k_norm: nn.Module | None


@dataclass(frozen=True)
class Decoder:
    """The parts of a decoder.

    Attributes
    ----------
    model : PreTrainedModel
        The whole.
    layers : tuple of DecoderLayer
        Its blocks, in order.
    embedding, positions, final_norm, head : nn.Module
        What is not in a block; ``positions`` (learned ones), ``final_norm`` and ``head`` may be None.
    n_heads, n_kv_heads, head_dim, hidden : int
        Query heads, key and value heads, width of a head, width of the residual stream.
    rotary : bool
        Whether queries and keys are rotated by their positions.
    pre_norm : bool
        Whether norms stand before attention and MLP (False for OPT-350m, which has them after).
    """

    model: Any
    layers: tuple[DecoderLayer, ...]
    embedding: nn.Embedding
    positions: nn.Module | None
    final_norm: nn.Module | None
    head: nn.Module | None
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden: int
    rotary: bool
    pre_norm: bool


def describe_decoder(model: Any, *, layout: Mapping[str, str] | None = None) -> Decoder:
    """Find the parts of a decoder.

    Parameters
    ----------
    model : PreTrainedModel
        With or without its head.
    layout : mapping of str to str, optional
        Names of the parts, as in ``LAYOUTS``, for a family that is not there.

    Raises
    ------
    UnsupportedModelError
        If the family is unknown and no layout given, or a part is missing, of another kind or of another shape.
    """
    try:
        from transformers import PreTrainedModel
    except ImportError as error:
        raise MissingExtraError('decoders of transformers need: pip install "heedful[llm]".') from error
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"a decoder of transformers (a PreTrainedModel) is needed; got a {name}. Compile it, or add adapters, later."
        )
    config, base = model.config, model.base_model
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} has an encoder. Supported are decoders: {', '.join(LAYOUTS)}.")
    if layout is None:
        layout = LAYOUTS.get(config.model_type)
    if layout is None:
        raise UnsupportedModelError(
            f"{name} is a {config.model_type!r}; supported are {', '.join(LAYOUTS)}. If its blocks hold one attention and "
            f"one MLP of linear layers, as theirs do, say where by layout=, which would be {_LLAMA} for a Llama."
        )
    _require_roles(layout)
    n_heads, hidden = config.num_attention_heads, config.hidden_size
    head_dim = getattr(config, "head_dim", None) or hidden // n_heads
    heads = {"q": n_heads, "k": getattr(config, "num_key_value_heads", None) or n_heads}
    heads["v"] = heads["k"]
    parts = _Parts(model, layout)

    def describe_block(block: nn.Module) -> DecoderLayer:
        if "qkv" in layout:
            rows = torch.arange(3 * n_heads * head_dim).view(n_heads, 3, head_dim)
            fused = parts.linear(block, "qkv", rows.numel())
            projections = {
                role: Projection(parts.names[fused], fused, rows[:, i].flatten(), n_heads)
                for i, role in enumerate("qkv")
            }
        else:
            linears = {role: parts.linear(block, role, n * head_dim) for role, n in heads.items()}
            projections = {role: Projection(parts.names[x], x, n_heads=heads[role]) for role, x in linears.items()}
        for role in ("o", "gate", "up", "down"):
            if role in layout:
                linear = parts.linear(block, role)
                projections[role] = Projection(parts.names[linear], linear)
        norms = {role: parts.module(block, role) for role in ("attention_norm", "mlp_norm", "q_norm", "k_norm")}
        attention = parts.module(block, "attention")
        return DecoderLayer(parts.names[block], block, attention, **{"gate": None} | projections, **norms)  # type: ignore[arg-type]

    blocks: Any = parts.module(base, "blocks")
    return Decoder(
        model=model,
        layers=tuple(describe_block(block) for block in blocks),
        embedding=model.get_input_embeddings(),
        positions=parts.module(base, "positions"),
        final_norm=parts.module(base, "final_norm"),
        head=model.get_output_embeddings(),
        n_heads=n_heads,
        n_kv_heads=heads["k"],
        head_dim=head_dim,
        hidden=hidden,
        rotary=hasattr(base, "rotary_emb"),
        pre_norm=getattr(config, "do_layer_norm_before", True),
    )


class _Parts:
    """Modules by their roles in a layout."""

    def __init__(self, model: Any, layout: Mapping[str, str]):
        self._model, self._layout = type(model).__name__, layout
        self.names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}

    def module(self, parent: nn.Module, role: str) -> nn.Module | None:
        """The module of this role in ``parent``; None if the layout leaves it out, or the model sets it to None."""
        if role not in self._layout:
            return None
        found: Any = parent
        for step in self._layout[role].split("."):
            found = getattr(found, step, _MISSING)
        if isinstance(found, nn.Module) or (found is None and role in _OPTIONAL):
            return found
        where = self.names.get(parent) or "the base model"
        raise UnsupportedModelError(f"{self._model}: {where} has no module {self._layout[role]!r} ({role}).")

    def linear(self, block: nn.Module, role: str, outputs: int | None = None) -> nn.Linear:
        """The linear layer of this role in ``block``, with so many outputs."""
        linear: Any = self.module(block, role)
        if not isinstance(linear, nn.Linear):
            raise UnsupportedModelError(
                f"{self._model}: {self.names.get(linear)} ({role}) is a {type(linear).__name__}, and a torch.nn.Linear is "
                "needed. Mixtures of experts are not supported; merge adapters and dequantize weights first."
            )
        if outputs is not None and len(linear.weight) != outputs:
            raise UnsupportedModelError(
                f"{self._model}: {self.names[linear]} ({role}) has {len(linear.weight)} outputs, and heads and head_dim of "
                f"the configuration need {outputs}."
            )
        return linear


def _require_roles(layout: Mapping[str, str]) -> None:
    roles = ("blocks", "attention", "o", "up", "down", "attention_norm", "mlp_norm")
    needed = {*roles, "qkv"} if "qkv" in layout else {*roles, "q", "k", "v"}
    missing, unknown = sorted(needed - set(layout)), sorted(set(layout) - needed - set(_OPTIONAL))
    if missing or unknown:
        raise UnsupportedModelError(
            f"layout must name {', '.join(sorted(needed))}, and may name {', '.join(_OPTIONAL)}; "
            f"it lacks {missing or 'nothing'} and has {unknown or 'nothing'} besides."
        )


class AttentionCall(NamedTuple):
    """What one attention received: of rotary models, queries and keys after their rotation.

    ``mask`` is True where a query attends; ``scaling`` multiplies the products of queries and keys.
    """

    module: nn.Module
    query: Float[Tensor, "batch heads length head_dim"]
    key: Float[Tensor, "batch kv_heads length head_dim"]
    value: Float[Tensor, "batch kv_heads length head_dim"]
    mask: Bool[Tensor, "batch 1 length length"]
    scaling: float

    def probs(self, head: int) -> Float[Tensor, "batch length length"]:
        """Attention of one query head, in float32 (float64 if the model is): rows sum to one, and are zero where masked."""
        dtype = torch.promote_types(self.query.dtype, torch.float32)
        key = self.key[:, head * self.key.shape[1] // self.query.shape[1]]
        scores = self.query[:, head].to(dtype) @ key.to(dtype).mT
        return (scores * self.scaling).masked_fill_(~self.mask[:, 0], -math.inf).softmax(-1)


_RECORDING = "heedful_recording"
_calls: ContextVar[deque[AttentionCall]] = ContextVar("heedful_attention_calls")


@contextlib.contextmanager
def record_attention(model: Any, *, keep: int | None = None) -> Iterator[deque[AttentionCall]]:
    """Keep what every attention of the model receives while the block runs.

    Parameters
    ----------
    model : PreTrainedModel
        The model.
    keep : int, optional
        How many calls to hold, the latest ones. If None, all.

    Yields
    ------
    deque of AttentionCall
        It grows by one with every attention that runs.

    Raises
    ------
    UnsupportedModelError
        If the model does not let its attention function be chosen; and, when it runs, if its attention looks ahead.

    Notes
    -----
    Masks are made and passed explicitly, also where the model would leave causality to the kernel. Asking transformers for
    ``output_attentions`` instead can silently drop the mask.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise MissingExtraError('recording attention needs: pip install "heedful[llm]".') from error

    def explicit_mask(*args, **kwargs):
        return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})

    AttentionInterface.register(_RECORDING, _record)
    AttentionMaskInterface.register(_RECORDING, explicit_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(_RECORDING)
    try:
        if model.config._attn_implementation != _RECORDING:
            raise UnsupportedModelError(
                f"{type(model).__name__} does not let its attention function be chosen, so what it receives cannot be "
                "recorded. Models that transformers has moved to its AttentionInterface do."
            )
        calls: deque[AttentionCall] = deque(maxlen=keep)
        token = _calls.set(calls)
        try:
            yield calls
        finally:
            _calls.reset(token)
    finally:
        model.set_attn_implementation(before)


def _record(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """The attention function in charge while recording: torch's, after a look at what comes in."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if attention_mask is None or attention_mask.dtype != torch.bool or attention_mask.triu(1).any():
        raise UnsupportedModelError(
            f"{type(module).__name__} has attention that looks ahead, or whose mask is unknown. It must be causal: "
            "statistics of attention that sees the future would be wrong without a sign of it."
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    _calls.get().append(AttentionCall(module, query, key, value, attention_mask, scaling))
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)


class BlockRun:
    """A block and what comes into it, until the next block is reached."""

    def __init__(self, layer: DecoderLayer, states: list[Tensor], given: list[tuple[tuple, dict[str, Any]]]):
        self.layer = layer
        self._states, self._given = states, given

    def run(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Run the block as it is on each batch: what comes out, and the keyword arguments that it was given."""
        for states, (args, kwargs) in zip(self._states, self._given, strict=True):
            with torch.no_grad():
                out = self.layer.module(states, *args, **kwargs)
            yield out[0] if isinstance(out, tuple) else out, kwargs  # some families return more than the states


def run_by_block(
    model: Any, batches: Iterable[Tensor], *, layout: Mapping[str, str] | None = None
) -> Iterator[BlockRun]:
    """Visit the blocks in order, each with its inputs: what the blocks before it make, as they are when it is reached.

    A caller may run a block any number of times, watch it by hooks and change it; the next block gets what the changed one
    makes. The blocks that nobody asks for are not run.

    Parameters
    ----------
    model : PreTrainedModel
        In evaluation mode.
    batches : iterable of LongTensor, (sequences, length)
        Token ids without padding.
    layout
        As in ``describe_decoder``.

    Notes
    -----
    Memory: the inputs of one block. Each block runs once between two visits. Inside ``record_attention`` blocks get the
    explicit masks that it needs.
    """
    if model.training:
        raise InputError(
            f"{type(model).__name__} is in training mode, and would drop out at random. Call model.eval()."
        )
    decoder = describe_decoder(model, layout=layout)
    states, given = _first_inputs(decoder, batches)
    for index, layer in enumerate(decoder.layers):
        block = BlockRun(layer, states, [given[x.shape][index] for x in states])
        yield block
        if index + 1 < len(decoder.layers):
            for i, (out, _) in enumerate(block.run()):
                states[i] = out


@torch.no_grad()
def _first_inputs(
    decoder: Decoder, batches: Iterable[Tensor]
) -> tuple[list[Tensor], dict[tuple, list[tuple[tuple, dict[str, Any]]]]]:
    """What comes into the first block, and by its shape the other arguments of every block.

    Without padding these depend on the shape alone (masks, rotations), so one set serves all batches of a shape.
    """
    states: list[Tensor] = []
    given: dict[tuple, list[tuple[tuple, dict[str, Any]]]] = {}
    seen: list[tuple[Tensor, tuple, dict[str, Any]]] = []

    def pass_by(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append((hidden_states, args, kwargs))
        return hidden_states

    with contextlib.ExitStack() as replaced:
        for layer in decoder.layers:
            replaced.enter_context(_forward_as(layer.module, pass_by))
        for batch in batches:
            seen.clear()
            decoder.model.base_model(input_ids=batch.to(decoder.embedding.weight.device), use_cache=False)
            states.append(seen[0][0])
            given.setdefault(states[-1].shape, [(args, kwargs) for _, args, kwargs in seen])
    return states, given


@contextlib.contextmanager
def _forward_as(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Another forward for a while; also one that was set before, as libraries for many devices do, comes back."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before
