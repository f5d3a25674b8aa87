"""A: what is claimed of the assigner and the planner (buckets.py, plan.py)."""

from __future__ import annotations

from typing import Final

from ..claims import ALL_SIZES, BOUNDED, Claim, Evidence
from ..coqtool import theorems
from .conformance import torch_agrees
from .enumerated import example, function_of_specs, idempotent, learnt_order
from .replay import replay_assign, replay_plan


def _theorem(name: str, says: str, source: str, *names: str) -> Claim:
    def run(quick: bool) -> Evidence:
        return Evidence(theorems(source, names))

    return Claim(name, says, ALL_SIZES, run, (len(names), len(names)), needs_coq=True)


def _need_not_refine(quick: bool) -> Evidence:
    assert example(3) == [[0, 1], [2]], "the example is another one by now"
    assert example(2) == [[0], [1, 2]], "the example is another one by now"
    return Evidence(theorems("Order", ("smaller_limits_need_not_refine",)))


CLAIMS: Final = (
    _theorem("A1", "every item is in exactly one bucket", "Assign", "partition"),
    _theorem("A2", "a key's buckets are those its items alone would get", "Assign", "keys_are_independent"),
    _theorem(
        "A3", "a sparse item is alone; no bucket mixes keys or kinds", "Assign", "sparse_alone", "no_other_bucket"
    ),
    _theorem("A4", "a key's items keep their order, bucket after bucket", "Assign", "order_kept"),
    _theorem("A5", "the n-th bucket of a key has the n-th limit, the last repeats", "Assign", "limit_in_force"),
    _theorem("A6", "a bucket exceeds its limit by less than its last item", "Assign", "overshoot"),
    _theorem(
        "A7", "B bytes of a key under limits of at least m: at most B/m + 1 buckets", "Assign", "number_of_buckets"
    ),
    _theorem(
        "A8", "buckets come as they close, then leftovers as they opened", "Order", "launch_order", "blind_to_indices"
    ),
    _theorem("A9", "without indices given: sorted by smallest index", "Order", "sorted_by_smallest"),
    _theorem("A10", "a plan places the agreed parameters once each, and no other", "Order", "plan_places_agreed"),
    Claim(
        "A11",
        "NOT promised: buckets under a smaller limit need not be parts of those under a larger",
        ALL_SIZES,
        _need_not_refine,
        (1, 1),
        needs_coq=True,
    ),
    Claim("A12", "what makes a plan can see nothing of a rank or a run", BOUNDED, function_of_specs, (100, 100)),
    Claim("A13", "Coq's kernel gives the assigner's answers", BOUNDED, replay_assign, (300, 3000), needs_coq=True),
    Claim("A14", "Coq's kernel gives the planner's plans", BOUNDED, replay_plan, (100, 1000), needs_coq=True),
    Claim("A15", "torch gives the same assignments", BOUNDED, torch_agrees, (4000, 150_000)),
    Claim("A16", "assigning an assignment again changes nothing", BOUNDED, idempotent, (2000, 100_000)),
    Claim("A17", "an order learnt from ranks has every parameter once", BOUNDED, learnt_order, (280, 3000)),
)
