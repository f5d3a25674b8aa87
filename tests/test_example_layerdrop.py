"""The LayerDrop example, run as its users run it: two processes under torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_layerdrop.py"
STEPS, LAYERS, WIDTH, CONTEXT = 40, 4, 32, 16
SHAPE = ["--steps", STEPS, "--layers", LAYERS, "--width", WIDTH, "--context", CONTEXT, "--batch", 8, "--drop", 0.5]


def torchrun(*options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", EXAMPLE, *SHAPE, *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [str(word) for word in command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=50,
    )


def train(log: Path, *options: object) -> dict[str, Any]:
    """The summary the example writes to ``log``."""
    finished = torchrun("--log-json", log, *options)
    assert finished.returncode == 0, finished.stdout
    return json.loads(log.read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """One training under each wrapper that drops layers, and one interrupted after step 25 and resumed from step 15."""
    folder = tmp_path_factory.mktemp("layerdrop")
    checkpoint = ["--checkpoint", folder / "checkpoint.pt", "--checkpoint-every", 15]
    interrupted = torchrun(*checkpoint, "--stop-after", 25, "--log-json", folder / "interrupted.json")
    assert interrupted.returncode == 0, interrupted.stdout
    assert not (folder / "interrupted.json").exists()
    return SimpleNamespace(
        known=train(folder / "known.json"),
        known_find=train(folder / "known_find.json", "--wrapper", "known-find"),
        ddp_find=train(folder / "ddp_find.json", "--wrapper", "ddp-find"),
        resumed=train(folder / "resumed.json", *checkpoint),
        checkpoint=checkpoint,
    )


def without_times(summary: dict[str, Any], *also: str) -> dict[str, Any]:
    return {key: value for key, value in summary.items() if key not in {"step_seconds_median", *also}}


def test_known_and_detected_and_torch_end_with_the_same_bits(runs):
    differs = ("recipe", "bytes_reduced", "bytes_skipped")
    assert without_times(runs.known, *differs) == without_times(runs.ddp_find, *differs)
    assert without_times(runs.known_find, *differs) == without_times(runs.ddp_find, *differs)


def test_interrupted_and_resumed_equals_uninterrupted(runs):
    assert without_times(runs.resumed) == without_times(runs.known)


def test_loss_falls_from_that_of_a_uniform_guess(runs):
    """A uniform guess among 256 bytes costs ln 256 = 5.545 nats."""
    assert 5.3 < runs.known["train_loss_first"] < 6
    assert runs.known["train_loss_last"] < runs.known["train_loss_first"] - 0.5
    assert runs.known["validation_loss"] < runs.known["train_loss_first"] - 0.5


def test_every_gradient_byte_is_either_reduced_or_skipped(runs):
    """Worked out from the shapes, for width w, in floats of 4 bytes.

    A block: two norms 2 * 2w, qkv 3w^2 + 3w, attention out w^2 + w, MLP 4w^2 + 4w and 4w^2 + w: 12w^2 + 13w.
    The rest: token embedding 256w, position embedding CONTEXT * w, last norm 2w, head 256w + 256.
    With w = 32, 4 blocks of 12704 and 17216 more make 68032 parameters, 272128 bytes.
    """
    block = 4 * (12 * WIDTH**2 + 13 * WIDTH)
    rest = 4 * (256 * WIDTH + CONTEXT * WIDTH + 2 * WIDTH + 256 * WIDTH + 256)
    assert LAYERS * block + rest == 272128

    for summary in (runs.known, runs.known_find):
        assert summary["bytes_reduced"] + summary["bytes_skipped"] == STEPS * 272128
        assert summary["bytes_skipped"] > 0
        assert summary["bytes_skipped"] % block == 0
    assert runs.known_find["bytes_skipped"] == runs.known["bytes_skipped"]
    assert (runs.ddp_find["bytes_reduced"], runs.ddp_find["bytes_skipped"]) == (STEPS * 272128, 0)


def test_a_checkpoint_of_another_training_is_refused(runs):
    refused = torchrun(*runs.checkpoint, "--seed", 1)
    assert refused.returncode != 0
    assert "seed was 0, is 1" in refused.stdout
