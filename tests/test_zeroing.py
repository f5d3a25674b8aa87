"""The tensors in ``.grad``: kept where one stood, left to whoever holds them, and zeroed in any way.

Expected gradients come from plain autograd on one process.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from models import assert_grads, make, mean_grads
from steps import assert_same_parameters, follow, setups, square_loss, world_sizes

from knownddp import KnownDDP

Zero = Callable[[KnownDDP, torch.optim.Optimizer], None]


def _keep_identity(rank: int, cap: float | None) -> None:
    """Whoever holds on to a gradient (an optimizer, a logger) goes on seeing it."""
    plain, model = make(bucket_cap_mb=cap)
    square_loss(model, rank).backward()
    held = [p.grad for p in model.parameters()]
    for step in range(3):
        model.zero_grad(set_to_none=False)
        square_loss(model, rank, step).backward()
        assert all(p.grad is grad for p, grad in zip(model.parameters(), held, strict=True))
        assert_grads(model, mean_grads(plain, dist.get_world_size(), lambda m, r, s=step: square_loss(m, r, s)))
    with model.no_sync():
        square_loss(model, rank, 3).backward()
    square_loss(model, rank, 4).backward()
    assert all(p.grad is grad for p, grad in zip(model.parameters(), held, strict=True))


@setups
def test_a_gradient_tensor_that_stood_there_is_kept(ranks, world_size, cap):
    ranks(world_size, _keep_identity, cap)


def _held_from_the_last_step(rank: int) -> None:
    """A gradient that the user keeps after ``zero_grad`` is not written to by later steps."""
    _, model = make()
    held = []
    for step in range(4):
        model.zero_grad(set_to_none=True)
        square_loss(model, rank, step).backward()
        held.append([(p.grad, p.grad.clone()) for p in model.parameters()])
    assert all(torch.equal(grad, copied) for one in held for grad, copied in one)


@world_sizes
def test_a_gradient_kept_by_the_user_is_not_written_to_by_later_steps(ranks, world_size):
    ranks(world_size, _held_from_the_last_step)


# -- ways to zero


def _by_hand(model: KnownDDP, _: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        param.grad = None


def _in_place(model: KnownDDP, _: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.zero_()


def _detaching(model: KnownDDP, _: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.detach_()
            param.grad.zero_()


def _new_zeros(model: KnownDDP, _: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        param.grad = torch.zeros_like(param)


ZEROING: dict[str, Zero] = {
    "model-to-none": lambda model, _: model.zero_grad(set_to_none=True),
    "model-to-zero": lambda model, _: model.zero_grad(set_to_none=False),
    "optimizer-to-none": lambda _, optimizer: optimizer.zero_grad(set_to_none=True),
    "optimizer-to-zero": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "by-hand": _by_hand,
    "in-place": _in_place,
    "detaching": _detaching,
    "new-zeros": _new_zeros,
}


def _zeroed(rank: int, ways: list[str], views: bool) -> None:
    plain, model = make(gradient_as_bucket_view=views)
    ours = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step, way in enumerate(ways):
        ZEROING[way](model, ours)
        square_loss(model, rank, step).backward()
        ours.step()
        follow(plain, theirs, lambda m, r, s=step: square_loss(m, r, s))
        assert_same_parameters(model, plain)


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("way", ZEROING)
def test_every_way_of_zeroing_trains_like_one_process(ranks, way, views):
    ranks(2, _zeroed, [way] * 3, views)


@world_sizes
def test_ways_of_zeroing_may_be_mixed(ranks, world_size):
    ranks(world_size, _zeroed, [*ZEROING, *reversed(ZEROING)], True)
