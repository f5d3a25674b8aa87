"""What one rank does to run one of torch's tests: load it, choose the wrapper, make GPUs mean the CPU, call it."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import io
import os
import sys
import tempfile
import traceback
import types
import unittest
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock
from torch_suite_shims import gpus_are_cpus, nothing_is_skipped
from torch_suite_stand_ins import stand_ins
from torch_suite_syncbn import with_constants

from knownddp import KnownDDP

WRAPPERS: dict[str, type[nn.Module]] = {"stock": Stock, "known": KnownDDP}
# Shorter than torch's own minute: a test that waits this long for a peer has failed.
GROUP_TIMEOUT_S = 20
# Pictures of 1000 times 1000 pixels keep a CPU busy for an hour.
SMALLER = {"test_ddp_uneven_inputs": {1000: 24}}


def run_test(
    rank: int, world_size: int, module: str, owner: str, test: str, wrapper: str, as_shipped: bool, folder: str
) -> tuple[str, str]:
    """One test on this rank, in a process group of its own.

    Returns:
        What happened, "passed", "failed" or "skipped", and why.
    """
    os.environ.update(
        {
            "BACKEND": "gloo",
            "WORLD_SIZE": str(world_size),
            "TEMP_DIR": folder,
            "INIT_METHOD": f"file://{folder}/init_dir/shared_init_file",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
        }
    )
    dist.destroy_process_group()
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), _as_found():
        kind, why = _run(rank, world_size, module, owner, test, WRAPPERS[wrapper], as_shipped, folder)
    why = f"{why}\n{said.getvalue()[-3000:]}" if kind == "failed" else why
    if kind == "failed" and makes_own_group(module):
        raise RuntimeError(why)  # at once: peers may wait for this rank in vain, and the processes are of no more use
    _leave_groups()
    try:
        _join_group(rank, world_size, f"{folder}/store_after", limit_s=GROUP_TIMEOUT_S if kind == "passed" else 5)
    except Exception:
        raise RuntimeError(f"could not go on after the test {kind}:\n{why}") from None
    return kind, why


def _run(
    rank: int, world_size: int, module: str, owner: str, test: str, wrapper: Any, as_shipped: bool, folder: str
) -> tuple[str, str]:
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_distributed import TEST_SKIPS

    loaded = _load(module, as_shipped)
    case = _case(loaded, owner)(test)
    case.rank, case.file_name = rank, f"{folder}/file"
    if not makes_own_group(module):
        limit_s = loaded.CUSTOM_PG_TIMEOUT.get(test, GROUP_TIMEOUT_S)
        _join_group(rank, world_size, f"{folder}/store", limit_s)
        loaded.Barrier.barrier_id = 0
        case._barrier()
    common_utils.set_rng_seed()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(tempfile, "tempdir", folder))
            stack.enter_context(mock.patch.object(nn.parallel, "DistributedDataParallel", wrapper))
            stack.enter_context(mock.patch.object(loaded, "DistributedDataParallel", wrapper, create=True))
            if not as_shipped:
                stack.enter_context(stand_ins(case, test, wrapper))
                stack.enter_context(gpus_are_cpus(wrapper))
                if test in SMALLER:
                    method = with_constants(getattr(loaded.DistributedTest._DistTestBase, test), SMALLER[test])
                    stack.enter_context(mock.patch.object(case, test, types.MethodType(method, case)))
            getattr(case, test)()
            if not makes_own_group(module):
                case._barrier()
    except unittest.SkipTest as skip:
        return "skipped", str(skip)
    except SystemExit as leave:
        return "skipped", next((s.message for s in TEST_SKIPS.values() if s.exit_code == leave.code), repr(leave))
    except Exception:
        return "failed", traceback.format_exc()
    return "passed", ""


def makes_own_group(module: str) -> bool:
    """Whether the tests of a module call ``init_process_group`` themselves, beside RPC."""
    return "rpc" in module or "autograd" in module


@functools.cache
def _load(module: str, as_shipped: bool) -> types.ModuleType:
    """torch's module of tests, under a name of its own unless as shipped: its decorators act when it is imported."""
    if as_shipped:
        return importlib.import_module(module)
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None and spec.loader is not None
    name = f"without_skips_{Path(spec.origin).stem}"
    spec = importlib.util.spec_from_file_location(name, spec.origin)
    assert spec is not None and spec.loader is not None
    loaded = sys.modules[name] = importlib.util.module_from_spec(spec)
    with nothing_is_skipped():
        spec.loader.exec_module(loaded)
    return loaded


@functools.cache
def _case(loaded: types.ModuleType, owner: str) -> type[Any]:
    """The test class as torch's test runner puts it together, of which the wheel has the parts."""
    from torch.testing._internal.common_utils import TestCase

    if hasattr(loaded, "TestDistBackend"):
        return type(owner, (loaded.TestDistBackend, loaded.DistributedTest._DistTestBase), {})
    from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture

    return type(owner, (TensorPipeRpcAgentTestFixture, getattr(loaded, owner), TestCase), {})


@contextlib.contextmanager
def _as_found() -> Iterator[None]:
    """Restores what tests leave behind: the environment, warnings, the debug level, torch's compiler."""
    before, threads = dict(os.environ), torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)
            dist.set_debug_level(dist.DebugLevel.OFF)
            torch.set_num_threads(threads)
            if "torch._dynamo" in sys.modules:
                torch._dynamo.reset()
            gc.collect()


def _join_group(rank: int, world_size: int, path: str, limit_s: float) -> None:
    store = dist.FileStore(path, world_size)
    timeout = timedelta(seconds=limit_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def _leave_groups() -> None:
    from torch.distributed.rpc import api

    if api._is_current_rpc_agent_set():
        api.shutdown(graceful=False)
    if dist.is_initialized():
        dist.destroy_process_group()
