"""One launched bucket, the terms on which all of a window are combined, and what windows of one wrapper share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .comm import Collectives
from .comm_hooks import CommHook, HookedWork
from .params import ManagedParams
from .plan import BucketSpec
from .pool import FlatPool, GradientBucket
from .stats import Counters
from .works import Work


@dataclass(slots=True)
class Flight:
    """One launched bucket: what it carries, and where the means arrive."""

    bucket: BucketSpec
    work: Work
    flat: Tensor  # what is combined
    packed: list[Tensor]  # its parts, one a parameter, in the bucket's order
    filled: GradientBucket | None  # the flat bucket whose views they are, if these become the means
    stream: torch.Stream | None = None  # on which it was packed

    def wait(self) -> None:
        """Order what follows on the current stream behind ``work``, and keep the memory until that stream has it.

        It may not be the stream that the memory belongs to, where it would be free for others at once.
        """
        self.work.wait()
        if self.stream is not None:
            current = torch.accelerator.current_stream(self.flat.device)
            if current != self.stream:
                _keep_until(current, self.flat)

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        return self.work.get_future()

    def means(self) -> list[Tensor]:
        """The parts of the packed bucket, after ``wait``; or what a hook made of them."""
        return self.work.means() if isinstance(self.work, HookedWork) else self.packed


@dataclass(slots=True)
class Resources:
    """What every window of one wrapper uses.

    Attributes:
        params: the managed parameters.
        comm: the collectives.
        counters: what is counted.
        pool: where flat buckets come from.
        fired: a byte for each parameter, 1 once its gradient came in the running window, as the protocol has it.
        streams: on accelerators, where the gradient of a parameter was accumulated; hooks write it.
        users: of a large parameter, while its hook runs, what ``ownership.users_in_hook`` said; likewise.
    """

    params: ManagedParams
    comm: Collectives
    counters: Counters
    pool: FlatPool
    fired: bytearray
    streams: Mapping[int, torch.Stream]
    users: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Terms:
    """How the buckets of one window are combined.

    Attributes:
        divisor: how many ranks take part, by which shares are divided before they are summed.
        hook: combines each bucket instead, and divides itself.
        contributes: this rank has a share; else it takes part with zeros, whatever stands in ``.grad``.
    """

    divisor: int
    hook: CommHook | None = None
    contributes: bool = True


def wait_for_streams(bucket: BucketSpec, grads: Sequence[Tensor | None], streams: Mapping[int, torch.Stream]) -> None:
    """Order what follows behind accumulations on other ``streams``, and keep the memory of ``grads`` until then."""
    if not streams:
        return
    waited_for: set[torch.Stream] = set()
    for i, grad in zip(bucket.param_indices, grads, strict=True):
        stream = streams.get(i)
        if grad is None or stream is None or grad.device != stream.device:  # it was on another device then
            continue
        current = torch.accelerator.current_stream(grad.device)
        if stream != current:
            if stream not in waited_for:
                current.wait_stream(stream)
                waited_for.add(stream)
            _keep_until(current, grad)


def _keep_until(stream: torch.Stream, tensor: Tensor) -> None:
    """Its memory is not used again before what ``stream`` has to do until now is done."""
    for part in (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,):
        part.record_stream(stream)
