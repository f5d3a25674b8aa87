"""Pictures of what was measured: step time and bytes against the share of dropped layers, and both on one page.

``python -m proofs.speed.plots FILE DIR``, where FILE was written by ``--json``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

# Those of one family look alike; what is compared with them is grey.
STYLES: Mapping[str, Mapping[str, Any]] = {
    "plain": {"color": "0.6", "linestyle": ":"},
    "ddp-runs-all": {"color": "0.3", "linestyle": "-"},
    "ddp-find": {"color": "tab:red", "linestyle": "-"},
    "times-zero": {"color": "tab:brown", "linestyle": "--"},
    "zero-function": {"color": "tab:orange", "linestyle": "--"},
    "replicate": {"color": "tab:purple", "linestyle": "-."},
    "known": {"color": "tab:blue", "linestyle": "-"},
    "known-find": {"color": "tab:cyan", "linestyle": "-"},
    "known-trust": {"color": "tab:green", "linestyle": "--"},
    "known-shared": {"color": "tab:olive", "linestyle": "--"},
}
ALSO = {"ddp": ("ddp-runs-all", "times-zero", "zero-function")}  # which are the same where nothing is dropped
ON_PAGE = ("ddp-runs-all", "times-zero", "zero-function", "ddp-find", "replicate", "known", "known-find")
SENDS_NOTHING = "plain"

Panel = Callable[[Axes, Mapping[str, Any], Sequence[str]], None]


def _points(net: Mapping[str, Any], value: Callable[[Mapping[str, Any]], Any]) -> dict[str, dict[float, Any]]:
    """By contender: the value at each share of dropped layers."""
    found: dict[str, dict[float, Any]] = {}
    for run in net["runs"]:
        if run["workload"].startswith("drop-"):
            for row in run["rows"]:
                for name in ALSO.get(row["contender"], (row["contender"],)):
                    if name in STYLES:
                        found.setdefault(name, {})[run["drop"]] = value(row)
    return found


def _titles(net: Mapping[str, Any]) -> dict[str, str]:
    return {row["contender"]: row["title"] for run in net["runs"] for row in run["rows"]}


def _time(axes: Axes, net: Mapping[str, Any], names: Sequence[str]) -> None:
    titles, all_points = _titles(net), _points(net, lambda row: row["wall_s"])
    for name, points in ((name, all_points[name]) for name in names if name in all_points):
        drops = sorted(points)
        middle = [1e3 * points[d]["median"] for d in drops]
        axes.plot(drops, middle, label=titles.get(name, name), marker="o", markersize=3, **STYLES[name])
        low, high = ([1e3 * points[d][key] for d in drops] for key in ("q1", "q3"))
        axes.fill_between(drops, low, high, color=STYLES[name]["color"], alpha=0.12, linewidth=0)
    floors = {r["drop"]: 1e3 * r["floor_s"]["in_turn"] for r in net["runs"] if "floor_s" in r and not r["fixed"]}
    if floors:
        drops = sorted(floors)
        axes.plot(drops, [floors[d] for d in drops], color="black", linestyle=":", label="compute, then used bytes")
    axes.set_ylabel("step, ms (median, quartiles)")
    _finish(axes, net)


def _bytes(axes: Axes, net: Mapping[str, Any], names: Sequence[str]) -> None:
    titles, all_points = _titles(net), _points(net, lambda row: row["wire_bytes"] / 1e6)
    for name, points in ((name, all_points[name]) for name in names if name in all_points and name != SENDS_NOTHING):
        drops = sorted(points)
        label = titles.get(name, name)
        axes.plot(drops, [points[d] for d in drops], label=label, marker="o", markersize=3, **STYLES[name])
    axes.set_ylabel("MB sent by a rank in a step")
    _finish(axes, net)
    axes.set_title(f"{net['network']}: all bytes, or those of used layers", fontsize=10)


def _finish(axes: Axes, net: Mapping[str, Any]) -> None:
    axes.set_xlabel("share of layers that a step drops")
    axes.set_title(net["network"], fontsize=10)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)


def _save(path: Path, panels: Sequence[tuple[Panel, Mapping[str, Any]]], names: Sequence[str]) -> None:
    """Panels side by side, with one legend for all."""
    figure, grid = pyplot.subplots(1, len(panels), figsize=(4.6 * len(panels), 4.8), squeeze=False)
    entries: dict[str, Any] = {}
    for axes, (draw_panel, net) in zip(grid[0], panels, strict=True):
        draw_panel(axes, net, names)
        lines, labels = axes.get_legend_handles_labels()
        entries.update(zip(labels, lines, strict=True))
    columns = min(len(entries), max(1, round(1.6 * len(panels))))
    figure.legend(list(entries.values()), list(entries), loc="lower center", ncols=columns, fontsize=8, frameon=False)
    rows = -(-len(entries) // columns)
    figure.tight_layout(rect=(0, 0.045 * rows + 0.01, 1, 1))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


PANELS: Sequence[tuple[str, Panel]] = (("time", _time), ("bytes", _bytes))


def draw(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """The files that were written."""
    folder.mkdir(parents=True, exist_ok=True)
    nets = [net for net in result["networks"] if any(run["workload"].startswith("drop-") for run in net["runs"])]
    written = []
    for net in nets:
        slug = re.sub(r"\W+", "-", net["rate"] or "loopback")
        for kind, panel in PANELS:
            written.append(folder / f"{kind}-{slug}.png")
            _save(written[-1], [(panel, net)], list(STYLES))
    if nets:
        written.append(folder / "page.png")
        _save(written[-1], [*((_time, net) for net in nets), (_bytes, nets[-1])], ON_PAGE)
    return written


if __name__ == "__main__":
    for one in draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])):
        print(one)
