"""Several ranks of a large group, one after the other in one process, that hear each other's messages.

Each simulated rank runs a whole training on torch's fake process group. Messages are combined as on a real group: in
pass k the first k messages of every rank are what all of them said in the pass before, until all messages are settled.
Ranks that are not simulated say what some simulated rank says; gradients themselves are not exchanged.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor, nn

from knownddp import KnownDDP
from knownddp.works import DONE, Combination, Work

from .fake import FakeCollectives, Recorder, fake_rank

LAYERS, WIDTH, STEPS = 24, 4, 4


@dataclass
class Board:
    """What the ranks said: ``settled`` in earlier passes, ``said`` in this one, message by message."""

    settled: list[Tensor] = field(default_factory=list)
    said: list[Tensor] = field(default_factory=list)
    position: int = 0

    def exchange(self, message: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> None:
        place, mine = self.position, message.clone()
        self.position += 1
        if place < len(self.said):
            self.said[place] = combine(self.said[place], mine)
        else:
            self.said.append(mine)
        if place < len(self.settled):
            message.copy_(self.settled[place])

    def is_settled(self) -> bool:
        pairs = zip(self.settled, self.said, strict=False)
        return len(self.settled) == len(self.said) and all(torch.equal(a, b) for a, b in pairs)

    def settle_one_more(self) -> None:
        self.settled, self.said = self.said[: len(self.settled) + 1], []


@dataclass(frozen=True)
class Trained:
    """What one simulated rank did in its last step. ``plans``: of every step."""

    collectives: int
    gradient_bytes: int
    message_bytes: int
    plans: tuple[object, ...]


class SmallLayers(nn.Module):
    """Layers that a call may drop, small enough that computing costs next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor, dropped: frozenset[int]) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = x if i in dropped else layer(x)
        return x


def _train(rank: int, world_size: int, dropped_by: Callable[[int, int], frozenset[int]], board: Board) -> Trained:
    class Heard(FakeCollectives):
        def combine_or(self, message: bytes) -> Combination:
            super().combine_or(message)
            combined = torch.frombuffer(bytearray(message), dtype=torch.uint8)
            board.exchange(combined, torch.bitwise_or)
            return Combination(DONE, lambda: combined.numpy().tobytes())

        def combine_max(self, message: Tensor) -> Work:
            work = super().combine_max(message)
            board.exchange(message, torch.maximum)
            return work

    plans = []
    with fake_rank(rank, world_size), mock.patch("knownddp.ddp.collectives_over", Heard), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # declarations differ on purpose
        torch.manual_seed(0)
        module = SmallLayers()
        model = KnownDDP(module, bucket_cap_mb=500 / 2**20)
        for step in range(STEPS):
            dropped = dropped_by(rank, step)
            model.zero_grad()
            with Recorder() as recorder:
                unused = [module.layers[i] for i in dropped]
                model(torch.ones(2, WIDTH), dropped, unused_parameters=unused).sum().backward()
            plans.append(model.reducer.protocol.plan.buckets)
    gradients = [nbytes for _, is_gradient, nbytes in recorder.log if is_gradient]
    others = [nbytes for _, is_gradient, nbytes in recorder.log if not is_gradient]
    return Trained(len(recorder.log), sum(gradients), sum(others), tuple(plans))


def train(
    ranks: Sequence[int], world_size: int, dropped_by: Callable[[int, int], frozenset[int]], max_passes: int = 50
) -> list[Trained]:
    """What each of ``ranks`` of a group of ``world_size`` does, dropping ``dropped_by(rank, step)``.

    Raises:
        RuntimeError: the ranks never settle.
    """
    board = Board()
    for _ in range(max_passes):
        found = []
        for rank in ranks:
            board.position = 0
            # While messages are unsettled ranks may be at odds, which they may notice.
            with contextlib.suppress(Exception):
                found.append(_train(rank, world_size, dropped_by, board))
        if board.is_settled() and len(found) == len(ranks):
            return found
        board.settle_one_more()
    raise RuntimeError("the simulated ranks do not settle")
