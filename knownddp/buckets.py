"""The bucket assigner: which tensors travel together.

``assign`` is the rule, on sizes alone; ``compute_bucket_assignment_by_size`` is the rule under the name and with
the arguments of ``torch.distributed._compute_bucket_assignment_by_size``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

from .errors import ArgumentError

if TYPE_CHECKING:
    import torch

# What torch reports as the limit of a bucket that holds one sparse tensor.
NO_LIMIT = 0

Item = tuple[int, int, Hashable, bool]


class _Filling:
    """A bucket that is open: ``nbytes`` of at least ``limit`` close it."""

    __slots__ = ("indices", "limit", "nbytes")

    def __init__(self, limit: int) -> None:
        self.indices: list[int] = []
        self.nbytes = 0
        self.limit = limit


def assign(items: Iterable[Item], limits: Sequence[int]) -> list[tuple[list[int], int]]:
    """Group ``(index, nbytes, key, is_alone)`` items into ``(indices, limit in bytes)`` buckets.

    Items join, in order, the open bucket of their key. It closes when its bytes *reach* the limit in force for that
    key; each close moves that key on to its next limit, and the last limit repeats. One that ``is_alone``, a sparse
    one say, is a bucket of its own. Buckets come in the order in which they closed, then the leftovers in
    first-opened order.
    """
    last = len(limits) - 1
    done: list[tuple[list[int], int]] = []
    filling: dict[Hashable, _Filling] = {}
    stage: dict[Hashable, int] = {}
    for index, nbytes, key, is_alone in items:
        if is_alone:
            done.append(([index], NO_LIMIT))
            continue
        bucket = filling.get(key)
        if bucket is None:
            bucket = filling[key] = _Filling(limits[stage.setdefault(key, 0)])
        bucket.indices.append(index)
        bucket.nbytes += nbytes
        if bucket.nbytes >= bucket.limit:
            done.append((bucket.indices, bucket.limit))
            del filling[key]
            stage[key] = min(stage[key] + 1, last)
    done.extend((bucket.indices, bucket.limit) for bucket in filling.values())
    return done


def compute_bucket_assignment_by_size(
    tensors: Sequence[torch.Tensor],
    bucket_size_limits: Sequence[int],
    expect_sparse_gradient: Sequence[bool] | None = None,
    tensor_indices: Sequence[int] | None = None,
) -> tuple[list[list[int]], list[int]]:
    """Assign ``tensors`` to buckets by size, dtype and device.

    Args:
        tensors: dense tensors; only their size, dtype and device matter.
        bucket_size_limits: limits in bytes, one or more; each closed bucket of a (dtype, device) moves on to the next.
        expect_sparse_gradient: whether a tensor's gradient is sparse and needs a bucket of its own; one entry a tensor,
            looked up by the index that is reported for it.
        tensor_indices: the indices to report instead of 0, 1, ...; the order given is then kept.

    Returns:
        ``(buckets, limits)``: lists of indices, sorted by smallest index unless ``tensor_indices`` is given, and the
        limit in bytes that was in force for each (0 for a sparse one).

    Raises:
        ArgumentError: for no tensors, no limits, a sparse tensor, or lists whose lengths do not fit.

    Source: torch/csrc/distributed/c10d/reducer.cpp, ``compute_bucket_assignment_by_size``. It agrees with torch on
    every valid input, but for the order of leftover buckets under ``tensor_indices``, where torch iterates over a hash
    map and this is first-opened order.
    """
    sparse = [bool(x) for x in expect_sparse_gradient or ()]
    indices = list(tensor_indices or ())
    if not tensors:
        raise ArgumentError("compute_bucket_assignment_by_size needs at least one tensor")
    if not bucket_size_limits or min(bucket_size_limits) < 0:
        raise ArgumentError(f"bucket_size_limits must hold one or more sizes in bytes, got {list(bucket_size_limits)}")
    for name, given in (("expect_sparse_gradient", sparse), ("tensor_indices", indices)):
        if given and len(given) != len(tensors):
            raise ArgumentError(f"{name} has {len(given)} entries for {len(tensors)} tensors")
    if sparse and indices and not 0 <= min(indices) <= max(indices) < len(sparse):
        raise ArgumentError(f"expect_sparse_gradient is looked up by tensor index; {indices} do not all lie in it")
    for position, tensor in enumerate(tensors):
        if str(tensor.layout) != "torch.strided":
            raise ArgumentError(f"No support for sparse tensors. Tensor {position} has layout {tensor.layout}.")

    reported = indices or range(len(tensors))
    items = (
        (index, t.numel() * t.element_size(), (t.dtype, t.device), bool(sparse) and sparse[index])
        for index, t in zip(reported, tensors, strict=True)
    )
    assigned = assign(items, bucket_size_limits)
    if not indices:
        assigned.sort(key=lambda bucket: bucket[0][0])
    return [bucket for bucket, _ in assigned], [limit for _, limit in assigned]
