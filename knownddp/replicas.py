"""Replicas of a module on several devices inside one process.

[Note: replicas] Replica 0 is the module itself. The others are made anew in each forward: shallow copies of its
submodules, in which differentiable copies stand in the place of parameters. So autograd carries the gradients of all
replicas into the parameters, once a backward and summed, and nothing else in the library needs to know; a parameter
that no replica used gets none. Copies of buffers are dropped with their replica.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import threading
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from . import _torch_private as private
from .errors import ModelError, ReplicaError, shorten
from .flat import is_dense
from .outputs import may_fly
from .parallel import run_parallel, separate_seeds
from .params import ORIGINAL
from .scattering import gather, scatter
from .structures import contents_of, rebuilt

MAX_DEPTH = 4  # of containers in a module's attributes that are searched for modules and parameters
ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None)})


def examine(module: nn.Module, devices: Sequence[torch.device]) -> None:
    """Refuse what cannot be replicated, and warn of what will be otherwise than one might think.

    Raises:
        ModelError: an inner data-parallel wrapper, a SyncBatchNorm or a script module.
    """
    reasons = {
        DistributedDataParallel: "it would reduce the gradients of each replica at once",
        nn.SyncBatchNorm: "each replica would issue its collectives, in any order",
        torch.jit.ScriptModule: "its compiled code cannot be given other parameters",
    }
    for name, part in module.named_modules():
        for kind, reason in reasons.items():
            if isinstance(part, kind):
                raise ModelError(
                    f"a module with several device_ids cannot hold a {type(part).__name__} ({name or 'the module'}): "
                    f"{reason}.\nFix: run one process for each device."
                )
    if len({device for device in devices if device.type != "cpu"}) > 1:
        warnings.warn(
            "one process for each device (torchrun) is faster than several device_ids in one: here threads share "
            "Python's interpreter, and parameters are copied in each forward.",
            stacklevel=4,
        )


class Replicas:
    """Runs a module on several devices: splits inputs, runs replicas in threads, joins outputs.

    Args:
        module: on ``devices[0]``.
        devices: one a replica; a device may occur several times.
        output_device: where outputs are joined.
        dim: the batch dimension of inputs and outputs.
        tell_unused: is told the indices of the parameters that all replicas of a call marked as unused.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        output_device: torch.device,
        dim: int,
        tell_unused: Callable[[frozenset[int]], object],
    ) -> None:
        self._module = module
        self._devices = tuple(devices)
        self._output_device = output_device
        self._dim = dim
        self._tell_unused = tell_unused
        self._local = threading.local()  # ``marks``: what the replica that runs in this thread does not use
        named = [(name, p) for name, p in module.named_parameters() if p.layout is torch.strided]
        loose = [name for name, p in named if not is_dense(p.shape, p.stride())]
        if loose:  # only with ``init_sync=False``: the ranks' agreement leaves none
            warnings.warn(
                f"parameters whose elements share memory or leave gaps are row-major in replicas: {shorten(loose)}.",
                stacklevel=4,
            )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """``module(*args, **kwargs)``, each replica on its part of the batch.

        Raises:
            ReplicaError: inputs cannot be split, or outputs not be joined, or the module was moved.
            What a replica raises.
        """
        self._check_place()
        given = scatter(args, kwargs, self._devices, self._dim)
        devices = self._devices[: len(given)]
        separate_seeds(devices)
        replicas = [self._module, *(replicate(self._module, device) for device in devices[1:])]
        marks: list[set[int]] = [set() for _ in given]
        calls = [
            functools.partial(self._run, replica, own_args, own_kwargs, own_marks)
            for replica, (own_args, own_kwargs), own_marks in zip(replicas, given, marks, strict=True)
        ]
        outputs = run_parallel(calls, devices)
        unused = frozenset(set.intersection(*marks))
        if unused:
            self._tell_unused(unused)
        return gather(outputs, self._output_device, self._dim)

    def _check_place(self) -> None:
        """Raises where the module was moved since it was wrapped: the devices of replicas are those of then."""
        param, device = next(self._module.parameters(), None), self._devices[0]
        if param is not None and param.device != device:
            raise ReplicaError(
                f"the module was wrapped for replicas, the first of which is on {device}, and is on {param.device}.\n"
                "Fix: wrap it again after moving it, with device_ids that begin with its device, or move it back."
            )

    def _run(self, replica: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], marks: set[int]) -> Any:
        before = getattr(self._local, "marks", None)
        self._local.marks = marks
        try:
            return replica(*args, **kwargs)
        finally:
            self._local.marks = before

    def mark_unused(self, declared: frozenset[int]) -> bool:
        """Called in a replica's forward: it does not use these. Returns whether it was indeed called there."""
        marks: set[int] | None = getattr(self._local, "marks", None)
        if marks is None:
            return False
        marks |= declared
        return True


def replicate(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy of ``module`` on ``device``, whose parameters are differentiable copies of the module's.

    Each has the strides of the original, and its gradient has too; one that is not dense is row-major. Other attributes
    are shared with the original, but for modules, parameters and methods of these, which are those of the replica.
    """
    parts = list(module.modules())
    twins: dict[int, Any] = {}
    # A weight that is computed from another (a parametrization) is no parameter, and to ask for it would compute it.
    tables = [part for part in parts if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse]
    sparse = {id(part._parameters.get("weight")) for part in tables}
    # As parameters require gradients whatever the mode, copies do: a part of the module may switch gradients on.
    with torch.inference_mode(False), torch.enable_grad():
        for part in parts:
            for param in part._parameters.values():
                if param is not None and id(param) not in twins:
                    twins[id(param)] = _twin_of(param, device, sparse_grad=id(param) in sparse)
    for part in parts:
        for buffer in part._buffers.values():
            if buffer is not None and id(buffer) not in twins:
                twins[id(buffer)] = copied(buffer, device)
    compiled = {id(part): inner for part in parts if (inner := private.compiled_part(part)) is not None}
    written = [part for part in parts if id(part) not in compiled]
    twins.update((id(part), private.shallow_copy(part)) for part in written)
    twins.update((outer, twins[id(inner)]) for outer, inner in compiled.items())  # code compiled for the original
    for part in written:
        _furnish(twins[id(part)], part, twins)
    for part in parts:
        if isinstance(part, nn.RNNBase):
            private.renew_rnn_weights(twins[id(part)])  # one chunk again, where cuDNN wants that
    replica: nn.Module = twins[id(module)]
    return replica


def _furnish(replica: nn.Module, original: nn.Module, twins: dict[int, Any]) -> None:
    """Let ``replica`` hold twins of what ``original`` holds."""
    own = vars(replica)
    for name, value in list(own.items()):
        own[name] = _translated(value, twins, MAX_DEPTH)
    for held in ("_parameters", "_buffers", "_modules"):
        # One that ``modules()`` does not list stays.
        own[held] = {name: twins.get(id(part), part) for name, part in vars(original)[held].items()}
    own[ORIGINAL] = original


def _translated(value: Any, twins: dict[int, Any], depth: int) -> Any:
    """``value`` with twins in it; itself if there is none to be had."""
    if id(value) in twins:
        return twins[id(value)]
    if type(value) in ATOMS or not depth:
        return value
    if isinstance(value, types.MethodType):
        owner = twins.get(id(value.__self__))
        return value if owner is None else types.MethodType(value.__func__, owner)
    if type(value) is weakref.ref:
        twin = twins.get(id(value()))
        return value if twin is None else weakref.ref(twin)
    if type(value) is functools.partial:
        whole = (value.func, value.args, value.keywords)
        func, args, keywords = made = _translated(whole, twins, depth)
        return value if made is whole else _like(functools.partial(func, *args, **keywords), value)
    is_set = isinstance(value, (set, frozenset, deque))
    # Containers of other kinds may be slow to go through.
    is_own = isinstance(value, (list, tuple, dict)) or dataclasses.is_dataclass(value)
    parts = value if is_set else contents_of(value) if is_own else None
    if parts is None or ATOMS.issuperset(map(type, parts)):  # all of a vocabulary, say
        return value
    translated = [_translated(part, twins, depth - 1) for part in parts]
    if all(map(operator.is_, translated, parts)):
        return value
    if not is_set:
        return rebuilt(value, translated)
    return deque(translated, value.maxlen) if isinstance(value, deque) else type(value)(translated)


def _like(made: Any, value: Any) -> Any:
    """``made`` with the attributes of ``value``: what is partial may look like what it wraps."""
    vars(made).update(vars(value))
    return made


def _twin_of(param: Tensor, device: torch.device, *, sparse_grad: bool) -> Tensor:
    make: Callable[[Tensor, torch.device], Tensor] = _CopyForSparse.apply if sparse_grad else copied
    twin = make(param, device)
    if twin.requires_grad:
        twin.register_hook(functools.partial(_laid_out, twin.stride()))  # type: ignore[no-untyped-call]
    vars(twin).update(vars(param))  # marks that users set
    setattr(twin, ORIGINAL, param)
    return twin


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """A differentiable copy on ``device`` in the strides of ``tensor``, row-major if that is not dense.

    ``tensor`` may be overwritten as soon as this returns.
    """
    if tensor.layout is not torch.strided:
        return tensor.to(device, non_blocking=may_fly(tensor, device), copy=True)
    dense = is_dense(tensor.shape, tensor.stride())
    layout = torch.preserve_format if dense else torch.contiguous_format
    if tensor.device == device:
        return tensor.clone(memory_format=layout)
    return tensor.to(device, non_blocking=may_fly(tensor, device), copy=True, memory_format=layout)


class _CopyForSparse(torch.autograd.Function):
    """``copied`` whose gradient may be sparse, which that of ``Tensor.to`` may not."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, device: torch.device) -> Tensor:
        ctx.device = param.device
        return copied(param, device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.device, non_blocking=may_fly(grad, ctx.device)), None


def _laid_out(strides: tuple[int, ...], grad: Tensor) -> Tensor:
    """``grad`` with ``strides``."""
    if grad.layout is not torch.strided or grad.stride() == strides:
        return grad
    return torch.empty_strided(grad.shape, strides, dtype=grad.dtype, device=grad.device).copy_(grad)
