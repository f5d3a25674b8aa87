"""What the planner needs to know of a parameter: values only, no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class BucketKey(NamedTuple):
    """What one bucket may not mix: a collective reduces one dtype on one device."""

    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One managed parameter as all ranks see it.

    ``key`` and ``nbytes`` are those in which its gradient travels.
    ``strides`` are canonical: rank 0's where they are dense, row-major otherwise (see ``flat.canonical_strides``).
    ``is_sparse`` says that its gradient is expected in sparse layout.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    numel: int
    nbytes: int
    key: BucketKey
    is_sparse: bool = False
