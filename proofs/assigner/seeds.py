"""Faults in the assigner, the planner, and what Coq knows of them."""

from __future__ import annotations

from typing import Final

from ..seeded import Seed

BUCKETS: Final = "knownddp/buckets.py"
PLAN: Final = "knownddp/plan.py"
ASSIGN_V: Final = "proofs/coq/Assign.v"
ORDER_V: Final = "proofs/coq/Order.v"
BOTH: Final = ("A13", "A15")
NEXT_STAGE: Final = "stage[key] = min(stage[key] + 1, last)"

SEEDS: Final = (
    Seed(
        "a bucket closes when its limit is exceeded",
        BUCKETS,
        "bucket.nbytes >= bucket.limit",
        "bucket.nbytes > bucket.limit",
        BOTH,
    ),
    Seed(
        "keys share their limits",
        BUCKETS,
        NEXT_STAGE,
        "stage.update(dict.fromkeys([*stage, key], min(stage[key] + 1, last)))",
        BOTH,
    ),
    Seed("the first limit stays", BUCKETS, NEXT_STAGE, "stage[key] = min(stage[key], last)", BOTH),
    Seed("limits run out", BUCKETS, NEXT_STAGE, "stage[key] += 1", BOTH),
    Seed("limits begin again", BUCKETS, NEXT_STAGE, "stage[key] = (stage[key] + 1) % (last + 1)", BOTH),
    Seed("a sparse item joins dense ones", BUCKETS, "        if is_alone:\n", "        if False:\n", BOTH),
    Seed(
        "dtype and device do not matter",
        BUCKETS,
        "    for index, nbytes, key, is_alone in items:\n",
        "    for index, nbytes, key, is_alone in items:\n        key = 0\n",
        BOTH,
    ),
    Seed("buckets are not sorted", BUCKETS, "assigned.sort(", "sorted(assigned, ", ("A15",)),
    Seed("buckets are sorted by their last index", BUCKETS, "bucket[0][0])", "bucket[0][-1])", ("A15",)),
    Seed("leftovers are lost", BUCKETS, "in filling.values())", "in ())", BOTH),
    Seed("leftovers report the last limit", BUCKETS, "bucket.limit) for", "limits[-1]) for", BOTH),
    Seed(
        "leftovers come in reverse", BUCKETS, "in filling.values())", "in reversed(filling.values()))", ("A13", "A16")
    ),
    Seed("items are put in front", BUCKETS, "bucket.indices.append(index)", "bucket.indices.insert(0, index)", BOTH),
    Seed("a sparse item has a limit", BUCKETS, "([index], NO_LIMIT)", "([index], limits[0])", BOTH),
    Seed("bytes are not added up", BUCKETS, "bucket.nbytes += nbytes", "bucket.nbytes = nbytes", BOTH),
    Seed("a closed bucket stays open", BUCKETS, "            del filling[key]\n", "", (*BOTH, "A16")),
    Seed(
        "the decision can see the environment",
        BUCKETS,
        "from collections.abc import",
        "import os\nfrom collections.abc import",
        ("A12",),
    ),
    Seed(
        "a bucket depends on where an object lies",
        BUCKETS,
        "bucket = filling.get(key)",
        "bucket = filling.get(key) if id(key) else None",
        ("A12",),
    ),
    Seed("what was not agreed is planned", PLAN, "in self.order if agreed[i]]", "in self.order]", ("A14",)),
    Seed(
        "a plan has the order of definition",
        PLAN,
        "for i in self.order if agreed[i]]",
        "for i in sorted(self.order) if agreed[i]]",
        ("A14",),
    ),
    Seed(
        "what is held back goes first",
        PLAN,
        "(late if item[0] in held else early)",
        "(early if item[0] in held else late)",
        ("A14",),
    ),
    Seed(
        "nothing is held back at first", PLAN, "            late = present\n", "            early = present\n", ("A14",)
    ),
    Seed("a plan mixes dtypes", PLAN, "keys.setdefault(s.key, len(keys))", "0", ("A14",)),
    Seed(
        "plans outlive the order they were made for",
        PLAN,
        "        self.has_learnt = True\n        self._plans.clear()",
        "        self.has_learnt = True",
        ("A14",),
    ),
    Seed(
        "plans outlive what is held back since",
        PLAN,
        "            self.held |= fresh\n            self._plans.clear()",
        "            self.held |= fresh",
        ("A14",),
    ),
    Seed(
        "a learnt order forgets who was not seen",
        PLAN,
        "            self.order += followers.get(i, ())\n",
        "",
        ("A17",),
    ),
    Seed(
        "a learnt order forgets who was not seen first",
        PLAN,
        "self.order = followers.get(None, [])",
        "self.order = []",
        ("A17",),
    ),
    Seed("ties are broken the other way", PLAN, "(positions[i], -i)", "(positions[i], i)", ("A17",)),
    Seed(
        "neighbours are those before",
        PLAN,
        "        for i in reversed(range(self._num_params)):\n",
        "        for i in range(self._num_params):\n",
        ("A17",),
    ),
    Seed(
        "Coq: a bucket closes when its limit is exceeded",
        ASSIGN_V,
        "N.leb (cap b) (total (items b))",
        "N.ltb (cap b) (total (items b))",
        ("A6",),
    ),
    Seed("Coq: a closed bucket stays open", ASSIGN_V, "(del k (opened s)) (fun", "(opened s) (fun", ("A1",)),
    Seed(
        "Coq: a bucket is only its last item",
        ASSIGN_V,
        "Bucket (items b ++ [x]) (cap b).",
        "Bucket [x] (cap b).",
        ("A1",),
    ),
    Seed(
        "Coq: items are put in front",
        ASSIGN_V,
        "Bucket (items b ++ [x]) (cap b).",
        "Bucket (x :: items b) (cap b).",
        ("A4",),
    ),
    Seed(
        "Coq: keys share their limits",
        ASSIGN_V,
        "if Nat.eqb j k then next ls (stage s k) else stage s j",
        "next ls (stage s k)",
        ("A2",),
    ),
    Seed("Coq: limits run out", ASSIGN_V, "Nat.min (S n) (length ls - 1)", "S n", ("A5",)),
    Seed(
        "Coq: leftovers come first",
        ASSIGN_V,
        "closed s ++ map snd (opened s)",
        "map snd (opened s) ++ closed s",
        ("A2",),
    ),
    Seed(
        "Coq: buckets are sorted by their last index",
        ORDER_V,
        "Nat.leb (first b) (first c)",
        "Nat.leb (final b) (final c)",
        ("A9",),
    ),
    Seed(
        "Coq: what is held back goes early",
        ORDER_V,
        "(assign ls (filter (fun x => negb (held x)) present),",
        "(assign ls present,",
        ("A10",),
    ),
    Seed(
        "Coq: the counterexample has equal limits",
        ORDER_V,
        "(sizes [2; 1; 1]%N) 2%N 3%N",
        "(sizes [2; 2; 2]%N) 2%N 3%N",
        ("A11",),
    ),
)
