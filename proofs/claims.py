"""What a claim is, where the claims are, and how one is run."""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

# Each has CLAIMS. The last plants faults in what the others are about, to see that they notice.
MODULES: Final = (
    "proofs.assigner.claims",
    "proofs.protocol.theory",
    "proofs.protocol.claims",
    "proofs.layout.claims",
    "proofs.pins.claims",
    "proofs.gates",
    "proofs.seeded",
)
ALL_SIZES: Final = "all sizes"
BOUNDED: Final = "bounded"


class Refuted(AssertionError):
    """A claim does not hold."""


class ToolMissing(Exception):
    """What a claim is checked with is not installed here."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a run of a claim looked at.

    Attributes:
        cases: how many inputs, states, traces ... were checked.
        bounds: the bounds of this run in words, or "".
    """

    cases: int
    bounds: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement about the shipped code, and the check that could refute it.

    Attributes:
        name: as README.md numbers it.
        says: the statement in one line.
        strength: ``ALL_SIZES`` or ``BOUNDED``.
        run: does the check, the short form of it if its argument is true. Raises ``AssertionError`` when refuted.
        floor: at least so many cases in the short and in the full form: a generator that gives none proves nothing.
        needs_coq: without coqc it is skipped, and fails where KNOWNDDP_PROOFS=strict.
        multi_process: it starts processes of its own.
    """

    name: str
    says: str
    strength: str
    run: Callable[[bool], Evidence]
    floor: tuple[int, int]
    needs_coq: bool = False
    multi_process: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """How a claim fared. ``skipped`` is the reason why it was not checked, or ""."""

    claim: Claim
    seconds: float
    evidence: Evidence
    skipped: str = ""


def is_strict() -> bool:
    """Whether a missing tool is a failure."""
    return os.environ.get("KNOWNDDP_PROOFS") == "strict"


def load(names: Iterable[str] = ()) -> list[Claim]:
    """The claims of those names, or all, in the order of ``MODULES``."""
    claims: list[Claim] = []
    wanted = set(names)
    for module in map(importlib.import_module, MODULES):
        claims += module.CLAIMS
        known = [claim.name for claim in claims]
        if wanted and wanted <= set(known):
            break
    assert len(set(known)) == len(known), f"a name is used twice: {known}"
    unknown = sorted(wanted - set(known))
    if unknown:
        raise SystemExit(f"no such claim: {', '.join(unknown)}; there are {', '.join(known)}")
    return [claim for claim in claims if not wanted or claim.name in wanted]


def check(claim: Claim, *, quick: bool) -> Result:
    """Run the claim. Raises ``AssertionError`` when it is refuted or looked at too little."""
    begun = time.perf_counter()
    try:
        evidence = claim.run(quick)
    except ToolMissing as missing:
        if is_strict():
            raise
        return Result(claim, time.perf_counter() - begun, Evidence(0), str(missing))
    floor = claim.floor[0 if quick else 1]
    if evidence.cases < floor:
        raise Refuted(f"{claim.name} looked at {evidence.cases} cases, where at least {floor} are due")
    return Result(claim, time.perf_counter() - begun, evidence)
