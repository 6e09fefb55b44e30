"""Small networks and data for the drivers of N:M training."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy


def mlp(seed=0, dtype=torch.float32):
    """Two sparse layers, between a dense first and a dense last one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(16, 3)).to(dtype)


def cnn(seed=0):
    """A sparse convolution and a sparse linear layer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        convolutions = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten()]
        return nn.Sequential(*convolutions, nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3))


def batches(model, steps, *, seed=1, size=16, dtype=torch.float32):
    """Inputs that fit the model, and labels."""
    generator = torch.Generator().manual_seed(seed)
    shape = (size, 6) if isinstance(model[0], nn.Linear) else (size, 1, 6, 6)
    for _ in range(steps):
        yield torch.randn(shape, generator=generator, dtype=dtype), torch.randint(3, (size,), generator=generator)


def train(model, optimizer, driver, data):
    """The loop of a user."""
    for x, y in data:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        if driver is not None:
            driver.step()
    return model


def sgd(model, **settings):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **settings})
