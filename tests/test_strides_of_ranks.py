"""Any layout on any rank, when wrapping and later: parameters take rank 0's strides, gradients are averaged by index.

The mean is known: rank r's gradient is 6 (r + 1) times a pattern of different numbers, so it is 9 times the pattern on
two ranks and 12 times on three. Summed in memory order, it would be another, which is worked out too.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from knownddp import KnownDDP

MEAN = {2: 9, 3: 12}


@dataclass(frozen=True, slots=True)
class Layout:
    """How one rank stores a tensor: its dimensions from the outermost to the innermost, or not densely.

    ``kind``: "dense"; "sliced", every second column of row-major memory; "expanded", all along dimension 0 the same.
    """

    order: tuple[int, ...]
    kind: str = "dense"

    def is_dense(self, shape: Sequence[int]) -> bool:
        if self.kind == "sliced":
            return torch.Size(shape).numel() == 1
        return self.kind == "dense" or shape[0] == 1

    def of(self, values: Tensor) -> Tensor:
        if self.kind == "sliced":
            return torch.stack((values, values), dim=-1)[..., 0]
        if self.kind == "expanded":
            return values[:1].clone().expand(values.shape)
        inverse = [self.order.index(d) for d in range(values.dim())]
        return values.permute(self.order).clone(memory_format=torch.contiguous_format).permute(inverse)

    def memory_order(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The dimensions that have more than one element, outermost first, after wrapping: row-major if not dense."""
        order = self.order if self.kind == "dense" else range(len(shape))
        return tuple(d for d in order if shape[d] > 1)

    def strides(self, shape: Sequence[int]) -> dict[int, int]:
        """By dimension of more than one element, after wrapping."""
        strides, step = {}, 1
        for d in reversed(self.memory_order(shape)):
            strides[d] = step
            step *= shape[d]
        return strides


def strides_of(tensor: Tensor) -> dict[int, int]:
    """By dimension of more than one element; the others' mean nothing."""
    return {d: step for d, step in enumerate(tensor.stride()) if tensor.shape[d] > 1}


@dataclass(frozen=True, slots=True)
class Case:
    shape: tuple[int, ...]
    first: tuple[Layout, ...]  # by rank, when wrapping
    later: tuple[Layout, ...]  # by rank, after the first backward


def cases(world_size: int) -> st.SearchStrategy[Case]:
    def layouts(rank_of_tensor: int) -> st.SearchStrategy[tuple[Layout, ...]]:
        kinds = st.sampled_from(["dense", "dense", "dense", "sliced", "expanded"])
        orders = st.permutations(range(rank_of_tensor)).map(tuple)
        return st.tuples(*[st.builds(Layout, orders, kinds)] * world_size)

    shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)
    return shapes.flatmap(lambda shape: st.builds(Case, st.just(shape), layouts(len(shape)), layouts(len(shape))))


class _Weight(nn.Module):
    """A parameter with two names, and one that no rank changes."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(()))
        self.weight = nn.Parameter(weight)
        self.again = self.weight

    def forward(self, pattern: Tensor) -> Tensor:
        return (self.again * pattern).sum() + self.bias


def pattern_of(shape: Sequence[int]) -> Tensor:
    return torch.arange(1.0, torch.Size(shape).numel() + 1).reshape(shape)


def _in_memory_order(shape: Sequence[int], layouts: Sequence[Layout]) -> Tensor:
    """What rank 0 would have if gradients were summed as they lie in memory."""
    dims = [[*(d for d in range(len(shape)) if shape[d] == 1), *one.memory_order(shape)] for one in layouts]
    rows = [(pattern_of(shape) * 6 * (rank + 1)).permute(order).reshape(-1).clone() for rank, order in enumerate(dims)]
    mean = torch.stack(rows).sum(0) / len(layouts)
    return mean.view([shape[d] for d in dims[0]]).permute([dims[0].index(d) for d in range(len(shape))])


def _expected_warnings(rank: int, case: Case) -> list[str]:
    if not case.first[rank].is_dense(case.shape):
        return ["1 parameters were not dense"]
    same = case.first[rank].memory_order(case.shape) == case.first[0].memory_order(case.shape)
    return [] if same else ["1 parameters had other strides than on rank 0"]


def _check_grad(module: _Weight, right: Tensor) -> None:
    assert torch.equal(module.weight.grad, right)
    assert strides_of(module.weight.grad) == strides_of(module.weight)


def _run(rank: int, case: Case) -> None:
    world_size = dist.get_world_size()
    pattern = pattern_of(case.shape)
    right = pattern * MEAN[world_size]
    module = _Weight(case.first[rank].of(100 * rank + pattern))
    weight = module.weight
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = KnownDDP(module)
    texts = [str(one.message) for one in told]
    wanted = _expected_warnings(rank, case)
    assert len(texts) == len(wanted)
    for text, want in zip(texts, wanted, strict=True):
        assert want in text and "values kept" in text and text.endswith(": weight.")
    assert module.weight is module.again is weight
    assert strides_of(weight) == case.first[0].strides(case.shape)
    assert torch.equal(weight, case.first[0].of(pattern))  # rank 0's values, by index
    for _ in range(2):
        model.zero_grad()
        model(pattern * 6 * (rank + 1)).backward()
        _check_grad(module, right)
    # From now on the ranks differ, and nobody is told.
    with torch.no_grad():
        weight.data = case.later[rank].of(weight.detach().clone())
    for keeps in (False, True, False):
        model.zero_grad(set_to_none=not keeps)
        model(pattern * 6 * (rank + 1)).backward()
        assert torch.equal(weight.grad, right)
        if not keeps and case.later[rank].is_dense(case.shape):
            assert strides_of(weight.grad) == strides_of(weight)
    # The test can tell: where layouts differ, memory order gives something else.
    later = [one.memory_order(case.shape) for one in case.later]
    assert torch.equal(_in_memory_order(case.shape, case.later), right) == (len(set(later)) == 1)


def _dense(*orders: tuple[int, ...]) -> tuple[Layout, ...]:
    return tuple(Layout(order) for order in orders)


ROWS, COLUMNS = (0, 1), (1, 0)
CONTIGUOUS, CHANNELS_LAST = (0, 1, 2, 3), (0, 2, 3, 1)


def _property(world_size: int, number: int) -> Any:
    @settings(
        max_examples=number,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],  # each failure costs new processes; shrinking makes hundreds
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    @given(case=cases(world_size))
    def any_layout_gives_the_mean_by_index(ranks: Any, case: Case) -> None:
        ranks(world_size, _run, case)

    return any_layout_gives_the_mean_by_index


@pytest.mark.parametrize(("world_size", "number"), [(2, 40), (3, 20)])
def test_any_layout_on_any_rank_gives_rank_0s_strides_and_the_mean_by_index(ranks, world_size, number):
    _property(world_size, number)(ranks=ranks)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case((3, 4), _dense(ROWS, COLUMNS), _dense(COLUMNS, ROWS)), id="transposed"),
        pytest.param(Case((2, 3, 2, 2), _dense(CONTIGUOUS, CHANNELS_LAST), _dense(CHANNELS_LAST, CONTIGUOUS)), id="cl"),
        pytest.param(
            Case((2, 3, 2, 2), _dense(CHANNELS_LAST, CONTIGUOUS), _dense(CONTIGUOUS, CHANNELS_LAST)), id="cl-on-rank-0"
        ),
        pytest.param(
            Case((4, 3, 1, 1), _dense(CONTIGUOUS, CHANNELS_LAST), _dense(CHANNELS_LAST, CONTIGUOUS)), id="1x1"
        ),
        pytest.param(Case((2, 3, 4), _dense((0, 1, 2), (2, 0, 1)), _dense((1, 2, 0), (2, 1, 0))), id="orders-of-three"),
        pytest.param(
            Case((3, 4), (Layout(ROWS, "expanded"), Layout(COLUMNS)), _dense(ROWS, COLUMNS)), id="expanded-on-rank-0"
        ),
        pytest.param(
            Case((3, 4), (Layout(COLUMNS), Layout(ROWS, "expanded")), _dense(ROWS, COLUMNS)), id="expanded-on-rank-1"
        ),
        pytest.param(Case((1,), (Layout((0,), "sliced"),) * 2, (Layout((0,), "sliced"),) * 2), id="one-element"),
        pytest.param(Case((3, 4), (Layout(ROWS, "sliced"),) * 2, (Layout(ROWS, "sliced"),) * 2), id="sliced-on-both"),
        pytest.param(
            Case((3, 4), (Layout(COLUMNS), Layout(ROWS, "sliced")), (Layout(ROWS, "expanded"), Layout(COLUMNS))),
            id="sliced-on-rank-1",
        ),
    ],
)
def test_layouts_that_models_have(ranks, case):
    """Those of the property above that have a name."""
    ranks(2, _run, case)


# -- what hangs on a parameter


def _optimizer_goes_on(rank: int, options: dict[str, bool]) -> None:
    """Momentum 0.5, learning rate 1, gradients G and then 9 G: G, then 0.5 G + 9 G = 9.5 G.

    The weight goes from S (rank 0's, after its own first step S - G) to S - G - 9.5 G = S - 10.5 G.
    """
    pattern, start = pattern_of((3, 4)), pattern_of((3, 4)) * 2
    module = _Weight((Layout(COLUMNS) if rank else Layout(ROWS)).of(start + rank))
    hooked: list[Tensor] = []
    module.weight.register_post_accumulate_grad_hook(lambda param: hooked.append(param.grad.clone()))
    optimizer = torch.optim.SGD(module.parameters(), lr=1, momentum=0.5, **options)
    module(pattern).backward()
    optimizer.step()
    state = optimizer.state[module.weight]["momentum_buffer"]
    with pytest.warns(UserWarning, match="other strides") if rank else warnings.catch_warnings():
        model = KnownDDP(module)
    assert optimizer.state[module.weight]["momentum_buffer"] is state and torch.equal(state, pattern)
    optimizer.zero_grad()
    model(pattern * 6 * (rank + 1)).backward()
    optimizer.step()
    assert module.again is module.weight and module.weight.stride() == (4, 1)
    assert torch.equal(module.weight, start - 10.5 * pattern)
    assert [torch.equal(one, pattern * factor) for one, factor in zip(hooked, (1, 6 * (rank + 1)), strict=True)]


@pytest.mark.parametrize("options", [{}, {"foreach": True}], ids=["one-by-one", "foreach"])
def test_an_optimizer_that_was_there_before_goes_on_with_its_state(ranks, options):
    ranks(2, _optimizer_goes_on, options)
