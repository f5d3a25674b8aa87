"""What ranks do, as values: a setup, and for each rank a program of steps.

``fires`` says which gradients come in a backward, and in which order: this is what the shipped machine is fed with
where its answers are compared with what a real wrapper does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

PLAIN: Final = "plain"
HIDDEN: Final = "hidden"  # its gradient comes in a backward inside the backward, which the engine does not foretell
UNDEFINED: Final = "undefined"  # reached, but by a gradient that is None
NOTHING: Final[frozenset[int]] = frozenset()


class Use(NamedTuple):
    """One place where a forward uses a parameter."""

    param: int
    kind: str = PLAIN


@dataclass(frozen=True, slots=True)
class Call:
    """A forward.

    Attributes:
        uses: in the order in which a backward comes through them.
        declared: what it declares unused.
        synchronises: else it runs under ``no_sync``.
        raises_after: after so many uses its backward raises.
    """

    uses: tuple[Use, ...]
    declared: frozenset[int] = NOTHING
    synchronises: bool = True
    raises_after: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """Calls, then backwards, each of the sum of the outputs of some of the calls; no call: no backward."""

    calls: tuple[Call, ...]
    backwards: tuple[tuple[int, ...], ...] = ((0,),)
    zeroes: bool = False  # ``.grad`` is set to None first


@dataclass(frozen=True, slots=True)
class Setup:
    """What all ranks have in common.

    Attributes:
        shapes: of the parameters.
        doubles: the parameters in float64; others are in float32.
        caps: bucket sizes in bytes.
        agreement: what to do about declarations that differ.
        finds_unused, is_static: as for the wrapper.
        has_buffer: the module has a buffer to synchronise.
        checks: models are compared at construction.
        joins: all steps are in a join context, and ranks may have different numbers of them.
        divides_by_initial: as for the join context.
    """

    shapes: tuple[tuple[int, ...], ...] = ((1,), (2,), (1,))
    doubles: frozenset[int] = NOTHING
    caps: tuple[int, ...] = (4, 8)
    agreement: str = "union"
    finds_unused: bool = False
    is_static: bool = False
    has_buffer: bool = False
    checks: bool = False
    joins: bool = False
    divides_by_initial: bool = True

    @property
    def num_params(self) -> int:
        return len(self.shapes)


Program = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Script:
    """A setup and one program a rank."""

    setup: Setup
    programs: tuple[Program, ...]

    @property
    def world(self) -> int:
        return len(self.programs)

    def __str__(self) -> str:
        rows = [f"rank {rank}: " + "; ".join(map(repr, steps)) for rank, steps in enumerate(self.programs)]
        return "\n  ".join([repr(self.setup), *rows])


class Firing(NamedTuple):
    """One gradient that comes; ``defined`` or None."""

    param: int
    defined: bool = True


def fires(calls: Sequence[Call]) -> tuple[list[Firing], bool]:
    """The gradients that a backward brings through the sum of the outputs of ``calls``, and whether it then raises.

    The last call's come first. What is not hidden comes once, when the backward came through all of its uses.
    """
    through = [use for call in reversed(calls) for use in call.uses]
    last = {use.param: place for place, use in enumerate(through) if use.kind != HIDDEN}
    defined = {use.param for use in through if use.kind == PLAIN}
    found: list[Firing] = []
    place = 0
    for call in reversed(calls):
        for at, use in enumerate(call.uses):
            if call.raises_after == at:
                return found, True
            if use.kind == HIDDEN:
                found.append(Firing(use.param))
            elif last[use.param] == place:
                found.append(Firing(use.param, use.param in defined))
            place += 1
        if call.raises_after == len(call.uses):
            return found, True
    return found, False


def foretold(calls: Sequence[Call]) -> set[int]:
    """The parameters that the engine knows a backward through ``calls`` to reach."""
    return {use.param for call in calls for use in call.uses if use.kind != HIDDEN}


def using(*params: int, declared: Sequence[int] | frozenset[int] = (), **more: int | bool | None) -> Call:
    """A forward that uses each of these once, in this order."""
    return Call(tuple(map(Use, params)), frozenset(declared), **more)  # type: ignore[arg-type]
