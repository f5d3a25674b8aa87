"""Training steps on started ranks, compared with plain autograd on one process. See ``models.py`` for the oracle."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import assert_grads, inputs, mean_grads
from torch import Tensor, nn

from knownddp import KnownDDP

LossOf = Callable[[nn.Module, int, int], "Tensor | Iterable[Tensor]"]

# With this cap every parameter is a bucket of its own; the default holds all of a small model in one.
TINY_CAP_MB = 1e-5

# Both numbers of ranks, and both extremes of bucket sizes.
setups = pytest.mark.parametrize(
    ("world_size", "cap"), [pytest.param(2, None, id="2"), pytest.param(3, TINY_CAP_MB, id="3-tiny-buckets")]
)
world_sizes = pytest.mark.parametrize("world_size", [2, 3])


def square_loss(model: nn.Module, rank: int, step: int = 0, **kwargs: Any) -> Tensor:
    """Rank ``rank``'s loss on a model that takes (batch, 3)."""
    return model(inputs(rank, 5, 3, seed=step), **kwargs).square().mean()


def declares(model: nn.Module, unused: Iterable[Any]) -> dict[str, Any]:
    """The keyword argument for a wrapper; nothing for the plain model of the oracle."""
    return {"unused_parameters": unused} if isinstance(model, KnownDDP) else {}


def step_is_right(plain: nn.Module, model: KnownDDP, rank: int, step: int = 90, loss_of: LossOf = square_loss) -> None:
    """One step from no gradients: afterwards each parameter has the mean over ranks, or none where no rank has one.

    ``loss_of(module, rank, step)`` returns the loss, or several that are backpropagated in turn.
    """
    model.zero_grad(set_to_none=True)
    losses = loss_of(model, rank, step)
    for loss in [losses] if isinstance(losses, Tensor) else losses:
        loss.backward()
    assert_grads(model, mean_grads(plain, dist.get_world_size(), lambda m, r: loss_of(m, r, step)))


def steps_are_right(
    plain: nn.Module, model: KnownDDP, rank: int, loss_of: LossOf = square_loss, steps: int = 3
) -> None:
    """Several steps: the first learns the order, the later ones launch early."""
    for step in range(steps):
        step_is_right(plain, model, rank, step, loss_of)


def follow(
    plain: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[nn.Module, int], Tensor | Iterable[Tensor]]
) -> None:
    """Train ``plain`` by one step with the mean gradients of all ranks, as a single process would."""
    wanted = mean_grads(plain, dist.get_world_size(), loss_of)
    for name, param in plain.named_parameters():
        param.grad = wanted[name]
    optimizer.step()


def trains_like_one_process(
    plain: nn.Module, model: KnownDDP, rank: int, ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer
) -> None:
    """Three steps with ``ours`` (of ``model``), compared with those of one process with ``theirs`` (of ``plain``)."""
    for step in range(3):
        ours.zero_grad()
        square_loss(model, rank, step).backward()
        ours.step()
        follow(plain, theirs, lambda m, r, s=step: square_loss(m, r, s))
        assert_same_parameters(model, plain)


def assert_same_parameters(model: KnownDDP, plain: nn.Module) -> None:
    for (name, ours), theirs in zip(model.module.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def snapshot(params: Iterable[Tensor]) -> list[Tensor]:
    """Copies of the values."""
    return [param.detach().clone() for param in params]


def assert_unmoved(params: Iterable[Tensor], before: Collection[Tensor]) -> None:
    assert all(torch.equal(now, then) for now, then in zip(params, before, strict=True)), "a parameter moved"


def from_all_ranks(tensor: Tensor) -> list[Tensor]:
    """Every rank's ``tensor``, in rank order."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.contiguous())
    return found


def grads_of(model: nn.Module) -> list[float | None]:
    """The gradients of a model of scalars, for comparison with numbers worked out by hand."""
    return [None if p.grad is None else p.grad.item() for p in model.parameters()]


def identical_models(*builds: Callable[[], nn.Module]) -> Iterator[tuple[nn.Module, nn.Module]]:
    """For each builder a model that is the same on all ranks, and a copy."""
    for build in builds:
        torch.manual_seed(0)
        plain = build()
        yield plain, copy.deepcopy(plain)


@contextmanager
def counted_collectives() -> Iterator[list[str]]:
    """The names of what this process calls of process groups, which all collectives go through, and "new_group"."""
    watched = ("allreduce", "all_to_all_single", "allgather", "broadcast", "barrier", "reduce", "send", "recv")
    called: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in watched:
            patch.setattr(dist.ProcessGroup, name, _noting(called, name, getattr(dist.ProcessGroup, name)))
        patch.setattr(dist, "new_group", _noting(called, "new_group", dist.new_group))
        yield called


def _noting(called: list[str], name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def noting(*args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return original(*args, **kwargs)

    return noting
