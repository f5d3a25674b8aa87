"""Markdown from what was measured: ``python -m proofs.speed.table FILE``, where FILE was written by ``--json``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def _lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return ["| " + " | ".join(cells) + " |" for cells in (header, rule, *rows)]


def _of(spread: Mapping[str, float], scale: float, digits: int) -> str:
    low, middle, high = (f"{scale * spread[key]:.{digits}f}" for key in ("q1", "median", "q3"))
    return f"{middle} ({low} to {high})"


def _mb(nbytes: float | None) -> str:
    return "" if nbytes is None else f"{nbytes / 1e6:.2f}" if nbytes < 1e6 else f"{nbytes / 1e6:.1f}"


def _run(run: Mapping[str, Any], net: Mapping[str, Any]) -> list[str]:
    lines = [
        f"### {run['title']}; {net['network']}",
        "",
        f"{run['param_bytes'] / 1e6:.1f} MB of parameters, {run['used_bytes'] / 1e6:.1f} MB used in a step; "
        f"{net['world_size']} ranks, {run['rounds']} rounds.",
        "",
    ]
    has_memory = any("peak_bytes" in row for row in run["rows"])
    header = ["", "step ms", "to DDP", "CPU ms", "page faults", "MB sent"] + ["MB at peak", "MB kept"] * has_memory
    rows = []
    for row in run["rows"]:
        cells = [row["title"], _of(row["wall_s"], 1e3, 1), _of(row["ratio"], 1, 2) if "ratio" in row else ""]
        cells += [f"{1e3 * row['cpu_s']['median']:.1f}", f"{row['page_faults']['median']:.0f}", _mb(row["wire_bytes"])]
        if has_memory:
            cells += [_mb(row.get("peak_bytes")), _mb(row.get("kept_bytes"))]
        rows.append(cells)
    lines += _lines(header, rows)
    if "floor_s" in run:
        ms = {key: 1e3 * value for key, value in run["floor_s"].items()}
        lines += [
            "",
            f"Floor: {ms['compute']:.1f} ms of forward and backward, then {ms['wire']:.1f} ms for the used bytes at "
            f"the link's rate, {ms['in_turn']:.1f} ms in turn; {ms['overlapped']:.1f} ms if the link is busy all "
            "through the backward.",
        ]
    if run["left_out"]:
        lines += ["", "Left out:", ""]
        lines += [f"- {one['title']}: {one['reason']}." for one in run["left_out"]]
    return [*lines, ""]


def markdown(result: Mapping[str, Any]) -> str:
    """The whole page."""
    machine = result["machine"]
    lines = [
        f"{machine['when']}: {machine['cores']} cores of {machine['processor']}"
        + (f", {machine['gpu']}" if machine["gpu"] else "")
        + f"; torch {machine['torch']}, Python {machine['python']}, one thread a rank; load "
        f"{machine['load']:.1f} before and {machine.get('load_after', machine['load']):.1f} after.",
        "",
        "Medians, with quartiles in brackets. `to DDP` is the median of ratios of steps of one round. "
        "`MB sent` is what left the interface for a rank. Memory is without parameters, activations included, at the "
        "peak of a step and when its backward is over.",
        "",
    ]
    if machine["gpu"]:
        lines += ["On GPUs `MB sent` counts what went through the interface, which NCCL need not use.", ""]
    if result.get("quick"):
        lines += ["**A quick run of tiny models: its times say nothing.**", ""]
    for net in result["networks"]:
        for run in net["runs"]:
            lines += _run(run, net)
    if result.get("host_time"):
        lines += ["### Host time a parameter, world size 1", ""]
        rows = [[row["title"], _of(row["us_a_parameter"], 1, 2)] for row in result["host_time"]]
        lines += _lines(["", "us a parameter"], rows)
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m proofs.speed.table", description=__doc__)
    parser.add_argument("file", type=Path, help="what --json kept")
    print(markdown(json.loads(parser.parse_args().file.read_text())))
