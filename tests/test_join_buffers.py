"""Uneven inputs and state that is no gradient: buffers in each forward, and the model of the last joiner in the end.

Expected values are worked out in the docstring.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from models import Scales, make
from torch import Tensor, nn

from knownddp import KnownDDP
from knownddp.buffers import BufferHookLocation


class _Seen(Scales):
    """Notes the value of a buffer as the forward begins, then adds 10^rank to it."""

    def __init__(self) -> None:
        super().__init__("a")
        self.register_buffer("mark", torch.zeros(()))
        self.seen: list[float] = []

    def forward(self, x: Tensor, use: str = "a") -> Tensor:
        self.seen.append(self.mark.item())
        self.mark += 10.0 ** dist.get_rank()
        return super().forward(x, use)


def _buffers(rank: int, counts: Sequence[int], synchronised: bool, trains: bool = True) -> tuple[list[float], float]:
    _, model = make(_Seen, forward_sync_buffers=synchronised)
    model.train(trains)
    with model.join():
        for _ in range(counts[rank]):
            model(torch.tensor(1.0)).backward()
    return model.module.seen, model.module.mark.item()


def test_buffers_are_those_of_the_highest_rank_that_has_inputs(ranks):
    """After the first forward they are 1, 10, 100. Then rank 1 is the highest one: 10 on all, plus 1 and 10. Then
    rank 1 alone: 20 + 10. It is also the last joiner."""
    assert ranks(3, _buffers, (2, 3, 1), True) == [([0.0, 10.0], 30.0), ([0.0, 10.0, 20.0], 30.0), ([0.0], 30.0)]


def test_with_even_inputs_buffers_are_those_of_the_highest_rank(ranks):
    assert ranks(2, _buffers, (2, 2), True) == [([0.0, 10.0], 20.0)] * 2


def test_buffers_that_are_not_synchronised_stay_each_ranks_own(ranks):
    """Rank 1 adds 10 in each of 2 forwards, rank 0 adds 1 in each of 3."""
    assert ranks(2, _buffers, (3, 2), False) == [([0.0, 1.0, 2.0], 3.0), ([0.0, 10.0], 20.0)]


def test_in_evaluation_mode_buffers_are_brought_together_at_the_end(ranks):
    """Rank 1, the last one, has added 10 twice."""
    assert ranks(2, _buffers, (1, 2), True, False) == [([0.0], 20.0), ([0.0, 10.0], 20.0)]


def _batch_norm(rank: int) -> list[float]:
    """Rank r's inputs are all r: the running mean of the rank that ran longest."""
    torch.manual_seed(0)
    model = KnownDDP(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)))
    with model.join():
        for _ in range(3 - rank):
            model(torch.full((4, 2), float(rank))).sum().backward()
    return model.module[0].running_mean.tolist()


def test_running_means_of_batch_norm(ranks):
    """The first step begins with 0 on both and gives 0.1 on rank 1, whose values the second one takes over: 0.1, then
    0.09 on rank 0 and 0.19 on rank 1. The third begins with rank 0's own 0.09 and gives 0.081."""
    for found in ranks(2, _batch_norm):
        assert found == pytest.approx([0.081, 0.081])


def _exchanged_before(rank: int) -> tuple[list[float], float]:
    """Before the context rank 0 runs a forward whose output it drops."""
    _, model = make(_Seen)
    if rank == 0:
        model(torch.tensor(1.0))
    with model.join():
        for _ in range(2):
            model(torch.tensor(1.0)).backward()
    return model.module.seen, model.module.mark.item()


def test_a_forward_before_the_context_that_had_no_backward(ranks):
    """Rank 0 sent its 0 and has 1. In the first iteration of both it goes on with that, and rank 1 takes the 0: 2 and
    10. In the second both go on from rank 1's 10: 11 and 20, of which the last joiner's 20 stays."""
    assert ranks(2, _exchanged_before) == [([0.0, 1.0, 10.0], 20.0), ([0.0, 10.0], 20.0)]


def _buffer_hook(rank: int, location: str) -> list[float]:
    """The hook averages buffers, on the default group: ranks without inputs must run it too."""
    _, model = make(_Seen)

    def average(_: object, buffers: dict[str, Tensor]) -> None:
        for buffer in buffers.values():
            dist.all_reduce(buffer)
            buffer /= dist.get_world_size()

    model._register_buffer_comm_hook(None, average, BufferHookLocation[location])
    with model.join():
        for _ in range(2 - rank):
            model(torch.tensor(1.0)).backward()
    return [*model.module.seen, model.module.mark.item()]


@pytest.mark.parametrize(
    ("location", "wanted"),
    [("PRE_FORWARD", [[0.0, 5.5, 6.5], [0.0, 6.5]]), ("POST_FORWARD", [[0.0, 5.5, 6.0], [0.0, 6.0]])],
)
def test_ranks_without_inputs_run_a_buffer_hook(ranks, location, wanted):
    """1 and 10 are added: a mean of 5.5, before the second forward or after the first. Then rank 0 adds 1; a hook
    that runs afterwards takes the mean of 6.5 and 5.5. Rank 0, the last joiner, has the last word."""
    assert ranks(2, _buffer_hook, location) == wanted


# -- the end


def _last_joiner(rank: int, counts: Sequence[int], synchronised: bool) -> tuple[int, float, float, float]:
    """Ranks spoil their parameters and buffers; those of the highest one of the last joiners count."""
    _, model = make(_Seen, forward_sync_buffers=synchronised)
    frozen = nn.Parameter(torch.zeros(()), requires_grad=False)
    with model.join():
        for _ in range(counts[rank]):
            model(torch.tensor(1.0)).backward()
        with torch.no_grad():
            model.module.a.fill_(rank)
            model.module.mark.fill_(rank)
    return model._authoritative_rank, model.module.a.item(), model.module.mark.item(), frozen.item()


@pytest.mark.parametrize(("counts", "source"), [((1, 3, 3, 2), 2), ((2, 1, 0, 1), 0), ((1, 1, 1, 1), 3), ((0,) * 4, 3)])
def test_in_the_end_all_hold_the_model_of_the_highest_last_joiner(ranks, counts, source):
    assert ranks(4, _last_joiner, counts, True) == [(source, float(source), float(source), 0.0)] * 4


def test_buffers_are_left_alone_in_the_end_if_they_are_not_synchronised(ranks):
    assert ranks(2, _last_joiner, (2, 1), False) == [(0, 0.0, 0.0, 0.0), (0, 0.0, 1.0, 0.0)]
