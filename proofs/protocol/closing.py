"""The end of a window on one rank, to be read against ``Closing`` in closing.py; looking and launching, against
``Filling`` in filling.py.

``close`` and what follows are ``Closing._closing_steps``, in its order; a ``yield`` there is a ``wait`` here.
"""

from __future__ import annotations

from knownddp.graphs import Graph
from knownddp.outcomes import Fault
from knownddp.plan import BucketPlan
from knownddp.protocol import Phase

from .state import State, flags

Results = tuple[tuple[int, ...], ...]


class Closing(State):
    """What of a rank ends a window."""

    def look(self, message: bytes, *, launches: bool = True) -> None:
        """``look_at_opening``."""
        self.is_open_known = True
        opening = self.protocol.opened(message)
        self.patience = self.protocol.patience
        self.opening_fault = opening.fault
        self.facts["disputed"] = opening.disputed
        if opening.fault is None:
            self.plan, planner = self.protocol.plan, self.protocol.planner
            for bucket in self.plan.buckets:
                held = not planner.has_learnt or not planner.held.isdisjoint(bucket.param_indices)
                assert bucket.is_held == held, "a plan older than what is held by now"
            if launches:
                self.launch(opening.launch)
                self.check_launched()

    def launch(self, positions: range) -> None:
        for position in positions:
            assert self.is_open_known, "a bucket was launched while the agreed set is not known"
            assert self.plan is not None and self.protocol.plan == self.plan, "the plan changed within a window"
            assert position == len(self.gradients.flights), "a bucket was launched out of the plan's order"
            self._send_bucket("bucket", self.plan, position)

    def _send_bucket(self, tag: str, plan: BucketPlan, position: int) -> None:
        bucket = plan.buckets[position]
        share = self.gradients.pack(bucket) if not self.is_failed else self.gradients.pack_nothing(bucket)
        nbytes = sum(self.setup.nbytes[i] for i in bucket.param_indices)
        self.at = (*self.at, self.issue(tag, nbytes, share, "sum", bucket.param_indices))

    def check_launched(self) -> None:
        """[Note: launch order]: neither before every gradient came that is expected here, nor later, be it that nobody
        has looked at them; but the bucket of one that is not settled stays: [Note: settled].
        """
        assert self.plan is not None
        expected, may_go = self.facts["expected"], 0
        for bucket in self.plan.buckets:
            if self.newest in bucket.param_indices:
                break
            if bucket.is_held or any(i in expected and i not in self.fired for i in bucket.param_indices):
                break
            may_go += 1
        launched = len(self.gradients.flights)
        assert launched <= may_go, "a bucket was launched before its gradients had come"
        assert launched == may_go or (self.setup.in_program_order and not launched), "a full bucket was not launched"

    def close(self, *, failed: bool) -> None:
        """The backward is over, or raised."""
        self.is_failed = failed
        self.facts["raised"] = failed
        came, self.arrivals, self.newest = self.arrivals, (), -1
        if came and self.opening_fault is None:
            self.protocol.count(came)
        if self.setup.in_program_order:
            self.facts["early"] = len(self.gradients.flights)
        if self.is_open_known:
            self._launch_rest()
        else:
            self.stage = "OPEN at the end"  # awaited since the begin

    def _launch_rest(self) -> None:
        if self.opening_fault is not None:
            self._begin_error(self.opening_fault)
            return
        rest = self.protocol.end()
        assert self.plan is not None and rest.stop == len(self.plan.buckets), "a bucket was never to be launched"
        if self.is_failed:
            self.gradients.restore()
        for position in range(len(self.gradients.flights), len(self.plan.buckets)):
            self._send_bucket("bucket", self.plan, position)
        changed = self.has_graph and not self.is_failed and self.history.breaks_promise(self._graph())
        message = self.protocol.close(self._promised(), failed=self.is_failed, changed=changed)
        if self.trusts:
            self.wait("CLOSE of one's own", *self.at)
            self.own_close = message
        else:
            self.wait("CLOSE", self.issue("CLOSE", len(message), message, "or"), *self.at)

    def _graph(self) -> Graph:
        fired, repeated = self.protocol.fired()
        undefined = self.step.undefined
        return Graph(bytes(f or i in undefined for i, f in enumerate(fired)), repeated)

    def _promised(self) -> bytes:
        """``Closing._promised``."""
        n = self.setup.num_params
        promises = self.protocol.has_fired and not self.setup.finds_unused and not self.setup.is_static
        if not promises or not self.has_graph:
            return bytes(n)
        trainable = frozenset(range(n)) - self.step.frozen
        which = frozenset[int]().union(*(trainable - declared for declared in self.step.declared))
        return flags(which - self.step.undefined, n)

    def answer_in_closing(self, stage: str, results: Results) -> None:
        """What this rank waited for has come back."""
        if stage == "OPEN at the end":
            self.look(bytes(results[0]), launches=False)
            self._launch_rest()
        elif stage == "CLOSE":
            self._closed(bytes(results[0]), results[1:])
        elif stage == "CLOSE of one's own":
            self._closed(self.own_close, results)
        elif stage == "late round":
            self.in_late_round = results
            any_failed = self.issue("any failed", 1, (self.is_failed,), "max")
            self.wait("any failed", any_failed)
        elif stage == "any failed":
            if results[0][0]:
                self._begin_error(Fault.FAILED)
            else:
                self._hand_back()
        elif stage == "order":
            self.protocol.learn(results[0])
            self._finish()
        elif stage == "testimony size":
            mine = [self.is_failed and rank == self.role.number for rank in range(self.role.world)]
            self.wait("testimony", self.issue("testimony", 1, mine, "max"))
        else:
            assert stage == "testimony"
            self._end(self.fault, told=results[0])

    def _closed(self, message: bytes, sums: Results) -> None:
        closing = self.closing = self.protocol.closed(message)
        self.on_time = sums
        if closing.late_plan is not None:
            self.gradients.late_round()
            self.is_failed = self.has_graph and self.step.fails_late
            self.at = ()
            for position in range(len(closing.late_plan.buckets)):
                self._send_bucket("late", closing.late_plan, position)
            self.wait("late round", *self.at)
        elif closing.fault is not None and closing.fault is not Fault.TRUST:
            self._begin_error(closing.fault)
        else:
            self._hand_back()

    def _hand_back(self) -> None:
        closing = self.closing
        assert closing is not None
        self.gradients.hand_back(self.on_time, self.in_late_round, self.divisor, closing.touched, closing.late)
        if closing.fault is Fault.TRUST:
            self.gradients.keep_late_ones_local(closing.late)
        if closing.order_due:
            order = self.protocol.order_message()
            self.wait("order", self.issue("order", 8 * len(order), order, "max"))
        else:
            self._finish()

    def _finish(self) -> None:
        assert self.closing is not None
        if self.has_graph:
            self.history.note(self._graph(), self.protocol.fired()[0])
        self.touched_locally = ()
        self._end("TRUST" if self.closing.fault is Fault.TRUST else "")

    def _begin_error(self, fault: Fault) -> None:
        """``Closing._error_of``."""
        self.gradients.restore()
        if self.protocol.phase is Phase.SETTLING:
            self.protocol.settled(failed=True)
        assert fault is not Fault.CROSSED, "messages of different places met"
        self.fault = fault.name
        if self.trusts:
            mine = [self.is_failed and rank == self.role.number for rank in range(self.role.world)]
            self._end(self.fault, told=tuple(mine))
        else:
            self.wait("testimony size", self.issue("testimony size", 8, (1,), "max"))

    def _end(self, outcome: str, *, told: tuple[int, ...] = ()) -> None:
        """``Closing._end``. An error is caught, and the program goes on with the next step."""
        if self.protocol.phase is Phase.SETTLING:
            self.protocol.settled()
        self.report(outcome, told=told)
        self.windows += 1
        assert self.protocol.window == self.windows, "the machine lost count of windows"
        self.gradients.release()
        follows = self.follows
        self.clear()
        self.after_window(outcome, follows)

    def after_window(self, outcome: str, follows: str) -> None:
        raise NotImplementedError
