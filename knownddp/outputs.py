"""Finding the tensors in what a module returns, and converting those in what it is given."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# Larger structures exist, but then something in them is a graph of objects rather than an output.
MAX_DEPTH = 12
MAX_OBJECTS = 10_000

_PLAIN = (
    *(str, bytes, int, float, complex, bool, type(None), Enum, PurePath),
    *(torch.dtype, torch.device, torch.Size, np.ndarray, np.generic),
)


def find_tensors(output: object) -> tuple[list[Tensor], bool]:
    """The tensors in ``output``, and whether something in it could not be looked into.

    Looks into mappings, sequences, sets, dataclasses and the attributes of other objects; not into modules, functions
    or classes.
    """
    tensors: list[Tensor] = []
    is_hidden = False
    seen: dict[int, object] = {}  # by id; held, so that no id is taken over by another object meanwhile
    # Not a recursive closure: that would be a reference cycle, and keep outputs alive until the garbage collector runs.
    queue: deque[tuple[Any, int]] = deque([] if isinstance(output, _PLAIN) else [(output, 0)])
    while queue:
        value, depth = queue.popleft()
        if isinstance(value, Tensor):
            tensors.append(value)
        elif id(value) not in seen:
            seen[id(value)] = value
            try:
                inside = _contents(value) if depth < MAX_DEPTH and len(seen) <= MAX_OBJECTS else None
            except Exception:  # a lazy container or attribute that cannot be had now
                inside = None
            is_hidden |= inside is None
            queue.extend((one, depth + 1) for one in inside or () if not isinstance(one, _PLAIN))
    return tensors, is_hidden


def _contents(value: Any) -> list[Any] | None:
    """What ``value`` holds, as a container and in its attributes, or None if that cannot be told."""
    if isinstance(value, (nn.Module, type)) or callable(value):
        return None
    inside: list[Any] = list(getattr(value, "__dict__", {}).values())
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        inside += [getattr(value, name, None) for name in ((slots,) if isinstance(slots, str) else slots)]
    if isinstance(value, Mapping):
        return [*inside, *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [*inside, *value]
    return inside if inside or hasattr(value, "__dict__") else None


def may_fly(tensor: Tensor, device: torch.device) -> bool:
    """Whether a copy to ``device`` may still be on its way when the call that makes it returns (``non_blocking``).

    Not to the CPU, where it would be read before it is there. Nor from the CPU, where the caller may overwrite it
    meanwhile; except to CUDA and from memory that is not pinned, since values are then taken out of it at once.
    """
    if tensor.device.type != "cpu":
        return device.type != "cpu"
    return device.type == "cuda" and not torch.compiler.is_compiling() and not tensor.is_pinned()


def to_device(value: Any, device: torch.device) -> Any:
    """``value`` with every tensor in it on ``device``; structure and types stay, other objects pass by reference.

    What was given may be overwritten as soon as this returns.
    """

    def to(tensor: Any) -> Any:
        values = tensor if isinstance(tensor, Tensor) else tensor.data  # a packed sequence's
        return tensor.to(device, non_blocking=may_fly(values, device))

    return _convert(value, to, into_dataclasses=False)


def to_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Like ``to_device``, for a floating-point ``dtype``: tensors of integers and complex numbers stay as they are.

    Looks into dataclasses too, as DistributedDataParallel does here.
    """

    def to(tensor: Any) -> Any:
        values = tensor if isinstance(tensor, Tensor) else tensor.data  # a packed sequence's
        return tensor.to(dtype) if values.is_floating_point() else tensor

    return _convert(value, to, into_dataclasses=True)


def _convert(value: Any, to: Callable[[Any], Any], *, into_dataclasses: bool) -> Any:
    if isinstance(value, (Tensor, nn.utils.rnn.PackedSequence)):
        return to(value)
    convert = functools.partial(_convert, to=to, into_dataclasses=into_dataclasses)
    if isinstance(value, tuple):
        converted = [convert(one) for one in value]
        return type(value)(*converted) if hasattr(value, "_fields") else type(value)(converted)
    if isinstance(value, list):
        return type(value)(map(convert, value))
    if isinstance(value, dict):
        converted_dict = copy.copy(value)  # keeps what a subclass has beside its items
        converted_dict.update((key, convert(one)) for key, one in value.items())
        return converted_dict
    if into_dataclasses and dataclasses.is_dataclass(value) and not isinstance(value, type):
        converted_value = copy.copy(value)  # not ``replace``, which calls ``__init__`` again
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(converted_value, field.name, convert(getattr(value, field.name)))
        return converted_value
    return value
