"""Quantized models on disk: codes packed bit by bit, as compressed-tensors lays them out.

In the place of a layer's ``weight`` stand ``weight_packed`` (the codes of a row as one string of bits, cut into int32),
``weight_scale``, ``weight_zero_point`` (packed along the rows, if the grid is asymmetric) and ``weight_shape``; config.json
says under ``quantization_config`` how many bits a code has. vLLM and transformers open such folders; nothing in here needs
the package compressed-tensors.
"""

import dataclasses
import functools
import json
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Int32, UInt8
from torch import Tensor, nn

from heedful._checkpoints import CheckpointWriter, TensorInfo, TensorSource, companions, open_checkpoint
from heedful._results import logger, track
from heedful._validation import require_choice
from heedful.compress._grids import QuantGrid
from heedful.compress.boa.solve import QuantizedWeight
from heedful.errors import FileFormatError, InputError

_FORMAT, _PACKED = "pack-quantized", ".weight_packed"
_VERSION = "0.20.1"  # of compressed-tensors, whose layout this is
_SERVED = {(4, False), (4, True), (8, True)}  # bits and symmetry for which servers have kernels
_ROWS = 1024  # packed at a time: their codes take a byte for every bit meanwhile


def pack_codes(codes: UInt8[Tensor, "rows cols"], bits: int) -> Int32[Tensor, "rows words"]:
    """Rows of codes as rows of ⌈cols · bits / 32⌉ words: the bits of one code after those of the other, the lowest first."""
    rows, cols = codes.shape
    words = np.zeros((rows, -(-cols * bits // 32) * 4), dtype=np.uint8)
    for start in range(0, rows, _ROWS):
        part = codes[start : start + _ROWS].cpu().numpy()
        string = np.unpackbits(part[..., None], axis=-1, count=bits, bitorder="little").reshape(len(part), -1)
        packed = np.packbits(string, axis=-1, bitorder="little")
        words[start : start + _ROWS, : packed.shape[1]] = packed
    return torch.from_numpy(words.view("<i4").astype(np.int32, copy=False))


def unpack_codes(words: Int32[Tensor, "rows words"], bits: int, cols: int) -> UInt8[Tensor, "rows cols"]:
    """What ``pack_codes`` was given."""
    codes = np.empty((len(words), cols), dtype=np.uint8)
    for start in range(0, len(words), _ROWS):
        part = words[start : start + _ROWS].cpu().contiguous().numpy().astype("<i4", copy=False).view(np.uint8)
        string = np.unpackbits(part, axis=-1, count=cols * bits, bitorder="little").reshape(len(part), cols, bits)
        codes[start : start + _ROWS] = np.packbits(string, axis=-1, bitorder="little")[..., 0]
    return torch.from_numpy(codes)


def write_folder(
    model: Any,
    layers: Mapping[str, QuantizedWeight],
    out: str | os.PathLike,
    *,
    format: Literal["compressed-tensors", "dequantized"] = "compressed-tensors",
    overwrite: bool = False,
) -> Path:
    """Write a model with quantized weights as a folder that transformers opens.

    Parameters
    ----------
    model : PreTrainedModel
        Its weights are those that the codes stand for.
    layers : mapping of str to QuantizedWeight
        The quantized layers by name, whole, with one width of codes and one size of groups.
    out : path
        The folder. It appears when it is complete. If the model was loaded from a folder, that one's tokenizer and
        generation settings are copied along.
    format : {"compressed-tensors", "dequantized"}
        Packed codes, or plain weights in the dtype of the model.
    overwrite : bool
        Whether ``out`` may be a checkpoint already, which is replaced.

    Raises
    ------
    InputError
        If the model's weights are no longer those of the codes, or layers have different grids.
    FileExistsError, FileNotFoundError, OSError
        If ``out`` cannot be written.

    Notes
    -----
    vLLM has kernels for 4 bits, and for 8 if the grid is symmetric. Other codes are written the same way, and transformers
    opens them; whether a server does has to be tried, which the log says.
    """
    require_choice(format, "format", ("compressed-tensors", "dequantized"))
    _require_same(model, layers)
    config, scheme = model_config(model), None
    if format == "compressed-tensors":
        scheme = _Scheme.of(layers)
        config["quantization_config"] = scheme.to_config(_other_linears(model, layers))
        if (scheme.bits, scheme.symmetric) not in _SERVED:
            kind = "symmetric" if scheme.symmetric else "asymmetric"
            logger.warning("%s: servers may have no kernel for %s codes of %d bits.", out, kind, scheme.bits)
    tensors = _tensors(model, layers, scheme)
    files: dict[str, Path | str] = {}
    if model.name_or_path and os.path.isdir(model.name_or_path):  # none or "" if the model was made, not loaded
        files |= companions(Path(model.name_or_path))
    if getattr(model, "generation_config", None) is not None:
        files["generation_config.json"] = model.generation_config.to_json_string()
    plan = {name: info for name, (info, _) in tensors.items()}
    # A key of its own: a model in memory has no name by which a later run could know that it is the same.
    with CheckpointWriter(out, plan, key=secrets.token_hex(), overwrite=overwrite) as writer:
        for name in track(writer.pending, "save"):
            writer.add(name, tensors[name][1]())
        return writer.finish(config=config, files=files)


def model_config(model: Any) -> dict[str, Any]:
    """What ``config.json`` says of a model: enough to build another of its class and dtype."""
    config = json.loads(model.config.to_json_string())
    return config | {"architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")}


class PackedModel(NamedTuple):
    """What a folder of packed codes holds: the configuration of the model without codes, its tensors, and what was packed."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    bits: int
    layers: tuple[str, ...]


def read_folder(folder: str | os.PathLike) -> PackedModel:
    """The tensors of a model in a folder of packed codes, as the weights that these stand for.

    Parameters
    ----------
    folder : path
        As ``write_folder`` or llm-compressor makes it: only weights are quantized, by channels or groups, all alike.

    Raises
    ------
    FileFormatError
        If files are damaged, do not agree with each other, or hold what is not read here.
    """
    source = open_checkpoint(folder)
    config = dict(source.config or {})
    scheme = _Scheme.from_config(source.origin, config.pop("quantization_config", None))
    layers = tuple(name.removesuffix(_PACKED) for name in source if name.endswith(_PACKED))
    tensors = {}
    for name in track(source.names, "load"):
        layer, _, part = name.rpartition(".weight_")
        if layer not in layers:
            tensors[name] = source.get(name).clone()  # the file may go, the model stays
        elif part == "packed":
            tensors[f"{layer}.weight"] = scheme.read(source, layer).dequantize()
        elif part not in scheme.parts:
            raise FileFormatError(f"{source.origin} holds {name}, which is not read here. Open it with transformers.")
    return PackedModel(config, tensors, scheme.bits, layers)


@dataclasses.dataclass(frozen=True)
class _Scheme:
    """How all layers are packed: bits of a code, whether the zero point is fixed, and inputs that share a scale or -1."""

    bits: int
    symmetric: bool
    group_size: int

    @classmethod
    def of(cls, layers: Mapping[str, QuantizedWeight]) -> "_Scheme":
        grids = [weight.grid for weight in layers.values()]
        kinds = {(grid.qmax, grid.group_size) for grid in grids}
        if len(kinds) != 1:
            raise InputError(
                f"layers with one width of codes and one size of groups are packed; got {len(kinds)} kinds of grids. "
                "Save with format='dequantized'."
            )
        ((qmax, group_size),) = kinds
        middle = (qmax + 1) // 2
        return cls(qmax.bit_length(), all(bool((grid.zero == middle).all()) for grid in grids), group_size)

    @classmethod
    def from_config(cls, origin: str, settings: Any) -> "_Scheme":
        match settings:
            case {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {**groups},
            } if len(groups) == 1 and not settings.get("kv_cache_scheme"):
                group: Any = next(iter(groups.values()))
                match group:
                    case {"weights": {"num_bits": int(bits), "type": "int", "symmetric": bool(symmetric), **more}} if (
                        1 <= bits <= 8
                        and not (
                            group.get("input_activations") or group.get("output_activations") or more.get("dynamic")
                        )
                        and more.get("actorder") in (None, "weight", "static")
                    ):
                        match more.get("strategy"), more.get("group_size"):
                            case "channel", (None | -1):
                                return cls(bits, symmetric, -1)
                            case "group", int(size) if size > 0:
                                return cls(bits, symmetric, size)
        raise FileFormatError(
            f"{origin}: the quantization_config in config.json must be that of packed integer weights, quantized alone and "
            f"all alike, by channels or groups; got {json.dumps(settings, default=str):.300}. Open it with transformers."
        )

    def to_config(self, others: list[str]) -> dict[str, Any]:
        """What compressed-tensors writes into config.json; ``others`` are the linear layers that are not quantized."""
        weights = {
            "dynamic": False,
            "group_size": None if self.group_size == -1 else self.group_size,
            "num_bits": self.bits,
            "strategy": "channel" if self.group_size == -1 else "group",
            "symmetric": self.symmetric,
            "type": "int",
        }
        group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
        settings: dict[str, Any] = {
            "config_groups": {"group_0": {"format": _FORMAT, **group}},
            "format": _FORMAT,
            "global_compression_ratio": None,
            "ignore": others,
            "kv_cache_scheme": None,
            "moe_sparsity_config": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "sparsity_config": {},
            "transform_config": {},
            "version": _VERSION,
        }
        if not self.symmetric:
            # Not theirs, and ignored by servers: without it transformers (5.24) expects zero points that are not packed.
            settings["dequantize"] = True
        return settings

    @property
    def parts(self) -> tuple[str, ...]:
        """What stands in the place of ``weight``, after ``weight_``."""
        return ("packed", "scale", "shape") if self.symmetric else ("packed", "scale", "shape", "zero_point")

    def write(self, weight: QuantizedWeight) -> dict[str, tuple[TensorInfo, Callable[[], Tensor]]]:
        """Shape and dtype of each part, and what makes it."""
        (rows, cols), scale = weight.codes.shape, weight.grid.scale
        parts = {
            "packed": (
                TensorInfo((rows, self._words(cols)), torch.int32),
                lambda: pack_codes(weight.codes, self.bits),
            ),
            "scale": (TensorInfo(tuple(scale.shape), scale.dtype), lambda: scale),
            "shape": (TensorInfo((2,), torch.int64), lambda: torch.tensor([rows, cols])),
            "zero_point": (
                TensorInfo((self._words(rows), scale.shape[1]), torch.int32),
                lambda: pack_codes(weight.grid.zero.T.to(torch.uint8), self.bits).T,
            ),
        }
        return {name: parts[name] for name in self.parts}

    def read(self, source: TensorSource, layer: str) -> QuantizedWeight:
        """The codes and grid of a layer, whose parts must fit each other."""
        missing = [part for part in self.parts if f"{layer}.weight_{part}" not in source]
        if missing:
            raise FileFormatError(f"{source.origin} has codes for {layer}, but no weight_{missing[0]}. Fetch it again.")
        info = {part: source.info(f"{layer}.weight_{part}") for part in self.parts}
        if info["shape"] != TensorInfo((2,), torch.int64):
            raise FileFormatError(f"{source.origin}: {layer}.weight_shape must be two int64; it is {info['shape']}.")
        rows, cols = source.get(f"{layer}.weight_shape").tolist()
        groups = 1 if self.group_size == -1 else cols // self.group_size
        scale = info["scale"]
        needed = {
            "packed": TensorInfo((rows, self._words(cols)), torch.int32),
            "scale": TensorInfo((rows, groups), scale.dtype),
            "zero_point": TensorInfo((self._words(rows), groups), torch.int32),
        }
        if (
            min(rows, cols) < 1
            or (groups * self.group_size != cols and self.group_size != -1)
            or any(info[part] != needed[part] for part in self.parts if part in needed)
        ):
            raise FileFormatError(
                f"{source.origin}: the parts of {layer} do not fit a weight of shape {(rows, cols)} in {self.bits} bits with "
                f"{groups} scales a row: "
                + ", ".join(f"weight_{part} has {info[part].shape} {info[part].dtype}" for part in self.parts)
            )
        scales = source.get(f"{layer}.weight_scale")
        if not scale.dtype.is_floating_point or not bool((scales.isfinite() & (scales > 0)).all()):
            raise FileFormatError(f"{source.origin}: {layer}.weight_scale must hold finite numbers > 0.")
        if self.symmetric:
            zero = torch.full((rows, groups), 2 ** (self.bits - 1), dtype=torch.int32)
        else:
            zero = unpack_codes(source.get(f"{layer}.weight_zero_point").T, self.bits, rows).T.to(torch.int32)
        codes = unpack_codes(source.get(f"{layer}.weight_packed"), self.bits, cols)
        return QuantizedWeight(codes, QuantGrid(scales, zero, 0, 2**self.bits - 1, -1, self.group_size))

    def _words(self, n: int) -> int:
        return -(-n * self.bits // 32)


def _require_same(model: Any, layers: Mapping[str, QuantizedWeight]) -> None:
    """Raise ``InputError`` if a layer's weight is not, bit for bit, what its codes stand for."""
    modules = dict(model.named_modules())
    for name, weight in layers.items():
        linear = modules.get(name)
        if not isinstance(linear, nn.Linear) or not torch.equal(
            linear.weight, weight.dequantize().to(linear.weight.device)
        ):
            raise InputError(
                f"{name} does not hold the weight that its codes stand for: it was changed after it was quantized. Quantize "
                "the model again, or save it with its own save_pretrained."
            )


def _other_linears(model: Any, layers: Mapping[str, Any]) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name not in layers]


def _tensors(
    model: Any, layers: Mapping[str, QuantizedWeight], scheme: _Scheme | None
) -> dict[str, tuple[TensorInfo, Callable[[], Tensor]]]:
    """Every tensor of the checkpoint: shape and dtype, and what gives it. Tensors that several names share are there once."""
    source = open_checkpoint(model.state_dict())
    tensors: dict[str, tuple[TensorInfo, Callable[[], Tensor]]] = {}
    for name in source:
        layer = name.removesuffix(".weight")
        if scheme is not None and layer in layers:
            tensors |= {f"{name}_{part}": made for part, made in scheme.write(layers[layer]).items()}
        else:
            tensors[name] = (source.info(name), functools.partial(source.get, name))
    return tensors
