"""Activation checkpoints inside the wrapped module, reentrant and not.

Expected gradients come from plain autograd on one process. A wrapper called inside a checkpoint is in
``test_failures.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection

import pytest
import torch
import torch.distributed as dist
from models import Skippable, assert_grads, inputs, make, mean_grads
from steps import declares, setups, step_is_right, steps_are_right, world_sizes
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class _Checkpointed(Skippable):
    """Each layer behind an activation checkpoint, ``times`` times; layer 0 runs under both of its uses if shared."""

    def __init__(self, reentrant: bool, times: int, shared: bool) -> None:
        super().__init__(depth=3)
        self._reentrant = reentrant
        self._times = times
        if shared:
            self.layers[2] = self.layers[0]

    def forward(self, x: Tensor, skip: Collection[int] = ()) -> Tensor:
        for i, layer in enumerate(self.layers):
            if i not in skip:
                for _ in range(self._times):
                    x = x + torch.tanh(checkpoint(layer, x, use_reentrant=self._reentrant))
        return x


class _Recomputed(_Checkpointed):
    def __init__(self, reentrant: bool, kind: str) -> None:
        super().__init__(reentrant, times=2 if kind == "twice" else 1, shared=kind == "shared")


def _checkpoint_loss(module: nn.Module, rank: int, step: int, skip: Collection[int] = ()) -> Tensor:
    return module(inputs(rank, 5, 3, seed=step).requires_grad_(), skip=skip).square().mean()


def _checkpointing(rank: int, reentrant: bool, kind: str, find: bool, cap: float | None) -> None:
    plain, model = make(lambda: _Recomputed(reentrant, kind), find_unused_parameters=find, bucket_cap_mb=cap)
    steps_are_right(plain, model, rank, _checkpoint_loss, steps=4)


@pytest.mark.parametrize("find", [False, True])
@pytest.mark.parametrize("kind", ["once", "twice", "shared"])
@pytest.mark.parametrize("reentrant", [False, True])
@setups
def test_activation_checkpoints_inside_the_module(ranks, world_size, cap, reentrant, kind, find):
    ranks(world_size, _checkpointing, reentrant, kind, find, cap)


class _Repeating(nn.Module):
    """A layer behind as many reentrant checkpoints as the call says: so often its gradient comes in one backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.layer = nn.Linear(3, 3)
        self._reentrant = reentrant

    def forward(self, x: Tensor, times: int) -> Tensor:
        x = torch.tanh(self.first(x))
        for _ in range(times):
            x = x + torch.tanh(checkpoint(self.layer, x, use_reentrant=self._reentrant))
        return x


def _repeating(rank: int, reentrant: bool, find: bool, cap: float | None) -> None:
    """How often it comes changes with the step and differs between ranks. What stood in ``.grad`` joins once."""
    plain, model = make(lambda: _Repeating(reentrant), find_unused_parameters=find, bucket_cap_mb=cap)
    world = dist.get_world_size()
    times = [[1, 1, 1], [1, 1, 1], [1, 2, 3], [1, 1, 1], [2, 0, 1], [3, 2, 1]]
    for step, of_rank in enumerate(times):

        def loss_of(module: nn.Module, r: int, step: int, of_rank: list[int] = of_rank) -> Tensor:
            x = inputs(r, 5, 3, seed=step).requires_grad_()
            return module(x, times=of_rank[r]).square().mean()

        step_is_right(plain, model, rank, step, loss_of)
        loss_of(model, rank, step).backward()
        wanted = mean_grads(plain, world, lambda m, r, s=step, f=loss_of: [f(m, r, s), f(m, r, s)])
        assert_grads(model, wanted)


@pytest.mark.parametrize("find", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@setups
def test_a_layer_whose_gradient_comes_another_number_of_times_in_each_step(ranks, world_size, cap, reentrant, find):
    ranks(world_size, _repeating, reentrant, find, cap)


def _skipping_checkpoints(rank: int, reentrant: bool, way: str) -> None:
    """Rank 0 skips layers 0 and 1 in turn, the others layer 1: nobody uses 1 in every other step."""
    plain, model = make(lambda: _Recomputed(reentrant, "once"), find_unused_parameters=way == "detected")

    def loss_of(module: nn.Module, r: int, step: int) -> Tensor:
        skip = {1} if r or step % 2 else {0}
        declared = declares(module, [f"layers.{i}" for i in skip]) if way == "declared" else {}
        return module(inputs(r, 5, 3, seed=step).requires_grad_(), skip=skip, **declared).square().mean()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*declared different unused parameters", UserWarning)
        steps_are_right(plain, model, rank, loss_of, steps=5)


@pytest.mark.parametrize("way", ["detected", "declared"])
@pytest.mark.parametrize("reentrant", [False, True])
@world_sizes
def test_checkpointed_layers_that_ranks_skip(ranks, world_size, reentrant, way):
    ranks(world_size, _skipping_checkpoints, reentrant, way)


class _WholeCheckpoint(nn.Module):
    """All of it is behind one checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        self._reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self._reentrant)


def _whole(rank: int, reentrant: bool, find: bool, cap: float | None) -> None:
    plain, model = make(lambda: _WholeCheckpoint(reentrant), find_unused_parameters=find, bucket_cap_mb=cap)
    steps_are_right(plain, model, rank, lambda m, r, s: m(inputs(r, 5, 3, seed=s).requires_grad_()).square().mean())


@pytest.mark.parametrize("find", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@setups
def test_a_module_that_is_wholly_behind_one_checkpoint(ranks, world_size, cap, reentrant, find):
    ranks(world_size, _whole, reentrant, find, cap)


def _accumulated_checkpoints(rank: int, reentrant: bool) -> None:
    plain, model = make(lambda: _Recomputed(reentrant, "once"))
    for step in range(3):
        model.zero_grad(set_to_none=True)
        with model.no_sync():
            _checkpoint_loss(model, rank, step).backward()
        _checkpoint_loss(model, rank, step + 50).backward()
        wanted = mean_grads(
            plain,
            dist.get_world_size(),
            lambda m, r, s=step: [_checkpoint_loss(m, r, s), _checkpoint_loss(m, r, s + 50)],
        )
        assert_grads(model, wanted)


@pytest.mark.parametrize("reentrant", [False, True])
@world_sizes
def test_checkpoints_under_no_sync_stay_local_until_the_synchronised_call(ranks, world_size, reentrant):
    ranks(world_size, _accumulated_checkpoints, reentrant)
