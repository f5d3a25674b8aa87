"""One process a rank over gloo, started once for all scripts of a claim; scripts are played in lock step."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from ..claims import Refuted
from .script import Script

ROOT: Final = str(Path(__file__).parents[2])
START_LIMIT_S: Final = 120
GROUP_LIMIT_S: Final = 20  # a collective that waits longer raises
SCRIPT_LIMIT_S: Final = 40


class Processes:
    """Ranks over gloo. ``ran`` says what became of a script on each of them."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "numpy"])
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, self._folder.name, theirs), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Processes:
        if any(answer != "ready" for answer in self._answers(START_LIMIT_S)):  # an error here refutes nothing
            raise RuntimeError("ranks did not start")
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join()
            connection.close()
        self._folder.cleanup()

    def start(self, scripts: Sequence[Script]) -> None:
        """Begin to play these, in this order; ``ran`` returns what came of the first, then of the next ..."""
        for connection in self._connections:
            connection.send(list(scripts))

    def ran(self) -> list[tuple[Any, ...]]:
        """For each rank what it was told, what it started, and what it heard when it asked whether OPEN was back.

        Raises:
            Refuted: a rank raised, died or hangs.
        """
        answers = self._answers(SCRIPT_LIMIT_S)
        for rank, answer in enumerate(answers):
            if isinstance(answer, str):
                raise Refuted(f"rank {rank} {answer}")
        return answers

    def _answers(self, limit_s: float) -> list[Any]:
        found: list[Any] = []
        for connection in self._connections:
            try:
                found.append(connection.recv() if connection.poll(limit_s) else "hangs")
            except (EOFError, ConnectionResetError):
                found.append("died")
        return found


def _serve(rank: int, world: int, folder: str, orders: Connection) -> None:
    _forget_other_copies()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)  # type: ignore[attr-defined]
    limit = timedelta(seconds=GROUP_LIMIT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    played = importlib.import_module("proofs.pins.recorder").played
    gc.collect()
    gc.freeze()
    warnings.simplefilter("ignore")
    orders.send("ready")
    while True:
        try:
            scripts = orders.recv()
        except EOFError:
            os._exit(0)
        for script in scripts:
            try:
                orders.send(played(script, rank))
            except BaseException:
                orders.send(f"raised: {traceback.format_exc()}")
                break


def _forget_other_copies() -> None:
    """The server of processes may have loaded the packages from elsewhere: from where a copy with a fault is not."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] in ("knownddp", "proofs") and file and not file.startswith(ROOT):
            del sys.modules[name]
    if sys.path[0] != ROOT:
        sys.path.insert(0, ROOT)
