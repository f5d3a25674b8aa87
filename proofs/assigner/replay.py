"""The shipped answers of assigner and planner, computed again by Coq's kernel from what the theorems are about."""

from __future__ import annotations

from ..claims import Evidence
from ..coqtool import replayed, term
from .inputs import Case, PlanCase, assigned, cases, plan_cases, planned

COMMON = """
Definition equal {A B : Type} (a : forall x y : A, {x = y} + {x <> y}) (b : forall x y : B, {x = y} + {x <> y})
  (p q : A * B) : {p = q} + {p <> q}.
Proof. decide equality. Defined.
Definition same (a b : list (list N * N)) : bool :=
  if list_eq_dec (equal (list_eq_dec N.eq_dec) N.eq_dec) a b then true else false.
Definition item_of (r : N * N * N * bool) : item := let '(i, b, k, s) := r in Item (N.to_nat i) b (N.to_nat k) s.
Definition places (b : bucket) : list N := map (fun x => N.of_nat (idx x)) (items b).
"""
ASSIGN_ROW = "list (N * N * N * bool) * list N * list (list N * N)"
ASSIGN = f"""{COMMON}
Definition ok (r : {ASSIGN_ROW}) : bool :=
  let '(given, limits, answer) := r in
  same (map (fun b => (places b, cap b)) (assign limits (map item_of given))) answer.
"""
PLAN_ROW = "list (N * N * N * bool) * list N * (list bool * list bool) * list (list N * N)"
PLAN = f"""{COMMON}
Definition flags (l : list bool) (x : item) : bool := nth (idx x) l false.
Definition told (held : N) (l : list bucket) : list (list N * N) := map (fun b => (places b, held)) l.
Definition ok (r : {PLAN_ROW}) : bool :=
  let '(order, limits, (agreed, held), answer) := r in
  let (early, late) := plan limits (map item_of order) (flags agreed) (flags held) in
  same (told 0 early ++ told 1 late) answer.
"""


def assign_row(case: Case) -> str:
    answer = [(list(indices), limit) for indices, limit in assigned(case)]
    items = [(index, nbytes, key, sparse) for index, nbytes, key, sparse in case.items]
    return term((items, list(case.limits), answer))


def plan_row(case: PlanCase) -> str:
    order, held, plan = planned(case)
    items = [(i, *case.sizes[i]) for i in order]
    agreed = [bool(flag) for flag in case.agreed]
    answer = [(list(bucket.param_indices), int(bucket.is_held)) for bucket in plan.buckets]
    return term((items, list(case.limits), (agreed, [i in held for i in range(len(agreed))]), answer))


def replay_assign(quick: bool) -> Evidence:
    return Evidence(replayed("Assign", ASSIGN, ASSIGN_ROW, [assign_row(case) for case in cases(quick)]))


def replay_plan(quick: bool) -> Evidence:
    rows = [plan_row(case) for case in plan_cases(100 if quick else 1000)]
    return Evidence(replayed("Order", PLAN, PLAN_ROW, rows))
