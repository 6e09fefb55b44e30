"""Do diagonals chosen by learned importances train as well as single weights do, and run faster?

Every arm trains the same network from the same initial weights on the same mini-batches, with Adam and the same learning
rates to choose from, for the same number of steps. Sparse arms have equally many weights in each layer, K diagonals'
worth; they differ in where these lie and how the places are found. The final sparse layers are then timed on one core: as
dense, as compressed rows (CSR), or as diagonals, whatever the arm's pattern allows. Operations and bytes are computed.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, linear
from torch.optim import Adam

from heedful import data
from heedful._machine import time_call
from heedful.compress import SET, DiagonalLinear, DiagonalRigL, DynaDiag, RigL, StaticMask, diagonal_matmul
from heedful.compress._costs import Passes, layer_flops, mean_share, stored_bytes, training_passes
from heedful.compress._sparsity import csr_matrix, hear_beta_warning, select_layers
from heedful.errors import InputError
from heedful.evidence import Arm, Budget, Claim, Metric, Outcome, Study, Task
from heedful.studies._byte_llama import text_bytes, windows
from heedful.studies._small_nets import ByteTransformer, mixer, mlp
from heedful.studies._sparse_training import Rows, Score, Split, Supervised, digits, fashion, mask_generator, train

Layout = Literal["dense", "csr", "diagonal"]

FREEZE_AT = 0.75  # of training: when diagonals that are learned become fixed
LEAST_INTERVAL = 5  # steps that a grown weight has, to become worth keeping
LEARNING_RATES = [3e-3, 1e-2, 3e-2]
TIMINGS = {1: 50, 16: 20, 256: 5}  # by batch size, how often each layer is timed


@runtime_checkable
class DiagonalTask(Protocol):
    """What the arms train, and are scored by.

    For tensors in memory, ``DiagonalTraining`` is one already::

        # my_tasks.py
        import functools

        from heedful.studies._small_nets import mlp
        from heedful.studies.dynadiag import DiagonalTraining


        def build(*, split, seed):
            x, y = my_data()  # float32 and int64 tensors; keep a test set apart, and split the rest by the seed
            held_out_x, held_out_y = my_validation(x, y, seed) if split == "validation" else my_test()
            return DiagonalTraining(
                build_network=functools.partial(mlp, (64, 240, 240, 10)),  # called with seed=
                inputs=x,
                targets=y,
                held_out_inputs=held_out_x,
                held_out_targets=held_out_y,
                batch_size=50,
                split=split,
                sparsity=0.9,
                steps=200,
            )

    ``sparsity`` is that of every sparse layer, and leaves whole diagonals: (1 − sparsity) max(out, in) is an integer.
    ``steps`` is how many training takes under a budget of portion 1.
    ``network(seed)`` is the network to train, new at every call, and ``dense_layers`` names the linear layers that stay
    dense in every arm, as ``exclude`` of ``DynaDiag`` does. ``batches(steps, seed)`` yields that many ``(inputs, targets)``,
    ``score(model)`` is taken on ``split``, which is what ``build`` was asked for; on "validation", where learning rates are
    chosen, nothing is timed. All of them give the same for the same seed.
    """

    split: Split
    dense_layers: Sequence[str]
    sparsity: float
    steps: int

    def network(self, seed: int) -> nn.Module: ...
    def batches(self, steps: int, seed: int) -> Iterable[tuple[Tensor, Tensor]]: ...
    def score(self, model: nn.Module) -> Score: ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DiagonalTraining(Supervised):
    """A ``DiagonalTask`` on tensors in memory."""

    sparsity: float
    steps: int


# Arms: where the weights that are left lie, and how the places are found.


def dense(task: DiagonalTask, *, budget: Budget, seed: int, lr: float) -> Outcome:
    """All weights."""
    return _run(task, budget, seed, lr, None, "dense", dense_steps=1.0)


def static_unstructured(task: DiagonalTask, *, budget: Budget, seed: int, lr: float) -> Outcome:
    """Single weights, drawn at random once."""
    return _run(task, budget, seed, lr, functools.partial(StaticMask, pattern="unstructured"), "csr")


def static_diagonal(task: DiagonalTask, *, budget: Budget, seed: int, lr: float) -> Outcome:
    """Diagonals, drawn at random once."""
    return _run(task, budget, seed, lr, functools.partial(StaticMask, pattern="diagonal"), "diagonal")


def rigl(task: DiagonalTask, *, budget: Budget, seed: int, lr: float) -> Outcome:
    """Single weights: small ones make way for those with a large gradient."""
    return _run(task, budget, seed, lr, _drop_and_grow(RigL, task, budget), "csr", dense_gradients=True)


def set_(task: DiagonalTask, *, budget: Budget, seed: int, lr: float) -> Outcome:
    """Single weights: small ones make way for others at random."""
    return _run(task, budget, seed, lr, _drop_and_grow(SET, task, budget), "csr")


def diag_heuristic(task: DiagonalTask, *, budget: Budget, seed: int, lr: float) -> Outcome:
    """Diagonals: small ones make way for those with a large gradient."""
    return _run(task, budget, seed, lr, _drop_and_grow(DiagonalRigL, task, budget), "diagonal", dense_gradients=True)


def dynadiag(task: DiagonalTask, *, budget: Budget, seed: int, lr: float) -> Outcome:
    """Diagonals with learned importances, of which the largest are computed."""
    return _run(task, budget, seed, lr, _LEARNED, "diagonal")


def dynadiag_ste(task: DiagonalTask, *, budget: Budget, seed: int, lr: float) -> Outcome:
    """The same with importances that select, and scale nothing."""
    return _run(task, budget, seed, lr, functools.partial(_LEARNED, mask_values="ste"), "diagonal")


def dynadiag_soft(task: DiagonalTask, *, budget: Budget, seed: int, lr: float) -> Outcome:
    """The same with all diagonals computed, by their importances, until they are fixed."""
    driver = functools.partial(_LEARNED, selection="soft")
    return _run(task, budget, seed, lr, driver, "diagonal", dense_steps=FREEZE_AT)


_LEARNED = functools.partial(DynaDiag, freeze_at=FREEZE_AT)


def _drop_and_grow(kind: Callable[..., RigL], task: DiagonalTask, budget: Budget) -> Callable[..., RigL]:
    interval = max(LEAST_INTERVAL, _steps(task, budget) // budget.adaptations)
    return functools.partial(kind, interval=interval)


def _steps(task: DiagonalTask, budget: Budget) -> int:
    return max(1, round(budget.portion * task.steps))


def _run(
    task: DiagonalTask,
    budget: Budget,
    seed: int,
    lr: float,
    driver: Callable[..., Any] | None,
    layout: Layout,
    *,
    dense_steps: float = 0.0,
    dense_gradients: bool = False,
) -> Outcome:
    """Train, score, count and, on the test split, time.

    ``dense_steps`` is the share of steps with dense passes. With ``dense_gradients`` so is the pass to the weight where the
    driver adapts.
    """
    network = task.network(seed)
    layers = _sparse_layers(task, network)
    if driver is not None:
        driver = functools.partial(driver, sparsity=task.sparsity, generator=mask_generator(seed))
    steps = _steps(task, budget)
    trained = train(task, steps=steps, seed=seed, make_optimizer=functools.partial(Adam, lr=lr), make_driver=driver)
    density = mean_share(1 - task.sparsity, dense_steps)
    adapted = trained.driver.stats().adaptations / steps if dense_gradients else 0.0
    passes = Passes(density, density, mean_share(density, adapted))
    score = task.score(trained.model)
    metrics = {"accuracy": score.accuracy, "bits": score.bits}
    if task.split == "test":
        metrics |= _forward_ms([trained.model.get_submodule(name) for name in layers], layout, task.sparsity)
    costs = {"steps": steps} | _costs(task, network, seed, passes, layout)
    return Outcome(metrics=metrics, costs=costs, curves={"training loss": trained.losses})


def _sparse_layers(task: DiagonalTask, network: nn.Module) -> dict[str, nn.Linear]:
    """The layers that arms make sparse; a pattern that would not give arms equally many weights is refused."""
    layers: dict[str, Any] = select_layers(network, exclude=task.dense_layers)
    for name, layer in layers.items():
        k = (1 - task.sparsity) * max(layer.weight.shape)
        if abs(k - round(k)) > 1e-6 or round(k) < 1:
            raise InputError(
                f"Sparsity {task.sparsity} leaves {k:g} diagonals of the {tuple(layer.weight.shape)} weight of layer "
                f"{name!r}. Choose a width or a sparsity that leaves a whole number, so that arms have equally many weights."
            )
    return layers


def _costs(task: DiagonalTask, network: nn.Module, seed: int, passes: Passes, layout: Layout) -> dict[str, float]:
    """Operations of a step, all linear layers together, and bytes of the sparse ones when training is over."""
    layers = _sparse_layers(task, network)
    (batch,) = task.batches(1, seed)
    flops = training_passes(layer_flops(network, batch[0]), dict.fromkeys(layers, passes))
    weights = [layer.weight for layer in layers.values()]
    stored = [stored_bytes(w.shape, round((1 - task.sparsity) * w.numel()), layout=layout) for w in weights]
    return {
        "gflop_a_step": sum(flops) / 1e9,
        "weights_kib": sum(one.values for one in stored) / 1024,
        "indices_kib": sum(one.indices for one in stored) / 1024,
    }


def _forward_ms(layers: Sequence[Any], layout: Layout, sparsity: float) -> dict[str, float]:
    """Milliseconds of all sparse layers together, each by itself, at three sizes of a batch."""
    products = [_product(layer, layout, sparsity) for layer in layers]
    metrics = {}
    for batch_size, n_timings in TIMINGS.items():
        calls = [
            functools.partial(product, torch.randn(batch_size, layer.in_features))
            for product, layer in zip(products, layers, strict=True)
        ]
        with torch.no_grad():
            seconds = sum(time_call(call, n_timings=n_timings, warmup=3).median for call in calls)
        metrics[f"ms_batch_{batch_size}"] = 1000 * seconds
    return metrics


def _product(layer: Any, layout: Layout, sparsity: float) -> Callable[[Tensor], Tensor]:
    """From inputs, (batch, in), to outputs without bias; CSR may give them as (out, batch) or (out,), which is its fastest."""
    if layout == "diagonal":
        if not isinstance(layer, DiagonalLinear):
            layer = DiagonalLinear.from_linear(layer, sparsity=sparsity)
            layer.freeze()
        values, offsets = layer.values.detach(), layer.offsets()
        return lambda x: diagonal_matmul(x, values, offsets, layer.out_features)
    weight: Tensor = layer.weight.detach()
    if layout == "dense":
        return lambda x: linear(x, weight)
    hear_beta_warning()
    rows = weight.to_sparse_csr()
    # MKL takes indices of 32 bits: others are converted at every call, for a third of the time of a product with one row.
    rows = csr_matrix(rows.crow_indices().int(), rows.col_indices().int(), rows.values(), rows.shape)
    return lambda x: rows @ (x[0] if len(x) == 1 else x.mT)


# Tasks.

_MLP = functools.partial(mlp, (64, 240, 240, 10))
_MIXER = functools.partial(mixer, 10, patches=16, pixels=49, width=120, hidden=240, token_hidden=40, n_blocks=2)
_WIDE = functools.partial(mlp, (196, 768, 3072, 768, 10))  # between them, the layers of a block of ViT-B/16
_LENGTH = 64
_GPT = functools.partial(ByteTransformer, length=_LENGTH, width=80, n_heads=4, n_blocks=2)


def digits_mlp(*, split: Split, seed: int, sparsity: float) -> DiagonalTraining:
    """Digits by a perceptron with one sparse layer, 240 × 240."""
    rows = digits(split=split, seed=seed)._asdict()
    return DiagonalTraining(**rows, build_network=_MLP, batch_size=50, split=split, sparsity=sparsity, steps=200)


def fashion_mixer(*, split: Split, seed: int, sparsity: float) -> DiagonalTraining:
    """Fashion-MNIST, in 16 patches of 7 × 7 pixels, by an MLP-Mixer of two blocks."""
    rows = fashion(_patches, split=split, seed=seed, n=4800)._asdict()
    return DiagonalTraining(**rows, build_network=_MIXER, batch_size=16, split=split, sparsity=sparsity, steps=300)


def fashion_wide(*, split: Split, seed: int, sparsity: float) -> DiagonalTraining:
    """Fashion-MNIST at half its size, by a perceptron whose sparse layers have 768 × 3072 weights.

    Training is short: the task is there for the time that layers of this size take.
    """
    rows = fashion(_halved, split=split, seed=seed, n=960)._asdict()
    return DiagonalTraining(**rows, build_network=_WIDE, batch_size=32, split=split, sparsity=sparsity, steps=30)


def sotu_gpt(*, split: Split, seed: int, sparsity: float) -> DiagonalTraining:
    """The next byte of addresses of presidents, by a transformer of two blocks; all but its head is sparse."""
    rows = [
        windows(text_bytes(part), n, _LENGTH + 1, generator=torch.Generator().manual_seed(draw))
        for part, n, draw in (("training", 1000, seed), (split, 250, 0))
    ]
    data = Rows(*(part for ids in rows for part in (ids[:, :-1], ids[:, 1:])))._asdict()
    return DiagonalTraining(
        **data, build_network=_GPT, batch_size=4, split=split, sparsity=sparsity, steps=250, dense_layers=("last",)
    )


def _patches(images: Tensor) -> Tensor:
    return images.unflatten(2, (4, 7)).unflatten(1, (4, 7)).transpose(2, 3).reshape(len(images), 16, 49)


def _halved(images: Tensor) -> Tensor:
    return avg_pool2d(images, 2).flatten(1)


def _task(build: Callable[..., DiagonalTraining], source: str, sparsity: float) -> Task:
    return Task(functools.partial(build, sparsity=sparsity), data=data.checksums(source))


_TASKS = {
    "fashion_mixer_90": _task(fashion_mixer, "fashion_mnist", 0.9),
    "sotu_gpt_90": _task(sotu_gpt, "sotu", 0.9),
    "fashion_wide_90": _task(fashion_wide, "fashion_mnist", 1 - 308 / 3072),
    "digits_mlp_90": _task(digits_mlp, "digits", 0.9),
    "digits_mlp_95": _task(digits_mlp, "digits", 0.95),
}
_AT_90 = ("fashion_mixer_90", "sotu_gpt_90", "digits_mlp_90")


def _arm(run: Callable[..., Outcome], *, aware: bool = False) -> Arm:
    return Arm(run, grid={"lr": LEARNING_RATES}, aware=aware)


study = Study(
    slug="dynadiag",
    question="Do diagonals chosen by learned importances train as well as single weights do, and run faster?",
    tasks=_TASKS,
    arms={
        "dense": _arm(dense),
        "static_unstructured": _arm(static_unstructured),
        "static_diagonal": _arm(static_diagonal),
        "rigl": _arm(rigl),
        "set": _arm(set_),
        "diag_heuristic": _arm(diag_heuristic),
        "dynadiag": _arm(dynadiag, aware=True),
        "dynadiag_ste": _arm(dynadiag_ste, aware=True),
        "dynadiag_soft": _arm(dynadiag_soft, aware=True),
    },
    metrics=[
        Metric("accuracy", "%", better="higher"),
        Metric("bits", "bits", better="lower"),
        *(Metric(f"ms_batch_{size}", "ms", better="lower", timing=True) for size in TIMINGS),
    ],
    claims=[
        Claim("dynadiag", beats="rigl", on="accuracy", margin=0.5, tasks=_AT_90),
        Claim("dynadiag", beats="diag_heuristic", on="accuracy", tasks=_AT_90),
        Claim("dynadiag", beats="static_diagonal", on="accuracy", tasks=_AT_90),
        *(
            Claim("dynadiag", beats=other, on=f"ms_batch_{size}", tasks=("fashion_wide_90",))
            for size in (1, 16)
            for other in ("rigl", "dense")
        ),
        *(
            Claim("dynadiag", beats=other, on=f"ms_batch_{size}", tasks=_AT_90, exploratory=True)
            for size in (1, 16)
            for other in ("rigl", "dense")
        ),
        *(
            Claim("dynadiag", beats=other, on="bits", tasks=("sotu_gpt_90",), exploratory=True)
            for other in ("rigl", "diag_heuristic", "static_diagonal")
        ),
    ],
    budgets={
        "quick": Budget(seeds=3, tasks=("digits_mlp_90",), portion=0.6, adaptations=20),
        "full": Budget(seeds=5, portion=1.0, adaptations=20),
    },
    protocol=DiagonalTask,
    unit="steps",
)
