"""What travels: collectives and bytes, counted by a fake that records, by torch's own counter, and on a real link."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fakes import RecordingCollectives
from models import Skippable, inputs, make
from torch.distributed.tensor.debug import CommDebugMode

import knownddp.ddp
from knownddp import KnownDDP
from knownddp.comm import Collectives
from knownddp.protocol import HEADER_BYTES

# Skippable(depth=8, width=16): a layer has 16 x 16 + 16 = 272 floats, 1,088 bytes, in 2 parameters.
DEPTH, WIDTH = 8, 16
LAYER_BYTES = (16 * 16 + 16) * 4
HALF = (0, 2, 5, 7)


# -- the seam: fake and real behave alike


def check_collectives(make_collectives: Any) -> None:
    """What the reducer relies on, when every rank passes the same."""
    comm = make_collectives()
    world = comm.world_size
    data = torch.tensor([1.0, 2.0])
    comm.all_reduce_sum(data).wait()
    assert data.tolist() == [1.0 * world, 2.0 * world]
    work = comm.combine_or(bytes([5, 0, 255]))
    work.get_future().wait()
    assert work.wait() == bytes([5, 0, 255]) and work.is_completed()
    order = torch.tensor([-1, 7])
    comm.combine_max(order).wait()
    assert order.tolist() == [-1, 7]
    comm.broadcast(data).wait()
    assert data.tolist() == [1.0 * world, 2.0 * world]
    assert comm.gather_objects({"a": 1}) == [{"a": 1}] * world
    comm.retire()


def _check_real(_: int, own_group: bool) -> None:
    check_collectives(lambda: Collectives(dist.group.WORLD, own_group=own_group))


@pytest.mark.parametrize("own_group", [True, False])
def test_the_real_collectives_behave_as_the_reducer_relies_on(ranks, own_group):
    ranks(2, _check_real, own_group)


def test_the_fake_behaves_like_the_real_ones():
    check_collectives(lambda: RecordingCollectives(world_size=3))


# -- counted by the fake


@pytest.fixture
def fake(monkeypatch):
    """A KnownDDP made in the test issues its collectives here."""
    comm = RecordingCollectives(world_size=4)
    monkeypatch.setattr(knownddp.ddp, "collectives_over", lambda *_, **__: comm)
    monkeypatch.setattr(knownddp.ddp, "choose_group", lambda module, group, *_: group)
    return comm


def _step(model: KnownDDP, skip: tuple[int, ...], **kwargs: Any) -> None:
    model.zero_grad(set_to_none=True)
    model(inputs(0, 4, WIDTH), skip=skip, **kwargs).square().mean().backward()


@pytest.mark.parametrize("find", [False, True])
@pytest.mark.parametrize("cap_mb", [None, 1e-5])
def test_only_the_used_layers_travel(fake, find, cap_mb):
    """4 of 8 layers: 4 x 1,088 bytes; in one bucket, or one a parameter (2 a layer). Beside it OPEN and CLOSE."""
    _, model = make(lambda: Skippable(DEPTH, WIDTH), find_unused_parameters=find, bucket_cap_mb=cap_mb)
    for _ in range(3):  # the first backward learns the order: one more message
        fake.log.clear()
        _step(model, HALF, **({} if find else {"unused_parameters": model.module.of(HALF)}))
    assert sum(fake.bytes_of("all_reduce_sum")) == 4 * LAYER_BYTES
    assert len(fake.bytes_of("all_reduce_sum")) == (1 if cap_mb is None else 8)
    assert fake.bytes_of("combine_or") == [HEADER_BYTES + 2 * DEPTH] * 2
    assert {kind for kind, _ in fake.log} == {"all_reduce_sum", "combine_or"}


def test_a_forward_sends_nothing(fake):
    _, model = make(lambda: Skippable(DEPTH, WIDTH))
    fake.log.clear()
    output = model(inputs(0, 4, WIDTH), unused_parameters=["layers.1"], skip=(1,))
    with torch.no_grad():
        model(inputs(0, 4, WIDTH))
    with model.no_sync():
        model(inputs(0, 4, WIDTH)).sum().backward()
    assert fake.log == []
    output.sum().backward()
    assert fake.log != []


def test_trust_sends_no_messages(fake):
    _, model = make(lambda: Skippable(DEPTH, WIDTH), unused_agreement="trust")
    _step(model, HALF, unused_parameters=model.module.of(HALF))
    fake.log.clear()
    _step(model, HALF, unused_parameters=model.module.of(HALF))
    assert fake.log == [("all_reduce_sum", 4 * LAYER_BYTES)]


def test_buckets_are_launched_before_the_backward_ends_and_in_plan_order(fake):
    """One parameter a bucket: when the first layer's gradient arrives, those of the layers behind it have been sent."""
    _, model = make(lambda: Skippable(DEPTH, WIDTH), bucket_cap_mb=1e-5)
    _step(model, ())
    fake.log.clear()
    seen: list[int] = []
    handle = model.module.layers[0].weight.register_hook(lambda _: seen.append(len(fake.bytes_of("all_reduce_sum"))))
    _step(model, ())
    handle.remove()
    assert seen[0] >= 2 * (DEPTH - 1)
    # A layer's bias (64 bytes) and weight (1,024) arrive together; which is first was learnt and stays.
    sizes = fake.bytes_of("all_reduce_sum")
    assert sizes == sizes[:2] * DEPTH
    assert sorted(sizes[:2]) == [WIDTH * 4, WIDTH * WIDTH * 4]


def test_what_nobody_declares_costs_nothing_more(fake):
    """Everything used: all 8 layers in one bucket."""
    _, model = make(lambda: Skippable(DEPTH, WIDTH))
    _step(model, ())
    fake.log.clear()
    _step(model, ())
    assert fake.bytes_of("all_reduce_sum") == [DEPTH * LAYER_BYTES]
    stats = model.stats()
    assert (stats.bytes_reduced, stats.bytes_skipped) == (2 * DEPTH * LAYER_BYTES, 0)


def test_an_undeclared_layer_is_sent_as_zeros_and_left_without_a_gradient(fake):
    _, model = make(lambda: Skippable(DEPTH, WIDTH))
    _step(model, ())
    fake.log.clear()
    _step(model, (3,))
    assert sum(fake.bytes_of("all_reduce_sum")) == DEPTH * LAYER_BYTES
    assert model.module.layers[3].weight.grad is None


# -- counted by torch on real groups


def _count_collectives(rank: int, declared: bool) -> list[int]:
    """all-reduces a step: everything used, then half skipped."""
    _, model = make(lambda: Skippable(DEPTH, WIDTH), bucket_cap_mb=1e-5, find_unused_parameters=not declared)
    counts = []
    for skip in ((), (), HALF):
        model.zero_grad(set_to_none=True)
        with CommDebugMode() as counter:
            unused = model.module.of(skip) if declared else ()
            x = inputs(rank, 4, WIDTH).requires_grad_()  # else the counter's own module hooks warn
            model(x, skip=skip, unused_parameters=unused).sum().backward()
        counts.append(counter.get_total_counts())
    return counts


@pytest.mark.parametrize("declared", [True, False])
def test_collectives_of_real_ranks(ranks, declared):
    """16 parameters, one a bucket: 16 + OPEN + CLOSE (+ the order, once); with half the layers skipped 8 + 2."""
    assert ranks(3, _count_collectives, declared) == [[19, 18, 10]] * 3


# -- memory


def test_skipped_layers_get_no_gradient_memory(fake):
    """A skipped layer's ``.grad`` is never made, and no bucket holds room for it: 7 of 8 layers are in memory."""
    _, model = make(lambda: Skippable(DEPTH, WIDTH))
    for _ in range(2):
        _step(model, (3,), unused_parameters=["layers.3"])
    assert model.module.layers[3].weight.grad is None
    storages = [p.grad.untyped_storage() for p in model.parameters() if p.grad is not None]
    assert sum({s.data_ptr(): s.nbytes() for s in storages}.values()) == (DEPTH - 1) * LAYER_BYTES
