"""Does changing only blocks that are calm, and only where it promises to pay, find better N:M masks for less training?

Every arm trains the same network from the same initial weights on the same mini-batches, by SGD with momentum, weight decay
and a cosine schedule, with the same learning rates to choose from; ``dense`` is the ceiling, and all others end with the
same pattern. They differ in how masks change, and in which passes of a training step are dense. Sparse layers start with
weights that are scaled up, in every arm, so that they put out about what dense ones would.

Budgets are equal in one of two units, as the name of the task says: ``…_steps`` gives every arm the same number of steps,
``…_flops`` the same number of floating-point operations, so that sparser training goes on for longer. They are counted as
hardware for N:M sparsity would need them, with the pass back to the inputs dense, since it goes through the transposed
weight (but for Bi-Mask, which sees to that). The report gives the kinder count too, with that pass sparse.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d
from torch.optim import SGD

from heedful import data
from heedful.compress import BAME, SRSTE, BiMask, NMRigL, StaticMask, training_flops
from heedful.compress.bame.flops import Method
from heedful.compress.bame.swaps import Oscillation, SwapScores
from heedful.evidence import Arm, Budget, Claim, Metric, Outcome, Study, Task
from heedful.studies._small_nets import mlp, resnet8
from heedful.studies._sparse_training import Driver, Score, Split, Supervised, digits, fashion, mask_generator, train

Phases = Mapping[Method, float]
Equal = Literal["steps", "flops"]

END, WARMUP = 0.75, 0.25  # of training: when masks become fixed, and when SR-STE gives way to BAME in ``bame_warm25``
LEARNING_RATES = [0.02, 0.06, 0.2]


@runtime_checkable
class NMTask(Protocol):
    """What the arms train, and are scored by.

    For tensors in memory, ``NMTraining`` is one already::

        # my_tasks.py
        import functools

        from heedful.studies._small_nets import mlp
        from heedful.studies.bame import NMTraining


        def build(*, split, seed):
            x, y = my_data()  # float32 and int64 tensors; keep a test set apart, and split the rest by the seed
            held_out_x, held_out_y = my_validation(x, y, seed) if split == "validation" else my_test()
            return NMTraining(
                build_network=functools.partial(mlp, (64, 64, 64, 10)),  # called with seed=
                inputs=x,
                targets=y,
                held_out_inputs=held_out_x,
                held_out_targets=held_out_y,
                batch_size=50,
                split=split,
                n=2,
                m=4,
                equal="steps",
            )

    The sparse layers keep ``n`` of every ``m`` inputs, and ``equal`` is what the budget gives every arm the same number of.
    ``network(seed)`` is the network to train, new at every call, and ``dense_layers`` names the layers that stay dense in
    every arm, as ``exclude`` of ``BAME`` does. ``batches(steps, seed)`` yields that many ``(inputs, targets)``,
    ``score(model)`` is taken on ``split``, which is what ``build`` was asked for; on "validation", where learning rates are
    chosen, masks are not watched. All of them give the same for the same seed.
    """

    split: Split
    dense_layers: Sequence[str]
    n: int
    m: int
    equal: Equal

    def network(self, seed: int) -> nn.Module: ...
    def batches(self, steps: int, seed: int) -> Iterable[tuple[Tensor, Tensor]]: ...
    def score(self, model: nn.Module) -> Score: ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class NMTraining(Supervised):
    """An ``NMTask`` on tensors in memory."""

    n: int
    m: int
    equal: Equal


# Arms: how masks change, and for what share of the steps training costs what.


def dense(task: NMTask, *, budget: Budget, seed: int, lr: float) -> Outcome:
    """No mask."""
    return _run(task, budget, seed, lr, None, {"dense": 1.0})


def static(task: NMTask, *, budget: Budget, seed: int, lr: float) -> Outcome:
    """A mask drawn at random once."""
    pattern = f"{task.n}:{task.m}"
    driver = functools.partial(StaticMask, pattern=pattern, generator=mask_generator(seed))
    return _run(task, budget, seed, lr, driver, {"static": 1.0})


def sr_ste(task: NMTask, *, budget: Budget, seed: int, lr: float) -> Outcome:
    """The largest weights of each block anew at every step; the pass to the weight is dense."""
    return _run(
        task, budget, seed, lr, functools.partial(SRSTE, n=task.n, m=task.m, rescale_init=True), {"sr_ste": 1.0}
    )


def nm_rigl(task: NMTask, *, budget: Budget, seed: int, lr: float) -> Outcome:
    """In every block, now and then, the smallest weight makes way for the one with the largest gradient."""
    driver = functools.partial(NMRigL, n=task.n, m=task.m, interval=budget.interval, end=END)
    return _run(task, budget, seed, lr, driver, {"nm_rigl": END, "static": 1 - END})


def bi_mask(task: NMTask, *, budget: Budget, seed: int, lr: float) -> Outcome:
    """SR-STE with a second mask for the pass back to the inputs."""
    settings = {"interval": budget.interval, "generator": mask_generator(seed)}
    driver = functools.partial(BiMask, n=task.n, m=task.m, rescale_init=True, **settings)
    return _run(task, budget, seed, lr, driver, {"bi_mask": 1.0})


def bame(task: NMTask, *, budget: Budget, seed: int, lr: float) -> Outcome:
    """Swaps where they promise to lower the loss, in blocks that do not oscillate."""
    return _run(task, budget, seed, lr, _bame(BAME, task, budget), _BAME_PHASES)


def bame_no_obf(task: NMTask, *, budget: Budget, seed: int, lr: float) -> Outcome:
    """The same in all blocks: none freezes."""
    return _run(task, budget, seed, lr, _bame(BAME, task, budget, freeze_threshold=float("inf")), _BAME_PHASES)


def bame_no_gate(task: NMTask, *, budget: Budget, seed: int, lr: float) -> Outcome:
    """The same wherever there is a weight to grow, whatever it promises."""
    return _run(task, budget, seed, lr, _bame(_Ungated, task, budget), _BAME_PHASES)


def bame_warm25(task: NMTask, *, budget: Budget, seed: int, lr: float) -> Outcome:
    """SR-STE for the first quarter, then as ``bame``."""
    driver = _bame(BAME, task, budget, warmup="sr_ste", start=WARMUP)
    return _run(task, budget, seed, lr, driver, {"sr_ste": WARMUP, "bame": END - WARMUP, "static": 1 - END})


class _Ungated(BAME):
    """Every block that is not frozen swaps at every adaptation."""

    def _select(self, scores: SwapScores, state: Oscillation) -> Tensor:
        return scores.delta.isfinite() & ~state.frozen


_BAME_PHASES: Phases = {"bame": END, "static": 1 - END}


def _bame(kind: Callable[..., BAME], task: NMTask, budget: Budget, **settings: Any) -> Callable[..., Driver]:
    return functools.partial(kind, n=task.n, m=task.m, interval=budget.interval, end=END, **settings)


def _run(
    task: NMTask, budget: Budget, seed: int, lr: float, driver: Callable[..., Driver] | None, phases: Phases
) -> Outcome:
    """Spend the budget, then score; ``phases`` says by which method each share of the steps is counted."""
    flops = {dx: _flops_per_example(task, budget, seed, phases, dx) for dx in ("sparse", "dense")}
    steps = budget.steps
    if task.equal == "flops":
        unmasked = _flops_per_example(task, budget, seed, {"dense": 1.0}, "dense")
        steps = round(budget.dense_steps * unmasked / flops["dense"])
    revivals = _Revivals()
    trained = train(
        task,
        steps=steps,
        seed=seed,
        make_optimizer=functools.partial(SGD, lr=lr, momentum=0.9, weight_decay=5e-4),
        make_driver=driver,
        watch=revivals.watch if task.split == "test" else lambda driver: None,
    )
    metrics = {"accuracy": task.score(trained.model).accuracy}
    if task.split == "test":
        metrics["oscillating"] = revivals.percent
    examples = steps * len(next(iter(task.batches(1, seed)))[0])
    return Outcome(
        metrics=metrics,
        costs={
            "steps": steps,
            "gflop": examples * flops["sparse"] / 1e9,
            "gflop_dense_dx": examples * flops["dense"] / 1e9,
        },
        curves={"training loss": trained.losses},
    )


def _flops_per_example(
    task: NMTask, budget: Budget, seed: int, phases: Phases, dx: Literal["sparse", "dense"]
) -> float:
    """On average over training."""
    (inputs, _) = next(iter(task.batches(1, seed)))
    count = functools.partial(
        training_flops,
        task.network(seed),
        inputs.shape[1:],
        n=task.n,
        m=task.m,
        interval=budget.interval,
        dx=dx,
        exclude=task.dense_layers,
    )
    return sum(share * count(method=method).total for method, share in phases.items())


class _Revivals:
    """Of the weights that masks activate, the share that they had deactivated before."""

    def __init__(self) -> None:
        self._before: dict[str, Tensor] = {}
        self._pruned: dict[str, Tensor] = {}
        self._grown = self._revived = 0

    def watch(self, driver: Any) -> None:
        """Compare the masks of a driver with what they were when they were last looked at."""
        for name, mask in driver.masks().items():
            before = self._before.get(name, mask)
            pruned = self._pruned.setdefault(name, torch.zeros_like(mask))
            grown = mask & ~before
            self._grown += int(grown.sum())
            self._revived += int((grown & pruned).sum())
            pruned |= before & ~mask
            self._before[name] = mask.clone()

    @property
    def percent(self) -> float:
        return 100 * self._revived / max(1, self._grown)


# Tasks.

_MLP = functools.partial(mlp, (64, 64, 64, 64, 10))
_CNN = functools.partial(resnet8, 10, stem_stride=2)


def digits_mlp(*, split: Split, seed: int, n: int, m: int, equal: Equal) -> NMTraining:
    """Digits by a perceptron of four layers, of which the inner two are sparse."""
    rows = digits(split=split, seed=seed)._asdict()
    return NMTraining(**rows, build_network=_MLP, batch_size=50, split=split, n=n, m=m, equal=equal)


def fashion_cnn(*, split: Split, seed: int, n: int, m: int, equal: Equal) -> NMTraining:
    """Fashion-MNIST at half its size by a residual network of eight layers, of which the inner six are sparse."""
    rows = fashion(_halved, split=split, seed=seed, n=10_000)._asdict()
    return NMTraining(**rows, build_network=_CNN, batch_size=64, split=split, n=n, m=m, equal=equal)


def _halved(images: Tensor) -> Tensor:
    return avg_pool2d(images, 2)[:, None]


_BUILDERS = {"fashion_cnn": (fashion_cnn, "fashion_mnist"), "digits_mlp": (digits_mlp, "digits")}


def _task(name: str, n: int, m: int, equal: Equal) -> dict[str, Task]:
    build, source = _BUILDERS[name]
    task = Task(functools.partial(build, n=n, m=m, equal=equal), data=data.checksums(source))
    return {f"{name}_{n}_{m}_{equal}": task}


_TASKS = {
    **_task("fashion_cnn", 2, 4, "steps"),
    **_task("fashion_cnn", 2, 8, "steps"),
    **_task("fashion_cnn", 1, 16, "steps"),
    **_task("fashion_cnn", 1, 16, "flops"),
    **_task("digits_mlp", 1, 16, "steps"),
    **_task("digits_mlp", 1, 16, "flops"),
}
_STEPS = tuple(name for name in _TASKS if name.endswith("_steps"))
_FLOPS = tuple(name for name in _TASKS if name.endswith("_flops"))


def _arm(run: Callable[..., Outcome], *, aware: bool = False) -> Arm:
    return Arm(run, grid={"lr": LEARNING_RATES}, aware=aware)


study = Study(
    slug="bame",
    question="Does changing only calm blocks, and only where it promises to pay, find better N:M masks for less training?",
    tasks=_TASKS,
    arms={
        "dense": _arm(dense),
        "static": _arm(static),
        "sr_ste": _arm(sr_ste),
        "nm_rigl": _arm(nm_rigl),
        "bi_mask": _arm(bi_mask),
        "bame": _arm(bame, aware=True),
        "bame_no_obf": _arm(bame_no_obf, aware=True),
        "bame_no_gate": _arm(bame_no_gate, aware=True),
        "bame_warm25": _arm(bame_warm25, aware=True),
    },
    metrics=[Metric("accuracy", "%", better="higher"), Metric("oscillating", "%", better="lower")],
    claims=[
        Claim("bame", beats="sr_ste", on="accuracy", margin=0.5, tasks=_STEPS),
        Claim("bame", beats="static", on="accuracy", tasks=_STEPS),
        Claim("bame", beats="nm_rigl", on="accuracy", tasks=_STEPS),
        Claim("bame", beats="sr_ste", on="accuracy", tasks=_FLOPS),
        Claim("bame", beats="bame_no_obf", on="oscillating", tasks=_STEPS),
        Claim("bame", beats="bame_no_obf", on="accuracy", margin=0.5, tasks=_STEPS),
        *(
            Claim("bame", beats=other, on="accuracy", exploratory=True)
            for other in ("bi_mask", "bame_no_gate", "bame_warm25")
        ),
    ],
    budgets={
        "quick": Budget(
            seeds=3, tasks=("digits_mlp_1_16_steps", "digits_mlp_1_16_flops"), steps=150, dense_steps=75, interval=10
        ),
        "full": Budget(seeds=5, steps=300, dense_steps=120, interval=10),
    },
    protocol=NMTask,
    unit="steps or floating-point operations",
)
