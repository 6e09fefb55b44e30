"""Changes of a model that keep what it computes, and make its weights and activations easier to quantize.

A few channels of a language model are far larger than the others, and one step size for all of them wastes most of the
grid. A rotation Q of the residual stream spreads them over all channels, and costs nothing afterwards:

    x' = Q x,    W' = W G Qᵀ of layers that read it after a norm with gains G,    W' = Q W of layers that write to it.

Smoothing moves the size of channels into the weights instead. What either is worth is seen with activations rounded too:
``fake_quantize_activations``.

Ashkboos et al.: QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs, NeurIPS 2024. Liu et al.: SpinQuant: LLM Quantization
with Learned Rotations, ICLR 2025 (R1 and R2 here, drawn, not learned). Xiao et al.: SmoothQuant: Accurate and Efficient
Post-Training Quantization for Large Language Models, ICML 2023.
"""

import contextlib
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeGuard

import scipy.linalg
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from heedful._decoders import Decoder, DecoderLayer, Projection, describe_decoder
from heedful._random import torch_generator
from heedful._results import track
from heedful._validation import require_number
from heedful.compress.boa.model import _batches, _evaluating, _require_loaded
from heedful.errors import InputError, UnsupportedModelError

__all__ = ["fake_quantize_activations", "rotate_model", "smooth_model"]


@torch.no_grad()
def rotate_model(model: Any, *, random_state: Any = 0) -> Any:
    """Rotate the residual stream and the values of every head, in place; what the model computes stays the same.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder with its head: Llama, Mistral, Qwen2, OPT, GPT-NeoX. A head that is tied to the embedding becomes a
        weight of its own, since the gains of the last norm go into it alone; ``config.tie_word_embeddings`` then says so.
    random_state : int, Generator, RandomState or None
        Draws the rotations. Results at few bits vary a little with it.

    Returns
    -------
    PreTrainedModel
        The same model: the gains of its norms are one, its linear layers, embeddings and biases changed.

    Raises
    ------
    InputError
        If weights are not loaded, or quantized already.
    UnsupportedModelError
        If norms stand after attention and MLP or the embedding is narrower than the stream (OPT-350m is both), there is
        no head, or a norm is neither a LayerNorm nor an RMSNorm with plain gains.

    Notes
    -----
    Q is a Hadamard matrix with random signs where the width is a power of two, and else the Kronecker product of one with
    a random orthogonal matrix of the odd factor. A LayerNorm subtracts the mean, so that its Q must keep the vector of
    ones: one reflection after the rotation sees to that. Each head of values has a rotation of its own, undone in the
    output projection. All is computed in float64, O(parameters · width), and rounded once, to the dtype of the weights: by
    so much do the logits move.
    """
    decoder = _describe_untouched(model)
    _require_rotatable(decoder)
    generator = torch_generator(random_state)
    _untie_head(decoder)
    places = _norms(decoder)
    q = _random_rotation(decoder.hidden, generator)
    if any(isinstance(norm, nn.LayerNorm) for norm, _ in places):
        q = _keep_mean(q)
    for norm, readers in places:
        _fold(norm, readers, q)
    for part in (decoder.embedding, decoder.positions, decoder.head):
        _rotate_inputs(part, q)
    for layer in track(decoder.layers, "rotate"):
        for reader in _linears(layer.q, layer.k, layer.v, layer.gate, layer.up):
            _rotate_inputs(reader, q)
        for writer in (layer.o.linear, layer.down.linear):
            _rotate_outputs(writer.weight, q)
            _rotate_outputs(writer.bias, q)
        turns = [_random_rotation(decoder.head_dim, generator) for _ in range(decoder.n_kv_heads)]
        _rotate_values(layer, torch.stack(turns))
    return model


@torch.no_grad()
def smooth_model(
    model: Any, calibration: Int[Tensor, "n length"] | Iterable[Int[Tensor, "..."]], *, mix: float = 0.5
) -> Any:
    """Move the size of large input channels into the weights that read them, in place; what the model computes stays.

    Channel j of an input is divided by  s_j = max |x_j|^mix / max |W_j|^(1−mix),  and column j of W multiplied by it. The
    division goes into what comes before: norm → query, key, value; norm → gate, up; value → output projection; and up →
    down, where the activation between them lets it through (in a gated MLP, and with ReLU).

    Parameters
    ----------
    model : PreTrainedModel
        Llama, Mistral, Qwen2, OPT, GPT-NeoX.
    calibration : LongTensor[n, length], or iterable of LongTensor[batch, length]
        Token ids. A few thousand tokens do, for only maxima are taken.
    mix : float
        From 0 (weights alone decide) to 1 (activations do); usually 0.5 to 0.8.

    Returns
    -------
    PreTrainedModel
        The same model.

    Raises
    ------
    InputError
        If weights are not loaded or quantized already, the model cannot take the tokens, or an activation is NaN or
        infinite; the message names the layer.
    UnsupportedModelError
        If a norm has no gains to divide, or norms stand after attention and MLP.

    Notes
    -----
    Channels of query heads that share a value head share a scale. One forward pass over the tokens; O(width) memory.
    """
    require_number(mix, "mix", low=0, high=1)
    decoder = _describe_untouched(model)
    places = _places_to_smooth(decoder)
    sizes = _largest_inputs(decoder, [place.readers[0] for place in places], _batches(calibration, decoder))
    for place, size in zip(places, track(sizes, "smooth"), strict=True):
        columns = torch.stack([reader.weight.abs().amax(0) for reader in place.readers]).amax(0)
        x, w = (place.share(largest.double()) for largest in (size, columns))
        place.scale(torch.where((x > 0) & (w > 0), x**mix / w ** (1 - mix), 1.0))
    return model


class ActivationQuantization:
    """What ``fake_quantize_activations`` put on a model: ``remove`` takes it off, and so does the end of a ``with`` block."""

    def __init__(self, hooks: list[RemovableHandle]):
        self._hooks = hooks

    def remove(self) -> None:
        """Let the model compute as it did before."""
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> "ActivationQuantization":
        return self

    def __exit__(self, *exception) -> None:
        self.remove()


def fake_quantize_activations(model: Any, bits: int, *, kv_bits: int | None = None) -> ActivationQuantization:
    """Round what comes into every linear layer of the blocks, and keys and values, as low-bit arithmetic would.

    Every token has a grid of its own, found as it comes (asymmetric, from its least to its greatest entry, with 0 among
    them): one for the input of a layer, one in each head for its key, after the rotation by position, and for its value.

    Parameters
    ----------
    model : PreTrainedModel
        Llama, Mistral, Qwen2, OPT, GPT-NeoX, with plain or with fake-quantized weights.
    bits : int
        Of inputs of linear layers, 2 to 16; usually 4 or 8. The head, the embedding and attention itself stay as they are.
    kv_bits : int, optional
        Of keys and values, 2 to 16, as the cache would hold them; if None they are not rounded.

    Returns
    -------
    ActivationQuantization
        A handle: ``handle.remove()``, or the end of ``with fake_quantize_activations(model, 4):``, undoes it.

    Notes
    -----
    For evaluation: it measures what rounding loses, and makes nothing faster. Keys and values are rounded when they enter
    the cache, with one and without.
    """
    require_number(bits, "bits", low=2, high=16, integer=True)
    if kv_bits is not None:
        require_number(kv_bits, "kv_bits", low=2, high=16, integer=True)
    decoder = describe_decoder(model)
    hooks = [
        linear.register_forward_pre_hook(functools.partial(_round_input, bits))
        for layer in decoder.layers
        for linear in _linears(layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down)
    ]
    if kv_bits is not None:
        hook = functools.partial(_round_cache, kv_bits)
        hooks += [layer.attention.register_forward_pre_hook(hook, with_kwargs=True) for layer in decoder.layers]
    return ActivationQuantization(hooks)


def round_tokens(x: Float[Tensor, "*tokens width"], bits: int) -> Float[Tensor, "*tokens width"]:
    """Each row rounded to a grid of its own: 2^bits values, evenly spaced over its range and 0."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    low, high = wide.amin(-1, keepdim=True).clamp_(max=0), wide.amax(-1, keepdim=True).clamp_(min=0)
    top = 2**bits - 1
    scale = (high - low) / top
    scale = torch.where(scale > 0, scale, 1.0)
    zero = (-low / scale).round_()
    codes = (wide / scale).round_().add_(zero).clamp_(0, top)
    return ((codes - zero) * scale).to(x.dtype)


def _round_input(bits: int, module: nn.Module, args: tuple) -> tuple:
    return (round_tokens(args[0], bits), *args[1:])


_CACHE_NAMES = ("cache", "past_key_values", "layer_past")  # of the argument, by version of transformers and by model


def _round_cache(bits: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    name = next((name for name in _CACHE_NAMES if name in kwargs), None)
    if name is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} gets no cache by a name that is known ({', '.join(_CACHE_NAMES)}), where its keys and "
            "values could be rounded. Leave kv_bits out."
        )
    return args, {**kwargs, name: _RoundingCache(kwargs[name], bits)}


class _RoundingCache:
    """Stands before a cache, or in the place of none, and rounds what comes to it."""

    def __init__(self, cache: Any, bits: int):
        self._cache, self._bits = cache, bits

    def update(self, key: Tensor, value: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        key, value = round_tokens(key, self._bits), round_tokens(value, self._bits)
        return (key, value) if self._cache is None else self._cache.update(key, value, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def _random_rotation(n: int, generator: torch.Generator) -> Float64[Tensor, "n n"]:
    """A Hadamard matrix of the largest power of two in ``n``, times a random orthogonal one of the rest, with random signs."""
    power = n & -n
    signs = torch.randint(2, (n,), generator=generator) * 2.0 - 1
    rest, upper = torch.linalg.qr(torch.randn(n // power, n // power, generator=generator, dtype=torch.float64))
    rest *= upper.diagonal().sign()  # uniform over all orthogonal matrices
    hadamard = torch.from_numpy(scipy.linalg.hadamard(power, dtype=float)) / power**0.5
    return torch.kron(hadamard, rest.contiguous()) * signs


def _keep_mean(q: Float64[Tensor, "n n"]) -> Float64[Tensor, "n n"]:
    """``q``, and then the reflection that brings back the vector of ones, so that a mean stays the mean."""
    ones = torch.full((len(q),), len(q) ** -0.5, dtype=q.dtype)
    mirror = q @ ones - ones
    if not mirror.any():
        return q
    return q - 2 * torch.outer(mirror, mirror @ q) / (mirror @ mirror)


def _norms(decoder: Decoder) -> list[tuple[Any, list[nn.Linear]]]:
    """Every norm with the layers that read what it gives."""
    places = []
    for layer in decoder.layers:
        places.append((layer.attention_norm, _linears(layer.q, layer.k, layer.v)))
        places.append((layer.mlp_norm, _linears(layer.gate, layer.up)))
    if decoder.final_norm is not None:
        places.append((decoder.final_norm, [decoder.head]))
    return places


def _linears(*projections: Projection | None) -> list[Any]:
    """The layers of projections, each once."""
    return list(dict.fromkeys(projection.linear for projection in projections if projection is not None))


def _describe_untouched(model: Any) -> Decoder:
    decoder = describe_decoder(model)
    _require_loaded(model)
    for layer in decoder.layers:
        for linear in _linears(layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down):
            if hasattr(linear, "quantized_bits"):
                raise InputError(
                    f"{layer.name} of this {type(model).__name__} is quantized, and its weights would leave their grids. "
                    "Rotate or smooth first, then quantize."
                )
    return decoder


def _require_rotatable(decoder: Decoder) -> None:
    name, width = type(decoder.model).__name__, decoder.embedding.embedding_dim
    _require_pre_norm(decoder)
    if width != decoder.hidden:
        raise UnsupportedModelError(
            f"{name} projects embeddings of width {width} to a stream of {decoder.hidden}, which is not rotated here."
        )
    if decoder.head is None:
        raise UnsupportedModelError(
            f"{name} has no head that could undo the rotation. Load the model with it, e.g. by AutoModelForCausalLM."
        )
    for norm, readers in _norms(decoder):
        _require_plain_norm(norm)
        if not _takes_bias(readers) and norm.weight is not None and (norm.weight == 0).any():
            bias = getattr(norm, "bias", None)
            if bias is not None and bias.any():
                raise UnsupportedModelError(
                    f"{name} has a norm with gains of zero, and its bias can go nowhere, as what reads it has none. Quantize "
                    "the model as it is."
                )


def _require_pre_norm(decoder: Decoder) -> None:
    if not decoder.pre_norm:
        raise UnsupportedModelError(
            f"{type(decoder.model).__name__} has its norms after attention and MLP, in the residual stream itself, where "
            "neither a rotation nor a scale can pass. Quantize it as it is."
        )


def _require_plain_norm(norm: Any) -> None:
    """A LayerNorm, or what gives x / rms(x) · gains; others, such as gains of 1 + weight, would be folded wrongly."""
    if isinstance(norm, nn.LayerNorm):
        return
    gains = getattr(norm, "weight", None)
    if gains is not None:
        x = torch.linspace(1, 2, len(gains)).to(gains)
        expected = x / x.square().mean().sqrt() * gains
    if gains is None or not torch.allclose(norm(x[None])[0], expected, rtol=0.02, atol=0.0, equal_nan=True):
        raise UnsupportedModelError(f"{type(norm).__name__} is neither a LayerNorm nor an RMSNorm with plain gains.")


def _untie_head(decoder: Decoder) -> None:
    head: Any = decoder.head
    if head.weight is decoder.embedding.weight:
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
        decoder.model.config.tie_word_embeddings = False
        # What transformers remembers of its tied weights it would otherwise leave out when saving.
        decoder.model.all_tied_weights_keys = {}


def _fold(norm: Any, readers: list[nn.Linear], q: Float64[Tensor, "n n"]) -> None:
    """Move gains and bias of a norm into the layers that read it."""
    gains, bias = norm.weight, getattr(norm, "bias", None)
    if bias is not None and _takes_bias(readers):
        for reader in readers:
            reader.bias.copy_(reader.bias.double() + reader.weight.double() @ bias.double())
        bias.zero_()
    elif bias is not None and bias.any():
        # It stays, rotated, and divided by the gains that the readers will multiply it with.
        bias.copy_(q.to(bias.device) @ (bias.double() / gains.double()))
    if gains is not None:
        for reader in readers:
            reader.weight.copy_(reader.weight.double() * gains.double())
        gains.fill_(1)


def _takes_bias(readers: list[nn.Linear]) -> bool:
    return all(reader.bias is not None for reader in readers)


def _rotate_inputs(reader: Any, q: Float64[Tensor, "n n"]) -> None:
    """Of a layer or a table of embeddings (W ← W Qᵀ); None has nothing to rotate."""
    if reader is not None:
        reader.weight.copy_(reader.weight.double() @ q.to(reader.weight.device).T)


def _rotate_outputs(part: Tensor | None, q: Float64[Tensor, "n n"]) -> None:
    """Of a weight or a bias (W ← Q W); None has nothing to rotate."""
    if part is not None:
        part.copy_(q.to(part.device) @ part.double())


def _rotate_values(layer: DecoderLayer, turns: Float64[Tensor, "kv_heads head_dim head_dim"]) -> None:
    """Rotate what each value head makes, and turn it back in the output projection of the query heads that read it."""
    (n_kv, dim, _), rows = turns.shape, _rows(layer.v)
    for part in filter(_is_there, (layer.v.linear.weight, layer.v.linear.bias)):
        heads = part[rows].double().view(n_kv, dim, -1)
        part[rows] = (turns.to(part.device) @ heads).view_as(part[rows]).to(part.dtype)
    out = layer.o.linear.weight
    heads = out.double().unflatten(1, (n_kv, -1, dim))
    out.copy_(torch.einsum("okgj,kij->okgi", heads, turns.to(out.device)).flatten(1))


def _is_there(part: Tensor | None) -> TypeGuard[Tensor]:
    return part is not None


def _rows(projection: Projection) -> Tensor | slice:
    return slice(None) if projection.rows is None else projection.rows


class _Place(NamedTuple):
    """Where sizes can move: what divides its outputs, what reads them, and which output each input channel comes from."""

    before: Any  # a norm or a Projection
    readers: list[Projection]
    owners: Tensor

    def share(self, sizes: Tensor) -> Tensor:
        """The largest of the sizes of all channels that come from one output."""
        n = int(self.owners.max()) + 1
        return sizes.new_zeros(n).scatter_reduce(0, self.owners.to(sizes.device), sizes, "amax")

    def scale(self, scales: Float64[Tensor, " outputs"]) -> None:
        """Divide what comes before, and multiply the columns of what reads it."""
        for linear in _linears(*self.readers):
            linear.weight.copy_(linear.weight.double() * scales[self.owners])
        if isinstance(self.before, Projection):
            rows = _rows(self.before)
            for part in filter(_is_there, (self.before.linear.weight, self.before.linear.bias)):
                part[rows] = (part[rows].double() / scales.view(-1, *[1] * (part.ndim - 1))).to(part.dtype)
        else:
            for part in filter(_is_there, (self.before.weight, getattr(self.before, "bias", None))):
                part.copy_(part.double() / scales)


def _places_to_smooth(decoder: Decoder) -> list[_Place]:
    _require_pre_norm(decoder)
    stream = torch.arange(decoder.hidden)
    values = torch.arange(decoder.n_kv_heads * decoder.head_dim).view(decoder.n_kv_heads, 1, decoder.head_dim)
    values = values.expand(-1, decoder.n_heads // decoder.n_kv_heads, -1).flatten()
    config = decoder.model.config
    relu = getattr(config, "activation_function", getattr(config, "hidden_act", None)) == "relu"
    places = []
    for layer in decoder.layers:
        for norm in (layer.attention_norm, layer.mlp_norm):
            _require_plain_norm(norm)
            if getattr(norm, "weight", None) is None:
                raise UnsupportedModelError(f"{layer.name} has a norm without gains, where no scale can go.")
        places.append(_Place(layer.attention_norm, [layer.q, layer.k, layer.v], stream))
        places.append(_Place(layer.v, [layer.o], values))
        places.append(_Place(layer.mlp_norm, [part for part in (layer.gate, layer.up) if part is not None], stream))
        if layer.gate is not None or relu:
            places.append(_Place(layer.up, [layer.down], torch.arange(layer.down.linear.in_features)))
    return places


def _largest_inputs(
    decoder: Decoder, readers: list[Projection], batches: list[Int[Tensor, "..."]]
) -> list[Float[Tensor, " width"]]:
    """The greatest absolute value in each channel of the inputs of some layers, over all calibration tokens."""
    sizes = [reader.linear.weight.new_zeros(reader.linear.in_features) for reader in readers]

    def watch(index: int, module: nn.Module, args: tuple) -> None:
        largest = args[0].abs().flatten(0, -2).amax(0)
        if not largest.isfinite().all():
            raise InputError(
                f"what comes into {readers[index].name} is NaN or infinite. Check the model and the tokens."
            )
        sizes[index] = torch.maximum(sizes[index], largest)

    with contextlib.ExitStack() as stack:
        stack.enter_context(_evaluating(decoder.model))
        for index, reader in enumerate(readers):
            hook = reader.linear.register_forward_pre_hook(functools.partial(watch, index))
            stack.callback(hook.remove)
        for batch in batches:
            decoder.model.base_model(input_ids=batch.to(decoder.embedding.weight.device), use_cache=False)
    return sizes
