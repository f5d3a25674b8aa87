"""What DistributedDataParallel's own tests promise of construction, inputs, and what a wrapper leaves."""

from __future__ import annotations

import collections
import copy
import gc
import io
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from models import Scales, inputs, make
from steps import counted_collectives, from_all_ranks, grads_of, square_loss, steps_are_right
from torch import Tensor, nn

from knownddp import KnownDDP

MIB = 2**20


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


# -- construction


@pytest.mark.parametrize(
    ("arguments", "cap", "caps", "default"),
    [
        ({}, 25 * MIB, [], True),
        ({"bucket_cap_mb": 2}, 2 * MIB, [], False),
        ({"bucket_cap_mb_list": [1, 8, 4]}, 8 * MIB, [1 * MIB, 8 * MIB, 4 * MIB], False),
    ],
)
def test_bucket_sizes_as_attributes(ranks, arguments, cap, caps, default):
    assert ranks(1, _sizes, arguments) == [(cap, caps, default)]


def _sizes(rank: int, arguments: dict[str, Any]) -> tuple[int, list[int], bool]:
    model = KnownDDP(_mlp(), **arguments)
    return model.bucket_bytes_cap, model.bucket_bytes_cap_list, model.bucket_bytes_cap_default


def _no_ids(rank: int) -> None:
    plain, model = make(_mlp, device_ids=[])
    assert model.device_ids is None
    steps_are_right(plain, model, rank, steps=1)


def test_an_empty_list_of_devices_means_none(ranks):
    ranks(1, _no_ids)


def _nothing_to_train(rank: int) -> None:
    frozen = _mlp().requires_grad_(False)
    for module in (nn.Sequential(), frozen):
        with pytest.raises(RuntimeError, match="require"):
            KnownDDP(module)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_module_with_nothing_to_train_is_refused(ranks, world_size):
    ranks(world_size, _nothing_to_train)


def _frozen_follow(rank: int) -> None:
    """Frozen parameters start from rank 0's values too, and are not averaged."""
    torch.manual_seed(rank)
    module = _mlp()
    module[0].requires_grad_(False)
    model = KnownDDP(module)
    for param in module.parameters():
        assert all(torch.equal(param, other) for other in from_all_ranks(param.detach()))
    square_loss(model, rank).backward()
    assert module[0].weight.grad is None and module[2].weight.grad is not None


@pytest.mark.parametrize("world_size", [2, 4])
def test_frozen_parameters_are_broadcast_and_not_reduced(ranks, world_size):
    ranks(world_size, _frozen_follow)


def _sharded(rank: int) -> None:
    """Of torch.distributed's: not a tensor that could be broadcast or averaged."""
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    torch.manual_seed(0)
    module = _mlp()
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{r}/cpu" for r in range(dist.get_world_size())])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        part = sharded_tensor.rand(spec, 4, 4)
    module.register_parameter("part", nn.Parameter(torch.zeros(1)))
    module._parameters["part"] = part
    KnownDDP._set_params_and_buffers_to_ignore_for_model(module, ["part"])
    model = KnownDDP(module)
    module[0](inputs(rank, 2, 3)).sum().backward()
    assert model.reducer is not None


def test_an_ignored_sharded_tensor(ranks):
    ranks(2, _sharded)


def _replaced(rank: int) -> None:
    """An ignored parameter may be another one after wrapping, of another shape on each rank."""
    torch.manual_seed(0)
    module = nn.ModuleDict({"own": nn.Linear(2, 2), "shared": nn.Linear(2, 2)})
    KnownDDP._set_params_and_buffers_to_ignore_for_model(module, ["own.weight", "own.bias"])

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = module

        def forward(self, x: Tensor) -> Tensor:
            return self.parts["shared"](x).sum() + sum(p.sum() for p in self.parts["own"].parameters())

    caller = Caller()
    caller._ddp_params_and_buffers_to_ignore = ["parts.own.weight", "parts.own.bias"]
    model = KnownDDP(caller)
    module["own"].weight = nn.Parameter(torch.ones(1 + rank, 2))
    for _ in range(3):
        model.zero_grad()
        model(torch.full((1, 2), 2.0 + 2.0 * rank)).backward()
        assert module["own"].weight.grad.tolist() == [[1.0, 1.0]] * (1 + rank)
        assert module["shared"].weight.grad.tolist() == [[3.0, 3.0]] * 2


def test_an_ignored_parameter_may_be_replaced_after_wrapping(ranks):
    """Inputs are 2 on rank 0 and 4 on rank 1."""
    ranks(2, _replaced)


# -- inputs and outputs


class _Typed(NamedTuple):
    a: Tensor
    b: Tensor


_Plain = collections.namedtuple("_Plain", ["a", "b"])


class _Custom:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class _Receiving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.got: Any = None

    def forward(self, given: Any, *, more: Any = None) -> Tensor:
        self.got = given, more
        return self.linear(given[0] if isinstance(given, (tuple, list)) else given.x)


def _passed_on(rank: int) -> None:
    _, model = make(_Receiving)
    x, y = inputs(rank, 2, 3), inputs(rank, 2, 3, seed=1)
    for given in (_Typed(x, y), _Plain(x, y), _Custom(x), [x, {"y": y}], (x, None, "text")):
        model(given, more={"given": given}).sum().backward()
        got, more = model.module.got
        assert got is given and more["given"] is given and type(got) is type(given)


def test_inputs_reach_the_module_as_they_are(ranks):
    ranks(2, _passed_on)


def _closed(rank: int) -> None:
    """A wrapper does not forward attributes, nor has it a length; its keys start with ``module.``."""
    _, model = make(_mlp)
    with pytest.raises(TypeError):
        len(model)
    for name in ("in_features", "weight", "layers"):
        with pytest.raises(AttributeError):
            getattr(model, name)
    assert all(key.startswith("module.") for key in model.state_dict())
    assert [name for name, _ in model.named_children()] == ["module"]


def test_a_wrapper_is_no_stand_in_for_its_module(ranks):
    ranks(1, _closed)


def _two_micro_batches(rank: int, views: bool) -> list[float | None]:
    """Through the bare module first, which stays local; then through the wrapper, which takes all of it along."""
    _, model = make(lambda: Scales("a"), gradient_as_bucket_view=views)
    x = torch.tensor(2.0 + 2.0 * rank)
    with counted_collectives() as called:
        model.module(x, "a").backward()
    assert called == [] and model.module.a.grad.item() == x.item()
    model(x, "a").backward()
    return grads_of(model)


@pytest.mark.parametrize("views", [False, True])
def test_a_backward_through_the_module_and_one_through_the_wrapper(ranks, views):
    """(2 + 2 + 4 + 4) / 2."""
    assert ranks(2, _two_micro_batches, views) == [[6.0], [6.0]]


# -- what a wrapper leaves


def _declares(model: KnownDDP, rank: int) -> None:
    model(inputs(rank, 2, 3), unused_parameters=[model.module[0].bias])
    with model.unused(["0.bias"]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*no rank expected: 0.bias")
        model(inputs(rank, 2, 3)).sum().backward()


def _saves(model: KnownDDP, rank: int) -> None:
    square_loss(model, rank).backward()
    torch.save(model, io.BytesIO())
    twin = copy.deepcopy(model)
    square_loss(twin, rank).backward()


def _joins(model: KnownDDP, rank: int) -> None:
    with model.join():
        for step in range(1 + rank):
            square_loss(model, rank, step).backward()


def _hooks(model: KnownDDP, rank: int) -> None:
    def hook(group: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, hook)
    square_loss(model, rank).backward()
    model._get_ddp_logging_data()


def _hooks_of_torch(model: KnownDDP, rank: int) -> None:
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    square_loss(model, rank).backward()


def _accumulates(model: KnownDDP, rank: int) -> None:
    with model.no_sync():
        square_loss(model, rank).backward()
    model.reducer.prepare_for_backward([])
    square_loss(model, rank).backward()


def _static(model: KnownDDP, rank: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # beside find_unused_parameters
        model._set_static_graph()
    for step in range(3):
        square_loss(model, rank, step).backward()


def _drops(model: KnownDDP, rank: int) -> None:
    square_loss(model, rank)
    with torch.no_grad():
        square_loss(model, rank)


FEATURES = [_declares, _saves, _joins, _hooks, _hooks_of_torch, _accumulates, _static, _drops]


def _freed(rank: int, use: Callable[[KnownDDP, int], None], options: dict[str, Any]) -> None:
    _, model = make(_mlp, **options)
    gc.disable()
    try:
        use(model, rank)
        alive, reducer = weakref.ref(model), weakref.ref(model.reducer)
        del model
        assert alive() is None and reducer() is None
    finally:
        gc.enable()
    dist.barrier()


@pytest.mark.parametrize(
    "options",
    [{}, {"find_unused_parameters": True, "own_group": False, "gradient_as_bucket_view": True}],
    ids=["default", "other-options"],
)
@pytest.mark.parametrize("use", FEATURES)
def test_a_dropped_wrapper_is_freed_without_the_garbage_collector(ranks, use, options):
    ranks(2, _freed, use, options)
