"""``mixed_precision``: the module computes in bfloat16 while parameters, gradients and ``state_dict`` stay in float32.

The oracle is a copy of the module whose parameters *are* bfloat16, run on one process: its gradients as float32,
averaged. ``FLOAT_WIRE`` lets gradients travel in float32, so that nothing but that copy's arithmetic rounds.

Kinds of modules are in ``test_mixed_precision_modules.py``, recomputation in ``test_mixed_precision_backwards.py``,
copies, compilation and other tools in ``test_mixed_precision_tools.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lowered import BF16, FLOAT_WIRE, assert_in_place, low_grads, low_step_is_right
from models import Scales, assert_grads, inputs, make, raises_everywhere
from steps import grads_of, square_loss
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision

from knownddp import ArgumentError, KnownDDP, RanksDifferError
from knownddp.precision import Precision, choose_precision

every_world_size = pytest.mark.parametrize("world_size", [1, 2, 3])


# -- what is asked for


def test_gradients_travel_in_the_dtype_of_parameters_unless_told_otherwise():
    half, bf16, single = torch.float16, torch.bfloat16, torch.float32
    assert choose_precision(_MixedPrecision(param_dtype=half)) == Precision(half, half, None)
    assert choose_precision(_MixedPrecision(half, single, bf16)) == Precision(half, single, bf16)
    assert choose_precision(_MixedPrecision(reduce_dtype=half)) == Precision(None, half, None)
    assert choose_precision(_MixedPrecision(buffer_dtype=half)) == Precision(None, None, half)


def test_nothing_asked_for_is_nothing():
    assert choose_precision(None) is None
    assert choose_precision(_MixedPrecision()) is None


def test_any_object_with_the_attributes_will_do():
    config = SimpleNamespace(param_dtype=torch.float16, reduce_dtype=None, buffer_dtype=None)
    assert choose_precision(config) == Precision(torch.float16, torch.float16, None)


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype", "buffer_dtype"])
@pytest.mark.parametrize("value", [torch.int8, torch.complex64, "bfloat16", 16])
def test_only_floating_point_dtypes_are_taken(name, value):
    with pytest.raises(ArgumentError, match=rf"mixed_precision\.{name} must be a floating-point dtype or None, got"):
        choose_precision(_MixedPrecision(**{name: value}))


def test_an_object_without_the_attributes_is_refused():
    with pytest.raises(ArgumentError, match="dtype has no param_dtype"):
        choose_precision(torch.bfloat16)


def _refused(rank: int) -> None:
    """On one rank alone: the others learn of it, and the process group stays in step."""
    config = _MixedPrecision(torch.int8) if rank == 0 else BF16
    kind = ArgumentError if rank == 0 else Exception
    assert "param_dtype" in raises_everywhere(lambda: KnownDDP(nn.Linear(1, 1), mixed_precision=config), kind)
    config = _MixedPrecision(torch.float16) if rank == 0 else BF16
    module = nn.BatchNorm1d(2)
    raises_everywhere(lambda: KnownDDP(module, mixed_precision=config), RanksDifferError)
    assert module.running_mean.dtype == torch.float32


def test_a_wrong_or_different_argument_raises_on_every_rank(ranks):
    ranks(2, _refused)


# -- what the module sees


class _Looks(nn.Module):
    """Notes the dtypes it sees. Not every parameter is used; one is frozen, one is complex."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 3)
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.register_buffer("shift", torch.ones(3))
        self.register_buffer("count", torch.tensor([257]))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor, *, picked: Tensor, extra: dict[str, Sequence[Tensor]]) -> Tensor:
        self.seen = {name: p.dtype for name, p in self.named_parameters()}
        self.seen |= {name: b.dtype for name, b in self.named_buffers()}
        self.seen |= {"x": x.dtype, "picked": picked.dtype, "extra": extra["more"][0].dtype}
        return (self.used(x) * self.frozen + self.shift + extra["more"][0])[picked]


def _looking_loss(module: nn.Module, rank: int, step: int) -> Tensor:
    extra = {"more": (inputs(rank, 3, seed=step + 50),)}
    return module(inputs(rank, 5, 3, seed=step), picked=torch.tensor([0, 2]), extra=extra).square().mean()


def _looking(rank: int, set_to_none: bool) -> None:
    config = _MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
    plain, model = make(_Looks, mixed_precision=config, find_unused_parameters=True)
    parameters, state = list(model.parameters()), {n: t.dtype for n, t in model.module.state_dict().items()}
    assert model.module.shift.dtype == torch.bfloat16 and model.module.count.item() == 257
    plain.shift = plain.shift.bfloat16()
    for step in range(3):
        _looking_loss(model, rank, step).backward()
        seen = model.module.seen
        assert {n for n, dtype in seen.items() if dtype != torch.bfloat16} == {"phase", "count", "picked"}
        assert all(ours is before for ours, before in zip(model.parameters(), parameters, strict=True))
        assert {n: t.dtype for n, t in model.module.state_dict().items()} == state
        assert_in_place(model)
        wanted = low_grads(plain, lambda m, r, s=step: _looking_loss(m, r, s))
        assert wanted["used.weight"] is not None and wanted["unused.weight"] is None
        assert_grads(model, wanted)
        assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())
        model.zero_grad(set_to_none=set_to_none)


@pytest.mark.parametrize("set_to_none", [False, True])
@every_world_size
def test_the_module_sees_low_precision_and_nobody_else_does(ranks, world_size, set_to_none):
    ranks(world_size, _looking, set_to_none)


def _keeping_small_steps(rank: int) -> list[float]:
    """A step of 2**-9 is lost in bfloat16 beside 1, which the module computes with, but two make a difference."""
    model = KnownDDP(Scales("a"), mixed_precision=BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-9)
    outputs = []
    for _ in range(5):
        optimizer.zero_grad()
        output = model(torch.ones(()), "a")
        (-output).backward()
        optimizer.step()
        outputs.append(output.item())
    return [*outputs, model.module.a.item()]


def test_steps_too_small_for_the_low_precision_add_up(ranks):
    """1 + n * 2**-9 in bfloat16, whose next number after 1 is 1 + 2**-7: 0 and 1 round to 1, 3 and 4 to the next.
    n = 2 lies in the middle and goes to the even one, which is 1."""
    wanted = [1.0, 1.0, 1.0, 1 + 2**-7, 1 + 2**-7, 1 + 5 * 2**-9]
    assert ranks(2, _keeping_small_steps) == [wanted] * 2


def _accumulating(rank: int) -> list[float | None]:
    model = KnownDDP(Scales("a"), mixed_precision=FLOAT_WIRE)
    with model.no_sync():
        model(torch.tensor(256.0), "a").backward()
    assert model.module.a.grad.item() == 256
    model(torch.tensor(rank + 1.0), "a").backward()
    return grads_of(model)


@pytest.mark.parametrize(("world_size", "mean"), [(1, 257.0), (2, 257.5), (3, 258.0)])
def test_accumulated_gradients_are_summed_in_full_precision(ranks, world_size, mean):
    """256 stays on the rank, r + 1 follows. bfloat16 would have 256 + 1 = 256."""
    assert ranks(world_size, _accumulating) == [[mean]] * world_size


def _training(rank: int) -> None:
    plain, model = make(mixed_precision=FLOAT_WIRE)
    theirs, ours = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, model))
    for step in range(4):
        wanted = low_step_is_right(plain, model, rank, lambda m, r, s=step: square_loss(m, r, s))
        for (name, param), parameter in zip(plain.named_parameters(), model.parameters(), strict=True):
            param.grad = wanted[name]
            parameter.grad.copy_(wanted[name])  # equal but for the order of the sum
        for optimizer in (theirs, ours):
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


@every_world_size
def test_optimizers_step_in_full_precision(ranks, world_size):
    ranks(world_size, _training)


def _without_casts(rank: int, config: _MixedPrecision) -> None:
    """Neither parameters nor inputs are touched, and gradients are those of the module as it is."""
    plain, model = make(_Looks, mixed_precision=config)
    loss = _looking_loss(model, rank, 0)
    assert model.module.seen["used.weight"] == model.module.seen["x"] == torch.float32
    loss.backward()
    wanted = torch.autograd.grad(_looking_loss(plain, rank, 0), plain.used.weight)[0]
    dist.all_reduce(wanted)
    torch.testing.assert_close(model.module.used.weight.grad, wanted / dist.get_world_size())


@pytest.mark.parametrize("config", [_MixedPrecision(), _MixedPrecision(reduce_dtype=torch.float32)])
def test_without_a_param_dtype_the_module_runs_as_it_is(ranks, config):
    ranks(2, _without_casts, config)
