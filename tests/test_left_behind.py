"""What an exception, a context or a move to other ranks must not leave behind.

Gradients of models of scalars are worked out in the docstrings; rank r has the input 6 (r + 1), so the mean is 9.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Scales, make, raises_everywhere
from steps import grads_of
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.futures import Future
from torch.nn.parallel.distributed import _BufferCommHookLocation

from knownddp import KnownDDP, PeerError, PeerFailedError


class _Marked(Scales):
    """Scalars a and b, and a buffer."""

    def __init__(self) -> None:
        super().__init__("a", "b")
        self.register_buffer("mark", torch.zeros(()))


def _x(rank: int) -> Tensor:
    return torch.tensor(6.0 * (rank + 1))


def _step(model: KnownDDP, rank: int, use: str = "a b") -> list[float | None]:
    model.zero_grad()
    model(_x(rank), use=use).backward()
    return grads_of(model)


# -- a forward or a buffer hook that fails


def _hook_after_forward_raises(rank: int) -> tuple[list[float | None], list[float | None]]:
    _, model = make(_Marked)
    once = [rank == 0]

    def hook(_: object, __: object) -> None:
        if once and once.pop():
            raise ValueError("mine")

    model._register_buffer_comm_hook(None, hook, _BufferCommHookLocation.POST_FORWARD)
    if rank == 0:
        raises_everywhere(lambda: model(_x(rank), use="a b"), ValueError)
    right = _step(model, rank)
    model.zero_grad()
    model.module(_x(rank), use="a").backward()
    return right, grads_of(model)


def test_a_forward_whose_buffer_hook_raised_is_over(ranks):
    """A backward through the module itself then stays on its rank: 6 on rank 0, 12 on rank 1."""
    assert ranks(2, _hook_after_forward_raises) == [([9.0, 9.0], [6.0 * (r + 1), None]) for r in range(2)]


def _buffer_future_fails(rank: int) -> tuple[list[float | None], list[float | None]]:
    _, model = make(_Marked)
    fails = [True]

    def hook(_: object, __: object) -> Future[Any]:
        future: Future[Any] = Future()
        if rank == 0 and fails and fails.pop():
            future.set_exception(ValueError("mine"))
        else:
            future.set_result(None)
        return future

    model._register_buffer_comm_hook(None, hook)
    raises_everywhere(lambda: _step(model, rank), ValueError if rank == 0 else PeerFailedError)
    return grads_of(model), _step(model, rank)


def test_a_buffer_hook_whose_future_fails_on_one_rank_fails_the_step_on_all(ranks):
    assert ranks(2, _buffer_future_fails) == [([None, None], [9.0, 9.0])] * 2


# -- a begin that cannot go on


def _opening_fails(rank: int) -> list[list[float | None]]:
    module = Scales("a", "b")
    model = KnownDDP(module)
    _step(model, rank)
    before = grads_of(model)
    output = model(_x(rank), use="a b")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.reducer.comm, "combine_or", _no_connection)
        raises_everywhere(lambda: output.backward(), ConnectionError)
    kept = grads_of(model)
    raises_everywhere(lambda: model(_x(rank), use="a b"), PeerError)
    model._remove_autograd_hooks()
    return [before, kept, _step(KnownDDP(module), rank)]


def _no_connection(message: Tensor) -> None:
    raise ConnectionError("gone")


def test_a_window_that_could_not_open_leaves_gradients_and_another_wrapper_can_have_them(ranks):
    assert ranks(2, _opening_fails) == [[[9.0, 9.0]] * 3] * 2


# -- join contexts


def _raise_inside(context: Join, model: KnownDDP, rank: int) -> None:
    with context:
        model(_x(rank), use="a b").backward()
        raise ValueError("mine")


def _left_by_an_exception(rank: int) -> list[float | None]:
    _, model = make(lambda: Scales("a", "b"))
    context = model.join()  # kept alive
    raises_everywhere(lambda: _raise_inside(context, model, rank), ValueError)
    model.zero_grad()
    output = model(_x(rank), use="a b")
    output.backward(retain_graph=True)
    output.backward()
    return grads_of(model)


def test_a_context_that_an_exception_left_is_over_although_it_is_kept(ranks):
    """Two backwards of one forward, which a join context refuses: 9 and 9."""
    assert ranks(2, _left_by_an_exception) == [[18.0, 18.0]] * 2


def _divides_by_all_again(rank: int) -> list[float | None]:
    _, model = make(lambda: Scales("a"))
    with model.join(divide_by_initial_world_size=False):
        for _ in range(2 - rank):
            kept = model(_x(rank), use="a")
            kept.backward(retain_graph=True)
    model.zero_grad()
    kept.backward()
    return grads_of(model)


def test_after_a_context_gradients_are_divided_by_all_ranks(ranks):
    """The last forward of rank 0 had no peer: it was divided by 1."""
    assert ranks(2, _divides_by_all_again) == [[9.0]] * 2


def _keeps_what_it_accumulated(rank: int) -> list[float | None]:
    _, model = make(lambda: Scales("a", "b"))
    if rank == 0:
        with model.no_sync():
            model(_x(rank), use="b").backward()
    with model.join():
        if rank == 1:
            model(_x(rank), use="a", unused_parameters=["b"]).backward()
    model.module.a.grad = None
    model(_x(rank), use="a", unused_parameters=["b"]).backward()
    return grads_of(model)


def test_what_no_sync_accumulated_on_a_joined_rank_is_averaged_after_the_context(ranks):
    """a: (6 + 12) / 2; b: 6 on rank 0 alone, halved."""
    assert ranks(2, _keeps_what_it_accumulated) == [[9.0, 3.0]] * 2


# -- a move to other ranks


def _optimizers_move(rank: int, attached: str) -> tuple[list[float], list[float | None]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: it compiles functional optimizers
        from torch.distributed.optim import _apply_optimizer_in_backward

    module = Scales("a", "b")
    model = KnownDDP(module)
    if attached == "late":
        _step(model, rank)
        model.zero_grad()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 1.0})
    if attached == "before the move":
        model.zero_grad()
        model._update_process_group(dist.group.WORLD)
    model(_x(rank), use="a b").backward()
    return [p.item() for p in module.parameters()], grads_of(model)


@pytest.mark.parametrize("attached", ["early", "late", "before the move"])
def test_optimizers_in_backward_step_by_the_mean_whenever_they_were_attached(ranks, attached):
    """From 1 by 9."""
    assert ranks(2, _optimizers_move, attached) == [([-8.0, -8.0], [None, None])] * 2


def _moves_between(rank: int) -> list[float | None]:
    _, model = make(lambda: Scales("a", "b"))
    output = model(_x(rank), use="a b")
    model._update_process_group(dist.group.WORLD)
    output.backward()
    return grads_of(model)


def test_the_backward_of_a_forward_before_a_move_is_averaged(ranks):
    assert ranks(2, _moves_between) == [[9.0, 9.0]] * 2


def _numbers_after_a_move(rank: int) -> tuple[list[tuple[int, tuple[int, ...]]], bool]:
    torch.manual_seed(0)
    model = KnownDDP(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), bucket_cap_mb=1e-5)
    order = {id(p): i for i, p in enumerate(model.module.parameters())}
    seen: list[tuple[int, tuple[int, ...]]] = []

    def hook(_: object, bucket):
        seen.append((bucket.index(), tuple(order[id(p)] for p in bucket.parameters())))
        future: Future[Tensor] = Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    for step in range(4):
        if step == 2:
            model._update_process_group(dist.group.WORLD)
        if step == 1:
            seen.clear()  # numbers start anew once, after the first backward
        model(torch.ones(1, 2)).sum().backward()
    return seen, len({number for number, _ in seen}) == len(set(seen))


def test_a_bucket_number_means_the_same_parameters_after_a_move(ranks):
    for seen, is_unambiguous in ranks(2, _numbers_after_a_move):
        assert sum(len(params) for _, params in seen) == 3 * 6 and is_unambiguous
