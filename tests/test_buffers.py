"""Buffers follow rank 0: at construction, and once a step, before the first synchronised training forward.

Expected values are worked out in the docstring; gradients come from plain autograd on one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import assert_grads, inputs, make, mean_grads
from steps import counted_collectives, from_all_ranks, setups, square_loss, step_is_right, steps_are_right, world_sizes
from torch import Tensor, nn

from knownddp import KnownDDP


class _Kinds(nn.Module):
    """Buffers of many kinds, all of value ``start``; a call remembers what it saw."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("wide", torch.full((2,), float(start), dtype=torch.float64))
        self.register_buffer("narrow", torch.full((3,), float(start), dtype=torch.bfloat16))
        self.register_buffer("tiny", torch.full((), float(start), dtype=torch.float16))
        self.register_buffer("count", torch.full((5,), start, dtype=torch.int64))
        self.register_buffer("byte", torch.full((3,), start, dtype=torch.uint8))
        self.register_buffer("flag", torch.tensor([start % 2 == 0, start % 2 == 1, True]))
        self.register_buffer("wave", torch.full((2,), start * 1j, dtype=torch.complex64))
        self.register_buffer("turned", torch.full((3, 2), float(start)).t())
        self.register_buffer("alone", torch.full((2,), float(start))[::2])  # one element, stride 2
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("missing", None)
        self.register_buffer("unsaved", torch.full((2,), float(start)), persistent=False)
        self.seen: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {name: buffer.clone() for name, buffer in self.named_buffers()}
        return self.linear(self.norm(x))


def _put(module: _Kinds, value: int) -> None:
    """Write ``value`` to every buffer, as ``_Kinds(value)`` has it."""
    wanted = dict(_Kinds(value).named_buffers())
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if not name.startswith("norm"):
                buffer.copy_(wanted[name])


def _holds(found: dict[str, Tensor], value: int) -> None:
    for name, want in _Kinds(value).named_buffers():
        if not name.startswith("norm"):
            assert torch.equal(found[name], want) and found[name].dtype is want.dtype, name


def _kinds(rank: int, find: bool) -> None:
    module = _Kinds(start=7 + rank)
    objects = dict(module.named_buffers())
    model = KnownDDP(module, find_unused_parameters=find)
    _holds(dict(module.named_buffers()), 7)
    for step in range(3):
        _put(module, 10 * step + rank)
        square_loss(model, rank, step).backward()
        _holds(module.seen, 10 * step)
        assert module.seen["norm.num_batches_tracked"].item() == step
        assert all(buffer is objects[name] for name, buffer in module.named_buffers())
        assert module.missing is None


@pytest.mark.parametrize("find", [False, True])
@world_sizes
def test_buffers_of_every_kind_follow_rank_0_at_construction_and_before_each_step(ranks, world_size, find):
    """Rank r starts from 7 + r and later holds 10 step + r; every rank then sees rank 0's 7 and 10 step."""
    ranks(world_size, _kinds, find)


class _Replacing(nn.Module):
    """Assigns a new tensor to its buffer in every call, and a new buffer in the second one."""

    def __init__(self, step: float) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.step = step
        self.register_buffer("count", torch.zeros(1))
        self.saw: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.saw.append(self.count.item())
        self.count = self.count + self.step
        return self.linear(x)


def _replaced(rank: int) -> list[float]:
    model = KnownDDP(_Replacing(step=1.0 + 10 * rank))
    for step in range(4):
        square_loss(model, rank, step).backward()
    return model.module.saw


@world_sizes
def test_a_buffer_replaced_by_assignment_goes_on_following_rank_0(ranks, world_size):
    """Rank 0 adds 1 a call, rank r 1 + 10 r: all see 0, 1, 2, 3."""
    assert ranks(world_size, _replaced) == [[0.0, 1.0, 2.0, 3.0]] * world_size


def _batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def _two_forwards(module: nn.Module, rank: int, step: int) -> Tensor:
    return module(inputs(rank, 6, 3, seed=step)).mean() - square_loss(module, rank, step + 50)


def _batch_norm_twice(rank: int, cap: float | None, find: bool) -> None:
    plain, model = make(_batch_norm, bucket_cap_mb=cap, find_unused_parameters=find)
    steps_are_right(plain, model, rank, _two_forwards)


@pytest.mark.parametrize("find", [False, True])
@setups
def test_two_forwards_through_batch_norm_and_one_backward(ranks, world_size, cap, find):
    """What the first forward saved for its backward is not written to by the exchange."""
    ranks(world_size, _batch_norm_twice, cap, find)


def _older_graph(module: nn.Module, rank: int, step: int) -> Iterator[Tensor]:
    """The backward of the first call comes after that of the second, and after the exchange before the third."""
    first = square_loss(module, rank, step)
    yield square_loss(module, rank, step + 20)
    third = square_loss(module, rank, step + 40)
    yield first
    yield third


@world_sizes
def test_a_backward_through_batch_norm_after_a_later_exchange(ranks, world_size):
    ranks(world_size, _older)


def _older(rank: int) -> None:
    plain, model = make(_batch_norm)
    steps_are_right(plain, model, rank, _older_graph)


def _running_mean(rank: int) -> None:
    """Rank r keeps statistics of its own batches between the exchanges; the last forward does not move them."""
    plain, model = make(_batch_norm)
    for step in range(3):
        square_loss(model, rank, step).backward()
        with torch.no_grad():
            square_loss(plain, 0, step)
        assert torch.equal(model.module[1].running_mean, plain[1].running_mean) == (rank == 0)
    model.module[1].momentum = 0.0
    square_loss(model, rank).backward()
    assert torch.equal(model.module[1].running_mean, plain[1].running_mean)


@world_sizes
def test_running_statistics_are_those_of_rank_0(ranks, world_size):
    ranks(world_size, _running_mean)


# -- when nothing is exchanged


def _evaluating(rank: int, on: int, mode: Callable[[], AbstractContextManager[None]], with_eval: bool) -> None:
    """One rank evaluates by itself between training steps: nobody is waited for, and nothing is shifted."""
    plain, model = make(_batch_norm)
    for step in range(3):
        step_is_right(plain, model, rank, step)
        if rank == on:
            model.train(not with_eval)
            with mode(), counted_collectives() as called:
                for k in range(3):
                    square_loss(model, rank, 80 + k)
            assert called == []
            model.train()


@pytest.mark.parametrize("with_eval", [True, False], ids=["eval", "train"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("world_size", "on"), [(2, 0), (3, 1)])
def test_forwards_without_gradients_on_one_rank_alone_communicate_nothing(ranks, world_size, on, mode, with_eval):
    ranks(world_size, _evaluating, on, mode, with_eval)


def _evaluating_with_gradients(rank: int, on: int) -> None:
    """In eval mode also with gradients on: of a forward that has no backward nobody hears."""
    plain, model = make(_batch_norm)
    for step in range(3):
        step_is_right(plain, model, rank, step)
        if rank == on:
            model.eval()
            with counted_collectives() as called:
                x = inputs(rank, 5, 3, seed=70).requires_grad_()
                (saliency,) = torch.autograd.grad(model(x).sum(), x)
            assert called == [] and saliency.shape == x.shape
            model.train()


@pytest.mark.parametrize(("world_size", "on"), [(2, 0), (3, 1)])
def test_eval_forwards_with_gradients_on_one_rank_alone_communicate_nothing(ranks, world_size, on):
    ranks(world_size, _evaluating_with_gradients, on)


def _under_no_sync(rank: int) -> list[float]:
    module = _Replacing(step=1.0 + 10 * rank)
    model = KnownDDP(module)
    for step in range(2):
        with model.no_sync():
            square_loss(model, rank, step).backward()
            square_loss(model, rank, step).backward()
        square_loss(model, rank, step).backward()
    return module.saw


def test_unsynchronised_forwards_use_and_change_this_ranks_own_buffers(ranks):
    """Rank 0 adds 1 a call, rank 1 adds 11. Each third call is synchronised: rank 1 then sees rank 0's 2 and 5."""
    assert ranks(2, _under_no_sync) == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [0.0, 11.0, 2.0, 13.0, 24.0, 5.0]]


# -- switched off


def _switched_off(rank: int, arguments: dict[str, Any]) -> tuple[float, float]:
    """What the buffer holds after construction, and what a forward sees after it was set to 20 + r."""
    module = _Replacing(step=0.0)
    module.count.fill_(10.0 + rank)
    if "broadcast_buffers" in arguments:
        with pytest.warns(FutureWarning, match="broadcast_buffers"):
            model = KnownDDP(module, **arguments)
    else:
        model = KnownDDP(module, **arguments)
    constructed = module.count.item()
    module.count.fill_(20.0 + rank)
    square_loss(model, rank).backward()
    return constructed, module.saw[0]


FOLLOWS, OWN = [(10.0, 20.0), (10.0, 20.0)], [(10.0, 20.0), (11.0, 21.0)]
START_ONLY = [(10.0, 20.0), (10.0, 21.0)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, FOLLOWS),
        ({"forward_sync_buffers": True}, FOLLOWS),
        ({"forward_sync_buffers": False}, START_ONLY),
        ({"broadcast_buffers": True}, FOLLOWS),
        ({"broadcast_buffers": False}, OWN),
        ({"broadcast_buffers": False, "forward_sync_buffers": True}, FOLLOWS),
        ({"broadcast_buffers": True, "forward_sync_buffers": False}, START_ONLY),
    ],
)
def test_arguments_that_switch_the_exchange_off(ranks, arguments, expected):
    """Buffers hold 10 + r before construction and 20 + r before the forward, on rank r. ``forward_sync_buffers`` leaves
    the start alone and wins over its old name, which warns and, being False, leaves out the start too."""
    assert ranks(2, _switched_off, arguments) == expected


def _stale(rank: int) -> None:
    """With the exchange off, batch norm trains on each rank's own statistics and gradients are averaged as ever."""
    plain, model = make(_batch_norm, forward_sync_buffers=False)
    steps_are_right(plain, model, rank, _two_forwards)
    assert not torch.equal(*from_all_ranks(model.module[1].running_mean)[:2])
    with counted_collectives() as called:
        square_loss(model, rank)
    assert called == []
    model.zero_grad()
    square_loss(model, rank, 5).backward()
    assert_grads(model, mean_grads(plain, dist.get_world_size(), lambda m, r: square_loss(m, r, 5)))


@world_sizes
def test_with_the_exchange_off_a_forward_communicates_nothing(ranks, world_size):
    ranks(world_size, _stale)
