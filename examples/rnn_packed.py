"""Guess, after each character, which module of the standard library a line of source comes from.

    torchrun --nproc-per-node 2 examples/rnn_packed.py     # two processes
    python examples/rnn_packed.py --replicas 2             # one process, two replicas of the model

Lines have different lengths, so the LSTM reads packed sequences and computes nothing for padding. Both ways train on
the same lines, dealt out to the ranks or split up over the replicas, and each line counts the same in the mean. So they
end with the same parameters, bit for bit.

A replica, like a rank, sees only its own lines, and ``pad_packed_sequence`` pads to the longest of them. Outputs of
different widths cannot be gathered, so the model pads to the width it was given: ``total_length=``.
"""

import argparse
import hashlib
import importlib
import inspect
import json
import os
import random
import statistics
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from tqdm import tqdm

from knownddp import KnownDDP

MODULES: Final = ("argparse", "ast", "difflib", "mailbox", "pickle", "tarfile", "turtle", "_pydecimal")
CHARACTERS: Final = 128  # others than ASCII are read as "?"
SHORTEST, LONGEST = 12, 80  # characters of a line, without indentation
VALIDATION_LINES: Final = 50  # of each module
LEARNING_RATE: Final = 1e-2


@dataclass(frozen=True, slots=True)
class Lines:
    """Shapes: text (lines, LONGEST) in ASCII, lengths (lines,), labels (lines,), the positions in ``MODULES``."""

    text: Tensor
    lengths: Tensor
    labels: Tensor

    def take(self, indices: Tensor) -> "Lines":
        """Some of the lines, padded no further than the longest of them."""
        lengths = self.lengths[indices]
        return Lines(self.text[indices, : lengths.max()], lengths, self.labels[indices])


class LineReader(nn.Module):
    """After each character a guess at the module that the line comes from."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.character = nn.Embedding(CHARACTERS, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.guess = nn.Linear(width, len(MODULES))

    def forward(self, text: Tensor, lengths: Tensor) -> Tensor:
        """Shapes: text (lines, time), lengths (lines,) -> logits (lines, time, modules), void past a line's end."""
        packed = pack_padded_sequence(self.character(text), lengths.cpu(), batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=text.shape[1])
        return self.guess(states)


def standard_library() -> tuple[Lines, Lines]:
    """Training and validation lines; as many of each module, none of which occurs twice."""
    texts = {name: inspect.getsource(importlib.import_module(name)) for name in MODULES}
    found = {name: dict.fromkeys(line.strip() for line in text.splitlines()) for name, text in texts.items()}
    times = Counter(line for lines in found.values() for line in lines)
    kept = {
        name: [line for line in lines if SHORTEST <= len(line) <= LONGEST and times[line] == 1]
        for name, lines in found.items()
    }
    number = min(map(len, kept.values()))
    training: list[tuple[str, int]] = []
    validation: list[tuple[str, int]] = []
    for label, name in enumerate(MODULES):
        chosen = [(line, label) for line in random.Random(name).sample(kept[name], number)]
        validation += chosen[:VALIDATION_LINES]
        training += chosen[VALIDATION_LINES:]
    return encoded(training), encoded(validation)


def encoded(lines: list[tuple[str, int]]) -> Lines:
    """Lines and labels as tensors, padded with zeros to ``LONGEST``."""
    text = torch.zeros(len(lines), LONGEST, dtype=torch.long)
    for row, (line, _) in zip(text, lines, strict=True):
        row[: len(line)] = torch.tensor(list(line.encode("ascii", "replace")))
    return Lines(text, torch.tensor([len(line) for line, _ in lines]), torch.tensor([label for _, label in lines]))


def each_lines_loss(logits: Tensor, lines: Lines) -> Tensor:
    """The mean over a line's characters of the cross-entropy, in nats. Shapes: (lines, time, modules) -> (lines,)."""
    labels = lines.labels[:, None].expand(logits.shape[:2])
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    is_read = torch.arange(logits.shape[1]) < lines.lengths[:, None]
    return (losses * is_read).sum(1) / lines.lengths


def batch_of(lines: Lines, recipe: "Recipe", step: int) -> Lines:
    """This rank's share of the step's lines, which depend on seed and step alone.

    Padded as the whole step's are, else a rank and a replica with the same lines would add in another order.
    """
    generator = torch.Generator().manual_seed(1_000_003 * recipe.seed + step)
    chosen = torch.randint(len(lines.labels), (recipe.batch,), generator=generator)
    whole, share = lines.take(chosen), torch.arange(recipe.batch).chunk(recipe.ranks)[rank()]
    return Lines(whole.text[share], whole.lengths[share], whole.labels[share])


@torch.no_grad()
def accuracy(reader: LineReader, lines: Lines) -> float:
    """How often the guess after the whole line is right. The same on every rank."""
    logits = reader(lines.text, lines.lengths)
    last = logits[torch.arange(len(lines.labels)), lines.lengths - 1]
    return (last.argmax(1) == lines.labels).double().mean().item()


def train(recipe: "Recipe") -> dict[str, Any]:
    """Train and return the summary."""
    training, validation = standard_library()
    torch.manual_seed(recipe.seed)
    reader = LineReader(recipe.width)
    model = wrap(reader, recipe.replicas)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in tqdm(range(recipe.steps), unit="step", disable=rank() != 0):
        lines = batch_of(training, recipe, step)
        loss = each_lines_loss(model(lines.text, lines.lengths), lines).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(mean_over_ranks(loss.detach()))
    return {
        "recipe": asdict(recipe),
        "losses": losses,
        "accuracy": accuracy(reader, validation),
        "training_lines": len(training.labels),
        "parameters_sha256": sha256_of(reader),
    }


def sha256_of(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().numpy())
    return digest.hexdigest()


def report(summary: dict[str, Any]) -> None:
    losses = summary["losses"]
    for step in range(0, len(losses), max(len(losses) // 5, 1)):
        print(f"step {step:>4}        {losses[step]:.4f} nats a character, mean over lines")
    print(f"last 10 steps    {statistics.fmean(losses[-10:]):.4f}")
    print(f"accuracy         {summary['accuracy']:.1%} of unseen lines, {1 / len(MODULES):.1%} by chance")
    print(f"parameters       sha256 {summary['parameters_sha256']}")


# -- one process with replicas, or ranks


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that decides the result. Two ranks give that of two replicas, and of one process up to rounding."""

    steps: int
    batch: int
    width: int
    seed: int
    ranks: int
    replicas: int


def wrap(reader: LineReader, replicas: int) -> KnownDDP:
    """Over the ranks of the process group; or over replicas in this process, without a process group."""
    if replicas == 1:
        return KnownDDP(reader)
    return KnownDDP(reader, device_ids=["cpu"] * replicas)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def mean_over_ranks(value: Tensor) -> float:
    if dist.is_initialized():
        value = value / dist.get_world_size()
        dist.all_reduce(value)
    return value.item()


@contextmanager
def process_group(is_needed: bool) -> Iterator[None]:
    """Join the ranks that torchrun started."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    if is_needed:
        dist.init_process_group("gloo")
    try:
        yield
    finally:
        if is_needed:
            dist.destroy_process_group()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Guess with an LSTM on packed sequences which module of the standard library a line comes from.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--replicas", type=int, default=1, help="replicas of the model in one process, which is not under torchrun then"
    )
    add("--steps", type=int, default=150, help="optimizer steps")
    add("--batch", type=int, default=64, help="lines in a step, over all ranks and replicas")
    add("--width", type=int, default=64, help="of embedding and LSTM")
    add("--seed", type=int, default=0, help="decides initial parameters and batches")
    add("--log-json", type=Path, help="rank 0 writes the summary to this file")
    options = parser.parse_args()
    for name in ("replicas", "steps", "batch", "width"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    under_torchrun = "LOCAL_RANK" in os.environ
    if under_torchrun == (options.replicas > 1):
        parser.error("start it with torchrun, or with --replicas 2 without torchrun")
    parts = int(os.environ["WORLD_SIZE"]) if under_torchrun else options.replicas
    if options.batch % parts:
        parser.error(f"--batch must be a multiple of {parts}, so that all have as many lines: got {options.batch}")
    return options


def main() -> None:
    options = parse_options()
    with process_group(is_needed=options.replicas == 1):
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        chosen = {name: getattr(options, name) for name in ("steps", "batch", "width", "seed", "replicas")}
        summary = train(Recipe(ranks=ranks, **chosen))
        if rank() == 0:
            report(summary)
            if options.log_json:
                options.log_json.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
