"""Torch's names for a reducer's methods, for what reaches into ``model.reducer``: its hooks, pipelines and trainers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .comm import Collectives
from .comm_hooks import GradBucket, sum_future
from .graphs import GraphHistory


class StockReducer:
    """``Reducer`` sets the attributes."""

    comm: Collectives
    history: GraphHistory
    sync_next: bool  # the next backward synchronises, whatever its forward was told

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """The next backward synchronises, though its forward ran under ``no_sync``.

        Pipeline schedules and trainers call this before the last of several backwards. ``outputs`` is not needed here.
        """
        self.sync_next = True

    def _rebuild_buckets(self) -> bool:
        """Buckets are planned as needed, so there is nothing to do."""
        return False

    def _delay_all_reduce(self) -> None:
        """What a backward left is launched when it is over, also for a static graph."""

    def _run_allreduce_hook(self, bucket: GradBucket) -> Any:
        """A future of the bucket's sum over ranks, in place and undivided."""
        return sum_future(self.comm, bucket.buffer())

    def _ddp_graph_static(self) -> bool:
        """Whether all backwards so far had one graph."""
        return self.history.is_static
