"""The oracle for ``mixed_precision``: a copy of the module whose parameters are bfloat16, run on one process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterable

import torch
import torch.distributed as dist
from models import assert_grads
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.nn.utils.rnn import PackedSequence

from knownddp import KnownDDP

BF16 = _MixedPrecision(param_dtype=torch.bfloat16)
# Gradients travel in float32, so that nothing rounds but the arithmetic of the module itself.
FLOAT_WIRE = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

Loss = Callable[[nn.Module, int], "Tensor | Iterable[Tensor]"]


class Lowered(nn.Module):
    """A bfloat16 copy of ``plain``, but for parameters ``kept``; float32 arguments are cast."""

    def __init__(self, plain: nn.Module, kept: Collection[str] = ()) -> None:
        super().__init__()
        self.module = copy.deepcopy(plain)
        for name, param in self.module.named_parameters():
            if param.is_floating_point() and name not in kept:
                param.data = param.data.bfloat16()

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.module(*map(_cast, args), **{name: _cast(value) for name, value in kwargs.items()})


def _cast(value: object) -> object:
    if isinstance(value, (Tensor, PackedSequence)):
        return value.to(torch.bfloat16) if value.data.is_floating_point() else value
    if isinstance(value, dict):
        return {name: _cast(one) for name, one in value.items()}
    return type(value)(map(_cast, value)) if type(value) in (list, tuple) else value


def low_grads(plain: nn.Module, loss_of: Loss, kept: Collection[str] = ()) -> dict[str, Tensor | None]:
    """The mean over ranks of the copy's gradients, each summed as float32 as it comes; None where no rank has one."""
    sums: dict[str, Tensor | None] = {name: None for name, _ in plain.named_parameters()}

    def take(name: str, param: Tensor) -> None:
        grad = param.grad.to(torch.complex64 if param.is_complex() else torch.float32)
        before, param.grad = sums[name], None
        sums[name] = grad if before is None else before + grad

    for rank in range(dist.get_world_size()):
        low = Lowered(plain, kept)
        for name, param in low.module.named_parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(functools.partial(take, name))
        losses = loss_of(low, rank)
        for loss in [losses] if isinstance(losses, Tensor) else losses:
            loss.backward()
    return {name: None if total is None else total / dist.get_world_size() for name, total in sums.items()}


def low_step_is_right(
    plain: nn.Module, model: KnownDDP, rank: int, loss_of: Loss, kept: Collection[str] = ()
) -> dict[str, Tensor | None]:
    """One step from no gradients: each parameter has the oracle's gradient, in its own dtype. Returns the oracle's."""
    model.zero_grad(set_to_none=True)
    losses = loss_of(model, rank)
    for loss in [losses] if isinstance(losses, Tensor) else losses:
        loss.backward()
    wanted = low_grads(plain, loss_of, kept)
    assert_grads(model, wanted)
    assert_in_place(model)
    return wanted


def assert_in_place(model: KnownDDP) -> None:
    """Parameters are where they belong, float32 unless complex, and nothing stands in for them."""
    assert all(isinstance(p, nn.Parameter) and p.is_leaf for p in model.parameters())
    assert {p.dtype for p in model.parameters()} <= {torch.float32, torch.complex64}
    assert not model._params.masters and not model._low_precision._up
