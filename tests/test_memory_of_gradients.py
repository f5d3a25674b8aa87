"""Whose memory means lie in: flat buckets that are used again, gradients that are reduced where they are.

Inputs are rank r -> r + 1, so on two ranks the mean of a gradient that is the input is 1.5.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from models import Fails, Scales, Skippable, inputs, make, raises_everywhere
from steps import step_is_right
from torch import Tensor, nn

from knownddp import KnownDDP, PeerFailedError
from knownddp.plan import ALONE_BYTES

SIDE = 1024  # a float32 matrix of this side is as large as a parameter that travels alone


class Matrix(nn.Module):
    """``forward(x)`` is the sum of the elements times x, so each element's gradient is x."""

    def __init__(
        self, layout: Callable[[Tensor], Tensor] = lambda one: one, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(layout(torch.ones(SIDE, SIDE, dtype=dtype)))
        self.bias = nn.Parameter(torch.ones(3))
        self.fails = False

    def forward(self, x: float) -> Tensor:
        """The backward comes to the weight first."""
        bias = Fails.apply(self.bias) if self.fails else self.bias
        return (bias * x).sum() + (self.weight.float() * x).sum()


def _addresses(model: KnownDDP) -> list[int]:
    return [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]


def _skipping(rank: int, skip: tuple[int, ...]) -> Callable[[nn.Module, int, int], Tensor]:
    def loss(module: nn.Module, r: int, step: int) -> Tensor:
        declared = {"unused_parameters": module.module.of(skip)} if isinstance(module, KnownDDP) else {}
        return module(inputs(r, 5, 3, seed=step), skip, **declared).square().mean()

    return loss


# -- used again


def _validates(rank: int, no_grad: bool) -> bool:
    """Whether a gradient that was dropped after a forward without a backward is gone."""
    _, model = make()
    model(inputs(rank, 5, 3, seed=0)).square().mean().backward()
    first = next(iter(model.parameters()))
    gone = weakref.ref(first.grad)
    with torch.set_grad_enabled(not no_grad):
        model(inputs(rank, 5, 3, seed=1))
    if not no_grad:
        with torch.no_grad():
            model(inputs(rank, 5, 3, seed=1))
    model.zero_grad(set_to_none=True)
    model.reducer.pool.clear()
    return gone() is None


@pytest.mark.parametrize("no_grad", [True, False])
def test_a_forward_without_a_backward_keeps_no_gradient(ranks, no_grad):
    assert ranks(1, _validates, no_grad) == [True]


def _zeroes_late(rank: int) -> list[bool]:
    """Gradients are dropped between a forward and its backward: whether their memory is used again."""
    _, model = make()
    found = []
    before: list[int] = []
    for step in range(4):
        loss = model(inputs(rank, 5, 3, seed=step)).square().mean()
        model.zero_grad(set_to_none=True)
        loss.backward()
        found.append(_addresses(model) == before)
        before = _addresses(model)
    return found[2:]


def test_memory_is_used_again_where_gradients_are_dropped_after_the_forward(ranks):
    """From the third step on; before, another order may be planned. On one rank, where no backend's thread holds it."""
    assert ranks(1, _zeroes_late) == [[True, True]]


def _reuses(rank: int) -> None:
    plain, model = make()
    step_is_right(plain, model, rank, 0)  # the second plan is another one
    step_is_right(plain, model, rank, 1)
    before = _addresses(model)
    for step in range(2, 5):
        step_is_right(plain, model, rank, step)
        assert _addresses(model) == before


def test_what_nobody_holds_is_written_again(ranks):
    ranks(2, _reuses)


HOLD = {
    "the gradient": lambda grad: grad,
    "an alias": lambda grad: grad.detach(),
    "an array": lambda grad: grad.numpy(),
    "an array by way of DLPack": np.from_dlpack,
    "a part": lambda grad: grad[0],
    "its storage": lambda grad: _Storage(grad),
}


class _Storage:
    """The memory of a tensor, held without a tensor."""

    def __init__(self, grad: Tensor) -> None:
        self._storage = grad.untyped_storage()
        self._place = grad.storage_offset(), grad.shape, grad.stride()

    def value(self) -> Tensor:
        return torch.empty(0).set_(self._storage, *self._place)


def _keeps(rank: int, hold: str) -> None:
    plain, model = make()
    kept: list[tuple[Any, Tensor]] = []
    for step in range(4):
        step_is_right(plain, model, rank, step)
        grad = model.module.layers[0].weight.grad
        kept.append((HOLD[hold](grad), grad.clone()))
        del grad
    for held, value in kept:
        held = held.value() if isinstance(held, _Storage) else torch.as_tensor(held)
        assert torch.equal(held, value[0] if hold == "a part" else value)


@pytest.mark.parametrize("hold", HOLD)
def test_what_somebody_holds_stays_as_it_is(ranks, hold):
    ranks(2, _keeps, hold)


def _keeps_storages(rank: int) -> None:
    plain, model = make()
    kept: list[tuple[torch.UntypedStorage, list[int]]] = []
    for step in range(4):
        step_is_right(plain, model, rank, step)
        storage = model.module.layers[0].weight.grad.untyped_storage()
        kept.append((storage, storage.tolist()))
        del storage
    assert all(storage.tolist() == bytes_then for storage, bytes_then in kept)


def test_a_storage_that_somebody_holds_stays_as_it_is(ranks):
    ranks(2, _keeps_storages)


def _moves(grads: list[Tensor]) -> list[Tensor]:
    """As clipping by ``.data`` does; the unclipped ones are kept."""
    unclipped = [grad.data for grad in grads]
    for grad in grads:
        grad.data = grad.data.clamp(-0.01, 0.01)
    return unclipped


def _swaps(grads: list[Tensor]) -> list[Tensor]:
    grads[0].data, grads[1].data = grads[1].data, grads[0].data
    return []


def _transposes_data(grads: list[Tensor]) -> list[Tensor]:
    grads[0].data = grads[0].data.t()
    return []


MEDDLE: dict[str, Callable[[list[Tensor]], object]] = {
    "moved": _moves,
    "swapped": _swaps,
    "laid out anew": lambda grads: grads[0].t_() is None or [],
    "laid out anew by .data": _transposes_data,
    "written on": lambda grads: setattr(grads[0], "seen", True) or [],
    "given a history": lambda grads: grads[0].mul_(torch.ones((), requires_grad=True)) is None or [],
    "made a leaf": lambda grads: grads[0].requires_grad_() is None or [],
    "shared between processes": lambda grads: grads[0].share_memory_() is None or [],
    "freed": lambda grads: grads[0].untyped_storage().resize_(0) or [],
}


def _is_meddled_with(rank: int, kind: str, who: tuple[int, ...]) -> None:
    plain, model = make(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)))
    kept: list[tuple[Tensor, Tensor]] = []
    for step in range(5):
        step_is_right(plain, model, rank, step)
        weights = [param for param in model.parameters() if param.ndim == 2]
        for weight in weights:
            grad = weight.grad
            assert not hasattr(grad, "seen") and not grad.requires_grad and not grad.is_shared()
            assert grad.stride() == weight.stride()
            del grad
        if rank in who and step:
            held = MEDDLE[kind]([weight.grad for weight in weights])
            kept += [(one, one.clone()) for one in held]
    assert all(torch.equal(one, value) for one, value in kept)


@pytest.mark.parametrize("who", [(0,), (0, 1)], ids=str)
@pytest.mark.parametrize("kind", MEDDLE)
def test_a_gradient_that_users_changed_beyond_its_elements_is_not_used_again(ranks, kind, who):
    ranks(2, _is_meddled_with, kind, who)


def _accumulates(rank: int) -> None:
    """Gradients that stay: the means are written into the very tensors that were there."""
    _, model = make(lambda: Scales("a", "b"))
    x = torch.tensor(float(rank + 1))
    model(x, "a b").backward()
    grads = [p.grad for p in model.parameters()]
    for total in (3.0, 4.5, 6.0):
        model(x, "a b").backward()
        assert [p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True)] == [True, True]
        assert [grad.item() for grad in grads] == [total, total]
    for grad in grads:
        grad.zero_()  # as ``zero_grad(set_to_none=False)`` does
    model(x, "a b").backward()
    assert [grad.item() for grad in grads] == [1.5, 1.5]


def test_gradients_that_stay_are_written_in_place(ranks):
    ranks(2, _accumulates)


def _changes_sets(rank: int) -> None:
    plain, model = make(lambda: Skippable(6))
    for step in range(12):
        skip = ((), (0, 1), (4, 5), (1, 3))[step % 4]
        step_is_right(plain, model, rank, step, _skipping(rank, skip))
        used = sum(p.numel() for p in model.parameters() if p.grad is not None)
        pooled = sum(kept.memory.numel() for kept in model.reducer.pool.kept())
        assert pooled <= 2 * used  # memory of another set may be larger than what was needed
    model.zero_grad(set_to_none=True)
    flats = [weakref.ref(kept.memory) for kept in model.reducer.pool.kept()]
    assert flats
    model.module.double()
    model(inputs(rank, 5, 3).double()).sum().backward()
    assert not any(flat() is not None for flat in flats)


def test_the_pool_holds_what_the_last_step_used(ranks):
    ranks(2, _changes_sets)


# -- where they are


def _in_place(rank: int) -> None:
    _, model = make(Matrix)
    weight = model.module.weight
    assert weight.nbytes == ALONE_BYTES
    local: list[int] = []
    weight.register_post_accumulate_grad_hook(lambda p: local.append(p.grad.data_ptr()))
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        model(rank + 1.0).backward()
        assert weight.grad.data_ptr() == local[-1]
        assert weight.grad.stride() == weight.stride()
        assert torch.equal(weight.grad, torch.full((SIDE, SIDE), 1.5))
        assert torch.equal(model.module.bias.grad, torch.full((3,), 1.5))


def test_a_large_gradient_is_reduced_where_it_is(ranks):
    ranks(2, _in_place)


def _held(rank: int, alias: bool) -> None:
    """A hook keeps the local gradient: it must stay rank r -> r + 1."""
    _, model = make(Matrix)
    kept: list[Tensor] = []
    model.module.weight.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad.detach() if alias else p.grad))
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        model(rank + 1.0).backward()
        assert model.module.weight.grad[0, 0].item() == 1.5
    assert all(torch.equal(one, torch.full_like(one, rank + 1.0)) for one in kept)


@pytest.mark.parametrize("alias", [False, True])
def test_a_large_gradient_that_a_hook_keeps_is_copied(ranks, alias):
    ranks(2, _held, alias)


class Expanded(Matrix):
    """The gradient of the weight comes as an expanded tensor, which autograd copies into ``.grad``."""

    def forward(self, x: float) -> Tensor:
        return self.weight.sum() * x + self.bias.sum() * x


def _held_copy(rank: int) -> None:
    _, model = make(Expanded)
    kept: list[Tensor] = []
    model.module.weight.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad.detach()))
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        model(rank + 1.0).backward()
        assert model.module.weight.grad[0, 0].item() == 1.5
    assert all(torch.equal(one, torch.full_like(one, rank + 1.0)) for one in kept)


def test_an_alias_of_a_large_gradient_that_autograd_copied_stays(ranks):
    ranks(2, _held_copy)


def _held_by_a_node(rank: int) -> None:
    """A hook that was on the node before wrapping keeps what the engine accumulated."""
    torch.manual_seed(0)
    module = Matrix()
    kept: list[Tensor] = []
    node = torch.autograd.graph.get_gradient_edge(module.weight).node
    node.register_hook(lambda _, grads: kept.append(grads[0]))
    model = KnownDDP(module)
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        model(rank + 1.0).backward()
        assert module.weight.grad[0, 0].item() == 1.5
    assert all(torch.equal(one, torch.full_like(one, rank + 1.0)) for one in kept)


def test_a_large_gradient_that_a_hook_of_its_node_keeps_is_copied(ranks):
    ranks(2, _held_by_a_node)


CHANGES = {
    "transposed in place": lambda weight: weight.t(),
    "other memory": lambda weight: weight.clone(),
    "column-major": lambda weight: weight.t().contiguous().t(),
}


class Weighted(nn.Module):
    """``forward(x)`` is the sum of elements times their number times x."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: float) -> Tensor:
        return (self.weight * torch.arange(float(self.weight.numel())).view(self.weight.shape) * x).sum()


def _changed(rank: int, change: str) -> None:
    _, model = make(Weighted)
    weight = model.module.weight
    for step in range(4):
        if step == 2:
            weight.data = CHANGES[change](weight.detach())
        model.zero_grad(set_to_none=True)
        model(rank + 1.0).backward()
        assert torch.equal(weight.grad, 1.5 * torch.arange(float(weight.numel())).view(weight.shape))
        assert weight.grad.stride() == weight.stride()


@pytest.mark.parametrize("change", CHANGES)
def test_a_parameter_whose_memory_is_seen_otherwise_is_noticed(ranks, change):
    ranks(2, _changed, change)


class Summed(nn.Module):
    """``forward(x)`` is the sum of all elements times x. Autograd has one gradient for both, and copies it once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(SIDE, SIDE))
        self.second = nn.Parameter(torch.ones(SIDE, SIDE))

    def forward(self, x: float) -> Tensor:
        return ((self.first + self.second) * x).sum()


def _grad_of_another(grad: Tensor) -> nn.Parameter:
    other = nn.Parameter(torch.ones(SIDE, SIDE))
    other.grad = grad
    return other


@torch.enable_grad()
def _made_with(grad: Tensor) -> Tensor:
    return nn.Parameter(torch.ones(())) * grad


HOLD_LARGE: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "an alias": (lambda grad: grad.detach(), lambda alias: alias),
    "an array by way of DLPack": (np.from_dlpack, torch.as_tensor),
    "a storage": (lambda grad: grad.untyped_storage(), lambda storage: torch.empty(0).set_(storage)),
    "another parameter": (_grad_of_another, lambda other: other.grad),
    "a graph": (_made_with, lambda made: made.grad_fn._saved_other),
}


def _held_however(rank: int, hold: str, part: str) -> None:
    keep, values = HOLD_LARGE[hold]
    _, model = make(Summed)
    kept: list[Any] = []

    def note(param: Tensor) -> None:
        kept.append(keep(param.grad))

    model.module.get_parameter(part).register_post_accumulate_grad_hook(note)
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        model(rank + 1.0).backward()
        assert all(torch.equal(p.grad, torch.full_like(p, 1.5)) for p in model.parameters())
    assert all((values(one) == rank + 1.0).all() for one in kept)


@pytest.mark.parametrize("part", ["first", "second"])
@pytest.mark.parametrize("hold", HOLD_LARGE)
def test_a_large_gradient_that_is_held_in_whatever_way_is_copied(ranks, hold, part):
    ranks(2, _held_however, hold, part)


class FromArray(torch.autograd.Function):
    """The sum of two matrices times x. One array holds the gradients of both; torch knows of no user it has."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor, x: float, array: Any) -> Tensor:  # type: ignore[override]
        ctx.x, ctx.array = x, array
        return (first + second).sum() * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.array.fill(grad.item() * ctx.x)
        return torch.from_numpy(ctx.array), torch.from_numpy(ctx.array), None, None


class OfAnArray(Summed):
    def __init__(self) -> None:
        super().__init__()
        self.array = np.zeros((SIDE, SIDE), dtype=np.float32)

    def forward(self, x: float) -> Tensor:
        return FromArray.apply(self.first, self.second, x, self.array)  # type: ignore[no-untyped-call, no-any-return]


def _array(rank: int) -> None:
    _, model = make(OfAnArray)
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        model(rank + 1.0).backward()
        assert all(torch.equal(p.grad, torch.full_like(p, 1.5)) for p in model.parameters())
        assert (model.module.array == rank + 1.0).all()


def test_large_gradients_in_memory_that_is_not_torchs_own_are_copied(ranks):
    ranks(2, _array)


LAYOUTS = {
    "transposed": lambda one: one.t(),
    "four dimensions, channels last": lambda one: one.view(256, 4, 32, 32).to(memory_format=torch.channels_last),
}


def _laid_out(rank: int, layout: str) -> None:
    """Element i has the gradient (r + 1) i, whatever the order in memory; rank 1 gets another layout later."""
    _, model = make(lambda: Matrix(LAYOUTS[layout]))
    weight = model.module.weight
    index = torch.arange(float(weight.numel())).view(weight.shape)
    for step in range(3):
        if step == 2 and rank == 1:
            weight.data = weight.detach().contiguous()
        model.zero_grad(set_to_none=True)
        ((weight * index * (rank + 1.0)).sum() + model(rank + 1.0) * 0).backward()
        assert torch.equal(weight.grad, 1.5 * index)
        assert weight.grad.stride() == weight.stride()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_elements_go_by_index_where_nothing_is_copied(ranks, layout):
    ranks(2, _laid_out, layout)


def _travels_in(rank: int) -> None:
    """2^-9 is lost beside 1 in bfloat16, and is not in float32: the mean is rounded once."""
    _, model = make(lambda: Matrix(dtype=torch.bfloat16), reduce_dtype=torch.float32)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        model(1.0 if rank == 0 else 2.0**-7).backward()
        assert model.module.weight.grad.dtype is torch.bfloat16
        assert model.module.weight.grad[0, 0].item() == torch.tensor((1 + 2.0**-7) / 2).bfloat16().item()


def test_a_large_gradient_that_travels_in_another_dtype(ranks):
    ranks(2, _travels_in)


def _fails_after(rank: int) -> None:
    """The large gradient left already when rank 1 fails: what stood there before is back."""
    _, model = make(Matrix)
    model(rank + 1.0).backward()
    for stood in (None, torch.full((SIDE, SIDE), 7.0)):
        model.module.weight.grad = stood
        model.module.fails = rank == 1
        raises_everywhere(model(rank + 1.0).backward, ArithmeticError if rank == 1 else PeerFailedError)
        model.module.fails = False
        assert model.module.weight.grad is stood
        assert stood is None or torch.equal(stood, torch.full((SIDE, SIDE), 7.0))
    model.zero_grad(set_to_none=True)
    model(rank + 1.0).backward()
    assert model.module.weight.grad[0, 0].item() == 1.5


def test_after_an_error_large_gradients_are_what_they_were(ranks):
    ranks(2, _fails_after)


def _graph(rank: int) -> None:
    """``create_graph=True`` leaves gradients with a graph, which must not be written to."""
    _, model = make(Matrix)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of a cycle
            model(rank + 1.0).backward(create_graph=True)
        assert model.module.weight.grad[0, 0].item() == 1.5


def test_gradients_with_a_graph_are_copied(ranks):
    ranks(2, _graph)


# -- lost hooks


def _cast(rank: int, part: str) -> list[float | None]:
    """A cast to and fro gives parameters new nodes, on which there is no hook."""
    _, model = make(lambda: nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1)))
    for step in range(3):
        model.zero_grad(set_to_none=True)
        model(torch.full((1, 2), rank + 1.0)).sum().backward()
        assert model.module[1].bias.grad.item() == 1.0
        assert torch.equal(model.module[0].weight.grad, 1.5 * model.module[1].weight.detach().expand(1, 2)), step
        model.module.get_submodule(part).double()
        model.module.get_submodule(part).float()
    return []


@pytest.mark.parametrize("part", ["", "0", "1"])
def test_a_cast_to_and_fro_between_steps_loses_no_gradient(ranks, part):
    ranks(2, _cast, part)
