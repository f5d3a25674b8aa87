"""Inputs for the assigner and the planner, and the shipped code's answers to them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from knownddp import buckets
from knownddp.plan import BucketPlan, Planner
from knownddp.specs import BucketKey, ParamSpec

from ..claims import Refuted

LIMIT_LISTS = ((0,), (2,), (1, 3), (3, 1), (1, 2, 4))
KEYS = tuple(BucketKey(dtype, torch.device("cpu")) for dtype in (torch.float32, torch.float64, torch.float16))


@dataclass(frozen=True, slots=True)
class Case:
    """What the assigner is given: items of (index, bytes, number of the key, sparse), and limits in bytes."""

    items: tuple[buckets.Item, ...]
    limits: tuple[int, ...]


def assigned(case: Case) -> list[tuple[list[int], int]]:
    """The shipped answer."""
    try:
        return buckets.assign(case.items, case.limits)
    except Exception as error:
        raise Refuted(f"assign raises {error!r} for {case}") from error


def enumerated_cases() -> Iterator[Case]:
    """Up to three items of 0 to 2 bytes and two keys, each dense or sparse, under each of five lists of limits."""
    kinds = tuple(itertools.product((0, 1, 2), (0, 1), (False, True)))
    for length in (1, 2, 3):
        for chosen in itertools.product(kinds, repeat=length):
            items = tuple((i, nbytes, key, sparse) for i, (nbytes, key, sparse) in enumerate(chosen))
            yield from (Case(items, limits) for limits in LIMIT_LISTS)


def drawn_cases(number: int) -> Iterator[Case]:
    """Up to 14 items of three keys, their indices in any order."""
    draw = random.Random(0)
    for _ in range(number):
        length = draw.randint(1, 14)
        items = tuple(
            (index, draw.choice((0, 3, 7, 20, 64)), draw.randrange(3), draw.random() < 0.15)
            for index in draw.sample(range(length), length)
        )
        yield Case(items, tuple(draw.choice((0, 5, 20, 50)) for _ in range(draw.randint(1, 4))))


def cases(quick: bool) -> list[Case]:
    """About 300, or 3,100."""
    every = list(enumerated_cases())
    return every[:: 61 if quick else 6] + list(drawn_cases(150 if quick else 1550))


@dataclass(frozen=True, slots=True)
class PlanCase:
    """What the planner is given. ``positions`` is None where no order was learnt."""

    sizes: tuple[tuple[int, int, bool], ...]  # bytes, number of the key, sparse
    limits: tuple[int, ...]
    positions: tuple[int, ...] | None
    repeated: tuple[int, ...]
    held_later: tuple[int, ...]
    agreed: bytes


def specs_of(sizes: Sequence[tuple[int, int, bool]]) -> list[ParamSpec]:
    return [ParamSpec(f"p{i}", (n,), (1,), n, n, KEYS[key], sparse) for i, (n, key, sparse) in enumerate(sizes)]


def plan_cases(number: int) -> Iterator[PlanCase]:
    """Up to 10 parameters of three keys, half of them agreed, some of them held back, with and without an order."""
    draw = random.Random(1)
    for _ in range(number):
        n = draw.randint(1, 10)
        some = [tuple(i for i in range(n) if draw.random() < 0.15) for _ in range(2)]
        yield PlanCase(
            tuple((draw.choice((0, 3, 7, 20, 64)), draw.randrange(3), draw.random() < 0.15) for _ in range(n)),
            tuple(draw.choice((0, 5, 20, 50)) for _ in range(draw.randint(1, 3))),
            tuple(draw.randint(-1, n) for _ in range(n)) if draw.random() < 0.8 else None,
            some[0],
            some[1],
            bytes(draw.random() < 0.6 for _ in range(n)),
        )


def planned(case: PlanCase) -> tuple[list[int], frozenset[int], BucketPlan]:
    """The shipped planner's order, what it holds back, and its plan, asked for twice: the second comes from memory."""
    try:
        planner = Planner(specs_of(case.sizes), case.limits)
        planner.plan(case.agreed)  # must be forgotten when an order is learnt
        if case.positions is not None:
            planner.learn(case.positions, case.repeated)
            planner.plan(case.agreed)  # must be forgotten when more is held back
            planner.hold(case.held_later)
        plan = planner.plan(case.agreed)
        remembered = planner.plan(case.agreed)
    except Exception as error:
        raise Refuted(f"the planner raises {error!r} for {case}") from error
    assert remembered == plan, f"a plan made twice differs for {case}"
    held = planner.held if planner.has_learnt else range(len(case.sizes))
    return planner.order, frozenset(held), plan
