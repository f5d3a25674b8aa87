"""KnownDDP has the interface of the installed DistributedDataParallel: what a new torch release adds fails here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from knownddp import KnownDDP

# What only DistributedDataParallel's own code uses, most of it as the other half of its C++ reducer.
INTERNAL = {
    # construction
    *("_build_debug_param_to_name_mapping", "_build_params_for_reducer", "_bucket_config", "_check_default_group"),
    *("_ddp_init_helper", "_get_parameters", "_log_and_throw", "_passing_sync_batchnorm_handle"),
    # forward
    *("_ddp_sink_clone", "_inside_ddp_forward", "_lazy_init", "_lazy_init_ran", "_post_forward", "_pre_forward"),
    *("_run_ddp_forward", "_setup_in_backward_optimizers"),
    # buffers
    *("_assign_modules_buffers", "_check_and_sync_module_buffers", "_check_sync_bufs_post_fwd"),
    *("_check_sync_bufs_pre_fwd", "_distributed_broadcast_coalesced"),
    *("_find_common_rank", "_sync_buffers", "_sync_module_buffers"),
    # hooks
    *("_check_comm_hook", "_clear_grad_buffer", "_delay_all_reduce_all_params", "_delay_all_reduce_params"),
    *("_delay_grad_buffer", "_delay_grad_views", "_delayed_all_reduce_hook", "_register_delay_all_reduce_hook"),
    # the reducer in Python, for compiled autograd
    *("_accum_grad_hooks", "_register_accum_grad_hook", "_use_python_reducer"),
    # mixed precision
    *("_fire_reducer_autograd_hook", "_module_wait_for_copy_hook", "_root_copy_hook"),
    # join
    *("_check_global_requires_backward_grad_sync", "_match_all_reduce_for_bwd_pass"),
    *("_match_unused_params_allreduce", "_sync_final_model"),
}

# Private names that others reach for, and who does.
REACHED_FOR = {
    "_active_ddp_module": "torch.compile, replicate",
    "_get_active_ddp_module": "torch.compile, to split graphs",
    "_check_reducer_finalized": "training loops that look for unfinished backwards",
    "_comm_hooks": "code that asks whether a hook is registered",
    "_default_broadcast_coalesced": "buffer hooks that want the broadcast",
    "_distributed_rank": "subclasses of DistributedDataParallel's join",
    "_get_data_parallel_params": "torch's hook for in-backward optimizers",
    "_get_ddp_logging_data": "Lightning's DDP strategy at its end",
    "_has_rebuilt_buckets": "ZeroRedundancyOptimizer's overlap hooks",
    "_join_config": "torch.distributed.algorithms.Join",
    "_module_parameters": "code that lists what is averaged",
    "_register_buffer_comm_hook": "users of DistributedDataParallel's buffer hooks",
    "_register_builtin_comm_hook": "users of the hooks in C++",
    "_register_fused_optim": "users of overlapped optimizers",
    "_remove_autograd_hooks": "code that wraps a module again",
    "_set_ddp_runtime_logging_sample_rate": "users of the logging data",
    "_set_ddp_sink_clone": "users whose outputs are large",
    "_set_params_and_buffers_to_ignore_for_model": "users with parameters of one rank alone",
    "_set_sparse_metadata": "users of sparse embeddings",
    "_set_static_graph": "trainers that decide after construction",
    "_update_process_group": "elastic training",
}
REACHED_FOR_IN_REDUCER = {
    "_delay_all_reduce": "Lightning's DDP strategy, with a static graph",
    "_rebuild_buckets": "Lightning's prepare_for_backward, and its copies",
    "_run_allreduce_hook": "torch's mixed precision and in-backward optimizer hooks",
    "prepare_for_backward": "pipelining's stages, Accelerate's trigger_sync_in_backward, Lightning",
}

SET_IN_INIT = {"_comm_hooks", "_has_rebuilt_buckets", "_join_config", "_module_parameters"}

# Instances only differ in these values, which have no meaning here.
OTHER_VALUES = {"logger", "modules_buffers", "process_group", "reducer", "use_side_stream_for_tensor_copies"}


def _pair() -> tuple[DistributedDataParallel, KnownDDP]:
    module = nn.Linear(2, 2)
    return DistributedDataParallel(module), KnownDDP(module)


def _lacks(rank: int) -> set[str]:
    stock, ours = _pair()
    return {*dir(stock), *vars(stock)} - {*dir(ours), *vars(ours)}


def test_every_attribute_is_there_but_for_internal_ones(ranks):
    """A name in the second set is new in torch or was added here: sort it in."""
    (lacks,) = ranks(1, _lacks)
    assert (lacks - INTERNAL, INTERNAL - lacks) == (set(), set())
    assert not [name for name in INTERNAL if not name.startswith("_")]


def _values(rank: int) -> None:
    stock, ours = _pair()
    for name in sorted(set(vars(stock)) | {"broadcast_bucket_size"}):
        if not name.startswith("_") and name not in OTHER_VALUES:
            assert (name, getattr(ours, name)) == (name, getattr(stock, name))
    for name in ("_comm_hooks", "_distributed_rank", "_has_rebuilt_buckets", "_join_config"):
        assert (name, getattr(ours, name)) == (name, getattr(stock, name))
    assert [id(p) for p in ours._module_parameters] == [id(p) for p in stock._module_parameters]
    assert ours.process_group is stock.process_group
    assert list(ours.modules_buffers) == list(stock.modules_buffers) == []
    assert ours._get_active_ddp_module() is ours._active_ddp_module is None
    assert ours.reducer._rebuild_buckets() is False
    assert ours.reducer._delay_all_reduce() is None


def test_attributes_start_with_the_same_values(ranks):
    ranks(1, _values)


@pytest.mark.parametrize("name", sorted(REACHED_FOR))
def test_private_names_that_others_reach_for_are_there(ranks, name):
    assert hasattr(DistributedDataParallel, name) or name in SET_IN_INIT
    assert ranks(1, _has, name) == [True]


def _has(rank: int, name: str) -> bool:
    return hasattr(_pair()[1], name)


@pytest.mark.parametrize("name", sorted(REACHED_FOR_IN_REDUCER))
def test_private_names_of_the_reducer_that_others_reach_for_are_there(ranks, name):
    assert hasattr(dist.Reducer, name)  # type: ignore[attr-defined]
    assert ranks(1, _reducer_has, name) == [True]


def _reducer_has(rank: int, name: str) -> bool:
    return hasattr(_pair()[1].reducer, name)


def _logged(rank: int, options: dict[str, Any]) -> set[str]:
    """Names that only stock logs after five steps; values of the others are the same, but for times."""
    found = []
    for kind in (DistributedDataParallel, KnownDDP):
        torch.manual_seed(0)
        model = kind(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), **options)
        for _ in range(5):
            model(torch.ones(4, 2)).sum().backward()
        found.append(model._get_ddp_logging_data())
    stock, ours = found
    timeless = {name for name in stock.keys() & ours.keys() if "time" not in name}
    assert {name: ours[name] for name in timeless} == {name: stock[name] for name in timeless}
    return stock.keys() - ours.keys()


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 1}, {"static_graph": True}])
def test_all_that_stock_logs_is_logged(ranks, options):
    assert ranks(1, _logged, options) == [set()]


def _described(function: Callable[..., Any]) -> list[tuple[str, object, object]]:
    """Name, kind and default of each argument."""
    return [
        (one.name, one.kind, one.default.name if isinstance(one.default, Enum) else one.default)
        for one in inspect.signature(function).parameters.values()
    ]


OWN_ARGUMENTS = ["unused_agreement", "own_group", "reduce_dtype"]


def test_the_constructor_takes_the_same_arguments_and_after_them_its_own_by_keyword():
    """``bucket_cap_mb`` and the rest, in order, with defaults: positional calls mean the same."""
    stock, ours = _described(DistributedDataParallel), _described(KnownDDP)
    assert ours[: len(stock)] == stock
    assert [name for name, _, _ in ours[len(stock) :]] == OWN_ARGUMENTS
    assert {kind for _, kind, _ in ours[len(stock) :]} == {inspect.Parameter.KEYWORD_ONLY}


def _methods() -> list[str]:
    own = set(dir(DistributedDataParallel)) - set(dir(nn.Module)) - INTERNAL
    return sorted(name for name in own if inspect.isroutine(getattr(DistributedDataParallel, name)))


@pytest.mark.parametrize("name", _methods())
def test_each_method_takes_the_same_arguments(name):
    assert _described(getattr(KnownDDP, name)) == _described(getattr(DistributedDataParallel, name))


def test_forward_takes_one_argument_more():
    stock, ours = _described(DistributedDataParallel.forward), _described(KnownDDP.forward)
    kinds = [(kind, default) for _, kind, default in stock]
    assert [(kind, default) for name, kind, default in ours if name != "unused_parameters"] == kinds
    assert ("unused_parameters", inspect.Parameter.KEYWORD_ONLY, None) in ours


@pytest.mark.parametrize("name", ["_set_params_and_buffers_to_ignore_for_model", "_get_data_parallel_params"])
def test_what_is_called_on_the_class_can_be(name):
    assert isinstance(inspect.getattr_static(DistributedDataParallel, name), staticmethod | classmethod)
    assert isinstance(inspect.getattr_static(KnownDDP, name), staticmethod | classmethod)
