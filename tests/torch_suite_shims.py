"""Makes what torch's own tests say about GPUs mean the CPU, so that they run where there is none.

Everything is undone at the end. Nothing here touches what a test checks: only where tensors live.
"""

from __future__ import annotations

import contextlib
import functools
import unittest
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch_suite_syncbn import sync_batch_norm_patches

DEVICE = torch.device
FACTORIES = ("arange", "empty", "eye", "full", "ones", "rand", "randint", "randn", "tensor", "zeros")


def _on_cpu(device: Any) -> Any:
    """The CPU for anything that names a GPU: ``1``, ``"cuda"``, ``"cuda:1"``, a ``torch.device`` of it."""
    if isinstance(device, bool):
        return device
    names_gpu = isinstance(device, int) or str(device).startswith("cuda")
    return DEVICE("cpu") if names_gpu else device


def _moves(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.to`` and ``Module.to``: only the first argument can be a device."""

    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], int | str | DEVICE):
            args = (_on_cpu(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return original(self, *args, **kwargs)

    return to


def _makes(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return original(*args, **kwargs)

    return factory


def _stays(self: Any, *_args: Any, **_kwargs: Any) -> Any:
    return self


def _always(value: Any) -> Callable[..., Any]:
    """A function of anything. A new one each time: torch.compile wants no two of torch's functions the same."""
    return lambda *_args, **_kwargs: value


def _nothing() -> Callable[..., None]:
    """Something to call in vain."""
    return _always(None)


class _Stream:
    """A stream on which work is done at once."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _nothing()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_error: object) -> None:
        pass


def _mesh(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return original("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return init_device_mesh


def _without_device_ids(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kw: Any) -> None:
        return original(self, module, None, None, *args, **kw)

    return init


class _DeviceType(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, DEVICE)

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
        return DEVICE("cpu") if args and _on_cpu(args[0]) != args[0] else DEVICE(*args, **kwargs)


class _Device(metaclass=_DeviceType):
    """``torch.device``, for which a number is the CPU: without a GPU, torch's own refuses numbers."""


@contextlib.contextmanager
def gpus_are_cpus(wrapper: type[nn.Module], n_gpus: int = 8) -> Iterator[None]:
    """Inside, a test that puts things on GPUs has them on the CPU; ``wrapper`` takes no notice of ``device_ids``.

    ``torch.cuda.is_available()`` stays False: torch itself asks it, and would then start CUDA.
    """
    import torch.distributed.device_mesh as device_mesh

    patches = [
        mock.patch.object(torch.Tensor, "to", _moves(torch.Tensor.to)),
        mock.patch.object(torch.Tensor, "cuda", _stays),
        mock.patch.object(nn.Module, "to", _moves(nn.Module.to)),
        mock.patch.object(nn.Module, "cuda", _stays),
        mock.patch.object(torch.cuda, "set_device", _nothing()),
        mock.patch.object(torch.cuda, "synchronize", _nothing()),
        mock.patch.object(torch.cuda, "current_device", _always(0)),
        mock.patch.object(torch.cuda, "device_count", _always(n_gpus)),
        mock.patch.object(torch.cuda, "Stream", type("Stream", (_Stream,), {})),
        mock.patch.object(torch.cuda, "stream", _always(contextlib.nullcontext())),
        mock.patch.object(torch, "device", _Device),
        mock.patch.object(torch, "Stream", type("Stream", (_Stream,), {})),
        mock.patch.object(torch, "Event", type("Event", (_Stream,), {})),
        mock.patch.object(torch.accelerator, "current_stream", _always(_Stream())),
        mock.patch.object(device_mesh, "init_device_mesh", _mesh(device_mesh.init_device_mesh)),
        mock.patch.object(wrapper, "__init__", _without_device_ids(wrapper.__init__)),
        *(mock.patch.object(torch, name, _makes(getattr(torch, name))) for name in FACTORIES),
        *sync_batch_norm_patches(wrapper),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


@contextlib.contextmanager
def nothing_is_skipped() -> Iterator[None]:
    """A test module imported inside runs every test, whatever its decorators say about GPUs, platforms or flakiness."""
    from torch.testing._internal import common_distributed, common_utils

    def keep(*_args: Any, **_kwargs: Any) -> Callable[[Any], Any]:
        return lambda test: test

    patches = [
        mock.patch.object(common_distributed, "skip_if_no_gpu", lambda test: test),
        mock.patch.object(common_distributed, "skip_if_lt_x_gpu", keep),
        mock.patch.object(common_distributed, "requires_nccl", keep),
        mock.patch.object(common_utils, "skip_but_pass_in_sandcastle", keep),
        mock.patch.object(common_utils, "skip_but_pass_in_sandcastle_if", keep),
        mock.patch.object(common_distributed, "skip_but_pass_in_sandcastle", keep),
        mock.patch.object(common_distributed, "skip_but_pass_in_sandcastle_if", keep),
        mock.patch.object(unittest, "skip", keep),
        mock.patch.object(unittest, "skipIf", keep),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield
