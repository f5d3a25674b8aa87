"""Parameters of every dtype, size and layout of gradient.

Expected gradients come from plain autograd on one process or are worked out in the docstring.
"""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch
import torch.distributed as dist
from models import assert_grads, inputs, make, mean_grads
from steps import declares, setups, square_loss, step_is_right, steps_are_right, world_sizes
from torch import Tensor, nn

DTYPES = [torch.float32, torch.float16, torch.float64, torch.bfloat16, torch.complex64, torch.complex128]


class _AllDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((i + 1,), 1.0, dtype=dtype) for i, dtype in enumerate(DTYPES))

    def forward(self, x: float) -> Tensor:
        return sum((w * (x * (i + 1))).sum().to(torch.complex128) for i, w in enumerate(self.weights)).real


def _mixed(rank: int, cap: float | None, find: bool) -> None:
    _, model = make(_AllDtypes, bucket_cap_mb=cap, find_unused_parameters=find)
    mean = {2: 9, 3: 12}[dist.get_world_size()]
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        model(6.0 * (rank + 1)).backward()
        for i, weight in enumerate(model.module.weights):
            assert weight.grad.dtype is weight.dtype
            assert (weight.grad == mean * (i + 1)).all(), weight


@pytest.mark.parametrize("find", [False, True])
@setups
def test_parameters_of_many_dtypes_in_one_module_keep_theirs(ranks, world_size, cap, find):
    """x is 6 (r + 1) and small multiples of it, exact in every dtype: 9 on average over two ranks, 12 over three."""
    ranks(world_size, _mixed, cap, find)


class _Complex(nn.Module):
    def __init__(self, with_real: bool) -> None:
        super().__init__()
        self.waves = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
        self.real = nn.Parameter(torch.randn(3, 2)) if with_real else None

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.complex64) @ (self.waves * (1 + 2j))
        if self.real is not None:
            y = y + x @ self.real
        return y.abs()


def _complex(rank: int, cap: float | None, with_real: bool, views: bool) -> None:
    plain, model = make(lambda: _Complex(with_real), bucket_cap_mb=cap, gradient_as_bucket_view=views)
    steps_are_right(plain, model, rank)
    assert model.module.waves.grad.imag.abs().max() > 1e-3


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("with_real", [False, True])
@setups
def test_complex_gradients_keep_their_imaginary_part(ranks, world_size, cap, with_real, views):
    ranks(world_size, _complex, cap, with_real, views)


class _Large(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self) -> Tensor:
        return (self.weight * torch.tensor(2.0**15, dtype=self.weight.dtype)).sum().float()


def _large(rank: int, dtype: torch.dtype) -> list[float]:
    _, model = make(lambda: _Large(dtype))
    model().backward()
    return model.module.weight.grad.tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_does_not_overflow_on_the_way(ranks, dtype):
    """2^15 on both ranks: their sum, 2^16, is no float16; halves are summed instead."""
    assert ranks(2, _large, dtype) == [[2.0**15] * 3] * 2


def _cast_later(rank: int, dtype: torch.dtype) -> None:
    plain, model = make()
    steps_are_right(plain, model, rank, steps=2)
    plain.to(dtype)
    model.to(dtype)

    def loss_of(module: nn.Module, r: int, step: int) -> Tensor:
        return module(inputs(r, 5, 3, seed=step).to(dtype)).square().mean()

    if dtype is torch.float64:
        steps_are_right(plain, model, rank, loss_of)
    else:
        for step in range(3):
            model.zero_grad(set_to_none=True)
            loss_of(model, rank, step).backward()
            wanted = mean_grads(plain, dist.get_world_size(), lambda m, r, s=step: loss_of(m, r, s))
            for name, param in model.module.named_parameters():
                assert param.grad.dtype is dtype
                # The sum is rounded to 8 bits of mantissa in another order here than in the oracle.
                torch.testing.assert_close(param.grad, wanted[name], rtol=2**-6, atol=2**-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@world_sizes
def test_a_model_cast_after_wrapping_is_averaged_in_its_new_dtype(ranks, world_size, dtype):
    ranks(world_size, _cast_later, dtype)


class _FrozenLast(nn.Module):
    """A frozen parameter of a dtype of its own, registered last."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.tensor([3.0], dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def _frozen_last(rank: int, cap: float | None) -> None:
    plain, model = make(_FrozenLast, bucket_cap_mb=cap)
    steps_are_right(plain, model, rank)


@setups
def test_a_frozen_parameter_of_a_dtype_of_its_own_blocks_nothing(ranks, world_size, cap):
    ranks(world_size, _frozen_last, cap)


class _Empty(nn.Module):
    """Parameters without elements, one of them used."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.randn(0, 3))
        self.linear = nn.Linear(3, 2)
        self.after = nn.Parameter(torch.randn(4, 0))
        self.alone = nn.Parameter(torch.randn(0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.before.sum() + self.after.sum() + self.alone.sum()


def _empty(rank: int, cap: float | None, find: bool) -> None:
    plain, model = make(_Empty, bucket_cap_mb=cap, find_unused_parameters=find)
    steps_are_right(plain, model, rank)
    assert model.module.after.grad.shape == (4, 0)


@pytest.mark.parametrize("find", [False, True])
@setups
def test_parameters_without_elements_get_gradients_without_elements(ranks, world_size, cap, find):
    ranks(world_size, _empty, cap, find)


# -- sparse gradients


class _Tables(nn.Module):
    """Two sparse tables and a dense layer; a call looks up one table, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(10, 3, sparse=True)
        self.second = nn.EmbeddingBag(10, 3, sparse=True, mode="sum")
        self.linear = nn.Linear(3, 2)

    def forward(self, ids: Tensor, which: str) -> Tensor:
        if which == "none":
            return self.linear(torch.ones(3))
        table = getattr(self, which)
        return self.linear(table(ids if which == "first" else ids.unsqueeze(0)))


def _rows(rank: int, step: int) -> Tensor:
    """Other rows and another number of them on each rank, one twice, one on several ranks."""
    return (torch.tensor([[1, 1, 4], [4, 7, 9, 0], [1, 5]][rank]) + step) % 10


def _lookup(module: nn.Module, rank: int, step: int, which: str, unused: Collection[str] = ()) -> Tensor:
    declared = declares(module, unused) if unused else {}
    return module(_rows(rank, step), which=which, **declared).square().mean()


def _assert_sparse(plain: nn.Module, model: nn.Module, wanted: dict[str, Tensor | None]) -> None:
    """Compared dense: the order of rows, and zero rows, mean nothing."""
    for name, param in model.module.named_parameters():
        want = wanted[name]
        assert (param.grad is None) == (want is None), name
        if want is not None:
            assert param.grad.is_sparse == want.is_sparse, name
            torch.testing.assert_close(param.grad.to_dense(), want.to_dense(), rtol=1e-5, atol=1e-6)


def _sparse(rank: int, cap: float | None, way: str) -> None:
    """Tables take turns, on all ranks alike (``declared``, ``detected``) or shifted by rank (``shifted``)."""
    plain, model = make(_Tables, bucket_cap_mb=cap, find_unused_parameters=way != "declared")
    turns = ["first", "second", "none", "first"]
    for step in range(len(turns)):

        def loss_of(module: nn.Module, r: int, step: int = step) -> Tensor:
            which = turns[(step + (r if way == "shifted" else 0)) % len(turns)]
            unused = {"first", "second"} - {which} if way == "declared" else ()
            return _lookup(module, r, step, which, unused)

        model.zero_grad(set_to_none=True)
        loss_of(model, rank).backward()
        _assert_sparse(plain, model, mean_grads(plain, dist.get_world_size(), loss_of))


@pytest.mark.parametrize("way", ["declared", "detected", "shifted"])
@setups
def test_sparse_gradients_of_used_and_unused_tables_stay_sparse(ranks, world_size, cap, way):
    ranks(world_size, _sparse, cap, way)


def _sparse_on_one_rank(rank: int) -> None:
    """By default: rank 0 alone looks anything up in the first table, the others in the second."""
    plain, model = make(_Tables)

    def loss_of(module: nn.Module, r: int) -> Tensor:
        return _lookup(module, r, 0, "first" if r == 0 else "second")

    for _ in range(3):
        model.zero_grad(set_to_none=True)
        loss_of(model, rank).backward()
        _assert_sparse(plain, model, mean_grads(plain, dist.get_world_size(), loss_of))


@world_sizes
def test_a_rank_without_rows_contributes_nothing(ranks, world_size):
    ranks(world_size, _sparse_on_one_rank)


def _sparse_accumulated(rank: int) -> None:
    plain, model = make(_Tables)

    def losses(module: nn.Module, r: int) -> list[Tensor]:
        return [_lookup(module, r, 0, "first"), _lookup(module, r, 3, "first")]

    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with model.no_sync():
            _lookup(model, rank, 0, "first").backward()
        _lookup(model, rank, 3, "first", ["second"]).backward()
        _assert_sparse(plain, model, mean_grads(plain, dist.get_world_size(), losses))


@world_sizes
def test_sparse_gradients_accumulate(ranks, world_size):
    ranks(world_size, _sparse_accumulated)


def _sparse_training(rank: int) -> None:
    """SparseAdam moves only the rows that some rank looked up; replicas stay equal."""
    _, model = make(_Tables)
    before = model.module.first.weight.detach().clone()
    optimizer = torch.optim.SparseAdam([model.module.first.weight], lr=0.1)
    model(_rows(rank, 0), which="first", unused_parameters=["second"]).sum().backward()
    optimizer.step()
    looked_up = sorted({int(i) for r in range(dist.get_world_size()) for i in _rows(r, 0)})
    moved = (model.module.first.weight != before).any(dim=1).nonzero().flatten().tolist()
    assert moved == looked_up


@world_sizes
def test_a_sparse_optimizer_moves_the_rows_that_any_rank_looked_up(ranks, world_size):
    ranks(world_size, _sparse_training)


def _autocast(rank: int) -> None:
    """Parameters and gradients are float32, what is computed between is bfloat16."""
    plain, model = make()

    def loss_of(module: nn.Module, r: int, step: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return square_loss(module, r, step).float()

    for step in range(3):
        step_is_right(plain, model, rank, step, loss_of)
        assert_grads(model, mean_grads(plain, dist.get_world_size(), lambda m, r, s=step: loss_of(m, r, s)))
        assert all(p.grad.dtype is torch.float32 for p in model.parameters())


@world_sizes
def test_autocast_leaves_float32_means(ranks, world_size):
    ranks(world_size, _autocast)
