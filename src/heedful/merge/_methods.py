"""The registry of merge methods: one call for all of them, tensor by tensor.

Settings and defaults are mergekit's, under heedful's names (``lambda`` is ``scale``, ``gamma`` is ``drop_largest``), and
results agree with mergekit's; where that is not what a method's paper does, the function below says so.
"""

import dataclasses
import difflib
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heedful._masks import nm_mask, require_pattern, top_mask
from heedful._random import spawn
from heedful._results import track
from heedful._validation import require_choice, require_number
from heedful.errors import ParameterError
from heedful.merge._task_vectors import (
    TensorSource,
    masked,
    norm_order,
    one_each,
    open_models,
    open_state_dict,
    require_finite,
    require_same_tensors,
    stored,
    warn_of_copies,
    weighted_sum,
)
from heedful.merge.cabs import prune_in_turn, require_order

__all__ = ["MergeMethod", "available_methods", "merge_state_dicts", "tensor_generator"]

_PIECE = 2**17  # entries merged together where a method allows it: the memory of temporary tensors is then used again

logger = logging.getLogger("heedful")


@dataclasses.dataclass(frozen=True)
class MergeMethod:
    """A way to merge one tensor of several models; the same for every tensor, and blind to all others.

    Parameters
    ----------
    name, title : str
        What recipes and what people call it.
    needs_base : bool
        Whether it merges task vectors, fine-tuned minus base, or the models themselves.
    defaults, model_defaults : mapping of str to value
        Settings of the merge as a whole, and settings that each model has its own value of.
    merge : callable
        ``merge(base, tensors, *, generator=None, **settings)``: the merged tensor of K float32 tensors and, if it needs
        one, their base. Settings are those of ``settings``. What is random comes from ``generator``.
    local : bool
        Whether an entry depends on no others than those of its own block of m (of the flattened tensor), if there is a
        setting m, or on none. Large tensors are then merged piece by piece, which is several times as fast.
    prune : callable or None
        ``prune(base, tensors, *, generator=None, **settings)``: the K task vectors as ``merge`` adds them up, before
        weights.
    """

    name: str
    title: str
    needs_base: bool
    defaults: Mapping[str, Any]
    model_defaults: Mapping[str, Any]
    merge: Callable[..., Tensor]
    local: bool = False
    prune: Callable[..., Iterable[Tensor]] | None = None

    def settings(self, n_models: int, **given: Any) -> dict[str, Any]:
        """Every setting, checked: those given, else the defaults; a list of ``n_models`` values where each has its own.

        Raises
        ------
        ParameterError
            If a name is unknown (the nearest is suggested), a value out of range, or a list of the wrong length.
        """
        known = {**self.defaults, **self.model_defaults}
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"Did you mean {near[0]}?" if near else f"It has {', '.join(known)}."
                raise ParameterError(f"{self.name} has no setting {name}. {hint}")
        settings = known | given
        for name in self.model_defaults:
            settings[name] = one_each(settings[name], n_models, name)
        for name, value in settings.items():
            for one in value if name in self.model_defaults else [value]:
                if name in _CHECKS and not (one is None and known[name] is None):
                    _CHECKS[name](one, name)
        if isinstance(order := settings.get("order", "given"), str):
            require_choice(order, "order", ("given", "norm"))
        else:
            require_order(order, n_models)
        if "n" in settings:
            self._check_counts(settings["n"], settings["density"], settings["m"])
        return settings

    def _check_counts(self, n: Sequence[int], density: Sequence[float | None], m: int) -> None:
        counts = _counts(n, density, m)
        for count, share in zip(counts, density, strict=True):
            require_pattern(count, m)
            if share is not None and count == 0:
                raise ParameterError(f"density={share} keeps nothing of blocks of m={m}. Raise the density or m.")
        if "overlap" in self.defaults and (excess := sum(counts) - m) > 0:
            logger.info("%s: n sums to %d, and %d of every m=%d entries overlap.", self.name, m + excess, excess, m)


_finite = partial(require_number, low=-torch.finfo(torch.float32).max, high=torch.finfo(torch.float32).max)
_CHECKS: dict[str, Callable[[Any, str], None]] = {
    "weight": _finite,
    "scale": _finite,
    "normalize": partial(require_choice, choices=(True, False)),
    "rescale": partial(require_choice, choices=(True, False)),
    "density": partial(require_number, low=0, high=1, open_low=True),
    "drop_largest": partial(require_number, low=0, high=1),
    "n": partial(require_number, low=0, integer=True),
    "m": partial(require_number, low=1, integer=True),
    "tail": partial(require_choice, choices=("proportional", "drop", "keep")),
    "overlap": partial(require_choice, choices=("sum", "ties", "first")),
}


def _counts(n: Sequence[int], density: Sequence[float | None], m: int) -> list[int]:
    """How many entries of a block each model keeps: n, or the share that a density stands for."""
    return [count if share is None else round(share * m) for count, share in zip(n, density, strict=True)]


# How methods prune task vectors. Each takes the vectors in turn and gives them back with zeros where they are not kept.


def _keep_all(deltas: Iterable[Tensor], generator: torch.Generator | None) -> Iterable[Tensor]:
    return deltas


def _keep_largest(
    deltas: Iterable[Tensor], generator: torch.Generator | None, *, density: Sequence[float], rescale: bool
) -> Iterator[Tensor]:
    """The share ``density`` of largest entries of the tensor, at least one."""
    for delta, share in zip(deltas, density, strict=True):
        if share == 1 or delta.numel() == 0:
            yield delta
        else:
            yield _pruned(delta, top_mask(delta, max(1, int(share * delta.numel()))), rescale)


def _keep_inliers(
    deltas: Iterable[Tensor],
    generator: torch.Generator | None,
    *,
    density: Sequence[float],
    drop_largest: Sequence[float],
    rescale: bool,
) -> Iterator[Tensor]:
    """The share ``density`` that is largest once the share ``drop_largest`` of outliers is gone, or less of them.

    Where both shares exceed the tensor, fewer outliers are dropped and the density stays, as in mergekit.
    """
    for delta, share, outliers in zip(deltas, density, drop_largest, strict=True):
        if share == 1:
            yield delta
        else:
            kept = int(share * delta.numel())
            dropped = min(int(outliers * delta.numel()), delta.numel() - kept)
            yield _pruned(delta, top_mask(delta, kept + dropped) & ~top_mask(delta, dropped), rescale)


def _keep_random(
    deltas: Iterable[Tensor], generator: torch.Generator | None, *, density: Sequence[float], rescale: bool
) -> Iterator[Tensor]:
    """Each entry with probability ``density``; DARE."""
    for delta, share in zip(deltas, density, strict=True):
        if share == 1:
            yield delta
        else:
            drawn = torch.empty(delta.shape, dtype=torch.bool).bernoulli_(share, generator=generator)
            yield _pruned(delta, drawn.to(delta.device), rescale)  # drawn on the CPU: the same for every device


def _keep_balanced(
    deltas: Iterable[Tensor],
    generator: torch.Generator | None,
    *,
    n: Sequence[int],
    density: Sequence[float | None],
    m: int,
    tail: Any,
) -> Iterator[Tensor]:
    """Of every m the n largest, each vector on its own: CABS without its awareness of conflicts."""
    for delta, count in zip(deltas, _counts(n, density, m), strict=True):
        yield masked(delta, nm_mask(delta, count, m, tail=tail))


def _keep_free_largest(
    deltas: Iterable[Tensor], generator: torch.Generator | None, *, density: Sequence[float], order: Any, overlap: str
) -> Iterator[Tensor]:
    """The share ``density`` of the tensor, where no vector before holds it: CABS without its balance."""
    deltas = list(deltas)
    size = deltas[0].numel()
    counts = [int(share * size) for share in density]
    return prune_in_turn(deltas, counts, max(size, 1), order=_indices(order), overlap=overlap)


def _keep_free_balanced(
    deltas: Iterable[Tensor],
    generator: torch.Generator | None,
    *,
    n: Sequence[int],
    density: Sequence[float | None],
    m: int,
    tail: Any,
    order: Any,
    overlap: str,
) -> Iterator[Tensor]:
    """CABS."""
    counts = _counts(n, density, m)
    return prune_in_turn(list(deltas), counts, m, order=_indices(order), overlap=overlap, tail=tail)


def _indices(order: str | Sequence[int]) -> Sequence[int] | None:
    if order == "norm":
        raise ParameterError("order='norm' needs the whole vectors: give the indices that norm_order finds.")
    return None if isinstance(order, str) else order


def _pruned(delta: Tensor, mask: Tensor, rescale: bool) -> Tensor:
    """``delta`` where ``mask`` is true, rescaled to the L1 norm that it had.

    DARE divides by the density, which is what the ratio of norms is on average; mergekit takes the ratio itself.
    """
    kept = masked(delta, mask)
    if not rescale:
        return kept
    before, after = delta.abs().sum(), kept.abs().sum()
    return kept if min(before, after) < 1e-7 else kept.mul_(before / after)  # as in mergekit


def _prune(
    base: Tensor,
    tensors: Sequence[Tensor],
    *,
    how: Callable[..., Iterable[Tensor]],
    generator: torch.Generator | None = None,
    **settings: Any,
) -> Iterable[Tensor]:
    own = {name: value for name, value in settings.items() if name not in ("weight", "scale", "normalize")}
    return how((tensor - base for tensor in tensors), generator, **own)


def _add_pruned(
    base: Tensor,
    tensors: Sequence[Tensor],
    *,
    how: Callable[..., Iterable[Tensor]],
    elect: bool = False,
    **settings: Any,
) -> Tensor:
    """The base plus the weighted sum of the pruned task vectors."""
    vectors = _prune(base, tensors, how=how, **settings)
    scale, weight, normalize = (settings[name] for name in ("scale", "weight", "normalize"))
    elect = elect or settings.get("overlap") == "ties"
    return weighted_sum(vectors, scale, weight, normalize=normalize, elect=elect).add_(base)


def _average(
    base: Tensor | None,
    tensors: Sequence[Tensor],
    *,
    generator: torch.Generator | None = None,
    weight: Sequence[float],
    normalize: bool,
) -> Tensor:
    """The weighted sum of the models themselves, divided by the sum of the weights if ``normalize``."""
    return weighted_sum(tensors, [1.0] * len(tensors), weight, normalize=normalize)


def _sum_of_pruned(
    name: str,
    title: str,
    how: Callable[..., Iterable[Tensor]],
    whole: Mapping[str, Any],
    each: Mapping[str, Any],
    *,
    elect: bool = False,
    local: bool = False,
) -> MergeMethod:
    return MergeMethod(
        name,
        title,
        needs_base=True,
        defaults={"normalize": False, **whole},
        model_defaults={"weight": 1.0, "scale": 1.0, **each},
        merge=partial(_add_pruned, how=how, elect=elect),
        local=local,
        prune=partial(_prune, how=how),
    )


_SHARE: dict[str, Any] = {"density": 1.0}
_BLOCKS: dict[str, Any] = {"m": 256, "tail": "proportional"}
_COUNT: dict[str, Any] = {"n": 64, "density": None}
_TURNS: dict[str, Any] = {"order": "given", "overlap": "sum"}
_RESCALED, _PLAIN = {"rescale": True}, {"rescale": False}

_METHODS = {
    method.name: method
    for method in (
        MergeMethod(
            "linear", "Weighted average", False, {"normalize": True}, {"weight": 1.0}, merge=_average, local=True
        ),
        _sum_of_pruned("task_arithmetic", "Task arithmetic", _keep_all, {}, {}, local=True),
        _sum_of_pruned("magnitude", "Magnitude pruning", _keep_largest, _PLAIN, _SHARE),
        _sum_of_pruned("ties", "TIES", _keep_largest, {"normalize": True, **_PLAIN}, _SHARE, elect=True),
        _sum_of_pruned("dare_linear", "DARE", _keep_random, _RESCALED, _SHARE),
        _sum_of_pruned("dare_ties", "DARE with TIES", _keep_random, _RESCALED, _SHARE, elect=True),
        _sum_of_pruned("breadcrumbs", "Model Breadcrumbs", _keep_inliers, _PLAIN, _SHARE | {"drop_largest": 0.01}),
        _sum_of_pruned("cabs", "CABS", _keep_free_balanced, _BLOCKS | _TURNS, _COUNT, local=True),
        _sum_of_pruned("bs_only", "CABS without conflict awareness", _keep_balanced, _BLOCKS, _COUNT, local=True),
        _sum_of_pruned("ca_only", "CABS without balance", _keep_free_largest, _TURNS, {"density": 0.25}),
    )
}


def available_methods() -> Mapping[str, MergeMethod]:
    """The merge methods by name: cabs, its ablations bs_only and ca_only, and what they are compared with."""
    return MappingProxyType(_METHODS)


def tensor_generator(random_state: int, name: str) -> torch.Generator:
    """A stream of random numbers of its own for each tensor: the same whatever else is merged, and in which order."""
    digest = hashlib.sha256(f"{random_state}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def merge_tensor(
    method: MergeMethod,
    name: str,
    base: TensorSource | None,
    models: Mapping[str, TensorSource],
    settings: Mapping[str, Any],
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> Tensor:
    """Tensor ``name`` of the merged model, in the place and (unless told ``dtype``) the type that the base has it in.

    Where there is no base, the first model stands for it. It is computed on ``device``; if None, in its place.
    """
    reference = stored(next(iter(models.values())) if base is None else base, name)
    sources = [*models.items()]
    if base is not None and method.needs_base:
        sources.append((base.origin, base))
    tensors = [stored(source, name) for _, source in sources]
    wide = reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
    merged = torch.empty(reference.shape, dtype=reference.dtype if dtype is None else dtype, device=reference.device)
    device = reference.device if device is None else device
    generator = tensor_generator(seed, name)

    def merge(out: Tensor, pieces: list[Tensor]) -> None:
        inputs = [
            require_finite(piece.to(device, wide), whole, name, label)
            for piece, whole, (label, _) in zip(pieces, tensors, sources, strict=True)
        ]
        start = inputs.pop() if method.needs_base else None
        if start is not None and all(torch.equal(start, model) for model in inputs):
            out.copy_(start)  # bit for bit: even a negative zero, which adding zero would make positive
        else:
            out.copy_(method.merge(start, inputs, generator=generator, **settings))

    if method.local:
        step = max(_PIECE // settings.get("m", 1), 1) * settings.get("m", 1)
        for pieces in zip(*(x.flatten().split(step) for x in (merged, *tensors)), strict=True):
            merge(pieces[0], list(pieces[1:]))
    else:
        merge(merged, tensors)
    return merged


def merge_state_dicts(
    base: Mapping[str, Tensor] | None,
    models: Sequence[Mapping[str, Tensor]] | Mapping[str, Mapping[str, Tensor]],
    *,
    method: str | MergeMethod = "cabs",
    dtype: torch.dtype | None = None,
    exclude: Sequence[str] = (),
    random_state: int | np.random.Generator | np.random.RandomState | None = None,
    **params: Any,
) -> dict[str, Tensor]:
    """Merge models that were fine-tuned from one base.

    Parameters
    ----------
    base : mapping of str to Tensor, or None
        The state dict that the models started from. None is for ``method="linear"``, which needs none.
    models : sequence, or mapping from name to state dict
        K >= 1 state dicts with the names and shapes of the base. Where pruning goes in turn, the first is best preserved.
    method : str or MergeMethod
        The name of one of ``available_methods()``, or a method of your own.
    dtype : torch.dtype, optional
        Type of the floating-point tensors of the result. If None, each has the type that it has in the base.
    exclude : sequence of str
        Tensors that are not merged, each entry a name, a glob, or ``re:`` and a regular expression for its beginning, such
        as ``"classifier.*"``. The base's are copied; those that only models have are left out.
    random_state : int, RandomState, Generator or None
        For methods that draw at random (DARE).
    **params
        Settings of the method: ``weight``, ``scale`` (λ; 1 unless given), ``density``, … Those in the method's
        ``model_defaults`` may be a sequence with one value for each model.

    Returns
    -------
    dict of str to Tensor
        New tensors under the names of the base, in its order. Buffers of integers are copied from the base.

    Raises
    ------
    InputError
        If tensors differ in name or shape, are quantised, or are not finite.
    ParameterError
        If the method or a setting is unknown or out of its range.

    Notes
    -----
    Computed tensor by tensor in float32 (float64 where inputs are), so besides the result it takes the memory of
    some ten copies of the largest tensor, and hardly any for methods that are ``local``. No result depends on what other
    tensors there are.

    Examples
    --------
    >>> base = {"w": torch.zeros(4)}
    >>> models = [{"w": torch.tensor([4.0, 3.0, 2.0, 1.0])}, {"w": torch.tensor([4.0, 1.0, 2.0, 3.0])}]
    >>> merge_state_dicts(base, models, method="cabs", n=2, m=4)["w"]
    tensor([4., 3., 2., 3.])
    """
    if not isinstance(method, MergeMethod):
        require_choice(method, "method", tuple(_METHODS))
        method = _METHODS[method]
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ParameterError(f"dtype must be a type of floating-point numbers, such as torch.bfloat16; got {dtype!r}.")
    if base is None and method.needs_base:
        raise ParameterError(f"base is None, and {method.name} merges what models add to it. Give its state dict.")
    start = None if base is None else open_state_dict(base, "the base")
    sources = open_models(models)
    settings = method.settings(len(sources), **params)
    reference = next(iter(sources.values())) if start is None else start
    names = require_same_tensors(reference, sources, exclude)
    if start is not None:
        warn_of_copies(start, sources, names)
        if settings.get("order") == "norm":
            settings["order"] = norm_order(start, sources, names)
    seed = spawn(random_state, 1)[0]
    merged = {
        name: merge_tensor(method, name, start, sources, settings, seed=seed, dtype=dtype)
        for name in track(names, "merge")
    }
    for name in reference.names:
        if name not in merged:
            tensor = reference.get(name)
            merged[name] = tensor.to(dtype if tensor.is_floating_point() else None, copy=True)
    merged |= {name: merged[home] for name, home in reference.tied.items()}
    return {name: merged[name] for name in (merged if base is None else base)}
