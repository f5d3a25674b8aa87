"""The reducer: hooks in, collectives out. It drives the protocol; decisions are the protocol's. Here is how a window
begins; ``filling.py`` is its middle and ``closing.py`` its end.

One gradient's route: ``backward()`` -> a hook on an output begins the window (``_begin``) and sends OPEN -> autograd
accumulates into ``.grad`` -> ``_on_arrivals`` -> ``Protocol.ready`` names the buckets that may go ->
``GradientExchange.launch`` packs and all-reduces them -> ``closing_steps`` at the end of the backward: what never came
is sent as zeros, CLOSE is exchanged, means are handed back, and a late round follows where one is due.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from . import _torch_private as private
from . import faults
from .arrivals import Arrivals
from .buffers import BufferSync
from .closing import Closing
from .comm import Collectives
from .comm_hooks import CommHook
from .exchange import GradientExchange, is_held_elsewhere
from .flat import before_accumulation
from .flights import Resources, Terms
from .forwards import ForwardLog, ForwardRecord, declared_by_all, promised_by
from .graphs import GraphHistory
from .nodes import GradientNodes, inside_nested_task
from .optimizers import BackwardOptimizers
from .params import ManagedParams
from .plan import Planner
from .pool import FlatPool
from .protocol import Agreement, Phase, WindowProtocol
from .stats import Counters, Times
from .stock_reducer import StockReducer
from .window import Debt, LocalBackward, Standing, TaskEnd, Window
from .works import raise_first, run

_numbers = itertools.count()
_no_backward = weakref.ref(LocalBackward((), lambda _, failed: None))  # dead at once
_reducers: weakref.WeakValueDictionary[int, Reducer] = weakref.WeakValueDictionary()


class Reducer(Closing, StockReducer):
    """Averages the gradients of ``params`` over the ranks of ``comm``, one window a synchronising backward.

    Args:
        params: the managed parameters, refreshed at each forward.
        comm: the collectives.
        buffers: exchanged once a window.
        limits, limits_of_much: bucket sizes in bytes (see ``Planner``).
        agreement: what to do about declarations that differ.
        find_unused: expect what the engine is about to run instead of what was not declared.
        static_graph: expect what the first backward brought; another graph is an error.
        delayed: parameters that are launched only when the backward is over.
    """

    def __init__(
        self,
        params: ManagedParams,
        comm: Collectives,
        buffers: BufferSync,
        *,
        limits: Sequence[int],
        limits_of_much: Sequence[int],
        agreement: Agreement,
        find_unused: bool,
        static_graph: bool = False,
        delayed: Collection[int] = (),
    ) -> None:
        self.params = params
        self.comm = comm
        self.buffers = buffers
        self.find_unused = find_unused and not static_graph
        self.history = GraphHistory(is_promised=static_graph)
        self.optimizers = BackwardOptimizers()
        self.counters, self.times = Counters(), Times()
        self.window: Window | None = None
        self.hook: CommHook | None = None
        self.divisor = comm.world_size  # ranks that take part; fewer where join() is told to count them
        self.debt: Callable[[], Debt | None] = lambda: None  # what is owed in the running join context
        self.last_error = ""
        self._warned_of_late, self._comes_again = set(), set()
        self._agreement = agreement
        self.number = next(_numbers)
        # Hooks run on an engine thread for each device, and so may the end of a backward that raised.
        self.lock = threading.RLock()
        params.refresh()
        self.planner = Planner(params.specs, limits, limits_of_much)
        self.planner.hold(delayed)
        self._sizes = zlib.crc32(repr(self.planner.limits).encode())
        self.protocol = WindowProtocol(self.planner, len(params), agreement, detects_unused=self.find_unused)
        self.may_wait = self._are_on_one_device = params.are_on_one_device()  # else hooks run on several threads
        self.pool = FlatPool(params)
        self.arrivals = Arrivals()
        nodes = self.nodes = GradientNodes(
            len(params), self.arrivals, self._on_arrivals, self._on_settled, self._on_undefined
        )
        arrived = self.protocol.arrived
        self._resources = Resources(params, comm, self.counters, self.pool, arrived, nodes.streams, nodes.users)
        self.forwards = ForwardLog(lambda t: params.index_of(t) is not None, self.on_output_grad)
        self.forwards_begun = 0
        self.touched_locally: set[int] = set()  # by unsynchronised backwards, since the last window
        self._local: Callable[[], LocalBackward | None] = _no_backward
        self._stood: Standing | None = None  # at the last forward's end, until a backward of one begins
        self.sync_next = self._is_off = False
        self.nodes.hear(None if static_graph else ())
        self.nodes.hook(params.live, params.trainable)
        _reducers[self.number] = self

    @property
    def follows_program_order(self) -> bool:
        """Whether launches must come at the same point of the program on all ranks: hooks may use any group."""
        return self.comm.follows_program_order or (self.hook is not None and not self.hook.is_own)

    def set_static(self) -> None:
        """From the first backward on the graph may not change."""
        self.find_unused = self.protocol.detects_unused = False
        self.history = GraphHistory(is_promised=True)

    def remove_hooks(self) -> None:
        """From now on no backward communicates."""
        self._is_off = True
        self.nodes.remove()

    def take_over(self, old: Reducer) -> None:
        """Go on with what ``old``, of the same parameters, knew that does not depend on the ranks."""
        self.hook, self.counters, self.forwards_begun = old.hook, old.counters, old.forwards_begun
        self._resources.counters = old.counters
        self.touched_locally, self.history, self.optimizers = old.touched_locally, old.history, old.optimizers
        self.forwards = old.forwards
        self.forwards.report_to(self.on_output_grad)

    def give_up(self) -> None:
        """Other ranks take over from here: hooks go, and with them a window whose end was never noticed."""
        with self.lock:
            self.remove_hooks()
            if self.window is not None:
                self.protocol.break_off()
                self._end(self.window, restore=True)

    # -- forward

    def check_finished(self, *, judges: bool) -> None:
        """A synchronising forward outside of a backward begins: is the last backward complete?

        Raises:
            UnfinishedBackwardError: ``judges``, and parameters were promised that no rank touched; on every rank.
            PeerError: a collective failed earlier.
        """
        with self.lock:  # on an accelerator the end of a backward that raised may still be running
            window = self.window
            if window is not None and self.protocol.phase is not Phase.BROKEN:
                with contextlib.suppress(Exception):  # its end was never noticed; a failed window ends in an error
                    run(self.closing_steps(window, failed=True))
            if self.protocol.phase is Phase.BROKEN:
                raise faults.broken_error(self.where)
            self.forwards.forward_begins()
        if judges:
            self.judge()

    def forward_begins(self, declared: frozenset[int], *, synchronises: bool) -> ForwardRecord:
        """Record one forward, reading the parameters as they are now."""
        self.optimizers.adopt(self.params.live)
        self.forwards_begun += 1
        self._read_params()
        trainable = self.params.trainable
        return self.forwards.begin(declared, trainable, synchronises=synchronises and any(trainable))

    def _read_params(self) -> None:
        if self.params.refresh():
            self.planner.set_specs(self.params.specs)
            self.pool.clear()
            self.nodes.forget()
            self._are_on_one_device = self.params.are_on_one_device()
        elif self.params.moved:
            self.nodes.forget()  # they may have been cast and cast back
        if uses_rpc := private.rpc_is_running():
            self.nodes.hear_all()
        if self.window is None and self._local() is None:  # what is written down is read as it was meant
            self.may_wait = self._are_on_one_device and not uses_rpc
        if self.window is None:  # else a parameter could have two hooks at once
            self.nodes.hear(self._comes_again if not self.history.is_promised else None)
        self.nodes.hook(self.params.live, self.params.trainable)

    def forward_ends(self, record: ForwardRecord, output: object) -> None:
        """Hook the tensors in ``output``: a backward begins there, before it reaches any parameter."""
        if self.params.trainable_now() != record.trainable:
            self._read_params()  # the module froze or thawed some meanwhile
            record.trainable = self.params.trainable
        expects_backward = torch.is_grad_enabled() and any(record.trainable) and not self._is_off
        self.forwards.end(record, is_over=not expects_backward)
        if self.window is None:
            untold = self.nodes.untold(self.params.live) if expects_backward else None
            self._stood = Standing(untold) if untold is not None else None
        if expects_backward and self.forwards.watch(output, record):
            self._hear_all()

    def _hear_all(self) -> None:
        """A backward may begin at any parameter, or outside of windows."""
        self.nodes.hear_all()
        if self.window is None and not self._is_off:  # else a parameter could have two hooks at once
            self.nodes.hook(self.params.live, self.params.trainable)

    # -- begin

    def on_output_grad(self, record: ForwardRecord) -> None:
        """An output's gradient is known: a backward has begun, or ``torch.autograd.grad`` runs."""
        with self.lock:
            if self._is_off or not self._note_output_grad(record):
                return
        try:  # without the lock: another device's thread may begin another wrapper, and that one's this
            _begin_all()
        except BaseException:
            record.visited = record.visited and self.window is not None
            raise

    def _note_output_grad(self, record: ForwardRecord) -> bool:
        """Returns whether a window is to begin."""
        if private.in_compiled_backward():
            raise faults.compiled_error(self.where)
        if self.window is not None:
            if record.synchronises:
                self.forwards.visit(record)
        elif not self.nodes.begins_backward():
            if torch.is_grad_enabled() and record.synchronises:
                self.forwards.keep(record)  # create_graph: what is derived outlives the output (a penalty)
                if not private.is_bound_to_thread():  # in a transform a parameter shows no node
                    self._hear_all()
        elif record.synchronises or self.sync_next:
            self._settle_debt(pays=False)
            record.synchronises = True
            self.forwards.visit(record)
            return True
        elif self._local() is None:  # of a ``no_sync`` forward: gradients stay on this rank, as [Note: local] tells
            mark = LocalBackward(self.params.live, self.local_ends)
            private.queue_callback(mark)
            self._local, self._stood = weakref.ref(mark), None
            self._renew_patience()
        return False

    def begin_if_reached(self) -> None:
        """Begin a window if the running backward comes through an open forward of this wrapper and goes on to its part.

        The windows of all wrappers in one backward begin together. Else an exception on one rank, raised before the
        backward gets to a second wrapper, would leave peers waiting there until this rank's next step.
        """
        is_reached = self.forwards.is_visited() or (self.forwards.is_reached() and self.nodes.is_reached())
        # Asked without the lock, which another thread's wrapper may hold; so that one may also have begun it by now.
        if is_reached and self.window is None and not self._is_off:
            with self.lock:
                if self.window is None:
                    self._begin()

    def _begin(self, *, stood_before: Mapping[int, Tensor | None] | None = None) -> None:
        """``stood_before``: the backward was noticed at a parameter, whose ``.grad`` held this before."""
        self._settle_debt()
        self.times.mark("backward_begun")
        self._count_local()
        self._local = _no_backward
        self._stood = None  # it would keep memory
        self.sync_next = False
        at_parameter = stood_before is not None
        nested = at_parameter and inside_nested_task()
        guessed = at_parameter and not self.forwards.is_out_of_sight()
        participants = self.forwards.participants()
        expected = self.history.expected()
        if expected is None and (self.find_unused or self.history.is_promised):
            expected = self.nodes.foreseen([i for i in self.protocol.unforeseen if self.params.trainable[i]])
        elif expected is None:
            expected = promised_by(participants, len(self.params))
        gradients = GradientExchange(self._resources, Terms(self.divisor, self.hook), stood_before or {})
        if gradients.elsewhere:
            expected = bytes(e and i not in gradients.elsewhere for i, e in enumerate(expected))
        window = Window(participants, gradients, not at_parameter)
        with self._breaking_off(window):
            TaskEnd.of_running_task().add(self, window)
            self._open(window, expected, nested=nested, guessed=guessed)
        if nested or self.protocol.agreement is not Agreement.UNION:
            self.look_at_opening(window)
            if window.has_fault:  # raised now, while nothing was sent
                run(self.closing_steps(window, failed=False))
        self._renew_patience()

    @contextlib.contextmanager
    def _breaking_off(self, window: Window) -> Iterator[None]:
        """If what is done inside raises, ranks are out of step, but gradients are as they were."""
        self.window = window
        try:
            yield
        except BaseException:
            self.protocol.break_off()
            self._end(window, restore=True)
            raise

    def _settle_debt(self, *, pays: bool = True) -> None:
        """In a join context a window must be the one that its forward announced: joined ranks wait for that alone."""
        if self.protocol.phase is Phase.BROKEN:
            raise faults.broken_error(self.where)
        debt = self.debt()
        if debt is not None and not debt.is_due:
            raise faults.second_backward_error(self.where)
        if debt is not None and pays:
            debt.is_due = False

    def _open(
        self, window: Window, expected: bytes, *, nested: bool = False, guessed: bool = False, silent: bool = False
    ) -> None:
        """Send OPEN."""
        self.arrivals.take()  # of a backward whose end was never noticed
        self.buffers.exchange(apply=False)
        # Joined ranks cannot know declarations that nobody tells them.
        trusts = self._agreement is Agreement.TRUST
        self.protocol.in_program_order = self.follows_program_order
        self.protocol.agreement = Agreement.UNION if trusts and self.debt() is not None else self._agreement
        carried = [i for i in self.touched_locally if window.gradients.held_back[i] is not None]
        message = self.protocol.begin(
            expected,
            carried,
            declared_by_all(window.participants),
            signature=zlib.crc32(self.hook_name.encode(), self.params.signature ^ self._sizes),
            nested=nested,
            guessed=guessed,
            silent=silent,
        )
        window.opening = self.combine(message)

    def take_part(self, *, joined: bool, failed: bool = False) -> None:
        """A window in which this rank has no backward, but others have: the mean reaches this rank too.

        ``joined``: this rank has no inputs left; it contributes zeros and has no say. Else it contributes like a rank
        whose backward reaches no parameter. ``failed``: like one whose backward raises, so that the window is an error
        on every rank.
        """
        with self.lock:
            debt = self.debt()
            if debt is not None:
                debt.is_due = False
            self.optimizers.adopt(self.params.live)
            self._read_params()
            terms = Terms(self.divisor, self.hook, contributes=not joined)
            gradients = GradientExchange(self._resources, terms, {})
            window = Window([], gradients, begun_at_output=True, has_graph=False)
            if joined:
                self.touched_locally.clear()
            with self._breaking_off(window):
                self._open(window, bytes(len(self.params)), silent=True)
            run(self.closing_steps(window, failed=failed))

    def _begins_or_stays(self, param_index: int, grad: Tensor | None) -> bool:
        """Whether a gradient that came while no window was open begins one, or came after one that did.

        [Note: local] It stays on this rank if its backward is that of a ``no_sync`` forward, or if no synchronising
        forward waits for its backward (one through ``model.module``). Else it belongs to an output that could not be
        seen, and its backward begins here, one gradient late: what stood in ``.grad`` before is worked out from the
        sum. If nothing was out of sight that is a guess, which OPEN compares between ranks.
        """
        if self.window is not None:
            return True
        param = self.params.live[param_index]
        if param is None or is_held_elsewhere(param, None):
            return False  # another wrapper averages it in this backward
        if self.nodes.is_passed_by(param_index):
            raise faults.warned(faults.distributed_autograd_error(self.where))
        is_local = self._local() is not None
        stood = self._stood
        if grad is None and not is_local:  # not told, as no backward was thought to come by this way
            if stood is not None and param.grad is not None and not stood.has_changed(param_index):
                return False  # an undefined one
            private.queue_callback(self._hear_all)  # from now on such are
        if param.grad is None:
            self._raise_if_taken(param_index, param)
        if is_local or not self.forwards.is_expecting() or param.grad is None:
            self.touched_locally.add(param_index)
            return False
        if private.in_compiled_backward():
            raise faults.compiled_error(self.where)
        before = stood.before(param_index, param.grad) if stood is not None else param.grad
        before = before_accumulation(param.grad, grad) if grad is not None else before
        self._begin(stood_before={param_index: before})
        _begin_all()
        return self.window is not None


def _begin_all() -> None:
    """In the order of construction, the same on all ranks. One that raises keeps no other from beginning."""
    errors: list[BaseException] = []
    alive = filter(None, [ref() for ref in _reducers.valuerefs()])  # other threads may make wrappers meanwhile
    for reducer in sorted(alive, key=lambda one: one.number):
        try:
            reducer.begin_if_reached()
        except BaseException as error:
            errors.append(error)
    raise_first(errors)
