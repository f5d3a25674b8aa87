"""The step on paper: ``python -m proofs.speed.model FILE``, where FILE was written by ``--json``.

An all-reduce of b bytes over N ranks in a ring takes 2 (N - 1) (alpha + b / (N beta)): alpha is the time of a message,
beta the rate of the slowest link. A backward's buckets go one after the other, each when its gradients are there; see
"The step on paper" in README.md. ``alpha`` and ``beta`` are fitted to all-reduces that the same run measured, computing
is that of the plain module, and what follows for each wrapper is printed beside what was measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from knownddp.buckets import assign

MIB = 2**20
DDP_CAPS = (1 * MIB, 25 * MIB)
PARAMS_A_LAYER = 12  # of a transformer encoder layer
CLUSTER = (2, 8, 64, 512, 4096)


@dataclass(frozen=True)
class Link:
    """``alpha`` in seconds a message, ``beta`` in bytes a second."""

    alpha: float
    beta: float

    def all_reduce(self, nbytes: float, world_size: int) -> float:
        """Seconds of one all-reduce in a ring."""
        return 2 * (world_size - 1) * (self.alpha + nbytes / (world_size * self.beta))


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
    forward: float, backward: float, bucket_bytes: Sequence[int], link: Link, world_size: int, agreement_bytes: int
) -> float:
    """Seconds of a step. ``agreement_bytes``: of each of the two messages about what is used; 0: there are none.

    Gradients are taken to appear evenly over the backward. The opening message goes while the backward begins, so it
    only delays the first bucket; the closing one comes after everything else.
    """
    message = link.all_reduce(agreement_bytes, world_size) if agreement_bytes else 0.0
    total = sum(bucket_bytes) or 1
    end = message
    for nbytes, ready in zip(bucket_bytes, accumulate(bucket_bytes), strict=True):
        end = max(end, backward * ready / total) + link.all_reduce(nbytes, world_size)
    return forward + max(backward, end) + message


def sizes_of(run: Mapping[str, Any], used: bool) -> list[int]:
    """Parameters' bytes, as if all of a layer were alike."""
    nbytes, per_param = run["used_bytes" if used else "param_bytes"], 789_760 * 4 // PARAMS_A_LAYER
    count = max(1, round(nbytes / per_param))
    return [nbytes // count] * count


def predict(run: Mapping[str, Any], name: str, link: Link, world_size: int) -> float | None:
    """Seconds of a step of that contender, from those of the plain module; None where the model has nothing to say."""
    rows = {row["contender"]: row for row in run["rows"]}
    # A wrapper that runs dropped layers computes what it computes when none is dropped.
    share = run["param_bytes"] / run["used_bytes"] if name in ("ddp-runs-all", "times-zero") else 1.0
    forward = rows["plain"]["forward_s"]["median"] * share
    backward = rows["plain"]["wall_s"]["median"] * share - forward
    num_params = len(sizes_of(run, used=False))
    if name.startswith("known"):
        agreement = 0 if name == "known-trust" else 11 + num_params
        return step(forward, backward, buckets(sizes_of(run, used=True)), link, world_size, agreement)
    if name in ("ddp", "ddp-runs-all", "times-zero", "zero-function", "ddp-view", "ddp-batched"):
        return step(forward, backward, buckets(sizes_of(run, used=False)), link, world_size, 0)
    if name == "ddp-find":  # sends a map of what is used, an integer a parameter, at the end
        time = step(forward, backward, buckets(sizes_of(run, used=False)), link, world_size, 0)
        return time + link.all_reduce(4 * num_params, world_size)
    return None


def compared(result: Mapping[str, Any]) -> list[str]:
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
                predicted = predict(run, row["contender"], link, net["world_size"])
                if predicted is not None and row["contender"] != "plain":
                    measured = row["wall_s"]["median"]
                    lines.append(
                        f"  {run['workload']:<10} {row['contender']:<14} {1e3 * predicted:>12.1f} "
                        f"{1e3 * measured:>12.1f} {predicted / measured:>6.2f}"
                    )
    return lines


def cluster() -> list[str]:
    """Where skipping pays: half of the layers dropped, all sent or only the used ones, on clusters of several sizes.

    Computing and parameters are those of the 24 layers; a rank's step and the ring's messages get longer with N.
    """
    layer = [789_760 * 4 // PARAMS_A_LAYER] * PARAMS_A_LAYER
    everything, used = buckets(layer * 24), buckets(layer * 12)
    lines = [
        "half of 24 layers (75.8 MB) dropped, 60 ms of computing; ms when all is sent, when only the used is sent and",
        "agreed upon, and the share of the latter that is latency",
        f"  {'link':<24} {'ranks':>6} {'all ms':>9} {'used ms':>9} {'ratio':>6} {'latency':>8}",
    ]
    for title, link in (
        ("1 Gbit/s, 50 us", Link(50e-6, 125e6)),
        ("10 Gbit/s, 30 us", Link(30e-6, 1.25e9)),
        ("100 Gbit/s, 10 us", Link(10e-6, 12.5e9)),
        ("400 Gbit/s, 5 us", Link(5e-6, 50e9)),
    ):
        for ranks in CLUSTER:
            times = [
                step(0.02, 0.04, some, link, ranks, message) for some, message in ((everything, 0), (used, 11 + 288))
            ]
            rounds = 2 * (ranks - 1) * (len(used) + 2)
            share = rounds * link.alpha / times[1]
            lines.append(
                f"  {title:<24} {ranks:>6} {1e3 * times[0]:>9.1f} {1e3 * times[1]:>9.1f} "
                f"{times[1] / times[0]:>6.2f} {share:>8.0%}"
            )
    return lines


def main(arguments: Sequence[str]) -> int:
    for name in arguments:
        print("\n".join(compared(json.loads(Path(name).read_text()))))
    print("\n".join(cluster()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
