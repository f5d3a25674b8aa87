"""The constructor's arguments, gathered at the door into one value that also holds what follows from them."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from . import _torch_private as private
from .comm import is_initialized
from .errors import ArgumentError, MeshError
from .precision import Precision, choose_precision
from .protocol import Agreement
from .replicas import examine

MIB = 2**20
# DistributedDataParallel's: a small first bucket starts the wire early, later ones amortise latency.
DEFAULT_FIRST_CAP_BYTES = 1 * MIB
DEFAULT_CAP_BYTES = 25 * MIB
# Over gloo few in all, as each takes turns of its threads. Where much is sent the first ones are small: a slow link is
# busy soon, and when one is through there the next one is ready.
GLOO_CAP_BYTES = (4 * MIB, 8 * MIB, 16 * MIB, 25 * MIB)
GLOO_CAP_BYTES_OF_MUCH = (1 * MIB, 2 * MIB, 8 * MIB, 16 * MIB, 25 * MIB)

STATIC_FINDS = (
    "find_unused_parameters=True does nothing beside static_graph=True: the first backward shows which parameters are "
    "unused, and that may not change."
)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the replicas of a module are, the module itself being the first, and where outputs are joined."""

    devices: tuple[torch.device, ...]
    output: torch.device


@dataclass(frozen=True, slots=True)
class Options:
    """What the rest of the library needs to know of the arguments."""

    device: torch.device | None  # where inputs are moved to; None leaves them where they are
    placement: Placement | None  # of replicas inside this process; None: the module runs as it is
    init_sync_buffers: bool
    forward_sync_buffers: bool
    cap_bytes: tuple[int, ...] | None  # None: ``default_cap_bytes``
    find_unused_parameters: bool
    static_graph: bool
    delayed: tuple[str, ...]  # names of parameters that are launched only when the backward is over
    precision: Precision | None  # in which the module computes; None: in that of its parameters
    reduce_dtype: torch.dtype | None  # what real floating-point gradients travel in; None: their own dtype
    agreement: Agreement
    own_group: bool

    def shared(self) -> dict[str, object]:
        """What must be the same on every rank."""
        return {
            "init_sync_buffers": self.init_sync_buffers,
            "forward_sync_buffers": self.forward_sync_buffers,
            "bucket_cap_mb": tuple(cap / MIB for cap in self.cap_bytes) if self.cap_bytes else None,
            "find_unused_parameters": self.find_unused_parameters,
            "static_graph": self.static_graph,
            "delay_all_reduce_named_params": self.delayed,
            "mixed_precision": self.precision,
            "reduce_dtype": str(self.reduce_dtype),
            "unused_agreement": self.agreement.value,
            "own_group": self.own_group,
        }


def gather_options(
    *,
    device: torch.device | None,
    placement: Placement | None,
    broadcast_buffers: bool | None,
    forward_sync_buffers: bool | None,
    bucket_cap_mb: float | None,
    bucket_cap_mb_list: Sequence[float] | None,
    find_unused_parameters: bool,
    static_graph: bool,
    check_reduction: bool,
    delay_all_reduce_named_params: Iterable[tuple[str, torch.nn.Parameter]] | None,
    param_to_hook_all_reduce: torch.nn.Parameter | None,
    mixed_precision: object,
    reduce_dtype: torch.dtype | None,
    unused_agreement: str,
    own_group: bool,
) -> Options:
    """Check the arguments against each other.

    Raises:
        ArgumentError: a value that makes no sense.
    """
    if broadcast_buffers is not None:
        _warn_of_broadcast_buffers(forward_sync_buffers)
    if check_reduction:
        text = "The `check_reduction` argument is deprecated: every backward ends with a check, and it does nothing."
        warnings.warn(text, FutureWarning, stacklevel=3)
    if static_graph and find_unused_parameters:
        warnings.warn(STATIC_FINDS, stacklevel=3)
    if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
        raise ArgumentError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time."
        )
    precision = choose_precision(mixed_precision)
    if reduce_dtype is None and precision is not None:
        reduce_dtype = precision.reduce_dtype
    if reduce_dtype is not None and not (isinstance(reduce_dtype, torch.dtype) and reduce_dtype.is_floating_point):
        raise ArgumentError(
            f"reduce_dtype must be a real floating-point dtype, got {reduce_dtype!r}.\n"
            "Fix: a torch.dtype, such as torch.float32 or torch.bfloat16."
        )
    try:
        agreement = Agreement(unused_agreement)
    except ValueError:
        known = ", ".join(repr(mode.value) for mode in Agreement)
        raise ArgumentError(f"unused_agreement must be one of {known}, got {unused_agreement!r}") from None
    old = True if broadcast_buffers is None else broadcast_buffers
    return Options(
        device=device,
        placement=placement,
        init_sync_buffers=old if forward_sync_buffers is None else True,
        forward_sync_buffers=old if forward_sync_buffers is None else forward_sync_buffers,
        cap_bytes=_cap_bytes(bucket_cap_mb, bucket_cap_mb_list),
        find_unused_parameters=find_unused_parameters,
        static_graph=static_graph,
        delayed=tuple(name for name, _ in delay_all_reduce_named_params or ()),
        reduce_dtype=reduce_dtype,
        precision=precision,
        agreement=agreement,
        own_group=own_group,
    )


def default_cap_bytes(backend: str, *, of_much: bool) -> tuple[int, ...]:
    """Limits where none are given, by the backend that carries the gradients. ``of_much``: see ``plan.MUCH_BYTES``."""
    if backend != "gloo":
        return DEFAULT_FIRST_CAP_BYTES, DEFAULT_CAP_BYTES
    return GLOO_CAP_BYTES_OF_MUCH if of_much else GLOO_CAP_BYTES


def _cap_bytes(bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None) -> tuple[int, ...] | None:
    """Limits in bytes: the first for the first bucket and so on, the last one for all others. None: none are given."""
    if bucket_cap_mb is None and not bucket_cap_mb_list:
        return None
    caps = list(bucket_cap_mb_list) if bucket_cap_mb_list else [bucket_cap_mb]
    if not all(cap is not None and 0 < cap < math.inf for cap in caps):
        name = "bucket_cap_mb_list" if bucket_cap_mb_list else "bucket_cap_mb"
        raise ArgumentError(f"{name} is in MiB and must be positive, got {caps if bucket_cap_mb_list else caps[0]}")
    return tuple(max(1, int(cap * MIB)) for cap in caps if cap is not None)


def _warn_of_broadcast_buffers(forward_sync_buffers: bool | None) -> None:
    if forward_sync_buffers is not None:
        text = "`broadcast_buffers` is deprecated, and ignored since `forward_sync_buffers` is given."
    else:
        text = (
            "`broadcast_buffers` is deprecated in favour of `forward_sync_buffers`. They differ in one thing: "
            "`broadcast_buffers=False` also leaves buffers unsynchronised at construction."
        )
    warnings.warn(text, FutureWarning, stacklevel=4)


def are_several(device_ids: Sequence[Any] | None) -> bool:
    """Whether replicas are asked for."""
    return isinstance(device_ids, Sequence) and not isinstance(device_ids, str) and len(device_ids) > 1


def choose_group(
    module: nn.Module,
    process_group: dist.ProcessGroup | None,
    device_mesh: private.DeviceMesh | None,
    device_ids: Sequence[Any] | None,
) -> dist.ProcessGroup | None:
    """The group to average over; None if there is none and several devices of this process are asked for.

    A mesh that was cut out of a larger one means that ``module`` is sharded over the other dimension (tensor
    parallelism): its parameters are then replaced by the shards they are made of, as DistributedDataParallel does.
    """
    if device_mesh is not None:
        if process_group is not None:
            raise MeshError("Cannot specify both process_group and device_mesh arguments.")
        if device_mesh.ndim != 1:
            raise MeshError(f"Only 1D device mesh is supported, but got {device_mesh}.")
        if are_several(device_ids):
            raise MeshError("a device_mesh goes with one device for each process, not with several device_ids.")
        private.unshard_if_submesh(module, device_mesh)
        return device_mesh.get_group(mesh_dim=0)
    if process_group is None and is_initialized():
        return private.default_group()
    if process_group is None and are_several(device_ids):
        return None
    if process_group is None:
        raise ArgumentError(
            "Default process group has not been initialized, and none was given.\n"
            "Fix: start the program with torchrun and call torch.distributed.init_process_group() before wrapping. For "
            'one process alone no group is needed if device_ids name several devices, such as ["cpu", "cpu"].'
        )
    if not isinstance(process_group, dist.ProcessGroup):
        raise ArgumentError(
            f"process_group must be a ProcessGroup that this rank belongs to, got {process_group!r}.\n"
            "Fix: only members of a group may construct KnownDDP over it."
        )
    return process_group


def choose_device(module: nn.Module, device_ids: Sequence[Any] | None, output_device: Any) -> torch.device | None:
    """Where the module's inputs go.

    Returns None where ``device_ids`` is not given or empty, names the CPU, or names several devices: inputs then stay
    where they are, or are split by ``Replicas``.

    Raises:
        ArgumentError: a device that the module is not on.
    """
    if device_ids is not None and (isinstance(device_ids, str) or not isinstance(device_ids, Sequence)):
        raise ArgumentError(
            f"device_ids takes a list of devices, got {device_ids!r}.\n"
            f"Fix: device_ids=[{device_ids!r}], or leave it out."
        )
    if not device_ids:
        if output_device is not None:
            raise ArgumentError(f"output_device={output_device!r} needs device_ids")
        return None
    if are_several(device_ids):
        return None
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


def choose_placement(module: nn.Module, device_ids: Sequence[Any] | None, output_device: Any) -> Placement | None:
    """The devices of the replicas, if ``device_ids`` names several.

    Raises:
        ArgumentError: integers for a module on the CPU, an accelerator twice, a module that is not on the first one.
        ModelError: a module that cannot be replicated.
    """
    if device_ids is None or not are_several(device_ids):
        return None
    found = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    given = [*device_ids] if output_device is None else [*device_ids, output_device]
    if all(device.type == "cpu" for device in found) and any(isinstance(device, int) for device in given):
        raise ArgumentError(
            "device_ids can only be None or contain a single element, or names of devices: integers name accelerators, "
            f"but the module is on the CPU: {given}.\n"
            f"Fix: move the module to the first device, or device_ids={['cpu'] * len(device_ids)}."
        )
    devices = tuple(_device(device, found) for device in device_ids)
    if found - {devices[0]}:
        raise ArgumentError(
            f"with several device_ids the module must have its parameters and buffers on device_ids[0], {devices[0]}, "
            f"but some are on {', '.join(sorted(str(device) for device in found - {devices[0]}))}.\n"
            "Fix: move the module there first."
        )
    accelerators = [device for device in devices if device.type != "cpu"]
    if len(set(accelerators)) < len(accelerators):
        raise ArgumentError(f"device_ids name a device twice: {list(device_ids)}")
    examine(module, devices)
    return Placement(devices, devices[0] if output_device is None else _device(output_device, found))


def _device(given: Any, found: set[torch.device]) -> torch.device:
    if isinstance(given, int):
        kinds = {d.type for d in found} - {"cpu"}
        return torch.device(kinds.pop() if len(kinds) == 1 else "cuda", given)
    device = torch.device(given)
    if device.type == "cpu":
        return torch.device("cpu")
    return device if device.index is not None else torch.device(device.type, 0)


def refuse_own_unused_argument(module: nn.Module) -> None:
    """A module whose ``forward`` takes ``unused_parameters`` itself would never receive it.

    Raises:
        ArgumentError: with the way out.
    """
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"KnownDDP wraps a torch.nn.Module, got {type(module).__name__}.")
    if isinstance(module, DistributedDataParallel):
        return  # a wrapper in a wrapper: the outer one has nothing to reduce, and nothing to declare
    try:
        parameters = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # a forward without a readable signature
        return
    if "unused_parameters" in parameters:
        raise ArgumentError(
            f"{type(module).__name__}.forward has an argument named unused_parameters, which KnownDDP takes itself.\n"
            "Fix: rename it in the module, or declare with `with model.unused(layers):` or model.mark_unused(layers)."
        )
