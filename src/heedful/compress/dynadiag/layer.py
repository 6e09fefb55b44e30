"""A linear layer that is sparse along whole wrapped diagonals and learns which."""

import logging
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear as dense_linear

from heedful._validation import require_choice, require_number
from heedful.compress._patterns import require_sparsity
from heedful.compress.dynadiag._backends import BACKENDS
from heedful.compress.dynadiag.matmul import diagonal_matmul
from heedful.compress.dynadiag.pattern import active_diagonals, indices
from heedful.errors import InputError, ParameterError

__all__ = ["DiagonalLinear", "add_lora_fa", "soft_topk"]

logger = logging.getLogger("heedful")

Selection = Literal["hard", "soft"]
MaskValues = Literal["soft", "ste"]

_SCORE_NOISE = 0.01  # without it the first K diagonals would be chosen
_LEAST_IMPORTANCE = 1e-6  # what values are divided by at least, so that a diagonal far from being chosen stays finite


def soft_topk(scores: Float[Tensor, " p"], k: int, temperature: float | Tensor) -> Float[Tensor, " p"]:
    """min(k · softmax(scores / temperature), 1): how much each of p candidates counts when about k may.

    Parameters
    ----------
    scores : Float[Tensor, " p"]
        Any finite numbers; only their differences matter. The result is differentiable in all of them.
    k : int
        1 <= k <= p.
    temperature : float or scalar Tensor
        > 0. As it falls to 0, all importance goes to the largest score; as it grows, each candidate gets k / p.

    Returns
    -------
    Float[Tensor, " p"]
        Numbers in [0, 1] that add up to at most k: to k if none had to be cut off at 1.

    Raises
    ------
    InputError
        If a score is NaN or infinite.

    Examples
    --------
    >>> soft_topk(torch.tensor([1.0, 0.5, 0.0, -0.5]), 2, temperature=0.5)
    tensor([1.0000, 0.4738, 0.1743, 0.0641])
    """
    require_number(k, "k", low=1, high=len(scores), integer=True)
    require_number(float(temperature), "temperature", low=0, open_low=True)
    _require_finite(scores)
    return _soft_topk(scores, k, temperature)


def _soft_topk(scores: Tensor, k: int, temperature: float | Tensor) -> Tensor:
    # The largest is taken away before the division, which could overflow.
    return (k * torch.softmax((scores - scores.detach().max()) / temperature, dim=0)).clamp(max=1)


def _require_finite(scores: Tensor) -> None:
    if not scores.isfinite().all():
        raise InputError(
            f"{int((~scores.isfinite()).sum())} of {len(scores)} scores are NaN or infinite. Lower the learning rate "
            "of the scores, or clip their gradients."
        )


class DiagonalLinear(nn.Module):
    """y = W x + b, with W zero outside of K learned wrapped diagonals: ``nn.Linear`` at sparsity 1 − K/P.

    An M × N weight (out × in) has P = max(M, N) candidate diagonals of D = min(M, N) entries (``diagonal_indices`` says
    where). Importances α̃ = min(K softmax(α / T), 1) of learned scores α choose the K largest, the set I:

        W = Σ_{o ∈ I} α̃_o P_o diag(V_o).

    Forward and backward compute those K diagonals alone, yet the softmax passes a gradient to the scores of all, so that a
    diagonal outside can come in.

    Parameters
    ----------
    in_features, out_features : int
        N and M.
    sparsity : float
        Share of zeros, in [0, 1); usually 0.8 to 0.99. K = max(1, ⌈(1 − sparsity) P⌉).
    bias : bool
        Whether to add a learned bias.
    temperature : float
        T > 0. ``DynaDiag`` lowers it from 5 to 0.05, which makes the importances ever more distinct.
    selection : {"hard", "soft"}
        "soft" computes all P diagonals, each weighted by its importance, until ``freeze`` takes the K largest. It costs
        what a dense layer does, and freezing then changes the function.
    mask_values : {"soft", "ste"}
        "ste" takes 1 in the place of α̃ on I (and 0 elsewhere) in the forward pass, with the gradient of α̃.
    groups : int
        Diagonals are chosen in aligned runs of this many neighbours, which share a score; it must divide P. Runs of 16
        and more make dense blocks, for backend "bcsr". K is a multiple of it.
    backend : str
        As in ``diagonal_matmul``.
    generator : torch.Generator, optional
        Of the initial weights.
    device, dtype
        As in ``nn.Linear``.

    Attributes
    ----------
    scores : Parameter, shape (P / groups,)
        α; starts at 1/P with normal noise of standard deviation 0.01. None once frozen.
    values : Parameter, shape (P, D), once frozen (K, D)
        V; starts uniform in ±√(1/n) · P/K for n = K D / M inputs per output, so that α̃ V starts as the weights of
        ``nn.Linear`` do. Once frozen, in the order of ``offsets()``.
    bias : Parameter, shape (M,), or None
    temperature : Tensor
        T, a buffer.
    k, n_diagonals : int
        K and P.

    Raises
    ------
    ParameterError
        If a setting is out of its range; the message names it.
    InputError
        If called with another number of features.

    Notes
    -----
    *Cost.* O(batch · K · D) operations, 1 − sparsity of those of a dense layer. While scores are alive, all P · D values
    are stored, as many as the dense weight has, and so is their gradient (zero outside of I); once frozen, K · D.

    *State.* A live layer saves ``scores, values, bias, temperature``, a frozen one ``frozen_offsets`` in the place of
    ``scores``. Loading either into a layer of the same sparsity gives it that form; its parameters are then new objects,
    which an optimizer of before does not know.

    References
    ----------
    Dynamic Sparse Training of Diagonally Sparse Networks, ICML 2025, arXiv:2506.11449.

    Examples
    --------
    >>> layer = DiagonalLinear(64, 32, sparsity=0.9)
    >>> layer(torch.ones(5, 64)).shape, layer.k, layer.n_diagonals
    (torch.Size([5, 32]), 7, 64)
    >>> layer.freeze()
    >>> layer.values.shape
    torch.Size([7, 32])
    """

    values: nn.Parameter
    temperature: Tensor
    frozen_offsets: Tensor | None
    scores: Any  # Parameter, None once frozen
    bias: Any  # Parameter or None, as the next two
    lora_a: Any
    lora_b: Any

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sparsity: float = 0.9,
        bias: bool = True,
        temperature: float = 5.0,
        selection: Selection = "hard",
        mask_values: MaskValues = "soft",
        groups: int = 1,
        backend: str = "auto",
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        require_number(in_features, "in_features", low=1, integer=True)
        require_number(out_features, "out_features", low=1, integer=True)
        require_number(temperature, "temperature", low=0, open_low=True)
        require_choice(selection, "selection", ("hard", "soft"))
        require_choice(mask_values, "mask_values", ("soft", "ste"))
        require_choice(backend, "backend", ("auto", *BACKENDS))
        self.in_features, self.out_features = in_features, out_features
        self.n_diagonals = max(in_features, out_features)
        require_number(groups, "groups", low=1, high=self.n_diagonals, integer=True)
        if self.n_diagonals % groups:
            raise ParameterError(
                f"groups must divide the number of diagonals, max(in_features, out_features); got groups={groups} for "
                f"{self.n_diagonals}."
            )
        require_sparsity(sparsity)
        self._dense_kind: type[nn.Module] = nn.Linear
        self.k = active_diagonals(self.n_diagonals, sparsity, groups=groups)
        if self.k == self.n_diagonals:
            logger.info("a layer of sparsity %g keeps all of its %d diagonals: it is dense", sparsity, self.k)
        self.selection, self.mask_values, self.groups = selection, mask_values, groups
        self.backend: Any = backend
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.scores = nn.Parameter(torch.empty(self.n_diagonals // groups, **factory))
        self.values = nn.Parameter(torch.empty(self.n_diagonals, self._length, **factory))
        self.bias = nn.Parameter(torch.empty(out_features, **factory)) if bias else None
        self.register_buffer("temperature", torch.tensor(float(temperature), device=device, dtype=dtype))
        self.register_buffer("frozen_offsets", None)
        self.register_buffer("lora_a", None)
        self.register_parameter("lora_b", None)
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw scores, values and bias anew. The layer must not be frozen."""
        if self.scores is None:
            raise InputError("a frozen layer has no scores to draw. Make a new layer.")
        _fill(self.scores, lambda x: x.normal_(1 / self.n_diagonals, _SCORE_NOISE, generator=generator), generator)
        bound = 1 / math.sqrt(self._n_weighted * self._length / self.out_features)
        if self.mask_values == "soft":
            bound *= self.n_diagonals / self.k
        _fill(self.values, lambda x: x.uniform_(-bound, bound, generator=generator), generator)
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            _fill(self.bias, lambda x: x.uniform_(-bound, bound, generator=generator), generator)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Module,
        *,
        sparsity: float = 0.9,
        generator: torch.Generator | None = None,
        **settings: Any,
    ) -> "DiagonalLinear":
        """A layer that starts as ``linear`` restricted to its K diagonals of largest energy, Σ_d W².

        That is the closest K-diagonal weight there is. All P diagonals are read off, those that are not chosen too; the
        noise of the initial scores is dealt out in the order of their energies.

        Parameters
        ----------
        linear : nn.Linear or transformers' Conv1D
            It shares its bias with the new layer, which takes its device, dtype and mode.
        sparsity, generator, **settings
            As for the class.

        Raises
        ------
        InputError
            If the layer is of another kind, or an entry of its weight is NaN or infinite.
        """
        weight = weight_of(linear)
        if not weight.is_meta:
            require_finite_weight(weight)
        layer = cls(
            weight.shape[1],
            weight.shape[0],
            sparsity=sparsity,
            bias=linear.bias is not None,
            generator=generator,
            device=weight.device,
            dtype=weight.dtype,
            **settings,
        )
        diagonals = read_diagonals(weight.detach())
        with torch.no_grad():
            layer.scores[by_energy(diagonals, layer.groups)] = layer.scores.sort(descending=True).values
        layer._take_diagonals_of(linear)
        return layer

    @torch.no_grad()
    def _take_diagonals_of(self, linear: nn.Module, *, scale: float = 1.0) -> None:
        """Let the diagonals of the weight, at the importances of now, be those of ``linear`` times ``scale``.

        Everything but the scores is as ``from_linear`` says.
        """
        weight = weight_of(linear)
        gates = self.importance() if self.mask_values == "soft" else torch.ones_like(self.importance())
        self.values.copy_(read_diagonals(weight) * (scale / gates.clamp(min=_LEAST_IMPORTANCE))[:, None])
        for parameter in (self.scores, self.values):
            parameter.requires_grad_(weight.requires_grad)
        self.bias = linear.bias
        self._dense_kind = type(linear)
        self.train(linear.training)

    @torch.no_grad()
    def to_linear(self) -> nn.Module:
        """The dense layer of the same function, ``nn.Linear`` (or ``Conv1D``, if it was made from one); the bias is shared."""
        weight = self.dense_weight()
        with torch.device("meta"):  # neither memory nor random numbers are spent on weights to be replaced
            if self._dense_kind is nn.Linear:
                dense: Any = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None)
            else:
                dense, weight = self._dense_kind(self.out_features, self.in_features), weight.T.contiguous()
        dense.weight = nn.Parameter(weight, requires_grad=self.values.requires_grad)
        dense.bias = self.bias
        return dense.train(self.training)

    @property
    def frozen(self) -> bool:
        """Whether the diagonals are fixed."""
        return self.frozen_offsets is not None

    def offsets(self) -> Int[Tensor, " k"]:
        """The diagonals in use, ascending: those with the K largest scores, of equal ones the lowest."""
        return self._expand_groups(self._chosen()) if self.frozen_offsets is None else self.frozen_offsets

    def importance(self) -> Float[Tensor, " p"]:
        """α̃ of every candidate; of a frozen layer 1 where the diagonal is in use, else 0."""
        if self.frozen_offsets is not None:
            return self.values.new_zeros(self.n_diagonals).index_fill(0, self.frozen_offsets, 1)
        return _soft_topk(self.scores, self.k // self.groups, self.temperature).repeat_interleave(self.groups)

    def _diagonals(self) -> tuple[Float[Tensor, "n d"], Int[Tensor, " n"]]:
        """The diagonals that the forward pass computes, α̃_o V_o as rows, and their offsets."""
        if self.frozen_offsets is not None:
            compact = len(self.values) == self.k
            return self.values if compact else self.values.index_select(0, self.frozen_offsets), self.frozen_offsets
        chosen = self._chosen()
        gates = _soft_topk(self.scores, len(chosen), self.temperature)
        if self.selection == "hard":
            gates, ones = gates[chosen], torch.ones_like(chosen, dtype=gates.dtype)
        else:
            ones = torch.zeros_like(gates).index_fill(0, chosen, 1)
            chosen = torch.arange(len(gates), device=gates.device)
        if self.mask_values == "ste":
            gates = ones + (gates - gates.detach())
        offsets = self._expand_groups(chosen)
        values = self.values.index_select(0, offsets) if self.selection == "hard" else self.values
        return values * gates.repeat_interleave(self.groups)[:, None], offsets

    def dense_weight(self) -> Float[Tensor, "out in"]:
        """The weight as a dense matrix, differentiable in the parameters; it includes what ``add_lora_fa`` added."""
        values, offsets = self._diagonals()
        where = indices(self.out_features, self.in_features, offsets, tall=self.out_features >= self.in_features)
        weight = values.new_zeros(self.out_features, self.in_features).index_put(tuple(where), values)
        return weight if self.lora_b is None else weight + self.lora_b @ self.lora_a

    def effective_sparsity(self) -> float:
        """Share of the entries of the weight that lie on no diagonal in use: 1 − K/P."""
        return 1 - self.k / self.n_diagonals

    def forward(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        """The product x Wᵀ + b over the last axis."""
        if x.shape[-1:] != (self.in_features,):
            raise InputError(f"this layer takes {self.in_features} features; got an input of shape {tuple(x.shape)}.")
        values, offsets = self._diagonals()
        y = diagonal_matmul(x, values, offsets, self.out_features, backend=self.backend)
        if self.lora_b is not None:
            y = y + dense_linear(dense_linear(x, self.lora_a), self.lora_b)
        # In the dtype of the product, which autocast may have lowered, as nn.Linear does.
        return y if self.bias is None else y + self.bias.to(y.dtype)

    @torch.no_grad()
    def freeze(self, *, compact: bool = True) -> None:
        """Fix the diagonals in use and fold the importances into the values: V_o ← α̃_o V_o; scores stop.

        The function stays as it is (with ``selection="hard"``). A layer that is frozen stays so.

        Parameters
        ----------
        compact : bool
            Keep K · D values and drop the scores. ``values`` is then a new parameter: hand it to the optimizer, as
            ``DynaDiag`` does. If False, all parameters stay the objects they were, and the scores get no more gradients.

        Raises
        ------
        InputError
            If there is a gradient, which would be lost: freeze between ``zero_grad()`` and the next backward pass. Or if
            a score is NaN or infinite.
        """
        if self.frozen_offsets is not None and (not compact or self.scores is None):
            return
        if any(p.grad is not None and p.grad.any() for p in (self.scores, self.values)):
            raise InputError(
                "freeze() found gradients that no step has used, or that were not cleared after it. Call "
                "optimizer.step() and optimizer.zero_grad() first."
            )
        _require_finite(self.scores)
        offsets, folded = self.offsets(), self._folded()
        if compact:
            self.values = nn.Parameter(folded, requires_grad=self.values.requires_grad)
            self.scores = None
        else:
            self.values[offsets] = folded
            self.scores.requires_grad_(False)
        self.frozen_offsets = offsets

    @torch.no_grad()
    def _folded(self) -> Float[Tensor, "k d"]:
        """The values that ``freeze`` leaves, in the order of ``offsets()``."""
        if self.frozen_offsets is not None:
            return self._diagonals()[0].detach()
        return self.values[self.offsets()] * self._folding()[:, None]

    def _folding(self) -> Float[Tensor, " k"]:
        """What ``freeze`` multiplies the values of each diagonal in use by: its importance, or 1 for "ste"."""
        importance = self.importance().detach()[self.offsets()]
        return importance if self.mask_values == "soft" else torch.ones_like(importance)

    def extra_repr(self) -> str:
        """What ``print`` shows of the layer."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, k={self.k} of {self.n_diagonals}, "
            f"bias={self.bias is not None}{', frozen' * self.frozen}"
        )

    @property
    def _length(self) -> int:
        return min(self.in_features, self.out_features)

    @property
    def _n_weighted(self) -> int:
        """How many diagonals do not have weight 0 in the forward pass."""
        return self.n_diagonals if (self.selection, self.mask_values) == ("soft", "soft") else self.k

    def _chosen(self) -> Int[Tensor, " n"]:
        """Groups with the largest scores, ascending. Scores order as importances do, and do not tie where those round."""
        order = self.scores.detach().sort(descending=True, stable=True).indices
        return order[: self.k // self.groups].sort().values

    def _expand_groups(self, groups: Tensor) -> Tensor:
        if self.groups == 1:
            return groups
        return (groups[:, None] * self.groups + torch.arange(self.groups, device=groups.device)).reshape(-1)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors) -> None:
        state = {name: state_dict.get(prefix + name) for name in ("scores", "values", "frozen_offsets", "lora_a")}
        saved = state["frozen_offsets"]
        if saved is not None and saved.shape != (self.k,):
            errors.append(
                f"{prefix}frozen_offsets: a layer with {saved.numel()} diagonals was saved, this one has {self.k}. Make "
                "it with the sparsity it was saved with."
            )
        else:
            self._take_form(**state)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    def _take_form(self, scores, values, frozen_offsets, lora_a) -> None:
        """Be live or frozen, compact or not, with or without an adapter, as a saved state is; contents come later."""
        if frozen_offsets is not None or scores is not None:
            live = scores is not None
            rows = self.k if not live and values is not None and len(values) == self.k else self.n_diagonals
            if len(self.values) != rows:
                self.values = self._like(self.values, rows, self._length)
            if live != (self.scores is not None):
                self.scores = self._like(self.values, self.n_diagonals // self.groups) if live else None
            if frozen_offsets is None:
                self.frozen_offsets = None
            elif self.frozen_offsets is None:
                self.frozen_offsets = torch.zeros(self.k, dtype=torch.int64, device=self.values.device)
            if live:
                self.scores.requires_grad_(self.values.requires_grad and not self.frozen)
        if lora_a is not None and lora_a.ndim == 2 and (self.lora_a is None or len(self.lora_a) != len(lora_a)):
            self._make_adapter(len(lora_a))

    def _make_adapter(self, rank: int) -> None:
        """Zeros, and no other parameter trains."""
        self.requires_grad_(False)
        self.lora_a = self.values.detach().new_zeros(rank, self.in_features)
        self.lora_b = nn.Parameter(self.values.detach().new_zeros(self.out_features, rank))

    @staticmethod
    def _like(parameter: nn.Parameter, *shape: int) -> nn.Parameter:
        return nn.Parameter(parameter.detach().new_zeros(shape), requires_grad=parameter.requires_grad)


def add_lora_fa(layer: DiagonalLinear, rank: int, *, generator: torch.Generator | None = None) -> DiagonalLinear:
    """Give a frozen diagonal layer a low-rank adapter, y += B A x, with A random and fixed, and train B alone.

    Weights off the diagonals come within reach for rank · M parameters, and the backward pass keeps rank numbers per input
    instead of N.

    Parameters
    ----------
    layer : DiagonalLinear
        A frozen layer; it is changed in place, and its values and bias stop training (``requires_grad_`` starts them
        again). Hand ``layer.lora_b`` to an optimizer.
    rank : int
        1 <= rank <= min(M, N); usually 4 to 16. An adapter that is there is replaced.
    generator : torch.Generator, optional
        Of A, uniform in ±1/√N. B starts at zero, so that the function is unchanged.

    Returns
    -------
    DiagonalLinear
        ``layer``.

    Raises
    ------
    InputError
        If the layer is not frozen.

    References
    ----------
    Zhang, Zhang, Shi, Chu, Li: LoRA-FA: Memory-efficient Low-rank Adaptation for Large Language Models Fine-tuning, 2023,
    arXiv:2308.03303.

    Examples
    --------
    >>> layer = DiagonalLinear(64, 32, sparsity=0.9)
    >>> layer.freeze()
    >>> [name for name, p in add_lora_fa(layer, rank=4).named_parameters() if p.requires_grad]
    ['lora_b']
    """
    require_number(rank, "rank", low=1, high=layer._length, integer=True)
    if not layer.frozen:
        raise InputError("add_lora_fa needs a frozen layer. Call layer.freeze(), or finalize() of its driver, first.")
    layer._make_adapter(rank)
    bound = 1 / math.sqrt(layer.in_features)
    _fill(layer.lora_a, lambda x: x.uniform_(-bound, bound, generator=generator), generator)
    return layer


def read_diagonals(weight: Float[Tensor, "out in"]) -> Float[Tensor, "p d"]:
    """All P wrapped diagonals of a matrix, as rows in the order of their offsets; a view of a copy of it."""
    tall = weight if weight.shape[0] >= weight.shape[1] else weight.T
    p, d = tall.shape
    # Entry d of diagonal o is at ((d + o) mod p, d). Below a matrix its first d rows again: no wrapping, even strides.
    return torch.cat([tall, tall[:d]]).as_strided((p, d), (d, d + 1))


def by_energy(diagonals: Float[Tensor, "p d"], groups: int = 1) -> Int[Tensor, " g"]:
    """Diagonals, or runs of ``groups`` of them, from the largest Σ V² to the least; of equal ones the lowest comes first."""
    wide = torch.promote_types(diagonals.dtype, torch.float32)
    norms = torch.linalg.vector_norm(diagonals, dim=1, dtype=wide)
    return torch.linalg.vector_norm(norms.view(-1, groups), dim=1).sort(descending=True, stable=True).indices


def require_finite_weight(weight: Float[Tensor, "out in"]) -> None:
    """Raise ``InputError`` where the strongest diagonals are unknown."""
    if not weight.isfinite().all():
        raise InputError(
            f"a weight of shape {tuple(weight.shape)} has {int((~weight.isfinite()).sum())} entries that are NaN or "
            "infinite; its strongest diagonals are unknown. Exclude that layer."
        )


def weight_of(linear: nn.Module) -> Tensor:
    """The weight of ``nn.Linear``, or of transformers' ``Conv1D``, which keeps it transposed, as (out, in)."""
    weight: Any = getattr(linear, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise InputError(f"a {type(linear).__name__} cannot become diagonal. Give nn.Linear or transformers' Conv1D.")
    return weight if isinstance(linear, nn.Linear) else weight.T


def _fill(target: Tensor, draw: Callable[[Tensor], Tensor], generator: torch.Generator | None) -> None:
    """Fill ``target`` with random numbers that are drawn where the generator is."""
    device = target.device if generator is None else generator.device
    target.data.copy_(draw(torch.empty_like(target, device=device)))
