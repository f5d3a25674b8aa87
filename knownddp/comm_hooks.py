"""Communication hooks: the user's own way to combine a bucket over ranks, instead of the mean.

[Note: bucket numbers] Hooks such as PowerSGD keep state by ``bucket.index()``. So a number always means the same
parameters, in the same order and dtype: a bucket that was seen before keeps its number, another gets the next one. A
model that always uses all parameters sees 0 to n - 1, in launch order. Numbers start anew once, after the first
synchronising backward, when buckets are made in the order in which gradients became ready.
"""

from __future__ import annotations

import contextlib
import functools
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from . import _torch_private as private
from .comm import Collectives
from .errors import ArgumentError, CommHookError, CommHookTypeError
from .flat import sliced
from .plan import BucketSpec
from .specs import ParamSpec
from .works import Work


class GradBucket:
    """What a hook is handed: the gradients of one bucket on this rank. The interface of ``dist.GradBucket``."""

    __slots__ = ("_buffer", "_index", "_is_last", "_parameters", "_specs")

    def __init__(
        self, index: int, buffer: Tensor, specs: Sequence[ParamSpec], parameters: Sequence[Tensor], *, is_last: bool
    ) -> None:
        self._index = index
        self._buffer = buffer
        self._specs = specs
        self._parameters = parameters
        self._is_last = is_last

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Hooks may be annotated, and checked, as taking torch's class, which Python cannot make or subclass."""
        return private.GRAD_BUCKET

    def index(self) -> int:
        """Which bucket this is; see [Note: bucket numbers]."""
        return self._index

    def buffer(self) -> Tensor:
        """All gradients, undivided, as one contiguous 1-D tensor; of a sparse bucket the sparse gradient itself."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Views of the buffer, one a parameter, in its shape and strides."""
        return [self._buffer] if self._buffer.is_sparse else sliced(self._buffer, self._specs)

    def parameters(self) -> list[Tensor]:
        """The parameters themselves, in the order of ``gradients``."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Whether this is the last bucket of the round."""
        return self._is_last

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the buffer by one of the same number of elements, of any dtype.

        Raises:
            CommHookError: it has another number of elements, or gaps.
        """
        if buffer.numel() != self._buffer.numel() or (not buffer.is_sparse and not buffer.is_contiguous()):
            raise CommHookError(
                f"set_buffer takes a contiguous tensor of {self._buffer.numel()} elements, got one of "
                f"{list(buffer.shape)} with strides {list(buffer.stride()) if not buffer.is_sparse else 'none'}."
            )
        self._buffer = buffer


Hook = Callable[[Any, Any], Any]


class HookedWork:
    """Handle of a bucket that a hook combines; the means are what the hook's future holds."""

    def __init__(self, name: str, future: Any, flat: Tensor, specs: Sequence[ParamSpec]) -> None:
        self._name = name
        self._future = future
        self._flat = flat
        self._specs = specs
        self._means: list[Tensor] | None = None

    def wait(self) -> None:
        """Wait for the future.

        Raises:
            CommHookError: it does not hold one tensor with as many elements as the buffer.
        """
        if self._means is not None:
            return
        result = self._future.wait()
        if not isinstance(result, Tensor):
            raise CommHookError(
                f"the communication hook {self._name} must return a future of one tensor, got one of "
                f"{type(result).__name__}.\nFix: end it with .then(lambda future: future.value()[0]) or the like."
            )
        if self._flat.is_complex() and not result.is_complex() and result.shape[-1:] == (2,):
            result = torch.view_as_complex(result.contiguous())  # as the future of an all-reduce holds it
        is_alike = result.shape == self._flat.shape if self._flat.is_sparse else result.numel() == self._flat.numel()
        if not is_alike or result.is_complex() != self._flat.is_complex():
            raise CommHookError(
                f"the communication hook {self._name} returned {result.numel()} elements for a bucket of "
                f"{self._flat.numel()} ({list(result.shape)} {result.dtype} for {self._flat.dtype})."
            )
        if self._flat.is_sparse:
            self._means = [result if result is self._flat else result.detach().clone()]
        else:
            result = result.detach()
            self._means = sliced(self._as_own(result), self._specs)

    def _as_own(self, result: Tensor) -> Tensor:
        """``result`` as a contiguous 1-D tensor that nobody else writes to: a hook may go on using its own."""
        if result.is_set_to(self._flat) and not result.is_conj() and not result.is_neg():
            return result
        return torch.empty_like(self._flat, dtype=result.dtype).copy_(result.reshape(-1))

    def is_completed(self) -> bool:
        return bool(self._future.done())

    def get_future(self) -> Any:
        return self._future

    def means(self) -> list[Tensor]:
        """What every rank has to take over, one a parameter; after ``wait``."""
        assert self._means is not None
        return self._means


class CommHook:
    """A registered hook.

    Args:
        state: passed to ``hook``.
        hook: called with ``state`` and a ``GradBucket``; returns a future of the combined buffer. Nothing is divided
            for it.
        is_own: it communicates on the wrapper's own groups alone, where it cannot meet other traffic.
    """

    def __init__(self, state: object, hook: Hook, *, name: str, is_own: bool = False) -> None:
        self._state = state
        self._hook = hook
        self.name = name
        self.is_own = is_own
        self._numbers: dict[tuple[object, ...], int] = {}
        self._has_restarted = False

    def run(
        self,
        bucket: BucketSpec,
        flat: Tensor,
        specs: Sequence[ParamSpec],
        parameters: Sequence[Tensor],
        *,
        is_last: bool,
        is_learnt: bool,
    ) -> HookedWork:
        """Hand ``flat`` to the hook.

        ``is_learnt``: the plan's; with the first one that is, numbers start anew.
        """
        if is_learnt and not self._has_restarted:
            self._has_restarted = True
            self._numbers.clear()
        layout = (bucket.param_indices, flat.dtype, tuple(spec.shape for spec in specs))
        number = self._numbers.setdefault(layout, len(self._numbers))
        future = self._hook(self._state, GradBucket(number, flat, specs, parameters, is_last=is_last))
        if not isinstance(future, private.ANY_FUTURE):
            raise CommHookError(
                f"the communication hook {self.name} must return a torch.futures.Future, got {type(future).__name__}."
            )
        return HookedWork(self.name, future, flat, specs)


def check_hook(hook: object) -> None:
    """Refuse what cannot be a communication hook.

    Raises:
        CommHookTypeError: it cannot be called.
        ArgumentError: its annotations say that it takes or returns something else.
    """
    if not callable(hook):
        raise CommHookTypeError(f"Communication hook must be callable. Got {type(hook).__name__}.")
    annotations: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # an object without readable annotations, or names that cannot be resolved
        annotations = typing.get_type_hints(hook)
    bucket = annotations.get("bucket", GradBucket)
    if bucket not in (private.GRAD_BUCKET, GradBucket):
        raise ArgumentError(f"Communication hook: bucket annotation should be dist.GradBucket. Got {bucket}.")
    returned = annotations.get("return", Future[Tensor])
    if returned != Future[Tensor]:
        raise ArgumentError(
            f"Communication hook: return annotation should be torch.futures.Future[torch.Tensor]. Got {returned}."
        )


def name_of(hook: object) -> str:
    """As DistributedDataParallel's logging data calls it."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__qualname__", None) or type(hook).__qualname__


def builtin_hook(comm: Collectives, kind: object) -> CommHook:
    """The mean, on the wrapper's own groups: in full, or rounded to float16 on the wire.

    Raises:
        CommHookTypeError: there is no such hook.
    Source: torch/csrc/distributed/c10d/default_comm_hooks.cpp.
    """
    known = {private.BuiltinHook.ALLREDUCE: _allreduce, private.BuiltinHook.FP16_COMPRESS: _fp16_compress}
    if kind not in known:
        raise CommHookTypeError(f"a built-in communication hook is one of dist.BuiltinCommHookType, got {kind!r}.")
    return CommHook(comm, known[kind], name=str(kind), is_own=True)


def _allreduce(comm: Collectives, bucket: GradBucket) -> Any:
    share = bucket.buffer()
    share = share / comm.world_size if share.is_sparse else share.div_(comm.world_size)
    return sum_future(comm, share.coalesce() if share.is_sparse else share)


def _fp16_compress(comm: Collectives, bucket: GradBucket) -> Any:
    flat = bucket.buffer()
    if not flat.is_floating_point() or flat.is_sparse:
        return _allreduce(comm, bucket)
    half = flat.to(torch.float16).div_(comm.world_size)
    return sum_future(comm, half).then(lambda future: flat.copy_(future.wait()))


def sum_future(comm: Collectives, tensor: Tensor) -> Any:
    """A future of ``tensor`` summed over ranks, in place and undivided."""
    work: Work = comm.all_reduce_sum(tensor)

    def result(_: object, held: Work = work) -> Tensor:  # a backend may end a collective whose handle is gone
        return tensor

    return work.get_future().then(result)
