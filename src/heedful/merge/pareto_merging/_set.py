"""A Pareto set of merged models: one model, and what each of its matrices adds for a preference."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from heedful._files import Saved
from heedful.errors import InputError
from heedful.merge.pareto_merging._modules import PreferenceModel, follows_preference
from heedful.merge.pareto_merging._scalarization import Preference, as_preference, simplex_lattice
from heedful.merge.pareto_merging._sweep import ParetoSweep, read_bounds


class Factors(NamedTuple):
    """What one matrix adds for a preference γ: A (Σ_k γ_k G_k) Bᵀ.

    Attributes
    ----------
    A, B, G : Float[Tensor, "c r"], Float[Tensor, "d r"], Float[Tensor, "K r r"]
        Common bases, and one core for each model.
    """

    A: Tensor
    B: Tensor
    G: Tensor

    def added_to(self, weight: Tensor, preference: Float[Tensor, " K"], *, out: Tensor | None = None) -> Tensor:
        """``weight`` and what is added for ``preference``, in the weight's dtype and shape; computed in float32."""
        core = torch.tensordot(preference.to(self.G), self.G, 1)
        left, right = self.A @ core, self.B.T
        same = out is not None and (out.dtype, out.device) == (weight.dtype, weight.device) == (core.dtype, core.device)
        if out is not None and same and out.is_contiguous():
            torch.addmm(weight.flatten(1), left, right, out=out.flatten(1))
            return out
        merged = torch.addmm(weight.flatten(1).to(core), left, right).to(weight.dtype).view_as(weight)
        return merged if out is None else out.copy_(merged)

    @property
    def numel(self) -> int:
        """How many numbers: r (c + d) + K r²."""
        return sum(part.numel() for part in self)


@dataclasses.dataclass(frozen=True, eq=False)
class ParetoSet(Saved):
    """A merged model for every preference over its source models.

    W(γ) = W_base + A (Σ_k γ_k G_k) Bᵀ for every matrix that has factors; all other tensors are the same for all γ.
    ``fit_pareto_set`` and ``fit_pareto_set_unlabelled`` make one.

    A *preference* is one weight >= 0 for each model, in any scale: a list, array or tensor in the order of ``names``, or a
    mapping from names, where those left out weigh 0. Canonical ones are a corner (all on one model), equal, and priority
    (0.5 on the favourite, the rest shared equally).

    Parameters
    ----------
    names : tuple of str
        The source models.
    base : mapping of str to Tensor
        The part that no preference changes: a merged model by itself.
    factors : mapping of str to Factors
        A, B and G of the matrices that a preference changes; tensors of more than two axes count as c × rest.

    Examples
    --------
    >>> generator = torch.Generator().manual_seed(0)
    >>> base = {"weight": torch.randn(4, 4, generator=generator), "bias": torch.zeros(4)}
    >>> models = {name: {**base, "weight": torch.randn(4, 4, generator=generator)} for name in ("math", "code")}
    >>> from heedful.merge import fit_pareto_set
    >>> pareto = fit_pareto_set(base, models, rank=4, scalarization="linear")  # full rank: it interpolates
    >>> merged = pareto.state_dict({"math": 0.25, "code": 0.75})["weight"]
    >>> torch.allclose(merged, 0.25 * models["math"]["weight"] + 0.75 * models["code"]["weight"], atol=1e-5)
    True
    """

    names: tuple[str, ...]
    base: Mapping[str, Tensor]
    factors: Mapping[str, Factors]

    @property
    def n_extra_parameters(self) -> int:
        """Numbers stored beyond one model: Σ r (c + d) + K r² over the matrices with factors."""
        return sum(factors.numel for factors in self.factors.values())

    @torch.no_grad()
    def state_dict(self, preference: Preference) -> dict[str, Tensor]:
        """The model for ``preference``, as tensors of its own. O(c d r) a matrix, bound by the bandwidth of memory."""
        weights = as_preference(preference, self.names)
        return {
            name: self.factors[name].added_to(tensor, weights) if name in self.factors else tensor.clone()
            for name, tensor in self.base.items()
        }

    @torch.no_grad()
    def apply(self, module: nn.Module, preference: Preference) -> nn.Module:
        """Write the model for ``preference`` into ``module``, in place and exactly, whatever it held; returns it.

        Tensors of ``module`` that the set does not have, say of a head, stay as they are.
        """
        weights, own = as_preference(preference, self.names), self._tensors_of(module)
        for name, tensor in self.base.items():
            if name in self.factors:
                self.factors[name].added_to(tensor, weights, out=own[name])
            else:
                own[name].copy_(tensor)
        return module

    def wrap(self, module: nn.Module) -> PreferenceModel:
        """``module``, changed in place so that its preference can be set at any time, or for each row of a batch.

        Every ``nn.Linear`` with factors becomes a ``PreferenceLinear``, which never forms the merged matrix. Other
        matrices with factors (of attention in one piece, of convolutions) are formed in each call, for one preference.

        Returns
        -------
        nn.Module
            Calls ``module``; ``.set_preference(preference)`` takes a preference, or a tensor of shape (batch, K) with one
            for each row. At first all models weigh the same. Its ``state_dict`` holds all of it.
        """
        equal = [1.0] * len(self.names)
        return PreferenceModel(self.apply(module, equal), self.names, self.base, self.factors)

    def sweep(
        self,
        evaluate: Callable[[dict[str, Tensor]], Mapping[str, float]],
        n_points: int = 21,
        *,
        reference: Mapping[str, float] | None = None,
    ) -> ParetoSweep:
        """Evaluate the models for a regular lattice of preferences.

        Parameters
        ----------
        evaluate : callable
            ``evaluate(state_dict)`` gives the performance for each name in ``names``, larger is better.
        n_points : int
            Preferences at most, >= K. The lattice is the finest that this allows: 21 are steps of 0.05 for two models and
            of 0.2 for three.
        reference : mapping of str to float, optional
            Performances that the hypervolume is measured from, say the base model's. Default: the worst of each name.
        """
        preferences = simplex_lattice(len(self.names), n_points)
        if reference is not None:
            self._require_names(reference, "reference has values")
        values = []
        for preference in preferences:
            performance = evaluate(self.state_dict(preference))
            self._require_names(performance, "evaluate returned values")
            values.append([float(performance[name]) for name in self.names])
            if not np.isfinite(values[-1]).all():
                raise InputError(
                    f"evaluate returned {dict(performance)} for the preference {preference.tolist()}. Give finite numbers."
                )
        corner = np.min(values, axis=0) if reference is None else [float(reference[name]) for name in self.names]
        return ParetoSweep.of(self.names, preferences, np.array(values), np.array(corner))

    def select(
        self,
        evaluate: Callable[[dict[str, Tensor]], Mapping[str, float]],
        constraint: Mapping[str, str],
        n_points: int = 21,
    ) -> dict[str, float]:
        """The preference whose model has the best mean performance among those that meet ``constraint``.

        Parameters
        ----------
        evaluate, n_points
            As in ``sweep``, which this runs; a sweep at hand has ``select(constraint)`` itself.
        constraint : mapping of str to str
            A bound for some names, such as ``{"math": ">=0.9", "code": "<=0.5"}``.
        """
        read_bounds(constraint, self.names)  # a slip is told before the models are evaluated
        return self.sweep(evaluate, n_points).select(constraint)

    def save(self, path: str | os.PathLike, *, overwrite: bool = False) -> None:
        """Write the set, base and all, to one ``.safetensors`` file, atomically and without pickling.

        A file that is there is refused unless ``overwrite``.
        """
        if not overwrite and Path(path).exists():
            raise FileExistsError(f"{os.fspath(path)} exists. Choose another name, or say overwrite=True.")
        super().save(path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "ParetoSet":
        """Read a file that ``save`` wrote, or a folder that ``heedful merge`` wrote for ``merge_method: pareto``."""
        if Path(path).is_dir():
            from heedful.merge._pareto_files import open_set

            return open_set(path).in_memory()
        return super().load(path)

    def _tensors_of(self, module: nn.Module) -> dict[str, Tensor]:
        if follows_preference(module):
            raise InputError(
                "The module follows a preference already, since wrap changed it: call set_preference of what wrap returned, or "
                "give a new module."
            )
        own = module.state_dict()
        if missing := [name for name in self.base if name not in own]:
            raise InputError(
                f"The module lacks {len(missing)} tensors of the set, the first {', '.join(missing[:5])}. Give a module of "
                "the architecture that was merged."
            )
        if wrong := [name for name, tensor in self.base.items() if own[name].shape != tensor.shape]:
            raise InputError(
                f"{wrong[0]} has shape {tuple(own[wrong[0]].shape)} in the module and {tuple(self.base[wrong[0]].shape)} in "
                "the set. Give a module of the architecture that was merged."
            )
        return own

    def _require_names(self, values: Mapping[str, float], what: str) -> None:
        if not isinstance(values, Mapping):
            raise InputError(
                f"{what} of type {type(values).__name__}. Give a mapping from {', '.join(map(str, self.names))} to numbers."
            )
        if missing := [name for name in self.names if name not in values]:
            raise InputError(
                f"{what} for {', '.join(values) or 'nothing'}; {', '.join(missing)} is missing. Give one value a model."
            )

    def _to_saved(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        base = {f"base.{name}": tensor for name, tensor in self.base.items()}
        return packed({**base, **named_parts(self.factors)}, {"names": list(self.names), "tensors": list(self.base)})

    @classmethod
    def _from_saved(cls, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> "ParetoSet":
        if "tensors" not in meta:
            raise ValueError("it belongs to the other files of its folder; load the folder")
        tensors = unpacked(arrays, meta)
        base = {name: tensors[f"base.{name}"] for name in meta["tensors"]}  # in their order, which files do not keep
        return cls(tuple(meta["names"]), base, factors_of(tensors))


def named_parts(factors: Mapping[str, Factors]) -> dict[str, Tensor]:
    """``A.<name>``, ``B.<name>`` and ``G.<name>``, as files hold them."""
    return {f"{part}.{name}": value for name, parts in factors.items() for part, value in parts._asdict().items()}


def factors_of(tensors: Mapping[str, Tensor]) -> dict[str, Factors]:
    """What ``named_parts`` named."""
    names = [key.removeprefix("A.") for key in tensors if key.startswith("A.")]
    return {name: Factors(*(tensors[f"{part}.{name}"] for part in Factors._fields)) for name in names}


def packed(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and metadata for a file; bfloat16, which NumPy lacks, goes as int16 and is listed."""
    halves = [key for key, tensor in tensors.items() if tensor.dtype == torch.bfloat16]
    arrays = {
        key: (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy(force=True)
        for key, tensor in tensors.items()
    }
    return arrays, {**meta, "bfloat16": halves}


def unpacked(arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> dict[str, Tensor]:
    """What was ``packed``."""
    tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
    return {key: tensor.view(torch.bfloat16) if key in meta["bfloat16"] else tensor for key, tensor in tensors.items()}
