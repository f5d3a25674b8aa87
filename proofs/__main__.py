"""``python -m proofs [--quick] [claim ...]``: check the claims and say how each fared; status 1 if one did not hold."""

from __future__ import annotations

import argparse
import sys
import time
import traceback

from . import coqtool
from .claims import check, load


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m proofs", description="Check what is claimed; see proofs/README.md."
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases, for between two edits")
    parser.add_argument("claims", nargs="*", help="names of claims (default: all)")
    options = parser.parse_args()
    counts = {"held": 0, "failed": 0, "skipped": 0}
    begun = time.perf_counter()
    if not options.claims:
        coqtool.prepare()
    for claim in load(options.claims):
        started = time.perf_counter()
        try:
            result = check(claim, quick=options.quick)
        except Exception as error:
            counts["failed"] += 1
            if not isinstance(error, AssertionError):
                traceback.print_exc()
            seconds = time.perf_counter() - started
            print(f"FAILED  {claim.name:4} {seconds:6.1f} s  {claim.says}\n        {error or type(error)}", flush=True)
            continue
        outcome = "skipped" if result.skipped else "held"
        counts[outcome] += 1
        evidence = result.evidence
        found = result.skipped or f"{evidence.cases:,} cases{'; ' if evidence.bounds else ''}{evidence.bounds}"
        print(
            f"{outcome:7} {claim.name:4} {result.seconds:6.1f} s  {claim.strength:9}  {claim.says} ({found})",
            flush=True,
        )
    print(", ".join(f"{n} {what}" for what, n in counts.items()), f"in {time.perf_counter() - begun:.0f} s")
    return 1 if counts["failed"] or sum(counts.values()) == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
