"""What a fresh wrapper holds, what it leaves alone, and over which ranks it averages.

Expected gradients come from plain autograd on one process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from models import Skippable, assert_grads, inputs, make, mean_grads
from steps import counted_collectives, from_all_ranks, square_loss, step_is_right, steps_are_right, world_sizes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from knownddp import ArgumentError, KnownDDP

# -- the start


class _Mixture(nn.Module):
    """Parameters and buffers of several kinds, other values with every seed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 1).requires_grad_(False)
        self.wide = nn.Parameter(torch.randn(2, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(4).bfloat16())
        self.waves = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.scalar = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.randn(0, 3))
        self.transposed = nn.Parameter(torch.randn(3, 2).t())
        self.gaps = nn.Parameter(torch.randn(2, 6)[:, ::2])
        self.codes = nn.Parameter(torch.randint(0, 99, (5,)), requires_grad=False)
        self.register_buffer("counts", torch.randint(0, 99, (5,)))
        self.register_buffer("flags", torch.rand(9) < 0.5)
        self.register_buffer("hidden", torch.randn(2), persistent=False)
        self.register_buffer("turned", torch.randn(3, 4).t())


def _start(rank: int) -> None:
    torch.manual_seed(rank)
    module = _Mixture()
    objects, wanted_grad = list(module.parameters()), [p.requires_grad for p in module.parameters()]
    with pytest.warns(UserWarning, match=r"1 parameters were not dense .*: gaps\."):
        KnownDDP(module)
    torch.manual_seed(0)
    first = _Mixture()
    first.gaps.data = first.gaps.data.contiguous()
    for (name, want), got in zip(first.named_parameters(), module.parameters(), strict=True):
        assert torch.equal(got, want), name
        assert got.dtype is want.dtype and got.stride() == want.stride(), name
    for (name, want), got in zip(first.named_buffers(), module.buffers(), strict=True):
        assert torch.equal(got, want), name
    assert all(a is b for a, b in zip(module.parameters(), objects, strict=True))
    assert [p.requires_grad for p in module.parameters()] == wanted_grad


@world_sizes
def test_all_ranks_start_from_rank_0_in_the_parameters_they_have(ranks, world_size):
    ranks(world_size, _start)


def _without_init_sync(rank: int) -> None:
    """Ranks construct one after the other, with a collective of the user's own between, and keep their values."""
    torch.manual_seed(rank)
    module = nn.Linear(3, 2)
    kept = copy.deepcopy(module)
    total = torch.tensor([1.0])
    with counted_collectives() as called:
        if rank == 0:
            model = KnownDDP(module, init_sync=False)
        dist.all_reduce(total)
        if rank != 0:
            model = KnownDDP(module, init_sync=False)
        dist.all_reduce(total)
    assert called == ["allreduce", "allreduce"]
    assert total.item() == dist.get_world_size() ** 2
    assert torch.equal(module.weight, kept.weight)

    def start_of(r: int) -> nn.Module:
        torch.manual_seed(r)
        return nn.Linear(3, 2)

    starts = {r: start_of(r) for r in range(dist.get_world_size())}
    square_loss(model, rank).backward()
    means = []
    for param in ("weight", "bias"):
        own = []
        for r, start in starts.items():
            start.zero_grad()
            square_loss(start, r).backward()
            own.append(getattr(start, param).grad)
        means.append(sum(own) / len(own))
    torch.testing.assert_close([module.weight.grad, module.bias.grad], means)


@world_sizes
def test_without_init_sync_the_constructor_talks_to_nobody_and_gradients_are_averaged(ranks, world_size):
    ranks(world_size, _without_init_sync)


# -- what is left alone


class _Own(nn.Module):
    """``own`` and ``table`` are each rank's business; their sizes differ by rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.own = nn.Linear(2 + rank, 2)
        self.shared = nn.Linear(2 + rank, 2)
        self.shared.weight = nn.Parameter(torch.randn(2, 2))
        self.register_buffer("table", torch.full((1 + rank,), 5.0 + rank))
        self.register_buffer("common", torch.full((2,), 5.0 + rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x[:, :1].expand(-1, self.own.in_features)) + self.shared(x[:, :2])


class _Outer(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.inner = _Own(rank)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.first(x)))


def _ignore_by_method(module: _Outer) -> None:
    names = ["inner.own.weight", "inner.own.bias", "inner.table"]
    KnownDDP._set_params_and_buffers_to_ignore_for_model(module, names)


def _ignore_by_child(module: _Outer) -> None:
    module.inner._ddp_params_and_buffers_to_ignore = ["own.weight", "own.bias", "table"]


def _ignored(rank: int, ignore: Callable[[_Outer], None]) -> None:
    torch.manual_seed(10 + rank)
    module = _Outer(rank)
    ignore(module)
    kept = copy.deepcopy(module.inner.own.state_dict())
    model = KnownDDP(module)
    assert torch.equal(module.inner.own.weight, kept["weight"]) and torch.equal(module.inner.own.bias, kept["bias"])
    assert module.inner.table.tolist() == [5.0 + rank] * (1 + rank)
    assert module.inner.common.tolist() == [5.0] * 2
    assert all(p._ddp_ignored for p in module.inner.own.parameters())
    assert not any(hasattr(p, "_ddp_ignored") for p in module.first.parameters())
    for step in range(3):
        model.zero_grad(set_to_none=True)
        local = copy.deepcopy(module)
        square_loss(local, rank, step).backward()
        square_loss(model, rank, step, unused_parameters=["inner.own"]).backward()
        for name, param in local.named_parameters():
            want = param.grad
            if not name.startswith("inner.own"):
                want = torch.stack(from_all_ranks(param.grad)).mean(0)
            torch.testing.assert_close(module.get_parameter(name).grad, want, msg=lambda m, n=name: f"{n}: {m}")
    assert model.stats().late_rounds == 0


@pytest.mark.parametrize("ignore", [_ignore_by_method, _ignore_by_child])
@world_sizes
def test_ignored_parameters_and_buffers_are_neither_broadcast_nor_averaged(ranks, world_size, ignore):
    """They may have other shapes on every rank, and may be declared unused, which says nothing."""
    ranks(world_size, _ignored, ignore)


# -- a drop-in


def _like_stock(rank: int) -> None:
    plain, model = make(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), Skippable(2, 4)))
    assert isinstance(model, DistributedDataParallel) and issubclass(KnownDDP, DistributedDataParallel)
    assert not isinstance(plain, DistributedDataParallel)
    stock = DistributedDataParallel(copy.deepcopy(plain))
    assert list(model.state_dict()) == list(stock.state_dict())
    model.load_state_dict(stock.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in stock.named_parameters()]
    consumed = model.state_dict()
    nn.modules.utils.consume_prefix_in_state_dict_if_present(consumed, "module.")
    plain.load_state_dict(consumed)


def test_it_passes_for_stock_ddp_and_exchanges_state_with_it(ranks):
    ranks(2, _like_stock)


# -- over which ranks


def _over(group: dist.ProcessGroup, members: list[int], rank: int, **options: object) -> KnownDDP:
    torch.manual_seed(members[0])
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    torch.manual_seed(rank)
    mine = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model = KnownDDP(mine, process_group=group, **options)  # type: ignore[arg-type]
    for step in range(3):
        model.zero_grad(set_to_none=True)
        square_loss(model, rank, step).backward()
        wanted = mean_grads(plain, len(members), lambda m, r, s=step: square_loss(m, members[r], s))
        assert_grads(model, wanted)
    assert dist.get_process_group_ranks(model.process_group) == members
    return model


def _sub_groups(rank: int, own_group: bool) -> None:
    """Ranks 0 and 2 average over two and start from rank 0, rank 1 is alone and goes on by itself."""
    pair, alone = dist.new_group([0, 2]), dist.new_group([1])
    if rank == 1:
        _over(alone, [1], rank, own_group=own_group)
    else:
        _over(pair, [0, 2], rank, own_group=own_group)
    dist.barrier()
    with pytest.raises(ArgumentError, match="process_group"):
        KnownDDP(nn.Linear(3, 2), process_group=pair if rank == 1 else alone)


@pytest.mark.parametrize("own_group", [True, False])
def test_sub_groups_average_over_their_own_ranks(ranks, own_group):
    ranks(3, _sub_groups, own_group)


def _overlapping(rank: int) -> None:
    """A trunk averaged over all three ranks and a head over ranks 0 and 2, trained by one loss."""
    pair = dist.new_group([0, 2])
    torch.manual_seed(0)
    plain = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 2)])
    mine = copy.deepcopy(plain)
    trunk = KnownDDP(mine[0])
    head = KnownDDP(mine[1], process_group=pair) if rank != 1 else mine[1]

    def loss_of(parts: list[nn.Module], r: int, step: int) -> Tensor:
        return parts[1](torch.tanh(parts[0](inputs(r, 5, 3, seed=step)))).square().mean()

    for step in range(3):
        mine.zero_grad()
        loss_of([trunk, head], rank, step).backward()
        wanted = mean_grads(plain, 3, lambda m, r, s=step: loss_of(list(m), r, s))
        assert_grads(trunk, {n.removeprefix("0."): want for n, want in wanted.items() if n.startswith("0.")})
        sharers = [1] if rank == 1 else [0, 2]
        wanted = mean_grads(plain, len(sharers), lambda m, r, s=step, of=sharers: loss_of(list(m), of[r], s))
        assert_grads(mine[1], {n.removeprefix("1."): want for n, want in wanted.items() if n.startswith("1.")})


def test_two_wrappers_over_overlapping_groups_in_one_backward(ranks):
    ranks(3, _overlapping)


def _groups_before(rank: int) -> None:
    if rank == 0:
        for _ in range(2):
            dist.new_group([0], use_local_synchronization=True)
    plain, model = make()
    steps_are_right(plain, model, rank, steps=2)


@world_sizes
def test_ranks_may_have_made_different_numbers_of_groups_before(ranks, world_size):
    ranks(world_size, _groups_before)


def _alone(rank: int, find: bool) -> None:
    """To the last bit, and without any other rank: rank r runs r + 2 steps."""
    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model = KnownDDP(copy.deepcopy(plain), process_group=groups[rank], find_unused_parameters=find)
    for step in range(2 + rank):
        for module in (plain, model):
            module.zero_grad()
            square_loss(module, rank, step).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("find", [False, True])
def test_in_a_world_of_one_gradients_are_the_plain_ones_bit_for_bit(ranks, find):
    ranks(2, _alone, find)


# -- buckets


def _any_cap(rank: int) -> None:
    """From a cap smaller than each parameter (1 byte) to one larger than the model."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16, bias=i % 2 == 0) for i in range(4)]
    plain = nn.Sequential(*(module for layer in layers for module in (layer, nn.Tanh())))
    for cap in (1e-6, 5e-4, 1.5e-3, 1, 1000):
        model = KnownDDP(copy.deepcopy(plain), bucket_cap_mb=cap)
        for step in range(2):
            step_is_right(plain, model, rank, step, lambda m, r, s: m(inputs(r, 4, 16, seed=s)).square().mean())


@world_sizes
def test_any_bucket_cap_gives_the_same_means(ranks, world_size):
    ranks(world_size, _any_cap)


class _AnyOrder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((4,), i + 1.0) for i in range(6))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        total = x.new_zeros(())
        for i in order:
            total = total + (torch.tanh(x * self.weights[i]) + total).sum() * (i + 1)
        return total


def _orders(rank: int, cap: float) -> None:
    plain, model = make(_AnyOrder, bucket_cap_mb=cap)
    orders = [[0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4], [4, 2, 0, 5, 1, 3]]

    def loss_of(module: nn.Module, r: int, step: int) -> Tensor:
        return module(inputs(r, 4, seed=step) / 64, orders[(r + step) % 3]) / 2**12

    steps_are_right(plain, model, rank, loss_of)


@pytest.mark.parametrize("cap", [1e-5, 3e-5, 25])
@world_sizes
def test_ranks_that_use_their_layers_in_different_orders_get_the_mean(ranks, world_size, cap):
    ranks(world_size, _orders, cap)
