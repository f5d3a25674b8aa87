"""The seam to torch.distributed: the only file that calls its collectives.

[Note: two lanes] Each wrapper has groups of its own over the ranks of its process group: one for buckets, and a small
one on the CPU for control messages. On a shared group two wrappers, or a wrapper and its user's collectives, can meet
each other's traffic; gloo then aborts the process or sums unlike things without a word.

[Note: two ranks] gloo sums in a ring that every tensor passes twice, in pieces, each of which wakes its threads. Two
ranks may as well swap theirs and add: as many bytes, one hop, half of the processor's time, and the same sum bit for
bit. But the adding is then done by the thread that waits, and it has nothing else to do at the end of a backward alone.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections.abc import Generator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from . import _torch_private as private
from .errors import UsageError
from .works import DONE, Combination, PythonWork, UnfinishedWork, Work, run

# Up to which a message goes from each rank to each other. N - 1 of them are sent then, instead of two in the ring's
# pieces; but it is the hops that cost where a message is shorter than what a link carries in the time of two.
DIRECT_BYTES = 16 * 2**10
DIRECT_BYTES_IN_ALL = 4 * 2**20  # what a rank sends and receives at most
# Up to which a flat is swapped. Adding it is this process's work, and takes as much memory once more.
SWAP_BYTES = 4 * 2**20

# What every step calls are the group's own methods, as in DistributedDataParallel: the functions of torch.distributed
# before them take tens of microseconds when the caches are full of a model.
_SUM, _TO_ALL = dist.AllreduceOptions(), dist.AllToAllOptions()  # reductions are sums unless told otherwise
_SUM.asyncOp = _TO_ALL.asyncOp = True

# Groups of wrappers that are gone. A peer may still be in its last collective when a wrapper is dropped here, so they
# are destroyed only when a later wrapper's construction has shown that all ranks are past it.
_retired: list[dist.ProcessGroup] = []


class Collectives:
    """Every collective that one wrapper issues.

    Args:
        parent: the user's process group.
        own_group: make a data lane apart from ``parent``. A parent that cannot be cloned is used as it is.
    """

    def __init__(self, parent: dist.ProcessGroup, *, own_group: bool) -> None:
        self._wants_own_group = own_group
        self._data: dist.ProcessGroup | None = None
        self._control: dist.ProcessGroup | None = None
        self._room: MessageRoom | None = None
        self.move_to(parent)

    def move_to(self, parent: dist.ProcessGroup) -> None:
        """From now on talk to the ranks of ``parent``."""
        self.retire()
        self.parent = parent
        # Asked of the group itself: one written in Python may not be registered with torch.
        self.rank: int = parent.rank()
        self.world_size: int = parent.size()
        self._own_group = self._wants_own_group and is_cloneable(parent)
        # Sums over one rank are what they are sums of. A group written in Python may do more (count, note, raise).
        self._is_alone = self.world_size == 1 and is_cloneable(parent)
        self._is_own_gloo = self._own_group and _is_all_gloo(parent)

    @property
    def follows_program_order(self) -> bool:
        """Whether launches must come at the same point of the program on all ranks, whatever the timing.

        So it is on the user's own group; and for backends whose collectives of different groups may block each other
        on a device (NCCL). gloo's do not.
        """
        return not self._is_own_gloo

    @property
    def backend(self) -> str:
        """The parent's, as ``torch.distributed.get_backend`` names it."""
        return dist.get_backend(self.parent) if private.is_registered(self.parent) else self.parent.name()

    def backend_for(self, device_type: str) -> str:
        """The parent's for tensors on such devices; the parent's own name if it does not tell."""
        by_type = private.backends(self.parent) if private.is_registered(self.parent) else {}
        return by_type.get(device_type, self.backend)

    def _data_lane(self) -> dist.ProcessGroup:
        """The first call on a rank makes it, and is collective over ``parent``; likewise for the control lane."""
        if self._data is None:
            self._data = _clone(self.parent, dist.get_backend(self.parent)) if self._own_group else self.parent
        return self._data

    def _control_lane(self) -> dist.ProcessGroup:
        if self._control is None:
            self._control = _clone(self.parent, "gloo") if is_cloneable(self.parent) else self.parent
        return self._control

    def retire(self) -> None:
        """Give up the groups this object made; see ``_retired``."""
        made = [group for group in (self._data, self._control) if group is not None and group is not self.parent]
        _retired.extend(made)
        self._data = self._control = self._room = None

    # -- data lane

    def room_to_swap(self, tensor: Tensor) -> Tensor | None:
        """Memory for the other rank's ``tensor`` where swapping it is worth it, else None; the same on all ranks.

        To be asked for the last bucket of a plan alone; see [Note: two ranks].
        """
        is_alike = not tensor.is_sparse and tensor.device.type == "cpu" and tensor.nbytes <= SWAP_BYTES
        return torch.empty_like(tensor) if self.world_size == 2 and self._is_own_gloo and is_alike else None

    def all_reduce_sum(self, tensor: Tensor, room: Tensor | None = None) -> Work:
        """Sum ``tensor`` (1-D contiguous, or coalesced sparse) over ranks, in place.

        ``room``: what ``room_to_swap`` returned. The sum is then there after ``wait`` alone.
        """
        if self._is_alone:
            return DONE
        group = self._data_lane()
        if room is None:
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            return _work(group.allreduce([real], _SUM), real)
        whole = [0, tensor.nbytes] if self.rank == 0 else [tensor.nbytes, 0]
        sent, received = tensor.view(torch.uint8), room.view(torch.uint8)
        work = group.all_to_all_single(received, sent, whole, whole, _TO_ALL)
        return UnfinishedWork(_work(work), functools.partial(tensor.add_, room))

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> Work:
        """Overwrite ``tensor`` (1-D contiguous) with that of group rank ``source``."""
        return _work(dist.broadcast(tensor, group_src=source, group=self._data_lane(), async_op=True), tensor)

    # -- control lane

    def combine_or(self, message: bytes) -> Combination:
        """Combine bytes by bitwise OR over ranks; messages of all ranks have one size.

        Small messages go from each rank to each other, which takes one hop; gloo's all-reduce is a ring of 2 (N - 1).
        """
        if self._is_alone:
            return Combination(DONE, lambda: message)
        group = self._control_lane()
        in_all = self.world_size * len(message)
        if group is self.parent or len(message) > DIRECT_BYTES or in_all > DIRECT_BYTES_IN_ALL:
            combined = torch.frombuffer(bytearray(message), dtype=torch.uint8)
            work = dist.all_reduce(combined, op=dist.ReduceOp.BOR, group=group, async_op=True)
            return Combination(_work(work, combined), lambda: combined.numpy().tobytes())
        room, self._room = self._room, None  # until the result was read: one that is lost may still be written to
        if room is None or room.shape != (self.world_size, len(message)):
            room = MessageRoom(self.world_size, len(message))
        room.fill(message)
        work = group.all_to_all_single(room.received, room.sent, [], [], _TO_ALL)
        return Combination(_work(work), functools.partial(self._combined, room))

    def _combined(self, room: MessageRoom) -> bytes:
        self._room = room
        return room.combined()

    def combine_max(self, message: Tensor) -> Work:
        """Combine integers by MAX over ranks, in place. ``message`` is 1-D int64 on the CPU."""
        return _work(dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self._control_lane(), async_op=True), message)

    def gather_steps(self, mine: object) -> Generator[Work, None, list[Any]]:
        """What every rank passed, in rank order: yields each handle to wait for, then returns the objects."""
        group = self._control_lane()
        payload = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        yield _work(
            dist.all_gather(list(sizes.unsqueeze(1)), torch.tensor([payload.numel()]), group=group, async_op=True)
        )
        longest = int(sizes.max())
        found = torch.zeros(self.world_size, longest, dtype=torch.uint8)
        padded = torch.nn.functional.pad(payload, (0, longest - payload.numel()))
        yield _work(dist.all_gather(list(found), padded, group=group, async_op=True))
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(found, sizes.tolist(), strict=True)]

    def gather_objects(self, mine: object) -> list[Any]:
        """What every rank passed, in rank order. Blocks."""
        return run(self.gather_steps(mine))


class MessageRoom:
    """Where messages of one size are sent from and received.

    Shapes: ``sent`` and ``received`` are 1-D, a row of bytes for each rank, row after row.
    """

    def __init__(self, world_size: int, num_bytes: int) -> None:
        self.shape = world_size, num_bytes
        self.sent = torch.zeros(world_size * num_bytes, dtype=torch.uint8)
        self.received = torch.zeros_like(self.sent)
        self._world_size = world_size
        self._sent = memoryview(self.sent.numpy())  # type: ignore[arg-type]
        self._rows = self.received.numpy().reshape(world_size, num_bytes)

    def fill(self, message: bytes) -> None:
        """Every rank is to get ``message``."""
        self._sent[:] = message * self._world_size

    def combined(self) -> bytes:
        """What ranks sent, by bitwise OR."""
        combined: bytes = np.bitwise_or.reduce(self._rows).tobytes()
        return combined


class Alone(Collectives):
    """The collectives of a single process that made no process group: nothing has to be sent."""

    backend = "none"
    follows_program_order = False

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1

    def move_to(self, parent: dist.ProcessGroup) -> None:
        raise UsageError(
            "a wrapper that was made without a process group cannot be given one.\nFix: wrap the module again."
        )

    def backend_for(self, device_type: str) -> str:
        return self.backend

    def retire(self) -> None:
        """Nothing was made."""

    def room_to_swap(self, tensor: Tensor) -> Tensor | None:
        return None

    def all_reduce_sum(self, tensor: Tensor, room: Tensor | None = None) -> Work:
        return DONE

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> Work:
        return DONE

    def combine_or(self, message: bytes) -> Combination:
        return Combination(DONE, lambda: message)

    def combine_max(self, message: Tensor) -> Work:
        return DONE

    def gather_steps(self, mine: object) -> Generator[Work, None, list[Any]]:
        yield DONE
        return [mine]


def collectives_over(group: dist.ProcessGroup | None, *, own_group: bool) -> Collectives:
    """Those of ``group``; None: this process is alone."""
    return Alone() if group is None else Collectives(group, own_group=own_group)


def is_initialized() -> bool:
    """Whether there is a default process group."""
    return dist.is_initialized()


def _work(work: Any, tensor: Tensor | None = None) -> Work:
    """``dist`` types its handles as optional: None comes only from ranks outside the group."""
    assert work is not None
    return work if type(work) is dist.Work else PythonWork(work, tensor)


def is_cloneable(group: dist.ProcessGroup) -> bool:
    """Whether groups like ``group`` can be made: not for a ProcessGroup subclass written in Python."""
    return type(group) is dist.ProcessGroup and dist.get_backend(group) != "mpi"


def _is_all_gloo(group: dist.ProcessGroup) -> bool:
    """Whether it serves all its devices by gloo."""
    return set(private.backends(group).values()) == {"gloo"}


def _clone(parent: dist.ProcessGroup, backend: str) -> dist.ProcessGroup:
    """A group like ``parent``. Its name says how many were made over a parent of that name and size.

    Ranks make them in the same order, so they agree. The store keeps the count, not the process: it knows of the
    addresses that older groups left there, and a process that joins later, or was not a member for a while, goes on
    where the others are.
    """
    ranks = dist.get_process_group_ranks(parent)
    name = f"knownddp/{parent.group_name}/{len(ranks)}"
    number = private.count_in_store(f"{name}/{dist.get_rank(parent)}")
    return private.create_group(f"{name}/{number}/{backend}", ranks, backend, private.group_timeout(parent))


def destroy_retired() -> None:
    """Destroy what dropped wrappers left, now that every rank is known to be past their last collective."""
    while _retired:
        group = _retired.pop()
        # Only gloo groups: destroying an NCCL communicator may itself wait for peers.
        if private.is_registered(group) and _is_all_gloo(group):
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group(group)
