"""Faults in what drives the machine and moves tensors: each is planted in a copy and must be noticed.

The explorer of the machine cannot see them, since it has a driver of its own.
"""

from __future__ import annotations

from typing import Final

from ..seeded import Seed

_LAUNCHES = "        own_error = gradients.launch_rest(protocol.plan, failed=failed)\n"
_LATE = "        own_error = own_error or (self._late_one_taken(gradients) if not failed else None)\n"
_WAITS_FOR_HOOK = "        own_error = (yield from gradients.wait_for_hook()) or self.buffers.finish()"
_SENDS_CLOSE = (
    "        failed = failed or own_error is not None\n"
    "        graph = self._graph_of(window)\n"
    "        changed = window.has_graph and not failed and self.history.breaks_promise(graph)\n"
    "        closed = self.combine("
    "protocol.close(self._promised(window), failed=failed, changed=changed))\n"
)

SEEDS: Final = (
    Seed(
        "buckets that may go together go in reverse",
        "knownddp/filling.py",
        "        for position in positions:\n",
        "        for position in reversed(positions):\n",
        ("P2", "P5"),
    ),
    Seed(
        "where all gradients are there they are packed in another order",
        "knownddp/exchange.py",
        "        first = bucket.param_indices[0]\n        if bucket.is_sparse:\n",
        "        if self._is_plain:\n"
        "            bucket = bucket._replace(param_indices=tuple(sorted(bucket.param_indices)))\n"
        "        first = bucket.param_indices[0]\n        if bucket.is_sparse:\n",
        ("P5",),
    ),
    Seed(
        "what stood in .grad is not averaged",
        "knownddp/exchange.py",
        "            held_back = [None if travelled[i] else self.held_back[i] for i",
        "            held_back = [None if travelled[i] or self.held_back[i] is not None else None for i",
        ("P2", "P3", "P5"),
    ),
    Seed(
        "what nobody touched gets a mean",
        "knownddp/exchange.py",
        "        are_touched = list(map(touched.__getitem__, flight.bucket.param_indices))\n",
        "        are_touched = [1] * len(flight.bucket.param_indices)\n",
        ("P2", "P5"),
    ),
    Seed(
        "after an error gradients are not put back",
        "knownddp/closing.py",
        "            window.gradients.restore()\n        window.gradients.release()\n",
        "            pass\n        window.gradients.release()\n",
        ("P5",),
    ),
    Seed(
        "what came is looked at one gradient too late",
        "knownddp/filling.py",
        "            self.arrivals.wait_for(self.protocol.patience)\n",
        "            self.arrivals.wait_for(self.protocol.patience + 1)\n",
        ("P2",),
    ),
    Seed(
        "one rank leaves out the late round",
        "knownddp/closing.py",
        "        if closing.late_plan is not None:\n",
        "        if closing.late_plan is not None and self.comm.rank != 1:\n",
        ("P2", "P5"),
    ),
    Seed(
        "what came late replaces what came in time",
        "knownddp/exchange.py",
        "                self._set_means({i: mean if earlier is None else earlier + mean})\n",
        "                self._set_means({i: mean})\n",
        ("P5",),
    ),
    Seed(
        "the pool hands out memory that .grad refers to",
        "knownddp/pool.py",
        "        if kept is not None and kept.is_free():\n",
        "        if kept is not None:\n",
        ("P3", "P5"),
    ),
    Seed(
        "shares are divided by two, whatever the number of ranks",
        "knownddp/exchange.py",
        "        self._divisor = 1 if terms.hook is not None else terms.divisor\n",
        "        self._divisor = 1 if terms.hook is not None else 2\n",
        ("P2", "P5"),
    ),
    Seed(
        "CLOSE is sent before the rest of the buckets",
        "knownddp/closing.py",
        _LAUNCHES + _WAITS_FOR_HOOK + " or own_error\n" + _LATE + _SENDS_CLOSE,
        _WAITS_FOR_HOOK + "\n" + _SENDS_CLOSE + _LAUNCHES,
        ("P2", "P3", "P5"),
    ),
    Seed(
        "means are handed back before they have come",
        "knownddp/closing.py",
        "        gradients.wait()\n        closing = ",
        "        closing = ",
        ("P2", "P3", "P5"),
    ),
    Seed(
        "buckets travel in the lane of messages",
        "knownddp/comm.py",
        "            return _work(group.allreduce([real], _SUM), real)\n",
        "            return _work(self._control_lane().allreduce([real], _SUM), real)\n",
        ("P1", "P2"),
    ),
    Seed(
        "two ranks swap a bucket and keep their own",
        "knownddp/comm.py",
        "functools.partial(tensor.add_, room)",
        "functools.partial(tensor.add_, tensor)",
        ("P2", "P3", "P5"),
    ),
    Seed(
        "only what rank 0 says is heard",
        "knownddp/comm.py",
        "np.bitwise_or.reduce(self._rows)",
        "np.bitwise_or.reduce(self._rows[:1])",
        ("P2", "P3", "P5"),
    ),
    Seed(
        "what no_sync accumulated is not announced",
        "knownddp/reducer.py",
        "        carried = [i for i in self.touched_locally if window.gradients.held_back[i] is not None]\n",
        "        carried: list[int] = []\n",
        ("P3", "P5"),
    ),
    Seed(
        "what no_sync accumulated is announced for ever",
        "knownddp/closing.py",
        "        self.touched_locally.clear()\n        costly",
        "        costly",
        ("P5",),
    ),
    Seed(
        "ranks that ran out of inputs count, though they should not",
        "knownddp/join.py",
        "self._comm.world_size if hook.divides_by_initial else len(still_active)\n",
        "self._comm.world_size\n",
        ("P3", "P5"),
    ),
    Seed(
        "a rank that ran out of inputs keeps the last mean",
        "knownddp/join.py",
        "        for param, grad in self._set_aside:\n            param.grad = grad\n",
        "        for param, grad in self._set_aside:\n            pass\n",
        ("P3", "P5"),
    ),
    Seed(
        "a hook waits for OPEN where it should look",
        "knownddp/filling.py",
        "return (self.protocol.wants_opening or is_at_hand) and opening.is_completed()",
        "return self.protocol.wants_opening",
        ("P2", "P4"),
    ),
)
