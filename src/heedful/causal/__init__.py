"""What an experiment can say, and what it cannot."""

from typing import TYPE_CHECKING

from heedful._lazy import attach

if TYPE_CHECKING:
    from heedful.causal.causal_bounds import Bounds as Bounds
    from heedful.causal.causal_bounds import CovariateAwareBounds as CovariateAwareBounds
    from heedful.causal.causal_bounds import TransportValue as TransportValue
    from heedful.causal.causal_bounds import conditional_bounds as conditional_bounds
    from heedful.causal.causal_bounds import covariate_bounds as covariate_bounds
    from heedful.causal.causal_bounds import transport_value as transport_value

__getattr__, __dir__, __all__ = attach(
    "heedful.causal",
    {
        "causal_bounds": [
            "covariate_bounds",
            "Bounds",
            "CovariateAwareBounds",
            "conditional_bounds",
            "transport_value",
            "TransportValue",
        ],
    },
)
