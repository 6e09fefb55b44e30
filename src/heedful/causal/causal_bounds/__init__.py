"""Bounds on what depends on both potential outcomes, tightened by covariates.

The two arms of a trial tell the distributions of Y(0) and of Y(1) and not how they hang together. Fréchet-Hoeffding bounds
allow every coupling of the two, and are blind to covariates Z: units that look nothing alike may be coupled. These bounds
charge for that,

    V(η) = E_π[h(Y0, Y1)],    π = argmin over couplings of E_π[h(Y0, Y1) + η ‖Z0 − Z1‖²],

which is ordinary optimal transport, never wider than the blind bound (η = 0), and the conditional one as η → ∞.

Lin, Gao, Blanchet, Glynn: Tightening Causal Bounds via Covariate-Aware Optimal Transport, ICML 2025, arXiv:2502.01164.
"""

from heedful._lazy import attach

__getattr__, __dir__, __all__ = attach(
    "heedful.causal.causal_bounds",
    {
        "bounds": ["covariate_bounds", "Bounds", "CovariateAwareBounds"],
        "strata": ["conditional_bounds"],
        "transport": ["transport_value", "TransportValue"],
    },
)
