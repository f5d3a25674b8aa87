"""Real gloo runs whose collectives are written down, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from ..claims import Refuted
from .oracle import Told, due
from .play import Clock, play
from .predict import Sent
from .processes import Processes
from .schedules import Ran, judge
from .script import Script
from .seam import recorded


def played(script: Script, rank: int) -> tuple[list[Told], list[Sent], list[bool]]:
    """On a started rank: play its program; what it was told, what it started, and what it heard of OPEN."""
    clock = Clock()
    with recorded(clock) as recorder:
        told = play(script, rank, clock)
    return told, recorder.sent, recorder.polls


def compare(scripts: Sequence[Script]) -> int:
    """Play all of them on gloo and compare with what is due. Returns how many collectives were compared.

    Raises:
        Refuted: a rank started something else than the machine says, or something else than its peers, or was told
            something else than plain autograd says.
    """
    number = 0
    for world in sorted({script.world for script in scripts}):
        mine = [script for script in scripts if script.world == world]
        with Processes(world) as processes:
            processes.start(mine)
            for script in mine:
                try:
                    told, sent, polls = zip(*processes.ran(), strict=True)
                    ran = Ran(tuple(map(tuple, told)), tuple(map(tuple, sent)), tuple(map(tuple, polls)))
                    judge(script, ran, due(script))
                except AssertionError as error:
                    raise Refuted(f"{error}\n  {script}") from error
                number += sum(map(len, sent))
    return number
