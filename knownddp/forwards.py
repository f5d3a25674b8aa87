"""Which forwards are still open: what each declared, and which of them take part in a backward."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from . import _torch_private as private
from .outputs import find_tensors

# Records kept without an output to hold them. One too many dropped costs a late round, not a wrong gradient.
MAX_KEPT = 64


class ForwardRecord:
    """One call of the wrapper with gradients on.

    It lives as long as the hooks on its outputs do, that is, as long as their graph. It must not hold what would keep
    the graph alive longer: ``sources`` are the nodes *behind* each output's own node, which that node holds anyway.
    """

    __slots__ = (
        "__weakref__",
        "declared",
        "is_running",
        "is_spent",
        "sources",
        "synchronises",
        "visited",
        "was_closed",
    )

    def __init__(self, declared: Iterable[int], *, synchronises: bool) -> None:
        self.declared = frozenset(declared)
        self.synchronises = synchronises
        self.is_running = True
        self.visited = False  # an output's hook fired in the current window
        self.was_closed = False  # a window in which it may have taken part is over
        self.is_spent = False  # no backward of it is expected any more (a kept graph may still start one)
        self.sources: list[list[Node]] = []

    def watch(self, output: Tensor) -> None:
        """Remember where the engine can be asked whether ``output``'s node takes part."""
        node = output.grad_fn
        if node is not None:
            behind = [n for n, _ in node.next_functions if n is not None]
            self.sources.append([n for n in behind if not hasattr(n, "variable")] or behind)

    def takes_part(self) -> bool:
        """Whether the running backward reaches one of the outputs, as far as can be told."""
        if self.visited:
            return True
        try:
            return any(bool(nodes) and all(map(private.will_execute, nodes)) for nodes in self.sources)
        except RuntimeError:
            return False


class ForwardLog:
    """All records that are alive."""

    def __init__(self, is_own_leaf: Callable[[Tensor], bool]) -> None:
        self._is_own_leaf = is_own_leaf
        self._alive: weakref.WeakSet[ForwardRecord] = weakref.WeakSet()
        self._kept: deque[ForwardRecord] = deque(maxlen=MAX_KEPT)
        self._running: list[ForwardRecord] = []
        self._last: weakref.ref[ForwardRecord] | None = None
        self._leaf_hooks: list[tuple[weakref.ref[Tensor], RemovableHandle]] = []

    @contextmanager
    def recording(self, declared: Iterable[int], *, synchronises: bool) -> Iterator[ForwardRecord]:
        """Record a forward that runs inside; one that raises leaves no trace."""
        record = ForwardRecord(declared, synchronises=synchronises)
        self._alive.add(record)
        self._running.append(record)
        try:
            yield record
        except BaseException:
            record.is_spent = True
            raise
        finally:
            record.is_running = False
            self._running.remove(record)
        self._last = weakref.ref(record)

    def mark_unused(self, declared: Iterable[int]) -> bool:
        """Add to the declaration of the running forward, else of the last one if no backward of it has begun.

        Returns whether there was such a forward.
        """
        record = self._running[-1] if self._running else self._last() if self._last is not None else None
        if record is None or (not record.is_running and (record.is_spent or record.visited)):
            return False
        record.declared = record.declared.union(declared)
        return True

    def watch(self, output: object, record: ForwardRecord, on_grad: Callable[[Tensor], None]) -> None:
        """Call ``on_grad`` when the gradient of a tensor in ``output`` is known.

        What cannot be hooked (nothing was found, or a managed parameter itself) is out of sight, as is a part of
        ``output`` that cannot be looked into; the record is then kept, and a parameter's own hook will tell.
        """
        tensors, is_hidden = find_tensors(output)
        watched = False
        for tensor in tensors:
            if not tensor.requires_grad:
                continue
            if self._is_own_leaf(tensor):
                is_hidden = True
                continue
            watched = True
            record.watch(tensor)
            handle = tensor.register_hook(on_grad)  # type: ignore[no-untyped-call]
            if tensor.is_leaf:  # the user's own tensor, which would collect hooks from call to call
                self._leaf_hooks = [(leaf, h) for leaf, h in self._leaf_hooks if leaf() is not None]
                self._leaf_hooks.append((weakref.ref(tensor), handle))
        if is_hidden or not watched:
            self.keep(record)

    def keep(self, record: ForwardRecord) -> None:
        """Keep ``record`` although its outputs may be gone: part of its graph is out of sight.

        It is forgotten once a window was closed and the next synchronising forward begins.
        """
        record.sources.clear()  # they would keep the graph alive
        if record not in self._kept:
            self._kept.append(record)

    def is_expecting(self) -> bool:
        """Whether some synchronising forward has not had its backward yet, one that is running included."""
        return any(r.synchronises and (r.is_running or not r.is_spent) for r in self._alive)

    def participants(self, begun_by: ForwardRecord | None) -> list[ForwardRecord]:
        """The forwards whose graph the running backward goes through.

        Those out of sight count while they are open. If none can be told, all that are open.
        """
        candidates = [r for r in self._alive if r.synchronises]
        found = [r for r in candidates if r is begun_by or r.takes_part() or (r in self._kept and not r.is_spent)]
        return found or [r for r in candidates if r.is_running or not r.is_spent]

    def window_closed(self, participants: Sequence[ForwardRecord]) -> None:
        """The backward of ``participants``, and of all whose hooks fired in it, is over."""
        for record in [*participants, *(r for r in self._alive if r.visited)]:
            record.visited = False
            record.was_closed = True
            record.is_spent = record not in self._kept
        for _, handle in self._leaf_hooks:
            handle.remove()
        self._leaf_hooks.clear()

    def forward_begins(self) -> None:
        """A synchronising forward outside of a backward begins: what was kept and closed is over."""
        for record in self._kept:
            record.is_spent = record.is_spent or record.was_closed
        open_still = [r for r in self._kept if not r.is_spent or r.is_running]
        self._kept.clear()
        self._kept.extend(open_still)
