"""The Triton kernels, interpreted on the CPU; on a GPU where there is one."""

import os
import subprocess
import sys

import pytest
import torch

from heedful.compress import diagonal_matmul
from heedful.compress.dynadiag import _backends

pytest.importorskip("triton", reason="needs the extra kernels")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

COMPARE = """
import torch
from heedful.compress import diagonal_matmul
from heedful.compress.dynadiag import _backends, _triton
from heedful.compress.dynadiag.pattern import block_layout

def compare(ours, exact, dtype, what):
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    assert ours.dtype == dtype, what
    torch.testing.assert_close(ours.double(), exact, rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}")

def check(out_features, in_features, k, batch, dtype, *, tall, blocks=True):
    generator = torch.Generator().manual_seed(0)
    offsets = torch.randperm(max(out_features, in_features), generator=generator)[:k]
    x, values, grad = (torch.randn(*shape, generator=generator).to(dtype) for shape in (
        (batch, in_features), (k, min(out_features, in_features)), (batch, out_features)))
    product = _backends.product(x.double(), values.double(), offsets, out_features, tall=tall, backend="dense")
    gradient = _backends.value_gradient(grad.double(), x.double(), offsets, tall=tall, backend="dense")
    what = f"{out_features} × {in_features}, tall={tall}, {dtype}"
    compare(_triton.product(x, values, offsets, out_features, tall=tall), product, dtype, what)
    compare(_triton.value_gradient(grad, x, offsets, tall=tall), gradient, dtype, what)
    if blocks:
        layout = block_layout(out_features, in_features, tuple(offsets.tolist()), tall, 16, x.device)
        compare(_triton.block_product(x, layout.fill(values, 16), layout, out_features), product, dtype, what)
        found = _triton.block_gradient(grad, x, layout, 16).reshape(-1)[layout.position].view(k, -1)
        compare(found.to(dtype), gradient, dtype, what)
"""


CASES = """
for out_features, in_features in ((40, 19), (19, 40), (2, 3), (33, 33)):
    for tall in {out_features >= in_features, out_features > in_features}:
        check(out_features, in_features, 2, 5, torch.float32, tall=tall)
check(130, 20, 3, 35, torch.float64, tall=True, blocks=False)
check(20, 20, 3, 35, torch.bfloat16, tall=True, blocks=False)  # which the interpreter cannot dot
check(20, 20, 3, 35, torch.float16, tall=True)

_triton._PART = 32  # so that the batch has three parts
x, values = (torch.randn(n, 9, dtype=torch.float64, requires_grad=True) for n in (70, 2))
gradients = [
    torch.autograd.grad(
        diagonal_matmul(x, values, torch.tensor([1, 10]), 12, backend=backend).square().sum(), (x, values)
    )
    for backend in ("triton", "dense")
]
for ours, theirs in zip(*gradients):
    compare(ours, theirs, torch.float64, "gradient")
"""


def test_interpreted_kernels_equal_the_dense_product_at_the_edges_of_tiles():
    # In one process of its own: Triton looks at the variable when it is imported.
    subprocess.run([sys.executable, "-c", COMPARE + CASES], check=True, env=os.environ | {"TRITON_INTERPRET": "1"})


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("backend", ["triton", "bcsr", "csr", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("out_features", "in_features"), [(768, 3072), (3072, 768), (1000, 1000)])
@pytest.mark.parametrize("batch", [1, 16, 256])
def test_on_a_gpu_every_backend_equals_the_dense_product(backend, dtype, out_features, in_features, batch):
    generator = torch.Generator().manual_seed(0)
    offsets = torch.randperm(max(out_features, in_features), generator=generator)[:77].cuda()
    x = torch.randn(batch, in_features, generator=generator).cuda().to(dtype).requires_grad_()
    values = torch.randn(77, min(out_features, in_features), generator=generator).cuda().to(dtype).requires_grad_()
    y = diagonal_matmul(x, values, offsets, out_features, backend=backend)
    ours = y, *torch.autograd.grad(y.float().square().mean(), (x, values))
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, values)]
    exact = diagonal_matmul(*wide, offsets, out_features, backend="dense")
    theirs = exact, *torch.autograd.grad(exact.square().mean(), wide)
    for left, right in zip(ours, theirs, strict=True):
        scale = right.abs().max().item()
        tolerance = (1e-5 if dtype == torch.float32 else 2e-2) * scale
        torch.testing.assert_close(left.double(), right, rtol=0, atol=tolerance)


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_the_usable_backends_include_triton():
    assert "triton" in _backends.usable(torch.device("cuda"))
