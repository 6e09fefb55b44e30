"""What a step of TiltedSAM costs beyond the gradients it needs, its memory, and SAM beside pytorch_optimizer's.

python benchmarks/bench_tsam.py
"""

import copy

import pytorch_optimizer
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from heedful._machine import peak_memory
from heedful.optim import SAM, TiltedSAM, closure_step
from measure import ratio, record, side_by_side

SAMPLES = 3


def cnn() -> nn.Module:
    """About a million parameters."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for fan_in, fan_out in ((3, 64), (64, 128), (128, 256), (256, 256)):
        layers += [nn.Conv2d(fan_in, fan_out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 10))


def images() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, 3, 32, 32, generator=generator), torch.randint(10, (64,), generator=generator)


def overhead() -> dict[str, float]:
    """A step beside the gradient evaluations that it consists of."""
    model = cnn()
    closure = closure_step(model, images(), cross_entropy)
    optimizer = TiltedSAM(model.parameters(), n_samples=SAMPLES, lr=1e-3, momentum=0.9)
    contestants = {
        "step": lambda: optimizer.step(closure),
        "gradients": lambda: [closure() for _ in range(2 * SAMPLES)],
    }
    return ratio(side_by_side(contestants), "step", "gradients")


def beside_pytorch_optimizer() -> dict[str, float]:
    """SAM's step; the peer wants the first gradient computed before, so that both evaluate the closure twice."""
    ours, theirs = cnn(), cnn()
    settings = {"rho": 0.05, "lr": 1e-3, "momentum": 0.9}
    our_optimizer = SAM(ours.parameters(), **settings)
    their_optimizer = pytorch_optimizer.SAM(theirs.parameters(), torch.optim.SGD, **settings)
    our_closure, their_closure = (closure_step(model, images(), cross_entropy) for model in (ours, theirs))

    def their_step():
        their_closure()
        their_optimizer.step(their_closure)

    for _ in range(3):
        our_optimizer.step(our_closure)
        their_step()
    for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
    contestants = {"heedful": lambda: our_optimizer.step(our_closure), "pytorch_optimizer": their_step}
    return ratio(side_by_side(contestants), "heedful", "pytorch_optimizer")


def extra_copies(n_samples: int) -> float:
    """Peak memory of a step beyond that of a step of SGD, in copies of the parameters, which here dwarf activations."""
    wide = nn.Sequential(nn.Linear(4096, 4096), nn.Tanh(), nn.Linear(4096, 2))
    batch = torch.ones(1, 4096), torch.zeros(1, dtype=torch.long)
    peaks = {}
    for name in ("sgd", "tsam"):
        model = copy.deepcopy(wide)
        closure = closure_step(model, batch, cross_entropy)
        make = torch.optim.SGD if name == "sgd" else TiltedSAM
        settings = {} if name == "sgd" else {"n_samples": n_samples}
        optimizer = make(model.parameters(), lr=1e-3, **settings)
        with peak_memory() as peak:
            optimizer.step(closure)
        peaks[name] = peak.mib
        del model, optimizer, closure
    return (peaks["tsam"] - peaks["sgd"]) / (sum(p.numel() * 4 for p in wide.parameters()) / 2**20)


if __name__ == "__main__":
    torch.set_num_threads(1)
    record(
        "tsam",
        {
            f"TiltedSAM step, 3 samples, to the {2 * SAMPLES} gradients in it": overhead(),
            "SAM step to pytorch_optimizer's": beside_pytorch_optimizer(),
            "extra copies of the parameters, 2 samples": extra_copies(2),
            "extra copies of the parameters, 8 samples": extra_copies(8),
        },
    )
