"""Which forwards are still open: what each declared, and which of them take part in a backward."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from . import _torch_private as private
from .outputs import find_tensors

# Records kept without an output to hold them. One too many dropped costs a late round, not a wrong gradient.
MAX_KEPT = 64


class ForwardRecord:
    """One call of the wrapper. It lives as long as a hook on one of its outputs does: as long as their graph."""

    __slots__ = (
        "__weakref__",
        "declared",
        "is_running",
        "profiled",
        "sources",
        "synchronises",
        "took_part",
        "trainable",
        "visited",
        "was_closed",
    )

    def __init__(self, declared: Iterable[int], trainable: list[bool], *, synchronises: bool) -> None:
        self.declared = frozenset(declared)
        self.trainable = trainable
        self.synchronises = synchronises
        self.is_running = True
        self.visited = False  # an output's hook fired in the current window
        self.took_part = False  # it was taken to take part in the current window
        self.was_closed = False  # a window in which it took part is over
        self.profiled = private.profiled("KnownDDP.forward")
        self.sources: weakref.WeakSet[OutputSource] = weakref.WeakSet()

    def takes_part(self) -> bool:
        """Whether the running backward reaches one of the outputs, as far as can be told."""
        return self.visited or any(source.will_run() for source in self.sources)


class OutputSource:
    """Where the engine can be asked whether a backward comes through an output: the nodes *behind* the output's own.

    The output's hook holds it, and the record does not: an output may be computed from another of the same forward, so
    its nodes lead to the other's hook, and a record that held them would never be freed.
    """

    __slots__ = ("__weakref__", "nodes", "record")

    def __init__(self, output: Tensor, record: ForwardRecord) -> None:
        self.record = record
        behind = [n for n, _ in output.grad_fn.next_functions if n is not None] if output.grad_fn is not None else []
        self.nodes = [n for n in behind if not hasattr(n, "variable")] or behind
        record.sources.add(self)

    def will_run(self) -> bool:
        """Whether the running backward goes through all of them."""
        try:
            return bool(self.nodes) and all(map(private.will_execute, self.nodes))
        except RuntimeError:  # no backward runs, or it is torch.autograd.grad
            return False


class ForwardLog:
    """The synchronising forwards that have not had their backward yet. Those of dropped outputs just vanish.

    Args:
        is_own_leaf: whether a tensor is a managed parameter.
        on_grad: see ``report_to``.
    """

    def __init__(self, is_own_leaf: Callable[[Tensor], bool], on_grad: Callable[[ForwardRecord], None]) -> None:
        self._is_own_leaf = is_own_leaf
        self.report_to(on_grad)
        self._alive: weakref.WeakSet[ForwardRecord] = weakref.WeakSet()
        self._kept: deque[ForwardRecord] = deque(maxlen=MAX_KEPT)
        self._running: list[ForwardRecord] = []
        self._last: weakref.ref[ForwardRecord] | None = None
        self._leaf_hooks: list[tuple[weakref.ref[Tensor], RemovableHandle]] = []
        self._is_unanswered = False  # a synchronising forward ended since the last window
        self._last_synchronised = False

    def begin(self, declared: Iterable[int], trainable: list[bool], *, synchronises: bool) -> ForwardRecord:
        """A forward begins; ``end`` must follow, whether it raises or not."""
        record = ForwardRecord(declared, trainable, synchronises=synchronises)
        if synchronises:
            self._alive.add(record)
        self._running.append(record)
        record.profiled.__enter__()
        return record

    def end(self, record: ForwardRecord, *, is_over: bool) -> None:
        """The forward has run. ``is_over``: no backward can follow (it raised, or nothing requires a gradient).

        May be called again, to say that it is over after all.
        """
        if record.is_running:
            record.profiled.__exit__(None, None, None)
            record.is_running = False
            self._running.remove(record)
        if is_over:
            self._alive.discard(record)
            self._last = None
        else:
            self._last = weakref.ref(record)
            self._is_unanswered |= record.synchronises
            self._last_synchronised = record.synchronises

    def mark_unused(self, declared: Iterable[int]) -> bool:
        """Add to the declaration of the running forward, else of the last one if no backward of it has begun.

        Returns whether there was such a forward.
        """
        record = self._running[-1] if self._running else self._last() if self._last is not None else None
        if record is None or (not record.is_running and (record.was_closed or record.visited)):
            return False
        record.declared = record.declared.union(declared)
        return True

    def is_running(self) -> bool:
        """Whether the wrapper is in the middle of a forward."""
        return bool(self._running)

    def report_to(self, on_grad: Callable[[ForwardRecord], None]) -> None:
        """From now on call this bound method, held weakly, when the gradient of a watched output is known."""
        self.on_grad = weakref.WeakMethod(on_grad)

    def watch(self, output: object, record: ForwardRecord) -> bool:
        """Report when the gradient of a tensor in ``output`` is known. Returns whether part of it is out of sight.

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
            hook = functools.partial(_on_output_grad, weakref.ref(self), OutputSource(tensor, record))
            handle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
            if tensor.is_leaf:  # the user's own tensor, which would collect hooks from call to call
                self._leaf_hooks = [(leaf, h) for leaf, h in self._leaf_hooks if leaf() is not None]
                self._leaf_hooks.append((weakref.ref(tensor), handle))
        is_hidden |= not watched
        if is_hidden:
            self.keep(record)
        return is_hidden

    def keep(self, record: ForwardRecord) -> None:
        """Keep ``record`` although its outputs may be gone: part of its graph is out of sight.

        It is forgotten once a window was closed and the next synchronising forward begins.
        """
        if not record.synchronises:
            return
        self._alive.add(record)
        if record not in self._kept:
            self._kept.append(record)

    def __len__(self) -> int:
        """How many open forwards are remembered."""
        return len(self._alive)

    def is_expecting(self) -> bool:
        """Whether a backward of some synchronising forward may still come, be it that its outputs are gone.

        One that had a backward and is kept may have another, unless a ``no_sync`` forward came since.
        """
        if self._is_unanswered or any(not record.was_closed for record in self._alive):
            return True
        return self._last_synchronised and len(self._alive) > 0

    def is_out_of_sight(self) -> bool:
        """Whether an open forward runs or hides part of its graph, so that no output may tell of its backward."""
        return any(record.is_running or record in self._kept for record in self._alive)

    def is_reached(self) -> bool:
        """Whether the running backward goes through an output of an open forward, as far as can be told."""
        return any(record.takes_part() for record in self._snapshot())

    def _snapshot(self) -> list[ForwardRecord]:
        """The open forwards; none if another thread is busy with them, so that they are not those of this backward."""
        try:
            return list(self._alive)
        except RuntimeError:  # changed during iteration
            return []

    def is_visited(self) -> bool:
        """Whether a hook of an output fired in the running backward."""
        return any(record.visited for record in self._snapshot())

    def participants(self) -> list[ForwardRecord]:
        """The forwards whose graph the running backward goes through.

        Those out of sight count while they are open. If none can be told, all that are open.
        """
        found = [r for r in self._alive if r.takes_part() or r in self._kept] or list(self._alive)
        for record in found:
            record.took_part = True
        return found

    def visit(self, record: ForwardRecord) -> None:
        """A hook of one of its outputs fired in a backward; a kept graph may bring back one that was spent."""
        record.visited = True
        self._alive.add(record)

    def window_closed(self) -> None:
        """The backward is over for all whose hooks fired in it or that were taken to take part."""
        for record in list(self._alive):
            if record.visited or record.took_part:
                record.visited = record.took_part = False
                record.was_closed = True
                if record not in self._kept and not record.is_running:
                    self._alive.discard(record)
        for _, handle in self._leaf_hooks:
            handle.remove()
        self._leaf_hooks.clear()
        self._is_unanswered = False

    def forward_begins(self) -> None:
        """A synchronising forward outside of a backward begins: what was kept and closed is over."""
        for record in list(self._kept):
            if record.was_closed and not record.is_running:
                self._kept.remove(record)
                self._alive.discard(record)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _on_output_grad(log: weakref.ref[ForwardLog], source: OutputSource, _: Tensor) -> None:
    alive = log()
    report = alive.on_grad() if alive is not None else None
    if report is not None:
        report(source.record)


def declared_by_all(records: Sequence[ForwardRecord]) -> frozenset[int]:
    """A parameter counts as unused when every forward that takes part declared it."""
    return frozenset.intersection(*(r.declared for r in records)) if records else frozenset()


def promised_by(records: Sequence[ForwardRecord], num_params: int) -> bytes:
    """A byte for each parameter: 1 if it was trainable in one of the forwards and not declared unused there."""
    promised = 0
    for record in records:
        flags = bytearray(record.trainable)
        for i in record.declared:
            flags[i] = 0
        promised |= int.from_bytes(flags, "little")
    return promised.to_bytes(num_params, "little")
