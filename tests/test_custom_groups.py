"""Process groups that are not gloo's own: written in Python, or wrapped by torch's debug mode.

Expected gradients come from plain autograd on one process.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections import Counter
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist
from models import assert_grads, make, mean_grads
from ranks import run_processes
from steps import TINY_CAP_MB, square_loss, step_is_right, steps_are_right
from torch import Tensor, nn
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

from knownddp import KnownDDP


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


class _Work(dist._Work):
    """A handle written in Python: it counts what it is asked for."""

    def __init__(self, result: object, group: _Lonely) -> None:
        super().__init__()
        self._future: Future[object] = Future()
        self._future.set_result(result)
        self._group = weakref.ref(group)

    def wait(self, timeout: timedelta) -> bool:
        group = self._group()
        assert group is not None
        group.counts["wait"] += 1
        return True

    def get_future(self) -> Future[object]:
        group = self._group()
        assert group is not None
        group.counts["get_future"] += 1
        return self._future


class _Lonely(dist.ProcessGroup):
    """A world of one. ``own_work``: hand out handles written in Python, else torch's own around a future."""

    def __init__(self, own_work: bool) -> None:
        super().__init__(0, 1)
        self.counts: Counter[str] = Counter()
        self._own_work = own_work
        self._works: list[object] = []

    def _done(self, name: str, result: object) -> object:
        self.counts[name] += 1
        if self._own_work:
            self._works.append(_Work(result, self))
            return self._works[-1]
        future: Future[object] = Future()
        future.set_result(result)
        return _create_work_from_future(future)

    def broadcast(self, tensors: list[Tensor], options: object) -> object:
        return self._done("broadcast", tensors)

    def allreduce(self, tensors: list[Tensor], options: object) -> object:
        return self._done("allreduce", tensors)

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], options: object) -> object:
        for output, tensor in zip(outputs[0], tensors, strict=True):
            output.copy_(tensor)
        return self._done("allgather", outputs)

    def getSize(self) -> int:
        return 1

    def getBackendName(self) -> str:
        return "lonely"


def _over_a_python_group(rank: int, own_work: bool, views: bool, cap: float | None) -> None:
    group = _Lonely(own_work)
    torch.manual_seed(0)
    plain = _mlp()
    model = KnownDDP(copy.deepcopy(plain), process_group=group, gradient_as_bucket_view=views, bucket_cap_mb=cap)
    for step in range(3):
        model.zero_grad()
        square_loss(model, rank, step).backward()
        assert_grads(model, mean_grads(plain, 1, lambda m, r, s=step: square_loss(m, r, s)))
    assert group.counts["allreduce"] > 0
    if own_work:
        assert group.counts["wait"] > 0 and group.counts["get_future"] > 0


@pytest.mark.parametrize("cap", [None, TINY_CAP_MB])
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("own_work", [False, True])
def test_a_process_group_written_in_python(ranks, own_work, views, cap):
    ranks(1, _over_a_python_group, own_work, views, cap)


class _Cloning(dist.ProcessGroup):
    """Calls the default group with copies: a result arrives in the future alone."""

    def __init__(self) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size())

    def allreduce(self, tensors: list[Tensor], options: dist.AllreduceOptions) -> object:
        copies = [tensor.clone() for tensor in tensors]
        dist.group.WORLD.allreduce(copies, options).wait()  # type: ignore[union-attr]
        return self._done(copies)

    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> object:
        copies = [tensor.clone() for tensor in tensors]
        dist.group.WORLD.broadcast(copies, options).wait()  # type: ignore[union-attr]
        return self._done(copies)

    def allgather(self, found: list[list[Tensor]], tensors: list[Tensor], *options: object) -> object:
        dist.group.WORLD.allgather(found, tensors).wait()  # type: ignore[union-attr]
        return self._done(found)

    def _done(self, result: object) -> object:
        future: Future[object] = Future()
        future.set_result(result)
        return _FutureAlone(future)

    def getBackendName(self) -> str:
        return "cloning"


class _FutureAlone(dist._Work):
    def __init__(self, future: Future[object]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Future[object]:
        return self._future


def _results_in_futures(rank: int, hook: str) -> None:
    torch.manual_seed(0)
    plain = _mlp()
    model = KnownDDP(copy.deepcopy(plain), process_group=_Cloning(), bucket_cap_mb=TINY_CAP_MB)
    if hook == "built in":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    elif hook:
        model.register_comm_hook(None, lambda _, bucket: _halved(model, bucket))
    steps_are_right(plain, model, rank)


def _halved(model: KnownDDP, bucket: dist.GradBucket) -> Future[Tensor]:
    bucket.buffer().div_(2)
    return model.reducer._run_allreduce_hook(bucket)


class _Complex(nn.Module):
    """``forward(x)`` is the real part of weight times x + i x, whose gradient is x - i x."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * torch.complex(x, x)).real.sum()


def _complex_results(rank: int) -> list[complex]:
    model = KnownDDP(_Complex(), process_group=_Cloning())
    model(torch.tensor([1.0, 2.0, 4.0]) * (rank + 1)).backward()
    found: list[complex] = model.module.weight.grad.tolist()
    return found


def test_complex_gradients_over_a_group_written_in_python(ranks):
    """x is 1, 2, 4 and twice that, so means are 1.5, 3, 6."""
    assert ranks(2, _complex_results) == [[1.5 - 1.5j, 3 - 3j, 6 - 6j]] * 2


@pytest.mark.parametrize("hook", ["", "built in", "calls the reducer's"])
def test_a_group_whose_results_arrive_in_futures_alone(ranks, hook):
    ranks(2, _results_in_futures, hook)


def _silent(rank: int) -> Counter[str]:
    group = _Lonely(own_work=True)
    KnownDDP(_mlp(), process_group=group, init_sync=False)
    return group.counts


def test_without_init_sync_a_group_written_in_python_is_not_called(ranks):
    assert ranks(1, _silent) == [Counter()]


# -- TORCH_DISTRIBUTED_DEBUG


def _trains(rank: int, folder: str, level: str, answer: Connection) -> None:
    """In a process of its own: the level is read once."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = level
    torch.set_num_threads(1)
    dist.set_debug_level_from_env()
    assert dist.get_debug_level() == getattr(dist.DebugLevel, level)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    for options in ({}, {"find_unused_parameters": True, "bucket_cap_mb": TINY_CAP_MB}, {"own_group": False}):
        plain, model = make(_mlp, **options)
        steps_are_right(plain, model, rank, steps=3)
        with model.no_sync():
            square_loss(model, rank).backward()
        step_is_right(plain, model, rank)
    dist.barrier()
    answer.send("trained")
    dist.destroy_process_group()


@pytest.mark.parametrize("level", ["INFO", "DETAIL"])
def test_training_under_torchs_debug_levels(tmp_path, level):
    """DETAIL wraps every group and compares the collectives of the ranks: they must be the same ones in one order."""
    assert run_processes(_trains, 2, str(tmp_path), level) == ["trained"] * 2
