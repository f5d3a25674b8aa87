"""The constructor's arguments, gathered at the door into one value that also holds what follows from them."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from . import _torch_private as private
from .errors import ArgumentError
from .precision import Precision, choose_precision
from .protocol import Agreement

MIB = 2**20
# DistributedDataParallel's: a small first bucket starts the wire early, later ones amortise latency.
DEFAULT_FIRST_CAP_BYTES = 1 * MIB
DEFAULT_CAP_BYTES = 25 * MIB

# Arguments that exist so that code written for DistributedDataParallel is understood, with their defaults there.
NOT_YET: dict[str, object] = {
    "check_reduction": False,
    "static_graph": False,
    "delay_all_reduce_named_params": None,
    "param_to_hook_all_reduce": None,
    "device_mesh": None,
    "skip_all_reduce_unused_params": False,
    "bucket_cap_mb_list": None,
    "batched_grad_copy": False,
}


@dataclass(frozen=True, slots=True)
class Options:
    """What the rest of the library needs to know of the arguments."""

    device: torch.device | None  # where inputs are moved to; None leaves them where they are
    init_sync_buffers: bool
    forward_sync_buffers: bool
    cap_bytes: tuple[int, ...]
    find_unused_parameters: bool
    agreement: Agreement
    own_group: bool
    precision: Precision | None

    def shared(self) -> dict[str, object]:
        """What must be the same on every rank."""
        return {
            "init_sync_buffers": self.init_sync_buffers,
            "forward_sync_buffers": self.forward_sync_buffers,
            "bucket_cap_mb": tuple(cap / MIB for cap in self.cap_bytes),
            "find_unused_parameters": self.find_unused_parameters,
            "unused_agreement": self.agreement.value,
            "own_group": self.own_group,
            "mixed_precision": self.precision,
        }


def gather_options(
    *,
    device: torch.device | None,
    broadcast_buffers: bool | None,
    forward_sync_buffers: bool | None,
    bucket_cap_mb: float | None,
    find_unused_parameters: bool,
    unused_agreement: str,
    own_group: bool,
    mixed_precision: object,
    not_yet: dict[str, object],
) -> Options:
    """Check the arguments against each other.

    Raises:
        NotImplementedError: an argument that does nothing yet was given another value than its default.
        ArgumentError: a value that makes no sense.
    """
    for name, value in not_yet.items():
        if value != NOT_YET[name]:
            raise NotImplementedError(f"KnownDDP does not support {name}={value!r} yet; leave it at {NOT_YET[name]!r}")
    if broadcast_buffers is not None:
        _warn_of_broadcast_buffers(forward_sync_buffers)
    if bucket_cap_mb is not None and not 0 < bucket_cap_mb < math.inf:
        raise ArgumentError(f"bucket_cap_mb is a size in MiB and must be positive, got {bucket_cap_mb}")
    try:
        agreement = Agreement(unused_agreement)
    except ValueError:
        known = ", ".join(repr(mode.value) for mode in Agreement)
        raise ArgumentError(f"unused_agreement must be one of {known}, got {unused_agreement!r}") from None
    old = True if broadcast_buffers is None else broadcast_buffers
    return Options(
        device=device,
        init_sync_buffers=old if forward_sync_buffers is None else True,
        forward_sync_buffers=old if forward_sync_buffers is None else forward_sync_buffers,
        cap_bytes=(DEFAULT_FIRST_CAP_BYTES, DEFAULT_CAP_BYTES)
        if bucket_cap_mb is None
        else (max(1, int(bucket_cap_mb * MIB)),),
        find_unused_parameters=find_unused_parameters,
        agreement=agreement,
        own_group=own_group,
        precision=choose_precision(mixed_precision),
    )


def _warn_of_broadcast_buffers(forward_sync_buffers: bool | None) -> None:
    if forward_sync_buffers is not None:
        text = "`broadcast_buffers` is deprecated, and ignored since `forward_sync_buffers` is given."
    else:
        text = (
            "`broadcast_buffers` is deprecated in favour of `forward_sync_buffers`. They differ in one thing: "
            "`broadcast_buffers=False` also leaves buffers unsynchronised at construction."
        )
    warnings.warn(text, FutureWarning, stacklevel=4)


def choose_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group to average over."""
    if process_group is None:
        return private.default_group()
    if not isinstance(process_group, dist.ProcessGroup):
        raise ArgumentError(
            f"process_group must be a ProcessGroup that this rank belongs to, got {process_group!r}.\n"
            "Fix: only members of a group may construct KnownDDP over it."
        )
    return process_group


def choose_device(module: nn.Module, device_ids: Sequence[Any] | None, output_device: Any) -> torch.device | None:
    """Where the module's inputs go.

    Returns None where ``device_ids`` is not given or empty, or names the CPU: inputs then stay where they are.

    Raises:
        NotImplementedError: several devices.
        ArgumentError: a device that the module is not on.
    """
    if not device_ids:
        if output_device is not None:
            raise ArgumentError(f"output_device={output_device!r} needs device_ids")
        return None
    if len(device_ids) > 1:
        on_cpu = all(p.device.type == "cpu" for p in module.parameters())
        if on_cpu and any(isinstance(d, int) for d in device_ids):
            raise ArgumentError(
                f"device_ids can only be None or contain a single element, and integers name accelerators, but the "
                f"module is on the CPU: {list(device_ids)}"
            )
        raise NotImplementedError(f"KnownDDP does not support several device_ids yet, got {list(device_ids)}")
    found = {p.device for p in module.parameters()}
    wanted = _device(device_ids[0], found)
    if found != {wanted}:
        raise ArgumentError(
            f"DistributedDataParallel device_ids and output_device arguments only work with single-device GPU modules: "
            f"device_ids={list(device_ids)} and output_device={output_device!r}, but parameters are on "
            f"{sorted(map(str, found))}.\nFix: move the module there first, or leave device_ids out."
        )
    if output_device is not None and _device(output_device, found) != wanted:
        raise ArgumentError(f"output_device={output_device!r} is not device_ids[0]={device_ids[0]!r}")
    return None if wanted.type == "cpu" else wanted


def _device(given: Any, found: set[torch.device]) -> torch.device:
    if isinstance(given, int):
        kinds = {d.type for d in found} - {"cpu"}
        return torch.device(kinds.pop() if len(kinds) == 1 else "cuda", given)
    device = torch.device(given)
    return device if device.type == "cpu" or device.index is not None else torch.device(device.type, 0)


def refuse_own_unused_argument(module: nn.Module) -> None:
    """A module whose ``forward`` takes ``unused_parameters`` itself would never receive it.

    Raises:
        ArgumentError: with the way out.
    """
    try:
        parameters = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # a forward without a readable signature
        return
    if "unused_parameters" in parameters:
        raise ArgumentError(
            f"{type(module).__name__}.forward has an argument named unused_parameters, which KnownDDP takes itself.\n"
            "Fix: rename it in the module, or declare with `with model.unused(layers):` or model.mark_unused(layers)."
        )
