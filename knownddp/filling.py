"""The middle of a window: gradients come, and full buckets leave.

Hooks write gradients down (``arrivals.py``); what is here reads that, asks the protocol, and launches what may go.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from itertools import compress

from torch import Tensor

from .arrivals import Arrivals
from .comm import Collectives
from .errors import at_rank
from .exchange import is_held_elsewhere
from .faults import gradient_taken_error
from .nodes import GradientNodes
from .params import ManagedParams
from .protocol import ENDLESS, Phase, WindowProtocol
from .stats import Counters, Times
from .window import LocalBackward, Window
from .works import Combination


class Filling:
    """What of a reducer counts gradients. ``Reducer`` sets the attributes and adds how a window begins."""

    params: ManagedParams
    comm: Collectives
    protocol: WindowProtocol
    arrivals: Arrivals
    nodes: GradientNodes
    counters: Counters
    times: Times
    window: Window | None
    lock: threading.RLock
    may_wait: bool  # hooks run on one thread: see [Note: patience]
    touched_locally: set[int]  # by unsynchronised backwards, since the last window
    _local: Callable[[], LocalBackward | None]  # the one that runs

    @property
    def where(self) -> str:
        """This rank, for messages."""
        return at_rank(self.comm.rank, self.comm.world_size)

    def _on_arrivals(self, newest: Tensor, grad: Tensor | None) -> None:
        """It is time to look at what came, ``newest`` last; ``grad`` is its gradient, where that is known."""
        with self.lock:
            try:
                self._look_at(newest, grad, is_over=False)
            finally:
                self._renew_patience()

    def _on_settled(self, param: Tensor, grad: Tensor | None) -> None:
        """A gradient came, and is at hand: a large one is packed at once where that may be."""
        with self.lock:
            param_index = self.params.index_of(param)
            if param.grad is None and self.window is not None and param_index is not None:
                self._raise_if_taken(param_index, param)
            is_noted = self.protocol.phase is Phase.REDUCING and self.arrivals.notes(param)
            if not is_noted:
                try:
                    self._look_at(param, grad, is_over=True)
                finally:
                    self._renew_patience()
            # Before, the plan is but a guess.
            if self.window is not None and self.protocol.phase is Phase.REDUCING and param_index is not None:
                self.window.gradients.pack_early(self.protocol.plan, param_index)

    def _raise_if_taken(self, param_index: int, param: Tensor) -> None:
        """A gradient came, and is gone. A wrapper that shares the parameter may have packed it; what stays on this rank
        anyone may take; frozen since the forward it counts as zero.
        """
        is_elsewhere = is_held_elsewhere(param, self.window.gradients if self.window is not None else None)
        if param.requires_grad and not is_elsewhere and self._local() is None:
            raise gradient_taken_error(self.where, self.params.names[param_index])

    def _on_undefined(self, param: Tensor) -> None:
        """An autograd Function returned no gradient."""
        with self.lock:
            if self.window is not None:
                self.window.undefined.update(self.params.indices_of([param]))

    def _renew_patience(self) -> None:
        """Wait as long as may be: [Note: patience]."""
        if not self.may_wait:
            self.arrivals.wait_for(1)
        elif self.window is not None:
            self.arrivals.wait_for(self.protocol.patience)
        else:
            self.arrivals.wait_for(1 if self._local() is None else ENDLESS)

    def _look_at(self, newest: Tensor, grad: Tensor | None, *, is_over: bool) -> None:
        """``grad`` came for ``newest``, if that is known, after what was written down.

        ``is_over``: hooks did not write it down, and nothing else happens to it.
        """
        params = self.arrivals.take()
        if not self.may_wait:  # each reports itself; another thread's may be among these
            params = [newest]
        elif is_over:
            params.append(newest)
        came = self.params.indices_of(params)
        if self.window is None:
            local = self._local()
            came = local.stood.written(came) if local is not None else came
            came = [i for i in came if self._begins_or_stays(i, grad if self.params.live[i] is newest else None)]
        window = self.window
        if window is None or window.has_fault:
            return
        came = _kept_here(window, came)
        launch = self.protocol.ready(*came, is_over=is_over) if came else ()
        if launch:
            self.launch(window, launch)
        if window.opening is not None and self.may_look_at_opening(window.opening, is_at_hand=is_over):
            self.look_at_opening(window)

    def may_look_at_opening(self, opening: Combination, *, is_at_hand: bool) -> bool:
        """Whether to look at OPEN: a bucket may go then, or the gradient that is at hand be packed; and it is there.

        In program order all ranks look at the same gradient, to launch there: they wait for it.
        """
        if self.protocol.in_program_order:
            return self.protocol.wants_opening
        return (self.protocol.wants_opening or is_at_hand) and opening.is_completed()

    def look_at_opening(self, window: Window, *, launches: bool = True) -> None:
        """OPEN has come back, or must be waited for."""
        assert window.opening is not None
        window.outcome = self.protocol.opened(window.opening.wait())  # if that is interrupted the end waits again
        window.opening = None
        if window.outcome.fault is not None:
            return
        agreed = self.protocol.agreed
        if agreed != bytes(self.params.trainable):
            skipped = compress(self.params.specs, map(operator.gt, self.params.trainable, agreed))
            self.counters.bytes_skipped += sum(spec.nbytes for spec in skipped)
        if launches and window.outcome.launch:
            self.launch(window, window.outcome.launch)

    def _begins_or_stays(self, param_index: int, grad: Tensor | None) -> bool:
        """A gradient came while no window was open. Does it begin one, or else stay on this rank?"""
        raise NotImplementedError

    def launch(self, window: Window, positions: Sequence[int]) -> None:
        """Start to combine these buckets of the plan."""
        self.times.mark("first_launch")
        for position in positions:
            window.gradients.launch(self.protocol.plan, position)

    def _count_last(self, window: Window, *, failed: bool) -> None:
        """Count gradients that were not looked at. What they fill is launched with the rest.

        Also those whose hooks on nodes did not run, as their parameters were cast and cast back since.
        """
        came = self.params.indices_of(self.arrivals.take())
        if window.has_fault:
            return
        self.protocol.count(_kept_here(window, came))
        unhooked = window.gradients.unhooked() if not failed else ()
        if unhooked:
            self.protocol.count(unhooked)
            self.nodes.forget()

    def local_ends(self, local: LocalBackward, *, failed: bool) -> None:
        """A backward that stayed on this rank is over. Gradients whose hooks did not run count too."""
        with self.lock:
            if self._local() is not local:
                return  # it went on to what ranks average
            self._count_local()
            unhooked = local.stood.changed(self.touched_locally) if not failed else ()
            if unhooked:
                self.touched_locally.update(unhooked)
                self.nodes.forget()

    def _count_local(self) -> None:
        """Take over what hooks wrote down in a backward that stays on this rank."""
        local = self._local()
        if local is not None:
            self.touched_locally.update(local.stood.written(self.params.indices_of(self.arrivals.take())))
            self.arrivals.wait_for(1)


def _kept_here(window: Window, came: list[int]) -> list[int]:
    """Those in ``came`` whose gradients ``window`` keeps, and no other wrapper's."""
    elsewhere = window.gradients.elsewhere
    return [i for i in came if i not in elsewhere] if elsewhere else came
