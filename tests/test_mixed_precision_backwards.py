"""``mixed_precision`` where a backward runs parts of the module again, fails, or comes several times.

The oracle is in ``lowered.py``. A layer that ran again with a float32 weight would raise, its input being bfloat16.
"""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from lowered import BF16, FLOAT_WIRE, Lowered, assert_in_place, low_grads, low_step_is_right
from models import Fails, Scales, assert_grads, inputs, make, raises_everywhere
from steps import declares
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from knownddp import KnownDDP
from knownddp.precision import Casts

both_kinds = pytest.mark.parametrize("reentrant", [False, True])
every_world_size = pytest.mark.parametrize("world_size", [1, 2, 3])


class _Recomputed(nn.Module):
    """Checkpoints over a module, a function that reads a parameter before it calls a module, a recurrent module, and
    a layer that also runs outside of one. ``seen``: the dtypes of parameters, in the order of their use."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.scale = nn.Parameter(torch.full((3,), 1.5))
        self.rnn = nn.LSTM(3, 3)
        self.reentrant = reentrant
        self.seen: list[torch.dtype] = []

    def _again(self, run: Any, x: Tensor) -> Tensor:
        return checkpoint(run, x, use_reentrant=self.reentrant)

    def _scaled(self, x: Tensor) -> Tensor:
        self.seen.append(self.scale.dtype)
        return torch.tanh(self.layers[2](x * self.scale))

    def _recurrent(self, x: Tensor) -> Tensor:
        return self.rnn(x.unsqueeze(1))[0].squeeze(1)

    def forward(self, x: Tensor, skip: int | None = None) -> Tensor:
        self.seen.clear()
        for i in (0, 1):
            if i != skip:
                x = x + torch.tanh(self._again(self.layers[i], x))
        x = x + self._again(self._scaled, x)
        x = x + self.layers[2](x)
        return x + self._again(self._recurrent, x) + self.rnn(x.unsqueeze(1))[0].squeeze(1)


def _loss(module: nn.Module, rank: int, step: int = 0, **kwargs: Any) -> Tensor:
    return module(inputs(rank, 5, 3, seed=step).requires_grad_(), **kwargs).square().mean()


def _checkpointing(rank: int, reentrant: bool, way: str) -> None:
    plain, model = make(
        lambda: _Recomputed(reentrant), mixed_precision=FLOAT_WIRE, find_unused_parameters=way == "find"
    )
    for step in range(4):
        skip = step % 2 if way else None

        def loss_of(module: nn.Module, r: int, step: int = step, skip: int | None = skip) -> Tensor:
            declared = declares(module, [f"layers.{skip}"]) if way == "declared" else {}
            return _loss(module, r, step, skip=skip, **declared)

        low_step_is_right(plain, model, rank, loss_of)
        assert model.module.seen == [torch.bfloat16] * 2
        rnn = model.module.rnn
        assert all(w is p for w, p in zip(rnn._flat_weights, rnn.parameters(), strict=True))


@pytest.mark.parametrize("way", ["", "declared", "find"])
@both_kinds
@every_world_size
def test_checkpoints_are_recomputed_in_low_precision(ranks, world_size, reentrant, way):
    ranks(world_size, _checkpointing, reentrant, way)


def _accumulating(rank: int, reentrant: bool) -> None:
    plain, model = make(lambda: _Recomputed(reentrant), mixed_precision=FLOAT_WIRE)
    for step in range(2):
        model.zero_grad()
        with model.no_sync():
            _loss(model, rank, step).backward()
        assert_in_place(model)
        _loss(model, rank, step + 50).backward()
        assert_grads(model, low_grads(plain, lambda m, r, s=step: [_loss(m, r, s), _loss(m, r, s + 50)]))


@both_kinds
def test_checkpoints_under_no_sync(ranks, reentrant):
    ranks(2, _accumulating, reentrant)


def _several_backwards(rank: int) -> None:
    """Of one retained graph, and of two forwards in one backward."""
    plain, model = make(lambda: _Recomputed(False), mixed_precision=FLOAT_WIRE)
    loss = _loss(model, rank)
    loss.backward(retain_graph=True)
    assert_in_place(model)
    loss.backward()
    assert_grads(model, low_grads(plain, lambda m, r: [_loss(m, r), _loss(m, r)]))
    assert_in_place(model)
    model.zero_grad()
    (_loss(model, rank, 1) + _loss(model, rank, 2)).backward()
    assert_in_place(model)
    assert_grads(model, low_grads(plain, lambda m, r: [_loss(m, r, 1), _loss(m, r, 2)]))


def test_several_backwards_and_several_forwards(ranks):
    ranks(2, _several_backwards)


def _local_grad(rank: int) -> None:
    """``torch.autograd.grad`` stays on the rank; gradients come in the dtype of what they are of."""
    plain, model = make(lambda: _Recomputed(False), mixed_precision=FLOAT_WIRE)
    found = torch.autograd.grad(_loss(model, rank), list(model.parameters()))
    assert_in_place(model)
    low = Lowered(plain)
    for grad, want in zip(found, torch.autograd.grad(_loss(low, rank), list(low.parameters())), strict=True):
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad, want.float())


def test_autograd_grad(ranks):
    ranks(2, _local_grad)


def _penalty(rank: int) -> list[float]:
    """Output a**2 * x, of a = 1: its gradient by x is a**2, and that of the gradient's square 4 * a**3."""
    model = KnownDDP(_Square(), mixed_precision=BF16)
    x = torch.tensor(rank + 1.0, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x), x, create_graph=True)
    slope.square().backward()
    return [model.module.a.grad.item()]


class _Square(Scales):
    def __init__(self) -> None:
        super().__init__("a")

    def forward(self, x: Tensor) -> Tensor:
        return self.a.square() * x


def test_a_gradient_of_a_gradient(ranks):
    assert ranks(2, _penalty) == [[4.0]] * 2


class _FailsOnce(_Recomputed):
    def forward(self, x: Tensor, fails: bool) -> Tensor:
        x = Fails.apply(self.layers[0](x)) if fails else x
        return super().forward(x)


def _raising(rank: int, reentrant: bool) -> None:
    """On all ranks. Parameters are in place when the exception arrives."""
    plain, model = make(lambda: _FailsOnce(reentrant), mixed_precision=FLOAT_WIRE)
    for step in range(2):
        loss = _loss(model, rank, step, fails=True)
        raises_everywhere(loss.backward, ArithmeticError)
        assert_in_place(model)
        del loss
        low_step_is_right(plain, model, rank, lambda m, r, s=step: _loss(m, r, s, fails=False))


@both_kinds
def test_a_backward_that_raises_leaves_parameters_in_place(ranks, reentrant):
    ranks(2, _raising, reentrant)


class _RunsAgain(torch.autograd.Function):
    """Calls the whole wrapper in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: Any) -> Tensor:
        ctx.model = model
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with torch.no_grad():
            ctx.model.seen = ctx.model(torch.ones(1, 3))
        return grad, None


def _nested(rank: int) -> None:
    """A call of the wrapper in its own backward, where casts stand already, declares and reads its parameters."""
    plain, model = make(lambda: _Recomputed(False), mixed_precision=FLOAT_WIRE)
    model.seen = None
    for step in range(2):
        model.zero_grad()
        output = model(inputs(rank, 5, 3, seed=step).requires_grad_())
        _RunsAgain.apply(output, model).square().mean().backward()
        torch.testing.assert_close(model.seen, Lowered(plain)(torch.ones(1, 3)))
        assert_in_place(model)
        assert_grads(model, low_grads(plain, lambda m, r, s=step: _loss(m, r, s)))


def test_a_forward_in_the_own_backward(ranks):
    ranks(2, _nested)


class _CallsItself(nn.Module):
    wrapper: weakref.ref[KnownDDP] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, times: int) -> Tensor:
        assert self.linear.weight.dtype == torch.bfloat16
        x = torch.tanh(self.linear(x))
        if times == 0:
            return x
        inner = self.wrapper() if self.wrapper is not None else self
        return x + inner(x, times - 1) + self.linear(x)


def _recursive(rank: int) -> None:
    """A wrapper that its module calls again."""
    plain, model = make(_CallsItself, mixed_precision=FLOAT_WIRE)
    model.module.wrapper = weakref.ref(model)
    for step in range(2):
        model.zero_grad()
        model(inputs(rank, 5, 3, seed=step), 2).square().mean().backward()
        assert_in_place(model)
        low = low_grads(plain, lambda m, r, s=step: m(inputs(r, 5, 3, seed=s), 2).square().mean())
        for name, param in model.module.named_parameters():
            # Each call has a cast of its own, so the sum over calls is rounded less than the oracle's.
            torch.testing.assert_close(param.grad, low[name], rtol=0.02, atol=0.01)


def test_a_forward_in_the_own_forward(ranks):
    ranks(2, _recursive)


def _whole_wrapper_recomputed(rank: int) -> None:
    """A checkpoint around the wrapper: its forward runs in the backward, with checkpoints of its own inside."""
    plain, model = make(lambda: _Recomputed(False), mixed_precision=FLOAT_WIRE)

    def loss_of(module: nn.Module, r: int) -> Tensor:
        return checkpoint(module, inputs(r, 5, 3).requires_grad_(), use_reentrant=False).square().mean()

    for _ in range(2):
        low_step_is_right(plain, model, rank, loss_of)


def test_a_checkpoint_around_the_wrapper(ranks):
    ranks(2, _whole_wrapper_recomputed)


def _with_a_step_between(rank: int) -> None:
    """Parameters change between forward and backward: what is recomputed is what the forward computed."""
    model = KnownDDP(_CheckpointedScale(), mixed_precision=BF16)
    x = torch.ones((), requires_grad=True)
    output = model(x)
    with torch.no_grad():
        model.module.a.fill_(5.0)
    output.backward()
    assert x.grad.item() == 3.0 and model.module.a.grad.item() == 1.0
    x, y = (torch.ones((), requires_grad=True) for _ in range(2))
    first = model(x)
    with torch.no_grad():
        model.module.a.fill_(7.0)
    second = model(y)
    (first + second).backward()
    assert (x.grad.item(), y.grad.item()) == (5.0, 7.0)
    assert model.module.a.item() == 7.0
    assert all(cast() is None for cast in model.module.casts), "an output keeps a cast alive when its backward is over"


class _CheckpointedScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(3.0))
        self.casts: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.casts.append(weakref.ref(self.a))
        return checkpoint(lambda t: t * self.a, x, use_reentrant=True)


def test_recomputation_uses_what_the_forward_used(ranks):
    ranks(1, _with_a_step_between)


def _in_threads(rank: int) -> None:
    """Evaluation in other threads, while this one trains. It holds the parameters, since the module has them by turns
    only. The wrapper itself is for one thread at a time; what puts casts up and takes them down is not."""
    plain, model = make(lambda: _Recomputed(False), mixed_precision=FLOAT_WIRE)
    parameters, wanted = dict(model.module.named_parameters()), Lowered(plain)(inputs(rank, 5, 3))
    stop, wrong = threading.Event(), []

    def evaluate() -> None:
        try:
            while not stop.is_set():
                with torch.inference_mode():
                    if not torch.equal(model._low_precision.run(model.module, (inputs(rank, 5, 3),), {}), wanted):
                        wrong.append("another output")
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=evaluate) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for step in range(20):
            for param in parameters.values():
                param.grad = None
            _loss(model, rank, step).backward()
            low = low_grads(plain, lambda m, r, s=step: _loss(m, r, s))
            # A layer that is used twice may have had casts of two forwards, whose gradients are summed as float32.
            torch.testing.assert_close({name: p.grad for name, p in parameters.items()}, low, rtol=0.02, atol=0.01)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert_in_place(model)


def test_threads_that_run_the_module_at_the_same_time(ranks):
    ranks(1, _in_threads)


def _freed(rank: int, reentrant: bool) -> None:
    """Reference counts alone free everything, also with outputs whose backward never came."""
    gc.disable()
    try:
        model = KnownDDP(_Recomputed(reentrant), mixed_precision=BF16)
        _loss(model, rank).backward()
        model(inputs(rank, 5, 3).requires_grad_())
        output = model(inputs(rank, 5, 3).requires_grad_())
        wrapper, low, module = map(weakref.ref, (model, model._low_precision, model.module))
        del model
        assert wrapper() is None and low() is None
        del output  # its graph leads to checkpoints, which hold what they run
        assert module() is None
    finally:
        gc.enable()


@both_kinds
def test_nothing_is_left_behind(ranks, reentrant):
    ranks(2, _freed, reentrant)


class _Aside(nn.Module):
    """Leaves a result that it does not return."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.aside = checkpoint(self.inner, x, use_reentrant=False)
        return x


def _out_of_sight(rank: int) -> None:
    """No hook tells of such a backward before it runs modules again, with parameters as they are."""
    model = KnownDDP(_Aside(), mixed_precision=BF16)
    for _ in range(2):
        model(inputs(rank, 5, 3))
        message = raises_everywhere(model.module.aside.float().sum().backward, RuntimeError)
        assert "dtype" in message
        assert_in_place(model)
        model.module.aside = None


def test_a_checkpoint_whose_result_is_not_returned_raises(ranks):
    ranks(2, _out_of_sight)


def _stale_lists(rank: int) -> None:
    """Two sets of casts are up, of which the first was never run: what an RNN keeps then is not of the parameters."""
    _, model = make(lambda: nn.LSTM(3, 2), mixed_precision=FLOAT_WIRE)
    lstm, low = model.module, model._low_precision
    first, second = Casts(), Casts()
    low.put_up(first)
    low.put_up(second)
    output, _ = lstm(torch.ones(1, 3, dtype=torch.bfloat16))
    assert output.dtype is torch.bfloat16
    low.take_down(second, is_last_use=False)
    assert {weight.dtype for weight in lstm._flat_weights} == {torch.bfloat16}
    low.take_down(first, is_last_use=False)
    assert all(a is b for a, b in zip(lstm._flat_weights, lstm.parameters(), strict=True))


def test_an_rnn_keeps_no_weights_of_what_stood_there_before(ranks):
    ranks(1, _stale_lists)
