"""Mixed precision: the module computes in one dtype, while its parameters and their gradients stay in another.

[Note: stand-ins] While the module runs, a differentiable cast stands in the place of each parameter, so autograd itself
carries gradients back to the parameter, which nothing else in the library needs to know. Casts are those of one
forward. A backward that comes to one of its outputs puts them up again until it is over, since activation checkpoints
run parts of the module a second time there. No hook sits on a module, so nothing is copied with it or must be removed.

What follows for users: in a forward, and in a backward, the module's parameters are tensors with a history. Changed in
place they do not change the parameter, and ``requires_grad_(False)`` raises. A checkpoint whose result the forward does
not return (it is left in an attribute, say) is recomputed with the parameters as they are, if its backward comes by
no output; the first layer then refuses its input.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor, nn

from . import _torch_private as private
from .errors import ArgumentError
from .outputs import find_tensors, to_dtype
from .params import ManagedParams, own_modules


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes asked for; None leaves things as they are."""

    param_dtype: torch.dtype | None  # of parameters and inputs while the module runs
    reduce_dtype: torch.dtype | None  # in which gradients travel
    buffer_dtype: torch.dtype | None  # of buffers, from construction on


def choose_precision(config: object) -> Precision | None:
    """Read ``config``, torch's ``_MixedPrecision`` or anything with these attributes. None if it asks for nothing.

    ``reduce_dtype`` defaults to ``param_dtype``.

    Raises:
        ArgumentError: an attribute is missing, or neither None nor a real floating-point dtype.
    """
    if config is None:
        return None
    given: dict[str, torch.dtype | None] = {}
    for name in (field.name for field in fields(Precision)):
        try:
            dtype = getattr(config, name)
        except AttributeError:
            raise ArgumentError(
                f"mixed_precision must have the attributes param_dtype, reduce_dtype and buffer_dtype; this "
                f"{type(config).__name__} has no {name}.\n"
                "Fix: use torch.nn.parallel.distributed._MixedPrecision(param_dtype=..., ...)."
            ) from None
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ArgumentError(f"mixed_precision.{name} must be a floating-point dtype or None, got {dtype!r}")
        given[name] = dtype
    if not any(given.values()):
        return None
    return Precision(given["param_dtype"], given["reduce_dtype"] or given["param_dtype"], given["buffer_dtype"])


def cast_buffers(module: nn.Module, ignored: frozenset[str], dtype: torch.dtype) -> None:
    """Give floating-point buffers ``dtype``; the buffer objects stay. Not those of an inner wrapper, nor ignored ones.

    Unlike DistributedDataParallel this leaves integers alone: BatchNorm's count of batches would stop at 256 in
    bfloat16.
    """
    for prefix, child in own_modules(module):
        for name, buffer in child.named_buffers(recurse=False):
            if (f"{prefix}.{name}" if prefix else name) not in ignored and buffer.is_floating_point():
                buffer.data = buffer.to(dtype)


class _CastSparse(torch.autograd.Function):
    """``param.to(dtype)`` whose gradient may be sparse, which that of ``Tensor.to`` may not."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = param.dtype
        return param.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


class Casts:
    """What stands in for parameters: of one forward, or of nothing (then parameters stand for themselves)."""

    def __init__(self) -> None:
        # By id of the parameter: itself, so that its id stays its own, and the cast. A tied one has one cast.
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}
        self.rnn_weights: list[tuple[object, object]] = []

    def of(self, tensor: Tensor) -> Tensor:
        """The cast, or ``tensor`` itself if it has none."""
        pair = self.pairs.get(id(tensor))
        return tensor if pair is None else pair[1]

    def forget(self) -> None:
        """Free the casts. Whoever puts them up again makes new ones."""
        self.pairs.clear()
        self.rnn_weights.clear()


class _Recomputation:
    """Queued on the engine: called when the graph task is over, dropped uncalled when it raises. See ``TaskEnd``."""

    def __init__(self, owner: LowPrecision, casts: Casts) -> None:
        self._owner: LowPrecision | None = owner
        self._casts = casts

    def __call__(self) -> None:
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.take_down(self._casts, is_last_use=True)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the backward is raising already
            self()


class LowPrecision:
    """Runs a module with its managed floating-point parameters, and its inputs, in ``dtype``. See [Note: stand-ins].

    Threads may run the module at the same time: the casts of either serve both, since all lead to the same parameters.

    Args:
        module: outermost; inner data-parallel wrappers in it are left alone.
        params: the parameters; told in ``masters`` what stands in for them.
        dtype: real, floating-point.
    """

    def __init__(self, module: nn.Module, params: ManagedParams, dtype: torch.dtype) -> None:
        self._params = params
        self._dtype = dtype
        self._rnns = [m for m in dict.fromkeys(m for _, m in own_modules(module)) if isinstance(m, nn.RNNBase)]
        self._lock = threading.RLock()
        self._up: list[Casts] = []  # the last one is what stands; one may be in it twice
        self._themselves = self._standing = Casts()
        # By graph task and id of the casts.
        self._recomputations: weakref.WeakValueDictionary[tuple[int, int], _Recomputation]
        self._recomputations = weakref.WeakValueDictionary()

    def run(self, module: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """``module(*args, **kwargs)`` in low precision. What it returns is not cast back."""
        casts, args, kwargs = self._begin(args, kwargs)
        try:
            output = module(*args, **kwargs)
        except BaseException:
            self._end(casts)
            raise
        self._end(casts)
        self._watch(output, casts)
        return output

    # Apart from the module itself, so that torch.compile sees that alone.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(self, args: Any, kwargs: Any) -> tuple[Casts, Any, Any]:
        args, kwargs = to_dtype(args, self._dtype), to_dtype(kwargs, self._dtype)
        casts = Casts()
        self.put_up(casts)
        return casts, args, kwargs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end(self, casts: Casts) -> None:
        self.take_down(casts, is_last_use=False)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _watch(self, output: object, casts: Casts) -> None:
        """Put ``casts`` up in a backward that comes through ``output``."""
        hook = functools.partial(_on_output_grad, weakref.ref(self), casts)
        own = {id(stand_in) for _, stand_in in casts.pairs.values()}
        for tensor in find_tensors(output)[0]:
            # A returned cast is left out: its node would hold a hook that holds the cast, for ever.
            if tensor.requires_grad and not tensor.is_leaf and id(tensor) not in own:
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def recompute(self, casts: Casts) -> None:
        """Called in a backward: ``casts`` stand until the innermost running graph task is over."""
        key = private.current_graph_task(), id(casts)
        if key not in self._recomputations:  # else another output of the same forward was there before
            self.put_up(casts)
            recomputation = self._recomputations[key] = _Recomputation(self, casts)
            private.queue_callback(recomputation)

    def put_up(self, casts: Casts) -> None:
        """Let ``casts`` stand in for the parameters, making those that it lacks; ``take_down`` must follow."""
        with self._lock:
            self._fill(casts)
            self._params.masters.update((id(stand_in), master) for master, stand_in in casts.pairs.values())
            self._up.append(casts)
            self._show(casts)

    def take_down(self, casts: Casts, *, is_last_use: bool) -> None:
        """Let stand what stood before, parameters themselves if nothing else is up."""
        with self._lock:
            self._up.remove(casts)
            self._show(self._up[-1] if self._up else self._themselves)
            if casts in self._up:
                return
            for _, stand_in in casts.pairs.values():
                self._params.masters.pop(id(stand_in), None)
            if is_last_use:
                casts.forget()

    def _fill(self, casts: Casts) -> None:
        # As parameters require gradients whatever the mode, casts do: a part of the module may switch gradients on.
        with torch.inference_mode(False), torch.enable_grad():
            for home, name, i in self._params.places:
                tensor = home.get(name)
                if tensor is None:
                    continue
                master = self._params.masters.get(id(tensor), tensor)
                if id(master) in casts.pairs or not master.is_floating_point() or master.dtype == self._dtype:
                    continue
                make = _CastSparse.apply if self._params.sparse[i] else Tensor.to
                casts.pairs[id(master)] = (master, make(master, self._dtype))

    def _show(self, casts: Casts) -> None:
        # At no moment the parameter itself stands where a cast stood and will stand: other threads may be running.
        masters = self._params.masters
        self._standing.rnn_weights = [private.rnn_weights(rnn) for rnn in self._rnns]
        for home, name, _ in self._params.places:
            tensor = home.get(name)
            if tensor is not None:
                home[name] = cast(nn.Parameter, casts.of(masters.get(id(tensor), tensor)))
        for rnn, lists in zip(self._rnns, casts.rnn_weights, strict=False):  # none yet: each RNN makes its own
            private.set_rnn_weights(rnn, lists)
        casts.rnn_weights = []
        self._standing = casts


def _on_output_grad(owner: weakref.ref[LowPrecision], casts: Casts, _: Tensor) -> None:
    alive = owner()
    if alive is not None:
        alive.recompute(casts)
