"""The best low-rank family of matrices that is linear in the preference, in closed form."""

import warnings
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from heedful._validation import require_number
from heedful.errors import HeedfulWarning, InputError

_EXACT_START = 256  # rows up to which the truncated HOSVD is exact; beyond, subspace iteration finds it


class Tucker(NamedTuple):
    """``A @ G[k] @ B.T`` approximates matrix k of K.

    Attributes
    ----------
    A, B : Float[Tensor, "c r"], Float[Tensor, "d r"]
        Orthonormal columns, shared by all matrices.
    G : Float[Tensor, "K r r"]
        One small core for each matrix.
    relative_error : float
        Root of the error that was minimised, relative to that of A G B^T = 0: 0 is exact, 1 is useless.
    """

    A: Tensor
    B: Tensor
    G: Tensor
    relative_error: float


@torch.no_grad()
def fit_tucker(
    deltas: Float[Tensor, "K c d"],
    rank: int,
    *,
    second_moment: Float[Tensor, "K K"] | None = None,
    max_iter: int = 20,
    tol: float = 1e-7,
) -> Tucker:
    """Common bases A, B and cores G_k that come closest to ``deltas`` on average over preferences.

    Minimises E_γ ‖Σ_k γ_k (A G_k Bᵀ − Δ_k)‖² = Σ_kl S_kl ⟨A G_k Bᵀ − Δ_k, A G_l Bᵀ − Δ_l⟩ with S = E γγᵀ, the Tucker-2
    approximation of Δ mixed by a root of S. Starts from the truncated higher-order SVD and alternates between A and B
    (HOOI); no sweep raises the error.

    Parameters
    ----------
    deltas : Float[Tensor, "K c d"]
        The matrices to approximate, say differences of fine-tuned weights from a merged one. They stay as they are.
    rank : int
        r >= 1; usually 4 to 64. More than min(c, d) is taken as min(c, d), with a warning.
    second_moment : Float[Tensor, "K K"], optional
        S, symmetric and positive semidefinite. Default: of a preference uniform on the simplex, (I + 11ᵀ)/(K(K + 1)).
    max_iter : int
        Sweeps at most, >= 1.
    tol : float
        Stop once a sweep adds less than this share to the squared norm that is captured, >= 0.

    Returns
    -------
    Tucker
        In float32, or float64 if ``deltas`` are. The same arguments give the same result: no generator is drawn from.

    Raises
    ------
    InputError
        If an entry is NaN or infinite, or a shape is another.

    Notes
    -----
    O(K c d r) per sweep. Memory beyond ``deltas``: two matrices of c × d, and what is r wide.

    References
    ----------
    De Lathauwer, De Moor, Vandewalle: On the best rank-1 and rank-(R1, …, RN) approximation of higher-order tensors, SIAM
    Journal on Matrix Analysis and Applications 2000. Start for large matrices: Halko, Martinsson, Tropp, SIAM Review 2011.

    Examples
    --------
    >>> left, cores, right = torch.ones(5, 1), torch.tensor([1.0, -2.0]), torch.arange(4.0)
    >>> fit = fit_tucker(cores[:, None, None] * (left * right), rank=1)  # two matrices of rank 1 with common bases
    >>> [tuple(part.shape) for part in (fit.A, fit.B, fit.G)], fit.relative_error < 1e-5
    ([(5, 1), (4, 1), (2, 1, 1)], True)
    """
    require_number(rank, "rank", low=1, integer=True)
    require_number(max_iter, "max_iter", low=1, integer=True)
    require_number(tol, "tol", low=0)
    if deltas.dim() != 3 or not deltas.numel():
        raise InputError(
            f"deltas has shape {tuple(deltas.shape)}. Give one of shape (K, c, d): at least one matrix with at least one entry."
        )
    n_models, *sides = deltas.shape
    if not bool(deltas.isfinite().all()):
        raise InputError("deltas has entries that are NaN or infinite. Check the models that they come from.")
    if rank > min(sides):
        warnings.warn(
            f"rank {rank} is more than matrices of {sides[0]} × {sides[1]} have; took {min(sides)}.",
            HeedfulWarning,
            stacklevel=2,
        )
        rank = min(sides)
    deltas = deltas if deltas.dtype == torch.float64 else deltas.float()
    moment = dirichlet_second_moment(n_models) if second_moment is None else second_moment
    if moment.shape != (n_models, n_models) or not torch.allclose(moment, moment.T):
        raise InputError(
            f"second_moment must be symmetric and of shape ({n_models}, {n_models}), one row for each matrix; got shape "
            f"{tuple(moment.shape)}."
        )
    root = _square_root(moment.to(deltas))

    A, captured = _hosvd_basis(deltas, moment.to(deltas), root, rank), 0.0
    for _ in range(max_iter):
        B, _ = _leading_basis(deltas.mT @ A, root, rank)
        projected = deltas @ B
        A, energy = _leading_basis(projected, root, rank)
        if energy - captured <= tol * energy:
            break
        captured = energy
    G = A.mT @ projected
    return Tucker(A.contiguous(), B.contiguous(), G, _relative_error(deltas, A @ G, B, root))


def dirichlet_second_moment(n_models: int, concentration: float = 1.0) -> Float[Tensor, "K K"]:
    """E γγᵀ for γ ~ Dirichlet(concentration · 1) over ``n_models`` entries, in float64."""
    moment = torch.eye(n_models, dtype=torch.float64) + concentration
    return moment / (n_models * (n_models * concentration + 1))


def _square_root(moment: Float[Tensor, "K K"]) -> Float[Tensor, "K K"]:
    """Some L with L Lᵀ = ``moment``, which may be singular."""
    values, vectors = torch.linalg.eigh(moment.double())
    return (vectors * values.clamp(min=0).sqrt()).to(moment.dtype)


def _hosvd_basis(
    deltas: Float[Tensor, "K c d"], moment: Float[Tensor, "K K"], root: Float[Tensor, "K K"], rank: int
) -> Float[Tensor, "c r"]:
    """The ``rank`` leading left singular vectors of the mixed matrices side by side."""
    n_models, rows, columns = deltas.shape
    if min(rows, n_models * columns) <= _EXACT_START:
        return _leading_basis(deltas, root, rank)[0]
    # Of a fixed seed: a start must not make the result depend on chance.
    generator = torch.Generator(deltas.device).manual_seed(0)
    sketch = torch.randn(rows, min(rows, rank + 10), generator=generator, dtype=deltas.dtype, device=deltas.device)
    for _ in range(3):
        sketch, _ = torch.linalg.qr(sketch)
        sketch = (deltas @ torch.tensordot(moment, deltas.mT @ sketch, 1)).sum(0)
    sketch, _ = torch.linalg.qr(sketch)
    return sketch @ _leading_basis(sketch.mT @ deltas, root, rank)[0]


def _leading_basis(
    products: Float[Tensor, "K n q"], root: Float[Tensor, "K K"], rank: int
) -> tuple[Float[Tensor, "n r"], float]:
    """The ``rank`` leading left singular vectors of ``products``, mixed and side by side, and Σ σ² over them."""
    mixed = torch.einsum("knq,kj->njq", products, root).flatten(1)
    basis, values, _ = torch.linalg.svd(mixed, full_matrices=False)
    return basis[:, :rank], float(values[:rank].square().sum())


def _relative_error(
    deltas: Float[Tensor, "K c d"], left: Float[Tensor, "K c r"], B: Float[Tensor, "d r"], root: Float[Tensor, "K K"]
) -> float:
    """Of ``left[k] @ B.T``, from the differences themselves: subtracting norms would lose small errors."""
    error, total = 0.0, 0.0
    for mixing in root.T:
        mixed = torch.tensordot(mixing, deltas, 1)
        total += float(mixed.square().sum())
        error += float(torch.addmm(mixed, torch.tensordot(mixing, left, 1), B.T, alpha=-1).square().sum())
    return (error / total) ** 0.5 if total else 0.0
