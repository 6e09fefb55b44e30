"""Grids against the search written out, over every range and zero point."""

import pytest
import torch

from heedful.compress import QuantConfig, find_grid
from tests.conformance.typechecks import as_users_have_it


def exhaustive(w, h, bits, *, symmetric=False):
    """The least (ŵ − w) H (ŵ − w)ᵀ of each row over p and zero points, with its scale and zero point."""
    qmax = 2**bits - 1
    low, high = w.amin(1, keepdim=True).clamp(max=0), w.amax(1, keepdim=True).clamp(min=0)
    if symmetric:
        high = w.abs().amax(1, keepdim=True)
        low = -high
    found = []
    for p in range(100, 0, -1):
        scale = p / 100 * (high - low) / qmax
        place = -p / 100 * low / scale
        for zero in [torch.full_like(place, 2 ** (bits - 1))] if symmetric else [place.floor(), place.ceil()]:
            error = scale * (((w / scale).round() + zero).clamp(0, qmax) - zero) - w
            found.append(torch.stack([((error @ h) * error).sum(1), scale[:, 0], zero[:, 0]]))
    found = torch.stack(found)  # [choices, 3, rows]
    best = found[:, 0].argmin(0)
    return found[best, :, torch.arange(len(w))].T


def layer(rows, cols, seed=0, outliers=2):
    """Weights with heavy tails, and the second moments of inputs with a mean and a few large ones, as in a transformer."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, cols, generator=generator, dtype=torch.float64) ** 3
    x = torch.randn(4 * cols, cols, generator=generator, dtype=torch.float64) @ torch.randn(
        cols, cols, generator=generator, dtype=torch.float64
    ) / cols**0.5 + torch.randn(cols, generator=generator, dtype=torch.float64)
    x[:, :outliers] *= 10
    return w, x.T @ x / len(x)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("grid", ["hessian", "mse"])
def test_the_grid_is_the_best_of_all(grid, bits, symmetric, seed):
    w, h = layer(20, 24, seed)
    found = find_grid(w, h, config=QuantConfig(bits=bits, grid=grid, symmetric=symmetric))
    measure = h if grid == "hessian" else torch.eye(24, dtype=torch.float64)
    least, scale, _ = exhaustive(w, measure, bits, symmetric=symmetric)
    error = found.fake_quantize(w) - w
    torch.testing.assert_close(((error @ measure) * error).sum(1), least, rtol=1e-10, atol=0)
    torch.testing.assert_close(found.scale[:, 0], scale, rtol=1e-12, atol=0)


@pytest.mark.parametrize("bits", [2, 4])
def test_wide_layers_are_screened_and_come_within_a_percent_of_the_best(bits):
    w, h = layer(40, 300)
    least, scale, _ = exhaustive(w, h, bits)
    found = find_grid(w, h, config=QuantConfig(bits=bits))
    error = found.fake_quantize(w) - w
    ratio = ((error @ h) * error).sum(1) / least
    assert (ratio > 1 - 1e-9).all()
    assert ratio.mean() < 1.01
    assert (found.scale[:, 0] / scale - 1).abs().lt(1e-9).float().mean() > 0.8


def test_minmax_covers_all_weights_and_zero():
    w = torch.tensor([[-1.0, 0.0, 2.0], [1.0, 2.0, 3.0], [-3.0, -2.0, -3.0]], dtype=torch.float64)
    found = find_grid(w, torch.eye(3), config=QuantConfig(bits=2, grid="minmax"))
    torch.testing.assert_close(found.scale, torch.tensor([[1.0], [1.0], [1.0]], dtype=torch.float64))
    assert found.zero.tolist() == [[1], [0], [3]]
    symmetric = find_grid(w, torch.eye(3), config=QuantConfig(bits=2, grid="minmax", symmetric=True))
    torch.testing.assert_close(symmetric.scale, torch.tensor([[4 / 3], [2.0], [2.0]], dtype=torch.float64))
    assert symmetric.zero.tolist() == [[2], [2], [2]]


def test_rows_of_zeros_stay_zeros():
    for grid in ("hessian", "mse", "minmax"):
        found = find_grid(torch.zeros(2, 4), torch.eye(4), config=QuantConfig(bits=3, grid=grid))
        assert (found.scale > 0).all()
        assert not found.fake_quantize(torch.zeros(2, 4)).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_are_rounded_to_the_dtype_of_the_weight_before_they_are_compared(dtype, seed):
    w, h = layer(20, 24, seed)
    w = (w / 64).to(dtype)
    found = find_grid(w, h, config=QuantConfig(bits=3))
    assert found.scale.dtype == dtype
    # Of all scales that the dtype can hold, the search must not prefer one that is worse after rounding.
    low, high = w.double().amin(1, keepdim=True).clamp(max=0), w.double().amax(1, keepdim=True).clamp(min=0)
    least = torch.full((20,), torch.inf, dtype=torch.float64)
    for p in range(100, 0, -1):
        scale = (p / 100 * (high - low) / 7).to(dtype).double()
        place = -low * 7 / (high - low)
        for zero in (place.floor(), place.ceil()):
            error = scale * ((w.double() / scale).round() + zero).clamp(0, 7).sub(zero) - w.double()
            least = torch.minimum(least, ((error @ h) * error).sum(1))
    error = found.scale.double() * (found.quantize(w).double() - found.zero) - w.double()
    assert (((error @ h) * error).sum(1) <= least * (1 + 1e-9)).all()


def test_weights_near_the_least_number_keep_a_scale_above_zero():
    tiny = torch.full((1, 4), 6e-8, dtype=torch.float16)  # the least that float16 has
    found = find_grid(tiny, torch.eye(4), config=QuantConfig(bits=8))
    assert (found.scale > 0).all()
    assert found.fake_quantize(tiny).isfinite().all()


def test_each_group_is_searched_by_its_own_inputs(seed):
    w, h = layer(10, 24, seed)
    grouped = find_grid(w, h, config=QuantConfig(bits=3, group_size=8))
    for g in range(3):
        part = slice(8 * g, 8 * g + 8)
        alone = find_grid(w[:, part], h[part, part], config=QuantConfig(bits=3))
        assert torch.equal(grouped.scale[:, g], alone.scale[:, 0])
        assert torch.equal(grouped.zero[:, g], alone.zero[:, 0])


def test_heads_use_their_own_factor(seed):
    w, h = layer(12, 24, seed)
    w, factors = w.view(3, 4, 24), torch.stack([h, h.flip(0, 1), torch.eye(24, dtype=torch.float64)])
    found = find_grid(w, factors, config=QuantConfig(bits=2))
    for head in range(3):
        assert torch.equal(found.scale[head], find_grid(w[head], factors[head], config=QuantConfig(bits=2)).scale)


def test_no_row_depends_on_those_that_are_searched_beside_it():
    w, h = layer(300, 200)  # more rows than are searched at once
    with as_users_have_it():  # thousands of calls
        together = find_grid(w, h, config=QuantConfig(bits=2))
        apart = [find_grid(part, h, config=QuantConfig(bits=2)).scale for part in w.split(77)]
    torch.testing.assert_close(together.scale, torch.cat(apart), rtol=0, atol=0)
