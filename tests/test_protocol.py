"""The protocol alone: order of calls, agreement, late and carried gradients, promises, faults, the first window.

Unless a test says otherwise there are four parameters of one float, each its own bucket, launched in definition order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import ALL, N, Part, closing, combine, flags, group, machine, window
from strategies import examples, limits, specs_and_order

from knownddp.errors import InternalError
from knownddp.outcomes import Closing, Fault, Opening
from knownddp.protocol import HEADER_BYTES, NEXT, Agreement, Phase, WindowProtocol


def assert_next_window_works(ranks: Sequence[WindowProtocol]) -> None:
    """All fire everything: four buckets, all touched, nothing late."""
    for outcome in window(ranks, [Part()] * len(ranks)):
        assert outcome.launched == [0, 1, 2, 3]
        assert outcome.closing == Closing(None, flags(ALL))


# -- the order of calls


def good(kind: str) -> bytes:
    """A combined message without a fault, of window 0."""
    rank = machine()
    opening = rank.begin(flags(ALL))
    if kind == "OPEN":
        return opening
    rank.opened(opening)
    rank.end()
    return rank.close(flags(ALL))


CALLS: dict[str, Callable[[WindowProtocol], object]] = {
    "begin": lambda rank: rank.begin(flags(ALL)),
    "opened": lambda rank: rank.opened(good("OPEN")),
    "end": lambda rank: rank.end(),
    "closed": lambda rank: rank.closed(good("CLOSE")),
    "settled": lambda rank: rank.settled(),
}
ROUTE = [
    (Phase.IDLE, "begin"),
    (Phase.OPENING, "opened"),
    (Phase.REDUCING, "end"),
    (Phase.CLOSING, "closed"),
    (Phase.SETTLING, "settled"),
]


def at(phase: Phase) -> WindowProtocol:
    rank = machine()
    for here, call in ROUTE:
        if here is phase:
            break
        CALLS[call](rank)
    return rank


def test_a_window_goes_through_the_phases_in_order():
    rank = machine()
    for phase, call in ROUTE:
        assert rank.phase is phase
        CALLS[call](rank)
    assert rank.phase is Phase.IDLE and rank.window == 1


WRONG = [(phase, call) for phase, right in ROUTE for call in CALLS if call != right]


@pytest.mark.parametrize(("phase", "call"), WRONG)
def test_a_call_out_of_order_is_an_internal_error(phase, call):
    rank = at(phase)
    with pytest.raises(InternalError, match=f"cannot go from {phase.name}"):
        CALLS[call](rank)


@pytest.mark.parametrize("call", CALLS)
def test_nothing_leads_out_of_broken(call):
    rank = at(Phase.REDUCING)
    rank.break_off()
    assert NEXT[Phase.BROKEN] == set()
    with pytest.raises(InternalError, match="cannot go from BROKEN"):
        CALLS[call](rank)
    assert rank.phase is Phase.BROKEN


def test_open_and_close_have_one_size():
    assert len(good("OPEN")) == len(good("CLOSE")) == HEADER_BYTES + N == 15


# -- launch order


@examples(300)
@given(specs_and_order, limits, st.data())
def test_launch_order_never_depends_on_arrival_order(specs_and_order, caps, data):
    specs, order = specs_and_order
    n = len(specs)
    arrival = data.draw(st.permutations(range(n)))
    rank = machine(specs, caps, order=order)
    part = Part(expected=range(n), fires=arrival, opens_after=data.draw(st.integers(0, n)))

    (outcome,) = window([rank], [part])

    assert outcome.launched == list(range(len(outcome.plan.buckets)))
    assert outcome.early == len(outcome.launched)


@examples(300)
@given(specs_and_order, limits, st.data())
def test_a_bucket_goes_as_soon_as_what_this_rank_expects_of_it_and_of_all_before_it_fired(specs_and_order, caps, data):
    """A peer expects all parameters. This one expects some, and others may fire all the same."""
    specs, order = specs_and_order
    n = len(specs)
    some = st.sets(st.sampled_from(range(n)))
    rank, peer = (machine(specs, caps, order=order) for _ in range(2))
    rank.planner.hold(data.draw(some))
    expected, fired = data.draw(some), set()
    launched = list(rank.opened(combine([rank.begin(flags(expected, n)), peer.begin(flags(range(n), n))])).launch)
    for i in (None, *data.draw(st.permutations(range(n)))):
        if i is not None:
            launched += rank.ready(i)
            fired.add(i)
        may_go = [fired >= expected.intersection(b.param_indices) and not b.is_held for b in rank.plan.buckets]
        assert launched == list(range((*may_go, False).index(False)))


def test_held_buckets_and_unfilled_ones_go_when_the_backward_is_over():
    """Bucket 1 never fills, so bucket 2, though full, waits behind it; 0 is held and planned last."""
    (rank,) = group(1)
    rank.planner.hold([0])
    (outcome,) = window([rank], [Part(fires=[0, 1, 3])])
    assert [b.param_indices for b in outcome.plan.buckets] == [(1,), (2,), (3,), (0,)]
    assert outcome.launched == [0, 1, 2, 3] and outcome.early == 1


def test_a_rank_does_not_wait_for_what_it_does_not_expect_itself():
    """Rank 1 expects only 3: its buckets 0 to 2 go at once."""
    first, second = window(group(), [Part(declared=[3], expected=[0, 1, 2]), Part(declared=[0, 1, 2], expected=[3])])
    assert first.opening.launch == range(0) and second.opening.launch == range(3)
    assert first.launched == second.launched == [0, 1, 2, 3]


def test_in_program_order_nothing_is_launched_early_where_ranks_expect_different_gradients():
    """Of the same parts rank 1 would launch buckets 0 to 2 at once, and rank 0 as its gradients come."""
    ranks = group()
    for one in ranks:
        one.in_program_order = True
    for outcome in window(ranks, [Part(declared=[3], expected=[0, 1, 2]), Part(declared=[0, 1, 2], expected=[3])]):
        assert (outcome.opening.launch, outcome.early) == (range(0), 0)
        assert outcome.launched == [0, 1, 2, 3]


def test_in_program_order_buckets_go_as_they_fill_where_ranks_expect_the_same():
    ranks = group()
    for one in ranks:
        one.in_program_order = True
    for outcome in window(ranks, [Part(expected=[0, 1], declared=[2, 3])] * 2):
        assert (outcome.launched, outcome.early) == ([0, 1], 2)


# -- agreement


def test_union_skips_what_every_rank_declared():
    """Rank 0 declares 1 and 2, rank 1 declares 2 and 3: 1 and 3 are in dispute, only 2 is skipped."""
    parts = [Part([0, 3], declared=[1, 2]), Part([0, 1], declared=[2, 3])]
    for outcome in window(group(), parts):
        assert outcome.opening.fault is None
        assert outcome.opening.disputed == (1, 3)
        assert outcome.plan.members == (0, 1, 3)
        assert outcome.closing == Closing(None, flags([0, 1, 3]))


def test_same_refuses_declarations_that_differ_and_names_them():
    ranks = group(3, Agreement.SAME)
    outcomes = window(
        ranks, [Part([0, 2, 3], declared=[1]), Part([0, 3], declared=[1, 2]), Part([0, 2, 3], declared=[1])]
    )
    assert [o.opening for o in outcomes] == [Opening(Fault.DECLARATIONS, disputed=(2,))] * 3
    assert [o.launched for o in outcomes] == [[]] * 3
    assert_next_window_works(ranks)


def test_same_compares_declarations_not_what_is_expected():
    """Both declare 3; 2 is frozen on rank 1 alone."""
    ranks = group(2, Agreement.SAME)
    outcome, _ = window(ranks, [Part([0, 1, 2], declared=[3]), Part([0, 1], declared=[3])])
    assert outcome.opening.fault is None and outcome.plan.members == (0, 1, 2)


def test_trust_sends_no_message_and_takes_this_ranks_word():
    rank = machine(agreement=Agreement.TRUST)
    assert rank.opened(rank.begin(flags([0, 2]))).launch == range(0) and rank.plan.members == (0, 2)
    assert [list(rank.ready(i)) for i in (2, 0)] == [[], [0, 1]]
    assert rank.end() == range(2, 2)
    assert rank.closed(rank.close(flags([0, 2]))) == Closing(None, flags([0, 2]))


def test_trust_launches_a_bucket_that_is_only_carried():
    """0 is in a bucket of its own, which waits for nothing; 1 fires and goes after it."""
    rank = machine(agreement=Agreement.TRUST)
    opening = rank.begin(flags([1]), carried=[0])
    assert [*rank.opened(opening).launch, *rank.ready(1), *rank.end()] == [0, 1]


def test_gradients_that_come_before_the_opening_is_known_are_in_time():
    """0 fires twice, and 0 is declared by a rank that uses it all the same: both before any bucket could leave."""
    assert closing(group(), Part(), Part(fires=[0, 0, 1, 2, 3], opens_after=2)).late == ()
    assert closing(group(), Part(), Part([1, 2, 3], fires=ALL, declared=[0], opens_after=1)).late == ()


@pytest.mark.parametrize(
    ("fires", "late"), [pytest.param([0, 1, 2], (1,), id="declared"), pytest.param([0, 2, 2], (2,), id="twice")]
)
def test_trust_ends_in_an_error_where_a_gradient_was_not_expected(fires, late):
    rank = machine(agreement=Agreement.TRUST)
    rank.opened(rank.begin(flags([0, 2])))
    for i in fires:
        rank.ready(i)
    rank.end()
    told = rank.closed(rank.close(flags([0, 2])))
    assert told.fault is Fault.TRUST and told.late == late


# -- late gradients


def test_declared_but_used_is_late_on_all_ranks():
    """Both declare 1, rank 1 uses it; both learn that it is due in a round of its own."""
    told = closing(group(), Part([0, 2, 3], declared=[1]), Part([0, 2, 3], fires=[0, 1, 2, 3], declared=[1]))
    assert told.touched == flags(ALL) and told.late == (1,)
    assert [bucket.param_indices for bucket in told.late_plan.buckets] == [(1,)]


def test_a_second_firing_after_launch_is_late_on_all_ranks():
    told = closing(group(), Part(), Part(fires=[0, 0, 1, 2, 3]))
    assert told.touched == flags(ALL) and told.late == (0,)


def test_a_second_firing_before_launch_is_in_time():
    """Order 0, 1, ...: bucket 1 cannot leave before bucket 0, so 1 may still fire twice."""
    assert closing(group(), Part(), Part(fires=[1, 1, 0, 2, 3])) == Closing(None, flags(ALL))


def test_a_second_firing_does_not_make_up_for_a_missing_member():
    """0 and 1 share a bucket; 0 fires twice, 1 never."""
    rank = machine(caps=[8])
    (outcome,) = window([rank], [Part(fires=[0, 0, 2, 3])])
    assert outcome.early == 0 and outcome.closing == Closing(None, flags([0, 2, 3]))


def test_a_parameter_that_fired_twice_is_held_from_then_on():
    ranks = group()
    assert closing(ranks, Part(fires=[0, 0, 1, 2, 3]), Part()).late == (0,)
    assert closing(ranks, Part(fires=[0, 0, 1, 2, 3]), Part()).late == ()


def test_a_wrong_declaration_once_does_not_hold_a_parameter():
    ranks = group()
    assert closing(ranks, Part([0, 2, 3], fires=ALL, declared=[1]), Part([0, 2, 3], declared=[1])).late == (1,)
    assert [rank.planner.held for rank in ranks] == [set(), set()]


def test_with_detection_what_came_late_is_known_to_be_unforeseen_and_held():
    ranks = group(detects_unused=True)
    closing(ranks, Part([0, 2, 3], fires=ALL), Part([0, 2, 3]))
    assert [rank.unforeseen for rank in ranks] == [{1}, {1}]
    assert [rank.planner.held for rank in ranks] == [{1}, {1}]


# -- carried gradients


def test_a_carried_parameter_is_agreed_and_touched_without_firing():
    """Rank 0 carries 1 and nobody expects it: its bucket waits for nobody."""
    ranks = group()
    parts = [Part([0], carried=[1], declared=[1, 2, 3]), Part([0], declared=[1, 2, 3])]
    outcomes = window(ranks, parts)
    for outcome in outcomes:
        assert outcome.plan.members == (0, 1)
        assert outcome.launched == [0, 1] and outcome.early == 2
        assert outcome.closing == Closing(None, flags([0, 1]))


def test_what_is_expected_and_never_fires_is_agreed_but_not_touched():
    assert closing(group(), Part(fires=[0, 2]), Part(fires=[2])) == Closing(None, flags([0, 2]))


# -- what forwards promised


def test_promised_by_any_rank_and_touched_by_none_is_unmet():
    """0 is touched by rank 1; 1 is promised by rank 0 alone; 2 by both; 3 by nobody."""
    ranks = group()
    closing(ranks, Part(fires=[], promised=[0, 1, 2]), Part(fires=[0], promised=[2]))
    assert [rank.unmet() for rank in ranks] == [(1, 2)] * 2


def test_a_second_window_of_the_same_forward_can_keep_the_promise():
    """Two losses: 0 came in the first window, 1 in the second, 2 in neither."""
    ranks = group(1)
    closing(ranks, Part(fires=[0], promised=[0, 1, 2]))
    assert ranks[0].unmet() == (1, 2)
    closing(ranks, Part(fires=[1], promised=[0, 1, 2]))
    assert ranks[0].unmet() == (2,)


def test_a_late_or_carried_gradient_keeps_the_promise():
    ranks = group(1)
    closing(ranks, Part([0], fires=[0, 1], carried=[2], promised=[1, 2, 3]))
    assert ranks[0].unmet() == (3,)


def test_a_new_forward_starts_with_nothing_owed():
    ranks = group(1)
    closing(ranks, Part(fires=[0], promised=[0, 1]))
    ranks[0].forward_begins()
    assert ranks[0].unmet() == ()


def test_a_window_that_failed_owes_nothing():
    ranks = group()
    closing(ranks, Part(fires=[], failed=True), Part(fires=[]))
    assert [rank.unmet() for rank in ranks] == [()] * 2


def test_a_window_whose_late_round_went_wrong_owes_nothing():
    """Both fire 0 twice, the second time late, and never 1. Packing for the late round fails on one of them."""
    ranks = group()
    opening = combine([rank.begin(flags(ALL)) for rank in ranks])
    for rank in ranks:
        rank.opened(opening)
        for i in (0, 0, 2, 3):
            rank.ready(i)
        rank.end()
    message = combine([rank.close(flags(ALL)) for rank in ranks])
    for rank in ranks:
        assert rank.closed(message).late == (0,)
        rank.settled(failed=True)
    assert [rank.unmet() for rank in ranks] == [()] * 2


def test_under_trust_a_rank_judges_by_itself():
    rank = machine(agreement=Agreement.TRUST)
    rank.opened(rank.begin(flags([0, 1])))
    rank.ready(0)
    rank.end()
    rank.closed(rank.close(flags([0, 1])))
    rank.settled()
    assert rank.unmet() == (1,)


def test_a_gradient_outside_of_a_window_is_an_internal_error():
    for phase in (Phase.IDLE, Phase.CLOSING, Phase.SETTLING):
        with pytest.raises(InternalError, match=f"in phase {phase.name}"):
            at(phase).ready(0)


# -- faults


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        pytest.param([Part(signature=7), Part(signature=5)], Fault.MODELS, id="models"),
        pytest.param([Part(), Part(nested=True)], Fault.NESTED, id="nested"),
        pytest.param([Part(), Part(guessed=True)], Fault.UNSEEN, id="unseen"),
        pytest.param([Part(nested=True, signature=1), Part()], Fault.MODELS, id="models before nested"),
    ],
)
def test_a_faulty_opening_ends_the_window_on_all_ranks(parts, fault):
    ranks = group()
    for outcome in window(ranks, parts):
        assert outcome.opening == Opening(fault)
        assert outcome.launched == []
    assert [(rank.phase, rank.window) for rank in ranks] == [(Phase.IDLE, 1)] * 2
    assert_next_window_works(ranks)


@examples(200)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=4))
def test_models_are_at_fault_if_and_only_if_signatures_differ(signatures):
    outcomes = window(group(len(signatures)), [Part(signature=s) for s in signatures])
    assert {o.opening.fault for o in outcomes} == {Fault.MODELS if len(set(signatures)) > 1 else None}


def test_a_backward_that_raised_is_a_fault_on_all_ranks_after_everything_was_launched():
    ranks = group()
    outcomes = window(ranks, [Part(fires=[0], failed=True), Part()])
    assert [o.launched for o in outcomes] == [[0, 1, 2, 3]] * 2
    assert [o.closing for o in outcomes] == [Closing(Fault.FAILED)] * 2
    assert_next_window_works(ranks)


@pytest.mark.parametrize("signature", [0, 5])
def test_open_meeting_close_is_seen_on_both_sides(signature):
    """Rank 1 was told its own opening alone and is at its end when rank 0 begins."""
    ahead, behind = ranks = group()
    ahead.opened(ahead.begin(flags(ALL)))
    ahead.end()
    met = combine([ahead.close(flags(ALL)), behind.begin(flags(ALL), signature=signature)])
    assert ahead.closed(met) == Closing(Fault.CROSSED)
    assert behind.opened(met).fault is Fault.CROSSED
    ahead.settled()
    assert_next_window_works(ranks)


@examples(100)
@given(st.lists(st.integers(0, 255), min_size=2, max_size=4))
def test_openings_of_different_windows_are_crossed(numbers):
    ranks = group(len(numbers))
    for rank, number in zip(ranks, numbers, strict=True):
        rank.window = number
    outcomes = window(ranks, [Part()] * len(ranks))
    assert {o.opening.fault for o in outcomes} == {Fault.CROSSED if len(set(numbers)) > 1 else None}


def test_ends_of_different_windows_are_crossed():
    ranks = group()
    ranks[1].window = 1
    for rank in ranks:
        rank.opened(rank.begin(flags(ALL)))
        rank.end()
    met = combine(rank.close(flags(ALL)) for rank in ranks)
    assert [rank.closed(met) for rank in ranks] == [Closing(Fault.CROSSED)] * 2


def test_window_numbers_go_round():
    ranks = group()
    for _ in range(300):
        assert_next_window_works(ranks)
    assert [rank.window for rank in ranks] == [300, 300]


# -- the first window


def test_until_an_order_is_learnt_nothing_is_launched_early():
    """Nothing leaves before the end, so no second firing is late."""
    for outcome in window(group(order=None), [Part(fires=[1, 1, 0, 2, 3])] * 2):
        assert outcome.early == 0 and outcome.launched == [0, 1, 2, 3]
        assert outcome.closing == Closing(None, flags(ALL), order_due=True)


def test_ranks_learn_the_latest_position_that_any_of_them_saw():
    """Rank 0 sees 3, 1, 0 and rank 1 sees 1, 3, 0: positions 0: 2, 1: 1, 3: 1, and of 1 and 3 the later defined goes
    first. 2 was seen by nobody and follows 3, its neighbour in reversed definition order."""
    ranks = group(order=None)
    closing(ranks, Part([0, 1, 3], fires=[3, 1, 0]), Part([0, 1, 3], fires=[1, 3, 0]))
    assert [rank.planner.order for rank in ranks] == [[3, 2, 1, 0]] * 2
    assert all(rank.planner.has_learnt for rank in ranks)


def test_gradients_that_came_before_the_opening_count_in_the_order():
    ranks = group(1, order=None)
    closing(ranks, Part(fires=[2, 0, 3, 1], opens_after=3))
    assert ranks[0].planner.order == [2, 0, 3, 1]


def test_what_fired_twice_on_any_rank_is_held_on_all():
    """2 fires twice on rank 1; its latest position there is 4."""
    ranks = group(order=None)
    closing(ranks, Part(), Part(fires=[2, 0, 1, 3, 2]))
    assert [rank.planner.held for rank in ranks] == [{2}] * 2
    assert [rank.planner.order for rank in ranks] == [[0, 1, 3, 2]] * 2


def test_the_order_message_tells_latest_positions_then_counts():
    rank = machine(order=None)
    rank.opened(rank.begin(flags(ALL)))
    for i in (3, 1, 3):
        rank.ready(i)
    assert rank.order_message() == [-1, 1, -1, 2, 0, 1, 0, 2]


def test_a_window_that_touched_nothing_teaches_no_order():
    """An order is due only in the window after, which touched something."""
    ranks = group(order=None)
    assert not closing(ranks, Part(fires=[]), Part(fires=[])).order_due
    assert not ranks[0].planner.has_learnt
    assert closing(ranks, Part(), Part()).order_due
    assert not closing(ranks, Part(), Part()).order_due
