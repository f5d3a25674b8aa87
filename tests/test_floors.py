"""The structure of the package, read from its source: who may import whom, and which names of torch are used where."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import knownddp
from knownddp import errors

PACKAGE = Path(knownddp.__file__).parent
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")
TREES = {module: ast.parse((PACKAGE / f"{module}.py").read_text()) for module in [*MODULES, "__init__"]}

# Low to high: a module imports only modules to its left.
ORDER = [
    *("errors", "specs", "buckets", "plan", "messages", "outcomes", "protocol", "sampling"),
    *("_torch_private", "flat", "ownership", "rnns", "compact", "outputs", "params", "precision", "arrivals", "nodes"),
    *("structures", "scattering", "parallel", "replicas"),
    *("works", "comm", "comm_hooks", "agreement", "buffers", "forwards", "graphs", "optimizers", "faults", "stats"),
    *(
        "pool",
        "flights",
        "exchange",
        "window",
        "filling",
        "closing",
        "stock_reducer",
        "reducer",
        "join",
        "logging_data",
        "options",
        "interface",
        "lifecycle",
        "ddp",
    ),
]
WITHOUT_TORCH = ORDER[: ORDER.index("_torch_private")]
TALKS = {"comm", "_torch_private"}

# What else of torch.distributed may be named outside of TALKS: a type ...
SILENT = {"ProcessGroup"}
# ... and the context of uneven inputs, which has a collective of its own.
JOINS = {
    "algorithms.join.Join",
    "algorithms.join.Join.notify_join_context",
    "algorithms.join.JoinHook",
    "algorithms.join.Joinable",
    "algorithms.join.Joinable.__init__",
}
# Names of collectives, of torch.distributed and of process groups, that are not also names of comm.Collectives.
LOUD = {
    "all_reduce",
    "allreduce",
    "all_gather",
    "allgather",
    "barrier",
    "monitored_barrier",
    "new_group",
    "send",
    "recv",
}

# Private names used outside of _torch_private.py, each for want of a public one.
PRIVATE = {
    ("lifecycle", "_ddp_ignored"),  # torch.compile reads it
    ("interface", "_apply"),  # what .to() and its like call
    ("interface", "_ddp_ignored"),
    ("interface", "_ddp_params_and_buffers_to_ignore"),  # DistributedDataParallel's, set by its users ...
    ("params", "_ddp_params_and_buffers_to_ignore"),  # ... and read here
    ("ownership", "_is_gil_enabled"),  # of Python
    ("exchange", "_values"),  # of a sparse tensor that is not coalesced yet
    ("flat", "_foreach_add_"),  # one call for many
    ("flat", "_foreach_copy_"),
    ("flat", "_foreach_div_"),
    ("ownership", "_foreach_copy_"),
    ("flights", "_indices"),  # of a sparse tensor, coalesced or not
    ("flights", "_values"),
    ("join", "_join_config"),  # what torch's Join sets
    ("nodes", "_getframe"),  # of sys
    ("outputs", "_fields"),  # what tells a named tuple
    ("params", "_modules"),  # named_modules() cannot stop at an inner wrapper
    ("params", "_parameters"),  # the dict in which a parameter may be replaced
    ("replicas", "_buffers"),  # the dicts of which a replica gets its own
    ("replicas", "_parameters"),
    ("structures", "_fields"),
}

MAX_LINES = 400


def imports(tree: ast.Module, *, at_run_time: bool = False) -> Iterator[tuple[str, int, list[str]]]:
    """(module, level, names) of each import; ``at_run_time`` leaves out those under ``if TYPE_CHECKING``."""
    queue: list[ast.AST] = [tree]
    while queue:
        node = queue.pop()
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node.level, [alias.name for alias in node.names]
        elif not (at_run_time and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            queue += ast.iter_child_nodes(node)


def siblings(module: str) -> set[str]:
    """Modules of the package that ``module`` imports."""
    found: set[str] = set()
    for name, level, names in imports(TREES[module]):
        if level == 1:
            found |= {name.split(".")[0]} if name else set(names)
        else:
            assert level == 0 and name.split(".")[0] != "knownddp", f"{module} imports {name} by its full name"
    return found


def torch_names(module: str) -> set[str]:
    """Qualified names of torch that ``module`` imports or reaches by attributes of what it imported."""
    origin = {"torch": "torch"}
    found = set()
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            origin |= {alias.asname: alias.name for alias in node.names if alias.asname}
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            origin |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            if first in origin:
                found.add(f"{origin[first]}.{rest}")
    return {name for name in found if name.split(".")[0] == "torch"}


def private_attributes(module: str) -> set[str]:
    """Private names, single underscore, that ``module`` takes from anything but ``self`` or imports."""
    found = {name for _, _, names in imports(TREES[module]) for name in names} - {"_torch_private"}
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            found.add(node.attr)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"getattr", "setattr", "hasattr"}:
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def test_every_module_has_its_place_in_the_order():
    assert sorted(ORDER) == MODULES


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_modules_to_its_left(module):
    assert siblings(module) <= set(ORDER[: ORDER.index(module)])


def test_sampling_imports_only_errors():
    assert siblings("sampling") == {"errors"}


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_the_lowest_floor_names_torch_for_type_checkers_alone(module):
    roots = {name.split(".")[0] for name, level, _ in imports(TREES[module], at_run_time=True) if level == 0}
    assert roots <= set(sys.stdlib_module_names)


def test_the_lowest_floor_runs_where_there_is_no_torch():
    """The package's own ``__init__`` imports everything, so an empty one stands in for it."""
    program = f"""
import importlib, sys, types
sys.modules["torch"] = None
package = sys.modules["knownddp"] = types.ModuleType("knownddp")
package.__path__ = [{str(PACKAGE)!r}]
for module in {WITHOUT_TORCH}:
    importlib.import_module("knownddp." + module)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("module", [m for m in MODULES if m not in TALKS])
def test_only_the_seam_communicates(module):
    prefix = "torch.distributed."
    used = {name.removeprefix(prefix) for name in torch_names(module) if name.startswith(prefix)}
    assert used <= SILENT | (JOINS if module in {"join", "interface", "ddp"} else set())
    assert LOUD.isdisjoint(node.attr for node in ast.walk(TREES[module]) if isinstance(node, ast.Attribute))


def test_private_names_of_torch_are_in_one_file():
    used = {(module, name) for module in MODULES if module != "_torch_private" for name in private_attributes(module)}
    own = {(module, name) for module, name in used if name == "_set_params_and_buffers_to_ignore_for_model"}
    assert used - own == PRIVATE
    assert own <= {("interface", "_set_params_and_buffers_to_ignore_for_model")}  # a method of KnownDDP too


@pytest.mark.parametrize("module", [*MODULES, "__init__"])
def test_a_module_says_what_it_is_for_and_is_not_too_long(module):
    assert ast.get_docstring(TREES[module])
    number_of_lines = (PACKAGE / f"{module}.py").read_text().count("\n")
    assert number_of_lines <= MAX_LINES


def test_all_lists_what_the_package_imports_sorted():
    offered = {name for _, level, names in imports(TREES["__init__"]) if level == 1 for name in names}
    assert knownddp.__all__ == sorted(offered)
    assert all(hasattr(knownddp, name) for name in knownddp.__all__)


def test_every_error_is_offered():
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert kinds <= set(knownddp.__all__)
