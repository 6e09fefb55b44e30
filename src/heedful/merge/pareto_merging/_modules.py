"""Modules whose weights follow a preference, set once or for each row of a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

from heedful.errors import InputError, UnsupportedModelError
from heedful.merge.pareto_merging._scalarization import Preference, as_preference, normalized

if TYPE_CHECKING:
    from heedful.merge.pareto_merging._set import Factors

# They read the weights of the nn.Linear in them directly, without calling it.
_READ_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


class PreferenceLinear(nn.Module):
    """A linear layer with weight W + A (Σ_k γ_k G_k) Bᵀ, where each row of a batch may have its own preference γ.

    y = x Wᵀ + b + ((x B) (Σ_k γ_k G_k)ᵀ) Aᵀ; the merged matrix is never formed.

    Parameters
    ----------
    weight : Float[Tensor, "c d"]
        W, the part that no preference changes.
    bias : Float[Tensor, " c"] or None
        b.
    A, B, G : Float[Tensor, "c r"], Float[Tensor, "d r"], Float[Tensor, "K r r"]
        Bases and cores, as in ``Tucker``.

    Attributes
    ----------
    preference : Float[Tensor, "*batch K"]
        A buffer: what ``forward`` uses if it is given none, at first equal. One preference, or one for each row.

    Notes
    -----
    Beyond the linear layer, 2 r (c + d) + 2 r² operations a row.

    Examples
    --------
    >>> linear = torch.nn.Linear(6, 5)
    >>> layer = PreferenceLinear.from_linear(linear, torch.randn(5, 2), torch.randn(6, 2), torch.randn(3, 2, 2))
    >>> x, preference = torch.randn(2, 6), torch.tensor([[1.0, 0.0, 0.0], [0.2, 0.3, 0.5]])
    >>> torch.allclose(layer(x, preference)[1], layer.merge([0.2, 0.3, 0.5])(x[1]), atol=1e-5)
    True
    """

    weight: Tensor
    bias: Tensor | None
    preference: Tensor

    def __init__(
        self,
        weight: Float[Tensor, "c d"],
        bias: Float[Tensor, " c"] | None,
        A: Float[Tensor, "c r"],
        B: Float[Tensor, "d r"],
        G: Float[Tensor, "K r r"],
    ):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.A, self.B, self.G = nn.Parameter(A), nn.Parameter(B), nn.Parameter(G)
        self.register_buffer("preference", G.new_full((len(G),), 1 / len(G)))

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, A: Float[Tensor, "c r"], B: Float[Tensor, "d r"], G: Float[Tensor, "K r r"]
    ) -> PreferenceLinear:
        """``linear`` with factors; its own parameters are shared, and everything takes its dtype and device."""
        layer = cls(linear.weight, linear.bias, A.to(linear.weight), B.to(linear.weight), G.to(linear.weight))
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer

    def forward(
        self, x: Float[Tensor, "*rows d"], preference: Float[Tensor, "*batch K"] | None = None
    ) -> Float[Tensor, "*rows c"]:
        """The layer's output.

        Parameters
        ----------
        x : Float[Tensor, "*rows d"]
            Inputs; with a preference for each row, the first axis is the batch.
        preference : Float[Tensor, "*batch K"], optional
            One of shape (K,), or one for each row, (batch, K): weights >= 0, divided by their sum here and not checked.
        """
        weights = self.preference if preference is None else preference
        weights = weights / weights.sum(-1, keepdim=True)
        core = torch.einsum("...k,krs->...sr", weights, self.G)  # transposed
        low = x @ self.B
        if weights.dim() == 2:
            if len(weights) != len(x):
                raise InputError(
                    f"There are {len(weights)} preferences for a batch of {len(x)}. Give one for each row, or one for all."
                )
            low = (low.reshape(len(x), math.prod(x.shape[1:-1]), self.B.shape[1]) @ core).flatten(0, 1)
        else:
            low = low.flatten(0, -2) @ core if x.dim() > 1 else (low @ core).unsqueeze(0)
        y = nn.functional.linear(x, self.weight, self.bias)
        return torch.addmm(y.reshape(len(low), y.shape[-1]), low, self.A.T).view_as(y)

    @torch.no_grad()
    def merge(self, preference: Preference) -> nn.Linear:
        """An ordinary linear layer for one preference."""
        weights = as_preference(preference, [str(k) for k in range(len(self.G))]).to(self.G)
        linear = nn.Linear(self.weight.shape[1], self.weight.shape[0], self.bias is not None, device="meta")
        core = torch.tensordot(weights, self.G, 1)
        linear.weight = nn.Parameter(torch.addmm(self.weight, self.A @ core, self.B.T))
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.clone())
        return linear

    def extra_repr(self) -> str:
        """Sizes, for ``print``."""
        c, d = self.weight.shape
        return f"in_features={d}, out_features={c}, rank={self.G.shape[1]}, n_models={len(self.G)}"


class _Merged(nn.Module):
    """A parametrization that adds A (Σ_k γ_k G_k) Bᵀ to a weight."""

    preference: Tensor

    def __init__(self, A: Tensor, B: Tensor, G: Tensor):
        super().__init__()
        self.A, self.B, self.G = nn.Parameter(A), nn.Parameter(B), nn.Parameter(G)
        self.register_buffer("preference", G.new_full((len(G),), 1 / len(G)))

    def forward(self, weight: Tensor) -> Tensor:
        core = torch.tensordot(self.preference, self.G, 1)
        return torch.addmm(weight.flatten(1), self.A @ core, self.B.T).view_as(weight)


_FOLLOWERS = (PreferenceLinear, _Merged)


def follows_preference(module: nn.Module) -> bool:
    """Whether some layer of ``module`` has a preference."""
    return any(isinstance(part, _FOLLOWERS) for part in module.modules())


def _take_shapes(model: nn.Module, state: Mapping[str, Tensor], prefix: str, *_: Any) -> None:
    """Before a state is loaded: it may have another number of preferences than ``model`` has now."""
    for name, layer in model.named_modules(prefix=prefix.removesuffix(".")):
        if isinstance(layer, _FOLLOWERS) and (saved := state.get(f"{name}.preference")) is not None:
            layer.preference = layer.preference.new_empty(saved.shape)


class PreferenceModel(nn.Module):
    """A model with a preference; made by ``ParetoSet.wrap``."""

    def __init__(
        self, module: nn.Module, names: Sequence[str], base: Mapping[str, Tensor], factors: Mapping[str, Factors]
    ):
        super().__init__()
        self.module, self.names = module, tuple(names)
        self.register_load_state_dict_pre_hook(_take_shapes)
        with torch.no_grad():
            for name, parts in factors.items():
                path, _, leaf = name.rpartition(".")
                parent, _, child = path.rpartition(".")
                owner, around = module.get_submodule(path), module.get_submodule(parent)
                weight = getattr(owner, leaf)
                weight.copy_(base[name])
                own = [part.to(weight, copy=True) for part in parts]  # what becomes of the module is not the set's
                if type(owner) is nn.Linear and path and not isinstance(around, _READ_WEIGHTS):
                    setattr(around, child, PreferenceLinear.from_linear(owner, *own))
                else:
                    parametrize.register_parametrization(owner, leaf, _Merged(*own))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for the preference that was set."""
        return self.module(*args, **kwargs)

    def set_preference(self, preference: Preference) -> None:
        """Use ``preference`` from now on: one for all rows, or a tensor of shape (batch, K) with one for each.

        Raises
        ------
        UnsupportedModelError
            If rows are to differ and some matrix is formed in each call, for all rows alike.
        """
        if isinstance(preference, Tensor) and preference.dim() == 2 and preference.shape[1] == len(self.names):
            weights = normalized(preference)
        else:
            weights = as_preference(preference, self.names)
        layers = {n: m for n, m in self.module.named_modules() if isinstance(m, _FOLLOWERS)}
        if weights.dim() == 2 and (whole := [name for name, layer in layers.items() if isinstance(layer, _Merged)]):
            raise UnsupportedModelError(
                f"Rows cannot have preferences of their own in {', '.join(whole[:5])}, which is formed for all rows alike. Set "
                "one preference, or leave these matrices out of the fit with include=."
            )
        for layer in layers.values():
            layer.preference = weights.to(layer.G)
