"""The claim of ``proofs/planning_cost.py``, without the clock: its exit status depends on counts alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "proofs" / "planning_cost.py"


def test_the_memory_of_plans_is_bounded_and_the_table_is_printed():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "after 640 sets 64 plans are remembered"
    assert [int(line.split()[0]) for line in done.stdout.splitlines()[1:5]] == [100, 1000, 10_000, 100_000]
