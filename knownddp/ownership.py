"""Whose memory a gradient is: when it may be written in place."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ._torch_private import storage_users, tensor_holders
from .flat import is_dense, with_strides_of
from .specs import ParamSpec

# Whether reference counts tell who else refers to a tensor, and Python runs one thread at a time: not so in builds
# without the global lock. Since torch 2.13 the count of a tensor's Python object includes owners in C++.
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
        and (before.is_contiguous() or is_dense(before.shape, before.stride()))
    )


def put_means(params: Sequence[Tensor | None], before: Sequence[Tensor | None], means: Sequence[Tensor]) -> None:
    """Each mean becomes ``.grad``, in the tensor that was there ``before``, for whoever holds on to it; if there was
    none, or one that cannot take it, in the parameter's own strides.
    """
    written: list[Tensor] = []
    sources: list[Tensor] = []
    for param, old, mean in zip(params, before, means, strict=True):
        if param is not None and old is not None and can_take(old, mean, param):
            written.append(old)
            sources.append(mean)
            param.grad = old
        elif param is not None:
            param.grad = with_strides_of(param, mean)
    if written:
        torch._foreach_copy_(written, sources)


def sharing(grads: Sequence[Tensor | None]) -> frozenset[int]:
    """Positions of those whose memory begins where that of another does: written in place, one sum would be lost."""
    with contextlib.suppress(RuntimeError):  # of one that is not strided
        addresses = [g.data_ptr() for g in grads if g is not None]
        if len(set(addresses)) == len(addresses):  # the usual case
            return frozenset()
    starts = [g.data_ptr() if g is not None and g.layout is torch.strided else 0 for g in grads]
    counts = Counter(starts)
    return frozenset(i for i, start in enumerate(starts) if start and counts[start] > 1)


def may_be_overwritten(param: Tensor, spec: ParamSpec, num_users: int) -> bool:
    """Whether ``param.grad`` is laid out as ``spec`` says and referred to by nobody else, the caller included.

    ``num_users``: how many tensors lie in its memory if nobody else has one: 1, or what ``users_in_hook`` says.
    """
    grad = param.grad
    return (
        COUNTS_TELL
        and type(grad) is Tensor
        and grad.layout is torch.strided
        and grad.dtype is spec.key.dtype
        and grad.shape == spec.shape
        and grad.stride() == spec.strides
        and not (grad.requires_grad or grad.is_conj() or grad.is_neg() or grad.is_inference())
        and _references_to_grad(param) == _USUAL_REFERENCES
        and tensor_holders(grad) == 2  # the parameter, and Python
        and storage_users(grad) == num_users
        and grad.untyped_storage().resizable()  # else it is not torch's own: who else has an array, say, nobody knows
    )


def users_in_hook(param: Tensor, arrived: Sequence[Tensor | None]) -> int:
    """Asked in the hook of a parameter's node, which was given ``arrived``: how many tensors the engine and the
    parameter have in the memory of ``param.grad``; 0 if somebody else holds the engine's own.

    What arrived becomes ``.grad`` as it is, or is copied; and the engine lets go of it only after the hooks.
    """
    grad, (own,) = param.grad, arrived
    if grad is None or own is None or not grad.layout is own.layout is torch.strided:
        return 0
    del own
    if references_to_arrived(arrived) != usual_references_to_arrived():
        return 0
    arrived_at, is_at = (tensor.untyped_storage().data_ptr() for tensor in (arrived[0], grad) if tensor is not None)
    return 2 if arrived_at == is_at else 1


def references_to_arrived(arrived: Sequence[Tensor | None]) -> int:
    """Called in the hook of a node."""
    return sys.getrefcount(arrived[0])


@functools.cache
def usual_references_to_arrived() -> int:
    """As ``references_to_arrived`` finds them for what nobody but the engine holds. Not to be called in a backward."""
    found: list[int] = []
    with torch.inference_mode(False), torch.enable_grad():
        param = torch.zeros(1, requires_grad=True)
        node = torch.autograd.graph.get_gradient_edge(param).node
        node.register_hook(lambda _, arrived: found.append(references_to_arrived(arrived)))
        (param * 1).sum().backward()  # type: ignore[no-untyped-call]
    return found[0]


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
