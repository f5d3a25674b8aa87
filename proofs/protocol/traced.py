"""What ranks issue and wait for, as the shipped machine decides it, over windows drawn at random.

A trace is a list of ``("issue", tag, size in bytes)`` and ``("wait", k)``, k the position of the issue waited for among
the rank's own. Waits stand where ``Closing._closing_steps`` and ``Filling.look_at_opening`` have them.

In half of the runs gradients come as hooks bring them: ``ready`` hears of several, when the machine's patience is at
its end. In half of these OPEN is looked at then, where the machine wants it, or at the end, as
``Filling.may_look_at_opening`` has it; in all others anywhere.
"""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from knownddp.messages import HEADER_BYTES, IS_UNEVEN, flags_of
from knownddp.outcomes import Closing, Opening
from knownddp.plan import BucketPlan, Planner
from knownddp.protocol import Agreement, WindowProtocol
from knownddp.specs import BucketKey, ParamSpec

Step = tuple[str, str, int] | tuple[str, int]
KEYS = tuple(BucketKey(dtype, torch.device("cpu")) for dtype in (torch.float32, torch.float64))


def combined(messages: Iterable[bytes]) -> bytes:
    return bytes(functools.reduce(operator.or_, column) for column in zip(*messages, strict=True))


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank does in one window."""

    expected: tuple[int, ...]
    fires: tuple[int, ...]  # one gradient after the other, some again, some that nobody expected
    opens_after: int  # so many of them come before the opening is there
    declared: tuple[int, ...]
    carried: tuple[int, ...]
    signature: int
    nested: bool
    failed: bool


@dataclass(slots=True)
class Heard:
    """What one rank did and was told in one window."""

    part: Part
    trace: list[Step] = field(default_factory=list)
    opening: Opening | None = None
    closing: Closing | None = None
    plan: BucketPlan | None = None
    waits_for_end: bool = False
    opened_after: int = 0  # so many gradients came before the opening was looked at
    launched: list[int] = field(default_factory=list)  # how many buckets, once OPEN was known and after each gradient

    @property
    def early(self) -> tuple[int, ...]:
        return self.part.fires[: self.opened_after]

    @property
    def later(self) -> tuple[int, ...]:
        return self.part.fires[self.opened_after :]

    @property
    def tags(self) -> list[str]:
        return [str(step[1]) for step in self.trace if step[0] == "issue"]


class TracedRank:
    """A rank: the machine and what it issues."""

    def __init__(
        self,
        specs: Sequence[ParamSpec],
        limits: Sequence[int],
        agreement: Agreement,
        in_order: bool,
        *,
        counts: bool = False,
        looks_if_wanted: bool = False,
    ) -> None:
        self.counts, self.looks_if_wanted = counts, looks_if_wanted
        self.counted = 0  # gradients that were written down alone
        self._arrivals: list[int] = []
        self._patience = 1
        self._nbytes = [spec.nbytes for spec in specs]
        self.machine = WindowProtocol(Planner(specs, limits), len(specs), agreement, detects_unused=False)
        self.machine.in_program_order = in_order
        self.trace: list[Step] = []
        self._issued = 0

    def issue(self, tag: str, size: int) -> int:
        self.trace.append(("issue", tag, size))
        self._issued += 1
        return self._issued - 1

    def wait(self, *which: int) -> None:
        self.trace += [("wait", k) for k in which]

    def gradient(self, i: int) -> range | None:
        """What may go after it; None if it was only written down."""
        self._arrivals.append(i)
        self._patience -= 1
        if self.counts and self._patience > 0:
            self.counted += 1
            return None
        return self.look_at_arrivals()

    def look_at_arrivals(self) -> range:
        """What may go after those that were written down."""
        came, self._arrivals = self._arrivals, []
        launch = self.machine.ready(*came) if came else range(0)
        self.renew_patience()
        return launch

    def renew_patience(self) -> None:
        self._patience = max(1, self.machine.patience - 1)  # each gradient is settled here as it comes

    def launch(self, tag: str, plan: BucketPlan, positions: Iterable[int]) -> list[int]:
        sizes = [sum(self._nbytes[i] for i in bucket.param_indices) for bucket in plan.buckets]
        return [self.issue(f"{tag} {position}", sizes[position]) for position in positions]


def _before_opening(rank: TracedRank, part: Part) -> int:
    """The gradients before the opening is looked at. Returns how many."""
    for number, i in enumerate(part.fires):
        if number >= part.opens_after and not rank.looks_if_wanted:
            return number
        told, machine = rank.gradient(i) is not None, rank.machine
        is_there = number + 1 >= part.opens_after or machine.in_program_order  # in the latter it is waited for
        if rank.looks_if_wanted and told and is_there and machine.wants_opening:
            return number + 1
    return len(part.fires)


def _until_closed(rank: TracedRank, heard: Heard, opening: int, message: bytes) -> list[int]:
    """From the begin to the end of the backward. Returns what is to be waited for, nothing if the opening failed."""
    machine, part = rank.machine, heard.part
    heard.opened_after = _before_opening(rank, part)
    rank.look_at_arrivals()
    rank.wait(opening)
    heard.opening = machine.opened(message)
    rank.renew_patience()
    if heard.opening.fault is not None:
        rank.wait(rank.issue("testimony", 0))
        return []
    heard.plan = machine.plan
    heard.waits_for_end = machine.in_program_order and any(message[HEADER_BYTES:].translate(IS_UNEVEN))
    flights = rank.launch("bucket", machine.plan, heard.opening.launch)
    heard.launched.append(len(flights))
    for i in heard.later:
        flights += rank.launch("bucket", machine.plan, rank.gradient(i) or ())
        heard.launched.append(len(flights))
    assert not rank.look_at_arrivals(), "a bucket that was full did not go"
    return [*flights, *rank.launch("bucket", machine.plan, machine.end())]


def _settle(rank: TracedRank, heard: Heard, message: bytes) -> None:
    """What CLOSE told, up to where the order round is issued."""
    machine = rank.machine
    closing = heard.closing = machine.closed(message)
    if closing.late_plan is not None:
        rank.wait(*rank.launch("late", closing.late_plan, range(len(closing.late_plan.buckets))))
        rank.wait(rank.issue("outcome", 8))
    if closing.fault is not None:
        rank.wait(rank.issue("testimony", 0))
    elif closing.order_due:
        rank.wait(rank.issue("order", 16 * len(closing.touched)))


def window(ranks: Sequence[TracedRank], parts: Sequence[Part]) -> list[Heard]:
    """One window on all ranks; each goes its own way between two meetings."""
    n = len(ranks[0].machine.agreed)
    heard = [Heard(part) for part in parts]
    first = [len(rank.trace) for rank in ranks]
    messages = [
        rank.machine.begin(
            flags_of(part.expected, n), part.carried, part.declared, signature=part.signature, nested=part.nested
        )
        for rank, part in zip(ranks, parts, strict=True)
    ]
    for rank in ranks:
        rank.renew_patience()
    opens = [rank.issue("open", len(message)) for rank, message in zip(ranks, messages, strict=True)]
    flights = [
        _until_closed(rank, one, opening, combined(messages))
        for rank, one, opening in zip(ranks, heard, opens, strict=True)
    ]
    if heard[0].plan is not None:
        closes = [
            rank.machine.close(flags_of(p.expected, n), failed=p.failed) for rank, p in zip(ranks, parts, strict=True)
        ]
        for rank, one, message, sent in zip(ranks, heard, closes, flights, strict=True):
            rank.wait(rank.issue("close", len(message)), *sent)
            _settle(rank, one, combined(closes))
        orders = [max(column) for column in zip(*(rank.machine.order_message() for rank in ranks), strict=True)]
        for rank, one in zip(ranks, heard, strict=True):
            if one.closing is not None and one.closing.order_due:
                rank.machine.learn(orders)
            rank.machine.settled()
    for rank, one, begun in zip(ranks, heard, first, strict=True):
        one.trace = rank.trace[begun:]
    return heard


@dataclass(frozen=True, slots=True)
class Run:
    """Some windows of some ranks."""

    ranks: tuple[TracedRank, ...]
    windows: tuple[tuple[Heard, ...], ...]


def _part(draw: random.Random, n: int, usual: Sequence[int], signature: int) -> Part:
    def some(share: float) -> tuple[int, ...]:
        return tuple(i for i in range(n) if draw.random() < share)

    expected = tuple(usual) if draw.random() < 0.5 else some(0.6)
    fires = [i for i in expected if draw.random() < 0.95]
    fires += [draw.randrange(n) for _ in range(draw.choice((0, 0, 0, 1, 2)))]
    draw.shuffle(fires)
    rare = draw.random()
    return Part(
        expected,
        tuple(fires),
        draw.choice((0, 0, draw.randint(0, len(fires)))),
        tuple(i for i in range(n) if i not in expected) if draw.random() < 0.8 else some(0.3),
        some(0.1) if draw.random() < 0.2 else (),
        signature if rare > 0.02 else signature + 1,
        0.02 < rare < 0.03,
        0.03 < rare < 0.06,
    )


def runs(number: int) -> Iterator[Run]:
    """1 to 4 ranks, 1 to 7 parameters of two dtypes, 1 to 4 windows."""
    draw = random.Random(0)
    for k in range(number):
        n, world_size = draw.randint(1, 7), draw.randint(1, 4)
        sizes = [(draw.randint(0, 3), draw.choice((0, 0, 0, 1)), draw.random() < 0.1) for _ in range(n)]
        specs = [
            ParamSpec("p", (m,), (1,), m, m * KEYS[key].dtype.itemsize, KEYS[key], sparse) for m, key, sparse in sizes
        ]
        limits = [draw.choice((0, 4, 8, 16, 1000, 1000)) for _ in range(draw.randint(1, 2))]
        agreement = draw.choice((Agreement.UNION, Agreement.UNION, Agreement.SAME))
        in_order = draw.random() < 0.3
        how = {"counts": k % 2 == 1, "looks_if_wanted": k % 4 == 3}
        ranks = tuple(TracedRank(specs, limits, agreement, in_order, **how) for _ in range(world_size))
        if k % 8 > 3:  # before an order is known all buckets are held
            for rank in ranks:
                rank.machine.planner.learn(range(n), ())
        windows = []
        for _ in range(draw.randint(1, 4)):
            usual = [i for i in range(n) if draw.random() < 0.7]
            windows.append(tuple(window(ranks, [_part(draw, n, usual, 5) for _ in ranks])))
        yield Run(ranks, tuple(windows))
