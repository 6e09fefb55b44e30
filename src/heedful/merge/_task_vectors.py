"""Task vectors, fine-tuned minus base: what may be subtracted, read tensor by tensor, and how vectors are added up.

``models`` are sources of tensors by the name that messages call them; ``reference`` is the base, or the first model
where a method needs no base.
"""

import fnmatch
import itertools
import math
import re
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from heedful._checkpoints import TensorSource, open_checkpoint
from heedful.errors import HeedfulWarning, InputError, ParameterError

T = TypeVar("T")


def one_each(value: T | Sequence[T] | np.ndarray | Tensor, count: int, name: str) -> list[T]:
    """``value`` for each of ``count`` models: one for all of them, or a sequence or array of one each."""
    if isinstance(value, np.ndarray | Tensor):
        value = value.tolist()
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ParameterError(
            f"{name} must be one value, or one for each of the {count} models; got {len(value)} values."
        )
    return list(value)


def masked(vector: Float[Tensor, "..."], mask: Bool[Tensor, "..."]) -> Float[Tensor, "..."]:
    """``vector`` with zeros where ``mask`` is false. A product with bytes is quicker than one with booleans, or ``where``."""
    return vector * mask.view(torch.uint8)


def weighted_sum(
    vectors: Iterable[Float[Tensor, "..."]],
    scale: Sequence[float],
    weight: Sequence[float] | None = None,
    *,
    normalize: bool = False,
    elect: bool = False,
) -> Float[Tensor, "..."]:
    """Σ scale_k weight_k v_k, divided by Σ weight_k if ``normalize``.

    With ``elect``, as in TIES, an entry of a term counts only if it has the sign of the sum of the terms (plus if that is
    zero), in the sum and in the sum of the weights. Nothing is divided by weights that sum to zero.
    """
    weight = [1.0] * len(scale) if weight is None else weight
    factors = [s * w for s, w in zip(scale, weight, strict=True)]
    if not elect:  # one vector at a time is in memory
        total, divisor = _sum(vectors, factors), sum(weight)
        return total.div_(divisor) if normalize and abs(divisor) >= 1e-8 else total
    # Products are rounded before they are added, so that opposite ones cancel and plus wins.
    terms = [vector * factor for vector, factor in zip(vectors, factors, strict=True)]
    positive = _sum(terms) >= 0
    agreeing = [torch.where(positive, term > 0, term < 0) for term in terms]
    total = _sum(masked(term, agrees) for term, agrees in zip(terms, agreeing, strict=True))
    if normalize:
        divisors = _sum((agrees.to(total.dtype) for agrees in agreeing), weight)
        total.div_(divisors.where(divisors != 0, 1.0))
    return total


def _sum(vectors: Iterable[Tensor], factors: Iterable[float] = itertools.repeat(1.0)) -> Tensor:
    """Σ factor_k v_k, a new tensor."""
    pairs = zip(vectors, factors, strict=False)
    first, factor = next(pairs)
    total = first * factor
    for vector, factor in pairs:
        total.add_(vector, alpha=factor)
    return total


def select_names(names: Iterable[str], patterns: Sequence[str]) -> set[str]:
    """Those of ``names`` that are one of ``patterns``: a name, a glob, or ``re:`` and an expression for their beginning."""
    if isinstance(patterns, str):  # a sequence of letters, among which * would be everything
        raise ParameterError(
            f"tensors are chosen by a list of names, globs or re:…; got {patterns!r}. Give [{patterns!r}]."
        )
    try:
        expressions = [
            re.compile(pattern[3:] if pattern.startswith("re:") else fnmatch.translate(pattern)) for pattern in patterns
        ]
    except re.error as error:
        raise ParameterError(f"{error.pattern!r} is no regular expression: {error}.") from error
    return {name for name in names if name in patterns or any(e.match(name) for e in expressions)}


def open_state_dict(state: Mapping[str, Tensor], origin: str) -> TensorSource:
    """A state dict as a source that messages call ``origin``."""
    if not isinstance(state, Mapping):
        raise InputError(
            f"{origin} must be a state dict, from names to tensors, such as model.state_dict(); got {state!r:.60}."
        )
    source = open_checkpoint(state)
    source.origin = origin
    return source


def open_models(
    models: Sequence[Mapping[str, Tensor]] | Mapping[str, Mapping[str, Tensor]],
) -> dict[str, TensorSource]:
    """State dicts as sources by name, at least one; those that have none are called by their place."""
    if not models:
        raise InputError("there are no models to merge. Give at least one.")
    named = models if isinstance(models, Mapping) else {f"models[{i}]": state for i, state in enumerate(models)}
    return {name: open_state_dict(state, name) for name, state in named.items()}


def require_same_tensors(
    reference: TensorSource, models: Mapping[str, TensorSource], exclude: Sequence[str] = ()
) -> list[str]:
    """Names of the tensors to merge: the floating-point ones of ``reference``, without those excluded.

    Raises
    ------
    InputError
        If names or shapes differ, or a tensor is quantised. Excluded tensors may differ.

    Warns
    -----
    HeedfulWarning
        If types differ, or if an entry of ``exclude`` is the name of nothing.
    """
    for label, source in {reference.origin: reference, **models}.items():
        if source.quantization is not None:
            raise InputError(f"{label} is quantised: {source.quantization}. Give the model as it was before.")
    everything = {name for source in (reference, *models.values()) for name in (*source.names, *source.tied)}
    excluded = select_names(everything, exclude)
    for pattern in exclude:
        if not select_names(everything, [pattern]):
            _warn(f"exclude: {pattern!r} is the name of no tensor.")
    names = [name for name in reference.names if name not in excluded]
    types = []
    for label, model in models.items():
        _require_names(label, reference, model, excluded)
        for name in names:
            ours, theirs = reference.info(name), model.info(_home(model, name))
            if theirs.shape != ours.shape:
                raise InputError(
                    f"{name} has shape {tuple(theirs.shape)} in {label}, and {tuple(ours.shape)} in {reference.origin}. "
                    f"Give all models one vocabulary if tokens were added, or leave it out: exclude=[{name!r}]."
                )
            if theirs.dtype.is_floating_point != ours.dtype.is_floating_point or theirs.dtype.is_complex:
                raise InputError(f"{name} is {theirs.dtype} in {label}, and {ours.dtype} in {reference.origin}.")
            if theirs.dtype != ours.dtype:
                types.append(f"{name} is {theirs.dtype} in {label}, and {ours.dtype} in {reference.origin}")
    if types:
        more = f"; {len(types) - 1} more differ" if len(types) > 1 else ""
        _warn(f"{types[0]}{more}. The merge is computed in float32 and takes the type of {reference.origin}, or dtype.")
    return [name for name in names if reference.info(name).dtype.is_floating_point]


def warn_of_copies(base: TensorSource, models: Mapping[str, TensorSource], names: Collection[str]) -> None:
    """Warn of models that are the base. Reads of each only as far as the first tensor that differs."""
    for label, model in models.items():
        if names and all(_same(name, base, model) for name in names):
            _warn(f"{label} equals {base.origin}: its task vector is zero, and it holds and adds nothing.")


def norm_order(base: TensorSource, models: Mapping[str, TensorSource], names: Iterable[str]) -> list[int]:
    """Indices of the models by the norm of their whole task vectors, the longest first. Reads everything once."""
    squares = [0.0] * len(models)
    for name in names:
        start = read(base, name, base.origin)
        for k, (label, model) in enumerate(models.items()):
            squares[k] += float((read(model, name, label) - start).double().square().sum())
    return sorted(range(len(models)), key=lambda k: -squares[k])


def read(source: TensorSource, name: str, label: str) -> Float[Tensor, "..."]:
    """A tensor as float32 (float64 if it is that), all of it finite."""
    tensor = stored(source, name)
    return require_finite(tensor.to(torch.promote_types(tensor.dtype, torch.float32)), tensor, name, label)


def stored(source: TensorSource, name: str) -> Tensor:
    """A tensor as it is in ``source``, perhaps under the name that it is tied to."""
    return source.get(_home(source, name))


def require_finite(part: Float[Tensor, "..."], whole: Tensor, name: str, label: str) -> Float[Tensor, "..."]:
    """``part`` itself; an ``InputError`` on ``whole``, the tensor ``name`` of ``label``, unless all entries are finite."""
    if not math.isfinite(part.sum()) and not part.isfinite().all():  # a finite sum, the usual case, is quick to tell
        raise InputError(
            f"{name} of {label} has {int((~whole.isfinite()).sum())} entries that are NaN or infinite. Train or download "
            f"that model again, or leave the tensor out: exclude=[{name!r}]."
        )
    return part


def _require_names(label: str, reference: TensorSource, model: TensorSource, excluded: set[str]) -> None:
    """Nothing may be missing or extra but names of shared values: what is tied in one may be a copy in the other."""
    missing, extra = (
        [name for name in one.names if name not in known]
        for one, known in (
            (reference, {*model.names, *model.tied, *excluded}),
            (model, {*reference.names, *reference.tied, *excluded}),
        )
    )
    parts = [f"{verb} {_first(names)}" for verb, names in (("lacks", missing), ("has besides", extra)) if names]
    if parts:
        raise InputError(
            f"{label} and {reference.origin} must have the same tensors; {label} {' and '.join(parts)}. "
            "Are they of one architecture? What is not to be merged, such as heads, goes into exclude, as names or globs."
        )
    for name, home in reference.tied.items():
        if name in model and name not in excluded and not torch.equal(model.get(name), stored(model, home)):
            raise InputError(
                f"{name} shares the values of {home} in {reference.origin}, and has its own in {label}. Untie it in "
                f"{reference.origin} (tie_word_embeddings), or leave it out: exclude=[{name!r}]."
            )


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _same(name: str, one: TensorSource, other: TensorSource) -> bool:
    return torch.equal(stored(one, name), stored(other, name))


def _home(source: TensorSource, name: str) -> str:
    """The name that ``source`` keeps the values of ``name`` under."""
    return source.tied.get(name, name)


def _warn(message: str) -> None:
    warnings.warn(message, HeedfulWarning, stacklevel=4)
