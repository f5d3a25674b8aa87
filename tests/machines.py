"""Ranks as protocol machines in one process, whose messages are combined here by bitwise OR."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from strategies import spec

from knownddp.outcomes import Closing, Opening
from knownddp.plan import BucketPlan, Planner
from knownddp.protocol import Agreement, WindowProtocol, flags_of
from knownddp.specs import ParamSpec

N = 4
ALL = range(N)


def machine(
    specs: Sequence[ParamSpec] = (spec(1),) * N,
    caps: Sequence[int] = (4,),
    agreement: Agreement = Agreement.UNION,
    *,
    detects_unused: bool = False,
    order: Iterable[int] | None = ALL,
) -> WindowProtocol:
    """One rank that has learnt ``order`` (None: nothing yet)."""
    planner = Planner(specs, caps)
    if order is not None:
        place = {param_index: position for position, param_index in enumerate(order)}
        planner.learn([place[i] for i in range(len(specs))], ())
    return WindowProtocol(planner, len(specs), agreement, detects_unused=detects_unused)


def group(world_size: int = 2, agreement: Agreement = Agreement.UNION, **options: object) -> list[WindowProtocol]:
    return [machine(agreement=agreement, **options) for _ in range(world_size)]


def flags(param_indices: Collection[int], of: int = N) -> bytes:
    return flags_of(param_indices, of)


def combine(messages: Iterable[bytes]) -> bytes:
    return bytes(functools.reduce(operator.or_, column) for column in zip(*messages, strict=True))


@dataclass
class Part:
    """What one rank does in a window: all it expects fires in order, unless ``fires`` says otherwise."""

    expected: Collection[int] = ALL
    fires: Sequence[int] | None = None
    carried: Collection[int] = ()
    declared: Collection[int] = ()
    opens_after: int = 0  # how many gradients come before OPEN is back
    promised: Collection[int] | None = None
    failed: bool = False
    nested: bool = False
    guessed: bool = False
    signature: int = 0

    def gradients(self) -> Sequence[int]:
        return sorted(self.expected) if self.fires is None else self.fires


@dataclass
class Outcome:
    """What one rank was told."""

    opening: Opening
    plan: BucketPlan
    launched: list[int]  # buckets, by position in the plan
    early: int  # how many of them went before the backward was over
    closing: Closing | None = None  # None: the opening was an error
    past_launch: set[int] = field(default_factory=set)  # fired when OPEN was known and their bucket had left


def backward(rank: WindowProtocol, part: Part, opening_message: bytes) -> Outcome:
    """From OPEN to the end of the backward."""
    before, after = part.gradients()[: part.opens_after], part.gradients()[part.opens_after :]
    assert [list(rank.ready(i)) for i in before] == [[]] * len(before), "launched while the agreed set is not known"
    outcome = Outcome(rank.opened(opening_message), rank.plan, [], 0)
    if outcome.opening.fault is not None:
        return outcome
    outcome.launched += outcome.opening.launch
    for i in after:
        if rank.plan.bucket_of[i] in outcome.launched:
            outcome.past_launch.add(i)
        outcome.launched += rank.ready(i)
    outcome.plan, outcome.early = rank.plan, len(outcome.launched)
    return outcome


def window(ranks: Sequence[WindowProtocol], parts: Sequence[Part]) -> list[Outcome]:
    """One window on all ranks, with the order round if it is due."""
    n = len(ranks[0].agreed)
    opens = [
        rank.begin(
            flags(p.expected, n), p.carried, p.declared, signature=p.signature, nested=p.nested, guessed=p.guessed
        )
        for rank, p in zip(ranks, parts, strict=True)
    ]
    outcomes = [backward(rank, p, combine(opens)) for rank, p in zip(ranks, parts, strict=True)]
    if outcomes[0].opening.fault is not None:
        return outcomes
    closes = []
    for rank, p, outcome in zip(ranks, parts, outcomes, strict=True):
        promised = p.expected if p.promised is None else p.promised
        outcome.launched += rank.end()
        closes.append(rank.close(flags(promised, n), failed=p.failed))
    for rank, outcome in zip(ranks, outcomes, strict=True):
        outcome.closing = rank.closed(combine(closes))
    if outcomes[0].closing.order_due:
        orders = [rank.order_message() for rank in ranks]
        for rank in ranks:
            rank.learn([max(column) for column in zip(*orders, strict=True)])
    for rank in ranks:
        rank.settled()
    return outcomes


def closing(ranks: Sequence[WindowProtocol], *parts: Part) -> Closing:
    """The closing of a window, which all ranks are told alike."""
    first, *others = [outcome.closing for outcome in window(ranks, parts)]
    assert all(other == first for other in others)
    return first
