"""G: that the Coq sources prove what they say, and that nothing in them is unused."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from .claims import ALL_SIZES, Claim, Evidence
from .coqtool import FOLDER, REALS, SOURCES, assumptions, checked


def nothing_is_assumed(quick: bool) -> Evidence:
    """Every theorem of every source, and the second checker's word on what was compiled."""
    found = {path.stem for path in FOLDER.glob("*.v")}
    assert found == set(SOURCES), f"sources that nobody compiles: {sorted(found ^ set(SOURCES))}"
    claims = "".join(path.read_text() for path in Path(__file__).parent.glob("*/*.py"))
    cases = 0
    for source in SOURCES:
        for theorem, assumed in assumptions(source).items():
            allowed = REALS if source == "Mean" else frozenset()
            assert assumed <= allowed, f"{source}.{theorem} assumes {sorted(assumed - allowed)}"
            assert f'"{theorem}"' in claims, f"{source}.{theorem} is part of no claim"
            cases += 1
    checked(SOURCES)
    return Evidence(cases, f"theorems in {len(SOURCES)} sources")


CLAIMS: Final = (
    Claim(
        "G",
        "no theorem assumes anything, but two axioms of the real numbers one; coqchk agrees",
        ALL_SIZES,
        nothing_is_assumed,
        (30, 30),
        needs_coq=True,
    ),
)
