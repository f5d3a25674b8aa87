"""Gradients that hooks count by themselves: the machine must not be able to tell."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st
from machines import combine, flags, machine
from strategies import examples, limits, specs_and_order
from torch import nn

from knownddp.countdown import Countdown
from knownddp.nodes import GradientNodes
from knownddp.plan import NOT_PLACED
from knownddp.protocol import WindowProtocol


def test_it_counts_what_leaves_its_bucket_waiting():
    """Buckets 0 and 1 wait for three and one; parameter 4 is in none."""
    countdown = Countdown(5)
    assert not any(countdown.counts(i) for i in range(5))  # no window is open
    countdown.slots[:], countdown.left[:] = [0, 0, 0, 1, NOT_PLACED], [3, 1]
    assert countdown.counts(0) and countdown.left == [2, 1]
    assert not countdown.counts(0)  # a second time
    assert not countdown.counts(3) and not countdown.counts(4)  # it fills its bucket; it has none
    assert countdown.counts(2) and countdown.left == [1, 1]
    assert not countdown.counts(1)  # the last one
    assert list(countdown.fired) == [1, 0, 1, 0, 0]
    countdown.stop()
    assert not any(countdown.counts(i) for i in range(5))
    countdown.reset()
    assert list(countdown.fired) == [0] * 5
    countdown.count_all()  # of each parameter once
    assert all(countdown.counts(i) for i in (3, 0, 4, 1, 2)) and not any(countdown.counts(i) for i in range(5))
    assert list(countdown.fired) == [1] * 5


def _run(
    rank: WindowProtocol, expected: bytes, opening: bytes, fires: Sequence[int], early: int, *, counts: bool
) -> object:
    """All that the machine says in one window."""
    rank.begin(expected)
    said: list[object] = []
    for place, i in enumerate(fires):
        if place == early:
            said.append(rank.opened(opening))
        said.append(range(0) if counts and rank.countdown.counts(i) else rank.ready(i))
        said.append(rank.wants_opening)
    if early == len(fires):
        said.append(rank.opened(opening))
    said = [list(one) if isinstance(one, range) else one for one in said]
    said += [list(rank.end()), rank.fired(), rank.has_fired]
    message = rank.close(expected)
    return said, message, rank.closed(message)


@examples(300)
@given(specs_and_order, limits, st.booleans(), st.data())
def test_the_machine_cannot_tell_whether_gradients_were_counted_or_told(specs_and_order, caps, has_learnt, data):
    specs, order = specs_and_order
    n = len(specs)
    some = st.sets(st.integers(0, n - 1))
    mine, theirs = (flags(data.draw(some), n) for _ in range(2))
    fires = data.draw(st.lists(st.integers(0, n - 1), max_size=2 * n))
    early = data.draw(st.integers(0, len(fires)))
    told, counted, peer, myself = (machine(specs, caps, order=order if has_learnt else None) for _ in range(4))
    given_to_both = mine, combine([peer.begin(theirs), myself.begin(mine)]), fires, early
    assert _run(told, *given_to_both, counts=False) == _run(counted, *given_to_both, counts=True)


@examples(100)
@given(st.data())
def test_hooks_count_as_the_countdown_does(data):
    """Backwards through some parameters, in the order of a chain; what the hook does not count it reports."""
    n = data.draw(st.integers(1, 6))
    slots = data.draw(st.lists(st.integers(-1, 1), min_size=n, max_size=n))
    left = [max(1, slots.count(bucket)) for bucket in range(2)]
    params = [nn.Parameter(torch.ones(())) for _ in range(n)]
    by_hook, by_hand = Countdown(n), Countdown(n)
    for countdown in (by_hook, by_hand):
        countdown.slots[:], countdown.left[:] = slots, left

    class Reports:
        def __init__(self) -> None:
            self.seen: list[tuple[int, bool]] = []

        def on_ready(self, param_index: int, grad: torch.Tensor | None) -> None:
            self.seen.append((param_index, grad is None))

    reports = Reports()
    nodes = GradientNodes(n, reports.on_ready, by_hook)
    nodes.hook(params, [True] * n)
    wanted = []
    for _ in range(2):
        used = data.draw(st.permutations(range(n)))
        total = torch.ones(())
        for i in used:
            total = total * params[i]
        total.backward()
        wanted += [(i, False) for i in reversed(used) if not by_hand.counts(i)]
    assert reports.seen == wanted
    assert (by_hook.slots, by_hook.left, by_hook.fired) == (by_hand.slots, by_hand.left, by_hand.fired)


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> None:
        return None


def test_an_undefined_gradient_is_not_counted():
    param = nn.Parameter(torch.ones(()))
    countdown = Countdown(1)
    countdown.slots[:], countdown.left[:] = [0], [2]
    seen: list[tuple[int, torch.Tensor | None]] = []

    class Reports:
        def on_ready(self, param_index: int, grad: torch.Tensor | None) -> None:
            seen.append((param_index, grad))

    reports = Reports()
    nodes = GradientNodes(1, reports.on_ready, countdown)
    nodes.hook([param], [True])
    _Nothing.apply(param).backward()
    assert seen == [(0, None)] and countdown.left == [2] and not countdown.fired[0]


def test_a_guess_that_was_wrong_counts_each_arrival_once():
    """Nothing is learnt yet; this rank expects three of four, a peer all: what came before OPEN is counted anew."""
    mine, peer = machine(order=None), machine(order=None)
    opening = combine([mine.begin(flags([0, 1, 2])), peer.begin(flags(range(4)))])
    for i in (2, 1, 0):
        assert not mine.ready(i)
    mine.opened(opening)
    positions, counts = mine.order_message()[:4], mine.order_message()[4:]
    assert positions == [2, 1, 0, -1] and counts == [1, 1, 1, 0]
    assert mine.fired() == (flags([0, 1, 2]), ())


def test_a_bucket_that_waits_for_nothing_asks_for_the_agreed_set_at_once():
    """Parameter 0 was touched before and is not expected now: its bucket could go as the backward begins."""
    rank, peer = machine(), machine()
    opening = combine([rank.begin(flags([1, 2, 3]), carried=[0]), peer.begin(flags([1, 2, 3]))])
    assert rank.wants_opening and not peer.wants_opening
    assert not rank.countdown.counts(1)  # each gradient is an occasion to look
    assert list(rank.opened(opening).launch) == [0]
    assert not rank.wants_opening
