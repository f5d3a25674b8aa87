"""Handles of launched collectives, and how to go through steps that wait for them."""

from __future__ import annotations

import queue
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor


class Work(Protocol):
    """Handle of one launched collective."""

    def wait(self) -> Any: ...

    def is_completed(self) -> bool: ...

    def get_future(self) -> torch.futures.Future[Any]: ...


class Done:
    """The handle of what needs no peer."""

    def wait(self) -> None:
        """Returns at once."""

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future


DONE = Done()

NO_TIMEOUT = timedelta(0)  # C++'s kNoTimeout: the group's own


class PythonWork:
    """A handle from a group written in Python. Its ``wait`` may insist on a time-out, and its future may hold the
    result as a tensor of its own: that counts, as for torch.

    Args:
        work: the handle.
        tensor: where the result belongs; None if it arrives where it should.
    """

    def __init__(self, work: Any, tensor: Tensor | None) -> None:
        self._work = work
        self._tensor = tensor
        self._arrival: Any = None  # a future of when the result is in ``tensor``

    def wait(self) -> None:
        self._work.wait(NO_TIMEOUT)
        if self._tensor is not None:
            self.get_future().wait()

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def get_future(self) -> Any:
        """When it is done the result is where it belongs."""
        if self._tensor is None:
            return self._work.get_future()
        if self._arrival is None:
            self._arrival = self._work.get_future().then(lambda done: _put(done.value(), self._tensor))
        return self._arrival


def _put(result: object, tensor: Tensor | None) -> None:
    result = result[0] if isinstance(result, (list, tuple)) else result
    if tensor is not None and isinstance(result, Tensor) and result is not tensor:
        tensor.copy_(result)


class UnfinishedWork:
    """A handle of a collective that leaves something to be done here. Before ``wait`` there is no result, whatever
    ``is_completed`` and the future say.

    Args:
        work: the collective's own.
        finish: does it, in the first ``wait``.
    """

    __slots__ = ("_finish", "_work", "get_future", "is_completed")

    def __init__(self, work: Work, finish: Callable[[], object]) -> None:
        self._work, self._finish = work, finish
        self.is_completed, self.get_future = work.is_completed, work.get_future

    def wait(self) -> None:
        self._work.wait()
        finish, self._finish = self._finish, _nothing  # first: an interrupt (Ctrl-C) is raised when a call returns
        finish()


def _nothing() -> None: ...


class Combination:
    """A message that is being combined with those of all ranks.

    Args:
        work: the handle of the collective.
        combined: what came of it, asked once, after ``work`` is done.
    """

    __slots__ = ("_combined", "_message", "_work", "get_future", "is_completed")

    def __init__(self, work: Work, combined: Callable[[], bytes]) -> None:
        self._work, self._combined = work, combined
        self._message: bytes | None = None
        self.is_completed, self.get_future = work.is_completed, work.get_future

    def wait(self) -> bytes:
        """The combined message."""
        if self._message is None:
            self._work.wait()
            self._message = self._combined()
        return self._message


T = TypeVar("T")


def run(steps: Generator[Work, None, T]) -> T:
    """Go through ``steps``, waiting for each handle they yield, and return what they return.

    If waiting fails, the steps hear of it where they yielded. An interrupt (Ctrl-C) is raised when they have ended:
    peers wait for what follows.
    """
    interrupts: list[BaseException] = []
    try:
        work = next(steps)
        while True:
            work = _after(work, steps, interrupts)
    except StopIteration as stop:
        raise_first(interrupts)
        return stop.value  # type: ignore[no-any-return]


def _after(work: Work, steps: Generator[Work, None, T], interrupts: list[BaseException]) -> Work:
    """Wait for ``work``, go on with ``steps``, and return the next handle."""
    try:
        try:
            work.wait()
        except KeyboardInterrupt as interrupt:
            interrupts.append(interrupt)
            work.wait()
    except BaseException as error:
        return steps.throw(error)
    return next(steps)


def run_in_turn(several: Sequence[Generator[Work, None, None]]) -> None:
    """Go through several sequences of steps one after the other. The first exception is raised when all have ended."""
    errors: list[BaseException] = []
    for steps in several:
        try:
            run(steps)
        except BaseException as error:
            errors.append(error)
    raise_first(errors)


def run_together(several: Sequence[Generator[Work, None, None]]) -> None:
    """Go through several sequences of steps at once, each as its handles are done, none waiting for another in turn.

    Peers may wait for them in any order. The first exception is raised when all have ended.
    """
    errors: list[BaseException] = []
    waiting: list[tuple[Generator[Work, None, None], Work]] = []

    def advance(steps: Generator[Work, None, None], work: Work) -> None:
        try:
            waiting.append((steps, _after(work, steps, errors)))
        except StopIteration:
            pass
        except BaseException as error:
            errors.append(error)

    for steps in several:
        advance(steps, DONE)
    while waiting:
        advance(*waiting.pop(_wait_any([work for _, work in waiting]) if len(waiting) > 1 else 0))
    del advance  # a cycle with its own cell
    raise_first(errors)


def raise_first(errors: list[BaseException]) -> None:
    """Leaves no reference behind in the frames that the exception's traceback holds: that would be a cycle."""
    first = errors[0] if errors else None
    errors.clear()
    try:
        if first is not None:
            raise first
    finally:
        del first


def _wait_any(works: Sequence[Work]) -> int:
    """Block until one of ``works`` is done and return its position."""
    done: queue.SimpleQueue[int] = queue.SimpleQueue()

    def note(position: int) -> Callable[[object], None]:
        return lambda _: done.put(position)

    for position, work in enumerate(works):
        work.get_future().add_done_callback(note(position))
    return done.get()
