"""Communication hooks: what is refused, what fails, and how a hook goes together with the rest.

Expected gradients come from plain autograd on one process or are worked out in the docstring.
"""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Scales, make, raises_everywhere
from steps import TINY_CAP_MB, declares, grads_of, setups, square_loss, step_is_right, steps_are_right
from torch import Tensor, nn
from torch.futures import Future

from knownddp import ArgumentError, CommHookError, KnownDDP, PeerFailedError, RanksDifferError
from knownddp.comm_hooks import GradBucket, check_hook, name_of

Hook = Callable[[Any, Any], Any]


def averaged(_: object, bucket: dist.GradBucket) -> Future[Tensor]:
    """The mean, on the default group."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0] / dist.get_world_size())


def done(value: Any) -> Any:
    """A future that holds ``value``."""
    future: Future = Future()
    future.set_result(value)
    return future


# -- what can be registered


class _Callable:
    def __call__(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return averaged(state, bucket)

    def method(self, state: object, bucket: GradBucket) -> Future[torch.Tensor]:
        return averaged(state, bucket)


def _unresolvable(state: object, bucket: Unknown) -> Nowhere:  # type: ignore[name-defined]  # noqa: F821
    return averaged(state, bucket)


def _without_annotations(state, bucket):  # type: ignore[no-untyped-def]
    return averaged(state, bucket)


ACCEPTED: list[Hook] = [
    averaged,
    _without_annotations,
    _Callable(),
    _Callable().method,
    _unresolvable,
    functools.partial(averaged),
    lambda state, bucket: averaged(state, bucket),
]


@pytest.mark.parametrize("hook", ACCEPTED, ids=name_of)
def test_what_can_be_a_hook(hook):
    check_hook(hook)


def _wrong_bucket(state: object, bucket: int) -> Future[Tensor]:
    return averaged(state, bucket)  # type: ignore[arg-type]


def _wrong_result(state: object, bucket: dist.GradBucket) -> int:
    return 1


def _wrong_future(state: object, bucket: dist.GradBucket) -> Future[int]:
    return averaged(state, bucket)


@pytest.mark.parametrize(
    ("hook", "kind", "text"),
    [
        (1, TypeError, "Communication hook must be callable."),
        (1, CommHookError, "Got int"),
        (_wrong_bucket, ValueError, "bucket annotation should be dist.GradBucket."),
        (_wrong_result, ValueError, r"return annotation should be torch.futures.Future\[torch.Tensor\]."),
        (_wrong_future, ArgumentError, r"Got .*Future\[int\]"),
    ],
)
def test_what_cannot_be_a_hook(hook, kind, text):
    with pytest.raises(kind, match=text):
        check_hook(hook)


def _once(rank: int) -> list[str]:
    builtin = dist.BuiltinCommHookType.ALLREDUCE
    ways: list[Callable[[KnownDDP], None]] = [
        lambda model: model.register_comm_hook(None, averaged),
        lambda model: model._register_builtin_comm_hook(builtin),
    ]
    texts = []
    for first in ways:
        for second in ways:
            plain, model = make()
            raises_everywhere(lambda m=model: m.register_comm_hook(None, 1), TypeError)
            raises_everywhere(lambda m=model: m._register_builtin_comm_hook(1), TypeError)
            first(model)
            texts.append(raises_everywhere(functools.partial(second, model), RuntimeError))
            step_is_right(plain, model, rank)
    return texts


def test_a_hook_is_registered_once(ranks):
    for texts in ranks(2, _once):
        assert len(texts) == 4
        assert all("can only be called once" in text for text in texts)


def test_a_buffer_is_replaced_by_one_of_its_size():
    bucket = GradBucket(0, torch.zeros(4), (), (), is_last=True)
    with pytest.raises(CommHookError, match="4 elements"):
        bucket.set_buffer(torch.zeros(3))
    with pytest.raises(CommHookError, match="contiguous"):
        bucket.set_buffer(torch.zeros(()).expand(4))
    replaced = torch.ones(4, dtype=torch.float64)
    bucket.set_buffer(replaced)
    assert bucket.buffer() is replaced


# -- what fails


def _bad(kind: str, bucket: Any) -> Any:
    averaging = averaged(None, bucket)
    if kind == "raises":
        averaging.wait()
        raise ArithmeticError("boom")
    return {
        "no future": lambda: averaging.wait(),
        "list": lambda: averaging.then(lambda future: [future.value()]),
        "short": lambda: averaging.then(lambda future: future.value()[:-1]),
        "fails": lambda: averaging.then(lambda future: 1 / 0),
    }[kind]()


FAILURES = {
    "raises": (ArithmeticError, "boom"),
    "no future": (RuntimeError, "must return a torch.futures.Future, got Tensor"),
    "list": (CommHookError, "must return a future of one tensor, got one of list"),
    "short": (CommHookError, "elements for a bucket of"),
    "fails": (RuntimeError, "ZeroDivisionError"),
}


def _failing(rank: int, kind: str, cap: float | None, position: int) -> str:
    """Rank 1's hook does wrong in one bucket of the second step: .grad is as it was, and the next step is right."""
    plain, model = make(bucket_cap_mb=cap)
    countdown = -1

    def hook(_: object, bucket: dist.GradBucket) -> Future[Tensor]:
        nonlocal countdown
        countdown -= 1
        return _bad(kind, bucket) if countdown == -1 and rank == 1 else averaged(None, bucket)

    model.register_comm_hook(None, hook)
    countdown = -9999
    steps_are_right(plain, model, rank, steps=2)
    before = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    loss = square_loss(model, rank, 5)
    countdown = position
    text = raises_everywhere(loss.backward, FAILURES[kind][0] if rank == 1 else PeerFailedError)
    countdown = -9999
    assert all(torch.equal(p.grad, then) for p, then in zip(model.parameters(), before, strict=True))
    steps_are_right(plain, model, rank)
    return text


@pytest.mark.parametrize("kind", list(FAILURES))
@pytest.mark.parametrize(("cap", "position"), [(None, 0), (TINY_CAP_MB, 0), (TINY_CAP_MB, 3), (TINY_CAP_MB, 7)])
def test_a_hook_that_fails_on_one_rank_fails_the_step_on_all(ranks, cap, position, kind):
    peer, own = ranks(2, _failing, kind, cap, position)
    assert "on rank 1 raised" in peer
    assert FAILURES[kind][1] in own


def _declaring_wrongly(model: KnownDDP) -> None:
    """Let it warn of that once."""
    with pytest.warns(UserWarning, match="no rank expected: b"):
        model(torch.tensor(0.0), use="a b", unused_parameters=["b"]).backward()
    model.zero_grad(set_to_none=True)


def _failing_late(rank: int, kind: str) -> str:
    """As above, in the round for a gradient that comes though it was declared unused. The step that fails leaves out
    ``a``, which the next forward does not hold against it."""
    _, model = make(lambda: Scales("a", "b"))
    fails = False

    def hook(_: object, bucket: dist.GradBucket) -> Future[Tensor]:
        is_late = bucket.parameters()[0] is model.module.b
        return _bad(kind, bucket) if is_late and fails else averaged(None, bucket)

    model.register_comm_hook(None, hook)
    _declaring_wrongly(model)
    texts = []
    for fails in (False, rank == 1, False):  # noqa: B007
        for param in model.parameters():
            param.grad = torch.tensor(10.0 * (rank + 1))
        use = "b" if len(texts) == 1 else "a b"
        loss = model(torch.tensor(6.0 * (rank + 1)), use=use, unused_parameters=["b"])
        if len(texts) == 1:
            texts.append(raises_everywhere(loss.backward, FAILURES[kind][0] if rank == 1 else PeerFailedError))
            assert grads_of(model) == [10.0 * (rank + 1)] * 2
        else:
            loss.backward()
            texts.append("")
            assert grads_of(model) == [24.0, 24.0]
    return texts[1]


@pytest.mark.parametrize("kind", list(FAILURES))
def test_a_hook_that_fails_in_the_late_round_fails_the_step_on_all(ranks, kind):
    """Where it does not fail: (10 + 6 + 20 + 12) / 2."""
    peer, own = ranks(2, _failing_late, kind)
    assert "on rank 1 raised" in peer
    assert FAILURES[kind][1] in own


def _on_one_rank(rank: int) -> str:
    plain, model = make()
    if rank == 0:
        model.register_comm_hook(None, averaged)
    text = raises_everywhere(square_loss(model, rank).backward, RanksDifferError)
    if rank == 1:
        model.register_comm_hook(None, averaged)
    step_is_right(plain, model, rank)
    return text


def test_a_hook_on_one_rank_alone_is_an_error_on_all(ranks):
    for text in ranks(2, _on_one_rank):
        assert "communication hooks by rank: ['averaged', '']" in text


# -- together with the rest


def _losses(module: nn.Module, rank: int, step: int) -> Iterator[Tensor]:
    """Unsynchronised calls before the one that averages. Layer 3 is used by none of them."""
    for k in range(2):
        with module.no_sync() if isinstance(module, KnownDDP) else torch.enable_grad():
            yield square_loss(module, rank, 10 * step + k, skip={2, 3}, **declares(module, ["layers.2", "layers.3"]))
    yield square_loss(module, rank, step, skip={1, 3}, **declares(module, ["layers.1", "layers.3"]))


def _accumulating(rank: int, cap: float | None, find: bool) -> int:
    plain, model = make(bucket_cap_mb=cap, find_unused_parameters=find)
    calls = 0

    def hook(_: object, bucket: dist.GradBucket) -> Future[Tensor]:
        nonlocal calls
        calls += 1
        return averaged(None, bucket)

    model.register_comm_hook(None, hook)
    steps_are_right(plain, model, rank, _losses)
    assert calls == model.stats().buckets_launched
    return model.stats().late_rounds


@pytest.mark.parametrize("find", [False, True])
@setups
def test_accumulated_gradients_go_through_the_hook_in_the_step_that_averages(ranks, world_size, cap, find):
    """Layer 1 was declared unused in the last call alone: it is carried, and nothing is late."""
    assert ranks(world_size, _accumulating, cap, find) == [0] * world_size


def _late(rank: int) -> list[Any]:
    _, model = make(lambda: Scales("a", "b"), bucket_cap_mb=1e-6)
    calls: list[tuple[int, float, bool]] = []

    def fivefold(_: object, bucket: dist.GradBucket) -> Future[Tensor]:
        calls.append((bucket.index(), bucket.buffer().item(), bucket.is_last()))
        return averaged(None, bucket).then(lambda future: 5 * future.value())

    model.register_comm_hook(None, fivefold)
    _declaring_wrongly(model)
    for _ in range(2):
        calls.clear()
        model.zero_grad()
        model(torch.tensor(6.0 * (rank + 1)), use="a b", unused_parameters=["b"]).backward()
    return [grads_of(model), *calls]


def test_late_gradients_go_through_the_hook_too(ranks):
    """5 (6 + 12) / 2. a goes first, and is the last one of what was agreed; b is alone in the late round."""
    wanted = [[45.0, 45.0], [(0, 6.0, True), (1, 6.0, True)], [(0, 12.0, True), (1, 12.0, True)]]
    assert ranks(2, _late) == [[wanted[0], *calls] for calls in wanted[1:]]


def _division(rank: int) -> float:
    """2^15 of float16: the sum of two is infinite, and a hook sees the gradients undivided."""
    model = KnownDDP(Scales("a").half())
    seen: list[float] = []

    def hook(_: object, bucket: dist.GradBucket) -> Future[Tensor]:
        seen.append(bucket.buffer().item())
        bucket.buffer().div_(2)
        return averaged(None, bucket).then(lambda future: future.value() * 2)

    model.register_comm_hook(None, hook)
    model(torch.tensor(2.0**15, dtype=torch.float16), use="a").backward()
    assert seen == [2.0**15]
    return model.module.a.grad.item()


def test_nothing_is_divided_for_a_hook(ranks):
    assert ranks(2, _division) == [2.0**15] * 2


# -- life and death


def _dropped(rank: int) -> tuple[bool, bool]:
    """Without and with a state that holds the wrapper."""
    gone = []
    for holds in (False, True):
        _, model = make()
        state: dict[str, Any] = {"model": model} if holds else {}
        model.register_comm_hook(state, averaged)
        square_loss(model, rank).backward()
        watcher = weakref.ref(model)
        gc.disable()
        try:
            del model
            gone.append(watcher() is None)
        finally:
            gc.enable()
        state.clear()
    return gone[0], gone[1]


def test_a_wrapper_with_a_hook_dies_with_its_last_reference(ranks):
    assert ranks(2, _dropped) == [(True, False)] * 2


def _copied(rank: int, by: str) -> list[list[float | None]]:
    _, model = make(lambda: Scales("a"))
    model.register_comm_hook(None, lambda _, bucket: done(5 * bucket.buffer()))
    twin = copy.deepcopy(model) if by == "copy" else pickle.loads(pickle.dumps(model))
    found = []
    for one in (model, twin):
        one(torch.tensor(6.0 * (rank + 1)), use="a").backward()
        found.append(grads_of(one))
    twin.register_comm_hook(None, averaged)
    twin(torch.tensor(0.0), use="a").backward()
    return [*found, grads_of(twin)]


@pytest.mark.parametrize("by", ["copy", "pickle"])
def test_copies_have_no_hook(ranks, by):
    """The hook multiplies by five; without it (6 + 12) / 2, to which a zero is then added."""
    assert ranks(2, _copied, by) == [[[30.0], [9.0], [9.0]], [[60.0], [9.0], [9.0]]]


def _undivided_sum(rank: int) -> list[float]:
    """For hooks of torch's own that ask the reducer to sum."""
    _, model = make(lambda: Scales("a"))

    def hook(state: weakref.ref[KnownDDP], bucket: dist.GradBucket) -> Future[Tensor]:
        return state().reducer._run_allreduce_hook(bucket)  # type: ignore[union-attr]

    model.register_comm_hook(weakref.ref(model), hook)
    model(torch.tensor(6.0 * (rank + 1)), use="a").backward()
    return grads_of(model)


def test_the_reducer_sums_a_bucket_on_request(ranks):
    """6 + 12"""
    assert ranks(2, _undivided_sum) == [[18.0]] * 2


# -- a hook on a group that the backward itself communicates on


class _Exchanges(torch.autograd.Function):
    """The identity; its backward sums the gradient over ranks on the default group, as SyncBatchNorm's does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class _Exchanging(nn.Module):
    """a and b, each behind an exchange; one of them may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(n)) for n in (2, 3))

    def forward(self, x: Tensor, use: str) -> Tensor:
        for name, param in (("a", self.a), ("b", self.b)):
            x = _Exchanges.apply(x * param.sum() if name in use else x)
        return x


def _beside_the_backwards_own_collectives(rank: int, find: bool) -> list[list[list[float] | None]]:
    _, model = make(_Exchanging, bucket_cap_mb=TINY_CAP_MB, find_unused_parameters=find)
    model.register_comm_hook(None, averaged)
    found = []
    for use in ("ab", "ab", "a" if rank == 0 else "b", "b" if rank == 0 else "a"):
        model.zero_grad()
        unused = [] if find else [name for name in "ab" if name not in use]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r".*declared different unused parameters", UserWarning)
            model(torch.ones((), requires_grad=True), use, unused_parameters=unused).backward()
        found.append([None if p.grad is None else p.grad.tolist() for p in model.parameters()])
    return found


@pytest.mark.parametrize("find", [False, True])
def test_a_hook_may_share_a_group_with_the_backward_where_ranks_use_different_layers(ranks, find):
    """x is 1 and the sums of a and b are 2 and 3. Each exchange doubles the gradient 1 of the loss on 2 ranks.

    All used: d a = 3 * 2 * 2 = 12 and d b = 2 * 2 = 4 on both ranks. One used by each: the gradient that comes to a is
    the sum over ranks of 2 * 1 (where b is left out) and 2 * 3 (where it is not), 8 on rank 0; that of b is 2, with x
    unchanged before it. Half of each, from its one user: 4 and 1.
    """
    both, one = [[12.0] * 2, [4.0] * 3], [[4.0] * 2, [1.0] * 3]
    assert ranks(2, _beside_the_backwards_own_collectives, find) == [[both, both, one, one]] * 2
