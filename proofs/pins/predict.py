"""Which collectives a script should lead to, as the shipped machine says: a driver of its own, with no tensors.

It shares with the library ``WindowProtocol`` and ``Planner`` alone. What the reducer adds to their answers is written
down here once more, from the description of a window: OPEN, the buckets that the machine names, CLOSE, the late round
where one is due, the order round where one is due, testimonies after an error.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Generator, Iterator, Sequence
from typing import Final, NamedTuple

import torch

from knownddp.outcomes import Fault
from knownddp.plan import BucketPlan, Planner
from knownddp.protocol import Agreement, WindowProtocol
from knownddp.specs import BucketKey, ParamSpec

from .meeting import meet
from .script import Call, Script, fires, foretold

ANY_SIZE: Final = -1  # of a pickled object


class Sent(NamedTuple):
    """One collective of a rank."""

    kind: (
        str  # "sum", "swap" (a sum of two ranks), "exchange" (of messages, to be ORed), "max", "broadcast" or "gather"
    )
    lane: str  # "data" or "control"
    nbytes: int
    after: int  # so many gradients had come on that rank, undefined ones counted


def predicted(script: Script, polls: Sequence[Sequence[bool]]) -> list[list[Sent]]:
    """What each rank issues. ``polls``: for each rank, the answers it got when it asked whether OPEN was back.

    Raises:
        AssertionError: a rank asked more or less often than it should.
    """
    return meet([_Rank(script, rank, iter(polls[rank])).run() for rank in range(script.world)])


def _or(messages: Sequence[bytes]) -> bytes:
    return bytes(functools.reduce(operator.or_, column) for column in zip(*messages, strict=True))


Meeting = Generator[bytes, list[bytes], None]


class _Rank:
    def __init__(self, script: Script, rank: int, polls: Iterator[bool]) -> None:
        self.script, self.setup, self.rank, self.polls = script, script.setup, rank, polls
        n = self.n = self.setup.num_params
        self.untold: set[int] = set()
        self.again: set[int] = set()  # parameters that had several gradients in a backward
        self.standing: set[int] = set()  # of which a gradient came in this window and was not packed yet
        self.sizes = []
        specs = []
        for i, shape in enumerate(self.setup.shapes):
            dtype = torch.float64 if i in self.setup.doubles else torch.float32
            numel = torch.Size(shape).numel()
            self.sizes.append(numel * dtype.itemsize)
            specs.append(ParamSpec("p", shape, (), numel, self.sizes[i], BucketKey(dtype, torch.device("cpu"))))
        agreement = Agreement(self.setup.agreement)
        detects = self.setup.finds_unused and not self.setup.is_static
        self.machine = WindowProtocol(Planner(specs, self.setup.caps), n, agreement, detects_unused=detects)
        self.detects = detects
        self.trusts = agreement is Agreement.TRUST
        self.sent: list[Sent] = []
        self.came = 0  # gradients
        self.has_exchanged_buffers = False
        self.accumulated: set[int] = set()
        self.has_grad = [False] * n
        self.first_graph: tuple[set[int], tuple[int, ...], bytes] | None = None

    def run(self) -> Generator[bytes, list[bytes], list[Sent]]:
        if self.setup.checks:
            self._gather()
            self._send("broadcast", "data", sum(self.sizes) + self._buffer_bytes())
        for step in self.script.programs[self.rank]:
            if step.zeroes:
                self.has_grad = [False] * self.n
            if step.calls:  # hooks that are not told a gradient see what stands in ``.grad``; others have been there
                self.untold = set(range(1, self.n, 2)) - self.again if not self.setup.is_static else set()
            for call in step.calls:
                if call.synchronises:
                    self.machine.forward_begins()
                    if self.setup.joins:
                        self._announce()
                    self._exchange_buffers()
            for backward in step.backwards:
                calls = [step.calls[i] for i in backward]
                if calls and calls[0].synchronises:
                    yield from self._window(calls)
                elif calls:
                    for i, defined in fires(calls)[0]:
                        self.came += 1
                        self.has_grad[i] |= defined
                        self.accumulated |= {i} if defined else set()
        if self.setup.joins:
            yield from self._shadow()
        assert next(self.polls, None) is None, f"rank {self.rank} asked for OPEN too often"
        return self.sent

    def _shadow(self) -> Meeting:
        """Take part in the windows of those that still have inputs, then take over the model of one of the last."""
        for _ in range(len(self.script.programs[self.rank]), max(map(len, self.script.programs))):
            self._announce()
            self._exchange_buffers()
            opening = yield from self._message(self.machine.begin(bytes(self.n), silent=True))
            told = self.machine.opened(opening)
            self._launch(self.machine.plan, told.launch)
            yield from self._close((), set(), False)
        self._send("max", "control", 8)
        self._send("broadcast", "data", sum(self.sizes) + self._buffer_bytes())

    # -- what is sent

    def _announce(self) -> None:
        """In a join context each forward says what it is about to do: four flags, and one a rank."""
        self._send("max", "control", 8 * (4 + self.script.world))

    def _send(self, kind: str, lane: str, nbytes: int) -> None:
        self.sent.append(Sent(kind, lane, nbytes, self.came))

    def _gather(self) -> None:
        self._send("gather", "control", 8)
        self._send("gather", "control", ANY_SIZE)

    def _buffer_bytes(self) -> int:
        return 12 if self.setup.has_buffer else 0

    def _exchange_buffers(self) -> None:
        """Once a window."""
        if self.setup.has_buffer and not self.has_exchanged_buffers:
            self._send("broadcast", "data", self._buffer_bytes())
        self.has_exchanged_buffers = True

    def _launch(self, plan: BucketPlan, positions: range) -> None:
        for position in positions:
            is_swapped = self.script.world == 2 and position == len(plan.buckets) - 1
            nbytes = sum(self.sizes[i] for i in plan.buckets[position].param_indices)
            self.standing.difference_update(plan.buckets[position].param_indices)
            self._send("swap" if is_swapped else "sum", "data", nbytes)

    def _message(self, message: bytes) -> Generator[bytes, list[bytes], bytes]:
        """Combine a message with those of all ranks."""
        if not self.trusts:
            self._send("exchange", "control", len(message))
        messages = yield message
        return message if self.trusts else _or(messages)

    # -- one window

    def _flags(self, which: set[int] | frozenset[int]) -> bytes:
        return bytes(i in which for i in range(self.n))

    def _expected(self, calls: Sequence[Call]) -> bytes:
        if self.setup.is_static and self.first_graph is not None:
            return self.first_graph[2]
        if self.setup.is_static or self.detects:
            return self._flags(foretold(calls) | self.machine.unforeseen)
        return self._flags(set().union(*(set(range(self.n)) - call.declared for call in calls)))

    def _window(self, calls: Sequence[Call]) -> Meeting:
        machine = self.machine
        self._exchange_buffers()
        carried = [i for i in sorted(self.accumulated) if self.has_grad[i]]
        declared = frozenset.intersection(*(call.declared for call in calls))
        opening = yield from self._message(machine.begin(self._expected(calls), carried, declared))
        firings, raises = fires(calls)
        undefined = {one.param for one in firings if not one.defined}
        is_open_known = False
        if machine.agreement is not Agreement.UNION:
            is_open_known = True
            told = machine.opened(opening)
            if told.fault is not None:  # raised before any gradient comes
                yield from self._end_in_error()
                return
            self._launch(machine.plan, told.launch)
        self.standing.clear()
        arrivals: list[int] = []
        patience = machine.patience
        for i, defined in firings:
            self.came += 1
            if not defined and not (i in self.untold and i in self.standing):
                continue
            self.standing.add(i)
            arrivals.append(i)  # as hooks do
            patience -= 1
            if patience > 0:
                continue
            self._launch(machine.plan, machine.ready(*arrivals, is_over=False))
            arrivals.clear()
            if not is_open_known and machine.wants_opening:
                answer = next(self.polls, None)
                assert answer is not None, f"rank {self.rank} should have asked for OPEN"
                if answer:
                    is_open_known = True
                    told = machine.opened(opening)
                    self._launch(machine.plan, told.launch)
            patience = machine.patience
        if arrivals:
            machine.count(arrivals)
        if not is_open_known:
            told = machine.opened(opening)
            self._launch(machine.plan, told.launch)
        yield from self._close(calls, undefined, raises)

    def _close(self, calls: Sequence[Call], undefined: set[int], raises: bool) -> Meeting:
        machine = self.machine
        self._launch(machine.plan, machine.end())
        fired, repeated = machine.fired()
        self.again.update(repeated)
        graph = ({i for i in range(self.n) if fired[i]} | undefined, repeated, fired)
        is_changed = self.setup.is_static and self.first_graph is not None and graph[:2] != self.first_graph[:2]
        promised: set[int] = set()
        if machine.has_fired and not self.detects and not self.setup.is_static:
            promised = set().union(*(set(range(self.n)) - call.declared for call in calls)) - undefined
        message = machine.close(self._flags(promised), failed=raises, changed=is_changed and not raises)
        closing = machine.closed((yield from self._message(message)))
        if closing.fault is not None and closing.fault is not Fault.TRUST:
            yield from self._end_in_error()
            machine.settled(failed=True)
            return
        if closing.late_plan is not None:
            self._launch(closing.late_plan, range(len(closing.late_plan.buckets)))
            self._send("max", "control", 8)
        if closing.order_due:
            self._send("max", "control", 16 * self.n)
            orders = yield b"".join((place + 1).to_bytes(4, "little") for place in machine.order_message())
            machine.learn([max(column) - 1 for column in zip(*map(_numbers, orders), strict=True)])
        if self.first_graph is None:
            self.first_graph = graph
        for i, touched in enumerate(closing.touched):
            self.has_grad[i] |= bool(touched)
        self.accumulated = set()
        self.has_exchanged_buffers = False
        machine.settled()

    def _end_in_error(self) -> Meeting:
        self.has_exchanged_buffers = False
        if not self.trusts:
            self._gather()
        yield b""  # nothing to combine, but all are here


def _numbers(packed: bytes) -> list[int]:
    return [int.from_bytes(packed[at : at + 4], "little") for at in range(0, len(packed), 4)]
