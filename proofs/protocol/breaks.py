"""Scripts in which something goes wrong, and join contexts, in families as those of ``families.py``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from knownddp.protocol import Agreement

from .families import THREE, TWO, pairs, subsets
from .script import NOTHING, Backward, Forward, LeaveJoin, Program, Script, Setup, ZeroGrad, step

CLEAN: Program = (ZeroGrad(), *step())


def exceptions() -> Iterator[Script]:
    """A backward that may raise, at every point from its begin to its end, on one rank or on several; then goes on."""
    setups = [
        THREE,
        Setup(order=None),
        Setup(agreement=Agreement.SAME),
        Setup(finds_unused=True),
        Setup(limits=(1000,)),
    ]
    carried = (Forward(synchronises=False), Backward((0, 1), synchronises=False))
    parts: list[dict[str, Any]] = [
        {},
        {"fires": (0, 1, 2, 2)},  # late where 2 has left
        {"unused": {1}, "fires": (0, 1, 2)},  # late
        {"unused": {0, 2}},
        {"fires": ()},
        {"fires": (1,)},  # a promise that is not kept
    ]
    for setup in setups:
        for one, other in itertools.product(parts, parts):
            if setup is not THREE and one is not other and other is not parts[0]:
                continue
            for both in (False, True):
                programs = (step(**one, may_raise=True), step(**other, may_raise=both))
                yield Script(setup, (programs[0] + CLEAN, programs[1] + CLEAN))
                if both and setup is THREE:
                    yield Script(setup, (carried + programs[0] + step(), programs[1] + step()))
    raising = [(step(may_raise=True), step(may_raise=True) * 2) for _ in range(2)]
    yield Script(THREE, (raising[0][1] + CLEAN, raising[1][1] + CLEAN))
    for fires in ((0, 1), (0, 1, 1), (0, 1, 2), (2, 2, 1)):
        may = step(fires=fires, may_raise=True)
        yield Script(THREE, (may + CLEAN, step(fires=fires) + CLEAN, may + CLEAN))


def faults() -> Iterator[Script]:
    """Windows whose opening is a fault, a graph that was promised not to change, and a late round that goes wrong."""
    odd: list[dict[str, Any]] = [{}, {"signature": 5}, {"nested": True}, {"guessed": True}, {"unused": {1}}]
    setups = (THREE, Setup(order=None), Setup(agreement=Agreement.SAME))
    for setup, (one, other), may_raise in itertools.product(setups, itertools.product(odd, odd), (False, True)):
        first, second = step(**one, may_raise=may_raise), step(**other)
        yield Script(setup, (first + CLEAN, second + CLEAN))
        clean = (ZeroGrad(), *step(of=2))
        two = [step(**one, of=2, may_raise=may_raise) + clean, step(**other, of=2) + clean]
        if setup is not setups[1]:
            yield Script(replace(TWO, agreement=setup.agreement), (two[0], two[1], two[1]))
    for (a, b), order in itertools.product(pairs(), (None, (2, 1, 0))):
        static = Setup(is_static=True, order=order)
        usual, changes, may = step(fires=sorted(a)), step(fires=sorted(b)), step(fires=sorted(b), may_raise=True)
        yield Script(static, (usual + changes + usual, step() * 3))
        if order is not None:
            yield Script(static, (usual + changes + usual, usual + changes + usual))
            yield Script(static, (usual + may + usual, step() * 3))
    for fires, fails in itertools.product([(0, 1, 1), (0, 1), (1, 1)], [(True, False), (False, True), (True, True)]):
        for unused in subsets(2):
            parts = [step(unused, fires, of=2, fails_late=fail) for fail in fails]
            yield Script(TWO, (parts[0] + step(of=2), parts[1] + step(of=2)))


def _iterations(number: int, unused: frozenset[int] = NOTHING, **more: Any) -> Program:
    return step(unused, **more) * number


def joins() -> Iterator[Script]:
    """Ranks that run out of inputs at different times; what they have in between; the step after the context."""
    leave: Program = (LeaveJoin(),)
    after = (ZeroGrad(), *step())
    dropped: Program = (Forward(),)
    local: Program = (Forward(synchronises=False), Backward((0, 2), synchronises=False))
    for divides, order in ((True, (2, 1, 0)), (False, None)):
        setup = Setup(joins=True, divides_by_initial=divides, order=order)
        for many, few in [(1, 0), (2, 0), (2, 1)]:
            for a in subsets(3):
                yield Script(setup, (_iterations(many, a) + leave + after, _iterations(few) + leave + after))
                yield Script(setup, (_iterations(few, a) + leave + after, _iterations(many) + leave + after))
                late = _iterations(many, a, fires=(0, 1, 2, 2))
                yield Script(setup, (late + leave + after, _iterations(few) + leave + after))
    setup = Setup(joins=True)
    pieces = [(), dropped, local, step(), step({1}), local + step(), dropped + step(), step() + dropped]
    for one, other in itertools.product(pieces, pieces):
        yield Script(setup, (step({0}) + one + leave + after, step({2}) + other + leave + after))
        yield Script(setup, (one + leave + after, other + leave + local + step()))
        yield Script(Setup(joins=True, finds_unused=True), (one + leave + after, other + leave + after))
    for a, b in pairs():  # promises that are not kept, declarations that must not differ, "trust"
        unmet = step(fires=sorted(a))
        yield Script(setup, (unmet + unmet + leave + after, unmet + leave + after))
        yield Script(setup, (unmet + unmet + leave + after, leave + after))
        same = Setup(agreement=Agreement.SAME, joins=True)
        yield Script(same, (step(a) * 2 + leave + after, step(b) + leave + after))
        trust = Setup(agreement=Agreement.TRUST, joins=True)
        yield Script(trust, (step(a) * 2 + leave + after, step(a) + leave + after))
        yield Script(setup, (local + step(a) + step(b) + leave + after, local + leave + step()))
    for fires in ((0, 1, 2), (1,)):  # an exception leaves the context on all ranks
        may = step(fires=fires, may_raise=True)
        yield Script(setup, (may + step() + leave + after, leave + after))
        yield Script(setup, (step() + may + leave + after, step() + leave + after))
        yield Script(setup, (may + leave + after, step() * 2 + leave + after))
    for numbers in itertools.product(range(3), repeat=3):
        for divides in (True, False):
            programs = [_iterations(n, frozenset({n}) if n else NOTHING) + leave + after for n in numbers]
            yield Script(Setup(joins=True, divides_by_initial=divides), tuple(programs))
