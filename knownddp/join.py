"""Uneven inputs: ranks that have run out of inputs take part in what the others do.

[Note: joined ranks] Torch's ``Join`` tells ranks in every forward whether others still run. On top of that every rank,
joined or not, announces what the forward is going to do, so that a joined rank can do the same: exchange buffers, and
take part in one window, in which it contributes zeros and has no say. It learns the agreed set from OPEN like everyone,
and has the means in ``.grad`` until all have joined, so that an optimizer which joins too can step. So each
synchronising forward owes exactly one window; if its output was dropped, the next forward pays.

Several wrappers may share a context. ``Join`` has a joined rank shadow them one after the other, each to the end of its
window; so ranks with inputs must run them in that order, too, each to the end of its backward.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from .buffers import BufferHookLocation, BufferSync, broadcast_from
from .comm import Collectives
from .errors import PeerError, RanksDifferError, UsageError
from .params import ManagedParams
from .reducer import Reducer
from .window import Debt


@dataclass(frozen=True, slots=True)
class Announcement:
    """What some rank is about to do, so that all have to: begin a window, in training mode or not."""

    synchronises: bool
    trains: bool


_all: weakref.WeakSet[UnevenInputs] = weakref.WeakSet()


class UnevenInputs:
    """One wrapper's part in join contexts."""

    def __init__(self, reducer: Reducer, comm: Collectives, params: ManagedParams, buffers: BufferSync) -> None:
        self.reducer = reducer
        self._comm = comm
        self._params = params
        self._buffers = buffers
        self._context: weakref.ref[KnownJoinHook] | None = None
        self._set_aside: list[tuple[nn.Parameter, Tensor | None]] = []  # what stood in .grad when this rank joined
        self._touched: set[int] = set()  # and which of it no_sync had accumulated
        self.was_used = False
        _all.add(self)

    def enter(self, hook: KnownJoinHook) -> None:
        """A join context was made. It is over when the context, which alone holds ``hook``, is gone."""
        self._context = weakref.ref(hook)
        self.reducer.debt = functools.partial(_ask, weakref.WeakMethod(self._debt))
        self.was_used = True

    def leave(self) -> None:
        """The context is over."""
        self._context = None
        self.reducer.divisor = self._comm.world_size
        self._buffers.source = 0

    @property
    def _hook(self) -> KnownJoinHook | None:
        return self._context() if self._context is not None else None

    def _debt(self) -> Debt | None:
        hook = self._hook
        return hook.debt if hook is not None and hook.is_enabled else None

    def is_on(self, joinable: Joinable) -> bool:
        """Whether a forward that begins now does so in a join context."""
        hook = self._hook
        if hook is not None:
            hook.is_enabled = joinable._join_config.enable
        is_on = self._debt() is not None
        if not is_on:
            self.reducer.divisor = self._comm.world_size
            self._buffers.source = 0
        return is_on

    def forward_begins(self, joinable: Joinable, *, synchronises: bool, trains: bool) -> None:
        """A forward with gradients, outside of a backward and in a join context, on a rank that has inputs.

        Raises:
            RuntimeError: another rank has run out of inputs and ``throw_on_early_termination`` was asked for.
            RanksDifferError: some ranks run this forward under ``no_sync`` and others do not; on every rank.
            UnfinishedBackwardError: parameters were promised and no rank touched them; on every rank.
            UsageError: another wrapper of the context has yet to have its backward; an error on every rank.
        """
        hook = self._hook
        assert hook is not None
        self.pay_debt()
        for other in list(_all):
            if other is not self:
                other.make_way()
        work = Join.notify_join_context(joinable)
        told = self._announce(hook, active=True, synchronises=synchronises, trains=trains)
        if work is not None:
            work.wait()
        if told.trains:
            self.reducer.judge()
        if synchronises and trains:
            self._buffers.at(BufferHookLocation.PRE_FORWARD)
        elif told.trains:
            self._buffers.exchange(apply=False)
        hook.debt.is_due = synchronises

    def pay_debt(self) -> None:
        """The last synchronising forward had no backward, but joined ranks take part in one: give it to them."""
        debt = self._debt()
        if debt is not None and debt.is_due:
            self.reducer.take_part(joined=False)

    def make_way(self) -> None:
        """The forward of another wrapper in the context begins. Joined ranks still wait for the window owed here.

        Raises:
            UsageError: its backward may still come; an error on every rank.
        """
        debt = self._debt()
        if debt is None or not debt.is_due:
            return
        if not len(self.reducer.forwards):  # its output was dropped
            self.pay_debt()
            return
        with contextlib.suppress(PeerError):
            self.reducer.take_part(joined=False, failed=True)
        raise UsageError(
            f"{self.reducer.where} inside a join context that several wrappers share, the forward of one began "
            "before another had its backward.\n"
            "Why: ranks without inputs take part in what the wrappers do one after the other, in the order in "
            "which Join was given them.\n"
            "Fix: call each wrapper's forward and backward in turn, or wrap one module that holds all of them."
        )

    def shadow(self, hook: KnownJoinHook) -> None:
        """A forward, and the backward that it announces, on a rank that has no inputs left."""
        hook.is_enabled = True
        if not self._set_aside:
            self._set_aside = [(p, p.grad) for p in self._params.live if p is not None]
            self._touched = set(self.reducer.touched_locally)
        for param, _ in self._set_aside:
            param.grad = None  # what this window does not touch must not be stepped with the mean of an earlier one
        try:
            told = self._announce(hook, active=False)
            if told.trains:
                self.reducer.judge()
                for location in BufferHookLocation:  # a hook runs at one of them
                    self._buffers.at(location)
            if told.synchronises:
                self.reducer.take_part(joined=True)
        except BaseException:
            self._put_back()
            self.leave()
            raise

    def _put_back(self) -> None:
        """``.grad`` is as it was when this rank joined."""
        for param, grad in self._set_aside:
            param.grad = grad
        self.reducer.touched_locally |= self._touched
        self._set_aside.clear()
        self._touched = set()

    def _announce(
        self, hook: KnownJoinHook, *, active: bool, synchronises: bool = False, trains: bool = False
    ) -> Announcement:
        """Tell what this rank is about to do, and learn what any rank is: flags, combined by MAX, then one a rank.

        Sets the divisor and the rank whose buffers count.
        """
        mine = [
            active and synchronises,
            active and not synchronises,
            synchronises and trains,
            self._buffers.has_exchanged,
        ]
        message = torch.tensor([*map(int, mine), *(0 for _ in range(self._comm.world_size))])
        message[len(mine) + self._comm.rank] = int(active)
        self._comm.combine_max(message).wait()
        does, does_not, any_trains, has_exchanged, *flags = map(bool, message.tolist())
        still_active = [rank for rank, flag in enumerate(flags) if flag]
        if does and does_not:
            raise RanksDifferError(
                f"{self.reducer.where} inside join() some ranks run this forward under no_sync() and others do not.\n"
                "Fix: use no_sync() in the same iterations on every rank."
            )
        # Where a rank exchanged before the context began, others are still to answer, to rank 0.
        self._buffers.source = 0 if has_exchanged else max(still_active)
        self.reducer.divisor = self._comm.world_size if hook.divides_by_initial else len(still_active)
        return Announcement(does, any_trains)

    def finish(self, *, is_last_joiner: bool) -> int:
        """All ranks have joined: take over the model of the highest one that was among the last. Returns that rank."""
        self._put_back()
        candidate = torch.tensor([self._comm.rank if is_last_joiner else -1])
        self._comm.combine_max(candidate).wait()
        source = int(candidate)
        buffers = self._buffers.current().values() if self._buffers.enabled else ()
        broadcast_from(self._comm, source, [*(p for p in self._params.live if p is not None), *buffers])
        self.leave()
        return source


def _ask(debt: weakref.WeakMethod[Callable[[], Debt | None]]) -> Debt | None:
    """The reducer asks, and must not keep alive whom it asks."""
    alive = debt()
    return alive() if alive is not None else None


class KnownJoinHook(JoinHook):
    """What ``Join`` calls on a rank without inputs: once for each iteration of the others, then once at the end."""

    def __init__(self, uneven: UnevenInputs, *, divides_by_initial: bool, on_end: Callable[[int], None]) -> None:
        self._uneven = uneven
        self.divides_by_initial = divides_by_initial
        self.debt = Debt()
        self.is_enabled = False  # until the first forward has asked
        self._on_end = on_end
        uneven.enter(self)

    def main_hook(self) -> None:
        """Shadow one forward and backward."""
        self._uneven.shadow(self)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Make all ranks hold one model again."""
        self._on_end(self._uneven.finish(is_last_joiner=is_last_joiner))


class DebtPayingJoin(Join):
    """``Join`` for one wrapper: a rank that drops its last output does not leave others waiting in their backward."""

    def __init__(self, joinable: Joinable, uneven: UnevenInputs, *args: Any, **kwargs: Any) -> None:
        super().__init__([joinable], *args, **kwargs)
        self._uneven = uneven

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: Any) -> None:
        if kind is None:
            self._uneven.pay_debt()
        else:
            self._uneven.leave()
        super().__exit__(kind, value, traceback)
