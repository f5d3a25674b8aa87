"""Claim: compacting a model changes no value, and makes neither the start of training nor an optimizer step slower.

Run it: ``python proofs/compact_gain.py`` (``--quick`` for a small model and few repetitions). Times are medians of
interleaved repetitions on two ranks with one thread each, models of many small parameters as they are and compacted.
The verdict on the clock is printed, and only what does not depend on it sets the exit status.

Rows: wrapping in KnownDDP and in DistributedDataParallel, whose start brings every parameter to rank 0's values; a
broadcast of each parameter by itself, against one broadcast of the compacted storage; optimizer steps, one call for all
parameters (``foreach``) and one kernel (``fused``); copying all parameters to another model of the same layout.
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

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from knownddp import KnownDDP, compact_parameters

WORLD_SIZE = 2
SLOWER = 1.1  # ratios between 1 / SLOWER and SLOWER are noise


def small_parameters(blocks: int, width: int) -> nn.Module:
    """Ten parameters a block."""
    layers: list[nn.Module] = []
    for _ in range(blocks):
        layers += [nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, 2 * width)]
        layers += [nn.Linear(2 * width, width), nn.LayerNorm(width)]
    return nn.Sequential(*layers)


def storage_of(module: nn.Module) -> Tensor:
    """The one storage of a compacted module, padding and all."""
    first = next(module.parameters())
    return torch.empty(0).set_(first.untyped_storage())


def broadcast_each(module: nn.Module) -> None:
    for param in module.parameters():
        dist.broadcast(param.detach(), 0)


def broadcast_storage(module: nn.Module) -> None:
    dist.broadcast(storage_of(module), 0)


def copy_each(target: nn.Module, source: nn.Module) -> None:
    with torch.no_grad():
        for ours, theirs in zip(target.parameters(), source.parameters(), strict=True):
            ours.copy_(theirs)


def optimizer(module: nn.Module, *, fused: bool) -> torch.optim.Optimizer:
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    return torch.optim.AdamW(module.parameters(), lr=1e-3, fused=fused, foreach=not fused)


def seconds(call: Callable[[], object], *, talks: bool) -> float:
    """By the clock on the wall if ranks wait for each other, else this process's own time, whatever else runs."""
    clock = time.perf_counter if talks else time.process_time
    if talks:
        dist.barrier()
    begun = clock()
    call()
    return clock() - begun


def compare(
    name: str, plain: Callable[[], object], compacted: Callable[[], object], repeats: int, *, talks: bool = True
) -> str:
    """One row; which of the two goes first alternates."""
    times: tuple[list[float], list[float]] = ([], [])
    for call in (plain, compacted):
        call()
    for number in range(repeats):
        for which in (0, 1) if number % 2 else (1, 0):
            times[which].append(seconds((plain, compacted)[which], talks=talks))
    ratios = [after / before for before, after in zip(*times, strict=True)]
    ratio = statistics.median(ratios)
    low, *_, high = statistics.quantiles(ratios, n=10)
    verdict = "no difference" if 1 / SLOWER < ratio < SLOWER else "slower" if ratio > 1 else "faster"
    before, after = (1e3 * statistics.median(one) for one in times)
    return f"{name:<34} {before:>9.2f} {after:>9.2f} {ratio:>6.2f} {low:>6.2f} {high:>6.2f}  {verdict}"


def measure(rank: int, folder: str, quick: bool) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    blocks, width, repeats = (5, 16, 3) if quick else (50, 64, 41)
    plain = small_parameters(blocks, width)
    compacted = copy.deepcopy(plain)
    report = compact_parameters(compacted)
    others = copy.deepcopy(plain), copy.deepcopy(plain)
    compact_parameters(others[1])
    rows = [
        f"{len(list(plain.parameters()))} parameters, {report.bytes_moved / 1e6:.1f} MB moved, "
        f"{report.bytes_of_padding} bytes of padding, storages: {report.storages}",
        f"{'median ms':<34} {'as it is':>9} {'compacted':>9} {'ratio':>6} {'10%':>6} {'90%':>6}",
        compare("wrap in KnownDDP", lambda: KnownDDP(plain), lambda: KnownDDP(compacted), repeats),
        compare(
            "wrap in DistributedDataParallel",
            lambda: DistributedDataParallel(plain),
            lambda: DistributedDataParallel(compacted),
            repeats,
        ),
        compare(
            "broadcast each / the storage", lambda: broadcast_each(plain), lambda: broadcast_storage(compacted), repeats
        ),
        compare(
            "copy each / the storage",
            lambda: copy_each(others[0], plain),
            lambda: storage_of(others[1]).copy_(storage_of(compacted)),
            5 * repeats,
            talks=False,
        ),
    ]
    for fused in (False, True):
        before, after = (optimizer(module, fused=fused).step for module in (plain, compacted))
        name = f"AdamW step, {'fused' if fused else 'foreach'}"
        rows.append(compare(name, before, after, 5 * repeats, talks=False))
    same = all(
        torch.equal(ours, theirs) for ours, theirs in zip(plain.parameters(), compacted.parameters(), strict=True)
    )
    rows.append("values are " + ("the same to the last bit" if same else "DIFFERENT"))
    if rank == 0:
        print("\n".join(rows), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0 if same else 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model and few repetitions")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=measure, args=(rank, folder, options.quick)) for rank in range(WORLD_SIZE)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


if __name__ == "__main__":
    sys.exit(main())
