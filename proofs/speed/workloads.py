"""The models that are trained, and which layers a step drops."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn


class Dropped(Enum):
    """What a model does in the place of a dropped layer."""

    SKIP = "skip"  # nothing: the layer is not run
    RUN = "run"  # runs it all the same
    TIMES_ZERO = "times zero"  # runs it and multiplies its output by zero
    ZERO_GRADIENTS = "zero gradients"  # does not run it; an autograd Function gives its parameters zeros


class ZeroGradients(torch.autograd.Function):
    """``apply(x, *params)`` is x; the gradient of each parameter is zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *params: Tensor) -> Tensor:
        ctx.save_for_backward(*params)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *map(torch.zeros_like, ctx.saved_tensors)


class Layers(nn.Module):
    """Layers in a row, each of which a call may drop. Shapes: the same from each layer to the next."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, dropped: Collection[int] = (), instead: Dropped = Dropped.SKIP) -> Tensor:
        for i, layer in enumerate(self.layers):
            if i not in dropped or instead is Dropped.RUN:
                x = layer(x)
            elif instead is Dropped.TIMES_ZERO:
                x = x + 0 * layer(x)
            elif instead is Dropped.ZERO_GRADIENTS:
                x = ZeroGradients.apply(x, *layer.parameters())
        return x


@dataclass(frozen=True)
class Workload:
    """One model and how it is trained.

    Attributes:
        shape: of a rank's input.
        drop: the share of layers that a step drops; ``is_fixed``: the same ones in every step.
        repeats: so many times as many rounds, where steps are short and what disturbs them weighs more.
    """

    name: str
    title: str
    depth: int
    layer: Callable[[], nn.Module]
    shape: tuple[int, ...]
    drop: float = 0.0
    is_fixed: bool = False
    repeats: int = 1

    def build(self) -> Layers:
        """The same on all ranks."""
        torch.manual_seed(0)
        return Layers([self.layer() for _ in range(self.depth)])

    def inputs(self, rank: int) -> Tensor:
        return torch.randn(*self.shape, generator=torch.Generator().manual_seed(rank))

    def dropped(self, step: int) -> frozenset[int]:
        """Numbers of the layers that step ``step`` drops: as many in each step, and the same ones on all ranks."""
        draw = random.Random(0 if self.is_fixed else step)
        return frozenset(draw.sample(range(self.depth), round(self.drop * self.depth)))

    @property
    def param_bytes(self) -> int:
        with torch.device("meta"):
            return self.depth * sum(p.numel() * p.element_size() for p in self.layer().parameters())

    @property
    def used_bytes(self) -> int:
        """Gradients of the layers that a step does not drop."""
        return self.param_bytes * (self.depth - len(self.dropped(0))) // self.depth


def _encoder(width: int) -> Callable[[], nn.Module]:
    return lambda: nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)


def _square(width: int, *, bias: bool) -> Callable[[], nn.Module]:
    def layer() -> nn.Module:
        linear = nn.Linear(width, width, bias=bias)
        if linear.weight.device.type != "meta":
            nn.init.uniform_(linear.weight, -math.sqrt(3 / width), math.sqrt(3 / width))  # keeps the scale of x
        return linear

    return layer


class Convolutions(nn.Module):
    """A residual block. Shapes: (batch, width, height, width of the image), in and out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.GroupNorm(8, width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.GroupNorm(8, width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


class Recurrent(nn.LSTM):
    """One layer of an LSTM. Shapes: (batch, time, width), in and out."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


def workloads(*, quick: bool, drops: Collection[float]) -> list[Workload]:
    """Those of the table. ``quick``: small models that show nothing but that everything runs."""
    depth, width, shape = (6, 32, (2, 4, 32)) if quick else (24, 256, (4, 16, 256))
    large, many = (64, 10) if quick else (2048, 400)
    encoders = f"{depth} encoder layers"
    found = [
        Workload("large", f"8 linear layers {large} x {large}", 8, _square(large, bias=False), (4, large)),
        Workload("small", f"{many} linear layers 32 x 32", many, _square(32, bias=True), (4, 32), repeats=5),
    ]
    blocks, recurrent, side = (4, 4, 4) if quick else (24, 12, 8)
    channels = 8 if quick else 64
    for drop in (0.0, 0.5):
        how = f"{drop:.0%} dropped" if drop else "all used"
        shape_of_images = (4, channels, side, side)
        found += [
            Workload(
                f"conv-{drop:g}",
                f"{blocks} residual blocks of 2 convolutions, {how}",
                blocks,
                functools.partial(Convolutions, channels),
                shape_of_images,
                drop,
            ),
            Workload(
                f"lstm-{drop:g}",
                f"{recurrent} LSTM layers of width {width}, {how}",
                recurrent,
                functools.partial(Recurrent, width),
                shape,
                drop,
            ),
        ]
    for drop in drops:
        title = f"{encoders}, {drop:.0%} dropped, other ones each step" if drop else f"{encoders}, all used"
        found.append(Workload(f"drop-{drop:g}", title, depth, _encoder(width), shape, drop))
    title = f"{encoders}, 50% dropped, always the same"
    return [*found, Workload("fixed", title, depth, _encoder(width), shape, 0.5, is_fixed=True)]
