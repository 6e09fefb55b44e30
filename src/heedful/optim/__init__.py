"""Train a network."""

from typing import TYPE_CHECKING

from heedful._lazy import attach

if TYPE_CHECKING:
    from heedful._flatness import flatness as flatness
    from heedful._flatness import hessian_eigenvalues as hessian_eigenvalues
    from heedful._flatness import neighbourhood_loss as neighbourhood_loss
    from heedful.optim.tsam import SAM as SAM
    from heedful.optim.tsam import TiltedSAM as TiltedSAM
    from heedful.optim.tsam import closure_step as closure_step
    from heedful.optim.tsam import tilted_loss as tilted_loss
    from heedful.optim.tsam import tilted_weights as tilted_weights

__getattr__, __dir__, __all__ = attach(
    "heedful.optim",
    {
        "tsam": ["TiltedSAM", "SAM", "closure_step", "tilted_weights", "tilted_loss"],
        "._flatness": ["hessian_eigenvalues", "neighbourhood_loss", "flatness"],
    },
)
