"""Curvature in Kronecker factors: the triangular factors of inverses that solvers work with."""

import torch
from jaxtyping import Float
from torch import Tensor

from heedful._validation import require_number
from heedful.errors import ConvergenceError


def inverse_cholesky(h: Float[Tensor, "*batch n n"], *, damping: float = 0.01, retries: int = 10):
    """The upper triangular U with positive diagonal and (H + damping · mean(diag H) · I)⁻¹ = UᵀU, for each matrix.

    Parameters
    ----------
    h : Float[Tensor, "*batch n n"]
        Symmetric, positive semidefinite up to rounding, finite. Only its lower triangle, mirrored, is trusted.
    damping : float
        What is added to the diagonal, relative to its mean, >= 0; usually 0.01.
    retries : int
        How many times more the same is added to a matrix that is not yet positive definite.

    Returns
    -------
    Float[Tensor, "*batch n n"]
        U, zero below its diagonal.

    Raises
    ------
    ConvergenceError
        A matrix is not positive definite even with (retries + 1) times the damping.

    Notes
    -----
    U is made from one Cholesky factorisation, without the inverse: reversing the order of rows and columns of H turns its
    lower factor into an upper one, H = R Rᵀ, and U = R⁻¹. O(n³) a matrix. For H = A ⊗ B without damping, U(H) = U(A) ⊗ U(B).
    """
    require_number(damping, "damping", low=0)
    require_number(retries, "retries", low=0, integer=True)
    step = damping * h.diagonal(dim1=-2, dim2=-1).mean(dim=-1)
    added = step.clone()
    for _ in range(retries + 1):
        damped = h.flip(-2, -1)
        damped.diagonal(dim1=-2, dim2=-1).add_(added[..., None])
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed.any():
            return _inverse_upper(factor.flip(-2, -1))
        added = torch.where(failed > 0, added + step, added)
    raise ConvergenceError(
        f"a {h.shape[-1]} x {h.shape[-1]} matrix is not positive definite, not even with {retries + 1} times the damping "
        f"of {damping:g} of its mean diagonal. Choose a larger damping, or more calibration data."
    )


def _inverse_upper(r: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """The inverse of upper triangular matrices, by halves: n³/3 in products, where solving for I takes n³."""
    n = r.shape[-1]
    if n <= 128:
        return torch.linalg.solve_triangular(
            r, torch.eye(n, dtype=r.dtype, device=r.device).expand(r.shape), upper=True
        )
    half = n // 2
    inverse = torch.zeros_like(r)
    inverse[..., :half, :half] = a = _inverse_upper(r[..., :half, :half])
    inverse[..., half:, half:] = c = _inverse_upper(r[..., half:, half:])
    inverse[..., :half, half:] = -(a @ r[..., :half, half:] @ c)
    return inverse
