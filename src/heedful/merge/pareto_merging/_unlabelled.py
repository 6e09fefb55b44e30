"""A Pareto set, or one merge, from unlabelled inputs of each task: AdaMerging and what a preference adds to it."""

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from heedful._random import numpy_generator
from heedful._results import Event, report_progress
from heedful._validation import require_choice, require_number
from heedful.errors import ConvergenceError, InputError, ParameterError
from heedful.merge._task_vectors import open_models, open_state_dict
from heedful.merge.pareto_merging._data_free import SCALARIZATIONS
from heedful.merge.pareto_merging._matrices import Sources, StateDict
from heedful.merge.pareto_merging._scalarization import Preference, as_preference, scalarize
from heedful.merge.pareto_merging._set import Factors, ParetoSet

logger = logging.getLogger("heedful")

Heads = Mapping[str, nn.Module] | nn.ModuleDict | Callable[[str, Any], Tensor]
_FIRST_BATCHES = 8


def fit_pareto_set_unlabelled(
    model: nn.Module,
    base: StateDict,
    models: Mapping[str, StateDict],
    *,
    batches: Mapping[str, Iterable],
    heads: Heads,
    rank: int = 16,
    start: Literal["task_arithmetic", "ties"] | StateDict = "task_arithmetic",
    start_scale: float = 0.3,
    learn_base: bool = True,
    objective: Literal["entropy"] | Callable[[Tensor], Tensor] = "entropy",
    scalarization: Literal["smooth_tchebycheff", "linear"] = "smooth_tchebycheff",
    smoothing: float = 0.1,
    ideal: float | Literal["estimate"] = 0.0,
    concentration: float = 1.0,
    n_preferences: int = 1,
    normalize: bool = True,
    steps: int = 2000,
    lr: float = 1e-3,
    base_lr: float | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    callback: Callable[[Event], bool | None] | None = None,
    random_state=None,
) -> ParetoSet:
    """A Pareto set of merged models, learned on inputs of each task without their labels.

    Objective k is the mean entropy of the predictions for inputs of task k. Every step draws a preference γ, forms the
    merged weights W_base + A (Σ_k γ_k G_k) Bᵀ, and takes one step of Adam on A, B, G, and on the coefficients λ of
    W_base = θ_0 + Σ_k λ_k V_k, which each tensor has of its own (AdaMerging). The family starts as the constant W_base.

    Parameters
    ----------
    model : nn.Module
        The architecture that is merged. It is run in eval mode, on the device that it is on, and not changed.
    base : mapping of str to Tensor
        State dict of what all models were fine-tuned from; names as in ``model``, whose other tensors serve as they are.
    models : mapping of str to state dicts
        K >= 2 fine-tuned models, by the name of their task.
    batches : mapping of str to iterable
        For each task, batches of inputs (usually 16 of them) and nothing else: a tensor, a mapping of keyword arguments,
        or a sequence of one tensor, as a ``DataLoader`` gives. They are started over when they end.
    heads : mapping of str to nn.Module, nn.ModuleDict, or callable
        What makes logits of the model's output: a frozen head for each task, or ``heads(name, output)``.
    rank, start, start_scale, scalarization, smoothing, concentration, include, exclude
        As in ``fit_pareto_set``. With TIES as ``start``, V_k are the trimmed vectors (AdaMerging++); with a state dict,
        W_base = start + Σ_k λ_k V_k, from λ = 0.
    learn_base : bool
        Learn λ, or keep W_base as it starts.
    objective : "entropy" or callable
        ``objective(logits)`` gives a number to minimise, averaged over ranks if there are several.
    ideal : float or "estimate"
        The best that each objective could be, in units of its value at the start if ``normalize``; "estimate" takes the
        value of each task's own model on its first batches.
    n_preferences : int
        Preferences drawn per step, >= 1; the cost is proportional.
    normalize : bool
        Divide each objective by its value at the start, the mean over the first batches of the task, at most 8.
    steps : int
        Optimizer steps, >= 1.
    lr : float
        Adam's learning rate, > 0; usually 1e-4 to 1e-2. Small networks that are often wrong take the smaller ones: at larger
        ones, entropies fall to zero by giving every input the same class.
    base_lr : float, optional
        That of the coefficients λ; default ``lr``. They can be learned faster, since they cannot leave the task vectors.
    callback : callable, optional
        Called after each step with an ``Event`` whose values are the loss and the objectives; True stops the fit there.
    random_state : int, NumPy RandomState or Generator, optional
        Initial bases, and preferences.

    Returns
    -------
    ParetoSet
        On the model's device; its base has the dtypes of ``base``.

    Raises
    ------
    InputError
        As ``fit_pareto_set``, and if batches or heads are missing, hold labels, or end at once.
    ConvergenceError
        If the loss is NaN or infinite; the message names the step and the preference.

    Notes
    -----
    A step costs one forward and backward pass per task and preference. Memory: the task vectors in float32, and the graphs
    of K passes. If a process group is initialised, ranks share the preferences and average objectives and gradients, as
    if their batches were one; give each rank its own batches.

    References
    ----------
    Chen and Kwok: Pareto Merging, ICML 2025, arXiv:2408.12105. Yang et al.: AdaMerging, ICLR 2024.
    """
    require_choice(scalarization, "scalarization", SCALARIZATIONS)
    require_number(smoothing, "smoothing", low=0, open_low=True)
    require_number(concentration, "concentration", low=0, open_low=True)
    require_number(n_preferences, "n_preferences", low=1, integer=True)
    if base_lr is not None:
        require_number(base_lr, "base_lr", low=0, open_low=True)
    if ideal != "estimate":
        require_number(ideal, "ideal")
    sources = Sources(
        open_state_dict(base, "the base"),
        open_models(models),
        start=start,
        start_scale=start_scale,
        include=include,
        exclude=exclude,
    )
    ranks = sources.ranks(rank)
    n_models, rng = len(models), _shared_generator(random_state)
    merged = LearnedMerge(sources, model, each_tensor=True, learned=learn_base)
    learned = {name: _new_factors(merged.fixed[name], n_models, r, rng) for name, r in ranks.items()}
    # Cores are learned in units in which all entries 1 make a change as large (in spectral norm) as a task vector, which is
    # what coefficients of 1 make: so one learning rate serves both.
    units = {
        name: torch.linalg.matrix_norm(sources.vectors(name).flatten(2), 2).mean().item() / r
        for name, r in ranks.items()
    }

    def factors() -> dict[str, Factors]:
        return {name: parts._replace(G=units[name] * parts.G) for name, parts in learned.items()}

    def state(preference: Tensor) -> dict[str, Tensor]:
        weights = merged.state()
        return weights | {name: parts.added_to(weights[name], preference) for name, parts in factors().items()}

    with TaskObjectives(model, sources.names, batches, heads, objective) as objectives:
        scale = torch.ones(n_models)
        if normalize:
            scale = objectives.averages([merged.state()] * n_models)
            _require_positive(scale, sources.names)
        best = objectives.averages(list(models.values())) if ideal == "estimate" else scale * ideal
        parts = [part for each in learned.values() for part in each]
        minimize(
            [{"params": merged.parameters, "lr": lr if base_lr is None else base_lr}, {"params": parts, "lr": lr}],
            objectives,
            state,
            lambda values, preference: scalarize((values - best) / scale, preference, scalarization, smoothing),
            lambda: torch.from_numpy(rng.dirichlet([concentration] * n_models, size=n_preferences)).float(),
            steps=steps,
            callback=callback,
        )
    kept = {name: Factors(*(part.detach() for part in parts)) for name, parts in factors().items()}
    return ParetoSet(sources.names, sources.with_tied(merged.detached()), sources.with_tied(kept))


def adamerging(
    model: nn.Module,
    base: StateDict,
    models: Mapping[str, StateDict],
    *,
    batches: Mapping[str, Iterable],
    heads: Heads,
    preference: Preference | None = None,
    coefficients: Literal["layer", "task"] = "layer",
    start: Literal["task_arithmetic", "ties"] = "task_arithmetic",
    start_scale: float = 0.3,
    objective: Literal["entropy"] | Callable[[Tensor], Tensor] = "entropy",
    steps: int = 2000,
    lr: float = 1e-3,
    exclude: Sequence[str] = (),
    callback: Callable[[Event], bool | None] | None = None,
) -> dict[str, Tensor]:
    """AdaMerging: one merged model, whose coefficients minimise the weighted sum of the tasks' entropies.

    Parameters
    ----------
    preference : preference, optional
        The weights of the tasks; default equal.
    coefficients : {"layer", "task"}
        λ_k of each tensor, or one λ_k for all.
    model, base, models, batches, heads, start, start_scale, objective, steps, lr, exclude, callback
        As in ``fit_pareto_set_unlabelled``; here one model is enough.

    References
    ----------
    Yang, Wang, Shen, Liu, Guo, Wang, Tao: AdaMerging: Adaptive Model Merging for Multi-Task Learning, ICLR 2024.
    """
    require_choice(coefficients, "coefficients", ("layer", "task"))
    sources = Sources(
        open_state_dict(base, "the base"),
        open_models(models),
        start=start,
        start_scale=start_scale,
        include=None,
        exclude=exclude,
        at_least=1,
    )
    merged = LearnedMerge(sources, model, each_tensor=coefficients == "layer", learned=True)
    weights = as_preference([1.0] * len(models) if preference is None else preference, sources.names)
    with TaskObjectives(model, sources.names, batches, heads, objective) as objectives:
        minimize(
            [{"params": merged.parameters, "lr": lr}],
            objectives,
            lambda _: merged.state(),
            lambda values, preference: (values * preference).sum(),
            lambda: weights[None],
            steps=steps,
            callback=callback,
        )
    return sources.with_tied(merged.detached())


class LearnedMerge:
    """fixed + Σ_k λ_k V_k with a λ_k for each tensor, or for all together, on the model's device.

    Buffers and what is not merged have no coefficients.
    """

    def __init__(self, sources: Sources, model: nn.Module, *, each_tensor: bool, learned: bool):
        own = model.state_dict()
        if unknown := [name for name in sources.base.names if name not in own]:
            raise InputError(
                f"The model lacks {len(unknown)} tensors of the base, the first {', '.join(unknown[:5])}. Give a model of the "
                "architecture that was fine-tuned."
            )
        parameters = {name for name, _ in model.named_parameters()}
        self.fixed: dict[str, Tensor] = {}
        self._vectors: dict[str, Tensor] = {}
        for name in sources.base.names:
            vectors, device = sources.vectors(name) if name in sources.merged else None, own[name].device
            if learned and vectors is not None and name in parameters:
                self._vectors[name] = sources.addends(vectors).to(device)
                fixed = sources.start_of(name, None)
            else:
                fixed = sources.start_of(name, vectors)
            self.fixed[name] = fixed.to(device)
        columns = range(len(self._vectors)) if each_tensor else [0] * len(self._vectors)
        self._columns = dict(zip(self._vectors, columns, strict=True))
        first = sources.start_scale if sources.start is None else 0.0
        shape = len(sources.names), 1 + max(columns, default=-1)
        self.coefficients = torch.full(shape, first, requires_grad=learned)

    @property
    def parameters(self) -> list[Tensor]:
        """What is learned: the coefficients, one row a model, or nothing."""
        return [self.coefficients] if self._vectors else []

    def state(self) -> dict[str, Tensor]:
        """The merged tensors, in the dtypes of the base."""
        return self.fixed | {name: self._merged(name) for name in self._vectors}

    def _merged(self, name: str) -> Tensor:
        vectors, fixed = self._vectors[name], self.fixed[name]
        weights = self.coefficients[:, self._columns[name]].to(vectors)
        return (fixed + torch.tensordot(weights, vectors, 1)).to(fixed.dtype)

    @torch.no_grad()
    def detached(self) -> dict[str, Tensor]:
        """The merged tensors as they are now, of their own."""
        return {name: tensor.clone() for name, tensor in self.state().items()}


class TaskObjectives:
    """The objective of each task on its next batch, as a function of the merged tensors.

    A context in which the model and its heads are in eval mode.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        batches: Mapping[str, Iterable],
        heads: Heads,
        objective: Literal["entropy"] | Callable[[Tensor], Tensor],
    ):
        if objective != "entropy" and not callable(objective):
            raise ParameterError(f'objective must be "entropy" or a function of the logits; got {objective!r}.')
        if isinstance(heads, nn.ModuleDict):
            heads = dict(heads.items())
        for what, given in {"batches": batches, "heads": heads}.items():
            if isinstance(given, Mapping) and (missing := [name for name in names if name not in given]):
                raise InputError(
                    f"{what} has nothing for {', '.join(missing)}. Give one for each of {', '.join(names)}."
                )
        self.names, self._model, self._heads, self._objective = tuple(names), model, heads, objective
        self._batches = batches
        self._streams = {name: _cycled(name, batches[name]) for name in names}
        self._device = next(iter(model.state_dict().values())).device
        self._modes: dict[nn.Module, bool] = {}

    def __enter__(self) -> "TaskObjectives":
        heads = [self._heads[name] for name in self.names] if isinstance(self._heads, Mapping) else [self._heads]
        for part in (self._model, *heads):
            if isinstance(part, nn.Module):
                self._modes |= {module: module.training for module in part.modules()}
                part.eval()
        return self

    def __exit__(self, *exception) -> None:
        for module, training in self._modes.items():
            module.training = training

    def __call__(self, state: Mapping[str, Tensor]) -> Float[Tensor, " K"]:
        """With the graph that leads to ``state``."""
        return torch.stack([self._value(name, state, next(self._streams[name])) for name in self.names])

    @torch.no_grad()
    def averages(self, states: Sequence[Mapping[str, Tensor]]) -> Float[Tensor, " K"]:
        """For each task with its own state, the mean over its first batches, and over ranks."""
        means = []
        for name, state in zip(self.names, states, strict=True):
            first = itertools.islice(self._batches[name], _FIRST_BATCHES)
            means.append(torch.stack([self._value(name, state, batch) for batch in first]).mean())
        return _mean_over_ranks(torch.stack(means))

    def _value(self, name: str, state: Mapping[str, Tensor], batch: Any) -> Float[Tensor, ""]:
        args, kwargs = _arguments(name, batch, self._device)
        output = functional_call(self._model, dict(state), args, kwargs)
        logits = self._heads[name](output) if isinstance(self._heads, Mapping) else self._heads(name, output)
        if not isinstance(logits, Tensor):
            raise InputError(
                f"The head of {name} returned a {type(logits).__name__}, not the logits. Write heads as a function: "
                "heads=lambda name, output: output.logits, say."
            )
        if self._objective != "entropy":
            return self._objective(logits).reshape(()).float().cpu()
        if logits.shape[-1] == 1:
            raise InputError(
                f"The head of {name} has one class, and the entropy of its predictions is 0 for ever. Give a head of two or "
                "more classes, or an objective of your own."
            )
        logs = torch.log_softmax(logits.float(), dim=-1)
        return -(logs.exp() * logs).sum(-1).mean().cpu()


@torch.enable_grad()
def minimize(
    groups: Sequence[dict[str, Any]],
    objectives: TaskObjectives,
    state: Callable[[Tensor], dict[str, Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor],
    preferences: Callable[[], Float[Tensor, "n K"]],
    *,
    steps: int,
    callback: Callable[[Event], bool | None] | None,
) -> None:
    """Adam, in place, on the mean of ``loss(objectives(state(γ)), γ)`` over the preferences γ that each step draws.

    ``groups`` are the optimizer's: tensors and their learning rate.

    The loss is taken of the objectives' means over ranks. Its gradient there weighs the objectives of each rank, so that
    the sum over ranks is the gradient for all of their batches together.
    """
    require_number(steps, "steps", low=1, integer=True)
    for group in groups:
        require_number(group["lr"], "lr", low=0, open_low=True)
    optimizer = torch.optim.Adam(groups)
    parameters = [tensor for group in groups for tensor in group["params"]]
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        drawn, total = preferences(), 0.0
        for preference in drawn:
            with torch.autocast(parameters[0].device.type, enabled=False):
                weights = state(preference)
            values = objectives(weights)
            means = _mean_over_ranks(values.detach().clone()).requires_grad_()
            value = loss(means, preference) / len(drawn)
            total += value.item()
            if not math.isfinite(total):
                raise ConvergenceError(
                    f"The loss is {total} at step {step} with the preference {preference.tolist()}; the objectives are "
                    f"{means.tolist()}. Lower lr, or check the batches."
                )
            (slope,) = torch.autograd.grad(value, means)
            (values @ slope).backward(inputs=list(parameters))
        _average_gradients(parameters)
        optimizer.step()
        names = objectives.names
        event = Event("fit", step, steps, {"loss": total, **dict(zip(names, means.tolist(), strict=True))})
        report_progress(event)
        if callback is not None and callback(event):
            return


def _new_factors(weight: Tensor, n_models: int, rank: int, rng: np.random.Generator) -> Factors:
    """Orthonormal bases of random directions, and cores of zeros."""
    c, d = weight.flatten(1).shape
    bases = (np.linalg.qr(rng.standard_normal((side, rank)))[0] for side in (c, d))
    parts = *(torch.from_numpy(base).contiguous() for base in bases), torch.zeros(n_models, rank, rank)
    return Factors(*(part.to(weight.device, torch.float32).requires_grad_() for part in parts))


def _cycled(name: str, batches: Iterable) -> Iterator[Any]:
    """Batch after batch, from the start again when they end."""
    for turn in itertools.count():
        count = 0
        for batch in batches:
            yield batch
            count += 1
        if not count:
            came = "has ended and cannot be started over" if turn else "is empty"
            raise InputError(f"batches[{name!r}] {came}. Give a list of batches or a DataLoader.")
        if not turn:
            logger.info("The batches of %s have ended after %d, and start over whenever they do.", name, count)


def _arguments(name: str, batch: Any, device: torch.device) -> tuple[tuple, dict[str, Any]]:
    """Positional and keyword arguments for the model, on its device."""
    if isinstance(batch, Mapping):
        if "labels" in batch:
            raise InputError(f"A batch of {name} has labels, which are not used. Give the model's inputs alone.")
        return (), tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, dict(batch))
    if isinstance(batch, (tuple, list)):
        if len(batch) != 1:
            raise InputError(
                f"A batch of {name} is a {type(batch).__name__} of {len(batch)}; are there labels in it? Give inputs alone: a "
                "tensor, or a mapping of keyword arguments."
            )
        (batch,) = batch
    if not isinstance(batch, Tensor):
        raise InputError(
            f"A batch of {name} is a {type(batch).__name__}. Give a tensor, or a mapping of keyword arguments."
        )
    return (batch.to(device),), {}


def _require_positive(values: Float[Tensor, " K"], names: Sequence[str]) -> None:
    if wrong := [f"{name} {value:g}" for name, value in zip(names, values.tolist(), strict=True) if not value > 0]:
        raise InputError(
            f"normalize=True divides each objective by its value at the start, which must be > 0; got {', '.join(wrong)}. Use "
            "normalize=False."
        )


def _n_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _exchange_device() -> str:
    """Where tensors must be for ranks to exchange them."""
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def _mean_over_ranks(values: Tensor) -> Tensor:
    if _n_ranks() == 1:
        return values
    total = values.to(_exchange_device(), copy=True)
    dist.all_reduce(total)
    return (total / _n_ranks()).to(values.device)


def _average_gradients(parameters: Sequence[Tensor]) -> None:
    """Over ranks, all in one message."""
    if _n_ranks() > 1:
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        mean = _mean_over_ranks(torch.cat([grad.flatten().to(_exchange_device()) for grad in grads]))
        for p, part in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p).to(p.device)


def _shared_generator(random_state) -> np.random.Generator:
    """A generator that is the same on all ranks: that of rank 0."""
    rng = numpy_generator(random_state)
    if _n_ranks() == 1:
        return rng
    seed = torch.tensor(int(rng.integers(2**63)), device=_exchange_device())
    dist.broadcast(seed, src=0)
    return numpy_generator(int(seed))
