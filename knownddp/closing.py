"""The second half of a window: what never came is sent, ranks tell each other how it went, means are handed back."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Sequence

import torch

from .buffers import BufferSync
from .comm_hooks import CommHook
from .errors import KnownDDPError
from .exchange import GradientExchange
from .faults import (
    Testimony,
    dispute_message,
    error_for,
    gradient_taken_error,
    late_message,
    unfinished_error,
)
from .filling import Filling
from .forwards import ForwardLog, declared_by_all, promised_by
from .graphs import Graph, GraphHistory
from .nodes import inside_nested_task
from .optimizers import BackwardOptimizers
from .outcomes import Fault
from .plan import Planner
from .protocol import Agreement, Phase
from .stats import ReducerStatistics
from .window import Window
from .works import DONE, Combination, Work


class Closing(Filling):
    """What of a reducer ends a window. ``Reducer`` sets the attributes and adds how one begins."""

    buffers: BufferSync
    planner: Planner
    forwards: ForwardLog
    history: GraphHistory
    optimizers: BackwardOptimizers
    number: int
    find_unused: bool
    hook: CommHook | None
    last_error: str  # for logging data
    _warned_of_dispute = False
    _warned_of_late: set[int]  # which parameters
    _comes_again: set[int]  # parameters that had several gradients in some backward

    @property
    def hook_name(self) -> str:
        """Name of the communication hook; empty if there is none."""
        return self.hook.name if self.hook is not None else ""

    def statistics(self) -> ReducerStatistics:
        """A snapshot of the counters."""
        return self.counters.snapshot(
            phase=self.protocol.phase.name,
            buckets_planned=len(self.protocol.plan.buckets),
            plans_cached=len(self.planner),
            unforeseen=tuple(self.params.names_of(sorted(self.protocol.unforeseen))),
        )

    def combine(self, message: bytes) -> Combination:
        """Start to combine a message with that of all ranks. Under "trust" one's own stands for all."""
        if self.protocol.agreement is Agreement.TRUST:
            return Combination(DONE, lambda: message)
        return self.comm.combine_or(message)

    def closing_steps(self, window: Window, *, failed: bool) -> Generator[Work, None, None]:
        """Close the window: yields each handle to wait for.

        ``failed``: this rank's backward raised; take part so that no rank waits, then every other rank raises. Raises
        what the window's fault is, after gradients are back to what they were.
        """
        try:
            yield from self._closing_steps(window, failed)
        except BaseException as error:
            self.last_error = str(error)
            if self.window is window:  # no error of the protocol: those end the window first
                self.protocol.break_off()
                self._end(window, restore=True)
            raise

    def _closing_steps(self, window: Window, failed: bool) -> Generator[Work, None, None]:
        protocol, gradients = self.protocol, window.gradients
        self.times.mark("backward_over")
        self._count_last(window, failed=failed)
        if window.opening is not None:
            yield window.opening
            self.look_at_opening(window, launches=False)
        assert window.outcome is not None
        if window.outcome.fault is not None:
            raise (yield from self._error_of(window, window.outcome.fault, window.outcome.disputed, failed))
        protocol.end()
        own_error = gradients.launch_rest(protocol.plan, failed=failed)
        own_error = (yield from gradients.wait_for_hook()) or self.buffers.finish() or own_error
        own_error = own_error or (self._late_one_taken(gradients) if not failed else None)
        failed = failed or own_error is not None
        graph = self._graph_of(window)
        changed = window.has_graph and not failed and self.history.breaks_promise(graph)
        closed = self.combine(protocol.close(self._promised(window), failed=failed, changed=changed))
        self._comes_again.update(graph.repeated)
        try:
            yield closed
        except Exception as lost:
            if own_error is not None:  # the cause: a hook that raised where peers still wait for its collective, say
                raise own_error from lost
            raise
        gradients.wait()
        closing = protocol.closed(closed.wait())
        fault = closing.fault if closing.fault is not Fault.TRUST else None
        if closing.late_plan is not None:
            own_error = yield from gradients.late_round(closing.late_plan)
            failed = own_error is not None
            any_failed = torch.tensor([int(failed)])
            yield self.comm.combine_max(any_failed)
            fault = Fault.FAILED if any_failed.item() else None
        if fault is not None:
            error = yield from self._error_of(window, fault, (), failed)
            try:
                raise own_error or error
            finally:
                del own_error, error  # else a cycle through the traceback keeps the model alive
        gradients.hand_back(closing.touched, closing.late)
        self.counters.bytes_skipped -= sum(  # sent after all
            self.params.specs[i].nbytes for i in closing.late if self.params.trainable[i] and not protocol.agreed[i]
        )
        if closing.fault is Fault.TRUST:
            gradients.keep_late_ones_local(closing.late)
        if closing.order_due:
            order = torch.tensor(protocol.order_message(), dtype=torch.int64)
            yield self.comm.combine_max(order)
            protocol.learn(order.tolist())
        if window.has_graph:
            self.history.note(graph, protocol.fired()[0])
        self.touched_locally.clear()
        costly = [i for i in window.outcome.disputed if protocol.agreed[i]]
        self.counters.bytes_disputed += sum(self.params.specs[i].nbytes for i in costly)
        self.counters.backwards_finished += 1
        self._end(window, restore=False)
        if closing.fault is not Fault.TRUST:
            self.optimizers.step(self.params.live, closing.touched)
        self._warn_of_late(declared_by_all(window.participants).intersection(closing.late))
        self._warn_of_dispute(costly)  # last: a warning may be made an exception
        if closing.fault is Fault.TRUST:
            raise error_for(Fault.TRUST, self.where, (), self.params.names, closing.late)

    def _late_one_taken(self, gradients: GradientExchange) -> KnownDDPError | None:
        """The error if a gradient that came late is gone; the late round would take zeros for it.

        That at which the backward was noticed is held back with what stood there.
        """
        late = ((i, self.params.live[i]) for i in self.protocol.late() if i not in gradients.stood_before)
        gone = [i for i, param in late if param is not None and param.grad is None and param.requires_grad]
        return gradient_taken_error(self.where, self.params.names[gone[0]]) if gone else None

    def _graph_of(self, window: Window) -> Graph:
        fired, repeated = self.protocol.fired()
        if window.undefined:
            flags = bytearray(fired)
            for i in window.undefined:
                flags[i] = 1
            fired = bytes(flags)
        return Graph(fired, repeated)

    def _promised(self, window: Window) -> bytes:
        """What the forwards promised whose outputs took part.

        Nothing where the engine foretells it or the graph is static, nor on a rank whose backward reached no parameter
        (a constant loss), as in stock DDP.
        """
        at_output = window.begun_at_output  # else no hook told which, and what had a backward kept its promise
        records = [r for r in window.participants if (r.visited if at_output else not r.was_closed)]
        promises = self.protocol.has_fired and not self.find_unused and not self.history.is_promised
        promised = bytearray(promised_by(records if promises else (), len(self.params)))
        for i in window.undefined | window.gradients.elsewhere:
            promised[i] = 0
        return bytes(promised)

    def judge(self) -> None:
        """Was every promise kept since this was last asked?

        Raises:
            UnfinishedBackwardError: not so; on every rank.
        """
        with self.lock:
            missing = self.protocol.unmet()
            self.protocol.forward_begins()
        if missing:
            stock_indices = self.params.stock_indices(missing)
            error = unfinished_error(self.where, self.comm.rank, self.params.names, missing, stock_indices)
            self.last_error = str(error)
            raise error

    def _end(self, window: Window, *, restore: bool) -> None:
        """The window is over; gradients stay as they are, or go back to what they were when it began."""
        if restore:
            window.gradients.restore()
        window.gradients.release()
        if self.protocol.phase is Phase.SETTLING:
            self.protocol.settled(failed=restore)
        self.arrivals.take()
        self.arrivals.wait_for(1)
        self.window = None
        self.times.mark("closed")
        self.forwards.window_closed()
        if self.protocol.phase is not Phase.BROKEN:
            self.buffers.window_over()

    def _error_of(
        self, window: Window, fault: Fault, about: tuple[int, ...], failed: bool
    ) -> Generator[Work, None, KnownDDPError]:
        """Every rank is here. End the window, hear what the others know, and return the exception to raise."""
        layout = tuple(f"{str(s.key.dtype).removeprefix('torch.')}{list(s.shape)}" for s in self.params.specs)
        declared = tuple(self.params.names_of(sorted(declared_by_all(window.participants))))
        changes: tuple[tuple[str, ...], ...] = ((), (), ())
        if fault is Fault.GRAPH and window.has_graph:
            found = self.history.differences(self._graph_of(window))
            changes = tuple(tuple(self.params.names_of(which)) for which in found)
            about = tuple(found[1])
        nested, limits = inside_nested_task(), self.planner.limits
        mine = Testimony(failed, nested, window.begun_at_output, declared, layout, self.hook_name, limits, changes)
        self._end(window, restore=True)
        told: Sequence[Testimony] = ()
        if fault is Fault.CROSSED:  # ranks are not at the same place, so nothing can be exchanged any more
            self.protocol.break_off()
        elif self.protocol.agreement is not Agreement.TRUST:
            told = yield from self.comm.gather_steps(mine)
        about = tuple(self.params.stock_indices(about)) if fault is Fault.GRAPH else about
        return error_for(fault, self.where, told or (mine,), self.params.names, about)

    def _warn_of_late(self, used: frozenset[int]) -> None:
        """Once of each parameter that this rank declared unused, no rank expected, and some rank used."""
        found = sorted(i for i in used.difference(self._warned_of_late) if not self.protocol.agreed[i])
        if found and self.protocol.agreement is not Agreement.TRUST:
            self._warned_of_late.update(found)
            warnings.warn(late_message(self.where, self.params.names_of(found)), stacklevel=2)

    def _warn_of_dispute(self, costly: Sequence[int]) -> None:
        """Once, that differing declarations cost the bytes of these parameters."""
        if costly and not self._warned_of_dispute:
            self._warned_of_dispute = True
            warnings.warn(dispute_message(self.where, self.params.names_of(costly)), stacklevel=2)
