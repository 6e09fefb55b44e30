import os
import time

import pytest
import torch

from tests.conformance.distributed import on_two_ranks


def _sum_of_ranks(rank, offset):
    total = torch.tensor(float(rank + offset))
    torch.distributed.all_reduce(total)
    return rank, total.item()


def _fail_while_the_other_waits(rank):
    if rank == 1:
        raise ZeroDivisionError("only here")
    torch.distributed.barrier()


def _die(rank):
    os._exit(3)


def _never_answer(rank):
    time.sleep(60)


def test_two_processes_talk_to_each_other():
    assert on_two_ranks(_sum_of_ranks, 10) == [(0, 21.0), (1, 21.0)]


def test_the_error_of_a_rank_reaches_the_caller():
    with pytest.raises(RuntimeError, match="ZeroDivisionError: only here"):
        on_two_ranks(_fail_while_the_other_waits)


def test_a_rank_that_dies_without_a_word_is_an_error():
    with pytest.raises(RuntimeError, match="died without a word"):
        on_two_ranks(_die)


def test_a_rank_that_hangs_is_ended():
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer in 0\.5 s"):
        on_two_ranks(_never_answer, seconds=0.5)
    assert time.monotonic() - start < 30
