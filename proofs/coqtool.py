"""Coq, as the claims use it: compile the sources, ask what a theorem rests on, and let its kernel replay answers.

Everything compiled goes to a temporary directory, one for each text of the sources, shared with started processes
through an environment variable.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from .claims import Refuted, ToolMissing

FOLDER: Final = Path(__file__).with_name("coq")
# In the order in which they need each other.
SOURCES: Final = ("Assign", "Order", "Launch", "Protocol", "Layout", "Pack", "Mean")
# What real numbers rest on in Coq's standard library. Nothing else may be assumed by anything.
REALS: Final = frozenset(
    {
        "ClassicalDedekindReals.sig_forall_dec",
        "FunctionalExtensionality.functional_extensionality_dep",
    }
)
# Words by which a source could assume what it should prove.
FORBIDDEN: Final = re.compile(
    r"\b(Admitted|admit|Axioms?|Conjectures?|Parameters?|Unset\s+\w+\s+Checking|bypass_check|type_in_type|give_up|"
    r"Declare\s+ML|Add\s+LoadPath|Load)\b"
)
KEEPS_BUILDS: Final = "KNOWNDDP_PROOFS_BUILDS"
# Errors that show a broken source, and not one whose proofs fail.
BROKEN: Final = re.compile(r"Syntax error|[Ll]exical error|was not found in the current environment")
LIMIT_S: Final = 240
# Numbers in rows are binary, which Coq reads fast.
HEADER: Final = "Require Import List Arith NArith Bool. Import ListNotations. Open Scope N_scope."
A_GOAL: Final = 500  # rows: a longer list costs Coq more than its share


class CoqBroken(Exception):
    """A source that cannot be read."""


def find(program: str = "coqc") -> str:
    """The path of a program of Coq's."""
    found = shutil.which(program)
    if found is None:
        raise ToolMissing(f"{program} is not installed (Debian: apt-get install --no-install-recommends coq)")
    return found


def _run(program: str, arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [find(program), "-Q", ".", "", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)


def _compile(folder: Path, name: str) -> str:
    """What coqc prints."""
    done = _run("coqc", ["-q", f"{name}.v"], folder)
    if done.returncode:
        complaint = " ".join(done.stderr.split())[-600:]
        raise CoqBroken(f"{name}.v: {complaint}") if BROKEN.search(complaint) else Refuted(f"{name}.v: {complaint}")
    return done.stdout


@functools.cache
def builds() -> Path:
    """Where compiled sources are kept for as long as the first process that asked runs."""
    inherited = os.environ.get(KEEPS_BUILDS)
    if inherited is None:
        inherited = tempfile.mkdtemp(prefix="proofs-")
        atexit.register(shutil.rmtree, inherited, ignore_errors=True)
        os.environ[KEEPS_BUILDS] = inherited
    return Path(inherited)


def needed(name: str) -> list[str]:
    """The sources that one needs, itself the last."""
    found: list[str] = []
    for line in re.findall(r"^Require Import ([^.]*)\.", (FOLDER / f"{name}.v").read_text(), re.MULTILINE):
        for other in line.split():
            if other in SOURCES:
                found += [one for one in needed(other) if one not in found]
    return [*found, name]


@functools.cache
def built(name: str) -> Path:
    """A directory with that source and those it needs, compiled. Raises ``Refuted`` if a proof fails."""
    names = needed(name)
    texts = {one: (FOLDER / f"{one}.v").read_text() for one in names}
    for one, text in texts.items():
        word = FORBIDDEN.search(without_comments(text))
        if word:
            raise Refuted(f"{one}.v assumes something: {word[0]}")
    key = hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()[:16]
    folder = builds() / key
    if not folder.exists():
        find()
        with tempfile.TemporaryDirectory(dir=builds()) as scratch:
            for other in names[:-1]:
                shutil.copy(built(other) / f"{other}.vo", scratch)
            Path(scratch, f"{name}.v").write_text(texts[name])
            _compile(Path(scratch), name)
            shutil.copytree(scratch, f"{scratch}-done")
        try:
            os.rename(f"{scratch}-done", folder)
        except OSError:  # another process was faster
            shutil.rmtree(f"{scratch}-done")
    return folder


def without_comments(text: str) -> str:
    """The source without ``(* ... *)``, which nest."""
    kept, depth = [], 0
    for piece in re.split(r"(\(\*|\*\))", text):
        if piece == "(*":
            depth += 1
        elif piece == "*)":
            depth -= 1
        elif not depth:
            kept.append(piece)
    return "".join(kept)


def ask(name: str, commands: str) -> str:
    """What Coq answers to ``commands`` after that source. Raises ``Refuted`` if it cannot accept them."""
    folder = built(name)
    with tempfile.TemporaryDirectory(dir=builds()) as scratch:
        for compiled in folder.glob("*.vo"):
            os.symlink(compiled, Path(scratch, compiled.name))
        Path(scratch, "Asked.v").write_text(f"Require Import {' '.join(needed(name))}.\n{commands}\n")
        return _compile(Path(scratch), "Asked")


@functools.cache
def assumptions(name: str) -> dict[str, frozenset[str]]:
    """What each theorem of a source rests on."""
    names = re.findall(r"^Theorem (\w+)", (FOLDER / f"{name}.v").read_text(), re.MULTILINE)
    answer = ask(name, "\n".join(f"Print Assumptions {name}.{one}." for one in names))
    sections = re.split(r"^(?:Axioms:|Closed under the global context)$", answer, flags=re.MULTILINE)[1:]
    assert len(sections) == len(names), answer
    found = (re.findall(r"^([\w.']+)(?= *$| *:)", section, re.MULTILINE) for section in sections)
    return {one: frozenset(some) for one, some in zip(names, found, strict=True)}


def prepare() -> None:
    """Compile all sources, two at a time. What goes wrong shows again in the claims that need them."""

    def attempt(name: str) -> None:
        with contextlib.suppress(Exception):
            assumptions(name)

    with ThreadPoolExecutor(2) as pool:  # those that others need come first
        list(pool.map(attempt, sorted(SOURCES, key=lambda name: len(needed(name)))))


def theorems(name: str, wanted: Iterable[str], allowed: frozenset[str] = frozenset()) -> int:
    """Check that each theorem is there and rests on nothing but ``allowed``. Returns their number."""
    wanted = tuple(wanted)
    there = assumptions(name)
    for one in wanted:
        if one not in there:
            raise Refuted(f"{name}.v has no theorem {one}")
        if there[one] - allowed:
            raise Refuted(f"{name}.{one} assumes {sorted(there[one] - allowed)}")
    return len(wanted)


def replayed(name: str, definitions: str, kind: str, rows: Sequence[str]) -> int:
    """Let the kernel compute ``ok row = true`` for each row. Returns their number.

    Args:
        name: the source that ``definitions`` need.
        definitions: Coq text that defines ``ok : kind -> bool``.
        kind: the type of a row.
        rows: terms of that type.
    """
    goals = [
        f"Definition rows{first} : list ({kind}) := [{';'.join(some)}].\n"
        f"Goal forallb ok rows{first} = true. Proof. vm_compute. reflexivity. Qed."
        for first, some in _chunks(rows)
    ]
    try:
        ask(name, "\n".join([HEADER, definitions, *goals]))
    except Refuted as different:
        raise Refuted(f"Coq computes something else than the shipped code: {different}") from None
    return len(rows)


def _chunks(rows: Sequence[str]) -> Iterator[tuple[int, Sequence[str]]]:
    return ((first, rows[first : first + A_GOAL]) for first in range(0, len(rows), A_GOAL))


def checked(names: Sequence[str]) -> int:
    """Let Coq's second, small checker go through the compiled sources. Returns their number."""
    with tempfile.TemporaryDirectory(dir=builds()) as scratch:
        for name in names:
            shutil.copy(built(name) / f"{name}.vo", scratch)
        done = _run("coqchk", ["-silent", *(word for name in names for word in ("-norec", name))], Path(scratch))
    if done.returncode:
        raise Refuted(f"coqchk: {done.stderr.strip()[-600:]}")
    return len(names)


def term(value: object) -> str:
    """A Coq term of booleans, numbers (of N), tuples and lists."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, tuple):
        return "(" + ",".join(map(term, value)) + ")"
    assert isinstance(value, list), value
    return "[" + ";".join(map(term, value)) + "]"
