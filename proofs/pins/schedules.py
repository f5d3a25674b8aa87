"""Scripts on real wrappers in a simulated group, in every schedule or in some.

[Note: schedules] What a rank does depends on nothing of the others but what it is told: results, which do not depend on
the order, and whether OPEN is back, which it asks now and then. "Not yet" is always a possible answer, "yes" once all
ranks have started it; and if every rank goes on as far as it can before a question is answered, they have. So it is
enough to let ranks go on in any one order and to try all answers. Where ``switches`` are given another rank may also be
next, so often, although the one that ran could go on: P4 finds that this makes no difference. It takes for granted
that ranks share nothing; see [Note: apart].
"""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

from knownddp import protocol

from ..claims import Refuted
from .baton import Baton, Choices, Stuck
from .group import Group, Hub, simulated
from .oracle import Told, due
from .play import play
from .predict import ANY_SIZE, Sent, predicted
from .script import Script

UNLIMITED: Final = 10**9


class Ran(NamedTuple):
    """What became of a script in one schedule, by rank."""

    told: tuple[tuple[Told, ...], ...]
    sent: tuple[tuple[Sent, ...], ...]
    polls: tuple[tuple[bool, ...], ...]


class Simulation:
    """Runs scripts, and checks what becomes of them."""

    def __init__(self) -> None:
        self._batons: dict[int, Baton] = {}
        self.runs = 0

    def explore(self, script: Script, *, switches: int | None = None, tries_first: bool = False) -> set[Ran]:
        """All schedules. ``tries_first``: also all answers in the first window, which launches nothing early."""
        wanted = due(script)
        found: set[Ran] = set()
        prefix: list[int] | None = []
        while prefix is not None:
            choices = Choices(prefix)
            found.add(self._checked(script, choices, wanted, switches, tries_first))
            prefix = choices.next_prefix()
        return found

    def sample(self, script: Script, number: int, seed: int) -> set[Ran]:
        """So many schedules drawn at random."""
        wanted = due(script)
        draws = random.Random(seed)
        return {
            self._checked(script, Choices(draw=draws.randrange), wanted, UNLIMITED, tries_first=True)
            for _ in range(number)
        }

    def _checked(
        self, script: Script, choices: Choices, wanted: list[list[Told]], switches: int | None, tries_first: bool
    ) -> Ran:
        try:
            ran = self._run(script, choices, switches, tries_first)
            judge(script, ran, wanted)
        except AssertionError as error:
            trail = [chosen for chosen, _ in choices.trail]
            raise Refuted(f"{error}\n  choices {trail} of\n  {script}") from error
        return ran

    def _run(self, script: Script, choices: Choices, switches: int | None, tries_first: bool) -> Ran:
        if script.world not in self._batons:
            self._batons[script.world] = Baton(script.world)
        baton = self._batons[script.world]
        self.runs += 1
        if self.runs % 500 == 0:
            gc.collect()
        hub = Hub(baton, script.world, pauses_at_starts=switches is not None, tries_first=tries_first)
        mine = threading.local()

        def job(rank: int) -> list[Told]:
            mine.group = Group(hub, rank)
            return play(script, rank, hub.clocks[rank])

        with simulated(hub, lambda: mine.group):
            try:
                results = baton.run([partial(job, rank) for rank in range(script.world)], choices, switches=switches)
            except Stuck as stuck:
                raise Refuted("; ".join([*hub.complaints, str(stuck)])) from stuck
        if hub.complaints:
            raise Refuted(hub.complaints[0])
        for rank, result in enumerate(results):
            if isinstance(result, BaseException):
                raise Refuted(f"rank {rank} ended with {type(result).__name__}: {result}") from result
        for sent, rank, handle in hub.handles:
            assert handle.is_delivered or sent.kind not in ("sum", "swap"), f"rank {rank} never waited for {sent}"
        return Ran(tuple(map(tuple, results)), tuple(map(tuple, hub.sent)), tuple(map(tuple, hub.polls)))


def judge(script: Script, ran: Ran, wanted: list[list[Told]]) -> None:
    """Assert that all was told and sent that should be, and nothing else."""
    for rank, told in enumerate(ran.told):
        for position, (one, other) in enumerate(zip(told, wanted[rank], strict=False)):
            assert one == other, f"rank {rank} was told {one} in place {position}, due is {other}"
        assert len(told) == len(wanted[rank]), f"rank {rank} was told {told}, due is {wanted[rank]}"
    what = [[one._replace(after=0) for one in sent] for sent in ran.sent]
    assert all(sent == what[0] for sent in what), f"ranks started different collectives: {list(map(_brief, what))}"
    expected = predicted(script, ran.polls)
    for rank, sent in enumerate(ran.sent):
        pickled = {at for at, one in enumerate(expected[rank]) if one.nbytes == ANY_SIZE}
        started = [one._replace(nbytes=ANY_SIZE) if at in pickled else one for at, one in enumerate(sent)]
        assert started == expected[rank], (
            f"rank {rank} started {_brief(sent)}, the machine says {_brief(expected[rank])}"
        )


def _brief(sent: Sequence[Sent]) -> str:
    return " ".join(f"{one.kind}/{one.lane}:{one.nbytes}@{one.after}" for one in sent)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Inside, no warnings, which threads cannot filter each for itself, and no collection of what others left.

    Ranks look for OPEN at each gradient that may matter, not at every eighth: models are small here.
    """
    was_on, every = gc.isenabled(), protocol.LOOK_EVERY
    gc.disable()
    protocol.LOOK_EVERY = 1  # type: ignore[misc]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        protocol.LOOK_EVERY = every  # type: ignore[misc]
        if was_on:
            gc.enable()
