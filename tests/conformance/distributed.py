"""Run a function in a process of its own, or on two gloo ranks, within a time limit.

The processes are forked from a server that has imported torch once, so that a run costs tenths of a second. What they
import of heedful is as users have it, without the type checks of the test run. Ranks meet in a file, not at a port:
nobody can take a file's place between its choice and its use.
"""

import contextlib
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

WORLD = 2
processes = multiprocessing.get_context("forkserver")
# Imports that the first DistributedDataParallel, the first torch.compile and heedful.calibrate cost: some seconds, once.
processes.set_forkserver_preload(
    ["pytest", "torch.distributed", "torch._dynamo", "torch._inductor.compile_fx", "safetensors.numpy", "sklearn.svm"]
)


def in_new_process(function: Callable[..., Any], *args: Any, seconds: float = 120) -> Any:
    """``function(*args)`` in a process of its own; both must be picklable: a function at the top of a module.

    Raises RuntimeError with the traceback if it fails, TimeoutError if it has not answered in time.
    """
    return _answers([(function, args)], seconds)[0]


def on_two_ranks(function: Callable[..., Any], *args: Any, seconds: float = 120) -> list[Any]:
    """``[function(rank, *args) for rank in (0, 1)]``, each in a process of one gloo group.

    Raises as :func:`in_new_process` does, for the rank that failed first; no process outlives the call.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store").as_uri()
        return _answers([(_on_rank, (rank, store, seconds, function, args)) for rank in range(WORLD)], seconds)


def _on_rank(rank: int, store: str, seconds: float, function: Callable[..., Any], args: tuple) -> Any:
    torch.distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=seconds)
    )
    answer = function(rank, *args)
    torch.distributed.destroy_process_group()
    return answer


def _answers(calls: Sequence[tuple[Callable[..., Any], tuple]], seconds: float) -> list[Any]:
    """What each call returns, all running at once, each in a process."""
    with contextlib.ExitStack() as stack:
        places = {}
        for place, (function, args) in enumerate(calls):
            receiver, sender = processes.Pipe(duplex=False)
            process = processes.Process(target=_call, args=(sender, function, args), daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)  # called first: callbacks run in reverse
            sender.close()  # so that a process that dies without a word ends the wait
            places[receiver] = place
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + seconds
        while waiting := [receiver for receiver, place in places.items() if place not in answers]:
            ready = wait(waiting, timeout=max(0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"no answer in {seconds:g} s; do processes wait for each other?")
            for receiver in ready:
                answers[places[receiver]] = _answer(receiver)
        return [answers[place] for place in range(len(calls))]


def _answer(receiver: Connection) -> Any:
    try:
        done, answer = receiver.recv()
    except EOFError:
        done, answer = False, "it died without a word"
    if not done:
        raise RuntimeError(f"another process failed:\n{answer}")
    return answer


def _call(sender: Connection, function: Callable[..., Any], args: tuple) -> None:
    torch.set_num_threads(1)
    try:
        sender.send((True, function(*args)))
    except BaseException:
        sender.send((False, traceback.format_exc()))
        sys.exit(1)
