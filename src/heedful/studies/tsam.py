"""Does the tilted neighbourhood find flatter minima that test better than SAM's single worst point?

Every arm trains the same network by SGD with momentum, weight decay and a cosine schedule, from the same initial weights
on the same mini-batches; they differ in where the gradient is taken. The budget is equal in one of two units, as the name
of the task says: ``…_epochs`` gives every arm the same number of steps (the paper's protocol: a step then costs SGD 1
gradient evaluation, SAM 2, and TSAM with s samples 2s), ``…_gradients`` the same number of gradient evaluations.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from heedful import data
from heedful._random import spawn
from heedful.errors import MissingExtraError
from heedful.evidence import Arm, Budget, Claim, Metric, Outcome, Study, Task
from heedful.optim import SAM, TiltedSAM, closure_step, hessian_eigenvalues, neighbourhood_loss
from heedful.studies._small_nets import mlp

_Unit = Literal["steps", "gradients"]
_Split = Literal["validation", "test"]

SAMPLES = 3
BASE: dict[str, Any] = {"momentum": 0.9, "weight_decay": 5e-4}


@runtime_checkable
class TrainingTask(Protocol):
    """What the arms train, and are scored by.

    For tensors in memory, ``Classification`` is one already::

        # my_tasks.py
        from heedful.studies.tsam import Classification


        def build(*, split, seed):
            x, y = my_data()  # float32 and int64 tensors; keep a test set apart, and split the rest by the seed
            held_out = my_validation(x, y, seed) if split == "validation" else my_test()
            training = my_training(x, y, seed)
            return Classification(*training, *held_out, batch_size=64, equal="steps", split=split)

    ``equal`` is what the budget gives every arm the same number of, and ``split`` what ``build`` was asked for: on
    "validation", where settings are chosen, accuracy is all that is measured. ``network(seed)`` is the network to train,
    new at every call; ``batches(steps, seed)`` yields that many ``(inputs, targets)``; ``probe()`` is one batch of
    training data, about 1000, on which flatness is measured; ``accuracy(model)`` is in %, on the split. All of them
    give the same for the same seed.
    """

    equal: _Unit
    split: _Split

    def network(self, seed: int) -> nn.Module: ...
    def batches(self, steps: int, seed: int) -> Iterable[tuple[Tensor, Tensor]]: ...
    def probe(self) -> tuple[Tensor, Tensor]: ...
    def accuracy(self, model: nn.Module) -> float: ...


# Arms: where each takes the gradient, and how many evaluations a step costs.


def sgd(task: TrainingTask, *, budget: Budget, seed: int, lr: float) -> Outcome:
    """At the weights."""
    return _train(task, budget, seed, lambda model: SGD(model.parameters(), lr=lr, **BASE), gradients_per_step=1)


def sam(task: TrainingTask, *, budget: Budget, seed: int, lr: float, rho: float) -> Outcome:
    """At the top of one climb from the weights."""
    return _train(
        task,
        budget,
        seed,
        lambda model: SAM(model.parameters(), model=model, rho=rho, lr=lr, **BASE),
        gradients_per_step=2,
    )


def average_perturbation(task: TrainingTask, *, budget: Budget, seed: int, lr: float, radius: float) -> Outcome:
    """At random points around the weights, averaged."""
    make = _tilted(seed, tilt=0.0, n_samples=SAMPLES, sampler="none", radius=radius, lr=lr)
    return _train(task, budget, seed, make, gradients_per_step=SAMPLES)


def rsam(task: TrainingTask, *, budget: Budget, seed: int, lr: float, rho: float, radius: float) -> Outcome:
    """At the top of one climb from a random point."""
    make = _tilted(seed, n_samples=1, rho=rho, radius=radius, lr=lr)
    return _train(task, budget, seed, make, gradients_per_step=2)


def tsam(
    task: TrainingTask, *, budget: Budget, seed: int, lr: float, rho: float, radius: float, tilt: float
) -> Outcome:
    """At the tops of several climbs from random points, averaged with weights that grow with the loss."""
    make = _tilted(seed, tilt=tilt, n_samples=SAMPLES, rho=rho, radius=radius, lr=lr)
    return _train(task, budget, seed, make, gradients_per_step=2 * SAMPLES)


def _tilted(seed: int, **settings: Any) -> Callable[[nn.Module], Optimizer]:
    def make(model: nn.Module) -> Optimizer:
        generator = torch.Generator().manual_seed(seed)
        return TiltedSAM(model.parameters(), model=model, generator=generator, **settings, **BASE)

    return make


def _train(
    task: TrainingTask,
    budget: Budget,
    seed: int,
    make_optimizer: Callable[[nn.Module], Optimizer],
    *,
    gradients_per_step: int,
) -> Outcome:
    """Spend the budget, then measure."""
    steps = budget.steps if task.equal == "steps" else budget.gradients // gradients_per_step
    model = task.network(seed)
    optimizer = make_optimizer(model)
    scheduler = CosineAnnealingLR(optimizer, steps)
    losses = []
    for step, batch in enumerate(task.batches(steps, seed)):
        loss = optimizer.step(closure_step(model, batch, cross_entropy))  # type: ignore[arg-type]  # it says float
        scheduler.step()
        if step % max(1, steps // 50) == 0:
            losses.append((step, float(loss)))
    return Outcome(
        metrics={"accuracy": task.accuracy(model)}
        | (_flatness(task, budget, model, seed) if task.split == "test" else {}),
        costs={"gradients": steps * gradients_per_step},
        curves={"training loss": losses},
    )


def _flatness(task: TrainingTask, budget: Budget, model: nn.Module, seed: int) -> dict[str, float]:
    """Of the training loss where the model ended."""
    generator = torch.Generator().manual_seed(seed)
    probe = [task.probe()]
    (top,) = hessian_eigenvalues(model, cross_entropy, probe, k=1, tol=1e-2, generator=generator)
    around = [
        neighbourhood_loss(model, cross_entropy, probe, std=std, n_samples=budget.neighbours, generator=generator).mean
        for std in (0.01, 0.02, 0.05)
    ]
    return {"top_eigenvalue": float(top), "neighbourhood_loss": sum(around) / len(around)}


# Tasks.


@dataclasses.dataclass(frozen=True)
class Classification:
    """A ``TrainingTask`` on tensors in memory, with a multi-layer perceptron."""

    inputs: Tensor
    targets: Tensor
    held_out_inputs: Tensor
    held_out_targets: Tensor
    batch_size: int
    equal: _Unit
    split: _Split
    hidden: tuple[int, ...] = (128, 128)

    def network(self, seed: int) -> nn.Module:
        n_classes = int(max(self.targets.max(), self.held_out_targets.max())) + 1
        return mlp((self.inputs[0].numel(), *self.hidden, n_classes), seed=seed)

    def batches(self, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Epoch after epoch in a new order each; what does not fill a batch is left out of the epoch."""
        (seed,) = spawn(seed, 1)  # So that no order here repeats one that a builder drew from the same seed.
        generator = torch.Generator().manual_seed(seed)
        n = len(self.inputs) - len(self.inputs) % self.batch_size
        epochs = (torch.randperm(len(self.inputs), generator=generator)[:n] for _ in itertools.count())
        chosen = (batch for order in epochs for batch in order.split(self.batch_size))
        for batch in itertools.islice(chosen, steps):
            yield self.inputs[batch], self.targets[batch]

    def probe(self) -> tuple[Tensor, Tensor]:
        return self.inputs[:1000], self.targets[:1000]

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        return 100 * (model(self.held_out_inputs).argmax(1) == self.held_out_targets).double().mean().item()


def noisy_digits(*, split: _Split, seed: int, equal: _Unit) -> Classification:
    """600 of scikit-learn's digits, 40 % of them with another label; 400 validate and 797 test, all labelled right."""
    digits = data.load("digits")
    x, y = torch.tensor(digits.X / 16, dtype=torch.float32), torch.tensor(digits.y)
    train, held_out = _parts(len(y), 600, 400, split=split, seed=seed)
    noisy = _relabelled(y[train], 0.4, n_classes=10, seed=seed)
    return Classification(x[train], noisy, x[held_out], y[held_out], batch_size=30, equal=equal, split=split)


def fashion(*, split: _Split, seed: int, equal: _Unit, noise: float = 0.0) -> Classification:
    """1500 images of Fashion-MNIST at half their size, 1000 validate, its own 10,000 test.

    ``noise`` is the share of the training labels that are replaced by others.
    """
    images = data.load("fashion_mnist")
    order = _shuffled(len(images.y_train), seed)
    train, validation = order[:1500].numpy(), order[1500:2500].numpy()
    if split == "validation":
        held_out, labels = images.x_train[validation], images.y_train[validation]
    else:
        held_out, labels = images.x_test, images.y_test
    targets = _relabelled(torch.tensor(images.y_train[train]), noise, n_classes=10, seed=seed)
    inputs = (_halved(images.x_train[train]), targets, _halved(held_out), torch.tensor(labels))
    return Classification(*inputs, batch_size=50, equal=equal, split=split)


def sentiment(*, split: _Split, seed: int, equal: _Unit) -> Classification:
    """Is a sentence of a film review positive? 3000 sentences train, 1000 validate, the rest test; mean token vectors.

    The vectors are standardised over all sentences, without their labels.
    """
    x, y = _sentence_vectors()
    train, held_out = _parts(len(y), 3000, 1000, split=split, seed=seed)
    return Classification(x[train], y[train], x[held_out], y[held_out], batch_size=60, equal=equal, split=split)


@functools.cache
def _sentence_vectors() -> tuple[Tensor, Tensor]:
    """The mean of each sentence's token vectors, of unit variance over sentences, and whether its rating is above zero."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingExtraError('The task "sentiment" needs a tokenizer: pip install "heedful[llm]".') from error
    sentences, embedding = data.load("sentiment4"), data.load("wordllama")
    chosen = (sentences.domain == sentences.domain_names.index("movie")) & (sentences.ratings != 0)
    texts = [text for text, kept in zip(sentences.texts, chosen, strict=True) if kept]
    tokens = Tokenizer.from_file(str(embedding.tokenizer_file)).encode_batch(texts)
    vectors = np.stack([embedding.vectors[encoded.ids].mean(0) for encoded in tokens])
    vectors = (vectors - vectors.mean(0)) / vectors.std(0)
    return torch.tensor(vectors), torch.tensor(sentences.ratings[chosen] > 0).long()


def _parts(n: int, n_train: int, n_validation: int, *, split: _Split, seed: int) -> tuple[Tensor, Tensor]:
    """Rows that train, and rows that are scored. No seed ever trains or validates on a test row of another."""
    own, test = _shuffled(n, 0).split([n_train + n_validation, n - n_train - n_validation])
    train, validation = own[_shuffled(len(own), seed)].split([n_train, n_validation])
    return train, validation if split == "validation" else test


def _shuffled(n: int, seed: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


def _halved(pixels: np.ndarray) -> Tensor:
    """Half the height and width, and about zero mean and unit variance."""
    return (avg_pool2d(torch.tensor(pixels, dtype=torch.float32), 2) / 255 - 0.29) / 0.33


def _relabelled(y: Tensor, share: float, *, n_classes: int, seed: int) -> Tensor:
    """``y`` with ``share`` of the labels, drawn at random, replaced by one of the other classes at random."""
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.randperm(len(y), generator=generator)[: round(share * len(y))]
    y = y.clone()
    y[wrong] = (y[wrong] + torch.randint(1, n_classes, (len(wrong),), generator=generator)) % n_classes
    return y


# The study.

_BUILDERS: dict[str, tuple[Callable[..., Classification], tuple[str, ...]]] = {
    "noisy_digits": (noisy_digits, ("digits",)),
    "fashion": (fashion, ("fashion_mnist",)),
    "fashion_noisy": (functools.partial(fashion, noise=0.3), ("fashion_mnist",)),
    "sentiment": (sentiment, ("sentiment4", "wordllama")),
}
_EPOCHS = tuple(f"{name}_epochs" for name in _BUILDERS)
_GRADIENTS = tuple(f"{name}_gradients" for name in _BUILDERS)


def _tasks(names: Iterable[str], equal: str) -> dict[str, Task]:
    return {
        name: Task(functools.partial(build, equal=equal), data=data.checksums(*sources))
        for name, (build, sources) in zip(names, _BUILDERS.values(), strict=True)
    }


study = Study(
    slug="tsam",
    question="Does the tilted neighbourhood find flatter minima that test better than SAM's single worst point?",
    tasks={**_tasks(_EPOCHS, "steps"), **_tasks(_GRADIENTS, "gradients")},
    arms={
        "sgd": Arm(sgd, grid={"lr": [0.005, 0.01, 0.02, 0.05, 0.1, 0.2]}),
        "sam": Arm(sam, grid={"lr": [0.02, 0.1], "rho": [0.02, 0.1, 0.3]}),
        "average_perturbation": Arm(average_perturbation, grid={"lr": [0.02, 0.1], "radius": [0.1, 0.5, 2.0]}),
        "rsam": Arm(
            rsam,
            grid=[
                {"lr": lr, "rho": rho, "radius": radius}
                for lr in (0.02, 0.1)
                for rho, radius in ((0.02, 0.3), (0.1, 0.3), (0.3, 1.0))
            ],
        ),
        "tsam": Arm(
            tsam,
            grid=[
                {"lr": lr, "rho": rho, "radius": radius, "tilt": tilt}
                for lr in (0.02, 0.1)
                for rho, radius, tilt in ((0.02, 0.3, 20.0), (0.1, 0.3, 20.0), (0.3, 1.0, 1.0))
            ],
            aware=True,
        ),
    },
    metrics=[
        Metric("accuracy", "%", better="higher"),
        Metric("top_eigenvalue", better="lower"),
        Metric("neighbourhood_loss", "nats", better="lower"),
    ],
    claims=[
        Claim("tsam", beats="sam", on="accuracy", tasks=_EPOCHS),
        Claim("tsam", beats="sgd", on="accuracy", tasks=_EPOCHS),
        Claim("tsam", beats="sam", on="top_eigenvalue", tasks=_EPOCHS),
        Claim("tsam", beats="sam", on="accuracy", exploratory=True, tasks=_GRADIENTS),
    ],
    budgets={
        "quick": Budget(
            seeds=3, tasks=("noisy_digits_epochs", "noisy_digits_gradients"), steps=200, gradients=600, neighbours=10
        ),
        "full": Budget(seeds=5, tuning_seeds=2, steps=500, gradients=1500, neighbours=10),
    },
    protocol=TrainingTask,
    unit="steps or gradient evaluations",
)
