"""Unused parameters that nobody declares, found by ``find_unused_parameters=True``.

Expected gradients come from plain autograd on one process or are worked out in the docstring.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Scales, Skippable, assert_grads, inputs, make, mean_grads
from steps import (
    assert_same_parameters,
    assert_unmoved,
    follow,
    grads_of,
    setups,
    snapshot,
    square_loss,
    step_is_right,
    steps_are_right,
    world_sizes,
)
from torch import Tensor, nn


def _skips(rank: int, step: int) -> set[int]:
    """Each rank leaves out other layers of four, and others in each step; rank 2 all of them in step 1."""
    if rank == 2:
        return {0, 1, 2, 3} if step == 1 else {step % 4, 3}
    return {step % 4} if rank == 0 else {(step + 1) % 4, (step + 2) % 4}


# -- with detection


def _skipping(rank: int, cap: float | None) -> None:
    plain, model = make(find_unused_parameters=True, bucket_cap_mb=cap)

    def loss_of(module: nn.Module, r: int, step: int) -> Tensor:
        x = inputs(r, 5, 3, seed=step).requires_grad_()
        return module(x, skip=_skips(r, step)).square().mean()

    steps_are_right(plain, model, rank, loss_of, steps=5)


@setups
def test_ranks_that_skip_different_layers_get_the_mean(ranks, world_size, cap):
    ranks(world_size, _skipping, cap)


class _Heads(nn.Module):
    """A body and one head a task; a call uses one head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(4))

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](torch.tanh(self.body(x)))


def _each_rank_its_head(rank: int, cap: float | None) -> None:
    plain, model = make(_Heads, find_unused_parameters=True, bucket_cap_mb=cap)
    steps_are_right(plain, model, rank, lambda m, r, step: square_loss(m, r, step, head=(r + step) % 4), steps=4)


@setups
def test_each_rank_uses_a_head_of_its_own(ranks, world_size, cap):
    ranks(world_size, _each_rank_its_head, cap)


def _by_hand(rank: int) -> tuple[list[float | None], int, int]:
    _, model = make(lambda: Scales("a", "b", "c", "d"), find_unused_parameters=True)
    use = {0: "a d", 1: "a b", 2: "a d"}[rank]
    model(torch.tensor(6.0 * (rank + 1)), use=use).backward()
    return grads_of(model), model.stats().bytes_reduced, model.stats().bytes_skipped


def test_on_two_ranks_a_rank_without_the_parameter_counts_as_zero(ranks):
    """x is 6 and 12. a: (6 + 12) / 2; b, on rank 1: 12 / 2; c: nowhere; d, on rank 0: 6 / 2."""
    assert [grads for grads, _, _ in ranks(2, _by_hand)] == [[9.0, 6.0, None, 3.0]] * 2


def test_on_three_ranks_a_rank_without_the_parameter_counts_as_zero(ranks):
    """x is 6, 12, 18. a: (6 + 12 + 18) / 3; b, on rank 1: 12 / 3; c: nowhere; d, on ranks 0 and 2: (6 + 18) / 3."""
    assert [grads for grads, _, _ in ranks(3, _by_hand)] == [[12.0, 4.0, None, 8.0]] * 3


@world_sizes
def test_what_no_rank_uses_is_not_sent(ranks, world_size):
    """Of four scalars of 4 bytes one is used nowhere."""
    assert [(reduced, skipped) for _, reduced, skipped in ranks(world_size, _by_hand)] == [(12, 4)] * world_size


def _nobody_uses(rank: int, optimizer: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    """Layer 2 rests in steps 1 to 3, after it has moved in step 0 and so has momentum."""
    plain, model = make(find_unused_parameters=True)
    ours, theirs = optimizer(model.parameters(), **options), optimizer(plain.parameters(), **options)
    for step in range(4):
        skip = () if step == 0 else (2,)
        before = snapshot(model.module.layers[2].parameters())
        ours.zero_grad(set_to_none=True)
        square_loss(model, rank, step, skip=skip).backward()
        ours.step()
        follow(plain, theirs, lambda m, r, s=step, k=skip: square_loss(m, r, s, skip=k))
        assert_same_parameters(model, plain)
        if skip:
            assert all(p.grad is None for p in model.module.layers[2].parameters())
            assert_unmoved(model.module.layers[2].parameters(), before)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.5}),
        (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.5}),
    ],
    ids=["SGD", "AdamW"],
)
@world_sizes
def test_momentum_and_weight_decay_leave_alone_what_no_rank_used(ranks, world_size, optimizer, options):
    ranks(world_size, _nobody_uses, optimizer, options)


class _TwoOutputs(nn.Module):
    def __init__(self, pack: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.first = nn.Linear(4, 2)
        self.second = nn.Linear(4, 2)
        self._pack = pack

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.body(x))
        return self._pack(self.first(hidden), self.second(hidden))


def _as_dict(first: Tensor, second: Tensor) -> dict[int, Tensor]:
    return {0: first, 1: second}


def _as_nested(first: Tensor, second: Tensor) -> dict[int, Any]:
    return {0: first, 1: second, 2: [(first, None), "text"]}


def _left_out(rank: int, pack: Callable[[Tensor, Tensor], Any], cap: float | None) -> None:
    """Outputs take turns in the loss. What stood in the other's ``.grad`` stays: nobody touched it."""
    plain, model = make(lambda: _TwoOutputs(pack), find_unused_parameters=True, bucket_cap_mb=cap)
    for step in range(4):
        used, unused = ("first", "second") if step % 2 == 0 else ("second", "first")

        def loss_of(module: nn.Module, r: int, step: int = step) -> Tensor:
            return module(inputs(r, 5, 3, seed=step))[step % 2].square().mean()

        model.zero_grad(set_to_none=True)
        for param in getattr(model.module, unused).parameters():
            param.grad = torch.full_like(param, 7.0 + rank)
        loss_of(model, rank).backward()
        wanted = mean_grads(plain, dist.get_world_size(), loss_of)
        for name, param in getattr(model.module, unused).named_parameters():
            wanted[f"{unused}.{name}"] = torch.full_like(param, 7.0 + rank)
        assert_grads(model, wanted)
        assert getattr(model.module, used).weight.grad is not None


@pytest.mark.parametrize("pack", [_as_dict, _as_nested])
@setups
def test_an_output_that_the_loss_leaves_out_is_no_error_and_its_gradients_stay(ranks, world_size, cap, pack):
    ranks(world_size, _left_out, pack, cap)


def _nothing_used(rank: int, cap: float | None) -> None:
    """The loss reaches the input alone: its gradient is 1, and no parameter gets one."""
    plain, model = make(find_unused_parameters=True, bucket_cap_mb=cap)
    for step in range(3):
        model.zero_grad(set_to_none=True)
        x = inputs(rank, 5, 3, seed=step).requires_grad_()
        model(x, skip=range(4)).sum().backward()
        assert torch.equal(x.grad, torch.ones(5, 3))
        assert all(p.grad is None for p in model.parameters())
        step_is_right(plain, model, rank, step)


@setups
def test_a_step_that_uses_no_parameter_on_any_rank_and_the_step_after(ranks, world_size, cap):
    ranks(world_size, _nothing_used, cap)


def _two_forwards(rank: int, cap: float | None) -> None:
    plain, model = make(find_unused_parameters=True, bucket_cap_mb=cap)

    def loss_of(module: nn.Module, r: int, step: int) -> Tensor:
        one = square_loss(module, r, step, skip=_skips(r % 2, step))
        return one + square_loss(module, r, step + 50, skip={0, 1} if r else {1, 3})

    steps_are_right(plain, model, rank, loss_of, steps=4)


@setups
def test_two_forwards_that_use_different_layers_and_one_backward(ranks, world_size, cap):
    ranks(world_size, _two_forwards, cap)


class _Closure(Skippable):
    """What it returns cannot be looked into."""

    def forward(self, x: Tensor, skip: Collection[int] = ()) -> Any:  # type: ignore[override]
        y = super().forward(x, skip)
        return lambda: y


def _hidden(rank: int, cap: float | None) -> None:
    plain, model = make(_Closure, find_unused_parameters=True, bucket_cap_mb=cap)
    steps_are_right(
        plain,
        model,
        rank,
        lambda m, r, step: m(inputs(r, 5, 3, seed=step), skip=_skips(r % 2, step))().square().mean(),
        steps=4,
    )


@setups
def test_detection_needs_nothing_of_the_output(ranks, world_size, cap):
    ranks(world_size, _hidden, cap)


class _Withholding(torch.autograd.Function):
    """Adds two numbers and gives a gradient to the first of them only, or to none."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, to_both: bool) -> Tensor:
        ctx.to_both = to_both
        return a + b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        return grad, grad if ctx.to_both else None, None


class _Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(()))
        self.b = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, to_both: bool) -> Tensor:
        return _Withholding.apply(self.a * 1, self.b, to_both) * x


def _undefined(rank: int, by_one: bool) -> list[list[float | None]]:
    _, model = make(_Sum, find_unused_parameters=True)
    found = []
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        model(torch.tensor(6.0 * (rank + 1)), to_both=by_one and rank == 1).backward()
        found.append(grads_of(model))
    return found


@pytest.mark.parametrize(("by_one", "of_b"), [(False, None), (True, 6.0)])
def test_a_gradient_that_a_function_withholds_counts_as_none(ranks, by_one, of_b):
    """x is 6 and 12. a: (6 + 12) / 2. b is reached by the backward, but has a gradient on rank 1 or nowhere: 12 / 2."""
    assert ranks(2, _undefined, by_one) == [[[9.0, of_b]] * 3] * 2
