"""Keeping the ranks' tensors equal to one rank's: everything at construction, buffers once a window.

[Note: buffers] Ranks may run different numbers of forwards, so a broadcast in every forward would pair up wrongly.
Buffers travel once a window: in its first synchronising training forward outside of a backward, or, in a window that
had none, as its backward begins. There the values are dropped: writing them could spoil what BatchNorm saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer

from . import _torch_private as private
from .comm import Collectives
from .errors import ModelError, shorten
from .works import Work

# Stock DDP broadcasts a model in pieces of this size.
CHUNK_BYTES = 250 * 2**20


def named_buffers(module: nn.Module, ignored: Iterable[str]) -> dict[str, Tensor]:
    """The module's buffers as they are now, without ignored ones. Modules may replace a buffer at any time."""
    left_out = set(ignored)
    return {name: buffer for name, buffer in module.named_buffers() if name not in left_out}


def check_writable(buffers: dict[str, Tensor]) -> None:
    """Refuse buffers that cannot be overwritten with rank 0's.

    Raises:
        ModelError: a buffer is not initialised yet, or its elements share memory (it was made by ``expand``).
    """
    lazy = [n for n, b in buffers.items() if isinstance(b, UninitializedBuffer)]
    if lazy:
        raise ModelError(
            f"buffers that are not initialised yet cannot be brought to rank 0's values: {shorten(lazy)}.\n"
            "Fix: run a dummy forward pass to initialise the modules, then wrap."
        )
    shared = [n for n, b in buffers.items() if any(k > 1 and s == 0 for k, s in zip(b.shape, b.stride(), strict=True))]
    if shared:
        raise ModelError(
            f"buffers whose elements share memory cannot be brought to rank 0's values: {shorten(shared)}.\n"
            "Fix: register them with .contiguous()."
        )


def _pack(tensors: list[Tensor]) -> Tensor:
    """All tensors as one uint8 tensor, each in row-major order of its elements. Any dtype, any strides."""
    rows = [t.detach().resolve_conj().resolve_neg().contiguous() for t in tensors]
    # as_strided: one element counts as contiguous whatever its strides, but as a view of bytes only if they are 1
    return torch.cat([row.as_strided((row.numel(),), (1,)).view(torch.uint8) for row in rows])


def _unpack(packed: Tensor, tensors: list[Tensor]) -> None:
    pieces = torch.split(packed, [t.numel() * t.element_size() for t in tensors])
    with torch.no_grad(), private.preserve_versions(tensors):
        for tensor, piece in zip(tensors, pieces, strict=True):
            # clone: a view as a wider dtype must start at a multiple of that dtype's size
            tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))


def _chunks(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group by device, in order, into chunks of about ``CHUNK_BYTES``."""
    done: list[list[Tensor]] = []
    chunk_of: dict[torch.device, list[Tensor]] = {}
    bytes_of: dict[torch.device, int] = {}
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        device = tensor.device
        if bytes_of.get(device, CHUNK_BYTES) >= CHUNK_BYTES:
            chunk_of[device], bytes_of[device] = [], 0
            done.append(chunk_of[device])
        chunk_of[device].append(tensor)
        bytes_of[device] += tensor.numel() * tensor.element_size()
    return done


def broadcast_from(comm: Collectives, source: int, tensors: Iterable[Tensor]) -> None:
    """Overwrite ``tensors`` with those of rank ``source``, in place, on all ranks. Blocks."""
    for chunk in _chunks(tensors):
        packed = _pack(chunk)
        comm.broadcast(packed, source=source).wait()
        if comm.rank != source:
            _unpack(packed, chunk)


class BufferHookLocation(Enum):
    """When a buffer hook runs: the names of ``_BufferCommHookLocation``."""

    PRE_FORWARD = auto()
    POST_FORWARD = auto()


@dataclass(frozen=True, slots=True)
class BufferHook:
    """The user's own way to synchronise buffers, run in every synchronising training forward instead of the broadcast.

    ``hook(state, buffers)`` gets them by qualified name. It may return a future or several, which are waited for when
    the backward is over.
    """

    state: object
    hook: Callable[[Any, dict[str, Tensor]], Any]
    location: BufferHookLocation


class BufferSync:
    """Brings buffers to rank 0's values once a window. See [Note: buffers].

    ``enabled``: whether they are synchronised at all. ``source`` is the rank whose values count: 0, but in a join
    context the highest one that still has inputs.
    """

    def __init__(self, module: nn.Module, ignored: frozenset[str], comm: Collectives, *, enabled: bool) -> None:
        self.enabled = enabled
        self.source = 0
        self.hook: BufferHook | None = None
        self._module = module
        self._ignored = ignored
        self._has_any = bool(named_buffers(module, ignored))
        self._comm = comm
        self.has_exchanged = False  # in this window
        self._futures: list[Any] = []
        self._sending: list[tuple[Work, Tensor]] = []  # rank 0 does not wait; the tensors must live that long

    def current(self) -> dict[str, Tensor]:
        """The buffers by name, without ignored ones. None, as in stock, if there was none at construction."""
        return named_buffers(self._module, self._ignored) if self._has_any else {}

    @property
    def is_due(self) -> bool:
        """Whether this window has yet to exchange buffers."""
        return self.enabled and self.hook is None and not self.has_exchanged

    def at(self, location: BufferHookLocation) -> None:
        """A synchronising training forward outside of a backward begins or ends."""
        if not self.enabled:
            return
        if self.hook is None:
            if location is BufferHookLocation.PRE_FORWARD:
                self.exchange(apply=True)
        elif self.hook.location is location:
            returned = self.hook.hook(self.hook.state, self.current())
            self._futures += returned if isinstance(returned, (list, tuple)) else [returned] if returned else []

    def exchange(self, *, apply: bool) -> None:
        """Exchange buffers unless this window has done so. ``apply=False``: take part, but drop what arrives."""
        if not self.is_due:
            return
        self.has_exchanged = True
        for chunk in _chunks(self.current().values()):
            packed = _pack(chunk)
            work = self._comm.broadcast(packed, source=self.source)
            if self._comm.rank == self.source or not apply:
                self._sending.append((work, packed))
            else:
                work.wait()
                _unpack(packed, chunk)

    def finish(self) -> Exception | None:
        """Wait for what this window began. Returns what went wrong in a buffer hook's future, or None.

        Safe once the window is open: every rank has taken part in its broadcasts then.
        """
        waiting: list[Any] = [*(work for work, _ in self._sending), *self._futures]
        first: Exception | None = None
        for one in waiting:
            try:
                one.wait()
            except Exception as error:
                first = first or error
        self._sending.clear()
        self._futures.clear()
        try:
            return first
        finally:
            del first  # in the frame that its traceback holds it would be a cycle

    def window_over(self) -> None:
        """The next window exchanges anew."""
        self.finish()
        self.has_exchanged = False
