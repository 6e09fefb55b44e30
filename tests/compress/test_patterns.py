"""Masks at random have the count that their density says, and diagonals wrap."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful.compress._patterns import active_weights, diagonal_mask, random_diagonals, random_mask, require_sparsity
from heedful.errors import ParameterError


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@given(out=st.integers(1, 30), inputs=st.integers(1, 30), percent=st.integers(0, 99), seed=st.integers(0, 2**20))
def test_random_masks_have_exactly_the_count_of_their_density(out, inputs, percent, seed):
    shape, density = (out, inputs), 1 - percent / 100
    assert random_mask(shape, density, generator=generator(seed)).sum() == active_weights(shape, density)
    mask = random_diagonals(shape, density, generator=generator(seed))
    assert mask.sum() == max(1, -(-(100 - percent) * max(shape) // 100)) * min(shape)  # rounded up in integers: exact


def test_diagonal_mask_wraps():
    assert diagonal_mask((2, 3), torch.tensor([2])).int().tolist() == [[0, 0, 1], [1, 0, 0]]
    assert diagonal_mask((3, 2), torch.tensor([2])).int().tolist() == [[0, 1], [0, 0], [1, 0]]


def test_masks_are_drawn_by_the_generator_given():
    for draw in (random_mask, random_diagonals):
        state = torch.get_rng_state()
        one, same, other = (draw((9, 12), 0.3, generator=generator(seed)) for seed in (1, 1, 2))
        assert torch.equal(one, same)
        assert not torch.equal(one, other)
        assert torch.equal(state, torch.get_rng_state())


def test_convolutions_have_masks_too():
    assert random_mask((8, 4, 3, 3), 0.25, generator=generator()).sum() == 72


@pytest.mark.parametrize("sparsity", [-0.1, 1.0, 1.5, float("nan")])
def test_a_sparsity_that_leaves_nothing_or_more_than_all_is_refused(sparsity):
    with pytest.raises(ParameterError, match="sparsity must be"):
        require_sparsity(sparsity)
