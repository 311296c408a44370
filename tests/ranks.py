"""Run one function as the ranks of a real gloo group, one process each.

The processes are forked from a server that has imported torch already, so a call costs a fraction of a second
instead of an import of torch per rank. Functions must stand at the top level of a module; what they take and return
must be picklable. Tensors travel as plain pickles, not by multiprocessing's own pickler: that shares file
descriptors, which die with the process that made them.
"""

import datetime
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")
# An optimizer's first step and DDP import torch._dynamo: seconds that each rank would spend again.
CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "pytest"])


class RankError(RuntimeError):
    """A rank failed: its traceback as text, or the exit code of a process that ended without a word."""


def run_ranks(function: Callable, world_size: int, *args: Any, timeout: float = 60) -> list:
    """Call `function(rank, world_size, *args)` in `world_size` processes of one gloo group, each on one thread.

    Returns the results in rank order. The first rank's exception is raised here again, with its traceback text in a
    RankError as the cause; RankError alone where a process died silently; TimeoutError after `timeout` seconds.
    No process outlives the call.
    """
    with tempfile.TemporaryDirectory() as folder:
        store, payload = str(Path(folder) / "store"), pickle.dumps(args)
        processes, pipes = [], []
        try:
            for rank in range(world_size):
                pipe, child_end = CONTEXT.Pipe()
                call = (function, rank, world_size, payload, timeout, store, dict(os.environ), child_end)
                processes.append(CONTEXT.Process(target=run_rank, args=call, daemon=True))
                pipes.append(pipe)
                processes[-1].start()
                child_end.close()  # else a dead child would not read as end of file here
            return collect(pipes, processes, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def collect(pipes: list, processes: list, deadline: float) -> list:
    """Results in rank order, or the first failure, raised."""
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            silent = [rank for rank in range(len(pipes)) if rank not in results]
            raise TimeoutError(f"no result from ranks {silent} of {len(pipes)} in time")
        answers = [(pipes.index(pipe), *receive(pipe, processes[pipes.index(pipe)])) for pipe in ready]
        # A rank may fail only because its peer is gone: the earliest failure is the cause.
        for rank, _, error, text in sorted((answer for answer in answers if answer[3]), key=lambda answer: answer[1]):
            raise (error or RankError(f"rank {rank} failed")) from RankError(f"rank {rank} failed:\n{text}")
        results.update({rank: result for rank, _, result, _ in answers})
    return [results[rank] for rank in range(len(pipes))]


def receive(pipe: Any, process: Any) -> tuple[float, Any, str]:
    """When the rank answered (seconds), its result or exception, and the traceback text, empty on success."""
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join(5)
        return 0.0, None, f"the process ended without a result, exit code {process.exitcode}"


def run_rank(
    function: Callable, rank: int, world_size: int, payload: bytes, timeout: float, store: str, environ: dict, pipe: Any
) -> None:
    # The server was started by an earlier test: its environment is not the caller's.
    os.environ.clear()
    os.environ.update(environ)
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout),
        )
        result = function(rank, world_size, *pickle.loads(payload))
        if dist.is_initialized():
            dist.barrier()  # nobody leaves while a peer still talks
            dist.destroy_process_group()
        answer = pickle.dumps((time.monotonic(), result, ""))
    except BaseException as error:
        answer = failure_to_bytes(error, time.monotonic(), traceback.format_exc())
    pipe.send_bytes(answer)


def failure_to_bytes(error: BaseException, moment: float, text: str) -> bytes:
    try:
        answer = pickle.dumps((moment, error, text))
        pickle.loads(answer)
    except Exception:  # an exception that does not survive a pickle is told by its text alone
        answer = pickle.dumps((moment, None, text))
    return answer
