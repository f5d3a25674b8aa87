"""Claim: where one process for each device is possible, several devices in one process cost more.

Run it: ``python proofs/replicas_cost.py`` (``--quick`` for a small model and few steps). One training step on one
batch, three ways: by the module alone; by ``KnownDDP(module, device_ids=["cpu", "cpu"])``, in one process as well; by
two ranks with half of the batch each. Interleaved, one thread a process; ratios are medians of those within a round.
The exit status tells whether all three have the same gradients, up to rounding, and nothing of the clock.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from knownddp import KnownDDP

WORLD_SIZE = 2
ALONE, REPLICAS, RANKS = "module alone", "2 replicas in one process", "2 ranks"


@dataclass(frozen=True, slots=True)
class Size:
    layers: int
    width: int
    rows: int  # of the batch, over all replicas or ranks
    rounds: int


def network(size: Size) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(size.width, size.width), nn.ReLU()) for _ in range(size.layers)]
    return nn.Sequential(*layers)


def step_of(model: nn.Module, batch: Tensor) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(batch).square().mean().backward()

    return step


def seconds(step: Callable[[], None]) -> float:
    dist.barrier()
    begun = time.perf_counter()
    step()
    return time.perf_counter() - begun


def measure(rank: int, folder: str, size: Size) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    own_group = dist.new_group([rank], use_local_synchronization=True)
    plain = network(size)
    replicas = KnownDDP(copy.deepcopy(plain), device_ids=["cpu", "cpu"], process_group=own_group)
    ranks = KnownDDP(copy.deepcopy(plain))
    batch = torch.randn(size.rows, size.width, generator=torch.Generator().manual_seed(1))
    together = step_of(ranks, batch.chunk(WORLD_SIZE)[rank])
    # What one process does, rank 0 does, while rank 1 waits and leaves it the machine.
    steps = {
        ALONE: step_of(plain, batch) if rank == 0 else idle,
        REPLICAS: step_of(replicas, batch) if rank == 0 else idle,
        RANKS: together,
    }
    times: dict[str, list[float]] = {way: [] for way in steps}
    ways = list(steps)
    for number in range(1 + size.rounds):
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            times[way].append(seconds(steps[way]))
    if rank == 0:
        print_table(times)
        same = all(equal_up_to_rounding(plain, model) for model in (replicas.module, ranks.module))
        print("gradients are " + ("the same, up to rounding" if same else "DIFFERENT"), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0 if rank or same else 1)


def idle() -> None:
    """The other process works."""


def print_table(times: dict[str, list[float]]) -> None:
    print(f"{'median ms of a step':<28} {'':>9} {'ratio':>6} {'10%':>6} {'90%':>6}")
    for way, all_times in times.items():
        own, base = all_times[1:], times[ALONE][1:]  # the first round makes pools and plans
        ratios = [mine / its for mine, its in zip(own, base, strict=True)]
        low, *_, high = statistics.quantiles(ratios, n=10, method="inclusive")
        print(
            f"{way:<28} {1e3 * statistics.median(own):>9.2f} {statistics.median(ratios):>6.2f} {low:>6.2f} {high:>6.2f}"
        )


def equal_up_to_rounding(expected: nn.Module, model: nn.Module) -> bool:
    pairs = zip(expected.parameters(), model.parameters(), strict=True)
    return all(
        ours.grad is not None and theirs.grad is not None and torch.allclose(ours.grad, theirs.grad, atol=1e-7)
        for theirs, ours in pairs
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model and few steps")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.quick:
        print("a small model and few steps: times say nothing")
    sizes = [Size(4, 32, 64, 5)] if options.quick else [Size(8, 1024, 512, 31), Size(50, 64, 64, 101)]
    context = multiprocessing.get_context("spawn")
    worst = 0
    for size in sizes:
        print(f"\n{size.layers} linear layers {size.width} x {size.width}, {size.rows} rows", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            processes = [context.Process(target=measure, args=(rank, folder, size)) for rank in range(WORLD_SIZE)]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
        worst = max(worst, *(abs(process.exitcode or 0) for process in processes))
    return worst


if __name__ == "__main__":
    sys.exit(main())
