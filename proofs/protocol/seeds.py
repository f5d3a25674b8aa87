"""Faults of the protocol, each of which the explorer must find: see ``proofs/seeded.py``."""

from __future__ import annotations

from typing import Final

from ..seeded import Seed

PROTOCOL: Final = "knownddp/protocol.py"
PLAN: Final = "knownddp/plan.py"
COUNTDOWN: Final = "knownddp/countdown.py"
MESSAGES: Final = "knownddp/messages.py"

SEEDS: Final = (
    Seed(
        "buckets leave as they fill, in any order",
        PROTOCOL,
        "        if self._count(param_index) == self._next:\n",
        "        filled = self._count(param_index)\n"
        "        if self.phase is Phase.REDUCING and filled != NOT_PLACED:\n"
        "            return range(filled, filled + 1)\n"
        "        if filled == self._next:\n",
        ("B5", "B9", "B13", "B15"),
    ),
    Seed(
        "a second firing counts as ready again",
        PROTOCOL,
        "        elif is_first and self._expected[param_index]:",
        "        elif self._expected[param_index]:",
        ("B5",),
    ),
    Seed(
        "a bucket does not wait for its gradients",
        PROTOCOL,
        "while position < len(buckets) and not left[position] and not buckets[position].is_held:",
        "while position < len(buckets) and not buckets[position].is_held:",
        ("B5",),
    ),
    Seed(
        "a held bucket does not wait for the end",
        PROTOCOL,
        "while position < len(buckets) and not left[position] and not buckets[position].is_held:",
        "while position < len(buckets) and not left[position]:",
        ("B6",),
    ),
    Seed(
        "a rank waits for what it does not expect itself",
        PROTOCOL,
        "left = [size - missing[bucket] for bucket, size in enumerate(left)]",
        "left = list(left)",
        ("B5",),
    ),
    Seed(
        "the first bucket does not wait for OPEN",
        PROTOCOL,
        "            self._ask_for_opening()\n        elif self",
        "            self._ask_for_opening()\n            return range(1)\n        elif self",
        ("B5",),
    ),
    Seed(
        "a rank plans what it expects itself",
        PROTOCOL,
        "plan = self.plan = self.planner.plan(agreed)",
        "plan = self.plan = self.planner.plan(self._expected if any(self._expected) else agreed)",
        ("B5", "B13", "B15", "B16"),
    ),
    Seed(
        "the agreed set is what all ranks expect",
        MESSAGES,
        "IS_AGREED: Final = _table(lambda b: b & (EXPECTED | CARRIED))",
        "IS_AGREED: Final = _table(lambda b: b & CARRIED or b & EXPECTED and not b & LACKING)",
        ("B5", "B13", "B15"),
    ),
    Seed(
        "what was promised is averaged though nobody touched it",
        MESSAGES,
        "IS_TOUCHED: Final = _table(lambda b: b & (TOUCHED | LATE))",
        "IS_TOUCHED: Final = _table(lambda b: b & (TOUCHED | LATE | PROMISED))",
        ("B5", "B8", "B13"),
    ),
    Seed(
        "what was accumulated is sent but not said to be touched",
        PROTOCOL,
        "for bit, some in ((TOUCHED, self._carried), (LATE, self._late)):",
        "for bit, some in ((LATE, self._late),):",
        ("B7",),
    ),
    Seed(
        "what no_sync accumulated is forgotten",
        PROTOCOL,
        'carries = int.from_bytes(flags_of(carried, self._num_params), "little")',
        "carries = 0",
        ("B7",),
    ),
    Seed(
        "a rank that no gradient came late on leaves out the late round",
        PROTOCOL,
        "        late = indices_of(late_flags)\n",
        "        late = indices_of(late_flags) if self._late else ()\n",
        ("B5", "B13", "B15", "B16"),
    ),
    Seed(
        "the late round reduces everything again",
        PROTOCOL,
        "self.planner.plan(late_flags) if late else None",
        "self.planner.plan(touched) if late else None",
        ("B5",),
    ),
    Seed(
        "a second firing after launch is not late",
        PROTOCOL,
        "        if bucket < self._next:  # [Note: late]; NOT_PLACED is smaller than any position\n",
        "        if bucket == NOT_PLACED:\n",
        ("B5",),
    ),
    Seed(
        "what came late in one window is late in the next",
        PROTOCOL,
        "        self._late: set[int] = set()\n",
        '        self._late: set[int] = getattr(self, "_late", set())\n',
        ("B5",),
    ),
    Seed(
        "what comes twice is not held from then on",
        PROTOCOL,
        "            self.planner.hold(late if self.detects_unused else [i for i in late if self.agreed[i]])\n",
        "",
        ("B6",),
    ),
    Seed(
        "what the engine did not foretell is not learnt",
        PROTOCOL,
        "                self.unforeseen.update(late)\n",
        "                pass\n",
        ("B9",),
    ),
    Seed(
        "plans made before parameters were held are used again",
        PLAN,
        "            self.held |= fresh\n            self._plans.clear()\n",
        "            self.held |= fresh\n",
        ("B6",),
    ),
    Seed(
        "plans made before the order was learnt are used again",
        PLAN,
        "        self.has_learnt = True\n        self._plans.clear()\n",
        "        self.has_learnt = True\n",
        ("B6",),
    ),
    Seed(
        "a plan is made of all parameters",
        PLAN,
        "present = [items[i] for i in self.order if agreed[i]]",
        "present = [items[i] for i in self.order]",
        ("B5",),
    ),
    Seed(
        "a rank learns the order that it saw itself",
        PROTOCOL,
        "self.planner.learn(combined[:n], ",
        "self.planner.learn(self.order_message()[:n], ",
        ("B6",),
    ),
    Seed(
        "differing declarations raise only where the parameter is expected",
        PROTOCOL,
        "        if disputed and self.agreement is Agreement.SAME:",
        "        if any(self._expected[i] for i in disputed) and self.agreement is Agreement.SAME:",
        ("B9",),
    ),
    Seed(
        "a rank sees a dispute only in what it expects itself",
        PROTOCOL,
        "        disputed = indices_of(message[HEADER_BYTES:].translate(IS_DISPUTED))\n",
        "        said = indices_of(message[HEADER_BYTES:].translate(IS_DISPUTED))\n"
        "        disputed = tuple(i for i in said if self._expected[i])\n",
        ("B9",),
    ),
    Seed(
        "under trust nobody hears of a late gradient",
        PROTOCOL,
        "Closing(Fault.TRUST if late else None,",
        "Closing(None,",
        ("B9",),
    ),
    Seed(
        "in program order buckets leave as they fill where ranks expect different gradients",
        PROTOCOL,
        "self._waits_for_end = self.in_program_order and any(lane.translate(IS_UNEVEN))",
        "self._waits_for_end = False",
        ("B9",),
    ),
    Seed(
        "an exception is not told",
        PROTOCOL,
        "what = Flag.CLOSE | (Flag.FAILED if failed else 0)",
        "what = Flag.CLOSE | (Flag.FAILED if failed and self.countdown.fired[0] else 0)",
        ("B10",),
    ),
    Seed(
        "after an exception the window is not counted on the rank that raised nothing",
        PROTOCOL,
        "        self._move(Phase.SETTLING, Phase.IDLE)\n        self.window += 1\n",
        "        self._move(Phase.SETTLING, Phase.IDLE)\n        self.window += any(self.countdown.fired)\n",
        ("B10",),
    ),
    Seed(
        "a window that failed owes what it promised",
        PROTOCOL,
        "        if not failed:\n            self._since_forward |= self._told\n",
        "        self._since_forward |= self._told\n",
        ("B11",),
    ),
    Seed(
        "a faulty opening is not counted as a window",
        PROTOCOL,
        "            self.countdown.stop()\n            self.window += 1\n",
        "            self.countdown.stop()\n",
        ("B9", "B11"),
    ),
    Seed(
        "a changed graph is not told",
        PROTOCOL,
        " | (Flag.CHANGED if changed else 0)",
        "",
        ("B11",),
    ),
    Seed(
        "models that differ are not seen",
        PROTOCOL,
        "        if self._contradicts(message, 3, 4):\n",
        "        if self._contradicts(message, 5, 2):\n",
        ("B11",),
    ),
    Seed(
        "a forward does not settle what was owed",
        PROTOCOL,
        'is settled."""\n        self._since_forward = 0\n',
        'is settled."""\n',
        ("B8",),
    ),
    Seed(
        "a second backward of a forward forgets the first",
        PROTOCOL,
        "            self._since_forward |= self._told\n",
        "            self._since_forward = self._told\n",
        ("B8",),
    ),
    Seed(
        "a joined rank votes",
        PROTOCOL,
        "            return self._message(Flag.OPEN, signature, carries * CARRIED)\n",
        "            return self._message(Flag.OPEN, signature, lane | carries * CARRIED)\n",
        ("B12",),
    ),
    Seed(
        "a joined rank says that it saw no output",
        PROTOCOL,
        "            return self._message(Flag.OPEN, signature, carries * CARRIED)\n",
        "            return self._message(Flag.OPEN | Flag.GUESSED, signature, carries * CARRIED)\n",
        ("B12",),
    ),
    Seed(
        "a wrong guess of the agreed set is kept",
        PROTOCOL,
        "        if agreed != self.agreed:\n            self._start_again(agreed)",
        "        if not agreed:\n            self._start_again(agreed)",
        ("B5", "B6", "B13"),
    ),
    Seed(
        "what came before a wrong guess was known is forgotten",
        PROTOCOL,
        "        for i in (*fired, *repeated):\n",
        "        for i in repeated:\n",
        ("B5",),
    ),
    Seed(
        "a hook counts the last gradient of a bucket",
        COUNTDOWN,
        "self.left[bucket] < 2",
        "self.left[bucket] < 1",
        ("B5", "B9"),
    ),
    Seed(
        "what a hook counts is not known to have come",
        COUNTDOWN,
        "        self.fired[param_index] = 1\n        return True\n",
        "        return True\n",
        ("B6", "B9", "B10", "B11", "B12", "B13"),
    ),
    Seed(
        "the explorer follows a rank alone that awaits what others have yet to send",
        "proofs/protocol/explore.py",
        "if reduced and events and is_answered:",
        "if reduced and events:",
        ("B14",),
    ),
)
