"""KeyboardInterrupt on one rank, at many points of a step: there it is raised, on the others an error, and all go on.

Expected gradients come from plain autograd on one process.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import assert_grads, make, mean_grads
from steps import TINY_CAP_MB, square_loss, step_is_right, steps_are_right
from torch import Tensor, nn

from knownddp import KnownDDP, PeerFailedError

Arm = Callable[[KnownDDP, "Fuse"], None]


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))


class Fuse:
    """Raises when lit, once."""

    def __init__(self) -> None:
        self.lit = False

    def __call__(self, *_: object) -> None:
        if self.lit:
            self.lit = False
            raise KeyboardInterrupt


def in_a_hook_on_an_activation(model: KnownDDP, fuse: Fuse) -> None:
    def hook_output(_module: nn.Module, _args: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(fuse)

    model.module[1].register_forward_hook(hook_output)


def in_a_hook_on_the_output(model: KnownDDP, fuse: Fuse) -> None:
    model.register_forward_hook(lambda _module, _args, output: output.register_hook(fuse) and None)


def in_a_hook_on_a_parameter(model: KnownDDP, fuse: Fuse) -> None:
    model.module[2].weight.register_hook(fuse)


def after_the_last_gradient(model: KnownDDP, fuse: Fuse) -> None:
    model.module[0].weight.register_post_accumulate_grad_hook(fuse)


def in_a_communication_hook(model: KnownDDP, fuse: Fuse) -> None:
    """After it called its collective: before, peers would miss it."""

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        bucket.buffer().div_(dist.get_world_size())
        future = model.reducer._run_allreduce_hook(bucket)
        fuse()
        return future

    model.register_comm_hook(None, hook)


POINTS = [
    in_a_hook_on_an_activation,
    in_a_hook_on_the_output,
    in_a_hook_on_a_parameter,
    after_the_last_gradient,
    in_a_communication_hook,
]


def _interrupted(rank: int, arm: Arm, steps_before: int, options: dict[str, Any]) -> None:
    """On rank 0 alone, after ``steps_before`` steps: in the first, buckets go when the backward is over."""
    plain, model = make(_mlp, **options)
    fuse = Fuse()
    arm(model, fuse)
    if steps_before:
        steps_are_right(plain, model, rank, steps=steps_before)
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    fuse.lit = rank == 0
    with pytest.raises(KeyboardInterrupt if rank == 0 else PeerFailedError):
        square_loss(model, rank, 5).backward()
    for param, old in zip(model.parameters(), before, strict=True):
        assert param.grad is old is None or torch.equal(param.grad, old)
    steps_are_right(plain, model, rank, steps=2)


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize(
    "options", [{}, {"bucket_cap_mb": TINY_CAP_MB, "find_unused_parameters": True}], ids=["one-bucket", "tiny-buckets"]
)
@pytest.mark.parametrize("arm", POINTS)
def test_an_interrupt_in_a_backward_raises_on_all_ranks_and_the_next_step_is_right(ranks, arm, steps_before, options):
    ranks(2, _interrupted, arm, steps_before, options)


class _Interrupted:
    """A handle whose ``wait`` is interrupted once."""

    def __init__(self, work: Any, fuse: Fuse) -> None:
        self._work, self._fuse = work, fuse

    def wait(self) -> Any:
        self._fuse()
        return self._work.wait()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def get_future(self) -> Any:
        return self._work.get_future()


def _while_opening(rank: int, options: dict[str, Any]) -> None:
    """Rank 0 is interrupted in a hook on a gradient, where it waits for OPEN: what it told peers by then stands."""
    plain, model = make(_mlp, **options)
    steps_are_right(plain, model, rank, steps=2)
    fuse = Fuse()
    combine = model._comm.combine_or
    model._comm.combine_or = lambda message: _Interrupted(combine(message), fuse)
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    loss = square_loss(model, rank, 5)
    fuse.lit = rank == 0
    with pytest.raises(KeyboardInterrupt if rank == 0 else PeerFailedError):
        loss.backward()
    for param, old in zip(model.parameters(), before, strict=True):
        assert param.grad is old is None or torch.equal(param.grad, old)
    steps_are_right(plain, model, rank, steps=2)


@pytest.mark.parametrize("options", [{"unused_agreement": "same"}, {"own_group": False, "bucket_cap_mb": TINY_CAP_MB}])
def test_an_interrupt_while_others_are_waited_for_as_a_backward_begins(ranks, options):
    """Under "same" as it begins, on the user's own group at the first launch, which is in a hook."""
    ranks(2, _while_opening, options)


def _while_waiting(rank: int, several: bool) -> None:
    """For peers at the end of a backward, on rank 0. Gradients are averaged everywhere, then rank 0 raises."""
    plain, model = make(_mlp)
    other_plain, other = make(_mlp)
    fuse = Fuse()
    combine, numbers = model._comm.combine_or, itertools.count()

    def combine_interrupted(message: bytes) -> Any:
        work = combine(message)
        return _Interrupted(work, fuse) if next(numbers) % 2 else work  # the second message of each backward

    model._comm.combine_or = combine_interrupted
    for step in range(3):
        model.zero_grad()
        other.zero_grad()
        loss = square_loss(model, rank, step) + (square_loss(other, rank, step) if several else 0)
        fuse.lit = rank == 0
        with pytest.raises(KeyboardInterrupt) if rank == 0 else contextlib.nullcontext():
            loss.backward()
        assert_grads(model, mean_grads(plain, 2, lambda m, r, s=step: square_loss(m, r, s)))
        if several:
            assert_grads(other, mean_grads(other_plain, 2, lambda m, r, s=step: square_loss(m, r, s)))


@pytest.mark.parametrize("several", [False, True])
def test_an_interrupt_while_waiting_is_raised_when_the_backward_is_over(ranks, several):
    ranks(2, _while_waiting, several)


class _Stopping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _mlp()
        self.fuse = Fuse()

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.fuse()
        return y


def _in_forward(rank: int) -> None:
    """All ranks are interrupted in one forward, as by a signal to all; then rank 0 alone, which tries again."""
    plain, model = make(_Stopping)
    for everywhere in (True, False):
        steps_are_right(plain, model, rank, steps=2)
        model.module.fuse.lit = everywhere or rank == 0
        if model.module.fuse.lit:
            with pytest.raises(KeyboardInterrupt):
                square_loss(model, rank)
        step_is_right(plain, model, rank, 3)


def test_an_interrupt_in_forward_disturbs_nothing(ranks):
    ranks(2, _in_forward)
