"""The scripts of which every schedule is tried, in families.

The first window teaches the launch order; the windows after it launch early.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from .script import HIDDEN, PLAIN, UNDEFINED, Call, Program, Script, Setup, Step, Use, using

Params = frozenset[int]

TWO = Setup(((1,), (2,)))
THREE = Setup()
ONE_BUCKET = Setup(caps=(1000,))
FOUR = Setup(((1,),) * 4, caps=(1000,))
TWO_DTYPES = Setup(((2,), (1,), (2, 2)), doubles=frozenset({1}), caps=(16, 8))


def subsets(of: int) -> list[Params]:
    """All sets of parameters, the empty one first."""
    return [frozenset(some) for size in range(of + 1) for some in itertools.combinations(range(of), size)]


def learning(of: int) -> Program:
    """The first window: it teaches to launch the last parameter first."""
    return (Step((using(of - 1, declared=range(of - 1)),)),)


def whole(declared: Iterable[int], of: int, **more: int | bool | None) -> Call:
    """What is not declared is used once, the last parameter first."""
    unused = frozenset(declared)
    return using(*(i for i in reversed(range(of)) if i not in unused), declared=unused, **more)


def scripts(setup: Setup, programs: Iterable[Sequence[Program]]) -> Iterator[Script]:
    """With the first window before each."""
    for each in programs:
        yield Script(setup, tuple(learning(setup.num_params) + one for one in each))


def one(call: Call, *, zeroes: bool = True) -> Program:
    """A step of one forward and its backward."""
    return (Step((call,), zeroes=zeroes),)


def smallest() -> Iterator[Script]:
    """Two ranks with one parameter, which each uses, declares, or brings twice."""
    calls = (using(0), using(declared=(0,)), Call((Use(0), Use(0, HIDDEN))))
    for a, b in itertools.combinations_with_replacement(calls, 2):
        yield Script(Setup(((2,),)), (one(a), one(b)))


def declared() -> Iterator[Script]:
    """Two ranks: every pair of declared sets of three parameters, in three ways of bucketing."""
    for setup in (THREE, ONE_BUCKET, TWO_DTYPES):
        for a, b in itertools.product(subsets(3), repeat=2):
            yield from scripts(setup, [(one(whole(a, 3)), one(whole(b, 3), zeroes=False))])


def three_ranks() -> Iterator[Script]:
    """Three ranks and two parameters: any declared sets."""
    for sets in itertools.product(subsets(2), repeat=3):
        yield from scripts(TWO, [[one(whole(unused, 2)) for unused in sets]])


def changing() -> Iterator[Script]:
    """Two ranks: every pair of sets in two windows, one after the other; the other rank with another pair."""
    for a, b in itertools.product(subsets(3), repeat=2):
        if len(a) + len(b) < 3:  # of which there are the most schedules
            continue
        yield from scripts(THREE, [(one(whole(a, 3)) + one(whole(b, 3)), one(whole(b, 3)) + one(whole(a, 3)))])


def _brought() -> list[Call]:
    """Two parameters, any declared set, and each gradient never, once or twice, in both orders."""
    found = []
    for unused in subsets(2):
        for uses in ((), (0,), (1,), (1, 0), (0, 1), (0, 0), (0, 0, 1), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 1, 0, 1)):
            places = [Use(i, HIDDEN if i in uses[:at] else PLAIN) for at, i in enumerate(uses)]
            found.append(Call(tuple(places), unused))
    return found


def late() -> Iterator[Script]:
    """Two ranks and two parameters, what nobody expected and what comes again: an eighth of all pairs."""
    calls = _brought()
    for a, b in itertools.combinations_with_replacement(range(len(calls)), 2):
        if (a + b) % 8 == 0:
            yield from scripts(TWO, [(one(calls[a]), one(calls[b]))])


def late_and_again() -> Iterator[Script]:
    """What came late or twice once is known in the next window; gradients that are None; detection."""
    calls = _brought()[3::11]
    for a, b in itertools.product(calls, repeat=2):
        yield from scripts(TWO, [(one(a) * 2, one(b) * 2)])
    nothing = Call((Use(0, UNDEFINED), Use(1)))
    hides = Call((Use(1), Use(0, HIDDEN)))
    for finds in (False, True):
        setup = Setup(TWO.shapes, finds_unused=finds)
        for a, b in itertools.product((nothing, hides, using(0), using()), repeat=2):
            yield from scripts(setup, [(one(a) + one(using(1, 0)), one(b) + one(using(1, 0)))])


def in_one_bucket() -> Iterator[Script]:
    """Gradients that come again while their bucket waits for others, and one that does not come when it should."""
    for i in range(3):
        yield from scripts(ONE_BUCKET, [(one(using(i)) + one(whole((), 3)),) * 2])
    for uses in ((3, 2, 2, 1, 0), (0, 1, 1, 2, 3), (2, 0, 0, 3, 1)):
        again = Call(tuple(Use(i, HIDDEN if i in uses[:at] else PLAIN) for at, i in enumerate(uses)))
        yield from scripts(FOUR, [(one(again), one(whole((1, 2, 3), 4)))])


def exceptions() -> Iterator[Script]:
    """Two or three ranks: an exception at any point on one or on several, then a clean step; and an interrupted one."""
    fine = whole((), 2)
    for after in range(3):
        fails = whole((), 2, raises_after=after)
        skips = whole((1,), 2, raises_after=min(after, 1))
        for other in (fine, whole((1,), 2), skips, using(declared=()), fails):
            yield from scripts(TWO, [(one(fails) + one(fine), one(other) + one(fine))])
            yield from scripts(TWO, [(one(fails, zeroes=False) + one(fine, zeroes=False),) * 2])
        yield from scripts(TWO, [(one(fails), one(fine), one(whole((0,), 2)))])


def accumulating() -> Iterator[Script]:
    """Windows of ``no_sync`` on one rank or on all, before a window that any of them uses or not."""
    for a, b in itertools.product(subsets(2), repeat=2):
        local = one(whole(a, 2, synchronises=False))
        then = one(whole(b, 2), zeroes=False)
        yield from scripts(TWO, [(local + then, local * 2 + then), (local + then, one(whole(a, 2)))])


def several() -> Iterator[Script]:
    """Several forwards for a backward, several backwards for a forward, dropped outputs, a loss without parameters."""
    for a, b in itertools.product(subsets(2), repeat=2):
        both = (Step((whole(a, 2), whole(b, 2)), ((0, 1),), zeroes=True),)
        twice = (Step((whole(a, 2),), ((0,), (0,))),)
        dropped = (Step((whole(b, 2),), ()),)
        yield from scripts(
            TWO,
            [
                (both, one(whole(b, 2))),
                (twice, one(whole(b, 2)) + one(whole(a, 2))),
                (dropped + one(whole(a, 2)), one(whole(a, 2))),
                (one(using(declared=a)) + dropped, one(whole(b, 2)) + dropped),
            ],
        )


def promised() -> Iterator[Script]:
    """Promises that no rank keeps are an error in the next forward, on all ranks."""
    for a, b in itertools.product(subsets(2), repeat=2):
        breaks = [one(using(*sorted(used))) + one(whole((), 2)) for used in (a, b)]
        yield from scripts(TWO, [breaks])


def agreements() -> Iterator[Script]:
    """Declarations that must not differ, that nobody checks, static graphs, detection, buffers."""
    for a, b in itertools.product(subsets(2), repeat=2):
        same, static = Setup(TWO.shapes, agreement="same"), Setup(TWO.shapes, is_static=True)
        yield from scripts(same, [(one(whole(a, 2)) + one(whole((), 2)), one(whole(b, 2)) + one(whole((), 2)))])
        yield from scripts(Setup(TWO.shapes, agreement="trust"), [(one(whole(a, 2)) + one(whole(b, 2)),) * 2])
        pair = [one(using(*sorted(used, reverse=True))) for used in (a, b)]
        yield Script(static, (pair[0] * 2 + pair[1], pair[1] * 3))
        yield from scripts(Setup(TWO.shapes, finds_unused=True), [(pair[0] + pair[1], pair[1] + pair[0])])
        yield from scripts(Setup(TWO.shapes, has_buffer=True, checks=True), [(one(whole(a, 2)), one(whole(b, 2)))])


def uneven() -> Iterator[Script]:
    """Join contexts: one rank runs out of inputs before another, at once or later, whatever they use."""
    for a, b in itertools.product(subsets(2), repeat=2):
        for divides in (False, True):
            setup = Setup(TWO.shapes, joins=True, divides_by_initial=divides)
            some, more = one(whole(a, 2)), one(whole(b, 2), zeroes=False)
            yield Script(setup, (some + more, some))
            yield Script(setup, ((), more + some))
            yield Script(setup, (some, some + more, more))
