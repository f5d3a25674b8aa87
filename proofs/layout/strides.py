"""Strides: the shipped test for dense ones, torch's, and a look at every place; and the canonical strides."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Final

import torch

from knownddp import flat

from ..claims import Evidence, Refuted
from ..coqtool import replayed, term

Shape = tuple[int, ...]


def pairs(quick: bool) -> Iterator[tuple[Shape, Shape]]:
    """Shapes of up to three dimensions of 1 to 3, each with all strides of 0 to 9; some of four dimensions."""
    for k in (0, 1, 2) if quick else (0, 1, 2, 3):
        for shape in itertools.product((1, 2, 3), repeat=k):
            yield from ((shape, strides) for strides in itertools.product(range(10), repeat=k))
    draw = random.Random(0)
    for _ in range(500 if quick else 5000):
        yield drawn(draw)


def drawn(draw: random.Random) -> tuple[Shape, Shape]:
    """Four or five dimensions of 1 to 4; dense in some order, often with one stride changed."""
    shape = tuple(draw.choice((1, 2, 2, 3, 4)) for _ in range(draw.randint(4, 5)))
    strides, step = [0] * len(shape), 1
    for d in draw.sample(range(len(shape)), len(shape)):
        strides[d] = step
        step *= shape[d]
    if draw.random() < 0.5:
        strides[draw.randrange(len(shape))] = draw.choice((0, 1, 2, 3, 4, 6, 8, 12, 24, 48))
    return shape, tuple(strides)


def places(shape: Shape, strides: Shape) -> list[int]:
    """Where elements lie, in logical order."""
    return [sum(i * s for i, s in zip(at, strides, strict=True)) for at in itertools.product(*map(range, shape))]


def is_bijection(shape: Shape, strides: Shape) -> bool:
    found = places(shape, strides)
    return sorted(found) == list(range(len(found)))


def canonical(shape: Shape, strides: Shape) -> tuple[int, ...]:
    try:
        return flat.canonical_strides(shape, strides)
    except Exception as error:
        raise Refuted(f"canonical_strides raises {error!r} for {shape}, {strides}") from error


def same_test_as_torch(quick: bool) -> Evidence:
    checked = dense = 0
    for shape, strides in pairs(quick):
        theirs = torch.ops.aten.is_non_overlapping_and_dense(torch.empty_strided(shape, strides, device="meta"))
        truth, ours = is_bijection(shape, strides), flat.is_dense(shape, strides)
        assert ours == truth, f"is_dense says {ours} of shape {shape} with strides {strides}"
        assert theirs == truth, f"torch says {theirs} of shape {shape} with strides {strides}"
        checked += 1
        dense += ours
    assert dense > checked // 100, "hardly any of the strides are dense"
    return Evidence(checked, f"{dense:,} of them dense")


def canonical_facts(quick: bool) -> Evidence:
    """Always a bijection; the strides themselves where those are, else row-major; blind to dimensions of size 1."""
    checked = 0
    for shape, strides in pairs(quick):
        answer = canonical(shape, strides)
        what = f"canonical strides {answer} of shape {shape} with strides {strides}"
        assert is_bijection(shape, answer), f"{what} are not dense"
        if is_bijection(shape, strides):
            assert places(shape, answer) == places(shape, strides), f"{what} are another layout"
        else:
            assert answer == flat.row_major(shape), f"{what}: row-major is due"
        assert canonical(shape, answer) == answer, f"{what} have others in turn"
        meaningless = tuple(7 if n == 1 else s for n, s in zip(shape, strides, strict=True))
        assert canonical(shape, meaningless) == answer, f"{what} hang on a dimension of size 1"
        checked += 1
    for shape in itertools.product((0, 1, 2), repeat=3):
        tensor = torch.empty(shape)
        assert flat.row_major(shape) == tensor.stride() or 1 in shape or 0 in shape, f"row_major of {shape}"
        if 0 in shape:
            assert canonical(shape, (5, 5, 5)) == flat.row_major(shape), f"an empty tensor of shape {shape}"
        checked += 1
    return Evidence(checked)


ROW: Final = "list N * list N * bool * list N"
DEFINITIONS: Final = f"""
Definition ok (r : {ROW}) : bool :=
  let '(shape, strides, dense, answer) := r in
  let n := map N.to_nat in
  Bool.eqb (is_dense (n shape) (n strides)) dense
  && if list_eq_dec Nat.eq_dec (canonical (n shape) (n strides)) (n answer) then true else false.
"""


def replay(quick: bool) -> Evidence:
    draw = random.Random(1)
    every = [*pairs(quick=True), *(((2, 0, 3), (s, 1, 1)) for s in range(3))]
    rows = []
    for shape, strides in draw.sample(every, 150) if quick else every:
        answer = (list(shape), list(strides), flat.is_dense(shape, strides), list(canonical(shape, strides)))
        rows.append(term(answer))
    return Evidence(replayed("Layout", DEFINITIONS, ROW, rows))
