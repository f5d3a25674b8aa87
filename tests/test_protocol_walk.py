"""The protocol alone, for any number of ranks and any difference between them: whatever each one expects, carries,
declares and fires, and whenever its OPEN comes back."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from machines import Part, machine, window
from strategies import examples, limits, specs_and_order

from knownddp.protocol import WindowProtocol, indices_of


@st.composite
def any_part(draw: st.DrawFn, n: int) -> Part:
    some = st.sets(st.integers(0, n - 1))
    fires = draw(st.lists(st.integers(0, n - 1), max_size=2 * n))
    return Part(
        expected=draw(some),
        fires=fires,
        carried=draw(st.sets(st.integers(0, n - 1), max_size=2)),
        declared=draw(some),
        opens_after=draw(st.integers(0, len(fires))),
        promised=draw(some),
    )


@st.composite
def walks(draw: st.DrawFn) -> tuple[list[WindowProtocol], list[list[Part]]]:
    """Two to four ranks with one planner state, and what they do in up to three windows."""
    specs, order = draw(specs_and_order)
    caps, detects_unused = draw(limits), draw(st.booleans())
    learnt = order if draw(st.booleans()) else None
    held = draw(st.sets(st.sampled_from(range(len(specs)))))
    ranks = [machine(specs, caps, detects_unused=detects_unused, order=learnt) for _ in range(draw(st.integers(2, 4)))]
    for rank in ranks:
        rank.planner.hold(held)
    a_window = st.tuples(*[any_part(len(specs))] * len(ranks)).map(list)
    return ranks, draw(st.lists(a_window, min_size=1, max_size=3))


def touched_by(parts: Sequence[Part]) -> set[int]:
    return {i for part in parts for i in (*part.gradients(), *part.carried)}


@examples(400)
@given(walks())
def test_all_ranks_launch_the_same_buckets_of_the_same_plan_in_order(walk):
    ranks, windows = walk
    for parts in windows:
        first, *others = window(ranks, parts)
        agreed = {i for part in parts for i in (*part.expected, *part.carried)}
        assert set(first.plan.members) == agreed
        assert first.launched == list(range(len(first.plan.buckets)))
        for other in others:
            assert (other.plan, other.launched, other.closing) == (first.plan, first.launched, first.closing)
        assert len({(tuple(rank.planner.order), frozenset(rank.planner.held)) for rank in ranks}) == 1


@examples(400)
@given(walks())
def test_every_touched_parameter_is_agreed_or_late_and_nothing_else_is_reported(walk):
    ranks, windows = walk
    for parts in windows:
        outcome, *_ = window(ranks, parts)
        told = outcome.closing
        in_time = set(outcome.plan.members) - set(told.late)
        assert set(indices_of(told.touched)) == touched_by(parts)
        assert set(told.late) <= touched_by(parts) <= in_time | set(told.late)
        if told.late:
            assert sorted(told.late_plan.members) == list(told.late)
        else:
            assert told.late_plan is None


@examples(400)
@given(walks())
def test_late_is_what_is_not_agreed_or_fires_after_its_bucket_left(walk):
    """What comes before OPEN is back is in time if it is agreed: no bucket has left yet."""
    ranks, windows = walk
    for parts in windows:
        outcomes = window(ranks, parts)
        agreed = outcomes[0].plan.members
        outside = {i for part in parts for i in part.gradients() if i not in agreed}
        assert set(outcomes[0].closing.late) == outside.union(*(outcome.past_launch for outcome in outcomes))


@examples(400)
@given(walks())
def test_unmet_is_what_was_promised_and_touched_by_nobody_since_the_forward(walk):
    ranks, windows = walk
    promised: set[int] = set()
    touched: set[int] = set()
    for parts in windows:
        window(ranks, parts)
        promised |= {i for part in parts for i in part.promised}
        touched |= touched_by(parts)
        assert [set(rank.unmet()) for rank in ranks] == [promised - touched] * len(ranks)
