"""One rank: the shipped machine, and the least of a driver around it.

The machine decides; what it leaves to its driver is mirrored here, to be read against the shipped files: ``_backward``
and ``begin_window`` against ``Reducer._begin`` and ``_open`` (reducer.py), ``_ready`` against ``Filling`` (filling.py),
closing.py against closing.py, gradients.py against exchange.py, and joining.py against join.py. Buffers, which travel
before OPEN, are left out, and so is how a backward is noticed: a program says when one begins and ends.

What can be said of one rank alone is asserted on the way, the rest in ``oracle.py``.
"""

from __future__ import annotations

import pickle

from knownddp.protocol import Agreement, Phase

from .gradients import firing, plus
from .joining import Joining
from .script import Backward, Forward, LeaveJoin, ZeroGrad
from .state import Event, Role, flags


class Rank(Joining):
    """A rank in its program. ``do`` moves it on."""

    def do(self, event: Event, results: tuple[tuple[int, ...], ...] = ()) -> None:
        """``event`` is one of ``choices``, or of ``choices_when_answered`` with the results of what was awaited."""
        what, i = event
        if what == "go":
            self._go()
        elif what == "ready":
            self._ready(i)
        elif what == "look":
            self.has_waited()
            self._look_at_arrivals(is_over=False)
            self.look(bytes(results[0]))
        elif what == "end" or what == "raise":
            self.close(failed=what == "raise")
        else:
            stage = self.stage
            self.has_waited()
            if stage.endswith("at once") or stage.endswith("in order"):
                self.stage = "backward"
                self.look(bytes(results[0]))
                self._raise_if_at_once()
            elif stage in self.JOIN_STAGES:
                self.answer_in_join(stage, results)
            else:
                self.answer_in_closing(stage, results)

    def _go(self) -> None:
        step = self.role.program[self.place]
        if isinstance(step, Forward):
            if self.is_in_join:
                self.join_forward()
                return
            if step.synchronises:
                self.judge()
        elif isinstance(step, ZeroGrad):
            self.gradients.grads = [None] * self.setup.num_params
        elif isinstance(step, LeaveJoin):
            self.leave_join()
            return
        elif step.synchronises:
            self._backward(step)
            return
        else:  # under no_sync: gradients stay on this rank
            for at, i in enumerate(step.fires):
                token = firing(self.role.number, self.place, step.fires[:at].count(i))
                self.gradients.grads[i] = plus(self.gradients.grads[i], token)
            self.touched_locally = tuple(sorted({*self.touched_locally, *step.fires}))
        self.place += 1

    def _backward(self, step: Backward) -> None:
        """A backward begins: ``Reducer._begin``."""
        n = self.setup.num_params
        self.owes_window = False
        self.left = step.fires if self.setup.in_program_order else tuple(sorted(step.fires))
        trainable = frozenset(range(n)) - step.frozen
        expected = self.history.expected()
        if expected is None and (self.setup.finds_unused or self.setup.is_static):
            foretold = (frozenset(step.fires) | step.undefined) - step.hidden
            expected = flags(foretold | (self.protocol.unforeseen & trainable), n)
        elif expected is None:
            expected = flags(frozenset[int]().union(*(trainable - declared for declared in step.declared)), n)
        self.stage = "backward"
        self.begin_window(expected)
        if self.is_open_known:
            self._raise_if_at_once()
        elif step.nested or self.setup.agreement is not Agreement.UNION:
            self.stage = "OPEN at once"

    def _raise_if_at_once(self) -> None:
        """Where the opening is looked at as the backward begins, its fault is raised then."""
        at_once = self.step.nested or self.setup.agreement is not Agreement.UNION
        if at_once and self.opening_fault is not None:
            self.close(failed=False)

    def _ready(self, i: int) -> None:
        """A gradient was accumulated. Each other parameter is a large one, whose gradient is settled, and looked at at
        once until OPEN is known; those of the rest are written down.
        """
        at = self.left.index(i)
        self.left = self.left[:at] + self.left[at + 1 :]
        if i in self.step.marks:
            self.issue("user", 1, (0,), "sum", (i,))
        token = firing(self.role.number, self.place, self.fired.count(i))
        self.gradients.grads[i] = plus(self.gradients.grads[i], token)
        self.fired = tuple(sorted((*self.fired, i)))
        if self.opening_fault is not None:
            return
        if self.gradients.has_left(i):
            self.late = (*self.late, i)
        is_over = i % 2 == 1
        before = self.arrivals if not self.protocol.planner.has_learnt else tuple(sorted(self.arrivals))
        self.arrivals = (*before, i)  # else their order makes no difference, but for the last
        self.newest = i if not is_over and not self.gradients.has_left(i) else -1
        self.patience -= 1
        if self.patience <= int(is_over) or (is_over and not self.is_open_known):
            self._look_at_arrivals(is_over=is_over)
        if self.is_open_known:
            self.check_launched()
        elif self.setup.in_program_order and self.protocol.wants_opening:
            self.stage = "OPEN in order"

    def _look_at_arrivals(self, *, is_over: bool) -> None:
        """``Filling._look_at``."""
        came, self.arrivals = self.arrivals, ()
        if came:
            self.launch(self.protocol.ready(*came, is_over=is_over))
        self.patience = self.protocol.patience

    def snapshot(self) -> bytes:
        """All of its state."""
        return pickle.dumps(self, pickle.HIGHEST_PROTOCOL)

    def key(self, snapshot: bytes) -> bytes:
        """What tells its state, of which ``snapshot`` was made, from others that go on differently.

        Between windows the machine still has the last one, until ``begin`` forgets it: here it is left out.
        """
        if self.stage != "between" or self.protocol.phase is not Phase.IDLE:
            return snapshot
        later = Rank.restored(snapshot, self.role)
        later.protocol._reset()
        return later.snapshot()

    @classmethod
    def restored(cls, snapshot: bytes, role: Role) -> Rank:
        """A rank in the state that was."""
        rank = pickle.loads(snapshot)
        assert isinstance(rank, cls)
        rank.role, rank.actions = role, []
        return rank
