"""The driver that trains diagonal layers: importances grow distinct as the temperature falls, then the diagonals are fixed."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from heedful._results import Report
from heedful._validation import require_choice, require_number
from heedful.compress._patterns import require_sparsity
from heedful.compress._sparsity import Schedule, SparseTraining, anneal, erk_densities
from heedful.compress.dynadiag.convert import convertible_layers, diagonal_layers, other_layers, replace_module
from heedful.compress.dynadiag.layer import DiagonalLinear, MaskValues, Selection, weight_of
from heedful.errors import InputError, ParameterError, UnsupportedModelError

__all__ = ["DynaDiag", "DynaDiagStats", "LayerStats"]

# What momentum remembers is linear in the gradient, and the second moments of Adam are quadratic.
_POWERS = {"momentum_buffer": 1, "exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2}
_LEAST_FOLDING = 1e-3


@dataclasses.dataclass(frozen=True)
class LayerStats(Report):
    """One diagonal layer.

    Parameters
    ----------
    candidates, active : int
        P, and K of them in use.
    replaced : int
        How many of those in use were not when the driver was made.
    importance : float
        Mean importance α̃ of those in use, in (0, 1]; 1 once frozen.
    parameters : int
        Trained numbers that the layer holds now, its bias not counted.
    """

    candidates: int
    active: int
    replaced: int
    importance: float
    parameters: int


@dataclasses.dataclass(frozen=True)
class DynaDiagStats(Report):
    """Where training stands.

    Parameters
    ----------
    steps_taken : int
        Steps so far.
    temperature : float
        T now.
    frozen : bool
        Whether diagonals are fixed.
    sparsity : float
        Share of zeros in the weights of the diagonal layers.
    layers : dict of str to LayerStats
        Each diagonal layer.
    skipped : tuple of str
        Layers with a weight matrix that cannot become diagonal: convolutions, subclasses of ``nn.Linear``.
    """

    steps_taken: int
    temperature: float
    frozen: bool
    sparsity: float
    layers: dict[str, LayerStats]
    skipped: tuple[str, ...]


class DynaDiag(SparseTraining):
    """Train the linear layers of a model sparse along whole diagonals, and learn which.

    Parameters
    ----------
    model : nn.Module
        Its linear layers become ``DiagonalLinear``, in place: values are read off their weights and scaled up, so that
        outputs have the variance that the dense initialisation gives. If it has such layers already, as
        ``convert_to_diagonal`` leaves them, these are trained as they are and nothing is converted.
    optimizer : Optimizer
        It owns the weights; new parameters take their place, and scores get a group of their own, without weight decay.
        Make it before, and learning-rate schedulers and ``DistributedDataParallel`` after.
    sparsity : float
        Share of zeros, in [0, 1); usually 0.8 to 0.99.
    total_steps : int
        Optimizer steps of the whole training.
    temperature : tuple of two float
        T at the start and when diagonals are fixed, both > 0.
    schedule : {"cosine", "linear", "exponential", "constant"}
        How T goes from one to the other.
    freeze_at : float
        When diagonals are fixed, as a fraction of ``total_steps``, in (0, 1].
    l1_weight : float
        λ >= 0 of ``penalty``, whose size the paper does not give. From 1e-4 on it can outweigh the loss under Adam.
    score_lr_scale : float
        The learning rate of scores is this times that of the first diagonal layer's values, > 0.
    distribution : {"uniform", "erk"}
        The same sparsity in every layer, or Erdős-Rényi-kernel: denser where a layer is small.
    selection, mask_values, groups, backend
        As for ``DiagonalLinear``.
    include, exclude : sequence of str
        Names, globs, ``"re:…"``, or ``"first"`` and ``"last"``: which layers.
    generator : torch.Generator, optional
        Of the first scores. If None, torch's default one.

    Attributes
    ----------
    steps_taken : int
        How many steps of the optimizer ``step`` has counted.
    layers : dict of str to DiagonalLinear
        The diagonal layers.
    frozen : bool
        Whether diagonals are fixed.

    Raises
    ------
    ParameterError
        If a setting is out of its range, or the optimizer does not own a weight; the message names it.
    UnsupportedModelError
        If no linear layer is left, two modules share a weight, or the model is in ``DistributedDataParallel`` already.

    Notes
    -----
    *Freezing* folds importances into values and keeps K · D of the P · D values; the function does not change, unless
    ``selection="soft"``. Optimizer state is cut alike, momentum and Adam's moments in the units of the folded values. If
    the optimizer did not step, because a ``GradScaler`` skipped it or gradients are being accumulated, freezing waits for
    the next step that it takes. Values are then new parameters: under ``DistributedDataParallel``, wrap the model again
    when ``frozen`` turns true, or let ``freeze_at=1.0``.

    *Distributed.* Chosen diagonals are a function of the scores, which all ranks share.

    *Checkpoints.* Load the model before the optimizer and the driver; training goes on bit for bit.

    References
    ----------
    Dynamic Sparse Training of Diagonally Sparse Networks, ICML 2025, arXiv:2506.11449.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    >>> driver = DynaDiag(model, optimizer, sparsity=0.9, total_steps=20)
    >>> for _ in range(20):
    ...     loss = model(torch.randn(16, 8)).square().mean() + driver.penalty()
    ...     optimizer.zero_grad()
    ...     loss.backward()
    ...     optimizer.step()
    ...     driver.step()
    >>> driver.finalize()[2]
    DiagonalLinear(in_features=64, out_features=64, k=7 of 64, bias=True, frozen)
    """

    layers: dict[str, Any]

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        sparsity: float = 0.9,
        total_steps: int,
        temperature: tuple[float, float] = (5.0, 0.05),
        schedule: Schedule = "cosine",
        freeze_at: float = 0.75,
        l1_weight: float = 1e-6,
        score_lr_scale: float = 1.0,
        distribution: Literal["uniform", "erk"] = "uniform",
        selection: Selection = "hard",
        mask_values: MaskValues = "soft",
        groups: int = 1,
        backend: str = "auto",
        include: Sequence[str] | None = None,
        exclude: Sequence[str] = ("first", "last"),
        generator: torch.Generator | None = None,
    ):
        require_sparsity(sparsity)
        if not isinstance(temperature, Sequence) or len(temperature) != 2:
            raise ParameterError(
                f"temperature must be two numbers, T at the start and at the end; got {temperature!r}."
            )
        require_number(temperature[0], "the start of temperature", low=0, open_low=True)
        require_number(temperature[1], "the end of temperature", low=0, open_low=True)
        require_choice(schedule, "schedule", ("cosine", "linear", "exponential", "constant"))
        require_number(freeze_at, "freeze_at", low=0, high=1, open_low=True)
        require_number(l1_weight, "l1_weight", low=0)
        require_number(score_lr_scale, "score_lr_scale", low=0, open_low=True)
        require_choice(distribution, "distribution", ("uniform", "erk"))
        diagonal = diagonal_layers(model)
        already = {name: layer for name, layer in diagonal.items() if not layer.frozen}
        if diagonal and not already:
            raise UnsupportedModelError(
                f"The diagonal layers {', '.join(map(repr, diagonal))} are frozen already. Load a state from before, or "
                "call diagonal_to_dense to begin anew."
            )
        dense: dict[str, Any] = {} if already else convertible_layers(model, include=include, exclude=exclude)
        _refuse_if_late(model, optimizer, dense)
        settings = {"selection": selection, "mask_values": mask_values, "groups": groups, "backend": backend}
        sparsities = dict.fromkeys(dense, sparsity)
        if dense and distribution == "erk":
            densities = erk_densities({name: layer.weight.shape for name, layer in dense.items()}, sparsity)
            sparsities = {name: 1 - density for name, density in densities.items()}
        converted = {
            name: _converted(
                layer, sparsity=sparsities[name], temperature=temperature[0], generator=generator, **settings
            )
            for name, layer in dense.items()
        }
        super().__init__(model, optimizer, total_steps=total_steps, layers=already or dense, generator=generator)
        self.temperature, self.schedule, self.l1_weight = temperature, schedule, l1_weight
        self.freeze_step = max(1, round(freeze_at * total_steps))
        for name, layer in converted.items():
            self._replace(dense[name].weight, layer.values)
            replace_module(model, name, layer)
            self.layers[name] = layer
        self.skipped = tuple(other_layers(model))
        self._first_offsets = {name: layer.offsets().tolist() for name, layer in self.layers.items()}
        self._known = {name: layer.values for name, layer in self.layers.items()}
        self._add_score_group(score_lr_scale)
        self._set_temperature()
        self._hooks.append(optimizer.register_load_state_dict_pre_hook(lambda *_: self._hand_over()))

    def penalty(self) -> Float[Tensor, ""]:
        """λ Σ ‖α‖₁ over the live layers, to be added to the loss; 0 once diagonals are fixed."""
        total = next(iter(self.layers.values())).values.new_zeros(())
        if self.frozen:
            return total
        return total + self.l1_weight * sum(layer.scores.abs().sum().to(total.device) for layer in self.layers.values())

    @property
    def frozen(self) -> bool:
        """Whether diagonals are fixed."""
        return all(layer.frozen for layer in self.layers.values())

    def finalize(self) -> nn.Module:
        """Fix diagonals, if they are not yet, end the driver, and return the model with its frozen ``DiagonalLinear``.

        ``diagonal_to_dense(model)`` then makes ordinary layers of them, ``save_compressed`` keeps them small.
        """
        if self._hooks and not self.frozen:
            self._freeze()
        return super().finalize()

    def stats(self) -> DynaDiagStats:
        """Where training stands, layer by layer."""
        layers = {}
        for name, layer in self.layers.items():
            offsets = layer.offsets()
            layers[name] = LayerStats(
                candidates=layer.n_diagonals,
                active=layer.k,
                replaced=len(set(offsets.tolist()).difference(self._first_offsets[name])),
                importance=float(layer.importance().detach()[offsets].mean()),
                parameters=layer.values.numel() + (0 if layer.scores is None else layer.scores.numel()),
            )
        sizes = {name: layer.in_features * layer.out_features for name, layer in self.layers.items()}
        zeros = sum(layer.effective_sparsity() * sizes[name] for name, layer in self.layers.items())
        return DynaDiagStats(
            steps_taken=self.steps_taken,
            temperature=self._temperature(),
            frozen=self.frozen,
            sparsity=zeros / sum(sizes.values()),
            layers=layers,
            skipped=self.skipped,
        )

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs beside the state of the model and of the optimizer."""
        return {**super().state_dict(), "frozen": self.frozen, "first_offsets": dict(self._first_offsets)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from ``state_dict``; load the model first.

        Raises
        ------
        InputError
            If the state is of another driver or choice of layers, or the model was not loaded before.
        """
        if state_dict.get("frozen", self.frozen) != self.frozen:
            form = ("live", "frozen")
            raise InputError(
                f"The diagonal layers are {form[self.frozen]}, but were {form[not self.frozen]} when this state was saved. "
                "Load the state of the model first, then those of the optimizer and of the driver."
            )
        super().load_state_dict(state_dict)
        self._first_offsets = dict(state_dict["first_offsets"])
        self._hand_over()
        self._set_temperature()

    def weights(self) -> dict[str, nn.Parameter]:
        """The values of each layer, whatever form it has."""
        return {
            name: layer.values if isinstance(layer, DiagonalLinear) else layer.weight
            for name, layer in self.layers.items()
        }

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "active": [layer.k for layer in self.layers.values()]}

    def _temperature(self) -> float:
        return anneal(self.steps_taken / self.freeze_step, *self.temperature, self.schedule)

    def _set_temperature(self) -> None:
        for layer in self.layers.values():
            layer.temperature.fill_(self._temperature())

    def _begin_step(self) -> None:
        if self.frozen:
            return
        self._require_scores()
        self._set_temperature()
        if self.steps_taken >= self.freeze_step:
            self._freeze()

    def _require_scores(self) -> None:
        owned = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        scores = {name: layer.scores for name, layer in self.layers.items() if not layer.frozen}
        for name, score in scores.items():
            if id(score) not in owned:
                raise InputError(
                    f"The optimizer does not own the scores of layer {name!r}, so that its diagonals cannot be learned. "
                    "Make DynaDiag with the optimizer that trains the model, and leave its groups as they are."
                )
        device = next(iter(scores.values())).device
        if not torch.stack([score.isfinite().all().to(device) for score in scores.values()]).all():
            broken = [name for name, score in scores.items() if not score.isfinite().all()]
            raise InputError(
                f"Scores of {', '.join(map(repr, broken))} are NaN or infinite after step {self.steps_taken}. Lower the "
                "learning rate or score_lr_scale, or clip gradients."
            )

    def _add_score_group(self, lr_scale: float) -> None:
        """Give scores a parameter group of their own, wherever in the optimizer they were before."""
        first = self._group(next(iter(self._known.values())), next(iter(self.layers)))
        scores = {f"{name}.scores": layer.scores for name, layer in self.layers.items()}
        ours = {id(score) for score in scores.values()}
        for group in self.optimizer.param_groups:
            kept = [i for i, parameter in enumerate(group["params"]) if id(parameter) not in ours]
            group.update({key: [group[key][i] for i in kept] for key in ("params", "param_names") if key in group})
        self._score_group = len(self.optimizer.param_groups)
        shared = {key: value for key, value in first.items() if key not in ("params", "param_names")}
        own = {
            "params": list(scores.items() if "param_names" in first else scores.values()),
            "lr": first["lr"] * lr_scale,
        }
        self.optimizer.add_param_group({**shared, "weight_decay": 0.0, **own})

    def _replace(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """Give the optimizer ``new`` in the place of ``old``, which it forgets."""
        for group in self.optimizer.param_groups:
            group["params"] = [new if parameter is old else parameter for parameter in group["params"]]
        self.optimizer.state.pop(old, None)

    def _hand_over(self) -> None:
        """Let the optimizer have the parameters that the layers have: loading a state or freezing may have made new ones."""
        for name, layer in self.layers.items():
            if layer.values is not self._known[name]:
                self._replace(self._known[name], layer.values)
                self._known[name] = layer.values
        group = self.optimizer.param_groups[self._score_group]
        live = {f"{name}.scores": layer.scores for name, layer in self.layers.items() if layer.scores is not None}
        for score in group["params"]:
            if not any(score is other for other in live.values()):
                self.optimizer.state.pop(score, None)
        group["params"] = list(live.values())
        if "param_names" in group:
            group["param_names"] = list(live)

    def _freeze(self) -> None:
        """Fix the diagonals of every layer; the optimizer keeps what it remembers of those that stay."""
        for layer in self.layers.values():
            if layer.frozen:
                continue
            values = layer.values
            values.grad = layer.scores.grad = None  # the optimizer has used them
            offsets, folding = layer.offsets(), layer._folding()
            layer.freeze()
            if memory := self.optimizer.state.get(values):
                self.optimizer.state[layer.values] = {
                    key: _cut(key, entry, values, offsets, folding) for key, entry in memory.items()
                }
        self._hand_over()


def _converted(dense: nn.Module, *, generator: torch.Generator | None, **settings: Any) -> DiagonalLinear:
    """A diagonal layer with random scores, its weight that of ``dense`` scaled up."""
    weight = weight_of(dense)
    layer = DiagonalLinear(
        weight.shape[1],
        weight.shape[0],
        bias=dense.bias is not None,
        generator=generator,
        device=weight.device,
        dtype=weight.dtype,
        **settings,
    )
    # Outputs are sums over fewer inputs, so that weights must be larger to give them the same variance.
    layer._take_diagonals_of(dense, scale=(layer.n_diagonals / layer._n_weighted) ** 0.5)
    return layer


def _cut(key: str, entry: Any, values: Tensor, offsets: Tensor, folding: Tensor) -> Any:
    """What an optimizer remembers of all diagonals, of those that stay alone and in the units of folded values.

    V' = α̃ V turns a gradient g into g/α̃. The division is bounded, or what is left of older gradients could become huge.
    """
    if not isinstance(entry, Tensor) or entry.ndim != values.ndim or len(entry) != len(values):
        return entry
    units = folding.clamp(min=_LEAST_FOLDING) ** _POWERS.get(key, 0)
    return entry[offsets] / units[:, None].to(entry.dtype)


def _refuse_if_late(model: nn.Module, optimizer: Optimizer, dense: dict[str, Any]) -> None:
    """Raise unless parameters may still be exchanged."""
    if isinstance(model, DistributedDataParallel) and dense:
        raise UnsupportedModelError(
            "DistributedDataParallel has registered the dense weights already. Make DynaDiag first, then wrap the model."
        )
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise ParameterError(
            "A learning-rate scheduler has counted the optimizer's parameter groups already. Make DynaDiag first, which "
            "adds one, then the scheduler."
        )
    for name, layer in dense.items():
        if optimizer.state.get(layer.weight):
            raise ParameterError(
                f"The optimizer remembers the dense weight of {name!r} already, and would lose that. Make DynaDiag before "
                "the first step, or a new optimizer; not Adagrad, which cannot take new parameters."
            )
