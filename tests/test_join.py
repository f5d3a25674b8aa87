"""Uneven inputs: ranks that run out take part in what the others do, and hold the same model in the end.

Expected gradients come from plain autograd on one process or are worked out in the docstring.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import assert_grads, inputs, make, mean_grads
from steps import TINY_CAP_MB, assert_same_parameters, declares, square_loss, step_is_right
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from knownddp import KnownDDP

Losses = Callable[[nn.Module, int, int], Iterable[Tensor]]

# How many inputs each rank has: a rank without any, one that runs out in the middle, last joiners that are not rank 0.
UNEVEN = [(3, 1), (2, 0, 4), (1, 3, 0, 3)]
uneven = pytest.mark.parametrize("counts", UNEVEN, ids=str)


def shares(plain: nn.Module, active: Sequence[int], divisor: int, losses: Losses, step: int) -> dict[str, Any]:
    """The gradients of the ranks that still have inputs, summed and divided; None where none of them has one."""
    each = [mean_grads(plain, 1, lambda m, _, r=rank: losses(m, r, step)) for rank in active]  # type: ignore[misc]
    found: dict[str, Any] = {}
    for name in each[0]:
        some = [grads[name] for grads in each if grads[name] is not None]
        found[name] = torch.stack(some).sum(0) / divisor if some else None
    return found


def no_sync_of(module: nn.Module) -> AbstractContextManager[None]:
    return module.no_sync() if isinstance(module, KnownDDP) else nullcontext()


def train_unevenly(
    rank: int, counts: Sequence[int], plain: nn.Module, model: KnownDDP, losses: Losses, *, divides_by_all: bool = True
) -> None:
    """Train by SGD as long as this rank has inputs, beside an oracle that trains for all ranks; then once together."""
    ours, oracle = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain))

    def wanted_of(step: int) -> dict[str, Any]:
        active = [r for r, count in enumerate(counts) if step < count]
        return shares(plain, active, len(counts) if divides_by_all else len(active), losses, step)

    def follow(wanted: dict[str, Any]) -> None:
        for name, param in plain.named_parameters():
            param.grad = wanted[name]
        oracle.step()

    with model.join(divide_by_initial_world_size=divides_by_all):
        for step in range(counts[rank]):
            wanted = wanted_of(step)
            model.zero_grad(set_to_none=True)
            for loss in losses(model, rank, step):
                loss.backward()
            assert_grads(model, wanted)
            ours.step()
            follow(wanted)
    for step in range(counts[rank], max(counts)):
        follow(wanted_of(step))
    assert_same_parameters(model, plain)
    step_is_right(plain, model, rank, loss_of=losses)


# -- every way of training


def _plain(module: nn.Module, rank: int, step: int) -> Iterator[Tensor]:
    yield square_loss(module, rank, step)


def _skipping(module: nn.Module, rank: int, step: int) -> Iterator[Tensor]:
    """Without a word: for ``find_unused_parameters``."""
    yield square_loss(module, rank, step, skip={rank % 2, 2 + step % 2})


def _declaring(module: nn.Module, rank: int, step: int) -> Iterator[Tensor]:
    """Ranks differ: layers 0 and 1 are skipped by some, one of 2 and 3 by all."""
    skip = {rank % 2, 2 + step % 2}
    yield square_loss(module, rank, step, skip=skip, **declares(module, [f"layers.{i}" for i in skip]))


def _declaring_alike(module: nn.Module, rank: int, step: int) -> Iterator[Tensor]:
    unused = [f"layers.{step % 4}"]
    yield square_loss(module, rank, step, skip={step % 4}, **declares(module, unused))


def _always_the_same(module: nn.Module, rank: int, step: int) -> Iterator[Tensor]:
    """For ``static_graph``: layer 3 is used by no rank, layers 0 and 1 by some."""
    yield square_loss(module, rank, step, skip={rank % 2, 3})


def _micro_batches(module: nn.Module, rank: int, step: int) -> Iterator[Tensor]:
    with no_sync_of(module):
        yield square_loss(module, rank, 10 + step, skip={2, 3}, **declares(module, ["layers.2", "layers.3"]))
    yield square_loss(module, rank, step, skip={1, 3}, **declares(module, ["layers.1", "layers.3"]))


WAYS: dict[str, tuple[Losses, dict[str, Any]]] = {
    "plain": (_plain, {}),
    "found": (_skipping, {"find_unused_parameters": True}),
    "declared": (_declaring, {}),
    "same": (_declaring_alike, {"unused_agreement": "same"}),
    "trust": (_declaring_alike, {"unused_agreement": "trust"}),
    "static": (_always_the_same, {"static_graph": True}),
    "micro": (_micro_batches, {}),
}
ways = pytest.mark.parametrize("way", list(WAYS))


def _train(rank: int, counts: Sequence[int], way: str, cap: float | None, divides_by_all: bool) -> None:
    losses, options = WAYS[way]
    plain, model = make(bucket_cap_mb=cap, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*declared different unused parameters")
        train_unevenly(rank, counts, plain, model, losses, divides_by_all=divides_by_all)


@ways
@uneven
def test_training_with_uneven_inputs_is_training_on_what_there_is(ranks, counts, way):
    """In tiny buckets; gradients are divided by the number of ranks that have inputs."""
    ranks(len(counts), _train, counts, way, TINY_CAP_MB, False)


@ways
def test_ranks_without_inputs_contribute_zeros_to_the_mean(ranks, way):
    ranks(3, _train, (2, 0, 4), way, None, True)


# -- communication hooks


def _with_hook(rank: int, counts: Sequence[int], hook: str) -> None:
    plain, model = make(bucket_cap_mb=TINY_CAP_MB if hook == "allreduce" else None)
    if hook == "allreduce":
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    elif hook == "built in":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    train_unevenly(rank, counts, plain, model, _plain)


@pytest.mark.parametrize("hook", ["allreduce", "built in"])
@pytest.mark.parametrize("counts", [(0, 3), (3, 1, 2)], ids=str)
def test_ranks_without_inputs_run_the_communication_hook(ranks, counts, hook):
    ranks(len(counts), _with_hook, counts, hook)


def _power_sgd(rank: int, counts: Sequence[int]) -> None:
    """Gradients of rank one, which PowerSGD transmits exactly: rank r's input is r + 1 times the same row."""

    def losses(module: nn.Module, r: int, step: int) -> Iterator[Tensor]:
        yield module((r + 1) * inputs(0, 1, 8, seed=step)).sum()

    plain, model = make(lambda: nn.Linear(8, 8))
    state = powerSGD_hook.PowerSGDState(dist.group.WORLD, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train_unevenly(rank, counts, plain, model, losses)
    assert state.iter == max(counts) + 1
    assert list(state.error_dict) == [0]


@pytest.mark.parametrize("counts", [(2, 5), (5, 0, 4)], ids=str)
def test_a_hook_with_a_state_stays_in_step_on_ranks_without_inputs(ranks, counts):
    ranks(len(counts), _power_sgd, counts)
