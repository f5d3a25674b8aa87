"""What is claimed of the whole library on several ranks, and how each claim is checked: on gloo and simulated."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Final

from ..claims import BOUNDED, Claim, Evidence, Refuted
from . import families, recorder
from .draws import drawn
from .schedules import Simulation, undisturbed
from .script import Script

Family = Callable[[], Iterator[Script]]


def chosen(parts: tuple[Family, ...], few: int | None) -> list[Script]:
    """All scripts of some families; or so many of each, from all over it and the same in every run."""
    found: list[Script] = []
    for family in parts:
        scripts = list(family())
        found += scripts if few is None else random.Random(1).sample(scripts, min(few, len(scripts)))
    return found


def on_gloo(quick: bool) -> Evidence:
    scripts = [drawn(number, (3,) if quick else (2, 3)) for number in range(12 if quick else 200)]
    compared = recorder.compare(scripts)
    ranks = "3" if quick else "2 or 3"
    return Evidence(len(scripts), f"{ranks} ranks, up to 5 parameters and 4 windows: {compared:,} collectives")


def in_every_schedule(parts: tuple[Family, ...], few: int, what: str) -> Callable[[bool], Evidence]:
    """A check of families in every schedule; in a quick run of ``few`` scripts of each."""

    def run(quick: bool) -> Evidence:
        scripts = chosen(parts, few if quick else None)
        with undisturbed():
            simulation = Simulation()
            for script in scripts:
                simulation.explore(script)
        return Evidence(simulation.runs, f"{what}: {len(scripts):,} scripts")

    return run


def in_every_order(quick: bool) -> Evidence:
    """[Note: schedules]: no other order leads to anything else."""
    few, switches, sampled = (2, 1, 5) if quick else (5, 2, 40)
    scripts = chosen((families.smallest, families.exceptions, families.late), few)
    with undisturbed():
        simulation = Simulation()
        for at, script in enumerate(scripts):
            known = simulation.explore(script, tries_first=True)
            others = simulation.sample(script, sampled, at)
            if at < few:
                others |= simulation.explore(script, switches=switches, tries_first=True)
            if not others <= known:
                raise Refuted(f"another order of the ranks leads to something else\n  {script}")
    return Evidence(simulation.runs, f"2 ranks, 1 or 2 parameters: {len(scripts)} scripts, up to {switches} switches")


def at_random(quick: bool) -> Evidence:
    number = 120 if quick else 2_000
    with undisturbed():
        simulation = Simulation()
        for seed in range(number):
            simulation.sample(drawn(seed), 1, seed)
    return Evidence(simulation.runs, "2 to 4 ranks, up to 5 parameters and 4 windows, one schedule each")


CLAIMS: Final = (
    Claim(
        "P1",
        "on gloo real wrappers issue what the machine says, and gradients are plain autograd's mean, exactly",
        BOUNDED,
        on_gloo,
        (12, 200),
        multi_process=True,
    ),
    Claim(
        "P2",
        "whatever ranks declare and use, in every schedule they stay in step and each mean is right",
        BOUNDED,
        in_every_schedule(
            (
                *(families.declared, families.three_ranks, families.changing),
                *(families.late, families.late_and_again, families.in_one_bucket),
            ),
            4,
            "2 or 3 ranks x 2 or 3 parameters",
        ),
        (80, 1_200),
    ),
    Claim(
        "P3",
        "exceptions, broken promises, no_sync and other loops: errors on all ranks exactly when due, and right after",
        BOUNDED,
        in_every_schedule(
            (
                *(families.exceptions, families.accumulating, families.several),
                *(families.promised, families.agreements, families.uneven),
            ),
            5,
            "2 or 3 ranks x 2 parameters",
        ),
        (90, 750),
    ),
    Claim(
        "P4",
        "who runs first makes no difference: no order of the ranks leads to anything that P2 and P3 do not try",
        BOUNDED,
        in_every_order,
        (69, 990),
    ),
    Claim(
        "P5",
        "the same of larger groups and models, in schedules drawn at random",
        BOUNDED,
        at_random,
        (120, 2_000),
    ),
)
