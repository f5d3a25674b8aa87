"""What is claimed of the protocol, and how each claim is checked on the shipped machine.

Every claim of the explorer is checked for the same: see ``explore.py`` for what holds in every state, ``oracle.py`` for
what must have become of the ranks in the end, and ``closing.py`` and ``rank.py`` for what each launch must satisfy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ..claims import BOUNDED, Claim, Evidence, Refuted
from ..coqtool import replayed, term, theorems
from . import breaks, families, oracle, walks
from .explore import Explorer, Found
from .families import Family, chosen
from .script import Script
from .theory import PROGRAM, PROGRAM_ROW
from .traces import traces


def explored(parts: tuple[Family, ...], few: int, what: str) -> Callable[[bool], Evidence]:
    """A check that goes through all scripts of some families, or in a quick run through ``few`` of each."""

    def run(quick: bool) -> Evidence:
        explorer = Explorer()
        for script in (script for family in parts for script in chosen(family, few if quick else None)):
            judge(script, explorer.explore(script))
        counts = (
            f"{explorer.scripts:,} scripts, {explorer.transitions:,} transitions, {explorer.moves:,} of one machine"
        )
        return Evidence(explorer.states, f"{what}: {counts}")

    return run


def judge(script: Script, found: Found) -> None:
    """Assert that every end of the script is as it should be."""
    for reports in found.ends:
        try:
            oracle.judge(script, reports)
        except Exception as error:
            raise Refuted(f"{error or type(error).__name__}\n  {script}") from error


def every_order_is_covered(quick: bool) -> Evidence:
    """[Note: reduction] and the merging of states, against exploring without them."""
    explorers = [Explorer(), Explorer(merges=False)]
    parts = (
        (families.changing_sets, 2),
        (families.gradients_up_to_twice, 12),
        (families.agreements, 4),
        (breaks.joins, 4),
        (breaks.faults, 1),
    )
    for family, few in parts:
        for script in chosen(family, few if quick else 6 * few):
            if len(script.programs) > 2:
                continue
            ends = [explorers[0].explore(script).ends, explorers[1].explore(script, reduced=False).ends]
            if ends[0] != ends[1]:
                raise Refuted(f"there are other ends without the reduction\n  {script}")
    states = [explorer.states for explorer in explorers]
    return Evidence(
        states[1], f"{explorers[0].scripts} scripts: {states[1]:,} states, of which {states[0]:,} are enough"
    )


def paths_are_as_the_theorem_asks(quick: bool) -> Evidence:
    """Explored paths, for Coq's kernel: waits for own earlier issues alone, and as many issues on each rank."""
    theorems("Protocol", ("every_run_ends_well",))
    rows = []
    for ranks in traces(quick):
        issues = [[step for step in trace if step[0] == "issue"] for trace in ranks]
        assert all(other == issues[0] for other in issues), f"ranks issue {issues}"
        for trace in ranks:
            steps = [0 if step[0] == "issue" else int(step[1]) + 1 for step in trace]
            rows.append(term((len(issues[0]), steps)))
    return Evidence(replayed("Protocol", PROGRAM, PROGRAM_ROW, rows), "paths through every family of scripts")


CLAIMS: Final = (
    Claim(
        "B5",
        "whatever two ranks declare and whichever gradients come, they stay in step and each mean is right",
        BOUNDED,
        explored((families.gradients_up_to_twice, families.declared_and_used), 30, "2 ranks x 3 parameters"),
        (8_000, 300_000),
    ),
    Claim(
        "B6",
        "sets may change from one backward to the next: no plan is mixed with another",
        BOUNDED,
        explored((families.changing_sets, families.repeated_gradients), 25, "2 ranks x 3 parameters, 1 to 3 windows"),
        (6_000, 120_000),
    ),
    Claim(
        "B7",
        "what no_sync accumulated is averaged once, by the next window, on all ranks",
        BOUNDED,
        explored((families.accumulation,), 40, "2 ranks x 3 parameters, every pair of sets"),
        (3_000, 45_000),
    ),
    Claim(
        "B8",
        "forwards and backwards need not alternate, and a promise that nobody kept raises on all ranks",
        BOUNDED,
        explored((families.forwards_and_backwards,), 60, "2 ranks x 3 parameters, every pair of sets"),
        (6_000, 80_000),
    ),
    Claim(
        "B9",
        'under "same", "trust", detection, a static graph and program order ranks stay in step',
        BOUNDED,
        explored((families.agreements,), 60, "2 ranks x 3 parameters, every pair of sets"),
        (12_000, 230_000),
    ),
    Claim(
        "B10",
        "an exception at any point of a backward is told to all ranks, changes no gradient, and the next step works",
        BOUNDED,
        explored((breaks.exceptions,), 12, "2 or 3 ranks x 3 parameters"),
        (20_000, 700_000),
    ),
    Claim(
        "B11",
        "a faulty opening, a changed graph and a failed late round are errors on all ranks, and the next step is right",
        BOUNDED,
        explored((breaks.faults,), 40, "2 or 3 ranks x 2 or 3 parameters"),
        (25_000, 550_000),
    ),
    Claim(
        "B12",
        "ranks that ran out of inputs follow the others, without a say, and no rank is left waiting",
        BOUNDED,
        explored((breaks.joins,), 60, "2 or 3 ranks x 3 parameters, up to 3 iterations"),
        (15_000, 250_000),
    ),
    Claim(
        "B13",
        "three ranks that differ stay in step and each mean is right",
        BOUNDED,
        explored((families.three_ranks,), 60, "3 ranks x 2 or 3 parameters"),
        (20_000, 350_000),
    ),
    Claim(
        "B14",
        "the explorer's short cuts lose nothing: all orders of all ranks have the same ends",
        BOUNDED,
        every_order_is_covered,
        (40_000, 170_000),
    ),
    Claim(
        "B15",
        "the same of larger groups and models, along paths drawn at random",
        BOUNDED,
        walks.walked,
        (1_500, 30_000),
    ),
    Claim(
        "B16",
        "what ranks issue and wait for along explored paths is what B4's theorem asks for",
        BOUNDED,
        paths_are_as_the_theorem_asks,
        (200, 2_000),
        needs_coq=True,
    ),
)
