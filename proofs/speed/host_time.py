"""What a wrapper costs the host for each parameter, where there is nobody to send to.

World size 1 and 800 parameters of 8 floats: backward of the wrapper minus backward of the plain module, by the
processor's clock, divided by the parameters.
"""

from __future__ import annotations

import gc
import json
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .contenders import BY_NAME, CONTENDERS, PLAIN
from .launch import ROOT, environment
from .summary import spread
from .workloads import Dropped

NUM_PARAMS, NUMEL = 800, 8
ROUNDS = 201


class Tiny(nn.Module):
    """Many small parameters and hardly anything to compute."""

    def __init__(self, num_params: int) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.ones(NUMEL)) for _ in range(num_params))

    def forward(self, x: Tensor, dropped: Collection[int] = (), instead: Dropped = Dropped.SKIP) -> Tensor:
        return x * torch.cat(list(self.layers))


def measure(num_params: int, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """A row a contender that can train a model that uses everything."""
    x = torch.ones(num_params * NUMEL, device=device)
    # FSDP's replicate makes groups of modules, of which this model has none but itself; it would be no comparison.
    able = [one for one in CONTENDERS if one.drops != "some" and one.name != "replicate"]
    modules = {one.name: Tiny(num_params).to(device) for one in able}
    wrappers = {one.name: one.wrap(modules[one.name]) for one in able}
    times: dict[str, list[float]] = {one.name: [] for one in able}
    gc.collect()
    gc.freeze()  # what there is now is not looked at again
    gc.disable()
    for number in range(-4, rounds):
        order = [one.name for one in able]
        random.Random(number).shuffle(order)
        for name in order:
            modules[name].zero_grad(set_to_none=not BY_NAME[name].keeps_grads)
            loss = wrappers[name](x).sum()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            begun = time.process_time()
            loss.backward()
            took = time.process_time() - begun
            if number >= 0:
                times[name].append(took)
        gc.collect()
    rows = []
    for one in able:
        if one is not PLAIN:
            pairs = zip(times[one.name], times[PLAIN.name], strict=True)
            more = [1e6 * (ours - plain) / num_params for ours, plain in pairs]
            rows.append({"contender": one.name, "title": one.title, "us_a_parameter": spread(more)})
    return rows


def host_times(*, quick: bool, device: str) -> list[dict[str, Any]]:
    """Measured in a process of its own."""
    command = [sys.executable, "-m", "proofs.speed.host_time", "--quick" if quick else "--full", device]
    done = subprocess.run(command, env=environment(), cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(size: str, device: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        sizes = (50, 5) if size == "--quick" else (NUM_PARAMS, ROUNDS)
        print(json.dumps(measure(*sizes, torch.device(device, 0) if device == "cuda" else torch.device("cpu"))))
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
