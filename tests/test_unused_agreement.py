"""What ranks do about declarations that differ: ``unused_agreement`` is "union", "same" or "trust".

Expected gradients come from plain autograd on one process or are worked out in the docstring.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Scales, inputs, make, raises_everywhere
from steps import (
    counted_collectives,
    declares,
    from_all_ranks,
    grads_of,
    setups,
    square_loss,
    step_is_right,
    steps_are_right,
    world_sizes,
)
from torch import Tensor, nn

from knownddp import BrokenTrustError, KnownDDP, RanksDifferError

LAYER_BYTES = 48  # 3 * 3 + 3 floats of 4 bytes

SETS = [{0: {0}, 1: {3}, 2: {0, 3}}, {0: set(), 1: {1, 2}, 2: {1}}, {0: {1}, 1: {1, 2}, 2: {0, 1, 2, 3}}]


def _loss_of(module: nn.Module, rank: int, step: int) -> Tensor:
    """Each rank skips and declares layers of its own."""
    skip = SETS[step % 3][rank]
    x = inputs(rank, 5, 3, seed=step).requires_grad_()
    return module(x, skip=skip, **declares(module, [f"layers.{i}" for i in skip])).square().mean()


# -- union


def _union(rank: int, cap: float | None) -> None:
    plain, model = make(bucket_cap_mb=cap)
    step_is_right(plain, model, rank)
    with pytest.warns(UserWarning, match="ranks declared different unused parameters"):
        step_is_right(plain, model, rank, 0, _loss_of)
    for step in range(1, 6):
        step_is_right(plain, model, rank, step, _loss_of)  # a second warning would be an error


@setups
def test_union_averages_what_any_rank_uses_and_warns_once(ranks, world_size, cap):
    ranks(world_size, _union, cap)


def _union_bytes(rank: int) -> tuple[int, int, int]:
    _, model = make()
    skip = {1, 2} if rank == 0 else {2, 3}
    with pytest.warns(UserWarning, match=r"layers\.1\.weight.*layers\.3\.bias"):
        square_loss(model, rank, skip=skip, unused_parameters=model.module.of(skip)).backward()
    stats = model.stats()
    return stats.bytes_reduced, stats.bytes_skipped, stats.bytes_disputed


@world_sizes
def test_union_counts_what_differing_declarations_cost(ranks, world_size):
    """Rank 0 declares layers 1 and 2, the others 2 and 3: layer 2 is skipped, 1 and 3 are in dispute and sent."""
    assert ranks(world_size, _union_bytes) == [(3 * LAYER_BYTES, LAYER_BYTES, 2 * LAYER_BYTES)] * world_size


def _union_by_hand(rank: int) -> list[float | None]:
    """What stood in ``.grad`` joins the mean where any rank uses the parameter, and stays where none does."""
    _, model = make(lambda: Scales("a", "b", "c"))
    for param in model.parameters():
        param.grad = torch.tensor(60.0 * (rank + 1))
    use, declared = ("a", ["b", "c"]) if rank == 0 else ("a b", ["c"])
    with pytest.warns(UserWarning, match=r"\(b\)"):
        model(torch.tensor(6.0), use=use, unused_parameters=declared).backward()
    return grads_of(model)


def test_union_lets_a_rank_that_declared_contribute_what_stood_in_grad(ranks):
    """a: (66 + 126) / 2; b, not used by rank 0: (60 + 126) / 2; c, used nowhere: 60 and 120."""
    assert ranks(2, _union_by_hand) == [[96.0, 93.0, 60.0], [96.0, 93.0, 120.0]]


def _quiet_union(rank: int) -> None:
    """A rank that declares nothing costs nothing if the others use it all too."""
    plain, model = make()
    for step in range(3):
        step_is_right(plain, model, rank, step)
    model.zero_grad(set_to_none=True)
    square_loss(model, rank, skip={1}, unused_parameters=["layers.1"]).backward()
    assert model.stats().bytes_disputed == 0


def test_equal_declarations_are_not_in_dispute(ranks):
    ranks(2, _quiet_union)


# -- same


def _same_and_equal(rank: int, cap: float | None) -> tuple[int, int]:
    plain, model = make(unused_agreement="same", bucket_cap_mb=cap)

    def loss_of(module: nn.Module, r: int, step: int) -> Tensor:
        skip = SETS[step % 3][1]
        return square_loss(module, r, step, skip=skip, **declares(module, [f"layers.{i}" for i in skip]))

    steps_are_right(plain, model, rank, loss_of, steps=6)
    return model.stats().bytes_reduced, model.stats().bytes_skipped


@setups
def test_same_with_equal_declarations_skips_them(ranks, world_size, cap):
    """Twice 1 + 2 + 2 layers skipped of six times 4."""
    assert ranks(world_size, _same_and_equal, cap) == [(14 * LAYER_BYTES, 10 * LAYER_BYTES)] * world_size


def _same_but_different(rank: int, cap: float | None) -> str:
    plain, model = make(unused_agreement="same", bucket_cap_mb=cap)
    step_is_right(plain, model, rank)
    message = ""
    for step in range(3):
        model.zero_grad(set_to_none=True)
        sent = model.stats().bytes_reduced
        message = raises_everywhere(_loss_of(model, rank, step).backward, RanksDifferError)
        assert model.stats().bytes_reduced == sent
        assert all(p.grad is None for p in model.parameters())
        step_is_right(plain, model, rank, step)
    return message


@setups
def test_same_with_differing_declarations_raises_on_every_rank_and_sends_nothing(ranks, world_size, cap):
    """Last, rank 0 declares layer 1 alone and rank 1 layers 1 and 2."""
    for rank, message in enumerate(ranks(world_size, _same_but_different, cap)):
        assert message.startswith(f"[rank {rank} of {world_size}]")
        assert "rank 0 declared layers.1.weight, layers.1.bias;" in message
        assert "rank 1 declared layers.1.weight, layers.1.bias, layers.2.weight, layers.2.bias" in message


def _same_declared_used_differently(rank: int) -> int:
    """What is compared is what was said. A layer that only rank 1 uses is averaged as ever."""
    plain, model = make(unused_agreement="same")

    def loss_of(module: nn.Module, r: int, step: int) -> Tensor:
        return square_loss(module, r, step, skip={1, 2} if r == 0 else {1}, **declares(module, ["layers.1"]))

    steps_are_right(plain, model, rank, loss_of)
    return model.stats().bytes_skipped


@world_sizes
def test_same_compares_declarations_not_use(ranks, world_size):
    assert ranks(world_size, _same_declared_used_differently) == [3 * LAYER_BYTES] * world_size


def _same_over_two_calls(rank: int) -> list[float | None]:
    """Rank 0 declares another parameter in each call, so none for the backward of both; rank 1 declares none at all."""
    _, model = make(lambda: Scales("a", "b", "c"), unused_agreement="same")
    for _ in range(2):
        model.zero_grad()
        x = torch.tensor(6.0 * (rank + 1))
        one = model(x, use="a b", unused_parameters=["c"] if rank == 0 else [])
        two = model(x, use="a c", unused_parameters=["b"] if rank == 0 else [])
        (one + two).backward()
    return grads_of(model)


def test_same_compares_what_all_calls_of_a_backward_declared(ranks):
    """x is 6 and 12. a, in both calls: (12 + 24) / 2; b and c, in one each: (6 + 12) / 2."""
    assert ranks(2, _same_over_two_calls) == [[18.0, 9.0, 9.0]] * 2


class _Closure(Scales):
    def forward(self, x: Tensor, use: str) -> Any:  # type: ignore[override]
        total = super().forward(x, use)
        return lambda: total


def _same_with_hidden_output(rank: int) -> list[float | None]:
    _, model = make(lambda: _Closure("a", "b"), unused_agreement="same")
    x = torch.tensor(6.0 * (rank + 1))
    output = model(x, use="a b", unused_parameters=["b"] if rank == 0 else [])
    raises_everywhere(output().backward, RanksDifferError)
    assert grads_of(model) == [None, None]
    model(x, use="a b")().backward()
    return grads_of(model)


def test_same_raises_on_every_rank_also_when_the_output_is_hidden(ranks):
    """The step after it: x is 6 and 12, (6 + 12) / 2."""
    assert ranks(2, _same_with_hidden_output) == [[9.0, 9.0]] * 2


# -- trust


def _trust(rank: int, cap: float | None) -> tuple[int, int]:
    plain, model = make(unused_agreement="trust", bucket_cap_mb=cap)

    def loss_of(module: nn.Module, r: int, step: int) -> Tensor:
        skip = SETS[step % 3][1]
        return square_loss(module, r, step, skip=skip, **declares(module, [f"layers.{i}" for i in skip]))

    steps_are_right(plain, model, rank, loss_of, steps=6)
    return model.stats().bytes_reduced, model.stats().bytes_skipped


@setups
def test_trust_with_right_declarations_skips_them(ranks, world_size, cap):
    """Twice 1 + 2 + 2 layers skipped of six times 4."""
    assert ranks(world_size, _trust, cap) == [(14 * LAYER_BYTES, 10 * LAYER_BYTES)] * world_size


def _messages(rank: int, agreement: str) -> list[str]:
    """What the third step calls: the first two learn the order."""
    plain, model = make(unused_agreement=agreement)
    steps_are_right(plain, model, rank, steps=2)
    with counted_collectives() as called:
        square_loss(model, rank, skip={1}, unused_parameters=["layers.1"]).backward()
    return called


@pytest.mark.parametrize(("agreement", "count"), [("trust", 1), ("union", 3)])
def test_trust_sends_its_buckets_and_no_message(ranks, agreement, count):
    """One bucket holds all; "union" opens and closes with a message more each. Two ranks send each other all that."""
    assert ranks(2, _messages, agreement) == [["all_to_all_single"] * count] * 2


def _broken_trust(rank: int, cap: float | None) -> list[list[float | None]]:
    _, model = make(lambda: Scales("a", "b", "c"), unused_agreement="trust", bucket_cap_mb=cap)
    x = torch.tensor(6.0 * (rank + 1))
    found = []
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        loss = model(x, use="a b" if rank == 1 else "a", unused_parameters=["b", "c"])
        if rank == 1:
            message = raises_everywhere(loss.backward, BrokenTrustError)
            assert message.startswith(f"[rank 1 of {dist.get_world_size()}]") and "not to have: b." in message
        else:
            loss.backward()
        found.append(grads_of(model))
        model.zero_grad(set_to_none=True)
        model(x, use="a b c").backward()
        found.append(grads_of(model))
    return found


@pytest.mark.parametrize("cap", [None, 1e-5])
def test_broken_trust_raises_where_it_was_broken_and_averages_all_else(ranks, cap):
    """x is 6 and 12. a: (6 + 12) / 2 on both; b, declared by both but used by rank 1: its own 12, there alone."""
    everything = [9.0, 9.0, 9.0]
    assert ranks(2, _broken_trust, cap) == [
        [[9.0, None, None], everything] * 2,
        [[9.0, 12.0, None], everything] * 2,
    ]


def _trust_joins_old_gradients(rank: int) -> list[float | None]:
    """A gradient that nobody expected is added to what stood there, on its rank alone."""
    _, model = make(lambda: Scales("a", "b"), unused_agreement="trust")
    for param in model.parameters():
        param.grad = torch.tensor(60.0)
    loss = model(torch.tensor(6.0), use="a b" if rank == 1 else "a", unused_parameters=["b"])
    if rank == 1:
        raises_everywhere(loss.backward, BrokenTrustError)
    else:
        loss.backward()
    return grads_of(model)


def test_broken_trust_adds_to_what_stood_in_grad(ranks):
    """a: 60 + 6 on both; b: 60 stays on rank 0 and is 60 + 6 on rank 1."""
    assert ranks(2, _trust_joins_old_gradients) == [[66.0, 60.0], [66.0, 66.0]]


@world_sizes
@pytest.mark.parametrize("agreement", ["union", "same", "trust"])
def test_replicas_stay_equal_to_the_last_bit(ranks, world_size, agreement):
    ranks(world_size, _bitwise, agreement)


def _bitwise(rank: int, agreement: str) -> None:
    _, model = make(unused_agreement=agreement)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(4):
        skip = {step, 1}
        optimizer.zero_grad()
        _loss(model, rank, step, skip).backward()
        optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert all(torch.equal(weights, other) for other in from_all_ranks(weights))


def _loss(model: KnownDDP, rank: int, step: int, skip: set[int]) -> Tensor:
    return square_loss(model, rank, step, skip=skip, unused_parameters=model.module.of(skip))
