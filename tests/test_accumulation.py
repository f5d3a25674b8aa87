"""Gradients that were there before: accumulated under ``no_sync``, or left over.

Expected gradients come from plain autograd on one process or are worked out in the docstring.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import Scales, Withholds, assert_grads, inputs, make, mean_grads
from steps import (
    declares,
    grads_of,
    setups,
    square_loss,
    step_is_right,
    world_sizes,
)
from torch import Tensor, nn

from knownddp import KnownDDP, _torch_private


def _window_is_right(
    plain: nn.Module, model: KnownDDP, rank: int, calls: Callable[[nn.Module, int], list[Tensor]]
) -> None:
    """All but the last loss come from calls under ``no_sync``. ``calls(module, rank)`` is a generator of losses."""
    losses = iter(calls(model, rank))
    pending = next(losses, None)
    while pending is not None:
        pending.backward()
        pending = next(losses, None)
    assert_grads(model, mean_grads(plain, dist.get_world_size(), calls))


# -- windows of several calls


def _micro_batches(rank: int, cap: float | None, find: bool) -> None:
    """Rank r runs r + 1 unsynchronised calls before the synchronised one."""
    plain, model = make(bucket_cap_mb=cap, find_unused_parameters=find)
    for step in range(3):

        def calls(module: nn.Module, r: int, step: int = step):  # type: ignore[no-untyped-def]
            for k in range(r + 1):
                with _no_sync(module):
                    loss = square_loss(module, r, 10 * step + k)
                    yield loss
            yield square_loss(module, r, 10 * step + 9)

        model.zero_grad(set_to_none=step != 1)
        _window_is_right(plain, model, rank, calls)


def _no_sync(module: nn.Module):  # type: ignore[no-untyped-def]
    return module.no_sync() if isinstance(module, KnownDDP) else torch.enable_grad()


@pytest.mark.parametrize("find", [False, True])
@setups
def test_micro_batches_give_the_mean_of_their_sums(ranks, world_size, cap, find):
    ranks(world_size, _micro_batches, cap, find)


# The layers that each of three calls uses: together all four on some rank, and in the last call layer 3 at most.
USES = [[{0}, {0, 1}, {3}], [{1, 2}, set(), {3}], [{2}, {0}, set()]]


def _uses_over_the_window(rank: int, cap: float | None, find: bool) -> None:
    plain, model = make(bucket_cap_mb=cap, find_unused_parameters=find)
    for step in range(3):

        def calls(module: nn.Module, r: int, step: int = step):  # type: ignore[no-untyped-def]
            for k, use in enumerate(USES[(r + step) % 3]):
                unused = set(range(4)) - use
                x = inputs(r, 5, 3, seed=10 * step + k).requires_grad_()
                with _no_sync(module) if k < 2 else torch.enable_grad():
                    yield module(x, skip=unused).square().mean()

        model.zero_grad(set_to_none=True)
        _window_is_right(plain, model, rank, calls)


@pytest.mark.parametrize("find", [False, True])
@setups
def test_what_any_call_of_the_window_used_on_any_rank_is_averaged(ranks, world_size, cap, find):
    ranks(world_size, _uses_over_the_window, cap, find)


def _declared_over_the_window(rank: int, cap: float | None) -> int:
    """Each call declares what it skips; layer 2 is skipped by all, layers 0 and 1 by the synchronised call alone."""
    plain, model = make(bucket_cap_mb=cap)
    for step in range(3):

        def calls(module: nn.Module, r: int, step: int = step):  # type: ignore[no-untyped-def]
            for k, skip in enumerate([{2, 3}, {0, 2}, {0, 1, 2}]):
                with _no_sync(module) if k < 2 else torch.enable_grad():
                    unused = [f"layers.{i}" for i in skip]
                    yield square_loss(module, r, 10 * step + k, skip=skip, **declares(module, unused))

        model.zero_grad(set_to_none=True)
        _window_is_right(plain, model, rank, calls)
    return model.stats().bytes_skipped


@setups
def test_declarations_that_change_inside_a_window_skip_only_what_all_calls_skipped(ranks, world_size, cap):
    """A layer of 3 * 3 + 3 floats of 4 bytes in each of three windows."""
    assert ranks(world_size, _declared_over_the_window, cap) == [3 * 48] * world_size


def _after_the_window(rank: int) -> list[float | None]:
    """b is used in the first window alone, then gets a gradient by hand."""
    _, model = make(lambda: Scales("a", "b"))
    with model.no_sync():
        model(torch.tensor(6.0), use="b").backward()
    model(torch.tensor(6.0), use="a", unused_parameters=["b"]).backward()
    model.zero_grad()
    model.module.b.grad = torch.tensor(10.0 * (rank + 1))
    model(torch.tensor(6.0), use="a", unused_parameters=["b"]).backward()
    return grads_of(model)


def test_what_one_window_used_is_forgotten_in_the_next(ranks):
    """x is 6. a: 6; b, touched by nobody since the last synchronisation, stays 10 and 20."""
    assert ranks(2, _after_the_window) == [[6.0, 10.0], [6.0, 20.0]]


def _window_without_end(rank: int) -> None:
    """Gradients of unsynchronised calls that are zeroed before the synchronised one are not brought back."""
    plain, model = make()
    for set_to_none in (True, False):
        model.zero_grad(set_to_none=True)
        with model.no_sync():
            square_loss(model, rank, 1, skip={2, 3}).backward()
        model.zero_grad(set_to_none=set_to_none)
        square_loss(model, rank, 2, skip={0, 1}, unused_parameters=["layers.0", "layers.1"]).backward()
        wanted = mean_grads(plain, dist.get_world_size(), lambda m, r: square_loss(m, r, 2, skip={0, 1}))
        if not set_to_none:
            wanted |= {n: torch.zeros_like(p) for n, p in plain.named_parameters() if wanted[n] is None}
        assert_grads(model, wanted)


@world_sizes
def test_gradients_zeroed_inside_a_window_are_gone(ranks, world_size):
    ranks(world_size, _window_without_end)


# -- which calls are local


def _forward_decides(rank: int) -> list[list[float | None]]:
    _, model = make(lambda: Scales("a"))
    x = torch.tensor(6.0 * (rank + 1))
    found = []
    with model.no_sync():
        loss = model(x, use="a")
    loss.backward()
    found.append(grads_of(model))
    model.zero_grad()
    loss = model(x, use="a")
    with model.no_sync():
        loss.backward()
    found.append(grads_of(model))
    return found


def test_the_forward_decides_whether_a_backward_is_local(ranks):
    """x is 6 and 12. Forward inside, backward outside: 6 and 12; forward outside, backward inside: (6 + 12) / 2."""
    assert ranks(2, _forward_decides) == [[[6.0], [9.0]], [[12.0], [9.0]]]


def _by_attribute(rank: int) -> list[list[float | None]]:
    """As training frameworks do that wrap ``no_sync`` in something of their own."""
    _, model = make(lambda: Scales("a"))
    found = []
    for synchronises in (False, True):
        model.require_backward_grad_sync = synchronises
        model(torch.tensor(6.0 * (rank + 1)), use="a").backward()
        found.append(grads_of(model))
    return found


def test_the_attribute_behind_no_sync_may_be_set_directly(ranks):
    """x is 6 and 12, in two calls. After the local one: 6 and 12; after the synchronised one: (12 + 24) / 2."""
    assert ranks(2, _by_attribute) == [[[6.0], [18.0]], [[12.0], [18.0]]]


def _both_in_one_backward(rank: int, swapped: bool) -> list[float | None]:
    _, model = make(lambda: Scales("a", "b"))
    for _ in range(3):
        model.zero_grad()
        x = torch.tensor(6.0 * (rank + 1))
        if swapped:
            synchronised = model(x, use="a")
        with model.no_sync():
            local = model(x, use="a b")
        if not swapped:
            synchronised = model(x, use="a", unused_parameters=["b"])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*no rank expected: b")  # the local call uses it
            (synchronised + local).backward()
    return grads_of(model)


@pytest.mark.parametrize("swapped", [False, True])
def test_one_backward_through_a_local_and_a_synchronised_call_averages_all_of_it(ranks, swapped):
    """x is 6 and 12. a, in both calls: (12 + 24) / 2; b, in the local one: (6 + 12) / 2."""
    assert ranks(2, _both_in_one_backward, swapped) == [[18.0, 9.0]] * 2


def _without_grad(rank: int) -> None:
    plain, model = make()
    for step in range(3):
        with model.no_sync(), torch.no_grad():
            assert not square_loss(model, rank, step).requires_grad
        step_is_right(plain, model, rank, step)


def test_a_call_under_no_sync_and_no_grad_leaves_nothing_behind(ranks):
    ranks(2, _without_grad)


def _one_rank_accumulates(rank: int) -> None:
    """Only rank 0 has unsynchronised calls, in every other step."""
    plain, model = make()
    for step in range(4):

        def calls(module: nn.Module, r: int, step: int = step):  # type: ignore[no-untyped-def]
            if r == 0 and step % 2:
                with _no_sync(module):
                    yield square_loss(module, r, 10 + step)
            yield square_loss(module, r, step)

        model.zero_grad()
        _window_is_right(plain, model, rank, calls)


@world_sizes
def test_one_rank_alone_may_accumulate(ranks, world_size):
    ranks(world_size, _one_rank_accumulates)


def _error_inside(rank: int, kind: type[BaseException]) -> None:
    plain, model = make()

    def accumulate() -> None:
        with model.no_sync(), model.no_sync():
            square_loss(model, rank, 1).backward()
            raise kind

    for step in range(2):
        with pytest.raises(kind):
            accumulate()
        assert model.require_backward_grad_sync
        step_is_right(plain, model, rank, step)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_leaving_no_sync_by_an_error_restores_synchronisation(ranks, kind):
    ranks(2, _error_inside, kind)


# -- gradients that stood there before


def _told_one_by_one(rank: int) -> list[list[float | None]]:
    """Where hooks report each gradient, as on several devices: b is used before, and by no rank since."""
    _, model = make(lambda: Scales("a", "b"), find_unused_parameters=True)
    x = torch.tensor(6.0 * (rank + 1))
    found = []
    for may_wait in (True, False):
        model.zero_grad()
        model(x, use="a b").backward()
        model.module.a.grad, model.module.b.grad = None, torch.tensor(float(rank))
        model.reducer._are_on_one_device = may_wait
        with model.no_sync():
            model(x, use="a").backward()
        model(x, use="a").backward()
        found.append(grads_of(model))
    return found


def test_what_the_last_window_brought_is_not_taken_for_local(ranks):
    """x is 6 and 12. a, twice: (12 + 24) / 2; b stays what each rank put there."""
    assert ranks(2, _told_one_by_one) == [[[18.0, float(rank)]] * 2 for rank in range(2)]


class _Sometimes(Scales):
    """What it returns cannot be looked into if ``hides``."""

    def forward(self, x: Tensor, use: str, hides: bool = False) -> Any:  # type: ignore[override]
        total = super().forward(x, use)
        return (lambda: total) if hides else total


class _Large(Scales):
    def __init__(self) -> None:
        super().__init__("a", "b")
        self.large = nn.Parameter(torch.ones(2**15))


def _undefined_locally(rank: int, may_wait: bool) -> list[float]:
    """b stood there, other on each rank, and nothing comes of it in a local backward, nor in the next."""
    _, model = make(_Large, find_unused_parameters=True)
    a, b, large = model.parameters()
    model.reducer._are_on_one_device = may_wait
    x = torch.tensor(6.0 * (rank + 1))
    b.grad = torch.tensor(float(rank))
    with model.no_sync():
        loss = model(x, use="a")
    (loss + Withholds.apply(b) + large.sum()).backward()
    model(x, use="a").backward()
    return [float(a.grad), float(b.grad), float(large.grad[0])]


@pytest.mark.parametrize("may_wait", [True, False])
def test_an_undefined_gradient_in_a_local_backward_is_not_averaged(ranks, may_wait):
    """x is 6 and 12. a, twice: (12 + 24) / 2; b stays what each rank put there."""
    assert ranks(2, _undefined_locally, may_wait) == [[18.0, float(rank), 1.0] for rank in range(2)]


class _Interrupted(_Large):
    """``between`` is called in a backward when a gradient of b and of large came, and none of a."""

    def forward(self, x: Tensor, between: Callable[[Tensor], None] | None = None) -> Tensor:  # type: ignore[override]
        first = self.a * x
        if between is not None:
            first.register_hook(between)
        return first + (self.b + self.large.sum()) * x


def _told_one_by_one_from_the_middle_on(rank: int) -> list[float]:
    """A forward in the middle of a backward finds that RPC runs: from the next on hooks report each gradient."""
    _, model = make(_Interrupted, unused_agreement="same")  # large ones are packed as they come, from the first on
    a, b, large = model.parameters()
    x = torch.tensor(6.0 * (rank + 1))

    def between(_: Tensor) -> None:
        assert b.grad is not None and a.grad is None
        with mock.patch.object(_torch_private, "rpc_is_running", return_value=True), torch.no_grad():
            model(x)

    model(x).backward()  # buckets are learnt
    model.zero_grad()
    model(x, between).backward()
    return [float(a.grad), float(b.grad), float(large.grad[0])]


def test_what_was_written_down_counts_though_hooks_report_each_gradient_from_now_on(ranks):
    """x is 6 and 12."""
    assert ranks(2, _told_one_by_one_from_the_middle_on) == [[9.0] * 3] * 2


def _fails_locally(rank: int) -> list[list[float | None]]:
    _, model = make(lambda: _Sometimes("a", "b", "c"))
    x = torch.tensor(6.0 * (rank + 1))
    model(x, use="a b c").backward()
    model.zero_grad()
    with model.no_sync():
        loss = model(x, use="a b c")

    def fails(_: Tensor) -> None:
        raise ArithmeticError

    handle = model.module.a.register_hook(fails)
    with pytest.raises(ArithmeticError):
        loss.backward()
    handle.remove()
    found = [grads_of(model)]
    model(x, use="a", hides=True, unused_parameters=["b", "c"])().backward()
    return [*found, grads_of(model)]


def test_what_came_before_a_local_backward_raised_is_averaged_and_the_next_one_is_noticed(ranks):
    """x is 6 and 12. The local backward comes to c, b and a, where it raises. a: (6 + 12) / 2, as are b and c, which
    the next one leaves out.
    """
    assert ranks(2, _fails_locally) == [[[None, x, x], [9.0] * 3] for x in (6.0, 12.0)]


def _old_gradients(rank: int, find: bool, views: bool) -> list[list[float | None]]:
    """a is used by both ranks, b by rank 1 alone, c by none; d has no gradient and is used by none."""
    _, model = make(lambda: Scales("a", "b", "c", "d"), find_unused_parameters=find, gradient_as_bucket_view=views)
    found = []
    for _ in range(2):
        for param in (model.module.a, model.module.b, model.module.c):
            param.grad = torch.tensor(10.0 * (rank + 1))
        unused = [] if find else ["c", "d"]
        model(torch.tensor(1.0), use="a" if rank == 0 else "a b", unused_parameters=unused).backward()
        found.append(grads_of(model))
    return found


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("find", [False, True])
def test_gradients_that_stood_there_join_the_mean(ranks, find, views):
    """10 and 20 stood there, x is 1. a: (11 + 21) / 2; b: (10 + 21) / 2; c, touched by nobody, stays; d has none."""
    rank_0, rank_1 = [16.0, 15.5, 10.0, None], [16.0, 15.5, 20.0, None]
    assert ranks(2, _old_gradients, find, views) == [[rank_0] * 2, [rank_1] * 2]


class _Closure(Scales):
    """What it returns cannot be looked into, so its backward is noticed only at the first parameter."""

    def forward(self, x: Tensor, use: str):  # type: ignore[no-untyped-def, override]
        total = super().forward(x, use)
        return lambda: total


def _old_gradients_hidden(rank: int) -> list[list[float | None]]:
    _, model = make(lambda: _Closure("a", "b", "c"))
    found = []
    for _ in range(2):
        for param in model.parameters():
            param.grad = torch.tensor(10.0 * (rank + 1))
        with model.no_sync():
            model(torch.tensor(1.0), use="a")().backward()
        output = model(torch.tensor(1.0), use="a" if rank == 0 else "a b", unused_parameters=["c"])
        output().backward()
        found.append(grads_of(model))
    return found


def test_gradients_that_stood_there_join_the_mean_also_when_the_output_is_hidden(ranks):
    """10 and 20 stood there, x is 1. a, used twice: (12 + 22) / 2; b, by rank 1 alone: (10 + 21) / 2; c stays."""
    assert ranks(2, _old_gradients_hidden) == [[[17.0, 15.5, 10.0]] * 2, [[17.0, 15.5, 20.0]] * 2]


def _on_one_rank_only(rank: int) -> list[float | None]:
    _, model = make(lambda: Scales("a", "b"))
    if rank == 1:
        model.module.a.grad = torch.tensor(60.0)
        model.module.b.grad = torch.tensor(60.0)
    model(torch.tensor(6.0), use="a", unused_parameters=["b"]).backward()
    return grads_of(model)


def test_a_gradient_that_stood_on_one_rank_alone(ranks):
    """a: (6 + 66 + 6) / 3 = 26; b, touched by nobody, stays where it was."""
    assert ranks(3, _on_one_rank_only) == [[26.0, None], [26.0, 60.0], [26.0, None]]


def _twice_without_zeroing(rank: int, cap: float | None) -> list[float | None]:
    _, model = make(lambda: Scales("a", "b"), bucket_cap_mb=cap)
    for k in (1, 2, 3):
        model(torch.tensor(6.0 * (rank + 1) * k), use="a b" if rank else "a").backward()
    return grads_of(model)


def test_synchronised_backwards_without_zeroing_add_up_their_means_on_two_ranks(ranks):
    """x is 6 k and 12 k. a: 9 k, in sum over k = 1, 2, 3: 54; b, used by rank 1: 6 k, in sum 36."""
    assert ranks(2, _twice_without_zeroing, None) == [[54.0, 36.0]] * 2


def test_synchronised_backwards_without_zeroing_add_up_their_means_on_three_ranks(ranks):
    """x is 6 k, 12 k, 18 k. a: 12 k, in sum over k = 1, 2, 3: 72; b, used by ranks 1 and 2: 10 k, in sum 60."""
    assert ranks(3, _twice_without_zeroing, 1e-5) == [[72.0, 60.0]] * 3


def _shares(rank: int, is_one: bool) -> None:
    """a: 5 + (1 + 2) / 2; b, used three times: 5 + 3 (1 + 2) / 2; c is unused, and has what was there."""
    _, model = make(lambda: Scales("a", "b", "c"))
    x = torch.tensor(rank + 1.0)
    a, b, c = model.parameters()
    for _ in range(3):
        a.grad = c.grad = torch.tensor(5.0)
        b.grad = a.grad if is_one else a.grad.detach()
        (model(x, "a b", unused_parameters=["c"]) + model(2 * x, "b", unused_parameters=["a", "c"])).backward()
        assert grads_of(model) == [6.5, 9.5, 5.0]


@pytest.mark.parametrize("is_one", [True, False], ids=["one tensor", "one memory"])
def test_gradients_that_share_memory_come_apart(ranks, is_one):
    ranks(2, _shares, is_one)


def _loses_hooks(rank: int, cast: Callable[[nn.Parameter], None]) -> None:
    """A cast and back gives a parameter a new node, without a hook: what accumulates there is averaged all the same.

    a: twice (1 + 2) / 2; b: once; c: in the call that synchronises. d is untouched.
    """
    _, model = make(lambda: Scales("a", "b", "c", "d"))
    x = torch.tensor(rank + 1.0)
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        model(x, "a b c d").backward()
        model.zero_grad(set_to_none=True)
        d = model.module.d.grad = torch.tensor(7.0 + rank)
        for param in model.parameters():
            cast(param)
        for use in ("a b", "a"):
            with model.no_sync():
                model(x, use).backward()
        model(x, "c", unused_parameters=["a", "b", "d"]).backward()
        assert grads_of(model) == [3.0, 1.5, 1.5, 7.0 + rank]
        assert model.module.d.grad is d


def _to_and_fro(param: nn.Parameter) -> None:
    param.data = param.data.double()
    param.data = param.data.float()


def _half_for_a_while(param: nn.Parameter) -> None:
    data = param.data
    param.data = data.half()
    param.data = data


@pytest.mark.parametrize("cast", [_to_and_fro, _half_for_a_while])
def test_local_gradients_of_parameters_that_were_cast_and_cast_back_are_averaged(ranks, cast):
    ranks(2, _loses_hooks, cast)
