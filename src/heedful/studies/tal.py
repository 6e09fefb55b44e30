"""Is a start that heeds architecture and task better than one that heeds the architecture alone, for the same training?

Networks to be started are vision transformers that are deeper or wider than any that the hypernetworks were trained on.
Every hypernetwork may run the same number of mini-batches through other networks, forward and backward, its *passes*:

* ``tal``: a part of them under a teacher on CIFAR-10, the rest on the tasks that it sees, modulated by their embeddings;
* ``tal_no_teacher``: the same without matching the teacher's features;
* ``tal_no_task``: the same without task embeddings, one start for all tasks with as many classes;
* ``logah_per_task``: a hypernetwork for each task, among which the passes are divided;
* ``weight_selection``: no hypernetwork but one large network, trained on CIFAR-10, of which smaller ones take weights;
* ``random``: torch's own initialisation, for no passes at all.

Two of the seven families of tasks are held out: no hypernetwork sees them but ``logah_per_task``, which is given a
share of passes on each. (The images and classes of the first, vehicles, are a part of CIFAR-10, which is seen: held out
is the task.) What shares a hypernetwork shares labels: those of the larger tasks of CIFAR-10 and MNIST also serve their
versions with 200. All arms then fine-tune alike. A hypernetwork is a function of its arm, the seed and the budget; it
is trained by whichever trial needs it first, whose seconds are therefore more than its own, and kept.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int, Int64, UInt8
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from heedful import data
from heedful._random import numpy_generator, spawn
from heedful.evidence import Arm, Budget, Claim, Metric, Outcome, Study, Task, TrialRecord
from heedful.evidence._trial import code_version
from heedful.merge.tal import ArchitecturePool, TaskAwareLearngene, VisionTransformer
from heedful.merge.tal.baselines import weight_selection as select_weights
from heedful.studies._features import N_FEATURES, image_features
from heedful.studies._kept import kept

_Split = Literal["validation", "test"]

BATCH = 32
SIDE = 32  # of images
PATCH = 8  # 16 patches to an image: with patches of 4 pixels everything takes four times as long
POOL = [{"depth": depth, "width": width, "n_heads": 4} for depth in (2, 3, 4, 5) for width in (48, 64)]
UNSEEN = [  # two deeper than all of the pool, one wider
    {"depth": 6, "width": 48, "n_heads": 4},
    {"depth": 6, "width": 64, "n_heads": 4},
    {"depth": 3, "width": 80, "n_heads": 4},
]
LARGE = {"depth": 6, "width": 80, "n_heads": 4}  # what weight selection takes weights from
HYPERNETWORK = {"hidden": 48, "n_layers": 2, "n_heads": 4, "rank": 32, "max_side": 1280}
TRAINING = {"lr": 1e-4, "clip_norm": 0.5}  # of all hypernetworks; at a higher lr they learn nothing
PRETRAINING = 0.4  # the share of a hypernetwork's passes under a teacher, or without one for ``tal_no_teacher``
N_VALIDATION, N_TEST = 300, 500


@runtime_checkable
class TransferTask(Protocol):
    """Images to classify, by a network that is started for them and fine-tuned.

    For images in memory, ``ImageTask`` is one already::

        # my_tasks.py
        from heedful.studies.tal import ImageTask


        def build(*, split, seed):
            x, y = my_training(seed)  # uint8 images (n, 32, 32, 3) and int64 labels from 0 on
            held_out = my_validation(seed) if split == "validation" else my_test()
            return ImageTask.of(x, y, *held_out, split=split)

    ``split`` is what ``build`` was asked for; ``n_classes`` the number of classes; ``embedding`` the mean feature of the
    training images, from ``heedful.studies._features.image_features``. ``batches(steps, seed)`` yields that many pairs of
    images, float32 of shape (n, 3, 32, 32), and labels; ``accuracy(network)`` is in %, on the split. All of them give the
    same for the same seed. No hypernetwork is tuned on the task but that of ``logah_per_task``.
    """

    split: _Split
    n_classes: int
    embedding: Float[Tensor, " 1280"]

    def batches(self, steps: int, seed: int) -> Iterable[tuple[Tensor, Tensor]]: ...
    def accuracy(self, network: nn.Module) -> float: ...


# Arms: how a network is started.

_Start = Callable[[nn.Module], Any]  # changes the weights in place


def tal(task: TransferTask, *, budget: Budget, seed: int, lr: float) -> Outcome:
    """Predicted from the architecture and the task, by a hypernetwork that a teacher taught."""
    start = _predicted(_tuned(seed, budget, teacher=True, embedded=True), task.embedding)
    return _fine_tuned(task, budget, seed, lr, start, passes=budget.passes)


def tal_no_teacher(task: TransferTask, *, budget: Budget, seed: int, lr: float) -> Outcome:
    """Predicted from the architecture and the task, by a hypernetwork that learnt from labels alone."""
    start = _predicted(_tuned(seed, budget, teacher=False, embedded=True), task.embedding)
    return _fine_tuned(task, budget, seed, lr, start, passes=budget.passes)


def tal_no_task(task: TransferTask, *, budget: Budget, seed: int, lr: float) -> Outcome:
    """Predicted from the architecture, by a hypernetwork that a teacher taught and that saw all tasks as one."""
    start = _predicted(_tuned(seed, budget, teacher=True, embedded=False), None)
    return _fine_tuned(task, budget, seed, lr, start, passes=budget.passes)


def logah_per_task(task: TransferTask, *, budget: Budget, seed: int, lr: float) -> Outcome:
    """Predicted from the architecture, by a hypernetwork of the task's own, trained for its share of the passes."""
    passes = budget.passes // len(_seen(budget))
    learngene = TaskAwareLearngene(HYPERNETWORK, random_state=seed)
    batches = list(task.batches(passes, seed))
    learngene.tune(_pool(), {"own": (batches, task.n_classes, None)}, steps=passes, **TRAINING)
    return _fine_tuned(task, budget, seed, lr, _predicted(learngene, None), passes=budget.passes)


def weight_selection(task: TransferTask, *, budget: Budget, seed: int, lr: float) -> Outcome:
    """Taken from a larger network that was trained on CIFAR-10, but for the head."""
    start = functools.partial(select_weights, source=_large(seed, budget), exclude=["head.*"])
    return _fine_tuned(task, budget, seed, lr, start, passes=budget.passes)


def random(task: TransferTask, *, budget: Budget, seed: int, lr: float) -> Outcome:
    """As torch initialises."""
    return _fine_tuned(task, budget, seed, lr, lambda network: None, passes=0)


def _predicted(learngene: TaskAwareLearngene, task: Tensor | None) -> _Start:
    def start(network: nn.Module) -> None:
        learngene.initialize(network, task, example_inputs=torch.zeros(1, 3, SIDE, SIDE))

    return start


def _fine_tuned(task: TransferTask, budget: Budget, seed: int, lr: float, start: _Start, *, passes: int) -> Outcome:
    """Accuracy of every unseen architecture at its start, and of one, of the next with each seed, as it is fine-tuned.

    On the validation split, where the learning rate is chosen, that one is all.
    """
    own = seed % len(UNSEEN)
    networks = {
        number: _network(architecture, task.n_classes, seed)
        for number, architecture in enumerate(UNSEEN)
        if number == own or task.split == "test"
    }
    for network in networks.values():
        start(network)
    at_start = {number: task.accuracy(network) for number, network in networks.items()}
    taken = _descend(networks[own], task.batches(budget.steps, seed), lr=lr)
    measured = {10, 20, budget.steps}
    curve = [(0, at_start[own]), *((step, task.accuracy(networks[own])) for step in taken if step in measured)]
    steps, accuracies = np.array(curve).T
    return Outcome(
        metrics={
            "accuracy_0": float(np.mean(list(at_start.values()))),
            "accuracy": float(accuracies[-1]),
            "area": float(np.trapezoid(accuracies, steps)) / budget.steps,
        },
        costs={"passes before": passes, "passes of fine-tuning": budget.steps},
        curves={"accuracy": curve},
    )


def _descend(network: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], *, lr: float) -> Iterator[int]:
    """Train in place; the number of steps taken, after each."""
    optimizer = AdamW(network.parameters(), lr=lr)
    for step, (x, y) in enumerate(batches, start=1):
        optimizer.zero_grad()
        cross_entropy(network(x), y).backward()
        optimizer.step()
        yield step


def _network(architecture: Mapping[str, int], n_classes: int, seed: int) -> VisionTransformer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return VisionTransformer(**architecture, patch=PATCH, image_size=SIDE, n_classes=n_classes)


# Hypernetworks, and what else is trained before a task is met.


def _tuned(seed: int, budget: Budget, *, teacher: bool, embedded: bool) -> TaskAwareLearngene:
    """Pretrained on CIFAR-10, then tuned on the tasks that may be seen."""
    before = round(PRETRAINING * budget.passes)

    def pretrained() -> TaskAwareLearngene:
        learngene = _learngene(seed, teacher=teacher)
        rows = _rows("cifar10", _unchanged)
        batches = _loader(*rows.parts["training"], rows.features, seed=seed)
        return learngene.pretrain(_pool(), batches, None, steps=before, **TRAINING)

    def tuned() -> TaskAwareLearngene:
        learngene = _kept_learngene(seed, budget, pretrained, teacher=teacher)
        tasks = {name: image_task(name, split="validation", seed=seed) for name in _seen(budget)}
        told = {
            name: (_loader(task.images, task.labels, seed=seed), task.n_classes, task.embedding if embedded else None)
            for name, task in tasks.items()
        }
        return learngene.tune(_pool(), told, steps=budget.passes - before, **TRAINING)

    return _kept_learngene(seed, budget, tuned, teacher=teacher, embedded=embedded)


def _kept_learngene(
    seed: int, budget: Budget, train: Callable[[], TaskAwareLearngene], *, teacher: bool, embedded: bool | None = None
) -> TaskAwareLearngene:
    """What ``train`` returns, trained once; ``embedded`` is None for what is not tuned yet."""
    depends = [_code(), seed, budget.passes, _seen(budget), teacher, embedded]
    arrays = kept("learngenes", depends, lambda: _arrays(train().hypernet))
    learngene = _learngene(seed, teacher=teacher)
    if embedded:
        learngene.hypernet.add_task_modulation(N_FEATURES)
    _load(learngene.hypernet, arrays)
    return learngene


def _learngene(seed: int, *, teacher: bool) -> TaskAwareLearngene:
    return TaskAwareLearngene(HYPERNETWORK, teacher_weight=0.2 if teacher else 0.0, random_state=seed)


def _large(seed: int, budget: Budget) -> nn.Module:
    """A network larger than all that are started, trained on CIFAR-10 for as many passes as a hypernetwork."""
    network = _network(LARGE, 10, seed)

    def trained() -> dict[str, np.ndarray]:
        images, labels = _rows("cifar10", _unchanged).parts["training"]
        for _ in _descend(network, _batches(images, labels, budget.passes, seed), lr=1e-3):
            pass
        return _arrays(network)

    _load(network, kept("learngenes", [_code(), seed, budget.passes, LARGE], trained))
    return network


def _arrays(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in module.state_dict().items()}


def _load(module: nn.Module, arrays: Mapping[str, np.ndarray]) -> None:
    module.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})


@functools.cache
def _code() -> str:
    return code_version(study)


@functools.cache
def _pool() -> ArchitecturePool:
    members = [{**architecture, "patch": PATCH, "image_size": SIDE, "n_classes": 10} for architecture in POOL]
    return ArchitecturePool(VisionTransformer, members, torch.zeros(1, 3, SIDE, SIDE))


def _loader(*columns: Tensor, seed: int) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(TensorDataset(*columns), BATCH, shuffle=True, generator=generator)


# Tasks.


def _batches(images: Tensor, labels: Tensor, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Epoch after epoch in a new order each; what does not fill a batch is left out of the epoch."""
    (seed,) = spawn(seed, 1)  # so that no order here repeats one that a builder drew from the same seed
    generator = torch.Generator().manual_seed(seed)
    n = len(images) // BATCH * BATCH or len(images)
    epochs = (torch.randperm(len(images), generator=generator)[:n] for _ in itertools.count())
    chosen = (batch for order in epochs for batch in order.split(BATCH))
    for batch in itertools.islice(chosen, steps):
        yield images[batch], labels[batch]


@dataclasses.dataclass(frozen=True, eq=False)
class ImageTask:
    """A ``TransferTask`` on images in memory."""

    images: Float[Tensor, "n 3 32 32"]
    labels: Int[Tensor, " n"]
    embedding: Float[Tensor, " 1280"]
    held_out_images: Float[Tensor, "m 3 32 32"]
    held_out_labels: Int[Tensor, " m"]
    split: _Split

    @classmethod
    def of(
        cls,
        images: UInt8[np.ndarray, "n 32 32 3"],
        labels: Int64[np.ndarray, " n"],
        held_out_images: UInt8[np.ndarray, "m 32 32 3"],
        held_out_labels: Int64[np.ndarray, " m"],
        *,
        split: _Split,
    ) -> "ImageTask":
        """From pixels, which are brought to zero mean and unit variance of the training images."""
        x, held_out = _standardised(images, held_out_images)
        embedding = torch.tensor(image_features(images).mean(0))
        return cls(x, torch.tensor(labels), embedding, held_out, torch.tensor(held_out_labels), split)

    @property
    def n_classes(self) -> int:
        """One more than the largest label."""
        return int(max(self.labels.max(), self.held_out_labels.max())) + 1

    def batches(self, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        return _batches(self.images, self.labels, steps, seed)

    @torch.no_grad()
    def accuracy(self, network: nn.Module) -> float:
        return 100 * (network(self.held_out_images).argmax(1) == self.held_out_labels).double().mean().item()


def image_task(name: str, *, split: _Split, seed: int) -> ImageTask:
    """A family of tasks, or with "_200" behind its name a version of it with 200 labels, drawn with the seed.

    Of some classes alone there are fewer rows. Which rows train, validate and test is the same for all seeds. Embeddings
    need no labels: they are of the first 256 training images (of all of CIFAR-10), whichever have one.
    """
    source, change, classes = _FAMILIES[name.removesuffix("_200")]
    rows = _rows(source, change)
    told = {}
    for part, (images, labels) in rows.parts.items():
        chosen = torch.isin(labels, torch.tensor(classes))
        told[part] = images[chosen], torch.searchsorted(torch.tensor(classes), labels[chosen])
    x, y = told["training"]
    if name.endswith("_200"):
        labelled = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))[:200]
        x, y = x[labelled], y[labelled]
    _, labels = rows.parts["training"]
    embedding = rows.features[torch.isin(labels[: len(rows.features)], torch.tensor(classes))].mean(0)
    return ImageTask(x, y, embedding, *told[split], split)


class _Rows(NamedTuple):
    """Images and labels by part, and the teacher's features of the first training images."""

    parts: dict[str, tuple[Float[Tensor, "n 3 32 32"], Int[Tensor, " n"]]]
    features: Float[Tensor, "n_features 1280"]


@functools.cache
def _rows(source: str, change: Callable[[np.ndarray], np.ndarray]) -> _Rows:
    form = data.load(source)
    n_training, n_features = (1500, 1500) if source == "cifar10" else (1000, 256)
    own = numpy_generator(0).permutation(len(form.y_train))[: n_training + N_VALIDATION]
    test = numpy_generator(0).permutation(len(form.y_test))[:N_TEST]
    x, y = change(_colour(form.x_train[own])), torch.tensor(form.y_train[own])
    training, validation, tested = _standardised(x[:n_training], x[n_training:], change(_colour(form.x_test[test])))
    parts = {
        "training": (training, y[:n_training]),
        "validation": (validation, y[n_training:]),
        "test": (tested, torch.tensor(form.y_test[test])),
    }
    return _Rows(parts, torch.tensor(image_features(x[:n_features])))


def _standardised(training: np.ndarray, *others: np.ndarray) -> list[Float[Tensor, "_ 3 32 32"]]:
    """Zero mean and unit variance over the training images, and channels first."""
    mean, std = training.mean(), training.std()
    return [
        torch.tensor((pixels - mean) / std, dtype=torch.float32).permute(0, 3, 1, 2).contiguous()
        for pixels in (training, *others)
    ]


def _colour(images: np.ndarray) -> UInt8[np.ndarray, "n 32 32 3"]:
    """Grey images of 28 × 28 get three channels and a border of two black pixels."""
    if images.ndim == 4:
        return images
    return np.repeat(np.pad(images, ((0, 0), (2, 2), (2, 2)))[..., None], 3, axis=3)


def _unchanged(images: np.ndarray) -> np.ndarray:
    return images


def _inverted(images: np.ndarray) -> np.ndarray:
    return 255 - images


def _turned(images: np.ndarray) -> np.ndarray:
    """By a right angle."""
    return np.ascontiguousarray(np.rot90(images, axes=(1, 2)))


_ALL = tuple(range(10))
_FAMILIES: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray], tuple[int, ...]]] = {
    "cifar10": ("cifar10", _unchanged, _ALL),
    "fashion": ("fashion_mnist", _unchanged, _ALL),
    "mnist": ("mnist", _unchanged, _ALL),
    "animals": ("cifar10", _unchanged, (2, 3, 4, 5, 6, 7)),
    "inverted_fashion": ("fashion_mnist", _inverted, _ALL),
    "vehicles": ("cifar10", _unchanged, (0, 1, 8, 9)),
    "rotated_mnist": ("mnist", _turned, _ALL),
}
SMALL = tuple(f"{family}_200" for family in _FAMILIES)
HELD_OUT = ("vehicles_200", "rotated_mnist_200")  # a new choice of classes that were seen, and new images of seen ones
SEEN = ("cifar10", "mnist", *(name for name in SMALL if name not in HELD_OUT))


def _seen(budget: Budget) -> list[str]:
    """The tasks that hypernetworks are tuned on."""
    return [name for name in budget.tasks or SEEN if name in SEEN]


# The study.

_GRID = {"lr": [5e-4, 2e-3]}

study = Study(
    slug="tal",
    question="Is a start that heeds architecture and task better than one that heeds the architecture alone?",
    tasks={
        name: Task(
            functools.partial(image_task, name),
            data=data.checksums("efficientnet_lite0", "cifar10", "fashion_mnist", "mnist"),
        )
        for name in (*SEEN, *HELD_OUT)
    },
    arms={
        "random": Arm(random, grid=_GRID),
        "weight_selection": Arm(weight_selection, grid=_GRID),
        "logah_per_task": Arm(logah_per_task, grid=_GRID),
        "tal_no_task": Arm(tal_no_task, grid=_GRID),
        "tal_no_teacher": Arm(tal_no_teacher, grid=_GRID),
        "tal": Arm(tal, grid=_GRID, aware=True),
    },
    metrics=[
        Metric("area", "%", better="higher"),
        Metric("accuracy_0", "%", better="higher"),
        Metric("accuracy", "%", better="higher"),
    ],
    claims=[
        Claim("tal", beats="logah_per_task", on="accuracy_0", tasks=SEEN, pairs="tasks"),
        Claim("tal", beats="random", on="area", tasks=SEEN, pairs="tasks"),
        Claim("tal", beats="tal_no_task", on="area", tasks=SMALL, pairs="tasks"),
        Claim("tal", beats="random", on="area", tasks=HELD_OUT, exploratory=True),
        Claim("tal", beats="weight_selection", on="area", pairs="tasks", exploratory=True),
    ],
    budgets={
        "quick": Budget(seeds=1, passes=40, steps=20, tasks=("cifar10_200", "fashion_200", "mnist_200")),
        "full": Budget(seeds=4, passes=400, steps=50),
    },
    protocol=TransferTask,
    unit="passes",
)


def networks_to_recover(trials: Sequence[TrialRecord], *, arm: str = "tal") -> float:
    """How many networks must be started by ``arm`` until the fine-tuning it saves outweighs the passes before.

    Of a task and seed, it saves the steps by which it is earlier than ``random`` at the accuracy that both reach; a pass
    and a step are one mini-batch each, forward and backward. ``math.inf`` if it saves none on average.

    Parameters
    ----------
    trials : sequence of TrialRecord
        ``result.trials`` of the study.
    arm : str
        Whose start it is.
    """
    curves = {
        (trial.arm, trial.task, trial.seed): np.array(trial.curves["accuracy"]) for trial in trials if trial.curves
    }
    passes = next(trial.costs["passes before"] for trial in trials if trial.arm == arm and trial.status == "done")
    saved = [
        _steps_to(other, common) - _steps_to(own, common)
        for (name, task, seed), own in curves.items()
        if name == arm and (other := curves.get(("random", task, seed))) is not None
        for common in [min(own[:, 1].max(), other[:, 1].max())]
    ]
    return passes / float(np.mean(saved)) if np.mean(saved) > 0 else math.inf


def _steps_to(curve: np.ndarray, accuracy: float) -> float:
    """Steps to ``accuracy``, on straight lines between the points of the curve's running maximum."""
    steps, best = curve[:, 0], np.maximum.accumulate(curve[:, 1])
    at = int(np.argmax(best >= accuracy))
    if at == 0:
        return 0.0
    share = (accuracy - best[at - 1]) / (best[at] - best[at - 1])
    return float(steps[at - 1] + share * (steps[at] - steps[at - 1]))
