"""``mixed_precision`` and exceptions, copies, what outlives a wrapper, and other tools of torch.

The oracle is in ``lowered.py``.
"""

from __future__ import annotations

import copy
import io
import warnings
import weakref
from typing import Any

import pytest
import torch
from lowered import BF16, FLOAT_WIRE, Lowered, assert_in_place, low_grads, low_step_is_right
from models import Scales, inputs, make, raises_everywhere
from steps import grads_of, square_loss
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision

from knownddp import KnownDDP

# -- life cycle


class _Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(3, 3)

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        out = self.rnn(x)[0]
        if fails:
            raise KeyError("on purpose")
        return out


def _raising(rank: int) -> None:
    plain, model = make(_Raises, mixed_precision=FLOAT_WIRE)
    for _ in range(2):
        raises_everywhere(lambda: model(inputs(rank, 2, 2, 3), True), KeyError)
        assert_in_place(model)
        assert model.module.rnn._flat_weights[0] is model.module.rnn.weight_ih_l0
        low_step_is_right(plain, model, rank, lambda m, r: m(inputs(r, 2, 2, 3), False).square().mean())


def test_a_forward_that_raises_leaves_parameters_in_place(ranks):
    ranks(2, _raising)


def _copied(rank: int, by_pickle: bool) -> None:
    plain, model = make(_Raises, mixed_precision=FLOAT_WIRE)

    def loss_of(module: nn.Module, r: int) -> Tensor:
        return module(inputs(r, 4, 2, 3)).square().mean()

    low_step_is_right(plain, model, rank, loss_of)
    if by_pickle:
        stored = io.BytesIO()
        torch.save(model, stored)
        stored.seek(0)
        twin = torch.load(stored, weights_only=False)
    else:
        twin = copy.deepcopy(model)
    assert twin.mixed_precision == FLOAT_WIRE
    for one in (twin, model, copy.deepcopy(twin)):
        low_step_is_right(plain, one, rank, loss_of)
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in one.modules())


@pytest.mark.parametrize("by_pickle", [False, True])
def test_a_copy_keeps_the_precision(ranks, by_pickle):
    ranks(2, _copied, by_pickle)


def _dropped(rank: int) -> None:
    """Without the garbage collector: reference counts alone free the wrapper, its module, and the casts."""
    model = KnownDDP(_Keeps(), mixed_precision=BF16)
    output = model(inputs(rank, 5, 3))
    cast = model.module.cast
    assert cast().dtype == torch.bfloat16
    output.sum().backward()
    assert cast() is None, "the output keeps a cast alive when its backward is over"
    dropped = [weakref.ref(one) for one in (model, model.module, model.module.linear, model._low_precision)]
    del model
    assert [one() for one in dropped] == [None] * 4
    assert output.dtype == torch.bfloat16


class _Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.cast = weakref.ref(self.linear.weight)
        return self.linear(x)


def test_nothing_outlives_its_use(ranks):
    ranks(2, _dropped)


def _returned_cast(rank: int) -> None:
    """Its hooks must not lead back to it, or it would never be freed, whether a backward comes or not."""
    model = KnownDDP(_ReturnsWeight(), mixed_precision=BF16)
    for comes in (False, True):
        output = model(inputs(rank, 5, 3))
        cast = weakref.ref(output[1])
        if comes:
            (output[0].sum() + output[1].sum()).backward()
        del output
        assert cast() is None
        assert_in_place(model)
    assert model.module.linear.weight.grad is not None


class _ReturnsWeight(_Keeps):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.linear.weight


def test_a_module_may_return_its_weight(ranks):
    ranks(2, _returned_cast)


def _hooks_removed(rank: int) -> None:
    """The wrapper goes on to compute in low precision; the module itself and another wrapper are free of it."""
    plain, model = make(mixed_precision=FLOAT_WIRE)
    low_step_is_right(plain, model, rank, square_loss)
    model._remove_autograd_hooks()
    module = model.module
    assert torch.equal(module(inputs(rank, 5, 3)), plain(inputs(rank, 5, 3)))
    again = KnownDDP(module)
    assert torch.equal(again(inputs(rank, 5, 3)), plain(inputs(rank, 5, 3)))
    assert model(inputs(rank, 5, 3)).dtype == torch.bfloat16
    del model
    low_step_is_right(plain, KnownDDP(module, mixed_precision=FLOAT_WIRE), rank, square_loss)


def test_the_module_is_free_when_hooks_are_removed(ranks):
    ranks(2, _hooks_removed)


def _replaced(rank: int) -> None:
    """Parameters that were replaced, frozen or moved after wrapping are cast as they are now."""
    plain, model = make(mixed_precision=FLOAT_WIRE)
    for module in (plain, model.module):
        module.layers[0].weight = nn.Parameter(torch.full((3, 3), 0.5))
        module.layers[1].requires_grad_(False)
        module.layers[2].to(torch.float64)
        module.layers[3].to(torch.bfloat16)
    output = model(inputs(rank, 5, 3))
    assert torch.equal(output, Lowered(plain)(inputs(rank, 5, 3)))
    output.square().mean().backward()
    assert [p.grad is None for p in model.parameters()] == [False, False, True, True, False, False, False, False]
    assert [p.grad.dtype for p in model.module.layers[2].parameters()] == [torch.float64] * 2
    assert model.module.layers[3].weight.grad.dtype == torch.bfloat16


def test_parameters_that_changed_after_wrapping(ranks):
    ranks(2, _replaced)


# -- beside other tools


def _functional(rank: int) -> None:
    """What stands in for a parameter during a call is cast too, and what stood there before comes back."""
    plain, model = make(mixed_precision=BF16)
    stand_in = torch.full((3, 3), 1 + 2**-9, requires_grad=True)
    x = inputs(rank, 5, 3)
    output = torch.func.functional_call(model, {"module.layers.0.weight": stand_in}, x)
    with torch.no_grad():
        plain.layers[0].weight.fill_(1.0)
    assert torch.equal(output, Lowered(plain)(x))
    output.sum().backward()
    assert stand_in.grad.dtype == torch.float32 and model.module.layers[0].weight.grad is None
    assert_in_place(model)


def test_functional_call(ranks):
    ranks(1, _functional)


def _without_gradients(rank: int) -> None:
    plain, model = make(mixed_precision=FLOAT_WIRE)
    wanted = Lowered(plain)(inputs(rank, 5, 3))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(model(inputs(rank, 5, 3)), wanted)
        low_step_is_right(plain, model, rank, square_loss)


def test_evaluation(ranks):
    ranks(2, _without_gradients)


def _gradients_switched_on(rank: int) -> Tensor:
    """A module that switches gradients on itself has them, as it would without a wrapper."""
    model = KnownDDP(_SwitchesOn(), mixed_precision=BF16)
    with torch.no_grad():
        return model(torch.ones(1, 3))


class _SwitchesOn(_Keeps):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return torch.autograd.grad(self.linear(x).sum(), self.linear.weight)[0]


def test_gradients_switched_on_inside(ranks):
    assert all(torch.equal(grad, torch.ones(3, 3, dtype=torch.bfloat16)) for grad in ranks(1, _gradients_switched_on))


def _scaled(rank: int) -> list[float | None]:
    """float16 holds 2**-20 as a subnormal number, its square not at all; a scale of 2**16 carries it over."""
    model = KnownDDP(Scales("a"), mixed_precision=_MixedPrecision(torch.float16, torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    output = model(torch.tensor(2.0**-20), "a")
    scaler.scale(output.float() * 2.0**-20).backward()
    scaler.unscale_(optimizer)
    found = grads_of(model)
    scaler.step(optimizer)
    scaler.update()
    assert model.module.a.item() == 1.0 and scaler.get_scale() == 2.0**16
    model.zero_grad()
    scaler.scale(model(torch.tensor(2.0), "a").float()).backward()  # 2**17 is infinite in float16
    scaler.step(optimizer)
    scaler.update()
    assert model.module.a.item() == 1.0 and scaler.get_scale() == 2.0**15
    return found


def test_a_gradient_scaler(ranks):
    assert ranks(2, _scaled) == [[2.0**-40]] * 2


def _clipped(rank: int) -> list[float | None]:
    """Gradients 3 and 4 on each rank: norm 5."""
    model = KnownDDP(Scales("a", "b"), mixed_precision=BF16)
    (model(torch.tensor(3.0), "a") + model(torch.tensor(4.0), "b")).backward()
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 2.5).item() == 5
    return [round(grad, 4) for grad in grads_of(model)]


def test_gradient_clipping(ranks):
    assert ranks(2, _clipped) == [[1.5, 2.0]] * 2


def _autocast(rank: int) -> None:
    """Nothing is left for it to cast: the same numbers."""
    plain, model = make(mixed_precision=FLOAT_WIRE)

    def loss_of(module: nn.Module, r: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=isinstance(module, KnownDDP)):
            out = module(inputs(r, 5, 3))
        assert out.dtype == torch.bfloat16
        return out.square().mean()

    for _ in range(2):
        low_step_is_right(plain, model, rank, loss_of)


def test_inside_autocast(ranks):
    ranks(2, _autocast)


def _compiled(rank: int, whole: bool, backend: str) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    plain = _mlp()
    inner = copy.deepcopy(plain)
    options: dict[str, Any] = {"mixed_precision": FLOAT_WIRE}
    model = KnownDDP(inner if whole else torch.compile(inner, backend=backend), **options)
    call = torch.compile(model, backend=backend) if whole else model
    # Dynamo looks at ``.grad`` of what a module holds, also where ``functional_call`` has put a tensor with a history.
    warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf", UserWarning)
    for step in range(3):
        model.zero_grad()
        call(inputs(rank, 5, 3, seed=step)).square().mean().backward()
        wanted = low_grads(plain, lambda m, r, s=step: square_loss(m, r, s))
        for (name, want), param in zip(wanted.items(), model.parameters(), strict=True):
            torch.testing.assert_close(param.grad, want, msg=lambda text, n=name: f"{n}: {text}")
        assert_in_place(model)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("whole", [False, True])
def test_compiled(ranks, whole, backend):
    ranks(2, _compiled, whole, backend)
