"""Small models, this rank's inputs, and the oracle: plain autograd on one process, averaged by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from knownddp import KnownDDP


def inputs(rank: int, *shape: int, seed: int = 0) -> Tensor:
    """Rank ``rank``'s input: the same on every process that asks for it."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * seed + rank))


class Skippable(nn.Module):
    """Residual layers, some of which one call may skip. Shapes: (batch, width) to the same."""

    def __init__(self, depth: int = 4, width: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor, skip: Collection[int] = ()) -> Tensor:
        for i, layer in enumerate(self.layers):
            if i not in skip:
                x = x + torch.tanh(layer(x))
        return x

    def of(self, skip: Iterable[int]) -> list[nn.Module]:
        return [self.layers[i] for i in sorted(skip)]


class Scales(nn.Module):
    """One scalar a name, for arithmetic by hand: ``forward(x, use)`` is the sum of ``scale * x`` over ``use``."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Parameter(torch.ones(())))

    def forward(self, x: Tensor, use: str) -> Tensor:
        total = torch.zeros(())
        for name in use.split():
            total = total + getattr(self, name) * x
        return total


class Withholds(torch.autograd.Function):
    """``Withholds.apply(x)`` is x; what its backward gives is undefined."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


class Fails(torch.autograd.Function):
    """``Fails.apply(x)`` is x; its backward raises ArithmeticError."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("on purpose")


def make(build: Callable[[], nn.Module] = Skippable, **options: object) -> tuple[nn.Module, KnownDDP]:
    """A model, the same on all ranks, and a wrapped copy of it."""
    torch.manual_seed(0)
    plain = build()
    return plain, KnownDDP(copy.deepcopy(plain), **options)  # type: ignore[arg-type]


def mean_grads(
    plain: nn.Module, world_size: int, loss_of: Callable[[nn.Module, int], Tensor | Iterable[Tensor]]
) -> dict[str, Tensor | None]:
    """The mean over ranks of what plain autograd gives; None where no rank has a gradient.

    ``loss_of(module, rank)`` returns the loss, or several that are backpropagated in turn.
    """
    plain = copy.deepcopy(plain)
    sums: dict[str, Tensor] = {}
    for rank in range(world_size):
        plain.zero_grad(set_to_none=True)
        losses = loss_of(plain, rank)
        for loss in [losses] if isinstance(losses, Tensor) else losses:
            loss.backward()
        for name, param in plain.named_parameters():
            if param.grad is not None:
                grad = param.grad.detach().clone()
                sums[name] = sums[name] + grad if name in sums else grad
    return {name: sums[name] / world_size if name in sums else None for name, _ in plain.named_parameters()}


def assert_grads(model: KnownDDP | nn.Module, wanted: dict[str, Tensor | None]) -> None:
    """Each parameter has the wanted gradient, and none where none is wanted."""
    module = model.module if isinstance(model, KnownDDP) else model
    for name, param in module.named_parameters():
        want = wanted[name]
        if want is None:
            assert param.grad is None, f"{name} has a gradient where no rank has one"
        else:
            assert param.grad is not None, f"{name} has no gradient"
            torch.testing.assert_close(param.grad, want, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def raises_everywhere(step: Callable[[], object], kind: type[Exception]) -> str:
    """The message of the ``kind`` that ``step`` raises; AssertionError if it does not raise."""
    try:
        step()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")
