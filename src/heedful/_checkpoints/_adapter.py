"""LoRA adapters as the models that they make: W + scale · B A, tensor by tensor.

Hu et al.: LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022. Kalajdzievski: A Rank Stabilization Scaling
Factor for Fine-Tuning with LoRA, arXiv:2312.03732 (scale alpha / √r in the place of alpha / r).
"""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heedful._checkpoints._safetensors import TensorInfo
from heedful._checkpoints._source import TensorSource
from heedful.errors import FileFormatError, InputError

_PREFIX = "base_model.model."  # of every name that PEFT writes
# Settings that are read here.
_READ = {"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "fan_in_fan_out", "bias"}
# Settings of the training, or that say again what the names of the tensors say.
_HARMLESS = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "megatron_config",
    "megatron_core",
    "modules_to_save",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
}
# The others that are usual change the base itself, which then is not the one given here.
_INITIALISATIONS = (True, False, "gaussian", "orthogonal", "eva")


class _Pair(NamedTuple):
    """The names of A and B, what multiplies their product, and whether that is transposed."""

    a: str
    b: str
    scale: float
    transposed: bool


def apply_adapter(
    folder: Path,
    settings: Mapping[str, Any],
    infos: Mapping[str, TensorInfo],
    read: Callable[[str], Tensor],
    base: TensorSource,
) -> TensorSource:
    """The tensors of ``base`` as the adapter in ``folder`` changes them; ``infos`` and ``read`` are of its file."""
    _require_plain_lora(folder, settings)
    factors, whole = _sort(folder, infos)
    place = _place_in(folder, base, [f"{module}.weight" for module in factors])
    saved = {place(target): name for target, name in whole.items()}
    made = {name: base.info(name) for name in base}
    for target, name in saved.items():
        dtype = made[target].dtype if target in made else infos[name].dtype
        made[target] = TensorInfo(infos[name].shape, dtype)
    pairs = _pair(folder, settings, factors, infos, lambda module: made[place(f"{module}.weight")].shape)
    changed = {place(f"{module}.weight"): pair for module, pair in pairs.items()}

    def get(name: str) -> Tensor:
        value = read(saved[name]) if name in saved else base.get(name)
        if name in changed:
            value = _add(value, changed[name], read)
        return value.to(made[name].dtype)

    tied = {name: home for name, home in base.tied.items() if name not in made}
    return TensorSource(str(folder), made, get, folder=folder, config=base.config, tied=tied)


def _add(weight: Tensor, pair: _Pair, read: Callable[[str], Tensor]) -> Tensor:
    """W + scale · B A, in float32, or float64 if W is."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    # A convolution's B has sides 1, so that its product with A is that of two matrices too.
    product = read(pair.b).to(wide).flatten(1) @ read(pair.a).to(wide).flatten(1)
    if pair.transposed:
        product = product.T
    return product.reshape(weight.shape).mul_(pair.scale).add_(weight)


def _require_plain_lora(folder: Path, settings: Mapping[str, Any]) -> None:
    if settings.get("peft_type") != "LORA":
        raise FileFormatError(f"{folder} is a {settings.get('peft_type')!r} adapter; only 'LORA' is read.")
    odd = {name: value for name, value in settings.items() if value and name not in _READ | _HARMLESS}
    if settings.get("bias", "none") != "none":
        odd["bias"] = settings["bias"]
    if settings.get("init_lora_weights", True) not in _INITIALISATIONS:
        odd["init_lora_weights"] = settings["init_lora_weights"]
    if odd:
        raise FileFormatError(
            f"{folder} is no plain LoRA: it sets {', '.join(f'{name}={value!r:.40}' for name, value in odd.items())}. "
            "Merge it into its model with PEFT (merge_and_unload), and give that model."
        )


def _sort(folder: Path, infos: Mapping[str, TensorInfo]) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Module -> {"A": name, "B": name} of what is added, and tensor -> name of what takes another's place."""
    factors: dict[str, dict[str, str]] = {}
    whole = {}
    for name in infos:
        if not name.startswith(_PREFIX):
            raise FileFormatError(f"{folder} holds {name}, and what PEFT saves starts with {_PREFIX}")
        target = name.removeprefix(_PREFIX).replace(".base_layer.", ".")
        if match := re.fullmatch(r"(.+)\.lora_(embedding_)?([AB])(?(2)|\.weight)", target):
            factors.setdefault(match[1], {})[f"{match[2] or ''}{match[3]}"] = name
        elif "lora_" not in name and target not in whole:
            whole[target] = name
        else:
            raise FileFormatError(f"{folder} holds {name}, which is no part of a plain LoRA as PEFT saves it.")
    for module, names in factors.items():
        if names.keys() not in ({"A", "B"}, {"embedding_A", "embedding_B"}):
            raise FileFormatError(f"{folder} has only {', '.join(names)} for {module}, where A and B are needed.")
    return factors, whole


def _place_in(folder: Path, base: TensorSource, targets: list[str]) -> Callable[[str], str]:
    """What the adapter's names are in ``base``, which may have been saved with more or with less in front of them.

    All ``targets`` must be there. Other tensors, such as a classifier that a task added, keep their names if they are not.
    """
    if all(target in base for target in targets):
        return lambda name: name
    first, found = targets[0], set()
    for name in base:
        if name.endswith(f".{first}") or first.endswith(f".{name}"):
            shared = min(first, name, key=len)
            cut, put = first.removesuffix(shared), name.removesuffix(shared)
            if all(target.startswith(cut) and put + target[len(cut) :] in base for target in targets):
                found.add((cut, put))
    if len(found) != 1:
        lacking = next(target for target in targets if target not in base)
        raise InputError(
            f"{folder} changes {lacking}, which {base.origin} {'has more than once' if found else 'does not have'}. "
            "Give the base that the adapter was trained on."
        )
    ((cut, put),) = found
    return lambda name: moved if name.startswith(cut) and (moved := put + name[len(cut) :]) in base else name


def _pair(
    folder: Path,
    settings: Mapping[str, Any],
    factors: Mapping[str, Mapping[str, str]],
    infos: Mapping[str, TensorInfo],
    shape_of: Callable[[str], tuple[int, ...]],
) -> dict[str, _Pair]:
    """Module -> its pair, checked against the shape of its weight, which says whether the product is transposed.

    Only where it is square, the setting ``fan_in_fan_out`` has to say it. PEFT corrects that setting when it is wrong for
    a module, so that one which is wrong for some says nothing about the others.
    """
    pairs, square, wrong = {}, None, False
    stated = bool(settings.get("fan_in_fan_out"))
    for module, names in factors.items():
        embedding = "embedding_A" in names
        a, b = (names[f"{'embedding_' if embedding else ''}{factor}"] for factor in "AB")
        shape, product = shape_of(module), (*infos[b].shape[:1], *infos[a].shape[1:])
        rank = math.prod(infos[a].shape[:1])
        straight, turned = shape == product, len(shape) == 2 and shape == product[::-1]
        transposed = embedding or (stated if straight else turned)
        if not (turned if transposed else straight) or infos[b].shape[1:] != (rank,) + (1,) * (len(shape) - 2):
            raise InputError(
                f"{folder}: A of shape {infos[a].shape} and B of shape {infos[b].shape} do not make the change of a weight "
                f"of shape {shape} for {module}. Give the base that the adapter was trained on."
            )
        if not embedding:
            square = module if straight and turned else square
            wrong |= transposed != stated
        pairs[module] = _Pair(a, b, _scale(folder, module, rank, settings), transposed)
    if square is not None and wrong:
        raise FileFormatError(
            f"{folder}: fan_in_fan_out={settings.get('fan_in_fan_out')!r} is wrong for some modules, so that it cannot say "
            f"how the square {square} is stored. Merge it into its model with PEFT (merge_and_unload), and give that model."
        )
    return pairs


def _scale(folder: Path, module: str, rank: int, settings: Mapping[str, Any]) -> float:
    """What B A is multiplied by: alpha / r, or alpha / √r. A pattern for the end of a module's name overrides both."""

    def setting(name: str, patterns: str) -> float:
        value = settings.get(name, 8)  # PEFT's default of both
        for pattern, other in (settings.get(patterns) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                value = other
                break
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{name} is {value!r}")
        return value

    try:
        stated, alpha = setting("r", "rank_pattern"), setting("lora_alpha", "alpha_pattern")
        if stated != rank or rank < 1:
            raise ValueError(f"r is {stated}, and A has {rank} rows")
    except (ValueError, AttributeError, OverflowError, re.error) as error:
        raise FileFormatError(f"{folder}: adapter_config.json does not fit {module}: {error}.") from error
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
