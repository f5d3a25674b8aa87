"""The bucket assigner: torch's own answers, values worked out by hand, and what holds for every input."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples, limits

from knownddp import ArgumentError, compute_bucket_assignment_by_size
from knownddp.buckets import NO_LIMIT, assign

# -- against torch

POOL = [
    *(torch.empty(numel) for numel in (0, 1, 2, 3, 10)),
    *(torch.empty(numel, dtype=torch.float64) for numel in (0, 1, 2, 5)),
    torch.empty(3, dtype=torch.float16),
    torch.empty(2, 2, dtype=torch.bfloat16),
    torch.empty((), dtype=torch.complex64),
    torch.empty(3, device="meta"),
]
NBYTES = [t.numel() * t.element_size() for t in POOL]
LIMITS = (0, 1, 4, 8, 11, 12, 20, 40, 10**6)

Assignment = tuple[list[list[int]], list[int]]
Case = tuple[Sequence[int], Sequence[int], list[bool] | None, list[int] | None]  # positions in POOL, then arguments


def enumerated_cases() -> Iterator[Case]:
    """Every sequence of up to four out of five tensors, under each of 30 lists of limits."""
    some = [0, 1, 2, 6, 7]
    sequences = [s for n in range(1, 5) for s in itertools.product(some, repeat=n)]
    sizes = (0, 4, 8, 12, 20)
    lists = [*itertools.product(sizes, repeat=1), *itertools.product(sizes, repeat=2)]
    return ((s, caps, None, None) for s in sequences for caps in lists)


def drawn_cases(number: int) -> Iterator[Case]:
    """Up to eight tensors and four limits; in part with sparse ones, or with indices to report."""
    draw = random.Random(0)
    for _ in range(number):
        chosen = draw.choices(range(len(POOL)), k=draw.randint(1, 8))
        caps = draw.choices(LIMITS, k=draw.randint(1, 4))
        sparse = [draw.random() < 0.2 for _ in chosen] if draw.random() < 0.5 else None
        indices = None
        if (
            draw.random() < 0.5
        ):  # sparse flags are looked up by the index that is reported, so those must lie among them
            indices = draw.sample(range(len(chosen) if sparse else 50), len(chosen))
        yield chosen, caps, sparse, indices


def split(assignment: Assignment, size_of: dict[int, int]) -> tuple[list[tuple[list[int], int]], ...]:
    """Closed buckets in their order; leftovers, those below their limit, sorted: torch has them in a hash map."""
    pairs = list(zip(*assignment, strict=True))
    first = next((k for k, (bucket, cap) in enumerate(pairs) if sum(size_of[i] for i in bucket) < cap), len(pairs))
    return pairs[:first], sorted(pairs[first:])


def assert_agrees_with_torch(chosen: Sequence[int], caps: Sequence[int], sparse: object, indices: object) -> None:
    tensors = [POOL[k] for k in chosen]
    ours = compute_bucket_assignment_by_size(tensors, caps, sparse, indices)
    theirs = torch.distributed._compute_bucket_assignment_by_size(tensors, caps, sparse or [], indices or [])
    if indices:
        size_of = {i: NBYTES[k] for i, k in zip(indices, chosen, strict=True)}
        assert split(ours, size_of) == split(theirs, size_of), (chosen, caps, sparse, indices)
    else:
        assert ours == theirs, (chosen, caps, sparse)


def test_it_gives_the_answers_of_torch():
    compared = 0
    for case in itertools.chain(enumerated_cases(), drawn_cases(100_000)):
        assert_agrees_with_torch(*case)
        compared += 1
    assert compared == 30 * (5 + 25 + 125 + 625) + 100_000  # 123,400


# -- by hand


def floats(*numels: int) -> list[torch.Tensor]:
    return [torch.empty(n) for n in numels]


def alternating() -> list[torch.Tensor]:
    """200 bytes of float and of double in turn."""
    return [torch.empty(50), torch.empty(25, dtype=torch.float64)] * 3


@pytest.mark.parametrize(
    ("tensors", "caps", "buckets", "reported"),
    [
        pytest.param(floats(10, 10, 10, 10), [40, 80], [[0], [1, 2], [3]], [40, 80, 80], id="leftover"),
        pytest.param(alternating(), [400], [[0, 2], [1, 3], [4], [5]], [400] * 4, id="two dtypes"),
        pytest.param(
            alternating(), [200, 400], [[0], [1], [2, 4], [3, 5]], [200, 200, 400, 400], id="a limit a dtype and stage"
        ),
        pytest.param(floats(100, 200, 100, 50), [400], [[0], [1], [2], [3]], [400] * 4, id="reached, not exceeded"),
        pytest.param(floats(1, 0, 1), [0], [[0], [1], [2]], [0, 0, 0], id="no room"),
        pytest.param(floats(0, 1, 0), [4], [[0, 1], [2]], [4, 4], id="empty tensors"),
    ],
)
def test_worked_values(tensors, caps, buckets, reported):
    assert compute_bucket_assignment_by_size(tensors, caps) == (buckets, reported)


def test_a_sparse_one_is_alone_and_has_no_limit():
    """The dense ones, 40 bytes each, go on around it; it comes after them by its smallest index."""
    answer = compute_bucket_assignment_by_size(floats(10, 10, 10), [80], [False, True, False])
    assert answer == ([[0, 2], [1]], [80, NO_LIMIT])


def test_given_indices_are_reported_in_the_order_in_which_buckets_close():
    """9 and 2 fill 80 bytes before the double does; 7 and 4 are left over, the double opened first."""
    tensors = [torch.empty(5, dtype=torch.float64), *floats(10, 10, 10)]
    assert compute_bucket_assignment_by_size(tensors, [80], None, [7, 9, 2, 4]) == ([[9, 2], [7], [4]], [80, 80, 80])


def test_sparse_flags_are_looked_up_by_the_reported_index():
    """Flag 2 is that of the tensor reported as 2, the first."""
    answer = compute_bucket_assignment_by_size(floats(10, 10, 10), [80], [False, False, True], [2, 0, 1])
    assert answer == ([[2], [0, 1]], [NO_LIMIT, 80])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [4]), "at least one tensor"),
        ((floats(1), []), "one or more sizes"),
        ((floats(1), [4, -1]), r"one or more sizes in bytes, got \[4, -1\]"),
        ((floats(1, 1), [4], [True]), "expect_sparse_gradient has 1 entries for 2 tensors"),
        ((floats(1, 1), [4], None, [0, 1, 2]), "tensor_indices has 3 entries for 2 tensors"),
        ((floats(1, 1), [4], [True, False], [1, 2]), "looked up by tensor index"),
        ((floats(1, 1), [4], [True, False], [1, -1]), "looked up by tensor index"),
        (([torch.empty(1), torch.eye(2).to_sparse()], [4]), "No support for sparse tensors. Tensor 1"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        compute_bucket_assignment_by_size(*arguments)


# -- for every input

Items = list[tuple[int, int, str, bool]]


@st.composite
def items(draw: st.DrawFn) -> Items:
    """(index, nbytes, key, is_sparse) with distinct indices in any order."""
    indices = draw(st.lists(st.integers(0, 99), unique=True, max_size=12))
    rest = st.tuples(st.integers(0, 20), st.sampled_from("abc"), st.sampled_from([False, False, True]))
    return [(i, *draw(rest)) for i in indices]


def described(given_items: Items, caps: list[int]) -> list[tuple[Items, int]]:
    """``assign``'s buckets with the items themselves in place of their indices."""
    by_index = {item[0]: item for item in given_items}
    return [([by_index[i] for i in bucket], cap) for bucket, cap in assign(given_items, caps)]


def total(bucket: Items) -> int:
    return sum(nbytes for _, nbytes, _, _ in bucket)


@examples(300)
@given(items(), limits)
def test_every_item_is_placed_exactly_once(given_items, caps):
    placed = [i for bucket, _ in assign(given_items, caps) for i in bucket]
    assert sorted(placed) == sorted(item[0] for item in given_items)


@examples(300)
@given(items(), limits)
def test_a_bucket_holds_one_key_and_a_sparse_item_is_alone(given_items, caps):
    for bucket, cap in described(given_items, caps):
        assert len({key for _, _, key, _ in bucket}) == 1
        if any(is_sparse for *_, is_sparse in bucket):
            assert len(bucket) == 1 and cap == NO_LIMIT


@examples(300)
@given(items(), limits)
def test_items_of_a_bucket_keep_their_order(given_items, caps):
    arrival = [item[0] for item in given_items]
    for bucket, _ in assign(given_items, caps):
        assert [arrival.index(i) for i in bucket] == sorted(arrival.index(i) for i in bucket)


@examples(300)
@given(items(), limits)
def test_a_bucket_exceeds_its_limit_by_less_than_its_last_item(given_items, caps):
    """Said without a difference, so that it holds for empty items too: without the last item it was not full."""
    for bucket, cap in described(given_items, caps):
        assert len(bucket) == 1 or total(bucket[:-1]) < cap


@examples(300)
@given(items(), limits)
def test_each_key_goes_through_the_limits_and_stays_at_the_last(given_items, caps):
    for key in "abc":
        of_key = [cap for bucket, cap in described(given_items, caps) if bucket[0][2:] == (key, False)]
        assert of_key == [caps[min(k, len(caps) - 1)] for k in range(len(of_key))]


@examples(300)
@given(items(), limits)
def test_at_most_one_bucket_a_key_is_left_over_and_leftovers_come_last(given_items, caps):
    buckets = described(given_items, caps)
    left_over = [total(bucket) < cap for bucket, cap in buckets]
    assert left_over == sorted(left_over)
    keys = [bucket[0][2] for (bucket, _), is_left in zip(buckets, left_over, strict=True) if is_left]
    assert len(keys) == len(set(keys))
