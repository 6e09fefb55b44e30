"""What a step of BAME costs beyond plain masked training and beside SR-STE, LMA alone, and the compressed backend.

python benchmarks/bench_bame.py
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from heedful.compress import BAME, SRSTE, StaticMask, nm_mask, swap_scores
from measure import ratio, record, side_by_side

INTERVAL = 100


def mlp(width: int = 1024) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.Linear(width, 10),
    )


def training(make, *, batch: int = 128, layer: bool = False):
    """A function that takes one training step, and the driver."""
    model = nn.Sequential(nn.Linear(1024, 1024)) if layer else mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    driver = make(model, optimizer)
    x = torch.randn(batch, 1024 if layer else 64, requires_grad=True)
    y = torch.randint(10, (batch,))

    def step():
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        if driver is not None:
            driver.step()

    return step, driver


def overhead() -> dict[str, float]:
    """Seconds of BAME's steps over those of a static mask: 99 of 100 plain, and one that adapts."""
    plain, _ = training(lambda m, o: BAME(m, o, total_steps=10**6, interval=10**5))
    adapting, driver = training(lambda m, o: BAME(m, o, total_steps=10**6, interval=1))
    static, _ = training(lambda m, o: StaticMask(m, o, pattern="2:4", total_steps=10**6))
    sr_ste, _ = training(lambda m, o: SRSTE(m, o, total_steps=10**6))
    seconds = side_by_side({"plain": plain, "adapting": adapting, "static": static, "sr_ste": sr_ste})
    assert driver.stats().adaptations > 10
    pairs = zip(seconds["plain"], seconds["adapting"], strict=True)
    seconds["bame"] = [((INTERVAL - 1) * a + b) / INTERVAL for a, b in pairs]
    return {
        f"step of BAME, an adaptation every {INTERVAL}, to that of a static mask": ratio(seconds, "bame", "static"),
        "step that adapts, to that of a static mask": ratio(seconds, "adapting", "static"),
        "step of SR-STE, to that of a static mask": ratio(seconds, "sr_ste", "static"),
    }


def adaptation(n: int, m: int) -> dict[str, float]:
    """Scores of 25 million weights, beside reading their products with the gradient once."""
    weight, grad = torch.randn(5000, 5000 // m * m), torch.randn(5000, 5000 // m * m)
    mask = nm_mask(weight, n, m, dim=1)
    weight *= mask
    contestants = {
        "swap_scores": lambda: swap_scores(weight, grad, mask, n, m, lr=0.1),
        "product": lambda: (weight * grad).abs_(),
    }
    return ratio(side_by_side(contestants, rounds=9), "swap_scores", "product")


def compressed(n: int, m: int) -> dict[str, float]:
    """A training step of one layer of 1024 by 1024, batch 128: forward, to the input, to the weight, and SGD."""
    dense, _ = training(lambda model, o: None, layer=True)
    sparse, _ = training(
        lambda model, o: BAME(model, o, n, m, total_steps=10**6, interval=10**5, exclude=(), backend="compressed"),
        layer=True,
    )
    return ratio(side_by_side({"compressed": sparse, "dense": dense}, rounds=31), "compressed", "dense")


if __name__ == "__main__":
    torch.set_num_threads(1)
    record(
        "bame",
        {
            **overhead(),
            "scores of 25 million weights at 2:4, to one product of weight and gradient": adaptation(2, 4),
            "scores of 25 million weights at 1:16, to one product of weight and gradient": adaptation(1, 16),
            **{
                f"compressed training step of Linear(1024, 1024) at {n}:{m}, to the dense one": compressed(n, m)
                for n, m in ((1, 16), (2, 8), (2, 4))
            },
        },
    )
