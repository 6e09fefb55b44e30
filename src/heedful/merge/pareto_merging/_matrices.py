"""What every fit starts from: models by name, the merged start, and which matrices a preference changes."""

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from heedful._checkpoints import TensorSource
from heedful._validation import require_choice, require_number
from heedful.errors import HeedfulWarning, InputError
from heedful.merge._methods import available_methods
from heedful.merge._task_vectors import open_state_dict, read, require_same_tensors, select_names

StateDict = Mapping[str, Tensor]
T = TypeVar("T")
STARTS = ("task_arithmetic", "ties")
_TIES_DENSITY = 0.2  # of the TIES paper

# Rows of these are looked up, not multiplied: they stay as they are in the start.
_EMBEDDING = re.compile(r"embed|position|(^|\.)(wte|wpe|shared)\.", re.IGNORECASE)


class Sources:
    """Base, models and start as sources of tensors, checked against each other.

    Parameters
    ----------
    base, models
        Where tensors come from.
    start : {"task_arithmetic", "ties"} or mapping
        How the start merges, or the start itself.
    start_scale : float
        λ of θ_0 + λ Σ V_k.
    include, exclude
        Names, globs or ``re:…``: the matrices with factors (None: all but embeddings), and tensors left out of the merge.
    at_least : int
        How many models it takes.
    dtype : torch.dtype, optional
        Of the start's floating-point tensors; default each its own in the base.
    """

    def __init__(
        self,
        base: TensorSource,
        models: Mapping[str, TensorSource],
        *,
        start: str | StateDict,
        start_scale: float,
        include: Sequence[str] | None,
        exclude: Sequence[str],
        at_least: int = 2,
        dtype: torch.dtype | None = None,
    ):
        if not isinstance(start, Mapping):
            require_choice(start, "start", STARTS)
        require_number(start_scale, "start_scale")
        if len(models) < at_least:
            raise InputError(
                f"A Pareto set needs two models or more, got {len(models)}: with one there is nothing to trade. Use the model "
                "itself."
            )
        self.base, self.models, self.names = base, models, tuple(models)
        self.merged = set(require_same_tensors(self.base, self.models, exclude))
        self.method, self.start_scale, self._dtype = start, start_scale, dtype
        self.start = open_state_dict(start, "the start") if isinstance(start, Mapping) else None
        if self.start is not None:
            require_same_tensors(self.base, {"the start": self.start}, exclude)
        self.factored = self._choose(include)

    def _choose(self, include: Sequence[str] | None) -> list[str]:
        shapes = {name: self.base.info(name).shape for name in self.merged}
        matrices = {name for name, shape in shapes.items() if len(shape) > 1 and 0 not in shape}
        if include is None:
            matrices = {name for name in matrices if len(shapes[name]) == 2 and not _EMBEDDING.search(name)}
        else:
            matrices &= select_names(self.merged, include)
        if not matrices:
            what = (
                "no matrix besides embeddings" if include is None else f"no matrix that include={list(include)} names"
            )
            raise InputError(f"The models have {what}. Name the matrices that a preference may change with include=.")
        return [name for name in self.base.names if name in matrices]

    def ranks(self, rank: int) -> dict[str, int]:
        """``rank`` for each matrix with factors, or what the matrix has; one warning for all."""
        require_number(rank, "rank", low=1, integer=True)
        shapes = {name: self.base.info(name).shape for name in self.factored}
        ranks = {name: min(rank, shape[0], math.prod(shape[1:])) for name, shape in shapes.items()}
        if small := [name for name in ranks if ranks[name] < rank]:
            warnings.warn(
                f"rank {rank} is more than {len(small)} of the {len(ranks)} matrices have, the first {small[0]} of "
                f"{' × '.join(map(str, shapes[small[0]]))}; they took the largest that they can have.",
                HeedfulWarning,
                stacklevel=4,
            )
        return ranks

    def vectors(self, name: str) -> Float[Tensor, "K ..."]:
        """The task vectors of a tensor, in float32 (float64 if models are)."""
        base = read(self.base, name, self.base.origin)
        return torch.stack([read(model, name, label) for label, model in self.models.items()]).sub_(base)

    def addends(self, vectors: Float[Tensor, "K ..."]) -> Float[Tensor, "K ..."]:
        """What the start adds to the base, before its scale: ``vectors``, or what TIES leaves of them."""
        if self.method != "ties":
            return vectors
        ties, zero = available_methods()["ties"], torch.zeros_like(vectors[0])
        assert ties.prune is not None
        settings = ties.settings(len(vectors), density=_TIES_DENSITY)
        trimmed = torch.stack(list(ties.prune(zero, list(vectors), **settings)))
        return torch.where(trimmed.sum(0) >= 0, trimmed.clamp(min=0), trimmed.clamp(max=0))

    def start_of(self, name: str, vectors: Float[Tensor, "K ..."] | None) -> Tensor:
        """The start's tensor; ``vectors`` are None where nothing is to be added to the base."""
        if self.start is not None:
            start = self.start.get(name)
        else:
            start = self.base.get(name)
            if vectors is not None:
                start = self.addends(vectors).sum(0).mul_(self.start_scale).add_(start)
        return start.to(self.dtype_of(name))

    def with_tied(self, values: Mapping[str, T]) -> dict[str, T]:
        """``values`` with those of tied tensors again under their other names."""
        return {**values, **{name: values[home] for name, home in self.base.tied.items() if home in values}}

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of the start's tensor."""
        own = self.base.info(name).dtype
        return own if self._dtype is None or not own.is_floating_point else self._dtype
