"""Buffer hooks: the user's own way to synchronise buffers, before or after each synchronising training forward.

Expected values are worked out in the docstring.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Scales, make, raises_everywhere
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel.distributed import _BufferCommHookLocation

from knownddp import KnownDDP


class _Seen(Scales):
    """Notes the value of a buffer as the forward begins, then adds 10^rank to it."""

    def __init__(self) -> None:
        super().__init__("a")
        self.register_buffer("mark", torch.zeros(()))
        self.register_buffer("idle", torch.zeros(2))
        self.seen: list[float] = []

    def forward(self, x: Tensor, use: str = "a") -> Tensor:
        self.seen.append(self.mark.item())
        self.mark += 10.0 ** dist.get_rank()
        return super().forward(x, use)


def _maximum(calls: list[Any], buffers: dict[str, Tensor]) -> list[Future]:
    """The maximum over ranks, not waited for."""
    calls.append(sorted(buffers))
    return [dist.all_reduce(b, op=dist.ReduceOp.MAX, async_op=True).get_future() for b in buffers.values()]  # type: ignore[union-attr]


def _waiting(calls: list[Any], buffers: dict[str, Tensor]) -> None:
    for future in _maximum(calls, buffers):
        future.wait()


def _step(model: KnownDDP) -> None:
    model(torch.tensor(1.0)).backward()


def _hooked(rank: int, location: str | None) -> tuple[list[float], float, int]:
    _, model = make(_Seen)
    calls: list[Any] = []
    where = [] if location is None else [_BufferCommHookLocation[location]]
    model._register_buffer_comm_hook(calls, _waiting, *where)
    with model.no_sync():
        _step(model)
    with torch.no_grad():
        model(torch.tensor(1.0))
    for _ in range(2):
        _step(model)
    assert all(names == ["idle", "mark"] for names in calls)
    return model.module.seen, model.module.mark.item(), len(calls)


def test_a_hook_before_each_forward(ranks):
    """Without gradients and under no_sync buffers stay each rank's own: 1, 2 and 10, 20. Then the maximum of 2 and 20,
    and of 21 and 30."""
    assert ranks(2, _hooked, "PRE_FORWARD") == [([0, 1, 20, 30], 31, 2), ([0, 10, 20, 30], 40, 2)]


@pytest.mark.parametrize("location", ["POST_FORWARD", None])
def test_a_hook_after_each_forward(ranks, location):
    """2 and 20 are each rank's own; then the maximum of 3 and 30, and of 31 and 40."""
    assert ranks(2, _hooked, location) == [([0, 1, 2, 30], 40, 2), ([0, 10, 20, 30], 40, 2)]


def _futures(rank: int, single: bool) -> list[float]:
    _, model = make(_Seen)
    hook = (lambda calls, buffers: _maximum(calls, {"mark": buffers["mark"]})[0]) if single else _maximum
    model._register_buffer_comm_hook([], hook)
    found = []
    for _ in range(3):
        _step(model)
        found.append(model.module.mark.item())
    return found


@pytest.mark.parametrize("single", [False, True])
def test_futures_are_waited_for_when_the_backward_is_over(ranks, single):
    """The maximum of 1 and 10, of 11 and 20, of 21 and 30."""
    assert ranks(2, _futures, single) == [[10.0, 20.0, 30.0]] * 2


def _off(rank: int, why: str) -> tuple[list[float], int]:
    _, model = make(_Seen, forward_sync_buffers=why != "off")
    if why == "evaluation":
        model.eval()
    calls: list[Any] = []
    model._register_buffer_comm_hook(calls, _waiting)
    for _ in range(2):
        _step(model)
    return model.module.seen, len(calls)


@pytest.mark.parametrize("why", ["off", "evaluation"])
def test_no_hook_runs_where_buffers_are_not_synchronised(ranks, why):
    assert ranks(2, _off, why) == [([0.0, 1.0], 0), ([0.0, 10.0], 0)]


def _failing(rank: int) -> list[float]:
    """On all ranks the hook raises before its collectives; then it does not."""
    _, model = make(_Seen)
    fails = True

    def hook(calls: list[Any], buffers: dict[str, Tensor]) -> None:
        if fails:
            raise ArithmeticError
        _waiting(calls, buffers)

    model._register_buffer_comm_hook([], hook)
    with pytest.raises(ArithmeticError):
        model(torch.tensor(1.0))
    fails = False
    _step(model)
    raises_everywhere(lambda: model._register_buffer_comm_hook(None, 1), TypeError)
    return [*model.module.seen, model.module.mark.item(), model.module.a.grad.item()]


def test_a_hook_that_raises(ranks):
    """It raises after the forward: 1 and 10; then 2 and 20."""
    assert ranks(2, _failing) == [[0.0, 1.0, 20.0, 1.0], [0.0, 10.0, 20.0, 1.0]]


def _copied(rank: int) -> list[float]:
    _, model = make(_Seen)
    model._register_buffer_comm_hook([], _waiting)
    twin = copy.deepcopy(model)
    for _ in range(2):
        _step(twin)
    return twin.module.seen


def test_copies_have_no_hook(ranks):
    """Rank 0's values: 0, then 1."""
    assert ranks(2, _copied) == [[0.0, 1.0]] * 2
