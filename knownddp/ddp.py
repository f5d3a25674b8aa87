"""KnownDDP: the wrapper that users see."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from . import _torch_private as private
from .agreement import agree, fix_strides, report_on, tell, warn_of_moved
from .buffers import BufferSync, broadcast_from_rank_0, check_writable, named_buffers
from .comm import Collectives, destroy_retired
from .errors import DeclarationError, ModelError, PeerError, UsageError
from .forwards import ForwardRecord
from .options import choose_device, choose_group, gather_options, refuse_own_unused_argument
from .outputs import to_device
from .params import NOTHING, ManagedParams, Unused
from .precision import LowPrecision, cast_buffers
from .reducer import Reducer
from .stats import ReducerStatistics


class KnownDDP(nn.Module):
    """Data parallelism over a process group, told before each forward which parameters it will not use.

    A drop-in for ``torch.nn.parallel.DistributedDataParallel``: after ``backward()`` every rank holds the mean over
    ranks in ``.grad``. ``model(x, unused_parameters=layers)`` declares what this call skips: those parameters are not
    reduced, cost no bytes and no waiting, and keep ``.grad`` as it was. Declarations may differ between ranks (see
    ``unused_agreement``), and a wrong one costs time, not correctness.

    Args:
        module: the module to train, already on its device.
        device_ids: None, or the one device of the module; inputs are then moved there.
        output_device: that same device.
        dim: the batch dimension; of use with several devices only.
        broadcast_buffers: deprecated name of ``forward_sync_buffers``; False also leaves buffers unsynchronised at
            construction.
        init_sync: check that ranks hold the same model and start from rank 0's values. False: the caller vouches for
            both, and the constructor issues no collective.
        process_group: the ranks to average over; default all.
        bucket_cap_mb: bucket size in MiB; default 1 for the first bucket and 25 for the others.
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
        mixed_precision: torch's ``_MixedPrecision``, or anything with its attributes ``param_dtype`` (of parameters and
            inputs while the module runs), ``reduce_dtype`` (in which gradients travel; default ``param_dtype``) and
            ``buffer_dtype`` (of buffers, from now on). Parameters, their gradients and ``state_dict`` keep their dtype.
        check_reduction, static_graph, delay_all_reduce_named_params, param_to_hook_all_reduce, device_mesh,
        skip_all_reduce_unused_params, bucket_cap_mb_list, batched_grad_copy: known by name only; any value but the
            default raises NotImplementedError.

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
        delay_all_reduce_named_params: object = None,
        param_to_hook_all_reduce: object = None,
        mixed_precision: object = None,
        device_mesh: object = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: object = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        unused_agreement: str = "union",
        own_group: bool = True,
    ) -> None:
        super().__init__()
        self.process_group: dist.ProcessGroup = choose_group(process_group)
        comm = Collectives(self.process_group, own_group=own_group)
        try:
            self._options = gather_options(
                device=choose_device(module, device_ids, output_device),
                broadcast_buffers=broadcast_buffers,
                forward_sync_buffers=forward_sync_buffers,
                bucket_cap_mb=bucket_cap_mb,
                find_unused_parameters=find_unused_parameters,
                unused_agreement=unused_agreement,
                own_group=own_group,
                mixed_precision=mixed_precision,
                not_yet={
                    "check_reduction": check_reduction,
                    "static_graph": static_graph,
                    "delay_all_reduce_named_params": delay_all_reduce_named_params,
                    "param_to_hook_all_reduce": param_to_hook_all_reduce,
                    "device_mesh": device_mesh,
                    "skip_all_reduce_unused_params": skip_all_reduce_unused_params,
                    "bucket_cap_mb_list": bucket_cap_mb_list,
                    "batched_grad_copy": batched_grad_copy,
                },
            )
            refuse_own_unused_argument(module)
            params = ManagedParams(module)
            params.check()
            if self._options.init_sync_buffers or self._options.forward_sync_buffers:
                check_writable(named_buffers(module, params.ignored))
        except Exception as error:
            # Whatever is wrong here must not leave the other ranks waiting in the agreement.
            if init_sync:
                tell(comm, error)
                comm.retire()
            raise
        device = self._options.device
        self.module = module
        self.dim = dim
        self.device_ids = [device.index] if device is not None else None
        self.output_device = device.index if device is not None else None
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = False
        self.mixed_precision = mixed_precision
        self.forward_sync_buffers = self._options.forward_sync_buffers
        self.bucket_bytes_cap = self._options.cap_bytes[-1]
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._agreed_strides: Sequence[tuple[int, ...]] = ()
        moved = self._agree(comm, params) if init_sync else []
        precision = self._options.precision
        if precision is not None and precision.buffer_dtype is not None:
            cast_buffers(module, params.ignored, precision.buffer_dtype)
        self._attach(comm, params)
        warn_of_moved(moved, self._reducer.where)

    def _agree(self, comm: Collectives, params: ManagedParams) -> list[str]:
        """Make sure that all ranks hold one model, and start from rank 0's. Returns whose strides were changed."""
        buffers = named_buffers(self.module, params.ignored) if self._options.init_sync_buffers else {}
        try:
            first = agree(comm, report_on(params, buffers, self._options.shared()))
        except PeerError:  # on every rank
            comm.retire()
            raise
        destroy_retired()
        self._agreed_strides = first.strides
        moved = fix_strides(params, first.strides)
        broadcast_from_rank_0(comm, [*(p for p in params.live if p is not None), *buffers.values()])
        return moved

    def _attach(self, comm: Collectives, params: ManagedParams) -> None:
        """Set up what is not copied with a wrapper: hooks, reducer, groups."""
        options = self._options
        if len(self._agreed_strides) == len(params):
            params.set_canonical(self._agreed_strides)
        for name, param in self.module.named_parameters(remove_duplicate=False):
            if name in params.ignored:
                param._ddp_ignored = True  # type: ignore[attr-defined]  # torch.compile's DDP optimizer reads it
        self.parameters_to_ignore = set(params.ignored)
        self._params = params
        self._buffer_sync = BufferSync(self.module, params.ignored, comm) if options.forward_sync_buffers else None
        self._reducer = Reducer(
            params,
            comm,
            self._buffer_sync,
            limits=options.cap_bytes,
            agreement=options.agreement,
            find_unused=options.find_unused_parameters,
        )
        param_dtype = options.precision.param_dtype if options.precision is not None else None
        self._low_precision = LowPrecision(self.module, params, param_dtype) if param_dtype is not None else None
        self._declared_around: frozenset[int] = NOTHING
        self._release = weakref.finalize(self, _release, self._reducer, comm)
        self._release.atexit = False

    # -- forward

    def forward(self, *args: Any, unused_parameters: Unused | None = None, **kwargs: Any) -> Any:
        """Run the module; gradients of this call are averaged by the backward that follows.

        Args:
            unused_parameters: parameters, modules, or names (qualified, or globs such as ``"blocks.[0-3].*"``) that
                this call does not use. It holds for this call alone, and is not passed on to the module.

        Raises:
            DeclarationError, UnknownParameterError: ``unused_parameters`` cannot be understood; nothing has run yet.
            UnfinishedBackwardError: the last backward left promised parameters without a gradient on every rank.
        """
        record = self._forward_begins(unused_parameters)
        if self._options.device is not None:
            args, kwargs = to_device(args, self._options.device), to_device(kwargs, self._options.device)
        try:
            with private.inside_ddp_forward(self):
                if self._low_precision is None:
                    output = self.module(*args, **kwargs)
                else:
                    output = self._low_precision.run(self.module, args, kwargs)
        except BaseException:
            self._forward_failed(record)
            raise
        self._forward_ends(record, output)
        return output

    # Apart from the module itself, so that torch.compile sees that alone.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward_begins(self, unused: Unused | None) -> ForwardRecord:
        declared = self._resolve(unused) | self._declared_around
        # Under ``no_grad`` no backward follows, so nothing is sent.
        synchronises = self.require_backward_grad_sync and torch.is_grad_enabled()
        if synchronises and private.current_graph_task() == private.NO_GRAPH_TASK:
            self._reducer.check_finished(judges=self.module.training)
            if self._buffer_sync is not None and self.module.training:
                self._buffer_sync.exchange(apply=True)
        return self._reducer.forward_begins(declared, synchronises=synchronises)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward_ends(self, record: ForwardRecord, output: object) -> None:
        self._reducer.forward_ends(record, output)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward_failed(self, record: ForwardRecord) -> None:
        self._reducer.forwards.end(record, is_over=True)

    def _resolve(self, unused: Unused | None) -> frozenset[int]:
        """What ``unused`` names; an error says on which rank."""
        try:
            return self._params.resolve(unused)
        except UsageError as error:
            raise type(error)(f"{self._reducer.where} {error}") from None

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
        if private.current_graph_task() != private.NO_GRAPH_TASK and torch.is_grad_enabled():
            return  # a checkpoint runs the module again: it was told the first time
        if not self._reducer.forwards.mark_unused(declared):
            raise DeclarationError(
                f"{self._reducer.where} mark_unused found no call to mark: "
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
        return self._reducer.statistics()

    # -- life cycle

    def _remove_autograd_hooks(self) -> None:
        """From now on this wrapper communicates no more, and its module may be wrapped again."""
        self._reducer.remove_hooks()

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, names: Sequence[str]) -> None:
        """Leave these parameters and buffers of ``module`` (before it is wrapped) to each rank alone."""
        module._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not private.default_group():
            raise ModelError(
                f"{self._reducer.where} DDP Pickling/Unpickling are only supported when using DDP with the default "
                "process group: a copy could not tell which group to use.\n"
                "Fix: copy or save model.module, or its state_dict()."
            )
        state = self.__dict__.copy()
        for name in ("process_group", "_reducer", "_params", "_buffer_sync", "_low_precision", "_release"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.process_group = private.default_group()
        self.require_backward_grad_sync = True
        # No collective: copies are made on one rank alone, for an average of weights, say.
        comm = Collectives(self.process_group, own_group=self._options.own_group)
        self._attach(comm, ManagedParams(self.module))


def _release(reducer: Reducer, comm: Collectives) -> None:
    """The wrapper is gone: its hooks go, and its groups when that is safe."""
    reducer.remove_hooks()
    comm.retire()


DistributedDataParallel.register(KnownDDP)
