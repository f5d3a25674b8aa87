"""Finding the tensors in what a module returns, and moving what it is given."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

# Larger structures exist, but then something in them is a graph of objects rather than an output.
MAX_DEPTH = 12
MAX_OBJECTS = 10_000

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)


def find_tensors(output: object) -> tuple[list[Tensor], bool]:
    """The tensors in ``output``, and whether something in it could not be looked into.

    Looks into mappings, sequences, sets, dataclasses and the attributes of other objects; not into modules, functions
    or classes.
    """
    tensors: list[Tensor] = []
    hidden = False
    seen: set[int] = set()
    # Not a recursive closure: that would be a reference cycle, and keep outputs alive until the garbage collector runs.
    queue: deque[tuple[Any, int]] = deque([(output, 0)])
    while queue:
        value, depth = queue.popleft()
        if isinstance(value, Tensor):
            tensors.append(value)
        elif not isinstance(value, _PLAIN) and id(value) not in seen:
            seen.add(id(value))
            inside = _contents(value) if depth < MAX_DEPTH and len(seen) <= MAX_OBJECTS else None
            hidden |= inside is None
            queue.extend((one, depth + 1) for one in inside or ())
    return tensors, hidden


def _contents(value: Any) -> Iterable[Any] | None:
    """What ``value`` holds, or None if that cannot be told."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, (nn.Module, type)) or callable(value):
        return None
    if dataclasses.is_dataclass(value):
        return [getattr(value, f.name, None) for f in dataclasses.fields(value)]
    return vars(value).values() if hasattr(value, "__dict__") else None


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
        return type(value)((key, to_device(one, device)) for key, one in value.items())
    return value
