"""``torch.compile`` around the wrapper, inside it and block by block."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo
from models import inputs, make, mean_grads
from steps import step_is_right, steps_are_right
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from knownddp import CompiledBackwardError, KnownDDP

WIDTH = 512  # a layer is a little more than 1 MiB: torch.compile splits graphs for no smaller buckets


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Blocks(nn.Module):
    """Four layers, some of which a call may skip: ``skip`` holds their digits."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor, skip: str = "") -> Tensor:
        for i, block in enumerate(self.blocks):
            if str(i) not in skip:
                x = x + block(x)
        return x


class Counting:
    """A backend that runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


def whole_from_outside(module: nn.Module, wrap: Callable[[nn.Module], nn.Module], backend: Any) -> nn.Module:
    return torch.compile(wrap(module), backend=backend)  # type: ignore[return-value]


def whole_from_inside(module: nn.Module, wrap: Callable[[nn.Module], nn.Module], backend: Any) -> nn.Module:
    return wrap(torch.compile(module, backend=backend))  # type: ignore[arg-type]


def in_place(module: nn.Module, wrap: Callable[[nn.Module], nn.Module], backend: Any) -> nn.Module:
    wrapper = wrap(module)
    wrapper.compile(backend=backend)
    return wrapper


def by_block(module: nn.Module, wrap: Callable[[nn.Module], nn.Module], backend: Any) -> nn.Module:
    for block in module.blocks:  # type: ignore[union-attr]
        block.compile(backend=backend)
    return wrap(module)


WAYS = pytest.mark.parametrize("way", [whole_from_outside, whole_from_inside, in_place, by_block])


@contextmanager
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    try:
        with warnings.catch_warnings():  # of torch.compile's own
            warnings.simplefilter("ignore")
            yield
    finally:
        torch._dynamo.reset()


def loss_of(module: nn.Module, rank: int, step: int = 0, **kwargs: Any) -> Tensor:
    return module(inputs(rank, 4, WIDTH, seed=step), **kwargs).square().mean()


def _graphs(rank: int, way: Callable[..., nn.Module], cap: float | None) -> tuple[int, int]:
    """How many graphs three steps make under stock and under ours."""
    made = []
    for kind in (DistributedDataParallel, KnownDDP):
        torch.manual_seed(0)
        counting = Counting()
        with fresh_dynamo():
            model = way(Blocks(), lambda m, k=kind: k(m, bucket_cap_mb=cap), counting)
            for step in range(3):
                loss_of(model, rank, step).backward()
        made.append(counting.graphs)
    return made[0], made[1]


@WAYS
@pytest.mark.parametrize(("cap", "at_least"), [(None, 1), (2, 2)], ids=["one-bucket", "two-layers-a-bucket"])
def test_as_many_graphs_as_under_stock_ddp(ranks, way, cap, at_least):
    """Two layers fill a bucket, so four layers make at least two graphs when torch splits at bucket sizes."""
    ((stock, ours),) = ranks(1, _graphs, way, cap)
    assert ours == stock >= (1 if way is by_block else at_least)


def _right(rank: int, way: Callable[..., nn.Module], find: bool) -> None:
    """Compiled by aot_eager, which runs a compiled backward too. Each step is compared with plain autograd."""
    torch.manual_seed(0)
    plain = Blocks()
    with fresh_dynamo():
        model = way(
            copy.deepcopy(plain),
            lambda m: KnownDDP(m, bucket_cap_mb=2, find_unused_parameters=find),
            "aot_eager",
        )
        for step in range(3):
            model.zero_grad()
            loss_of(model, rank, step).backward()
            wanted = mean_grads(plain, 2, lambda m, r, s=step: loss_of(m, r, s))
            got = dict(model.named_parameters())
            for name, want in wanted.items():
                grad = next(p.grad for full, p in got.items() if full.replace("_orig_mod.", "").endswith(name))
                torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("way", "find"),
    [(whole_from_outside, False), (whole_from_inside, True), (in_place, False), (by_block, True)],
)
def test_compiled_models_get_the_mean(ranks, way, find):
    ranks(2, _right, way, find)


def _declared(rank: int, way: Callable[..., nn.Module]) -> tuple[int, int]:
    """Steps that skip other layers, declared. Returns how many bytes were skipped, and of one layer."""
    torch.manual_seed(0)
    plain = Blocks()
    wrappers = []
    with fresh_dynamo():

        def wrap(module: nn.Module) -> KnownDDP:
            wrappers.append(KnownDDP(module))
            return wrappers[0]

        model = way(copy.deepcopy(plain), wrap, "eager")
        for step, skip in enumerate(["03", "2", "", "03"]):
            model.zero_grad()
            unused = [f"*blocks.{i}.*" for i in skip]
            loss_of(model, rank, step, skip=skip, unused_parameters=unused).backward()
            wanted = mean_grads(plain, 2, lambda m, r, s=step, k=skip: loss_of(m, r, s, skip=k))
            for (name, want), param in zip(wanted.items(), model.parameters(), strict=True):
                assert (param.grad is None) == (want is None), name
                if want is not None:
                    torch.testing.assert_close(
                        param.grad, want, rtol=1e-4, atol=1e-6, msg=lambda m, n=name, s=step: f"{n} in step {s}: {m}"
                    )
    return wrappers[0].stats().bytes_skipped, (WIDTH * WIDTH + WIDTH) * 4


@WAYS
def test_declared_layers_of_compiled_models_are_skipped(ranks, way):
    """Two, one, none and two layers of the four steps."""
    for skipped, layer in ranks(2, _declared, way):
        assert skipped == 5 * layer


def _compiled_autograd(rank: int) -> None:
    """On all ranks. Gradients are as before, and the next step is right."""
    plain, model = make(Blocks)
    steps_are_right(plain, model, rank, loss_of, steps=2)
    before = [p.grad.clone() for p in model.parameters()]
    with fresh_dynamo(), torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        loss = loss_of(model, rank)
        with pytest.raises(CompiledBackwardError, match="compiled_autograd=False"):
            loss.backward()
        del loss
    assert all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), before, strict=True))
    step_is_right(plain, model, rank, 7, loss_of)


def test_compiled_autograd_is_refused_on_every_rank(ranks):
    ranks(2, _compiled_autograd)
