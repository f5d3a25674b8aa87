"""What DistributedDataParallel's own tests promise of training.

Each for one bucket and for a bucket a parameter, with and without ``gradient_as_bucket_view``, on 1 to 4 ranks.
Expected gradients come from plain autograd on one process, or are worked out by hand.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Scales, assert_grads, inputs, make, mean_grads
from steps import (
    assert_same_parameters,
    follow,
    grads_of,
    square_loss,
    step_is_right,
    steps_are_right,
    trains_like_one_process,
)
from torch import Tensor, nn

from knownddp import KnownDDP, UnfinishedBackwardError

Options = dict[str, Any]

ONE_BYTE_MB = 1e-6  # each scalar is a bucket of its own

OPTIONS = pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"bucket_cap_mb": cap, "gradient_as_bucket_view": views}, id=f"{name}-{'views' if views else 'own'}"
        )
        for cap, name in ((None, "one-bucket"), (ONE_BYTE_MB, "tiny-buckets"))
        for views in (False, True)
    ],
)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3), nn.Linear(3, 2))


# -- like one process


def _like_one_process(rank: int, options: Options) -> None:
    plain, model = make(_mlp, **options)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (model, plain))
    trains_like_one_process(plain, model, rank, ours, theirs)


@OPTIONS
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_training_equals_one_process(ranks, world_size, options):
    ranks(world_size, _like_one_process, options)


# -- unused parameters


def _global_and_local(rank: int, options: Options) -> list[float | None]:
    """a on rank 0 alone, b on all others, c nowhere; d everywhere."""
    _, model = make(lambda: Scales("a", "b", "c", "d"), find_unused_parameters=True, **options)
    assert grads_of(model) == [None] * 4
    for _ in range(3):
        model.zero_grad()
        model(torch.tensor(12.0), use="a d" if rank == 0 else "b d").backward()
    return grads_of(model)


@OPTIONS
@pytest.mark.parametrize(
    ("world_size", "expected"),
    [
        (1, [12.0, None, None, 12.0]),
        (2, [6.0, 6.0, None, 12.0]),
        (3, [4.0, 8.0, None, 12.0]),
        (4, [3.0, 9.0, None, 12.0]),
    ],
)
def test_unused_on_some_ranks_and_unused_on_all(ranks, world_size, expected, options):
    """12 from each user, over the number of ranks."""
    assert ranks(world_size, _global_and_local, options) == [expected] * world_size


def _all_and_some(rank: int, options: Options) -> list[float | None]:
    """Rank 0 uses everything, the others only a: all take part in finding out."""
    _, model = make(lambda: Scales("a", "b"), find_unused_parameters=True, **options)
    for _ in range(2):
        model.zero_grad()
        model(torch.tensor(6.0), use="a b" if rank == 0 else "a").backward()
    return grads_of(model)


@OPTIONS
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_uses_everything_beside_ranks_that_do_not(ranks, world_size, options):
    assert ranks(world_size, _all_and_some, options) == [[6.0, 6.0 / world_size]] * world_size


def _standing(rank: int, options: Options) -> list[float | None]:
    """Gradients stand in b and c before: b is used by rank 1 alone, c by nobody."""
    _, model = make(lambda: Scales("a", "b", "c"), find_unused_parameters=True, **options)
    for _ in range(2):
        model.module.a.grad = None
        model.module.b.grad = torch.tensor(10.0 + 10.0 * rank)
        model.module.c.grad = torch.tensor(10.0 + 10.0 * rank)
        model(torch.tensor(1.0), use="a b" if rank == 1 else "a").backward()
    return grads_of(model)


@OPTIONS
def test_what_stood_there_takes_part_where_any_rank_used_it(ranks, options):
    """a is (1 + 1) / 2. b is (10 + 20 + 1) / 2. c stays 10 and 20, which stock does only without bucket views."""
    assert ranks(2, _standing, options) == [[1.0, 15.5, 10.0], [1.0, 15.5, 20.0]]


def _left_out(rank: int, options: Options) -> list[list[float | None]]:
    """Of two outputs the loss takes one; gradients of the other's parameter stay, be it None or a number."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = Scales("a", "b")

        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"first": self.scales(x, "a"), "rest": (self.scales(x, "b"), "text")}

    _, model = make(Two, find_unused_parameters=True, **options)
    found = []
    for stood in (None, 7.0):
        model.module.scales.a.grad = None
        model.module.scales.b.grad = None if stood is None else torch.tensor(stood)
        model(torch.tensor(2.0 + 2.0 * rank))["first"].backward()
        found.append(grads_of(model))
    return found


@OPTIONS
def test_an_output_that_the_loss_leaves_out_changes_nothing(ranks, options):
    """(2 + 4) / 2."""
    assert ranks(2, _left_out, options) == [[[3.0, None], [3.0, 7.0]]] * 2


# -- outputs without a backward


def _dropped(rank: int, options: Options, find: bool) -> None:
    plain, model = make(_mlp, find_unused_parameters=find, **options)
    for step in range(4):
        square_loss(model, rank, step)
    steps_are_right(plain, model, rank, steps=4)


@pytest.mark.parametrize("find", [False, True])
@OPTIONS
def test_four_dropped_outputs_and_four_steps(ranks, find, options):
    ranks(2, _dropped, options, find)


def _no_grad(rank: int, options: Options) -> None:
    plain, model = make(_mlp, **options)
    with torch.no_grad():
        out = model(inputs(rank, 5, 3))
    assert not out.requires_grad and all(p.requires_grad and p.grad is None for p in model.parameters())
    steps_are_right(plain, model, rank, steps=2)
    model.zero_grad()
    if rank == 0:
        with torch.inference_mode():
            assert torch.equal(model(inputs(rank, 5, 3)), plain(inputs(rank, 5, 3)))
    assert all(p.grad is None for p in model.parameters())
    step_is_right(plain, model, rank)


@OPTIONS
def test_a_forward_without_gradients_leaves_none(ranks, options):
    ranks(2, _no_grad, options)


# -- saved and resumed


def _saved(rank: int, options: Options) -> None:
    """Three steps, save, spoil, load into the wrapper and into a plain model, three steps: as six in a row."""
    plain, model = make(_mlp, **options)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, plain))

    def three_steps(first: int) -> None:
        for step in range(first, first + 3):
            step_is_right(plain, model, rank, step)
            ours.step()
            follow(plain, theirs, lambda m, r, s=step: square_loss(m, r, s))

    three_steps(0)
    stored = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(stored)
    assert_same_parameters(model, plain)
    fresh = _mlp()
    nn.modules.utils.consume_prefix_in_state_dict_if_present(stored, "module.")
    fresh.load_state_dict(stored)
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), model.parameters(), strict=True))
    three_steps(3)
    assert_same_parameters(model, plain)


@OPTIONS
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_goes_on_where_it_was(ranks, world_size, options):
    ranks(world_size, _saved, options)


# -- wrapped again


def _rewrapped(rank: int, options: Options) -> None:
    """After an error, hooks are removed and the module is wrapped again, detecting now."""
    torch.manual_seed(0)
    module = Scales("a", "b")
    model = KnownDDP(module, **options)
    model(torch.tensor(1.0), use="a").backward()
    with pytest.raises(UnfinishedBackwardError, match="Expected to have finished reduction in the prior iteration"):
        model(torch.tensor(1.0), use="a")
    model._remove_autograd_hooks()
    module.zero_grad()
    again = KnownDDP(module, find_unused_parameters=True, **options)
    for _ in range(2):
        again.zero_grad()
        again(torch.tensor(2.0 + 2.0 * rank), use="a").backward()
        assert grads_of(again) == [1.0 + dist.get_world_size(), None]


@OPTIONS
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_after_an_unfinished_backward_the_module_may_be_wrapped_again(ranks, world_size, options):
    """2, 4, ... 2n have the mean n + 1."""
    ranks(world_size, _rewrapped, options)


# -- passes


def _passes(rank: int, options: Options) -> list[list[float]]:
    """x is 1 on rank 0 and 2 on rank 1. Each pair of calls starts from no gradients."""
    _, model = make(lambda: Scales("a"), **options)
    x = torch.tensor(1.0 + rank)
    found = []

    def note() -> None:
        found.append(model.module.a.grad.item())
        model.zero_grad(set_to_none=True)

    (model(x, "a") + model(x, "a")).backward()
    note()
    one, two = model(x, "a"), model(x, "a")
    one.backward()
    two.backward()
    note()
    kept = model(x, "a")
    kept.backward(retain_graph=True)
    kept.backward()
    note()
    assert torch.autograd.grad(model(x, "a"), model.module.a)[0].item() == 1.0 + rank
    assert model.module.a.grad is None
    return found


@OPTIONS
def test_several_passes(ranks, options):
    """The mean of x is 1.5. Two forwards: 3, by one backward or two (stock adds a local 1 or 2 for the second)."""
    assert ranks(2, _passes, options) == [[3.0, 3.0, 3.0]] * 2


def _scaled(rank: int, options: Options) -> None:
    plain, model = make(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)), **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            loss = square_loss(model, rank, step)
        scaler.scale(loss).backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        scaler.unscale_(optimizer)
        assert_grads(model, mean_grads(plain, dist.get_world_size(), lambda m, r, s=step: square_loss(m, r, s)))
        scaler.step(optimizer)
        scaler.update()


@OPTIONS
def test_a_gradient_scaler_finds_means_to_unscale(ranks, options):
    ranks(2, _scaled, options)
