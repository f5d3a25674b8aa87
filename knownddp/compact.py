"""All parameters of a module in one storage for each dtype and device.

[Note: alignment] Each parameter begins at a multiple of 64 bytes. So does what torch allocates on the CPU: it is a line
of the cache and the widest register (AVX-512); CUDA kernels want 16 for their widest loads. Closer together, kernels
would fall back to slower loads for some parameters. What lies between is zero, so equal parameters are equal storages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ._torch_private import storage_users
from .errors import ArgumentError
from .flat import is_dense
from .rnns import chunk_of, flatten, move_into, rnns_of

ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class CompactReport:
    """What ``compact_parameters`` did.

    Attributes:
        bytes_moved: of parameters that lie elsewhere now; 0 if all lay in their places already.
        bytes_of_padding: between and behind parameters, for alignment.
        storages: how many hold the parameters that are not left alone: one for each dtype and device, and one for each
            RNN.
        left_alone: names of parameters that stayed where they were, each with the reason.
    """

    bytes_moved: int
    bytes_of_padding: int
    storages: int
    left_alone: tuple[tuple[str, str], ...]


def compact_parameters(module: nn.Module) -> CompactReport:
    """Lay all parameters of ``module`` that have one dtype and device into one storage, in definition order.

    What stays: the Parameter objects, so optimizers, hooks and tied parameters notice nothing; values; strides;
    gradients, where they are. Called again, it does nothing. The weights of an RNN lie in a storage of their own, one
    chunk from its beginning on, since cuDNN takes them in no other way (see ``flatten_parameters``).

    Left alone, and named in the report, is what others would lose sight of or what is no plain dense tensor: parameters
    that share memory with one another or with any other tensor (a view of a larger tensor, a buffer, a numpy array, on
    the CPU also another process; on an accelerator, do not compact what another process was given), tensor subclasses
    such as DTensor, uninitialised and sparse ones, those on the meta device.

    Do not expect speed on the CPU: with 500 small parameters the start of training and an optimizer step took as long
    as before, up to noise (on a busy machine, a median ratio of 0.96 and 1.04 for wrapping in two runs, 0.96 to 0.98
    for AdamW). What it does buy is that a whole model is one tensor to whoever wants that: for one broadcast (0.01 of
    the time of hundreds, but 0.3 to 0.4 of that of torch's packed one) or one copy (0.12 of that of a loop, 0.15 of
    that of ``foreach``), which are milliseconds. ``python proofs/compact_gain.py`` measures it.

    What undoes it: ``.to()``, ``copy.deepcopy`` and ``load_state_dict(assign=True)`` make new tensors (call again
    afterwards). ``torch.save`` of one parameter writes its whole storage. Call it before a CUDA graph is captured, and
    not between a forward and its backward. A dtype's parameters exist twice while they are moved.

    Raises:
        ArgumentError: ``module`` is none.
    """
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"compact_parameters takes a module, got {type(module).__name__}.")
    named = list(module.named_parameters())
    left_alone = _left_alone(named)
    movable = {id(param): param for name, param in named if name not in left_alone}
    moved = padding = storages = 0
    for rnn in rnns_of(module):
        chunk = chunk_of(rnn)
        if chunk is None or any(id(weight) not in movable for weight in chunk):
            continue  # its weights are parameters like others
        before = [weight.data_ptr() for weight in chunk]
        flatten(rnn)
        moved += sum(w.nbytes for w, place in zip(chunk, before, strict=True) if w.data_ptr() != place)
        padding += chunk[0].untyped_storage().nbytes() - sum(weight.nbytes for weight in chunk)
        storages += 1
        for weight in chunk:
            del movable[id(weight)]
    groups: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for param in movable.values():
        groups.setdefault((param.dtype, param.device), []).append(param)
    for (dtype, device), params in groups.items():
        offsets, numel = _places(params, dtype)
        if not _lie_at(params, offsets, numel):
            move_into(torch.zeros(numel, dtype=dtype, device=device), params, offsets)
            moved += sum(param.nbytes for param in params)
        padding += numel * dtype.itemsize - sum(param.nbytes for param in params)
        storages += 1
    return CompactReport(moved, padding, storages, tuple(left_alone.items()))


def _places(params: Iterable[nn.Parameter], dtype: torch.dtype) -> tuple[list[int], int]:
    """Where each parameter begins, and the length of all; in elements."""
    step = max(ALIGNMENT_BYTES // dtype.itemsize, 1)
    offsets, end = [], 0
    for param in params:
        offsets.append(end)
        end += -(-param.numel() // step) * step
    return offsets, end


def _lie_at(params: Sequence[nn.Parameter], offsets: Sequence[int], numel: int) -> bool:
    """Whether ``params`` lie at ``offsets`` of one storage of ``numel`` elements."""
    storage = params[0].untyped_storage()
    return storage.nbytes() == numel * params[0].element_size() and all(
        param.untyped_storage().data_ptr() == storage.data_ptr() and param.storage_offset() == offset
        for param, offset in zip(params, offsets, strict=True)
    )


# -- what cannot be moved


def _left_alone(named: Sequence[tuple[str, nn.Parameter]]) -> dict[str, str]:
    """By name, why a parameter must stay where it is."""
    reasons = {name: reason for name, param in named if (reason := _by_itself(param)) is not None}
    plain = [(name, param) for name, param in named if name not in reasons]
    reasons.update(_overlapping([(name, param) for name, param in plain if param.numel()]))
    known = Counter(param.untyped_storage().data_ptr() for _, param in plain)
    for name, param in plain:
        others = storage_users(param) - known[param.untyped_storage().data_ptr()]
        if others and param.numel() and name not in reasons:
            reasons[name] = f"{others} more tensors lie in its storage"
    return {name: reasons[name] for name, _ in named if name in reasons}


def _by_itself(param: nn.Parameter) -> str | None:
    if isinstance(param, UninitializedParameter):
        return "it is not initialised yet"
    if type(param) is not nn.Parameter:
        return f"it is a tensor subclass, {type(param).__name__}"
    if param.layout is not torch.strided:
        return f"its layout is {param.layout}"
    if param.is_meta:
        return "it is on the meta device"
    if param.is_inference():
        return "it was made in inference mode"
    if not is_dense(param.shape, param.stride()):
        return f"its elements do not lie densely: shape {tuple(param.shape)}, strides {param.stride()}"
    if param.device.type == "cpu" and param.untyped_storage().is_shared():
        return "it is in memory that processes share"
    if param.numel() and not param.untyped_storage().resizable():
        return "its memory is not torch's own: a numpy array, say, or a mapped file"
    return None


def _overlapping(named: Sequence[tuple[str, nn.Parameter]]) -> dict[str, str]:
    """Parameters whose memory is in part another's. They are not tied: those are one Parameter object."""
    reasons: dict[str, str] = {}
    furthest: tuple[str, Tensor] | None = None
    for name, param in sorted(named, key=lambda pair: (str(pair[1].device), pair[1].data_ptr())):
        if furthest is not None and furthest[1].device == param.device:
            other, before = furthest
            if param.data_ptr() < before.data_ptr() + before.nbytes:
                reasons[name] = f"it shares memory with {other}"
                reasons.setdefault(other, f"it shares memory with {name}")
                if param.data_ptr() + param.nbytes < before.data_ptr() + before.nbytes:
                    continue
        furthest = name, param
    return reasons
