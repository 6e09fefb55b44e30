"""A Pareto set from the weights alone."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from heedful._random import numpy_generator
from heedful._results import track
from heedful._validation import require_choice, require_number
from heedful.errors import InputError
from heedful.merge._task_vectors import open_models, open_state_dict
from heedful.merge.pareto_merging._matrices import Sources, StateDict
from heedful.merge.pareto_merging._scalarization import scalarize
from heedful.merge.pareto_merging._set import Factors, ParetoSet
from heedful.merge.pareto_merging._tucker import dirichlet_second_moment, fit_tucker

SCALARIZATIONS = ("smooth_tchebycheff", "linear")
_DRAWS = 512  # preferences that stand for the Dirichlet law in the refinement


def fit_pareto_set(
    base: StateDict,
    models: Mapping[str, StateDict] | Sequence[StateDict],
    *,
    rank: int = 16,
    start: Literal["task_arithmetic", "ties"] | StateDict = "task_arithmetic",
    start_scale: float = 0.3,
    scalarization: Literal["smooth_tchebycheff", "linear"] = "smooth_tchebycheff",
    smoothing: float = 0.1,
    concentration: float = 1.0,
    target_scale: float = 1.0,
    normalize: bool = True,
    refine_steps: int = 200,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    random_state=None,
) -> ParetoSet:
    """A Pareto set of merged models from their weights alone, in closed form.

    Objective k is the squared distance to target k, θ_0 + s (θ_k − θ_0), over the matrices that a preference changes. With
    ``scalarization="linear"`` the expected weighted sum of distances is minimised by the Tucker approximation of the
    differences of the targets from the start (``fit_tucker``). At a rank that holds all differences, W(γ) is the weighted
    average of the targets: the set is a compressed form of averaging the models by preference ("rewarded soups"). With
    ``"smooth_tchebycheff"`` the cores are then mixed, so as to lower the smoothed largest weighted distance.

    Parameters
    ----------
    base : mapping of str to Tensor
        State dict of the model that all were fine-tuned from.
    models : mapping of str to state dicts, or sequence
        K >= 2 fine-tuned models by name; those of a sequence are called models[0], models[1], …
    rank : int
        r >= 1; usually 4 to 64. Smaller matrices take the largest that they can have, with one warning for all.
    start : {"task_arithmetic", "ties"} or mapping
        The merged model W_base that factors are added to: θ_0 + λ Σ_k V_k with the task vectors V_k, or with the V_k
        trimmed to their largest fifth and reduced to the elected signs; or any state dict.
    start_scale : float
        λ; usually 0.2 to 0.5.
    scalarization, smoothing
        What one number a preference makes of the distances, as in ``smooth_tchebycheff``.
    concentration : float
        Preferences are drawn from Dirichlet(concentration · 1), > 0; 1 is uniform, smaller ones stress the corners.
    target_scale : float
        s. 1 aims at the models themselves; K λ makes equal preference coincide with task arithmetic at λ.
    normalize : bool
        Divide each distance by that of the start before smoothing. The linear form needs none.
    refine_steps : int
        Steps of Adam that mix the cores, >= 0. Their best is kept, which is never worse than no step.
    include : sequence of str, optional
        Matrices that a preference changes: names, globs or ``re:…``. Default: all of two axes but embeddings. Kernels of
        convolutions are taken, as c × rest, if they are named.
    exclude : sequence of str
        Tensors that are not merged; they stay the base's (or those of a ``start`` that was given).
    random_state : int, NumPy RandomState or Generator, optional
        Draws the preferences of the refinement.

    Returns
    -------
    ParetoSet
        Its base is the start, in the dtype of ``base``; factors are float32 (float64 if the models are).

    Raises
    ------
    InputError
        If there are fewer than two models, they do not match, entries are not finite, or no matrix is selected.

    Notes
    -----
    O(K c d r) per sweep of ``fit_tucker``, matrix by matrix. The mixing has K² unknowns whatever the size of the model:
    the objective is convex in the cores, and its gradient stays in the span of the closed-form cores, with the same
    coefficients in every matrix; so nothing is lost. The bases A and B stay those of the linear form.

    References
    ----------
    Chen and Kwok: Pareto Merging: Multi-Objective Optimization for Preference-Aware Model Merging, ICML 2025,
    arXiv:2408.12105. The closed form and the mixing are this library's.
    """
    sources = Sources(
        open_state_dict(base, "the base"),
        open_models(models),
        start=start,
        start_scale=start_scale,
        include=include,
        exclude=exclude,
    )
    fit = DataFreeFit(
        sources,
        rank=rank,
        scalarization=scalarization,
        smoothing=smoothing,
        concentration=concentration,
        target_scale=target_scale,
        normalize=normalize,
        refine_steps=refine_steps,
        random_state=random_state,
    )
    merged = {name: fit.add(name).clone() for name in track(sources.base.names, "fit")}
    return ParetoSet(sources.names, sources.with_tied(merged), sources.with_tied(fit.factors()))


class DataFreeFit:
    """``fit_pareto_set``, one tensor at a time."""

    def __init__(
        self,
        sources: Sources,
        *,
        rank: int = 16,
        scalarization: str = "smooth_tchebycheff",
        smoothing: float = 0.1,
        concentration: float = 1.0,
        target_scale: float = 1.0,
        normalize: bool = True,
        refine_steps: int = 200,
        random_state=None,
    ):
        require_choice(scalarization, "scalarization", SCALARIZATIONS)
        require_number(smoothing, "smoothing", low=0, open_low=True)
        require_number(concentration, "concentration", low=0, open_low=True)
        require_number(target_scale, "target_scale")
        require_number(refine_steps, "refine_steps", low=0, integer=True)
        self._sources = sources
        self._ranks = sources.ranks(rank)
        self._steps = refine_steps if scalarization == "smooth_tchebycheff" else 0
        self._smoothing, self._concentration, self._normalize = smoothing, concentration, normalize
        self._target_scale, self._random_state = target_scale, random_state
        n_models = len(sources.names)
        self._moment = dirichlet_second_moment(n_models, concentration)
        self._factors: dict[str, Factors] = {}
        self._gram = torch.zeros(n_models, n_models, dtype=torch.float64)
        self._squares = torch.zeros(n_models, dtype=torch.float64)

    def add(self, name: str) -> Tensor:
        """Take in a tensor, and give back that of the start. Memory: K + 3 float32 copies of it."""
        vectors = self._sources.vectors(name) if name in self._sources.merged else None
        start = self._sources.start_of(name, vectors)
        if name in self._ranks and vectors is not None:
            base = self._sources.base.get(name).to(vectors)
            deltas = vectors.mul_(self._target_scale).sub_(start.to(vectors) - base).flatten(2)
            A, B, G, _ = fit_tucker(deltas, self._ranks[name], second_moment=self._moment)
            self._factors[name] = Factors(A, B, G)
            cores = G.flatten(1).double().cpu()
            self._gram += cores @ cores.T
            self._squares += deltas.flatten(1).norm(dim=1).double().cpu().square()
        return start

    def factors(self) -> dict[str, Factors]:
        """The factors of all that was added."""
        mixing = self._mixing()
        return {
            name: parts._replace(G=torch.tensordot(mixing.to(parts.G), parts.G, 1))
            for name, parts in self._factors.items()
        }

    @torch.enable_grad()
    def _mixing(self) -> Float[Tensor, "K K"]:
        """C, for which the cores Σ_j C_kj G_j lower the smooth Tchebycheff objective; the identity without steps."""
        best = mixing = torch.eye(len(self._gram), dtype=torch.float64)
        if not self._steps:
            return best
        scale = self._squares if self._normalize else torch.ones_like(self._squares)
        if not bool((scale > 0).all()):
            same = [name for name, square in zip(self._sources.names, scale, strict=True) if square == 0]
            raise InputError(
                f"The start is already the target of {', '.join(same)}, and normalize=True divides by that distance of 0. "
                "Choose another start, or normalize=False."
            )
        shares = numpy_generator(self._random_state).dirichlet([self._concentration] * len(mixing), size=_DRAWS)
        preferences, lowest = torch.from_numpy(shares), math.inf
        mixing.requires_grad_()
        optimizer = torch.optim.Adam([mixing], lr=0.02)
        for _ in range(self._steps + 1):
            distances = self.distances(preferences @ mixing) / scale
            loss = scalarize(distances, preferences, "smooth_tchebycheff", self._smoothing).mean()
            if loss.item() < lowest:
                best, lowest = mixing.detach().clone(), loss.item()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return best

    def distances(self, weights: Float[Tensor, "n K"]) -> Float[Tensor, "n K"]:
        """Squared distances of start + A (Σ_j w_j G_j) Bᵀ to each target, over all matrices added so far."""
        mixed = weights @ self._gram
        return (mixed * weights).sum(1, keepdim=True) - 2 * mixed + self._squares
