"""What is claimed of assigner and planner up to a size, on every input up to it; and what their source can see."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import knownddp
from knownddp.plan import Planner

from ..claims import Evidence, Refuted
from .inputs import Case, assigned, specs_of

# Modules that decide which parameter travels in which bucket, and all that they import of the package.
DECIDES: Final = ("buckets", "plan", "specs", "errors")
# What else they may import. None of it knows a rank, a clock, the environment or anything random.
HARMLESS: Final = {"__future__", "collections", "collections.abc", "dataclasses", "typing"}
# Built-in functions whose answers differ between processes or runs.
PECULIAR: Final = {"id", "hash", "open", "input", "globals", "vars", "eval", "exec", "__import__"}


def imports(tree: ast.AST) -> Iterator[str]:
    """What is imported when the module runs: "." before a sibling; nothing under ``if TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
        else:
            yield from imports(node)


def function_of_specs(quick: bool) -> Evidence:
    """The decision is made by code that can see nothing but its arguments."""
    folder = Path(knownddp.__file__).parent
    looked_at = 0
    for module in DECIDES:
        tree = ast.parse((folder / f"{module}.py").read_text())
        for name in imports(tree):
            assert name in HARMLESS or (name.startswith(".") and name[1:] in DECIDES), f"{module}.py imports {name}"
            looked_at += 1
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                assert node.id not in PECULIAR, f"{module}.py uses {node.id}"
                looked_at += 1
            if isinstance(node, ast.Global | ast.Nonlocal):
                raise Refuted(f"{module}.py has {ast.unparse(node)}")
            if isinstance(node, ast.For) and isinstance(node.iter, ast.Set | ast.SetComp):
                raise Refuted(f"{module}.py iterates over a set, whose order may differ")
    return Evidence(looked_at)


def idempotent(quick: bool) -> Evidence:
    """Assigned again in the order of its buckets, an assignment stays as it is; so does each bucket by itself."""
    longest = 4 if quick else 6
    checked = 0
    for length in range(1, longest + 1):
        for sizes in itertools.product((1, 2, 3), repeat=length):
            for keys in itertools.product((0, 1), repeat=length - 1):
                for limits in ((2,), (4,), (2, 4), (3, 2)):
                    items = tuple((i, n, key, False) for i, (n, key) in enumerate(zip(sizes, (0, *keys), strict=True)))
                    once = assigned(Case(items, limits))
                    again = assigned(Case(tuple(items[i] for bucket, _ in once for i in bucket), limits))
                    assert again == once, f"{items} under {limits}: first {once}, then {again}"
                    for bucket, limit in once:
                        alone = assigned(Case(tuple(items[i] for i in bucket), (limit,)))
                        assert alone == [(bucket, limit)], f"{bucket} of {items} under {limit} alone: {alone}"
                    checked += 1
    return Evidence(checked, f"up to {longest} items of 1 to 3 bytes, two keys, four lists of limits")


def example(limit: int) -> list[list[int]]:
    """Three items of 2, 1 and 1 bytes."""
    return [bucket for bucket, _ in assigned(Case(((0, 2, 0, False), (1, 1, 0, False), (2, 1, 0, False)), (limit,)))]


def learnt_order(quick: bool) -> Evidence:
    """After ``learn`` every parameter has one place: those seen by position, the later defined first where they tie;
    one not seen right behind its neighbour in reversed definition order."""
    most = 4 if quick else 5
    checked = 0
    for n in range(1, most + 1):
        for positions in itertools.product(range(-1, n), repeat=n):
            planner = Planner(specs_of([(1, 0, False)] * n), (1,))
            planner.learn(positions, ())
            order = planner.order
            assert sorted(order) == list(range(n)), f"{positions} give the order {order}"
            seen = [i for i in order if positions[i] >= 0]
            assert all((positions[a], -a) < (positions[b], -b) for a, b in itertools.pairwise(seen)), (positions, order)
            for place, i in enumerate(order):
                if positions[i] < 0:
                    behind = order[place - 1] if place else None
                    assert behind == (i + 1 if i + 1 < n else None), f"{i} of {positions} is behind {behind}"
            checked += 1
    return Evidence(checked, f"up to {most} parameters, every list of positions")
