import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful._random import numpy_generator, spawn, torch_generator
from heedful.errors import ParameterError
from tests.conformance.generators import global_generators_stay

seeds = st.integers(0, 2**80)


@given(seed=seeds)
def test_the_same_int_gives_the_same_draws(seed):
    assert np.array_equal(numpy_generator(seed).random(3), np.random.default_rng(seed).random(3))
    assert np.array_equal(numpy_generator(seed).random(3), numpy_generator(seed).random(3))
    draws = [torch.rand(3, generator=torch_generator(seed)) for _ in range(2)]
    assert torch.equal(*draws)


def test_an_int_seeds_torch_directly(seed):
    expected = torch.rand(3, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(torch.rand(3, generator=torch_generator(np.int64(seed))), expected)


def test_seeds_too_large_for_torch_are_taken_all_the_same():
    left, right = (torch.rand(8, generator=torch_generator(2**70 + i)) for i in range(2))
    assert not torch.equal(left, right)


def test_a_generator_is_used_as_it_is_and_moves(seed):
    mine, twin = np.random.default_rng(seed), np.random.default_rng(seed)
    assert numpy_generator(mine) is mine
    first, second = torch_generator(mine), torch_generator(mine)
    assert first.initial_seed() != second.initial_seed()
    assert first.initial_seed() == torch_generator(twin).initial_seed()


def test_a_random_state_seeds_and_moves(seed):
    mine, twin = (np.random.RandomState(seed % 2**32) for _ in range(2))
    first, second = numpy_generator(mine).random(), numpy_generator(mine).random()
    assert first != second
    assert [numpy_generator(twin).random() for _ in range(2)] == [first, second]


def test_none_differs_each_time():
    assert numpy_generator(None).random() != numpy_generator(None).random()
    assert torch_generator().initial_seed() != torch_generator().initial_seed()


@pytest.mark.parametrize("wrong", [-1, 1.0, "0", True, np.random, torch.Generator()])
@pytest.mark.parametrize("door", [numpy_generator, torch_generator, lambda wrong: spawn(wrong, 2)])
def test_anything_else_is_refused(door, wrong):
    with pytest.raises(
        ParameterError, match=r"random_state must be None, an int >= 0, a numpy Generator, or a numpy Ran"
    ):
        door(wrong)


@given(seed=st.integers(0, 2**40), n=st.integers(0, 20), more=st.integers(0, 20))
def test_spawned_seeds_do_not_depend_on_how_many_are_asked_for(seed, n, more):
    few = spawn(seed, n)
    assert few == spawn(seed, n + more)[:n]
    assert len(few) == n


def test_spawned_seeds_differ_and_suit_every_consumer(seed):
    found = spawn(seed, 200)
    assert len(set(found)) == 200
    assert not set(found) & set(spawn(seed + 1, 200))
    for child in found:
        np.random.RandomState(child)
        torch.Generator().manual_seed(child)
    assert spawn(np.random.default_rng(seed), 3) == spawn(np.random.default_rng(seed), 3)


def test_no_global_generator_moves(seed):
    with global_generators_stay("a generator of ours"):
        numpy_generator(seed).random()
        torch.rand(1, generator=torch_generator(seed))
        spawn(seed, 3)
        torch_generator(None)
