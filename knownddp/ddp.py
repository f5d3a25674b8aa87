"""KnownDDP: the wrapper that users see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel

from . import _torch_private as private
from .agreement import Moved, tell, warn_of_moved
from .buffers import BufferHookLocation, check_writable, named_buffers
from .comm import collectives_over
from .errors import DeclarationError, UsageError
from .faults import distributed_autograd_error
from .forwards import ForwardRecord
from .lifecycle import LifeCycle
from .options import (
    DEFAULT_CAP_BYTES,
    choose_device,
    choose_group,
    choose_placement,
    gather_options,
    refuse_own_unused_argument,
)
from .outputs import to_device
from .params import ManagedParams, Unused
from .precision import cast_buffers
from .stats import ReducerStatistics


class KnownDDP(LifeCycle):
    """Data parallelism over a process group, told before each forward which parameters it will not use.

    A drop-in for ``torch.nn.parallel.DistributedDataParallel``: after ``backward()`` every rank holds the mean over
    ranks in ``.grad``. ``model(x, unused_parameters=layers)`` declares what this call skips: those parameters are not
    reduced, cost no bytes and no waiting, and keep ``.grad`` as it was. Declarations may differ between ranks (see
    ``unused_agreement``), and a wrong one costs time, not correctness.

    A profiler's trace has the ranges ``KnownDDP.forward``, ``knownddp::pack`` (each bucket), ``knownddp::close`` (from
    the end of a backward until all gradients are there) and, inside that, ``knownddp::unpack``.

    Args:
        module: the module to train, already on its device.
        device_ids: None, or the one device of the module; inputs are then moved there. Several: in each forward the
            module, which is on the first, is replicated on the others, inputs are split over them along ``dim``,
            replicas run in threads and outputs are joined; gradients are summed over replicas, then averaged over
            ranks. Replica 0 is the module itself: what forward changes in the others (buffers, say) is dropped. A
            single process needs no process group for that. ``["cpu", "cpu"]`` works too.
        output_device: that same device; with several any device, where outputs are joined. Default the first.
        dim: the batch dimension; of use with several devices only.
        broadcast_buffers: deprecated name of ``forward_sync_buffers``; False also leaves buffers unsynchronised at
            construction.
        init_sync: check that ranks hold the same model and start from rank 0's values. False: the caller vouches for
            both, and the constructor issues no collective.
        process_group: the ranks to average over; default all.
        bucket_cap_mb: bucket size in MiB; default 4, 8, 16 and then 25 over gloo (1, 2, 8, 16 and then 25 in a
            step that sends 16 MiB or more), elsewhere 1 and then 25. On the CPU a parameter of 4 MiB or more is a
            bucket of its own.
        find_unused_parameters: ask the autograd engine at the start of each backward which parameters it will reach.
            What no rank reaches is not sent. Nothing needs to be declared.
        gradient_as_bucket_view: accepted; gradients are views of the reduced buckets either way, except that a tensor
            which stood in ``.grad`` before the backward is kept and written to.
        forward_sync_buffers: bring buffers to rank 0's values once a step. Default True.
        unused_agreement: what to do about declarations that differ between ranks. ``"union"``: a parameter is skipped
            when every rank declared it. ``"same"``: differing declarations raise on every rank before anything is
            sent. ``"trust"``: nobody asks; declarations must be right and the same on all ranks.
        own_group: make a communicator of one's own, so that traffic cannot meet that of others. False: use
            ``process_group`` itself for gradients.
        reduce_dtype: dtype in which the gradients of real floating-point parameters travel and are summed; ``.grad``
            keeps the parameter's. float32 for bfloat16 models sums exactly, bfloat16 for float32 models halves bytes.
        static_graph: the graph of every backward is that of the first. What a step leaves unused is then neither
            declared nor searched for; a graph that changes on any rank raises on every rank.
        delay_all_reduce_named_params: pairs of name and parameter that are reduced only when a backward is over, after
            all others. Goes with ``param_to_hook_all_reduce``, which is accepted for DistributedDataParallel's sake.
        mixed_precision: torch's ``_MixedPrecision``, or anything with its attributes ``param_dtype`` (of parameters and
            inputs while the module runs), ``reduce_dtype`` (in which gradients travel; default ``param_dtype``) and
            ``buffer_dtype`` (of buffers, from now on). Parameters, their gradients and ``state_dict`` keep their dtype.
        device_mesh: a one-dimensional mesh, instead of ``process_group``.
        bucket_cap_mb_list: sizes of the first, second, ... bucket in MiB; the last one repeats.
        check_reduction, skip_all_reduce_unused_params, batched_grad_copy: accepted; unused parameters are never
            reduced, and gradients are always copied in batches.

    Raises:
        ArgumentError, ModelError, DeviceError: on the ranks where the cause is; PeerError on the others.
        RanksDifferError: models or arguments differ between ranks; on every rank.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: private.DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        unused_agreement: str = "union",
        own_group: bool = True,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        self.process_group = choose_group(module, process_group, device_mesh, device_ids)
        comm = collectives_over(self.process_group, own_group=own_group)
        try:
            self._options = gather_options(
                device=choose_device(module, device_ids, output_device),
                placement=choose_placement(module, device_ids, output_device),
                broadcast_buffers=broadcast_buffers,
                forward_sync_buffers=forward_sync_buffers,
                bucket_cap_mb=bucket_cap_mb,
                bucket_cap_mb_list=bucket_cap_mb_list,
                find_unused_parameters=find_unused_parameters,
                static_graph=static_graph,
                check_reduction=check_reduction,
                delay_all_reduce_named_params=delay_all_reduce_named_params,
                param_to_hook_all_reduce=param_to_hook_all_reduce,
                mixed_precision=mixed_precision,
                reduce_dtype=reduce_dtype,
                unused_agreement=unused_agreement,
                own_group=own_group,
            )
            refuse_own_unused_argument(module)
            params = ManagedParams(module, self._options.reduce_dtype)
            params.check()
            params.resolve(self._options.delayed)
            if self._options.init_sync_buffers or self._options.forward_sync_buffers:
                check_writable(named_buffers(module, params.ignored))
        except Exception as error:
            # Whatever is wrong here must not leave the other ranks waiting in the agreement.
            if init_sync:
                tell(comm, error)
                comm.retire()
            raise
        self.module = module
        self.dim = dim
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.mixed_precision = mixed_precision
        self.static_graph = static_graph
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self._describe_places(params)
        # What stock says of itself; its default is 25 MiB over any backend.
        cap_bytes = self._options.cap_bytes
        self.bucket_bytes_cap_default = cap_bytes is None
        self.bucket_bytes_cap = max(cap_bytes or (DEFAULT_CAP_BYTES,))
        self.bucket_bytes_cap_list = list(cap_bytes or ()) if bucket_cap_mb_list else []
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._agreed_strides: Sequence[tuple[int, ...]] = ()
        moved = self._agree(comm, params) if init_sync else Moved()
        precision = self._options.precision
        if precision is not None and precision.buffer_dtype is not None:
            cast_buffers(module, params.ignored, precision.buffer_dtype)
        self._attach(comm, params, synchronises_buffers=self._options.forward_sync_buffers)
        warn_of_moved(moved, self.reducer.where)

    # -- forward

    def forward(self, *args: Any, unused_parameters: Unused | None = None, **kwargs: Any) -> Any:
        """Run the module; gradients of this call are averaged by the backward that follows.

        Args:
            unused_parameters: parameters, modules, or names (qualified, or globs such as ``"blocks.[0-3].*"``) that
                this call does not use. It holds for this call alone, and is not passed on to the module.

        Raises:
            DeclarationError, UnknownParameterError: ``unused_parameters`` cannot be understood; nothing has run yet.
            UnfinishedBackwardError: the last backward left promised parameters without a gradient on every rank.
            UsageError: the call is inside ``torch.distributed.autograd.context()``.
        """
        record = self._forward_begins(unused_parameters)
        try:
            if self._options.device is not None:
                args, kwargs = to_device(args, self._options.device), to_device(kwargs, self._options.device)
            run = self.module if self._replicas is None else self._replicas
            with private.inside_ddp_forward(self):
                if self._low_precision is None:
                    output = run(*args, **kwargs)
                else:
                    output = self._low_precision.run(run, args, kwargs)
            self._forward_ends(record, output)
        except BaseException:
            self._forward_failed(record)
            raise
        return output

    # Apart from the module itself, so that torch.compile sees that alone.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward_begins(self, unused: Unused | None) -> ForwardRecord:
        declared = self._resolve(unused) | self._declared_around
        # Under ``no_grad`` no backward follows, so nothing is sent.
        synchronises = self.require_backward_grad_sync and torch.is_grad_enabled()
        if torch.is_grad_enabled() and private.current_graph_task() == private.NO_GRAPH_TASK:
            if private.in_distributed_autograd():
                raise distributed_autograd_error(self.reducer.where)
            trains = self.module.training
            joins = self._uneven.is_on(self)
            if synchronises:
                self.reducer.check_finished(judges=trains and not joins)
                self._logging.forward_begins(self.reducer.times)
            if joins:
                self._uneven.forward_begins(self, synchronises=synchronises, trains=trains)
            elif synchronises and trains:
                self._buffer_sync.at(BufferHookLocation.PRE_FORWARD)
        return self.reducer.forward_begins(declared, synchronises=synchronises)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward_ends(self, record: ForwardRecord, output: object) -> None:
        is_outermost = private.current_graph_task() == private.NO_GRAPH_TASK
        if record.synchronises and is_outermost and self.module.training:
            self._buffer_sync.at(BufferHookLocation.POST_FORWARD)
        self.reducer.forward_ends(record, output)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward_failed(self, record: ForwardRecord) -> None:
        self.reducer.forwards.end(record, is_over=True)

    def _resolve(self, unused: Unused | None) -> frozenset[int]:
        """What ``unused`` names; an error says on which rank."""
        try:
            return self._params.resolve(unused)
        except UsageError as error:
            raise type(error)(f"{self.reducer.where} {error}") from None

    @contextmanager
    def unused(self, parameters: Unused) -> Iterator[None]:
        """Calls inside declare ``parameters`` unused, beside what they declare themselves."""
        before = self._declared_around
        self._declared_around = before | self._resolve(parameters)
        try:
            yield
        finally:
            self._declared_around = before

    def mark_unused(self, parameters: Unused) -> None:
        """Declare ``parameters`` unused by the running call, or by the last one while its backward has not begun.

        Raises:
            DeclarationError: there is no such call.
        """
        declared = self._resolve(parameters)
        if self._replicas is not None and self._replicas.mark_unused(declared):
            return
        is_recomputing = private.current_graph_task() != private.NO_GRAPH_TASK and torch.is_grad_enabled()
        if is_recomputing and not self.reducer.forwards.is_running():
            return  # a checkpoint inside the module runs a part of it again: it was told the first time
        if not self.reducer.forwards.mark_unused(declared):
            raise DeclarationError(
                f"{self.reducer.where} mark_unused found no call to mark: "
                "none is running, and the last one had its backward or its outputs are gone.\n"
                "Fix: call it inside forward or between forward and backward; before a call use "
                "forward(..., unused_parameters=...) or `with model.unused(...):`."
            )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards inside only accumulate: their backwards stay on this rank until the next one outside averages all.

        What decides is the forward, not the backward.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    # -- insight

    def stats(self) -> ReducerStatistics:
        """What the reducer has done so far on this rank."""
        return self.reducer.statistics()


DistributedDataParallel.register(KnownDDP)
