"""Replicas under what belongs to one thread: transforms of ``torch.func`` and modes that intercept calls.

They cannot be entered in a second thread, so all replicas run in the caller's. The oracle is the plain module.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Skippable, assert_grads, inputs, make, mean_grads
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from knownddp import KnownDDP
from knownddp import _torch_private as private

THREE = ["cpu"] * 3


def _square(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: module(x).square().sum()


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "grad": lambda module, x: torch.func.grad(_square(module))(x),
    "twice": lambda module, x: torch.func.jacrev(torch.func.jacrev(_square(module)))(x),
    "vmap": lambda module, x: torch.func.vmap(module)(x.unsqueeze(0).repeat(2, 1, 1)),
    "parameters": lambda module, x: torch.func.grad(
        lambda params: torch.func.functional_call(module, params, (x,)).square().sum()
    )(dict(module.named_parameters())),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_see_all_replicas(transform):
    plain, model = make(device_ids=THREE)
    ours, wanted = transform(model, inputs(0, 6, 3)), transform(plain, inputs(0, 6, 3))
    if isinstance(ours, dict):
        ours = {name.removeprefix("module."): grad for name, grad in ours.items()}
    torch.testing.assert_close(ours, wanted)
    assert not private.is_bound_to_thread()


class _CountingDispatch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.aten.tanh.default
        return func(*args, **(kwargs or {}))


class _CountingFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.tanh
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [_CountingDispatch, _CountingFunctions])
def test_modes_count_the_calls_of_all_replicas(kind):
    """Four layers on each of three replicas."""
    plain, model = make(device_ids=THREE)
    with kind() as mode:
        model(inputs(0, 6, 3)).square().sum().backward()
    assert mode.number == 12
    assert_grads(model, mean_grads(plain, 1, lambda m, _: _square(m)(inputs(0, 6, 3))))


def test_a_failure_under_a_mode_is_that_of_the_first_replica_that_has_one():
    class Failing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if x[0, 0] > 0:
                raise ArithmeticError(x[0, 0].item())
            return super().forward(x)

    model = KnownDDP(Failing(1, 1), device_ids=THREE)
    with pytest.raises(ArithmeticError, match="1") as caught, _CountingDispatch():
        model(torch.tensor([[0.0], [1.0], [2.0]]))
    assert "raised in replica 1 of 3, on cpu" in "".join(traceback.format_exception(caught.value))
    assert threading.active_count() == 1


def test_a_checkpoint_around_the_wrapper_under_a_mode():
    plain, model = make(Skippable, device_ids=THREE)
    with _CountingDispatch():
        checkpoint(model, inputs(0, 6, 3).requires_grad_(), use_reentrant=False).square().sum().backward()
    assert_grads(model, mean_grads(plain, 1, lambda m, _: _square(m)(inputs(0, 6, 3))))


def test_a_default_device_is_a_mode_that_each_thread_can_have():
    with torch.device("meta"):
        assert not private.is_bound_to_thread()
    with _CountingFunctions():
        assert private.is_bound_to_thread()
