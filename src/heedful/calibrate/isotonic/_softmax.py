"""Parametric calibration: temperature, vector and Dirichlet scaling, softmax(A log p + b) with ever freer A and b.

Guo, Pleiss, Sun, Weinberger: On Calibration of Modern Neural Networks, ICML 2017. Kull et al.: Beyond temperature
scaling, NeurIPS 2019.
"""

from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import minimize
from scipy.special import logsumexp

Family = Literal["temperature", "vector", "dirichlet"]
_LIMITS = (1e-4, 1e4)  # of the inverse temperature: separable data would send it to infinity


class SoftmaxFit(NamedTuple):
    """softmax(A z + b): ``scale`` is A as a number, a diagonal or a matrix, ``bias`` is b (zeros for temperature).

    ``gap`` estimates the nats still to gain: ½ ∇ᵀH⁻¹∇ with the solver's own approximation of H⁻¹.
    """

    scale: Float[np.ndarray, "..."]
    bias: Float[np.ndarray, " K"]
    gap: float
    n_iter: int


def fit_softmax(
    P: Float[np.ndarray, "n K"],
    codes: Int[np.ndarray, " n"],
    weight: Float[np.ndarray, " n"],
    *,
    family: Family,
    smallest: float = 2.0**-52,
    ridge: float = 0.0,
    max_iter: int = 500,
    tol: float = 1e-7,
) -> SoftmaxFit:
    """Minimise the weighted mean log loss by L-BFGS from the identity; convex.

    Parameters
    ----------
    P : array of shape (n, K)
        Probabilities; z = log P.
    codes, weight : arrays of shape (n,)
        Column of the true class; weights with sum 1.
    family : {"temperature", "vector", "dirichlet"}
        A is a positive number, a diagonal, or a matrix.
    smallest : float
        Probabilities below this count as this.
    ridge : float
        Multiplies the mean square of the off-diagonal entries of A plus that of b ("dirichlet").
    max_iter, tol : int, float
        Most iterations; largest entry of the gradient to stop at.
    """
    z = np.log(np.maximum(P, smallest))
    K = z.shape[1]
    rows = np.arange(len(z))
    shape: tuple[int, ...] = {"temperature": (), "vector": (K,), "dirichlet": (K, K)}[family]
    size = int(np.prod(shape))
    identity = np.eye(K) if family == "dirichlet" else np.ones(shape)
    off_diagonal = 1 - np.eye(K)

    def unpack(theta):
        scale = theta[:size].reshape(shape)
        return scale, (np.zeros(K) if family == "temperature" else theta[size:])

    def objective(theta):
        scale, bias = unpack(theta)
        logits = (z @ scale.T if family == "dirichlet" else z * scale) + bias
        logits -= logsumexp(logits, axis=1, keepdims=True)
        value = -float(weight @ logits[rows, codes])
        error = np.exp(logits)
        error[rows, codes] -= 1
        error *= weight[:, None]
        if family == "temperature":
            return value, np.array([(error * z).sum()])
        if family == "vector":
            return value, np.r_[(error * z).sum(axis=0), error.sum(axis=0)]
        free = scale * off_diagonal
        value += ridge * (float((free**2).sum()) / (K * (K - 1)) + float(bias @ bias) / K)
        slope = error.T @ z + 2 * ridge / (K * (K - 1)) * free
        return value, np.r_[slope.ravel(), error.sum(axis=0) + 2 * ridge / K * bias]

    start = np.r_[identity.ravel(), np.zeros(0 if family == "temperature" else K)]
    found = minimize(
        objective,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=[_LIMITS] if family == "temperature" else None,
        options={"maxiter": max_iter, "gtol": tol, "ftol": 0.0, "maxls": 50},
    )
    scale, bias = unpack(found.x)
    gap = 0.5 * float(found.jac @ found.hess_inv.dot(found.jac))
    return SoftmaxFit(scale, bias, gap, int(found.nit))
