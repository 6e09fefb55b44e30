"""Diagonal layers beside dense and sparse ones of torch: how many times as long the peers take, on one thread.

python benchmarks/bench_dynadiag.py
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import SGD

from heedful.compress import block_fill, diagonal_indices, diagonal_matmul, to_bcsr
from heedful.compress.dynadiag._tuning import choose_backend
from heedful.compress.dynadiag.pattern import active_diagonals
from measure import ratio, record, side_by_side

CASES = [  # out, in, sparsities
    (1024, 1024, (0.9, 0.95)),
    (2048, 2048, (0.5, 0.8, 0.9, 0.95)),
    (4096, 4096, (0.9, 0.95)),
    (3072, 768, (0.9, 0.95)),
]
BATCHES = (1, 16, 256)


class Csr:
    """A matrix in CSR form, as unstructured sparsity would have it: with what its transpose needs laid out beforehand."""

    def __init__(self, out_features: int, in_features: int, rows: Tensor, cols: Tensor):
        self.order, self.starts, self.columns, self.shape = (
            *self._sorted(rows, cols, out_features, in_features),
            (out_features, in_features),
        )
        rows, cols = rows[self.order], cols[self.order]
        self.turned = self._sorted(cols, rows, in_features, out_features)

    @staticmethod
    def _sorted(rows: Tensor, cols: Tensor, n_rows: int, n_cols: int) -> tuple[Tensor, Tensor, Tensor]:
        order = (rows * n_cols + cols).argsort()
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), rows.bincount(minlength=n_rows).cumsum(0)])
        return order, starts.int(), cols[order].int()

    def matrix(self, values: Tensor) -> Tensor:
        return torch.sparse_csr_tensor(self.starts, self.columns, values, self.shape, check_invariants=False)

    def transposed(self, values: Tensor) -> Tensor:
        order, starts, columns = self.turned
        return torch.sparse_csr_tensor(starts, columns, values[order], self.shape[::-1], check_invariants=False)


class CsrProduct(torch.autograd.Function):
    """x Wᵀ and its two gradients by torch's CSR products."""

    @staticmethod
    def forward(ctx, x, values, csr):
        ctx.csr = csr
        ctx.save_for_backward(x, values)
        return times(csr.matrix(values), x)

    @staticmethod
    def backward(ctx, grad):
        x, values = ctx.saved_tensors
        turned = grad.T.contiguous()
        sampled = torch.sparse.sampled_addmm(ctx.csr.matrix(values), turned, x, beta=0.0).values()
        return times(ctx.csr.transposed(values), grad), sampled, None


def times(matrix: Tensor, x: Tensor) -> Tensor:
    """x times the transposed CSR matrix; one row as a vector, which takes half the time."""
    return (matrix @ x[0])[None] if len(x) == 1 else (matrix @ x.T.contiguous()).T.contiguous()


def layers(
    out_features: int, in_features: int, offsets: Tensor, *, train: bool
) -> dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]]:
    """Parameter and function of each contestant; all but the dense one have the same entries.

    The CSR matrix is made once if it is not to be trained; diagonals are taken as they are.
    """
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(len(offsets), min(out_features, in_features), generator=generator) / len(offsets) ** 0.5
    indices = diagonal_indices(out_features, in_features, offsets)
    csr = Csr(out_features, in_features, *(i.flatten() for i in indices))
    dense = nn.Parameter(torch.zeros(out_features, in_features).index_put(indices, values))
    unstructured, diagonal = nn.Parameter(values.flatten()[csr.order]), nn.Parameter(values)
    matrix = csr.matrix(unstructured.detach())
    return {
        "dense": (dense, lambda x: nn.functional.linear(x, dense)),
        "csr": (unstructured, lambda x: CsrProduct.apply(x, unstructured, csr) if train else times(matrix, x)),
        "diagonal": (diagonal, lambda x: diagonal_matmul(x, diagonal, offsets, out_features)),
    }


def inference(layer: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
    def run():
        with torch.inference_mode():
            return layer(x)

    return run


def training_step(parameter: Tensor, layer: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], None]:
    """Forward, both gradients, SGD: what a hidden layer does in a step."""
    x, optimizer = x.clone().requires_grad_(), SGD([parameter], lr=1e-4)

    def run():
        optimizer.zero_grad()
        x.grad = None
        layer(x).square().mean().backward()
        optimizer.step()

    return run


def beside_peers(out_features: int, in_features: int, sparsity: float, *, train: bool) -> dict[str, object]:
    """For each batch, the time of the peers divided by ours, and the backend chosen."""
    n_diagonals = max(out_features, in_features)
    offsets = torch.randperm(n_diagonals, generator=torch.Generator().manual_seed(0))
    offsets = offsets[: active_diagonals(n_diagonals, sparsity)].sort().values
    figures: dict[str, object] = {}
    for batch in BATCHES:
        contestants = layers(out_features, in_features, offsets, train=train)
        x = torch.randn(batch, in_features, generator=torch.Generator().manual_seed(2))
        outputs = [layer(x) for _, layer in contestants.values()]
        for output in outputs[1:]:
            torch.testing.assert_close(output, outputs[0], rtol=1e-4, atol=1e-4)
        calls = {
            name: training_step(parameter, layer, x) if train else inference(layer, x)
            for name, (parameter, layer) in contestants.items()
        }
        seconds = side_by_side(calls, rounds=9 if batch * out_features * in_features > 2**29 else 41)
        for peer in ("dense", "csr"):
            figures[f"batch {batch}, {peer}"] = ratio(seconds, peer, "diagonal")
        operations = ("product", "value_gradient") if train else ("product",)
        chosen = {choose_backend(name, x, (out_features, in_features), len(offsets)) for name in operations}
        figures[f"batch {batch}, backend"] = " and ".join(sorted(chosen))
    figures["best possible over dense"] = in_features * out_features / (len(offsets) * min(out_features, in_features))
    return figures


def beside_blocks(size: int = 2048, batch: int = 256, block: int = 16) -> dict[str, object]:
    """Torch's BSR matrix: with random offsets nearly all blocks are touched, in aligned runs few are."""
    k = size // 10 // block * block
    starts = torch.randperm(size // block, generator=torch.Generator().manual_seed(0))[: k // block] * block
    runs = (starts[:, None] + torch.arange(block)).flatten()
    apart = torch.randperm(size, generator=torch.Generator().manual_seed(0))[:k]
    x, values = torch.randn(batch, size), torch.randn(k, size)
    figures: dict[str, object] = {}
    for name, offsets in (("runs of 16", runs), ("random offsets", apart)):
        matrix, turned = to_bcsr(values, offsets, size, size, block), x.T.contiguous()
        torch.testing.assert_close((matrix @ turned).T, diagonal_matmul(x, values, offsets, size), rtol=1e-3, atol=1e-3)
        calls = {
            "bsr": lambda m=matrix, t=turned: m @ t,
            "diagonal": inference(lambda x, o=offsets: diagonal_matmul(x, values, o, size), x),
        }
        figures[name] = ratio(side_by_side(calls, rounds=5, warmup=1), "bsr", "diagonal")
        figures[f"blocks touched, {name}"] = block_fill(offsets, size, size, block)
    return figures


def rates(figures: dict[str, object], out_features: int, in_features: int, sparsity: float) -> dict[str, float]:
    """What the processor does a second: multiplications and additions for many rows, bytes of values for one."""
    many, one = figures["batch 256, dense"], figures["batch 1, dense"]
    weights = out_features * in_features
    active = active_diagonals(max(out_features, in_features), sparsity) * min(out_features, in_features)
    return {
        "batch 256, dense, GFLOP/s": 2e-9 * 256 * weights / many["dense_s"],
        "batch 256, diagonal, GFLOP/s": 2e-9 * 256 * active / many["diagonal_s"],
        "batch 1, dense, GB/s": 4e-9 * weights / one["dense_s"],
        "batch 1, diagonal, GB/s": 4e-9 * active / one["diagonal_s"],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    figures = {}
    for out_features, in_features, sparsities in CASES:
        for sparsity in sparsities:
            for train in (False, True):
                what = "training step" if train else "inference"
                name = f"{out_features} × {in_features}, {sparsity:.0%} zeros, {what}: time of peers to ours"
                figures[name] = beside_peers(out_features, in_features, sparsity, train=train)
                if not train and (out_features, sparsity) == (2048, 0.9):
                    speed = rates(figures[name], out_features, in_features, sparsity)
    figures["2048 × 2048, 90% zeros, batch 256, inference: time of torch's blocks of 16 to ours"] = beside_blocks()
    figures["2048 × 2048, 90% zeros, inference: rates"] = speed
    record("dynadiag", figures)
