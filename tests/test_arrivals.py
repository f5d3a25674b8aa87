"""Gradients that are only written down: nobody must be able to tell, and no hook must be missed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from machines import combine, flags, machine
from models import Withholds
from strategies import examples, limits, specs_and_order
from torch import Tensor, nn

from knownddp.arrivals import Arrivals
from knownddp.nodes import GradientNodes
from knownddp.plan import EAGER_BYTES
from knownddp.protocol import ENDLESS, LOOK_EVERY, WindowProtocol


class _Reports:
    """What hooks report: the names of what came, and of which gradient they were told, if of any."""

    def __init__(self, params: Sequence[nn.Parameter], arrivals: Arrivals, patience: Callable[[], int]) -> None:
        self.params, self.arrivals, self.patience = list(params), arrivals, patience
        self.seen: list[tuple[str, list[int], bool]] = []

    def _index(self, param: Tensor) -> int:
        return next(i for i, one in enumerate(self.params) if one is param)

    def on_arrivals(self, newest: Tensor, grad: Tensor | None) -> None:
        came = [self._index(param) for param in self.arrivals.take()]
        assert came[-1] == self._index(newest)
        self.seen.append(("small", came, grad is not None))
        self.arrivals.wait_for(self.patience())

    def on_settled(self, param: Tensor, grad: Tensor | None) -> None:
        self.seen.append(("settled", [*map(self._index, self.arrivals.take()), self._index(param)], grad is not None))
        self.arrivals.wait_for(self.patience())

    def on_undefined(self, param: Tensor) -> None:
        self.seen.append(("undefined", [self._index(param)], False))


def _hooked(params: Sequence[nn.Parameter], patience: Callable[[], int], *, hears_all: bool = False) -> tuple[Any, Any]:
    arrivals = Arrivals()
    reports = _Reports(params, arrivals, patience)
    nodes = GradientNodes(len(params), arrivals, reports.on_arrivals, reports.on_settled, reports.on_undefined)
    if hears_all:
        nodes.hear(None)
    nodes.hook(params, [True] * len(params))
    arrivals.wait_for(patience())
    return nodes, reports


def _product(params: Sequence[nn.Parameter]) -> Tensor:
    """Its gradients come last first."""
    total = torch.ones(())
    for param in params:
        total = total * param.sum()
    return total


@pytest.mark.parametrize("hears_all", [False, True])
def test_hooks_write_down_and_report_when_it_is_time(hears_all):
    """Seven small ones, of which three are to come each time; then a large one, which is reported with those before."""
    params = [nn.Parameter(torch.ones(1)) for _ in range(7)]
    large = nn.Parameter(torch.ones(EAGER_BYTES // 4))
    nodes, reports = _hooked([*params, large], lambda: 3, hears_all=hears_all)
    _product([large, *params]).backward()
    assert reports.seen == [
        ("small", [6, 5, 4], hears_all),
        ("small", [3, 2, 1], hears_all),
        ("settled", [0, 7], True),
    ]
    assert nodes is not None


@pytest.mark.parametrize("hears_all", [False, True])
def test_an_undefined_gradient_is_not_written_down(hears_all):
    params = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    nodes, reports = _hooked(params, lambda: 1, hears_all=hears_all)
    (Withholds.apply(params[0]) + params[1]).backward()
    assert sorted(reports.seen) == [("small", [1], hears_all), ("undefined", [0], False)]
    assert nodes is not None


def test_a_gradient_that_a_hook_took_is_not_an_undefined_one():
    """The hook was there before: only one on the node knows that something came. It is looked at at once."""
    param = nn.Parameter(torch.ones(1))

    def take(param: Tensor) -> None:
        param.grad = None

    param.register_post_accumulate_grad_hook(take)
    nodes, reports = _hooked([param], lambda: 1)
    param.sum().backward()
    assert reports.seen == [("settled", [0], True)]
    assert nodes is not None


def test_hooks_go_with_whom_they_report_to():
    """Parameters outlive wrappers: nothing may be written down for one that is gone."""
    param = nn.Parameter(torch.ones(1))
    nodes, reports = _hooked([param], lambda: 1)
    assert len(param._post_accumulate_grad_hooks) == 1
    del nodes
    gc.collect()
    assert not param._post_accumulate_grad_hooks
    param.sum().backward()
    assert not reports.seen


def _run(
    rank: WindowProtocol, expected: bytes, opening: bytes, fires: Sequence[int], early: int, *, waits: bool
) -> object:
    """All that the machine says in one window, in which each gradient is settled as it comes."""
    params = [torch.empty(0) for _ in expected]
    index_of = {id(param): i for i, param in enumerate(params)}
    arrivals = Arrivals()

    def look(newest: Sequence[int], *, opens: bool) -> list[int]:
        came = [*(index_of[id(param)] for param in arrivals.take()), *newest]
        found = [*rank.ready(*came)] if came else []
        if opens:
            found += rank.opened(opening).launch
        arrivals.wait_for(rank.patience)
        return found

    rank.begin(expected)
    arrivals.wait_for(rank.patience)
    launched: list[list[int]] = []
    for place, i in enumerate(fires):
        found = look([], opens=True) if place == early else []
        if not waits or not arrivals.notes(params[i]):
            found += look([i], opens=False)
        launched.append(found)
    launched.append(look([], opens=early == len(fires)))
    said = [launched, list(rank.end()), rank.fired(), rank.late(), rank.has_fired]
    message = rank.close(expected)
    return said, message, rank.closed(message), rank.order_message()


@examples(300)
@given(specs_and_order, limits, st.booleans(), st.data())
def test_the_machine_cannot_tell_whether_gradients_were_written_down_or_told(specs_and_order, caps, has_learnt, data):
    """Each bucket goes at the same gradient, in whatever order they come."""
    specs, order = specs_and_order
    n = len(specs)
    some = st.sets(st.integers(0, n - 1))
    mine, theirs = (flags(data.draw(some), n) for _ in range(2))
    fires = data.draw(st.lists(st.integers(0, n - 1), max_size=2 * n))
    early = data.draw(st.integers(0, len(fires)))
    told, patient, peer, myself = (machine(specs, caps, order=order if has_learnt else None) for _ in range(4))
    given_to_both = mine, combine([peer.begin(theirs), myself.begin(mine)]), fires, early
    assert _run(told, *given_to_both, waits=False) == _run(patient, *given_to_both, waits=True)


def test_a_bucket_stays_while_its_last_gradient_may_change():
    """Buckets (0, 1) and (2, 3): the first goes with the gradient after that which fills it, the second at the end."""
    rank = machine(caps=[8])
    assert [bucket.param_indices for bucket in rank.planner.plan(flags(range(4))).buckets] == [(0, 1), (2, 3)]
    opening = rank.begin(flags(range(4)))
    rank.opened(opening)
    assert rank.patience == 3
    assert [list(rank.ready(0, 1, is_over=False)), rank.patience] == [[], 1]
    assert [list(rank.ready(2, is_over=False)), rank.patience] == [[0], 2]
    assert [list(rank.ready(3, is_over=False)), rank.patience] == [[], 1]
    assert list(rank.end()) == [1]


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
    assert rank.patience == LOOK_EVERY
    assert list(rank.opened(opening).launch) == [0]
    assert not rank.wants_opening


def test_nothing_is_looked_at_where_nothing_can_go():
    """Before an order is known all buckets are held."""
    rank = machine(order=None)
    rank.opened(rank.begin(flags(range(4))))
    assert rank.patience == ENDLESS
