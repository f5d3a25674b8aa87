"""Flat buckets as shipped: where their parts lie, and that packing loses, mixes and leaves nothing."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Final
from unittest import mock

import torch
from torch import Tensor

from knownddp import flat
from knownddp.flat import FlatBucket, canonical_strides, with_strides_of
from knownddp.specs import BucketKey, ParamSpec

from ..claims import Evidence, Refuted
from ..coqtool import replayed, term
from .strides import Shape, drawn

KEY: Final = BucketKey(torch.float64, torch.device("cpu"))
# Layouts in which a rank may have its own gradient of shape (2, 3): row-major, transposed, sliced, sparsely placed.
LAYOUTS: Final = ((3, 1), (1, 2), (6, 2), (1, 5), (4, 1))
# How a bucket is packed: whatever there is, or all gradients, as small ones are, as large ones are, or the first one
# ahead of the others.
FILLED, COPIED, ONE_BY_ONE, AHEAD = "filled", "copied", "copied one by one", "written ahead"
WAYS: Final = (FILLED, COPIED, ONE_BY_ONE, AHEAD)
DIVISOR: Final = 2  # quotients are exact


def spec(shape: Shape, strides: Shape) -> ParamSpec:
    numel = torch.Size(shape).numel()
    return ParamSpec("p", shape, canonical_strides(shape, strides), numel, 8 * numel, KEY)


def buckets(number: int) -> Iterator[list[ParamSpec]]:
    """One to four parameters, dense in any order, some of them empty or of no dimension."""
    draw = random.Random(2)
    for _ in range(number):
        chosen = [drawn(draw) for _ in range(draw.randint(1, 4))]
        chosen = [((), ()) if draw.random() < 0.1 else one for one in chosen]
        chosen = [((2, 0), (1, 1)) if draw.random() < 0.1 else one for one in chosen]
        yield [spec(*one) for one in chosen]


def packed(
    way: str, specs: Sequence[ParamSpec], grads: Sequence[Tensor | None], old: Sequence[Tensor | None] = ()
) -> FlatBucket:
    """A bucket packed over memory that holds NaN; but for ``FILLED`` all gradients are there and nothing is old."""
    try:
        with mock.patch.object(flat, "ONE_BY_ONE_BYTES", 0 if way == ONE_BY_ONE else 2**40):
            bucket = FlatBucket(specs)
        bucket.flat.fill_(float("nan"))
        if way == FILLED:
            bucket.fill(grads, old or [None] * len(specs), DIVISOR)
        elif way == AHEAD and grads[0] is not None:
            bucket.write(0, grads[0], None, DIVISOR)
            bucket.copy([None, *grads[1:]], DIVISOR)
        else:
            bucket.copy([grad for grad in grads if grad is not None], DIVISOR)
    except Exception as error:
        raise Refuted(f"packing raises {error!r} for {[(s.shape, s.strides) for s in specs]}") from error
    return bucket


def laid_out(values: Tensor, strides: Shape) -> Tensor:
    """The same values in a tensor of these strides, which need not be dense."""
    return torch.empty_strided(values.shape, strides, dtype=values.dtype).copy_(values)


def packing_is_undone(quick: bool) -> Evidence:
    """Values are all different, so that none can stand for another. Gradients have the bucket's dtype or another."""
    checked = 0
    for specs in buckets(100 if quick else 2000):
        numel = sum(s.numel for s in specs)
        values = DIVISOR * torch.arange(1.0, 1 + numel, dtype=torch.float64)
        cut = torch.split(values, [s.numel for s in specs])
        parts = [part.view(s.shape) for part, s in zip(cut, specs, strict=True)]
        for way, dtype in itertools.product(WAYS, (torch.float64, torch.float32)):
            bucket = packed(way, specs, [part.to(dtype) for part in parts])
            what = f"{way}, {dtype}: {[(s.shape, s.strides) for s in specs]}"
            assert torch.equal(bucket.flat.sort().values, values / DIVISOR), f"lost, stale or not divided: {what}"
            for view, part in zip(bucket.views, parts, strict=True):
                assert torch.equal(view, part / DIVISOR), f"mixed up: {what}"
            checked += numel
    return Evidence(checked, "elements of drawn buckets, packed in each of four ways")


ROW: Final = "list (list (N * N)) * (N * list N) * N"
DEFINITIONS: Final = f"""
Definition dims_of (l : list (N * N)) : dims := map (fun p => (N.to_nat (fst p), N.to_nat (snd p))) l.
Definition ok (r : {ROW}) : bool :=
  let '(ts, (p, i), answer) := r in
  Nat.eqb (place (map dims_of ts) (N.to_nat p, map N.to_nat i)) (N.to_nat answer).
"""


def replay(quick: bool) -> Evidence:
    """Where the element with a number of its own was found, against ``place``."""
    draw, rows = random.Random(3), []
    for specs in buckets(60 if quick else 600):
        bucket = FlatBucket(specs)
        dims = [list(zip(s.shape, s.strides, strict=True)) for s in specs]
        for position in [p for p, s in enumerate(specs) if s.numel]:
            index = [draw.randrange(n) for n in specs[position].shape]
            bucket.flat.zero_()
            bucket.views[position][tuple(index)] = 1
            rows.append(term((dims, (position, index), int(bucket.flat.argmax()))))
    return Evidence(replayed("Pack", DEFINITIONS, ROW, rows))


def same_element(quick: bool) -> Evidence:
    """Two ranks; their gradients, and what stood there before on the second, lie in any of five ways.

    The first has a gradient of 1, 2, ... and nothing from before. The second has one ten times that, or one a thousand
    times that from before, or both. Of the second parameter a rank that fills has none, one that copies has ones.
    """
    checked = 0
    base, ones = torch.arange(1.0, 7.0, dtype=torch.float64).view(2, 3), torch.ones(3, dtype=torch.float64)
    ways = [(new, old) for new in (*LAYOUTS, None) for old in (*LAYOUTS, None) if new or old]
    for canonical, first, (new, old) in itertools.product(((3, 1), (1, 2)), LAYOUTS, ways):
        specs = [spec((2, 3), canonical), spec((3,), (1,))]
        before = laid_out(base * 1000, old) if old else None
        for mine, theirs in itertools.product(WAYS, WAYS if new and not old else (FILLED,)):
            one = packed(mine, specs, [laid_out(base, first), ones if mine != FILLED else None])
            grads = [laid_out(base * 10, new) if new else None, ones if theirs != FILLED else None]
            two = packed(theirs, specs, grads, [before, None])
            one.flat.add_(two.flat)
            what = f"ranks with strides {first} ({mine}) and {new} ({theirs}), {old} before"
            assert torch.equal(one.views[0], base * (1 + 10 * bool(new) + 1000 * bool(old)) / DIVISOR), what
            ones_there = (mine != FILLED) + (theirs != FILLED)
            assert torch.equal(one.views[1], ones * ones_there / DIVISOR), f"{what}: what is None counts as zero"
            checked += 1
    return Evidence(checked, "every pair of five layouts, dense and not, and of four ways to pack, old ones or not")


def handed_back(quick: bool) -> Evidence:
    """Means come back by index, in the parameter's own strides where those are dense."""
    checked = 0
    values = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    for canonical, own in itertools.product(((3, 1), (1, 2)), LAYOUTS):
        mean = laid_out(values, canonical)
        param = laid_out(values, own)
        back = with_strides_of(param, mean)
        assert torch.equal(back, values), f"from strides {canonical} to {own} elements moved"
        is_dense = own in ((3, 1), (1, 2))
        assert back.stride() == (own if is_dense else canonical), f"strides {back.stride()} for a parameter with {own}"
        checked += 1
    return Evidence(checked)
