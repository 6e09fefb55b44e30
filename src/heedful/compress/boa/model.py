"""Over a whole model: block by block, each calibrated on what the blocks quantized before it make of the texts."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from heedful._checkpoints._safetensors import bits as bytes_of
from heedful._decoders import (
    AttentionCall,
    BlockRun,
    Decoder,
    DecoderLayer,
    Projection,
    describe_decoder,
    record_attention,
    run_by_block,
)
from heedful._files import load_arrays, save_arrays
from heedful._results import Event, Report, report_progress
from heedful.compress._grids import QuantGrid, require_groups
from heedful.compress._sparsity import select_layers
from heedful.compress.boa.config import QuantConfig
from heedful.compress.boa.factors import AttentionStatistics, Factor, Rotation, RunningGram, rotate
from heedful.compress.boa.solve import QuantizedWeight, _kron_loss, kron_quantize
from heedful.errors import (
    ConvergenceError,
    FileFormatError,
    HeedfulWarning,
    InputError,
    ParameterError,
    UnsupportedModelError,
)

__all__ = ["LayerReport", "QuantizationReport", "QuantizedModel", "quantize"]

_TOKENS_PER_BATCH = 2048


@dataclasses.dataclass(frozen=True)
class LayerReport(Report):
    """What quantization did to one layer.

    Losses are tr(H_row ΔW H_col ΔWᵀ), the error as the method measures it, relative to that of leaving the layer out
    (ΔW = −W): 0 is perfect.

    Attributes
    ----------
    name : str
        Of the layer.
    part : {"q", "k", "v"} or None
        Which projection, if it was quantized head by head.
    block : int
        Number of its block.
    loss, loss_rtn, loss_gptq : float
        Of the weight that was chosen; of rounding to nearest; of GPTQ, which does not know attention. All by the measure of
        this method and these bits. ``loss_gptq`` is None for ``method="rtn"``, which does not try it.
    act_order : str
        The order of the solver.
    seconds : float
        Time that the layer's solve took.
    """

    name: str
    part: Literal["q", "k", "v"] | None
    block: int
    loss: float
    loss_rtn: float
    loss_gptq: float | None
    act_order: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class QuantizationReport(Report):
    """What ``quantize`` did.

    Attributes
    ----------
    method : str
        The method.
    bits : int
        Bits a weight.
    tokens : int
        Tokens of calibration.
    layers : tuple of LayerReport
        In the order in which they were quantized.
    seconds : float
        Time of the whole, less what it took to compare with RTN and GPTQ.
    """

    method: str
    bits: int
    tokens: int
    layers: tuple[LayerReport, ...]
    seconds: float


@dataclasses.dataclass(frozen=True)
class QuantizedModel:
    """A model with quantized weights.

    Attributes
    ----------
    model : PreTrainedModel
        The model that was given: the same class, its weights replaced by what the codes stand for.
    layers : dict of str to QuantizedWeight
        Codes and grid of every quantized layer; ``layers[name].dequantize()`` is that layer's weight, bit for bit.
    report : QuantizationReport
        Losses and times.
    config : QuantConfig
        The settings.
    """

    model: Any
    layers: dict[str, QuantizedWeight]
    report: QuantizationReport
    config: QuantConfig

    def save_pretrained(
        self,
        out: str | os.PathLike,
        format: Literal["compressed-tensors", "dequantized"] = "compressed-tensors",
        *,
        overwrite: bool = False,
    ) -> None:
        """Write a folder that transformers opens.

        Parameters
        ----------
        out : str or path
            The folder.
        format : {"compressed-tensors", "dequantized"}
            Packed codes, which vLLM serves, or plain weights in the model's dtype.
        overwrite : bool
            Whether it may replace a checkpoint that is there.
        """
        from heedful.compress.boa.packing import write_folder

        write_folder(self.model, self.layers, out, format=format, overwrite=overwrite)


def quantize(
    model: Any,
    calibration: Tensor | Iterable[Tensor],
    config: QuantConfig = QuantConfig(),  # noqa: B008  (frozen)
    *,
    layout: Mapping[str, str] | None = None,
    work_dir: str | os.PathLike | None = None,
) -> QuantizedModel:
    """Quantize the linear layers in the blocks of a decoder, in place.

    Each block runs on the calibration texts, as the blocks quantized before it pass them on. What its layers and its
    attention then see decides how they are quantized. Embeddings, norms, biases and the head stay as they are.

    Parameters
    ----------
    model : PreTrainedModel
        Llama, Mistral, Qwen2, Qwen3, OPT or GPT-NeoX, in float32, bfloat16, float16 or float64, on any device.
    calibration : LongTensor of shape (n, length), or iterable of LongTensor
        Token ids of texts, without padding; usually 128 sequences of 2048. Of an iterable each is a sequence or a batch.
    config : QuantConfig
        The settings.
    layout : mapping of str to str, optional
        Where a decoder of another family keeps its parts. The keys are those of this one, of a Llama: ``{"blocks": "layers",
        "attention": "self_attn", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o":
        "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj", "attention_norm":
        "input_layernorm", "mlp_norm": "post_attention_layernorm", "final_norm": "norm"}``; the blocks are looked for in
        ``model.base_model``, their parts in each of them. ``gate`` and ``final_norm`` can be left out, ``q_norm``, ``k_norm``
        and ``positions`` (learned ones, in the base model) added, and ``qkv`` stands for a layer that makes all three, head
        after head. Rotations turn the first half of a head's rotated entries into the second, as in these families.
    work_dir : str or path, optional
        Keeps every finished block. A later call with the same model, texts and settings takes them from there, and gives
        the same bytes.

    Returns
    -------
    QuantizedModel

    Raises
    ------
    UnsupportedModelError
        An unknown layout, attention that is not causal, or weights shared between layers.
    InputError
        Tokens that the model cannot take, tensors that are not loaded, a layer that is quantized already, or activations
        that are NaN or infinite.
    ParameterError
        Groups that do not divide the inputs of a layer, or an ``exclude`` that matches nothing.
    ConvergenceError
        A factor that damping does not make positive definite.

    Notes
    -----
    Memory: the model, its codes (a byte a weight), the inputs of one block, and the Hessians of one block, of which those of
    values take n_kv_heads · d² numbers. Attention is computed for one head at a time.
    """
    if not isinstance(config, QuantConfig):
        raise ParameterError(f"config must be a QuantConfig; got {config!r}.")
    decoder = describe_decoder(model, layout=layout)
    _require_loaded(model)
    batches = _batches(calibration, decoder)
    tokens = sum(batch.numel() for batch in batches)
    targets = _targets(decoder, config, tokens)
    work = _Work(work_dir, lambda: _digest(model, batches, config, layout), config)
    last = max(i for i, layer in enumerate(decoder.layers) if _within(layer, targets))
    layers: dict[str, QuantizedWeight] = {}
    reports: list[LayerReport] = []
    clock = _Clock()
    with _evaluating(model), record_attention(model, keep=1) as calls:
        for index, block in enumerate(run_by_block(model, batches, layout=layout)):
            chosen = _within(block.layer, targets)
            done = work.load(index, chosen) or _Done({}, [])
            if chosen and not done.layers:
                done = _quantize_block(block, index, chosen, config, calls, clock)
                work.save(index, done)
            for name, weight in done.layers.items():
                chosen[name].weight.data.copy_(weight.dequantize())
                chosen[name].quantized_bits = config.bits  # type: ignore[assignment]  # so that nobody does it twice
            layers |= done.layers
            reports += done.reports
            report_progress(Event("quantize", index + 1, last + 1, _means(done.reports)))
            if index == last:
                break
    report = QuantizationReport(config.method, config.bits, tokens, tuple(reports), clock.seconds)
    return QuantizedModel(model, layers, report, config)


class _Part(NamedTuple):
    """Rows of a layer that are quantized together: all of them, or those of one projection, which fall into heads."""

    role: Literal["q", "k", "v"] | None
    rows: Tensor | None
    n_heads: int | None


class _Done(NamedTuple):
    """A block that has been quantized."""

    layers: dict[str, QuantizedWeight]
    reports: list[LayerReport]


class _Clock:
    """Seconds since it was made, without those while it was stopped."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._begin

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._begin += time.perf_counter() - begin


def _quantize_block(
    block: BlockRun,
    index: int,
    targets: Mapping[str, nn.Linear],
    config: QuantConfig,
    calls: deque[AttentionCall],
    clock: _Clock,
) -> _Done:
    """Calibrate all layers of a block on its inputs in one pass, then quantize one after the other."""
    parts = {name: _parts(block.layer, linear, config) for name, linear in targets.items()}
    factors, inputs = _calibrate(block, targets, parts, config, calls)
    done = _Done({}, [])
    for name, linear in targets.items():
        pieces = []
        for part in parts[name]:
            weight = linear.weight.detach() if part.rows is None else linear.weight.detach()[part.rows]
            weight = weight if part.n_heads is None else weight.unflatten(0, (part.n_heads, -1))
            factor = factors.pop((name, part.role))
            begin = clock.seconds
            try:
                piece = kron_quantize(weight, *factor, config=config)
            except ConvergenceError as error:
                raise ConvergenceError(f"{name}: {error}") from error
            seconds = clock.seconds - begin
            with clock.stopped():
                losses = _losses(weight, piece, factor, inputs[name], config)
            done.reports.append(LayerReport(name, part.role, index, *losses, piece.act_order, seconds))
            pieces.append(piece if part.n_heads is None else piece.merge_heads())
        done.layers[name] = pieces[0] if len(pieces) == 1 else _interleave(pieces, parts[name])
    return done


def _parts(layer: DecoderLayer, linear: nn.Linear, config: QuantConfig) -> list[_Part]:
    """What of a layer is quantized together: attention is heeded head by head."""
    whole = [_Part(None, None, None)]
    if config.method != "boa":
        return whole
    projections: dict[Any, Projection] = {"q": layer.q, "k": layer.k, "v": layer.v}
    return [_Part(role, x.rows, x.n_heads) for role, x in projections.items() if x.linear is linear] or whole


def _calibrate(
    block: BlockRun,
    targets: Mapping[str, nn.Linear],
    parts: Mapping[str, list[_Part]],
    config: QuantConfig,
    calls: deque[AttentionCall],
) -> tuple[dict[tuple[str, str | None], Factor], dict[str, Tensor]]:
    """Of every part the factors of its loss, and of every layer X Xᵀ."""
    layer = block.layer
    roles = {part.role for some in parts.values() for part in some} - {None}
    statistics = AttentionStatistics(
        value_hessian=config.value_hessian if "v" in roles else "shared", value_rows=config.value_rows
    )
    # Layers that read the same share what is known of it.
    reads = {layer.k.linear: layer.q.linear, layer.v.linear: layer.q.linear}
    if layer.gate is not None:
        reads[layer.gate.linear] = layer.up.linear
    grams = {layer.q.linear: statistics.inputs} if roles else {}
    seen: list[Tensor] = []
    plain = True
    with contextlib.ExitStack() as hooks:
        for linear in targets.values():
            reader = reads.get(linear, linear)
            if reader not in grams:
                grams[reader] = RunningGram()
                watch = functools.partial(_add_inputs, grams[reader])
                hooks.callback(reader.register_forward_pre_hook(watch).remove)
        if roles:
            hooks.callback(layer.q.linear.register_forward_pre_hook(lambda _, args: seen.append(args[0])).remove)
        for i, (_, kwargs) in enumerate(block.run()):
            if not roles:
                continue
            if not calls or calls[-1].module is not layer.attention:
                raise UnsupportedModelError(
                    f"{layer.name}: its attention is not that of the layout, a {type(layer.attention).__name__}, or does not "
                    "run through the AttentionInterface of transformers. Quantize with method='gptq'."
                )
            call, x, rope = calls.pop(), seen.pop(), kwargs.get("position_embeddings")
            plain = plain if i else _is_plain(layer, call, x, rope)
            statistics.update(call.query, call.key, x, call.probs, rope=rope)

    inputs = {name: grams[reads.get(linear, linear)].mean for name, linear in targets.items()}
    factors: dict[tuple[str, str | None], Factor] = {(name, None): Factor(h, None) for name, h in inputs.items()}
    if roles:
        query, key, value = statistics.factors(layer.o.weight)
        if not plain:
            warnings.warn(
                f"Between {layer.q.name}, {layer.k.name} and their attention stands more than a rotation, such as a norm. "
                "Both are quantized as by GPTQ; values heed attention.",
                HeedfulWarning,
                stacklevel=4,
            )
            query, key = query._replace(h_row=None), key._replace(h_row=None)
        by_role = {"q": query, "k": key, "v": value}
        factors |= {(name, part.role): by_role[part.role] for name in parts for part in parts[name] if part.role}
    for (name, _), factor in factors.items():
        _require_finite(name, factor)
    return factors, inputs


def _add_inputs(gram: RunningGram, module: nn.Module, args: tuple[Tensor, ...]) -> None:
    gram.update(args[0].flatten(0, -2))


def _is_plain(layer: DecoderLayer, call: AttentionCall, x: Tensor, rope: Rotation | None) -> bool:
    """Whether queries and keys are what their projections make of ``x``, rotated and scaled, and nothing else."""
    if layer.q_norm is not None or layer.k_norm is not None:
        return False
    for projection, given in ((layer.q, call.query), (layer.k, call.key)):
        made = nn.functional.linear(x, projection.weight, projection.bias).unflatten(-1, (given.shape[1], -1))
        made = rotate(made.transpose(1, 2), rope)
        made, given = made.double().flatten(), given.double().flatten()
        # Half precision rounds what is rotated; a norm or another rotation does much more than that. Zeros are plain.
        if made @ given < 0.999 * made.norm() * given.norm():
            return False
    return True


def _losses(
    weight: Tensor, chosen: QuantizedWeight, factor: Factor, inputs: Tensor, config: QuantConfig
) -> tuple[float, float, float | None]:
    """Relative losses of what was chosen, of rounding, and of GPTQ, which has nothing but X Xᵀ."""
    exact = weight.to(inputs.dtype)
    whole = _kron_loss(exact, *factor).sum().clamp_min(torch.finfo(inputs.dtype).tiny)

    def loss(quantized: Tensor) -> float:
        return float(_kron_loss(quantized.to(inputs.dtype) - exact, *factor).sum() / whole)

    same_grid = factor.h_col is inputs
    if config.method == "boa" and not (same_grid and factor.h_row is None):
        blind = dataclasses.replace(config, method="gptq")
        gptq = kron_quantize(weight, inputs, config=blind, grid=chosen.grid if same_grid else None)
    else:
        gptq = chosen
    rtn = loss(gptq.grid.fake_quantize(weight))
    return loss(chosen.dequantize()), rtn, None if config.method == "rtn" else loss(gptq.dequantize())


def _interleave(pieces: list[QuantizedWeight], parts: list[_Part]) -> QuantizedWeight:
    """The rows of several parts, in their places in the layer."""
    places = torch.cat([part.rows for part in parts if part.rows is not None]).argsort()

    def joined(tensors: Iterable[Tensor]) -> Tensor:
        return torch.cat(list(tensors))[places]

    grid = dataclasses.replace(
        pieces[0].grid,
        scale=joined(piece.grid.scale for piece in pieces),
        zero=joined(piece.grid.zero for piece in pieces),
    )
    return dataclasses.replace(pieces[0], codes=joined(piece.codes for piece in pieces), grid=grid)


class _Work:
    """Finished blocks on disk: one file each, of use to a run with the same weights, texts and settings alone."""

    def __init__(self, folder: str | os.PathLike | None, key: Callable[[], str], config: QuantConfig):
        self._folder, self._config = None if folder is None else Path(folder), config
        self._key = "" if folder is None else key()
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)

    def load(self, index: int, targets: Mapping[str, nn.Linear]) -> _Done | None:
        """The block, if it is there, whole and of this run."""
        if self._folder is None or not (path := self._path(index)).is_file():
            return None
        try:
            arrays, meta = load_arrays(path)
            if meta.get("key") != self._key:
                return None
            layers = {
                name: self._weight(arrays, name, linear, meta["orders"][name]) for name, linear in targets.items()
            }
            return _Done(layers, [LayerReport(**report) for report in meta["reports"]])
        except (FileFormatError, LookupError, TypeError):
            return None

    def save(self, index: int, done: _Done) -> None:
        """Keep a block."""
        if self._folder is None:
            return
        arrays: dict[str, np.ndarray] = {}
        for name, weight in done.layers.items():
            arrays[f"{name}.codes"] = weight.codes.cpu().numpy()
            arrays[f"{name}.scale"] = weight.grid.scale.double().cpu().numpy()  # NumPy has no bfloat16
            arrays[f"{name}.zero"] = weight.grid.zero.cpu().numpy()
        reports = [report.to_dict() for report in done.reports]
        orders = {name: weight.act_order for name, weight in done.layers.items()}
        save_arrays(self._path(index), arrays, {"key": self._key, "reports": reports, "orders": orders})

    def _path(self, index: int) -> Path:
        assert self._folder is not None
        return self._folder / f"block-{index:04d}.safetensors"

    def _weight(self, arrays: Mapping[str, np.ndarray], name: str, linear: nn.Linear, order: Any) -> QuantizedWeight:
        codes, scale, zero = (
            torch.from_numpy(arrays[f"{name}.{part}"]).to(linear.weight.device) for part in ("codes", "scale", "zero")
        )
        qmax = 2**self._config.bits - 1
        grid = QuantGrid(scale.to(linear.weight.dtype), zero, 0, qmax, -1, self._config.group_size)
        return QuantizedWeight(codes, grid, order)


def _digest(model: Any, batches: list[Tensor], config: QuantConfig, layout: Mapping[str, str] | None) -> str:
    """What decides the codes: settings, the model's and its every weight, and the texts."""
    settings = dataclasses.asdict(config) | {"exclude": list(config.exclude), "layout": dict(layout or {})}
    settings["model"] = model.config.to_dict() | {"_name_or_path": None}  # which folder it came from is no matter
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, tensor in [*model.state_dict().items(), *(("texts", batch) for batch in batches)]:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(bytes_of(tensor).numpy().data)
    return digest.hexdigest()


def _require_loaded(model: Any) -> None:
    """Raise ``InputError`` unless every weight is here, as a plain number."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise InputError(
                f"{name} is not loaded (it is on the meta device, or offloaded). Load the whole model: "
                f"{type(model).__name__}.from_pretrained(folder), without device_map, or with one that offloads nothing."
            )
    # One that was dequantized while it was loaded does not know that any more, but the folder that it came from does.
    if getattr(model.config, "quantization_config", None) or _has_packed_codes(model.name_or_path):
        raise InputError(
            f"this {type(model).__name__} is quantized already (its config has a quantization_config). Quantize the "
            "original; what codes left out does not come back."
        )


def _has_packed_codes(folder: str | None) -> bool:
    """Whether a folder says so. One that was built in memory has the empty name, which is not that of this folder."""
    try:
        settings = json.loads(Path(folder, "config.json").read_bytes()) if folder else None
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and bool(settings.get("quantization_config"))


def _batches(calibration: Tensor | Iterable[Tensor], decoder: Decoder) -> list[Tensor]:
    """Calibration texts in batches of few tokens, all of them such as the model can take."""
    if isinstance(calibration, Tensor) and calibration.ndim == 2:
        given = list(calibration.split(max(1, _TOKENS_PER_BATCH // max(1, calibration.shape[1]))))
    else:
        try:
            given = [ids[None] if ids.ndim == 1 else ids for ids in map(torch.as_tensor, calibration)]
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(
                "calibration must hold token ids, a tensor of shape (n, length) or an iterable of sequences, as the model's "
                f"tokenizer makes them of texts; got a {type(calibration).__name__}: {error}."
            ) from error
    vocabulary = decoder.embedding.num_embeddings
    longest = decoder.model.config.max_position_embeddings if decoder.positions is not None else None
    if not sum(ids.numel() for ids in given):
        raise InputError("calibration is empty. Give token ids of texts, usually 128 sequences of 2048.")
    for ids in given:
        if ids.ndim != 2 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise InputError(
                f"calibration must hold token ids, integers of shape (n, length); got {ids.dtype} of {tuple(ids.shape)}. "
                "One sequence alone goes in as ids[None]."
            )
        if ids.shape[1] < 2:
            raise InputError(
                f"calibration has a sequence of {ids.shape[1]} tokens; attention needs at least 2, and is usually "
                "calibrated on 2048."
            )
        if longest is not None and ids.shape[1] > longest:
            raise InputError(f"calibration has a sequence of {ids.shape[1]} tokens; the model has {longest} positions.")
        least, greatest = (int(end) for end in ids.long().aminmax())
        if least < 0 or greatest >= vocabulary:
            raise InputError(
                f"calibration has ids from {least} to {greatest}; the model's vocabulary goes from 0 to "
                f"{vocabulary - 1}. Use the tokenizer of this model, and no padding."
            )
    return [ids.long() for ids in given]


def _targets(decoder: Decoder, config: QuantConfig, tokens: int) -> dict[str, nn.Linear]:
    """The layers to quantize, by name."""
    blocks = {f"{layer.name.rpartition('.')[0]}.*" for layer in decoder.layers}
    exclude = [entry for entry in config.exclude if entry != "lm_head"]  # it is in no block
    targets: dict[str, Any] = select_layers(decoder.model, include=tuple(blocks), exclude=exclude)
    for name, linear in targets.items():
        if hasattr(linear, "quantized_bits"):
            raise InputError(
                f"{name} was quantized before, to {linear.quantized_bits} bits. Load the original model; with a work_dir, "
                "finished blocks are not computed again."
            )
        if not bool(linear.weight.isfinite().all()):
            raise InputError(f"the weight of {name} has entries that are NaN or infinite: the model is damaged.")
        require_groups(linear.in_features, config.group_size)
    widest = max(targets, key=lambda name: targets[name].in_features)
    if tokens < targets[widest].in_features:
        warnings.warn(
            f"{tokens} tokens of calibration are fewer than the {targets[widest].in_features} inputs of {widest}: what they do "
            "not show is left to damping. Give more texts.",
            HeedfulWarning,
            stacklevel=3,
        )
    return targets


def _within(layer: DecoderLayer, targets: Mapping[str, nn.Linear]) -> dict[str, nn.Linear]:
    """The targets in one block."""
    return {name: linear for name, linear in targets.items() if name.startswith(f"{layer.name}.")}


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and afterwards that of before."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _require_finite(name: str, factor: Factor) -> None:
    """Raise ``InputError`` if what a layer or its attention saw is not finite: squares of it are on the diagonals."""
    for h in factor:
        if h is not None and not bool(h.diagonal(dim1=-2, dim2=-1).isfinite().all()):
            raise InputError(
                f"the activations at {name} are NaN or infinite. Find out where they come from: a dtype too narrow "
                "(load the model in float32 or bfloat16), or weights that are damaged."
            )


def _means(reports: list[LayerReport]) -> dict[str, float]:
    """Losses of a block, to show."""
    rows = {name: [getattr(report, name) for report in reports] for name in ("loss", "loss_rtn", "loss_gptq")}
    return {name: float(np.mean(row)) for name, row in rows.items() if row and None not in row}
