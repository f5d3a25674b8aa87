"""Numbers about what the reducer did, for logs and tests; nothing in the library branches on them."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class ReducerStatistics:
    """What the reducer has done so far on this rank. Bytes are of gradients, before any ring factor.

    Attributes:
        phase: where the running window stands; "IDLE" between windows.
        backwards_finished: synchronising backwards that ended without an error.
        buckets_launched: all-reduces of gradients, late rounds included.
        buckets_planned: buckets in the plan of the last agreed set.
        bytes_reduced: handed to all-reduce.
        bytes_skipped: of trainable parameters that no rank needed, and which were not sent.
        bytes_disputed: sent although some rank had declared them unused.
        late_rounds: rounds for gradients that came unexpectedly or more than once.
        plans_cached: plans remembered at the moment.
        unforeseen: parameters that detection does not see in advance (reentrant checkpoints).
    """

    phase: str
    backwards_finished: int
    buckets_launched: int
    buckets_planned: int
    bytes_reduced: int
    bytes_skipped: int
    bytes_disputed: int
    late_rounds: int
    plans_cached: int
    unforeseen: tuple[str, ...]


@dataclass(slots=True)
class Counters:
    """Running totals, kept by the reducer; meanings as in ``ReducerStatistics``."""

    backwards_finished: int = 0
    buckets_launched: int = 0
    bytes_reduced: int = 0
    bytes_skipped: int = 0
    bytes_disputed: int = 0
    late_rounds: int = 0

    def snapshot(
        self, *, phase: str, buckets_planned: int, plans_cached: int, unforeseen: tuple[str, ...]
    ) -> ReducerStatistics:
        """The totals as they stand, with what the caller knows beside them."""
        return ReducerStatistics(
            **asdict(self),
            phase=phase,
            buckets_planned=buckets_planned,
            plans_cached=plans_cached,
            unforeseen=unforeseen,
        )


@dataclass(slots=True)
class Times:
    """When the parts of the running step came, in nanoseconds; 0: not yet."""

    forward_begun: int = 0
    backward_begun: int = 0
    first_launch: int = 0
    backward_over: int = 0
    closed: int = 0

    def mark(self, name: str) -> None:
        """Now. What was marked already keeps its time."""
        if not getattr(self, name):
            setattr(self, name, time.perf_counter_ns())

    def restart(self) -> None:
        """A step begins."""
        self.backward_begun = self.first_launch = self.backward_over = self.closed = 0
        self.forward_begun = time.perf_counter_ns()

    def durations(self) -> dict[str, int]:
        """By the names of DistributedDataParallel's logging data. At least 1 where something took place."""
        launched = self.first_launch or self.closed
        return {
            "forward_compute_time": max(1, self.backward_begun - self.forward_begun),
            "backward_compute_time": max(1, self.backward_over - self.backward_begun),
            "backward_comm_time": max(1, self.closed - launched),
            "backward_compute_comm_overlap_time": max(0, self.backward_over - launched),
        }

    def moments(self) -> dict[str, int]:
        """The times themselves, likewise."""
        return {
            "forward_compute_time_start": self.forward_begun,
            "backward_compute_time_start": self.backward_begun,
            "backward_comm_time_start": self.first_launch or self.closed,
            "backward_compute_time_end": self.backward_over,
            "backward_comm_time_end": self.closed,
        }
