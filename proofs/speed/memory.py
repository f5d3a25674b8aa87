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
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from .contenders import BY_NAME, Contender, Trainee
from .fake import PromptCollectives, fake_rank, make_complete
from .launch import ROOT, environment
from .rank import WARM_UP_STEPS, one_step
from .task import Task
from .workloads import Workload


@dataclass(frozen=True)
class StepMemory:
    """Of the last of several steps.

    Attributes:
        held_before: bytes held when it began, of what was asked for since before the wrapper was made.
        changes: bytes asked for (positive) and given back, one after the other.
    """

    held_before: int
    changes: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """The most that was held at a time, activations included."""
        return self.held_before + max(accumulate(self.changes), default=0)

    @property
    def kept_bytes(self) -> int:
        """What is held when the backward is over: gradients and buckets."""
        return self.held_before + sum(self.changes)


def of_last_step(contender: Contender, workload: Workload) -> StepMemory:
    """Every change of the CPU's memory, from torch's profiler."""
    trainee = Trainee(contender, workload, 0, torch.device("cpu"), wraps=False)
    gc.collect()
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=True) as profile:
        trainee.wrap()
        make_complete(trainee.wrapper)
        for step in range(WARM_UP_STEPS + 1):
            trainee.zero_grad()
            with torch.autograd.profiler.record_function(f"step {step}"):
                one_step(trainee, step)
    events = profile.kineto_results.events()
    last = next(event for event in events if event.name() == f"step {WARM_UP_STEPS}")
    memory = [event for event in events if event.name() == "[memory]" and event.start_ns() <= last.end_ns()]
    memory.sort(key=lambda event: event.start_ns())
    before = [event.nbytes() for event in memory if event.start_ns() < last.start_ns()]
    return StepMemory(sum(before), tuple(event.nbytes() for event in memory[len(before) :]))


def peak_of(contender: Contender, workload: Workload, device: torch.device) -> dict[str, int]:
    """``peak_bytes`` and ``kept_bytes`` of the last step, by the allocator of ``device``."""
    if device.type != "cuda":
        found = of_last_step(contender, workload)
        return {"peak_bytes": found.peak_bytes, "kept_bytes": found.kept_bytes}
    trainee = Trainee(contender, workload, 0, device, wraps=False)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    trainee.wrap()
    make_complete(trainee.wrapper)
    for step in range(WARM_UP_STEPS + 1):
        trainee.zero_grad()
        torch.cuda.reset_peak_memory_stats(device)
        one_step(trainee, step)
    torch.cuda.synchronize(device)
    peak, kept = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    return {"peak_bytes": peak - before, "kept_bytes": kept - before}


def peaks(task: Task) -> dict[str, dict[str, dict[str, int]]]:
    """By workload and contender, measured in a process of its own."""
    with TemporaryDirectory(prefix="knownddp-speed-") as folder:
        task.write(Path(folder))
        command = [sys.executable, "-m", "proofs.speed.memory", folder]
        # The profiler writes lines of its own to stderr, which are of use only if it fails.
        done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"memory could not be measured:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main(folder: Path) -> None:
    task = Task.read(folder)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    device = torch.device(task.device, 0) if task.device == "cuda" else torch.device("cpu")
    found = {}
    # As on a link that is quick beside a backward; else all buckets would wait for its end.
    with fake_rank(0, task.world_size, PromptCollectives):
        for workload in task.chosen_workloads():
            able = [one for name in task.contenders if (one := BY_NAME[name]).refusal(workload) is None]
            found[workload.name] = {one.name: peak_of(one, workload, device) for one in able}
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
