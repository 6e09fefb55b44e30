"""Training small networks sparse: the one loop, and the tasks, that the studies of bame and dynadiag share.

Arms start from the same weights and see the same batches. They differ in the driver that stands beside the optimizer.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from heedful import data
from heedful._random import spawn, torch_generator

Split = Literal["validation", "test"]


class Score(NamedTuple):
    """Share of right predictions in %, and how many bits the right answer is worth on average (cross-entropy)."""

    accuracy: float
    bits: float


@runtime_checkable
class SupervisedTask(Protocol):
    """What is trained, and scored by.

    ``network(seed)`` is the network to train, new at every call, and ``dense_layers`` says which of its layers no arm makes
    sparse, as ``exclude`` of a driver does. ``batches(steps, seed)`` yields that many ``(inputs, targets)``, ``score`` is
    taken on ``split``, which is what ``build`` was asked for. All of them give the same for the same seed.
    """

    split: Split
    dense_layers: Sequence[str]

    def network(self, seed: int) -> nn.Module: ...
    def batches(self, steps: int, seed: int) -> Iterable[tuple[Tensor, Tensor]]: ...
    def score(self, model: nn.Module) -> Score: ...


@runtime_checkable
class Driver(Protocol):
    """What the arms differ in: a driver of ``heedful.compress``."""

    def step(self) -> None: ...
    def finalize(self) -> nn.Module: ...


class Trained(NamedTuple):
    """A model as its driver left it, the driver, and now and then the loss of a batch, ``(step, loss)``."""

    model: nn.Module
    driver: Any
    losses: list[tuple[int, float]]


def train(
    task: SupervisedTask,
    *,
    steps: int,
    seed: int,
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
    make_driver: Callable[..., Driver] | None,
    watch: Callable[[Driver], None] = lambda driver: None,
) -> Trained:
    """Take ``steps`` steps with a learning rate that falls to zero by a cosine.

    ``make_driver`` is called with ``model, optimizer, total_steps=, exclude=``; without one, training is dense. ``watch`` is
    called with the driver after each optimizer step.
    """
    model = task.network(seed)
    optimizer = make_optimizer(model.parameters())
    driver: Any = None
    if make_driver is not None:
        driver = make_driver(model, optimizer, total_steps=steps, exclude=task.dense_layers)
    penalty = getattr(driver, "penalty", lambda: 0.0)
    scheduler = CosineAnnealingLR(optimizer, steps)
    losses = []
    for step, (inputs, targets) in enumerate(task.batches(steps, seed)):
        optimizer.zero_grad()
        loss = _cross_entropy(model(inputs), targets)
        (loss + penalty()).backward()
        optimizer.step()
        if driver is not None:
            watch(driver)
            driver.step()
        scheduler.step()
        if step % max(1, steps // 50) == 0:
            losses.append((step, loss.item()))
    return Trained(model if driver is None else driver.finalize(), driver, losses)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Of each prediction, be there one of an input or many."""
    return cross_entropy(logits.flatten(0, -2), targets.flatten())


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Supervised:
    """A ``SupervisedTask`` on tensors in memory.

    Parameters
    ----------
    build_network : callable
        Called with ``seed=``.
    inputs, targets : Tensor
        A row each. Targets are classes: one of each row, or one of each of its tokens.
    held_out_inputs, held_out_targets : Tensor
        What the split scores.
    batch_size : int
    split : {"validation", "test"}
    dense_layers : sequence of str
    """

    build_network: Callable[..., nn.Module]
    inputs: Tensor
    targets: Tensor
    held_out_inputs: Tensor
    held_out_targets: Tensor
    batch_size: int
    split: Split
    dense_layers: Sequence[str] = ("first", "last")

    def network(self, seed: int) -> nn.Module:
        return self.build_network(seed=seed)

    def batches(self, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Epoch after epoch in a new order each; what does not fill a batch is left out of the epoch."""
        (seed,) = spawn(seed, 1)  # So that no order here repeats one that a builder drew from the same seed.
        generator = torch.Generator().manual_seed(seed)
        n = len(self.inputs) - len(self.inputs) % self.batch_size
        epochs = (torch.randperm(len(self.inputs), generator=generator)[:n] for _ in itertools.count())
        chosen = (batch for order in epochs for batch in order.split(self.batch_size))
        for batch in itertools.islice(chosen, steps):
            yield self.inputs[batch], self.targets[batch]

    @torch.no_grad()
    def score(self, model: nn.Module) -> Score:
        model.eval()
        right = nats = 0.0
        for inputs, targets in zip(self.held_out_inputs.split(250), self.held_out_targets.split(250), strict=True):
            logits = model(inputs)
            right += float((logits.argmax(-1) == targets).sum())
            nats += float(_cross_entropy(logits, targets)) * targets.numel()
        n = self.held_out_targets.numel()
        return Score(100 * right / n, nats / n / math.log(2))


class Rows(NamedTuple):
    """The data of a ``Supervised``."""

    inputs: Tensor
    targets: Tensor
    held_out_inputs: Tensor
    held_out_targets: Tensor


def digits(*, split: Split, seed: int) -> Rows:
    """700 of scikit-learn's digits train, 300 validate; 797, the same for every seed, test."""
    table = data.load("digits")
    x, y = torch.tensor(table.X / 16, dtype=torch.float32), torch.tensor(table.y)
    own, test = _shuffled(len(y), 0).split([1000, len(y) - 1000])
    training, validation = own[_shuffled(1000, seed)].split([700, 300])
    held_out = validation if split == "validation" else test
    return Rows(x[training], y[training], x[held_out], y[held_out])


def fashion(prepare: Callable[[Tensor], Tensor], *, split: Split, seed: int, n: int) -> Rows:
    """``n`` images of Fashion-MNIST train, 2000 validate; 4000 of its own 10,000, the same for every seed, test.

    ``prepare`` makes inputs of pixels, (n, 28, 28), about zero mean and unit variance.
    """
    images = data.load("fashion_mnist")
    training, validation, _ = _shuffled(len(images.y_train), seed).split([n, 2000, len(images.y_train) - n - 2000])
    if split == "validation":
        x, y, rows = images.x_train, images.y_train, validation
    else:
        x, y, rows = images.x_test, images.y_test, _shuffled(len(images.y_test), 0)[:4000]

    def inputs(pixels: np.ndarray, rows: Tensor) -> Tensor:
        return prepare((torch.tensor(pixels[rows.numpy()], dtype=torch.float32) / 255 - 0.286) / 0.353)

    def targets(labels: np.ndarray, rows: Tensor) -> Tensor:
        return torch.tensor(labels[rows.numpy()])

    return Rows(inputs(images.x_train, training), targets(images.y_train, training), inputs(x, rows), targets(y, rows))


def mask_generator(seed: int) -> torch.Generator:
    """For random masks of a trial: apart from the streams that draw weights and batches."""
    return torch_generator(spawn(seed, 2)[1])


def _shuffled(n: int, seed: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))
