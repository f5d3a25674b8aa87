"""Scripts drawn at random: what ranks declare, use and drop differs from rank to rank and from step to step."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from .script import HIDDEN, PLAIN, UNDEFINED, Call, Program, Script, Setup, Step, Use

SHAPES = ((1,), (2,), (3,), (2, 2))
CAPS = ((4, 8), (8,), (1000,), (4, 1000))
FLAVOURS = ("union", "union", "union", "finds", "finds", "same", "trust", "static", "join")


def drawn(seed: int, worlds: Sequence[int] = (2, 3, 4)) -> Script:
    """The script of that number."""
    return _Draw(random.Random(seed)).script(worlds)


class _Draw:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.flavour = rng.choice(FLAVOURS)
        self.n = rng.randint(1, 5)
        self.goes_wrong = rng.random() < 0.3  # some backwards raise

    def _is(self, probability: float) -> bool:
        return self.rng.random() < probability

    def _some(self, probability: float) -> frozenset[int]:
        return frozenset(i for i in range(self.n) if self._is(probability))

    def script(self, worlds: Sequence[int]) -> Script:
        rng, world = self.rng, self.rng.choice(worlds)
        setup = Setup(
            shapes=tuple(rng.choice(SHAPES) for _ in range(self.n)),
            doubles=self._some(0.2),
            caps=rng.choice(CAPS),
            agreement=self.flavour if self.flavour in ("same", "trust") else "union",
            finds_unused=self.flavour == "finds",
            is_static=self.flavour == "static",
            has_buffer=self._is(0.3),
            checks=self._is(0.1),
        )
        if self.flavour == "join":
            setup = dataclasses.replace(setup, joins=True, divides_by_initial=self._is(0.5))
            return Script(setup, tuple(self._uneven(rng.randint(0, 3)) for _ in range(world)))
        windows = rng.randint(1, 4)
        if self.flavour == "trust":
            program = tuple(self._whole(self._some(0.4)) for _ in range(windows))
            return Script(setup, (program,) * world)
        if self.flavour == "static":
            return Script(setup, tuple(self._static(windows) for _ in range(world)))
        declared = [self._some(0.4) for _ in range(windows)]
        programs = [self._program(declared) for _ in range(world)]
        if self._is(0.3):  # a forward after the last backward: on all ranks, since it may wait for rank 0's buffers
            programs = [(*one, Step((self._call(self._some(0.3), synchronises=True),), ())) for one in programs]
        return Script(setup, tuple(programs))

    def _shuffled(self, params: frozenset[int] | set[int]) -> list[int]:
        return self.rng.sample(sorted(params), len(params))

    def _whole(self, declared: frozenset[int]) -> Step:
        """What is not declared is used once."""
        uses = tuple(map(Use, self._shuffled(frozenset(range(self.n)) - declared)))
        return Step((Call(uses, declared),), zeroes=True)

    def _uneven(self, inputs: int) -> Program:
        """Nothing that was promised is left out: that would be an error, and the end of the join context."""
        steps = []
        for _ in range(inputs):
            declared = self._some(0.4)
            uses = [Use(i) for i in range(self.n) if i not in declared or self._is(0.2)]
            uses += [Use(i, HIDDEN) for i in range(self.n) if self._is(0.1)]
            self.rng.shuffle(uses)
            steps.append(Step((Call(tuple(uses), declared),), zeroes=self._is(0.5)))
        return tuple(steps)

    def _static(self, windows: int) -> Program:
        call = self._call(self._some(0.3), synchronises=True)
        steps = [Step((call,), zeroes=self._is(0.5)) for _ in range(windows)]
        if self._is(0.2):
            steps[-1] = Step((self._call(self._some(0.3), synchronises=True),), zeroes=True)
        return tuple(steps)

    def _program(self, declared: Sequence[frozenset[int]]) -> Program:
        """As many windows as there are in ``declared``."""
        steps: list[Step] = []
        window = 0
        while window < len(declared):
            zeroes = self._is(0.5)
            unused = declared[window] if self.flavour == "same" and self._is(0.8) else self._some(0.4)
            unused = declared[window] if self._is(0.4) else unused
            if self._is(0.15):  # its output is dropped
                steps.append(Step((self._call(unused, synchronises=True),), ()))
            if self._is(0.25):
                steps.append(Step((self._call(unused, synchronises=False),), zeroes=zeroes))
                zeroes = zeroes and self._is(0.2)
            if window + 1 < len(declared) and self._is(0.15):
                steps.append(Step((self._call(unused, synchronises=True),), ((0,), (0,)), zeroes=zeroes))
                window += 2
            elif self._is(0.2):
                calls = (self._call(unused, synchronises=True), self._call(self._some(0.4), synchronises=True))
                steps.append(Step(calls, ((0, 1),), zeroes=zeroes))
                window += 1
            else:
                raises = self.goes_wrong and self._is(0.3)
                steps.append(Step((self._call(unused, synchronises=True, raises=raises),), zeroes=zeroes))
                window += 1
        return tuple(steps)

    def _call(self, declared: frozenset[int], *, synchronises: bool, raises: bool = False) -> Call:
        """Mostly what is not declared is used once; but any use of any parameter is possible."""
        params = set(range(self.n)) - declared
        if self._is(0.1):
            params = set()  # a loss without parameters
        elif self._is(0.3):
            params = set(self._some(0.6))
        uses = [Use(i, self.rng.choice((PLAIN, PLAIN, PLAIN, PLAIN, PLAIN, HIDDEN, UNDEFINED))) for i in params]
        uses += [Use(i, HIDDEN) for i in sorted(params) if self._is(0.1)]
        self.rng.shuffle(uses)
        after = self.rng.randint(0, len(uses)) if raises else None
        return Call(tuple(uses), declared, synchronises, after)
