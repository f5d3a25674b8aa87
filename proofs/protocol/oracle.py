"""What should have become of a script, from what its ranks did: asserted of their reports at the end of every path.

It shares nothing with the machine: what is due follows from the programs, the order of gradients on each rank, and
which exceptions were raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from knownddp.protocol import Agreement

from .gradients import Grad, firing, plus
from .script import SIGNATURE, Backward, Script
from .state import Report

TESTIMONIES: Final = ["testimony size", "testimony"]


def judge(script: Script, reports: Sequence[tuple[Report, ...]]) -> None:
    """Assert that everything went as it should."""
    by_rank = [[report for report in mine if report.is_window] for mine in reports]
    told = list(map(len, by_rank))
    due = told[:1] if script.setup.joins else [min(script.windows)]
    assert told == due * len(told), f"ranks ended {told} windows, due are {due[0]}"
    windows: list[Window] = []
    for window in zip(*by_rank, strict=True):
        windows.append(Window(script, window, windows))
        windows[-1].check()
    for rank, mine in enumerate(reports):
        _check_judgements(rank, mine, windows)


def _check_judgements(rank: int, mine: Sequence[Report], windows: Sequence[Window]) -> None:
    """A forward raises for what was promised since the last one and touched by nobody; otherwise it does not."""
    promised: set[int] = set()
    touched: set[int] = set()
    number = 0
    for report in mine:
        if not report.is_window:
            due = tuple(sorted(promised - touched))
            assert report.missing == due, f"rank {rank} missed {report.missing}, due is {due}"
            promised, touched = set(), set()
        elif number < len(windows):
            promised |= windows[number].promised(rank)
            touched |= windows[number].touched(rank)
            number += 1


class Window:
    """One window, as each rank told it, and those before it."""

    def __init__(self, script: Script, told: tuple[Report, ...], before: Sequence[Window]) -> None:
        self.setup, self.told, self.before = script.setup, told, tuple(before)
        self.ranks = range(len(told))
        programs = zip(script.programs, told, strict=True)
        steps = [program[report.place] for program, report in programs]
        self.steps = [s if isinstance(s, Backward) and not r.silent else None for s, r in zip(steps, told, strict=True)]
        self.is_uneven = told[0].outcome == "UNEVEN"
        in_join = any(report.in_join for report in told)
        self.trusts = self.setup.agreement is Agreement.TRUST and not in_join
        self.outcome = "" if self.trusts else told[0].outcome
        # What ranks agree on ...
        self.agreed = {i for report in told for i in (*report.expected, *report.carried)}
        # ... and what came late: outside of it, or after its bucket had left.
        self.late_at = [{*r.late, *(i for i in r.fired if i not in self.agreed)} for r in told]
        self.late = set().union(*self.late_at)

    def check(self) -> None:
        """Assert all that is due."""
        for rank, report in enumerate(self.told):
            due = self._outcomes_due(rank)
            assert report.outcome in due, f"rank {rank} ended with '{report.outcome}', due is {due}"
            assert self.trusts or report.outcome == self.outcome, "an error that some ranks did not see"
            assert report.order == self.told[0].order, "ranks learnt different orders"
        if self.is_uneven:
            return
        self._check_late()
        failed = tuple(int(r.raised or self._fails_late(r_at)) for r_at, r in enumerate(self.told))
        for rank, report in enumerate(self.told):
            self._check_sent(rank)
            if report.outcome in ("", "TRUST"):
                for i in range(self.setup.num_params):
                    due_grad = self._grad_due(rank, i)
                    assert report.after[i] == due_grad, f"rank {rank} has a wrong gradient of {i} after {report.fired}"
            else:
                assert report.after == report.before, f"rank {rank} has other gradients after an error than before"
                assert self.trusts or report.told == failed, f"told was {report.told}, {failed} failed"
            disputed = self._disputed()
            assert self.trusts or report.disputed == disputed, f"in dispute are {disputed}, told {report.disputed}"
            if self.setup.in_program_order:
                uneven = len({r.expected for r, step in zip(self.told, self.steps, strict=True) if step}) > 1
                assert report.early == (0 if uneven else self.told[0].early), "ranks launched at different gradients"

    # -- outcomes

    def _disputed(self) -> tuple[int, ...]:
        said = [frozenset.intersection(*step.declared) for step in self.steps if step is not None]
        return tuple(sorted(frozenset().union(*said) - frozenset.intersection(*said))) if said else ()

    def _outcomes_due(self, rank: int) -> set[str]:
        """One of these; whichever is told first, if several are due."""
        if self.is_uneven:
            return {"UNEVEN"}  # its own kind of window, told by all ranks or by none
        steps = [step for step in self.steps if step is not None]
        of_opening = set()
        if len({step.signature if step is not None else SIGNATURE for step in self.steps}) > 1:
            of_opening.add("MODELS")
        if any(step.nested for step in steps):
            of_opening.add("NESTED")
        if len({step.guessed for step in steps}) > 1:
            of_opening.add("UNSEEN")
        if self._disputed() and self.setup.agreement is Agreement.SAME:
            of_opening.add("DECLARATIONS")
        if of_opening and not self.trusts:
            return of_opening
        who = [rank] if self.trusts else self.ranks
        if any(self.told[r].raised for r in who):
            return {"FAILED"}
        if any(self._graph_changed(r) for r in who):
            return {"GRAPH"}
        if self.trusts:
            return {"TRUST" if self.late_at[rank] else ""}
        return {"FAILED" if self.late and any(self._fails_late(r) for r in who) else ""}

    def _fails_late(self, rank: int) -> bool:
        step, told = self.steps[rank], self.told
        nothing_else = not any(r.raised for r in told) and not any(self._graph_changed(r) for r in self.ranks)
        return step is not None and step.fails_late and bool(self.late) and nothing_else

    def _graph(self, rank: int) -> tuple[object, ...] | None:
        step = self.steps[rank]
        return (self.told[rank].fired, step.undefined) if step is not None else None

    def _graph_changed(self, rank: int) -> bool:
        """Whether the graph is not that of this rank's first backward that went well, though it was promised to be."""
        if not self.setup.is_static or self.told[rank].raised:
            return False
        graphs = [w._graph(rank) for w in self.before if w.told[rank].outcome == ""]
        first = next((graph for graph in graphs if graph is not None), None)
        mine = self._graph(rank)
        return first is not None and mine is not None and mine != first

    def _check_late(self) -> None:
        """What came late where the engine had not foretold it, or a second time, is known by then."""
        for earlier in self.before:
            if earlier.outcome == "" and not earlier.is_uneven:
                for one, other in zip(self.told, earlier.told, strict=True):
                    assert not set(one.late) & set(other.late), "a parameter known to come twice left early"
                if self.setup.finds_unused:
                    assert not earlier.late & (self.late - self.agreed), "what is known to be hidden was not expected"

    # -- collectives

    def _check_sent(self, rank: int) -> None:
        """OPEN, the plan's buckets, CLOSE, and what else is due, in that order and nothing more."""
        report = self.told[rank]
        sent = [(tag, about) for tag, about in report.sent if tag != "user"]
        buckets = [about for tag, about in sent if tag == "bucket"]
        late = [about for tag, about in sent if tag == "late"]
        of_opening = report.outcome in ("MODELS", "NESTED", "UNSEEN", "DECLARATIONS")
        agreed = set() if of_opening else self.agreed
        if not self.trusts or not self.late:
            assert sorted(i for about in buckets for i in about) == sorted(agreed), "not the agreed set was sent"
        due = [] if self.trusts else ["OPEN"]
        due += ["bucket"] * len(buckets)
        if not of_opening and not self.trusts:
            due += ["CLOSE"]
        if not self.trusts and self._goes_to_late_round():
            assert sorted(i for about in late for i in about) == sorted(self.late), "not what was late was sent late"
            due += ["late"] * len(late) + ["any failed"]
        if report.outcome not in ("", "TRUST"):
            due += [] if self.trusts else TESTIMONIES
        elif self._learns():
            due += ["order"]
        assert [tag for tag, _ in sent] == due, f"rank {rank} issued {[tag for tag, _ in sent]}, due is {due}"

    def _goes_to_late_round(self) -> bool:
        return bool(self.late) and (self.outcome == "" or any(map(self._fails_late, self.ranks)))

    def _learns(self) -> bool:
        """The first window that touched anything teaches the launch order."""
        if self.setup.order is not None or not (self.trusts or self.touched(0)):
            return False
        return not any(w._learns() for w in self.before if not w.is_uneven and w.outcome == "")

    # -- gradients

    def touched(self, rank: int) -> set[int]:
        """What anybody has a gradient to average for."""
        if self.told[rank].outcome not in ("", "TRUST"):
            return set()
        told = [self.told[rank]] if self.trusts else self.told
        return {i for report in told for i in (*report.fired, *report.carried)}

    def promised(self, rank: int) -> set[int]:
        """What forwards promised, as far as this rank hears of it."""
        if self.told[rank].outcome not in ("", "TRUST") or self.setup.finds_unused or self.setup.is_static:
            return set()
        found: set[int] = set()
        for r in [rank] if self.trusts else self.ranks:
            step = self.steps[r]
            if step is not None and self.told[r].fired:
                for declared in step.declared:
                    found |= set(range(self.setup.num_params)) - declared - step.frozen - step.undefined
        return found

    def _fired(self, rank: int, i: int, *, late: bool | None = None) -> Grad:
        """The sum of what came, or of what came late or not late."""
        report, total = self.told[rank], None
        times = report.fired.count(i)
        on_time = times - report.late.count(i) if i in self.agreed else 0
        for repeat in range(times):
            if late is None or late == (repeat >= on_time):
                total = plus(total, firing(rank, report.place, repeat))
        return total

    def _grad_due(self, rank: int, i: int) -> Grad:
        """The mean of what came and what stood there on all that take part; what stood there if nobody touched it."""
        report = self.told[rank]
        if self.trusts and i not in self.agreed:
            return plus(report.before[i], self._fired(rank, i))
        if not self.trusts and i not in self.touched(rank):
            return report.before[i]
        takes_late = False if self.trusts else None
        total = 0
        for r in self.ranks:
            if not self.told[r].joined:
                total += plus(self.told[r].before[i], self._fired(r, i, late=takes_late)) or 0
        mean, rest = divmod(total, report.divisor)
        assert not rest
        return plus(mean, self._fired(rank, i, late=True)) if self.trusts else mean
