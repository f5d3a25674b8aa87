"""Started processes that wait for work: importing torch and joining a process group costs seconds, a task none."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# A collective that waits longer than this raises on its rank ...
GROUP_TIMEOUT_S = 20
# ... and a task that takes longer than this is a hang: every rank's stack is shown and the ranks are replaced.
TASK_LIMIT_S = 50
START_LIMIT_S = 120


class RanksFailed(AssertionError):
    """What went wrong on which rank."""


def _serve(rank: int, world_size: int, folder: str, orders: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with open(f"{folder}/stack{rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        store = dist.FileStore(f"{folder}/store", world_size)
        timeout = timedelta(seconds=GROUP_TIMEOUT_S)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        dist.barrier()
        gc.collect()
        gc.freeze()  # the collection after each task then looks at what the task made, not at torch's modules
        orders.send(("ready", None))
        while True:
            try:
                task = orders.recv()
            except EOFError:
                os._exit(0)
            if task is None:
                os._exit(0)  # at once: peers may close their sockets in any order
            fn, args = task
            warnings.simplefilter("error")  # before each task: torch's Join sets a filter of its own
            try:
                torch.manual_seed(0)
                result = fn(rank, *args)
                gc.collect()
                _check_in_step(rank, world_size)
            except BaseException:
                orders.send(("raised", traceback.format_exc()))
            else:
                orders.send(("returned", result))


def _check_in_step(rank: int, world_size: int) -> None:
    """Whatever a task did, ranks must leave the process group usable and at the same place."""
    import torch
    import torch.distributed as dist

    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    assert total.item() == world_size * (world_size + 1) // 2, "the process group is out of step"


class _Pool:
    def __init__(self, world_size: int, patience_s: float) -> None:
        self.world_size = world_size
        self._patience_s = patience_s
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "numpy", "knownddp"])
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, self._folder.name, theirs), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        answers = self._collect(START_LIMIT_S)
        if any(answer != ("ready", None) for answer in answers):
            raise RanksFailed(self._describe(answers))

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        for connection in self._connections:
            connection.send((fn, args))
        answers = self._collect(TASK_LIMIT_S)
        if all(kind == "returned" for kind, _ in answers):
            return [value for _, value in answers]
        raise RanksFailed(self._describe(answers))

    def _collect(self, limit_s: float) -> list[tuple[str, Any]]:
        answers: list[tuple[str, Any]] = [("hangs", None)] * self.world_size
        waiting = dict(zip(self._connections, range(self.world_size), strict=True))
        deadline = time.monotonic() + limit_s
        while waiting and time.monotonic() < deadline:
            for connection in wait(list(waiting), timeout=deadline - time.monotonic()):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(5)
                    answers[rank] = ("died", self._processes[rank].exitcode)
            if any(kind in ("died", "raised") for kind, _ in answers):
                # What peers still say is worth hearing, but not the whole limit.
                deadline = min(deadline, time.monotonic() + self._patience_s)
        for rank in waiting.values():
            answers[rank] = ("hangs", self._stack(rank))
        return answers

    def _stack(self, rank: int) -> str:
        path = Path(self._folder.name, f"stack{rank}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        for _ in range(50):
            if path.exists() and path.stat().st_size:
                break
            self._processes[rank].join(0.1)
        return path.read_text() if path.exists() else "no stack"

    def _describe(self, answers: list[tuple[str, Any]]) -> str:
        rows = [f"-- rank {rank} {kind}: {value}" for rank, (kind, value) in enumerate(answers)]
        return f"on {self.world_size} ranks\n" + "\n".join(rows)

    def stop(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(None)
        deadline = time.monotonic() + 2
        for connection, process in zip(self._connections, self._processes, strict=True):
            process.join(max(0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            connection.close()
        self._folder.cleanup()


class RankPools:
    """One pool a world size, started when first asked for.

    Args:
        patience_s: how long peers of a rank that raised may go on, for what they say is worth hearing.
    """

    def __init__(self, patience_s: float = GROUP_TIMEOUT_S + 5) -> None:
        self._patience_s = patience_s
        self._pools: dict[int, _Pool] = {}

    def run(self, world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        pool = self._pools.get(world_size)
        if pool is None:
            pool = self._pools[world_size] = _Pool(world_size, self._patience_s)
        try:
            return pool.run(fn, args)
        except BaseException:
            self._pools.pop(world_size).stop()
            raise

    def stop(self) -> None:
        for pool in self._pools.values():
            pool.stop()
        self._pools.clear()


def run_processes(target: Callable[..., None], world_size: int, *args: Any) -> list[Any]:
    """What ``target(rank, *args, answer)`` sends through the connection ``answer``, by rank, in processes of their own.

    For tasks that need a default process group made by themselves.
    """
    context = multiprocessing.get_context("forkserver")
    started, answers = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(rank, *args, theirs), daemon=True)
        process.start()
        theirs.close()
        started.append(process)
        answers.append(ours)
    try:
        assert all(one.poll(START_LIMIT_S) for one in answers), "a rank hangs"
        return [one.recv() for one in answers]
    finally:
        for process in started:
            process.kill()
            process.join()


if sys.platform != "linux":  # pragma: no cover
    raise RuntimeError("the tests bind gloo to the interface 'lo'")
