"""One rank somewhere in its program: its state, what it could do next, and what it sends and waits for."""

from __future__ import annotations

import copyreg
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, TypeVar

import torch

from knownddp.graphs import GraphHistory
from knownddp.outcomes import Closing, Fault
from knownddp.plan import BucketPlan, Planner
from knownddp.protocol import Agreement, WindowProtocol
from knownddp.specs import BucketKey, ParamSpec

from .gradients import Grad, Gradients
from .script import Backward, Program, Setup

KEY = BucketKey(torch.float32, torch.device("cpu"))

Event = tuple[str, int]
T = TypeVar("T")


class Issue(NamedTuple):
    """A collective, ``about`` these parameters. ``how`` payloads are combined: "or", "sum" or "max"."""

    tag: str
    size: int
    about: tuple[int, ...]
    how: str
    payload: tuple[int, ...]


class Wait(NamedTuple):
    """A wait for the collective that this rank issued at that position."""

    position: int


class Report(NamedTuple):
    """One window as a rank saw it; or a forward's judgement, which has ``place`` and ``missing`` alone."""

    place: int  # of the step in the program
    is_window: bool
    outcome: str = ""  # "" if it went well
    told: tuple[int, ...] = ()  # after an error: for each rank whether it said that it failed
    missing: tuple[int, ...] = ()
    before: tuple[Grad, ...] = ()
    after: tuple[Grad, ...] = ()
    fired: tuple[int, ...] = ()
    expected: tuple[int, ...] = ()
    carried: tuple[int, ...] = ()
    order: tuple[int, ...] = ()  # the launch order that was learnt by its end
    late: tuple[int, ...] = ()  # what fired here after its bucket had left, once a time
    disputed: tuple[int, ...] = ()
    early: int = 0  # in program order: buckets that left before the backward was over
    divisor: int = 1
    joined: bool = False
    silent: bool = False
    in_join: bool = False
    raised: bool = False
    sent: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Role:
    """What is not state: the setup, and whose program this is."""

    setup: Setup
    program: Program
    world: int
    number: int


def some(flags: Sequence[int]) -> tuple[int, ...]:
    """Where flags are set."""
    return tuple(i for i, flag in enumerate(flags) if flag)


def flags(which: Collection[int], of: int) -> bytes:
    """One byte a parameter."""
    return bytes(i in which for i in range(of))


def new_machine(setup: Setup) -> WindowProtocol:
    """The shipped machine of a rank that has learnt what the setup says."""
    n = setup.num_params
    planner = Planner([ParamSpec("p", (b // 4,), (1,), b // 4, b, KEY) for b in setup.nbytes], setup.limits)
    if setup.order is not None:
        planner.learn([setup.order.index(i) for i in range(n)], ())
    planner.hold(setup.held)
    return WindowProtocol(planner, n, setup.agreement, detects_unused=setup.finds_unused)


class Numbered(Generic[T]):
    """Values that states have in common, and refer to by number."""

    def __init__(self) -> None:
        self._numbers: dict[T, int] = {}
        self._values: list[T] = []

    def number(self, value: T) -> int:
        number = self._numbers.setdefault(value, len(self._values))
        if number == len(self._values):
            self._values.append(value)
        return number

    def value(self, number: int) -> T:
        return self._values[number]


PLANS: Final = Numbered[BucketPlan]()
REPORTS: Final = Numbered[Report]()


def _plan(number: int) -> BucketPlan:
    return PLANS.value(number)


copyreg.pickle(BucketPlan, lambda plan: (_plan, (PLANS.number(plan),)))


class State:
    """A rank. Everything but ``role`` and ``actions`` is its state, and pickled as such."""

    role: Role
    actions: list[Issue | Wait]  # done since last taken

    def __init__(self, role: Role) -> None:
        self.role, self.actions = role, []
        self.protocol = new_machine(role.setup)
        self.history = GraphHistory(is_promised=role.setup.is_static)
        self.gradients = Gradients(role.setup.num_params)
        self.touched_locally: tuple[int, ...] = ()
        self.place = 0  # of the next step, or the running one
        self.stage = "between"  # or "backward", or which answer this rank waits for
        self.issued = self.windows = 0
        self.awaited: tuple[int, ...] = ()  # positions whose results it asks for
        self._reports: tuple[int, ...] = ()
        self.is_in_join = role.setup.joins
        self.owes_window = False
        self.set_aside: tuple[list[Grad], tuple[int, ...]] | None = None  # when this rank joined
        self.divisor = role.world
        self.clear()

    def clear(self) -> None:
        """No window is open."""
        self.left: tuple[int, ...] = ()  # gradients to come
        self.fired: tuple[int, ...] = ()
        self.arrivals: tuple[int, ...] = ()  # what hooks wrote down and nobody looked at yet
        self.patience = 1
        self.newest = -1  # whose gradient came last, if other hooks may follow on it
        self.is_open_known = True
        self.opening_fault: Fault | None = None
        self.plan: BucketPlan | None = None
        self.at: tuple[int, ...] = ()  # positions of the window's buckets
        self.sent: tuple[tuple[str, tuple[int, ...]], ...] = ()
        self.facts: dict[str, Any] = {}  # for the report
        self.has_graph = self.is_failed = False
        self.late: tuple[int, ...] = ()
        self.closing: Closing | None = None
        self.own_close = b""  # under "trust"
        self.on_time: tuple[tuple[int, ...], ...] = ()  # sums of buckets, when a late round follows
        self.in_late_round: tuple[tuple[int, ...], ...] | None = None
        self.fault = ""
        self.follows = ""  # in a join context: what follows the window, if not the next step

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("role", "actions")}

    @property
    def setup(self) -> Setup:
        return self.role.setup

    @property
    def step(self) -> Backward:
        """The running backward."""
        step = self.role.program[self.place]
        assert isinstance(step, Backward)
        return step

    @property
    def trusts(self) -> bool:
        """Whether nobody asks others: one's own message is taken for everybody's."""
        return self.protocol.agreement is Agreement.TRUST

    # -- what may happen

    @property
    def is_over(self) -> bool:
        return self.stage == "between" and self.place == len(self.role.program)

    def choices(self) -> tuple[Event, ...]:
        """What this rank may do whatever the others do."""
        if self.stage == "between":
            return () if self.is_over else (("go", 0),)
        if self.stage != "backward":
            return ()
        gradients = self.left[:1] if self.setup.in_program_order else sorted(set(self.left))
        found = [("ready", i) for i in gradients]
        if not self.left:
            found.append(("end", 0))
        if self.step.may_raise:
            found.append(("raise", 0))
        return tuple(found)

    def choices_when_answered(self) -> tuple[Event, ...]:
        """What else, once all ranks have issued what it awaits."""
        if self.stage == "backward":  # a hook looks whether OPEN has come back: at any time
            return () if self.is_open_known or self.setup.in_program_order else (("look", 0),)
        return () if self.stage == "between" else (("answer", 0),)

    def oldest(self) -> int:
        """The oldest position whose result this rank may still ask for."""
        return min((self.issued, *self.awaited, *self.at))

    # -- sending and waiting

    def issue(self, tag: str, size: int, payload: Sequence[int], how: str, about: tuple[int, ...] = ()) -> int:
        """Start a collective. Returns its position in what this rank issues."""
        self.actions.append(Issue(tag, size, about, how, tuple(payload)))
        self.sent = (*self.sent, (tag, about))
        self.issued += 1
        return self.issued - 1

    def wait(self, stage: str, *positions: int) -> None:
        """Nothing until these have come back."""
        self.stage, self.awaited = stage, positions

    def has_waited(self) -> None:
        """They have."""
        self.actions += [Wait(position) for position in self.awaited]
        self.awaited = ()

    def report(self, outcome: str, *, told: tuple[int, ...] = ()) -> None:
        """The window is over."""
        planner = self.protocol.planner
        has_raised = self.facts["raised"]  # then it makes no difference how far it had come
        fired, late = ((), ()) if has_raised else (tuple(sorted(self.fired)), tuple(sorted(self.late)))
        self.add_report(
            True,
            outcome=outcome,
            told=told,
            after=tuple(self.gradients.grads),
            fired=fired,
            order=tuple(planner.order) if planner.has_learnt else (),
            late=late,
            sent=self.sent,
            **self.facts,
        )

    @property
    def reports(self) -> tuple[Report, ...]:
        """What was told so far."""
        return tuple(map(REPORTS.value, self._reports))

    def add_report(self, is_window: bool, **told: Any) -> None:
        """Tell how a window or a judgement of the running step ended."""
        self._reports = (*self._reports, REPORTS.number(Report(self.place, is_window, **told)))
