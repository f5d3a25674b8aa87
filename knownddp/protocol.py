"""One rank's side of one backward, as a pure machine: events in, decisions out. No tensors, no process group, no clock.

[Note: the window] A synchronising backward is one window: **open, reduce, close**. Every rank sends one OPEN message as
its backward begins, all-reduces the agreed buckets in plan order, and sends one CLOSE message when its backward is
over. A forward sends nothing. Messages have one fixed size and are combined by bitwise OR, so ranks at different
places still meet in a message, and every rank learns the same from it.

[Note: launch order] Collectives of different ranks pair up by their order alone. So bucket k is launched when it is
full, the agreed set is known, and every bucket before k was launched.

[Note: guess] Until OPEN is back gradients are counted as if all ranks expected what this one does; mostly they do. Once
the first bucket is full, every few gradients are an occasion to look whether OPEN is back.

[Note: settled] A gradient may still be changed by other hooks when it is counted (``is_over=False``). Its bucket then
stays, and goes with the next gradient, or at the end. (Of several devices' threads, whichever has the next one.)

[Note: late] A gradient for a parameter outside the agreed set, or a second one after its bucket left, is late. CLOSE
tells every rank, and one more round, which all know to be due, reduces the late ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from enum import Enum, auto
from typing import Final

from .errors import InternalError
from .messages import (
    CARRIED,
    DECLARED,
    EXPECTED,
    HEADER_BYTES,
    IS_AGREED,
    IS_DISPUTED,
    IS_LATE,
    IS_TOUCHED,
    IS_UNEVEN,
    IS_UNMET,
    LACKING,
    LATE,
    NEEDED,
    PROMISED,
    TOUCHED,
    Flag,
    flags_of,
    indices_of,
)
from .outcomes import NONE, Closing, Fault, Opening
from .plan import NOT_PLACED, BucketPlan, Planner


class Agreement(Enum):
    """What ranks do about declarations that differ."""

    UNION = "union"  # a parameter is skipped when every rank declared it
    SAME = "same"  # differing declarations are an error on every rank, before anything is sent
    TRUST = "trust"  # nobody asks: a rank's own messages are taken for everybody's, and nothing is late


class Phase(Enum):
    """Where the current window stands on this rank."""

    IDLE = auto()  # between windows
    OPENING = auto()  # the backward has begun; OPEN is sent, the agreed set is not known yet
    REDUCING = auto()  # buckets are filling and in flight
    CLOSING = auto()  # the backward is over, everything is launched, CLOSE is sent
    SETTLING = auto()  # CLOSE came back: gradients are handed back, the late round and the order round run
    BROKEN = auto()  # a collective failed: ranks may be out of step, nothing leads out


LOOK_EVERY: Final = 8  # gradients: looking costs as much as ten that are only written down
ENDLESS: Final = 2**62  # more gradients than ever come

NEXT: Final = {
    Phase.IDLE: {Phase.OPENING},
    Phase.OPENING: {Phase.REDUCING, Phase.IDLE},  # IDLE: the opening itself was an error, on every rank
    Phase.REDUCING: {Phase.CLOSING},
    Phase.CLOSING: {Phase.SETTLING},
    Phase.SETTLING: {Phase.IDLE},
    Phase.BROKEN: set(),
}


class WindowProtocol:
    """The machine. Call ``begin``, ``opened``, ``ready``s, ``count``, ``end``, ``close``, ``closed``, ``settled``.

    ``ready`` may come before ``opened``; see [Note: guess].
    """

    def __init__(self, planner: Planner, num_params: int, agreement: Agreement, *, detects_unused: bool) -> None:
        self.planner = planner
        self.phase = Phase.IDLE
        self.window = 0
        self.agreement = agreement
        # With detection: parameters that the engine does not foretell, such as those inside reentrant checkpoints.
        self.unforeseen: set[int] = set()
        self.detects_unused = detects_unused
        # Other collectives may come between launches, so that these must come at the same gradient on all ranks. They
        # cannot where ranks expect different ones: everything is then launched at the end.
        self.in_program_order = False
        self._num_params = num_params
        self._ones = int.from_bytes(b"\1" * num_params, "little")
        self._no_plan = BucketPlan(num_params, ())
        self.arrived = bytearray(num_params)  # a byte for each parameter, 1 once a gradient came in the running window
        self._left: list[int] = []  # how many gradients each bucket waits for
        self._since_forward = 0  # the CLOSE lanes of windows that went well since the last forward, ORed
        self._reset()

    def _reset(self) -> None:
        n = self._num_params
        self.arrived[:] = bytes(n)
        self.plan = self._no_plan
        self.agreed = bytes(n)
        self._expected = bytes(n)
        self._carried: Collection[int] = ()
        self._repeated: list[int] = []
        self._late: set[int] = set()
        self._arrivals: list[int] = []
        self._told = 0  # the CLOSE lanes of this window, ORed
        self._next = 0
        self._waits_for_end = False
        self._unsettled = NOT_PLACED  # the parameter whose gradient came last, if that is not over: [Note: settled]
        self.wants_opening = False  # a bucket may go if the agreed set is what this rank takes it for

    def _move(self, source: Phase, target: Phase) -> None:
        if self.phase is not source or target not in NEXT[source]:
            raise InternalError(f"a window cannot go from {self.phase.name} to {target.name} here")
        self.phase = target

    # -- messages

    def _message(self, flags: int, signature: int, lane: int) -> bytes:
        window = self.window & 0xFF
        head = bytes((flags, window, 0xFF - window))
        both = signature.to_bytes(4, "little") + (0xFFFFFFFF - signature).to_bytes(4, "little")
        return head + both + lane.to_bytes(self._num_params, "little")

    @staticmethod
    def _contradicts(message: bytes, first: int, size: int) -> bool:
        """Whether ranks sent different values for a field that stands there together with its complement."""
        value, complement = message[first : first + size], message[first + size : first + 2 * size]
        return any(a & b for a, b in zip(value, complement, strict=True))

    # -- events

    def begin(
        self,
        expected: bytes,
        carried: Collection[int] = (),
        declared: Collection[int] = (),
        *,
        signature: int = 0,
        nested: bool = False,
        guessed: bool = False,
        silent: bool = False,
    ) -> bytes:
        """A synchronising backward begins.

        Args:
            expected: a byte for each parameter: 1 if this backward should produce its gradient on this rank.
            carried: parameters that earlier unsynchronised backwards touched and that have a gradient to average.
            declared: what every forward of this backward declared unused, for comparison between ranks.
            signature: 32 bits that all ranks must share (a hash of dtypes, shapes and the like).
            nested: this backward began where its end cannot be seen; every rank is to raise.
            guessed: this backward reached a parameter without passing an output; it is an error if others know better.
            silent: this rank has no backward and only takes part in those of others: of all this it tells ``carried``.

        Returns:
            The OPEN message, to be combined by bitwise OR with that of all ranks; under ``TRUST`` it stands for all.
        """
        self._move(Phase.IDLE, Phase.OPENING)
        self._reset()
        self._expected, self._carried = expected, carried
        said = int.from_bytes(flags_of(declared, self._num_params), "little")
        expects = int.from_bytes(expected, "little")
        lane = expects * EXPECTED | (self._ones ^ expects) * LACKING | said * DECLARED | (self._ones ^ said) * NEEDED
        carries = int.from_bytes(flags_of(carried, self._num_params), "little")
        self._start((expects | carries).to_bytes(self._num_params, "little"))
        self.wants_opening = bool(self._filled())
        if silent:
            return self._message(Flag.OPEN, signature, carries * CARRIED)
        lane |= carries * CARRIED
        how = Flag.GUESSED if guessed else Flag.SEEN
        return self._message(Flag.OPEN | how | (Flag.NESTED if nested else 0), signature, lane)

    def opened(self, message: bytes) -> Opening:
        """The OPEN of all ranks is known. A fault ends the window here, on every rank."""
        fault, disputed = self._fault_of_open(message)
        self.wants_opening = False
        if fault is not None:
            self._move(Phase.OPENING, Phase.IDLE)
            self.window += 1
            return Opening(fault, disputed=disputed)
        self._move(Phase.OPENING, Phase.REDUCING)
        lane = message[HEADER_BYTES:]
        self._waits_for_end = self.in_program_order and any(lane.translate(IS_UNEVEN))
        agreed = lane.translate(IS_AGREED)
        if agreed != self.agreed:
            self._start_again(agreed)
        launch = self._filled()
        self._next = launch.stop
        return Opening(None, launch, disputed)

    def _fault_of_open(self, message: bytes) -> tuple[Fault | None, tuple[int, ...]]:
        disputed = indices_of(message[HEADER_BYTES:].translate(IS_DISPUTED))
        if message[0] & Flag.CLOSE or self._contradicts(message, 1, 1):
            return Fault.CROSSED, disputed
        if self._contradicts(message, 3, 4):
            return Fault.MODELS, disputed
        if message[0] & Flag.NESTED:
            return Fault.NESTED, disputed
        if message[0] & Flag.SEEN and message[0] & Flag.GUESSED:
            return Fault.UNSEEN, disputed
        if disputed and self.agreement is Agreement.SAME:
            return Fault.DECLARATIONS, disputed
        return None, disputed

    def _start(self, agreed: bytes) -> None:
        """Plan a set, and count what this rank will not contribute to: [Note: guess]."""
        self.agreed = agreed
        plan = self.plan = self.planner.plan(agreed)
        self._left = list(plan.sizes)
        if self._expected != agreed:
            missing = Counter(plan.bucket_of[i] for i in plan.members if not self._expected[i])
            self._left = [size - missing[bucket] for bucket, size in enumerate(plan.sizes)]

    def _start_again(self, agreed: bytes) -> None:
        """The set is not the one that was guessed: count anew what has come."""
        came, repeated, arrivals = indices_of(bytes(self.arrived)), self._repeated, self._arrivals
        self.arrived[:] = bytes(self._num_params)
        self._repeated, self._late, self._arrivals = [], set(), []
        self._start(agreed)
        self._count((*came, *repeated))
        self._arrivals = arrivals

    def ready(self, *param_indices: int, is_over: bool = True) -> range:
        """Defined gradients were accumulated, in this order. Returns the buckets that may go now, in plan order.

        ``is_over``: nothing else happens to the last of them.
        """
        self.count(param_indices)
        if not is_over:
            self._unsettled = param_indices[-1]
        launch = self._filled()
        if self.phase is Phase.OPENING:
            self.wants_opening = bool(launch)
            return NONE
        self._next = launch.stop
        return launch

    def count(self, param_indices: Sequence[int]) -> None:
        """Gradients were accumulated, in this order, and are settled. At the end of a backward that is all: what may go
        goes with the rest.
        """
        if self.phase is not Phase.REDUCING and self.phase is not Phase.OPENING:
            raise InternalError(f"a gradient came in phase {self.phase.name}")
        self._count(param_indices)
        self._unsettled = NOT_PLACED

    @property
    def patience(self) -> int:
        """How many gradients have to come, at the least, before it matters that they did.

        As many as the next bucket waits for, and one more, after which the last of them is settled.
        """
        if self.wants_opening:
            return LOOK_EVERY
        if self._next == len(self.plan.buckets) or self.plan.buckets[self._next].is_held or self._waits_for_end:
            return ENDLESS
        return self._left[self._next] + 1

    def _count(self, param_indices: Sequence[int]) -> None:
        """Note gradients, in the order they came."""
        arrived, left, first = self.arrived, self._left, self._next
        bucket_of, expected = self.plan.bucket_of, self._expected
        if not self.planner.has_learnt:
            self._arrivals += param_indices
        for i in param_indices:
            bucket, is_first = bucket_of[i], not arrived[i]
            arrived[i] = 1
            if not is_first:
                self._repeated.append(i)
            if bucket < first:  # [Note: late]; NOT_PLACED is smaller than any position
                self._late.add(i)
            elif is_first and expected[i]:  # else it counted as ready from the start
                left[bucket] -= 1

    def _filled(self) -> range:
        """The buckets that may go: [Note: launch order]."""
        first, buckets, left = self._next, self.plan.buckets, self._left
        position, end = first, len(buckets) if not self._waits_for_end else first
        if self._unsettled != NOT_PLACED and self.plan.bucket_of[self._unsettled] >= first:
            end = min(end, self.plan.bucket_of[self._unsettled])  # [Note: settled]
        while position < end and not left[position] and not buckets[position].is_held:
            position += 1
        return range(first, position)

    @property
    def has_fired(self) -> bool:
        """Whether any gradient came on this rank."""
        return any(self.arrived)

    def fired(self) -> tuple[bytes, tuple[int, ...]]:
        """Which gradients came on this rank: a byte for each parameter, and those that came again, once a time."""
        return bytes(self.arrived), tuple(sorted(self._repeated))

    def late(self) -> tuple[int, ...]:
        """Whose gradients were late on this rank."""
        return tuple(sorted(self._late))

    def end(self) -> range:
        """The backward is over. Returns the buckets still to launch, in plan order, whether full or not: peers wait."""
        self._move(Phase.REDUCING, Phase.CLOSING)
        rest = range(self._next, len(self.plan.buckets))
        self._next = len(self.plan.buckets)
        return rest

    def close(self, promised: bytes, *, failed: bool = False, changed: bool = False) -> bytes:
        """Everything is launched. Returns the CLOSE message, to be combined as OPEN is.

        Args:
            promised: a byte for each parameter: 1 if a forward whose output took part promised its gradient.
            failed: this rank's backward raised.
            changed: this rank's graph is not the one it was promised to be.
        """
        if self.phase is not Phase.CLOSING:
            raise InternalError(f"CLOSE cannot be made in phase {self.phase.name}")
        lane = int.from_bytes(promised, "little") * PROMISED
        lane |= int.from_bytes(self.arrived, "little") * TOUCHED
        for bit, some in ((TOUCHED, self._carried), (LATE, self._late)):
            lane |= int.from_bytes(flags_of(some, self._num_params), "little") * bit
        what = Flag.CLOSE | (Flag.FAILED if failed else 0) | (Flag.CHANGED if changed else 0)
        return self._message(what, 0, lane)

    def closed(self, message: bytes) -> Closing:
        """The CLOSE of all ranks is known."""
        self._move(Phase.CLOSING, Phase.SETTLING)
        if message[0] & Flag.OPEN or self._contradicts(message, 1, 1):
            return Closing(Fault.CROSSED)
        if message[0] & Flag.FAILED:
            return Closing(Fault.FAILED)
        if message[0] & Flag.CHANGED:
            return Closing(Fault.GRAPH)
        lane = message[HEADER_BYTES:]
        self._told = int.from_bytes(lane, "little")
        touched, late_flags = lane.translate(IS_TOUCHED), lane.translate(IS_LATE)
        late = indices_of(late_flags)
        order_due = not self.planner.has_learnt
        if self.agreement is Agreement.TRUST:  # what others touched is not known: all that was agreed
            return Closing(Fault.TRUST if late else None, self.agreed, late, None, order_due)
        late_plan = self.planner.plan(late_flags) if late else None
        if late:
            if self.detects_unused:
                self.unforeseen.update(late)
            self.planner.hold(late if self.detects_unused else [i for i in late if self.agreed[i]])
        return Closing(None, touched, late, late_plan, order_due and any(touched))

    def settled(self, *, failed: bool = False) -> None:
        """Gradients are handed back; the window is over. ``failed``: in an error, so nothing is owed for it."""
        self._move(Phase.SETTLING, Phase.IDLE)
        self.window += 1
        if not failed:
            self._since_forward |= self._told

    def break_off(self) -> None:
        """A collective failed. No window can follow."""
        self.phase = Phase.BROKEN

    # -- between windows

    def unmet(self) -> tuple[int, ...]:
        """Parameters promised by a forward since ``forward_begins`` and touched by nobody since then."""
        return indices_of(self._since_forward.to_bytes(self._num_params, "little").translate(IS_UNMET))

    def forward_begins(self) -> None:
        """A synchronising forward outside of a backward: what windows before it owed is settled."""
        self._since_forward = 0

    # -- the order round

    def order_message(self) -> list[int]:
        """2n integers to combine by MAX: where each parameter stood in this rank's ready order (-1: nowhere), and how
        often it fired."""
        n = self._num_params
        positions, counts = [-1] * n, [0] * n
        for position, i in enumerate(self._arrivals):
            counts[i] += 1
            positions[i] = position
        return positions + counts

    def learn(self, combined: Sequence[int]) -> None:
        """Take over the order of all ranks."""
        n = self._num_params
        self.planner.learn(combined[:n], [i for i in range(n) if combined[n + i] > 1])
