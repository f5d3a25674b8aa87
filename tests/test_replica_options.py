"""Several devices in one process together with checkpoints, buffers and mixed precision; see ``test_replicas.py``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Skippable, assert_grads, inputs, make, mean_grads
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from knownddp import KnownDDP

two_by_two = pytest.mark.parametrize(("world_size", "replicas"), [(1, 2), (2, 2), (2, 3)])


def on(replicas: int) -> dict[str, Any]:
    """Options for so many replicas."""
    return {"device_ids": ["cpu"] * replicas}


def rows(rank: int, step: int = 0, number: int = 5) -> Tensor:
    return inputs(rank, number, 3, seed=step)


# -- checkpoints


class _Checkpointed(nn.Module):
    """Layers with dropout: a recomputation that draws other numbers gives other gradients."""

    def __init__(self, *, reentrant: bool, recomputes: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Tanh()) for _ in range(2))
        self.reentrant, self.recomputes = reentrant, recomputes

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant) if self.recomputes else layer(x)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_draw_again_what_their_replica_drew(reentrant):
    torch.manual_seed(0)
    model = KnownDDP(_Checkpointed(reentrant=reentrant), **on(3))
    reference = copy.deepcopy(model)
    reference.module.recomputes = False
    for step in range(3):
        for one in (model, reference):
            torch.manual_seed(step)
            one.zero_grad()
            one(rows(0, step, 6).requires_grad_()).square().sum().backward()
        assert_grads(model, {n: p.grad for n, p in reference.module.named_parameters()})


def test_a_checkpoint_around_the_wrapper_recomputes_all_replicas():
    plain, model = make(**on(3))
    for step in range(3):
        model.zero_grad()
        checkpoint(model, rows(0, step).requires_grad_(), use_reentrant=False).square().sum().backward()
        assert_grads(model, mean_grads(plain, 1, lambda m, _, s=step: m(rows(0, s)).square().sum()))


# -- buffers and mixed precision


class _Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(x)


def _buffers(rank: int, replicas: int) -> list[float]:
    plain, model = make(_Norm, **on(replicas))
    x = rows(0, number=6)
    model(rows(rank, number=6)).sum().backward()
    model(rows(rank, number=6)).sum().backward()  # brings rank 0's of the first step
    mine = rows(rank, number=6)[: 6 // replicas]
    for part in (x[: 6 // replicas], mine):
        plain(part)
    torch.testing.assert_close(model.module.norm.running_mean, plain.norm.running_mean)
    torch.testing.assert_close(model.module.norm.running_var, plain.norm.running_var)
    return [model.module.calls.item(), model.module.norm.num_batches_tracked.item()]


@two_by_two
def test_buffers_are_those_of_replica_0_of_rank_0(ranks, world_size, replicas):
    """A call counts once, however many replicas it has."""
    assert ranks(world_size, _buffers, replicas) == [[2, 2]] * world_size


@two_by_two
def test_mixed_precision_goes_with_replicas(ranks, world_size, replicas):
    ranks(world_size, _mixed, replicas)


class _DtypeNoting(Skippable):
    def forward(self, x: Tensor, skip: Any = ()) -> Tensor:
        assert x.dtype == self.layers[0].weight.dtype
        return super().forward(x, skip)


def _mixed(rank: int, replicas: int) -> None:
    """In float64 nothing is lost: gradients are those of a double-precision copy, rounded once."""
    config = nn.parallel.distributed._MixedPrecision(param_dtype=torch.float64)
    plain, model = make(_DtypeNoting, mixed_precision=config, **on(replicas))
    for step in range(3):
        model.zero_grad()
        output = model(rows(rank, step))
        assert output.dtype == torch.float64
        output.square().mean().backward()
        double = copy.deepcopy(plain).double()
        wanted = mean_grads(double, dist.get_world_size(), lambda m, r, s=step: m(rows(r, s).double()).square().mean())
        assert_grads(model, {name: grad.float() for name, grad in wanted.items()})
