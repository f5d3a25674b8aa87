"""What the ranks of one network are to measure, written to a file for them."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from .workloads import Workload, workloads

FILE = "task.json"


@dataclass(frozen=True)
class Task:
    """One start of ranks.

    Attributes:
        interface: whose counter tells the bytes sent.
        ranks_behind: how many ranks send through one interface.
    """

    workloads: tuple[str, ...]
    contenders: tuple[str, ...]
    drops: tuple[float, ...]
    rounds: int
    quick: bool
    device: str
    interface: str
    ranks_behind: int
    world_size: int = 2
    shows_progress: bool = True

    def chosen_workloads(self) -> list[Workload]:
        return [one for one in workloads(quick=self.quick, drops=self.drops) if one.name in self.workloads]

    def write(self, folder: Path) -> None:
        (folder / FILE).write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Task:
        return cls(**json.loads((folder / FILE).read_text()))
