"""What should become of a script: plain autograd on one process, averaged by hand.

It shares nothing with the library: what is due follows from the programs alone.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

import torch
from torch import Tensor

from .meeting import meet
from .model import EXACT_BELOW, Grads, Scripted, grads_of, seed_of
from .script import NOTHING, Call, Script, fires


class Told(NamedTuple):
    """How a forward or a backward ended on one rank, and the gradients after it."""

    what: str  # "forward", "backward" or "join"
    outcome: str  # name of the exception, or ""
    grads: Grads


class Share(NamedTuple):
    """What one rank brings to a window."""

    sums: list[Tensor | None]  # what stood in ``.grad``, and the local gradients
    touched: frozenset[int]
    fired: frozenset[int]
    promised: frozenset[int]
    declared: frozenset[int]
    raised: bool
    changed: bool


def due(script: Script) -> list[list[Told]]:
    """What each rank should be told."""
    return meet([_Rank(script, rank).run() for rank in range(script.world)])


class _Rank:
    def __init__(self, script: Script, rank: int) -> None:
        self.script, self.setup, self.rank = script, script.setup, rank
        self.module = Scripted(script.setup)
        self.params = list(self.module.params)
        self.told: list[Told] = []
        self.accumulated: set[int] = set()
        self.promised: set[int] = set()
        self.touched: set[int] = set()
        self.first_graph: object = None
        self.divisor = script.world

    def run(self) -> Generator[Share, list[Share], list[Told]]:
        for at, step in enumerate(self.script.programs[self.rank]):
            if step.zeroes:
                for param in self.params:
                    param.grad = None
            self.divisor = self._divisor(at)
            for call in step.calls:
                if call.synchronises:
                    self._judge()
            for backward in step.backwards:
                calls = [(step.calls[i], seed_of(self.rank, at, i)) for i in backward]
                if calls and calls[0][0].synchronises:
                    yield from self._window(calls)
                elif calls:
                    self._accumulate(calls)
                    self.accumulated |= {one.param for one in fires([call for call, _ in calls])[0] if one.defined}
                    self._tell("backward", "")
        if self.setup.joins:
            for _ in range(len(self.script.programs[self.rank]), self._longest):
                yield Share([None] * self.setup.num_params, NOTHING, NOTHING, NOTHING, NOTHING, False, False)
            self._tell("join", "")  # what stood in ``.grad`` when this rank joined
        return self.told

    @property
    def _longest(self) -> int:
        return max(map(len, self.script.programs))

    def _divisor(self, at: int) -> int:
        if not self.setup.joins or self.setup.divides_by_initial:
            return self.script.world
        return sum(len(program) > at for program in self.script.programs)

    def _tell(self, what: str, outcome: str) -> None:
        self.told.append(Told(what, outcome, grads_of(self.params)))

    def _judge(self) -> None:
        """A forward raises for what was promised since the last one and touched by nobody; then it is tried again."""
        if self.promised - self.touched:
            self._tell("forward", "UnfinishedBackwardError")
        self.promised, self.touched = set(), set()

    def _accumulate(self, calls: list[tuple[Call, int]]) -> None:
        total = sum((self.module(call, seed) for call, seed in calls), torch.zeros(()))
        total.backward()

    def _window(self, calls: list[tuple[Call, int]]) -> Generator[Share, list[Share], None]:
        before = [param.grad for param in self.params]
        firings, raises = fires([call for call, _ in calls])
        if not raises:
            for param, grad in zip(self.params, before, strict=True):
                param.grad = None if grad is None else grad.clone()
            self._accumulate(calls)
        fired = frozenset(one.param for one in firings if one.defined)
        carried = {i for i in self.accumulated if before[i] is not None}
        shares = yield Share(
            [param.grad for param in self.params],
            fired | carried,
            fired,
            self._promises(calls, bool(fired)),
            frozenset.intersection(*(call.declared for call, _ in calls)),
            raises,
            self._changes(calls) and not raises,
        )
        outcome = self._outcome(shares)
        if outcome:
            for param, grad in zip(self.params, before, strict=True):
                param.grad = grad
            self._tell("backward", "Raised" if raises and outcome == "PeerFailedError" else outcome)
            return
        touched = self._touched(shares)
        for i, param in enumerate(self.params):
            param.grad = self._mean([share.sums[i] for share in shares]) if i in touched else before[i]
        self.accumulated = set()
        self.touched |= touched
        self.promised |= frozenset[int]().union(*(share.promised for share in shares))
        if self.first_graph is None:
            self.first_graph = _graph(calls)
        self._tell("backward", "")

    def _touched(self, shares: list[Share]) -> frozenset[int]:
        return frozenset[int]().union(*(share.touched for share in shares))

    def _mean(self, sums: list[Tensor | None]) -> Tensor:
        there = [one for one in sums if one is not None]
        total = torch.stack([one.detach().double() for one in there]).sum(0)
        assert total.abs().max() < EXACT_BELOW and not (total % self.divisor).any(), "numbers are too large"
        return (total / self.divisor).to(there[0].dtype)

    def _promises(self, calls: list[tuple[Call, int]], has_fired: bool) -> frozenset[int]:
        """What forwards promised. A backward that brings no gradient at all (a constant loss) breaks no promise."""
        if not has_fired or self.setup.finds_unused or self.setup.is_static:
            return NOTHING
        undefined = {one.param for one in fires([call for call, _ in calls])[0] if not one.defined}
        everything = frozenset(range(self.setup.num_params))
        return frozenset[int]().union(*(everything - call.declared for call, _ in calls)) - undefined

    def _changes(self, calls: list[tuple[Call, int]]) -> bool:
        return self.setup.is_static and self.first_graph is not None and _graph(calls) != self.first_graph

    def _outcome(self, shares: list[Share]) -> str:
        """The error that is due on a rank that did not raise itself."""
        if self.setup.agreement == "same" and len({share.declared for share in shares}) > 1:
            return "RanksDifferError"
        if any(share.raised for share in shares):
            return "PeerFailedError"
        return "GraphChangedError" if any(share.changed for share in shares) else ""


def _graph(calls: list[tuple[Call, int]]) -> tuple[set[int], list[int]]:
    """Which parameters a backward reaches, and which gradients come again, once a time."""
    firings, _ = fires([call for call, _ in calls])
    again = [one.param for at, one in enumerate(firings) if one.defined and one in firings[:at]]
    return {one.param for one in firings}, sorted(again)
