"""The answers of torch's own function, input by input."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch

from knownddp import compute_bucket_assignment_by_size

from ..claims import Evidence, Refuted

Assignment = tuple[list[list[int]], list[int]]
Case = tuple[Sequence[int], Sequence[int], list[bool], list[int]]  # positions in POOL, then torch's arguments

POOL = [
    *(torch.empty(n) for n in (0, 1, 2, 3, 10, 59)),
    *(torch.empty(n, dtype=torch.float64) for n in (0, 1, 2, 5, 20)),
    *(torch.empty(n, dtype=torch.float16) for n in (1, 3)),
    torch.empty(2, device="meta"),
]
NBYTES = [t.numel() * t.element_size() for t in POOL]
LIMITS = (0, 1, 4, 8, 12, 40, 80, 200, 400, 10**6)


def theirs(case: Case) -> Assignment:
    chosen, limits, sparse, indices = case
    compute = cast(Any, torch._C)._distributed_c10d._compute_bucket_assignment_by_size
    buckets, reported = compute([POOL[k] for k in chosen], list(limits), sparse, indices)
    return [list(bucket) for bucket in buckets], list(reported)


def ours(case: Case) -> Assignment:
    chosen, limits, sparse, indices = case
    try:
        return compute_bucket_assignment_by_size([POOL[k] for k in chosen], limits, sparse or None, indices or None)
    except Exception as error:
        raise Refuted(f"it raises {error!r} for {case}") from error


def enumerated_cases() -> Iterator[Case]:
    """Up to four of four tensors of two dtypes, each dense or sparse, under 20 lists of limits."""
    lists = [*itertools.product((0, 4, 8, 16), repeat=1), *itertools.product((0, 4, 8, 16), repeat=2)]
    for length in (1, 2, 3, 4):
        for chosen in itertools.product((0, 1, 2, 7), repeat=length):
            for sparse in itertools.product((False, True), repeat=length if length < 4 else 0):
                yield from ((chosen, limits, list(sparse), []) for limits in lists)


def drawn_cases(number: int) -> Iterator[Case]:
    """Up to 30 tensors and four limits, in part with sparse ones, or with indices to report."""
    draw = random.Random(0)
    for _ in range(number):
        chosen = draw.choices(range(len(POOL)), k=draw.randint(1, draw.choice((6, 30))))
        sparse = [draw.random() < 0.1 for _ in chosen] if draw.random() < 0.5 else []
        indices = draw.sample(range(len(chosen)), len(chosen)) if draw.random() < 0.3 else []
        yield chosen, draw.choices(LIMITS, k=draw.randint(1, 4)), sparse, indices


def comparable(assignment: Assignment, case: Case) -> object:
    """With indices, leftovers, those below their limit, sorted: torch has them in the order of a hash map."""
    if not case[3]:
        return assignment
    size_of = dict(zip(case[3], (NBYTES[k] for k in case[0]), strict=True))
    pairs = list(zip(*assignment, strict=True))
    first = next((k for k, (bucket, limit) in enumerate(pairs) if sum(size_of[i] for i in bucket) < limit), len(pairs))
    return pairs[:first], sorted(pairs[first:])


def torch_agrees(quick: bool) -> Evidence:
    compared = 0
    some = itertools.islice(enumerated_cases(), 0, None, 20 if quick else 1)
    for case in itertools.chain(some, drawn_cases(4000 if quick else 150_000)):
        us, them = comparable(ours(case), case), comparable(theirs(case), case)
        assert us == them, f"{case}: {us}, where torch has {them}"
        compared += 1
    return Evidence(compared)
