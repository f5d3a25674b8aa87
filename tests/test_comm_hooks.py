"""Communication hooks: torch's own, and what a hook may do and see.

Expected gradients come from plain autograd on one process or are worked out in the docstring.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Scales, Skippable, assert_grads, inputs, make, mean_grads
from steps import TINY_CAP_MB, declares, grads_of, square_loss, step_is_right
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    register_ddp_comm_hook,
)
from torch.futures import Future

from knownddp import KnownDDP

Register = Callable[[KnownDDP], None]


def done(value: Any) -> Future:
    """A future that holds ``value``."""
    future: Future = Future()
    future.set_result(value)
    return future


def summed(bucket: dist.GradBucket, times: float = 1.0) -> Future[Tensor]:
    """The sum over ranks, multiplied."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0] * times)  # type: ignore[no-any-return, union-attr]


def averaged(_: object, bucket: dist.GradBucket) -> Future[Tensor]:
    """What happens without a hook."""
    return summed(bucket, 1 / dist.get_world_size())


# -- torch's hooks


def _of_type(kind: DDPCommHookType) -> Register:
    return lambda model: register_ddp_comm_hook(kind, model, state=None)


def _power_state() -> powerSGD_hook.PowerSGDState:
    """With a rank that is no compression worth doing: everything is averaged exactly."""
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=8, start_powerSGD_iter=2)


def _local_state() -> post_localSGD_hook.PostLocalSGDState:
    """Averages over all ranks for longer than the test lasts."""
    return post_localSGD_hook.PostLocalSGDState(None, dist.group.WORLD, start_localSGD_iter=1000)


HOOKS: dict[str, tuple[Register, float]] = {  # with the relative error of the wire's dtype
    "all-reduce": (_of_type(DDPCommHookType.ALLREDUCE), 1e-5),
    "float16": (_of_type(DDPCommHookType.FP16_COMPRESS), 1e-2),
    "bfloat16": (_of_type(DDPCommHookType.BF16_COMPRESS), 3e-2),
    "PowerSGD by name": (_of_type(DDPCommHookType.POWER_SGD), 1e-5),
    "PowerSGD": (
        lambda model: model.register_comm_hook(_power_state(), powerSGD_hook.powerSGD_hook),
        1e-5,
    ),
    "post-localSGD": (
        lambda model: model.register_comm_hook(_local_state(), post_localSGD_hook.post_localSGD_hook),
        1e-5,
    ),
    "built in": (lambda model: model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE), 1e-5),
    "built in float16": (lambda model: model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS), 1e-2),
    "float16 around": (
        lambda model: model.register_comm_hook(None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
        1e-2,
    ),
    "bfloat16 around PowerSGD": (
        lambda model: model.register_comm_hook(
            _power_state(), default_hooks.bf16_compress_wrapper(powerSGD_hook.powerSGD_hook)
        ),
        3e-2,
    ),
    "own": (lambda model: model.register_comm_hook(None, averaged), 1e-5),
}


def _skipping(module: nn.Module, rank: int, step: int) -> Tensor:
    """Ranks use different layers; layer 3 is used by none."""
    return square_loss(module, rank, step, skip={rank % 2, 3}, **declares(module, ["layers.3"]))


def _torch_hook(rank: int, name: str, cap: float | None, static: bool) -> None:
    register, error = HOOKS[name]
    plain, model = make(bucket_cap_mb=cap, static_graph=static)
    register(model)
    for step in range(4):
        model.zero_grad()
        _skipping(model, rank, step).backward()
        wanted = mean_grads(plain, dist.get_world_size(), lambda m, r, s=step: _skipping(m, r, s))
        for name, param in model.module.named_parameters():
            if wanted[name] is None:
                assert param.grad is None
            else:
                torch.testing.assert_close(param.grad, wanted[name], rtol=error, atol=error / 10)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", list(HOOKS))
def test_the_hooks_of_torch_average(ranks, name, static):
    ranks(2, _torch_hook, name, None, static)


@pytest.mark.parametrize("name", ["all-reduce", "built in float16", "own"])
def test_hooks_in_tiny_buckets(ranks, name):
    ranks(3, _torch_hook, name, TINY_CAP_MB, False)


def _compressing(rank: int, cap: float | None) -> list[int]:
    """Rank r's input is r + 1 times one row, so that gradients have rank one and PowerSGD transmits them exactly.

    Layers that are skipped change the buckets: state that is kept for one must never meet another.
    """

    class Wide(Skippable):
        def __init__(self) -> None:
            super().__init__(depth=3, width=8)

        def forward(self, x: Tensor, skip: Any = ()) -> Tensor:
            return torch.stack([layer(x).sum() for i, layer in enumerate(self.layers) if i not in skip]).sum()

    def loss_of(module: nn.Module, r: int, step: int) -> Tensor:
        skip = {step % 3} if step % 2 else set()
        unused = [f"layers.{i}" for i in skip]
        return module((r + 1) * inputs(0, 1, 8, seed=step), skip=skip, **declares(module, unused))  # type: ignore[no-any-return]

    plain, model = make(Wide, bucket_cap_mb=cap)
    state = powerSGD_hook.PowerSGDState(dist.group.WORLD, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(14):
        # What error feedback carries over is rounding alone.
        step_is_right(plain, model, rank, step, loss_of)
    return sorted(state.error_dict)


def test_a_hook_that_keeps_state_by_bucket_number_while_declarations_change(ranks):
    """One bucket a set: all layers (while it compresses, in even steps from 2 on), without 0, 1 or 2 (3, 9; 1, 7, 13;
    5, 11). Numbers start anew after the first step."""
    assert ranks(2, _compressing, None) == [[0, 1, 2, 3]] * 2


def _local_sgd(rank: int) -> list[list[float | None]]:
    """After 2 steps each rank keeps to its own sub-group, of one rank."""
    _, model = make(lambda: Scales("a"))
    groups = [dist.new_group([r]) for r in range(2)]
    state = post_localSGD_hook.PostLocalSGDState(None, groups[rank], start_localSGD_iter=2)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    found = []
    for _ in range(4):
        model.zero_grad()
        model(torch.tensor(6.0 * (rank + 1)), use="a").backward()
        found.append(grads_of(model))
    for group in groups:
        dist.destroy_process_group(group)
    return found


def test_a_hook_that_stops_averaging(ranks):
    """(6 + 12) / 2 twice, then 6 and 12."""
    assert ranks(2, _local_sgd) == [[[9.0]] * 2 + [[6.0]] * 2, [[9.0]] * 2 + [[12.0]] * 2]


def _noop(rank: int) -> None:
    plain, model = make()
    model.register_comm_hook(None, debugging_hooks.noop_hook)
    for step in range(3):
        model.zero_grad()
        _skipping(model, rank, step).backward()
        for param in model.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        assert_grads(model, mean_grads(plain, dist.get_world_size(), lambda m, r, s=step: _skipping(m, r, s)))


def test_a_hook_that_does_nothing_leaves_the_averaging_to_the_caller(ranks):
    ranks(2, _noop)


# -- what a hook returns


def _times(rank: int, kind: str) -> list[float | None]:
    _, model = make(lambda: Scales("a", "b"))
    hooks: dict[str, Callable[[Any, Any], Any]] = {
        "five": lambda _, bucket: summed(bucket, 5.0),
        "chain": lambda _, bucket: summed(bucket, 10.0).then(lambda future: 0.5 * future.value()),
        "float64": lambda _, bucket: summed(bucket).then(lambda future: 5 * future.value().double()),
        "strided": lambda _, bucket: summed(bucket).then(lambda f: torch.stack([5 * f.value(), f.value()], 1)[:, 0]),
        "column": lambda _, bucket: summed(bucket).then(lambda future: 5 * future.value().reshape(2, 1)),
        "replaced": _replacing,
    }
    model.register_comm_hook(None, hooks[kind])
    for _ in range(3):
        model.zero_grad()
        model(torch.tensor(6.0 * (rank + 1)), use="a b" if rank else "a").backward()
    return grads_of(model)


def _replacing(_: object, bucket: dist.GradBucket) -> Future[Tensor]:
    bucket.set_buffer(5 * bucket.buffer().double())
    return summed(bucket)


@pytest.mark.parametrize("kind", ["five", "chain", "float64", "strided", "column", "replaced"])
def test_gradients_are_what_the_last_future_holds(ranks, kind):
    """Nothing is divided. x is 6 and 12; a: 5 x 18, b, used by rank 1 alone: 5 x 12. What a hook sees is in that
    order or the reverse, so that mixed up elements would show."""
    assert ranks(2, _times, kind) == [[90.0, 60.0]] * 2


def _one_value(rank: int) -> list[float | None]:
    """The same element for all."""
    _, model = make(lambda: Scales("a", "b"))
    model.register_comm_hook(None, lambda _, bucket: done(torch.tensor(7.0).expand_as(bucket.buffer())))
    model(torch.tensor(6.0), use="a b").backward()
    return grads_of(model)


def test_a_tensor_whose_elements_share_memory(ranks):
    assert ranks(2, _one_value) == [[7.0, 7.0]] * 2


def _kept_state(rank: int) -> list[float]:
    """The hook returns a sum that it keeps; the caller then clears gradients in place."""
    _, model = make(lambda: Scales("a", "b"))
    kept: list[Tensor] = []

    def running_sum(_: object, bucket: dist.GradBucket) -> Future[Tensor]:
        if not kept:
            kept.append(torch.zeros_like(bucket.buffer()))
        kept[0] += bucket.buffer()
        return done(kept[0])

    model.register_comm_hook(None, running_sum)
    found = []
    for _ in range(3):
        model(torch.tensor(6.0), use="a b").backward()
        found.append(model.module.a.grad.item())
        model.zero_grad(set_to_none=False)
    return found


def test_gradients_do_not_share_memory_with_what_a_hook_keeps(ranks):
    assert ranks(2, _kept_state) == [[6.0, 12.0, 18.0]] * 2


# -- what a hook sees


def _seen(rank: int, static: bool) -> list[list[tuple[Any, ...]]]:
    """(number, names, whether last, sum of the buffer) of each call, by step."""
    _, model = make(lambda: Scales("a", "b", "c"), bucket_cap_mb=1e-6, static_graph=static)
    names = {id(p): n for n, p in model.module.named_parameters()}
    calls: list[tuple[Any, ...]] = []

    def note(state: object, bucket: dist.GradBucket) -> Future[Tensor]:
        assert state == "state"
        assert isinstance(bucket, dist.GradBucket)
        assert bucket.buffer().dim() == 1
        views = bucket.gradients()
        assert [v.shape for v in views] == [p.shape for p in bucket.parameters()]
        assert sum(v.sum() for v in views) == bucket.buffer().sum()
        views[0].add_(1)  # a view: seen in the buffer
        held = bucket.buffer().tolist()
        calls.append((bucket.index(), [names[id(p)] for p in bucket.parameters()], bucket.is_last(), held))
        return averaged(None, bucket)

    model.register_comm_hook("state", note)
    steps = []
    for use in ("a b", "a b", "a b") if static else ("a b c", "a b", "a b c", "a c", "a b c"):
        calls.clear()
        model.zero_grad()
        model(torch.tensor(6.0), use=use, unused_parameters=set("abc") - set(use)).backward()
        steps.append(list(calls))
    return steps


def _row(numbers: dict[str, int]) -> list[tuple[Any, ...]]:
    """Each scalar in a bucket of its own; x is 6, and 1 is added to it."""
    last = list(numbers)[-1]
    return [(number, [name], name == last, [7.0]) for name, number in numbers.items()]


def test_a_hook_sees_the_agreed_parameters_alone_undivided_and_by_number(ranks):
    """Buckets come in reverse order of use: c, b, a. A bucket keeps its number whatever else is in the step."""
    everything = _row({"c": 0, "b": 1, "a": 2})
    wanted = [everything, _row({"b": 0, "a": 1}), _row({"c": 2, "b": 0, "a": 1}), _row({"c": 2, "a": 1})]
    assert ranks(2, _seen, False) == [[*wanted, wanted[2]]] * 2


def test_a_static_graph_shows_hooks_the_same_buckets_in_each_step(ranks):
    assert ranks(2, _seen, True) == [[_row({"b": 0, "a": 1})] * 3] * 2


class _Kinds(nn.Module):
    """Parameters of several dtypes, one of them laid out in columns, and a sparse embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 3, sparse=True)
        self.wide = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.columns = nn.Parameter(torch.ones(2, 3).t())
        self.single = nn.Parameter(torch.ones(3))

    def forward(self, row: int, scale: float) -> Tensor:
        embedded = self.words(torch.tensor([row])).sum()
        return scale * (embedded + self.wide.sum() + (self.columns * torch.arange(6).view(3, 2)).sum())


def _kinds(rank: int, hook: str) -> list[Any]:
    torch.manual_seed(0)
    model = KnownDDP(_Kinds(), find_unused_parameters=True)
    seen: set[tuple[str, bool]] = set()

    def note(_: object, bucket: dist.GradBucket) -> Future[Tensor]:
        assert len({p.dtype for p in bucket.parameters()}) == 1
        assert [g.stride() for g in bucket.gradients() if not g.is_sparse] == [
            p.stride() for p in bucket.parameters() if p is not model.module.words.weight
        ]
        seen.add((str(bucket.buffer().dtype), bucket.buffer().is_sparse))
        if bucket.buffer().is_sparse:
            dense = bucket.buffer().to_dense()
            dist.all_reduce(dense)
            return done((dense / 2).to_sparse(1))
        return averaged(None, bucket)

    if hook == "own":
        model.register_comm_hook(None, note)
    else:
        model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, hook))
    for _ in range(3):
        model.zero_grad()
        model(row=rank, scale=2.0 * (rank + 1)).backward()
    found = model.module
    assert found.single.grad is None
    assert found.columns.grad.stride() == found.columns.stride()
    words = found.words.weight.grad
    return [words.is_sparse, words.to_dense()[:, 0].tolist(), found.wide.grad.tolist(), found.columns.grad.tolist()]


@pytest.mark.parametrize("hook", ["own", "ALLREDUCE", "FP16_COMPRESS"])
def test_every_kind_of_parameter_goes_through_a_hook(ranks, hook):
    """Scales are 2 and 4: the mean is 3 times what each was multiplied by; rows 0 and 1 of the embedding: 1 and 2."""
    columns = [[0.0, 3.0], [6.0, 9.0], [12.0, 15.0]]
    wanted = [True, [1.0, 2.0, 0.0, 0.0, 0.0], [3.0] * 3, columns]
    assert ranks(2, _kinds, hook) == [wanted] * 2
