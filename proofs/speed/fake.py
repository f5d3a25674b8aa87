"""One rank of a group of any size, alone in a process: torch's fake process group, whose collectives do nothing.

Nothing runs on other threads then, so that counts of calls and of memory are the same each time.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import knownddp.ddp
import knownddp.lifecycle
from knownddp.comm import Collectives
from knownddp.works import DONE, Combination, Work


class FakeCollectives(Collectives):
    """Those of KnownDDP on the fake group itself, as if it were gloo. Every peer says what this rank says, but late:
    handles of the fake group are never completed, only waited for.
    """

    follows_program_order = False
    backend = "gloo"

    def __init__(self, parent: dist.ProcessGroup, *, own_group: bool) -> None:
        super().__init__(parent, own_group=False)
        self._is_own_gloo = True

    def _control_lane(self) -> dist.ProcessGroup:
        return self.parent

    def gather_steps(self, mine: object) -> Generator[Work, None, list[Any]]:
        yield DONE
        return [mine] * self.world_size


class PromptCollectives(FakeCollectives):
    """Peers' messages are there at once."""

    def combine_or(self, message: bytes) -> Combination:
        super().combine_or(message)
        return Combination(DONE, lambda: message)


@contextmanager
def fake_rank(rank: int, world_size: int, kind: type[FakeCollectives] = FakeCollectives) -> Iterator[None]:
    """Inside, this process is rank ``rank`` of ``world_size``. ``kind``: those of KnownDDP."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with (
            mock.patch.object(knownddp.ddp, "collectives_over", kind),
            mock.patch.object(knownddp.lifecycle, "collectives_over", kind),
        ):
            yield
    finally:
        dist.destroy_process_group()


def make_complete(wrapper: nn.Module) -> None:
    """Torch's DDP wants the result of an all-reduce, of which the fake group's handle has none: a hook gives it.

    What is called and what is held in memory stays the same.
    """

    def all_reduce(state, bucket):  # type: ignore[no-untyped-def]  # torch wants classes, not their names
        dist.all_reduce(bucket.buffer())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    if type(wrapper) is DistributedDataParallel:
        wrapper.register_comm_hook(None, all_reduce)


class Recorder(TorchDispatchMode):
    """Keeps of every collective that is called inside its name, whether it is of gradients, and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, bool, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            first = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            tensors = [one for one in first if isinstance(one, torch.Tensor)]
            is_swap = func._opname.startswith("alltoall")  # of the bytes of gradients
            for one in tensors:
                self.log.append((func._opname, is_swap or one.dtype.is_floating_point, one.nbytes))
        return func(*args, **(kwargs or {}))
