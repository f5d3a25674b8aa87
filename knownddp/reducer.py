"""The reducer: hooks in, collectives out. It drives the protocol; decisions are the protocol's.

One gradient's route: ``backward()`` -> a hook on an output begins the window (``_begin``) and sends OPEN -> autograd
accumulates into ``.grad`` -> ``_on_grad_ready`` -> ``Protocol.ready`` names the buckets that may go ->
``GradientExchange.launch`` packs and all-reduces them -> the end of the backward runs ``closing_steps``: what never
came is sent as zeros, CLOSE is exchanged, means are handed back, and a late round follows where one is due.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence

import torch
from torch import Tensor

from . import _torch_private as private
from .buffers import BufferSync
from .comm import Collectives, Work, run
from .errors import GradientTakenError, PeerError, UnfinishedBackwardError, at_rank
from .exchange import GradientExchange
from .faults import Testimony, dispute_message, error_for, unfinished_message
from .flat import dense
from .forwards import ForwardLog, ForwardRecord, declared_by_all
from .nodes import GradientNodes, inside_nested_task
from .params import ManagedParams
from .plan import Planner
from .protocol import Agreement, Fault, Phase, Protocol
from .stats import Counters, ReducerStatistics
from .window import EndOfBackward, LocalBackward, Window, forget


class Reducer:
    """Averages the gradients of ``params`` over the ranks of ``comm``, one window a synchronising backward.

    Args:
        params: the managed parameters, refreshed at each forward.
        comm: the collectives.
        buffers: exchanged once a window; None if they are not synchronised.
        limits: bucket sizes in bytes (see ``buckets.assign``).
        agreement: what to do about declarations that differ.
        find_unused: expect what the engine is about to run instead of what was not declared.
    """

    def __init__(
        self,
        params: ManagedParams,
        comm: Collectives,
        buffers: BufferSync | None,
        *,
        limits: Sequence[int],
        agreement: Agreement,
        find_unused: bool,
    ) -> None:
        self.params = params
        self.comm = comm
        self.buffers = buffers
        self.find_unused = find_unused
        self.counters = Counters()
        self.window: Window | None = None
        params.refresh()
        self._limits = tuple(limits)
        self._planner = Planner(params.specs, limits)
        self.protocol = Protocol(self._planner, len(params), agreement, detects_unused=find_unused)
        self._nodes = GradientNodes(len(params), self._on_grad_ready)
        self.forwards = ForwardLog(is_own_leaf=lambda t: params.index_of(t) is not None)
        self._touched_locally: set[int] = set()  # by unsynchronised backwards, since the last window
        self._local: Callable[[], LocalBackward | None] = _nobody
        self._warned_of_dispute = False
        self._take_over_params()

    def _take_over_params(self) -> None:
        self._planner.set_specs(self.params.specs)
        self._signature = self.params.signature()
        self._nodes.forget()
        self._hook_trainable()

    def _hook_trainable(self) -> None:
        self._nodes.hook(self.params.live, self.params.trainable)
        self._hooked = list(self.params.trainable)

    @property
    def where(self) -> str:
        """This rank, for messages."""
        return at_rank(self.comm.rank, self.comm.world_size)

    def remove_hooks(self) -> None:
        """From now on no backward communicates."""
        self._nodes.remove()

    # -- forward

    def check_finished(self) -> None:
        """A synchronising forward outside of a backward begins: is the last backward complete?

        Raises:
            UnfinishedBackwardError: parameters were promised and no rank touched them; on every rank.
            PeerError: a collective failed earlier.
        """
        if self.protocol.phase is Phase.BROKEN:
            raise PeerError(
                f"{self.where} a collective of this wrapper failed or timed out, so "
                "ranks may be out of step.\nFix: restart, or make a new process group and wrap the module again."
            )
        if self.window is not None:  # the destructor of EndOfBackward missed it
            self.abandon()
        missing = self.protocol.unmet()
        self.protocol.forward_begins()
        self.forwards.forward_begins()
        if missing:
            raise UnfinishedBackwardError(unfinished_message(self.where, self.comm.rank, self.params.names, missing))

    def forward_begins(self, declared: frozenset[int], *, synchronises: bool) -> ForwardRecord:
        """Record one forward with gradients on, reading the parameters as they are now."""
        if self.params.refresh():
            self._take_over_params()
        elif self.params.trainable != self._hooked:
            self._hook_trainable()
        return self.forwards.begin(declared, synchronises=synchronises)

    def forward_ends(self, record: ForwardRecord, output: object) -> None:
        """Hook the tensors in ``output``: a backward begins there, before it reaches any parameter."""
        self.forwards.end(record, failed=False)
        self.forwards.watch(output, record, functools.partial(_on_output_grad, weakref.ref(self), record))

    def statistics(self) -> ReducerStatistics:
        """A snapshot of the counters."""
        return self.counters.snapshot(
            phase=self.protocol.phase.name,
            buckets_planned=len(self.protocol.plan.buckets),
            plans_cached=len(self._planner),
            unforeseen=tuple(self.params.names_of(sorted(self.protocol.unforeseen))),
        )

    # -- begin

    def on_output_grad(self, record: ForwardRecord) -> None:
        """An output's gradient is known: a backward has begun, or ``torch.autograd.grad`` runs."""
        if self.window is not None:
            if record.synchronises:
                self.forwards.visit(record)
        elif not self._nodes.begins_backward():
            if torch.is_grad_enabled() and record.synchronises and not record.was_closed:
                self.forwards.keep(record)  # create_graph: what is derived outlives the output (a gradient penalty)
        elif record.synchronises:
            self.forwards.visit(record)
            self._begin(record)
        else:
            self._mark_local()

    def _mark_local(self) -> None:
        """The backward of a ``no_sync`` forward: gradients stay on this rank, as [Note: local] tells."""
        mark = LocalBackward()
        private.queue_callback(mark)
        self._local = weakref.ref(mark)

    def _begin(
        self,
        begun_by: ForwardRecord | None,
        *,
        nested: bool = False,
        stood_before: Mapping[int, Tensor | None] | None = None,
    ) -> None:
        self._local = _nobody
        participants = self.forwards.participants(begun_by)
        if self.buffers is not None:
            self.buffers.exchange(apply=False)
        end = EndOfBackward(self)
        gradients = GradientExchange(self.params, self.comm, self.counters, stood_before or {})
        self.window = Window(private.current_graph_task(), participants, gradients, end.mark)
        end.queue()
        del end  # the engine holds the only reference
        declared = declared_by_all(participants)
        expected = self._nodes.foreseen() if self.find_unused else self._promised(declared)
        if self.protocol.unforeseen:
            expected = bytes(
                e or (i in self.protocol.unforeseen and t)
                for i, (e, t) in enumerate(zip(expected, self.params.trainable, strict=True))
            )
        carried = [i for i in self._touched_locally if gradients.held_back[i] is not None]
        message = self.protocol.begin(expected, carried, declared, signature=self._signature, nested=nested)
        if message is None:
            self._opened(None)
            return
        combined = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        self.window.opening = (self.comm.combine_or(combined), combined)
        if nested or self.protocol.agreement is Agreement.SAME:
            self._open_now()
            if self.window.fault is not None:  # raised now, while nothing was sent
                run(self.closing_steps())

    def _promised(self, declared: frozenset[int]) -> bytes:
        promised = bytearray(self.params.trainable)
        for i in declared:
            promised[i] = 0
        return bytes(promised)

    def _open_now(self) -> None:
        """OPEN has come back, or must be waited for."""
        window = self.window
        assert window is not None and window.opening is not None
        work, combined = window.opening
        window.opening = None
        work.wait()
        self._opened(combined.numpy().tobytes())

    def _opened(self, message: bytes | None) -> None:
        window = self.window
        assert window is not None
        opening = self.protocol.opened(message)
        if opening.fault is not None:
            window.fault = opening
            return
        window.disputed = opening.disputed
        self._count_agreed()
        self._launch(opening.launch)

    def _count_agreed(self) -> None:
        sizes = [spec.nbytes for spec in self.params.specs]
        agreed, trainable = self.protocol.agreed, self.params.trainable
        self.counters.bytes_skipped += sum(
            size for size, used, wanted in zip(sizes, agreed, trainable, strict=True) if wanted and not used
        )

    # -- reduce

    def _on_grad_ready(self, param_index: int, grad: Tensor) -> None:
        """``grad`` was accumulated into the parameter's ``.grad``."""
        window = self.window
        if window is None:
            if not self._outside_of_windows(param_index, grad):
                return
            window = self.window
            assert window is not None
        elif self.params.live[param_index].grad is None:  # type: ignore[union-attr]
            raise GradientTakenError(
                f"{self.where} a hook took the gradient of {self.params.names[param_index]} out of .grad before it "
                "could be averaged over ranks.\nFix: step optimizers and clear gradients after backward()."
            )
        if window.fault is not None:
            return
        full = self.protocol.ready(param_index)
        if full:
            self._launch(full)
        if window.opening is not None and self._may_open(window, param_index):
            self._open_now()

    def _may_open(self, window: Window, param_index: int) -> bool:
        """Whether to look at OPEN now, in the middle of the backward.

        On a lane of its own: when it is there. On the user's group the first launch must come at the same point of the
        program on all ranks, whatever the timing: when a first bucket could be full.
        """
        if not self.comm.shares_data_lane:
            return window.opening is not None and window.opening[0].is_completed()
        window.early_bytes += self.params.specs[param_index].nbytes
        return window.early_bytes >= self._limits[0]

    def _outside_of_windows(self, param_index: int, grad: Tensor) -> bool:
        """A gradient while no window is open. Returns whether one was begun.

        [Note: local] It stays on this rank if its backward is that of a ``no_sync`` forward, or if no synchronising
        forward is open (a backward through ``model.module``). Else it belongs to an output that could not be seen, and
        its backward begins here, one gradient late: what stood in ``.grad`` before is worked out from the sum.
        """
        if self._local() is not None or not self.forwards.is_expecting():
            self._touched_locally.add(param_index)
            return False
        param = self.params.live[param_index]
        assert param is not None and param.grad is not None
        with torch.no_grad():
            before = None if torch.equal(dense(param.grad), dense(grad)) else param.grad - grad
        self._begin(None, nested=inside_nested_task(), stood_before={param_index: before})
        return True

    def _launch(self, positions: range, *, empty: bool = False) -> None:
        """Start the all-reduces of these buckets of the plan."""
        window = self.window
        assert window is not None
        for position in positions:
            window.gradients.launch(self.protocol.plan.buckets[position], empty=empty)

    # -- close

    def closing_steps(self, *, failed: bool = False) -> Generator[Work, None, None]:
        """Close the window: yields each control handle to wait for.

        ``failed``: this rank's backward raised; take part so that no rank waits, then every other rank raises.

        Raises:
            KnownDDPError: what the window's fault is, after gradients are back to what they were.
        """
        try:
            yield from self._closing_steps(failed)
        except BaseException:
            if self.window is not None:  # no error of the protocol: those end the window first
                self.protocol.break_off()
                self.window.gradients.restore()
                self._window_over()
            raise

    def _closing_steps(self, failed: bool) -> Generator[Work, None, None]:
        window, protocol = self.window, self.protocol
        assert window is not None
        if window.opening is not None:
            yield window.opening[0]
            self._open_now()
        if window.fault is not None:
            yield from self._end_in_error(window.fault.fault, window.fault.disputed, failed)
        rest, message = protocol.end(self._hoped(), failed=failed)
        self._launch(rest, empty=failed)
        combined = None
        if message is not None:
            combined = torch.frombuffer(bytearray(message), dtype=torch.uint8)
            yield self.comm.combine_or(combined)
        window.gradients.wait()
        closing = protocol.closed(combined.numpy().tobytes() if combined is not None else None)
        if closing.fault is not None and closing.fault is not Fault.TRUST:
            yield from self._end_in_error(closing.fault, (), failed)
        if failed:  # under "trust" nobody hears of it
            window.gradients.restore()
        else:
            window.gradients.hand_back(closing.touched, closing.late)
        if closing.late_plan is not None:
            yield from window.gradients.late_round(closing.late_plan)
        elif closing.fault is Fault.TRUST:
            window.gradients.keep_late_ones_local(closing.late)
        if closing.order_due:
            order = torch.tensor(protocol.order_message(), dtype=torch.int64)
            yield self.comm.combine_max(order)
            protocol.learn(order.tolist())
        protocol.settled()
        self._touched_locally.clear()
        self.counters.backwards_finished += 1
        self._window_over()
        self._tell_of_dispute(window)
        if closing.fault is Fault.TRUST:
            raise error_for(Fault.TRUST, self.where, (), self.params.names, closing.late)

    def _hoped(self) -> bytes:
        """What the forwards whose outputs took part promised."""
        window = self.window
        assert window is not None
        if self.find_unused:
            return bytes(len(self.params))
        visited = [r for r in window.participants if r.visited] or window.participants
        return self._promised(declared_by_all(visited)) if visited else bytes(len(self.params))

    # -- errors

    def _testimony(self, failed: bool) -> Testimony:
        window = self.window
        declared = declared_by_all(window.participants) if window is not None else frozenset()
        layout = tuple(f"{str(s.key.dtype).removeprefix('torch.')}{list(s.shape)}" for s in self.params.specs)
        return Testimony(failed, inside_nested_task(), tuple(self.params.names_of(sorted(declared))), layout)

    def _end_in_error(self, fault: Fault | None, about: tuple[int, ...], failed: bool) -> Generator[Work, None, None]:
        """Every rank is here. Put gradients back, end the window, hear what the others know, and raise."""
        window = self.window
        assert fault is not None and window is not None
        mine = self._testimony(failed)
        if self.protocol.phase is Phase.SETTLING:
            self.protocol.settled()
        window.gradients.restore()
        self._window_over()
        if fault is Fault.CROSSED:  # ranks are not at the same place, so nothing can be exchanged any more
            self.protocol.break_off()
            raise error_for(fault, self.where, (), self.params.names, about)
        told = yield from self.comm.gather_steps(mine)
        raise error_for(fault, self.where, told, self.params.names, about)

    def abandon(self) -> None:
        """This rank's backward raised: finish the window with the others, so that the next one finds all in step."""
        window = self.window
        if window is None:
            return
        forget(self, window.graph_task)
        # This rank is raising already, and a failed window ends in an error by design. A lost connection shows at the
        # next forward (Phase.BROKEN).
        with contextlib.suppress(Exception):
            run(self.closing_steps(failed=True))

    def _window_over(self) -> None:
        window = self.window
        assert window is not None
        forget(self, window.graph_task)
        self.window = None
        self.forwards.window_closed()
        if self.buffers is not None:
            self.buffers.window_over()

    def _tell_of_dispute(self, window: Window) -> None:
        """Differing declarations cost bytes: count them, and say so once."""
        costly = [i for i in window.disputed if self.protocol.agreed[i]]
        self.counters.bytes_disputed += sum(self.params.specs[i].nbytes for i in costly)
        if costly and not self._warned_of_dispute:
            self._warned_of_dispute = True
            warnings.warn(dispute_message(self.where, self.params.names_of(costly)), stacklevel=2)


def _nobody() -> None:
    """A dead reference."""
    return None


def _on_output_grad(reducer: weakref.ref[Reducer], record: ForwardRecord, _: Tensor) -> None:
    alive = reducer()
    if alive is not None:
        alive.on_output_grad(record)
