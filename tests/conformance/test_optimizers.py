from functools import partial

import pytest
import torch
from torch.optim import AdamW

from heedful.optim import SAM, TiltedSAM
from tests.conformance import cases
from tests.conformance.optimizers import CHECKS, OptimizerRow


def tilted(params, **settings):
    """Small enough a neighbourhood for the small network of the checks, and noise of its own."""
    own = {"n_samples": 2, "radius": 0.05, "rho": 0.05, "generator": torch.Generator().manual_seed(0)}
    return TiltedSAM(params, **own | settings)


# They return the (tilted) loss of the points that they climbed to.
Row = partial(OptimizerRow, closure_required=True, returns_first_loss=False)
ROWS = (
    Row("sam", partial(SAM, momentum=0.9), evaluations=2),
    Row("asam", partial(SAM, adaptive=True, rho=0.5), evaluations=2),
    Row("tilted_sam", partial(tilted, momentum=0.9), evaluations=4),
    Row("tilted_sam_adamw", partial(tilted, base_optimizer=AdamW), evaluations=4),
    Row("tilted_sam_uniform", partial(tilted, sampler="none", noise="uniform"), evaluations=2),
    Row("tilted_sam_hmc", partial(tilted, sampler="hmc", hmc_steps=2, delta=1.0), evaluations=6),
)


@pytest.mark.parametrize(("check", "row"), cases(ROWS, CHECKS))
def test_optimizer(check, row):
    check(row)
