"""Plans and the planner: hand-worked orders, the memory of plans, and what holds for every set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples, limits, param_specs, spec

from knownddp.errors import InternalError
from knownddp.plan import MAX_CACHED_PLANS, MUCH_BYTES, NOT_PLACED, BucketPlan, BucketSpec, Planner
from knownddp.specs import ParamSpec

FLOAT_BYTES = 4


def bucket(*param_indices: int, is_sparse: bool = False, is_held: bool = False) -> BucketSpec:
    return BucketSpec(param_indices, is_sparse, is_held)


def planner(specs: Iterable[ParamSpec], caps: Sequence[int], positions: Sequence[int] | None = None) -> Planner:
    """A planner that has learnt definition order, or that of ``positions``."""
    made = Planner(list(specs), caps)
    made.learn(positions if positions is not None else range(len(made.order)), ())
    return made


def scalars(number: int) -> list[ParamSpec]:
    return [spec(1) for _ in range(number)]


def subset(*param_indices: int, of: int) -> bytes:
    return bytes(i in param_indices for i in range(of))


# -- a plan


def test_a_plan_knows_where_each_parameter_travels():
    plan = BucketPlan(5, (bucket(3, 0), bucket(4)))
    assert plan.bucket_of == (0, NOT_PLACED, NOT_PLACED, 0, 1)
    assert plan.members == (3, 0, 4)


@pytest.mark.parametrize("buckets", [(bucket(0, 1), bucket(1)), (bucket(0, 0),)])
def test_a_plan_that_places_a_parameter_twice_is_refused(buckets):
    with pytest.raises(InternalError, match="at most once"):
        BucketPlan(3, buckets)


# -- hand-worked plans of four floats, two to a bucket


def test_until_an_order_is_learnt_all_is_held_in_reversed_definition_order():
    made = Planner(scalars(4), [2 * FLOAT_BYTES])
    assert made.plan(subset(0, 1, 2, 3, of=4)).buckets == (bucket(3, 2, is_held=True), bucket(1, 0, is_held=True))


def test_after_learn_buckets_follow_the_positions():
    """Seen in the order 2, 0, 3, 1."""
    made = planner(scalars(4), [2 * FLOAT_BYTES], [1, 3, 0, 2])
    assert made.plan(subset(0, 1, 2, 3, of=4)).buckets == (bucket(2, 0), bucket(3, 1))
    assert made.plan(subset(1, 2, 3, of=4)).buckets == (bucket(2, 3), bucket(1))


def test_a_plan_of_much_has_sizes_of_its_own():
    """Parameters of an eighth of what counts as much, in buckets of all or of two."""
    made = Planner([spec(MUCH_BYTES // 8 // FLOAT_BYTES)] * 8, [MUCH_BYTES], [MUCH_BYTES // 4])
    assert [one.param_indices for one in made.plan(bytes([1] * 7 + [0])).buckets] == [(6, 5, 4, 3, 2, 1, 0)]
    assert [one.param_indices for one in made.plan(bytes([1] * 8)).buckets] == [(7, 6), (5, 4), (3, 2), (1, 0)]


def test_held_parameters_go_last_in_buckets_of_their_own():
    """Without 1 the early ones are 0, 2, 3: a bucket closes after 2."""
    made = planner(scalars(4), [2 * FLOAT_BYTES])
    made.hold([1])
    assert made.plan(subset(0, 1, 2, 3, of=4)).buckets == (bucket(0, 2), bucket(3), bucket(1, is_held=True))


def test_parameters_that_fired_more_than_once_are_held():
    made = Planner(scalars(3), [FLOAT_BYTES])
    made.learn([0, 1, 2], repeated=[0])
    assert made.plan(subset(0, 1, 2, of=3)).buckets == (bucket(1), bucket(2), bucket(0, is_held=True))


def test_dtypes_and_sparse_gradients_do_not_mix():
    """Order 0 to 4: floats 0 and 3 fill 8 bytes, sparse 1 is alone, doubles 2 and 4 hold 8 bytes each."""
    double = spec(1, dtype=torch.float64)
    made = planner([spec(1), spec(1, is_sparse=True), double, spec(1), double], [2 * FLOAT_BYTES])
    assert made.plan(bytes([1] * 5)).buckets == (bucket(1, is_sparse=True), bucket(2), bucket(0, 3), bucket(4))


def test_the_empty_set_has_no_buckets():
    assert planner(scalars(3), [4]).plan(bytes(3)) == BucketPlan(3, (), is_learnt=True)


# -- learning an order


@pytest.mark.parametrize(
    ("positions", "order"),
    [
        pytest.param([3, 2, 1, 0], [3, 2, 1, 0], id="all seen"),
        pytest.param([-1, 1, -1, 0, -1], [4, 3, 2, 1, 0], id="4 has no neighbour and goes first"),
        pytest.param([0, -1, 1], [0, 2, 1], id="1 goes behind 2, which comes before it in reversed order"),
        pytest.param([0, -1, -1, 1, 2], [0, 3, 2, 1, 4], id="both go behind 3"),
        pytest.param([5, 5, 5], [2, 1, 0], id="a tie is broken by reversed definition order"),
        pytest.param([-1, -1, -1], [2, 1, 0], id="none seen"),
    ],
)
def test_absent_parameters_go_behind_their_neighbour_in_reversed_definition_order(positions, order):
    assert planner(scalars(len(positions)), [4], positions).order == order


@examples(300)
@given(st.lists(st.integers(-1, 6), max_size=8))
def test_a_learnt_order_holds_every_parameter_once_and_sorts_those_seen(positions):
    order = planner(scalars(len(positions)), [4], positions).order
    assert sorted(order) == list(range(len(positions)))
    seen = [positions[i] for i in order if positions[i] >= 0]
    assert seen == sorted(seen)


# -- the memory of plans


def test_a_cached_set_gives_the_same_object():
    made = planner(scalars(3), [4])
    first = made.plan(subset(0, 2, of=3))
    made.plan(subset(1, of=3))
    assert made.plan(subset(0, 2, of=3)) is first
    assert len(made) == 2


def test_the_plan_used_longest_ago_is_forgotten_first():
    """Of 128 sets 64 plans fit; set 1 is used again, so the 65th plan takes the place of set 2's."""
    made = planner(scalars(7), [4])
    sets = [bytes(number >> i & 1 for i in range(7)) for number in range(128)]
    plans = {number: made.plan(sets[number]) for number in range(1, MAX_CACHED_PLANS + 1)}
    assert len(made) == MAX_CACHED_PLANS == 64

    assert made.plan(sets[1]) is plans[1]
    made.plan(sets[100])

    assert len(made) == MAX_CACHED_PLANS
    assert all(made.plan(sets[number]) is plans[number] for number in plans if number != 2)
    assert made.plan(sets[2]) is not plans[2]


def test_the_memory_is_bounded_over_all_sets():
    made = planner(scalars(7), [4])
    for number in range(128):
        made.plan(bytes(number >> i & 1 for i in range(7)))
        assert len(made) == min(number + 1, MAX_CACHED_PLANS)


@pytest.mark.parametrize(
    "change",
    [
        lambda made: made.hold([1]),
        lambda made: made.learn([1, 0], ()),
        lambda made: made.set_specs([spec(2), spec(2)]),
    ],
    ids=["hold", "learn", "set_specs"],
)
def test_what_changes_plans_forgets_the_old_ones(change):
    """Two floats fill the 8 bytes; held apart, swapped, or as pairs of floats they do otherwise."""
    made = planner(scalars(2), [2 * FLOAT_BYTES])
    before = made.plan(b"\1\1")
    change(made)
    assert len(made) == 0
    assert before.buckets == (bucket(0, 1),) != made.plan(b"\1\1").buckets


def test_holding_what_is_held_forgets_nothing():
    made = planner(scalars(2), [4])
    made.hold([1])
    plan = made.plan(b"\1\1")
    made.hold([1])
    assert made.plan(b"\1\1") is plan


# -- for every set


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[ParamSpec], list[int], list[int], set[int], bytes]:
    """Specs, limits, positions, held parameters, agreed set."""
    specs = draw(st.lists(param_specs, max_size=7))
    n = len(specs)
    positions = draw(st.lists(st.integers(-1, 9), min_size=n, max_size=n))
    held = draw(st.sets(st.integers(0, n - 1))) if n else set()
    return specs, draw(limits), positions, held, bytes(draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)))


@examples(300)
@given(situations(), st.booleans())
def test_every_member_is_placed_exactly_once_and_nothing_else_is(situation, has_learnt):
    specs, caps, positions, held, agreed = situation
    made = Planner(specs, caps)
    if has_learnt:
        made.learn(positions, held)
    assert sorted(made.plan(agreed).members) == [i for i, used in enumerate(agreed) if used]


@examples(300)
@given(situations())
def test_buckets_never_mix_keys_nor_layouts_nor_held_with_early(situation):
    specs, caps, positions, held, agreed = situation
    made = planner(specs, caps, positions)
    made.hold(held)
    plan = made.plan(agreed)
    for one in plan.buckets:
        assert len({specs[i].key for i in one.param_indices}) == 1
        assert {specs[i].is_sparse for i in one.param_indices} == {one.is_sparse}
        assert {i in held for i in one.param_indices} == {one.is_held}
        assert not one.is_sparse or len(one.param_indices) == 1
    assert [one.is_held for one in plan.buckets] == sorted(one.is_held for one in plan.buckets)


@examples(300)
@given(situations(), st.lists(st.integers(0, 127), max_size=5))
def test_a_plan_depends_only_on_set_order_limits_and_held(situation, other_sets):
    """A planner with a past, which first learnt another order for other sizes and was told piecemeal what to hold."""
    specs, caps, positions, held, agreed = situation
    n = len(specs)
    fresh = Planner(specs, caps)
    fresh.learn(positions, held)

    old = Planner([spec(2) for _ in specs], caps)
    old.learn([n - p for p in positions], ())
    for param_index in held:
        old.hold([param_index])
        for number in other_sets:
            old.plan(bytes(number >> i & 1 for i in range(n)))
    old.set_specs(specs)
    old.learn(positions, ())
    for number in other_sets:
        old.plan(bytes(number >> i & 1 for i in range(n)))

    assert old.plan(agreed) == fresh.plan(agreed)
