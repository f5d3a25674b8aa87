"""Ranks as threads of one process of which exactly one runs: who runs next is chosen, and every choice can be tried.

A rank runs until it pauses: where it has started a collective, where it asks whether one is done, and where it waits
for one. What it may then be told depends on what the others have started.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from knownddp import comm, exchange, join, reducer, window

PATIENCE_S = 60


class Stuck(AssertionError):
    """No rank can go on."""


class Abandoned(RuntimeError):
    """The run was given up: whatever a rank waits for will not come."""


class Pause(NamedTuple):
    """Where a rank stands. ``ready`` says which answers it may be given now; none: it cannot go on."""

    what: str  # "begin", "started", "asks", "waits", "waits for any" or "over"
    answers: Callable[[], list[Any]]


class Choices:
    """Which of several, each time: those of ``prefix`` first, then the first, or drawn by ``draw``."""

    def __init__(self, prefix: Sequence[int] = (), draw: Callable[[int], int] | None = None) -> None:
        self._prefix, self._draw = prefix, draw
        self.trail: list[tuple[int, int]] = []  # what was chosen, of how many

    def choose(self, number: int) -> int:
        if number == 1:
            return 0
        at = len(self.trail)
        chosen = self._prefix[at] if at < len(self._prefix) else self._draw(number) if self._draw is not None else 0
        self.trail.append((chosen, number))
        return chosen

    def next_prefix(self) -> list[int] | None:
        """The choices that lead to the next run, depth first; None when all were tried."""
        trail = list(self.trail)
        while trail:
            chosen, number = trail.pop()
            if chosen + 1 < number:
                return [*(one for one, _ in trail), chosen + 1]
        return None


# [Note: apart] What the library keeps for a whole process, each rank has for itself: it is exchanged with the baton.
# Otherwise ranks would see each other's open windows, and begin each other's.
_OWN = (
    (reducer, "_reducers"),
    (reducer, "_numbers"),
    (exchange, "_open"),
    (window, "_ends"),
    (join, "_all"),
    (comm, "_retired"),
)


def _taken() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


def _fresh(value: Any) -> Any:
    return type(value)()


class Baton:
    """Threads for ``world`` ranks, to be used for many runs."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._jobs: list[Callable[[], Any]] = []
        self._turns = [_taken() for _ in range(world)]  # released to let a rank run ...
        self._back = _taken()  # ... and by a rank to let the scheduler
        self._pauses: list[Pause] = []
        self._answers: list[Any] = [None] * world
        self._own: list[list[Any]] = []
        self._running = 0
        self._switches: int | None = None
        self.is_given_up = False
        for rank in range(world):
            threading.Thread(target=self._serve, args=(rank,), daemon=True).start()

    def run(self, jobs: Sequence[Callable[[], Any]], choices: Choices, *, switches: int | None) -> list[Any]:
        """Run one job a rank. Returns what they return, or the exceptions they raise.

        ``switches``: so often may another rank be next although the one that ran could go on. None: ranks go on as far
        as they can, and only answers are chosen; see [Note: schedules].

        Raises:
            Stuck: no rank can go on.
        """
        self._jobs, self.is_given_up = list(jobs), False
        self._pauses = [Pause("begin", lambda: [None]) for _ in jobs]
        self._running, self._switches = 0, switches
        self._results: list[Any] = [None] * self._world
        shared = [getattr(module, name) for module, name in _OWN]
        self._own = [[_fresh(value) for value in shared] for _ in jobs]
        try:
            while any(pause.what != "over" for pause in self._pauses):
                if self.is_given_up:
                    self._give_up()
                    break
                self._give(*self._next(choices))
        except BaseException:
            self._give_up()
            raise
        finally:
            self._jobs = []
            for (module, name), value in zip(_OWN, shared, strict=True):
                setattr(module, name, value)
        return self._results

    def _next(self, choices: Choices) -> tuple[int, Any]:
        paused = [(rank, pause) for rank, pause in enumerate(self._pauses) if pause.what != "over"]
        options = [(rank, pause.what, answers) for rank, pause in paused if (answers := pause.answers())]
        if not options:
            where = ", ".join(f"rank {rank} {pause.what}" for rank, pause in enumerate(self._pauses))
            raise Stuck(f"no rank can go on: {where}")
        if self._switches is None:
            forced = [option for option in options if option[1] not in ("asks", "waits for any")]
            options = (forced or options)[:1]
        elif not self._switches:
            options = [option for option in options if option[0] == self._running] or options
        found = [(rank, answer) for rank, _, answers in options for answer in answers]
        could_go_on = any(rank == self._running for rank, _ in found)
        rank, answer = found[choices.choose(len(found))]
        if self._switches is not None and could_go_on and rank != self._running:
            self._switches -= 1
        self._running = rank
        return rank, answer

    def _give(self, rank: int, answer: Any) -> None:
        self._answers[rank] = answer
        for (module, name), value in zip(_OWN, self._own[rank], strict=True):
            setattr(module, name, value)
        self._turns[rank].release()
        if not self._back.acquire(timeout=PATIENCE_S):
            raise Stuck(f"rank {rank} does not come back: it waits for something that no rank can give")
        self._own[rank] = [getattr(module, name) for module, name in _OWN]

    def _give_up(self) -> None:
        """Let all ranks run to their end, whatever they wait for failing."""
        self.is_given_up = True
        for rank, pause in enumerate(self._pauses):
            while pause.what != "over":
                self._give(rank, None)
                pause = self._pauses[rank]

    def pause(self, rank: int, what: str, answers: Callable[[], list[Any]]) -> Any:
        """Called by a rank: let others run. Returns one of the answers."""
        if self.is_given_up:
            raise Abandoned("another rank failed")
        self._pauses[rank] = Pause(what, answers)
        self._back.release()
        self._turns[rank].acquire()
        if self.is_given_up:
            raise Abandoned("another rank failed")
        return self._answers[rank]

    def _serve(self, rank: int) -> None:
        while True:
            self._turns[rank].acquire()
            try:
                self._results[rank] = self._jobs[rank]() if not self.is_given_up else None
            except BaseException as error:
                self._results[rank] = error
            self._pauses[rank] = Pause("over", list)
            self._back.release()
