"""How flat the loss is around the weights: Hessian eigenvalues and the loss of random neighbours.

Everything public here measures: the model comes back bit for bit and in the mode it was in.
"""

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import get_total_norm

from heedful._random import torch_generator
from heedful._results import Report
from heedful._validation import require_number
from heedful.errors import ConvergenceError, HeedfulWarning, InputError, ParameterError

Generators = Mapping[torch.device, torch.Generator]


def hessian_eigenvalues(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    batches: Iterable[Any],
    *,
    k: int = 5,
    max_iter: int = 100,
    tol: float = 1e-3,
    generator: torch.Generator | None = None,
) -> Float[Tensor, " k"]:
    """The ``k`` largest eigenvalues of the Hessian of the mean loss, largest first.

    Lanczos iteration on Hessian-vector products, each new direction made orthogonal to all earlier ones. The model is
    measured in evaluation mode, over the parameters that require a gradient.

    Parameters
    ----------
    model : nn.Module
        Its parameters on one device and of one dtype. float64 resolves small eigenvalues that float32 cannot.
    loss_fn : callable
        As ``batch_loss`` calls it: a mean over the batch, twice differentiable.
    batches : iterable of tuple or mapping
        As ``batch_loss`` takes them. Read once and kept; the mean weighs each by its length.
    k : int
        How many, from 1 to the number of parameters.
    max_iter : int
        At most this many Hessian-vector products, >= ``k``; usually 20 to 100.
    tol : float
        Stop when the error bound of each is at most ``tol`` times the largest of their magnitudes.
    generator : torch.Generator, optional
        Draws the first direction; torch's default one if None.

    Returns
    -------
    Float[Tensor, " k"]
        In the dtype of the parameters. Of a repeated eigenvalue, one copy may be all that is found.

    Warns
    -----
    HeedfulWarning
        If ``max_iter`` products do not reach ``tol``; the estimates so far are returned.

    Notes
    -----
    A product costs about twice a gradient of every batch; the directions take ``max_iter`` copies of the parameters.

    References
    ----------
    Golub, Van Loan: Matrix Computations, 4th edition, 2013, chapter 10.
    """
    params = _weights(model)
    size = sum(p.numel() for p in params)
    require_number(k, "k", low=1, high=size, integer=True)
    require_number(max_iter, "max_iter", low=k, integer=True)
    require_number(tol, "tol", low=0)
    batches = _as_list(batches)
    noise = device_generators(generator, params)

    def draw() -> Tensor:
        return torch.cat([torch.empty_like(p).normal_(generator=noise[p.device]).flatten() for p in params])

    def product(direction: Tensor) -> Tensor:
        parts = [part.view_as(p) for part, p in zip(direction.split([p.numel() for p in params]), params, strict=True)]
        # The fused kernels of attention have no second derivative.
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            images = [_hessian_product(batch_loss(model, loss_fn, batch), params, parts) for batch in batches]
        return _mean_by_length(images, batches)

    with torch.no_grad(), _evaluating(model):
        values, error = _lanczos(product, draw, k=k, max_iter=min(max_iter, size), tol=tol)
    if error > tol:
        warnings.warn(
            f"hessian_eigenvalues: after {max_iter} products the relative error bound is {error:.1e}, not tol={tol:g}. "
            "Raise max_iter or tol.",
            HeedfulWarning,
            stacklevel=2,
        )
    return values.to(params[0])


@dataclasses.dataclass(frozen=True)
class NeighbourhoodLoss(Report):
    """The loss at random neighbours of the weights.

    ``losses`` has one entry per neighbour; ``mean``, ``variance`` (unbiased) and ``max`` sum it up.
    """

    mean: float
    variance: float
    max: float
    losses: Float[Tensor, " n"]


def neighbourhood_loss(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    batches: Iterable[Any],
    *,
    std: float | None = None,
    radius: float | None = None,
    n_samples: int = 100,
    generator: torch.Generator | None = None,
) -> NeighbourhoodLoss:
    """The mean loss at ``n_samples`` random points around the weights, in evaluation mode.

    Parameters
    ----------
    model : nn.Module
        All parameters that require a gradient are perturbed together.
    loss_fn : callable
        As ``batch_loss`` calls it: a mean over the batch.
    batches : iterable of tuple or mapping
        As ``batch_loss`` takes them. Read once and kept; the mean weighs each by its length.
    std : float, optional
        Perturb every weight by N(0, std²); usually 0.005 to 0.05.
    radius : float, optional
        Or perturb to a uniform point of the sphere of this radius. Give exactly one of the two, > 0.
    n_samples : int
        How many neighbours, >= 2. Each costs a forward pass over all batches.
    generator : torch.Generator, optional
        Draws the perturbations; torch's default one if None.

    Returns
    -------
    NeighbourhoodLoss
    """
    given = {name: value for name, value in {"std": std, "radius": radius}.items() if value is not None}
    if len(given) != 1:
        raise ParameterError(f"neighbourhood_loss needs either std or radius; got std={std!r}, radius={radius!r}.")
    ((law, size),) = given.items()
    require_number(size, law, low=0, open_low=True)
    require_number(n_samples, "n_samples", low=2, integer=True)
    batches = _as_list(batches)
    params = _weights(model)
    noise = device_generators(generator, params)

    def length(norm: Tensor) -> Tensor:
        return norm * size if law == "std" else torch.full_like(norm, size)

    losses = []
    with torch.no_grad(), _evaluating(model), returning(params) as home:
        for _ in range(n_samples):
            perturb_(params, home, noise, length)
            losses.append(_mean_loss(model, loss_fn, batches))
    found = torch.stack(losses)
    return NeighbourhoodLoss(float(found.mean()), float(found.var()), float(found.max()), found)


def flatness(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    batches: Iterable[Any],
    radii: Sequence[float],
    *,
    n_samples: int = 100,
    generator: torch.Generator | None = None,
) -> Float[Tensor, " radii"]:
    """How much the mean loss rises on spheres around the weights: mean loss on the sphere − loss at its centre.

    Parameters
    ----------
    model, loss_fn, batches, n_samples, generator
        As in ``neighbourhood_loss``.
    radii : sequence of float
        Radii of the spheres, > 0, in the units of the weights.

    Returns
    -------
    Float[Tensor, " radii"]
        In the dtype of the loss; the smaller, the flatter.

    References
    ----------
    Cha et al.: SWAD: Domain Generalization by Seeking Flat Minima, NeurIPS 2021 (the quantity F_γ of section 4).
    """
    batches = _as_list(batches)
    with torch.no_grad(), _evaluating(model):
        centre = _mean_loss(model, loss_fn, batches)
    settings: dict[str, Any] = {"n_samples": n_samples, "generator": generator}
    around = [neighbourhood_loss(model, loss_fn, batches, radius=radius, **settings).losses.mean() for radius in radii]
    return torch.stack(around) - centre if around else centre.new_empty(0)


def batch_loss(model: nn.Module, loss_fn: Callable[..., Tensor], batch: Any) -> Float[Tensor, ""]:
    """The loss of one batch in either of the two forms that loaders give.

    ``loss_fn(model(inputs), targets)`` for a pair ``(inputs, targets)``; ``loss_fn(model(**batch), batch)`` for a
    mapping, as Hugging Face collators give, where ``loss_fn`` may be ``lambda output, batch: output.loss``.
    """
    if isinstance(batch, Mapping):
        return loss_fn(model(**batch), batch)
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        inputs, targets = batch
        return loss_fn(model(inputs), targets)
    raise InputError(f"A batch must be a pair (inputs, targets) or a mapping of model arguments; got {type(batch)}.")


def device_generators(generator: torch.Generator | None, tensors: Iterable[Tensor]) -> Generators:
    """A generator for each device that ``tensors`` live on, all seeded by one draw from ``generator``.

    So the noise moves ``generator`` by one draw however much of it there is, and a CPU generator serves every device.
    """
    where = generator.device if generator is not None else "cpu"
    seed = int(torch.randint(2**62, (), generator=generator, device=where))
    return {tensor.device: torch_generator(seed, device=tensor.device) for tensor in tensors}


def perturb_(params: list[Tensor], home: list[Tensor], noise: Generators, length: Callable[[Tensor], Tensor]) -> None:
    """Set ``params`` to home + z · length(‖z‖)/‖z‖ with z ~ N(0, I) over all of them together.

    z is drawn into the parameters themselves, so that it takes no memory of its own.
    """
    for p in params:
        p.normal_(generator=noise[p.device])
    norm = get_total_norm(params)
    scale_(params, length(norm) / norm)
    torch._foreach_add_(params, home)


def scale_(tensors: list[Tensor], factor: Float[Tensor, ""]) -> None:
    """Multiply all in place by a number that stays on its device: nothing waits for it."""
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        torch._foreach_mul_([tensor for tensor in tensors if tensor.device == device], factor.to(device))


@contextlib.contextmanager
def returning(params: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield copies of ``params`` and put them back at the end, exactly, whatever happened."""
    home = [p.detach().clone() for p in params]
    try:
        yield home
    finally:
        with torch.no_grad():
            torch._foreach_copy_(params, home)


def _lanczos(
    product: Callable[[Tensor], Tensor], draw: Callable[[], Tensor], *, k: int, max_iter: int, tol: float
) -> tuple[Float[Tensor, " k"], float]:
    """The top ``k`` Ritz values of a symmetric operator, largest first, and their worst relative error bound."""
    direction = draw()
    basis = direction.new_empty(max_iter, len(direction))
    tridiagonal = torch.zeros(max_iter + 1, max_iter + 1, dtype=torch.float64)
    values, error = tridiagonal[0], math.inf
    for m in range(max_iter):
        direction = _orthogonal(direction, basis[:m])
        basis[m] = direction / direction.norm()
        image = product(basis[m])
        tridiagonal[m, m] = float(basis[m] @ image)
        direction = _orthogonal(image, basis[: m + 1])
        beta = float(direction.norm())
        if not math.isfinite(beta):
            raise ConvergenceError(
                "A Hessian-vector product is NaN or infinite. Check the weights, the batches and loss_fn."
            )
        values, vectors = torch.linalg.eigh(tridiagonal[: m + 1, : m + 1])
        scale = float(values.abs().max())
        if beta <= torch.finfo(image.dtype).eps * scale:  # The span is invariant, its eigenvalues exact: start afresh.
            beta, direction = 0.0, draw()
        tridiagonal[m, m + 1] = tridiagonal[m + 1, m] = beta
        if m + 1 >= k:
            error = beta * float(vectors[-1, -k:].abs().max()) / max(float(values[-k:].abs().max()), 1e-300)
            if error <= tol:
                break
    return values.flip(0)[:k], error


def _orthogonal(vector: Tensor, basis: Float[Tensor, "m size"]) -> Tensor:
    """``vector`` without its part in the span of orthonormal rows; twice is enough to be so to rounding."""
    for _ in range(2):
        vector = vector - (basis @ vector) @ basis
    return vector


def _hessian_product(loss: Tensor, params: Sequence[Tensor], direction: Sequence[Tensor]) -> Tensor:
    """H v as one vector: the gradient of ∇L · v."""
    grads = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True, materialize_grads=True)
    slope = sum(((g * v).sum() for g, v in zip(grads, direction, strict=True)), loss.new_zeros(()))
    if not slope.requires_grad:  # A loss that is linear in the weights.
        return torch.cat([torch.zeros_like(p).flatten() for p in params])
    image = torch.autograd.grad(slope, params, allow_unused=True, materialize_grads=True)
    return torch.cat([part.flatten() for part in image])


def _weights(model: nn.Module) -> list[Tensor]:
    params: list[Tensor] = [p for p in model.parameters() if p.requires_grad and p.numel()]
    if not params:
        raise InputError("No parameter of the model requires a gradient, so nothing can be measured. Unfreeze some.")
    return params


def _mean_loss(model: nn.Module, loss_fn: Callable[..., Tensor], batches: Sequence[Any]) -> Tensor:
    return _mean_by_length([batch_loss(model, loss_fn, batch) for batch in batches], batches)


def _mean_by_length(values: Sequence[Tensor], batches: Sequence[Any]) -> Tensor:
    """The mean of one value per batch, weighted by the number of samples in the batch."""
    lengths = [len(next(iter(batch.values())) if isinstance(batch, Mapping) else batch[1]) for batch in batches]
    return torch.stack([v * (n / sum(lengths)) for v, n in zip(values, lengths, strict=True)]).sum(0)


def _as_list(batches: Iterable[Any]) -> list[Any]:
    if isinstance(batches, (Tensor, Mapping)):
        raise InputError(f"batches must be an iterable of batches, e.g. [(inputs, targets)]; got one {type(batches)}.")
    if not (found := list(batches)):
        raise InputError("batches is empty; give at least one batch, e.g. [(inputs, targets)].")
    return found


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block, and every module's own mode afterwards."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode
