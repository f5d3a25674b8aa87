"""The arithmetic of ``SyncBatchNorm`` on the CPU, for which torch has GPU kernels only.

torch's own ``SyncBatchNorm``, with the collectives it issues in forward and backward, then runs as it is.
"""

from __future__ import annotations

import functools
import types
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn


def _per_channel(value: Tensor, like: Tensor) -> Tensor:
    return value.view(1, -1, *[1] * (like.dim() - 2))


def _others(x: Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x = x.float()
    return x.mean(_others(x)), (x.var(_others(x), correction=0) + eps).rsqrt()


def _gather_stats(
    _x: Tensor,
    mean_all: Tensor,
    invstd_all: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    weights = counts.to(mean_all.dtype)[:, None]
    total = weights.sum()
    mean = (mean_all * weights).sum(0) / total
    squares = (invstd_all.pow(-2) - eps + (mean_all - mean).square()) * weights
    var = squares.sum(0) / total
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_((squares.sum(0) / (total - 1)).to(running_var.dtype), momentum)
    return mean, (var + eps).rsqrt()


def _elementwise(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, _e: float) -> Any:
    y = (x.float() - _per_channel(mean, x)) * _per_channel(invstd, x)
    if weight is not None:
        y = y * _per_channel(weight, x)
    if bias is not None:
        y = y + _per_channel(bias, x)
    return y.to(x.dtype)


def _backward_reduce(
    dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, *_needs: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sum_dy = dy.float().sum(_others(x))
    sum_dy_xmu = (dy.float() * (x.float() - _per_channel(mean, x))).sum(_others(x))
    dtype = x.dtype if weight is None else weight.dtype
    return sum_dy, sum_dy_xmu, (sum_dy_xmu * invstd).to(dtype), sum_dy.to(dtype)


def _backward_elementwise(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    counts: Tensor,
) -> Tensor:
    total = counts.sum()
    scale = invstd if weight is None else invstd * weight
    xmu = (x.float() - _per_channel(mean, x)) * _per_channel(invstd.square() * sum_dy_xmu / total, x)
    return ((dy.float() - _per_channel(sum_dy / total, x) - xmu) * _per_channel(scale, x)).to(x.dtype)


def with_constants(function: Any, instead: dict[Any, Any]) -> Any:
    """``function`` with other constants in its code."""
    code = function.__code__
    constants = tuple(instead.get(c, c) if isinstance(c, str | int) else c for c in code.co_consts)
    changed = types.FunctionType(
        code.replace(co_consts=constants),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    return functools.update_wrapper(changed, function)


def _accept(_wrapper: nn.Module, _module: nn.Module) -> None:
    pass


def sync_batch_norm_patches(wrapper: type[nn.Module]) -> list[Any]:
    """Patches that give ``SyncBatchNorm`` these kernels, and let ``wrapper`` and it accept the CPU."""
    patches = [
        mock.patch.object(torch, "batch_norm_stats", _stats),
        mock.patch.object(torch, "batch_norm_gather_stats_with_counts", _gather_stats),
        mock.patch.object(torch, "batch_norm_elemt", _elementwise),
        mock.patch.object(torch, "batch_norm_backward_reduce", _backward_reduce),
        mock.patch.object(torch, "batch_norm_backward_elemt", _backward_elementwise),
        mock.patch.object(nn.SyncBatchNorm, "forward", with_constants(nn.SyncBatchNorm.forward, {"xpu": "cpu"})),
    ]
    if hasattr(wrapper, "_passing_sync_batchnorm_handle"):
        patches.append(mock.patch.object(wrapper, "_passing_sync_batchnorm_handle", _accept))
    return patches
