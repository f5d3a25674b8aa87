"""Peak memory of a step, by torch's own count of what its allocator hands out: ``python -m proofs.speed.memory``.

Counted from before the wrapper is made, so parameters are left out and buckets are in. The group is fake: gloo's
threads would give memory back unseen.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from .contenders import BY_NAME, Contender, Trainee
from .fake import fake_rank, make_complete
from .launch import ROOT, environment
from .rank import WARM_UP_STEPS, one_step
from .task import Task
from .workloads import Workload


def _running_totals(changes: Iterable[int]) -> list[int]:
    totals = [0]
    for change in changes:
        totals.append(totals[-1] + change)
    return totals


def peak_of(contender: Contender, workload: Workload, device: torch.device) -> dict[str, int]:
    """Bytes of the last step.

    ``peak_bytes``: the most that was held at a time, activations included. ``kept_bytes``: what is still held when the
    backward is over: gradients and buckets.
    """
    trainee = Trainee.__new__(Trainee)
    trainee.contender, trainee.workload = contender, workload
    trainee.module = workload.build().to(device)
    trainee.inputs = workload.inputs(0).to(device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        trainee.wrapper = contender.wrap(trainee.module)
        make_complete(trainee.wrapper)
        for step in range(WARM_UP_STEPS + 1):
            torch.cuda.reset_peak_memory_stats(device)
            one_step(trainee, step)
        torch.cuda.synchronize(device)
        peak, kept = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        return {"peak_bytes": peak - before, "kept_bytes": kept - before}
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=True) as profile:
        trainee.wrapper = contender.wrap(trainee.module)
        make_complete(trainee.wrapper)
        for step in range(WARM_UP_STEPS + 1):
            trainee.zero_grad()
            with torch.autograd.profiler.record_function(f"step {step}"):
                one_step(trainee, step)
    events = profile.kineto_results.events()
    last = next(event for event in events if event.name() == f"step {WARM_UP_STEPS}")
    memory = [event for event in events if event.name() == "[memory]" and event.start_ns() <= last.end_ns()]
    memory.sort(key=lambda event: event.start_ns())
    totals = _running_totals(event.nbytes() for event in memory)
    inside = [total for total, event in zip(totals[1:], memory, strict=True) if event.start_ns() >= last.start_ns()]
    return {"peak_bytes": max(inside), "kept_bytes": inside[-1]}


def peaks(task: Task) -> dict[str, dict[str, dict[str, int]]]:
    """By workload and contender, measured in a process of its own."""
    with TemporaryDirectory(prefix="knownddp-speed-") as folder:
        task.write(Path(folder))
        command = [sys.executable, "-m", "proofs.speed.memory", folder]
        done = subprocess.run(command, env=environment(), cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(folder: Path) -> None:
    task = Task.read(folder)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    device = torch.device(task.device, 0) if task.device == "cuda" else torch.device("cpu")
    found = {}
    with fake_rank(0, task.world_size):
        for workload in task.chosen_workloads():
            able = [one for name in task.contenders if (one := BY_NAME[name]).refusal(workload) is None]
            found[workload.name] = {one.name: peak_of(one, workload, device) for one in able}
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
