"""The ranges that a profiler's trace shows: their names are part of the interface, and without a profiler they are
no more than a look at a flag."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from models import make
from steps import TINY_CAP_MB, square_loss, step_is_right
from torch import nn
from torch.profiler import ProfilerActivity, profile

from knownddp import _torch_private as private

RANGES = ("KnownDDP.forward", "knownddp::pack", "knownddp::close", "knownddp::unpack")


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))


def _traced(rank: int, cap: float | None) -> Counter[str]:
    """How often each range comes in three steps, after one that was not watched."""
    plain, model = make(_mlp, bucket_cap_mb=cap)
    step_is_right(plain, model, rank)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        for step in range(3):
            square_loss(model, rank, step).backward()
    step_is_right(plain, model, rank)
    return Counter(event.name for event in trace.events() if event.name in RANGES)


@pytest.mark.parametrize(("cap", "buckets"), [(None, 1), (TINY_CAP_MB, 4)])
def test_each_step_shows_its_forward_its_buckets_and_its_end(ranks, cap, buckets):
    """One bucket for all, or one for each of four parameters."""
    wanted = {"KnownDDP.forward": 3, "knownddp::pack": 3 * buckets, "knownddp::close": 3, "knownddp::unpack": 3}
    assert (
        ranks(
            2,
            _traced,
            cap,
        )
        == [wanted] * 2
    )


def _failing(rank: int) -> Counter[str]:
    _, model = make(_mlp)
    with profile(activities=[ProfilerActivity.CPU]) as trace, pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(2, 7))
    return Counter(event.name for event in trace.events() if event.name in RANGES)


def test_the_range_of_a_forward_that_raises_is_closed(ranks):
    assert ranks(1, _failing) == [{"KnownDDP.forward": 1}]


def test_without_a_profiler_no_range_is_made():
    assert private.profiled("one") is private.profiled("other")
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        assert private.profiled("one") is not private.profiled("one")
        with private.profiled("a range"):
            pass
    assert "a range" in {event.name for event in trace.events()}
    assert private.profiled("one") is private.profiled("other")
