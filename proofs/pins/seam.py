"""Stand-ins for what ``knownddp.comm`` knows of torch.distributed, so that the shipped ``Collectives`` runs as it is.

The recorder passes everything on and writes down what was started; the simulated group starts nothing.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms import join as torch_join

import knownddp.ddp
from knownddp import comm

from .play import Clock
from .predict import Sent

KINDS = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.MAX: "max"}


def kind_of_reduction(options: dist.AllreduceOptions) -> str:
    """What is formed over ranks."""
    reduced: object = options.reduceOp  # of another type than its constants
    return next((kind for op, kind in KINDS.items() if reduced == op), "another reduction")


def nbytes_of(tensor: Tensor) -> int:
    """What one rank brings."""
    return tensor.numel() * tensor.element_size()


def kind_of_exchange(sent: Tensor, world: int, sizes: Sequence[int]) -> tuple[str, int]:
    """Whether two ranks swap tensors or all tell each other messages, and how many bytes each brings."""
    return ("swap", nbytes_of(sent)) if sizes else ("exchange", nbytes_of(sent) // world)


class Passing:
    """What is not defined here is ``original``'s."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class Recorder:
    """Writes down in ``sent`` each collective of a process that has a wrapper, but for those of torch's ``Join``, and
    in ``polls`` whether OPEN was back.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.sent: list[Sent] = []
        self.polls: list[bool] = []
        self.comm: comm.Collectives | None = None
        self.is_quiet = False

    def _write_down(self, kind: str, nbytes: int, group: object) -> None:
        if self.comm is None or self.is_quiet:
            return
        lane = "control" if group is self.comm._control else "data" if group is self.comm._data else "other"
        self.sent.append(Sent(kind, lane, nbytes, self.clock.came))

    def methods(self) -> dict[str, Callable[..., Any]]:
        """What is to stand for those of ``dist.ProcessGroup``, through which all collectives go."""
        allreduce, broadcast = dist.ProcessGroup.allreduce, dist.ProcessGroup.broadcast
        allgather, all_to_all = dist.ProcessGroup.allgather, dist.ProcessGroup.all_to_all_single

        def reduces(group: dist.ProcessGroup, tensors: list[Tensor], options: dist.AllreduceOptions) -> Any:
            self._write_down(kind_of_reduction(options), nbytes_of(tensors[0]), group)
            return allreduce(group, tensors, options)

        def broadcasts(group: dist.ProcessGroup, tensors: list[Tensor], options: dist.BroadcastOptions) -> Any:
            self._write_down("broadcast", nbytes_of(tensors[0]), group)
            return broadcast(group, tensors, options)

        def gathers(group: dist.ProcessGroup, found: list[list[Tensor]], tensors: list[Tensor], *options: Any) -> Any:
            self._write_down("gather", nbytes_of(tensors[0]), group)
            return allgather(group, found, tensors, *options)

        def exchanges(group: dist.ProcessGroup, received: Tensor, sent: Tensor, *how: Any) -> Any:
            self._write_down(*kind_of_exchange(sent, group.size(), how[0]), group)
            return all_to_all(group, received, sent, *how)

        return {"allreduce": reduces, "broadcast": broadcasts, "allgather": gathers, "all_to_all_single": exchanges}


class _JoinsDist(Passing):
    """torch.distributed as torch's ``Join`` calls it, to count who still has inputs."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(dist)
        self._recorder = recorder

    def all_reduce(self, *args: Any, **kwargs: Any) -> Any:
        self._recorder.is_quiet = True
        try:
            return dist.all_reduce(*args, **kwargs)
        finally:
            self._recorder.is_quiet = False


class AskedWork(Passing):
    """A handle that writes down what it answers."""

    def __init__(self, work: Any, polls: list[bool]) -> None:
        super().__init__(work)
        self._polls = polls

    def is_completed(self) -> bool:
        self._polls.append(self._original.is_completed())
        return self._polls[-1]


@contextlib.contextmanager
def recorded(clock: Clock) -> Iterator[Recorder]:
    """Inside, all that ``knownddp.comm`` starts is written down."""
    recorder = Recorder(clock)

    class Asked(comm.Collectives):
        def __init__(self, parent: dist.ProcessGroup, *, own_group: bool) -> None:
            super().__init__(parent, own_group=own_group)
            recorder.comm = self

        def combine_or(self, message: bytes) -> Any:
            return AskedWork(super().combine_or(message), recorder.polls)

    def over(group: dist.ProcessGroup | None, *, own_group: bool) -> comm.Collectives:
        assert group is not None
        return Asked(group, own_group=own_group)

    with (
        replaced(dist.ProcessGroup, **recorder.methods()),
        replaced(knownddp.ddp, collectives_over=over),
        replaced(torch_join, dist=_JoinsDist(recorder), warnings=QuietWarnings(warnings)),
    ):
        yield recorder


@contextlib.contextmanager
def replaced(module: Any, **names: Any) -> Iterator[None]:
    """Inside, these names of ``module`` stand for something else."""
    before = {name: getattr(module, name) for name in names}
    for name, value in names.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


class QuietWarnings(Passing):
    """The module ``warnings`` for torch's ``Join``, which warns, and sets a filter of its own for the whole process."""

    def warn(self, *_: object) -> None: ...

    def simplefilter(self, *_: object) -> None: ...


POISON = 0x5A


def poison(tensor: Tensor) -> None:
    """Fill it with what could not pass for a result: so it stands while a collective has it."""
    tensor.fill_(float("nan") if tensor.dtype.is_floating_point else POISON)


def is_poisoned(tensor: Tensor) -> bool:
    """Whether nobody wrote there since."""
    return bool((tensor.isnan() if tensor.dtype.is_floating_point else tensor == POISON).all())
