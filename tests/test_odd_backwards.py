"""Backwards that begin, fail or end in unusual places, on ranks that differ."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Scales, Skippable, Withholds, assert_grads, inputs, make, mean_grads, raises_everywhere
from steps import TINY_CAP_MB
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from knownddp import GradientTakenError, KnownDDP, PeerFailedError, RanksDifferError, exchange
from knownddp.plan import BucketSpec
from knownddp.pool import FlatPool, GradientBucket


def _loss(model: nn.Module, rank: int, seed: int = 0, **kwargs: Any) -> Tensor:
    return model(inputs(rank, 5, 3, seed=seed), **kwargs).square().mean()


def _step_is_right(plain: nn.Module, model: KnownDDP, rank: int, seed: int = 90) -> None:
    model.zero_grad(set_to_none=True)
    _loss(model, rank, seed).backward()
    assert_grads(model, mean_grads(plain, dist.get_world_size(), lambda m, r: _loss(m, r, seed)))


# -- failures between windows and in launches


class _FailsInBackward(Skippable):
    def forward(self, x: Tensor, fails: bool = False) -> Tensor:  # type: ignore[override]
        x = super().forward(x, skip=(2, 3))
        if fails:
            x.register_hook(_raise)
        return super().forward(x, skip=(0, 1))


def _raise(_: Tensor) -> None:
    raise KeyError("bad gradient")


def _fails_between_windows(rank: int, failing: int) -> None:
    """first -> second; ``second``'s backward raises before ``first``'s output is reached: both windows fail."""
    plain_first, first = make(Skippable)
    plain_second, second = make(_FailsInBackward)
    for step in range(3):
        first.zero_grad(set_to_none=True)
        second.zero_grad(set_to_none=True)
        hidden = first(inputs(rank, 5, 3, seed=step))
        with pytest.raises(KeyError if rank == failing else PeerFailedError):
            second(hidden, fails=rank == failing).square().mean().backward()
        assert all(p.grad is None for m in (first, second) for p in m.parameters())
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == dist.get_world_size()
        _step_is_right(plain_first, first, rank, seed=step)
        _step_is_right(plain_second, second, rank, seed=step)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_in_one_wrapper_before_the_backward_reaches_another(ranks, failing):
    ranks(2, _fails_between_windows, failing)


@contextmanager
def _failing(n: int) -> Iterator[None]:
    """Raises when memory for the n-th bucket is asked for."""
    left, original = [n], FlatPool.take

    def take(pool: FlatPool, bucket: BucketSpec) -> GradientBucket:
        left[0] -= 1
        if left[0] == 0:
            raise MemoryError("out of memory")
        return original(pool, bucket)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlatPool, "take", take)
        yield


def _fails_to_launch(rank: int, bucket: int) -> None:
    """Out of memory in the hook of a parameter, or, while nothing was learnt, at the end of the backward."""
    plain, model = make(bucket_cap_mb=1e-5)
    for step in range(3):
        model.zero_grad(set_to_none=True)
        loss = _loss(model, rank, step)
        if rank == 1:
            with _failing(bucket), pytest.raises(MemoryError):
                loss.backward()
        else:
            assert "rank 1" in raises_everywhere(loss.backward, PeerFailedError)
        assert all(p.grad is None for p in model.parameters())
        _step_is_right(plain, model, rank, seed=step)


@pytest.mark.parametrize("bucket", [1, 3, 8])
def test_running_out_of_memory_in_a_launch_raises_on_all_ranks(ranks, bucket):
    ranks(3, _fails_to_launch, bucket)


def _fails_to_launch_unhooked(rank: int) -> None:
    """As above for gradients whose hooks did not run: cast and cast back in place, parameters have new nodes, on which
    hooks are where they hear all.
    """
    plain, model = make(bucket_cap_mb=1e-5)
    model.reducer.nodes.hear_all()
    for step in range(2):
        _step_is_right(plain, model, rank, seed=step)
    model.zero_grad(set_to_none=True)
    for param in model.parameters():
        memory = param.data
        param.data = memory.double()
        param.data = memory
    loss = _loss(model, rank, 2)
    with pytest.MonkeyPatch.context() as patch:
        unhooked: list[list[int]] = []
        ask = exchange.GradientExchange.unhooked
        patch.setattr(exchange.GradientExchange, "unhooked", lambda self: unhooked.append(ask(self)) or unhooked[-1])
        if rank == 1:
            with _failing(1), pytest.raises(MemoryError):
                loss.backward()
        else:
            assert "rank 1" in raises_everywhere(loss.backward, PeerFailedError)
    assert unhooked == [list(range(len(list(model.parameters()))))]
    assert all(p.grad is None for p in model.parameters())
    _step_is_right(plain, model, rank, seed=3)


def test_running_out_of_memory_for_gradients_without_hooks_raises_on_all_ranks(ranks):
    ranks(2, _fails_to_launch_unhooked)


# -- gradients past the outputs


class _LeavesAside(Skippable):
    """Its loss is an attribute, beside an output that nobody needs to use."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        out = super().forward(x)
        self.aside = out.square().mean()
        return out


def _aside(rank: int, keep: bool) -> None:
    plain, model = make(_LeavesAside)
    world = dist.get_world_size()
    for step in range(3):
        model.zero_grad(set_to_none=True)
        output = model(inputs(rank, 5, 3, seed=step))
        if not keep:
            del output
        model.module.aside.backward()
        assert_grads(model, mean_grads(plain, world, lambda m, r, s=step: _loss(m, r, s)))


@pytest.mark.parametrize("keep", [True, False])
def test_a_loss_left_aside_by_forward_is_averaged(ranks, keep):
    ranks(2, _aside, keep)


def _unseen_and_failing(rank: int, stood: float | None, create_graph: bool, drops: bool) -> float | None:
    """What is in the first ``.grad`` after a backward that no output told of, and that raises at the second."""
    _, model = make(lambda: Scales("a", "b"))
    a, b = model.parameters()
    x = torch.tensor(float(rank + 1))
    model(x, "a b").backward()
    model.zero_grad(set_to_none=True)
    b.grad = None if stood is None else torch.tensor(stood)
    pending = model(x, "a b")
    if drops:
        model.zero_grad(set_to_none=True)
    loss = model.module(x, "a b")
    handle = a.register_hook(_raise)
    with pytest.raises(KeyError):
        loss.backward(create_graph=create_graph)
    handle.remove()
    assert a.grad is None and pending is not None
    return None if b.grad is None else float(b.grad)


@pytest.mark.parametrize(
    ("stood", "create_graph", "drops"),
    [(None, False, False), (None, True, False), (5.0, True, False), (5.0, False, True)],
)
def test_what_stood_there_is_put_back_after_a_backward_that_no_output_told_of(ranks, stood, create_graph, drops):
    """``drops``: gradients are dropped between the forward and that backward."""
    assert ranks(2, _unseen_and_failing, stood, create_graph, drops) == [None if drops else stood] * 2


def _undefined_and_unseen(rank: int) -> list[float]:
    """A backward of the module's alone, of which nothing comes, while a forward waits for its own."""
    _, model = make(lambda: Scales("a", "b"))
    a, b = model.parameters()
    x = torch.tensor(float(rank + 1))
    a.grad, b.grad = torch.tensor(5.0), torch.tensor(6.0)
    pending = model(x, "a b")
    (Withholds.apply(a) + Withholds.apply(b)).backward()
    assert model.stats().backwards_finished == 0
    pending.backward()
    return [float(a.grad), float(b.grad)]


def test_undefined_gradients_outside_of_windows_begin_none(ranks):
    """5 and 6 stood there, x is 1 and 2."""
    assert ranks(2, _undefined_and_unseen) == [[6.5, 7.5]] * 2


def _late_and_unhooked(rank: int) -> list[float]:
    """b comes late on rank 0, whose hook on it did not run; OPEN comes back when the backward is over."""
    _, model = make(lambda: Scales("a", "b", "c"))
    model.reducer.nodes.hear_all()
    x = torch.tensor(float(rank + 1))
    for _ in range(2):
        model(x, "a b c").backward()
        model.zero_grad(set_to_none=True)
    combine = model._comm.combine_or

    def combined_late(message: bytes) -> Any:
        work = combine(message)
        work.is_completed = lambda: False
        return work

    model._comm.combine_or = combined_late
    if rank == 0:
        memory = model.module.b.data
        model.module.b.data = memory.double()
        model.module.b.data = memory
    loss = model(x, "a b c", unused_parameters=["b"] if rank == 0 else [])
    with pytest.warns(UserWarning, match="declared different unused parameters"):
        loss.backward()
    return [float(p.grad) for p in model.parameters()]


def test_a_late_gradient_whose_hook_did_not_run_is_averaged(ranks):
    """x is 1 and 2."""
    assert ranks(2, _late_and_unhooked) == [[1.5] * 3] * 2


class _Beside(Scales):
    """Its loss is an attribute beside an output that is dropped."""

    def forward(self, x: Tensor, use: str) -> Tensor:  # type: ignore[override]
        self.beside = super().forward(x, use)
        return x * 1.0


def _begins_at_a_late_one(rank: int) -> list[list[float]]:
    """No output lives and no forward promises anything, so all gradients are late; nobody took the first."""
    _, model = make(lambda: _Beside("a", "b"))
    found = []
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        model(torch.tensor(float(rank + 1), requires_grad=True), "a b")
        model.module.beside.backward()
        found.append([float(p.grad) for p in model.parameters()])
    return found


def test_a_backward_that_begins_at_a_late_gradient(ranks):
    """x is 1 and 2."""
    assert ranks(2, _begins_at_a_late_one) == [[[1.5] * 2] * 2] * 2


class _Twice(nn.Module):
    """``w`` has two gradients in a backward, v one."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.w = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.v.sum()
        for _ in range(2):
            x = checkpoint(lambda one: one + self.w.sum(), x, use_reentrant=True)
        return x


def _takes_first_of_two(rank: int, hooks_after: int, takes_at: int) -> None:
    """Rank 0 has the hook after so many steps, and takes the first gradient of w in step ``takes_at``."""
    _, model = make(_Twice)
    x = torch.ones((), requires_grad=True)
    came: list[int] = []
    step = 0

    def take(param: Tensor) -> None:
        came.append(step)
        if rank == 0 and came.count(step) == 1 and step == takes_at:
            param.grad = None

    for step in range(takes_at + 2):
        if step == hooks_after:
            model.module.w.register_post_accumulate_grad_hook(take)
        model.zero_grad(set_to_none=True)
        loss = model(x)
        if step == takes_at:
            raises_everywhere(loss.backward, GradientTakenError if rank == 0 else PeerFailedError)
            assert model.module.w.grad is None
        else:
            loss.backward()
            assert [float(p.grad) for p in model.parameters()] == [1.0, 2.0]


@pytest.mark.parametrize(("hooks_after", "takes_at"), [(0, 0), (0, 2), (2, 2), (2, 3)])
def test_a_hook_that_takes_the_first_of_two_gradients_is_an_error_on_all_ranks(ranks, hooks_after, takes_at):
    ranks(2, _takes_first_of_two, hooks_after, takes_at)


def _takes_late_one(rank: int) -> None:
    """b is declared unused on both ranks, used on rank 0, and a hook takes it."""
    _, model = make(lambda: Scales("a", "b"))
    x = torch.tensor(float(rank + 1))
    for _ in range(2):
        model(x, "a b").backward()
        model.zero_grad(set_to_none=True)

    def take(param: Tensor) -> None:
        param.grad = None

    model.module.b.register_post_accumulate_grad_hook(take)
    loss = model(x, "a b" if rank == 0 else "a", unused_parameters=["b"])
    message = raises_everywhere(loss.backward, GradientTakenError if rank == 0 else PeerFailedError)
    assert "rank 0" in message
    assert all(p.grad is None for p in model.parameters())


def test_a_late_gradient_that_a_hook_took_is_an_error_on_all_ranks(ranks):
    ranks(2, _takes_late_one)


def _open_on_one_rank(rank: int) -> None:
    """Rank 0 keeps an output; then all go through the inner module. On rank 0 that may be the output's backward."""
    plain, model = make()
    _step_is_right(plain, model, rank)
    kept = _loss(model, rank) if rank == 0 else None
    model.zero_grad(set_to_none=True)
    if rank == 0:
        message = raises_everywhere(lambda: _loss(model.module, rank).backward(), RanksDifferError)
    else:
        _loss(model.module, rank).backward()  # local, and rightly so
        message = raises_everywhere(lambda: _loss(model, rank).backward(), RanksDifferError)
    assert "on rank 0 a backward reached parameters without passing an output" in message
    del kept
    _step_is_right(plain, model, rank)


def test_ranks_that_cannot_tell_whether_a_backward_is_the_wrappers_raise(ranks):
    ranks(2, _open_on_one_rank)


# -- what each forward saw


def _frozen_in_one_forward(rank: int) -> None:
    """a is frozen in the first of two forwards; its backward alone promises b only, so nothing is missing after it.

    x is r + 1: b gets (1 + 2) / 2 = 1.5 from the first; a and b as much from the second.
    """
    model = KnownDDP(Scales("a", "b"))
    x = torch.tensor(rank + 1.0)
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        model.module.a.requires_grad_(False)
        first = model(x, use="a b")
        model.module.a.requires_grad_(True)
        second = model(x, use="a b")
        reduced = model.stats().bytes_reduced
        first.backward()
        assert (model.module.a.grad, model.module.b.grad.item()) == (None, 1.5)
        assert model.stats().bytes_reduced - reduced == 4
        second.backward()
        assert (model.module.a.grad.item(), model.module.b.grad.item()) == (1.5, 3.0)


def test_a_forward_promises_what_was_trainable_then(ranks):
    ranks(2, _frozen_in_one_forward)


def _all_frozen(rank: int) -> None:
    """A saliency map on rank 0: nothing is trainable, so the backward is its own."""
    plain, model = make()
    _step_is_right(plain, model, rank)
    if rank == 0:
        model.requires_grad_(False)
        x = inputs(0, 5, 3).requires_grad_()
        model(x).sum().backward()
        assert x.grad is not None
        model.requires_grad_(True)
    _step_is_right(plain, model, rank)


def test_a_backward_through_a_frozen_module_is_local(ranks):
    ranks(2, _all_frozen)


def _carried_alone_under_trust(rank: int) -> None:
    """b was touched under no_sync only, x is r + 1: both a and b get (1 + 2) / 2, a twice."""
    model = KnownDDP(Scales("a", "b"), unused_agreement="trust", bucket_cap_mb=1e-6)
    x = torch.tensor(rank + 1.0)
    model(x, use="a b").backward()  # learns the order
    model.zero_grad(set_to_none=True)
    with model.no_sync():
        model(x, use="a b").backward()
    model(x, use="a", unused_parameters=["b"]).backward()
    assert (model.module.a.grad.item(), model.module.b.grad.item()) == (3.0, 1.5)


def test_what_an_accumulated_backward_touched_is_averaged_under_trust(ranks):
    ranks(2, _carried_alone_under_trust)


# -- one lane for several wrappers


def _sharing_the_users_group(rank: int) -> None:
    """Two wrappers and the user's collectives on one group, unlike sizes: they must pair up by the program's order."""
    plain_first, first = make(Skippable, own_group=False)
    plain_second, second = make(lambda: Skippable(depth=2), own_group=False, bucket_cap_mb=1e-5)
    both = nn.ModuleList([plain_first, plain_second])
    for step in range(4):
        first.zero_grad(set_to_none=True)
        second.zero_grad(set_to_none=True)

        def loss_of(module: nn.ModuleList, r: int, step: int = step) -> Tensor:
            hidden = module[0](inputs(r, 5, 3, seed=step), skip=(r,) if step else ())
            return module[1](hidden).square().mean()

        loss_of(nn.ModuleList([first, second]), rank).backward()
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 3
        wanted = mean_grads(both, 3, loss_of)
        assert_grads(first, {k.removeprefix("0."): v for k, v in wanted.items() if k.startswith("0.")})
        assert_grads(second, {k.removeprefix("1."): v for k, v in wanted.items() if k.startswith("1.")})


def test_two_wrappers_on_the_users_own_group(ranks):
    ranks(3, _sharing_the_users_group)


# -- what wrappers share, what modules do meanwhile


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)


def _shared_encoder(rank: int, cap: float | None) -> None:
    """Both heads' losses in one backward, then each alone: the encoder's gradient is averaged once either way."""
    torch.manual_seed(0)
    plain, module = _Two(), _Two()
    module.load_state_dict(plain.state_dict())
    wrapped = [KnownDDP(nn.Sequential(module.encoder, head), bucket_cap_mb=cap) for head in (module.a, module.b)]
    bare = [nn.Sequential(plain.encoder, head) for head in (plain.a, plain.b)]
    for step in range(3):
        for used in ((0, 1), (1, 0), (0,), (1,)):
            for net in (plain, module):
                net.zero_grad(set_to_none=True)
            total: dict[str, Tensor] = {}
            for r in range(dist.get_world_size()):
                plain.zero_grad(set_to_none=True)
                sum(bare[k](inputs(r, 5, 3, seed=step)).square().mean() * (k + 1) for k in used).backward()
                for name, p in plain.named_parameters():
                    if p.grad is not None:
                        total[name] = total.get(name, 0) + p.grad / dist.get_world_size()
            sum(wrapped[k](inputs(rank, 5, 3, seed=step)).square().mean() * (k + 1) for k in used).backward()
            assert_grads(module, {name: total.get(name) for name, _ in plain.named_parameters()})


@pytest.mark.parametrize("cap", [None, 1e-5])
def test_two_wrappers_that_share_an_encoder(ranks, cap):
    ranks(2, _shared_encoder, cap)


class _Chain(Skippable):
    """Returns every hidden state; each is computed from the one before."""

    def forward(self, x: Tensor) -> list[Tensor]:  # type: ignore[override]
        states = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            states.append(x)
        return states


def _chained_outputs(rank: int) -> None:
    _, model = make(_Chain)
    gc.disable()
    try:
        for step in range(5):
            states = model(inputs(rank, 5, 3, seed=step))
            alive = weakref.ref(states[0])
            if step % 2:
                states[-1].sum().backward()
            del states
            assert alive() is None, "outputs are kept"
            assert len(model.reducer.forwards) == 0
    finally:
        gc.enable()


def test_outputs_computed_from_one_another_are_freed_at_once(ranks):
    ranks(2, _chained_outputs)


def _penalty_after_a_backward(rank: int) -> None:
    """A loss, then a penalty derived from the same kept graph, each with its own backward."""
    plain, model = make()
    world = dist.get_world_size()
    for step in range(3):

        def losses(module: nn.Module, r: int, step: int = step) -> None:
            x = inputs(r, 4, 3, seed=step).requires_grad_()
            y = module(x)
            y.square().mean().backward(retain_graph=True)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            slope.square().sum(1).mean().backward()

        reference = copy.deepcopy(plain)
        for r in range(world):
            losses(reference, r)
        model.zero_grad(set_to_none=True)
        losses(model, rank)
        assert_grads(model, {name: p.grad / world for name, p in reference.named_parameters()})


def test_a_penalty_backpropagated_after_the_loss(ranks):
    ranks(2, _penalty_after_a_backward)


class _Thaws(Skippable):
    def forward(self, x: Tensor, thaw: bool = False) -> Tensor:  # type: ignore[override]
        self.layers[0].requires_grad_(thaw)
        return super().forward(x)


def _thawed_inside(rank: int) -> None:
    plain, model = make(_Thaws)
    for step in range(4):
        thaw = step % 2 == 1
        model.zero_grad(set_to_none=True)
        _loss(model, rank, step, thaw=thaw).backward()
        assert_grads(model, mean_grads(plain, 2, lambda m, r, s=step, t=thaw: _loss(m, r, s, thaw=t)))


def test_a_layer_thawed_inside_forward_is_averaged_in_that_step(ranks):
    ranks(2, _thawed_inside)


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Undefined(Skippable):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(_NoGradient.apply(x, self.layers[0].weight), skip=(0,))


def _undefined(rank: int) -> None:
    """An autograd Function returns no gradient for layer 0's weight: none is missing. Its bias is declared unused."""
    _, model = make(_Undefined)
    for step in range(3):
        model.zero_grad(set_to_none=True)
        _loss(model, rank, step, unused_parameters=["layers.0.bias"]).backward()
        assert model.module.layers[0].weight.grad is None


def test_an_undefined_gradient_keeps_the_promise(ranks):
    ranks(2, _undefined)


def _taken(rank: int) -> None:
    """A hook of rank 1 clears other parameters' gradients in mid-backward: all ranks raise; the next step is right."""
    plain, model = make()
    _step_is_right(plain, model, rank)
    model.zero_grad(set_to_none=True)
    first = model.module.layers[0].weight

    def clear(_: Tensor) -> None:
        for p in model.module.layers[3].parameters():
            p.grad = None

    handle = first.register_post_accumulate_grad_hook(clear) if rank == 1 else None
    kind = GradientTakenError if rank == 1 else PeerFailedError
    raises_everywhere(lambda: _loss(model, rank).backward(), kind)
    if handle is not None:
        handle.remove()
    _step_is_right(plain, model, rank)


def test_a_gradient_taken_out_before_it_travels_raises_on_all_ranks(ranks):
    ranks(2, _taken)


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "rows cut off": lambda grad: grad[:3].clone(),
    "one row": lambda grad: grad[:1].clone(),
    "one element": lambda grad: grad.sum(),
    "twice the rows": lambda grad: torch.cat([grad, grad]),
}


def _misshapen(rank: int, side: int, shape: str, stood: bool) -> None:
    """A hook of rank 1 gives a gradient another shape: all ranks raise; the next step is right."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(side, side), nn.Linear(side, 2))
    model = KnownDDP(copy.deepcopy(plain))
    x = torch.linspace(-1, 1, 2 * side).view(2, side) * (rank + 1)
    for param in model.parameters():
        param.grad = None if stood is False else torch.ones_like(param)
    before = [param.grad for param in model.parameters()]
    model(x).sum().backward()  # learns the order
    weight = model.module[0].weight
    for param, grad in zip(model.parameters(), before, strict=True):
        param.grad = grad

    def change(param: nn.Parameter) -> None:
        param.grad.data = SHAPES[shape](param.grad)  # type: ignore[union-attr]

    handle = weight.register_post_accumulate_grad_hook(change) if rank == 1 else None
    raises_everywhere(lambda: model(x).sum().backward(), GradientTakenError if rank == 1 else PeerFailedError)
    assert all(param.grad is grad for param, grad in zip(model.parameters(), before, strict=True))
    if handle is not None:
        handle.remove()
    model.zero_grad()
    model(x).sum().backward()
    sign = torch.linspace(-1, 1, 2 * side).view(2, side)
    plain(sign * 1.5).sum().backward()  # linear in the input, but for biases, which have none of it
    for mine, due in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, due.grad)


@pytest.mark.parametrize("stood", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("side", [8, 160, 1024], ids=["packed with others", "packed early", "in place"])
def test_a_gradient_of_another_shape_raises_on_all_ranks(ranks, side, shape, stood):
    ranks(2, _misshapen, side, shape, stood)


def _doubled(rank: int, on_node: bool) -> list[float]:
    """Each gradient by a hook that is called after the wrapper's; each parameter has a bucket of its own."""
    _, model = make(lambda: Scales("a", "b", "c"), bucket_cap_mb=TINY_CAP_MB)
    x = torch.tensor(float(rank + 1))
    for _ in range(2):
        model(x, "a b c").backward()
        model.zero_grad(set_to_none=True)
    kept = []  # a node lives as long as somebody has it

    def double(param: nn.Parameter) -> None:
        assert param.grad is not None
        param.grad.mul_(2)

    for param in model.parameters():
        if on_node:
            kept.append(param.view_as(param).grad_fn.next_functions[0][0])
            kept[-1].register_hook(lambda *_, param=param: double(param))
        else:
            param.register_post_accumulate_grad_hook(double)
    model(x, "a b c").backward()
    return [float(p.grad) for p in model.parameters()]


@pytest.mark.parametrize("on_node", [False, True])
def test_a_hook_may_change_a_gradient_after_the_wrappers_own(ranks, on_node):
    """The last one of a bucket as the others. Inputs are 1 and 2; twice their mean."""
    assert ranks(2, _doubled, on_node) == [[3.0] * 3] * 2


def _freezes(rank: int, who: tuple[int, ...], steps_before: int) -> list[float]:
    """One of two parameters, between a forward and its backward."""
    _, model = make(lambda: Scales("a", "b"))
    x = torch.tensor(float(rank + 1))
    for _ in range(steps_before):
        model(x, "a b").backward()
        model.zero_grad(set_to_none=True)
    loss = model(x, "a b")
    if rank in who:
        next(model.parameters()).requires_grad_(False)
    loss.backward()
    return [float(p.grad) for p in model.parameters()]


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize(("who", "wanted"), [((0, 1), [0.0, 1.5]), ((0,), [1.0, 1.5])])
def test_what_is_frozen_before_its_backward_counts_as_zero(ranks, who, wanted, steps_before):
    """As under DistributedDataParallel. Inputs are 1 and 2."""
    assert ranks(2, _freezes, who, steps_before) == [wanted] * 2


def _fails_to_begin(rank: int) -> list[list[float]]:
    """What stood in ``.grad``, after an exception in the middle of a begin, and the next gradients of the model."""
    _, model = make(lambda: Scales("a", "b"))
    for param in model.parameters():
        param.grad = torch.full_like(param, 7.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "sharing", _no_memory)
        raises_everywhere(lambda: model(torch.tensor(1.0), "a b").backward(), MemoryError)
    found = [[float(p.grad.sum()) for p in model.parameters()]]
    again = KnownDDP(model.module)
    again.zero_grad(set_to_none=True)
    again(torch.tensor(3.0), "a b").backward()
    return [*found, [float(p.grad.sum()) for p in again.parameters()]]


def _no_memory(_: object) -> frozenset[int]:
    raise MemoryError("on purpose")


def test_a_begin_that_fails_keeps_nothing_of_the_parameters(ranks):
    """The loss is a x + b x, so the gradient of each is the input."""
    ((stood, after),) = ranks(1, _fails_to_begin)
    assert stood == [7.0, 7.0] and after == [3.0, 3.0]


def _cast_before_inference(rank: int) -> float:
    _, model = make(lambda: nn.Linear(2, 1, bias=False))
    model(torch.ones(1, 2)).sum().backward()
    model.module.half()
    model.module.float()
    model.module.weight = nn.Parameter(torch.ones(1, 2))
    with torch.inference_mode():
        assert model(torch.ones(1, 2)).item() == 2.0
    model.zero_grad()
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    return float(model.module.weight.grad[0, 0])


def test_a_forward_in_inference_mode_after_parameters_changed(ranks):
    assert ranks(2, _cast_before_inference) == [1.5, 1.5]
