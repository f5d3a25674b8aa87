"""Processes that have torch from the start, and nothing yet of what faults are planted in; ranks among them."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any, Final

LIMIT_S: Final = 120
# What takes long to import.
PRELOADED: Final = (
    "torch.distributed.algorithms._optimizer_overlap",
    "torch.distributed.algorithms.join",
    "torch.distributed.optim.apply_optimizer_in_backward",
    "torch.nn.parallel.distributed",
    "torch.nn.utils.rnn",
    "numpy",
    "hypothesis",
)


def context() -> ForkServerContext:
    """Where processes come from."""
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(list(PRELOADED))
    return forkserver


def _rank(
    rank: int, world_size: int, folder: str, fn: Callable[..., Any], args: tuple[Any, ...], to: Connection
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    try:
        to.send((True, fn(rank, *args)))
    except Exception as error:
        to.send((False, repr(error)))
    to.recv()  # until all have answered: a rank that ends closes connections that others may still need
    os._exit(0)


def on_ranks(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``fn(rank, *args)`` returns on each rank of a gloo group. Raises ``AssertionError`` if it raises on one."""
    pipes, processes = [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world_size):
            ours, theirs = context().Pipe()
            process = context().Process(target=_rank, args=(rank, world_size, folder, fn, args, theirs))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            answers = []
            for rank, pipe in enumerate(pipes):
                assert pipe.poll(LIMIT_S), f"rank {rank} of {world_size} does not answer"
                answers.append(pipe.recv())
        except EOFError:
            raise AssertionError(f"a rank of {world_size} died") from None
        finally:
            for process in processes:
                process.kill()
                process.join()
    assert all(is_well for is_well, _ in answers), answers
    return [answer for _, answer in answers]
