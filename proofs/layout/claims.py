"""C: what is claimed of the layout of flat buckets (flat.py) and of the means that come out of them."""

from __future__ import annotations

from typing import Final

from ..claims import ALL_SIZES, BOUNDED, Claim, Evidence
from ..coqtool import REALS, theorems
from . import packing, strides
from .mean import within_bound


def _bijection(quick: bool) -> Evidence:
    return Evidence(theorems("Layout", ("in_range", "no_overlap", "no_gap")))


def _canonical(quick: bool) -> Evidence:
    theorems("Layout", ("test_is_sound", "test_is_complete", "row_major_dense"))
    theorems("Layout", ("canonical_is_dense", "canonical_keeps_dense"))
    replayed = strides.replay(quick)
    return Evidence(replayed.cases, "5 theorems for all sizes; cases are answers replayed")


def _packing(quick: bool) -> Evidence:
    theorems(
        "Pack", ("place_in_range", "places_differ", "every_place_is_used", "unpack_after_pack", "no_place_is_stale")
    )
    replayed = packing.replay(quick)
    return Evidence(replayed.cases, "5 theorems for all sizes; cases are places replayed")


def _same_element(quick: bool) -> Evidence:
    return Evidence(theorems("Pack", ("same_element",)))


def _mean(quick: bool) -> Evidence:
    return Evidence(theorems("Mean", ("mean_error",), REALS))


CLAIMS: Final = (
    Claim("C1", "dense strides are a bijection onto the places", ALL_SIZES, _bijection, (3, 3), needs_coq=True),
    Claim("C2", "is_dense is exact; canonical strides are dense", ALL_SIZES, _canonical, (150, 1000), needs_coq=True),
    Claim("C3", "segments tile the bucket; unpacking undoes packing", ALL_SIZES, _packing, (100, 1000), needs_coq=True),
    Claim(
        "C4", "whatever strides ranks have, like elements are summed", ALL_SIZES, _same_element, (1, 1), needs_coq=True
    ),
    Claim("C5", "is_dense is torch's test, and the truth", BOUNDED, strides.same_test_as_torch, (1000, 30_000)),
    Claim("C6", "what canonical strides are", BOUNDED, strides.canonical_facts, (1000, 30_000)),
    Claim("C7", "packing loses, mixes and leaves nothing", BOUNDED, packing.packing_is_undone, (50_000, 1_000_000)),
    Claim("C8", "ranks of different strides: like elements are summed", BOUNDED, packing.same_element, (1350, 1350)),
    Claim("C9", "means come back in the parameter's strides", BOUNDED, packing.handed_back, (10, 10)),
    Claim("C10", "how far a mean may be off, for any order of additions", ALL_SIZES, _mean, (1, 1), needs_coq=True),
    Claim(
        "C11",
        "means over gloo are no further off",
        BOUNDED,
        within_bound,
        (12_000, 48_000),
        multi_process=True,
    ),
)
