"""The claim of ``proofs/compact_gain.py``, on a small model and without the clock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "proofs" / "compact_gain.py"


def test_compacted_models_train_to_the_same_bits_and_the_table_is_printed():
    """5 blocks of 10 parameters of width w = 16: weights w^2 + 2 w^2 + 2 w^2, biases w + 2 w + w, norms 4 w, in floats.

    All are multiples of 16 floats, so there is no padding: 5 * (5 * 256 + 8 * 16) * 4 bytes = 28160.
    """
    done = subprocess.run([sys.executable, SCRIPT, "--quick"], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "50 parameters, 28160 bytes moved, 0 bytes of padding, storages: 1"
    assert len(lines) == 12 and lines[-1] == "values are the same to the last bit"
