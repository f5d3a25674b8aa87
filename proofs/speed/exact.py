"""What of the cost does not depend on a clock: ``python -m proofs.speed.exact`` (``--json`` for programs).

Counted on one rank of a fake group of two, whose collectives do nothing and run on no other thread: bytes and
collectives of a step, memory that is asked for, and calls of Python functions for each parameter.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any
from unittest import mock

import torch

from knownddp import options

from .contenders import BY_NAME, Contender, Trainee
from .fake import FakeCollectives, PromptCollectives, Recorder, fake_rank, make_complete
from .host_time import NUM_PARAMS, Tiny
from .memory import of_last_step
from .rank import WARM_UP_STEPS, one_step
from .workloads import Workload, workloads

NAMES = ("plain", "ddp", "ddp-find", "known", "known-find", "known-trust")
CPU = torch.device("cpu")
NUM_BUCKETS = 16


def collectives(contender: Contender, workload: Workload) -> dict[str, int]:
    """Of one step that is not the first: how many all-reduces, bytes of the float ones (gradients) and of others."""
    trainee = Trainee(contender, workload, 0, CPU)
    make_complete(trainee.wrapper)
    for step in range(WARM_UP_STEPS):
        one_step(trainee, step)
    with Recorder() as recorder:
        one_step(trainee, WARM_UP_STEPS)
    return {
        "collectives": len(recorder.log),
        "gradient_bytes": sum(n for _, is_gradient, n in recorder.log if is_gradient),
        "other_bytes": sum(n for _, is_gradient, n in recorder.log if not is_gradient),
    }


def memory(contender: Contender, workload: Workload) -> dict[str, int]:
    """Of such a step; ``asked_bytes``: all that was asked for, beyond what the plain module asks for."""
    found = of_last_step(contender, workload)
    asked = sum(change for change in found.changes if change > 0)
    return {"peak_bytes": found.peak_bytes, "kept_bytes": found.kept_bytes, "asked_bytes": asked}


def calls(step: Callable[[], object]) -> int:
    """How many Python functions are called while ``step`` runs."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    gc.disable()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def python_calls(
    contender: Contender, num_params: int, *, num_buckets: int = 1, collectives: type[FakeCollectives] = FakeCollectives
) -> dict[str, float]:
    """A parameter, in forward and backward of a step that is not the first, and in a backward under ``no_sync``.

    ``num_buckets``: of KnownDDP.
    """
    module = Tiny(num_params)
    cap_bytes = sum(p.nbytes for p in module.parameters()) // num_buckets
    with (
        mock.patch.object(options, "GLOO_CAP_BYTES", (cap_bytes,)),
        mock.patch("knownddp.ddp.collectives_over", collectives),
    ):
        wrapper = contender.wrap(module)
    make_complete(wrapper)
    x = torch.ones(sum(p.numel() for p in module.parameters()))

    loss = x

    def forward() -> None:
        nonlocal loss
        module.zero_grad(set_to_none=True)
        loss = wrapper(x).sum()

    for _ in range(WARM_UP_STEPS):
        forward()
        loss.backward()
    found = {"forward_calls": calls(forward) / num_params}
    found["backward_calls"] = calls(lambda: loss.backward()) / num_params
    with getattr(wrapper, "no_sync", contextlib.nullcontext)():
        forward()
    return {**found, "no_sync_calls": calls(lambda: loss.backward()) / num_params}


def measure() -> dict[str, dict[str, float]]:
    """By contender: all of the above, with half of the layers of small models dropped where it can do that."""
    found: dict[str, dict[str, float]] = {}
    drawn = {one.name: one for one in workloads(quick=True, drops=(0.0, 0.5))}
    torch.set_num_threads(1)
    with fake_rank(0, 2):
        for name in NAMES:
            contender = BY_NAME[name]
            half = drawn["drop-0.5"]
            workload = half if contender.refusal(half) is None else drawn["drop-0"]
            row: dict[str, Any] = {"used_bytes": workload.used_bytes, "param_bytes": workload.param_bytes}
            row |= collectives(contender, workload)
            row |= memory(contender, workload)
            row |= python_calls(contender, NUM_PARAMS)
            for how, collectives_ in (("at once", PromptCollectives), ("late", FakeCollectives)):
                several = python_calls(contender, NUM_PARAMS, num_buckets=NUM_BUCKETS, collectives=collectives_)
                row[f"calls, {how}"] = several["backward_calls"]
            found[name] = row
    plain = dict(found["plain"])
    for row in found.values():
        for key in ("asked_bytes", *(key for key in row if "calls" in key)):
            row[key] -= plain[key]
    return found


def main(arguments: list[str]) -> int:
    warnings.simplefilter("ignore")
    found = measure()
    if "--json" in arguments:
        print(json.dumps(found))
        return 0
    columns = list(next(iter(found.values())))
    print(f"{'':<12}" + "".join(f"{column:>16}" for column in columns))
    for name, row in found.items():
        print(f"{name:<12}" + "".join(f"{row[column]:>16.6g}" for column in columns))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
