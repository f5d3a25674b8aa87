"""Whose memory a gradient is: when it may be written in place."""

from __future__ import annotations

import sys
from typing import Final

import torch
from torch import Tensor

from ._torch_private import storage_users
from .flat import is_dense
from .specs import ParamSpec

# Whether reference counts tell who else refers to a tensor: not in builds of Python without the global lock.
COUNTS_TELL: Final[bool] = getattr(sys, "_is_gil_enabled", lambda: True)()


def can_take(before: Tensor, mean: Tensor, param: Tensor) -> bool:
    """Whether ``mean`` can be written into the gradient that stood there."""
    return (
        before.layout is mean.layout is torch.strided
        and before.shape == mean.shape
        and before.dtype == param.dtype
        and before.device == mean.device
        and not before.requires_grad
        and not before.is_inference()
        and is_dense(before.shape, before.stride())
    )


def may_be_overwritten(param: Tensor, spec: ParamSpec, *, in_own_hook: bool) -> bool:
    """Whether ``param.grad`` is laid out as ``spec`` says and referred to by nobody else, the caller included.

    ``in_own_hook``: the engine still holds the tensor that was accumulated, which has the same memory.
    """
    grad = param.grad
    return (
        COUNTS_TELL
        and type(grad) is Tensor
        and grad.layout is torch.strided
        and grad.dtype is spec.key.dtype
        and grad.stride() == spec.strides
        and not (grad.requires_grad or grad.is_conj() or grad.is_neg() or grad.is_inference())
        and _references_to_grad(param) == _USUAL_REFERENCES
        and storage_users(grad) == (2 if in_own_hook else 1)
    )


def _references_to_grad(param: Tensor) -> int:
    """How many refer to ``param.grad``, the parameter and this function included."""
    grad = param.grad
    return sys.getrefcount(grad)


def _usual_references() -> int:
    """As ``_references_to_grad`` finds them for a gradient that its caller holds beside the parameter."""
    param = torch.zeros(1, requires_grad=True)
    param.grad = torch.zeros(1)
    grad = param.grad
    try:
        return _references_to_grad(param)
    finally:
        del grad


_USUAL_REFERENCES = _usual_references()
