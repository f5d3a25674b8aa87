"""How a wrapper is put together, copied, moved to other ranks, and taken apart."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import _torch_private as private
from .agreement import Moved, agree, fix_strides, report_on
from .buffers import BufferSync, broadcast_from, named_buffers
from .comm import Collectives, collectives_over, destroy_retired, is_initialized
from .errors import InternalError, ModelError, PeerError
from .interface import StockInterface
from .join import UnevenInputs
from .logging_data import LoggingData, describe
from .options import Options, default_cap_bytes
from .params import NOTHING, ManagedParams
from .precision import LowPrecision
from .reducer import Reducer
from .replicas import Replicas
from .rnns import flatten_for_cudnn

# Made anew for a copy. Communication hooks do not come with it, as in DistributedDataParallel.
_NOT_COPIED = (
    *("process_group", "reducer", "_comm", "_comm_hooks", "_params", "_buffer_sync", "_low_precision", "_uneven"),
    *("_logging", "_release", "_replicas"),
)


class LifeCycle(StockInterface):
    """What of ``KnownDDP`` makes and unmakes its parts."""

    device_ids: list[Any] | None
    output_device: Any
    bucket_bytes_cap: int
    gradient_as_bucket_view: bool
    _options: Options
    _params: ManagedParams
    _low_precision: LowPrecision | None
    _replicas: Replicas | None
    _agreed_strides: Sequence[tuple[int, ...]]

    def _describe_places(self, params: ManagedParams) -> None:
        """Where the module is, in DistributedDataParallel's attributes."""
        places = {p.device for p in params.live if p is not None} or {torch.device("cpu")}
        device = self._options.device
        self.device = next(iter(places))
        self.device_type = self.device.type
        self.is_multi_device_module = len(places) > 1
        self.device_ids = [device.index] if device is not None else None
        self.output_device = device.index if device is not None else None
        placement = self._options.placement
        if placement is not None:  # a number where there is one, which the CPU has not
            self.device_ids = [d if d.index is None else d.index for d in placement.devices]
            self.output_device = placement.output if placement.output.index is None else placement.output.index

    def _agree(self, comm: Collectives, params: ManagedParams) -> Moved:
        """Make sure that all ranks hold one model, and start from rank 0's. Returns whose strides were changed."""
        buffers = named_buffers(self.module, params.ignored) if self._options.init_sync_buffers else {}
        try:
            first = agree(comm, report_on(params, buffers, self._options.shared()))
        except PeerError:  # on every rank
            comm.retire()
            raise
        destroy_retired()
        self._agreed_strides = first.strides
        moved = fix_strides(self.module, params, first.strides)
        broadcast_from(comm, 0, [*(p for p in params.live if p is not None), *buffers.values()])
        return moved

    def _attach(self, comm: Collectives, params: ManagedParams, *, synchronises_buffers: bool) -> None:
        """Set up what is not copied with a wrapper: hooks, reducer, groups."""
        flatten_for_cudnn(self.module)
        options = self._options
        if len(self._agreed_strides) == len(params):
            params.set_canonical(self._agreed_strides)
        for name, param in self.module.named_parameters(remove_duplicate=False):
            if name in params.ignored:
                param._ddp_ignored = True  # type: ignore[attr-defined]  # torch.compile's DDP optimizer reads it
        self.parameters_to_ignore = {*params.ignored, *options.delayed}
        self._comm = comm
        self._params = params
        self._buffer_sync = BufferSync(self.module, params.ignored, comm, enabled=synchronises_buffers)
        self._comm_hooks = []
        backend = comm.backend_for(next((param.device.type for param in params.live if param is not None), "cpu"))
        self.reducer = Reducer(
            params,
            comm,
            self._buffer_sync,
            limits=options.cap_bytes or default_cap_bytes(backend, of_much=False),
            limits_of_much=options.cap_bytes or default_cap_bytes(backend, of_much=True),
            agreement=options.agreement,
            find_unused=options.find_unused_parameters,
            static_graph=self.static_graph,
            delayed=params.resolve(options.delayed),
        )
        self._replicas = None
        if options.placement is not None:
            place, tell_unused = options.placement, functools.partial(_mark_running, self.reducer)
            self._replicas = Replicas(self.module, place.devices, place.output, self.dim, tell_unused)
        param_dtype = options.precision.param_dtype if options.precision is not None else None
        self._low_precision = LowPrecision(self.module, params, param_dtype) if param_dtype is not None else None
        self._uneven = UnevenInputs(self.reducer, comm, params, self._buffer_sync)
        self._logging = LoggingData(self._constants())
        self._declared_around: frozenset[int] = NOTHING
        self._release = weakref.finalize(self, _release, self.reducer, comm)
        self._release.atexit = False

    def _constants(self) -> dict[str, Any]:
        """What logging data say of the construction."""
        return describe(
            self.module,
            world_size=self._comm.world_size,
            rank=self._comm.rank,
            backend_name=self._comm.backend,
            device_ids=", ".join(map(str, self.device_ids or ())),
            output_device=self.output_device if isinstance(self.output_device, int) else -1,
            broadcast_buffers=int(self.forward_sync_buffers),
            bucket_cap_bytes=self.bucket_bytes_cap,
            find_unused_parameters=int(self.find_unused_parameters),
            gradient_as_bucket_view=int(self.gradient_as_bucket_view),
            is_multi_device_module=int(self.is_multi_device_module),
        )

    def _remove_autograd_hooks(self) -> None:
        """From now on this wrapper communicates no more, and its module may be wrapped again."""
        self.reducer.remove_hooks()

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Average over other ranks from now on: fewer, more, or the same after their group was made anew.

        Communicates nothing until the next backward, so all members must hold equal models, and the same gradients or
        none; where models may differ, wrap again. The backward of a forward made before, and what ``no_sync``
        accumulated, is averaged over the new ranks. On a rank that is not a member the wrapper stays as it is.
        """
        if not isinstance(new_process_group, dist.ProcessGroup):  # GroupMember.NON_GROUP_MEMBER
            return
        old, buffer_hook, comm_hooks = self.reducer, self._buffer_sync.hook, self._comm_hooks
        synchronises_buffers = self.forward_sync_buffers
        self._release.detach()
        old.give_up()
        self._comm.move_to(new_process_group)
        self.process_group = new_process_group
        self._attach(self._comm, self._params, synchronises_buffers=synchronises_buffers)
        self._buffer_sync.hook, self._comm_hooks = buffer_hook, comm_hooks
        self.reducer.take_over(old)

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None and self.process_group is not private.default_group():
            raise ModelError(
                f"{self.reducer.where} DDP Pickling/Unpickling are only supported when using DDP with the default "
                "process group: a copy could not tell which group to use.\n"
                "Fix: copy or save model.module, or its state_dict()."
            )
        state = self.__dict__.copy()
        for name in _NOT_COPIED:
            state.pop(name, None)
        return {**state, "forward_sync_buffers": self.forward_sync_buffers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        synchronises_buffers = state.pop("forward_sync_buffers")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        is_alone = self._options.placement is not None and not is_initialized()
        self.process_group = None if is_alone else private.default_group()
        self.require_backward_grad_sync = True
        # No collective: copies are made on one rank alone, for an average of weights, say.
        comm = collectives_over(self.process_group, own_group=self._options.own_group)
        params = ManagedParams(self.module, self._options.reduce_dtype)
        self._attach(comm, params, synchronises_buffers=synchronises_buffers)


def _mark_running(reducer: Reducer, unused: frozenset[int]) -> None:
    """Mark in the forward that runs, as the reducer knows it now: ``take_over`` brings it another log."""
    if not reducer.forwards.mark_unused(unused):
        raise InternalError(f"{reducer.where} replicas marked parameters as unused while no forward ran.")


def _release(reducer: Reducer, comm: Collectives) -> None:
    """The wrapper is gone: its hooks go, and its groups when that is safe."""
    reducer.remove_hooks()
    comm.retire()
