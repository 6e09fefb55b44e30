"""What a run of training is made of: batches, the losses and probabilities of the method, and the descent."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import kl_div

from heedful._results import Event, report_progress
from heedful._validation import require_number
from heedful.errors import ConvergenceError, InputError, ParameterError
from heedful.merge.tal._students import Students

_LOWEST_LR = 1e-5
_LOWEST_SCALE = 1024.0


def feature_matching(
    student: Float[Tensor, "n features"], teacher: Float[Tensor, "n features"], *, n_classes: int, temperature: float
) -> Float[Tensor, ""]:
    """T² KL(softmax(t/T) ‖ softmax(s/T)) / (n · n_classes), over the dimensions of the features.

    Zero exactly where the features of each row differ by a constant. For large T it tends to
    Σ ‖centred(t − s)‖² / (2 · features · n · n_classes).
    """
    target = (teacher / temperature).log_softmax(dim=1)
    divergence = kl_div((student / temperature).log_softmax(dim=1), target, reduction="sum", log_target=True)
    return temperature**2 * divergence / (len(student) * n_classes)


def task_probabilities(sizes: Sequence[int], temperature: float) -> Float[Tensor, " tasks"]:
    """Probabilities ∝ size^{1/temperature}: proportional at 1, uniform at ``math.inf``."""
    weights = torch.tensor(sizes, dtype=torch.float64) ** (1 / temperature)
    return weights / weights.sum()


def learning_rate(step: int, steps: int, *, lr: float, warmup_fraction: float) -> float:
    """Of one step in ``steps``: a straight rise from 1e-5 during the warm-up, then half a cosine from ``lr`` to 0."""
    warmup = int(steps * warmup_fraction)
    if step < warmup:
        start = min(_LOWEST_LR, lr)
        return start + (lr - start) * step / warmup
    return lr * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2


class Example(NamedTuple):
    """One step's batch: inputs, labels, teacher's features, number of classes, task embedding."""

    x: Tensor
    y: Int[Tensor, " n"]
    features: Tensor | None
    n_classes: int
    task: Tensor | None

    def to(self, device: torch.device) -> "Example":
        rows = {len(part) for part in (self.x, self.y, self.features) if part is not None}
        if self.y.ndim != 1 or len(rows) > 1:
            shapes = ", ".join(str(tuple(part.shape)) for part in (self.x, self.y, self.features) if part is not None)
            raise InputError(
                "Batches must be (inputs, labels), perhaps with features behind them, and have a label for each input; "
                f"got shapes {shapes}."
            )
        if self.y.numel() and not 0 <= int(self.y.min()) <= int(self.y.max()) < self.n_classes:
            raise InputError(
                f"Labels run from {int(self.y.min())} to {int(self.y.max())}; with {self.n_classes} classes they must "
                f"be 0 to {self.n_classes - 1}."
            )
        return self._replace(
            x=self.x.to(device),
            y=self.y.to(device),
            features=None if self.features is None else self.features.to(device),
        )


@dataclasses.dataclass(frozen=True)
class Descent:
    """How to descend: AdamW and what goes with it."""

    lr: float
    weight_decay: float
    warmup_fraction: float
    clip_norm: float
    amp: bool
    callback: Callable[[Event], bool | None] | None

    def __post_init__(self):
        require_number(self.lr, "lr", low=0, open_low=True)
        require_number(self.weight_decay, "weight_decay", low=0)
        require_number(self.warmup_fraction, "warmup_fraction", low=0, high=1)
        require_number(self.clip_norm, "clip_norm", low=0, open_low=True)

    def run(
        self,
        phase: str,
        steps: int,
        parameters: list[nn.Parameter],
        examples: Iterator[Example],
        terms_of: Callable[[Example], dict[str, Tensor]],
    ) -> None:
        """Change ``parameters`` by a step for each example; of what ``terms_of`` returns, "loss" is descended on."""
        device = parameters[0].device
        if self.amp and device.type != "cuda":
            raise ParameterError(f"amp=True needs the hypernetwork on CUDA; it is on {device}.")
        scaler = torch.amp.GradScaler("cuda", enabled=self.amp)
        optimizer = torch.optim.AdamW(parameters, lr=self.lr, weight_decay=self.weight_decay)
        for step, example in enumerate(itertools.islice(examples, steps)):
            rate = learning_rate(step, steps, lr=self.lr, warmup_fraction=self.warmup_fraction)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16, enabled=self.amp):
                terms = terms_of(example.to(device))
            values = {name: float(term.detach()) for name, term in terms.items()}
            if not self.amp:  # else the scaler skips the step
                _require_finite(values, f"{phase}, step {step + 1}")
            scaler.scale(terms["loss"]).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, self.clip_norm)
            scaler.step(optimizer)
            scaler.update()
            if self.amp and scaler.get_scale() < _LOWEST_SCALE:
                scaler.update(_LOWEST_SCALE)
            event = Event(phase, step + 1, steps, values)
            report_progress(event)
            if self.callback is not None and self.callback(event):
                break


class Projector:
    """Brings the features of students to the width of the teacher's, as ``TaskAwareLearngene`` says of ``projector``."""

    def __init__(self, kind: str, n_features: int, students: Students):
        self.students, self.n_features = students, n_features
        self.n_predicted = n_features if kind == "predicted" else None
        self.parameters = [nn.Parameter(self._draw(students.widest))] if kind == "shared" else []

    def __call__(self, hidden: Float[Tensor, "n width"], predicted: Tensor | None) -> Float[Tensor, "n features"]:
        width = hidden.shape[1]
        if predicted is not None:
            return hidden @ predicted.T
        return hidden @ (self.parameters[0][:width] if self.parameters else self._draw(width))

    def _draw(self, width: int) -> Float[Tensor, "width features"]:
        bound = width**-0.5  # as a linear layer starts
        matrix = torch.empty(width, self.n_features).uniform_(-bound, bound, generator=self.students.generator)
        return matrix.to(self.students.device)


def _require_finite(values: Mapping[str, float], when: str) -> None:
    bad = [name for name, value in values.items() if not math.isfinite(value)]
    if bad:
        raise ConvergenceError(
            f"{when}: {', '.join(bad)} became NaN or infinite. Look for such entries in the batch and in the teacher's "
            "features, or lower lr or clip_norm."
        )


def checked_features(features: Any) -> Float[Tensor, "n features"]:
    """What a teacher gave, if it is what a teacher must give."""
    if not isinstance(features, Tensor) or features.ndim != 2:
        came = f"shape {tuple(features.shape)}" if isinstance(features, Tensor) else f"a {type(features).__name__}"
        raise InputError(
            f"The teacher must return features of shape (n, d), a tensor; got {came}. Give a function that returns the "
            "pooled features before the head."
        )
    if not features.isfinite().all():
        raise InputError("The teacher's features have entries that are NaN or infinite. Check its inputs and weights.")
    return features


@contextlib.contextmanager
def evaluating(teacher: Any) -> Iterator[None]:
    """Put a teacher that is a module in eval mode meanwhile."""
    modules = [module for module in teacher.modules() if module.training] if isinstance(teacher, nn.Module) else []
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module in modules:
            module.training = True


def count_steps(epochs: int | None, steps: int | None, per_epoch: Callable[[], int]) -> int:
    """Steps to take, of which exactly one of both says how many."""
    if epochs is not None and steps is None:
        require_number(epochs, "epochs", low=1, integer=True)
        return epochs * per_epoch()
    if steps is not None and epochs is None:
        require_number(steps, "steps", low=1, integer=True)
        return steps
    raise ParameterError(f"Give either epochs or steps; got epochs={epochs!r}, steps={steps!r}.")


def size(batches: Iterable[Any], name: str) -> tuple[int, int]:
    """Rows and batches of one pass: as a loader says, else counted."""
    _require_iterable(batches, name)
    try:
        n_rows, n_batches = len(batches.dataset), len(batches)  # type: ignore[attr-defined, arg-type]
    except (AttributeError, TypeError):
        sizes = [len(y) for _, y, *_ in batches]
        n_rows, n_batches = sum(sizes), len(sizes)
    if not n_rows or not n_batches:
        raise InputError(f"{name} has no batches.")
    return n_rows, n_batches


def endless(batches: Iterable[Any], name: str) -> Iterator[Any]:
    """Pass after pass."""
    _require_iterable(batches, name)
    while True:
        n = 0
        for n, batch in enumerate(batches, start=1):  # noqa: B007
            yield batch
        if n == 0:
            raise InputError(f"{name} has no batches.")


def _require_iterable(batches: Any, name: str) -> None:
    if iter(batches) is batches:
        raise InputError(
            f"{name} can be iterated only once, and training passes over it again and again. Give a list or a DataLoader."
        )
