"""The module that scripts train: each call says which parameters it uses, in which order and how.

Gradients are whole numbers that means over 2, 3 or 4 ranks leave whole, several times over, so that what is right can
be compared exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from .script import HIDDEN, UNDEFINED, Call, Setup

UNIT: Final = 2**8 * 3**4  # so that means of means over up to four windows are whole
EXACT_BELOW: Final = 2**24  # in float32


class Raised(ArithmeticError):
    """The exception that scripts raise in a backward."""


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Raised


class _Hides(torch.autograd.Function):
    """Adds ``(param * weight).sum()``, whose gradient comes in a backward of its own, as in a reentrant checkpoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, param: list[Tensor], weight: Tensor) -> Tensor:
        ctx.of = param, weight
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        [param], weight = ctx.of
        with torch.enable_grad():
            (param * weight).sum().backward()
        return grad, None, None


class _Undefines(torch.autograd.Function):
    """Reaches ``param`` with a gradient that is None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, param: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Scripted(nn.Module):
    """Parameters of the shapes of a setup, and a buffer."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.params = nn.ParameterList(
            torch.ones(shape, dtype=torch.float64 if i in setup.doubles else torch.float32)
            for i, shape in enumerate(setup.shapes)
        )
        if setup.has_buffer:
            self.register_buffer("count", torch.zeros(3))

    def forward(self, call: Call, seed: int) -> Tensor:
        """Shapes: a scalar."""
        x = torch.zeros((), dtype=torch.float64, requires_grad=True) * 1
        if call.raises_after == len(call.uses):
            x = _Raises.apply(x)  # type: ignore[no-untyped-call]
        for place, use in reversed(list(enumerate(call.uses))):
            param = self.params[use.param]
            weight = gradient(param, seed * 8 + place)
            if use.kind == HIDDEN:
                x = _Hides.apply(x, [param], weight)  # type: ignore[no-untyped-call]
            elif use.kind == UNDEFINED:
                x = _Undefines.apply(x, param)  # type: ignore[no-untyped-call]
            else:
                x = x + (param * weight).sum()
            if call.raises_after == place:
                x = _Raises.apply(x)  # type: ignore[no-untyped-call]
        return x


def gradient(param: Tensor, seed: int) -> Tensor:
    """What one use brings: other numbers for each element, use and rank."""
    pattern = torch.arange(param.numel()) % 3 + 1 + seed * 2654435761 % 4
    return (pattern * UNIT).to(param.dtype).view(param.shape)


def seed_of(rank: int, step: int, call: int) -> int:
    """For each rank, step and call another."""
    return (rank * 16 + step) * 4 + call


Grads = tuple[tuple[float, ...] | None, ...]


def grads_of(params: Sequence[Tensor]) -> Grads:
    """A snapshot of all ``.grad``."""
    return tuple(None if p.grad is None else tuple(p.grad.flatten().tolist()) for p in params)
