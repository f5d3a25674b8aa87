"""The scripts that are explored, in families."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from knownddp.protocol import Agreement

from .script import NOTHING, Backward, Forward, Program, Script, Setup, ZeroGrad, step

Params = frozenset[int]
Family = Callable[[], Iterator[Script]]

TWO = Setup(nbytes=(4, 8), limits=(4, 8), order=(1, 0))
THREE = Setup()


def chosen(family: Family, few: int | None) -> list[Script]:
    """The scripts of a family; or so many, from all over it and the same in every run."""
    scripts = list(family())
    return scripts if few is None else random.Random(1).sample(scripts, min(few, len(scripts)))


def subsets(of: int) -> list[Params]:
    """All sets of parameters, the empty one first."""
    return [frozenset(some) for size in range(of + 1) for some in itertools.combinations(range(of), size)]


def pairs(of: int = 3) -> list[tuple[Params, Params]]:
    """All pairs of sets of parameters."""
    return list(itertools.product(subsets(of), subsets(of)))


def unordered(programs: Iterable[Program], world: int = 2) -> Iterator[tuple[Program, ...]]:
    """Every choice of one for each rank, where it does not matter which rank has which."""
    return itertools.combinations_with_replacement(programs, world)


def _bringing(declared: Params, fires: Iterable[int], **more: Any) -> Program:
    return (Forward(), Backward(tuple(fires), (declared,), **more))


def gradients_up_to_twice() -> Iterator[Script]:
    """Two ranks and two parameters: any declared set, and each gradient up to twice; then a clean step."""
    clean = step(of=2)
    often = [(0,) * zeros + (1,) * ones for zeros in range(3) for ones in range(3)]
    for one, other in unordered(_bringing(declared, fires) for declared in subsets(2) for fires in often):
        yield Script(TWO, (one + clean, other + clean))


def declared_and_used() -> Iterator[Script]:
    """Two ranks and three parameters: any declared set, and any set of gradients."""
    everything = [_bringing(declared, sorted(fires)) for declared, fires in pairs()]
    yield from (Script(THREE, programs) for programs in unordered(everything))


def changing_sets() -> Iterator[Script]:
    """Sets that change from window to window and differ between ranks, and the first window of all."""
    for limits, order in (((4, 8), None), ((4, 8), (2, 1, 0)), ((1000,), (0, 1, 2)), ((4, 1000), (2, 1, 0))):
        setup = Setup(limits=limits, order=order)
        for a, b in pairs():
            yield Script(setup, (step(a) + step(b) + step(a),) * 2)
            yield Script(setup, (step(a) + step(b), step(b) + step(b)))
    for held, unused in pairs():
        yield Script(Setup(held=held), (step(), step(unused)))


def repeated_gradients() -> Iterator[Script]:
    """Gradients that come twice, in two windows, the first of all and later ones."""
    parts = [step(fires=fires) for fires in ((0, 1, 2), (0, 1, 2, 0), (2, 2, 1), (1,), ())]
    for one, other in unordered(parts):
        yield Script(THREE, (one * 2, other * 2))
        yield Script(Setup(order=None), (one * 2, other * 2))
        yield Script(Setup(order=None), (one + step(), other + step()))


def accumulation() -> Iterator[Script]:
    """Backwards under no_sync before one that synchronises, with and without zeroing between."""
    for a, b in pairs():
        local = (Forward(synchronises=False), Backward(tuple(sorted(a)), synchronises=False))
        yield from (
            Script(THREE, (local + step(b), local + step(b))),
            Script(THREE, (local + step({0, 1, 2}), step(b))),
            Script(THREE, (local + step(b, ()), local + step(b, ()))),
            Script(THREE, ((*local, ZeroGrad(), *step(b)), step(b))),
            Script(THREE, (local + step(b) + step(), local + local + step() + step({0, 2}))),
            Script(Setup(agreement=Agreement.SAME), (local + step(b), step(b))),
            Script(Setup(finds_unused=True), (local + step((), sorted(b)), step((), sorted(a)))),
            Script(Setup(order=None), (local + step(b, ()) + step(), step(b, ()) + step())),
        )


def forwards_and_backwards() -> Iterator[Script]:
    """Different numbers of forwards, dropped outputs, several of the one for one of the other, promises not kept."""
    dropped: Program = (Forward(),)
    two_losses: list[Program] = []
    two_forwards: list[Program] = []
    for a, b in pairs():
        two_losses.append((Forward(), Backward(tuple(sorted(a))), Backward(tuple(sorted(b)))))
        two_forwards.append((Forward(), Forward(), Backward(tuple(sorted({0, 1, 2} - (a & b))), (a, b))))
    for programs in two_losses:
        yield Script(THREE, (programs + dropped, programs + dropped))
        yield Script(THREE, (programs + dropped, two_losses[-1] + dropped))
    for programs in two_forwards:
        yield Script(THREE, (programs + dropped, step() + dropped))
        yield Script(THREE, (dropped + step() + step(), programs + dropped + step({1})))
    for a, b in pairs():
        missing = _bringing(NOTHING, sorted(a))
        yield Script(THREE, (missing + step(), _bringing(NOTHING, sorted(b)) + step()))
        yield Script(THREE, (missing + step(b), step({0, 1, 2} - a) + step(b)))
        yield Script(THREE, (missing, _bringing(NOTHING, sorted(b), frozen=frozenset({0}), undefined=frozenset({2}))))
        yield Script(THREE, (step() + missing + dropped * 2, step() + missing + step(b)))
        constant = _bringing(b, ())  # a loss that reaches no parameter
        yield Script(THREE, (constant + dropped, missing + dropped))
        yield Script(THREE, (dropped + missing + dropped, missing + constant[1:] + dropped))  # one backward too few


def agreements() -> Iterator[Script]:
    """Declarations that must not differ, that nobody checks, or that the engine makes; static graphs; program order."""
    same, first_same = Setup(agreement=Agreement.SAME), Setup(agreement=Agreement.SAME, order=None)
    for a, b in pairs():
        yield Script(same, (step(a) + step(), step(b) + step()))
        yield Script(first_same, (step(a) + step(b), step(b) + step(b)))
    for a, b in pairs():  # used otherwise than declared
        yield Script(same, (_bringing(a, sorted(b)) + step(a), _bringing(a, (0, 1, 2)) + step(a)))
    for a, b in pairs():
        for order in (None, (2, 1, 0)):
            trust = Setup(agreement=Agreement.TRUST, order=order)
            fires = sorted({0, 1, 2} - a)
            yield Script(trust, (step(a) + step(b), step(a, fires) + step(b)))
            yield Script(trust, (_bringing(a, sorted(b)) + step(a), _bringing(a, [0, 0, 1]) + step(a)))
    for a, b in pairs():  # the engine foretells all of it or not
        finds, hidden = Setup(finds_unused=True), frozenset({1})
        parts = [_bringing(NOTHING, sorted(some), hidden=hidden & some) for some in (a, b)]
        yield Script(finds, (parts[0] * 2 + parts[1], parts[1] * 2 + parts[0]))
        yield Script(Setup(finds_unused=True, order=None), (parts[0] + parts[1], step((), sorted(b)) * 2))
    for a, b in pairs():
        static = Setup(is_static=True, order=None)
        yield Script(static, (step((), sorted(a)) * 3, step((), sorted(b)) * 3))
        yield Script(static, (step((), sorted(a)) * 2 + step((), sorted(b)), step() * 3))
        yield Script(static, (step((), (*sorted(a), 0)) * 2, step((), sorted(b), undefined=frozenset({1}) - b) * 2))
    for a, b in pairs():  # with hooks of the user's, which call collectives where both ranks have a gradient
        for order in (None, (2, 1, 0)):
            marks = frozenset({0, 1, 2}) - a - b
            parts = [step(one, sorted({0, 1, 2} - one, reverse=True), marks=marks) for one in (a, b)]
            yield Script(Setup(in_program_order=True, order=order), (parts[0] * 2, parts[1] * 2))


def three_ranks() -> Iterator[Script]:
    """Three ranks that differ in what they declare and use."""
    whole = [step(a) + step() for a in subsets(3)]
    for setup in (THREE, Setup(order=None)):
        yield from (Script(setup, programs) for programs in unordered(whole, 3))
    two = [_bringing(a, sorted(b)) for a, b in pairs(2)]
    yield from (Script(TWO, programs) for programs in unordered(two, 3))
    same = Setup((4, 8), (4, 8), Agreement.SAME, order=(1, 0))
    declaring = [step(a, of=2) + step(of=2) for a in subsets(2)]
    yield from (Script(same, programs) for programs in itertools.product(declaring, repeat=3))
