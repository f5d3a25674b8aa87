"""Claim: compacting a model changes no value, and makes neither the start of training nor an optimizer step slower.

Run it: ``python proofs/compact_gain.py`` (``--quick`` for a small model and few repetitions). Times are medians of
interleaved repetitions on two ranks with one thread each, models of many small parameters as they are and compacted.
The verdict on the clock is printed, and only what does not depend on it sets the exit status.

Rows: wrapping in KnownDDP and in DistributedDataParallel, whose start brings every parameter to rank 0's values; one
broadcast of the compacted storage, against broadcasts of the parameters: one after the other, all at once, and packed
by torch; one copy of the storage, against a loop of copies and one call for all (``foreach``); optimizer steps, one
call for all parameters (``foreach``) and one kernel (``fused``). What is packed, at once or one call is what somebody
writes who minds the time; the loops are there because they are common.
"""

from __future__ import annotations

import argparse
import copy
import functools
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

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


def broadcast_at_once(module: nn.Module) -> None:
    for work in [dist.broadcast(param.detach(), 0, async_op=True) for param in module.parameters()]:
        work.wait()


def broadcast_packed(module: nn.Module) -> None:
    """As DistributedDataParallel does at its start, in packs of 250 MiB."""
    group: Any = dist.group.WORLD
    torch._C._distributed_c10d._broadcast_coalesced(group, [p.detach() for p in module.parameters()], 250 << 20, 0)


def broadcast_storage(module: nn.Module) -> None:
    dist.broadcast(storage_of(module), 0)


def copy_each(target: nn.Module, source: nn.Module) -> None:
    with torch.no_grad():
        for ours, theirs in zip(target.parameters(), source.parameters(), strict=True):
            ours.copy_(theirs)


def copy_in_one_call(target: nn.Module, source: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_copy_(list(target.parameters()), list(source.parameters()))


def copy_storage(target: nn.Module, source: nn.Module) -> None:
    storage_of(target).copy_(storage_of(source))


def optimizer(module: nn.Module, *, fused: bool) -> torch.optim.Optimizer:
    generator = torch.Generator().manual_seed(0)
    for param in module.parameters():
        param.grad = torch.randn(param.shape, generator=generator)
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
    low, *_, high = statistics.quantiles(ratios, n=10, method="inclusive")
    # Where single ratios lie on both sides of 1 the median is no verdict.
    differs = not 1 / SLOWER < ratio < SLOWER and not low < 1 < high
    verdict = ("slower" if ratio > 1 else "faster") if differs else "no difference"
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
        f"{len(list(plain.parameters()))} parameters, {report.bytes_moved} bytes moved, "
        f"{report.bytes_of_padding} bytes of padding, storages: {report.storages}",
        f"{'median ms':<34} {'as it is':>9} {'compacted':>9} {'ratio':>6} {'10%':>6} {'90%':>6}",
        compare("wrap in KnownDDP", lambda: KnownDDP(plain), lambda: KnownDDP(compacted), repeats),
        compare(
            "wrap in DistributedDataParallel",
            lambda: DistributedDataParallel(plain),
            lambda: DistributedDataParallel(compacted),
            repeats,
        ),
    ]
    for name, broadcast in {
        "broadcast, one by one": broadcast_each,
        "broadcast, all at once": broadcast_at_once,
        "broadcast, packed": broadcast_packed,
    }.items():
        pair = functools.partial(broadcast, plain), functools.partial(broadcast_storage, compacted)
        rows.append(compare(f"{name} / storage", *pair, repeats))
    for name, copy_to in {"copy, one by one": copy_each, "copy, foreach": copy_in_one_call}.items():
        pair = functools.partial(copy_to, others[0], plain), functools.partial(copy_storage, others[1], compacted)
        rows.append(compare(f"{name} / storage", *pair, 5 * repeats, talks=False))
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
