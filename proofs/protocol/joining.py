"""A rank in a join context, to be read against join.py and ``Reducer.take_part``; and how a window begins."""

from __future__ import annotations

from typing import Final

from knownddp.protocol import Agreement

from .closing import Closing, Results
from .script import SIGNATURE, Forward, LeaveJoin
from .state import some


class Joining(Closing):
    """What of a rank begins windows, its own and those that it shadows."""

    JOIN_STAGES: Final = ("announcement", "others", "announcement to a joined rank")

    def begin_window(self, expected: bytes, *, silent: bool = False, joined: bool = False) -> None:
        """``Reducer._open``, and what comes before it in ``_begin`` and ``take_part``."""
        gradients = self.gradients
        self.facts = {"before": tuple(gradients.grads), "expected": some(expected)}
        self.facts |= {"joined": joined, "silent": silent, "in_join": self.is_in_join, "divisor": self.divisor}
        if joined:
            self.touched_locally = ()
        gradients.begin(contributes=not joined)
        self.has_graph = not silent
        trusts = self.setup.agreement is Agreement.TRUST
        self.protocol.in_program_order = self.setup.in_program_order
        self.protocol.agreement = Agreement.UNION if trusts and self.is_in_join else self.setup.agreement
        carried = tuple(i for i in self.touched_locally if gradients.held_back[i] is not None)
        self.facts["carried"] = carried
        declared = frozenset[int]() if silent else frozenset.intersection(*self.step.declared)
        message = self.protocol.begin(
            expected,
            carried,
            sorted(declared),
            signature=SIGNATURE if silent else self.step.signature,
            nested=not silent and self.step.nested,
            guessed=not silent and self.step.guessed,
            silent=silent,
        )
        self.sent = ()
        self.patience = self.protocol.patience
        if self.trusts:
            self.look(message)
        else:
            self.is_open_known = False
            self.awaited = (self.issue("OPEN", len(message), message, "or"),)

    def judge(self) -> bool:
        """``Reducer.judge``: returns whether it raises."""
        missing = self.protocol.unmet()
        self.protocol.forward_begins()
        self.add_report(False, missing=missing)
        return bool(missing)

    def take_part(self, *, joined: bool, follows: str) -> None:
        """A window in which this rank has no backward."""
        self.owes_window = False
        self.follows = follows
        self.begin_window(bytes(self.setup.num_params), silent=True, joined=joined)
        self.close(failed=False)

    def join_forward(self) -> None:
        """``UnevenInputs.forward_begins``."""
        if self.owes_window:
            self.take_part(joined=False, follows="forward")
        else:
            self._announce(active=True)

    def _announce(self, *, active: bool) -> None:
        """``Join.notify_join_context`` on a rank that has inputs, then ``UnevenInputs._announce``."""
        step = self.role.program[self.place]
        syncs = isinstance(step, Forward) and step.synchronises
        waits = [self.issue("inputs left", 4, (1,), "sum")] if active else []
        mine = (active and syncs, active and not syncs, active and syncs)
        told = (*mine, *(active and rank == self.role.number for rank in range(self.role.world)))
        announced = self.issue("announcement", 8 * len(told), tuple(map(int, told)), "max")
        self.wait("announcement" if active else "announcement to a joined rank", announced, *waits)

    def leave_join(self) -> None:
        """``DebtPayingJoin.__exit__``, then torch's loop."""
        if self.owes_window:
            self.take_part(joined=False, follows="loop")
        else:
            self._ask_others()

    def _ask_others(self) -> None:
        self.wait("others", self.issue("inputs left", 4, (0,), "sum"))

    def answer_in_join(self, stage: str, results: Results) -> None:
        """What this rank waited for has come back."""
        if stage == "others":
            if results[0][0]:
                self._announce(active=False)
            else:
                self._put_back()
                self.is_in_join, self.divisor = False, self.role.world
                self.place, self.stage = self.place + 1, "between"
            return
        syncs, local, trains, *active = results[0]
        joined = stage == "announcement to a joined rank"
        if joined:  # ``UnevenInputs.shadow``
            if self.set_aside is None:
                self.set_aside = (list(self.gradients.grads), self.touched_locally)
            self.gradients.grads = [None] * self.setup.num_params
        if syncs and local:
            self._context_ends("UNEVEN")
            return
        self.divisor = self.role.world if self.setup.divides_by_initial else sum(active)
        if trains and self.judge():
            self._context_ends("")
        elif not joined:
            self.owes_window = bool(syncs)
            self.place, self.stage = self.place + 1, "between"
        elif syncs:
            self.take_part(joined=True, follows="loop")
        else:
            self._ask_others()

    def after_window(self, outcome: str, follows: str) -> None:
        if outcome and self.is_in_join:
            self._context_ends("")
        elif follows == "forward":
            self._announce(active=True)
        elif follows == "loop":
            self._ask_others()
        else:
            self.place, self.stage = self.place + 1, "between"

    def _context_ends(self, outcome: str) -> None:
        """An exception leaves the context: on all ranks, as the oracle sees to."""
        if outcome:
            self.add_report(True, outcome=outcome)
        self._put_back()
        self.is_in_join, self.owes_window, self.divisor = False, False, self.role.world
        program = self.role.program
        self.place = next(i for i in range(self.place, len(program)) if isinstance(program[i], LeaveJoin)) + 1
        self.stage = "between"

    def _put_back(self) -> None:
        if self.set_aside is not None:
            grads, touched = self.set_aside
            self.gradients.grads = list(grads)
            self.touched_locally = tuple(sorted({*self.touched_locally, *touched}))
            self.set_aside = None
