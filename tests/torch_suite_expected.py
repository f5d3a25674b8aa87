"""Which of torch's own tests are expected to fail here, and why. Every other test is expected to pass."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """Why a test cannot pass, and what its failure says: one that says something else is not the expected one."""

    text: str
    says: str

    def __str__(self) -> str:
        return self.text


# Whatever the wrapper is.
ON_THE_CPU = {
    "test_ddp_device": Reason(
        "compares the index of each input's device with the rank; a tensor on the CPU has no index", "device.index"
    ),
    "test_ddp_logging_data_gpu": Reason(
        "asserts that the logging data list device_ids; on the CPU there are none", 'get("device_ids")'
    ),
    "test_ddp_profiling_execution_trace": Reason("asserts that the backend is nccl", "'gloo' != 'nccl'"),
}

_RPC = Reason(
    "uses distributed autograd, which KnownDDP leaves out: a forward in torch.distributed.autograd.context() raises "
    "UsageError on every rank",
    "KnownDDP leaves distributed autograd out",
)
_PROFILE = Reason(
    "asserts one all-reduce a step and an event named search_unused_parameters; KnownDDP's messages about what a step "
    "leaves unused are all-reduces too, and it searches no graph",
    "self.assertEqual(event_count, num_iters)",
)
_PARAM_NAMES = Reason(
    "calls private methods alone, _build_params_for_reducer and _build_debug_param_to_name_mapping, which KnownDDP has "
    "no use for",
    "no attribute '_build_params_for_reducer'",
)

OWN = {
    "known": {
        "test_backward_ddp_outside": _RPC,
        "test_backward_ddp_outside_uneven_inputs": _RPC,
        "test_backward_ddp_inside": _RPC,
        "test_ddp_comparison": _RPC,
        "test_ddp_comparison_uneven_inputs": _RPC,
        "test_ddp_dist_autograd_sparse_grads": _RPC,
        "test_ddp_dist_autograd_local_vs_remote": _RPC,
        "test_ddp_dist_autograd_local_vs_remote_gpu": _RPC,
        "test_ddp_native_mixed_precision_ignored_params": Reason(
            "checks nothing but the attributes _mp_param and _fp_param, which stock gives the parameters that it casts",
            "no attribute '_mp_param'",
        ),
        "test_ddp_profiling_autograd_profiler": _PROFILE,
        "test_ddp_profiling_torch_profiler": _PROFILE,
        "test_compute_bucket_assignment_by_size_sparse_error_with_logger": Reason(
            "hands stock's C++ Logger to a C++ function of torch's and asserts that its error is logged; KnownDDP has "
            "no such object, and the same test without a logger passes",
            "Expected 'has_error' in ddp_logging_data",
        ),
        "test_ddp_build_debug_param_to_name_mapping": _PARAM_NAMES,
        "test_ddp_build_debug_param_to_name_mapping_requires_grad": _PARAM_NAMES,
        "test_ddp_has_finalized": Reason(
            "asserts an error: stock cannot look into an object of a type it does not know, takes what leads there for "
            "used and waits for it; KnownDDP asks the engine, and the backward ends well (torch skips the test)",
            "RuntimeError not raised",
        ),
        "test_skip_all_reduce_unused_parameters": Reason(
            "asserts that without skip_all_reduce_unused_params an unused parameter is sent; KnownDDP never sends it",
            "Expected 2 but got 1",
        ),
    },
    "stock": {
        "test_ddp_has_finalized": Reason("its ranks wait for each other until the time-out (torch skips it)", ""),
        "test_DistributedDataParallel": Reason(
            "parameters differ between ranks after a wrapper with static_graph was saved and loaded",
            "Tensor-likes are not close",
        ),
    },
}


def expected_failures(wrapper: str) -> dict[str, Reason]:
    """The reason for each test that cannot pass on ``wrapper``, by its name."""
    return {**ON_THE_CPU, **OWN[wrapper]}


def judge(kind: str, why: str, reason: Reason | None) -> str:
    """ "passed", "as listed" for a test that fails as ``reason`` tells, or "unexpected"."""
    if reason is None:
        return "passed" if kind == "passed" else "unexpected"
    return "as listed" if kind == "failed" and reason.says in why else "unexpected"
