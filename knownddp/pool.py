"""Flat buckets that are used again: fresh memory costs page faults, and fresh views a microsecond each.

[Note: pool] Means are handed back as views of the flat bucket, which live in ``.grad`` as long as the user likes. A
bucket is written again only when nobody refers to its memory any more, as reference counts tell. The pool holds what
the last window used, and nothing else: what a step skips takes no memory. It is for the CPU: on accelerators the
caching allocator makes fresh memory cheap, and knows of streams that still read the old one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

import torch

from . import _torch_private as private
from .flat import FlatBucket
from .ownership import COUNTS_TELL
from .params import ManagedParams
from .plan import BucketSpec

MAX_SLACK = 1.1  # memory is used for a bucket that it exceeds by no more than this factor


_dtype = operator.attrgetter("dtype")


class GradientBucket(FlatBucket):
    """A flat bucket of managed parameters.

    Attributes:
        layout: their indices.
        params: the parameters, without those that were taken out of their module.
        is_whole: whether none was.
        fits: whether the views are what their ``.grad`` should be, in dtype and strides.
    """

    __slots__ = ("_is_alike", "_look_alike", "_strides", "fits", "is_whole", "layout", "params")

    def __init__(self, params: ManagedParams, layout: tuple[int, ...], memory: torch.Tensor | None) -> None:
        super().__init__([params.specs[i] for i in layout], memory)
        self.layout = layout
        self.params = [param for i in layout if (param := params.live[i]) is not None]
        self.is_whole = len(self.params) == len(layout)
        self.fits = all(params.fits[i] for i in layout)
        self._strides = [view.stride() for view in self.views]
        self._look_alike: Callable[..., bool] | None = None  # whether parameters look as they did lately ...
        self._is_alike = False  # ... when this was so

    def is_laid_out_like_params(self) -> bool:
        """Whether that still holds: parameters may be laid out anew between a forward and the end of its backward."""
        if self._look_alike is None or not self._look_alike(*self.params):
            strides = list(map(torch.Tensor.stride, self.params))
            self._is_alike = strides == self._strides and set(map(_dtype, self.params)) == {self.flat.dtype}
            self._look_alike = private.looks_of(self.params)
        return self._is_alike


class FlatPool:
    """The flat buckets of the last window, to be taken again.

    Args:
        params: whose gradients they hold. ``clear`` the pool when their specs change.
    """

    def __init__(self, params: ManagedParams) -> None:
        self._params = params
        self._kept: dict[tuple[int, ...], GradientBucket] = {}  # by layout, oldest first

    def kept(self) -> list[GradientBucket]:
        """Those that may be taken."""
        return list(self._kept.values())

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()

    def take(self, bucket: BucketSpec) -> GradientBucket:
        """One for the parameters of ``bucket``; its contents are whatever they are."""
        layout = bucket.param_indices
        kept = self._kept.pop(layout, None)
        if kept is not None and kept.is_free():
            return kept
        del kept
        return GradientBucket(self._params, layout, self._free_memory(layout) if self._kept else None)

    def _free_memory(self, layout: tuple[int, ...]) -> torch.Tensor | None:
        """That of a bucket of another layout. If none suits, those are dropped that would be beside the new one."""
        specs = self._params.specs
        key, needed = specs[layout[0]].key, sum(specs[i].numel for i in layout)
        suitable = [
            (kept.memory.numel(), name)
            for name, kept in self._kept.items()
            if (kept.memory.dtype, kept.memory.device) == key and needed <= kept.memory.numel() <= MAX_SLACK * needed
        ]
        for _, name in sorted(suitable):
            kept = self._kept.pop(name)
            if kept.is_free():
                return kept.memory
        dropped = 0
        while self._kept and dropped < needed:
            name = next(iter(self._kept))
            dropped += self._kept.pop(name).memory.numel()
        return None

    def give(self, used: Iterable[GradientBucket]) -> None:
        """A window is over, and these were used in it. What it did not use is forgotten."""
        if COUNTS_TELL:
            self._kept = {one.layout: one for one in used if one.memory.device.type == "cpu"}
            for one in self._kept.values():
                one.written.clear()
