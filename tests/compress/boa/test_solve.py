"""The solver against dense GPTQ on Kronecker products, naive twins, exhaustive search, and limits that are another method."""

import dataclasses
import itertools

import pytest
import torch

import heedful.compress.boa.solve
from heedful.compress import QuantConfig, QuantGrid, find_grid, kron_quantize
from heedful.compress.boa.solve import _kron_loss
from heedful.errors import ConvergenceError, InputError, ParameterError
from tests.conformance.typechecks import as_users_have_it


def second_moments(*shape, generator, samples=3):
    x = torch.randn(*shape, samples * shape[-1], generator=generator, dtype=torch.float64)
    return x @ x.mT / x.shape[-1]


def problem(heads, rows, cols, *, seed=0, per_head=False, samples=3):
    """A weight, a column factor for all heads or each, and a row factor for each, in float64; few samples bind closely."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(heads, rows, cols, generator=generator, dtype=torch.float64)
    h_col = second_moments(*[heads] * per_head, cols, generator=generator, samples=samples)
    return weight, h_col, second_moments(heads, rows, generator=generator, samples=samples)


def surgeon(w, h, grid):
    """Optimal brain surgery on one vector: quantize an entry, move all others by the inverse Hessian, and strike it out."""
    w, inverse = w.clone(), torch.linalg.inv(h)
    q = torch.empty_like(w)
    for i in range(len(w)):
        q[i] = grid(i, w[i])
        w -= (w[i] - q[i]) / inverse[i, i] * inverse[:, i]
        inverse = inverse - torch.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    return q


def nearest_on(grid, head, rows, cols):
    """The grid of the entries of one head, numbered row by row."""
    scale, zero = (x[head].expand(rows, cols).flatten() for x in (grid.scale, grid.zero.double()))
    return lambda i, w: scale[i] * (torch.clamp(torch.round(w / scale[i]) + zero[i], 0, grid.qmax) - zero[i])


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(("rows", "cols"), [(8, 24), (1, 24), (8, 1), (3, 140)])  # 140: more than a block of columns
def test_both_directions_are_optimal_brain_surgery_on_the_kronecker_product(rows, cols, per_head, seed):
    weight, h_col, h_row = problem(2, rows, cols, seed=seed, per_head=per_head)
    result = kron_quantize(weight, h_col, h_row, config=QuantConfig(bits=3, damping=0))
    for head in range(2):
        h = torch.kron(h_row[head], h_col[head] if per_head else h_col)
        expected = surgeon(weight[head].flatten(), h, nearest_on(result.grid, head, rows, cols))
        assert torch.equal(result.dequantize()[head].flatten(), expected)


def test_damping_adds_to_the_diagonals_of_both_factors(seed):
    weight, h_col, h_row = problem(2, 6, 20, seed=seed)
    damped = kron_quantize(weight, h_col, h_row, config=QuantConfig(bits=3, damping=0.3))
    by_hand = [
        h + 0.3 * h.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] * torch.eye(len(h.mT)) for h in (h_col,)
    ]
    by_hand.append(h_row + 0.3 * h_row.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] * torch.eye(6))
    expected = kron_quantize(weight, *by_hand, config=QuantConfig(bits=3, damping=0), grid=damped.grid)
    assert torch.equal(damped.codes, expected.codes)


def test_without_a_row_factor_each_row_is_surgery_on_its_own(seed):
    weight, h_col, _ = problem(1, 9, 30, seed=seed)
    result = kron_quantize(weight[0], h_col, config=QuantConfig(bits=3, damping=0))
    for row in range(9):
        scale, zero = result.grid.scale[row, 0], result.grid.zero[row, 0]
        expected = surgeon(
            weight[0, row], h_col, lambda i, w, s=scale, z=zero: s * (torch.clamp((w / s).round() + z, 0, 7) - z)
        )
        assert torch.equal(result.dequantize()[row], expected)


@pytest.mark.parametrize("size", [1.0, 7.3])
def test_a_row_factor_that_binds_no_rows_is_gptq(size):
    weight, h_col, h_row = problem(3, 8, 40)
    config = QuantConfig(bits=2)
    plain = kron_quantize(weight, h_col, config=config)
    unbound = size * torch.eye(8, dtype=torch.float64).expand(3, 8, 8)
    assert torch.equal(kron_quantize(weight, h_col, unbound, config=config).codes, plain.codes)
    blind = kron_quantize(weight, h_col, h_row, config=dataclasses.replace(config, method="gptq"))
    assert torch.equal(blind.codes, plain.codes)
    assert not torch.equal(kron_quantize(weight, h_col, h_row, config=config).codes, plain.codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_diagonal_factors_leave_nothing_to_compensate(dtype, seed):
    weight, h_col, h_row = (x.to(dtype) for x in problem(2, 6, 150, seed=seed))
    h_col, h_row = (torch.diag_embed(h.diagonal(dim1=-2, dim2=-1)) for h in (h_col, h_row))
    config = QuantConfig(bits=3)
    grid = find_grid(weight, h_col, config=config)
    for method in ("boa", "gptq", "rtn"):
        result = kron_quantize(weight, h_col, h_row, config=dataclasses.replace(config, method=method), grid=grid)
        assert torch.equal(result.codes, grid.quantize(weight))


@pytest.mark.parametrize("steps", [2, 3, 5, 7, 100])
def test_rows_of_a_step_are_compensated_for_as_one_after_the_other(steps, seed):
    """The twin quantizes the rows of a step as they are when it begins, then lets each in turn move all rows below it."""
    weight, h_col, h_row = problem(2, 7, 20, seed=seed)
    result = kron_quantize(weight, h_col, h_row, config=QuantConfig(bits=3, damping=0, rows_per_step=steps))
    for head in range(2):
        left = weight[head].clone()
        u = torch.linalg.cholesky(torch.linalg.inv(h_row[head]), upper=True)
        for start in range(0, 7, steps):
            rows = range(start, min(start + steps, 7))
            of = slice(rows[0], rows[-1] + 1)
            grid = QuantGrid(result.grid.scale[head, of], result.grid.zero[head, of], 0, 7)
            q = kron_quantize(left[of], h_col, config=QuantConfig(bits=3, damping=0), grid=grid).dequantize()
            for j in rows:
                left[j + 1 :] -= torch.outer(u[j, j + 1 :] / u[j, j], left[j] - q[j - start])
            assert torch.equal(result.dequantize()[head, of], q)


@pytest.mark.parametrize("rows_per_step", [8, 11])
def test_a_step_of_all_rows_is_gptq(rows_per_step):
    weight, h_col, h_row = problem(3, 8, 30)
    one_step = kron_quantize(weight, h_col, h_row, config=QuantConfig(bits=3, rows_per_step=rows_per_step))
    assert torch.equal(one_step.codes, kron_quantize(weight, h_col, config=QuantConfig(bits=3)).codes)


@pytest.mark.parametrize("options", [{"symmetric": True}, {"group_size": 12}, {"grid": "minmax"}, {"grid": "mse"}, {}])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_value_is_on_the_grid_of_its_row_and_codes_say_which(bits, options, seed):
    weight, h_col, h_row = (x.float() for x in problem(2, 5, 24, seed=seed))
    result = kron_quantize(weight, h_col, h_row, config=QuantConfig(bits=bits, **options))
    assert result.codes.dtype == torch.uint8
    assert int(result.codes.max()) < 2**bits
    assert (result.grid.zero >= 0).all()
    assert (result.grid.zero < 2**bits).all()
    groups = 24 // options.get("group_size", 24)
    assert result.grid.scale.shape == result.grid.zero.shape == (2, 5, groups)
    scale, zero = (x.repeat_interleave(24 // groups, dim=2) for x in (result.grid.scale, result.grid.zero))
    assert torch.equal(result.dequantize(), (result.codes - zero) * scale)


def test_more_bits_lose_less(seed):
    weight, h_col, h_row = problem(2, 8, 32, seed=seed)
    losses = [
        float(
            _kron_loss(
                kron_quantize(weight, h_col, h_row, config=QuantConfig(bits=b)).dequantize() - weight, h_col, h_row
            ).sum()
        )
        for b in (8, 4, 2)
    ]
    assert 0 <= losses[0] < losses[1] < losses[2]


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_heeding_rows_loses_less_than_not_heeding_them(bits):
    """On average: greedy as both are, GPTQ is luckier now and then. Measured: 0.74, 0.60 and 0.69 of its loss."""
    boa = gptq = 0.0
    config = QuantConfig(bits=bits)
    for seed in range(20):
        weight, h_col, h_row = problem(1, 8, 24, seed=seed, samples=1)
        with as_users_have_it():  # thousands of calls
            grid = find_grid(weight, h_col, config=config)
        heeding, blind = (
            float(
                _kron_loss(
                    kron_quantize(weight, h_col, h, config=config, grid=grid).dequantize() - weight, h_col, h_row
                )
            )
            for h in (h_row, None)
        )
        assert min(heeding, blind) >= 0
        boa, gptq = boa + heeding, gptq + blind
    assert boa < 0.8 * gptq


@pytest.mark.parametrize("draw", [0, 2, 5])
def test_the_loss_comes_near_the_least_of_all_codes(draw):
    """All 256 codes of 2 x 2 weights at 2 bits, in 60 problems. Measured: 1.02 to 1.14 times the least; GPTQ 1.05 to 1.38."""
    config = QuantConfig(bits=2, grid="minmax")
    codes = torch.tensor(list(itertools.product(range(4), repeat=4)), dtype=torch.uint8).view(-1, 1, 2, 2)
    weight, h_col, h_row = problem(60, 2, 2, seed=draw, per_head=True)
    grid = find_grid(weight, h_col, config=config)
    everything = grid.scale * (codes.double() - grid.zero) - weight
    least = torch.stack([_kron_loss(delta, h_col, h_row) for delta in everything]).amin(0).sum()
    boa, gptq = (
        _kron_loss(kron_quantize(weight, h_col, h, config=config, grid=grid).dequantize() - weight, h_col, h_row).sum()
        for h in (h_row, None)
    )
    assert least <= boa <= 1.25 * least
    assert boa <= gptq


def test_the_scale_of_the_factors_does_not_matter():
    weight, h_col, h_row = problem(2, 6, 150)
    result = kron_quantize(weight, h_col, h_row, config=QuantConfig(bits=3))
    for c in (0.25, 1024):  # powers of two scale floating-point numbers exactly
        assert torch.equal(kron_quantize(weight, c * h_col, h_row / c, config=QuantConfig(bits=3)).codes, result.codes)


@pytest.mark.parametrize("per_head", [False, True])
def test_heads_know_nothing_of_each_other(per_head, seed):
    weight, h_col, h_row = problem(4, 6, 20, seed=seed, per_head=per_head)
    config = QuantConfig(bits=3, rows_per_step=2)
    result = kron_quantize(weight, h_col, h_row, config=config)
    turned = [2, 0, 3, 1]
    permuted = kron_quantize(weight[turned], h_col[turned] if per_head else h_col, h_row[turned], config=config)
    assert torch.equal(permuted.codes, result.codes[turned])
    for head in range(4):
        alone = kron_quantize(weight[head], h_col[head] if per_head else h_col, h_row[head], config=config)
        assert torch.equal(alone.codes, result.codes[head])
        assert torch.equal(alone.grid.scale, result.grid.scale[head])


def test_a_factor_for_each_head_may_be_the_same_for_all(seed):
    weight, h_col, h_row = problem(3, 6, 140, seed=seed)
    shared, repeated = (
        kron_quantize(weight, h, h_row, config=QuantConfig(bits=3)) for h in (h_col, h_col.expand(3, -1, -1))
    )
    assert torch.equal(shared.codes, repeated.codes)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("order", ["rows", "columns", "both"])
def test_act_order_quantizes_the_permuted_problem_and_puts_everything_back(order, per_head, seed):
    weight, h_col, h_row = problem(2, 6, 20, seed=seed, per_head=per_head)
    result = kron_quantize(weight, h_col, h_row, config=QuantConfig(bits=3, act_order=order))
    assert result.act_order == order
    for head in range(2):
        cols = h_col[head] if per_head else h_col
        row_order = h_row[head].diagonal().argsort(descending=True) if order != "columns" else torch.arange(6)
        col_order = cols.diagonal().argsort(descending=True) if order != "rows" else torch.arange(20)
        by_hand = kron_quantize(
            weight[head][row_order][:, col_order],
            cols[col_order][:, col_order],
            h_row[head][row_order][:, row_order],
            config=QuantConfig(bits=3),
        )
        assert torch.equal(result.codes[head][row_order][:, col_order], by_hand.codes)
        assert torch.equal(result.grid.scale[head][row_order], by_hand.grid.scale)


def test_auto_keeps_the_order_of_least_loss_and_says_which():
    weight, h_col, h_row = problem(2, 6, 20, seed=3)

    def loss(order, rows, **options):
        result = kron_quantize(weight, h_col, rows, config=QuantConfig(bits=2, act_order=order, **options))
        return float(_kron_loss(result.dequantize() - weight, h_col, rows).sum()), result.act_order

    losses = [loss(order, h_row) for order in ("off", "rows", "columns", "both")]
    assert loss("auto", h_row) == min(losses)
    assert len({value for value, _ in losses}) == 4
    assert loss("auto", None) == min(loss(order, None) for order in ("off", "columns"))
    in_groups = [loss(order, h_row, group_size=10) for order in ("off", "rows")]
    assert loss("auto", h_row, group_size=10) == min(in_groups)


def test_inputs_that_are_always_zero_are_left_out(seed):
    weight, h_col, h_row = problem(2, 6, 20, seed=seed)
    live = torch.ones(20, dtype=torch.bool)
    live[[0, 7, 19]] = False
    dead = h_col * live * live[:, None]
    result = kron_quantize(weight, dead, h_row, config=QuantConfig(bits=3))
    assert not result.dequantize()[..., ~live].any()
    alone = kron_quantize(weight[..., live], h_col[live][:, live], h_row, config=QuantConfig(bits=3))
    assert torch.equal(result.codes[..., live], alone.codes)
    assert torch.equal(result.grid.scale, alone.grid.scale)
    nothing = kron_quantize(weight, torch.zeros_like(h_col), h_row, config=QuantConfig(bits=3))
    assert not nothing.dequantize().any()


def test_groups_have_grids_of_their_own(seed):
    weight, h_col, h_row = problem(2, 5, 24, seed=seed)
    config = QuantConfig(bits=3, group_size=8, damping=0)
    result = kron_quantize(weight, h_col, h_row, config=config)
    for g in range(3):
        part = slice(8 * g, 8 * g + 8)
        one = find_grid(weight[..., part], h_col[part, part], config=dataclasses.replace(config, group_size=-1))
        assert torch.equal(result.grid.scale[..., g], one.scale[..., 0])
    grid = QuantGrid(
        result.grid.scale.repeat_interleave(8, 2).view(2, -1, 1),
        result.grid.zero.repeat_interleave(8, 2).view(2, -1, 1),
        0,
        7,
    )
    for head in range(2):
        scale, zero = grid.scale[head, :, 0], grid.zero[head, :, 0]
        expected = surgeon(
            weight[head].flatten(),
            torch.kron(h_row[head], h_col),
            lambda i, w, s=scale, z=zero: s[i] * (torch.clamp((w / s[i]).round() + z[i], 0, 7) - z[i]),
        )
        assert torch.equal(result.dequantize()[head].flatten(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_of_any_precision_come_back_in_it(dtype):
    weight, h_col, h_row = problem(2, 6, 32)
    result = kron_quantize(weight.to(dtype), h_col.float(), h_row.float(), config=QuantConfig(bits=4))
    assert result.dequantize().dtype == result.grid.scale.dtype == dtype
    in_float = kron_quantize(
        weight.to(dtype).float(), h_col.float(), h_row.float(), config=QuantConfig(bits=4), grid=result.grid
    )
    assert torch.equal(in_float.codes, result.codes)


def test_heads_are_merged_row_by_row():
    weight, h_col, h_row = problem(2, 3, 8)
    result = kron_quantize(weight, h_col, h_row, config=QuantConfig(bits=3, group_size=4))
    merged = result.merge_heads()
    assert merged.codes.shape == (6, 8)
    assert torch.equal(merged.dequantize(), result.dequantize().flatten(0, 1))


def test_nothing_that_is_given_changes_and_no_generator_moves():
    given = problem(2, 6, 20)
    copies = [x.clone() for x in given]
    state = torch.get_rng_state()
    kron_quantize(*given, config=QuantConfig(bits=3, act_order="auto"))
    assert all(torch.equal(x, copy) for x, copy in zip(given, copies, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_loss_is_that_of_the_kronecker_product(seed):
    delta, h_col, h_row = problem(3, 4, 6, seed=seed)
    expected = [delta[h].flatten() @ torch.kron(h_row[h], h_col) @ delta[h].flatten() for h in range(3)]
    torch.testing.assert_close(_kron_loss(delta, h_col, h_row), torch.stack(expected), rtol=1e-12, atol=0)
    plain = [
        delta[h].flatten() @ torch.kron(torch.eye(4, dtype=torch.float64), h_col) @ delta[h].flatten() for h in range(3)
    ]
    torch.testing.assert_close(_kron_loss(delta, h_col), torch.stack(plain), rtol=1e-12, atol=0)


def test_shapes_and_entries_that_do_not_fit_are_refused():
    weight, h_col, h_row = problem(2, 6, 20)
    config = QuantConfig(bits=3)

    def refuses(message, *arguments, error=InputError, **options):
        with as_users_have_it(), pytest.raises(error, match=message):
            kron_quantize(*arguments, **({"config": config} | options))

    refuses(r"weight must have shape \(rows, cols\) or \(heads, rows, cols\); got \(20,\)", weight[0, 0], h_col)
    refuses(r"h_col must be 20 x 20, for all heads or each; got \(19, 19\)", weight, h_col[1:, 1:])
    refuses(r"h_col must be 20 x 20, for all heads or each; got \(3, 20, 20\)", weight, h_col.expand(3, -1, -1))
    refuses(
        r"h_row must have shape \(2, 6, 6\) for a weight of shape \(2, 6, 20\); got \(6, 6\)", weight, h_col, h_row[0]
    )
    refuses(
        "weight has 1 entries that are NaN or infinite",
        weight.index_fill(0, torch.tensor(0), torch.nan)[:1, :1, :1],
        h_col[:1, :1],
    )
    refuses("h_col has 400 entries that are NaN or infinite", weight, h_col * torch.inf)
    refuses("h_row has 72 entries that are NaN or infinite", weight, h_col, h_row * torch.nan)
    refuses(
        "group_size must divide the number of inputs, 20; got 8",
        weight,
        h_col,
        error=ParameterError,
        config=QuantConfig(group_size=8),
    )
    grid = find_grid(weight, h_col, config=config)
    refuses(
        r"the grid must have scales of shape \(6, 1\) and codes from 0 to 7; got \(2, 6, 1\)",
        weight[0],
        h_col,
        grid=grid,
    )
    refuses(
        "codes from 0 to 15; got .* and 0 to 7. Make it by find_grid",
        weight,
        h_col,
        grid=grid,
        config=QuantConfig(bits=4),
    )
    refuses("not positive definite, not even with 11 times the damping", weight, -h_col, error=ConvergenceError)


def test_heads_may_be_solved_a_few_at_a_time(seed, monkeypatch):
    weight, h_col, h_row = problem(5, 4, 20, seed=seed, per_head=True)
    together = kron_quantize(weight, h_col, h_row, config=QuantConfig(bits=3))
    monkeypatch.setattr(heedful.compress.boa.solve, "_HELD", 2 * 400)
    assert torch.equal(kron_quantize(weight, h_col, h_row, config=QuantConfig(bits=3)).codes, together.codes)
