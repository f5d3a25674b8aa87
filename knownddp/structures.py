"""Containers that hold tensors: what is in them, and others of their kind with other contents."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence


def contents_of(value: Any) -> Collection[Any] | None:
    """What a container holds; None if ``value`` is not one.

    Containers are tuples, named tuples, lists, dictionaries and dataclasses; of these last attributes that are not
    fields count too.
    """
    if isinstance(value, (tuple, list)):
        return value
    if isinstance(value, MutableMapping):
        return value.values()
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, nn.Module)):
        return [getattr(value, name) for name in _attributes(value)]
    return None


def parts_of(value: Any) -> list[tuple[str, Any]] | None:
    """The contents of a container, each with how it is reached."""
    contents = contents_of(value)
    if contents is None:
        return None
    if isinstance(value, MutableMapping):
        names = [f'["{key}"]' if isinstance(key, str) else f"[{key!r}]" for key in value]
    elif isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        names = [f"[{i}]" for i in range(len(value))]
    else:
        names = [f".{name}" for name in getattr(value, "_fields", None) or _attributes(value)]
    return list(zip(names, contents, strict=True))


def rebuilt(value: Any, parts: Sequence[Any]) -> Any:
    """A container like ``value`` that holds ``parts``, in the order of ``contents_of``.

    No constructor of a class of the user's is called: it may take other arguments.
    """
    if isinstance(value, tuple):
        return _rebuilt_tuple(value, parts)
    if isinstance(value, MutableMapping) and not isinstance(value, (dict, UserDict)):
        # A shallow copy may share with the original where it keeps its items. Parts are new: they are not copied.
        made = copy.deepcopy(value, {id(old): new for old, new in zip(value.values(), parts, strict=True)})
    else:
        made = copy.copy(value)  # keeps what a subclass has beside its items
    if isinstance(made, list):
        made[:] = parts
    elif isinstance(made, MutableMapping):
        for key, part in zip(value, parts, strict=True):
            made[key] = part
    else:
        for name, part in zip(_attributes(value), parts, strict=True):
            object.__setattr__(made, name, part)  # frozen ones too
    return made


def leaves_of(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """What is no container in ``value``, with how it is reached from ``path``."""
    parts = None if isinstance(value, (Tensor, PackedSequence)) else parts_of(value)
    if parts is None:
        yield path, value
    for suffix, part in parts or ():
        yield from leaves_of(part, path + suffix)


def _attributes(value: Any) -> list[str]:
    """Names of a dataclass's fields, and of what else it was given."""
    names = [field.name for field in dataclasses.fields(value)]
    return [name for name in dict.fromkeys([*names, *getattr(value, "__dict__", ())]) if hasattr(value, name)]


def _rebuilt_tuple(value: tuple[Any, ...], parts: Sequence[Any]) -> Any:
    try:
        made = tuple.__new__(type(value), parts)
    except TypeError:  # one that is made in C, such as what torch.max returns
        return type(value)(parts)
    if hasattr(made, "__dict__"):
        vars(made).update(vars(value))
    return made
