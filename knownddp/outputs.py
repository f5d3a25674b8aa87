"""Finding the tensors in what a module returns, and moving what it is given."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any, cast

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


def to_device(value: Any, device: torch.device) -> Any:
    """``value`` with every tensor in it on ``device``; structure and types stay, other objects pass by reference."""
    if isinstance(value, (Tensor, nn.utils.rnn.PackedSequence)):
        return cast(Tensor, value).to(device, non_blocking=True)
    if isinstance(value, tuple):
        moved = [to_device(one, device) for one in value]
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    if isinstance(value, list):
        return type(value)(to_device(one, device) for one in value)
    if isinstance(value, dict):
        moved_dict = copy.copy(value)  # keeps what a subclass has beside its items
        moved_dict.update((key, to_device(one, device)) for key, one in value.items())
        return moved_dict
    return value
