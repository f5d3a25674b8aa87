"""Claim: planning a set never seen is linear in the parameters and, from a thousand on, costs at most five plain Python
loops over them (of few, what it costs at all); a set seen before is a look-up, and the memory of plans is bounded.

Run it: ``python proofs/planning_cost.py``. Times are medians of interleaved repetitions in one process; the verdict on
the clock is printed, and only what does not depend on it sets the exit status.
"""

from __future__ import annotations

import functools
import random
import statistics
import sys
import time
from collections.abc import Callable

import torch

from knownddp.plan import MAX_CACHED_PLANS, Planner
from knownddp.specs import BucketKey, ParamSpec

MIB = 2**20
REPEATS = 25


def specs_of(num_params: int) -> list[ParamSpec]:
    """Parameters of 1 KiB to 1 MiB in two dtypes, as a transformer in mixed precision might have."""
    draw = random.Random(num_params)
    keys = [BucketKey(torch.float32, torch.device("cpu")), BucketKey(torch.bfloat16, torch.device("cpu"))]
    sizes = [2 ** draw.randrange(10, 21) for _ in range(num_params)]
    return [ParamSpec(f"p{i}", (n,), (1,), n, n, keys[i % 7 == 0]) for i, n in enumerate(sizes)]


def planner_of(specs: list[ParamSpec]) -> Planner:
    planner = Planner(specs, [1 * MIB, 25 * MIB])
    planner.learn(list(reversed(range(len(specs)))), ())
    return planner


def plain_loop(agreed: bytes, sizes: list[int]) -> int:
    """What any planner has to do at least: look at every parameter and add up the bytes of those that are used."""
    total = 0
    for i in range(len(sizes)):
        if agreed[i]:
            total += sizes[i]
    return total


def seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def main() -> int:
    print(f"{'parameters':>10} {'loop us':>9} {'plan us':>9} {'ratio':>6} {'ns a parameter':>15} {'look-up us':>11}")
    for num_params in (100, 1000, 10_000, 100_000):
        specs = specs_of(num_params)
        planner, sizes = planner_of(specs), [spec.nbytes for spec in specs]
        draw = random.Random(0)
        loops, plans, ratios, lookups = [], [], [], []
        for _ in range(REPEATS):
            # Half the layers dropped: six parameters in a row go together.
            agreed = bytes(b for b in (draw.random() < 0.5 for _ in range(num_params // 6 + 1)) for _ in range(6))
            agreed = agreed[:num_params]
            loops.append(seconds(functools.partial(plain_loop, agreed, sizes)))
            plans.append(seconds(functools.partial(planner.plan, agreed)))
            lookups.append(seconds(functools.partial(planner.plan, agreed)))
            ratios.append(plans[-1] / loops[-1])
        row = [statistics.median(one) * 1e6 for one in (loops, plans, lookups)]
        ratio = statistics.median(ratios)
        verdict = "" if num_params < 1000 else "holds" if ratio <= 5 else "DOES NOT HOLD (on this run)"
        print(
            f"{num_params:>10} {row[0]:>9.1f} {row[1]:>9.1f} {ratio:>6.2f} {1000 * row[1] / num_params:>15.0f} "
            f"{row[2]:>11.2f}  {verdict}"
        )
    planner = planner_of(specs_of(20))
    for k in range(10 * MAX_CACHED_PLANS):
        planner.plan(bytes(k >> i & 1 for i in range(20)))
    bounded = len(planner) == MAX_CACHED_PLANS
    print(f"after {10 * MAX_CACHED_PLANS} sets {len(planner)} plans are remembered")
    return 0 if bounded else 1


if __name__ == "__main__":
    sys.exit(main())
