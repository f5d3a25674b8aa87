"""The reducer: hooks in, collectives out. It drives the protocol; decisions are the protocol's.

One gradient's route: ``backward()`` -> a hook on an output begins the window (``_begin``) and sends OPEN -> autograd
accumulates into ``.grad`` -> ``_on_grad_ready`` -> ``Protocol.ready`` names the buckets that may go ->
``GradientExchange.launch`` packs and all-reduces them -> the end of the backward runs ``closing_steps``: what never
came is sent as zeros, CLOSE is exchanged, means are handed back, and a late round follows where one is due.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence

import torch
from torch import Tensor

from . import _torch_private as private
from .buffers import BufferSync
from .comm import DONE, Collectives, Work, run
from .errors import KnownDDPError, PeerError, UnfinishedBackwardError, at_rank
from .exchange import GradientExchange, gradient_taken, is_held_elsewhere
from .faults import Testimony, dispute_message, error_for, unfinished_message
from .flat import dense
from .forwards import ForwardLog, ForwardRecord, OutputSource, declared_by_all, promised_by
from .nodes import GradientNodes, inside_nested_task
from .params import ManagedParams
from .plan import Planner
from .protocol import Agreement, Fault, Phase, WindowProtocol
from .stats import Counters, ReducerStatistics
from .window import LocalBackward, TaskEnd, Window

_numbers = itertools.count()
_no_backward = weakref.ref(LocalBackward())  # dead at once
_reducers: weakref.WeakValueDictionary[int, Reducer] = weakref.WeakValueDictionary()


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
        self.number = next(_numbers)
        # Hooks run on an engine thread for each device, and so may the end of a backward that raised.
        self.lock = threading.RLock()
        params.refresh()
        self._limits = tuple(limits)
        self._planner = Planner(params.specs, limits)
        self.protocol = WindowProtocol(self._planner, len(params), agreement, detects_unused=find_unused)
        self._nodes = GradientNodes(len(params), self._on_grad_ready)
        self.forwards = ForwardLog(is_own_leaf=lambda t: params.index_of(t) is not None)
        self._touched_locally: set[int] = set()  # by unsynchronised backwards, since the last window
        self._local: Callable[[], LocalBackward | None] = _no_backward
        self._warned_of_dispute = False
        self._is_off = False
        self._signature = params.signature()
        self._nodes.hook(params.live, params.trainable)
        _reducers[self.number] = self

    @property
    def where(self) -> str:
        """This rank, for messages."""
        return at_rank(self.comm.rank, self.comm.world_size)

    def remove_hooks(self) -> None:
        """From now on no backward communicates."""
        self._is_off = True
        self._nodes.remove()

    # -- forward

    def check_finished(self, *, judges: bool) -> None:
        """A synchronising forward outside of a backward begins: is the last backward complete?

        ``judges``: raise if parameters were promised and no rank touched them.

        Raises:
            UnfinishedBackwardError: that is so; on every rank.
            PeerError: a collective failed earlier.
        """
        with self.lock:  # on an accelerator the end of a backward that raised may still be running
            window = self.window
            if window is not None and self.protocol.phase is not Phase.BROKEN:
                with contextlib.suppress(Exception):  # its end was never noticed; a failed window ends in an error
                    run(self.closing_steps(window, failed=True))
            if self.protocol.phase is Phase.BROKEN:
                raise PeerError(
                    f"{self.where} a collective of this wrapper failed or timed out, so ranks may be out of step.\n"
                    "Fix: restart, or make a new process group and wrap the module again."
                )
            self.forwards.forward_begins()
            if not judges:
                return
            missing = self.protocol.unmet()
            self.protocol.forward_begins()
        if missing:
            stock_indices = self.params.stock_indices(missing)
            text = unfinished_message(self.where, self.comm.rank, self.params.names, missing, stock_indices)
            raise UnfinishedBackwardError(text)

    def forward_begins(self, declared: frozenset[int], *, synchronises: bool) -> ForwardRecord:
        """Record one forward, reading the parameters as they are now."""
        self._read_params()
        trainable = self.params.trainable
        return self.forwards.begin(declared, trainable, synchronises=synchronises and any(trainable))

    def _read_params(self) -> None:
        if self.params.refresh():
            self._planner.set_specs(self.params.specs)
            self._signature = self.params.signature()
            self._nodes.forget()
        self._nodes.hook(self.params.live, self.params.trainable)

    def forward_ends(self, record: ForwardRecord, output: object) -> None:
        """Hook the tensors in ``output``: a backward begins there, before it reaches any parameter."""
        if [p is not None and p.requires_grad for p in self.params.live] != list(record.trainable):
            self._read_params()  # the module froze or thawed some meanwhile
            record.trainable = tuple(self.params.trainable)
        expects_backward = torch.is_grad_enabled() and any(record.trainable) and not self._is_off
        self.forwards.end(record, is_over=not expects_backward)
        if expects_backward:
            self.forwards.watch(output, record, functools.partial(_on_output_grad, weakref.ref(self)))

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
        with self.lock:
            if self._is_off:
                return
            if self.window is not None:
                if record.synchronises:
                    self.forwards.visit(record)
            elif not self._nodes.begins_backward():
                if torch.is_grad_enabled() and record.synchronises:
                    self.forwards.keep(record)  # create_graph: what is derived outlives the output (a penalty)
            elif record.synchronises:
                self.forwards.visit(record)
                _begin_all()
            else:  # of a ``no_sync`` forward: gradients stay on this rank, as [Note: local] tells
                mark = LocalBackward()
                private.queue_callback(mark)
                self._local = weakref.ref(mark)

    def begin_if_reached(self) -> None:
        """Begin a window if the running backward comes through an open forward of this wrapper and goes on to its part.

        The windows of all wrappers in one backward begin together. Else an exception on one rank, raised before the
        backward gets to a second wrapper, would leave peers waiting there until this rank's next step.
        """
        is_reached = self.forwards.is_visited() or (self.forwards.is_reached() and self._nodes.is_reached())
        if is_reached and self.window is None:  # asked without the lock, which another thread's wrapper may hold
            with self.lock:
                self._begin()

    def _begin(self, *, stood_before: Mapping[int, Tensor | None] | None = None) -> None:
        """``stood_before``: the backward was noticed at a parameter, whose ``.grad`` held this before."""
        self._local = _no_backward
        at_parameter = stood_before is not None
        nested = at_parameter and inside_nested_task()
        guessed = at_parameter and not self.forwards.is_out_of_sight()
        if self.buffers is not None:
            self.buffers.exchange(apply=False)
        participants = self.forwards.participants()
        gradients = GradientExchange(self.params, self.comm, self.counters, stood_before or {})
        declared = declared_by_all(participants)
        if self.find_unused:
            expected = self._nodes.foreseen([i for i in self.protocol.unforeseen if self.params.trainable[i]])
        else:
            expected = promised_by(participants, len(self.params))
        if gradients.elsewhere:
            expected = bytes(e and i not in gradients.elsewhere for i, e in enumerate(expected))
        carried = [i for i in self._touched_locally if gradients.held_back[i] is not None]
        self.window = window = Window(participants, gradients, not at_parameter)
        TaskEnd.of_running_task().add(self, window)
        message = self.protocol.begin(
            expected, carried, declared, signature=self._signature, nested=nested, guessed=guessed
        )
        window.opening = self._combine(message)
        if nested or self.protocol.agreement is not Agreement.UNION:
            self._look_at_opening(window)
            if window.outcome is not None and window.outcome.fault is not None:  # raised now, while nothing was sent
                run(self.closing_steps(window, failed=False))

    def _combine(self, message: bytes) -> tuple[Work, Tensor]:
        """Start to combine a message with that of all ranks. Under "trust" one's own stands for all."""
        combined = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        return DONE if self.protocol.agreement is Agreement.TRUST else self.comm.combine_or(combined), combined

    def _look_at_opening(self, window: Window, *, launches: bool = True) -> None:
        """OPEN has come back, or must be waited for."""
        assert window.opening is not None
        work, message = window.opening
        window.opening = None
        work.wait()
        window.outcome = self.protocol.opened(message.numpy().tobytes())
        if window.outcome.fault is not None:
            return
        agreed, trainable = self.protocol.agreed, self.params.trainable
        self.counters.bytes_skipped += sum(
            spec.nbytes for i, spec in enumerate(self.params.specs) if trainable[i] and not agreed[i]
        )
        if launches:
            self._launch(window, window.outcome.launch)

    # -- reduce

    def _on_grad_ready(self, param_index: int, grad: Tensor | None) -> None:
        """``grad`` was accumulated into the parameter's ``.grad``; None: an autograd Function returned no gradient."""
        with self.lock:
            if grad is None:
                if self.window is not None:
                    self.window.undefined.add(param_index)
                return
            param, window = self.params.live[param_index], self.window
            if param is None or is_held_elsewhere(param, window.gradients if window is not None else None):
                return  # another wrapper averages it in this backward
            if param.grad is None:
                raise gradient_taken(self.where, self.params.names[param_index])
            if window is None and not self._begins_outside_of_windows(param_index, param.grad, grad):
                return
            window = self.window
            if window is None or (window.outcome is not None and window.outcome.fault is not None):
                return
            window.gradients.note(param_index, grad)
            self._launch(window, self.protocol.ready(param_index))
            if window.may_look_at_opening(self.comm, self.params.specs[param_index].nbytes, self._limits[0]):
                self._look_at_opening(window)

    def _begins_outside_of_windows(self, param_index: int, total: Tensor, grad: Tensor) -> bool:
        """A gradient while no window is open. Returns whether it begins one.

        [Note: local] It stays on this rank if its backward is that of a ``no_sync`` forward, or if no synchronising
        forward waits for its backward (one through ``model.module``). Else it belongs to an output that could not be
        seen, and its backward begins here, one gradient late: what stood in ``.grad`` before is worked out from the
        sum. If nothing was out of sight that is a guess, which OPEN compares between ranks.
        """
        if self._local() is not None or not self.forwards.is_expecting():
            self._touched_locally.add(param_index)
            return False
        with torch.no_grad():
            before = None if torch.equal(dense(total), dense(grad)) else total - grad
        self._begin(stood_before={param_index: before})
        _begin_all()
        return True

    def _launch(self, window: Window, positions: range) -> None:
        """Start the all-reduces of these buckets of the plan."""
        for position in positions:
            window.gradients.launch(self.protocol.plan.buckets[position])

    # -- close

    def closing_steps(self, window: Window, *, failed: bool) -> Generator[Work, None, None]:
        """Close the window: yields each handle to wait for.

        ``failed``: this rank's backward raised; take part so that no rank waits, then every other rank raises. Raises
        what the window's fault is, after gradients are back to what they were.
        """
        try:
            yield from self._closing_steps(window, failed)
        except BaseException:
            if self.window is window:  # no error of the protocol: those end the window first
                self.protocol.break_off()
                self._end(window, restore=True)
            raise

    def _closing_steps(self, window: Window, failed: bool) -> Generator[Work, None, None]:
        protocol, gradients = self.protocol, window.gradients
        if window.opening is not None:
            yield window.opening[0]
            self._look_at_opening(window, launches=False)
        assert window.outcome is not None
        if window.outcome.fault is not None:
            raise (yield from self._error_of(window, window.outcome.fault, window.outcome.disputed, failed))
        protocol.end()
        own_error = gradients.launch_rest(protocol.plan.buckets, failed=failed)
        failed = failed or own_error is not None
        work, message = self._combine(protocol.close(self._promised(window), failed=failed))
        yield work
        gradients.wait()
        closing = protocol.closed(message.numpy().tobytes())
        if closing.fault is not None and closing.fault is not Fault.TRUST:
            error = yield from self._error_of(window, closing.fault, (), failed)
            try:
                raise own_error or error
            finally:
                del own_error, error  # else a cycle through the traceback keeps the model alive
        gradients.hand_back(closing.touched, closing.late)
        if closing.late_plan is not None:
            yield from gradients.late_round(closing.late_plan)
        elif closing.fault is Fault.TRUST:
            gradients.keep_late_ones_local(closing.late)
        if closing.order_due:
            order = torch.tensor(protocol.order_message(), dtype=torch.int64)
            yield self.comm.combine_max(order)
            protocol.learn(order.tolist())
        self._touched_locally.clear()
        self.counters.backwards_finished += 1
        self._end(window, restore=False)
        self._tell_of_dispute(window.outcome.disputed)
        if closing.fault is Fault.TRUST:
            raise error_for(Fault.TRUST, self.where, (), self.params.names, closing.late)

    def _promised(self, window: Window) -> bytes:
        """What the forwards promised whose outputs took part.

        Nothing with detection, nor on a rank whose backward reached no parameter (a constant loss), as in stock DDP.
        """
        at_output = window.begun_at_output  # else no hook told which, and what had a backward kept its promise
        records = [r for r in window.participants if (r.visited if at_output else not r.was_closed)]
        promises = self.protocol.has_fired and not self.find_unused
        promised = bytearray(promised_by(records if promises else (), len(self.params)))
        for i in window.undefined | window.gradients.elsewhere:
            promised[i] = 0
        return bytes(promised)

    def _end(self, window: Window, *, restore: bool) -> None:
        """The window is over; gradients stay as they are, or go back to what they were when it began."""
        if restore:
            window.gradients.restore()
        window.gradients.release()
        if self.protocol.phase is Phase.SETTLING:
            self.protocol.settled()
        self.window = None
        self.forwards.window_closed()
        if self.buffers is not None and self.protocol.phase is not Phase.BROKEN:
            self.buffers.window_over()

    def _error_of(
        self, window: Window, fault: Fault, about: tuple[int, ...], failed: bool
    ) -> Generator[Work, None, KnownDDPError]:
        """Every rank is here. End the window, hear what the others know, and return the exception to raise."""
        layout = tuple(f"{str(s.key.dtype).removeprefix('torch.')}{list(s.shape)}" for s in self.params.specs)
        declared = tuple(self.params.names_of(sorted(declared_by_all(window.participants))))
        mine = Testimony(failed, inside_nested_task(), window.begun_at_output, declared, layout)
        self._end(window, restore=True)
        told: Sequence[Testimony] = ()
        if fault is Fault.CROSSED:  # ranks are not at the same place, so nothing can be exchanged any more
            self.protocol.break_off()
        elif self.protocol.agreement is not Agreement.TRUST:
            told = yield from self.comm.gather_steps(mine)
        return error_for(fault, self.where, told, self.params.names, about)

    def _tell_of_dispute(self, disputed: Sequence[int]) -> None:
        """Differing declarations cost bytes: count them, and say so once."""
        costly = [i for i in disputed if self.protocol.agreed[i]]
        self.counters.bytes_disputed += sum(self.params.specs[i].nbytes for i in costly)
        if costly and not self._warned_of_dispute:
            self._warned_of_dispute = True
            warnings.warn(dispute_message(self.where, self.params.names_of(costly)), stacklevel=2)


def _begin_all() -> None:
    """In the order of construction, which is the same on all ranks."""
    for reducer in sorted(_reducers.values(), key=lambda one: one.number):
        reducer.begin_if_reached()


def _on_output_grad(reducer: weakref.ref[Reducer], source: OutputSource, _: Tensor) -> None:
    alive = reducer()
    if alive is not None:
        alive.on_output_grad(source.record)
