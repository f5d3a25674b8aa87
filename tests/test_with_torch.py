"""What the rest of torch does with a DistributedDataParallel works on KnownDDP: checkpoints, ZeRO, pipelines, profiler.

Expected gradients come from plain autograd on one process.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from models import assert_grads, inputs, make, mean_grads
from steps import (
    TINY_CAP_MB,
    assert_same_parameters,
    counted_collectives,
    follow,
    setups,
    square_loss,
    step_is_right,
    world_sizes,
)
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from knownddp import KnownDDP


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))


# -- checkpoints


def _clean_keys(rank: int) -> None:
    """State dicts of torch.distributed.checkpoint have the module's own names, and go back in; training goes on."""
    plain, model = make(_mlp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(2):
        step_is_right(plain, model, rank, step)
        optimizer.step()
        follow(plain, theirs, lambda m, r, s=step: square_loss(m, r, s))
    names = [name for name, _ in plain.named_parameters()]
    weights, state = dcp.get_state_dict(model, optimizer)
    assert list(weights) == names == list(dcp.get_model_state_dict(model))
    assert set(state["state"]) == set(names)
    assert [name for group in state["param_groups"] for name in group["params"]] == names

    other = KnownDDP(_mlp())
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.1)
    dcp.set_model_state_dict(other, dict(weights))  # it empties what it is given
    dcp.set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=state)
    step_is_right(plain, other, rank, 7)
    other_optimizer.step()
    follow(plain, theirs, lambda m, r: square_loss(m, r, 7))
    assert_same_parameters(other, plain)


@world_sizes
def test_helpers_of_distributed_checkpoint_give_clean_keys(ranks, world_size):
    ranks(world_size, _clean_keys)


def _prefix(rank: int) -> None:
    plain, model = make(_mlp)
    stored = model.state_dict()
    assert list(stored) == [f"module.{name}" for name in plain.state_dict()]
    nn.modules.utils.consume_prefix_in_state_dict_if_present(stored, "module.")
    plain.load_state_dict(stored)
    step_is_right(plain, model, rank)


def test_the_prefix_is_consumed_as_from_stock(ranks):
    ranks(2, _prefix)


# -- ZeRO


def _zero(rank: int, cap: float | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import uses torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer
    plain, model = make(_mlp, bucket_cap_mb=cap)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.05)
    theirs = torch.optim.Adam(plain.parameters(), lr=0.05)
    for step in range(3):
        step_is_right(plain, model, rank, step)
        optimizer.step()
        follow(plain, theirs, lambda m, r, s=step: square_loss(m, r, s))
        assert_same_parameters(model, plain)
    assert len(optimizer.optim.state) < len(list(model.parameters()))  # each rank keeps a part of it


@setups
def test_a_zero_redundancy_optimizer_trains_like_one_process(ranks, world_size, cap):
    ranks(world_size, _zero, cap)


# -- pipelines


MICRO_BATCHES = 4


def _pipeline(rank: int, schedule: type, find: bool, cap: float | None) -> None:
    """Each rank is a pipeline of one stage over its own batch, and both stages' gradients are averaged."""
    torch.manual_seed(0)
    plain = _mlp()
    model = KnownDDP(copy.deepcopy(plain), bucket_cap_mb=cap, find_unused_parameters=find)
    alone = [dist.new_group([one]) for one in range(dist.get_world_size())][rank]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    batch = 2 * MICRO_BATCHES
    for step in range(3):
        stage = PipelineStage(model, 0, 1, torch.device("cpu"), group=alone)
        runner = schedule(stage, MICRO_BATCHES, loss_fn=loss_fn)
        model.zero_grad()
        finished = model.stats().backwards_finished
        runner.step(inputs(rank, batch, 3, seed=step), target=inputs(rank, batch, 3, seed=step + 50))
        assert model.stats().backwards_finished == finished + 1  # only the last micro-batch communicates
        wanted = mean_grads(
            plain,
            dist.get_world_size(),
            lambda m, r, s=step: loss_fn(m(inputs(r, batch, 3, seed=s)), inputs(r, batch, 3, seed=s + 50)),
        )
        assert_grads(model, wanted)


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
@pytest.mark.parametrize(("find", "cap"), [(False, None), (True, TINY_CAP_MB)])
def test_a_pipeline_stage_is_reduced_once_on_its_last_micro_batch(ranks, schedule, find, cap):
    ranks(2, _pipeline, schedule, find, cap)


def _triggered(rank: int, find: bool) -> None:
    """As Accelerate's trigger_sync_in_backward does: all forwards under no_sync, then the last backward averages."""
    plain, model = make(_mlp, find_unused_parameters=find)
    for _ in range(2):
        model.zero_grad()
        with model.no_sync():
            losses = [square_loss(model, rank, step) for step in range(3)]
        with counted_collectives() as called:
            losses[0].backward()
            losses[1].backward()
        assert called == []
        model.require_backward_grad_sync = True
        model.require_forward_param_sync = True
        model.reducer.prepare_for_backward([])
        losses[2].backward()
        assert_grads(model, mean_grads(plain, 2, lambda m, r: [square_loss(m, r, step) for step in range(3)]))
    step_is_right(plain, model, rank)


@pytest.mark.parametrize("find", [False, True])
def test_the_last_backward_can_be_told_to_synchronise(ranks, find):
    ranks(2, _triggered, find)


def _lightning_manual(rank: int, find: bool) -> None:
    """As Lightning's manual optimization: the backward runs inside the forward, after prepare_for_backward."""

    class Stepping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = _mlp()

        def forward(self, x: Tensor) -> None:
            loss = self.inner(x).square().mean()
            if torch.is_grad_enabled() and model.require_backward_grad_sync:
                model.require_forward_param_sync = True
                model.reducer._rebuild_buckets()
                model.reducer.prepare_for_backward(list(find_tensors(loss)) if find and not model.static_graph else [])
            loss.backward()
            model.require_backward_grad_sync = False

    find_tensors = torch.nn.parallel.distributed._find_tensors
    torch.manual_seed(0)
    module = Stepping()
    plain = copy.deepcopy(module.inner)
    model = KnownDDP(module, find_unused_parameters=find)
    for step in range(3):
        model.zero_grad()
        model(inputs(rank, 5, 3, seed=step))
        model.require_backward_grad_sync = True
        assert_grads(model.module.inner, mean_grads(plain, 2, lambda m, r, s=step: square_loss(m, r, s)))


@pytest.mark.parametrize("find", [False, True])
def test_a_backward_inside_forward_as_lightning_prepares_it(ranks, find):
    ranks(2, _lightning_manual, find)


# -- hooks of torch's that go on from the reducer


def _sum_of_a_bucket(rank: int) -> list[float]:
    """A future of the sum, undivided, as torch's mixed precision and optimizer hooks use it."""
    _, model = make(_mlp)
    seen: list[Tensor] = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        bucket.buffer().fill_(rank + 1.0)
        future = model.reducer._run_allreduce_hook(bucket)

        def note(done: torch.futures.Future[Tensor]) -> Tensor:
            seen.append(done.value())
            return done.value()

        return future.then(note)

    model.register_comm_hook(None, hook)
    square_loss(model, rank).backward()
    return [t.unique().item() for t in seen]


def test_the_reducer_offers_the_undivided_sum_of_a_bucket(ranks):
    """1 + 2 + 3."""
    assert ranks(3, _sum_of_a_bucket) == [[6.0]] * 3
