"""A learngene: one hypernetwork that has learnt from a teacher, and then from many tasks, how to start a network.

Pretraining predicts the weights of a network drawn from a pool, runs the network, and descends on

    α T² KL(softmax(t/T) ‖ softmax(s/T)) / (n · classes) + (1 − α) CE(logits, y) + c Σ_p ‖p‖_F,

the KL over the dimensions of the teacher's features t and of the student's, s = P cls(x), and the last sum over the
predicted tensors p. Tuning draws a task with probability ∝ |D|^{1/temperature}, modulates the hypernetwork by the task's
embedding (the teacher's mean feature), and descends on CE and the last term. What remains is asked for weights.

Learngene Tells You How to Customize: Task-Aware Parameter Initialization at Flexible Scales, ICML 2025.
"""

import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from heedful._files import Saved
from heedful._random import spawn
from heedful._results import Event, Report
from heedful._validation import require_choice, require_number
from heedful.errors import ConvergenceError, HeedfulWarning, InputError, ParameterError, UnsupportedModelError
from heedful.merge.tal._students import PROJECTOR, Pool, Student, Students, without
from heedful.merge.tal._training import (
    Descent,
    Example,
    Projector,
    checked_features,
    count_steps,
    endless,
    evaluating,
    feature_matching,
    size,
    task_probabilities,
)
from heedful.merge.tal.ghn import GraphHyperNetwork
from heedful.merge.tal.graph import computation_graph

CONFIGS: dict[str, dict[str, Any]] = {
    "base": {"hidden": 128, "n_layers": 5, "n_heads": 16, "rank": 90, "max_side": 32768},
    "tiny": {"hidden": 48, "n_layers": 2, "n_heads": 4, "rank": 12, "max_side": 2048},
}


@torch.no_grad()
def task_embedding(teacher: Callable[..., Tensor], batches: Iterable[Any]) -> Float[Tensor, " features"]:
    """The mean feature of a task's training inputs: all that a learngene needs to know about a task.

    Parameters
    ----------
    teacher : callable
        Inputs of shape (n, ...) to features of shape (n, d), not logits. A module is put in eval mode meanwhile.
    batches : iterable
        Of inputs, or of tuples that begin with them; labels are not looked at. Rows count equally whatever their batch.

    Returns
    -------
    Float[Tensor, " features"]
        float32, where the teacher's features are.

    Raises
    ------
    InputError
        If there are no rows, or the teacher does not return finite features of shape (n, d).

    Examples
    --------
    >>> task_embedding(nn.Flatten(), [torch.zeros(3, 2, 1), torch.ones(1, 2, 1)])
    tensor([0.2500, 0.2500])
    """
    total, n = torch.zeros(()), 0
    with evaluating(teacher):
        for batch in batches:
            features = checked_features(teacher(batch[0] if isinstance(batch, (tuple, list)) else batch))
            total = total.to(features.device) + features.sum(0, dtype=torch.float64)
            n += len(features)
    if n == 0:
        raise InputError("A task embedding is a mean over rows, and batches has none. Is it an iterator already used?")
    return (total / n).float()


class TaskData(NamedTuple):
    """What ``TaskAwareLearngene.tune`` must know of a task; a plain tuple does.

    ``batches`` is an iterable of (inputs, labels) that can be iterated again and again, ``n_classes`` the number of
    classes, labels being 0 … n_classes − 1, and ``embedding`` what ``task_embedding`` returns, or None to tune without
    task modulation.
    """

    batches: Iterable[Any]
    n_classes: int
    embedding: Tensor | None = None


class KnownTask(NamedTuple):
    """What remains of a task that a learngene was tuned on."""

    n_classes: int
    embedding: Tensor | None


@dataclasses.dataclass(frozen=True)
class InitializationReport(Report):
    """What ``initialize`` did: names of parameters it predicted and of those it kept, and how many numbers they hold."""

    task: str | None
    predicted: tuple[str, ...]
    kept: tuple[str, ...]
    n_predicted: int
    n_kept: int


class TaskAwareLearngene(Saved):
    """Starts networks of any size for any task with weights that a hypernetwork predicts.

    ``pretrain`` once, under a teacher; ``tune`` on many tasks; then ``initialize`` as many networks as you like, also for
    tasks that were not tuned on: their embedding is enough. One hypernetwork serves all sizes that its pool spans.

    Parameters
    ----------
    config : {"base", "tiny"} or dict
        Size of the hypernetwork: the paper's, one for networks of widths up to about 128, or the arguments of
        ``GraphHyperNetwork``.
    teacher_weight : float
        α in [0, 1]: the share of matching the teacher's features in pretraining; the rest is cross-entropy.
    temperature : float
        T > 0, divides features before their softmax.
    label_smoothing : float
        Of the cross-entropy, in [0, 1].
    norm_weight : float
        >= 0, multiplies the sum of the norms of the predicted tensors.
    task_temperature : float
        > 0. Tasks are drawn with probability ∝ size^{1/task_temperature}; ``math.inf`` draws them alike.
    trainable : {"all", "task"}
        What ``tune`` changes: the whole hypernetwork, or the task modulation and the decoder alone.
    projector : {"predicted", "shared", "random"}
        How the student's features come to the width of the teacher's: by one more linear layer that is predicted like the
        others, by one matrix trained beside the hypernetwork, of which narrow networks use the first rows, or by a
        matrix drawn anew for every step that nothing learns.
    random_state : int, RandomState, Generator or None
        Initial weights, order of networks and tasks, and noise. Every call of a method starts from it afresh.

    Attributes
    ----------
    hypernet : GraphHyperNetwork
        Training runs where it is: ``learngene.hypernet.cuda()``.
    tasks : dict
        Name of each task tuned on -> its number of classes and embedding.
    last_report : InitializationReport or None
        Of the last call of ``initialize``.

    References
    ----------
    *Learngene Tells You How to Customize: Task-Aware Parameter Initialization at Flexible Scales*. ICML 2025.
    """

    def __init__(
        self,
        config: str | Mapping[str, Any] = "base",
        *,
        teacher_weight: float = 0.2,
        temperature: float = 3.0,
        label_smoothing: float = 0.1,
        norm_weight: float = 3e-5,
        task_temperature: float = 2.0,
        trainable: Literal["all", "task"] = "all",
        projector: Literal["predicted", "shared", "random"] = "predicted",
        random_state=None,
    ):
        if not isinstance(config, Mapping):
            require_choice(config, "config", tuple(CONFIGS))
            config = CONFIGS[config]
        require_number(teacher_weight, "teacher_weight", low=0, high=1)
        require_number(temperature, "temperature", low=0, open_low=True)
        require_number(label_smoothing, "label_smoothing", low=0, high=1)
        require_number(norm_weight, "norm_weight", low=0)
        require_number(task_temperature, "task_temperature", low=0, open_low=True)
        require_choice(trainable, "trainable", ("all", "task"))
        require_choice(projector, "projector", ("predicted", "shared", "random"))
        self.teacher_weight, self.temperature, self.label_smoothing = teacher_weight, temperature, label_smoothing
        self.norm_weight, self.task_temperature = norm_weight, task_temperature
        self.trainable, self.projector = trainable, projector
        self._seeds = dict(zip(("weights", "pretrain", "tune", "noise"), spawn(random_state, 4), strict=True))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seeds["weights"])
            self.hypernet = GraphHyperNetwork(**config)
        self.tasks: dict[str, KnownTask] = {}
        self.teacher: Callable[..., Tensor] | None = None
        self.last_report: InitializationReport | None = None

    def pretrain(
        self,
        pool: Pool,
        batches: Iterable[Any],
        teacher: Callable[..., Tensor] | None,
        *,
        n_classes: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        n_architectures: int = 1,
        lr: float = 3e-4,
        weight_decay: float = 1e-2,
        warmup_fraction: float = 1 / 15,
        clip_norm: float = 5.0,
        amp: bool = False,
        callback: Callable[[Event], bool | None] | None = None,
    ) -> "TaskAwareLearngene":
        """Learn to start the networks of a pool for one large data set, under a teacher.

        Parameters
        ----------
        pool : ArchitecturePool
            Or any sequence of pairs (function that builds a network, its ``ComputationGraph``).
        batches : iterable
            Of (inputs, labels), or of (inputs, labels, teacher's features) where these are known already. It is iterated
            again and again.
        teacher : callable or None
            Inputs to features (n, d) before the head; not needed with ``teacher_weight=0`` or features in the batches.
        n_classes : int, optional
            Labels are 0 … n_classes − 1, and the networks get heads for them; None: as the pool builds them.
        epochs, steps : int
            How long to train, by one of both: passes over ``batches``, or steps. A step runs one batch through
            ``n_architectures`` networks, forward and backward.
        n_architectures : int
            Networks drawn for each step; the loss is their mean.
        lr, weight_decay, warmup_fraction, clip_norm : float
            AdamW, whose learning rate rises from 1e-5 to ``lr`` in the first ``warmup_fraction`` of the steps and falls
            to 0 along a cosine; the norm of the gradient is clipped.
        amp : bool
            Mixed precision (float16), on CUDA alone.
        callback : callable, optional
            Gets an ``Event`` after each step, with the terms of the loss; training stops when it returns True.

        Returns
        -------
        TaskAwareLearngene
            This one.

        Raises
        ------
        InputError
            If labels, features or networks do not fit together; the message says which.
        ConvergenceError
            If the loss becomes NaN or infinite.
        """
        descent = Descent(lr, weight_decay, warmup_fraction, clip_norm, amp, callback)
        generator = torch.Generator().manual_seed(self._seeds["pretrain"])
        students = Students(pool, n_architectures, generator, self._device)
        n_steps = count_steps(epochs, steps, lambda: size(batches, "batches")[1])
        classes = students.n_classes if n_classes is None else n_classes
        self.teacher = teacher

        def examples() -> Iterator[Example]:
            for x, y, *given in endless(batches, "batches"):
                features = None
                if self.teacher_weight > 0:
                    features = checked_features(given[0]) if given else self._teach(x, classes)
                yield Example(x, y, features, classes, None)

        with evaluating(teacher):
            source = examples()
            first = next(source)
            projector = None
            if first.features is not None:
                projector = Projector(self.projector, first.features.shape[1], students)
            self._descend("pretrain", descent, n_steps, students, itertools.chain([first], source), projector)
        return self

    def tune(
        self,
        pool: Pool,
        tasks: Mapping[str, TaskData | tuple[Any, ...]],
        *,
        epochs: int | None = None,
        steps: int | None = None,
        n_architectures: int = 1,
        lr: float = 3e-4,
        weight_decay: float = 1e-2,
        warmup_fraction: float = 1 / 15,
        clip_norm: float = 5.0,
        amp: bool = False,
        callback: Callable[[Event], bool | None] | None = None,
    ) -> "TaskAwareLearngene":
        """Learn to start the networks of a pool for each of several tasks.

        At first predictions are those of pretraining, whatever the task: the modulation starts as the identity.

        Parameters
        ----------
        pool, n_architectures, lr, weight_decay, warmup_fraction, clip_norm, amp, callback
            As in ``pretrain``. Every network gets a head for the classes of the step's task.
        tasks : mapping
            Name -> ``TaskData``, or a tuple (batches, number of classes, embedding). Without any embedding the
            hypernetwork learns one start for all tasks; with one task that is the blind baseline LoGAH.
        epochs, steps : int
            How long to train, by one of both: passes over the batches of all tasks together, or steps.

        Returns
        -------
        TaskAwareLearngene
            This one.

        Raises
        ------
        InputError
            If tasks, labels or embeddings do not fit together; the message says which.
        ConvergenceError
            If the loss becomes NaN or infinite.
        """
        descent = Descent(lr, weight_decay, warmup_fraction, clip_norm, amp, callback)
        data = {name: TaskData(*task) for name, task in tasks.items()}
        self._check_tasks(data)
        generator = torch.Generator().manual_seed(self._seeds["tune"])
        students = Students(pool, n_architectures, generator, self._device)
        sizes = {name: size(task.batches, f"tasks[{name!r}]") for name, task in data.items()}
        n_steps = count_steps(epochs, steps, lambda: sum(n_batches for _, n_batches in sizes.values()))
        probabilities = task_probabilities([n_rows for n_rows, _ in sizes.values()], self.task_temperature)

        def examples() -> Iterator[Example]:
            names = list(data)
            sources = {name: endless(data[name].batches, f"tasks[{name!r}]") for name in names}
            while True:
                name = names[int(torch.multinomial(probabilities, 1, generator=generator))]
                x, y, *_ = next(sources[name])
                yield Example(x, y, None, data[name].n_classes, data[name].embedding)

        self._descend("tune", descent, n_steps, students, examples(), None)
        self.tasks |= {name: KnownTask(task.n_classes, task.embedding) for name, task in data.items()}
        return self

    @torch.no_grad()
    def initialize(
        self,
        model: nn.Module,
        task: str | Tensor | Iterable[Any] | None,
        *,
        example_inputs: Any,
        noise: float = 1e-5,
        strict: bool = True,
        follow: Literal["shapes", "data"] = "shapes",
    ) -> nn.Module:
        """Replace the parameters of a network by predicted ones, in place.

        Parameters
        ----------
        model : nn.Module
            A network of any size, also a ``PreTrainedModel`` of Hugging Face, with weights in memory.
        task : str, Tensor, iterable or None
            Name of a task tuned on; or an embedding; or batches of inputs, which the teacher of pretraining then embeds;
            or None for the start that pretraining taught.
        example_inputs
            Inputs that ``model`` runs on, to trace it: a tensor, a sequence of arguments, or a mapping of keyword
            arguments.
        noise : float
            Standard deviation of the Gaussian noise that is added, >= 0. A little breaks the ties between units that
            were predicted equal.
        strict : bool
            Raise if there is a parameter that cannot be predicted; else such parameters are left as they are.
        follow : {"shapes", "data"}
            How to trace it, as in ``computation_graph``: "data" for a model whose path depends on values.

        Returns
        -------
        nn.Module
            ``model``. ``last_report`` says what was predicted and what was kept.

        Raises
        ------
        ParameterError
            If ``task`` names a task that is not known.
        InputError
            If the embedding has the wrong size, the model another number of classes than the task, or no weights yet.
        UnsupportedModelError
            If ``strict`` and a parameter cannot be predicted.
        ConvergenceError
            If a prediction is not finite.

        Warns
        -----
        HeedfulWarning
            If the model has batch normalisation, whose running statistics are not predicted.
        """
        require_number(noise, "noise", low=0)
        if any(parameter.is_meta for parameter in model.parameters()):
            raise InputError(
                'The model is on the meta device and has no weights to replace. Call model.to_empty(device="cpu") first.'
            )
        embedding, n_classes = self._embedding_and_classes(task)
        graph = computation_graph(model, example_inputs, follow=follow)
        if None not in (n_classes, graph.n_classes) and n_classes != graph.n_classes:
            raise InputError(
                f"The model's head {graph.head!r} has {graph.n_classes} classes, the task {task!r} has {n_classes}. Build "
                f"the model with {n_classes} classes."
            )
        parameters = dict(model.named_parameters(remove_duplicate=False))
        kept = tuple(name for name in (*graph.kept, *self.hypernet.too_large(graph)) if name in parameters)
        if kept and strict:
            raise UnsupportedModelError(
                f"{len(kept)} parameters cannot be predicted: {', '.join(kept[:5])}{', …' * (len(kept) > 5)}. They are "
                "single scalars, or used in no way that is known, or not at all, or have a side beyond "
                f"max_side={self.hypernet.max_side}. strict=False leaves them as they are."
            )
        if any(name not in parameters for name in graph.kept):
            warnings.warn(
                "The running statistics of batch normalisation are not predicted. Run some batches through the model in "
                "train mode before you evaluate it.",
                HeedfulWarning,
                stacklevel=2,
            )
        if diverged := [name for name, weight in self.hypernet.named_parameters() if not weight.isfinite().all()]:
            raise ConvergenceError(  # before the first of the model's tensors is overwritten
                f"The hypernetwork has diverged: {diverged[0]} has entries that are NaN or infinite. Train it again with a "
                "lower lr or clip_norm. The model is as it was."
            )
        generator = torch.Generator().manual_seed(self._seeds["noise"])
        predicted = []
        for name, tensor in self.hypernet.predict(without(graph, kept), embedding):
            parameters[name].copy_(tensor)
            if noise > 0:
                drawn = torch.randn(tensor.shape, generator=generator)
                parameters[name].add_(drawn.to(parameters[name]), alpha=noise)
            predicted.append(name)
        self.last_report = InitializationReport(
            task=task if isinstance(task, str) else None,
            predicted=tuple(predicted),
            kept=kept,
            n_predicted=sum(parameters[name].numel() for name in predicted),
            n_kept=sum(parameters[name].numel() for name in kept),
        )
        return model

    @property
    def _device(self) -> torch.device:
        return self.hypernet.primitive.weight.device

    def _teach(self, x: Tensor, n_classes: int) -> Tensor:
        if self.teacher is None:
            raise ParameterError(
                f"teacher_weight={self.teacher_weight} needs a teacher, or batches (inputs, labels, features); got "
                "teacher=None and pairs. Give a teacher, or teacher_weight=0."
            )
        with torch.no_grad():
            features = checked_features(self.teacher(x))
        if features.shape[1] == n_classes:
            raise InputError(
                f"The teacher returns {n_classes} numbers per input, as many as there are classes: these look like "
                "logits. Give a function that returns the features before the head."
            )
        return features

    def _check_tasks(self, tasks: Mapping[str, TaskData]) -> None:
        if not tasks:
            raise InputError("tune needs at least one task; got none.")
        embedded = {name: task.embedding for name, task in tasks.items() if task.embedding is not None}
        if embedded and len(embedded) < len(tasks):
            missing = next(name for name in tasks if name not in embedded)
            raise InputError(
                f"Some tasks have an embedding and {missing!r} has none. Give one to all of them, or to none."
            )
        for name, task in tasks.items():
            require_number(task.n_classes, f"n_classes of task {name!r}", low=1, integer=True)
        for name, embedding in embedded.items():
            if not isinstance(embedding, Tensor) or embedding.ndim != 1 or not embedding.isfinite().all():
                came = f"shape {tuple(embedding.shape)}" if isinstance(embedding, Tensor) else type(embedding).__name__
                raise InputError(
                    f"The embedding of task {name!r} must be a tensor, a vector of finite numbers; got {came}. Take "
                    "task_embedding(teacher, batches)."
                )
            self.hypernet.add_task_modulation(len(embedding))

    def _descend(
        self,
        phase: str,
        descent: Descent,
        steps: int,
        students: Students,
        examples: Iterator[Example],
        projector: Projector | None,
    ) -> None:
        with self._training(phase) as parameters:
            parameters = [*parameters, *(projector.parameters if projector is not None else ())]
            descent.run(phase, steps, parameters, examples, lambda example: self._loss(students, example, projector))

    @contextlib.contextmanager
    def _training(self, phase: str) -> Iterator[list[nn.Parameter]]:
        """The parameters that a phase changes; the others need no gradient meanwhile."""
        named = dict(self.hypernet.named_parameters())
        frozen = [
            parameter
            for name, parameter in named.items()
            if phase == "tune" and self.trainable == "task" and not ("modulation" in name or name.startswith("decoder"))
        ]
        for parameter in frozen:
            parameter.requires_grad_(False)
        try:
            yield [parameter for parameter in named.values() if parameter.requires_grad]
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)

    def _loss(self, students: Students, example: Example, projector: Projector | None) -> dict[str, Tensor]:
        """The loss and its terms, means over the step's students."""
        drawn = students.draw(example.n_classes, projector.n_predicted if projector is not None else None)
        predictions = self.hypernet([student.graph for student in drawn], example.task)
        rows = [
            self._loss_of(student, weights, example, projector)
            for student, weights in zip(drawn, predictions, strict=True)
        ]
        return {name: torch.stack([row[name] for row in rows]).mean() for name in rows[0]}

    def _loss_of(
        self, student: Student, weights: dict[str, Tensor], example: Example, projector: Projector | None
    ) -> dict[str, Tensor]:
        norm = torch.stack(torch._foreach_norm(list(weights.values()))).sum()
        predicted_matrix = weights.pop(PROJECTOR, None)
        logits, hidden = student.run(weights, example.x)
        loss = entropy = cross_entropy(logits, example.y, label_smoothing=self.label_smoothing)
        terms = {"cross_entropy": entropy, "norm": norm}
        if projector is not None and example.features is not None:
            terms["matching"] = feature_matching(
                projector(hidden, predicted_matrix),
                example.features,
                n_classes=example.n_classes,
                temperature=self.temperature,
            )
            loss = self.teacher_weight * terms["matching"] + (1 - self.teacher_weight) * entropy
        return {"loss": loss + self.norm_weight * norm, **terms}

    def _embedding_and_classes(self, task: Any) -> tuple[Tensor | None, int | None]:
        if task is None or isinstance(task, Tensor):
            return task, None
        if isinstance(task, str):
            if task not in self.tasks:
                known = ", ".join(map(repr, self.tasks)) or "none, since tune has not run"
                raise ParameterError(
                    f"This learngene was not tuned on a task {task!r}. It knows {known}. For another task give its "
                    "embedding: task_embedding(teacher, batches)."
                )
            return self.tasks[task].embedding, self.tasks[task].n_classes
        if isinstance(task, np.ndarray) or not isinstance(task, Iterable):
            raise InputError(
                "task must be the name of a task, an embedding (a tensor), batches of inputs, or None; got "
                f"{type(task).__name__}."
            )
        if self.teacher is None:
            raise ParameterError(
                "Batches can be embedded only by the teacher of pretraining, which a saved learngene does not hold. Give "
                "task_embedding(teacher, batches)."
            )
        return task_embedding(self.teacher, task), None

    def _to_saved(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        arrays = {f"hypernet.{name}": value.float().cpu().numpy() for name, value in self.hypernet.state_dict().items()}
        arrays |= {
            f"embedding.{name}": task.embedding.detach().float().cpu().numpy()
            for name, task in self.tasks.items()
            if task.embedding is not None
        }
        settings = {name: getattr(self, name) for name in _SETTINGS}
        meta = {
            "config": {**self.hypernet.settings, "task_dim": self.hypernet.task_dim},
            "settings": settings,
            "seeds": self._seeds,
            "tasks": {name: task.n_classes for name, task in self.tasks.items()},
        }
        return arrays, meta

    @classmethod
    def _from_saved(cls, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> "TaskAwareLearngene":
        learngene = cls(meta["config"], **meta["settings"])
        learngene._seeds = {name: int(meta["seeds"][name]) for name in learngene._seeds}
        state = {name: torch.from_numpy(arrays[f"hypernet.{name}"]) for name in learngene.hypernet.state_dict()}
        try:
            learngene.hypernet.load_state_dict(state)
        except RuntimeError as error:  # a shape that the settings do not give
            raise ValueError(str(error)) from error
        for name, n_classes in meta["tasks"].items():
            embedding = arrays.get(f"embedding.{name}")
            learngene.tasks[name] = KnownTask(n_classes, None if embedding is None else torch.from_numpy(embedding))
        return learngene


_SETTINGS = (
    "teacher_weight",
    "temperature",
    "label_smoothing",
    "norm_weight",
    "task_temperature",
    "trainable",
    "projector",
)
