"""Ranks that differ: in number of forwards, in what they use, in where they raise.

Expected gradients come from ``mean_grads`` (plain autograd on one process) or are worked out in the docstring. Each
test runs on started ranks, whose process group is checked afterwards.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Scales, Skippable, assert_grads, inputs, make, mean_grads, raises_everywhere
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from knownddp import HiddenOutputError, KnownDDP, PeerFailedError, RanksDifferError


def _loss(model: nn.Module, rank: int, seed: int = 0, **kwargs: Any) -> Tensor:
    return model(inputs(rank, 5, 3, seed=seed), **kwargs).square().mean()


def _step_is_right(plain: nn.Module, model: KnownDDP, rank: int, seed: int = 90) -> None:
    """An ordinary step on all ranks gives mean gradients: nothing is left over from what came before."""
    model.zero_grad(set_to_none=True)
    _loss(model, rank, seed).backward()
    wanted = mean_grads(plain, dist.get_world_size(), lambda m, r: _loss(m, r, seed))
    assert_grads(model, wanted)


# -- a loss without parameters


def _constant_loss(rank: int, *, related: bool, find: bool) -> None:
    plain, model = make(find_unused_parameters=find)
    world = dist.get_world_size()

    def loss_of(module: nn.Module, r: int) -> Tensor:
        if r != 1:
            return _loss(module, r)
        if related:  # computed from an output that reaches no parameter
            return module(inputs(r, 5, 3).requires_grad_(), skip=range(4)).sum()
        return _loss(module, r, skip=range(4)) * 0 + torch.zeros((), requires_grad=True)

    for _ in range(3):
        model.zero_grad(set_to_none=True)
        if rank == 1 and not related:
            model(inputs(1, 5, 3).requires_grad_(), skip=range(4)).sum().backward()
        else:
            loss_of(model, rank).backward()
        wanted = mean_grads(plain, world, lambda m, r: loss_of(m, r) if r != 1 else _loss(m, r, skip=()) * 0)
        assert_grads(model, wanted)


@pytest.mark.parametrize("find", [False, True])
@pytest.mark.parametrize("related", [True, False])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_loss_without_parameters_on_one_rank_counts_as_zero(ranks, world_size, related, find):
    ranks(world_size, _call, _constant_loss, {"related": related, "find": find})


class _FreshLeaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor, empty: bool) -> Tensor:
        return torch.zeros(1, requires_grad=True) if empty else self.linear(x).square().mean()


def _fresh_leaf(rank: int) -> None:
    plain, model = make(_FreshLeaf)
    world = dist.get_world_size()
    for step in range(3):
        model.zero_grad(set_to_none=True)
        model(inputs(rank, 5, 3, seed=step), empty=rank == 0).backward()
        wanted = mean_grads(plain, world, lambda m, r, s=step: m(inputs(r, 5, 3, seed=s), empty=r == 0))
        assert_grads(model, wanted)


def test_a_loss_that_is_a_fresh_leaf_on_one_rank_counts_as_zero(ranks):
    ranks(2, _fresh_leaf)


# -- numbers of forwards


def _different_numbers_of_forwards(rank: int) -> None:
    plain, model = make()
    world = dist.get_world_size()
    for step in range(3):
        model.zero_grad(set_to_none=True)

        def loss_of(module: nn.Module, r: int, step: int = step) -> Tensor:
            return sum((_loss(module, r, seed=10 * step + k) for k in range(r + 1)), torch.zeros(()))

        loss_of(model, rank).backward()
        assert_grads(model, mean_grads(plain, world, loss_of))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_rank_r_runs_r_plus_1_forwards_before_its_backward(ranks, world_size):
    ranks(world_size, _different_numbers_of_forwards)


def _extra_forwards(rank: int, *, keep: bool, training: bool) -> None:
    plain, model = make(lambda: nn.Sequential(Skippable(), nn.BatchNorm1d(3, momentum=None)))
    kept = []
    for step in range(3):
        if rank == 0:
            model.train(training)
            for k in range(3):
                output = model(inputs(0, 5, 3, seed=70 + k))
                if keep:
                    kept.append(output)
            model.train()
        model.zero_grad(set_to_none=True)
        model(inputs(rank, 5, 3, seed=step)).square().mean().backward()
        wanted = mean_grads(plain, dist.get_world_size(), lambda m, r, s=step: _loss(m, r, s))
        assert_grads(model, wanted)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("keep", [True, False])
def test_extra_forwards_with_gradients_on_rank_0_only_disturb_nothing(ranks, keep, training):
    ranks(2, _call, _extra_forwards, {"keep": keep, "training": training})


def _dropped_outputs(rank: int) -> tuple[float, float]:
    """Seconds that the step after 2,000 dropped forwards takes, and an ordinary one: medians of several."""
    plain, model = make()

    def timed_step() -> float:
        begun = time.perf_counter()
        _step_is_right(plain, model, rank)
        return time.perf_counter() - begun

    timed_step()
    ordinary = sorted(timed_step() for _ in range(9))[4]
    for _ in range(2000):
        model(inputs(rank, 1, 3))
    assert len(model.reducer.forwards) == 0, "a dropped forward is remembered"
    return timed_step(), ordinary


def test_2000_dropped_forwards_leave_nothing_behind(ranks):
    """What makes a step slow is what it has to look through; the times are returned for a look, not judged."""
    ranks(2, _dropped_outputs)


def _batch_norm_with_different_numbers_of_forwards(rank: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model = KnownDDP(copy.deepcopy(plain))
    world = dist.get_world_size()
    for step in range(3):
        model.zero_grad(set_to_none=True)

        def loss_of(module: nn.Module, r: int, step: int = step) -> Tensor:
            return sum((_loss(module, r, seed=10 * step + k) for k in range(1 + r)), torch.zeros(()))

        loss_of(model, rank).backward()
        assert_grads(model, mean_grads(plain, world, loss_of))
    with torch.no_grad():
        model.module[1].running_mean += rank  # differ now
    model.zero_grad(set_to_none=True)
    before = [torch.empty(4) for _ in range(world)]
    dist.all_gather(before, model.module[1].running_mean)
    model.module[1].momentum = 0.0  # the forward itself leaves the running mean as the exchange made it
    _loss(model, rank).backward()
    assert torch.equal(model.module[1].running_mean, before[0])


def test_batch_norm_with_different_numbers_of_forwards_follows_rank_0(ranks):
    ranks(3, _batch_norm_with_different_numbers_of_forwards)


# -- exceptions


class _Failing(Skippable):
    """Raises in forward, or in the backward of its second layer, when asked to."""

    def forward(self, x: Tensor, skip=(), fail: str = "") -> Tensor:  # type: ignore[override]
        if fail == "forward":
            raise ValueError("bad batch")
        x = super().forward(x, skip=(0, 1))
        if fail == "backward":
            x.register_hook(_raise)
        return super().forward(x, skip=(2, 3))


def _raise(_: Tensor) -> None:
    raise KeyError("bad gradient")


def _forward_raises(rank: int) -> None:
    """Rank 1 skips a backward, so its next one meets the one that rank 0 is in; both go on to the same number."""
    _, model = make(_Failing)
    done = 0
    batch = 0
    while done < 3:
        model.zero_grad(set_to_none=True)
        batch += 1
        try:
            loss = _loss(model, rank, fail="forward" if rank == 1 and batch == 2 else "")
        except ValueError:
            continue
        loss.backward()
        done += 1
        grads = torch.cat([p.grad.flatten() for p in model.parameters()])
        everywhere = [torch.empty_like(grads) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, grads)
        assert all(torch.equal(one, grads) for one in everywhere), "replicas differ"


def test_a_forward_that_raises_on_one_rank_leaves_replicas_equal(ranks):
    ranks(2, _forward_raises)


def _backward_raises(rank: int, *, old_grad: float | None, user_collective: bool, find: bool) -> None:
    """The failed backward leaves ``.grad`` as it was; the user's all-reduce after it sums 1 + 1 = 2 over two ranks."""
    plain, model = make(_Failing, find_unused_parameters=find)
    world = dist.get_world_size()
    _step_is_right(plain, model, rank)
    for param in model.parameters():
        param.grad = None if old_grad is None else torch.full_like(param, old_grad + rank)
    loss = _loss(model, rank, fail="backward" if rank == 1 else "")
    if rank == 1:
        with pytest.raises(KeyError, match="bad gradient"):
            loss.backward()
    else:
        message = raises_everywhere(loss.backward, PeerFailedError)
        assert f"[rank {rank} of {world}]" in message and "rank 1" in message
    for param in model.parameters():
        assert (param.grad is None) == (old_grad is None)
        assert old_grad is None or torch.equal(param.grad, torch.full_like(param, old_grad + rank))
    if user_collective:
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == world
    _step_is_right(plain, model, rank)
    _step_is_right(plain, model, rank, seed=91)


@pytest.mark.parametrize("find", [False, True])
@pytest.mark.parametrize("user_collective", [False, True])
@pytest.mark.parametrize("old_grad", [None, 3.0])
@pytest.mark.parametrize("world_size", [2, 3])
def test_an_exception_in_one_ranks_backward_raises_on_all_and_the_next_step_is_right(
    ranks, world_size, old_grad, user_collective, find
):
    options = {"old_grad": old_grad, "user_collective": user_collective, "find": find}
    ranks(world_size, _call, _backward_raises, options)


def _all_backwards_raise(rank: int, kind: type[BaseException]) -> None:
    plain, model = make()
    for step in range(3):
        model.zero_grad(set_to_none=True)
        output = model(inputs(rank, 5, 3, seed=step))

        def interrupt(_: Tensor) -> None:
            raise kind

        model.module.layers[rank].weight.register_hook(interrupt)
        with pytest.raises(kind):
            output.sum().backward()
        model.module.layers[rank].weight._backward_hooks.clear()
        assert all(p.grad is None for p in model.parameters())
        _step_is_right(plain, model, rank)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_a_backward_that_raises_on_all_ranks_at_different_places(ranks, kind):
    ranks(3, _all_backwards_raise, kind)


# -- skipped backwards, other wrappers, other collectives


def _skipped_backward(rank: int) -> None:
    """Rank 0 skips its second backward. Later ones pair up; replicas stay equal while both go on."""
    _, model = make()
    for step in range(5):
        output = model(inputs(rank, 5, 3, seed=step))
        if rank == 0 and step == 1:
            continue
        if rank == 1 and step == 4:
            break  # both have run four
        model.zero_grad(set_to_none=True)
        output.square().mean().backward()
        grads = torch.cat([p.grad.flatten() for p in model.parameters()])
        everywhere = [torch.empty_like(grads) for _ in range(2)]
        dist.all_gather(everywhere, grads)
        assert torch.equal(*everywhere)


def test_a_rank_that_skips_a_backward_leaves_replicas_equal(ranks):
    ranks(2, _skipped_backward)


def _two_wrappers(rank: int, *, skipped_by: int) -> None:
    """first -> second in a chain; one rank leaves out a layer of each, undeclared, and counts as zero in the means."""
    plain_first, first = make(Skippable)
    plain_second, second = make(lambda: Skippable(depth=2), bucket_cap_mb=1e-5)
    world = dist.get_world_size()
    both = nn.ModuleList([plain_first, plain_second])
    for step in range(3):
        first.zero_grad(set_to_none=True)
        second.zero_grad(set_to_none=True)

        def loss_of(module: nn.ModuleList, r: int, step: int = step) -> Tensor:
            skip = (1,) if r == skipped_by else ()
            hidden = module[0](inputs(r, 5, 3, seed=step), skip=skip)
            return module[1](hidden, skip=skip).square().mean()

        loss_of(nn.ModuleList([first, second]), rank).backward()
        wanted = mean_grads(both, world, loss_of)
        assert_grads(first, {k.removeprefix("0."): v for k, v in wanted.items() if k.startswith("0.")})
        assert_grads(second, {k.removeprefix("1."): v for k, v in wanted.items() if k.startswith("1.")})


@pytest.mark.parametrize("skipped_by", [0, 1])
@pytest.mark.parametrize("world_size", [2, 3])
def test_two_wrappers_in_one_chain_one_rank_skipping_a_layer(ranks, world_size, skipped_by):
    ranks(world_size, _call, _two_wrappers, {"skipped_by": skipped_by})


def _one_wrapper_skipped(rank: int) -> None:
    """Rank 1's first backward goes through ``first`` alone; its next meets rank 0's pending window of ``second``."""
    _, first = make(Skippable)
    _, second = make(Skippable)
    done = 0
    for step in range(4):
        hidden = first(inputs(rank, 5, 3, seed=step))
        output = hidden if rank == 1 and step == 0 else second(hidden)
        done += output is not hidden
        if rank == 0 and step == 3:
            output = hidden  # three backwards of ``second`` on both
        output.square().mean().backward()
    for model in (first, second):
        grads = torch.cat([p.grad.flatten() for p in model.parameters()])
        everywhere = [torch.empty_like(grads) for _ in range(2)]
        dist.all_gather(everywhere, grads)
        assert torch.equal(*everywhere)


def test_one_of_two_wrappers_left_out_of_a_backward_on_one_rank(ranks):
    ranks(2, _one_wrapper_skipped)


def _two_wrappers_failing(rank: int) -> None:
    """One failed backward through two wrappers ends both windows, whatever order ranks hear of it in."""
    plain_first, first = make(_Failing)
    plain_second, second = make(_Failing)
    for step in range(4):
        hidden = first(inputs(rank, 5, 3, seed=step), fail="backward" if rank == step % 3 else "")
        with pytest.raises((KeyError, PeerFailedError)):
            second(hidden).square().mean().backward()
        assert all(p.grad is None for m in (first, second) for p in m.parameters())
    _step_is_right(plain_first, first, rank)
    _step_is_right(plain_second, second, rank)


def test_a_failed_backward_through_two_wrappers(ranks):
    ranks(3, _two_wrappers_failing)


def _user_collective(rank: int) -> None:
    """1 + 2 = 3 over two ranks, between forward and backward, and inside the backward of rank 0's first output."""
    plain, model = make()
    for step in range(3):
        model.zero_grad(set_to_none=True)
        loss = _loss(model, rank, step)
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        assert total.item() == 3.0
        loss.backward()
        dist.all_reduce(total)
        assert total.item() == 6.0
        assert_grads(model, mean_grads(plain, 2, lambda m, r, s=step: _loss(m, r, s)))


def test_the_users_own_all_reduce_between_forward_and_backward(ranks):
    ranks(2, _user_collective)


# -- unusual backwards


def _backward_for_inputs(rank: int) -> None:
    plain, model = make()
    for step in range(3):
        x = inputs(rank, 5, 3, seed=step).requires_grad_()
        if rank == 0:  # concerns no parameter, so it is this rank's own business
            model(x).sum().backward(inputs=[x])
            assert x.grad is not None and all(p.grad is None for p in model.parameters())
        _step_is_right(plain, model, rank, seed=step)
        model.zero_grad(set_to_none=True)
    weight = model.module.layers[0].weight
    _loss(model, rank).backward(inputs=[weight])
    wanted = mean_grads(plain, dist.get_world_size(), _loss)
    assert_grads(model, {name: want if name == "layers.0.weight" else None for name, want in wanted.items()})


def test_backward_for_inputs_alone_is_local_and_for_a_parameter_is_averaged(ranks):
    ranks(2, _backward_for_inputs)


def _penalty(model: nn.Module, rank: int, *, alone: bool, seed: int = 0) -> Tensor:
    x = inputs(rank, 4, 3, seed=seed).requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    return penalty if alone else y.square().mean() + penalty


def _gradient_penalty(rank: int, *, alone: bool) -> None:
    plain, model = make()
    world = dist.get_world_size()
    for step in range(3):
        model.zero_grad(set_to_none=True)
        _penalty(model, rank, alone=alone, seed=step).backward()
        assert_grads(model, mean_grads(plain, world, lambda m, r, s=step: _penalty(m, r, alone=alone, seed=s)))


@pytest.mark.parametrize("alone", [False, True])
def test_gradient_penalties(ranks, alone):
    ranks(2, _call, _gradient_penalty, {"alone": alone})


def _kept_graph(rank: int, *, world_two_losses: bool) -> None:
    plain, model = make()
    world = dist.get_world_size()
    for step in range(3):
        model.zero_grad(set_to_none=True)

        def losses(module: nn.Module, r: int, step: int = step) -> Any:
            y = module(inputs(r, 5, 3, seed=step))
            first, second = y.square().mean(), (y.sum() if world_two_losses else y.square().mean())
            first.backward(retain_graph=True)
            second.backward()
            return []

        losses(model, rank)
        wanted = {}
        reference = copy.deepcopy(plain)
        for r in range(world):
            losses(reference, r)  # .grad accumulates over the ranks
        wanted = {name: p.grad / world for name, p in reference.named_parameters()}
        assert_grads(model, wanted)


@pytest.mark.parametrize("two_losses", [False, True])
def test_a_second_backward_through_a_kept_graph_is_averaged_too(ranks, two_losses):
    ranks(2, _call, _kept_graph, {"world_two_losses": two_losses})


class _BackwardInside(Skippable):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        loss = super().forward(x).square().mean()
        loss.backward()
        return loss.detach()


def _backward_inside_forward(rank: int) -> None:
    plain, model = make(_BackwardInside)
    world = dist.get_world_size()
    reference = make(Skippable)[0]
    reference.load_state_dict(plain.state_dict())
    for step in range(3):
        model.zero_grad(set_to_none=True)
        model(inputs(rank, 5, 3, seed=step))
        assert_grads(model, mean_grads(reference, world, lambda m, r, s=step: _loss(m, r, s)))


def test_a_backward_inside_forward_is_averaged(ranks):
    ranks(2, _backward_inside_forward)


def _double_on_one_rank(rank: int) -> None:
    plain, model = make()
    _step_is_right(plain, model, rank)
    if rank == 1:
        model.double()
    x = inputs(rank, 5, 3)
    x = x.double() if rank == 1 else x
    model.zero_grad(set_to_none=True)
    message = raises_everywhere(lambda: model(x).square().mean().backward(), RanksDifferError)
    assert "layers.0.weight: float32[3, 3] on rank 0, float64[3, 3] on rank 1" in message
    assert all(p.grad is None for p in model.parameters())
    model.float()
    _step_is_right(plain, model, rank)


def test_double_on_one_rank_raises_on_all(ranks):
    ranks(3, _double_on_one_rank)


def _inside_checkpoint(rank: int, *, reentrant: bool, find: bool) -> None:
    plain, model = make(find_unused_parameters=find)
    world = dist.get_world_size()

    def loss_of(module: nn.Module, r: int, step: int) -> Tensor:
        x = inputs(r, 5, 3, seed=step).requires_grad_()
        return checkpoint(module, x, use_reentrant=reentrant).square().mean()

    for step in range(3):
        model.zero_grad(set_to_none=True)
        loss_of(model, rank, step).backward()
        assert_grads(model, mean_grads(plain, world, lambda m, r, s=step: _loss(m, r, s)))


@pytest.mark.parametrize("find", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_wrapper_called_inside_an_activation_checkpoint(ranks, reentrant, find):
    ranks(2, _call, _inside_checkpoint, {"reentrant": reentrant, "find": find})


class _Hidden:
    def __init__(self, value: Tensor) -> None:
        self._get: Callable[[], Tensor] = lambda: value


class _HiddenCheckpoint(Skippable):
    """A reentrant checkpoint behind an output that cannot be looked into."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return _Hidden(checkpoint(super().forward, x, use_reentrant=True))


def _hidden_in_checkpoint(rank: int) -> None:
    _, model = make(_HiddenCheckpoint)
    for step in range(2):
        output = model(inputs(rank, 5, 3, seed=step).requires_grad_())
        message = raises_everywhere(lambda out=output: out._get().sum().backward(), HiddenOutputError)
        assert "ranks 0, 1" in message and "use_reentrant=False" in message
        assert all(p.grad is None for p in model.parameters())


def test_a_backward_whose_end_cannot_be_seen_raises_on_all_ranks(ranks):
    ranks(2, _hidden_in_checkpoint)


# -- declarations


def _differing_declarations(rank: int, agreement: str) -> Any:
    _, model = make(lambda: Scales("a", "b", "c"), unused_agreement=agreement)
    declared = ["b", "c"] if rank == 0 else ["c"]
    loss = model(torch.tensor(rank + 1.0), use="a" if rank == 0 else "a b", unused_parameters=declared)
    if agreement == "same":
        message = raises_everywhere(loss.backward, RanksDifferError)
        assert "In dispute: b." in message and "rank 0 declared b, c" in message and "rank 1 declared c" in message
        assert [p.grad for p in model.parameters()] == [None] * 3
        model(torch.tensor(rank + 1.0), use="a b", unused_parameters=["c"]).backward()
    else:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            loss.backward()
        assert len(told) == 1 and "ranks declared different unused parameters" in str(told[0].message)
        assert model.stats().bytes_disputed == 4
    return [None if p.grad is None else p.grad.item() for p in model.parameters()]


def test_union_averages_what_any_rank_uses(ranks):
    """x is r + 1. a: (1 + 2 + 3) / 3 = 2; b: (0 + 2 + 3) / 3, a rank that declared it counting as zero; c: nobody."""
    a, b, c = ranks(3, _differing_declarations, "union")[0]
    assert (a, c) == (2.0, None)
    assert b == pytest.approx(5 / 3)


def test_same_raises_on_every_rank_before_anything_is_sent_and_the_next_step_is_right(ranks):
    """x is r + 1 on both: a and b are (1 + 2) / 2."""
    assert ranks(2, _differing_declarations, "same") == [[1.5, 1.5, None]] * 2


def _call(rank: int, fn: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Keyword arguments for a task."""
    return fn(rank, **options)
