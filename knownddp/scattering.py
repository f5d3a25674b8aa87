"""Splitting inputs over replicas, and joining what the replicas return.

Both look into tuples, named tuples, lists, dictionaries and dataclasses. Packed sequences are split and joined by whole
sequences, in the order in which they were packed.
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .errors import ReplicaError
from .outputs import may_fly
from .structures import contents_of, leaves_of, parts_of, rebuilt

Span = tuple[int, int]  # from, to: rows of a batch


class _SideStreams(threading.local):
    """One a device, since each stream has a memory pool of its own; and a thread: who enters one writes to it."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}

    def of(self, device: torch.device) -> torch.Stream:
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        return self._streams[device]


_side_streams = _SideStreams()

PADDING_HINT = (
    "Why: each replica sees a part of the batch only; pad_packed_sequence, say, pads to the longest sequence there.\n"
    "Fix: make outputs of one size: pad_packed_sequence(..., total_length=n), where n is the length in the whole batch "
    "(the padded input's size), or pad before returning. The h_n of an RNN has the batch in dimension 1: transpose it."
)


# -- inputs


def scatter(
    args: tuple[Any, ...], kwargs: dict[str, Any], devices: Sequence[torch.device], dim: int
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of each replica, on its device. There may be fewer replicas than devices.

    Tensors are split along ``dim`` as ``torch.chunk`` does; those without that dimension, or with size 1 there where
    others have more, go to every replica, as do all other objects (by reference). The first replica's tensors are views
    where they lie on its device already; those of the others are copies.

    Raises:
        ReplicaError: tensors disagree about the number of rows, or one that must be split is sparse or nested.
    """
    if not args and not kwargs:
        return [(args, kwargs)]
    leaves = dict(itertools.chain(leaves_of(args, "args"), leaves_of(kwargs, "kwargs")))
    rows = {path: size for path, leaf in leaves.items() if (size := _rows(leaf, dim)) is not None}
    spans = _spans(rows, len(devices), dim)
    if len(spans) > 1:
        _check_layouts({path: leaves[path] for path, size in rows.items() if size != 1})
    given = []
    for replica, (span, device) in enumerate(zip(spans, devices, strict=False)):
        own_args = tuple(_piece(arg, span, device, dim, copies=replica > 0) for arg in args)
        own_kwargs = {name: _piece(arg, span, device, dim, copies=replica > 0) for name, arg in kwargs.items()}
        given.append((own_args, own_kwargs))
    return given


def _rows(leaf: Any, dim: int) -> int | None:
    if isinstance(leaf, PackedSequence):
        return int(leaf.batch_sizes[0])
    if isinstance(leaf, Tensor) and -leaf.dim() <= dim < leaf.dim():
        return leaf.size(dim)  # not ``shape``: a nested tensor knows the size of its first dimension alone
    return None


def _spans(rows: dict[str, int], num_devices: int, dim: int) -> list[Span | None]:
    """The rows of each replica; None: nothing is split."""
    sizes = set(rows.values())
    if len(sizes - {1}) > 1:
        found = ", ".join(f"{path} has {size}" for path, size in rows.items() if size != 1)
        raise ReplicaError(
            f"inputs have different numbers of rows along dimension {dim}, so they cannot be split alike over "
            f"{num_devices} replicas: {found}.\n"
            "Fix: give each tensor the batch in that dimension (or size 1 there: such a tensor goes to every replica "
            "as it is), or keep what is not part of the batch in the module, as a buffer."
        )
    if not sizes:
        return [None] * num_devices
    total = max(sizes - {1}, default=1)
    step = max(1, -(-total // num_devices))
    return [(start, min(start + step, total)) for start in range(0, max(1, total), step)]


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _check_layouts(leaves: dict[str, Any]) -> None:
    for path, leaf in leaves.items():
        if isinstance(leaf, Tensor) and not _is_plain(leaf):
            raise ReplicaError(
                f"{path} cannot be split over replicas: it is sparse or nested ({leaf.layout}).\n"
                "Fix: give it dense or padded, or as a packed sequence."
            )


def _piece(value: Any, span: Span | None, device: torch.device, dim: int, *, copies: bool) -> Any:
    """One replica's part of ``value``; containers without tensors are passed as they are."""
    if isinstance(value, (Tensor, PackedSequence)):
        size = _rows(value, dim)
        is_whole = span is None or size is None or span == (0, size) or size == 1
        if isinstance(value, Tensor):
            part = value if is_whole or span is None else value.narrow(dim, span[0], span[1] - span[0])
            return moved(part, device, copies=copies)
        if is_whole or span is None:
            return _moved_sequences(value, device, copies=copies)
        return _moved_sequences(_pick(value, *span), device, copies=False)  # it is a copy already
    parts = contents_of(value) or ()
    pieces = [_piece(part, span, device, dim, copies=copies) for part in parts]
    return value if all(map(operator.is_, pieces, parts)) else rebuilt(value, pieces)


def moved(tensor: Tensor, device: torch.device, *, copies: bool = False) -> Tensor:
    """``tensor`` on ``device``, without waiting where that is safe. ``copies``: a copy even if it is there already.

    From the CPU to an accelerator it travels on a side stream. ``tensor`` may be overwritten as soon as this returns.
    """
    accelerator = torch.accelerator.current_accelerator() if tensor.device.type == "cpu" != device.type else None
    # A sparse tensor consists of several, for which nobody could answer on the side stream.
    if accelerator is None or accelerator.type != device.type or tensor.layout is not torch.strided:
        return tensor.to(device, non_blocking=may_fly(tensor, device), copy=copies)
    side = _side_streams.of(device)
    with side:
        arrived = tensor.to(device, non_blocking=may_fly(tensor, device))  # where it waits, it waits for this stream
    current = torch.accelerator.current_stream(device)
    current.wait_stream(side)
    arrived.record_stream(current)
    return arrived


def _moved_sequences(packed: PackedSequence, device: torch.device, *, copies: bool) -> PackedSequence:
    """``moved`` for a packed sequence, whose sizes stay on the CPU."""
    data = moved(packed.data, device, copies=copies)
    sizes = moved(packed.batch_sizes, packed.batch_sizes.device, copies=copies)
    indices = (packed.sorted_indices, packed.unsorted_indices)
    order, inverse = (part if part is None else moved(part, device, copies=copies) for part in indices)
    stays = all(map(operator.is_, (data, sizes, order, inverse), packed))
    return packed if stays else PackedSequence(data, sizes, order, inverse)


def _pick(packed: PackedSequence, start: int, end: int) -> PackedSequence:
    """The sequences ``start`` to ``end``, in the order in which they were packed."""
    sizes, places = packed.batch_sizes, _places(packed)[start:end]
    chosen = places.sort().values  # longest first, as all are
    present = chosen < sizes.unsqueeze(1)  # (time, sequence)
    rows = ((sizes.cumsum(0) - sizes).unsqueeze(1) + chosen)[present]
    batch_sizes = present.sum(1)
    data = packed.data.index_select(0, rows.to(packed.data.device))
    order = None if packed.sorted_indices is None else _on(places.argsort(), data)
    return PackedSequence(data, batch_sizes[batch_sizes > 0], order, _inverse(order))


def _places(packed: PackedSequence) -> Tensor:
    """Where each sequence stands among the sorted ones, on the CPU."""
    if packed.unsorted_indices is None:
        return torch.arange(int(packed.batch_sizes[0]), device="cpu")
    return packed.unsorted_indices.cpu()


def _inverse(order: Tensor | None) -> Tensor | None:
    return None if order is None else order.argsort()


def _on(indices: Tensor, data: Tensor) -> Tensor:
    return indices.to(data.device)


# -- outputs


def gather(outputs: Sequence[Any], device: torch.device, dim: int, path: str = "output") -> Any:
    """One output in place of those of the replicas, on ``device``.

    Tensors are joined along ``dim``, those without dimensions (losses) into a vector, one element a replica. Anything
    else must be equal on all replicas.

    Raises:
        ReplicaError: outputs cannot be joined; says which, where and how they differ.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        _check_kinds(outputs, Tensor, path)
        return _joined(outputs, device, dim, path)
    _check_kinds(outputs, type(first), path)
    if isinstance(first, PackedSequence):
        return _joined_sequences(outputs, device, dim, path)
    parts = [parts_of(output) for output in outputs]
    if parts[0] is None:
        return _equal(outputs, path)
    names = [[suffix for suffix, _ in held or ()] for held in parts]
    for replica, held in enumerate(names):
        if sorted(held) != sorted(names[0]):
            raise ReplicaError(
                f"{path} holds {len(held)} parts on replica {replica}, {held}, and {len(names[0])} on replica 0, "
                f"{names[0]}: they cannot be joined.\nFix: return the same structure from every replica."
            )
    by_name = [dict(held or ()) for held in parts]
    columns = [gather([held[suffix] for held in by_name], device, dim, path + suffix) for suffix in names[0]]
    return rebuilt(first, columns)


def _check_kinds(outputs: Sequence[Any], kind: type, path: str) -> None:
    for replica, output in enumerate(outputs):
        if not isinstance(output, kind) if kind is Tensor else type(output) is not kind:
            raise ReplicaError(
                f"{path} is of type {type(output).__name__} on replica {replica} and {type(outputs[0]).__name__} on "
                "replica 0: they cannot be joined.\nFix: return the same structure from every replica."
            )


def _joined(outputs: Sequence[Tensor], device: torch.device, dim: int, path: str) -> Tensor:
    if not all(map(_is_plain, outputs)):
        raise ReplicaError(
            f"{path} cannot be joined: it is sparse or nested ({outputs[0].layout}).\n"
            "Fix: return it dense or padded, or as a packed sequence."
        )
    shapes = [tuple(output.shape) for output in outputs]
    first = shapes[0]
    for replica, shape in enumerate(shapes):
        if len(shape) != len(first):
            raise ReplicaError(
                f"{path} has {len(shape)} dimensions on replica {replica}, {list(shape)}, and {len(first)} on "
                f"replica 0, {list(first)}: they cannot be joined."
            )
        if first and not -len(first) <= dim < len(first):
            raise ReplicaError(
                f"{path} has no dimension {dim} to be joined along: its shape is {list(first)}.\n"
                "Fix: return tensors that have the batch in that dimension, or none (a loss)."
            )
        for d in range(len(first)):
            if d != dim % len(first) and shape[d] != first[d]:
                raise ReplicaError(
                    f"{path} has size {shape[d]} in dimension {d} on replica {replica}, and {first[d]} on replica 0: "
                    f"replicas' outputs are joined along dimension {dim} and must agree in all others.\n{PADDING_HINT}"
                )
    there = [moved(output, device) for output in outputs]
    return torch.cat(there, dim) if first else torch.stack(there)


def _joined_sequences(outputs: Sequence[PackedSequence], device: torch.device, dim: int, path: str) -> PackedSequence:
    data = _joined([output.data for output in outputs], device, 0, f"{path}.data")
    lengths, places, offsets, start = [], [], [], 0
    longest = max(len(output.batch_sizes) for output in outputs)
    for output in outputs:
        sizes = nn.functional.pad(output.batch_sizes, (0, longest - len(output.batch_sizes)))
        places.append(_places(output))
        lengths.append((places[-1] < sizes.unsqueeze(1)).sum(0))
        offsets.append((start + sizes.cumsum(0) - sizes).unsqueeze(1) + places[-1])
        start += output.data.shape[0]
    length, row = torch.cat(lengths), torch.cat(offsets, 1)  # (sequence,) and (time, sequence)
    order = length.argsort(descending=True, stable=True)
    present = torch.arange(longest, device="cpu").unsqueeze(1) < length[order]
    data = data.index_select(0, row[:, order][present].to(data.device))
    is_sorted = all(output.sorted_indices is None for output in outputs) and order.equal(
        torch.arange(len(order), device="cpu")
    )
    kept = None if is_sorted else _on(order, data)
    return PackedSequence(data, present.sum(1), kept, _inverse(kept))


def _equal(outputs: Sequence[Any], path: str) -> Any:
    first = outputs[0]
    for replica, output in enumerate(outputs):
        if not _is_equal(output, first):
            raise ReplicaError(
                f"{path} is no tensor and differs between replicas: {output!r:.80} on replica {replica}, {first!r:.80} "
                "on replica 0.\nFix: return tensors, alone or in tuples, lists, dictionaries or dataclasses; a number "
                "as a tensor without dimensions."
            )
    return first


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two objects of one type are equal; a number that is none (NaN) equals another."""
    if one is other:
        return True
    try:
        if isinstance(one, np.ndarray):
            return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
        if isinstance(one, (float, complex, np.generic)) and one != one:
            return bool(other != other)
        return bool(one == other)
    except Exception:  # whatever an object's own comparison may raise
        return False
