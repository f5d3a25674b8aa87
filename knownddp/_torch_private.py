"""Every private name of torch that the library uses, in one place.

Each is here because no public name does the same; ``tests/test_torch_private.py`` fails when one goes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._dynamo.guards import TensorGuards
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh as DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._device import DeviceContext

NO_GRAPH_TASK = -1

# What ``Work.get_future()`` returns, and ``torch.futures.Future`` is a subclass of.
ANY_FUTURE = torch._C.Future
GRAD_BUCKET: type = dist.GradBucket  # type: ignore[attr-defined]
BuiltinHook = dist.BuiltinCommHookType  # type: ignore[attr-defined]

_rpc = getattr(torch._C, "_distributed_rpc", None)  # a torch may be built without RPC


def queue_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the innermost running graph task is over; it is dropped unrun if that task raises."""
    Variable._execution_engine.queue_callback(callback)


def current_graph_task() -> int:
    """A number for the innermost running backward of this thread, or ``NO_GRAPH_TASK``."""
    return torch._C._current_graph_task_id()


# Whether the running backward is going to execute a node. Raises RuntimeError outside of a backward, and for a leaf
# that ``torch.autograd.grad`` was asked for.
will_execute: Callable[[Node], bool] = torch._C._will_engine_execute_node


def in_compiled_backward() -> bool:
    """Whether the running backward is a compiled one (``torch._dynamo.config.compiled_autograd``)."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")  # heavy, so not imported here
    return module is not None and bool(module.in_compiled_autograd_region)


def hooks_after_accumulation(param: torch.Tensor) -> Mapping[int, Callable[..., None]]:
    """Those that ``register_post_accumulate_grad_hook`` put there. If there is one, others will be seen in it too."""
    return param._post_accumulate_grad_hooks or {}


def current_node() -> Node | None:
    """The node that is being executed, or whose hook is running."""
    return torch._C._current_autograd_node()


def rpc_is_running() -> bool:
    """Whether this process takes part in RPC, without which there is no distributed autograd."""
    return _rpc is not None and _rpc._is_current_rpc_agent_set()


def in_distributed_autograd() -> bool:
    """Whether this thread is inside a ``torch.distributed.autograd.context()``, its own or that of a remote caller."""
    if not rpc_is_running():
        return False
    try:
        torch._C._distributed_autograd._current_context()
    except RuntimeError:
        return False
    return True


def preserve_versions(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """Writes to ``tensors`` inside leave their version counters alone, so that autograd does not refuse them later."""
    return torch.autograd.grad_mode._unsafe_preserve_version_counter(tuple(tensors))


@contextmanager
def inside_ddp_forward(wrapper: object) -> Iterator[None]:
    """Tell torch.compile that the graph may be split at this wrapper's bucket size."""
    before = DistributedDataParallel._active_ddp_module
    DistributedDataParallel._active_ddp_module = wrapper  # type: ignore[assignment]
    try:
        yield
    finally:
        DistributedDataParallel._active_ddp_module = before


def active_ddp_module() -> object:
    """The wrapper inside whose forward this is, or None."""
    return DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]


_UNPROFILED = nullcontext()


def profiled(name: str) -> AbstractContextManager[Any]:
    """A range of that name in a running profiler's trace; without one it costs next to nothing."""
    return torch.profiler.record_function(name) if torch.autograd.profiler._is_profiler_enabled else _UNPROFILED


def default_group() -> dist.ProcessGroup:
    """The group made by ``init_process_group``; raises if there is none."""
    return distributed_c10d._get_default_group()


def is_registered(group: dist.ProcessGroup) -> bool:
    """Whether ``group`` has not been destroyed."""
    return group in distributed_c10d._world.pg_map


def backends(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend of each device type that ``group`` serves, whether it was named at ``init_process_group`` or not."""
    parts = (part.rpartition(":") for part in dist.get_backend_config(group).split(","))
    return {device_type: backend for device_type, _, backend in parts}


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """How long collectives on ``group`` wait before they raise."""
    for device in ("cpu", "cuda"):
        try:
            timeout = group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):  # no backend for that device, or one without options
            continue
        if isinstance(timeout, timedelta):
            return timeout
    return distributed_c10d.default_pg_timeout


def count_in_store(key: str) -> int:
    """How often ``key`` was counted, this time included, in the store that the default group was made with."""
    _, store = distributed_c10d._world.pg_map[default_group()]
    return int(store.add(key, 1))


def create_group(name: str, ranks: list[int], backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """A new group over ``ranks`` (global, this rank among them), which only those ranks take part in making.

    ``new_group(use_local_synchronization=True)`` would do, but it names the group after the number of groups that
    exist on the calling rank; where that differs between ranks it waits for the time-out. Here the caller names it.
    """
    parent = default_group()
    _, store = distributed_c10d._world.pg_map[parent]
    group: dist.ProcessGroup
    # With a device bound to the default group NCCL would split its communicator, which is collective over the world.
    bound_device, parent.bound_device_id = parent.bound_device_id, None
    try:
        group, _ = distributed_c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            ranks,
            dist.Backend(backend),
            store,
            distributed_c10d.GroupName(name),
            timeout=timeout,
            group_desc=name,
        )
    finally:
        parent.bound_device_id = bound_device
    distributed_c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
    return group


def storage_view(flat: torch.Tensor, offset: int, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """A tensor over ``flat``'s storage that autograd does not take for a view, so that ``detach_()`` works on it."""
    view = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return view.set_(flat.untyped_storage(), flat.storage_offset() + offset, tuple(shape), tuple(strides))


def looks_of(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function that tells whether ``tensors`` still have the types, dtypes, devices, shapes, strides and
    requires_grad that they have now. It may say no where that is so: under another autocast or inference mode.

    Asked for the strides of a tensor that has none (CSR, or a subclass that answers by itself), torch would abort.
    """
    are_usual = all(type(t) in (torch.Tensor, nn.Parameter) and t.layout is torch.strided for t in tensors)
    if not are_usual or any(t.is_nested or t.is_quantized for t in tensors):
        return never
    return looks_of_plain(tensors)


def looks_of_plain(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """``looks_of`` tensors that are known to be strided, and of no subclass that answers by itself."""
    return TensorGuards(*tensors, dynamic_dims_sizes=[], dynamic_dims_strides=[]).check


def never(*_: object) -> bool:
    """As ``looks_of`` returns it where nothing is known."""
    return False


def times_written(tensor: torch.Tensor) -> int:
    """A count that grows when ``tensor`` is written in place; 0 for one that cannot be, of inference mode."""
    return 0 if tensor.is_inference() else tensor._version


class LocalShards:
    """Parameters that were DTensors, held as plain tensors of this rank's part. Only a forward sees DTensors.

    ``DistributedDataParallel`` does the same by ``tensor.parallel.ddp._pre_dp_module_transform``, which makes new
    parameters in each forward: optimizers lose track of them.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        from torch.distributed.tensor import DTensor  # heavy, and seldom needed

        self._rebuild: Callable[..., torch.Tensor] = DTensor.from_local
        self._shards: list[tuple[torch.nn.Module, str, torch.nn.Parameter, dict[str, Any]]] = []
        made: dict[torch.Tensor, torch.nn.Parameter] = {}  # tied ones stay tied
        for part in module.modules():
            for name, param in part._parameters.items():
                if isinstance(param, DTensor):
                    if param not in made:
                        local = torch.nn.Parameter(param.to_local().detach())
                        local.register_hook(_arrived)
                        made[param] = local.requires_grad_(param.requires_grad)
                    layout = {"device_mesh": param.device_mesh, "placements": param.placements, "run_check": False}
                    layout |= {"shape": param.shape, "stride": param.stride()}
                    self._shards.append((part, name, made[param], layout))
        self._localize()
        module.register_forward_pre_hook(self._reconstruct)
        module.register_forward_hook(self._localize, always_call=True)

    def _reconstruct(self, *_: object) -> None:
        built: dict[torch.Tensor, torch.Tensor] = {}
        for part, name, local, layout in self._shards:
            if local not in built:
                built[local] = self._rebuild(local, **layout)
            part._parameters[name] = built[local]  # type: ignore[assignment]

    def _localize(self, *_: object) -> None:
        for part, name, local, _layout in self._shards:
            part._parameters[name] = local


def _arrived(grad: torch.Tensor) -> torch.Tensor:
    """A gradient that tensor parallelism may still be communicating."""
    wait = getattr(grad, "wait", None)
    return wait() if wait is not None else grad


def _usual_references() -> int:
    """To the storage of a tensor that nobody else asked for its storage, as ``storage_users`` counts them."""
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


_USUAL_REFERENCES = _usual_references()


def storage_users(tensor: torch.Tensor) -> int:
    """How many tensors lie in the storage of ``tensor``, itself counted."""
    storage = tensor.untyped_storage()  # which counts as a user too; Python has one object for it, however many hold it
    return torch._C._storage_Use_Count(storage._cdata) - 1 + sys.getrefcount(storage) - _USUAL_REFERENCES


def tensor_holders(tensor: torch.Tensor) -> int:
    """How many hold ``tensor`` itself, Python being one of them, however many variables refer to it there.

    The others are a ``.grad``, graphs that saved it, arrays made by way of DLPack.
    """
    return tensor._use_count()  # type: ignore[attr-defined, no-any-return]


def unshard_if_submesh(module: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Let ``module`` hold plain shards instead of DTensors if ``mesh`` was cut out of a larger one."""
    if mesh._get_root_mesh() != mesh:
        LocalShards(module)


def scalar_type_name(dtype: torch.dtype) -> str:
    """C++'s name of a dtype: "float" for float32."""
    names = {torch.float32: "float", torch.float64: "double", torch.float16: "c10::Half"}
    return names.get(dtype, str(dtype).removeprefix("torch."))


def overlapped_optimizer(optim: type, params: object, *args: object, **kwargs: object) -> Any:
    """Torch's adapter of an optimizer to a communication hook; its ``register_ddp`` registers that hook."""
    # Imported late: it loads every functional optimizer.
    from torch.distributed.algorithms import _optimizer_overlap as overlap

    return overlap._as_overlapped_optim(optim, params, *args, **kwargs)  # type: ignore[attr-defined]


def in_backward_optimizers(param: torch.Tensor) -> list[torch.optim.Optimizer]:
    """Those that ``_apply_optimizer_in_backward`` attached to ``param``."""
    return getattr(param, "_in_backward_optimizers", [])


def count_in_backward_hooks() -> int:
    """How many optimizers of this process were made to step in backward."""
    module = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    return sum(map(len, module.param_to_optim_hook_handle_map.values())) if module is not None else 0


def remove_in_backward_hooks(param: torch.Tensor) -> None:
    """Take off the hooks by which they would step as soon as the gradient is accumulated."""
    # Imported late: it loads every functional optimizer.
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    for handle in param_to_optim_hook_handle_map.get(param, []):  # type: ignore[no-untyped-call]
        handle.remove()


def renew_rnn_weights(rnn: nn.RNNBase) -> None:
    """Let an RNN whose parameters became other tensors take these, as one chunk where cuDNN wants that."""
    rnn._init_flat_weights()


def shallow_copy(module: nn.Module) -> nn.Module:
    """A module of the same class and attributes, to be given parameters, buffers and submodules of its own.

    Modules may override how ``DataParallel`` copies them. What ``Module.compile`` made is bound to the original.
    """
    copied = module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    vars(copied).pop("_compiled_call_impl", None)
    return copied  # type: ignore[no-any-return]


def compiled_part(module: nn.Module) -> nn.Module | None:
    """The module that ``torch.compile(module)`` runs, if this is the result of that."""
    return module._modules["_orig_mod"] if type(module).__name__ == "OptimizedModule" else None


def saved_tensor_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """What ``saved_tensors_hooks`` set on this thread: the pair that is in force, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def is_bound_to_thread() -> bool:
    """Whether a transform of ``torch.func`` or a mode that intercepts calls is on, a default device not counted."""
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or any(not isinstance(mode, DeviceContext) for mode in modes)
    )


def default_generator(device: torch.device) -> torch.Generator | None:
    """The generator from which operations on an accelerator draw; None on the CPU."""
    generators = () if device.type == "cpu" else getattr(torch.get_device_module(device), "default_generators", ())
    return generators[device.index] if generators else None


def rnn_weights(rnn: nn.RNNBase) -> tuple[object, object]:
    """The list in which an RNN holds its weights once more, and what tells it that they became other tensors."""
    return rnn._flat_weights, rnn._flat_weight_refs


def set_rnn_weights(rnn: nn.RNNBase, lists: tuple[object, object]) -> None:
    """Put back what ``rnn_weights`` returned, if it is of the tensors that stand in the parameters' places.

    An RNN makes new lists as its forward begins, if it finds other tensors there. Lists that were kept before it did so
    are of the tensors that stood there earlier, and would be wrong in the middle of a forward of another thread.
    """
    weights: Any = lists[0]
    names = rnn._flat_weights_names
    if all(weight is getattr(rnn, name, None) for weight, name in zip(weights, names, strict=True)):
        rnn._flat_weights, rnn._flat_weight_refs = lists  # type: ignore[assignment]
