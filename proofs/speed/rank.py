"""One rank of the table, as a program of its own: ``python -m proofs.speed.rank FOLDER RANK``.

FOLDER/task.json says what to do; what was measured goes to FOLDER/rankRANK.json.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import sys
import time
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from .clocks import Stopwatch, WireCounter
from .contenders import BY_NAME, DDP_RUNS_ALL, PLAIN, Contender, Trainee
from .task import Task
from .workloads import Workload

WARM_UP_STEPS = 2  # DDP lays out its buckets anew in the second, KnownDDP learns an order in the first
BYTES_STEPS, BYTES_TURNS = 2, 2
# Of all-reduces of so many bytes. None between: a shaped link lets those pass at once.
LINK_REPEATS = {4: 41, 2**10: 41, 2**21: 7, 2**22: 7, 2**23: 7}


def one_step(trainee: Trainee, step: int) -> None:
    """Old gradients are dropped, forward, backward with its communication."""
    trainee.zero_grad()
    trainee.forward(step).backward()


def timed_step(trainee: Trainee, step: int, watch: Stopwatch) -> dict[str, float]:
    """Forward, backward with its communication, and gradients are dropped, all of which the clock sees.

    So each step finds the memory as the others do. If gradients stayed until the contender's next turn, it would depend
    on where in the heap they lie whether their memory goes back to the system and has to be fetched anew.
    """
    watch.start()
    loss = trainee.forward(step)
    watch.lap()
    loss.backward()
    trainee.zero_grad()
    watch.stop()
    return watch.read()


def wire_bytes(trainee: Trainee | None, counter: WireCounter, first_step: int) -> float:
    """Bytes a step that a rank sends; of None, those of the two barriers around.

    The least of some turns: a busy machine answers late, and TCP then sends again what had arrived.
    """
    sent = []
    for _ in range(BYTES_TURNS):
        dist.barrier()
        before = counter.read()
        for step in range(first_step, first_step + BYTES_STEPS):
            if trainee is not None:
                one_step(trainee, step)
        dist.barrier()
        time.sleep(0.01)  # the last acknowledgements
        sent.append((counter.read() - before) / BYTES_STEPS)
    return min(sent)


def link_times(device: torch.device) -> dict[int, float]:
    """Median seconds of one all-reduce, by its bytes."""
    found = {}
    for nbytes, repeats in LINK_REPEATS.items():
        data = torch.ones(nbytes // 4, device=device)
        times = []
        for _ in range(repeats):
            dist.barrier()
            begun = time.perf_counter()
            dist.all_reduce(data)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - begun)
        found[nbytes] = statistics.median(times)
    return found


def differences(trainees: list[Trainee]) -> dict[str, float]:
    """How far gradients of each wrapper's last step are from those of the plain module, averaged here.

    Element by element, relative to the largest of the layer; where that has none, of all layers. "ddp-runs-all" trains
    otherwise.
    """
    by_name = {one.contender.name: one for one in trainees}
    wanted = by_name.pop(PLAIN.name).gradients()
    for gradient in chain.from_iterable(wanted):
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    by_name.pop(DDP_RUNS_ALL.name, None)
    scales = [float(torch.stack([one.abs().max() for one in layer]).max()) for layer in wanted]
    found = {}
    for name, one in by_name.items():
        apart = torch.tensor(0.0)
        for layer, expected, scale in zip(one.gradients(), wanted, scales, strict=True):
            for ours, plain in zip(layer, expected, strict=True):
                apart = torch.maximum(apart, (ours - plain).abs().max().cpu() / (scale or max(scales)))
        found[name] = float(apart)  # NaN, if there is one anywhere
    return found


def measure(rank: int, task: Task, workload: Workload, contenders: list[Contender], progress: tqdm) -> dict[str, Any]:
    """All contenders on one workload, step by step in turn."""
    device = torch.device(task.device, rank) if task.device == "cuda" else torch.device("cpu")
    counter = WireCounter(task.interface, task.ranks_behind)
    trainees = [Trainee(contender, workload, rank, device) for contender in contenders]
    for trainee in trainees:
        progress.set_description(f"{workload.name}: {trainee.contender.name} warms up")
        for step in range(WARM_UP_STEPS):
            one_step(trainee, step)
    silent = wire_bytes(None, counter, 0)
    sent = {one.contender.name: max(0.0, wire_bytes(one, counter, WARM_UP_STEPS) - silent) for one in trainees}
    apart = differences(trainees)
    for trainee in trainees:
        trainee.zero_grad()
    samples: dict[str, list[dict[str, float]]] = {one.contender.name: [] for one in trainees}
    watch = Stopwatch(device)
    gc.collect()
    gc.freeze()  # what there is now is not looked at again
    gc.disable()
    for number in range(task.rounds * workload.repeats):
        order = list(trainees)
        random.Random(f"{workload.name} {number}").shuffle(order)  # the same on all ranks
        for trainee in order:
            progress.set_description(f"{workload.name}: {trainee.contender.name}")
            dist.barrier()
            sample = timed_step(trainee, WARM_UP_STEPS + BYTES_STEPS + number, watch)
            samples[trainee.contender.name].append(sample)
            progress.update()
        gc.collect()
    gc.enable()
    gc.unfreeze()
    return {"workload": workload.name, "samples": samples, "wire_bytes": sent, "apart": apart}


def main(folder: Path, rank: int) -> None:
    task = Task.read(folder)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = task.interface
    warnings.simplefilter("ignore")  # of torch about its own options
    if task.device == "cuda":
        torch.cuda.set_device(rank)
        if task.interface != "lo":  # else NCCL would find that both hosts are one machine
            os.environ["NCCL_P2P_DISABLE"] = os.environ["NCCL_SHM_DISABLE"] = "1"
    store = f"file://{folder}/store"
    backend = "nccl" if task.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=task.world_size)
    todo = [
        (workload, [one for name in task.contenders if (one := BY_NAME[name]).refusal(workload) is None])
        for workload in task.chosen_workloads()
    ]
    total = task.rounds * sum(workload.repeats * len(contenders) for workload, contenders in todo)
    runs = []
    with tqdm(total=total, disable=rank != 0 or not task.shows_progress) as progress:
        link = link_times(torch.device(task.device, rank) if task.device == "cuda" else torch.device("cpu"))
        for workload, contenders in todo:
            runs.append(measure(rank, task, workload, contenders, progress))
            gc.collect()
    (folder / f"rank{rank}.json").write_text(json.dumps({"link": link, "runs": runs}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # at once: many gloo groups stand, and torch may abort at exit


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
