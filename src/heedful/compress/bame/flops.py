"""What it costs to train with N:M masks, in floating-point operations.

A step passes through a layer three times: forward, back to its input, and back to its weight. With density d = n / m and
dense gradients at every T-th step, the passes cost, of what they cost dense,

    SR-STE  d, d, 1;    Bi-Mask  d, d, 1;    BAME, N:M RigL  d, d, d + (1 − d) / T;    a fixed mask  d, d, d.

Back to the input goes the transposed weight, in which blocks have no pattern. Where that must run dense, the second number
is 1 instead, except with Bi-Mask, which keeps a pattern for it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from heedful._results import Report
from heedful._validation import require_choice, require_number
from heedful.compress._costs import (
    DENSE,
    Passes,
    layer_flops,
    mean_share,
    stored_bytes,
    training_passes,
)
from heedful.compress.bame._nm import nm_layers

Method = Literal["dense", "static", "sr_ste", "nm_rigl", "bi_mask", "bame"]


@dataclasses.dataclass(frozen=True)
class TrainingFlops(Report):
    """Floating-point operations of training on one example, and bytes of the weights when training is over.

    All ``nn.Linear`` and ``nn.Conv2d`` layers count, those that stay dense too, and nothing else does: it is the same for
    every method.

    Parameters
    ----------
    forward, input_gradient, weight_gradient : float
        Of each pass; of the last one on average over steps.
    total : float
        Of all three.
    dense : float
        What ``total`` is when every weight is trained dense.
    relative : float
        ``total / dense``.
    weight_bytes, index_bytes, dense_bytes : int
        At inference: of the stored values, of their places, ⌈log₂ m⌉ bits each, and of all weights stored dense.
    sparse_layers : tuple of str
    """

    forward: float
    input_gradient: float
    weight_gradient: float
    total: float
    dense: float
    relative: float
    weight_bytes: int
    index_bytes: int
    dense_bytes: int
    sparse_layers: tuple[str, ...]


def training_flops(
    model: nn.Module,
    input_shape: Sequence[int],
    *,
    n: int,
    m: int,
    method: Method,
    interval: int = 100,
    dx: Literal["sparse", "dense"] = "sparse",
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = ("first", "last"),
) -> TrainingFlops:
    """Count what a method spends on one example while its masks adapt.

    Parameters
    ----------
    model : nn.Module
        Without a driver, or after its ``finalize``. It neither computes nor changes.
    input_shape : sequence of int
        Of one example, without the dimension of the batch; the model takes floats.
    n, m : int
        The pattern, 1 <= n <= m; blocks of ``m`` run along the inputs of a layer.
    method : {"dense", "static", "sr_ste", "nm_rigl", "bi_mask", "bame"}
        How it is trained. Where ``start`` and ``end`` of a driver leave masks fixed, a step costs what "static" does.
    interval : int
        Steps from one dense gradient to the next, >= 1 ("bame" and "nm_rigl").
    dx : {"sparse", "dense"}
        Whether the hardware multiplies by the transposed weight sparse.
    include, exclude : sequence of str
        Which layers are sparse, as in ``BAME``.

    Returns
    -------
    TrainingFlops

    Raises
    ------
    ParameterError
        If a setting is out of its range.
    UnsupportedModelError
        If no layer is left to be sparse, or one cannot be cut into blocks of ``m``, or has a driver.

    Notes
    -----
    These are the operations that a method needs. What of them a processor saves is another question: weights that are
    masked, and multiplied as dense ones are, save none.

    Examples
    --------
    >>> layer = nn.Linear(256, 256)
    >>> for method in ("dense", "sr_ste", "bame"):
    ...     print(method, training_flops(layer, (256,), n=1, m=16, method=method, exclude=()).relative)
    dense 1.0
    sr_ste 0.375
    bame 0.065625
    """
    require_number(interval, "interval", low=1, integer=True)
    require_choice(dx, "dx", ("sparse", "dense"))
    sparse = nm_layers(model, n, m, include=include, exclude=exclude)
    d, adapted = n / m, mean_share(n / m, 1 / interval)
    back = d if dx == "sparse" else 1.0
    shares = {
        "dense": DENSE,
        "static": Passes(d, back, d),
        "sr_ste": Passes(d, back, 1.0),
        "nm_rigl": Passes(d, back, adapted),
        "bi_mask": Passes(d, d, 1.0),
        "bame": Passes(d, back, adapted),
    }
    require_choice(method, "method", tuple(shares))
    flops = layer_flops(model, torch.empty(2, *input_shape, device="meta"))  # two, since batch norm refuses one
    per_example = {name: count / 2 for name, count in flops.items()}
    passes = training_passes(per_example, dict.fromkeys(sparse, shares[method]))
    dense = 3 * sum(per_example.values())
    values = indices = dense_bytes = 0
    for name in flops:
        weight: Tensor = model.get_submodule(name).weight  # type: ignore[assignment]
        masked = name in sparse and method != "dense"
        stored = stored_bytes(
            weight.shape,
            weight.numel() * n // m,
            layout="nm" if masked else "dense",
            m=m,
            itemsize=weight.element_size(),
        )
        values, indices = values + stored.values, indices + stored.indices
        dense_bytes += weight.numel() * weight.element_size()
    return TrainingFlops(
        *passes,
        total=sum(passes),
        dense=dense,
        relative=sum(passes) / dense,
        weight_bytes=values,
        index_bytes=indices,
        dense_bytes=dense_bytes,
        sparse_layers=tuple(sparse),
    )
