"""Bytes on a real link between two hosts, by the interface's own counter."""

from __future__ import annotations

import pytest
from two_hosts import run_on_two_hosts, why_not

STEPS = 6
# Skippable(depth=8, width=512): a layer has 512 x 512 + 512 floats; every step uses 4 of 8.
USED_BYTES = STEPS * 4 * (512 * 512 + 512) * 4


@pytest.mark.parametrize("mode", ["declared", "detected"])
def test_half_the_layers_dropped_sends_at_most_1_percent_more_than_the_used_ones(mode):
    """In a ring of two each rank sends 2 (N - 1) / N = 1 x the bytes; the rest is headers, agreement, acknowledging."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    for sent in run_on_two_hosts("1gbit", mode, STEPS):
        assert sent.used_bytes == USED_BYTES
        assert USED_BYTES <= sent.wire_bytes <= 1.01 * USED_BYTES
