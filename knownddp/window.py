"""What one synchronising backward holds on this rank, and how its end is noticed."""

from __future__ import annotations

import weakref
from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from . import _torch_private as private
from .comm import Work, run_together
from .exchange import GradientExchange
from .forwards import ForwardRecord
from .protocol import Opening


@dataclass(slots=True)
class Window:
    """The running window."""

    graph_task: int
    participants: list[ForwardRecord]
    gradients: GradientExchange
    end: object  # the mark of the EndOfBackward that closes it, not itself: its destructor must run
    opening: tuple[Work, Tensor] | None = None
    fault: Opening | None = None  # the opening was an error: raised at the end, where no rank waits in turn
    disputed: tuple[int, ...] = ()
    early_bytes: int = 0


class Closer(Protocol):
    """Who has a window to close."""

    window: Window | None

    def closing_steps(self, *, failed: bool = False) -> Generator[Work, None, None]: ...

    def abandon(self) -> None: ...


# Windows that are open, by the graph task whose end closes them. Several wrappers may share one.
_open: dict[int, list[Closer]] = {}


class EndOfBackward:
    """Queued on the engine: called when the graph task is over, dropped uncalled when it raises.

    So the destructor is where an exception in a backward is noticed, before the caller's ``except`` clause runs and
    issues collectives of its own (tests/test_failures.py).
    """

    def __init__(self, closer: Closer) -> None:
        self._closer = weakref.ref(closer)
        self._graph_task = private.current_graph_task()
        self.mark = object()

    def queue(self) -> None:
        """Bind to the innermost running graph task."""
        closer = self._closer()
        assert closer is not None
        _open.setdefault(self._graph_task, []).append(closer)
        private.queue_callback(self)

    def __call__(self) -> None:
        run_together([closer.closing_steps() for closer in _open.pop(self._graph_task, ())])

    def __del__(self) -> None:
        closer = self._closer()
        if closer is not None and closer.window is not None and closer.window.end is self.mark:
            closer.abandon()


def forget(closer: Closer, graph_task: int) -> None:
    """The window is over, or is being closed elsewhere."""
    closers = _open.get(graph_task, [])
    if closer in closers:
        closers.remove(closer)
    if not closers:
        _open.pop(graph_task, None)


class LocalBackward:
    """Queued on the engine in the backward of a ``no_sync`` forward: it is alive as long as that backward runs."""

    def __call__(self) -> None:
        """Nothing is due at the end."""
