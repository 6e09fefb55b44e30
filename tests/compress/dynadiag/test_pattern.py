"""Diagonals cover a matrix exactly, and blocks hold what they say."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful.compress import block_fill, diagonal_indices, to_bcsr
from heedful.compress.dynadiag.pattern import active_diagonals, check_offsets, indices
from heedful.errors import InputError, ParameterError

SHAPES = [(1, 1), (1, 7), (7, 1), (2, 3), (3, 2), (5, 5), (7, 11), (13, 11), (6, 4), (12, 30)]


def dense(values, offsets, out_features, in_features):
    weight = torch.zeros(out_features, in_features, dtype=values.dtype)
    weight[diagonal_indices(out_features, in_features, offsets)] = values
    return weight


@pytest.mark.parametrize(
    ("out_features", "in_features", "tall"),
    [(m, n, tall) for m, n in SHAPES for tall in (True, False) if m == n or tall == (m > n)],  # a square one both ways
)
def test_all_diagonals_together_cover_every_cell_once(out_features, in_features, tall):
    offsets = torch.arange(max(out_features, in_features))
    rows, cols = indices(out_features, in_features, offsets, tall=tall)
    count = torch.zeros(out_features, in_features).index_put((rows, cols), torch.tensor(1.0), accumulate=True)
    assert torch.equal(count, torch.ones(out_features, in_features))


def test_examples_done_by_hand():
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert dense(values, (0, 2), 2, 3).tolist() == [[1, 0, 3], [4, 2, 0]]
    assert dense(values, (0, 2), 3, 2).tolist() == [[1, 4], [0, 2], [3, 0]]


@given(st.integers(1, 20), st.integers(1, 20), st.data())
def test_the_transpose_has_the_same_diagonals(out_features, in_features, data):
    offsets = torch.tensor(data.draw(st.permutations(range(max(out_features, in_features))))[:3])
    tall = out_features >= in_features
    rows, cols = indices(out_features, in_features, offsets, tall=tall)
    other = indices(in_features, out_features, offsets, tall=not tall)
    assert torch.equal(rows, other.cols)
    assert torch.equal(cols, other.rows)


@pytest.mark.parametrize("n", [4, 5, 6])
def test_two_diagonals_reach_every_output_from_every_input_after_enough_layers(n):
    for first in range(n):
        for second in range(first):
            if math.gcd(first - second, n) == 1:
                layer = dense(torch.ones(2, n), (first, second), n, n)
                assert (torch.linalg.matrix_power(layer, n - 1) > 0).all()


@pytest.mark.parametrize(
    ("sparsity", "groups", "expected"), [(0.9, 1, 48), (0.95, 1, 24), (0.999, 1, 1), (0.0, 1, 480), (0.95, 16, 32)]
)
def test_active_diagonals_are_the_complement_of_the_sparsity_rounded_up(sparsity, groups, expected):
    assert active_diagonals(480, sparsity, groups=groups) == expected


@pytest.mark.parametrize(("offset", "blocks"), [(0, 1), (16, 1), (17, 2), (31, 2)])
def test_a_diagonal_touches_one_block_a_row_if_aligned_and_two_if_not(offset, blocks):
    assert block_fill([offset], 768, 768) == pytest.approx(blocks / 48)


def test_runs_of_neighbouring_offsets_touch_fewer_blocks_than_as_many_random_ones():
    runs = (torch.tensor([0, 10, 20, 30, 40])[:, None] * 16 + torch.arange(16)).flatten()
    apart = torch.randperm(768, generator=torch.Generator().manual_seed(0))[: len(runs)]
    assert block_fill(runs, 768, 768) == pytest.approx(10 / 48)  # a run crosses two blocks a row
    assert block_fill(apart, 768, 768) > 0.9


def test_blocks_cut_off_by_the_border_count():
    assert block_fill([0], 20, 20) == pytest.approx(2 / 4)


@pytest.mark.parametrize(("out_features", "in_features"), [(32, 64), (64, 32), (48, 48)])
@pytest.mark.parametrize("block", [1, 8, 16])
def test_bcsr_holds_the_matrix_and_only_touched_blocks(out_features, in_features, block, seed):
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.randperm(max(out_features, in_features), generator=generator)[:3]
    values = 1 + torch.rand(3, min(out_features, in_features), generator=generator)
    matrix = to_bcsr(values, offsets, out_features, in_features, block)
    assert torch.equal(matrix.to_dense(), dense(values, offsets, out_features, in_features))
    assert matrix.layout == torch.sparse_bsr
    n_blocks = (out_features // block) * (in_features // block)
    assert len(matrix.values()) == round(block_fill(offsets, out_features, in_features, block) * n_blocks)
    assert (matrix.values().flatten(1) != 0).any(1).all()


@pytest.mark.parametrize("offsets", [(0, 9), (-1, 2), (12, 3)])
def test_offsets_out_of_range_are_refused(offsets):
    with pytest.raises(InputError, match="offsets 0 to 8"):
        diagonal_indices(9, 4, offsets)


def test_an_offset_given_twice_is_refused_by_name():
    with pytest.raises(InputError, match="offset 4 is given twice"):
        diagonal_indices(9, 4, (4, 2, 4))


def test_offsets_changed_in_place_are_looked_at_again():
    offsets = torch.tensor([0, 1])
    assert check_offsets(offsets, 5) == (0, 1)
    offsets[0] = 4
    assert check_offsets(offsets, 5) == (4, 1)
    offsets[0] = 5
    with pytest.raises(InputError):
        check_offsets(offsets, 5)


def test_bad_blocks_and_values_are_refused():
    values = torch.ones(1, 32)
    with pytest.raises(ParameterError, match="do not tile a 32 × 40 matrix"):
        to_bcsr(values, [0], 32, 40, 16)
    with pytest.raises(InputError, match=r"need \(2, 32\)"):
        to_bcsr(values, [0, 1], 32, 64)
    with pytest.raises(ParameterError, match="block"):
        block_fill([0], 32, 32, 0)
    with pytest.raises(ParameterError, match="out_features"):
        diagonal_indices(0, 3, [0])
