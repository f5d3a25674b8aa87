"""How messages and sums travel between ranks: from each to each, swapped by two, or in gloo's ring."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import inputs, make, raises_everywhere
from steps import counted_collectives
from torch import Tensor, nn

from knownddp import PeerFailedError, comm
from knownddp.comm import Collectives
from knownddp.works import DONE, UnfinishedWork

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)


def _with_calls(do: Any) -> list[str]:
    with counted_collectives() as called:
        do()
    return called


# -- messages


def _message(rank: int, size: int) -> list[int]:
    """A bit of its own for each rank, and one that they share in every third byte."""
    return [1 << rank | (64 if i % 3 == 0 else 0) if i % (rank + 2) else 0 for i in range(size)]


def _messages(rank: int, size: int) -> list[bytes]:
    """Several in turn: alike in size, which may travel in the same memory, and not."""
    one = _message(rank, size)
    return [bytes(one), bytes(reversed(one)), bytes(one * 2)]


def _combine(rank: int, size: int, direct_bytes: int) -> tuple[list[bytes], list[str]]:
    collectives = Collectives(dist.group.WORLD, own_group=True)
    before, comm.DIRECT_BYTES = comm.DIRECT_BYTES, direct_bytes
    combined = []

    def combine() -> None:
        for message in _messages(rank, size):
            work = collectives.combine_or(message)
            combined.append(work.wait())
            assert work.wait() == combined[-1] and work.is_completed()

    try:
        names = _with_calls(combine)
    finally:
        comm.DIRECT_BYTES = before
    return combined, names


def _ored(messages: Sequence[bytes]) -> bytes:
    return bytes(functools.reduce(operator.or_, column) for column in zip(*messages, strict=True))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 11, 1000])
def test_messages_are_ored_whichever_way_they_go(ranks, world, size):
    """From each to each up to ``DIRECT_BYTES``, else in the ring; nowhere where there is but one."""
    wanted = [_ored(one) for one in zip(*(_messages(rank, size) for rank in range(world)), strict=True)]
    for limit, ways in (
        (2 * size, ["all_to_all_single"] * 3),
        (size, ["all_to_all_single", "all_to_all_single", "allreduce"]),
        (size - 1, ["allreduce"] * 3),
    ):
        assert ranks(world, _combine, size, limit) == [(wanted, ways if world > 1 else [])] * world


def _combine_at_once(rank: int) -> list[bytes]:
    collectives = Collectives(dist.group.WORLD, own_group=True)
    lost, other = (collectives.combine_or(message) for message in _messages(rank, 11)[:2])
    return [other.wait(), lost.wait()]


def test_a_message_that_is_not_over_keeps_its_memory(ranks):
    """One that was lost, say: a peer's may still be written there."""
    wanted = [_ored(one) for one in zip(*(_messages(rank, 11) for rank in range(2)), strict=True)]
    assert ranks(2, _combine_at_once) == [[wanted[1], wanted[0]]] * 2


# -- sums


def _values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    drawn = torch.randn(numel, 2, dtype=torch.float64, generator=generator)
    return (torch.view_as_complex(drawn) if dtype.is_complex else torch.tensor(drawn[:, 0].tolist())).to(dtype)


def _sum(rank: int, numel: int, own_group: bool, is_last: bool) -> list[list[str]]:
    """Bit for bit as torch's all-reduce, in each dtype. Returns what was called."""
    collectives = Collectives(dist.group.WORLD, own_group=own_group)
    names = []
    for dtype in DTYPES:
        mine, wanted = _values(rank, numel, dtype), _values(rank, numel, dtype)
        dist.all_reduce(wanted)

        def add(mine: Tensor = mine) -> None:
            work = collectives.all_reduce_sum(mine, collectives.room_to_swap(mine) if is_last else None)
            work.get_future().wait()
            work.wait()
            work.wait()  # adds no second time

        names.append(_with_calls(add))
        assert torch.equal(torch.view_as_real(mine) if dtype.is_complex else mine, _real(wanted))
    return names


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@pytest.mark.parametrize("numel", [1, 1001, 2**17])
def test_two_ranks_swap_what_the_backward_waits_for(ranks, numel):
    assert ranks(2, _sum, numel, True, True) == [[["all_to_all_single"]] * len(DTYPES)] * 2


@pytest.mark.parametrize(("world", "own_group", "is_last"), [(2, False, True), (2, True, False), (3, True, True)])
def test_all_else_is_an_all_reduce(ranks, world, own_group, is_last):
    """On the user's group other collectives may come between, and more than two ranks would send more bytes."""
    assert ranks(world, _sum, 10, own_group, is_last) == [[["allreduce"]] * len(DTYPES)] * world


def test_the_sum_over_one_rank_is_sent_nowhere(ranks):
    assert ranks(1, _sum, 10, True, True) == [[[]] * len(DTYPES)]


def _sum_at_the_limit(rank: int) -> list[str]:
    collectives = Collectives(dist.group.WORLD, own_group=True)

    def add() -> None:
        for numel in (comm.SWAP_BYTES // 4, comm.SWAP_BYTES // 4 + 1):
            ones = torch.ones(numel)
            collectives.all_reduce_sum(ones, collectives.room_to_swap(ones)).wait()
            assert ones.eq(2).all()

    return _with_calls(add)


def test_large_flats_are_not_swapped(ranks):
    assert ranks(2, _sum_at_the_limit) == [["all_to_all_single", "allreduce"]] * 2


# -- what a wrapper does


def _runs_out_of_memory(rank: int) -> list[list[float] | None]:
    """Rank 1 has no memory to receive in, once. Then a step that goes well."""
    _, model = make(Branches, unused_agreement="same")

    def step() -> None:
        model.zero_grad()
        model(torch.ones(1, 4) * (rank + 1)).sum().backward()

    step(), step()
    room, calls = model._comm.room_to_swap, itertools.count()

    def no_room(tensor: Tensor) -> Tensor | None:
        if rank == 1 and next(calls) == 0:
            raise MemoryError("on purpose")
        return room(tensor)

    model._comm.room_to_swap = no_room  # type: ignore[method-assign]
    raises_everywhere(step, MemoryError if rank == 1 else PeerFailedError)
    after = [p.grad for p in model.parameters()]
    step()
    return [*after, *(p.grad.flatten().tolist() for p in model.parameters())]


def test_no_rank_waits_where_another_has_no_memory_to_receive_in(ranks):
    mine, other = ranks(2, _runs_out_of_memory)
    assert mine == other and mine[:3] == [None] * 3 and None not in mine[3:]


class Branches(nn.Module):
    """One parameter a bucket, if buckets are small: 4 x 4 floats, 64 bytes each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _train(rank: int) -> tuple[list[str], list[list[float]], list[list[float]]]:
    """Calls of the third step, its gradients, and those of both ranks' inputs on one process."""
    plain, model = make(Branches, bucket_cap_mb=1e-6)

    def step() -> None:
        model.zero_grad()
        model(inputs(rank, 3, 4)).sum().backward()

    step(), step()
    names = _with_calls(step)
    for one in range(2):
        (plain(inputs(one, 3, 4)).sum() / 2).backward()
    grads = [[p.grad.flatten().tolist() for p in module.parameters()] for module in (model, plain)]
    return names, *grads


def test_only_the_last_bucket_of_a_backward_is_swapped(ranks):
    """OPEN, two buckets in the ring, the last one, CLOSE."""
    names, grads, wanted = ranks(2, _train)[0]
    assert names == ["all_to_all_single", "allreduce", "allreduce", "all_to_all_single", "all_to_all_single"]
    torch.testing.assert_close(torch.tensor(grads), torch.tensor(wanted))


# -- handles


class Interrupted:
    """A handle whose first wait is interrupted."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1
        if self.waits == 1:
            raise KeyboardInterrupt

    is_completed = get_future = DONE.is_completed


def test_what_is_left_to_do_is_done_once_whenever_the_wait_is_interrupted():
    done: list[int] = []

    def finish() -> None:
        done.append(1)
        raise KeyboardInterrupt  # a signal that came meanwhile: Python raises when the call is over

    work = UnfinishedWork(Interrupted(), finish)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            work.wait()
    work.wait()
    assert done == [1]
