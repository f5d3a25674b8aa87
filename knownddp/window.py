"""What one synchronising backward holds on this rank, and how its end is noticed."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from . import _torch_private as private
from .exchange import GradientExchange
from .flat import grads_of
from .forwards import ForwardRecord
from .outcomes import Opening
from .works import Combination, Work, run_in_turn, run_together


@dataclass(slots=True, eq=False)
class Window:
    """A running window.

    ``opening`` is the OPEN message, being combined with that of all ranks; None once it was looked at. An ``outcome``
    with a fault is raised at the end of the backward, where wrappers do not wait for each other in turn.
    """

    participants: list[ForwardRecord]
    gradients: GradientExchange
    begun_at_output: bool
    has_graph: bool = True
    opening: Combination | None = None
    outcome: Opening | None = None
    undefined: set[int] = field(default_factory=set)  # parameters whose gradient was undefined on this rank

    @property
    def has_fault(self) -> bool:
        """Whether OPEN is known to be an error."""
        return self.outcome is not None and self.outcome.fault is not None


@dataclass(slots=True)
class Debt:
    """In a join context each synchronising forward owes one window: joined ranks wait for that one alone."""

    is_due: bool = False


class Closer(Protocol):
    """Who has a window to close. ``number`` tells the order of construction, the same on all ranks."""

    window: Window | None
    number: int
    lock: threading.RLock

    @property
    def follows_program_order(self) -> bool: ...

    def closing_steps(self, window: Window, *, failed: bool) -> Generator[Work, None, None]: ...


class TaskEnd:
    """Queued on the engine: called when the graph task is over, dropped uncalled when it raises.

    So the destructor is where an exception in a backward is noticed. On the CPU it runs before the caller's ``except``
    clause, which may issue collectives of its own (tests/test_failures.py); on an accelerator it may run beside it, on
    the engine's thread, which the closers' locks allow for.
    """

    def __init__(self) -> None:
        self._windows: list[tuple[Closer, Window]] = []

    @classmethod
    def of_running_task(cls) -> TaskEnd:
        """The one of the innermost running graph task. The engine holds the only lasting reference to it."""
        task = private.current_graph_task()
        end = _ends.get(task)
        if end is None:
            end = _ends[task] = cls()
            private.queue_callback(end)
        return end

    def add(self, closer: Closer, window: Window) -> None:
        """Close ``window`` too."""
        self._windows.append((closer, window))

    def __call__(self) -> None:
        self._close(failed=False)

    def __del__(self) -> None:
        # The backward is raising already, and a failed window ends in an error by design. A lost connection shows at
        # the next forward (Phase.BROKEN).
        with contextlib.suppress(Exception):
            self._close(failed=True)

    def _close(self, *, failed: bool) -> None:
        windows, self._windows = self._windows, []
        if not windows:
            return
        with contextlib.ExitStack() as locks:
            for closer, _ in sorted(windows, key=lambda pair: pair[0].number):
                locks.enter_context(closer.lock)
            # A window may be over already: its opening was an error that was raised at once.
            still_open = [(closer, window) for closer, window in windows if closer.window is window]
            still_open.sort(key=lambda pair: pair[0].number)
            steps = [closer.closing_steps(window, failed=failed) for closer, window in still_open]
            in_turn = len(still_open) < 2 or any(closer.follows_program_order for closer, _ in still_open)
            with private.profiled("knownddp::close"):
                (run_in_turn if in_turn else run_together)(steps)


# By graph task; several wrappers may have windows in one.
_ends: weakref.WeakValueDictionary[int, TaskEnd] = weakref.WeakValueDictionary()


class Standing:
    """What stood in ``.grad`` of some parameters at one moment."""

    def __init__(self, params: Sequence[Tensor | None]) -> None:
        self._params = params
        self._grads = grads_of(params)
        self._written = [private.times_written(grad) if grad is not None else 0 for grad in self._grads]

    def has_changed(self, i: int) -> bool:
        """Whether another gradient stands there by now, or the same one was written to."""
        param, before = self._params[i], self._grads[i]
        grad = param.grad if param is not None else None
        return grad is not None and (grad is not before or private.times_written(grad) != self._written[i])

    def before(self, i: int, total: Tensor) -> Tensor | None:
        """What autograd added to, to make it ``total``: nothing if what stood there was dropped in between.

        Where it added in place that is ``total`` itself, as far as this knows.
        """
        stood = self._grads[i]
        adds_in_place = not torch.is_grad_enabled() and stood is not None and stood.layout is torch.strided
        return None if adds_in_place and stood is not total else stood

    def changed(self, known: Collection[int]) -> list[int]:
        """Which parameters beside those ``known`` to have one have another gradient by now."""
        return [i for i in range(len(self._grads)) if i not in known and self.has_changed(i)]

    def written(self, came: Iterable[int]) -> list[int]:
        """Those in ``came`` that got a gradient. Hooks do not tell undefined ones where one stood before."""
        return [i for i in came if self._grads[i] is None or self.has_changed(i)]


class LocalBackward:
    """Queued on the engine in the backward of a ``no_sync`` forward: it is alive as long as that backward runs.

    Args:
        params: whose gradients it may change.
        on_end: called at its end; with ``failed`` if it raised, as for ``TaskEnd``.
    """

    def __init__(self, params: Sequence[Tensor | None], on_end: Callable[..., None]) -> None:
        self._on_end = on_end
        self._is_over = False
        self.stood = Standing(params)

    def __call__(self) -> None:
        self._is_over = True
        self._on_end(self, failed=False)

    def __del__(self) -> None:
        if not self._is_over:
            self._on_end(self, failed=True)
