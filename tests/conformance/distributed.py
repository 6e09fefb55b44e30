"""Run a function on two gloo ranks, each a process of its own, within a time limit.

The processes are forked from a server that has imported torch once, so that a run costs tenths of a second. They meet
in a file, not at a port: nobody can take a file's place between its choice and its use.
"""

import contextlib
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

WORLD = 2
processes = multiprocessing.get_context("forkserver")
# Two seconds of DistributedDataParallel's first use are torch._dynamo's import.
processes.set_forkserver_preload(["pytest", "torch.distributed", "torch._dynamo", "safetensors.numpy"])


def on_two_ranks(function: Callable[..., Any], *args: Any, seconds: float = 120) -> list[Any]:
    """``[function(rank, *args) for rank in (0, 1)]``, each in a process of one gloo group.

    ``function`` and ``args`` must be picklable: a function at the top of a module. Raises RuntimeError with the
    traceback of the rank that failed first, TimeoutError if a rank has not answered in time; no process outlives the
    call.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        store = Path(folder, "store").as_uri()
        ranks = {}
        for rank in range(WORLD):
            receiver, sender = processes.Pipe(duplex=False)
            process = processes.Process(target=_rank, args=(rank, store, seconds, sender, function, args), daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)  # called first: callbacks run in reverse
            sender.close()  # so that a rank that dies without a word ends the wait
            ranks[receiver] = rank
        answers = {}
        deadline = time.monotonic() + seconds
        while waiting := [receiver for receiver in ranks if ranks[receiver] not in answers]:
            ready = wait(waiting, timeout=max(0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"a rank has not answered in {seconds:g} s; the ranks may wait for each other.")
            for receiver in ready:
                answers[ranks[receiver]] = _answer(receiver)
        return [answers[rank] for rank in range(WORLD)]


def _answer(receiver: Connection) -> Any:
    try:
        done, answer = receiver.recv()
    except EOFError:
        done, answer = False, "it died without a word"
    if not done:
        raise RuntimeError(f"a rank failed:\n{answer}")
    return answer


def _rank(rank: int, store: str, seconds: float, sender, function: Callable[..., Any], args: tuple) -> None:
    torch.set_num_threads(1)
    try:
        torch.distributed.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=seconds)
        )
        answer = function(rank, *args)
        torch.distributed.destroy_process_group()
        sender.send((True, answer))
    except BaseException:
        sender.send((False, traceback.format_exc()))
        sys.exit(1)
