"""What ranks issue and wait for, along some paths of every family of scripts, for theorems about such sequences."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final

from ..claims import Refuted
from . import breaks, families
from .explore import Explorer
from .families import Family, chosen
from .script import Script
from .state import Issue

Step = tuple[str, str, int] | tuple[str, int]
Trace = list[Step]

FAMILIES: Final[tuple[Family, ...]] = (
    families.gradients_up_to_twice,
    families.declared_and_used,
    families.changing_sets,
    families.repeated_gradients,
    families.accumulation,
    families.forwards_and_backwards,
    families.agreements,
    families.three_ranks,
    breaks.exceptions,
    breaks.faults,
    breaks.joins,
)


def traces(quick: bool) -> Iterator[tuple[Trace, ...]]:
    """Runs that went to their end, as a trace for each rank.

    A trace is a list of ``("issue", tag, size in bytes)`` and ``("wait", k)``, k being the position of what is waited
    for among the rank's own issues.
    """
    draw = random.Random(3)
    for family in FAMILIES:
        for script in chosen(family, 6 if quick else 60):
            explorer = Explorer()
            for _ in range(2):
                try:
                    trace = _path(explorer, script, draw)
                except Exception as error:  # of the machine too
                    raise Refuted(f"{error or type(error).__name__}\n  {script}") from error
                if trace is not None:
                    yield trace


def _path(explorer: Explorer, script: Script, draw: random.Random) -> tuple[Trace, ...] | None:
    """Along one path; None if a rank waits for one whose program is shorter."""
    here = explorer.start(script)
    found: tuple[Trace, ...] = tuple([] for _ in script.programs)
    while choices := explorer.all_choices(here):
        rank, event = draw.choice(choices)
        here, actions = explorer.after(here, rank, event)
        for action in actions:
            if isinstance(action, Issue):
                found[rank].append(("issue", action.tag, action.size))
            else:
                found[rank].append(("wait", action.position))
    return found if all(explorer.ranks.views[number].is_over for number in here.ranks) else None
