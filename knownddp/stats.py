"""Numbers about what the reducer did, for logs and tests; nothing in the library branches on them."""

from __future__ import annotations

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
