"""What training with sparse layers is made of: which layers, masks on weights, a driver beside the optimizer, schedules.

A driver takes part in a training loop through the optimizer's step hooks, and counts optimizer steps by its own ``step``:

    loss.backward()
    optimizer.step()  # the driver masks gradients and adapts masks just before, and clears pruned weights just after
    driver.step()
"""

import fnmatch
import functools
import math
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from torch.nn.utils import get_total_norm, parametrize
from torch.optim import Optimizer

from heedful._results import Report
from heedful._validation import require_choice, require_number
from heedful.errors import ClosureError, HeedfulWarning, InputError, ParameterError, UnsupportedModelError

Schedule = Literal["cosine", "linear", "exponential", "constant"]


def select_layers(
    model: nn.Module,
    kinds: tuple[type[nn.Module], ...] = (nn.Linear,),
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = ("first", "last"),
) -> dict[str, nn.Module]:
    """The layers of ``model`` that a method is to work on, by name, in the order in which they were registered.

    Parameters
    ----------
    model : nn.Module
        The model.
    kinds : tuple of types
        Layers are instances of these; each has a ``weight``.
    include, exclude : sequence of str
        A name, a glob (``"blocks.*.mlp.*"``; ``*`` crosses dots), ``"re:"`` and a regular expression for the whole name,
        or ``"first"`` and ``"last"``: the model's first and last layer with a weight of two or more dimensions, of
        whatever kind. If ``include`` is None, all layers of the kinds are.

    Raises
    ------
    ParameterError
        If an entry (other than "first" and "last") matches no layer.
    UnsupportedModelError
        If no layer is left, a weight belongs to two modules, or it is parametrized already.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    weighted = [name for name, module in model.named_modules() if _has_matrix(module)]
    ends = {"first": weighted[:1], "last": weighted[-1:]}
    chosen = set(layers) if include is None else matching(include, "include", layers, ends)
    chosen -= matching(exclude, "exclude", layers, ends)
    if not chosen:
        nouns = " or ".join(kind.__name__ for kind in kinds)
        found = f"the model has {_listed(layers)}" if layers else "the model has none"
        raise UnsupportedModelError(
            f"No {nouns} layer is left to work on: {found}; included are {'all' if include is None else _listed(include)}, "
            f"excluded {_listed(exclude) or 'none'}. Exclude less, say exclude=()."
        )
    selected = {name: module for name, module in layers.items() if name in chosen}
    _refuse_shared_weights(model, selected)
    return selected


class Mask(nn.Module):
    """Parametrization of a weight: zero where ``mask`` is False.

    Normally its gradient is masked as the weight is. With ``dense_grad`` every entry gets the gradient that it would have
    if it were kept (straight through).
    """

    mask: Tensor

    def __init__(self, mask: Bool[Tensor, "..."]):
        super().__init__()
        self.register_buffer("mask", mask.clone(memory_format=torch.contiguous_format))
        self.dense_grad = False

    def forward(self, weight: Tensor) -> Tensor:
        if self.dense_grad:
            return weight - (weight * ~self.mask).detach()
        return weight * self.mask


def own_weight(layer: nn.Module) -> nn.Parameter:
    """The parameter behind ``layer.weight``."""
    if parametrize.is_parametrized(layer, "weight"):
        return layer.parametrizations.weight.original  # type: ignore[union-attr, return-value]
    return layer.weight  # type: ignore[return-value]


def csr_matrix(starts: Tensor, columns: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    """A sparse matrix by compressed rows, without torch's warning that such are in beta."""
    hear_beta_warning()
    return torch.sparse_csr_tensor(starts, columns, values, tuple(shape), check_invariants=False)


@functools.cache
def hear_beta_warning() -> None:
    with warnings.catch_warnings():  # it is given once in a process
        warnings.simplefilter("ignore")
        torch.zeros(1, 1).to_sparse_csr()


class SparseTraining:
    """Base of the drivers: it counts steps, and calls ``_before_step`` and ``_after_step`` around the optimizer's.

    Parameters
    ----------
    model : nn.Module
        The model in training. It may be wrapped or compiled before or after.
    optimizer : Optimizer
        The optimizer that owns the weights of ``layers``.
    total_steps : int
        Optimizer steps of the whole training, >= 1. Fractions such as ``end`` refer to it.
    layers : mapping of str to nn.Module
        The layers to work on, by name, from ``select_layers``.
    generator : torch.Generator, optional
        All random choices come from this one, on the CPU. If None, from torch's default generator.

    Attributes
    ----------
    steps_taken : int
        How many steps of the optimizer ``step`` has counted.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        total_steps: int,
        layers: Mapping[str, nn.Module],
        generator: torch.Generator | None = None,
    ):
        require_number(total_steps, "total_steps", low=1, integer=True)
        self.model, self.optimizer, self.total_steps = model, optimizer, total_steps
        self.layers, self.generator = dict(layers), generator
        self.steps_taken = 0
        for name, weight in self.weights().items():
            self._group(weight, name)
        self._optimizer_stepped = False
        self._hooks = [
            optimizer.register_step_pre_hook(self._on_optimizer_step),
            optimizer.register_step_post_hook(self._on_optimizer_stepped),
        ]

    @torch.no_grad()
    def step(self) -> None:
        """Count one step of the optimizer. Call it after ``optimizer.step()``.

        Nothing happens if the optimizer has not stepped since: where a ``GradScaler`` skipped a step, or between the
        batches of an accumulated gradient.
        """
        if not self._hooks:
            raise InputError(f"{type(self).__name__}.step(): finalize() has ended this driver. Make a new one.")
        if self._optimizer_stepped:
            self._optimizer_stepped = False
            self.steps_taken += 1
            self._begin_step()

    def finalize(self) -> nn.Module:
        """End the driver: leave the optimizer alone, bake what was trained into plain layers, and return the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        return self.model

    def stats(self) -> Report:
        """What has happened so far."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs beside the state of the model and of the optimizer."""
        noise = None if self.generator is None else self.generator.get_state()
        return {**self._identity(), "steps_taken": self.steps_taken, "generator": noise}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from ``state_dict``; load the model and the optimizer too.

        Raises
        ------
        InputError
            If the state is of another driver, pattern or choice of layers.
        """
        for key, ours in self._identity().items():
            if (theirs := state_dict.get(key)) != ours:
                raise InputError(
                    f"This state does not fit: its {key} is {theirs!r}, this driver's is {ours!r}. Make the driver with "
                    "the settings of the one that was saved."
                )
        self.steps_taken, self._optimizer_stepped = state_dict["steps_taken"], False
        if state_dict["generator"] is not None:
            self.generator = self.generator or torch.Generator()
            self.generator.set_state(state_dict["generator"].cpu())

    def weights(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer sees as the weights of ``layers``, by the layers' names."""
        return {name: own_weight(layer) for name, layer in self.layers.items()}

    def _begin_step(self) -> None:
        """What must happen before the forward pass of a step."""

    def _before_step(self) -> None:
        """What must happen when gradients are complete, before the optimizer uses them."""

    def _after_step(self) -> None:
        """What must happen when the optimizer has changed the weights."""

    def _identity(self) -> dict[str, Any]:
        """What a state must agree on to be loaded."""
        return {"driver": type(self).__name__, "layers": list(self.layers)}

    def _group(self, weight: Tensor, name: str) -> dict[str, Any]:
        """The parameter group that ``weight`` is in."""
        for group in self.optimizer.param_groups:
            if any(parameter is weight for parameter in group["params"]):
                return group
        raise ParameterError(
            f"The optimizer does not own the weight of layer {name!r}. Make the optimizer with it, or exclude the layer."
        )

    @torch.no_grad()
    def _on_optimizer_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        name = type(self).__name__
        if any(argument is not None for argument in (*args[1:2], kwargs.get("closure"))):
            raise ClosureError(
                f"{name} needs the gradients before optimizer.step() begins, which a closure computes inside. Call "
                "loss.backward(), then optimizer.step() without a closure."
            )
        if self._optimizer_stepped:
            raise InputError(f"optimizer.step() was called twice without {name}.step(). Call that once after each.")
        self._before_step()

    @torch.no_grad()
    def _on_optimizer_stepped(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        self._after_step()
        self._optimizer_stepped = True


class MaskedTraining(SparseTraining):
    """Base of the drivers that hold a mask per layer, and change it now and then by looking at dense gradients.

    Inactive weights are exactly zero after every optimizer step, whatever the optimizer adds to them, and so are their
    gradients whenever the optimizer sees them. Subclasses say in ``_adapt`` how masks change.

    Parameters
    ----------
    model, optimizer, total_steps, layers, generator
        As in ``SparseTraining``.
    masks : mapping of str to Bool[Tensor, "..."]
        The first mask of each layer, True where a weight is active.
    interval : int, optional
        Adapt at every ``interval``-th step t, counted from 0: where t > 0 is a multiple of it. If None, never.
    start, end : float
        Adapt only in ``start * total_steps <= t < end * total_steps``; both in [0, 1].
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        total_steps: int,
        layers: Mapping[str, nn.Module],
        masks: Mapping[str, Bool[Tensor, "..."]],
        interval: int | None = None,
        start: float = 0.0,
        end: float = 1.0,
        generator: torch.Generator | None = None,
    ):
        if interval is not None:
            require_number(interval, "interval", low=1, integer=True)
        require_number(start, "start", low=0, high=1)
        require_number(end, "end", low=0, high=1)
        super().__init__(model, optimizer, total_steps=total_steps, layers=layers, generator=generator)
        self.interval, self.start, self.end = interval, start, end
        self._masks = {name: Mask(masks[name]) for name in layers}
        for name, layer in layers.items():
            self._attach(name, layer)
        with torch.no_grad():
            self._after_step()
            self._begin_step()

    def masks(self) -> dict[str, Tensor]:
        """The current masks (not copies), by the names of their layers: True where a weight is active."""
        return {name: module.mask for name, module in self._masks.items()}

    def finalize(self) -> nn.Module:
        """Bake the masks into plain layers, whose pruned weights are zeros; returns the model."""
        if self._hooks:
            for layer in self.layers.values():
                self._detach(layer)
        return super().finalize()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._set_dense_grad()

    def _adapt(self, gradients: dict[str, Tensor]) -> None:
        """Change masks, given the dense gradient of each layer that has one; ``_activate`` does so in good order."""
        raise NotImplementedError

    def _attach(self, name: str, layer: nn.Module) -> None:
        parametrize.register_parametrization(layer, "weight", self._masks[name])

    @torch.no_grad()
    def _detach(self, layer: nn.Module) -> None:
        parametrize.remove_parametrizations(layer, "weight")
        own_weight(layer).add_(0.0)  # a masked negative number is −0.0, and this makes it 0.0
        for key in [key for key in layer._parameters if key != "weight"]:  # first again, for optimizers go by order
            layer._parameters[key] = layer._parameters.pop(key)

    def _due(self) -> bool:
        """Whether the step that begins, or is under way, adapts masks."""
        t = self.steps_taken
        inside = self.start * self.total_steps <= t < self.end * self.total_steps
        return self.interval is not None and t > 0 and t % self.interval == 0 and inside

    def _needs_dense_gradient(self) -> bool:
        """Whether the gradient of this step must reach inactive weights."""
        return self._due()

    def _activate(self, name: str, mask: Bool[Tensor, "..."]) -> None:
        """Give a layer a new mask. What is pruned or grown starts again from zero, its moments too."""
        self._flip(name, (self._masks[name].mask ^ mask).nonzero(as_tuple=True))

    def _flip(self, name: str, where: tuple[Tensor, ...]) -> None:
        """``_activate`` by the indices of what changes."""
        weight, mask = self.weights()[name], self._masks[name].mask
        mask[where] = ~mask[where]
        weight[where] = 0
        clear_moments(self.optimizer, weight, where)

    def _set_dense_grad(self) -> None:
        for module in self._masks.values():
            module.dense_grad = self._needs_dense_gradient()

    def _begin_step(self) -> None:
        self._set_dense_grad()

    def _before_step(self) -> None:
        gradients = self._gradients()
        if self._due():
            scale = self._grad_scale()
            dense = {name: gradient if scale is None else gradient / scale for name, gradient in gradients.items()}
            if get_total_norm(list(dense.values()), norm_type=math.inf).isfinite():
                self._adapt(dense)
            else:
                warnings.warn(
                    f"{type(self).__name__} adapted no mask at step {self.steps_taken}: a gradient is NaN or infinite.",
                    HeedfulWarning,
                    stacklevel=2,
                )
        for name, gradient in gradients.items():
            if self._masks[name].dense_grad:  # otherwise it is masked already
                gradient.mul_(numbers(self._masks[name].mask, gradient.dtype))

    def _after_step(self) -> None:
        for name, weight in self.weights().items():
            weight.mul_(numbers(self._masks[name].mask, weight.dtype))

    def _gradients(self) -> dict[str, Tensor]:
        """The gradients that there are, by the names of their layers."""
        gradients = {name: weight.grad for name, weight in self.weights().items() if weight.grad is not None}
        if not gradients:
            raise InputError("optimizer.step() found no gradient in any sparse layer. Call loss.backward() before it.")
        return gradients

    def _grad_scale(self) -> Tensor | None:
        """What gradients are still to be divided by: fused optimizers undo the scale of a ``GradScaler`` themselves."""
        return getattr(self.optimizer, "grad_scale", None)


def numbers(mask: Bool[Tensor, "..."], dtype: torch.dtype) -> Tensor:
    """The mask as 0 and 1: several times as fast on a CPU as torch's own conversion of booleans."""
    return mask.view(torch.uint8).to(dtype)


def clear_moments(optimizer: Optimizer, weight: Tensor, where: Any) -> None:
    """Zero what ``optimizer`` remembers of ``weight[where]``: in all of its state that has the weight's shape."""
    for value in optimizer.state.get(weight, {}).values():
        if isinstance(value, Tensor) and value.shape == weight.shape:
            value[where] = 0


def erk_densities(shapes: Mapping[str, Sequence[int]], sparsity: float) -> dict[str, float]:
    """Erdős-Rényi kernel: densities ∝ (sum of a shape) / (product of it), at most 1, that give ``sparsity`` over all.

    Parameters
    ----------
    shapes : mapping of str to sequence of int
        The shapes of the weights, as (out, in) or (out, in, height, width).
    sparsity : float
        Share of zeros in all weights together, in [0, 1].

    Returns
    -------
    dict of str to float
        The share of each weight to keep. Small layers are kept denser than large ones.

    References
    ----------
    Evci, Gale, Menick, Castro, Elsen: Rigging the Lottery: Making All Tickets Winners, ICML 2020.
    """
    require_number(sparsity, "sparsity", low=0, high=1)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    budget = (1 - sparsity) * sum(sizes.values())
    full: set[str] = set()
    while True:  # A layer that would be more than full is full, and the others share what is left.
        parts = {name: sum(shape) for name, shape in shapes.items() if name not in full}
        left = budget - sum(sizes[name] for name in full)
        scale = left / sum(parts.values()) if parts else 0.0
        over = {name for name, part in parts.items() if scale * part > sizes[name]}
        if not over:
            return {name: 1.0 if name in full else scale * parts[name] / sizes[name] for name in shapes}
        full |= over


def anneal(fraction: float, start: float, end: float, schedule: Schedule = "cosine") -> float:
    """The value on the way from ``start`` to ``end`` when ``fraction`` (clipped to [0, 1]) of it is done.

    Examples
    --------
    >>> [round(anneal(fraction, 0.3, 0.0), 3) for fraction in (0.0, 0.5, 1.0, 2.0)]
    [0.3, 0.15, 0.0, 0.0]
    >>> round(anneal(0.5, 5.0, 0.05, "exponential"), 3)
    0.5
    """
    require_choice(schedule, "schedule", ("cosine", "linear", "exponential", "constant"))
    done = min(max(fraction, 0.0), 1.0)
    if schedule == "constant":
        return start
    if schedule == "exponential":
        return start ** (1 - done) * end**done
    if schedule == "cosine":
        done = (1 - math.cos(math.pi * done)) / 2
    return (1 - done) * start + done * end


def matching(
    patterns: Sequence[str], argument: str, layers: Mapping[str, Any], ends: Mapping[str, list[str]] | None = None
) -> set[str]:
    """The names among ``layers`` that any of the patterns matches; ``ends`` says what "first" and "last" are."""
    if isinstance(patterns, str):
        raise ParameterError(
            f"{argument} must be a sequence of patterns; got the string {patterns!r}. Put it in a list."
        )
    found: set[str] = set()
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ParameterError(f"{argument} must hold names of layers, globs or re:…; got {pattern!r}.")
        if ends is not None and pattern in ends:
            found.update(ends[pattern])
            continue
        try:
            expression = re.compile(pattern[3:] if pattern.startswith("re:") else fnmatch.translate(pattern))
        except re.error as error:
            raise ParameterError(f"{argument}: {pattern!r} is not a regular expression: {error}.") from error
        names = {name for name in layers if name == pattern or expression.fullmatch(name)}
        if not names:
            raise ParameterError(f"{argument}: {pattern!r} matches no layer; there are {_listed(layers)}.")
        found |= names
    return found & set(layers)


def _refuse_shared_weights(model: nn.Module, selected: Mapping[str, nn.Module]) -> None:
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    aliases = {id(module): name for name, module in reversed(list(model.named_modules()))}
    for name, layer in selected.items():
        if "weight" not in layer._parameters:
            raise UnsupportedModelError(
                f"The weight of layer {name!r} is parametrized already. Finalize the driver that did it, or call "
                "torch.nn.utils.parametrize.remove_parametrizations, or exclude the layer."
            )
        modules = {id(model.get_submodule(owner.rpartition(".")[0])) for owner in owners[id(layer.weight)]}
        if len(modules) > 1:
            shared = ", ".join(sorted(repr(aliases[module]) for module in modules))
            raise UnsupportedModelError(f"Modules {shared} share one weight. Exclude {name!r}, or untie them.")


def _has_matrix(module: nn.Module) -> bool:
    if parametrize.is_parametrized(module, "weight"):
        return any(parameter.ndim >= 2 for parameter in module.parametrizations.weight.parameters())  # type: ignore[union-attr]
    weight = module._parameters.get("weight")
    return weight is not None and weight.ndim >= 2


def _listed(names: Collection[str], limit: int = 20) -> str:
    shown = ", ".join(repr(name) for name in list(names)[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")
