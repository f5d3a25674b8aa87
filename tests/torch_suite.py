"""Runs the tests of DistributedDataParallel that torch ships in its wheel, on it or on KnownDDP."""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from ranks import RankPools, RanksFailed
from torch_suite_expected import expected_failures, judge
from torch_suite_ranks import makes_own_group, run_test

NAME = "DistributedDataParallel"
WORLD_SIZE = 2


@dataclass(frozen=True)
class TorchTest:
    """One test method, and where it is."""

    module: str
    owner: str
    name: str

    def __str__(self) -> str:
        return self.name


def find_tests() -> list[TorchTest]:
    """Every test method in torch's wheel that comes to use the name ``DistributedDataParallel``."""
    root = Path(torch.__file__).parent / "testing"
    found = []
    for path in sorted(root.rglob("*.py")):
        source = path.read_text()
        if NAME in source:
            module = ".".join(path.relative_to(root.parent.parent).with_suffix("").parts)
            found += [TorchTest(module, owner, name) for owner, name in _find_in(ast.parse(source))]
    return found


def _find_in(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The tests that say the name, or use a helper that does: a method of their class, a function, a class beside."""
    beside = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and not _has_tests(n)}
    for owner in ast.walk(tree):
        if not isinstance(owner, ast.ClassDef):
            continue
        methods = {n.name: n for n in owner.body if isinstance(n, ast.FunctionDef)}
        for name, method in methods.items():
            if name.startswith("test") and _uses(method, methods, beside):
                yield owner.name, name


def _has_tests(node: ast.stmt) -> bool:
    return any(isinstance(n, ast.FunctionDef) and n.name.startswith("test") for n in ast.walk(node))


def _uses(start: ast.AST, methods: dict[str, ast.FunctionDef], beside: dict[str, ast.AST]) -> bool:
    todo, seen = [start], {id(start)}
    while todo:
        for node in ast.walk(todo.pop()):
            reached: ast.AST | None = None
            if isinstance(node, ast.Name):
                if node.id == NAME:
                    return True
                reached = beside.get(node.id)
            elif isinstance(node, ast.Attribute):
                if node.attr == NAME:
                    return True
                of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
                reached = methods.get(node.attr) if of_self else None
            if reached is not None and id(reached) not in seen:
                seen.add(id(reached))
                todo.append(reached)
    return False


def ranks_of(test: TorchTest) -> int:
    """How many ranks the test is written for."""
    if test.owner == "DdpUnderDistAutogradTest":
        return 6
    if "hierarchical_sgd" in test.name or "Comparison" in test.owner or "Rpc" in test.owner:
        return 4
    return WORLD_SIZE


def uses_rpc(test: TorchTest) -> bool:
    """RPC leaves traces in a process that the next test sees, so these tests get processes of their own."""
    return makes_own_group(test.module)


def run(pools: RankPools, test: TorchTest, wrapper: str, as_shipped: bool = False) -> tuple[str, str]:
    """Run one test: "passed", "failed" or "skipped", and why."""
    n = ranks_of(test)
    own = RankPools(patience_s=1) if uses_rpc(test) else pools
    with tempfile.TemporaryDirectory() as folder:
        for name in ("barrier", "test_dir", "init_dir"):
            os.mkdir(f"{folder}/{name}")
        try:
            rows = own.run(n, run_test, n, test.module, test.owner, test.name, wrapper, as_shipped, folder)
        except RanksFailed as error:
            return "failed", str(error)
        finally:
            if own is not pools:
                own.stop()
    for kind in ("failed", "skipped"):
        if any(row[0] == kind for row in rows):
            return kind, "\n".join(f"-- rank {rank} {row[0]}: {row[1]}" for rank, row in enumerate(rows))
    return "passed", ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wrapper", choices=("stock", "known"), default="known")
    parser.add_argument("--as-shipped", action="store_true", help="leave GPUs and skips as they are; expect nothing")
    parser.add_argument("-k", default="", help="only tests whose name matches this")
    parser.add_argument("-v", action="store_true", help="say why a test failed")
    args = parser.parse_args()
    pools, listed = RankPools(), {} if args.as_shipped else expected_failures(args.wrapper)
    tests = find_tests()
    unknown = listed.keys() - {test.name for test in tests}
    counts: Counter[str] = Counter({"unexpected": len(unknown)})
    for name in sorted(unknown):
        print(f"unexpected: {name} is listed, and torch has no such test")
    try:
        for test in tests:
            if not re.search(args.k, test.name):
                continue
            begin = time.monotonic()
            kind, why = run(pools, test, args.wrapper, args.as_shipped)
            verdict = kind if args.as_shipped else judge(kind, why, listed.get(test.name))
            counts[verdict] += 1
            note = f" ({kind})" if verdict == "unexpected" else ""
            print(f"{verdict:10} {time.monotonic() - begin:5.1f} s  {test}{note}", flush=True)
            if verdict == "as listed":
                print(f"{'':20}{listed[test.name]}")
            if why and (args.v or verdict == "unexpected"):
                print(why, flush=True)
    finally:
        pools.stop()
    print(", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    return 1 if counts["unexpected"] else 0


if __name__ == "__main__":
    sys.exit(main())
