"""What a forward returns comes back as it is, of whatever type, and may be used in any way.

Expected gradients come from plain autograd on one process.
"""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import pytest
import torch
from models import Skippable, inputs, make
from steps import declares, step_is_right, steps_are_right, world_sizes
from torch import Tensor, nn

from knownddp import KnownDDP


@dataclasses.dataclass
class _Result:
    main: Any
    extra: list[Any]
    note: str = "text"


@dataclasses.dataclass(frozen=True)
class _Frozen:
    main: Any


class _Typed(NamedTuple):
    main: Any
    other: Any


_Untyped = namedtuple("_Untyped", ["main", "other"])


class _Slotted:
    __slots__ = ("main",)

    def __init__(self, main: Tensor) -> None:
        self.main = main


class _Mapping(dict):  # type: ignore[type-arg]
    @property
    def main(self) -> Tensor:
        return self["main"]


PACKS: dict[str, Callable[[Tensor], Any]] = {
    "dataclass": lambda y: _Result(y, [y.detach(), None]),
    "nested-dataclass": lambda y: _Result(None, [{"y": _Frozen(y)}]),
    "frozen-dataclass": _Frozen,
    "named-tuple": lambda y: _Typed(y, 5),
    "untyped-named-tuple": lambda y: _Untyped(y, None),
    "mapping": lambda y: _Mapping(main=y, note="text"),
    "slots": _Slotted,
}


class _Packing(Skippable):
    def __init__(self, pack: str) -> None:
        super().__init__()
        self._pack = PACKS[pack]
        self.returned: object = None

    def forward(self, x: Tensor, skip: Collection[int] = ()) -> Any:  # type: ignore[override]
        self.returned = self._pack(super().forward(x, skip))
        return self.returned


def _packed(rank: int, pack: str, find: bool) -> None:
    plain, model = make(lambda: _Packing(pack), find_unused_parameters=find)

    def loss_of(module: nn.Module, r: int, step: int) -> Tensor:
        skip = [{1}, {0, 2}, set()][step]
        output = module(inputs(r, 5, 3, seed=step), skip=skip, **({} if find else declares(module, _names(skip))))
        inner = module.module if isinstance(module, KnownDDP) else module
        assert output is inner.returned
        inner.returned = None
        found = output.main if output.main is not None else output.extra[0]["y"].main
        return found.square().mean()

    steps_are_right(plain, model, rank, loss_of)


def _names(skip: Collection[int]) -> list[str]:
    return [f"layers.{i}" for i in skip]


@pytest.mark.parametrize("find", [False, True])
@pytest.mark.parametrize("pack", PACKS)
def test_an_output_of_any_type_comes_back_itself_and_needs_no_search(ranks, pack, find):
    ranks(2, _packed, pack, find)


class _WithFresh(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.linear(x), torch.zeros(2), x


def _in_place(rank: int, find: bool) -> None:
    plain, model = make(_WithFresh, find_unused_parameters=find)

    def loss_of(module: nn.Module, r: int, step: int) -> Tensor:
        x = inputs(r, 5, 3, seed=step)
        y, fresh, same = module(x)
        assert fresh.grad_fn is None and not fresh.requires_grad
        assert same is x
        fresh += 1
        y += fresh
        y.mul_(2)
        loss = y.square().mean()
        loss /= 10
        return loss

    steps_are_right(plain, model, rank, loss_of)


@pytest.mark.parametrize("find", [False, True])
@world_sizes
def test_outputs_may_be_changed_in_place_and_fresh_tensors_stay_fresh(ranks, world_size, find):
    ranks(world_size, _in_place, find)


class _ReturnsParameter(nn.Module):
    """A managed parameter itself is among the outputs, for a penalty on it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.linear.weight


def _returns_parameter(rank: int, find: bool, penalty_alone: bool) -> None:
    plain, model = make(_ReturnsParameter, find_unused_parameters=find)

    def loss_of(module: nn.Module, r: int, step: int) -> Tensor:
        declared = declares(module, ["linear.bias"]) if penalty_alone and not find else {}
        y, weight = module(inputs(r, 5, 3, seed=step), **declared)
        penalty = (weight.square() * (r + 1)).sum()
        return penalty if penalty_alone else y.square().mean() + penalty

    steps_are_right(plain, model, rank, loss_of)


@pytest.mark.parametrize("penalty_alone", [False, True])
@pytest.mark.parametrize("find", [False, True])
@world_sizes
def test_a_parameter_among_the_outputs(ranks, world_size, find, penalty_alone):
    ranks(world_size, _returns_parameter, find, penalty_alone)


class _PassesOn(nn.Module):
    """Returns what it was given beside its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(features), features


def _only_passed_on(rank: int, find: bool) -> None:
    """A loss on the features alone trains the encoder in front, and no parameter of the wrapper is missing."""
    plain, model = make(_PassesOn, find_unused_parameters=find)
    encoder = nn.Linear(3, 3)
    for step in range(3):
        model.zero_grad(set_to_none=True)
        _, features = model(encoder(inputs(rank, 5, 3, seed=step)))
        features.square().mean().backward()
        assert encoder.weight.grad is not None
        assert all(p.grad is None for p in model.parameters())
        step_is_right(plain, model, rank, step, lambda m, r, s: m(inputs(r, 5, 3, seed=s))[0].square().mean())


@pytest.mark.parametrize("find", [False, True])
@world_sizes
def test_a_backward_through_a_returned_input_alone_promises_no_gradients(ranks, world_size, find):
    ranks(world_size, _only_passed_on, find)
