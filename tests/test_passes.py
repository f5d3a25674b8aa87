"""Backwards that are not one per forward: several passes, graphs that are kept or differentiated.

Expected gradients come from plain autograd on one process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from models import assert_grads, inputs, make, mean_grads
from steps import TINY_CAP_MB, declares, setups, square_loss, step_is_right, steps_are_right, world_sizes
from torch import Tensor, nn
from torch.func import functional_call


def _trains(
    rank: int, loss_of: Callable[..., Tensor], build: Callable[[], nn.Module], options: dict[str, object]
) -> None:
    plain, model = make(build, **options)
    steps_are_right(plain, model, rank, loss_of)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


# -- several forwards, several backwards


def _two_views(module: nn.Module, rank: int, step: int) -> Tensor:
    """One loss of two calls, as in contrastive learning."""
    return (module(inputs(rank, 5, 3, seed=step)) * module(inputs(rank, 5, 3, seed=step + 50))).sum()


def _chained(module: nn.Module, rank: int, step: int) -> Tensor:
    """The second call's input is the first one's output."""
    once = module(inputs(rank, 5, 3, seed=step))
    return module(nn.functional.pad(once, (0, 3 - once.size(1)))).square().mean()


def _five_calls(module: nn.Module, rank: int, step: int) -> Tensor:
    return sum((square_loss(module, rank, 10 * step + k) for k in range(5)), torch.zeros(()))


@pytest.mark.parametrize("loss_of", [_two_views, _chained, _five_calls])
@pytest.mark.parametrize("find", [False, True])
@setups
def test_several_forwards_and_one_backward(ranks, world_size, cap, find, loss_of):
    ranks(world_size, _trains, loss_of, _mlp, {"bucket_cap_mb": cap, "find_unused_parameters": find})


def _in_turn(module: nn.Module, rank: int, step: int) -> Iterator[Tensor]:
    """Forward, backward, forward, backward, without zeroing."""
    yield square_loss(module, rank, step)
    yield square_loss(module, rank, step + 50)


def _first_called_last(module: nn.Module, rank: int, step: int) -> list[Tensor]:
    """Two forwards, then the backward of the second and that of the first."""
    first, second = square_loss(module, rank, step), square_loss(module, rank, step + 50)
    return [second, first]


def _kept(module: nn.Module, rank: int, step: int) -> Iterator[Tensor]:
    """Two losses of one output, each with a backward of its own."""
    y = module(inputs(rank, 5, 3, seed=step))
    first = y.square().mean()
    first.register_hook(lambda grad: grad)
    torch.autograd.backward(first, retain_graph=True)
    yield y.exp().mean()


def _same_again(module: nn.Module, rank: int, step: int) -> Iterator[Tensor]:
    """The same backward three times."""
    loss = square_loss(module, rank, step)
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    yield loss


@pytest.mark.parametrize("loss_of", [_in_turn, _first_called_last, _kept, _same_again])
@pytest.mark.parametrize("find", [False, True])
@setups
def test_several_backwards_add_up_their_means(ranks, world_size, cap, find, loss_of):
    ranks(world_size, _trains, loss_of, _mlp, {"bucket_cap_mb": cap, "find_unused_parameters": find})


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2)
        self.second = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


def _two_outputs(module: nn.Module, rank: int, step: int) -> list[Tensor]:
    """Two losses of disjoint parameters; together their backwards touch all."""
    first, second = module(inputs(rank, 5, 3, seed=step))
    losses = [first.square().mean(), second.square().mean()]
    return losses if step % 2 else losses[::-1]


@pytest.mark.parametrize("find", [False, True])
@setups
def test_each_of_two_outputs_has_a_backward_of_its_own(ranks, world_size, cap, find):
    """Between the two no parameter is missing: a forward is due only afterwards."""
    ranks(world_size, _trains, _two_outputs, _TwoHeads, {"bucket_cap_mb": cap, "find_unused_parameters": find})


def _roots_at_once(rank: int) -> None:
    """``torch.autograd.backward`` of several outputs of several calls, with given gradients."""
    plain, model = make(_mlp)
    world = dist.get_world_size()
    for step in range(3):

        def outputs(module: nn.Module, r: int, step: int = step) -> list[Tensor]:
            return [module(inputs(r, 5, 3, seed=step + k)) for k in (0, 20, 40)]

        weights = [inputs(k, 5, 2, seed=77) for k in range(3)]

        def loss_of(module: nn.Module, r: int, weights: list[Tensor] = weights) -> Tensor:
            return sum(((y * w).sum() for y, w in zip(outputs(module, r), weights, strict=True)), torch.zeros(()))

        model.zero_grad(set_to_none=True)
        torch.autograd.backward(outputs(model, rank), weights)
        assert_grads(model, mean_grads(plain, world, loss_of))


@world_sizes
def test_one_backward_from_several_outputs_with_given_gradients(ranks, world_size):
    ranks(world_size, _roots_at_once)


# -- graphs of gradients


def _create_graph(rank: int, cap: float | None) -> None:
    """The gradient of a backward that keeps its graph has the mean's value; the plain step after it is right."""
    plain, model = make(_mlp, bucket_cap_mb=cap)
    for step in range(4):
        model.zero_grad(set_to_none=True)
        loss = square_loss(model, rank, step)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True", UserWarning)
            loss.backward(create_graph=step < 2)
        del loss
        wanted = mean_grads(plain, dist.get_world_size(), lambda m, r, s=step: square_loss(m, r, s))
        for param in model.parameters():
            param.grad = param.grad.detach()
        assert_grads(model, wanted)


@setups
def test_backward_with_create_graph_leaves_the_mean(ranks, world_size, cap):
    ranks(world_size, _create_graph, cap)


def _own_gradients(rank: int, alone: bool) -> None:
    """``torch.autograd.grad`` gives this rank's own gradients, on all ranks or on rank 0 alone."""
    plain, model = make(_mlp)
    for step in range(3):
        model.zero_grad(set_to_none=True)
        loss = square_loss(model, rank, step)
        if rank == 0 or not alone:
            own = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            wanted = torch.autograd.grad(square_loss(plain, rank, step), list(plain.parameters()))
            torch.testing.assert_close(own, wanted)
            assert all(p.grad is None for p in model.parameters())
        loss.backward()
        assert_grads(model, mean_grads(plain, dist.get_world_size(), lambda m, r, s=step: square_loss(m, r, s)))


@pytest.mark.parametrize("alone", [False, True])
@world_sizes
def test_autograd_grad_is_local_and_leaves_the_backward_after_it_undisturbed(ranks, world_size, alone):
    ranks(world_size, _own_gradients, alone)


def _penalised(module: nn.Module, rank: int, step: int) -> Tensor:
    """A penalty alone, on the norm of the input's gradient: it does not reach the last bias, which is declared."""
    x = inputs(rank, 4, 3, seed=step).requires_grad_()
    y = module(x, **declares(module, ["2.bias"]))
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


@setups
def test_a_gradient_penalty_with_the_bias_it_does_not_reach_declared(ranks, world_size, cap):
    ranks(world_size, _trains, _penalised, _mlp, {"bucket_cap_mb": cap})


@setups
def test_a_gradient_penalty_with_detection(ranks, world_size, cap):
    ranks(world_size, _trains, _undeclared_penalty, _mlp, {"bucket_cap_mb": cap, "find_unused_parameters": True})


def _undeclared_penalty(module: nn.Module, rank: int, step: int) -> Tensor:
    x = inputs(rank, 4, 3, seed=step).requires_grad_()
    (slope,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


# -- stand-ins for parameters


def _functional(rank: int) -> None:
    """What stands in for a parameter gets this rank's own gradient, the parameter none, and nobody waits."""
    plain, model = make(_mlp, bucket_cap_mb=TINY_CAP_MB)
    for step in range(2):
        model.zero_grad(set_to_none=True)
        stand_in = torch.full((5, 3), 0.5, requires_grad=True)
        output = functional_call(model, {"module.0.weight": stand_in}, (inputs(rank, 5, 3, seed=step),))
        output.square().mean().backward()

        def with_stand_in(module: nn.Module, r: int, step: int = step) -> Tensor:
            weights = {"0.weight": torch.full((5, 3), 0.5)}
            return functional_call(module, weights, (inputs(r, 5, 3, seed=step),)).square().mean()

        assert_grads(model, mean_grads(plain, dist.get_world_size(), with_stand_in))
        own = torch.full((5, 3), 0.5, requires_grad=True)
        functional_call(plain, {"0.weight": own}, (inputs(rank, 5, 3, seed=step),)).square().mean().backward()
        torch.testing.assert_close(stand_in.grad, own.grad)
        step_is_right(plain, model, rank, step)


@world_sizes
def test_functional_call_with_a_tensor_in_place_of_one_parameter(ranks, world_size):
    ranks(world_size, _functional)


def _all_stand_ins(rank: int) -> None:
    """With stand-ins for all parameters the backward is nobody else's business: rank 0 runs it alone."""
    plain, model = make(_mlp)
    for step in range(2):
        if rank == 0:
            stand_ins = {f"module.{n}": p.detach().clone().requires_grad_() for n, p in plain.named_parameters()}
            functional_call(model, stand_ins, (inputs(0, 5, 3),)).square().mean().backward()
            assert all(tensor.grad is not None for tensor in stand_ins.values())
            assert all(p.grad is None for p in model.parameters())
        step_is_right(plain, model, rank, step)
        model.zero_grad(set_to_none=True)


def test_functional_call_with_tensors_in_place_of_all_parameters_on_one_rank(ranks):
    ranks(2, _all_stand_ins)
