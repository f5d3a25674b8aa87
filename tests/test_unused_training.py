"""Declarations where a training does more than one call and one backward, or alternates between parts of its model.

Expected gradients come from plain autograd on one process; numbers of bytes are worked out in the docstring.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
from models import Skippable, inputs, make
from steps import (
    assert_same_parameters,
    assert_unmoved,
    declares,
    follow,
    setups,
    snapshot,
    square_loss,
    steps_are_right,
    world_sizes,
)
from torch import Tensor, nn

LAYER_BYTES = 48  # 3 * 3 + 3 floats of 4 bytes
SKIPS = [{1}, set(), {0, 3}, {2, 3}, {1}, {0, 1, 2}]


def _names(skip: Collection[int]) -> list[str]:
    return [f"layers.{i}" for i in skip]


# -- several forwards


def _two_calls(rank: int, cap: float | None) -> int:
    """Together the calls leave out layer 1 alone."""
    plain, model = make(bucket_cap_mb=cap)

    def loss_of(module: nn.Module, r: int, step: int) -> Tensor:
        one = square_loss(module, r, step, skip={0, 1}, **declares(module, ["layers.0", "layers.1"]))
        return one + square_loss(module, r, step + 50, skip={1, 3}, **declares(module, ["layers.1", "layers.3"]))

    steps_are_right(plain, model, rank, loss_of)
    return model.stats().bytes_skipped


@setups
def test_of_two_calls_before_one_backward_counts_what_either_uses(ranks, world_size, cap):
    assert ranks(world_size, _two_calls, cap) == [3 * LAYER_BYTES] * world_size


def _two_calls_two_backwards(rank: int, cap: float | None) -> int:
    """Each backward goes by the declaration of its own call, whatever the order: 2 + 1 layers skipped a step."""
    plain, model = make(bucket_cap_mb=cap)

    def loss_of(module: nn.Module, r: int, step: int) -> list[Tensor]:
        one = square_loss(module, r, step, skip={0, 1}, **declares(module, ["layers.0", "layers.1"]))
        two = square_loss(module, r, step + 50, skip={3}, **declares(module, ["layers.3"]))
        return [one, two] if step % 2 else [two, one]

    steps_are_right(plain, model, rank, loss_of)
    return model.stats().bytes_skipped


@setups
def test_each_of_two_backwards_goes_by_its_own_calls_declaration(ranks, world_size, cap):
    assert ranks(world_size, _two_calls_two_backwards, cap) == [9 * LAYER_BYTES] * world_size


class _Opaque:
    """An object whose tensor is out of sight."""

    def __init__(self, value: Tensor) -> None:
        self.inside = {"deep": [lambda: value]}


class _Open:
    """An object with a tensor among its attributes."""

    def __init__(self, value: Tensor) -> None:
        self.inside = {"deep": [value]}


class _Returning(Skippable):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self._kind = kind

    def forward(self, x: Tensor, skip: Collection[int] = ()) -> Any:  # type: ignore[override]
        return self._kind(super().forward(x, skip))


def _custom_output(rank: int, kind: type, cap: float | None) -> int:
    plain, model = make(lambda: _Returning(kind), bucket_cap_mb=cap)

    def loss_of(module: nn.Module, r: int, step: int) -> Tensor:
        skip = SKIPS[step]
        output = module(inputs(r, 5, 3, seed=step), skip=skip, **declares(module, _names(skip)))
        assert type(output) is kind
        found = output.inside["deep"][0]
        return (found() if kind is _Opaque else found).square().mean()

    steps_are_right(plain, model, rank, loss_of, steps=len(SKIPS))
    return model.stats().bytes_skipped


@pytest.mark.parametrize("kind", [_Open, _Opaque])
@setups
def test_what_a_declaring_call_returns_may_be_any_object(ranks, world_size, cap, kind):
    assert ranks(world_size, _custom_output, kind, cap) == [9 * LAYER_BYTES] * world_size


# -- trainings that skip


class _Supernet(nn.Module):
    """Three stages of three candidates; a path picks one each."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(nn.Linear(3, 3) for _ in range(3)) for _ in range(3))

    def forward(self, x: Tensor, path: Collection[int]) -> Tensor:
        for candidates, choice in zip(self.stages, path, strict=True):
            x = torch.tanh(candidates[choice](x))
        return x

    def idle(self, path: Collection[int]) -> list[nn.Module]:
        pairs = zip(self.stages, path, strict=True)
        return [one for candidates, choice in pairs for i, one in enumerate(candidates) if i != choice]


def _supernet(rank: int, cap: float | None) -> None:
    plain, model = make(_Supernet, bucket_cap_mb=cap)
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    ours, theirs = torch.optim.SGD(model.parameters(), **options), torch.optim.SGD(plain.parameters(), **options)
    for step, path in enumerate([(0, 1, 2), (2, 2, 0), (0, 0, 0), (1, 1, 1), (0, 1, 2)]):
        idle = model.module.idle(path)
        before = snapshot(p for module in idle for p in module.parameters())
        ours.zero_grad(set_to_none=True)
        square_loss(model, rank, step, path=path, unused_parameters=idle).backward()
        ours.step()
        assert_unmoved([p for module in idle for p in module.parameters()], before)
        follow(plain, theirs, lambda m, r, s=step, p=path: square_loss(m, r, s, path=p))
        assert_same_parameters(model, plain)


@setups
def test_a_supernet_trains_the_sampled_path_alone(ranks, world_size, cap):
    ranks(world_size, _supernet, cap)


class _Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(2, 3)
        self.critic = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, noise: Tensor, real: Tensor, turn: str) -> Tensor:
        if turn == "generator":
            return -self.critic(self.generator(noise)).mean()
        with torch.no_grad():
            fake = self.generator(noise)
        return self.critic(fake).mean() - self.critic(real).mean()


def _gan(rank: int, freezes: bool) -> None:
    """Adam for each half. The critic runs in the generator's turn, so it is unused there only if it is frozen."""
    plain, model = make(_Gan)
    optimizers = [
        {half: torch.optim.Adam(getattr(m, half).parameters(), lr=0.05) for half in ("generator", "critic")}
        for m in (model.module, plain)
    ]
    for step, turn in enumerate(["critic", "generator", "critic", "critic", "generator", "generator"]):
        other = "critic" if turn == "generator" else "generator"
        for m in (model.module, plain):
            m.generator.requires_grad_(not freezes or turn == "generator")
            m.critic.requires_grad_(not freezes or turn == "critic")

        def loss_of(module: nn.Module, r: int, step: int = step, turn: str = turn, other: str = other) -> Tensor:
            unused = [other] if freezes or other == "generator" else []
            noise, real = inputs(r, 4, 2, seed=step), inputs(r, 4, 3, seed=50 + step)
            return module(noise, real, turn, **declares(module, unused))

        model.zero_grad(set_to_none=True)
        loss_of(model, rank).backward()
        optimizers[0][turn].step()
        follow(plain, optimizers[1][turn], loss_of)
        assert_same_parameters(model, plain)


@pytest.mark.parametrize("freezes", [False, True])
@world_sizes
def test_generator_and_critic_in_one_module_take_turns(ranks, world_size, freezes):
    ranks(world_size, _gan, freezes)
