"""Optimizers that step while a backward runs: inside a communication hook, or attached to parameters.

Expected values come from an optimizer on one process or are worked out in the docstring.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Scales, Skippable, make
from steps import TINY_CAP_MB, assert_same_parameters, declares, follow, setups, square_loss
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from knownddp import KnownDDP


def _apply_in_backward(*args: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: it compiles functional optimizers
        from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(*args)


def _skipping(module: nn.Module, rank: int, step: int) -> Tensor:
    """Layer 3 is never used, layer 2 in every other step: what is not used does not step, momentum or not."""
    skip = {3, 2} if step % 2 else {3}
    return square_loss(module, rank, step, skip=skip, **declares(module, [f"layers.{i}" for i in skip]))


# -- in a communication hook


def _fused(rank: int, cap: float | None, kind: type, options: dict[str, float]) -> None:
    plain, model = make(bucket_cap_mb=cap)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model._register_fused_optim(kind, **options)
    oracle = kind(plain.parameters(), **options)
    for step in range(4):
        model.zero_grad()
        _skipping(model, rank, step).backward()
        follow(plain, oracle, lambda m, r, s=step: _skipping(m, r, s))
        assert_same_parameters(model, plain)


@pytest.mark.parametrize(
    ("kind", "options"), [(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.Adam, {"lr": 0.1})]
)
@setups
def test_an_optimizer_that_steps_on_each_bucket(ranks, world_size, cap, kind, options):
    ranks(world_size, _fused, cap, kind, options)


def _some(rank: int, by: str) -> tuple[float, float]:
    _, model = make(lambda: Scales("a", "b"))
    chosen = [model.module.a]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.algorithms.ddp_comm_hooks import optimizer_overlap_hooks as overlap
        from torch.distributed.optim import as_functional_optim

        if by == "method":
            model._register_fused_optim(torch.optim.SGD, lr=1.0, optim_params=chosen)
        else:
            state = overlap._OptimizerHookState(as_functional_optim(torch.optim.SGD, lr=1.0), chosen)
            model.register_comm_hook(None, overlap._hook_then_optimizer(allreduce_hook, state))
    for _ in range(2):
        model.zero_grad()
        model(torch.tensor(6.0 * (rank + 1)), use="a b").backward()
        assert [p.grad.item() for p in model.parameters()] == [9.0, 9.0]
    return model.module.a.item(), model.module.b.item()


@pytest.mark.parametrize("by", ["method", "hook"])
def test_an_optimizer_of_some_parameters(ranks, by):
    """a: 1 - 9 - 9."""
    assert ranks(2, _some, by) == [(-17.0, 1.0)] * 2


# -- attached to parameters


def _attached(rank: int, when: str, cap: float | None) -> None:
    plain = Skippable()
    model = Skippable()
    model.load_state_dict(plain.state_dict())
    options = {"lr": 0.1, "momentum": 0.9}
    if when == "before":
        _apply_in_backward(torch.optim.SGD, model.parameters(), options)
    wrapped = KnownDDP(model, bucket_cap_mb=cap)
    plain.load_state_dict(model.state_dict())
    if when == "after":
        _apply_in_backward(torch.optim.SGD, model.parameters(), options)
    oracle = torch.optim.SGD(plain.parameters(), **options)
    for step in range(4):
        _skipping(wrapped, rank, step).backward()
        assert all(param.grad is None for param in model.parameters())
        follow(plain, oracle, lambda m, r, s=step: _skipping(m, r, s))
        assert_same_parameters(wrapped, plain)


@pytest.mark.parametrize("when", ["before", "after"])
@setups
def test_optimizers_in_backward_step_by_the_mean(ranks, world_size, cap, when):
    ranks(world_size, _attached, when, cap)


def _accumulated(rank: int) -> list[tuple[float, float | None]]:
    """After each of two unsynchronised backwards and the one that averages: the parameter and its gradient."""
    _, model = make(lambda: Scales("a"))
    _apply_in_backward(torch.optim.SGD, [model.module.a], {"lr": 1.0})
    found = []

    def note() -> None:
        grad = model.module.a.grad
        found.append((model.module.a.item(), None if grad is None else grad.item()))

    for _ in range(2):
        with model.no_sync():
            model(torch.tensor(2.0 * (rank + 1)), use="a").backward()
        note()
        model(torch.tensor(4.0), use="a").backward()
        note()
    return found


def test_optimizers_in_backward_wait_for_the_backward_that_averages(ranks):
    """2 and 4 are accumulated, 4 is added: a mean of 7."""
    wanted = [[(1.0, local), (-6.0, None), (-6.0, local), (-13.0, None)] for local in (2.0, 4.0)]
    assert ranks(2, _accumulated) == wanted


def _ignored(rank: int) -> list[float]:
    """b is ignored by the wrapper, c has no optimizer."""
    module = Scales("a", "b", "c")
    KnownDDP._set_params_and_buffers_to_ignore_for_model(module, ["b"])
    _apply_in_backward(torch.optim.SGD, [module.a, module.b], {"lr": 1.0})
    model = KnownDDP(module)
    for _ in range(2):
        model(torch.tensor(6.0 * (rank + 1)), use="a b c").backward()
    assert module.a.grad is None
    assert module.b.grad is None
    return [module.a.item(), module.b.item(), module.c.item(), module.c.grad.item()]


def test_ignored_parameters_keep_their_own_optimizers(ranks):
    """x is 6 and 12, twice. a: 1 - 2 x 9; b: 1 - 2 x by itself; c does not step, and adds up means: 9, then 18."""
    assert ranks(2, _ignored) == [[-17.0, -11.0, 1.0, 18.0], [-17.0, -23.0, 1.0, 18.0]]


def _uneven(rank: int) -> list[float]:
    """Rank 0 has no inputs at all."""
    _, model = make(lambda: Scales("a"))
    _apply_in_backward(torch.optim.SGD, [model.module.a], {"lr": 1.0, "momentum": 0.5})
    with model.join():
        for _ in range(2 * rank):
            model(torch.tensor(8.0), use="a").backward()
    before = model.module.a.item()
    model(torch.tensor(0.0), use="a").backward()
    return [before, model.module.a.item()]


def test_optimizers_in_backward_step_on_ranks_without_inputs(ranks):
    """Means of 4, 4 and 0 with momentum 1/2: steps of 4, 6 and 3."""
    assert ranks(2, _uneven) == [[-9.0, -12.0]] * 2


def _failed(rank: int) -> float:
    """Nothing steps in a backward that fails."""
    _, model = make(lambda: Scales("a"))
    _apply_in_backward(torch.optim.SGD, [model.module.a], {"lr": 1.0})
    fails = True

    def boom(grad: Tensor) -> None:
        if fails and rank == 0:
            raise ArithmeticError

    output = model(torch.tensor(6.0), use="a")
    output.register_hook(boom)
    with pytest.raises(ArithmeticError if rank == 0 else RuntimeError):
        output.backward()
    assert model.module.a.item() == 1.0
    fails = False
    model(torch.tensor(6.0 * (rank + 1)), use="a").backward()
    return model.module.a.item()


def test_optimizers_in_backward_do_not_step_when_a_rank_failed(ranks):
    """1 - 9"""
    assert ranks(2, _failed) == [-8.0] * 2


def _with_a_hook(rank: int, cap: float) -> Iterator[float]:
    _, model = make(lambda: Scales("a", "b"), bucket_cap_mb=cap)
    _apply_in_backward(torch.optim.SGD, model.module.parameters(), {"lr": 1.0})
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    for _ in range(2):
        model(torch.tensor(6.0 * (rank + 1)), use="a b").backward()
    return [p.item() for p in model.parameters()]


def test_optimizers_in_backward_step_by_what_a_hook_returns(ranks):
    assert ranks(2, _with_a_hook, TINY_CAP_MB) == [[-17.0, -17.0]] * 2
