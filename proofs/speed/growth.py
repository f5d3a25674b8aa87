"""How costs grow with parameters, sets and ranks: ``python -m proofs.speed.growth`` (``--quick``: small numbers).

Claims: planning and hooks cost the same for each parameter, however many there are; ten thousand sets need no more
memory than a hundred; a message is a byte a parameter and eleven more; a step has as many collectives, and ranks have
the same plan, however many ranks there are and whatever each declares. Clocks are printed; the exit status depends on
what is exact.
"""

from __future__ import annotations

import argparse
import functools
import gc
import random
import statistics
import sys
import time
import tracemalloc
import warnings
from array import array
from collections.abc import Callable, Iterator, Sequence

import torch
from tqdm import tqdm

from knownddp import KnownDDP
from knownddp.plan import MAX_CACHED_PLANS, Planner
from proofs.planning_cost import planner_of, specs_of

from .contenders import BY_NAME
from .fake import Recorder, fake_rank, make_complete
from .host_time import NUMEL, Tiny
from .simulated import LAYERS, WIDTH, SmallLayers, train

COUNTS = (100, 1_000, 10_000, 100_000)
RANKS = (2, 8, 64, 512, 4096)
MOST_FOR_DDP = 10_000  # its construction is quadratic
REPEATS = 9
HEADER_BYTES = 11
MAX_GROWTH_OF_MEMORY = 1.1
MAX_BLOCKS_A_STEP = 0.1


def _plan_next(planner: Planner, sets: Iterator[bytes]) -> None:
    planner.plan(next(sets))


def median_us(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """By the processor's clock."""
    times = []
    for _ in range(repeats):
        begun = time.process_time_ns()
        call()
        times.append((time.process_time_ns() - begun) / 1e3)
    return statistics.median(times)


def plans(counts: Sequence[int]) -> None:
    print("plans: us for a new set, ns for each parameter of it, us for a set known already")
    for count in counts:
        planner, draw = planner_of(specs_of(count)), random.Random(0)
        sets = iter([bytes(draw.random() < 0.5 for _ in range(count)) for _ in range(REPEATS)])
        known = bytes(draw.random() < 0.5 for _ in range(count))
        planner.plan(known)
        looked_up = median_us(functools.partial(planner.plan, known))
        new = median_us(functools.partial(_plan_next, planner, sets))
        print(f"  {count:>7} parameters {new:>10.1f} {1e3 * new / count:>7.0f} {looked_up:>7.2f}")


def distinct_sets(count: int) -> bool:
    """Memory after ``count`` sets, beside that after as many as are remembered."""
    planner, draw = planner_of(specs_of(12 * 24)), random.Random(0)
    tracemalloc.start()
    held, begun = [], time.process_time()
    for number in range(count):
        layers = [draw.random() < 0.5 for _ in range(24)]
        planner.plan(bytes(used for used in layers for _ in range(12)))
        if number + 1 in (2 * MAX_CACHED_PLANS, count):
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
    took = time.process_time() - begun
    tracemalloc.stop()
    holds = held[1] <= MAX_GROWTH_OF_MEMORY * held[0] and len(planner) <= MAX_CACHED_PLANS
    print(
        f"{count} distinct sets of 24 layers with 288 parameters: {1e6 * took / count:.0f} us each (memory traced), "
        f"{len(planner)} plans kept, {held[0] / 1e6:.2f} MB after {2 * MAX_CACHED_PLANS} sets and "
        f"{held[1] / 1e6:.2f} MB at the end: {'holds' if holds else 'DOES NOT HOLD'}"
    )
    return holds


def steps_with_distinct_sets(count: int) -> bool:
    """Whole steps, each with layers dropped that never were dropped together before."""
    torch.manual_seed(0)
    module, x, draw = SmallLayers(), torch.ones(2, WIDTH), random.Random(0)
    model = KnownDDP(module)
    times, blocks = array("d", bytes(8 * count)), []
    for number in range(count):
        dropped = frozenset(draw.sample(range(LAYERS), LAYERS // 2))
        begun = time.process_time()
        model.zero_grad()
        unused = [module.layers[i] for i in dropped]
        model(x, dropped, unused_parameters=unused).sum().backward()
        times[number] = time.process_time() - begun
        if number + 1 in (2 * MAX_CACHED_PLANS, count):
            gc.collect()
            blocks.append(sys.getallocatedblocks())
    tenth = count // 10
    first, last = (1e6 * statistics.median(some) for some in (times[:tenth], times[-tenth:]))
    more = (blocks[1] - blocks[0]) / count
    holds = more <= MAX_BLOCKS_A_STEP
    print(
        f"{count} steps with distinct sets of {LAYERS} layers: {first:.0f} us each at first, {last:.0f} us at the end; "
        f"{more:.3f} blocks of Python's memory more for each step: "
        f"{'holds' if holds else 'DOES NOT HOLD'}"
    )
    return holds


def hooks(counts: Sequence[int]) -> bool:
    """Time a parameter in a step, beyond that of the plain module, and bytes of the two messages."""
    holds = True
    print("steps on a fake group of two: us a parameter beyond the plain module (ddp with a hook in Python, one call a")
    print("bucket, which it needs on that group); bytes of the messages about what is used")
    for count in counts:
        x, us, wraps = torch.ones(count * NUMEL), {}, {}
        names = ("plain", "ddp", "known", "known-find", "known-trust")
        for name in names if count <= MOST_FOR_DDP else [name for name in names if name != "ddp"]:
            module = Tiny(count)
            begun = time.process_time()
            wrapper = BY_NAME[name].wrap(module)
            wraps[name] = time.process_time() - begun
            make_complete(wrapper)

            def step(module: Tiny = module, wrapper: torch.nn.Module = wrapper, x: torch.Tensor = x) -> None:
                module.zero_grad(set_to_none=True)
                wrapper(x).sum().backward()

            for _ in range(3):
                step()
            us[name] = median_us(step, 3 if count >= 10_000 else 25) / count
            if name == "known":
                with Recorder() as recorder:
                    step()
                messages = [nbytes for _, is_gradient, nbytes in recorder.log if not is_gradient]
                holds &= messages == [count + HEADER_BYTES] * 2
        costs = ", ".join(f"{name} {us[name] - us['plain']:.2f}" for name in us if name != "plain")
        print(f"  {count:>7} parameters: {costs}; messages {messages}; wrapping took {wraps['known']:.2f} s")
    return holds


def ranks(sizes: Sequence[int], progress: bool) -> bool:
    """All simulated ranks have one plan in each step, and a step has as many collectives on any number of ranks."""

    def alike(rank: int, step: int) -> frozenset[int]:
        return frozenset(random.Random(step).sample(range(LAYERS), LAYERS // 2))

    def differing(rank: int, step: int) -> frozenset[int]:
        return frozenset(random.Random(100 * rank + step).sample(range(LAYERS), LAYERS // 2))

    holds, lines, seen = True, [], set()
    todo = [(size, dropped) for size in sizes for dropped in (alike, differing)]
    for size, dropped in tqdm(todo, desc="simulated ranks", disable=not progress):
        simulated = sorted({0, 1, size // 2, size - 1})
        found = train(simulated, size, dropped)
        same = len({one.plans for one in found}) == 1
        first = found[0]
        same &= len({(one.collectives, one.gradient_bytes, one.message_bytes) for one in found}) == 1
        holds &= same
        if dropped is alike:
            seen.add((first.collectives, first.gradient_bytes, first.message_bytes))
        in_ring = 2 * (size - 1) / size * (first.gradient_bytes + first.message_bytes)
        cells = [size, dropped.__name__, simulated, first.collectives, first.gradient_bytes, first.message_bytes]
        lines.append([*cells, round(in_ring), "one plan" if same else "PLANS DIFFER"])
    holds &= len(seen) == 1  # what all ranks declare alike costs the same on any number of them
    header = ["ranks", "declare", "simulated", "collectives", "gradients", "messages", "in a ring", ""]
    for cells in [header, *lines]:
        print(
            "  "
            + "".join(f"{cell!s:>{width}}" for cell, width in zip(cells, (5, 11, 23, 13, 11, 10, 11, 14), strict=True))
        )
    return holds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proofs.speed.growth", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small numbers")
    parser.add_argument("--silent", action="store_true", help="no progress bar")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts = COUNTS[:2] if options.quick else COUNTS
    plans(counts)
    holds = distinct_sets(1_000 if options.quick else 10_000)
    with fake_rank(0, 2):
        holds &= steps_with_distinct_sets(1_000 if options.quick else 10_000)
        holds &= hooks(counts)
    holds &= ranks(RANKS[:2] if options.quick else RANKS, not options.silent)
    print("all exact claims hold" if holds else "AN EXACT CLAIM DOES NOT HOLD")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
