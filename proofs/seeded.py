"""S: every claim notices faults planted in what it is about.

A ``Seed`` is a change of one line or few in a shipped file or in a Coq source. It is planted in a copy of the package
and of the proofs, in a process of its own, and each claim that it names must be refuted there, by its own assertion: a
claim that crashes, or a fault that keeps a module from being imported, shows nothing.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from .claims import BOUNDED, Claim, Evidence, Refuted, ToolMissing
from .coqtool import KEEPS_BUILDS, builds
from .processes import context

ROOT: Final = Path(__file__).parent.parent
PACKAGES: Final = ("knownddp", "proofs")
# Each has SEEDS.
MODULES: Final = (
    "proofs.assigner.seeds",
    "proofs.protocol.theory_seeds",
    "proofs.protocol.seeds",
    "proofs.layout.seeds",
    "proofs.pins.seeds",
)

IN_QUICK_RUNS: Final = 4
LIMIT_S: Final = 300
WORKERS: Final = 2


@dataclass(frozen=True, slots=True)
class Seed:
    """A fault. ``old`` stands exactly once in ``file`` (from the root of the repository) and becomes ``new``.

    ``catches`` are the claims each of which must be refuted.
    """

    name: str
    file: str
    old: str
    new: str
    catches: tuple[str, ...]


def seeds() -> list[Seed]:
    """All of them."""
    found: list[Seed] = []
    for module in map(importlib.import_module, MODULES):
        found += module.SEEDS
    names = [seed.name for seed in found]
    assert len(set(names)) == len(names), f"a name is used twice: {names}"
    return found


def planted(seed: Seed) -> str:
    """The text of the file with the fault in it."""
    text = (ROOT / seed.file).read_text()
    if text.count(seed.old) != 1 or seed.old == seed.new:
        raise Refuted(f"seed '{seed.name}': its place occurs {text.count(seed.old)} times in {seed.file}")
    return text.replace(seed.old, seed.new)


def fate(seed: Seed) -> dict[str, str]:
    """For each claim that the seed names: "refuted: ...", "held", "skipped: ..." or "crashed: ..."."""
    text = planted(seed)
    with tempfile.TemporaryDirectory() as folder:
        for package in PACKAGES:
            shutil.copytree(ROOT / package, Path(folder, package), ignore=shutil.ignore_patterns("__pycache__"))
        Path(folder, seed.file).write_text(text)
        ours, theirs = context().Pipe(duplex=False)
        process = context().Process(target=_run, args=(folder, str(builds()), seed.catches, theirs))
        process.start()
        theirs.close()
        try:
            if not ours.poll(LIMIT_S):
                return dict.fromkeys(seed.catches, f"crashed: no answer in {LIMIT_S} s")
            answer: dict[str, str] = ours.recv()
            return answer
        except EOFError:
            return dict.fromkeys(seed.catches, "crashed: the process died")
        finally:
            if process.is_alive():
                process.join(5)
            process.kill()
            process.join()


def _run(folder: str, compiled: str, names: tuple[str, ...], answers: Connection) -> None:
    """In a process of its own: forget what is imported, take the copy in ``folder`` instead, check the claims."""
    for module in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        del sys.modules[module]
    sys.path.insert(0, folder)
    os.chdir(folder)
    os.environ["PYTHONPATH"] = folder  # for processes that claims start
    os.environ[KEEPS_BUILDS] = compiled
    importlib.invalidate_caches()
    answers.send({name: _fate_here(name) for name in names})


def _fate_here(name: str) -> str:
    claims = importlib.import_module("proofs.claims")
    try:
        [claim] = claims.load([name])
        result = claims.check(claim, quick=True)
    except AssertionError as refutation:
        return f"refuted: {refutation}"
    except BaseException:
        return f"crashed: {traceback.format_exc()}"
    return f"skipped: {result.skipped}" if result.skipped else "held"


def _in_this_run(quick: bool) -> list[Seed]:
    """All, or some from all over."""
    found = seeds()
    return found[:: max(1, len(found) // IN_QUICK_RUNS)][:IN_QUICK_RUNS] if quick else found


def every_seed_is_caught(quick: bool) -> Evidence:
    chosen = _in_this_run(quick)
    with ThreadPoolExecutor(WORKERS) as pool:
        fates = list(pool.map(fate, chosen))
    caught, unchecked, complaints = 0, 0, []
    for seed, by_claim in zip(chosen, fates, strict=True):
        for claim, what in by_claim.items():
            caught += what.startswith("refuted")
            unchecked += what.startswith("skipped")
            if not what.startswith(("refuted", "skipped")):
                complaints.append(f"seed '{seed.name}' in {seed.file}: {claim} {what}")
    if complaints:
        raise Refuted("\n        ".join(complaints))
    if unchecked:
        raise ToolMissing(f"{caught} faults were caught; {unchecked} more need what is not installed here")
    return Evidence(caught, f"{len(chosen)} faults, each with every claim that should notice it")


CLAIMS: Final = (
    Claim("S", "each planted fault is caught by every claim that should", BOUNDED, every_seed_is_caught, (4, 130)),
)
