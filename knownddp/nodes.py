"""The autograd nodes of managed parameters: hooks on them, and what the engine says of them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from . import _torch_private as private
from .countdown import Countdown
from .ownership import users_in_hook, usual_references_to_arrived
from .plan import ALONE_BYTES, EAGER_BYTES, NOT_PLACED


class GradientNodes:
    """The AccumulateGrad node of each parameter, hooked to say when a gradient was accumulated.

    Args:
        num_params: how many parameters there are.
        on_ready: called with a parameter's index and its gradient, after it was accumulated into ``.grad``; with None
            if the gradient is undefined. Held weakly: hooks die with the object it is a method of.
        countdown: counts those of which nothing follows; ``on_ready`` is not called for them, unless they are large.
    """

    def __init__(
        self, num_params: int, on_ready: Callable[[int, torch.Tensor | None], None], countdown: Countdown
    ) -> None:
        self._on_ready = weakref.WeakMethod(on_ready)
        self._countdown = countdown
        self.streams: dict[int, torch.Stream] = {}  # where gradients on accelerators were accumulated, lately
        self.users: dict[int, int] = {}  # of a large parameter, while its hook runs, what ``users_in_hook`` said
        self._nodes: list[Node | None] = [None] * num_params
        self._handles: list[RemovableHandle | None] = [None] * num_params
        self._is_current = [False] * num_params
        self._hooked: list[bool] | None = None  # the trainable ones at the last call of ``hook`` that went through

    def forget(self) -> None:
        """Look every node up again: a cast or a move gives a parameter a new one."""
        self._is_current = [False] * len(self._nodes)
        self._hooked = None

    def hook(self, live: Sequence[nn.Parameter | None], trainable: Sequence[bool]) -> None:
        """Hook the nodes of trainable parameters that are not hooked yet."""
        if trainable == self._hooked:
            return
        for i, param in enumerate(live):
            if param is None or not trainable[i] or self._is_current[i]:
                continue
            with torch.inference_mode(False), torch.enable_grad():
                node = torch.autograd.graph.get_gradient_edge(param).node
            if node is not self._nodes[i]:
                handle = self._handles[i]
                if handle is not None:
                    handle.remove()
                self._handles[i] = node.register_hook(self._hook(i, param))
                self._nodes[i] = node
            self._is_current[i] = True
        self._hooked = list(trainable)

    def _hook(self, param_index: int, param: nn.Parameter) -> Callable[..., None]:
        on_ready, streams, users, device = self._on_ready, self.streams, self.users, param.device
        slots, left, fired = self._countdown.slots, self._countdown.left, self._countdown.fired

        def hook(_: object, grads: Sequence[torch.Tensor | None]) -> None:
            bucket = slots[param_index]  # as in ``Countdown.counts``
            if bucket >= 0 and (num_left := left[bucket]) > 1 and grads[0] is not None:
                slots[param_index] = NOT_PLACED
                left[bucket] = num_left - 1
                fired[param_index] = 1
                return
            report = on_ready()
            if report is not None:
                report(param_index, grads[0])

        def hook_on_stream(inputs: object, grads: Sequence[torch.Tensor | None]) -> None:
            streams[param_index] = torch.accelerator.current_stream(device)
            hook(inputs, grads)

        def hook_of_large(inputs: object, grads: Sequence[torch.Tensor | None]) -> None:
            users[param_index] = users_in_hook(param, grads)
            try:
                hook(inputs, grads)
            finally:
                users.pop(param_index, None)  # a hook may have run a backward of its own

        def hook_of_middle(_: object, grads: Sequence[torch.Tensor | None]) -> None:
            report = on_ready()  # each time, as it may be packed at once
            if report is not None:
                report(param_index, grads[0])

        if device.type != "cpu":
            return hook_on_stream
        if param.nbytes >= ALONE_BYTES:
            usual_references_to_arrived()  # while no backward runs
            return hook_of_large
        return hook_of_middle if param.nbytes >= EAGER_BYTES else hook

    def remove(self) -> None:
        """Take all hooks off. The nodes are kept: a hook may be running on one."""
        for i, handle in enumerate(self._handles):
            if handle is not None:
                handle.remove()
                self._handles[i] = None

    def foreseen(self, unforeseen: Iterable[int] = ()) -> bytes:
        """A byte for each parameter: 1 if the running backward is going to accumulate its gradient, as far as known.

        Nodes inside a reentrant checkpoint belong to a task of their own, which the outer one does not know: those in
        ``unforeseen`` count as foreseen.
        """
        will_execute = private.will_execute
        foreseen = bytearray([node is not None and will_execute(node) for node in self._nodes])
        for i in unforeseen:
            foreseen[i] = 1
        return bytes(foreseen)

    def is_passed_by(self, param_index: int) -> bool:
        """Asked from the node's hook: does distributed autograd call it, in place of the node?

        The engine then does not know of the node. Nor does it if the parameter is itself the root of the backward.
        """
        node = self._nodes[param_index]
        return private.rpc_is_running() and node is not None and not private.will_execute(node)

    def is_reached(self) -> bool:
        """Whether the running backward is going to accumulate any of the gradients."""
        try:
            return any(node is not None and private.will_execute(node) for node in self._nodes)
        except RuntimeError:  # a leaf that torch.autograd.grad was asked for
            return False

    def begins_backward(self) -> bool:
        """Asked from a hook on an output: is this a backward that concerns the managed parameters?

        It is if the engine will run one of their nodes. It also is if no such node can be reached from here at all (a
        constant loss, a module that is wholly inside a reentrant checkpoint): peers may be waiting. It is not if one
        can be reached but will not run (``backward(inputs=...)`` for others), nor in ``torch.autograd.grad``.
        """
        try:
            return self.is_reached() or self._leads_elsewhere()
        except RuntimeError:  # a leaf that torch.autograd.grad was asked for
            return False

    def _leads_elsewhere(self) -> bool:
        """Whether the running backward accumulates into leaves, none of which is managed or hides a managed one."""
        start = private.current_node()
        managed = {node for node in self._nodes if node is not None}
        seen: set[Node] = set()
        stack = [start] if start is not None else []
        accumulates = False
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            if node in managed:
                return False
            seen.add(node)
            if hasattr(node, "variable"):
                # The engine does not list a root that is itself a leaf; asking still raises in autograd.grad.
                accumulates |= private.will_execute(node) or node is start
            stack += [next_node for next_node, _ in node.next_functions if next_node is not None]
        return accumulates


def inside_nested_task() -> bool:
    """Whether this hook runs in a backward that was started from inside another (a reentrant checkpoint).

    The end of such a task is not the end of the user's backward. Python's stack tells: the outer engine called the
    ``apply`` of a Python autograd Function, which started the inner one.
    """
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        # ``self``: the apply that runs a backward; the one that runs a forward is a class method.
        is_apply = code.co_name == "apply" and code.co_varnames[:1] == ("self",)
        if is_apply and code.co_filename.endswith("torch/autograd/function.py"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
