"""A process group that is simulated: the shipped ``Collectives`` run over it, real wrappers and real tensors.

Ranks must start the same collectives in the same order, on each lane: one that does not fit is noticed at once, unlike
on gloo, which sums or aborts. While a collective has a tensor, nothing of use stands in it, and whoever writes there is
found out when the result is delivered: as late as can be, when the rank is told that it is done.
"""

from __future__ import annotations

import contextlib
import datetime
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms import join as torch_join

import knownddp.ddp
from knownddp import _torch_private, comm, works
from knownddp.flights import Flight
from knownddp.works import Combination, UnfinishedWork

from ..claims import Refuted
from .baton import Baton
from .play import Clock
from .predict import Sent
from .seam import (
    KINDS,
    Passing,
    QuietWarnings,
    is_poisoned,
    kind_of_exchange,
    kind_of_reduction,
    nbytes_of,
    poison,
    replaced,
)


class _Collective:
    """One, at its position on a lane."""

    def __init__(self, world: int, first: tuple[object, ...]) -> None:
        self.kind = first
        self.may_be_done = True  # when a rank asks
        self.inputs: list[Tensor | None] = [None] * world
        self.sizes: list[list[int]] = [[] for _ in range(world)]  # of an exchange: how much of it goes to each rank
        self.outputs: list[Sequence[Tensor]] = [()] * world

    @property
    def is_started(self) -> bool:
        """On all ranks."""
        return all(one is not None for one in self.inputs)

    def result(self, number: int) -> list[Tensor]:
        """What rank ``number`` receives."""
        there = [one for one in self.inputs if one is not None]
        kind, source = self.kind[0], self.kind[1]
        if kind == "gather":
            return there
        if kind == "broadcast":
            assert isinstance(source, int)
            return [there[source]]
        if kind in ("exchange", "swap"):
            return [torch.cat([torch.split(one, sizes)[number] for one, sizes in zip(there, self.sizes, strict=True)])]
        total = there[0].clone()
        for one in there[1:]:
            total = total + one if kind == "sum" else torch.maximum(total, one)
        return [total]


class Handle:
    """What stands for ``dist.Work``."""

    def __init__(self, group: Group, collective: _Collective, sent: Tensor | None) -> None:
        """``sent``: memory that is only read."""
        self._group, self._collective, self.sent = group, collective, sent
        self.is_delivered = False
        self.address = 0
        self.shares_memory = False

    def _deliver(self) -> None:
        if self.is_delivered:
            return
        self.is_delivered = True
        number = self._group.number
        outputs, mine = self._collective.outputs[number], self._collective.inputs[number]
        for tensor, result in zip(outputs, self._collective.result(number), strict=True):
            is_intact = self.sent is None or torch.equal(self.sent, mine) if mine is not None else True
            if not self.shares_memory and not (is_poisoned(tensor) and is_intact):
                self._group.hub.complain(f"rank {number} wrote to memory that a collective was using")
            tensor.copy_(result)

    def answers(self) -> list[bool]:
        """To the question whether it is done."""
        return [False, True] if self._collective.is_started and self._collective.may_be_done else [False]

    def when_done(self) -> list[None]:
        """To a wait."""
        return [None] if self._collective.is_started else []

    def wait(self) -> None:
        if not self.is_delivered:
            self._group.pause("waits", self.when_done)
        self._deliver()

    def is_completed(self) -> bool:
        answer = self.is_delivered or bool(self._group.pause("asks", self.answers))
        self._group.hub.polls[self._group.number].append(answer)
        if answer:
            self._deliver()
        return answer

    def get_future(self) -> Any:
        raise AssertionError("waits for any of several are simulated too")


class Group:
    """One rank's handle of a lane, and as the wrapper's process group that of all of them."""

    def __init__(self, hub: Hub, number: int, lane: str = "parent") -> None:
        self.hub, self.number, self.lane = hub, number, lane

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.hub.world

    def name(self) -> str:
        return "simulated"

    def allreduce(self, tensors: list[Tensor], options: dist.AllreduceOptions) -> Handle:
        return self.hub.start(self, tensors[0], tensors, kind_of_reduction(options))

    def all_to_all_single(
        self, received: Tensor, sent: Tensor, takes: list[int], gives: list[int], _: dist.AllToAllOptions
    ) -> Handle:
        kind, nbytes = kind_of_exchange(sent, self.hub.world, takes)
        return self.hub.start(self, sent, [received], kind, sizes=gives or [nbytes] * self.hub.world)

    def pause(self, what: str, answers: Callable[[], list[Any]]) -> Any:
        return self.hub.baton.pause(self.number, what, answers)


class Hub(Passing):
    """All lanes, and what stands for torch.distributed in ``knownddp.comm``."""

    Work = Handle
    ProcessGroup = Group

    def __init__(self, baton: Baton, world: int, *, pauses_at_starts: bool, tries_first: bool) -> None:
        super().__init__(dist)
        self.baton, self.world = baton, world
        self._pauses_at_starts = pauses_at_starts
        self._unasked = () if tries_first else (("control", 0),)  # where the answer is "not yet"
        self._lanes: dict[str, list[_Collective]] = {}
        self._places = [dict.fromkeys(("data", "control", "parent"), 0) for _ in range(world)]
        self.clocks = [Clock() for _ in range(world)]
        self.sent: list[list[Sent]] = [[] for _ in range(world)]
        self.polls: list[list[bool]] = [[] for _ in range(world)]
        self.handles: list[tuple[Sent, int, Handle]] = []
        self._in_flight: list[list[Handle]] = [[] for _ in range(world)]
        self.complaints: list[str] = []

    def complain(self, text: str) -> None:
        """Something is wrong; the run is given up at the next pause."""
        self.complaints.append(text)
        self.baton.is_given_up = True
        raise Refuted(text)

    def get_backend(self, group: object) -> str:
        return "gloo"

    def start(
        self,
        group: Group,
        tensor: Tensor,
        outputs: Sequence[Tensor],
        kind: str,
        source: int = 0,
        sizes: list[int] | None = None,
    ) -> Handle:
        """A rank starts a collective."""
        rank, lane = group.number, self._lanes.setdefault(group.lane, [])
        place = self._places[rank][group.lane]
        self._places[rank][group.lane] = place + 1
        nbytes = nbytes_of(tensor) // (self.world if kind == "exchange" else 1)
        sent = Sent(kind, group.lane, nbytes, self.clocks[rank].came)
        if group.lane != "parent":
            self.sent[rank].append(sent)
        what = (kind, source, sent.nbytes, tensor.dtype)
        if place == len(lane):
            lane.append(_Collective(self.world, what))
        collective = lane[place]
        collective.may_be_done = (group.lane, place) not in self._unasked
        if collective.kind != what:
            self.complain(f"rank {rank} starts {what} where another rank started {collective.kind}")
        collective.inputs[rank], collective.sizes[rank] = tensor.clone(), sizes or []
        collective.outputs[rank] = outputs
        for one in outputs:
            poison(one)
        handle = Handle(group, collective, tensor if sizes else None)
        # A rank whose backward failed packs nothing and gives all collectives one tensor: nobody uses the results. Were
        # they used, they would not be right.
        for other in self._in_flight[rank]:
            if not other.is_delivered and other.address == tensor.data_ptr():
                other.shares_memory = handle.shares_memory = True
        handle.address = tensor.data_ptr()
        self._in_flight[rank] = [one for one in self._in_flight[rank] if not one.is_delivered] + [handle]
        self.handles.append((sent, rank, handle))
        if self._pauses_at_starts:
            group.pause("started", lambda: [None])
        return handle

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, *, group: Group, async_op: bool) -> Handle:
        assert async_op
        return self.start(group, tensor, [tensor], KINDS[op])

    def broadcast(self, tensor: Tensor, *, group_src: int, group: Group, async_op: bool) -> Handle:
        assert async_op
        return self.start(group, tensor, [tensor], "broadcast", group_src)

    def all_gather(self, found: list[Tensor], tensor: Tensor, *, group: Group, async_op: bool) -> Handle:
        assert async_op
        return self.start(group, tensor, found, "gather")


class _JoinsDist(Passing):
    """torch.distributed as torch's ``Join`` calls it, to count who still has inputs."""

    def get_rank(self, group: Group) -> int:
        return group.number

    def all_reduce(self, tensor: Tensor, *, group: Group, async_op: bool = False) -> Handle | None:
        handle: Handle = self._original.all_reduce(tensor, group=group, async_op=True)
        if async_op:
            return handle
        handle.wait()
        return None


class _Private(Passing):
    """What ``knownddp.comm`` asks of a group."""

    def backends(self, group: object) -> dict[str, str]:
        return {"cpu": "gloo"}

    def is_registered(self, group: object) -> bool:
        return False

    def group_timeout(self, group: object) -> datetime.timedelta:
        return works.NO_TIMEOUT


class _Simulated(comm.Collectives):
    """Collectives whose lanes are made here; all else is shipped."""

    def _data_lane(self) -> Any:
        self._data = self._data or Group(self.parent.hub, self.parent.number, "data")  # type: ignore[attr-defined, assignment]
        return self._data

    def _control_lane(self) -> Any:
        self._control = self._control or Group(self.parent.hub, self.parent.number, "control")  # type: ignore[attr-defined, assignment]
        return self._control


def _handle_of(work: Any) -> Any:
    """The simulated handle under what the library put around it."""
    while isinstance(work, (Combination, Flight, UnfinishedWork)):
        work = work.work if isinstance(work, Flight) else work._work
    return work


@contextlib.contextmanager
def simulated(hub: Hub, group_of_thread: Callable[[], Group]) -> Iterator[None]:
    """Inside, wrappers are made over the simulated group of the rank that makes them."""

    def over(group: Any, *, own_group: bool) -> comm.Collectives:
        return _Simulated(group, own_group=own_group)

    def wait_any(works: Sequence[Any]) -> int:
        handles = list(map(_handle_of, works))
        chosen: int = handles[0]._group.pause(
            "waits for any", lambda: [i for i, one in enumerate(handles) if one.when_done()]
        )
        return chosen

    with (
        replaced(comm, dist=hub, private=_Private(_torch_private)),
        replaced(works, _wait_any=wait_any),
        replaced(torch_join, dist=_JoinsDist(hub), warnings=QuietWarnings(warnings)),
        replaced(knownddp.ddp, collectives_over=over, choose_group=lambda *_: group_of_thread()),
    ):
        yield
