"""Flat buckets: gradients of any strides packed into one contiguous tensor, in one order on all ranks.

[Note: logical order] Element (i, j) of a gradient must be summed with element (i, j) of its peers. Filled in memory
order, element (0, 1) of a row-major gradient would meet (1, 0) of a transposed one; nothing raises and the loss still
falls. So every parameter has one canonical layout, the same on all ranks, and copies go by index.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Final

import torch
from torch import Tensor

from ._torch_private import looks_of_plain, storage_users, storage_view
from .specs import BucketKey, ParamSpec

ONE_BY_ONE_BYTES: Final = 16 * 2**10  # a parameter, on average, from which the CPU divides gradients as it copies them


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor."""
    strides, step = [0] * len(shape), 1
    for d in reversed(range(len(shape))):
        strides[d] = step
        step *= max(shape[d], 1)
    return tuple(strides)


def canonical_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """``strides`` where they are dense (each element has a place of its own, without gaps), else row-major.

    Dimensions of size 1 have no meaningful stride, so layouts that differ only there give the same answer.
    """
    if 0 in shape:
        return row_major(shape)
    inner_first = sorted((d for d in range(len(shape)) if shape[d] != 1), key=lambda d: (strides[d], -d))
    dense, step = [1] * len(shape), 1
    for d in inner_first:
        if strides[d] != step:
            return row_major(shape)
        dense[d] = step
        step *= shape[d]
    is_row_major = inner_first == sorted(inner_first, reverse=True)
    return row_major(shape) if is_row_major else tuple(dense)


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether each element has a place of its own, without gaps (dimensions of size 1 do not matter)."""
    canonical = canonical_strides(shape, strides)
    return 0 in shape or all(n == 1 or s == c for n, s, c in zip(shape, strides, canonical, strict=True))


def sliced(flat: Tensor, specs: Sequence[ParamSpec]) -> list[Tensor]:
    """One tensor a parameter over the storage of ``flat`` (1-D contiguous), in its shape and canonical strides.

    They are not views to autograd.
    """
    views: list[Tensor] = []
    offset = 0
    for spec in specs:
        views.append(storage_view(flat, offset, spec.shape, spec.strides))
        offset += spec.numel
    return views


class FlatBucket:
    """The gradients of one bucket in one contiguous tensor.

    Shapes: ``flat`` is 1-D with the elements of all parameters, in the dtype they travel in; ``views`` are ``sliced``
    from it.

    Args:
        specs: of the parameters, in order.
        memory: 1-D, of at least as many elements; None: fresh memory.
    """

    __slots__ = (
        *("_addresses", "_num_users", "_references", "_views_look_alike", "_writes_one_by_one"),
        *("flat", "memory", "views", "written"),
    )

    def __init__(self, specs: Sequence[ParamSpec], memory: Tensor | None = None) -> None:
        key: BucketKey = specs[0].key
        numel = sum(spec.numel for spec in specs)
        self.memory = torch.empty(numel, dtype=key.dtype, device=key.device) if memory is None else memory
        self.flat = storage_view(self.memory, 0, (numel,), (1,))
        self.views = sliced(self.flat, specs)
        is_on_cpu = key.device.type == "cpu"
        self._writes_one_by_one = is_on_cpu and numel * key.dtype.itemsize >= ONE_BY_ONE_BYTES * len(specs)
        self.written: set[int] = set()  # positions of gradients that were written already, by ``write``
        if is_on_cpu:  # elsewhere it is not used again
            self._references = self._count_references()
            self._num_users = 2 + len(specs)
            self._views_look_alike = looks_of_plain(self.views)
            self._addresses = list(map(Tensor.data_ptr, self.views))

    def _count_references(self) -> int:
        return sum(map(sys.getrefcount, self.views))

    def is_free(self) -> bool:
        """Whether nobody else refers to its memory, no ``.grad`` and no alias of one, and all is as it was made; to be
        asked on the CPU alone.

        Views have been users' gradients, who may have moved them (``p.grad.data = ...``, into shared memory), laid them
        out anew (``t_()``), given them a history, or written something down on them.

        Those who refer to ``flat`` itself do not count: a backend's thread may do so for a moment longer than a
        collective takes. (One that still has it as bytes does; then fresh memory is taken.)
        """
        is_left_alone = self._count_references() == self._references and storage_users(self.memory) == self._num_users
        return (
            is_left_alone
            and self._views_look_alike(*self.views)
            and list(map(Tensor.data_ptr, self.views)) == self._addresses
            and not any(map(_notes_on, self.views))
        )

    def write(self, position: int, grad: Tensor, old: Tensor | None, divisor: int) -> None:
        """``(old + grad) / divisor`` of one parameter ahead of the others, strided. Another gradient of it is added,
        rounded by itself.
        """
        view = self.views[position]
        if position in self.written:
            share = torch.empty_like(view)
            _write_share(share, grad, divisor)
            view.add_(share)
            return
        _write_share(view, grad if old is None else _sum(dense(old), dense(grad), view), divisor)
        self.written.add(position)

    def misses(self, grads: Sequence[Tensor | None]) -> bool:
        """Whether one is None that was not written."""
        if not self.written:
            return any(map(operator.is_, grads, repeat(None)))
        return any(grad is None and position not in self.written for position, grad in enumerate(grads))

    def copy(self, grads: Sequence[Tensor | None], divisor: int) -> list[int]:
        """``fill`` where nothing was held back, and every gradient that was not written already is there, strided and
        of the dtype of ``flat``.

        Returns:
            Positions of gradients that have not their parameter's shape; if there are any, what was written is of no
            use.

        Raises:
            RuntimeError: one is not strided, or too large.
        """
        if not (self.written or self._writes_one_by_one):  # few bytes each: calls are what costs
            torch._foreach_copy_(self.views, grads)  # type: ignore[arg-type]
            self._divide(divisor)
            # One that is too large cannot be copied, one that is too small may have been broadcast. Asked now, as they
            # have been looked at.
            is_right = sum(map(Tensor.numel, grads)) == self.flat.numel()  # type: ignore[arg-type]
            return [] if is_right else self._misshapen(grads)
        misshapen = self._misshapen(grads)
        if not misshapen and self.written:
            self.fill(grads, [None] * len(grads), divisor)
        elif not misshapen:  # many bytes each: passes over memory are
            for view, grad in zip(self.views, grads, strict=True):
                _write_share(view, grad, divisor)  # type: ignore[arg-type]
        return misshapen

    def _misshapen(self, grads: Sequence[Tensor | None]) -> list[int]:
        pairs = enumerate(zip(self.views, grads, strict=True))
        return [position for position, (view, grad) in pairs if grad is not None and grad.shape != view.shape]

    def fill(self, grads: Sequence[Tensor | None], held_back: Sequence[Tensor | None], divisor: int) -> None:
        """Write ``(held_back + grad) / divisor`` for each parameter; what is None counts as zero. What was written
        already, by ``write``, stays as it is.

        Shapes: those of the parameters, any strides, any layout.
        Numerics: sum and quotient are formed, and rounded, in a dtype that holds both that of the gradient and that of
        ``flat``, then rounded to the latter; before anything is summed over ranks, so that float16 does not overflow on
        the way.
        """
        views, sources, added_to, addends = [], [], [], []  # many small ones at once
        for position, (view, grad, old) in enumerate(zip(self.views, grads, held_back, strict=True)):
            if position in self.written:
                continue
            one = grad if old is None else old
            is_small = not self._writes_one_by_one and (one is None or one.dtype is view.dtype)
            if one is None:
                view.zero_()
            elif grad is None or old is None:
                if is_small:
                    views.append(view)
                    sources.append(dense(one))
                else:
                    _write_share(view, dense(one), divisor)
            elif is_small and grad.dtype is view.dtype:
                views.append(view)
                sources.append(dense(old))
                added_to.append(view)
                addends.append(dense(grad))
            else:
                _write_share(view, _sum(dense(old), dense(grad), view), divisor)
        if views:
            torch._foreach_copy_(views, sources)
        if added_to:
            torch._foreach_add_(added_to, addends)
        if len(views) == len(self.views):
            self._divide(divisor)
        elif views and divisor != 1:
            torch._foreach_div_(views, divisor)

    def _divide(self, divisor: int) -> None:
        if divisor != 1:
            self.flat.div_(divisor)


def _sum(old: Tensor, grad: Tensor, view: Tensor) -> Tensor:
    """In a dtype that holds all three; in ``view`` if that is its own."""
    if old.dtype is grad.dtype is view.dtype:
        return torch.add(old, grad, out=view)
    wide = torch.promote_types(torch.promote_types(old.dtype, grad.dtype), view.dtype)
    return view.copy_(old).add_(grad) if wide is view.dtype else old.to(wide) + grad


def _write_share(view: Tensor, grad: Tensor, divisor: int) -> None:
    """``grad`` may be ``view`` itself."""
    if divisor == 1:
        view.copy_(grad)
    elif grad.dtype is view.dtype:
        torch.div(grad, divisor, out=view)
    elif (wide := torch.promote_types(grad.dtype, view.dtype)) is view.dtype:
        view.copy_(grad).div_(divisor)
    else:
        torch.div(grad.to(wide), divisor, out=view)


_notes_on: Callable[[Tensor], dict[str, object]] = operator.attrgetter("__dict__")
_grad_of: Callable[[Tensor | None], Tensor | None] = operator.attrgetter("grad")


def grads_of(params: Sequence[Tensor | None]) -> list[Tensor | None]:
    """What stands in ``.grad``; of a parameter that was removed nothing does."""
    try:
        return list(map(_grad_of, params))
    except AttributeError:
        return [param.grad if param is not None else None for param in params]


def dense(grad: Tensor) -> Tensor:
    """``grad`` without its graph (``create_graph=True`` leaves one) and in strided layout."""
    grad = grad.detach() if grad.requires_grad else grad
    return grad if grad.layout is torch.strided else grad.to_dense()


@torch.no_grad()
def before_accumulation(total: Tensor, grad: Tensor) -> Tensor | None:
    """What stood in ``.grad`` before autograd made it ``total`` by adding ``grad``."""
    return None if torch.equal(dense(total), dense(grad)) else total - grad


def sparse_share(grad: Tensor | None, held_back: Tensor | None, spec: ParamSpec, divisor: int) -> Tensor:
    """This rank's share of a sparse gradient: ``(held_back + grad) / divisor``, coalesced.

    Shapes: ``spec.shape``; a rank without one contributes an empty sparse tensor with one sparse dimension.
    """
    total: Tensor | None = None
    for one in (held_back, grad):
        if one is not None:
            one = one.detach()
            one = one if one.is_sparse else one.to_sparse(1)
            one = one.to(spec.key.dtype)
            total = one if total is None else total + one
    if total is None:
        indices = torch.zeros(1, 0, dtype=torch.int64, device=spec.key.device)
        values = torch.zeros(0, *spec.shape[1:], dtype=spec.key.dtype, device=spec.key.device)
        total = torch.sparse_coo_tensor(indices, values, spec.shape, check_invariants=False)
    return (total / divisor).coalesce()


def with_strides_of(param: Tensor, mean: Tensor) -> Tensor:
    """``mean`` itself where it has the dtype and strides of ``param``, else a copy that has.

    Strides of a parameter that is not dense cannot be had; its gradient stays as it is.
    """
    mean = mean.to(param.dtype)
    if mean.layout is not torch.strided or mean.stride() == param.stride():
        return mean
    if not is_dense(param.shape, param.stride()):
        return mean
    return torch.empty_strided(mean.shape, param.stride(), dtype=mean.dtype, device=mean.device).copy_(mean)
