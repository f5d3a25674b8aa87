"""What ranks do, as values: a setup, and for each rank a program of forwards and backwards.

An explorer runs a script in every order in which its parts may happen; see ``explore.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields

from knownddp.protocol import Agreement

NOTHING: frozenset[int] = frozenset()
SIGNATURE = 7  # of models that are alike


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward with gradients, outside of a backward. What windows before it owed is judged here."""

    synchronises: bool = True


@dataclass(frozen=True, slots=True)
class Backward:
    """A backward. Its gradients come in any order, once for each mention in ``fires``.

    Attributes:
        declared: what each forward that takes part declared unused.
        fires: the parameters whose gradient comes.
        hidden: what of ``fires`` the engine does not foretell, where it is asked: what reentrant checkpoints hide.
        undefined: parameters that the graph reaches without a defined gradient.
        frozen: parameters that are not trainable on this rank.
        synchronises: else it runs under ``no_sync``.
        may_raise: at every point from its begin to its end an exception may leave it, or none.
        fails_late: packing for the late round goes wrong on this rank, where there is one.
        nested, guessed, signature: see ``WindowProtocol.begin``.
        marks: in program order: parameters with a hook that calls a collective of the user's.
    """

    fires: tuple[int, ...]
    declared: tuple[frozenset[int], ...] = (NOTHING,)
    hidden: frozenset[int] = NOTHING
    undefined: frozenset[int] = NOTHING
    frozen: frozenset[int] = NOTHING
    synchronises: bool = True
    may_raise: bool = False
    fails_late: bool = False
    nested: bool = False
    guessed: bool = False
    signature: int = SIGNATURE
    marks: frozenset[int] = NOTHING


@dataclass(frozen=True, slots=True)
class ZeroGrad:
    """All ``.grad`` become None."""


@dataclass(frozen=True, slots=True)
class LeaveJoin:
    """The end of a join context: pay what is owed, then shadow the others until they are here too."""


Op = Forward | Backward | ZeroGrad | LeaveJoin
Program = tuple[Op, ...]


@dataclass(frozen=True, slots=True)
class Setup:
    """What all ranks have in common.

    Attributes:
        nbytes: the size of each parameter.
        limits: bucket sizes in bytes.
        agreement: what to do about declarations that differ.
        finds_unused: expect what the engine is about to run.
        is_static: the graph was promised not to change.
        order: the launch order already learnt; None: the first window is to come.
        held: parameters that are launched only when the backward is over.
        in_program_order: one group is shared with the user's collectives.
        joins: programs begin inside of a join context and leave it by ``LeaveJoin``.
        divides_by_initial: in the join context means are taken over all ranks, not over those that have inputs.
    """

    nbytes: tuple[int, ...] = (4, 8, 4)
    limits: tuple[int, ...] = (4, 8)
    agreement: Agreement = Agreement.UNION
    finds_unused: bool = False
    is_static: bool = False
    order: tuple[int, ...] | None = (2, 1, 0)
    held: frozenset[int] = NOTHING
    in_program_order: bool = False
    joins: bool = False
    divides_by_initial: bool = True

    @property
    def num_params(self) -> int:
        return len(self.nbytes)


@dataclass(frozen=True, slots=True)
class Script:
    """A setup and one program a rank."""

    setup: Setup
    programs: tuple[Program, ...]

    @property
    def windows(self) -> list[int]:
        """How many windows each rank begins, if none is in a join context."""
        return [sum(isinstance(step, Backward) and step.synchronises for step in one) for one in self.programs]

    def __str__(self) -> str:
        programs = [f"rank {rank}: {'; '.join(map(_brief, one))}" for rank, one in enumerate(self.programs)]
        return "\n  ".join([_brief(self.setup), *programs])


def _brief(value: Op | Setup) -> str:
    """With the attributes that are not the usual ones."""
    usual = {field.name: field.default for field in fields(value)}
    told = {name: getattr(value, name) for name, default in usual.items() if getattr(value, name) != default}
    said = [f"{name}={_plain(what)}" for name, what in told.items()]
    return f"{type(value).__name__}({', '.join(said)})"


def _plain(value: object) -> str:
    if isinstance(value, frozenset):
        return "{" + ", ".join(map(str, sorted(value))) + "}"
    return "(" + ", ".join(map(_plain, value)) + ")" if isinstance(value, tuple) else str(value)


def step(
    unused: Collection[int] = (),
    fires: Sequence[int] | None = None,
    *,
    of: int = 3,
    **more: bool | int | frozenset[int],
) -> Program:
    """A forward that declares ``unused`` and its backward, which brings all else unless ``fires`` says otherwise."""
    brings = tuple(fires) if fires is not None else tuple(i for i in range(of) if i not in unused)
    return (Forward(), Backward(brings, (frozenset(unused),), **more))  # type: ignore[arg-type]
