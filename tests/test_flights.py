"""Which streams packing waits for, where accelerators are simulated: what a stream is asked for is written down."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from knownddp.flights import Flight, wait_for_streams
from knownddp.plan import BucketSpec
from knownddp.works import DONE

CPU = torch.device("cpu")


class Stream:
    """Of a device; ``waited`` for others."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device
        self.waited: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)


@pytest.fixture
def current(monkeypatch):
    """The stream that is current, and what ``record_stream`` was called with: the numbers of elements."""
    stream, kept = Stream(), []
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, where: kept.append((tensor.numel(), where)))
    return SimpleNamespace(stream=stream, kept=kept)


def _wait(grads: list[torch.Tensor | None], streams: dict[int, Any]) -> None:
    wait_for_streams(BucketSpec(tuple(range(len(grads))), False, False), grads, streams)


def test_a_stream_is_waited_for_once_and_each_gradient_is_kept(current):
    side = Stream()
    _wait([torch.ones(1), torch.ones(2), None, torch.ones(4)], {0: side, 1: side, 2: side, 3: current.stream})
    assert current.stream.waited == [side]
    assert current.kept == [(1, current.stream), (2, current.stream)]


def test_a_stream_of_a_device_that_was_left_is_not_waited_for(current):
    """The module was moved to the CPU: hooks write no streams there, and the old ones stay written down."""
    _wait([torch.ones(1)], {0: Stream(torch.device("cuda", 0))})
    assert current.stream.waited == [] and current.kept == []


def test_of_a_sparse_gradient_indices_and_values_are_kept(current):
    sparse = torch.eye(4).to_sparse(1)
    _wait([sparse], {0: Stream()})
    assert current.kept == [(4, current.stream), (16, current.stream)]


def test_a_sparse_mean_is_kept_for_the_stream_that_waits_for_it(current):
    sparse = torch.eye(4).to_sparse(1)
    flight = Flight(BucketSpec((0,), True, False), DONE, sparse, [sparse], None, Stream())
    flight.wait()
    assert flight.means()[0] is sparse
    assert current.kept == [(4, current.stream), (16, current.stream)]


def test_what_failed_is_kept_too(current):
    """Its parts are of no use, but the collective still writes there."""
    flat = torch.ones(3)
    Flight(BucketSpec((0,), False, False), DONE, flat, [], None, Stream()).wait()
    assert current.kept == [(3, current.stream)]


def test_on_its_own_stream_nothing_needs_to_be_kept(current):
    flat = torch.ones(3)
    Flight(BucketSpec((0,), False, False), DONE, flat, [flat], None, current.stream).wait()
    assert current.kept == []
