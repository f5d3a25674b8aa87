"""Copies and pickles of a wrapper, in the middle of training.

Expected gradients come from plain autograd on one process.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from models import inputs, make
from steps import counted_collectives, declares, setups, square_loss, step_is_right, steps_are_right, world_sizes
from torch import Tensor, nn

from knownddp import KnownDDP


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def _twin_by_copy(model: KnownDDP) -> KnownDDP:
    return copy.deepcopy(model)


def _twin_by_pickle(model: KnownDDP) -> KnownDDP:
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    return torch.load(stored, weights_only=False)


TWINS = pytest.mark.parametrize("twin_of", [_twin_by_copy, _twin_by_pickle])


def _copied(rank: int, twin_of: Callable[[KnownDDP], KnownDDP], cap: float | None) -> None:
    """In the middle of training. Both go on, in turns, with parameters of their own."""
    plain, model = make(bucket_cap_mb=cap)
    steps_are_right(plain, model, rank, steps=2)
    twin = twin_of(model)
    ours, theirs = ({p.data_ptr() for p in m.parameters()} for m in (model, twin))
    assert not ours & theirs
    assert list(twin.state_dict()) == list(model.state_dict())
    for step in range(3):
        for one in (model, twin):
            assert torch.equal(one(inputs(rank, 5, 3)), plain(inputs(rank, 5, 3)))
            step_is_right(plain, one, rank, step)
            step_is_right(plain, one, rank, step, lambda m, r, s: _declaring_loss(m, r, s, {s % 4, 1}))


def _declaring_loss(module: nn.Module, rank: int, step: int, skip: set[int]) -> Tensor:
    return square_loss(module, rank, step, skip=skip, **declares(module, [f"layers.{i}" for i in skip]))


@TWINS
@setups
def test_a_copy_trains_on_beside_the_original(ranks, world_size, cap, twin_of):
    ranks(world_size, _copied, twin_of, cap)


def _copied_before_training(rank: int, twin_of: Callable[[KnownDDP], KnownDDP]) -> None:
    """A copy keeps the options: it detects unused parameters and leaves buffers alone as the original does."""
    options = {"find_unused_parameters": True, "forward_sync_buffers": False}
    plain, model = make(_Choice, **options)
    twin = twin_of(model)
    assert twin.find_unused_parameters and not twin.forward_sync_buffers
    assert twin.bucket_bytes_cap == model.bucket_bytes_cap
    for step in range(3):
        for one in (twin, model):
            step_is_right(plain, one, rank, step, lambda m, r, s: square_loss(m, r, s, which=(r + s) % 2))


class _Choice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([_mlp(), _mlp()])

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.parts[which](x)


@TWINS
@world_sizes
def test_a_copy_keeps_the_options(ranks, world_size, twin_of):
    ranks(world_size, _copied_before_training, twin_of)


def _copied_on_one_rank(rank: int, twin_of: Callable[[KnownDDP], KnownDDP]) -> None:
    """An average of weights, kept and evaluated by rank 0 alone."""
    plain, model = make(_mlp)
    for step in range(3):
        step_is_right(plain, model, rank, step)
        if rank == 0:
            with counted_collectives() as called:
                average = twin_of(model)
                with torch.no_grad():
                    assert torch.equal(average(inputs(0, 5, 3)), plain(inputs(0, 5, 3)))
            assert called == []


@TWINS
def test_one_rank_alone_may_copy(ranks, twin_of):
    ranks(2, _copied_on_one_rank, twin_of)


def _copied_with_group(rank: int, twin_of: Callable[[KnownDDP], KnownDDP]) -> None:
    """A copy would have to average over a group that cannot be stored; over another one it would be wrong silently."""
    group = dist.new_group([0, 1])
    if rank < 2:
        _, model = make(_mlp, process_group=group)
        with pytest.raises(RuntimeError, match="default process group"):
            twin_of(model)
        square_loss(model, rank).backward()
    dist.barrier()


@TWINS
def test_a_wrapper_over_a_group_of_its_own_refuses_to_be_copied(ranks, twin_of):
    ranks(3, _copied_with_group, twin_of)
