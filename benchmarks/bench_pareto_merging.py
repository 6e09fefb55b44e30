"""What a Pareto set costs: to fit, to make a model of, to serve row by row, and to store.

python benchmarks/bench_pareto_merging.py
"""

import torch
from torch import Tensor, nn

from heedful.merge import ParetoSet, PreferenceLinear, fit_pareto_set, fit_tucker
from heedful.merge.pareto_merging._set import Factors
from heedful.merge.pareto_merging._tucker import dirichlet_second_moment
from measure import ratio, record, side_by_side

RANK = 16


def task_vectors(n_models: int, rows: int, columns: int, seed: int = 0) -> Tensor:
    """Matrices whose singular values fall like 1/i, over noise, as those of fine-tunes do."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (
        torch.linalg.qr(torch.randn(n_models, side, 128, generator=generator))[0] for side in (rows, columns)
    )
    noise = torch.randn(n_models, rows, columns, generator=generator)
    return left / torch.arange(1, 129) @ right.mT + 1e-3 * noise


def randomised_svd(matrix: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Halko, Martinsson and Tropp's, with two power iterations, as torch.svd_lowrank and scikit-learn do it."""
    sketch = matrix @ torch.randn(matrix.shape[1], RANK + 10, generator=generator)
    for _ in range(2):
        sketch = matrix @ torch.linalg.qr(matrix.T @ torch.linalg.qr(sketch)[0])[0]
    basis, _ = torch.linalg.qr(sketch)
    left, values, right = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
    return basis @ left[:, :RANK], values[:RANK], right[:RANK]


def fit_beside_svds(n_models: int) -> dict[str, float]:
    """One Tucker fit of K matrices of 768 × 768, and a randomised SVD of each."""
    deltas, generator = task_vectors(n_models, 768, 768), torch.Generator().manual_seed(0)
    contestants = {
        "fit_tucker": lambda: fit_tucker(deltas, RANK),
        "svds": lambda: [randomised_svd(matrix, generator) for matrix in deltas],
    }
    return ratio(side_by_side(contestants, rounds=7, warmup=1), "fit_tucker", "svds")


def adam(deltas: Tensor, moment: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same objective by gradients, from orthonormal bases and zero cores."""
    n_models, rows, columns = deltas.shape
    generator = torch.Generator().manual_seed(0)
    A, B = (torch.linalg.qr(torch.randn(side, RANK, generator=generator))[0] for side in (rows, columns))
    parts = [A.requires_grad_(), B.requires_grad_(), torch.zeros(n_models, RANK, RANK, requires_grad=True)]
    optimizer = torch.optim.Adam(parts, lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        error(*parts, deltas, moment).backward()
        optimizer.step()
    return tuple(part.detach() for part in parts)


def error(A: Tensor, B: Tensor, G: Tensor, deltas: Tensor, moment: Tensor) -> Tensor:
    gaps = (A @ G @ B.T - deltas).flatten(1)
    return (moment * (gaps @ gaps.T)).sum()


def fit_beside_adam() -> dict[str, float]:
    """2000 steps of Adam reach at best what the closed form does: its error, relative to ours, is told as well."""
    deltas = task_vectors(2, 384, 384)
    moment = dirichlet_second_moment(2).float()
    ours, theirs = fit_tucker(deltas, RANK), adam(deltas, moment, 2000)
    errors = [float(error(*parts, deltas, moment)) for parts in (ours[:3], theirs)]
    assert errors[0] <= errors[1] * (1 + 1e-4), "Adam found a lower error than the closed form"
    contestants = {"fit_tucker": lambda: fit_tucker(deltas, RANK), "adam": lambda: adam(deltas, moment, 2000)}
    timed = ratio(side_by_side(contestants, rounds=3, warmup=0), "adam", "fit_tucker")
    return timed | {"error_of_adam_to_ours": errors[1] / errors[0]}


def transformer_set(n_layers: int = 14) -> ParetoSet:
    """About 100 M parameters in matrices of 768 × 768 and 768 × 3072, two models."""
    generator = torch.Generator().manual_seed(0)
    shapes = {}
    for layer in range(n_layers):
        shapes |= {f"{layer}.{name}": (768, 768) for name in ("q", "k", "v", "o")}
        shapes |= {f"{layer}.up": (3072, 768), f"{layer}.down": (768, 3072)}
    base = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    factors = {
        name: Factors(
            torch.randn(c, RANK, generator=generator),
            torch.randn(d, RANK, generator=generator),
            torch.randn(2, RANK, RANK, generator=generator),
        )
        for name, (c, d) in shapes.items()
    }
    return ParetoSet(("a", "b"), base, factors)


class Matrices(nn.Module):
    def __init__(self, state: dict[str, Tensor]):
        super().__init__()
        for name, tensor in state.items():
            self.register_buffer(name.replace(".", "_"), tensor.clone())


def materialising() -> dict[str, float]:
    """Writing the model for a new preference into a module, and copying one model's weights into it."""
    pareto = transformer_set()
    flat = ParetoSet(
        pareto.names,
        {name.replace(".", "_"): tensor for name, tensor in pareto.base.items()},
        {name.replace(".", "_"): parts for name, parts in pareto.factors.items()},
    )
    module = Matrices(dict(pareto.base))
    shares = iter(range(1, 10_000))

    def apply() -> None:
        share = next(shares) / 10_000
        flat.apply(module, [share, 1 - share])

    contestants = {"apply": apply, "copy": lambda: module.load_state_dict(flat.base)}
    n_parameters = sum(tensor.numel() for tensor in flat.base.values())
    return ratio(side_by_side(contestants), "apply", "copy") | {"parameters": n_parameters}


def serving(rows: int, *, by_row: bool) -> dict[str, float]:
    """PreferenceLinear of 768 × 768 beside nn.Linear, a batch of 8 with so many rows each."""
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(768, 768)
    sides = ((768, RANK), (768, RANK), (4, RANK, RANK))
    layer = PreferenceLinear.from_linear(linear, *(torch.randn(side, generator=generator) for side in sides))
    x = torch.randn(8, rows, 768, generator=generator)
    preference = torch.rand(8, 4, generator=generator) if by_row else torch.rand(4, generator=generator)
    with torch.no_grad():
        one = preference[0] if by_row else preference
        torch.testing.assert_close(layer(x, preference)[0], layer.merge(one)(x[0]), rtol=1e-3, atol=1e-2)
        contestants = {"preference": lambda: layer(x, preference), "linear": lambda: linear(x)}
        return ratio(side_by_side(contestants, rounds=41), "preference", "linear")


def storage(n_models: int) -> dict[str, float]:
    """Of a Pareto set of one layer of 768 × 3072, in models, where the average needs all of them."""
    base = {"weight": torch.zeros(768, 3072)}
    models = {f"m{k}": {"weight": torch.zeros(768, 3072).fill_diagonal_(k + 1.0)} for k in range(n_models)}
    pareto = fit_pareto_set(base, models, rank=RANK, refine_steps=0)
    return {"set": 1 + pareto.n_extra_parameters / base["weight"].numel(), "models": n_models}


if __name__ == "__main__":
    torch.set_num_threads(1)
    record(
        "pareto_merging",
        {
            "fit of 2 matrices of 768 × 768, rank 16, to a randomised SVD of each": fit_beside_svds(2),
            "fit of 8 matrices of 768 × 768, rank 16, to a randomised SVD of each": fit_beside_svds(8),
            "2000 steps of Adam to the closed form, 2 matrices of 384 × 384": fit_beside_adam(),
            "a model of 100 M parameters for a new preference, to copying its weights": materialising(),
            "PreferenceLinear to nn.Linear, 768 × 768, 8 × 64 rows, one preference": serving(64, by_row=False),
            "PreferenceLinear to nn.Linear, 768 × 768, 8 × 64 rows, one preference each": serving(64, by_row=True),
            **{f"storage in models, {k} models": storage(k) for k in (2, 8, 32)},
        },
    )
