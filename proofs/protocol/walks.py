"""Larger groups and models than can be explored: paths drawn at random, judged as those of the explorer are."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from knownddp.protocol import Agreement

from ..claims import Evidence, Refuted
from . import oracle
from .explore import Explorer
from .script import Backward, Forward, LeaveJoin, Op, Program, Script, Setup, ZeroGrad


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    """One to eight parameters."""
    nbytes = tuple(draw(st.lists(st.sampled_from((4, 8, 40)), min_size=1, max_size=8)))
    n = len(nbytes)
    return Setup(
        nbytes,
        tuple(draw(st.lists(st.sampled_from((4, 16, 100)), min_size=1, max_size=3))),
        draw(st.sampled_from([Agreement.UNION, Agreement.UNION, Agreement.SAME])),
        finds_unused=draw(st.booleans()),
        order=draw(st.none() | st.permutations(range(n)).map(tuple)),
        held=frozenset(draw(st.sets(st.integers(0, n - 1), max_size=2))),
        joins=draw(st.integers(0, 3)) == 0,
    )


@st.composite
def backwards(draw: st.DrawFn, n: int, usual: frozenset[int], how: dict[str, Any]) -> Backward:
    """One whose forwards declared the usual set, or another; most of what is expected comes once."""
    some = st.frozensets(st.integers(0, n - 1))
    declared = draw(st.just(usual) | some)
    expected = sorted(frozenset(range(n)) - declared)
    fires = [*expected, *draw(st.lists(st.integers(0, n - 1), max_size=1))] if draw(st.integers(0, 3)) else draw(some)
    return Backward(
        tuple(fires),
        (*draw(st.lists(st.just(declared) | some, max_size=1)), declared),
        hidden=draw(some) if draw(st.integers(0, 3)) == 0 else frozenset(),
        **how,
    )


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    """Two to five ranks, one to four windows; forwards differ between ranks, the number of windows does not."""
    setup, world = draw(setups()), draw(st.integers(2, 5))
    n = setup.num_params
    programs: list[list[Op]] = [[] for _ in range(world)]
    for _ in range(draw(st.integers(1, 4))):
        usual = draw(st.frozensets(st.integers(0, n - 1)))
        may_raise, accumulates = draw(st.integers(0, 5)) == 0, draw(st.integers(0, 3)) == 0
        zeroes = draw(st.booleans())
        for program in programs:
            if setup.joins and draw(st.integers(0, 3)) == 0:
                continue  # one iteration less, so that it joins early
            if accumulates:
                program += [Forward(synchronises=False), draw(backwards(n, usual, {"synchronises": False}))]
            if not setup.joins:
                program += [Forward()] * draw(st.integers(0, 1))
            program += [Forward(), draw(backwards(n, usual, {"may_raise": may_raise and draw(st.booleans())}))]
            program += [ZeroGrad()] * zeroes
    if setup.joins:
        after: list[Op] = [Forward(), Backward(tuple(range(n)))]
        programs = [[*program, LeaveJoin(), *after] for program in programs]
    return Script(setup, tuple(map(_program, programs)))


def _program(steps: list[Op]) -> Program:
    return tuple(steps)


def walked(quick: bool) -> Evidence:
    """Drawn scripts, each along one path at random."""
    counts = {"walks": 0, "steps": 0, "windows": 0}

    @settings(
        max_examples=60 if quick else 800,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(scripts(), st.integers(0, 2**32))
    def walk(script: Script, seed: int) -> None:
        explorer, draw = Explorer(), random.Random(seed)
        here, steps = explorer.start(script), 0
        try:
            while choices := explorer.all_choices(here):
                here, _ = explorer.after(here, *draw.choice(choices))
                steps += 1
            reports = explorer.ended(script, here)
            oracle.judge(script, reports)
        except Exception as error:
            raise Refuted(f"{error or type(error).__name__}\n  {script}") from error
        counts["walks"] += 1
        counts["steps"] += steps
        counts["windows"] += sum(report.is_window for report in reports[0])

    walk()
    bounds = f"2 to 5 ranks x 1 to 8 parameters, {counts['walks']:,} walks through {counts['windows']:,} windows"
    return Evidence(counts["steps"], bounds)
