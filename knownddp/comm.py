"""The seam to torch.distributed: the only file that calls its collectives.

[Note: two lanes] Each wrapper has groups of its own over the ranks of its process group: one for buckets, and a small
one on the CPU for control messages. On a shared group two wrappers, or a wrapper and its user's collectives, can meet
each other's traffic; gloo then aborts the process or sums unlike things without a word.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from . import _torch_private as private
from .errors import UsageError

# Groups of wrappers that are gone. A peer may still be in its last collective when a wrapper is dropped here, so they
# are destroyed only when a later wrapper's construction has shown that all ranks are past it.
_retired: list[dist.ProcessGroup] = []


class Work(Protocol):
    """Handle of one launched collective."""

    def wait(self) -> Any: ...

    def is_completed(self) -> bool: ...

    def get_future(self) -> torch.futures.Future[Any]: ...


class Done:
    """The handle of what needs no peer."""

    def wait(self) -> None:
        """Returns at once."""

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future


DONE = Done()

NO_TIMEOUT = timedelta(0)  # C++'s kNoTimeout: the group's own


class PythonWork:
    """A handle from a group written in Python. Its ``wait`` may insist on a time-out, and its future may hold the
    result as a tensor of its own: that counts, as for torch.

    Args:
        work: the handle.
        tensor: where the result belongs; None if it arrives where it should.
    """

    def __init__(self, work: Any, tensor: Tensor | None) -> None:
        self._work = work
        self._tensor = tensor

    def wait(self) -> None:
        self._work.wait(NO_TIMEOUT)
        if self._tensor is None:
            return
        result = self._work.get_future().wait()
        result = result[0] if isinstance(result, (list, tuple)) else result
        if isinstance(result, Tensor) and result is not self._tensor:
            self._tensor.copy_(result)
        self._tensor = None

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def get_future(self) -> Any:
        return self._work.get_future()


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
        self.move_to(parent)

    def move_to(self, parent: dist.ProcessGroup) -> None:
        """From now on talk to the ranks of ``parent``."""
        self.retire()
        self.parent = parent
        # Asked of the group itself: one written in Python may not be registered with torch.
        self.rank: int = parent.rank()
        self.world_size: int = parent.size()
        self._own_group = self._wants_own_group and is_cloneable(parent)

    @property
    def follows_program_order(self) -> bool:
        """Whether launches must come at the same point of the program on all ranks, whatever the timing.

        So it is on the user's own group; and for backends whose collectives of different groups may block each other
        on a device (NCCL). gloo's do not.
        """
        return not self._own_group or set(private.backends(self.parent)) != {"gloo"}

    @property
    def backend(self) -> str:
        """The parent's."""
        return dist.get_backend(self.parent) if private.is_registered(self.parent) else self.parent.name()

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
        self._data = self._control = None

    # -- data lane

    def all_reduce_sum(self, tensor: Tensor) -> Work:
        """Sum ``tensor`` (1-D contiguous, or coalesced sparse) over ranks, in place."""
        return _work(dist.all_reduce(tensor, group=self._data_lane(), async_op=True), tensor)

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> Work:
        """Overwrite ``tensor`` (1-D contiguous) with that of group rank ``source``."""
        return _work(dist.broadcast(tensor, group_src=source, group=self._data_lane(), async_op=True), tensor)

    # -- control lane

    def combine_or(self, message: Tensor) -> Work:
        """Combine bytes by bitwise OR over ranks, in place. ``message`` is 1-D uint8 on the CPU."""
        return _work(dist.all_reduce(message, op=dist.ReduceOp.BOR, group=self._control_lane(), async_op=True), message)

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

    def retire(self) -> None:
        """Nothing was made."""

    def all_reduce_sum(self, tensor: Tensor) -> Work:
        return DONE

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> Work:
        return DONE

    def combine_or(self, message: Tensor) -> Work:
        return DONE

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


T = TypeVar("T")


def run(steps: Generator[Work, None, T]) -> T:
    """Go through ``steps``, waiting for each handle they yield, and return what they return.

    If waiting fails, the steps hear of it where they yielded. An interrupt (Ctrl-C) is raised when they have ended:
    peers wait for what follows.
    """
    interrupts: list[BaseException] = []
    try:
        work = next(steps)
        while True:
            work = _after(work, steps, interrupts)
    except StopIteration as stop:
        raise_first(interrupts)
        return stop.value  # type: ignore[no-any-return]


def _after(work: Work, steps: Generator[Work, None, T], interrupts: list[BaseException]) -> Work:
    """Wait for ``work``, go on with ``steps``, and return the next handle."""
    try:
        try:
            work.wait()
        except KeyboardInterrupt as interrupt:
            interrupts.append(interrupt)
            work.wait()
    except BaseException as error:
        return steps.throw(error)
    return next(steps)


def run_in_turn(several: Sequence[Generator[Work, None, None]]) -> None:
    """Go through several sequences of steps one after the other. The first exception is raised when all have ended."""
    errors: list[BaseException] = []
    for steps in several:
        try:
            run(steps)
        except BaseException as error:
            errors.append(error)
    raise_first(errors)


def run_together(several: Sequence[Generator[Work, None, None]]) -> None:
    """Go through several sequences of steps at once, each as its handles are done, none waiting for another in turn.

    Peers may wait for them in any order. The first exception is raised when all have ended.
    """
    errors: list[BaseException] = []
    waiting: list[tuple[Generator[Work, None, None], Work]] = []

    def advance(steps: Generator[Work, None, None], work: Work) -> None:
        try:
            waiting.append((steps, _after(work, steps, errors)))
        except StopIteration:
            pass
        except BaseException as error:
            errors.append(error)

    for steps in several:
        advance(steps, DONE)
    while waiting:
        advance(*waiting.pop(_wait_any([work for _, work in waiting]) if len(waiting) > 1 else 0))
    del advance  # a cycle with its own cell
    raise_first(errors)


def raise_first(errors: list[BaseException]) -> None:
    """Leaves no reference behind in the frames that the exception's traceback holds: that would be a cycle."""
    first = errors[0] if errors else None
    errors.clear()
    try:
        if first is not None:
            raise first
    finally:
        del first


def _wait_any(works: Sequence[Work]) -> int:
    """Block until one of ``works`` is done and return its position."""
    done: queue.SimpleQueue[int] = queue.SimpleQueue()

    def note(position: int) -> Callable[[object], None]:
        return lambda _: done.put(position)

    for position, work in enumerate(works):
        work.get_future().add_done_callback(note(position))
    return done.get()


def destroy_retired() -> None:
    """Destroy what dropped wrappers left, now that every rank is known to be past their last collective."""
    while _retired:
        group = _retired.pop()
        # Only gloo groups: destroying an NCCL communicator may itself wait for peers.
        if private.is_registered(group) and set(private.backends(group)) == {"gloo"}:
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group(group)
