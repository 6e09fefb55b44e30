"""What choosing n of every m costs beside a full sort, torch.topk, a loop over blocks, and copying the tensor.

python benchmarks/bench_masks.py
"""

import torch
from torch import Tensor

from heedful._masks import nm_mask
from measure import ratio, record, side_by_side

N, M, WEIGHTS = 64, 256, 2**24


def by_sorting(values: Tensor) -> Tensor:
    blocks = values.abs().view(-1, M)
    chosen = blocks.sort(dim=1, descending=True, stable=True).indices[:, :N]
    return torch.zeros_like(blocks, dtype=torch.bool).scatter_(1, chosen, True).flatten()


def by_topk(values: Tensor) -> Tensor:
    blocks = values.abs().view(-1, M)
    return torch.zeros_like(blocks, dtype=torch.bool).scatter_(1, blocks.topk(N, dim=1).indices, True).flatten()


def by_loop(values: Tensor) -> Tensor:
    """Block by block, as the official script for small models does."""
    mask = torch.zeros(len(values), dtype=torch.bool)
    for start in range(0, len(values), M):
        mask[start + values[start : start + M].abs().topk(N).indices] = True
    return mask


def differences(kind: str) -> Tensor:
    """Differences of float32 weights, all of other sizes, or of bfloat16 ones, of which many are equal."""
    generator = torch.Generator().manual_seed(0)
    base = 0.02 * torch.randn(WEIGHTS, generator=generator)
    tuned = base + 1e-3 * torch.randn(WEIGHTS, generator=generator)
    return tuned - base if kind == "float32" else tuned.bfloat16().float() - base.bfloat16().float()


if __name__ == "__main__":
    torch.set_num_threads(1)
    plain, rounded = differences("float32"), differences("bfloat16")
    free = torch.rand(WEIGHTS, generator=torch.Generator().manual_seed(1)) > 0.25
    few = plain[: 2**18]
    assert torch.equal(nm_mask(few, N, M), by_loop(few))
    for values in (plain, rounded):
        assert torch.equal(nm_mask(values, N, M), by_sorting(values))

    cases = {
        "differences of float32 weights": lambda: nm_mask(plain, N, M),
        "differences of bfloat16 weights, full of ties": lambda: nm_mask(rounded, N, M),
        "a quarter of the places taken": lambda: nm_mask(plain, N, M, available=free),
    }
    peers = {"a full sort": lambda: by_sorting(plain), "torch.topk": lambda: by_topk(plain), "a copy": plain.clone}
    seconds = side_by_side({**cases, **peers})
    first = next(iter(cases))
    figures = {f"{N} of {M}, to {peer}": ratio(seconds, first, peer) for peer in peers}
    loop = side_by_side({"mask": lambda: nm_mask(few, N, M), "loop": lambda: by_loop(few)})
    figures[f"{N} of {M}, 2^18 weights, to a loop over blocks"] = ratio(loop, "mask", "loop")
    for case in cases:
        figures[f"million weights a second, {case}"] = WEIGHTS / ratio(seconds, case, "a copy")[f"{case}_s"] / 1e6
    record("masks", figures)
