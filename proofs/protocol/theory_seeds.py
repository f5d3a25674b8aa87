"""Faults in the machine that the theory's replays must notice, and in what Coq knows of it."""

from __future__ import annotations

from typing import Final

from ..seeded import Seed

PROTOCOL: Final = "knownddp/protocol.py"
MESSAGES: Final = "knownddp/messages.py"
LAUNCH_V: Final = "proofs/coq/Launch.v"
PROTOCOL_V: Final = "proofs/coq/Protocol.v"

SEEDS: Final = (
    Seed("held buckets go early", PROTOCOL, "and not buckets[position].is_held:", "and True:", ("B1",)),
    Seed(
        "a bucket goes before it is full",
        PROTOCOL,
        "and not left[position] and",
        "and left[position] < 2 and",
        ("B1",),
    ),
    Seed(
        "the end forgets a bucket",
        PROTOCOL,
        "rest = range(self._next, len(",
        "rest = range(self._next + 1, len(",
        ("B3", "B4"),
    ),
    Seed(
        "each rank decides itself about the order round",
        PROTOCOL,
        "order_due and any(touched)",
        "order_due and any(self.arrived)",
        ("B4",),
    ),
    Seed(
        "a second gradient counts as another's",
        PROTOCOL,
        "elif is_first and expected",
        "elif expected",
        ("B1",),
    ),
    Seed(
        "unexpected gradients count",
        PROTOCOL,
        "elif is_first and expected[i]:",
        "elif is_first:",
        ("B1",),
    ),
    Seed(
        "what came early is forgotten",
        PROTOCOL,
        "        self._count((*came, *repeated))\n",
        "",
        ("B1",),
    ),
    Seed(
        "patience waits for one gradient too many",
        PROTOCOL,
        "return self._left[self._next] + 1",
        "return self._left[self._next] + 2",
        ("B1",),
    ),
    Seed(
        "patience waits for the last bucket",
        PROTOCOL,
        "return self._left[self._next] + 1",
        "return self._left[-1] + 1",
        ("B1",),
    ),
    Seed("what came has not come", PROTOCOL, "            arrived[i] = 1\n", "", ("B1", "B2")),
    Seed("numbers must differ in every byte", PROTOCOL, "return any(a & b", "return all(a & b", ("B2",)),
    Seed(
        "complements are not complements",
        PROTOCOL,
        "(0xFFFFFFFF - signature)",
        "(0xFFFFFFFE - (signature & ~1))",
        ("B2",),
    ),
    Seed("a declaration is a dispute", MESSAGES, "b & DECLARED and b & NEEDED", "b & DECLARED", ("B2",)),
    Seed("what is carried is not agreed", MESSAGES, "b & (EXPECTED | CARRIED))", "b & EXPECTED)", ("B2",)),
    Seed(
        "what is touched late is not touched",
        MESSAGES,
        "IS_TOUCHED: Final = _table(lambda b: b & (TOUCHED | LATE))",
        "IS_TOUCHED: Final = _table(lambda b: b & LATE)",
        ("B2",),
    ),
    Seed(
        "Coq: held buckets go early",
        LAUNCH_V,
        "then advance t else t | None => t end.",
        "then t else t | None => t end.",
        ("B1",),
    ),
    Seed(
        "Coq: gone buckets are counted",
        LAUNCH_V,
        "if Nat.ltb k (next s) then (gone, None)",
        "if Nat.ltb (next s) k then (gone, None)",
        ("B1",),
    ),
    Seed(
        "Coq: a wait may be for what was not issued",
        PROTOCOL_V,
        "  | Wait k :: r => k < n /\\ waits_for_own total n r",
        "  | Wait k :: r => k <= n /\\ waits_for_own total n r",
        ("B4",),
    ),
    Seed(
        "Coq: ranks may issue different numbers", PROTOCOL_V, "  | [] => n = total\n", "  | [] => n <= total\n", ("B4",)
    ),
    Seed(
        "Coq: a late round hangs on the rank",
        PROTOCOL_V,
        "map Late (seq 0 n) ++ [Outcome]",
        "map Late (seq 0 (length (later l))) ++ [Outcome]",
        ("B3",),
    ),
    Seed("Coq: complements of one bit less", PROTOCOL_V, "N.lxor v (N.ones w).", "N.lxor v (N.ones (w - 1)).", ("B2",)),
)
