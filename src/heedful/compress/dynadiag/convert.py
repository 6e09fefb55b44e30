"""Whole models: linear layers become diagonal, diagonal layers dense, and weights lose all but their strongest diagonals."""

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heedful.compress._patterns import require_sparsity
from heedful.compress._sparsity import select_layers
from heedful.compress.dynadiag.layer import (
    DiagonalLinear,
    by_energy,
    read_diagonals,
    require_finite_weight,
    weight_of,
)
from heedful.compress.dynadiag.pattern import active_diagonals, check_offsets, check_values, indices
from heedful.errors import FileFormatError, InputError, ParameterError, UnsupportedModelError

__all__ = ["convert_to_diagonal", "diagonal_to_dense", "project_to_diagonals", "prune_diagonal"]

logger = logging.getLogger("heedful")


def project_to_diagonals(weight: Float[Tensor, "out in"], *, sparsity: float) -> Float[Tensor, "out in"]:
    """The matrix without all but its K diagonals of largest energy Σ V²: the closest that K wrapped diagonals can come.

    The diagonals of a transposed matrix are those of the matrix, so that a weight may be given as (in, out) too.

    Parameters
    ----------
    weight : Float[Tensor, "out in"]
        Any finite matrix; of equally strong diagonals the one with the lowest offset is kept.
    sparsity : float
        Share of zeros, in [0, 1); K = max(1, ⌈(1 − sparsity) · max(out, in)⌉).

    Raises
    ------
    InputError
        If an entry is NaN or infinite.

    Examples
    --------
    >>> project_to_diagonals(torch.tensor([[3.0, 1.0], [1.0, -2.0]]), sparsity=0.5)
    tensor([[ 3.,  0.],
            [ 0., -2.]])
    """
    require_sparsity(sparsity)
    require_finite_weight(weight)
    strongest = by_energy(read_diagonals(weight))[: active_diagonals(max(weight.shape), sparsity)]
    out, inputs = weight.shape
    rows, cols = indices(out, inputs, strongest, tall=out >= inputs)
    projected = torch.zeros_like(weight)
    projected[rows, cols] = weight[rows, cols]
    return projected


@torch.no_grad()
def prune_diagonal(
    model: nn.Module,
    *,
    sparsity: float,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = ("first", "last"),
) -> nn.Module:
    """Zero all but the K strongest diagonals of each linear layer, once and without data; the layers stay what they are.

    A point to fine-tune from (``convert_to_diagonal`` then finds these diagonals again): at high sparsity the pruned model
    itself is of little use.

    Parameters
    ----------
    model : nn.Module
        Changed in place. ``nn.Linear`` and transformers' ``Conv1D`` are pruned; what else has weights is left alone.
    sparsity : float
        Share of zeros in each of these layers, in [0, 1).
    include, exclude : sequence of str
        Names, globs, ``"re:…"``, or ``"first"`` and ``"last"``.

    Returns
    -------
    nn.Module
        ``model``.
    """
    for layer in convertible_layers(model, include=include, exclude=exclude).values():
        layer.weight.copy_(project_to_diagonals(layer.weight, sparsity=sparsity))
    return model


def convert_to_diagonal(
    model: nn.Module,
    *,
    sparsity: float,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = ("first", "last"),
    generator: torch.Generator | None = None,
    **settings: Any,
) -> nn.Module:
    """Replace linear layers by ``DiagonalLinear`` that start as their K strongest diagonals, to be trained on.

    Make the optimizer afterwards, and ``DynaDiag`` with it. For training from random weights let ``DynaDiag`` convert: it
    rescales them to what fewer inputs need.

    Parameters
    ----------
    model : nn.Module
        Changed in place. ``nn.Linear`` and transformers' ``Conv1D`` (GPT-2) are replaced; what else has weights, such as
        convolutions and the output projection of ``nn.MultiheadAttention``, is left alone and named in the log.
    sparsity : float
        Share of zeros in each of these layers, in [0, 1).
    include, exclude : sequence of str
        Names, globs, ``"re:…"``, or ``"first"`` and ``"last"``. In a language model the first weight is the embedding
        and the last its head, which both stay dense anyway.
    generator : torch.Generator, optional
        Of the noise in the scores.
    **settings
        As for ``DiagonalLinear``: ``temperature, selection, mask_values, groups, backend``.

    Returns
    -------
    nn.Module
        ``model``.

    Raises
    ------
    UnsupportedModelError
        If there are diagonal layers already, no layer is left to convert, or two modules share a weight.
    InputError
        If an entry of a weight is NaN or infinite; the model is then as it was.
    """
    if already := diagonal_layers(model):
        raise UnsupportedModelError(
            f"The model has diagonal layers already: {', '.join(map(repr, already))}. Convert it once, or call "
            "diagonal_to_dense first."
        )
    layers = convertible_layers(model, include=include, exclude=exclude)
    converted = {
        name: DiagonalLinear.from_linear(linear, sparsity=sparsity, generator=generator, **settings)
        for name, linear in layers.items()
    }
    for name, layer in converted.items():
        replace_module(model, name, layer)
    logger.info("%d layers became diagonal; left alone: %s", len(layers), ", ".join(other_layers(model)) or "none")
    return model


def diagonal_to_dense(model: nn.Module) -> nn.Module:
    """Replace every ``DiagonalLinear`` by the dense layer of the same function and of the kind it was made from.

    The ``state_dict`` then has the names and shapes of the model's family again, and ``save_pretrained`` writes what the
    usual loaders open. ``save_compressed`` keeps diagonals as diagonals.

    Parameters
    ----------
    model : nn.Module
        Changed in place; its dense weights are new parameters.

    Returns
    -------
    nn.Module
        ``model``.
    """
    for name, layer in diagonal_layers(model).items():
        replace_module(model, name, layer.to_linear())
    return model


def diagonal_layers(model: nn.Module) -> dict[str, DiagonalLinear]:
    """The diagonal layers of ``model`` by name, one name each."""
    return {name: module for name, module in model.named_modules() if isinstance(module, DiagonalLinear)}


def linear_kinds() -> tuple[type[nn.Module], ...]:
    """The types that can become diagonal. ``Conv1D`` counts if transformers is loaded: else no model can have one."""
    module = sys.modules.get("transformers.pytorch_utils")
    return (nn.Linear,) if module is None else (nn.Linear, module.Conv1D)


def other_layers(model: nn.Module) -> list[str]:
    """Names of what has a weight matrix and cannot become diagonal: convolutions, and subclasses of linear layers."""
    kinds = (*linear_kinds(), nn.Embedding, DiagonalLinear)
    weights = {name: m._parameters.get("weight") for name, m in model.named_modules() if type(m) not in kinds}
    return [name for name, weight in weights.items() if weight is not None and weight.ndim >= 2]


def convertible_layers(model: nn.Module, *, include: Sequence[str] | None, exclude: Sequence[str]) -> dict[str, Any]:
    """The layers that ``include`` and ``exclude`` choose and that can become diagonal."""
    kinds = linear_kinds()
    chosen = select_layers(model, kinds, include=include, exclude=exclude)
    # A subclass is there to do something else; that of nn.MultiheadAttention is never called, only its weight is read.
    layers = {name: layer for name, layer in chosen.items() if type(layer) in kinds}
    if not layers:
        raise UnsupportedModelError(
            f"None of {', '.join(map(repr, chosen))} can become diagonal: they are of subclasses of nn.Linear."
        )
    if "" in layers:
        raise UnsupportedModelError(
            "The model is itself a linear layer, with no module around it to hold another one. Use "
            "DiagonalLinear.from_linear."
        )
    return layers


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put ``new`` wherever the module called ``name`` is registered in ``model``."""
    old = model.get_submodule(name)
    for place in [place for place, module in model.named_modules(remove_duplicate=False) if module is old]:
        parent, _, attribute = place.rpartition(".")
        setattr(model.get_submodule(parent), attribute, new)


def _has_diagonals(model: nn.Module) -> bool:
    return bool(diagonal_layers(model))


def _diagonal_state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of ``model`` as they were if its diagonal layers were frozen, and what rebuilds these layers."""
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    layers = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, DiagonalLinear):
            tensors.pop(f"{name}.scores", None)
            tensors[f"{name}.values"], tensors[f"{name}.frozen_offsets"] = layer._folded(), layer.offsets()
            layers[name] = {"in_features": layer.in_features, "out_features": layer.out_features}
    return tensors, {"layers": layers}


def _load_diagonals(model: nn.Module, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> nn.Module:
    """Give ``model``, dense or with diagonal layers, the layers and tensors of ``_diagonal_state``.

    Raises
    ------
    FileFormatError
        If they do not fit together, or are not for this model; the model is then as it was.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    layers = {}
    for name, description in described_layers(meta).items():
        if not isinstance(modules.get(name), (*linear_kinds(), DiagonalLinear)):
            raise FileFormatError(f"The file has a diagonal layer {name!r}; in this model that is no linear layer.")
        own = {key.removeprefix(f"{name}."): t for key, t in tensors.items() if key.startswith(f"{name}.")}
        layers[name] = _rebuilt(name, modules[name], own, description)
    inside = tuple(f"{name}." for name in layers)
    ours = {key: tensor.shape for key, tensor in model.state_dict().items() if not key.startswith(inside)}
    theirs = {key: tensor.shape for key, tensor in tensors.items() if not key.startswith(inside)}
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            raise FileFormatError(
                f"{key}: this model has {_shape(ours.get(key))}, the file {_shape(theirs.get(key))}. Give the model that "
                "was saved."
            )
    for name, layer in layers.items():
        replace_module(model, name, layer)
    model.load_state_dict(dict(tensors))
    return model


def described_layers(meta: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The diagonal layers that the metadata of a file describe, by name."""
    layers = meta.get("layers")
    described = isinstance(layers, dict) and all(isinstance(layer, dict) for layer in layers.values())
    if not described or not layers:
        raise FileFormatError("The file does not say which layers are diagonal. Give one that save_compressed wrote.")
    return layers


def _rebuilt(
    name: str, old: nn.Module, tensors: Mapping[str, Tensor], description: Mapping[str, Any]
) -> DiagonalLinear:
    """The frozen layer that ``tensors`` hold, to be put where ``old`` is."""
    weight = old.values if isinstance(old, DiagonalLinear) else weight_of(old)
    out, inputs = (old.out_features, old.in_features) if isinstance(old, DiagonalLinear) else weight.shape
    if (description.get("out_features"), description.get("in_features")) != (out, inputs):
        raise FileFormatError(f"Layer {name!r} is {out} × {inputs} in this model; the file says {dict(description)}.")
    values, offsets = tensors.get("values"), tensors.get("frozen_offsets")
    if values is None or not all(t.is_floating_point() for t in tensors.values() if t is not offsets):
        raise FileFormatError(f"Layer {name!r} lacks its values, or they are no floating-point numbers.")
    if ("bias" in tensors) != (old.bias is not None):
        raise FileFormatError(f"Layer {name!r} has a bias either in this model or in the file, but not in both.")
    if offsets is None or offsets.dtype != torch.int64 or offsets.ndim != 1 or not len(offsets):
        raise FileFormatError(f"Layer {name!r} lacks its offsets, or they are not a list of int64.")
    try:
        check_offsets(offsets, max(out, inputs))
        check_values(values, offsets, out, inputs)
        layer = DiagonalLinear(
            inputs, out, sparsity=1 - len(offsets) / max(out, inputs), bias="bias" in tensors, device="meta"
        )
        layer.load_state_dict(
            {key: t.to(weight.device, weight.dtype if t.is_floating_point() else None) for key, t in tensors.items()},
            assign=True,
        )
    except (InputError, ParameterError, RuntimeError) as error:
        raise FileFormatError(f"Layer {name!r} cannot be rebuilt: {' '.join(str(error).split())}") from error
    layer._dense_kind = old._dense_kind if isinstance(old, DiagonalLinear) else type(old)
    return layer.train(old.training)


def _shape(shape: torch.Size | None) -> str:
    return "none" if shape is None else f"shape {tuple(shape)}"
