"""Every order in which the parts of a script can happen.

A state is that of all ranks and of the collectives between them. The k-th collective of a rank meets the k-th of the
others; it comes back when all have issued it. Whoever comes second must issue the same, or the script is refuted, with
the shortest way there.

[Note: ranks alone] A rank is deterministic, and knows of others only by the results of collectives. So what it does in
a state is worked out once, by the shipped machine, and remembered (``Ranks``); the product over ranks is of numbers.

[Note: reduction] Steps of different ranks commute: each changes its own rank and adds its share to collectives, which
combine in any order. All that a rank can do to another is to make an answer come that was awaited. So where a rank has
something to do and awaits nothing that is still to come, no other rank can change what it may do, and it is enough to
follow its own choices first: every other order does the same in another sequence, with the same ends and the same
meetings of collectives. Where no rank is so placed all are followed. Without ``reduced`` all are followed always, and
a claim compares.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ..claims import Refuted
from .rank import Rank
from .script import Script
from .state import Event, Issue, Report, Role, Wait

COMBINE: Final[dict[str, Callable[[int, int], int]]] = {"or": operator.or_, "sum": operator.add, "max": max}

MANY: Final = 100_000  # states of single ranks; forgotten then

Reports = tuple[Report, ...]
Results = tuple[tuple[int, ...], ...]


class View(NamedTuple):
    """What of a rank's state others see."""

    choices: tuple[Event, ...]
    when_answered: tuple[Event, ...]
    awaited: tuple[int, ...]
    oldest: int
    issued: int
    is_over: bool
    reports: Reports


class Ranks:
    """All states of single ranks seen so far, by number.

    ``merges``: take states for one that ``Rank.key`` says go on alike.
    """

    def __init__(self, *, merges: bool = True) -> None:
        self._merges = merges
        self._numbers: dict[tuple[int, bytes], int] = {}
        self._snapshots: list[tuple[int, bytes]] = []
        self._roles: list[Role] = []
        self._role_numbers: dict[Role, int] = {}
        self._starts: dict[int, int] = {}
        self._steps: dict[tuple[int, Event, Results], tuple[int, tuple[Issue | Wait, ...]]] = {}
        self.views: list[View] = []

    def __len__(self) -> int:
        return len(self._snapshots)

    @property
    def steps(self) -> int:
        """How often a machine was moved."""
        return len(self._steps)

    def start(self, role: Role) -> int:
        """The state in which a rank begins."""
        number = self._role_numbers.get(role)
        if number is None:
            number = self._role_numbers[role] = len(self._roles)
            self._roles.append(role)
            self._starts[number] = self._note(number, Rank(role))
        return self._starts[number]

    def _note(self, role: int, rank: Rank) -> int:
        snapshot = rank.snapshot()
        key = (role, rank.key(snapshot) if self._merges else snapshot)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._snapshots)
            self._snapshots.append((role, snapshot))
            answered, oldest = rank.choices_when_answered(), rank.oldest()
            self.views.append(
                View(rank.choices(), answered, rank.awaited, oldest, rank.issued, rank.is_over, rank.reports)
            )
        return number

    def step(self, state: int, event: Event, results: Results) -> tuple[int, tuple[Issue | Wait, ...]]:
        """The state after ``event``, and what the rank did."""
        key = (state, event, results)
        found = self._steps.get(key)
        if found is None:
            role, snapshot = self._snapshots[state]
            rank = Rank.restored(snapshot, self._roles[role])
            rank.do(event, results)
            found = self._steps[key] = self._note(role, rank), tuple(rank.actions)
        return found


class Global(NamedTuple):
    """Ranks by the numbers of their states, and the collectives from position ``base`` on."""

    ranks: tuple[int, ...]
    base: int
    collectives: tuple[Issue, ...]


@dataclass(slots=True)
class Found:
    """What exploring a script came to."""

    states: int = 0
    transitions: int = 0
    ends: set[tuple[Reports, ...]] = field(default_factory=set)  # reports of all ranks
    is_stuck: bool = False  # some ends are those of ranks that wait for one whose program is over


class Explorer:
    """Explores scripts, which have much in common."""

    def __init__(self, *, merges: bool = True) -> None:
        self.merges = merges
        self.ranks = Ranks(merges=merges)
        self.states = self.transitions = self.scripts = 0
        self.moves = 0  # of a machine

    def explore(self, script: Script, *, reduced: bool = True) -> Found:
        """All of ``script``. Raises ``Refuted`` where something said of a state does not hold."""
        if len(self.ranks) > MANY:
            self.ranks = Ranks(merges=self.merges)
        found, start, moved = Found(), self.start(script), self.ranks.steps
        came_from: dict[Global, tuple[Global, int, Event] | None] = {start: None}
        todo = deque([start])
        while todo:
            here = todo.popleft()
            rank, event = -1, ("", 0)
            try:
                chosen = self._choices(here, reduced=reduced)
                for rank, event in chosen:
                    there = self.after(here, rank, event)[0]
                    found.transitions += 1
                    if there not in came_from:
                        came_from[there] = (here, rank, event)
                        todo.append(there)
                if not chosen:
                    self._note_end(script, here, found)
            except Exception as error:  # of the machine too: what it never raises in a run that goes well
                way = [f"rank {r} {what} {i}" for r, (what, i) in _way(came_from, here, (rank, event))]
                raise Refuted(f"{error or type(error).__name__}\n  {script}\n  {', '.join(way)}") from error
        found.states = len(came_from)
        self.states += found.states
        self.transitions += found.transitions
        self.moves += self.ranks.steps - moved
        self.scripts += 1
        return found

    def start(self, script: Script) -> Global:
        """The state in which a script begins."""
        world = len(script.programs)
        roles = [Role(script.setup, program, world, number) for number, program in enumerate(script.programs)]
        return Global(tuple(self.ranks.start(role) for role in roles), 0, ())

    def _choices(self, here: Global, *, reduced: bool) -> list[tuple[int, Event]]:
        """Which rank may do what; with [Note: reduction] as much of it as is needed."""
        views = [self.ranks.views[number] for number in here.ranks]
        complete = min(view.issued for view in views)
        found: list[tuple[int, Event]] = []
        for rank, view in enumerate(views):
            is_answered = not view.when_answered or max(view.awaited, default=-1) < complete
            events = view.choices + view.when_answered if is_answered else view.choices
            if reduced and events and is_answered:
                return [(rank, event) for event in events]
            found += [(rank, event) for event in events]
        return found

    def all_choices(self, here: Global) -> list[tuple[int, Event]]:
        """Which rank may do what."""
        return self._choices(here, reduced=False)

    def after(self, here: Global, rank: int, event: Event) -> tuple[Global, tuple[Issue | Wait, ...]]:
        """The state after ``event``, and what the rank did."""
        views, (states, base, collectives) = self.ranks.views, here
        view = views[states[rank]]
        asks = event[0] in ("look", "answer")
        results = tuple(collectives[at - base].payload for at in view.awaited) if asks else ()
        state, actions = self.ranks.step(states[rank], event, results)
        states = (*states[:rank], state, *states[rank + 1 :])
        at = view.issued - base
        for issue in actions:
            if isinstance(issue, Issue):
                collectives = _met(collectives, at, issue)
                at += 1
        oldest = min(views[number].oldest for number in states)
        return Global(states, oldest, collectives[oldest - base :]), actions

    def _note_end(self, script: Script, here: Global, found: Found) -> None:
        views = [self.ranks.views[number] for number in here.ranks]
        found.is_stuck |= not all(view.is_over for view in views)
        found.ends.add(self.ended(script, here))

    def ended(self, script: Script, here: Global) -> tuple[Reports, ...]:
        """What ranks reported, where nothing more can happen: all are done, or a peer has a backward less."""
        views = [self.ranks.views[number] for number in here.ranks]
        fewest = min(view.issued for view in views)
        waiting = [rank for rank, view in enumerate(views) if not view.is_over]
        if waiting:
            ends_early = not script.setup.joins and len(set(script.windows)) > 1
            has_left = any(view.is_over and view.issued == fewest for view in views)
            assert ends_early and has_left, f"ranks {waiting} wait for ever"
        else:
            assert all(view.issued == fewest for view in views), "ranks issued different numbers of collectives"
        return tuple(view.reports for view in views)


def _met(collectives: tuple[Issue, ...], at: int, issue: Issue) -> tuple[Issue, ...]:
    """With one more rank at that collective."""
    if at == len(collectives):
        return (*collectives, issue)
    met = collectives[at]
    assert met[:4] == issue[:4], f"{issue.tag} of {issue.size} bytes for {issue.about} met {met[:3]}"
    combine = COMBINE[issue.how]
    both = issue._replace(payload=tuple(map(combine, met.payload, issue.payload)))
    return (*collectives[:at], both, *collectives[at + 1 :])


def _way(
    came_from: dict[Global, tuple[Global, int, Event] | None], here: Global, last: tuple[int, Event]
) -> Iterator[tuple[int, Event]]:
    """The events that led to ``here``, and the one that failed there."""
    way = [last] if last[0] >= 0 else []
    step = came_from[here]
    while step is not None:
        before, rank, event = step
        way.append((rank, event))
        step = came_from[before]
    return reversed(way)
