"""Several devices in one process: without a process group, copied, saved and loaded."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from models import assert_grads, inputs, make, mean_grads
from steps import counted_collectives
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from knownddp import KnownDDP, UsageError
from knownddp.comm import Alone

CPU = torch.device("cpu")
TWO = ["cpu", "cpu"]


def trains(plain: nn.Module, model: KnownDDP) -> None:
    """Steps whose gradients are those of the plain module on the whole batch."""
    for step in range(3):
        model.zero_grad()
        x = inputs(0, 6, 3, seed=step)
        model(x).square().sum().backward()
        assert_grads(model, mean_grads(plain, 1, lambda m, _, x=x: m(x).square().sum()))


# -- no process group


def test_a_single_process_needs_no_process_group():
    assert not dist.is_initialized()
    plain, model = make(device_ids=TWO, find_unused_parameters=True)
    with counted_collectives() as called:
        trains(plain, model)
    assert not called and not dist.is_initialized()
    assert isinstance(model, DistributedDataParallel) and model.process_group is None
    assert model.join_process_group is None
    data = model._get_ddp_logging_data()
    assert data["world_size"] == 1 and data["backend_name"] == "none" and data["device_ids"] == "cpu, cpu"


def test_a_wrapper_without_one_cannot_be_given_one():
    with pytest.raises(UsageError, match="wrap the module again"):
        Alone().move_to(None)


def test_alone_every_collective_is_over_at_once():
    alone, tensor = Alone(), torch.ones(2)
    for work in (alone.all_reduce_sum(tensor), alone.broadcast(tensor), alone.combine_or(b"12")):
        work.wait()
        assert work.is_completed() and work.get_future().done()
    assert alone.combine_max(tensor).is_completed() and tensor.tolist() == [1, 1]
    assert alone.gather_objects("mine") == ["mine"]
    assert (alone.rank, alone.world_size, alone.follows_program_order) == (0, 1, False)


def test_builtin_hooks_work_without_one():
    plain, model = make(device_ids=TWO)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    trains(plain, model)


# -- copies and checkpoints


def test_replication_leaves_no_trace_in_the_module():
    plain, model = make(device_ids=TWO)
    keys, attributes, params = list(model.state_dict()), set(vars(model.module.layers[0])), list(model.parameters())
    trains(plain, model)
    assert list(model.state_dict()) == keys == [f"module.{key}" for key in plain.state_dict()]
    assert set(vars(model.module.layers[0])) == attributes
    assert all(one is other for one, other in zip(model.parameters(), params, strict=True))
    plain.load_state_dict(model.module.state_dict())


def _saved(model: KnownDDP) -> KnownDDP:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: KnownDDP = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), _saved])
def test_copies_have_replicas_of_their_own(duplicate):
    plain, model = make(device_ids=["cpu"] * 3)
    trains(plain, model)
    model.zero_grad()
    other = duplicate(model)
    assert other.device_ids == [CPU] * 3 and other.process_group is None
    trains(plain, other)
    assert all(p.grad is None for p in model.parameters())


def _copied(rank: int) -> None:
    plain, model = make(device_ids=TWO)
    other = copy.deepcopy(model)
    other(inputs(rank, 6, 3)).square().sum().backward()
    assert_grads(other, mean_grads(plain, 2, lambda m, r: m(inputs(r, 6, 3)).square().sum()))


def test_copies_go_on_averaging(ranks):
    ranks(2, _copied)
