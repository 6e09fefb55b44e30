"""Curvature in Kronecker factors: the triangular factors that solvers work with."""

import torch
from jaxtyping import Float
from torch import Tensor

from heedful._validation import require_number
from heedful.errors import ConvergenceError


def upper_cholesky(
    h: Float[Tensor, "*batch n n"], *, damping: float = 0.01, retries: int = 10
) -> Float[Tensor, "*batch n n"]:
    """The upper triangular R with positive diagonal and H + damping · mean(diag H) · I = R Rᵀ, for each matrix.

    Parameters
    ----------
    h : Float[Tensor, "*batch n n"]
        Symmetric, positive semidefinite up to rounding, finite.
    damping : float
        What is added to the diagonal, relative to its mean, >= 0; usually 0.01.
    retries : int
        How many times more the same is added to a matrix that is not yet positive definite.

    Returns
    -------
    Float[Tensor, "*batch n n"]
        R, zero below its diagonal.

    Raises
    ------
    ConvergenceError
        A matrix is not positive definite even with (retries + 1) times the damping.

    Notes
    -----
    The lower factor of H with rows and columns in reverse order, reversed. R⁻¹ is the upper factor U of the inverse, H⁻¹ =
    UᵀU, that GPTQ works with. Of H = A ⊗ B without damping, R(H) = R(A) ⊗ R(B). O(n³) a matrix.
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
            return factor.flip(-2, -1)
        added = torch.where(failed > 0, added + step, added)
    raise ConvergenceError(
        f"a {h.shape[-1]} x {h.shape[-1]} matrix is not positive definite, not even with {retries + 1} times the damping "
        f"of {damping:g} of its mean diagonal. Choose a larger damping, or more calibration data."
    )
