"""The ways to train a model whose layers are dropped, each as something that can run a step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from knownddp import KnownDDP

from .workloads import Dropped, Layers, Workload

try:
    from torch.distributed._composable.replicate_with_fsdp import replicate
except ImportError:  # pragma: no cover
    replicate = None  # type: ignore[assignment]

MIN_GROUP_BYTES = 2**20
DDP_OPTIONS = frozenset(inspect.signature(DistributedDataParallel).parameters)


@dataclass(frozen=True)
class Contender:
    """One way.

    Attributes:
        wrap: makes the wrapper, on all ranks alike.
        instead: what the model does in the place of a dropped layer.
        declares: dropped layers are passed as ``unused_parameters``.
        needs_option: an argument of DistributedDataParallel that a version of torch may not have.
        drops: which workloads it is for: "never" (all layers are used), "some" (in which some are dropped), "fixed"
            (never, or always the same), "any".
        why_not: why it cannot be used for the other ones.
        keeps_grads: old gradients are zeroed, not dropped.
    """

    name: str
    title: str
    wrap: Callable[[Any], nn.Module]
    instead: Dropped = Dropped.SKIP
    declares: bool = False
    needs_option: str = ""
    drops: str = "any"
    why_not: str = ""
    keeps_grads: bool = False

    def refusal(self, workload: Workload) -> str | None:
        """Why it does not take part in ``workload``, or None."""
        if self.needs_option and self.needs_option not in DDP_OPTIONS:
            return f"torch {torch.__version__} has no {self.needs_option}"
        if self.name == "replicate" and replicate is None:  # pragma: no cover
            return f"torch {torch.__version__} has no replicate_with_fsdp"
        fits = {
            "any": True,
            "never": not workload.drop,
            "some": workload.drop > 0,
            "fixed": workload.is_fixed or not workload.drop,
        }
        return None if fits[self.drops] else self.why_not


class Trainee:
    """A contender's own copy of the model, wrapped; with ``wraps=False`` when ``wrap`` is called."""

    def __init__(
        self, contender: Contender, workload: Workload, rank: int, device: torch.device, *, wraps: bool = True
    ) -> None:
        self.contender = contender
        self.workload = workload
        self.module = workload.build().to(device)
        self.inputs = workload.inputs(rank).to(device)
        self.wrapper: nn.Module = self.module
        if wraps:
            self.wrap()

    def wrap(self) -> None:
        self.wrapper = self.contender.wrap(self.module)

    def forward(self, step: int) -> Tensor:
        dropped = self.workload.dropped(step)
        options: dict[str, Any] = {}
        if self.contender.declares and dropped:
            options["unused_parameters"] = [self.module.layers[i] for i in sorted(dropped)]
        return self.wrapper(self.inputs, dropped, self.contender.instead, **options).square().mean()

    def zero_grad(self) -> None:
        self.module.zero_grad(set_to_none=not self.contender.keeps_grads)

    def gradients(self) -> list[list[Tensor]]:
        """For each layer those of its parameters, zeros for one that has none."""
        return [[_gradient(p) for p in layer.parameters()] for layer in self.module.layers]


def _gradient(param: Tensor) -> Tensor:
    grad = param.grad if param.grad is not None else torch.zeros_like(param)
    return getattr(grad, "_local_tensor", grad).detach()  # FSDP's are DTensors


def _device_ids(module: nn.Module) -> list[int] | None:
    device = next(module.parameters()).device
    return [device.index] if device.type == "cuda" else None


def _ddp(**options: Any) -> Callable[[Layers], nn.Module]:
    return lambda module: DistributedDataParallel(module, device_ids=_device_ids(module), **options)


def _known(**options: Any) -> Callable[[Layers], nn.Module]:
    return lambda module: KnownDDP(module, device_ids=_device_ids(module), **options)


def _replicate(module: Layers) -> nn.Module:
    """One group a layer: a dropped layer's group is not reduced. Small layers are one group, as buckets would be."""
    mesh = init_device_mesh(next(module.parameters()).device.type, (dist.get_world_size(),))
    for layer in module.layers:
        if sum(p.nbytes for p in layer.parameters()) >= MIN_GROUP_BYTES:
            replicate(layer, mesh=mesh)
    replicated: Any = replicate(module, mesh=mesh)
    return replicated


_RAISES = 'raises at the next forward: "Expected to have finished reduction"'
_NOTHING = "nothing is dropped: the same as the wrapper without it"
_AS_WELL = "compared where all layers are used"
_CHANGES = "its unused parameters must be the same in every step"

PLAIN = Contender("plain", "no wrapper (computes alone, sends nothing)", lambda module: module)
DDP = Contender("ddp", "DDP", _ddp(), drops="never", why_not=_RAISES)
DDP_RUNS_ALL = Contender(
    "ddp-runs-all", "DDP, runs all layers", _ddp(), Dropped.RUN, drops="some", why_not="nothing is dropped"
)
CONTENDERS = (
    PLAIN,
    DDP,
    DDP_RUNS_ALL,
    Contender(
        "ddp-view", "DDP gradient_as_bucket_view", _ddp(gradient_as_bucket_view=True), drops="never", why_not=_RAISES
    ),
    Contender(
        "ddp-view-kept",
        "DDP gradient_as_bucket_view, gradients zeroed",
        _ddp(gradient_as_bucket_view=True),
        drops="never",
        why_not=_RAISES,
        keeps_grads=True,
    ),
    Contender("ddp-kept", "DDP, gradients zeroed", _ddp(), drops="never", why_not=_RAISES, keeps_grads=True),
    Contender(
        "ddp-batched",
        "DDP batched_grad_copy",
        _ddp(batched_grad_copy=True),
        needs_option="batched_grad_copy",
        drops="never",
        why_not=_RAISES,
    ),
    Contender("ddp-static", "DDP static_graph", _ddp(static_graph=True), drops="fixed", why_not=_CHANGES),
    Contender("ddp-find", "DDP find_unused_parameters", _ddp(find_unused_parameters=True)),
    Contender(
        "ddp-skip",
        "DDP skip_all_reduce_unused_params",
        _ddp(find_unused_parameters=True, skip_all_reduce_unused_params=True),
        needs_option="skip_all_reduce_unused_params",
        drops="fixed",
        why_not=_CHANGES,
    ),
    Contender("times-zero", "DDP, output times zero", _ddp(), Dropped.TIMES_ZERO, drops="some", why_not=_NOTHING),
    Contender(
        "zero-function",
        "DDP, Function of zero gradients",
        _ddp(),
        Dropped.ZERO_GRADIENTS,
        drops="some",
        why_not=_NOTHING,
    ),
    Contender("replicate", "FSDP2 replicate", _replicate),
    Contender("known", "KnownDDP, declared", _known(), declares=True),
    Contender("known-find", "KnownDDP, detected", _known(find_unused_parameters=True)),
    Contender("known-trust", "KnownDDP, trust", _known(unused_agreement="trust"), declares=True),
    Contender("known-shared", "KnownDDP, own_group=False", _known(own_group=False), declares=True),
    Contender("known-kept", "KnownDDP, gradients zeroed", _known(), drops="never", why_not=_AS_WELL, keeps_grads=True),
)
BY_NAME = {one.name: one for one in CONTENDERS}


def choose(names: Collection[str]) -> list[Contender]:
    """Those of that name, in the table's order; all if none is named."""
    return [one for one in CONTENDERS if not names or one.name in names or one.name == "plain"]
