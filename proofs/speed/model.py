"""The step on paper: ``python -m proofs.speed.model [--least] FILE``, where FILE was written by ``--json``.

An all-reduce of b bytes over N ranks takes 2 (N - 1) (alpha + b / (N beta)) in a ring and 2 (log2 N alpha + b / beta)
in a tree: alpha is the time of a message, beta the rate of the slowest link. What goes from each rank to each takes
alpha + (N - 1) (o + b / beta), where o is what a rank spends on sending one message. Buckets go one after the other,
each when its gradients are there; see "The step on paper" in README.md. For each network of FILE that has a rate,
``alpha`` and ``beta`` are fitted to all-reduces that the same run measured, computing is that of the plain module, and
the steps that follow are printed beside those that were measured. Then: on which cluster skipping pays, and where
latency rules.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from knownddp.buckets import assign
from knownddp.comm import DIRECT_BYTES, DIRECT_BYTES_IN_ALL, SWAP_BYTES
from knownddp.messages import HEADER_BYTES
from knownddp.options import default_cap_bytes
from knownddp.plan import MUCH_BYTES

MIB = 2**20
DDP_CAPS = (1 * MIB, 25 * MIB)
PARAMS_A_LAYER = 12  # of a transformer encoder layer
CLUSTER = (2, 8, 64, 512, 4096)
SENDING_S = 5e-6  # o: seconds of the processor for one message that gloo sends, assumed


@dataclass(frozen=True)
class Link:
    """``alpha`` in seconds a message, ``beta`` in bytes a second."""

    alpha: float
    beta: float

    def all_reduce(self, nbytes: float, world_size: int, *, tree: bool = False) -> float:
        """Seconds of one all-reduce."""
        if tree:
            return 2 * (math.log2(world_size) * self.alpha + nbytes / self.beta)
        return 2 * (world_size - 1) * (self.alpha + nbytes / (world_size * self.beta))

    def message(self, nbytes: float, world_size: int) -> float:
        """Seconds until every rank has such a message of all others: from each to each, or in gloo's ring."""
        if nbytes <= DIRECT_BYTES and world_size * nbytes <= DIRECT_BYTES_IN_ALL:
            return self.alpha + (world_size - 1) * (SENDING_S + nbytes / self.beta)
        return self.all_reduce(nbytes, world_size)


CLUSTER_LINKS = (
    ("1 Gbit/s, 50 us", Link(50e-6, 125e6)),
    ("10 Gbit/s, 30 us", Link(30e-6, 1.25e9)),
    ("100 Gbit/s, 10 us", Link(10e-6, 12.5e9)),
    ("400 Gbit/s, 5 us", Link(5e-6, 50e9)),
)


def fit(seconds_by_bytes: Mapping[str, float], world_size: int) -> Link:
    """Least squares of relative errors, so that small messages count as much as large ones."""
    nbytes = np.array([float(size) for size in seconds_by_bytes])
    seconds = np.array(list(seconds_by_bytes.values()))
    steps = 2 * (world_size - 1)
    terms = np.stack([np.full_like(nbytes, steps), steps * nbytes / world_size], axis=1)
    (alpha, inverse_beta), *_ = np.linalg.lstsq(terms / seconds[:, None], np.ones_like(seconds), rcond=None)
    return Link(max(float(alpha), 0.0), 1 / max(float(inverse_beta), 1e-15))


def buckets(sizes: Sequence[int], caps: Sequence[int] = DDP_CAPS) -> list[int]:
    """Bytes of each bucket, of parameters of ``sizes`` bytes in the order in which they become ready."""
    items = [(i, nbytes, 0, False) for i, nbytes in enumerate(sizes)]
    return [sum(sizes[i] for i in members) for members, _ in assign(items, caps)]


def step(
    forward: float,
    backward: float,
    bucket_bytes: Sequence[int],
    link: Link,
    world_size: int,
    *,
    agreement_bytes: int = 0,
    tree: bool = False,
    swaps: bool = False,
) -> float:
    """Seconds of a step. ``agreement_bytes``: of each of the two messages about what is used; 0: there are none.

    Gradients are taken to appear evenly over the backward. The opening message leaves as the backward begins and so
    only delays the first bucket; the closing one follows everything else. ``tree``: gradients do not go in a ring.
    ``swaps``: two ranks swap the last bucket, if it is small, in one hop instead of two.
    """
    message = link.message(agreement_bytes, world_size) if agreement_bytes else 0.0
    total = sum(bucket_bytes) or 1
    end = message
    for nbytes, ready in zip(bucket_bytes, accumulate(bucket_bytes), strict=True):
        end = max(end, backward * ready / total) + link.all_reduce(nbytes, world_size, tree=tree)
    if swaps and world_size == 2 and bucket_bytes and bucket_bytes[-1] <= SWAP_BYTES:
        end -= link.alpha
    return forward + max(backward, end) + message


def sizes_of(run: Mapping[str, Any], used: bool) -> list[int]:
    """Parameters' bytes, as if all of a layer were alike."""
    nbytes, per_param = run["used_bytes" if used else "param_bytes"], 789_760 * 4 // PARAMS_A_LAYER
    count = max(1, round(nbytes / per_param))
    return [nbytes // count] * count


def predict(run: Mapping[str, Any], name: str, link: Link, world_size: int, which: str = "median") -> float | None:
    """Seconds of a step of that contender, from those of the plain module; None where the model has nothing to say.

    ``which``: of the plain module's steps, "median" or "min".
    """
    rows = {row["contender"]: row for row in run["rows"]}
    # A wrapper that runs dropped layers computes what it computes when none is dropped.
    share = run["param_bytes"] / run["used_bytes"] if name in ("ddp-runs-all", "times-zero") else 1.0
    forward = rows["plain"]["forward_s"][which] * share
    backward = rows["plain"]["wall_s"][which] * share - forward
    num_params = len(sizes_of(run, used=False))
    if name.startswith("known"):
        agreement = 0 if name == "known-trust" else HEADER_BYTES + num_params
        used = buckets(sizes_of(run, used=True), default_cap_bytes("gloo", of_much=run["used_bytes"] >= MUCH_BYTES))
        return step(forward, backward, used, link, world_size, agreement_bytes=agreement, swaps=name != "known-shared")
    if name in ("ddp", "ddp-runs-all", "times-zero", "zero-function", "ddp-view", "ddp-view-kept", "ddp-batched"):
        return step(forward, backward, buckets(sizes_of(run, used=False)), link, world_size)
    if name == "ddp-find":  # sends a map of what is used, an integer a parameter, at the end
        time = step(forward, backward, buckets(sizes_of(run, used=False)), link, world_size)
        return time + link.all_reduce(4 * num_params, world_size)
    return None


def compared(result: Mapping[str, Any], which: str) -> list[str]:
    """Predicted against measured, for all networks of ``result`` that have a rate."""
    lines = []
    for net in result["networks"]:
        if net["rate"] is None:
            continue
        link = fit(net["link_s"], net["world_size"])
        lines += [
            f"{net['network']}: alpha {1e6 * link.alpha:.0f} us, beta {8e-6 * link.beta:.0f} Mbit/s (fitted)",
            f"  {'workload':<10} {'contender':<14} {'predicted ms':>12} {'measured ms':>12} {'ratio':>6}",
        ]
        for run in net["runs"]:
            for row in run["rows"]:
                predicted = predict(run, row["contender"], link, net["world_size"], which)
                if predicted is not None and row["contender"] != "plain":
                    measured = row["wall_s"][which]
                    lines.append(
                        f"  {run['workload']:<10} {row['contender']:<14} {1e3 * predicted:>12.1f} "
                        f"{1e3 * measured:>12.1f} {predicted / measured:>6.2f}"
                    )
    return lines


def break_even_bytes(link: Link, world_size: int, agreement_bytes: int) -> float:
    """How many bytes a step must save for the two messages about it to pay, if nothing is overlapped.

    What is saved goes in a ring: 2 (N - 1) / N saved / beta > 2 message. Buckets that are saved too make it less.
    """
    return link.message(agreement_bytes, world_size) * link.beta * world_size / (world_size - 1)


def cluster() -> list[str]:
    """Half of the layers dropped: all sent, only the used ones sent and agreed upon, or sent on trust."""
    layer = [789_760 * 4 // PARAMS_A_LAYER] * PARAMS_A_LAYER
    everything, used = buckets(layer * 24), buckets(layer * 12)
    agreement = HEADER_BYTES + PARAMS_A_LAYER * 24
    lines = [
        "Half of 24 layers (37.9 of 75.8 MB) dropped, 20 ms of forward and 40 ms of backward. A step in ms when all",
        "is sent (as by find_unused_parameters), when what is used is agreed upon and sent, and on trust; then the MB",
        "that a step must save for agreement to pay where nothing is overlapped.",
        f"  {'':<24} | {'in a ring':^27} | {'in a tree':^27} |",
        f"  {'link':<18} {'ranks':>5}" + 2 * f" | {'all':>9} {'used':>8} {'trust':>8}" + f" | {'MB':>7}",
    ]
    for title, link in CLUSTER_LINKS:
        for ranks in CLUSTER:
            cells = []
            for tree in (False, True):
                for some, message in ((everything, 0), (used, agreement), (used, 0)):
                    cells.append(step(0.02, 0.04, some, link, ranks, agreement_bytes=message, tree=tree))
                cells[-3] += link.all_reduce(4 * PARAMS_A_LAYER * 24, ranks, tree=tree)  # what each rank used
            ms = [f"{1e3 * cell:.1f}" for cell in cells]
            lines.append(
                f"  {title:<18} {ranks:>5} | {ms[0]:>9} {ms[1]:>8} {ms[2]:>8} | {ms[3]:>9} {ms[4]:>8} {ms[5]:>8} "
                f"| {break_even_bytes(link, ranks, agreement) / 1e6:>7.2f}"
            )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proofs.speed.model", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--least", action="store_true", help="compare shortest steps instead of medians")
    options = parser.parse_args()
    for file in options.files:
        print("\n".join(compared(json.loads(file.read_text()), "min" if options.least else "median")))
    print("\n".join(cluster()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
