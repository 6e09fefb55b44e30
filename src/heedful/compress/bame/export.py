"""N:M sparsity without training with it, and 2:4 weights in the form that sparse tensor cores multiply."""

import warnings
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heedful._masks import check_nm, nm_mask
from heedful.compress._sparsity import own_weight
from heedful.compress.bame._nm import nm_layers
from heedful.errors import HeedfulWarning, UnsupportedModelError

__all__ = ["prune_nm", "to_semi_structured"]


def prune_weight(weight: Float[Tensor, "..."], n: int, m: int) -> Float[Tensor, "..."]:
    """A copy that keeps the n largest of every m weights along dimension 1, the inputs of a layer; the rest is zero."""
    return torch.where(nm_mask(weight, n, m, dim=1), weight, 0)


@torch.no_grad()
def prune_nm(
    model: nn.Module,
    n: int = 2,
    m: int = 4,
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = ("first", "last"),
) -> nn.Module:
    """Zero all but the n largest of every m weights of a trained model, once.

    Fine-tune afterwards with ``StaticMask(…, pattern="2:4", selection="magnitude", rescale_init=False)``, which finds the
    same masks: the usual recipe for a pretrained model.

    Parameters
    ----------
    model : nn.Module
        Its linear and convolutional layers are pruned along their inputs, in place.
    n, m : int
        1 <= n <= m.
    include, exclude : sequence of str
        Which layers: names, globs, ``"re:…"``, or ``"first"`` and ``"last"``, as in ``BAME``.

    Returns
    -------
    nn.Module
        The model.

    Raises
    ------
    ParameterError
        If the pattern is none, or an entry of ``include`` or ``exclude`` matches no layer.
    UnsupportedModelError
        If no layer is left, or one cannot be cut into blocks of m, shares its weight or is parametrized.

    References
    ----------
    Mishra et al.: Accelerating Sparse Deep Neural Networks, 2021, arXiv:2104.08378.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    >>> check_nm(prune_nm(model, 2, 4)[1].weight, 2, 4, dim=1)
    True
    """
    for layer in nm_layers(model, n, m, include=include, exclude=exclude).values():
        weight = own_weight(layer)
        weight.copy_(prune_weight(weight, n, m))
    return model


@torch.no_grad()
def to_semi_structured(model: nn.Module) -> nn.Module:
    """Compress the 2:4 linear layers of a trained model for the sparse tensor cores of its GPU.

    Parameters
    ----------
    model : nn.Module
        On an NVIDIA GPU of compute capability 8.0 or more, in float16 or bfloat16. The weight of every linear layer that
        is 2:4 sparse along its inputs becomes a ``torch.sparse.SparseSemiStructuredTensor``, for inference only. Other
        layers stay; convolutions that are 2:4 are named in a warning, since torch multiplies them dense.

    Returns
    -------
    nn.Module
        The model.

    Raises
    ------
    UnsupportedModelError
        If no linear layer is 2:4, or one is where, or of a type or shape, that cannot be compressed. Then none is.
    """
    sparse = {name: module for name, module in model.named_modules() if _is_24(module)}
    linear = {name: layer for name, layer in sparse.items() if isinstance(layer, nn.Linear)}
    if not linear:
        raise UnsupportedModelError(
            "No linear layer has at most 2 of every 4 weights along its inputs not zero. Train the model with "
            "BAME(model, optimizer, 2, 4, …) and finalize() it, or prune it with prune_nm(model, 2, 4)."
        )
    for name, layer in linear.items():
        if "weight" not in layer._parameters:
            raise UnsupportedModelError(f"Layer {name!r} is masked still by a driver; finalize() that first.")
    compressed = {name: _compress(name, layer.weight) for name, layer in linear.items()}
    for name, layer in linear.items():
        layer.weight = nn.Parameter(compressed[name], requires_grad=False)
    if dense := [name for name in sparse if name not in linear]:
        warnings.warn(
            f"Convolutions stay dense in memory and in speed, although they are 2:4: {', '.join(map(repr, dense))}.",
            HeedfulWarning,
            stacklevel=2,
        )
    return model


def _is_24(module: nn.Module) -> bool:
    if not isinstance(module, (nn.Linear, nn.Conv2d)) or module.weight.layout is not torch.strided:
        return False
    return module.weight.shape[1] % 4 == 0 and check_nm(module.weight, 2, 4, dim=1)


def _compress(name: str, weight: Tensor) -> Tensor:
    if not weight.is_cuda or torch.cuda.get_device_capability(weight.device) < (8, 0):
        raise UnsupportedModelError(
            f"Layer {name!r} is on {weight.device}; 2:4 products need an NVIDIA GPU of compute capability 8.0 or more. "
            "Move the model to one. Elsewhere it works as it is, at the speed of dense weights."
        )
    if weight.dtype not in (torch.float16, torch.bfloat16):
        raise UnsupportedModelError(
            f"Layer {name!r} is {weight.dtype}; 2:4 products need float16 or bfloat16. Convert it, say by "
            "model.to(torch.bfloat16)."
        )
    try:
        return torch.sparse.to_sparse_semi_structured(weight.detach())
    except (RuntimeError, ValueError) as error:
        raise UnsupportedModelError(
            f"Layer {name!r}, {tuple(weight.shape)}, cannot be compressed: {error} Leave it dense."
        ) from error
