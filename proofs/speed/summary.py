"""From samples of ranks to rows of a table, as plain values that JSON can hold."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .contenders import BY_NAME
from .task import Task
from .workloads import Workload

REFERENCES = ("ddp", "ddp-runs-all")  # ratios are to plain DDP, which can only run all layers


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and the least."""
    if len(values) < 2:
        return dict.fromkeys(("min", "q1", "median", "q3"), values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"min": min(values), "q1": low, "median": middle, "q3": high}


def _series(of_ranks: Sequence[Mapping[str, Any]], name: str, key: str) -> list[tuple[float, ...]]:
    """A tuple a round, with one value a rank."""
    return list(zip(*([sample[key] for sample in one["samples"][name]] for one in of_ranks), strict=True))


def summarize(
    task: Task,
    workload: Workload,
    of_ranks: Sequence[Mapping[str, Any]],
    memory: Mapping[str, Mapping[str, int]],
    bytes_per_second: float | None,
) -> dict[str, Any]:
    """One workload on one network. A step is over when it is over on all ranks; CPU time is the mean of the ranks."""
    wall = {name: [max(one) for one in _series(of_ranks, name, "wall")] for name in of_ranks[0]["samples"]}
    reference = next((name for name in REFERENCES if name in wall), None)
    rows = []
    for name, walls in wall.items():
        cpu = [statistics.fmean(one) for one in _series(of_ranks, name, "cpu")]
        faults = [statistics.fmean(one) for one in _series(of_ranks, name, "faults")]
        forward = [max(one) for one in _series(of_ranks, name, "forward")]
        row: dict[str, Any] = {
            "contender": name,
            "title": BY_NAME[name].title,
            "wall_s": spread(walls),
            "cpu_s": spread(cpu),
            "forward_s": spread(forward),
            "page_faults": spread(faults),
            "wire_bytes": max(one["wire_bytes"][name] for one in of_ranks),
            **memory.get(name, {}),
        }
        if reference is not None:
            row["ratio"] = spread([ours / theirs for ours, theirs in zip(walls, wall[reference], strict=True)])
        rows.append(row)
    ring = 2 * (task.world_size - 1) / task.world_size
    found: dict[str, Any] = {
        "workload": workload.name,
        "title": workload.title,
        "drop": workload.drop,
        "fixed": workload.is_fixed,
        "param_bytes": workload.param_bytes,
        "used_bytes": workload.used_bytes,
        "rounds": task.rounds * workload.repeats,
        "reference": reference,
        "rows": rows,
        "left_out": [
            {"contender": name, "title": BY_NAME[name].title, "reason": reason}
            for name in task.contenders
            if (reason := BY_NAME[name].refusal(workload)) is not None
        ],
        "apart": {name: max(one["apart"][name] for one in of_ranks) for name in of_ranks[0]["apart"]},
    }
    if bytes_per_second is not None and "plain" in wall:
        plain = next(row for row in rows if row["contender"] == "plain")
        compute, forward_s = plain["wall_s"]["median"], plain["forward_s"]["median"]
        wire = ring * workload.used_bytes / bytes_per_second
        found["floor_s"] = {
            "compute": compute,
            "wire": wire,
            "in_turn": compute + wire,
            "overlapped": forward_s + max(compute - forward_s, wire),
        }
    return found
