import json
import mmap
import platform
import time
from importlib import metadata

import pytest

from heedful._machine import Timing, fingerprint, peak_memory, time_call
from heedful.errors import ParameterError


def test_fingerprint_says_what_a_reader_must_know_and_not_whose_machine_it_is():
    found = fingerprint()
    assert json.loads(json.dumps(found)) == found
    assert found["packages"]["torch"] == metadata.version("torch")
    assert found["python"] == platform.python_version()
    assert found["cores"] >= 1
    assert found["memory_gib"] > 0
    assert found["processor"]
    assert found == fingerprint(), "it changes between two calls"
    assert platform.node() not in json.dumps(found)


def test_time_call_counts_calls_and_orders_its_numbers():
    calls = []
    timing = time_call(lambda: calls.append(None), n_timings=4, warmup=2)
    assert len(calls) == 6
    assert timing.n == 4
    assert 0 <= timing.fastest <= timing.median <= timing.slowest
    assert timing.to_dict().keys() == {"median", "fastest", "slowest", "n"}


def test_the_median_of_an_even_number_is_between_the_middle_two(monkeypatch):
    clock = iter([0, 1, 10, 12, 20, 24, 30, 38])  # calls of 1, 2, 4 and 8 seconds
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    assert time_call(lambda: None, n_timings=4, warmup=0) == Timing(median=3, fastest=1, slowest=8, n=4)


def test_a_call_of_known_length_is_timed():
    timing = time_call(lambda: time.sleep(0.02), n_timings=3, warmup=0)
    assert timing.fastest >= 0.0199  # clocks may round


def test_at_least_one_timing():
    with pytest.raises(ParameterError, match=r"^n_timings must be an int >= 1; got 0\.$"):
        time_call(lambda: None, n_timings=0)


def touch(mib: int) -> None:
    """Write memory that the system has just given, and give it back; an array may lie in memory freed before."""
    with mmap.mmap(-1, mib * 2**20) as memory:
        for _ in range(mib):
            memory.write(bytes(2**20))


def test_peak_memory_sees_what_is_gone_at_the_end():
    with peak_memory() as peak:
        touch(64)
    assert 60 < peak.mib < 200


@pytest.mark.skipif(platform.system() != "Linux", reason="only Linux can reset the high-water mark")
def test_a_peak_belongs_to_its_block():
    with peak_memory():
        touch(64)
    with peak_memory() as peak:
        touch(1)
    assert peak.mib < 30


def test_peak_memory_is_known_after_an_error():
    with pytest.raises(ZeroDivisionError), peak_memory() as peak:  # noqa: PT012  (the block is the test)
        touch(64)
        raise ZeroDivisionError
    assert peak.mib > 60
