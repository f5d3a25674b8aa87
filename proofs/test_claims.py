"""The claims as tests: ``python -m pytest proofs`` checks all of them in full."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from . import claims
from .claims import Claim, Evidence, Refuted, ToolMissing

CLAIMS = claims.load()


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_claim(claim: Claim, quick: bool) -> None:
    result = claims.check(claim, quick=quick)
    if result.skipped:
        pytest.skip(result.skipped)


def test_the_readme_has_a_row_for_each_claim_and_no_other() -> None:
    rows = re.findall(r"^\| ([A-Z]\d*) \|", Path(__file__).with_name("README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(claim.name for claim in CLAIMS)


def _claim(cases: int, floor: int = 1) -> Claim:
    return Claim("X", "nothing", claims.BOUNDED, lambda quick: Evidence(cases), (floor, 2 * floor))


def test_a_generator_that_gives_too_little_refutes_its_claim() -> None:
    assert claims.check(_claim(1), quick=True).evidence.cases == 1
    with pytest.raises(Refuted, match="at least 2"):
        claims.check(_claim(1), quick=False)


def _without_tool(quick: bool) -> Evidence:
    raise ToolMissing("no coqc")


def test_a_missing_tool_is_a_reason_to_skip_unless_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = Claim("X", "nothing", claims.BOUNDED, _without_tool, (1, 1), needs_coq=True)
    monkeypatch.delenv("KNOWNDDP_PROOFS", raising=False)
    assert claims.check(claim, quick=True).skipped == "no coqc"
    monkeypatch.setenv("KNOWNDDP_PROOFS", "strict")
    with pytest.raises(ToolMissing):
        claims.check(claim, quick=True)


def test_a_claim_nobody_makes_is_an_error() -> None:
    with pytest.raises(SystemExit, match="no such claim: Z9"):
        claims.load(["Z9"])
