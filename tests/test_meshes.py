"""``device_mesh=``: one dimension of ranks to average over, alone or beside tensor parallelism."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from models import inputs, make, mean_grads, raises_everywhere
from steps import TINY_CAP_MB, square_loss, steps_are_right, world_sizes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from knownddp import KnownDDP


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def _one_dimension(rank: int, cap: float | None) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plain, model = make(_mlp, device_mesh=mesh, bucket_cap_mb=cap)
    assert model.device_mesh is mesh
    assert model.process_group == mesh.get_group()
    steps_are_right(plain, model, rank)


@pytest.mark.parametrize("cap", [None, TINY_CAP_MB])
@world_sizes
def test_a_mesh_of_one_dimension_is_averaged_over(ranks, world_size, cap):
    ranks(world_size, _one_dimension, cap)


def _refused(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    square = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    both = raises_everywhere(lambda: KnownDDP(_mlp(), process_group=dist.group.WORLD, device_mesh=mesh), RuntimeError)
    return [both, raises_everywhere(lambda: KnownDDP(_mlp(), device_mesh=square), RuntimeError)]


def test_two_ways_to_name_the_ranks_and_meshes_of_two_dimensions_are_refused(ranks):
    for both, square in ranks(2, _refused):
        assert "Cannot specify both process_group and device_mesh arguments." in both
        assert "Only 1D device mesh is supported" in square


def _without_a_mesh(rank: int) -> bool:
    return hasattr(KnownDDP(_mlp()), "device_mesh")


def test_without_a_mesh_there_is_no_such_attribute_as_in_stock(ranks):
    assert ranks(1, _without_a_mesh) == [False]


def _tensor_parallel(rank: int, cap: float | None, find: bool) -> None:
    """Two replicas of two shards. Ranks of one replica see the same batch, and both replicas make the mean."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    replica = mesh["dp"].get_local_rank()
    torch.manual_seed(0)
    plain = _mlp()
    plain[2].bias.requires_grad_(False)
    sharded = parallelize_module(copy.deepcopy(plain), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = KnownDDP(sharded, device_mesh=mesh["dp"], bucket_cap_mb=cap, find_unused_parameters=find)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        square_loss(model, replica, step).backward()
        optimizer.step()
        wanted = mean_grads(plain, 2, lambda m, r, s=step: square_loss(m, r, s))
        for name, param in plain.named_parameters():
            param.grad = wanted[name]
        theirs.step()
        x = inputs(0, 5, 3, seed=70 + step)
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize(("cap", "find"), [(None, False), (TINY_CAP_MB, True)])
def test_beside_tensor_parallelism_it_trains_like_one_process(ranks, cap, find):
    ranks(4, _tensor_parallel, cap, find)
