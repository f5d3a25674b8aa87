"""Train a byte-level language model with LayerDrop and send no gradients for dropped layers.

    torchrun --nproc-per-node 2 examples/train_layerdrop.py

The text is Python's own standard library. Before each forward a sampler drops layers, the same on
every rank; the model does not run them, and the wrapper is told so:

    logits = model(tokens, dropped, unused_parameters=[model.module.blocks[i] for i in dropped])

``--wrapper`` runs the same training under other wrappers. On CPU and at most two ranks those that
drop layers end with equal parameters, bit for bit, and so does a run resumed from ``--checkpoint``.
For elastic restarts (``torchrun --max-restarts 3``) set ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``: torch
2.13 otherwise keeps the store of the attempt before, whose addresses nobody answers any more.
"""

import argparse
import hashlib
import json
import math
import os
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from tqdm import tqdm

from knownddp import KnownDDP, LayerDropSampler

VOCABULARY: Final = 256  # a token is a byte
HEAD_WIDTH: Final = 32
CORPUS_BYTES: Final = 8_000_000
VALIDATION_WINDOWS: Final = 512
PEAK_LEARNING_RATE: Final = 3e-3
WARMUP_STEPS: Final = 20

Wrapped = KnownDDP | DistributedDataParallel


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that decides the final parameters; a checkpoint resumes only under the same recipe."""

    wrapper: str
    drop: float
    steps: int
    layers: int
    width: int
    batch: int
    context: int
    seed: int
    world_size: int
    corpus_sha256: str


@dataclass(slots=True)
class Progress:
    """What has happened so far, in earlier runs of the same checkpoint too."""

    step: int = 0
    losses: list[float] = field(default_factory=list)  # one a step, mean over ranks
    bytes_reduced: int = 0
    bytes_skipped: int = 0


class Block(nn.Module):
    """Pre-norm causal attention and MLP, each added to the residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (batch, time, width) in and out."""
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, -1, HEAD_WIDTH)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.norm_mlp(x))))


class ByteTransformer(nn.Module):
    """Predicts the next byte; runs the blocks that are not dropped."""

    def __init__(self, *, layers: int, width: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor, dropped: tuple[int, ...] = ()) -> Tensor:
        """Shapes: tokens (batch, time) -> logits (batch, time, 256)."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for index, block in enumerate(self.blocks):
            if index not in dropped:
                x = block(x)
        return self.head(self.norm(x))


def standard_library() -> tuple[Tensor, Tensor]:
    """Training and validation bytes; a tenth, in whole files, is held out.

    Files come in the order of their names' hashes: the same in every process, yet a mix of packages.
    """
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    names = [path.relative_to(root) for path in root.rglob("*.py") if path.is_file()]
    names = [name for name in names if left_out.isdisjoint(name.parts)]
    names.sort(key=lambda name: hashlib.sha256(name.as_posix().encode()).digest())
    training, validation = bytearray(), bytearray()
    for name in names:
        text = (root / name).read_bytes()
        if len(training) + len(validation) + len(text) > CORPUS_BYTES:
            break
        (validation if 9 * len(validation) < len(training) else training).extend(text)
    if not validation:
        raise SystemExit(f"no text to train on: {root} holds {len(names)} Python source files")
    return torch.frombuffer(training, dtype=torch.uint8), torch.frombuffer(validation, dtype=torch.uint8)


def windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, both (len(starts), context); a target is the byte after its input."""
    rows = text[starts[:, None] + torch.arange(context + 1, device=text.device)].long()
    return rows[:, :-1], rows[:, 1:]


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Shapes: logits (batch, time, 256), targets (batch, time) -> a scalar in nats."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


def training_batch(text: Tensor, recipe: Recipe, step: int) -> tuple[Tensor, Tensor]:
    """A function of seed, step and rank alone, so that a resumed run reads on where it was."""
    generator = np.random.default_rng((recipe.seed, step, dist.get_rank()))
    starts = generator.integers(0, len(text) - recipe.context, recipe.batch)
    return windows(text, torch.from_numpy(starts).to(text.device), recipe.context)


def train_step(model: Wrapped, optimizer: AdamW, recipe: Recipe, step: int, text: Tensor) -> float:
    """One optimizer step; returns its loss, averaged over ranks."""
    dropped = LayerDropSampler(recipe.layers, recipe.drop, recipe.seed).dropped(step)
    declared = {"unused_parameters": [model.module.blocks[i] for i in dropped]} if recipe.wrapper == "known" else {}
    inputs, targets = training_batch(text, recipe, step)
    loss = cross_entropy(model(inputs, dropped, **declared), targets)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    # Up in a line, then down in a cosine; from the step alone, so there is no scheduler to save.
    schedule = min((step + 1) / WARMUP_STEPS, (1 + math.cos(math.pi * step / recipe.steps)) / 2)
    for group in optimizer.param_groups:
        group["lr"] = PEAK_LEARNING_RATE * schedule
    optimizer.step()
    mean_loss = loss.detach() / recipe.world_size
    dist.all_reduce(mean_loss)
    return mean_loss.item()


@torch.no_grad()
def validate(module: nn.Module, text: Tensor, recipe: Recipe) -> float:
    """Nats a byte over evenly spaced windows: each rank takes its share, and no layer is dropped."""
    starts = torch.linspace(0, len(text) - recipe.context - 1, VALIDATION_WINDOWS, dtype=torch.float64)
    starts = starts.long().to(text.device)
    total = torch.zeros(2, dtype=torch.float64, device=text.device)
    for share in starts[dist.get_rank() :: recipe.world_size].split(recipe.batch):
        inputs, targets = windows(text, share, recipe.context)
        total[0] += cross_entropy(module(inputs), targets, reduction="sum")
        total[1] += targets.numel()
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def wrap(module: nn.Module, wrapper: str, device: torch.device) -> Wrapped:
    cls: Callable[..., Any] = KnownDDP if wrapper.startswith("known") else DistributedDataParallel
    device_ids = [device.index] if device.type == "cuda" else None
    return cls(module, device_ids=device_ids, find_unused_parameters=wrapper.endswith("-find"))


def traffic(model: Wrapped, steps: int) -> tuple[int, int]:
    """Gradient bytes reduced and skipped by this process, which ran ``steps`` steps."""
    if isinstance(model, KnownDDP):
        stats = model.stats()
        return stats.bytes_reduced, stats.bytes_skipped
    return steps * sum(p.nbytes for p in model.parameters()), 0  # what nobody used is sent as zeros


def save(path: Path, recipe: Recipe, progress: Progress, module: nn.Module, optimizer: AdamW) -> None:
    """Replace the checkpoint in one move: a crash at any moment leaves the old one or the new one."""
    state = {"recipe": asdict(recipe), "progress": asdict(progress)}
    state |= {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
    draft = path.with_name(path.name + ".tmp")
    with draft.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def resume(path: Path, recipe: Recipe, module: nn.Module, optimizer: AdamW) -> Progress:
    """Load rank 0's checkpoint on every rank; a fresh start if rank 0 has none."""
    message: list[Any] = [None]
    if dist.get_rank() == 0 and path.exists():
        message = [torch.load(path, map_location="cpu", weights_only=True)]
    dist.broadcast_object_list(message)
    if (state := message[0]) is None:
        return Progress()
    pairs = [(key, state["recipe"].get(key), now) for key, now in asdict(recipe).items()]
    if differing := [f"{key} was {then}, is {now}" for key, then, now in pairs if then != now]:
        raise SystemExit(
            f"{path} comes from another training: {'; '.join(differing)}.\n"
            "Fix: give the options it was made with, or another --checkpoint."
        )
    module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return Progress(**state["progress"])


def sha256_of(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().numpy())
    return digest.hexdigest()


def train(options: argparse.Namespace, device: torch.device) -> dict[str, Any] | None:
    """Train, validate and return the summary; None when told to stop early."""
    is_first = dist.get_rank() == 0
    training, validation = (text.to(device) for text in standard_library())
    if min(len(training), len(validation)) <= options.context:
        raise SystemExit(f"--context {options.context} is longer than the text: {len(validation)} bytes held out")
    from_options = ("wrapper", "steps", "layers", "width", "batch", "context", "seed")
    recipe = Recipe(
        drop=0.0 if options.wrapper == "ddp" else options.drop,
        world_size=dist.get_world_size(),
        corpus_sha256=hashlib.sha256(training.cpu().numpy()).hexdigest(),
        **{name: getattr(options, name) for name in from_options},
    )
    torch.manual_seed(recipe.seed)
    module = ByteTransformer(layers=recipe.layers, width=recipe.width, context=recipe.context).to(device)
    optimizer = AdamW(module.parameters(), betas=(0.9, 0.95))
    progress = resume(options.checkpoint, recipe, module, optimizer) if options.checkpoint else Progress()
    begun = Progress(**asdict(progress))
    model = wrap(module, recipe.wrapper, device)

    step_seconds: list[float] = []
    with tqdm(total=recipe.steps, initial=begun.step, unit="step", disable=not is_first) as bar:
        while progress.step < recipe.steps:
            clock = time.perf_counter()
            progress.losses.append(train_step(model, optimizer, recipe, progress.step, training))
            step_seconds.append(time.perf_counter() - clock)
            progress.step += 1
            reduced, skipped = traffic(model, progress.step - begun.step)
            progress.bytes_reduced = begun.bytes_reduced + reduced
            progress.bytes_skipped = begun.bytes_skipped + skipped
            bar.set_postfix_str(
                f"loss {progress.losses[-1]:.3f}, {1e3 * step_seconds[-1]:.0f} ms, gradients "
                f"{progress.bytes_reduced / 1e6:.1f} MB reduced, {progress.bytes_skipped / 1e6:.1f} MB skipped",
                refresh=False,
            )
            bar.update()
            if progress.step == options.stop_after:
                return None
            due = progress.step % options.checkpoint_every == 0 or progress.step == recipe.steps
            if options.checkpoint and is_first and due:
                save(options.checkpoint, recipe, progress, module, optimizer)

    return {
        "recipe": asdict(recipe),
        "train_loss_first": progress.losses[0],
        "train_loss_last": statistics.fmean(progress.losses[-10:]),  # one batch alone is noisy
        "validation_loss": validate(module, validation, recipe),
        "bytes_reduced": progress.bytes_reduced,
        "bytes_skipped": progress.bytes_skipped,
        "step_seconds_median": statistics.median(step_seconds) if step_seconds else None,
        "parameters_sha256": sha256_of(module),
    }


def report(summary: dict[str, Any]) -> None:
    reduced, skipped = summary["bytes_reduced"], summary["bytes_skipped"]
    first, last = summary["train_loss_first"], summary["train_loss_last"]
    print(f"train loss       {first:.3f} in the first step, {last:.3f} over the last 10")
    print(f"validation loss  {summary['validation_loss']:.3f} nats a byte")
    print(f"gradients        {reduced / 1e6:.1f} MB reduced, {skipped / 1e6:.1f} MB skipped a rank")
    print(f"saved            {skipped / (reduced + skipped):.1%} of the bytes")
    if seconds := summary["step_seconds_median"]:
        print(f"median step      {1e3 * seconds:.1f} ms")
    print(f"parameters       sha256 {summary['parameters_sha256']}")


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Join the ranks that torchrun started; yields this rank's device."""
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level language model with LayerDrop. Start it with torchrun.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--wrapper",
        choices=("known", "known-find", "ddp-find", "ddp"),
        default="known",
        help="known: KnownDDP, told what is dropped; known-find: KnownDDP that finds it out; ddp-find: torch's DDP "
        "with find_unused_parameters; ddp: torch's DDP as it is: it cannot skip, so nothing is dropped",
    )
    add("--drop", type=float, default=0.2, help="probability that a layer is dropped in a step")
    add("--steps", type=int, default=600, help="optimizer steps")
    add("--layers", type=int, default=6, help="transformer blocks")
    add("--width", type=int, default=128, help=f"model width, a multiple of {HEAD_WIDTH}")
    add("--batch", type=int, default=8, help="sequences a rank in a step")
    add("--context", type=int, default=64, help="bytes a sequence")
    add("--seed", type=int, default=0, help="decides initial parameters, batches and dropped layers")
    add("--checkpoint", type=Path, help="save to this file; resume from it when it exists")
    add("--checkpoint-every", type=int, default=100, help="steps between saves; one more comes at the end")
    add("--stop-after", type=int, help="leave after this step and save nothing, as a crash would")
    add("--log-json", type=Path, help="rank 0 writes the summary to this file")
    options = parser.parse_args()
    for name in ("steps", "layers", "width", "batch", "context", "checkpoint_every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if options.width % HEAD_WIDTH:
        parser.error(f"--width must be a multiple of {HEAD_WIDTH}, got {options.width}")
    if not 0 <= options.drop <= 1:
        parser.error(f"--drop is a probability, got {options.drop}")
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 examples/train_layerdrop.py")
    return options


def main() -> None:
    options = parse_options()
    with process_group() as device:
        summary = train(options, device)
        if summary and dist.get_rank() == 0:
            report(summary)
            if options.log_json:
                options.log_json.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
