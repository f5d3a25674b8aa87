"""The autograd nodes of managed parameters: hooks on them, and what the engine says of them.

[Note: two kinds of hooks] A hook on a node is called when all is done that autograd does to a gradient, and is told
what came. A hook on the parameter itself is called a moment earlier and is not told, but costs half, which counts where
gradients are small. Such have it, on the CPU, as long as it will do: RPC's autograd calls hooks of nodes alone; where
outputs do not tell of a backward before it reaches a parameter the gradient that begins it must be known; a hook that
is called before this one may take the gradient away, which is then not to be told from an undefined one; and of what
comes twice in a backward (reentrant checkpoints have it) a hook may take one gradient, whose place the next one fills.
So a parameter on which others have hooks is told too, and so is one that was seen to come twice.

Three things are not known that a node's hook would know. A gradient that is undefined after another came in the same
backward passes for a second one; so hooks are told where the graph is promised to be static, as that would be another
one. The first time that a parameter comes twice it is not noticed if a hook takes the first of them that was put there
between the forward and its backward, or on the node after wrapping.
And the first backward that begins at a parameter though its forward had an output to tell: if a gradient stood there,
autograd added to it in place, and the backward raises, the sum stays there. From then on all are told.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from . import _torch_private as private
from .arrivals import Arrivals, Look
from .ownership import users_in_hook, usual_references_to_arrived
from .plan import ALONE_BYTES, EAGER_BYTES


class GradientNodes:
    """The AccumulateGrad node of each parameter, and hooks that say when a gradient was accumulated.

    Args:
        arrivals: where they write it down.
        on_arrivals: called when it is time to look there, from a hook after which others may follow.
        on_settled: called at once with each large parameter and its gradient, to which all is done but for hooks that
            are put on its node later; also with a small one whose gradient another hook took away.
        on_undefined: called with a parameter of which an autograd Function returned no gradient.

    All three are bound methods, held weakly: hooks die with the object they belong to.
    """

    def __init__(
        self,
        num_params: int,
        arrivals: Arrivals,
        on_arrivals: Look,
        on_settled: Look,
        on_undefined: Callable[[Tensor], None],
    ) -> None:
        self._on_settled, self._on_undefined = weakref.WeakMethod(on_settled), weakref.WeakMethod(on_undefined)
        self._note, self._hook_of_small = arrivals.hooks(weakref.WeakMethod(on_arrivals), self._on_undefined)
        self.streams: dict[int, torch.Stream] = {}  # where gradients on accelerators were accumulated, lately
        self.users: dict[int, int] = {}  # of a large parameter, while its hook runs, what ``users_in_hook`` said
        self._nodes: list[Node | None] = [None] * num_params
        self._handles: list[RemovableHandle | None] = [None] * num_params
        weakref.finalize(self, _remove, self._handles).atexit = False  # parameters may outlive wrappers
        self._is_current = [False] * num_params
        self._is_untold = [False] * num_params  # their hooks are on the parameter itself
        self._beside: dict[int, Mapping[int, object]] = {}  # all hooks on parameters that have one of those
        self._hooked: list[bool] | None = None  # the trainable ones at the last call of ``hook`` that went through
        self._told: Set[int] | None = frozenset()  # of which parameters the gradient must be known; None: of all
        self._hears_all = False

    def untold(self, live: Sequence[nn.Parameter | None]) -> list[nn.Parameter | None] | None:
        """The parameters whose hooks are not told the gradient, None in place of others; None if there are none."""
        if self._told is None or not any(self._is_untold):
            return None
        return [param if is_untold else None for param, is_untold in zip(live, self._is_untold, strict=True)]

    def hear(self, which: Collection[int] | None) -> None:
        """From the next call of ``hook`` on be told what comes of these parameters, and of those on which others have
        put hooks since; None: of all.
        """
        which = None if self._hears_all or which is None else frozenset(which)
        if which != self._told:
            self._told = which
            self.forget()
        elif sum(map(len, self._beside.values())) > len(self._beside):
            self.forget()

    def hear_all(self) -> None:
        """From the next call of ``hook`` on be told what comes, of all, whatever ``hear`` is asked for."""
        self._hears_all = True
        self.hear(None)

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
            is_untold = self._may_be_untold(i, param)
            if node is not self._nodes[i] or is_untold != self._is_untold[i]:
                handle = self._handles[i]
                if handle is not None:
                    handle.remove()
                put: Callable[..., RemovableHandle] = param.register_post_accumulate_grad_hook
                self._handles[i] = put(self._hook_of_small) if is_untold else node.register_hook(self._hook(i, param))
                self._nodes[i], self._is_untold[i] = node, is_untold
                self._beside.pop(i, None)
                if is_untold:
                    self._beside[i] = private.hooks_after_accumulation(param)
            self._is_current[i] = True
        self._hooked = list(trainable)

    def _may_be_untold(self, param_index: int, param: nn.Parameter) -> bool:
        """[Note: two kinds of hooks]"""
        if self._told is None or param_index in self._told:
            return False
        is_small = param.device.type == "cpu" and param.nbytes < EAGER_BYTES and type(param) is nn.Parameter
        own_hooks = 1 if self._is_untold[param_index] else 0
        return is_small and len(private.hooks_after_accumulation(param)) == own_hooks

    def _hook(self, param_index: int, param: nn.Parameter) -> Callable[..., None]:
        note, streams, users, device = self._note, self.streams, self.users, param.device
        on_settled, on_undefined = self._on_settled, self._on_undefined

        def hook(_: object, grads: Sequence[Tensor | None]) -> None:
            (grad,) = grads
            if grad is not None and param.grad is None:
                hook_of_middle(_, grads)  # another hook took it: looked at now, as a second one may take its place
            elif grad is not None:
                note(param, grad)
            elif (alive := on_undefined()) is not None:
                alive(param)

        def hook_of_middle(inputs: object, grads: Sequence[Tensor | None]) -> None:
            (grad,) = grads
            if grad is None:
                hook(inputs, grads)
            elif (alive := on_settled()) is not None:  # each time, as it may be packed at once
                alive(param, grad)

        by_size = hook_of_middle if param.nbytes >= EAGER_BYTES else hook

        def hook_on_stream(inputs: object, grads: Sequence[Tensor | None]) -> None:
            streams[param_index] = torch.accelerator.current_stream(device)
            by_size(inputs, grads)

        def hook_of_large(inputs: object, grads: Sequence[Tensor | None]) -> None:
            users[param_index] = users_in_hook(param, grads)
            try:
                hook_of_middle(inputs, grads)
            finally:
                users.pop(param_index, None)  # a hook may have run a backward of its own

        if device.type != "cpu":
            return hook_on_stream
        if param.nbytes >= ALONE_BYTES:
            usual_references_to_arrived()  # while no backward runs
            return hook_of_large
        return by_size

    def remove(self) -> None:
        """Take all hooks off. The nodes are kept: a hook may be running on one."""
        _remove(self._handles)

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


def _remove(handles: list[RemovableHandle | None]) -> None:
    for i, handle in enumerate(handles):
        if handle is not None:
            handle.remove()
            handles[i] = None


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
