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
BACKWARD_CALLS = {"known": 1.5, "known-find": 1.6, "known-trust": 1.5}
FORWARD_CALLS = 0.2
# A quick model has one bucket, which is one message beside OPEN and CLOSE; "trust" has no such messages.
COLLECTIVES = {"known": 3, "known-find": 3, "known-trust": 1}
# Each message has a byte a parameter and eleven more; 6 encoder layers have 12 parameters each.
MESSAGE_BYTES = {"known": 2 * (72 + 11), "known-find": 2 * (72 + 11), "known-trust": 0}
# Memory for a whole bucket that a step asks for: a flat, whose parts are the gradients afterwards.
FLATS = 1

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
    assert counted[name]["flats"] <= FLATS
    assert counted[name]["peak_bytes"] <= counted["plain"]["peak_bytes"] + counted[name]["used_bytes"]


@pytest.mark.parametrize("name", NAMES)
def test_python_calls_a_parameter(counted, name):
    assert counted[name]["backward_calls"] <= BACKWARD_CALLS[name]
    assert counted[name]["forward_calls"] <= FORWARD_CALLS
