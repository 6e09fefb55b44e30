"""Tilted sharpness-aware minimisation.

SAM descends with the gradient of one bad point near the weights and is blind to every other; SGD is blind to them all.
Tilting heeds the whole neighbourhood, high losses exponentially more. With perturbations ε ~ μ and a tilt t >= 0,

    L^t(θ) = (1/t) log E_μ exp(t L(θ + ε)),      ∇L^t(θ) = E_μ[w(ε) ∇L(θ + ε)]  with  w(ε) ∝ exp(t L(θ + ε)),

the average loss around θ for t → 0 and SAM's worst case for t → ∞.

Li, Zhou, Bilmes: Tilted Sharpness-Aware Minimization, ICML 2025, arXiv:2410.22656.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import SGD, Optimizer

from heedful._flatness import Generators, batch_loss, device_generators, perturb_, returning, scale_
from heedful._validation import require_choice, require_number
from heedful.errors import ClosureError, ConvergenceError, InputError, ParameterError

__all__ = ["SAM", "TiltedSAM", "closure_step", "tilted_loss", "tilted_weights"]


def tilted_weights(losses: Float[Tensor, " k"], tilt: float) -> Float[Tensor, " k"]:
    """Weights ∝ exp(tilt · loss) that sum to 1.

    Parameters
    ----------
    losses : Float[Tensor, " k"]
        k >= 1 losses of any size; only their differences matter.
    tilt : float
        >= 0. 0 gives equal weights, ``math.inf`` all weight to the largest loss (shared among equals).

    Examples
    --------
    >>> tilted_weights(torch.tensor([0.0, math.log(3.0)]), tilt=1.0)
    tensor([0.2500, 0.7500])
    """
    _check_losses(losses, tilt)
    weights = _exp_tilt(losses - losses.max(), tilt)
    return weights / weights.sum()


def tilted_loss(losses: Float[Tensor, " k"], tilt: float) -> Float[Tensor, ""]:
    """(1/tilt) · log of the mean of exp(tilt · loss): between the mean (tilt 0) and the largest (tilt ``math.inf``).

    Parameters
    ----------
    losses : Float[Tensor, " k"]
        k >= 1 losses of any size. The result is differentiable in them, with gradient ``tilted_weights``.
    tilt : float
        >= 0. The result does not decrease as the tilt grows.

    Examples
    --------
    >>> losses = torch.tensor([1.0, 2.0, 6.0])
    >>> [round(float(tilted_loss(losses, tilt)), 2) for tilt in (0.0, 1.0, 20.0, math.inf)]
    [3.0, 4.93, 5.95, 6.0]
    """
    _check_losses(losses, tilt)
    top = losses.max()
    if tilt == 0:
        return losses.mean()
    if tilt == math.inf:
        return top
    gaps = losses - top
    growth = torch.expm1(tilt * gaps).mean()
    # A tilt too small to be told from 0 would leave only the roundings of subnormal numbers.
    return top + torch.where(growth.abs() < torch.finfo(gaps.dtype).eps, gaps.mean(), growth.log1p() / tilt)


class TiltedSAM(Optimizer):
    """Steps of any optimizer along the tilted average of the gradients around the weights.

    Each step looks at ``n_samples`` points near the weights θ. With the usual ``sampler="ascent"`` a point is a random
    ε₀ and a climb from there: ε = ε₀ + rho · g/‖g‖ with g = ∇L(θ + ε₀). The gradients at the points are averaged with
    ``tilted_weights``, and the base optimizer steps with that average *from θ*, which is first restored exactly.

    Parameters
    ----------
    params : iterable
        Parameters, named parameters or groups, as for every torch optimizer. Norms run over all groups together.
    base_optimizer : type of Optimizer
        The class that takes the step, made as ``base_optimizer(params, **base_kwargs)``; it shares its groups and state
        with this optimizer, so that schedulers and checkpoints see one. It must be able to step without a closure.
    tilt : float or callable
        t >= 0, ``math.inf`` allowed, or a function of the number of steps taken so far: a tilt that rises to 20 is
        ``lambda step: 20 * step / n_steps``, one that falls is ``lambda step: 20 * (1 - step / n_steps)``. Usual values
        1, 5, 20, 100.
    n_samples : int
        Points per step, >= 1; usually 3 to 5. Memory does not depend on it, cost is proportional to it.
    rho : float
        Length of the climb, >= 0, in the units of the weights; usually 0.02 to 0.5. For ``sampler="hmc"`` the radius of
        the ball that points stay in.
    radius : float
        Largest length of ε₀, >= 0; usually 0.1 to 1, and worth tuning for small networks. 0 starts every climb at θ
        itself, ``math.inf`` does not clip.
    noise : {"gaussian", "uniform"}
        ε₀ is N(0, noise_std² I), shortened to ``radius`` if longer; or uniform in the ball of that radius.
    noise_std : float
        Standard deviation of the Gaussian law, >= 0.
    sampler : {"ascent", "hmc", "none"}
        How a point leans towards high loss: by one climb, by ``hmc_steps`` Euler steps of Hamiltonian dynamics in the
        potential −delta · L, or not at all (plain Monte Carlo).
    delta : float
        Only for "hmc": the points follow exp(delta · L), 0 <= delta <= tilt, and tilt − delta is left to the weights.
    hmc_step, hmc_std, hmc_steps : float, float, int
        Step size, standard deviation of the momentum, and number of steps of the dynamics.
    adaptive : bool
        Climb in units of each weight's own size, as ASAM does: ε − ε₀ = rho · w² g/‖w g‖.
    model : nn.Module, optional
        Give it if it has batch normalisation: the running statistics are then updated as ``batch_norm`` says, instead
        of at every evaluation.
    batch_norm : {"first", "each"}
        Update running statistics once a step, or once for each sample, at the first evaluation.
    clip_norm : float, optional
        Clip the norm of the gradient to this after every evaluation, > 0.
    generator : torch.Generator, optional
        All noise comes from one draw of it a step; a CPU generator serves every device. If None, the optimizer seeds
        one of its own from torch's default generator at the first step that needs noise.
    **base_kwargs
        Arguments of ``base_optimizer``, which rejects unknown ones.

    Attributes
    ----------
    last_losses, last_weights : Float[Tensor, " n_samples"]
        Losses at the points of the last step, and their weights.
    base : Optimizer
        The base optimizer.

    Raises
    ------
    ParameterError
        If a setting is out of its range; the message names it.

    Notes
    -----
    *Cost.* The closure runs 2 · n_samples times a step for "ascent", n_samples times for "none" and
    (hmc_steps + 1) · n_samples times for "hmc". Memory during a step: a copy of the parameters and one of the
    gradients, for "hmc" also the momentum.

    *Gradients.* Parameters that need no gradient are neither perturbed nor changed. Those that the loss does not reach
    are perturbed, restored exactly, and get no step. ``.grad`` holds the tilted average after a step.

    *Distributed.* When a process group is initialised, all of its ranks draw the noise of rank 0, and the losses of a
    point are averaged over the ranks before they become weights; ``DistributedDataParallel`` averages the gradients.

    *float16.* Unscale in the closure: ``scaler.scale(loss).backward(); scaler.unscale_(optimizer); scaler.update()``.
    An overflow then raises ``ConvergenceError`` with the weights restored: skip that batch.

    References
    ----------
    Li, Zhou, Bilmes: Tilted Sharpness-Aware Minimization, ICML 2025, arXiv:2410.22656. Kwon et al.: ASAM, ICML 2021.

    Examples
    --------
    >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer = TiltedSAM([w], tilt=5.0, rho=0.1, radius=0.1, lr=0.1, generator=torch.Generator().manual_seed(0))
    >>> def closure():
    ...     optimizer.zero_grad()
    ...     loss = w.square().sum()
    ...     loss.backward()
    ...     return loss
    >>> for _ in range(100):
    ...     loss = optimizer.step(closure)
    >>> bool(w.norm() < 0.2)
    True
    """

    def __init__(
        self,
        params: Iterable[Any],
        base_optimizer: type[Optimizer] = SGD,
        *,
        tilt: float | Callable[[int], float] = 20.0,
        n_samples: int = 3,
        rho: float = 0.1,
        radius: float = 1.0,
        noise: Literal["gaussian", "uniform"] = "gaussian",
        noise_std: float = 1.0,
        sampler: Literal["ascent", "hmc", "none"] = "ascent",
        delta: float = 0.0,
        hmc_step: float = 0.01,
        hmc_std: float = 1.0,
        hmc_steps: int = 1,
        adaptive: bool = False,
        model: nn.Module | None = None,
        batch_norm: Literal["first", "each"] = "first",
        clip_norm: float | None = None,
        generator: torch.Generator | None = None,
        **base_kwargs: Any,
    ):
        _check_base(base_optimizer, type(self).__name__)
        require_number(n_samples, "n_samples", low=1, integer=True)
        require_number(hmc_steps, "hmc_steps", low=1, integer=True)
        for name, value in {"rho": rho, "noise_std": noise_std, "delta": delta, "hmc_step": hmc_step}.items():
            _require_finite(value, name)
        _require_finite(hmc_std, "hmc_std", open_low=True)
        require_number(radius, "radius", low=0)
        if clip_norm is not None:
            _require_finite(clip_norm, "clip_norm", open_low=True)
        require_choice(noise, "noise", ("gaussian", "uniform"))
        require_choice(sampler, "sampler", ("ascent", "hmc", "none"))
        require_choice(batch_norm, "batch_norm", ("first", "each"))
        if noise == "uniform" and radius == math.inf:
            raise ParameterError(
                'noise="uniform" needs a finite radius; got inf. Only noise="gaussian" can do without.'
            )
        if delta > 0 and sampler != "hmc":
            raise ParameterError(f'delta leans the sampler "hmc" alone; got delta={delta!r} with sampler={sampler!r}.')
        self.tilt, self.delta = tilt, delta
        self.n_samples, self.rho, self.radius, self.noise, self.noise_std = n_samples, rho, radius, noise, noise_std
        self.sampler, self.hmc_step, self.hmc_std, self.hmc_steps = sampler, hmc_step, hmc_std, hmc_steps
        self.adaptive, self.model, self.batch_norm, self.clip_norm = adaptive, model, batch_norm, clip_norm
        self.generator = generator
        self.last_losses: Tensor | None = None
        self.last_weights: Tensor | None = None
        self._steps, self._ranks_share_noise = 0, False
        self._exponent()

        self.base = base_optimizer(params, **base_kwargs)
        super().__init__(self.base.param_groups, self.base.defaults)
        self.base.param_groups = self.param_groups
        self.state = self.base.state  # In this direction: Adagrad and others begin with a state.

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor:  # type: ignore[override]
        """Evaluate ``closure`` around the weights, then step once from them.

        Parameters
        ----------
        closure : callable
            Clears the gradients, computes the loss of *one* mini-batch, calls ``backward`` and returns the loss. It is
            called several times (see Notes of the class) and must see the same mini-batch each time.

        Returns
        -------
        Float[Tensor, ""]
            The tilted loss of the sampled points.

        Raises
        ------
        ClosureError
            If there is no closure, or it returns no scalar tensor, or leaves every gradient at None.
        ConvergenceError
            If a loss or gradient is NaN or infinite.

        Whatever is raised, also by the closure itself, the weights are first restored exactly.
        """
        name = type(self).__name__
        if closure is None:
            raise ClosureError(f"{name}.step() needs a closure, since it evaluates the loss more than once.{_EXAMPLE}")
        if any(group.get("maximize") for group in self.param_groups):
            raise ParameterError(f"{name} minimises; got maximize=True. Return the negated objective from the closure.")
        exponent = self._exponent()
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad and p.numel()]
        if not params:
            raise InputError(f"{name}.step(): every parameter has requires_grad=False. Unfreeze some.")
        gradient = _TiltedMean(exponent)
        losses = []
        with returning(params) as home:
            generators = self._noise_generators(params)
            for sample in range(self.n_samples):
                update = sample == 0 or self.batch_norm == "each"
                loss = self._visit(closure, params, home, generators, update_statistics=update)
                gradient.add(loss, dict(zip(*_reached(params), strict=True)))
                losses.append(loss)

        self.zero_grad()
        mean = gradient.result()
        self.last_losses = torch.stack(losses)
        finite = self.last_losses.isfinite().all() & get_total_norm(list(mean.values()), norm_type=math.inf).isfinite()
        if not finite:  # The one time a step waits for the device.
            raise ConvergenceError(
                f"{name}.step(): a loss or gradient is NaN or infinite; the losses are {self.last_losses.tolist()}. "
                "The weights are as before the step. Check the batch, or lower lr, rho or radius; with a GradScaler, "
                "unscale the gradients inside the closure and skip the batch."
            )
        for p, grad in mean.items():
            p.grad = grad
        self.base.step()
        self._steps += 1
        self.last_weights = tilted_weights(self.last_losses, exponent)
        return tilted_loss(self.last_losses, exponent)

    def state_dict(self) -> dict[str, Any]:
        """State and groups of the base optimizer, the number of steps taken and the state of the noise generator."""
        noise = None if self.generator is None else self.generator.get_state()
        return {**super().state_dict(), "neighbourhood": {"steps": self._steps, "generator": noise}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from ``state_dict``, bit for bit. A checkpoint of the base optimizer alone will do for a start."""
        super().load_state_dict(state_dict)
        own = state_dict.get("neighbourhood", {"steps": 0, "generator": None})
        self._steps, self._ranks_share_noise = own["steps"], False
        if own["generator"] is not None:
            self.generator = self.generator or torch.Generator()
            self.generator.set_state(own["generator"].cpu())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.base.__setstate__({"state": self.state, "param_groups": self.param_groups})

    def __getstate__(self) -> dict[str, Any]:
        # Without ``step``: a scheduler's wrapper around it belongs to this instance, not to its copies.
        return {name: value for name, value in self.__dict__.items() if name != "step"}

    def _exponent(self) -> float:
        """What the losses are multiplied by at this step: the tilt less what the sampler already leans."""
        tilt = self.tilt(self._steps) if callable(self.tilt) else self.tilt
        require_number(tilt, "tilt", low=0)
        if self.delta > tilt:
            raise ParameterError(f"delta must be at most the tilt; got delta={self.delta!r} and tilt={tilt!r}.")
        return tilt - self.delta

    def _visit(
        self,
        closure: Callable[[], Tensor],
        params: list[Tensor],
        home: list[Tensor],
        generators: Generators,
        *,
        update_statistics: bool,
    ) -> Tensor:
        """Put the parameters at a sampled point; the loss there, and its gradient in ``.grad``."""
        self._scatter(params, home, generators)
        for move in self._moves(params, home, generators):
            self._evaluate(closure, params, update_statistics=update_statistics)
            move()
            update_statistics = False
        return self._evaluate(closure, params, update_statistics=update_statistics)

    def _scatter(self, params: list[Tensor], home: list[Tensor], generators: Generators) -> None:
        """Put the parameters at θ + ε₀."""
        radius = min(self.radius, self.rho) if self.sampler == "hmc" else self.radius
        if not self._has_noise:
            torch._foreach_copy_(params, home)
        elif self.noise == "gaussian":
            perturb_(params, home, generators, lambda norm: (self.noise_std * norm).clamp(max=radius))
        else:
            size, device = sum(p.numel() for p in params), params[0].device
            share = torch.rand((), generator=generators[device], device=device) ** (1 / size)
            perturb_(params, home, generators, lambda norm: radius * share)

    def _moves(self, params: list[Tensor], home: list[Tensor], generators: Generators) -> list[Callable[[], None]]:
        """What leads from θ + ε₀ to a sampled point; each move uses the gradient where it starts."""
        if self.sampler == "ascent":
            return [lambda: ascend_(*_reached(params), self.rho, adaptive=self.adaptive)]
        if self.sampler == "hmc":
            momentum = [torch.empty_like(p).normal_(0, self.hmc_std, generator=generators[p.device]) for p in params]
            settings = {"step": self.hmc_step, "delta": self.delta, "std": self.hmc_std, "radius": self.rho}
            return [lambda: hamiltonian_step_(params, home, momentum, **settings)] * self.hmc_steps
        return []

    def _evaluate(self, closure: Callable[[], Tensor], params: list[Tensor], *, update_statistics: bool) -> Tensor:
        """The loss where the parameters are, its gradient in ``.grad``."""
        for p in params:  # So that a closure that forgets to, or never calls backward, cannot pass unseen.
            p.grad = None
        torch.clear_autocast_cache()  # Of an autocast around the step: its half-precision copies are of another point.
        with _frozen_statistics(None if update_statistics else self.model), torch.enable_grad():
            loss = closure()
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            came = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise ClosureError(
                f"The closure must return the loss, a tensor of one number; it returned {came}.{_EXAMPLE}"
            )
        if all(p.grad is None for p in params):
            raise ClosureError(f"The closure left every .grad at None; it must call loss.backward().{_EXAMPLE}")
        if any(p.grad is not None and p.grad.layout is not torch.strided for p in params):
            raise ClosureError(
                "The closure left a sparse gradient; every gradient must be dense. Make embeddings with sparse=False."
            )
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(params, self.clip_norm)
        loss = loss.detach().reshape(()).clone()  # A closure may return the same memory every time.
        return _mean_over_ranks(loss.float() if loss.dtype.itemsize < 4 else loss)

    @property
    def _has_noise(self) -> bool:
        return self.radius > 0 and (self.noise == "uniform" or self.noise_std > 0)

    def _noise_generators(self, params: list[Tensor]) -> Generators:
        """One generator per device for this step, the same on every rank."""
        if not self._has_noise and self.sampler != "hmc":
            return {}
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        if not self._ranks_share_noise and _n_ranks() > 1:
            state = self.generator.get_state().to(params[0].device)
            dist.broadcast(state, src=0)
            self.generator.set_state(state.cpu())
            self._ranks_share_noise = True
        return device_generators(self.generator, params)


class SAM(TiltedSAM):
    """Sharpness-aware minimisation: the gradient at the top of one climb from the weights.

    ε = rho · g/‖g‖ with g = ∇L(θ), and the base optimizer steps from θ with ∇L(θ + ε). It is ``TiltedSAM`` with
    one sample that starts at θ itself, and keeps all of its promises; ``step`` returns L(θ + ε).

    Parameters
    ----------
    params, base_optimizer, model, clip_norm, **base_kwargs
        As in ``TiltedSAM``.
    rho : float
        Length of the climb, >= 0, in the units of the weights; usually 0.02 to 0.2. 0 is the base optimizer at twice
        its cost.
    adaptive : bool
        Climb in units of each weight's own size (ASAM); ``rho`` is then usually 0.5 to 2.

    References
    ----------
    Foret, Kleiner, Mobahi, Neyshabur: Sharpness-Aware Minimization for Efficiently Improving Generalization, ICLR 2021.
    Kwon, Kim, Park, Choi: ASAM: Adaptive Sharpness-Aware Minimization, ICML 2021.

    Examples
    --------
    >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> optimizer = SAM([w], rho=0.5, lr=0.1)
    >>> def closure():
    ...     optimizer.zero_grad()
    ...     loss = w.square().sum()
    ...     loss.backward()
    ...     return loss
    >>> float(optimizer.step(closure))  # ‖w + 0.5 w/‖w‖‖² = 5.5²
    30.25
    """

    def __init__(
        self,
        params: Iterable[Any],
        base_optimizer: type[Optimizer] = SGD,
        *,
        rho: float = 0.05,
        adaptive: bool = False,
        model: nn.Module | None = None,
        clip_norm: float | None = None,
        **base_kwargs: Any,
    ):
        super().__init__(
            params,
            base_optimizer,
            tilt=0.0,
            n_samples=1,
            rho=rho,
            radius=0.0,
            adaptive=adaptive,
            model=model,
            clip_norm=clip_norm,
            **base_kwargs,
        )


def closure_step(model: nn.Module, batch: Any, loss_fn: Callable[..., Tensor]) -> Callable[[], Tensor]:
    """A closure for one mini-batch: ``optimizer.step(closure_step(model, batch, loss_fn))``.

    Parameters
    ----------
    model : nn.Module
        Its gradients are cleared at every call.
    batch : tuple or mapping
        A pair ``(inputs, targets)``, or the keyword arguments of ``model``, as Hugging Face collators give.
    loss_fn : callable
        ``loss_fn(model(inputs), targets)`` for a pair, ``loss_fn(model(**batch), batch)`` for a mapping; for a Hugging
        Face model ``lambda output, batch: output.loss``.

    Returns
    -------
    callable
        Clears the gradients, computes the loss, calls ``backward``, returns the loss.
    """

    def closure() -> Tensor:
        model.zero_grad()
        loss = batch_loss(model, loss_fn, batch)
        loss.backward()
        return loss.detach()

    return closure


def ascend_(params: list[Tensor], grads: list[Tensor], rho: float, *, adaptive: bool = False) -> None:
    """Move ``params`` by rho · g/(‖g‖ + 1e-12), or rho · w²g/‖wg‖ if ``adaptive``; the gradients g are used up.

    One norm over all tensors. Takes no memory of its own.
    """
    if adaptive:
        torch._foreach_mul_(grads, params)
    scale_(grads, rho / (get_total_norm(grads) + 1e-12))
    if adaptive:
        torch._foreach_mul_(grads, params)
    torch._foreach_add_(params, grads)


def hamiltonian_step_(
    params: list[Tensor],
    home: list[Tensor],
    momentum: list[Tensor],
    *,
    step: float,
    delta: float,
    std: float,
    radius: float,
) -> None:
    """One Euler step in the potential −delta · L: p ← p + step · delta · g, ε ← ε + step · p/std², back into the ball.

    ``params`` are home + ε and hold g in their ``.grad``; a missing one is zero.
    """
    for param, speed in zip(params, momentum, strict=True):
        if param.grad is not None:
            speed.add_(param.grad, alpha=step * delta)
    torch._foreach_add_(params, momentum, alpha=step / std**2)
    torch._foreach_sub_(params, home)
    scale_(params, (radius / (get_total_norm(params) + 1e-12)).clamp(max=1))
    torch._foreach_add_(params, home)


class _TiltedMean:
    """Σ w_j g_j with w = tilted_weights(ℓ, tilt), one sample at a time: one copy of the gradients, however many come.

    Weights are relative to the largest loss so far, so that nothing overflows; a new largest fades what was summed.
    """

    top: Tensor
    total: Tensor

    def __init__(self, tilt: float):
        self.tilt = tilt
        self.sums: dict[Any, Tensor] = {}

    def add(self, loss: Tensor, grads: dict[Any, Tensor]) -> None:
        """Take in a sample; its ``grads`` are scaled in place, and one that is missing is zero."""
        if not self.sums:
            self.top, self.total = loss, torch.zeros_like(loss)
        top = torch.maximum(self.top, loss)
        fade, weight = _exp_tilt(self.top - top, self.tilt), _exp_tilt(loss - top, self.tilt)
        self.top, self.total = top, self.total * fade + weight
        scale_(list(self.sums.values()), fade)
        scale_(list(grads.values()), weight)
        known = [key for key in grads if key in self.sums]
        new = [key for key in grads if key not in self.sums]
        if known:
            torch._foreach_add_([self.sums[key] for key in known], [grads[key] for key in known])
        self.sums |= {key: grads[key].clone() for key in new}

    def result(self) -> dict[Any, Tensor]:
        """The mean, which ends the sum."""
        scale_(list(self.sums.values()), self.total.reciprocal())
        return self.sums


def _reached(params: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters that have a gradient, and the gradients."""
    pairs = [(p, p.grad) for p in params if p.grad is not None]
    return [p for p, _ in pairs], [grad for _, grad in pairs]


def _exp_tilt(gaps: Tensor, tilt: float) -> Tensor:
    """exp(tilt · gap) for gaps <= 0, also for an infinite tilt and, at tilt 0, infinite gaps."""
    if tilt == 0:
        return torch.ones_like(gaps)
    return (gaps == 0).to(gaps.dtype) if tilt == math.inf else torch.exp(tilt * gaps)


@contextlib.contextmanager
def _frozen_statistics(model: nn.Module | None) -> Iterator[None]:
    """Let ``model`` normalise by the batch, but leave running statistics and their counters as they are."""
    modules = [] if model is None else [m for m in model.modules() if m.training]
    tracking: list[Any] = [m for m in modules if getattr(m, "track_running_stats", False)]
    for module in tracking:
        module.track_running_stats = False
    try:
        yield
    finally:
        for module in tracking:
            module.track_running_stats = True


def _n_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _mean_over_ranks(loss: Tensor) -> Tensor:
    if _n_ranks() > 1:
        dist.all_reduce(loss)
        loss /= _n_ranks()
    return loss


def _check_losses(losses: Tensor, tilt: float) -> None:
    require_number(tilt, "tilt", low=0)
    if not losses.numel():
        raise InputError("losses is empty; give at least one loss.")


def _check_base(base_optimizer: Any, name: str) -> None:
    if not isinstance(base_optimizer, type) or not issubclass(base_optimizer, Optimizer):
        raise ParameterError(
            f"base_optimizer must be a class of optimizers, not {base_optimizer!r}. "
            f"Write {name}(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)."
        )
    if issubclass(base_optimizer, (torch.optim.LBFGS, TiltedSAM)):
        raise ParameterError(
            f"base_optimizer must step without a closure; {base_optimizer.__name__} needs one. Try SGD."
        )


def _require_finite(value: Any, name: str, *, open_low: bool = False) -> None:
    require_number(value, name, low=0, open_low=open_low)
    if value == math.inf:
        raise ParameterError(f"{name} must be finite; got inf.")


_EXAMPLE = """ Write

    def closure():
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        return loss

    optimizer.step(closure)"""
