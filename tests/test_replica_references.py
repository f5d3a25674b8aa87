"""Whatever a module refers to its parts by, those of a replica are meant in a replica."""

from __future__ import annotations

import collections
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import assert_grads, inputs, mean_grads
from torch import Tensor, nn

from knownddp import KnownDDP
from knownddp.replicas import replicate

CPU = torch.device("cpu")


@dataclass
class _Holder:
    part: Any


class _Listed(list[Any]):
    pass


class _Parted(nn.Module):
    """Holds its layer a second time, in ``held``, and finds it again by ``found``."""

    def __init__(self, hold: Callable[[nn.Module], Any], find: Callable[[Any], nn.Module]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.held, self.find = hold(self.layer), find

    def forward(self, x: Tensor) -> Tensor:
        assert self.find(self.held) is self.layer
        return self.layer(x)


WAYS: dict[str, tuple[Callable[[nn.Module], Any], Callable[[Any], Any]]] = {
    "set": (lambda layer: {layer}, lambda held: next(iter(held))),
    "frozenset": (lambda layer: frozenset([layer]), lambda held: next(iter(held))),
    "deque": (lambda layer: collections.deque([layer], maxlen=2), lambda held: held[0]),
    "list of a class": (lambda layer: _Listed([layer]), lambda held: held[0]),
    "defaultdict": (lambda layer: collections.defaultdict(list, a=[layer]), lambda held: held["a"][0]),
    "dataclass": (lambda layer: _Holder(layer), lambda held: held.part),
    "weak reference": (lambda layer: weakref.ref(layer), lambda held: held()),
    "weak references": (lambda layer: [weakref.ref(layer)], lambda held: held[0]()),
    "partial": (lambda layer: functools.partial(layer, 1), lambda held: held.func),
    "partial's arguments": (lambda layer: functools.partial(print, [layer], a=layer), lambda held: held.keywords["a"]),
}


@pytest.mark.parametrize(("hold", "find"), WAYS.values(), ids=WAYS)
def test_a_replica_finds_its_own_part(hold, find):
    module, x = _Parted(hold, find), inputs(0, 6, 3)
    wanted = mean_grads(module.layer, 1, lambda layer, _: layer(x).square().sum())
    before, model = module.held, KnownDDP(module, device_ids=["cpu"] * 3)
    model(x).square().sum().backward()
    assert module.held is before and find(before) is module.layer
    assert_grads(module.layer, wanted)


class _Wrapped(nn.Module):
    """``forward`` is a partial one, as tools make it that put something around a module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.forward = functools.update_wrapper(functools.partial(_counting, self), self.forward)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def _counting(module: nn.Module, x: Tensor) -> Tensor:
    module.calls += 1
    return type(module).forward(module, x)


def test_a_wrapped_forward_runs_the_replica():
    model = KnownDDP(_Wrapped(), device_ids=["cpu"] * 3)
    model(inputs(0, 6, 3)).square().sum().backward()
    assert model.module.calls.item() == 1  # copies count on their own
    assert model.module.forward.__name__ == replicate(model.module, CPU).forward.__name__ == "forward"


def test_marks_of_parameters_are_those_of_the_original():
    layer = nn.Linear(2, 2)
    layer.weight.scale = 2.0
    assert replicate(layer, CPU).weight.scale == 2.0


class _Hiding(nn.Module):
    """Does not list one of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.hidden = nn.Linear(3, 3), nn.Tanh()

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        return ((name, part) for name, part in super().named_modules(*args, **kwargs) if part is not self.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden(self.layer(x))


def test_a_part_that_is_not_listed_is_shared():
    model = KnownDDP(_Hiding(), device_ids=["cpu"] * 3)
    model(inputs(0, 6, 3)).sum().backward()
    assert replicate(model.module, CPU).hidden is model.module.hidden


def test_what_holds_no_part_is_shared():
    layer = nn.Linear(2, 2)
    layer.vocabulary, layer.records = {"a": 1}, [_Holder(1), {2}, weakref.ref(CPU.__class__)]
    replica = replicate(layer, CPU)
    assert replica.vocabulary is layer.vocabulary and replica.records is layer.records
