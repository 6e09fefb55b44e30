"""The compiled kernels at the edges of their tiles, in both types, with threads and on older processors."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from heedful.compress.dynadiag import _backends

_cpu = pytest.importorskip("heedful.compress.dynadiag._cpu", reason="needs the extra kernels")

W, ROWS, FEW = _cpu._WIDTH, _cpu._ROWS, _cpu._FEW


def compare(out_features, in_features, k, batch, *, tall, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.randperm(max(out_features, in_features), generator=generator)[:k]
    x, values, grad = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((batch, in_features), (k, min(out_features, in_features)), (batch, out_features))
    )
    exact = (
        _backends.product(x, values, offsets, out_features, tall=tall, backend="dense"),
        _backends.value_gradient(grad, x, offsets, tall=tall, backend="dense"),
    )
    x, values, grad = (tensor.to(dtype).numpy() for tensor in (x, values, grad))
    ours = (
        _cpu.product(x, values, offsets.numpy(), out_features, tall=tall),
        _cpu.value_gradient(grad, x, offsets.numpy(), tall=tall),
    )
    tolerance = 1e-4 if dtype == torch.float32 else 1e-12  # sums of at most a few hundred terms of size 1
    for result, expected in zip(ours, exact, strict=True):
        assert result.dtype == x.dtype
        assert result.flags.c_contiguous
        np.testing.assert_allclose(result, expected.numpy(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("batch", [FEW - 1, FEW, FEW + ROWS - 1, 3 * FEW])
@pytest.mark.parametrize("out_features", [W - 1, W, W + 1, 3 * W - 1, 5 * W])
@pytest.mark.parametrize("in_features", [1, W - 1, W, W + 2, 2 * W, 9 * W])
def test_edges_of_tiles(out_features, in_features, batch, seed):
    k = min(max(out_features, in_features), 2 * ROWS + 1)
    compare(out_features, in_features, k, batch, tall=out_features >= in_features, seed=seed)


@pytest.mark.parametrize("tall", [True, False])
@pytest.mark.parametrize("k", [1, ROWS, W + 5])
def test_a_square_matrix_and_its_transpose(k, tall):
    compare(W + 5, W + 5, k, 2 * FEW, tall=tall)


@pytest.mark.parametrize("tall", [True, False])
def test_a_batch_of_several_stretches(tall, monkeypatch):
    """More rows than stay near: gradients of the stretches add up, and the last stretch may be short."""
    monkeypatch.setattr(_cpu, "_NEAR", 16 * 3 * W)
    compare(2 * W, 2 * W, 9, 45, tall=tall)


@pytest.mark.parametrize(("batch", "tall"), [(FEW - 1, True), (2 * FEW, True), (2 * FEW, False)])
def test_double_precision(batch, tall):
    compare(W + 9, W + 9, 7, batch, tall=tall, dtype=torch.float64)


def test_threads_share_the_blocks_of_outputs(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(_cpu, "_WORTH_A_THREAD", 1)
    started = []

    class Counted(_cpu.threading.Thread):
        def start(self):
            started.append(self)
            super().start()

    monkeypatch.setattr(_cpu.threading, "Thread", Counted)
    compare(5 * W, 3 * W, 20, 40, tall=True)
    assert len(started) == 2 * 2  # product and gradient, two beside this thread


def test_values_that_are_not_numbers_stay_on_their_rows():
    """A row of x that holds a NaN spoils no other."""
    generator = torch.Generator().manual_seed(0)
    x, values = torch.randn(2 * FEW, W, generator=generator), torch.randn(3, W, generator=generator)
    x[3, 5] = torch.nan
    y = _cpu.product(x.numpy(), values.numpy(), np.array([0, 7, 9]), W, tall=True)
    assert np.isnan(y[3]).any()
    assert np.isfinite(np.delete(y, 3, axis=0)).all()


@pytest.mark.slow
@pytest.mark.skipif(
    "+avx512f" not in _cpu.cpu_target.target_context.codegen().magic_tuple()[2], reason="tests wider tiles"
)
def test_tiles_of_processors_with_fewer_registers():
    code = (
        "import torch; from heedful.compress.dynadiag import _backends, _cpu;"
        "assert _cpu._WIDTH == 24;"
        "x, v, o = torch.randn(9, 50), torch.randn(5, 50), torch.tensor([0, 3, 20, 44, 52]);"
        "y, z = (_backends.product(x, v, o, 53, tall=True, backend=b) for b in ('numba', 'dense'));"
        "torch.testing.assert_close(y, z, rtol=1e-5, atol=1e-5)"
    )
    older = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma"}
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | older)
