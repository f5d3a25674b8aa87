"""Gradients against plain autograd on one process, over drawn models, drop sets, bucket sizes and windows, and against
DistributedDataParallel bit for bit."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import Skippable, assert_grads, inputs
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from knownddp import KnownDDP


class Mixed(Skippable):
    """Layers of different widths, some in double precision, and one module used by several of them."""

    def __init__(self, widths: tuple[int, ...], doubles: frozenset[int], is_sharing: bool) -> None:
        super().__init__(depth=0)
        shared = nn.Linear(3, 3)
        self.layers = nn.ModuleList(
            nn.Sequential(
                shared if is_sharing and i % 2 else nn.Identity(), nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 3)
            )
            for i, width in enumerate(widths)
        )
        self.doubles = doubles
        for i in doubles:
            for part in list(self.layers[i])[1:]:
                part.double()

    def forward(self, x: Tensor, skip: Any = ()) -> Tensor:
        for i, layer in enumerate(self.layers):
            if i not in skip:
                first, *rest = layer
                y = first(x)
                y = y.double() if i in self.doubles else y
                for part in rest:
                    y = part(y)
                x = x + y.float()
        return x


@dataclass(frozen=True)
class Step:
    """One micro-batch: who skips what, who says so, and how its gradients are used."""

    skips: tuple[frozenset[int], ...]  # by rank
    declares: tuple[frozenset[int], ...]  # by rank; may be wrong in both directions
    synchronises: bool
    zeroes: str  # before it: "", "none" or "zero"


@dataclass(frozen=True)
class Script:
    widths: tuple[int, ...]
    doubles: frozenset[int]
    is_sharing: bool
    options: tuple[tuple[str, Any], ...]
    steps: tuple[Step, ...]


@st.composite
def scripts(draw: st.DrawFn, world_size: int) -> Script:
    depth = draw(st.integers(1, 5))
    layers = st.frozensets(st.integers(0, depth - 1))
    is_common = draw(st.booleans())  # all ranks skip alike

    def sets() -> tuple[frozenset[int], ...]:
        if is_common:
            return (draw(layers),) * world_size
        return tuple(draw(layers) for _ in range(world_size))

    finds = draw(st.booleans())
    steps = []
    for _ in range(draw(st.integers(1, 5))):
        skips = sets()
        # Without detection every undeclared skip would be an error at the next forward; lies in excess are allowed.
        lies = draw(st.booleans()) and not is_common
        declares = tuple(s | draw(layers) if lies else s for s in skips)
        synchronises = draw(st.booleans())
        steps.append(Step(skips, declares, synchronises, draw(st.sampled_from(["", "none", "zero"]))))
    steps.append(Step(sets(), (frozenset(),) * world_size if finds else steps[-1].declares, True, ""))
    if not finds:
        steps[-1] = Step(steps[-1].skips, steps[-1].skips, True, "")
    options = (
        ("bucket_cap_mb", draw(st.sampled_from([None, 1e-5, 1e-4]))),
        ("find_unused_parameters", finds),
        ("own_group", draw(st.booleans())),
    )
    widths = tuple(draw(st.integers(1, 6)) for _ in range(depth))
    return Script(widths, draw(layers), draw(st.booleans()), options, tuple(steps))


def _loss(module: nn.Module, rank: int, number: int, step: Step, **kwargs: Any) -> Tensor:
    # The last term depends on x alone, so that a loss without parameters can still be backpropagated.
    x = inputs(rank, 4, 3, seed=number).requires_grad_()
    return module(x, skip=step.skips[rank], **kwargs).square().mean() + 0 * x.sum()


def _expected(plain: nn.Module, script: Script, world_size: int) -> list[dict[str, Tensor | None]]:
    """What each synchronised step leaves in .grad on all ranks, by the definition: the mean over ranks of what was
    there plus the local gradient, for whatever any rank touched since the last synchronisation."""
    replicas = [copy.deepcopy(plain) for _ in range(world_size)]
    touched: set[str] = set()
    results = []
    for number, step in enumerate(script.steps):
        for rank, replica in enumerate(replicas):
            if step.zeroes:
                replica.zero_grad(set_to_none=step.zeroes == "none")
            before = {n: p.grad.clone() if p.grad is not None else None for n, p in replica.named_parameters()}
            replica.zero_grad(set_to_none=True)
            _loss(replica, rank, number, step).backward()
            for name, param in replica.named_parameters():
                if param.grad is not None:
                    touched.add(name)
                    if before[name] is not None:
                        param.grad += before[name]
                else:
                    param.grad = before[name]
        if step.synchronises:
            grads: dict[str, Tensor | None] = {}
            for name, _ in plain.named_parameters():
                shares = [dict(r.named_parameters())[name].grad for r in replicas]
                if name in touched and any(s is not None for s in shares):
                    total = sum((s for s in shares if s is not None), torch.zeros(()))
                    grads[name] = (total / world_size).to(dict(plain.named_parameters())[name].dtype)
                else:
                    grads[name] = shares[0]
                for replica in replicas:
                    value = grads[name]
                    dict(replica.named_parameters())[name].grad = None if value is None else value.clone()
            touched.clear()
            results.append(grads)
    return results


def _run_script(rank: int, script: Script) -> None:
    world_size = dist.get_world_size()
    torch.manual_seed(0)
    plain = Mixed(script.widths, script.doubles, script.is_sharing)
    model = KnownDDP(copy.deepcopy(plain), **dict(script.options))
    expected = iter(_expected(plain, script, world_size))
    for number, step in enumerate(script.steps):
        if step.zeroes:
            model.zero_grad(set_to_none=step.zeroes == "none")
        model.require_backward_grad_sync = step.synchronises
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*(declared different|no rank expected)")
            _loss(model, rank, number, step, unused_parameters=model.module.of(step.declares[rank])).backward()
        if step.synchronises:
            assert_grads(model, next(expected))


def _property(world_size: int, examples: int) -> Any:
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    @given(script=scripts(world_size))
    def gradients_are_the_mean_over_ranks(ranks: Any, script: Script) -> None:
        ranks(world_size, _run_script, script)

    return gradients_are_the_mean_over_ranks


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gradients_are_the_mean_over_ranks(ranks, world_size):
    _property(world_size, {1: 40, 2: 100, 3: 60, 4: 40}[world_size])(ranks=ranks)


# -- against DistributedDataParallel, bit for bit


def _train(model: nn.Module, rank: int, *, skips: Any, declare: bool) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for number, skip in enumerate(skips):
        optimizer.zero_grad()
        kwargs = {"unused_parameters": model.module.of(skip)} if declare else {}
        loss = model(inputs(rank, 6, 16, seed=number), skip=skip, **kwargs).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def _same_bits(rank: int, cap_mb: float | None) -> None:
    torch.manual_seed(0)
    plain = Skippable(6, 16)
    skips = [(), (0, 3), (1,), (), (2, 3, 4), (5,), (0, 1, 2, 3, 4), ()]
    stock = _train(
        DistributedDataParallel(copy.deepcopy(plain), find_unused_parameters=True), rank, skips=skips, declare=False
    )
    for declare in (True, False):
        model = KnownDDP(copy.deepcopy(plain), find_unused_parameters=not declare, bucket_cap_mb=cap_mb)
        ours = _train(model, rank, skips=skips, declare=declare)
        assert all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True))


@pytest.mark.parametrize("cap_mb", [None, 1e-4])
def test_two_ranks_train_bit_for_bit_like_distributed_data_parallel(ranks, cap_mb):
    """On two ranks a sum does not depend on how gradients are grouped: a/2 + b/2 either way."""
    ranks(2, _same_bits, cap_mb)
