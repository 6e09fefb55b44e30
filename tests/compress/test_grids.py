"""Grids: nearest values, bit for bit, along any axis."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful.compress import QuantGrid
from heedful.compress._grids import require_groups
from heedful.errors import InputError, ParameterError
from tests.conformance.typechecks import as_users_have_it


def grid_of(scale, zero, **options):
    return QuantGrid(torch.tensor(scale), torch.tensor(zero), **options)


@given(
    values=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=20),
    scale=st.floats(0.0625, 8, width=32),
    zero=st.integers(0, 15),
)
def test_each_value_goes_to_the_nearest_of_the_grid(values, scale, zero):
    grid, w = grid_of([[scale]], [[zero]], qmin=0, qmax=15), torch.tensor([values])
    everything = grid.dequantize(torch.arange(16).to(torch.uint8)[None])[0]
    nearest = (w[0, :, None] - everything).abs().amin(dim=1)
    distance = (grid.fake_quantize(w)[0] - w[0]).abs()
    torch.testing.assert_close(distance, nearest, rtol=1e-5, atol=1e-5)  # two rounded subtractions around 100


def test_what_is_on_the_grid_stays_and_the_middle_goes_to_the_even_code():
    grid = grid_of([[0.5]], [[1]], qmin=0, qmax=3)
    assert grid.fake_quantize(torch.tensor([[-0.5, 0, 0.5, 1]])).tolist() == [[-0.5, 0, 0.5, 1]]
    assert grid.quantize(torch.tensor([[0.25, 0.75, -9, 9]])).tolist() == [[1, 3, 0, 3]]


def test_every_group_has_its_own_scale_on_any_axis():
    scale, zero = torch.tensor([[1.0, 10.0]]), torch.tensor([[0, 2]])
    w = torch.tensor([[1.2, 2.7, 12.0, -19.0]])
    along_rows = QuantGrid(scale, zero, 0, 3, group_size=2)
    assert along_rows.quantize(w).tolist() == [[1, 3, 3, 0]]
    assert along_rows.dequantize(along_rows.quantize(w)).tolist() == [[1, 3, 10, -20]]
    along_columns = QuantGrid(scale.T, zero.T, 0, 3, axis=0, group_size=2)
    assert torch.equal(along_columns.quantize(w.T), along_rows.quantize(w).T)


def test_one_scale_may_stand_for_all_entries_of_other_dimensions():
    w = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    per_channel = QuantGrid(torch.full((4, 1, 1, 1), 0.1), torch.zeros(4, 1, 1, 1, dtype=torch.int32), -8, 7, axis=1)
    assert torch.equal(per_channel.quantize(w), (w / 0.1).round().clamp(-8, 7).to(torch.int8))


@pytest.mark.parametrize(
    ("bounds", "dtype"),
    [((0, 255), torch.uint8), ((-128, 127), torch.int8), ((0, 256), torch.int16), ((-1, 2**20), torch.int32)],
)
def test_codes_have_the_smallest_type_that_holds_them(bounds, dtype):
    assert grid_of([1.0], [0], qmin=bounds[0], qmax=bounds[1]).quantize(torch.ones(3)).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_values_have_the_dtype_of_the_scale_rounded_once(dtype):
    generator = torch.Generator().manual_seed(0)
    scale = (torch.rand(64, 1, generator=generator) + 0.01).to(dtype)
    grid = QuantGrid(scale, torch.randint(0, 256, (64, 1), generator=generator), 0, 255)
    codes = torch.randint(0, 256, (64, 32), generator=generator, dtype=torch.uint8)
    values = grid.dequantize(codes)
    assert values.dtype == dtype
    # Products of an integer below 256 and a number of 11 bits are exact in float64, so this rounds once, as readers do.
    assert torch.equal(values, ((codes.double() - grid.zero) * scale.double()).to(dtype))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"qmax": 0}, ParameterError, "qmax must be an int >= 1; got 0"),
        ({"qmin": 0.5}, ParameterError, "qmin must be an int; got 0.5"),
        ({"group_size": 0}, ParameterError, "group_size must be an int >= 1; got 0"),
        (
            {"scale": torch.ones(2, 2), "zero": torch.zeros(2, 2, dtype=torch.int32)},
            InputError,
            "without groups has one",
        ),
        ({"zero": torch.zeros(3, 1, dtype=torch.int32)}, InputError, "scale and zero must have one shape"),
    ],
)
def test_grids_that_cannot_be_are_refused(options, error, message):
    sound = {"scale": torch.ones(2, 1), "zero": torch.zeros(2, 1, dtype=torch.int32), "qmin": 0, "qmax": 3}
    with as_users_have_it(), pytest.raises(error, match=message):
        QuantGrid(**(sound | options))


def test_tensors_that_do_not_fit_the_grid_are_refused():
    grid = grid_of([[1.0, 1.0]], [[0, 0]], qmin=0, qmax=3, group_size=2)
    with pytest.raises(InputError, match="the grid has 2 groups of 2 along dimension 1; the tensor has 6 entries"):
        grid.quantize(torch.ones(1, 6))
    with pytest.raises(InputError, match="the grid is for 2 dimensions; got a tensor of shape \\(4,\\)"):
        grid.quantize(torch.ones(4))


def test_groups_must_divide_what_they_cut():
    assert require_groups(96, 32) == 32
    assert require_groups(96, -1) == 96
    message = "group_size must divide the number of inputs, 96; got 64. Choose a divisor, such as 32, or -1"
    with pytest.raises(ParameterError, match=message):
        require_groups(96, 64)
