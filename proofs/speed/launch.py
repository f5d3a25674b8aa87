"""Starts the ranks, waits for what they measured, and leaves no process behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .hosts import inside
from .task import Task

ROOT = Path(__file__).parents[2]
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # no word on options that a workload does not need


def environment() -> dict[str, str]:
    """Of programs started from here: one thread each, this checkout first."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **QUIET}


def run_ranks(task: Task, namespaces: Sequence[str | None]) -> list[dict[str, Any]]:
    """What each rank measured, in rank order. ``namespaces``: where each runs; None: in this one.

    Raises:
        RuntimeError: a rank failed; its own message went to stderr.
    """
    with tempfile.TemporaryDirectory(prefix="knownddp-speed-") as name:
        folder = Path(name)
        task.write(folder)
        ranks = [
            subprocess.Popen(
                [*inside(namespace), sys.executable, "-m", "proofs.speed.rank", name, str(rank)],
                env=environment(),
                cwd=ROOT,
                start_new_session=True,  # Ctrl-C reaches this process alone, which ends them
            )
            for rank, namespace in enumerate(namespaces)
        ]
        try:
            while (codes := [one.poll() for one in ranks]) != [0] * len(ranks):
                if any(codes):
                    raise RuntimeError(f"ranks ended with {codes}")
                time.sleep(0.1)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(len(ranks))]
