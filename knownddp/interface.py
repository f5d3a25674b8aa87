"""The rest of DistributedDataParallel's interface: hooks, join, and what trainers and tools reach for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable

from . import _torch_private as private
from .buffers import CHUNK_BYTES, BufferHook, BufferHookLocation, BufferSync, broadcast_from
from .comm import Collectives
from .comm_hooks import CommHook, builtin_hook, check_hook, name_of
from .errors import ArgumentError, CommHookError, CommHookTypeError, ModelError
from .join import DebtPayingJoin, KnownJoinHook, UnevenInputs
from .logging_data import LoggingData
from .options import STATIC_FINDS
from .outputs import to_device
from .reducer import Reducer
from .rnns import kept_flat
from .scattering import gather, scatter


class StockInterface(nn.Module, Joinable):
    """Methods and attributes that code written for DistributedDataParallel uses. ``KnownDDP`` sets the attributes."""

    module: nn.Module
    process_group: dist.ProcessGroup | None  # None: a single process that made none
    reducer: Reducer
    device: torch.device
    device_type: str
    dim: int
    static_graph: bool
    find_unused_parameters: bool
    require_backward_grad_sync: bool
    require_forward_param_sync: bool
    parameters_to_ignore: set[str]
    _comm: Collectives
    _buffer_sync: BufferSync
    _uneven: UnevenInputs
    _logging: LoggingData
    _comm_hooks: list[tuple[Callable[..., Any], object]]

    broadcast_bucket_size = CHUNK_BYTES
    use_side_stream_for_tensor_copies = False  # with one device; those of replicas travel on one

    # -- buffers

    @property
    def forward_sync_buffers(self) -> bool:
        """Whether buffers are brought to rank 0's values once a step."""
        return self._buffer_sync.enabled

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, value: bool) -> None:
        self._buffer_sync.enabled = value

    broadcast_buffers = forward_sync_buffers

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The buffers that are synchronised, by qualified name, as they are now."""
        return self._buffer_sync.current()

    @property
    def modules_buffers(self) -> list[Tensor]:
        """The same without names."""
        return list(self.named_module_buffers.values())

    def will_sync_module_buffers(self) -> bool:
        """Whether a synchronising training forward would synchronise any buffer."""
        return self.require_forward_param_sync and self.forward_sync_buffers and len(self.modules_buffers) > 0

    def _default_broadcast_coalesced(
        self, bufs: Sequence[Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        """Overwrite ``bufs`` (default: all buffers) with those of a rank; for buffer hooks."""
        broadcast_from(self._comm, authoritative_rank, self.modules_buffers if bufs is None else bufs)

    def _register_buffer_comm_hook(
        self, state: object, hook: Callable[..., Any], comm_hook_location: Any = BufferHookLocation.POST_FORWARD
    ) -> None:
        """Let ``hook(state, buffers)`` synchronise buffers instead of the broadcast, before or after each forward.

        ``buffers`` maps qualified names to the tensors. The hook may return futures, waited for at the end of backward.
        """
        if not callable(hook):
            raise CommHookTypeError(f"a buffer hook must be callable, got {type(hook).__name__}")
        self._buffer_sync.hook = BufferHook(state, hook, BufferHookLocation[comm_hook_location.name])

    # -- parameters

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """What ``.to()`` and its like are made of. RNNs that are one chunk of memory stay one."""
        with kept_flat(self):
            return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As any module's. RNNs that are one chunk of memory stay one, also where ``assign`` replaces parameters."""
        with kept_flat(self):
            return super().load_state_dict(*args, **kwargs)

    # -- communication hooks

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Combine each bucket by ``hook(state, bucket)`` instead of averaging it.

        Args:
            state: passed to the hook.
            hook: takes a bucket with the interface of ``dist.GradBucket`` and returns a future of one tensor with as
                many elements as ``bucket.buffer()``: what all ranks take over. Nothing is divided for it. The bucket
                holds only what this step reduces; see ``comm_hooks`` on what ``bucket.index()`` means.

        Raises:
            CommHookError: not callable, or the second hook of this wrapper.
            ArgumentError: annotated as taking or returning something else.
        """
        with self._logging_errors():
            check_hook(hook)
            self._set_hook(CommHook(state, hook, name=name_of(hook)))
        self._comm_hooks.append((hook, state))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """The mean in full (``ALLREDUCE``) or as float16 on the wire (``FP16_COMPRESS``)."""
        self._set_hook(builtin_hook(self._comm, comm_hook_type))

    def _set_hook(self, hook: CommHook) -> None:
        if self.reducer.hook is not None:
            raise CommHookError(
                "register_comm_hook or register_builtin_comm_hook can only be called once: "
                f"{self.reducer.hook_name} is registered already."
            )
        self.reducer.hook = hook

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        """Step a functional ``optim`` on each bucket as soon as it was averaged."""
        private.overlapped_optimizer(optim, optim_params, *args, **kwargs).register_ddp(self)

    # -- uneven inputs

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context in which ranks may have different numbers of inputs: those that run out keep taking part.

        Each forward outside of ``no_sync`` must be followed by one backward.

        Args:
            divide_by_initial_world_size: divide gradients by the number of all ranks; else by that of the ranks that
                still have inputs.
            enable: False: do nothing.
            throw_on_early_termination: raise on all ranks as soon as one has run out.
        """
        return DebtPayingJoin(
            self,
            self._uneven,
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> KnownJoinHook:
        """For ``torch.distributed.algorithms.Join``; takes ``divide_by_initial_world_size``."""
        divides = kwargs.get("divide_by_initial_world_size", True)
        return KnownJoinHook(self._uneven, divides_by_initial=divides, on_end=self._joined_all)

    def _joined_all(self, rank: int) -> None:
        self._authoritative_rank = rank

    @property
    def join_device(self) -> torch.device:
        """Where ``Join`` makes its tensors."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup | None:
        """Where ``Join`` counts the ranks that still run."""
        return self.process_group

    # -- static graph

    def _set_static_graph(self) -> None:
        """As ``static_graph=True``, after construction.

        Raises:
            ModelError: a forward has run already.
        """
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        with self._logging_errors():
            if self.reducer.forwards_begun:
                raise ModelError("_set_static_graph should be called before training loop starts.")
        if self.find_unused_parameters:
            warnings.warn(STATIC_FINDS, stacklevel=2)
        self.static_graph = True
        self.reducer.set_static()

    # -- helpers of earlier days

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[Any]) -> Any:
        """Split inputs along ``dim`` over devices: the positional ones of each, and the named ones of each."""
        given = scatter(tuple(inputs), kwargs or {}, self._devices(device_ids), self.dim)
        return tuple(own for own, _ in given), tuple(own for _, own in given)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Join outputs along ``dim`` on a device."""
        return gather(outputs, self._devices([output_device])[0], self.dim)

    def _devices(self, given: Sequence[Any]) -> list[torch.device]:
        return [torch.device(self.device_type, d) if isinstance(d, int) else torch.device(d) for d in given]

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Inputs on a device, in the nesting of one replica."""
        device = torch.device(self.device_type, device_id)
        return (to_device(inputs, device),), (to_device(kwargs, device),)

    # -- insight

    @contextmanager
    def _logging_errors(self) -> Iterator[None]:
        """What is raised inside shows in the logging data."""
        try:
            yield
        except Exception as error:
            self.reducer.last_error = str(error)
            raise

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """What DistributedDataParallel logs under the same names, as far as it has a meaning here."""
        return self._logging.collect(self.module, self.reducer, joins=self._uneven.was_used)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """After the first ten, take the times of every ``sample_rate``-th step."""
        if sample_rate < 1:
            raise ArgumentError("DDP runtime logging sample rate should be equal or greater than 1")
        self._logging.sample_rate = sample_rate

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """Whether buckets follow the order in which gradients become ready."""
        return self.reducer.planner.has_learnt

    @property
    def _distributed_rank(self) -> int:
        return self._comm.rank

    @property
    def _module_parameters(self) -> list[nn.Parameter]:
        return [p for p in self.reducer.params.live if p is not None]

    @property
    def logger(self) -> None:
        """DistributedDataParallel's C++ logger has no counterpart; see ``_get_ddp_logging_data``."""

    @staticmethod
    def _get_active_ddp_module() -> Any:
        """The wrapper, of either kind, whose forward is running; torch.compile splits graphs at its bucket size."""
        return private.active_ddp_module()

    @property
    def _active_ddp_module(self) -> Any:
        return private.active_ddp_module()

    def _check_reducer_finalized(self) -> None:
        """Raises what the next forward would raise about the last backward."""
        self.reducer.check_finished(judges=True)

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Outputs are never cloned, and may be modified in place either way."""

    def _set_sparse_metadata(self, global_unique_ids: Any) -> None:
        """Rows of sparse gradients are exchanged with the values; nothing needs to be told in advance."""

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        """The parameters of ``module`` (a wrapper or not) that are not ignored."""
        for name, param in module.named_parameters():
            if not hasattr(param, "_ddp_ignored"):
                yield (name, param) if named_params else param

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        """Leave these parameters and buffers of ``module`` (before it is wrapped) to each rank alone."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in params_and_buffers_to_ignore:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]
