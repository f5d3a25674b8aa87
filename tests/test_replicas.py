"""Several devices in one process, seen from training: gradients, declarations, buffers, everything a wrapper offers.

All devices are the CPU, which runs the whole path. The oracle is plain autograd on the joined batch: that of all
replicas, averaged over ranks. A world of one runs in this process, without a process group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Scales, assert_grads, inputs, make, mean_grads, raises_everywhere
from steps import TINY_CAP_MB, declares, grads_of, step_is_right, steps_are_right
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from knownddp import GraphChangedError, KnownDDP, UnfinishedBackwardError

# Ranks and replicas. One replica: the usual wrapper, for comparison.
combinations = pytest.mark.parametrize("world_size", [1, 2])
replica_counts = pytest.mark.parametrize("replicas", [1, 2, 3])
two_by_two = pytest.mark.parametrize(("world_size", "replicas"), [(1, 2), (2, 2), (2, 3)])


def on(replicas: int) -> dict[str, Any]:
    """Options for so many replicas."""
    return {"device_ids": ["cpu"] * replicas}


def rows(rank: int, step: int = 0, number: int = 5) -> Tensor:
    return inputs(rank, number, 3, seed=step)


# -- the joined batch


def _joined_batch(rank: int, replicas: int, cap: float | None) -> None:
    """The mean over ranks of means of 5 rows each is the mean over all rows of all ranks."""
    plain, model = make(bucket_cap_mb=cap, **on(replicas))
    ranks_there = range(dist.get_world_size())
    for step in range(4):
        model.zero_grad()
        loss = model(rows(rank, step)).square().mean()
        loss.backward()
        joined = torch.cat([rows(r, step) for r in ranks_there])
        assert_grads(model, mean_grads(plain, 1, lambda m, _, x=joined: m(x).square().mean()))


@combinations
@replica_counts
@pytest.mark.parametrize("cap", [None, TINY_CAP_MB], ids=["one-bucket", "tiny-buckets"])
def test_gradients_are_those_of_one_process_on_the_joined_batch(ranks, world_size, replicas, cap):
    ranks(world_size, _joined_batch, replicas, cap)


def test_gradients_by_hand():
    """Loss a (1 + 2 + 4): rows 1 and 2 on replica 0, row 4 on replica 1. Each adds its sum: 3 + 4 = 7."""
    model = KnownDDP(Scales("a"), **on(2))
    model(torch.tensor([1.0, 2.0, 4.0]), "a").sum().backward()
    assert grads_of(model) == [7]


class _Rows(nn.Module):
    """How many rows it was given, as an output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))  # the list is shared by all replicas, which take turns
        return self.linear(x)


@pytest.mark.parametrize(
    ("number", "replicas", "seen"), [(6, 3, [2, 2, 2]), (5, 3, [2, 2, 1]), (2, 3, [1, 1]), (1, 3, [1]), (0, 2, [0])]
)
def test_an_uneven_last_batch_runs_fewer_replicas(number, replicas, seen):
    plain, model = make(_Rows, **on(replicas))
    x = rows(0, number=number)
    output = model(x)
    assert model.module.seen == seen and output.shape == (number, 3)
    output.square().sum().backward()
    assert_grads(model, mean_grads(plain, 1, lambda m, _: m(x).square().sum()))


def _uneven_steps(rank: int) -> None:
    plain, model = make(**on(3))
    for step, number in enumerate([6, 2, 5, 1, 4]):
        step_is_right(plain, model, rank, step, lambda m, r, s, n=number: m(rows(r, s, n + r)).square().mean())


def test_ranks_may_run_different_numbers_of_replicas(ranks):
    ranks(2, _uneven_steps)


class _Losses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().sum()


def test_losses_of_replicas_come_as_a_vector():
    plain, model = make(_Losses, **on(2))
    x = rows(0)
    losses = model(x)
    torch.testing.assert_close(losses, torch.stack([plain(x[:3]), plain(x[3:])]))
    losses.sum().backward()
    assert_grads(model, mean_grads(plain, 1, lambda m, _: m(x)))


def test_the_batch_may_be_another_dimension():
    class Columns(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.t()).t()

    plain, model = make(lambda: Columns(3, 3), dim=1, **on(2))
    x = rows(0).t()
    torch.testing.assert_close(model(x), plain(x))


def test_inputs_receive_gradients():
    plain, model = make(**on(3))
    x, y = rows(0).requires_grad_(), rows(0).requires_grad_()
    model(x).square().sum().backward()
    plain(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_second_derivatives_go_through_replicas():
    """The penalty of a gradient with respect to the inputs."""

    def penalty(module: nn.Module) -> Tensor:
        x = rows(0).requires_grad_()
        return torch.autograd.grad(module(x).square().sum(), x, create_graph=True)[0].square().sum()

    plain, model = make(**on(2))
    penalty(model).backward()
    assert_grads(model, mean_grads(plain, 1, lambda m, _: penalty(m)))


# -- what a step does not use


def _skips(module: nn.Module, rank: int, step: int, **kwargs: Any) -> Tensor:
    skip = [step % 4, (step + 1) % 4]
    return module(rows(rank, step), skip, **kwargs).square().mean()


def _declared(rank: int, replicas: int) -> None:
    def loss(module: nn.Module, r: int, step: int) -> Tensor:
        return _skips(module, r, step, **declares(module, [f"layers.{step % 4}", f"layers.{(step + 1) % 4}"]))

    plain, model = make(**on(replicas))
    steps_are_right(plain, model, rank, loss)
    assert model.stats().bytes_skipped > 0 and model.stats().late_rounds == 0


@two_by_two
def test_declared_layers_are_skipped(ranks, world_size, replicas):
    ranks(world_size, _declared, replicas)


def _detected(rank: int, replicas: int) -> None:
    plain, model = make(find_unused_parameters=True, **on(replicas))
    steps_are_right(plain, model, rank, _skips, steps=5)
    assert model.stats().bytes_skipped > 0 and model.stats().late_rounds == 0


@two_by_two
def test_detection_sees_through_replicas(ranks, world_size, replicas):
    ranks(world_size, _detected, replicas)


class _ByRow(nn.Module):
    """Uses ``a`` for rows above zero and ``b`` for others, if there are such."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(())) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.a if (x > 0).any() else self.b)


def test_a_parameter_that_one_replica_uses_has_its_gradient_and_one_that_none_uses_has_none():
    """Replica 0 multiplies 1 + 2 by a, replica 1 -4 by b."""
    model = KnownDDP(_ByRow(), find_unused_parameters=True, **on(2))
    for _ in range(3):
        model.zero_grad()
        model(torch.tensor([1.0, 2.0, -4.0])).sum().backward()
        assert grads_of(model) == [3, -4, None]
    assert model.stats().late_rounds == 0


def test_an_unused_parameter_is_reported():
    model = KnownDDP(_ByRow(), **on(2))
    model(torch.tensor([1.0, 2.0])).sum().backward()
    with pytest.raises(UnfinishedBackwardError, match=r"\(b, c\)"):
        model(torch.tensor([1.0, 2.0]))


class _Marking(nn.Module):
    """Each replica marks what its own rows leave out: by module, by parameter, or by a slice of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.owner: Callable[[], KnownDDP] | None = None

    def forward(self, x: Tensor) -> Tensor:
        first = int(x[0, 0])
        used = {0: [0, 3], 1: [1, 3], 2: [3]}[first]
        skipped = [layer for i, layer in enumerate(self.layers) if i not in used]
        if self.owner is not None:
            self.owner().mark_unused([skipped[0].weight, skipped[0].bias, *skipped[1:]])
            self.owner().mark_unused([self.layers[4:]])
        for i in used:
            x = self.layers[i](x)
        return x


def _marked(x: Tensor, **options: Any) -> tuple[nn.Module, KnownDDP]:
    plain, model = make(_Marking, **on(2), **options)
    model.module.owner = lambda: model
    for _ in range(3):
        model.zero_grad()
        model(x).square().sum().backward()
        wanted = mean_grads(plain, 1, lambda m, _: m(x[:1]).square().sum() + m(x[1:]).square().sum())
        assert_grads(model, wanted)
    return plain, model


def test_what_every_replica_marks_is_skipped_and_what_one_marks_is_not():
    """Replica 0 uses layers 0 and 3, replica 1 layers 1 and 3. Both mark layer 2: 12 numbers, in three steps."""
    _, model = _marked(torch.tensor([[0.0, 1, 1], [1, 1, 1]]))
    assert model.stats().late_rounds == 0 and model.stats().bytes_skipped == 3 * 4 * 12
    _, model = _marked(torch.tensor([[2.0, 1, 1], [2, 1, 1]]))
    assert model.stats().late_rounds == 0 and model.stats().bytes_skipped == 3 * 4 * 36


@pytest.mark.parametrize("options", [on(2), on(1)], ids=["replicas", "one device"])
def test_marking_holds_in_a_reentrant_checkpoint_around_the_wrapper(ranks, options):
    ranks(1, _checkpointed, options)


def _checkpointed(rank: int, options: dict[str, Any]) -> None:
    """Its first forward has no gradients: what counts is what the recomputation marks."""
    plain, model = make(_Marking, **options)
    model.module.owner = lambda: model
    x = torch.tensor([[0.0, 1, 1], [0, 1, 1]])
    for _ in range(3):
        model.zero_grad()
        checkpoint(model, x.clone().requires_grad_(), use_reentrant=True).square().sum().backward()
        assert_grads(model, mean_grads(plain, 1, lambda m, _: m(x).square().sum()))
    assert model.stats().late_rounds == 0


def test_marking_works_in_low_precision_too():
    config = nn.parallel.distributed._MixedPrecision(param_dtype=torch.float64)
    _, model = _marked(torch.tensor([[0.0, 1, 1], [1, 1, 1]]), mixed_precision=config)
    assert model.stats().late_rounds == 0 and model.stats().bytes_skipped > 0


def _marked_in_another_group(rank: int) -> None:
    _, model = make(_Marking, **on(2))
    model.module.owner = lambda: model
    for step in range(3):
        if step:
            model._update_process_group(dist.new_group([0, 1]))
        model.zero_grad()
        model(torch.tensor([[2.0, 1, 1], [2, 1, 1]])).square().sum().backward()
        assert model.stats().bytes_skipped == (step + 1) * 4 * 36 and model.stats().late_rounds == 0
    dist.barrier()


def test_marking_goes_on_with_other_ranks(ranks):
    """Three of four layers are marked in each step: 36 numbers."""
    ranks(2, _marked_in_another_group)


# -- what a wrapper offers beside


def _accumulates(rank: int, replicas: int) -> None:
    plain, model = make(**on(replicas))
    for _ in range(3):
        model.zero_grad()
        with model.no_sync():
            model(rows(rank, 1)).square().mean().backward()
        model(rows(rank, 2)).square().mean().backward()
        assert_grads(
            model,
            mean_grads(plain, dist.get_world_size(), lambda m, r: [m(rows(r, s)).square().mean() for s in (1, 2)]),
        )


@two_by_two
def test_no_sync_accumulates(ranks, world_size, replicas):
    ranks(world_size, _accumulates, replicas)


def _static(rank: int) -> str:
    plain, model = make(static_graph=True, **on(2))
    for step in range(3):
        step_is_right(plain, model, rank, step, lambda m, r, s: m(rows(r, s), [1]).square().mean())
    assert model.module.layers[1].weight.grad is None
    return raises_everywhere(lambda: model(rows(rank), [0]).square().mean().backward(), GraphChangedError)


def test_a_static_graph_is_that_of_all_replicas(ranks):
    assert all("layers.0" in message for message in ranks(2, _static))


def _join(rank: int) -> None:
    """Rank 0 has two batches and rank 1 one: the second mean is half of rank 0's."""
    plain, model = make(**on(2))
    with model.join():
        for step in range(2 - rank):
            model.zero_grad()
            model(rows(rank, step)).square().mean().backward()
    if rank == 0:
        wanted = mean_grads(plain, 1, lambda m, _: m(rows(0, 1)).square().mean() / 2)
        assert_grads(model, wanted)


def test_join_serves_replicas(ranks):
    ranks(2, _join)


def _hooked(rank: int) -> list[float | None]:
    model = KnownDDP(Scales("a"), **on(2))

    def triple(_, bucket):
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: 3 * future.value()[0])

    model.register_comm_hook(None, triple)
    model(torch.tensor([1.0, 2.0]) + rank, "a").sum().backward()
    return grads_of(model)


def test_a_communication_hook_gets_the_sum_over_replicas(ranks):
    """Rank 0 has 1 + 2, rank 1 2 + 3; the hook makes three times the sum."""
    assert ranks(2, _hooked) == [[24]] * 2


def _frozen_and_thawed(rank: int) -> None:
    plain, model = make(**on(2))
    for module in (plain, model.module):
        module.layers[0].weight.requires_grad_(False)
    steps_are_right(plain, model, rank)
    for module in (plain, model.module):
        module.layers[0].weight.requires_grad_(True)
    steps_are_right(plain, model, rank)


def test_parameters_may_be_frozen_and_thawed(ranks):
    ranks(2, _frozen_and_thawed)
