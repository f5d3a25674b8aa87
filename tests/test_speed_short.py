"""What KnownDDP costs, as far as it does not depend on a clock: ``proofs/speed/exact.py`` counts, here are the limits.

A change that makes a step cheaper lowers a limit. Clocks are read by ``python -m proofs.speed``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Calls of Python functions a parameter, beyond those of the module itself. One more call in a gradient's route is one
# more a parameter.
BACKWARD_CALLS = {"known": 1.4, "known-find": 1.4, "known-trust": 1.4}
FORWARD_CALLS = 0.12
NO_SYNC_CALLS = 1.1
# Likewise with 16 buckets, where OPEN comes back at once, or not before the backward is over: then every eighth
# gradient after the first bucket looks for it. "trust" waits for none.
BACKWARD_CALLS_AT_ONCE = {"known": 2.4, "known-find": 2.4, "known-trust": 2.4}
BACKWARD_CALLS_LATE = {"known": 4.0, "known-find": 4.0, "known-trust": 2.4}
# A quick model has one bucket, which is one message beside OPEN and CLOSE; "trust" has no such messages.
COLLECTIVES = {"known": 3, "known-find": 3, "known-trust": 1}
# Each message has a byte a parameter and eleven more; 6 encoder layers have 12 parameters each.
MESSAGE_BYTES = {"known": 2 * (72 + 11), "known-find": 2 * (72 + 11), "known-trust": 0}
# What a step asks the allocator for, beyond what the module asks for and the memory in which the last flat of the other
# rank arrives: next to nothing. Flats, whose parts were the gradients, are used again, also by other sets.
ASKED_BYTES = 1024
# That memory takes the place of the local gradients, which are gone by then, but for those of the last layer to come
# (8 KiB for a weight of 2 width x width floats) where the backward is not over: under "trust".
PEAK_BYTES = {"known": 0, "known-find": 0, "known-trust": 2 * 32**2 * 4}

NAMES = ("known", "known-find", "known-trust")


@pytest.fixture(scope="module")
def counted():
    """Half of 6 layers dropped, different ones in each step; calls on 800 small parameters."""
    done = subprocess.run(
        [sys.executable, "-m", "proofs.speed.exact", "--json"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_used_layers_are_sent_and_no_others(counted, name):
    """3 of 6 layers of width 32: 4 w^2 + 4 w (attention), 2 * 4 w^2 + 5 w, 4 w (norms) floats each."""
    layer = (4 * 32**2 + 4 * 32 + 8 * 32**2 + 5 * 32 + 4 * 32) * 4
    assert counted[name]["gradient_bytes"] == 3 * layer == counted[name]["used_bytes"]
    assert counted["ddp-find"]["gradient_bytes"] == 6 * layer


@pytest.mark.parametrize("name", NAMES)
def test_number_of_collectives_and_bytes_of_messages(counted, name):
    assert counted[name]["collectives"] == COLLECTIVES[name]
    assert counted[name]["other_bytes"] == MESSAGE_BYTES[name]


@pytest.mark.parametrize("name", NAMES)
def test_memory_of_a_step_is_that_of_the_used_gradients(counted, name):
    """When the backward is over, as much is held as without a wrapper. Before, local gradients stand beside a flat."""
    assert counted[name]["kept_bytes"] == counted["plain"]["kept_bytes"] == counted[name]["used_bytes"]
    assert counted[name]["asked_bytes"] <= counted[name]["used_bytes"] + ASKED_BYTES
    peak_bytes = counted["plain"]["peak_bytes"] + counted[name]["used_bytes"] + PEAK_BYTES[name]
    assert counted[name]["peak_bytes"] <= peak_bytes


@pytest.mark.parametrize("name", NAMES)
def test_python_calls_a_parameter(counted, name):
    assert counted[name]["backward_calls"] <= BACKWARD_CALLS[name]
    assert counted[name]["forward_calls"] <= FORWARD_CALLS
    assert counted[name]["no_sync_calls"] <= NO_SYNC_CALLS
    assert counted[name]["calls, at once"] <= BACKWARD_CALLS_AT_ONCE[name]
    assert counted[name]["calls, late"] <= BACKWARD_CALLS_LATE[name]
