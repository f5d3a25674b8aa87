"""Collectives for one process: every peer is taken to do the same as this rank, and everything is recorded."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from torch import Tensor

from knownddp.works import DONE, Combination, Work


class RecordingCollectives:
    """Stands in for ``knownddp.comm.Collectives``. ``log`` holds (name, bytes) of each collective, in launch order."""

    follows_program_order = False
    backend = "gloo"

    def __init__(self, world_size: int, rank: int = 0) -> None:
        self.world_size = world_size
        self.rank = rank
        self.log: list[tuple[str, int]] = []

    def backend_for(self, device_type: str) -> str:
        return self.backend

    def _record(self, name: str, tensor: Tensor) -> Work:
        self.log.append((name, tensor.numel() * tensor.element_size()))
        return DONE

    def room_to_swap(self, tensor: Tensor) -> Tensor | None:
        return None

    def all_reduce_sum(self, tensor: Tensor, room: Tensor | None = None) -> Work:
        tensor.mul_(self.world_size)  # every peer sent the same
        return self._record("all_reduce_sum", tensor)

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> Work:
        return self._record("broadcast", tensor)

    def combine_or(self, message: bytes) -> Combination:
        self.log.append(("combine_or", len(message)))
        return Combination(DONE, lambda: message)

    def combine_max(self, message: Tensor) -> Work:
        return self._record("combine_max", message)

    def gather_steps(self, mine: object) -> Generator[Work, None, list[Any]]:
        self.log.append(("gather", 0))
        yield DONE
        return [mine] * self.world_size

    def gather_objects(self, mine: object) -> list[Any]:
        self.log.append(("gather", 0))
        return [mine] * self.world_size

    def retire(self) -> None:
        self.log.append(("retire", 0))

    def bytes_of(self, name: str) -> list[int]:
        """Sizes of the collectives of that name."""
        return [nbytes for kind, nbytes in self.log if kind == name]
