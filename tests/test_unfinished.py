"""Without detection: parameters that no rank used and nobody declared are reported by the next forward, on every rank.

Expected gradients come from plain autograd on one process.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Skippable, assert_grads, inputs, make, mean_grads, raises_everywhere
from steps import setups, square_loss, step_is_right, steps_are_right, world_sizes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from knownddp import KnownDDP, UnfinishedBackwardError


def _one_rank_skips(rank: int, cap: float | None) -> None:
    """All of it is touched somewhere, so nothing is missing."""
    plain, model = make(bucket_cap_mb=cap)
    world = dist.get_world_size()
    steps_are_right(
        plain,
        model,
        rank,
        lambda m, r, step: square_loss(m, r, step, skip={1, 3} if r == step % world else ()),
        steps=4,
    )


@setups
def test_without_detection_a_layer_that_one_rank_skips_counts_as_zero_there(ranks, world_size, cap):
    ranks(world_size, _one_rank_skips, cap)


def _unfinished(rank: int, cap: float | None, *, with_output: bool) -> str:
    """Layers 1 and 3 of four are used nowhere: parameters 2, 3 and 6, 7. The error ends with the forward that told."""
    plain, model = make(bucket_cap_mb=cap)
    world = dist.get_world_size()
    step_is_right(plain, model, rank)
    model.zero_grad(set_to_none=True)
    loss = square_loss(model, rank, 1, skip={1, 3})
    loss.backward()
    assert_grads(model, mean_grads(plain, world, lambda m, r: square_loss(m, r, 1, skip={1, 3})))
    if not with_output:
        del loss
    message = raises_everywhere(lambda: square_loss(model, rank, 2), UnfinishedBackwardError)
    for step in range(3, 6):
        step_is_right(plain, model, rank, step)
    return message


def _unfinished_with_output(rank: int, cap: float | None) -> str:
    return _unfinished(rank, cap, with_output=True)


def _unfinished_without_output(rank: int, cap: float | None) -> str:
    return _unfinished(rank, cap, with_output=False)


@pytest.mark.parametrize("task", [_unfinished_with_output, _unfinished_without_output])
@setups
def test_the_forward_after_an_unfinished_backward_raises_on_every_rank_and_steps_after_it_work(
    ranks, world_size, cap, task
):
    """What was used has its mean all the same; the message keeps the phrases that users of stock DDP search for."""
    for rank, message in enumerate(ranks(world_size, task, cap)):
        assert message.startswith(f"[rank {rank} of {world_size}] ")
        for phrase in (
            "Expected to have finished reduction in the prior iteration",
            "passing the keyword argument `find_unused_parameters=True`",
            "`forward` function outputs participate in calculating loss",
            f"Parameter indices which did not receive grad for rank {rank}: 2 3 6 7",
            "layers.1.weight, layers.1.bias, layers.3.weight, layers.3.bias",
            "unused_parameters=",
        ):
            assert phrase in message, phrase


class _TwoOutputs(nn.Module):
    def __init__(self, pack: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.first = nn.Linear(4, 2)
        self.second = nn.Linear(4, 2)
        self._pack = pack

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.body(x))
        return self._pack(self.first(hidden), self.second(hidden))


def _as_dict(first: Tensor, second: Tensor) -> dict[int, Tensor]:
    return {0: first, 1: second}


def _unfinished_by_output(rank: int) -> str:
    _, model = make(lambda: _TwoOutputs(_as_dict))
    model(inputs(rank, 5, 3))[0].sum().backward()
    return raises_everywhere(lambda: model(inputs(rank, 5, 3)), UnfinishedBackwardError)


def test_without_detection_an_output_left_out_of_the_loss_is_reported(ranks):
    """body and first come before second: its parameters are 4 and 5."""
    for rank, message in enumerate(ranks(2, _unfinished_by_output)):
        assert f"did not receive grad for rank {rank}: 4 5" in message
        assert "second.weight, second.bias" in message


def _differs_by_rank(rank: int) -> str:
    """Rank r leaves out layers r and 3 of four, so 3 alone is touched nowhere: parameters 6 and 7."""
    _, model = make()
    square_loss(model, rank, skip={rank, 3}).backward()
    return raises_everywhere(lambda: square_loss(model, rank), UnfinishedBackwardError)


@world_sizes
def test_only_what_no_rank_touched_is_missing(ranks, world_size):
    for rank, message in enumerate(ranks(world_size, _differs_by_rank)):
        assert f"did not receive grad for rank {rank}: 6 7" in message


def _frozen_before(rank: int) -> tuple[str, str]:
    """Layer 0 is frozen and layer 2 left out; what stock says of it, and what we say."""
    torch.manual_seed(0)
    plain = Skippable()
    plain.layers[0].requires_grad_(False)
    told = []
    for wrapper in (DistributedDataParallel, KnownDDP):
        model = wrapper(copy.deepcopy(plain))
        square_loss(model, rank, skip={2}).backward()
        message = raises_everywhere(lambda m=model: square_loss(m, rank), RuntimeError)
        told.append(re.search(r"indices which did not receive grad for rank \d+: ([\d ]*)", message).group(1).strip())
    return told[0], told[1]


def test_indices_in_the_message_leave_out_what_was_frozen_at_wrapping_as_in_stock_ddp(ranks):
    """Of layers 1, 2, 3, which train, layer 2 has parameters 2 and 3."""
    assert ranks(2, _frozen_before) == [("2 3", "2 3")] * 2


def _is_builtin(rank: int) -> None:
    _, model = make()
    square_loss(model, rank, skip={1}).backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
        square_loss(model, rank)


def test_the_error_is_the_runtime_error_of_stock_ddp(ranks):
    ranks(2, _is_builtin)


def _still_there(rank: int) -> int:
    """The fault is the user's and goes on: every second forward says so, and the steps between are right."""
    plain, model = make()
    told = 0
    for step in range(4):
        model.zero_grad(set_to_none=True)
        try:
            loss = square_loss(model, rank, step, skip={2})
        except UnfinishedBackwardError:
            told += 1
            loss = square_loss(model, rank, step, skip={2})
        loss.backward()
        wanted = mean_grads(plain, dist.get_world_size(), lambda m, r, s=step: square_loss(m, r, s, skip={2}))
        assert_grads(model, wanted)
    return told


def test_a_loop_that_goes_on_after_the_error_is_told_again(ranks):
    """Four steps, each but the first after an unfinished one."""
    assert ranks(2, _still_there) == [3, 3]


def _evaluated_between(rank: int) -> None:
    """Rank 0 alone evaluates after the unfinished backward: eval forwards, with gradients on or off, tell nobody."""
    plain, model = make()
    square_loss(model, rank, skip={1}).backward()
    if rank == 0:
        model.eval()
        square_loss(model, rank)
        with torch.no_grad():
            square_loss(model, rank)
        model.train()
    raises_everywhere(lambda: square_loss(model, rank), UnfinishedBackwardError)
    step_is_right(plain, model, rank)


def test_an_evaluation_on_one_rank_leaves_the_error_to_the_next_training_forward_of_all(ranks):
    ranks(2, _evaluated_between)
