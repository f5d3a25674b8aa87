"""What modules do: share parameters, freeze them, carry hooks and parametrizations, run without their wrapper.

Expected gradients come from plain autograd on one process or are worked out in the docstring.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Scales, assert_grads, inputs, make, mean_grads, raises_everywhere
from steps import (
    assert_same_parameters,
    declares,
    follow,
    from_all_ranks,
    grads_of,
    setups,
    square_loss,
    step_is_right,
    steps_are_right,
    trains_like_one_process,
    world_sizes,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from knownddp import KnownDDP, ModelError


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


# -- shared parameters


class _Tied(nn.Module):
    """An embedding tied to the output layer. A call may use ``all``, the embedding alone or neither of the two."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, use: str = "all") -> Tensor:
        hidden = torch.tanh(self.middle(torch.ones(1, 4) if use == "neither" else self.embed(ids)))
        return self.head(hidden) if use == "all" else hidden


def _ids(rank: int, step: int = 0) -> Tensor:
    """Other rows on each rank, another number of them, one twice."""
    return (torch.tensor([[1, 1, 4], [4, 6, 0, 6], [2, 2]][rank]) + step) % 7


def _tied(rank: int, cap: float | None) -> None:
    """Ranks start apart and end together."""
    torch.manual_seed(rank)
    module = _Tied()
    torch.manual_seed(0)
    plain = _Tied()
    model = KnownDDP(module, bucket_cap_mb=cap)
    ours, theirs = torch.optim.Adam(model.parameters(), lr=0.05), torch.optim.Adam(plain.parameters(), lr=0.05)
    for step in range(3):
        ours.zero_grad()
        model(_ids(rank, step)).square().mean().backward()
        ours.step()
        follow(plain, theirs, lambda m, r, s=step: m(_ids(r, s)).square().mean())
        assert_same_parameters(model, plain)
        assert model.module.head.weight is model.module.embed.weight


@setups
def test_tied_weights_are_one_parameter_and_stay_tied(ranks, world_size, cap):
    ranks(world_size, _tied, cap)


def _tied_declared(rank: int) -> list[int]:
    plain, model = make(_Tied)
    skipped = []
    for step, (use, unused) in enumerate([("all", []), ("embed", ["head"]), ("neither", ["head", "embed"])]):

        def loss_of(module: nn.Module, r: int, step: int, use: str = use, unused: Any = unused) -> Tensor:
            return module(_ids(r, step), use=use, **declares(module, unused)).square().mean()

        step_is_right(plain, model, rank, step, loss_of)
        skipped.append(model.stats().bytes_skipped)
    return skipped


@world_sizes
def test_a_tied_parameter_is_unused_only_if_all_its_owners_are(ranks, world_size):
    """Declaring the head alone says nothing of the shared weight, 28 floats of 4 bytes; declaring both owners does."""
    assert ranks(world_size, _tied_declared) == [[0, 0, 112]] * world_size


# -- freezing


def _freezing(rank: int, cap: float | None, find: bool) -> None:
    plain, model = make(_mlp, bucket_cap_mb=cap, find_unused_parameters=find)
    for step, frozen in enumerate([False, True, True, False, True, False]):
        for module in (plain, model.module):
            module[0].requires_grad_(not frozen)
        step_is_right(plain, model, rank, step)


@pytest.mark.parametrize("find", [False, True])
@setups
def test_a_layer_frozen_after_wrapping_is_left_out_until_it_is_thawed(ranks, world_size, cap, find):
    ranks(world_size, _freezing, cap, find)


def _thawed(rank: int, cap: float | None, before: bool) -> None:
    plain, model = make(lambda: _frozen_first(_mlp()), bucket_cap_mb=cap)
    if before:
        steps_are_right(plain, model, rank, steps=2)
    for module in (plain, model.module):
        module[0].requires_grad_(True)
    steps_are_right(plain, model, rank)


def _frozen_first(module: nn.Module) -> nn.Module:
    module[0].requires_grad_(False)
    return module


@pytest.mark.parametrize("before", [False, True], ids=["at-once", "after-steps"])
@setups
def test_a_layer_frozen_at_wrapping_and_thawed_later_is_averaged(ranks, world_size, cap, before):
    ranks(world_size, _thawed, cap, before)


def _frozen_on_one_rank(rank: int) -> list[float | None]:
    _, model = make(lambda: Scales("a", "b"))
    for step in range(3):
        model.module.b.requires_grad_(rank != 0 or step != 1)
        model.zero_grad(set_to_none=True)
        model(torch.tensor(6.0 * (rank + 1)), use="a b").backward()
        if step == 1:
            found = grads_of(model)
    assert grads_of(model) == [found[0]] * 2
    return found


def test_a_parameter_frozen_on_one_rank_counts_as_zero_there_on_two_ranks(ranks):
    """x is 6 and 12. a: (6 + 12) / 2; b, frozen on rank 0: 12 / 2."""
    assert ranks(2, _frozen_on_one_rank) == [[9.0, 6.0]] * 2


def test_a_parameter_frozen_on_one_rank_counts_as_zero_there_on_three_ranks(ranks):
    """x is 6, 12, 18. a: (6 + 12 + 18) / 3; b, frozen on rank 0: (12 + 18) / 3."""
    assert ranks(3, _frozen_on_one_rank) == [[12.0, 10.0]] * 3


def _by_new_parameter(module: nn.Module) -> None:
    module[2].weight = nn.Parameter(torch.full((2, 5), 0.25))


def _by_loading(module: nn.Module) -> None:
    torch.manual_seed(5)
    module.load_state_dict(_mlp().state_dict(), assign=True)


def _by_data(module: nn.Module) -> None:
    module[2].weight.data = torch.full((2, 5), 0.25)


def _by_shape(module: nn.Module) -> None:
    module[2].weight = nn.Parameter(torch.full((4, 5), 0.25))
    module[2].bias = nn.Parameter(torch.full((4,), 0.25))


def _by_removal(module: nn.Module) -> None:
    module[2].bias = None


def _replaced(rank: int, replace: Callable[[nn.Module], None], find: bool) -> None:
    """As when a trained model gets another head."""
    plain, model = make(_mlp, find_unused_parameters=find)
    steps_are_right(plain, model, rank, steps=2)
    for module in (plain, model.module):
        replace(module)
    steps_are_right(plain, model, rank)


@pytest.mark.parametrize("find", [False, True])
@pytest.mark.parametrize("replace", [_by_new_parameter, _by_loading, _by_data, _by_shape, _by_removal])
def test_a_parameter_replaced_after_wrapping_is_averaged(ranks, replace, find):
    ranks(2, _replaced, replace, find)


# -- wrappers inside wrappers


class _WithInner(nn.Module):
    """A part of it is wrapped by itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.first(x)))


def _nested(rank: int, wrap: type[nn.Module], cap: float | None) -> None:
    torch.manual_seed(0)
    plain = _WithInner(_mlp())
    module = copy.deepcopy(plain)
    module.inner = wrap(module.inner)
    model = KnownDDP(module, bucket_cap_mb=cap)
    for step in range(3):
        model.zero_grad(set_to_none=True)
        square_loss(model, rank, step).backward()
        wanted = mean_grads(plain, dist.get_world_size(), lambda m, r, s=step: square_loss(m, r, s))
        wanted = {n.replace("inner.", "inner.module."): want for n, want in wanted.items()}
        assert_grads(model, wanted)


@pytest.mark.parametrize("wrap", [KnownDDP, DistributedDataParallel])
@setups
def test_a_wrapper_inside_a_wrapper_averages_what_it_holds_once(ranks, world_size, cap, wrap):
    ranks(world_size, _nested, wrap, cap)


# -- hooks and parametrizations


def _hooks(rank: int, cap: float | None) -> None:
    plain, model = make(_mlp, bucket_cap_mb=cap)
    calls: list[str] = []

    def triple(grad: Tensor) -> Tensor:
        calls.append("tensor")
        return grad * 3

    model.module[0].weight.register_hook(triple)
    model.module[0].bias.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    model.module[2].register_forward_hook(lambda *_: calls.append("forward"))
    model.module[2].register_full_backward_hook(lambda *_: calls.append("backward"))
    for step in range(3):
        calls.clear()
        model.zero_grad(set_to_none=True)
        square_loss(model, rank, step).backward()
        assert sorted(calls) == ["accumulated", "backward", "forward", "tensor"]
        wanted = mean_grads(plain, dist.get_world_size(), lambda m, r, s=step: square_loss(m, r, s))
        wanted["0.weight"] = wanted["0.weight"] * 3  # type: ignore[operator]
        assert_grads(model, wanted)


@setups
def test_user_hooks_run_once_and_what_a_tensor_hook_returns_is_averaged(ranks, world_size, cap):
    ranks(world_size, _hooks, cap)


def _weight_norm(rank: int) -> None:
    plain, model = make(lambda: nn.Sequential(weight_norm(nn.Linear(3, 4)), nn.Tanh(), weight_norm(nn.Linear(4, 1))))
    ours, theirs = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    trains_like_one_process(plain, model, rank, ours, theirs)


@world_sizes
def test_weight_norm_trains_both_of_its_parameters(ranks, world_size):
    ranks(world_size, _weight_norm)


def _spectral_norm(rank: int) -> None:
    """Two forwards in training mode, each of which moves the buffers, before one backward; in eval mode they rest."""
    plain, model = make(lambda: nn.Sequential(spectral_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 1)))

    def loss_of(module: nn.Module, r: int, step: int) -> Tensor:
        return module(inputs(r, 5, 3, seed=step)).mean() - square_loss(module, r, step + 50)

    plain.eval()
    model.eval()
    steps_are_right(plain, model, rank, loss_of, steps=2)
    model.train()
    for step in range(3):
        model.zero_grad(set_to_none=True)
        loss_of(model, rank, step).backward()
        grads = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert all(torch.equal(grads, other) for other in from_all_ranks(grads))


@world_sizes
def test_spectral_norm_with_two_forwards_and_one_backward(ranks, world_size):
    ranks(world_size, _spectral_norm)


def _lazy(rank: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(1))
    message = raises_everywhere(lambda: KnownDDP(module), ModelError)
    assert "0.weight" in message and "dummy forward pass" in message
    module(torch.zeros(1, 3))
    model = KnownDDP(module)
    steps_are_right(copy.deepcopy(module), model, rank)


@world_sizes
def test_a_lazy_module_is_refused_until_a_dummy_forward(ranks, world_size):
    ranks(world_size, _lazy)


# -- the bare module


def _bare_on_one_rank(rank: int, cap: float | None) -> None:
    """Rank ``step % world`` also trains the inner module by itself."""
    plain, model = make(_mlp, bucket_cap_mb=cap)
    for step in range(4):
        step_is_right(plain, model, rank, step)
        if rank == step % dist.get_world_size():
            model.zero_grad(set_to_none=True)
            square_loss(model.module, rank, 70).backward()
            assert_grads(model, mean_grads(plain, 1, lambda m, _: square_loss(m, rank, 70)))
            model.zero_grad(set_to_none=True)


@setups
def test_a_backward_through_the_bare_module_is_local_and_disturbs_nothing(ranks, world_size, cap):
    ranks(world_size, _bare_on_one_rank, cap)


def _bare_then_wrapped(rank: int) -> list[float | None]:
    _, model = make(lambda: Scales("a", "b"))
    model.module(torch.tensor(60.0 * (rank + 1)), use="a b").backward()
    model(torch.tensor(6.0 * (rank + 1)), use="a", unused_parameters=["b"]).backward()
    return grads_of(model)


def test_gradients_of_the_bare_module_are_averaged_by_the_next_synchronised_backward(ranks):
    """60 and 120 stand there, x is 6 and 12. a: (66 + 132) / 2; b, touched since the last synchronisation: 180 / 2."""
    assert ranks(2, _bare_then_wrapped) == [[99.0, 90.0]] * 2
