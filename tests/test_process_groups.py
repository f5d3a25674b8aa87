"""A wrapper whose ranks change: groups that shrink, grow, or are destroyed and made anew.

Scalars make the arithmetic exact: rank r's loss is ``a * x`` with its own x, so its gradient of a is x.
"""

from __future__ import annotations

import copy
import gc
import weakref
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import Fails, Scales, Skippable, make
from ranks import run_processes
from steps import TINY_CAP_MB, grads_of, square_loss, steps_are_right
from torch import Tensor
from torch.distributed import distributed_c10d

from knownddp import KnownDDP, PeerFailedError
from knownddp.comm import collectives_over


def _mean_of(model: KnownDDP, x: float, use: str = "a b") -> list[float | None]:
    model.zero_grad(set_to_none=True)
    model(torch.tensor(x), use=use).backward()
    return grads_of(model)


def _shrinks_and_grows(rank: int, cap: float | None) -> list[list[float | None]]:
    _, model = make(lambda: Scales("a", "b"), bucket_cap_mb=cap)
    found = []
    for members in ([0, 1, 2, 3], [0, 1], [1, 2, 3], [0, 1, 2, 3], [2]):
        group = dist.new_group(members)
        model._update_process_group(group)
        if rank in members:
            assert model.process_group is group
            found += [_mean_of(model, 12.0 * (rank + 1)) for _ in range(2)]  # the second launches early
        dist.barrier()
        del group
    return found


@pytest.mark.parametrize("cap", [None, TINY_CAP_MB], ids=["one-bucket", "tiny-buckets"])
def test_gradients_are_averaged_over_the_new_group(ranks, cap):
    """x is 12, 24, 36, 48 by rank: means 30 of all, 18 of ranks 0 and 1, 36 of ranks 1 to 3, 36 of rank 2 alone."""
    all_four, first_two, last_three, alone = [[30.0] * 2] * 2, [[18.0] * 2] * 2, [[36.0] * 2] * 2, [[36.0] * 2] * 2
    assert ranks(4, _shrinks_and_grows, cap) == [
        all_four + first_two + all_four,
        all_four + first_two + last_three + all_four,
        all_four + last_three + all_four + alone,
        all_four + last_three + all_four,
    ]


def _keeps(rank: int) -> list[float | None]:
    """A communication hook, a buffer hook, counters, and what no_sync accumulated go with the wrapper."""
    _, model = make(lambda: Scales("a", "b"))
    seen: list[int] = []

    def twice(group: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        seen.append(dist.get_world_size(model.process_group))
        summed = dist.all_reduce(bucket.buffer(), group=model.process_group, async_op=True)
        return summed.get_future().then(lambda future: future.value()[0] * 2)

    model.register_comm_hook(None, twice)
    with model.no_sync():
        model(torch.tensor(rank + 1.0), use="a").backward()
    first_two = dist.new_group([0, 1])
    model._update_process_group(first_two)
    if rank < 2:
        model(torch.tensor(10.0), use="b").backward()
        assert seen == [2]
        assert model.stats().backwards_finished == 1
        with pytest.raises(RuntimeError, match="only be called once"):
            model.register_comm_hook(None, twice)
    dist.barrier()
    return grads_of(model)


def test_hooks_and_accumulated_gradients_go_with_the_wrapper(ranks):
    """Twice the sum over ranks 0 and 1: of a 2 * (1 + 2), of b 2 * 20. Rank 2 keeps what it had."""
    assert ranks(3, _keeps) == [[6.0, 40.0], [6.0, 40.0], [3.0, None]]


def _builtin_hook(rank: int) -> list[float | None]:
    _, model = make(lambda: Scales("a", "b"))
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    group = dist.new_group([0, 1])
    model._update_process_group(group)
    found = _mean_of(model, 4.0 * (rank + 1)) if rank < 2 else []
    dist.barrier()
    return found


def test_a_builtin_hook_divides_by_the_new_number_of_ranks(ranks):
    """(4 + 8) / 2."""
    assert ranks(3, _builtin_hook) == [[6.0, 6.0], [6.0, 6.0], []]


class _Failing(Skippable):
    def forward(self, x: Tensor, fails: bool = False) -> Tensor:  # type: ignore[override]
        x = super().forward(x, skip={2, 3})
        return super().forward(Fails.apply(x) if fails else x, skip={0, 1})


def _after_a_failure(rank: int) -> None:
    """Rank 2 fails and is left out; the others go on without it, and later with it again."""
    plain, model = make(_Failing, find_unused_parameters=True)
    steps_are_right(plain, model, rank, steps=2)
    with pytest.raises(ArithmeticError if rank == 2 else PeerFailedError):
        square_loss(model, rank, fails=rank == 2).backward()
    without = dist.new_group([0, 1])
    model._update_process_group(without)
    if rank < 2:
        model.zero_grad()
        square_loss(model, rank).backward()
        wanted = copy.deepcopy(plain)
        (sum(square_loss(wanted, r) for r in range(2)) / 2).backward()
        for ours, theirs in zip(model.parameters(), wanted.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    dist.barrier()
    model._update_process_group(distributed_c10d._get_default_group())
    steps_are_right(plain, model, rank, steps=2)


def test_training_goes_on_over_fewer_ranks_after_a_failure_and_then_over_all(ranks):
    ranks(3, _after_a_failure)


def _dropped(rank: int) -> None:
    """A wrapper that moved is freed as any other, and its hooks go with it."""
    _, model = make()
    model._update_process_group(dist.new_group([0, 1]))
    module = model.module
    square_loss(model, rank).backward()
    alive = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()
    if rank == 0:
        square_loss(module, rank).backward()


def test_a_wrapper_that_moved_is_freed_at_once(ranks):
    ranks(2, _dropped)


# -- the default group made anew


def _join_world(folder: str, name: str, rank: int, size: int) -> None:
    store = dist.FileStore(f"{folder}/{name}", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=20))


def _elastic(rank: int, folder: str, answer: Connection) -> None:
    """Ranks 0 and 1; then 1 with 2, who had no part in the first world; then all three."""
    torch.set_num_threads(1)
    found: list[list[float | None]] = []
    model: KnownDDP | None = None
    module = Scales("a")
    worlds = {"first": [0, 1], "second": [1, 2], "third": [0, 1, 2]}
    for name, members in worlds.items():
        if rank not in members:
            continue
        _join_world(folder, name, members.index(rank), len(members))
        if model is None:
            cap = None if name == "first" else TINY_CAP_MB  # as the others have by then
            model = KnownDDP(module, init_sync=False, bucket_cap_mb=cap)
        else:
            model._update_process_group(distributed_c10d._get_default_group())
        found.append(_mean_of(model, 6.0 * (rank + 1), use="a"))
        found.append(_mean_of(model, 6.0 * (rank + 1), use="a"))
        wrapped_again = KnownDDP(module, bucket_cap_mb=TINY_CAP_MB)
        model._remove_autograd_hooks()
        found.append(_mean_of(wrapped_again, 6.0 * (rank + 1), use="a"))
        model = wrapped_again
        dist.barrier()
        dist.destroy_process_group()
    answer.send(found)


def test_worlds_that_are_destroyed_and_made_anew_with_other_ranks(tmp_path: Path):
    """x is 6, 12, 18 by rank: means 9 of ranks 0 and 1, 15 of 1 and 2, 12 of all. Processes that were no members of a
    world made fewer groups so far than those that were."""
    assert run_processes(_elastic, 3, str(tmp_path)) == [
        [[9.0]] * 3 + [[12.0]] * 3,
        [[9.0]] * 3 + [[15.0]] * 3 + [[12.0]] * 3,
        [[15.0]] * 3 + [[12.0]] * 3,
    ]


def _backends_of(rank: int) -> list[str]:
    mixed = collectives_over(dist.new_group(backend="cpu:gloo,meta:fake"), own_group=True)
    alone = collectives_over(None, own_group=True)
    return [*map(mixed.backend_for, ("cpu", "meta", "cuda")), alone.backend_for("cpu")]


def test_each_kind_of_device_has_its_backend(ranks):
    """A group that does not tell is named as a whole."""
    assert ranks(1, _backends_of) == [["gloo", "fake", "cpu:gloo,meta:fake", "none"]]
