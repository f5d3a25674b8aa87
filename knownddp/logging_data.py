"""DistributedDataParallel's logging data, as far as it has a meaning here. Times are in nanoseconds, of the host."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from . import _torch_private as private
from .reducer import Reducer
from .stats import Times

FIRST_STEPS = 10  # whose times are all taken

# By name in the logging data; what is not set reads "N/A", as in torch.
_ENVIRONMENT = {
    "": ("MASTER_ADDR", "MASTER_PORT", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES"),
    "gloo": ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
    "nccl": (
        *("NCCL_SOCKET_IFNAME", "TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        *("NCCL_DEBUG", "NCCL_NTHREADS", "NCCL_IB_TIMEOUT"),
    ),
}


class LoggingData:
    """Samples the times of steps, and describes a wrapper.

    Args:
        constant: what never changes after construction, by the names of DistributedDataParallel.
    """

    def __init__(self, constant: Mapping[str, Any]) -> None:
        self.sample_rate = 100
        self._constant = dict(constant)
        self._forwards = 0
        self._sampled: dict[str, int] = {}
        self._sums: dict[str, int] = {}
        self._samples = 0

    def forward_begins(self, times: Times) -> None:
        """A synchronising forward begins: sample the step before it, one in ``sample_rate`` after the first ten."""
        step, self._forwards = self._forwards, self._forwards + 1
        if step and times.closed and (step < FIRST_STEPS or step % self.sample_rate == 0):
            durations = times.durations()
            for name, spent in durations.items():
                self._sums[name] = self._sums.get(name, 0) + spent
            self._samples += 1
            self._sampled = {"iteration": step, **durations, **times.moments()}
        times.restart()

    def collect(self, module: nn.Module, reducer: Reducer, *, joins: bool) -> dict[str, Any]:
        """Everything, in one dictionary."""
        params, plan = reducer.params, reducer.protocol.plan
        trainable = [p for p in params.live if p is not None and p.requires_grad]
        if not plan.buckets:  # no backward yet
            plan = reducer.planner.plan(bytes(params.trainable))
        sizes = ", ".join(str(sum(params.specs[i].nbytes for i in bucket.param_indices)) for bucket in plan.buckets)
        data = {
            **self._constant,
            **_environment(self._constant["backend_name"]),
            "dtypes": ", ".join(sorted({private.scalar_type_name(p.dtype) for p in trainable})),
            "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in trainable),
            "num_parameter_tensors": len(trainable),
            "bucket_sizes": sizes,
            "comm_hook": reducer.hook_name,
            "has_sync_bn": any(isinstance(m, nn.SyncBatchNorm) for m in module.modules()),
            "join_uneven_inputs": joins,
            "static_graph": int(reducer.history.is_promised),
            "can_set_static_graph": reducer.history.is_static,
            # With detection every set has buckets of its own.
            "has_rebuilt_buckets": int(reducer.planner.has_learnt and not reducer.find_unused),
            "num_buckets_reduced": len(plan.buckets),
            "unused_parameter_size": sum(
                s.nbytes for i, s in enumerate(params.specs) if params.trainable[i] and not reducer.protocol.agreed[i]
            ),
            **self._sampled,
            **{f"avg_{name}": total // self._samples for name, total in self._sums.items()},
        }
        if reducer.planner.has_learnt:
            data["rebuilt_bucket_sizes"] = sizes
            data["rebuilt_per_bucket_param_indices"] = ", ".join(
                _listed(params.stock_indices(bucket.param_indices), " ") for bucket in plan.buckets
            )
            ready = [i for i in reducer.planner.order if reducer.protocol.agreed[i]]
            data["prev_iteration_grad_ready_order_indices"] = _listed(params.stock_indices(ready), ", ")
        if reducer.last_error:
            data |= {"has_error": 1, "error": reducer.last_error}
        return {name: value for name, value in data.items() if value != "" or name == "device_ids"}


def _listed(indices: Iterable[int], separator: str) -> str:
    return separator.join(map(str, indices))


def _environment(backend: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        name.lower().replace("torch_nccl", "nccl"): os.environ.get(name, "N/A")
        for name in (*_ENVIRONMENT[""], *_ENVIRONMENT.get(backend, ()))
    }
    if backend == "gloo":
        found["gloo_num_threads"] = 2
    return found


def describe(module: nn.Module, **constant: Any) -> dict[str, Any]:
    """What never changes: the module's name and torch's version, and what is given."""
    return {"module_name": type(module).__name__, "torch_version": torch.__version__, "iteration": 0, **constant}
