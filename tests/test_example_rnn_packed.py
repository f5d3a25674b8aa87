"""The example with packed sequences, run as its users run it: two processes under torchrun, or one with replicas."""

import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "rnn_packed.py"
STEPS = 60


def torchrun(ranks: int) -> list[str]:
    """Python's arguments that start so many ranks of what follows."""
    launcher = ["-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    return [*launcher, "--nproc-per-node", str(ranks)]


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=50,
    )


def train(log: Path, *words: object) -> dict[str, Any]:
    """The summary the example writes to ``log``."""
    finished = run(*words, "--steps", STEPS, "--width", 32, "--log-json", log)
    assert finished.returncode == 0, finished.stdout
    return json.loads(log.read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("rnn")
    return SimpleNamespace(two_ranks=train(folder / "two.json", *torchrun(2), EXAMPLE), folder=folder)


def test_it_learns_from_a_uniform_guess_on(runs):
    """A uniform guess among 8 modules costs ln 8 = 2.079 nats and is right in 1 of 8 cases."""
    losses = runs.two_ranks["losses"]
    assert len(losses) == STEPS
    assert abs(losses[0] - math.log(8)) < 0.1
    assert statistics.fmean(losses[-10:]) < losses[0] - 0.1
    assert runs.two_ranks["accuracy"] > 0.25


def test_one_rank_on_all_lines_has_the_same_losses(runs):
    one = train(runs.folder / "one.json", *torchrun(1), EXAMPLE)
    assert one["losses"] == pytest.approx(runs.two_ranks["losses"], rel=1e-3)
    assert one["losses"][:5] == pytest.approx(runs.two_ranks["losses"][:5], rel=1e-5)


def test_two_replicas_in_one_process_have_the_same_result(runs):
    replicas = train(runs.folder / "replicas.json", EXAMPLE, "--replicas", 2)
    assert replicas["parameters_sha256"] == runs.two_ranks["parameters_sha256"]
    assert replicas["losses"] == pytest.approx(runs.two_ranks["losses"], rel=1e-6)  # a mean of means there
    assert replicas["accuracy"] == runs.two_ranks["accuracy"]


def test_it_says_how_to_start_it():
    refused = run(EXAMPLE)
    assert refused.returncode == 2
    assert "start it with torchrun, or with --replicas 2 without torchrun" in refused.stdout
