"""The table: ``python -m proofs.speed`` on a loopback, ``--rate 1gbit`` on two hosts as well; see README.md here."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import hosts, memory
from .contenders import BY_NAME, choose
from .host_time import host_times
from .launch import run_ranks
from .machine import describe
from .summary import summarize
from .table import markdown
from .task import Task
from .workloads import workloads

DROPS = (0.0, 0.25, 0.5, 0.75)
LOOPBACK_ROUNDS = 21
ROUNDS = {"100mbit": 3, "1gbit": 11, "10gbit": 21}  # a step takes seconds on the slowest
MAX_APART = 1e-4  # of gradients from averaged ones, relative
MAX_WIRE, MAX_WIRE_BYTES = 1.02, 20_000  # of what is due, and beside it: headers, acknowledgements, agreement


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m proofs.speed", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny models, to see that all runs; times say nothing")
    parser.add_argument("--rounds", type=int, help=f"steps of each contender; default {LOOPBACK_ROUNDS}, less on links")
    parser.add_argument("--drops", type=float, nargs="*", default=DROPS, help="shares of dropped layers")
    parser.add_argument(
        "--workloads",
        nargs="*",
        default=(),
        help="large, small, conv-0.5, lstm-0, drop-0.25, ..., fixed; default all",
    )
    parser.add_argument("--contenders", nargs="*", default=(), choices=list(BY_NAME), help="default all")
    parser.add_argument("--rate", nargs="*", default=(), help="also two hosts on links of 100mbit, 1gbit, 10gbit")
    parser.add_argument("--no-loopback", action="store_true", help="only the links")
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory")
    parser.add_argument("--no-host-time", action="store_true", help="do not measure the time a parameter")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: NCCL, one GPU a rank")
    parser.add_argument("--json", type=Path, help="keep what was measured here")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw it as PNGs (pip install -e '.[plot]')")
    parser.add_argument("--silent", action="store_true", help="no progress bar")
    options = parser.parse_args(arguments)
    known = [one.name for one in workloads(quick=options.quick, drops=options.drops)]
    unknown = sorted(set(options.workloads) - set(known))
    if unknown:
        parser.error(f"no workload is called {', '.join(unknown)}; there are {', '.join(known)}")
    return options


@contextlib.contextmanager
def network(rate: str | None) -> Iterator[tuple[list[str | None], str, int, str]]:
    """Namespace of each rank, interface, ranks behind it, and a title. ``rate``: of a link; None: loopback."""
    if rate is not None:
        with hosts.two_hosts(rate) as names:
            yield list(names), hosts.LINK, 1, f"two hosts, {rate}"
    elif hosts.why_not() is None:
        with hosts.own_loopback() as names:
            yield list(names), "lo", 2, "loopback"
    else:
        yield [None, None], "lo", 2, "loopback, whose counter also counts what others send"


def measure_network(options: argparse.Namespace, rate: str | None) -> dict[str, Any]:
    """All workloads on one network."""
    drawn = [
        one
        for one in workloads(quick=options.quick, drops=options.drops)
        if (not options.workloads and (rate is None or one.name.startswith("drop"))) or one.name in options.workloads
    ]
    rounds = options.rounds or (3 if options.quick else ROUNDS.get(rate, 7) if rate else LOOPBACK_ROUNDS)
    contenders = choose(options.contenders)
    with network(rate) as (namespaces, interface, ranks_behind, title):
        task = Task(
            workloads=tuple(one.name for one in drawn),
            contenders=tuple(one.name for one in contenders),
            drops=tuple(options.drops),
            rounds=rounds,
            quick=options.quick,
            device=options.device,
            interface=interface,
            ranks_behind=ranks_behind,
            shows_progress=not options.silent,
        )
        measured = run_ranks(task, namespaces)
    speed = hosts.bytes_per_second(rate) if rate else None
    peaks = {} if options.no_memory or rate else memory.peaks(task)
    runs = [
        summarize(task, one, [rank["runs"][i] for rank in measured], peaks.get(one.name, {}), speed)
        for i, one in enumerate(drawn)
    ]
    link = {size: max(rank["link"][size] for rank in measured) for size in measured[0]["link"]}
    return {"network": title, "rate": rate, "world_size": task.world_size, "link_s": link, "runs": runs}


def check(result: dict[str, Any]) -> tuple[list[str], int, list[str]]:
    """What is exact and does not hold, of how many checks, and what could not be checked.

    Gradients are those of the plain module, averaged. KnownDDP sends what is used, once: 2 (N - 1) / N bytes a byte.
    """
    wrong, checks, unchecked = [], 0, []
    for net in result["networks"]:
        counts_ours = "others" not in net["network"] and not result["machine"]["gpu"]
        if not counts_ours:
            unchecked.append(f"{net['network']}: bytes, as the counter also counts others or misses what NCCL sends")
        ring = 2 * (net["world_size"] - 1) / net["world_size"]
        for run in net["runs"]:
            where = f"{net['network']}, {run['workload']}"
            checks += len(run["apart"])
            off = {name: apart for name, apart in run["apart"].items() if not apart <= MAX_APART}  # also NaN
            wrong += [f"{where}: gradients of {name} are {apart:.1e} off" for name, apart in off.items()]
            due = ring * run["used_bytes"]
            for row in run["rows"]:
                if row["contender"].startswith("known") and counts_ours:
                    checks += 1
                    if not due <= row["wire_bytes"] <= MAX_WIRE * due + MAX_WIRE_BYTES:
                        sent = f"{row['wire_bytes']:.0f} bytes, where {due:.0f} are due"
                        wrong.append(f"{where}: {row['contender']} sends {sent}")
    return wrong, checks, unchecked


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    result: dict[str, Any] = {"machine": describe(options.device), "quick": options.quick, "networks": []}
    rates: list[str | None] = [] if options.no_loopback else [None]
    reason = hosts.why_not()
    if reason is None:
        rates += options.rate
    elif options.rate:
        print(f"no links: {reason}", file=sys.stderr)
    for rate in rates:
        result["networks"].append(measure_network(options, rate))
    if not options.no_host_time:
        result["host_time"] = host_times(quick=options.quick, device=options.device)
    result["machine"]["load_after"] = describe(options.device)["load"]
    print(markdown(result))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot:
        from .plots import draw

        draw(result, options.plot)
    wrong, checks, unchecked = check(result)
    for title, found in (("not checked", unchecked), ("DOES NOT HOLD", wrong)):
        for what in found:
            print(f"{title}: {what}")
    print(f"{checks} exact checks, of which {len(wrong)} do not hold" if wrong else f"all {checks} exact checks hold")
    return 1 if wrong or not checks else 0


if __name__ == "__main__":
    sys.exit(main())
