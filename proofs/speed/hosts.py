"""Network namespaces: one for ranks that share a loopback, or two that a link of a chosen rate joins.

They need root and iproute2. Names hold the process number, and leave with the ``with`` statement, also after Ctrl-C or
a SIGTERM; those of a process that was killed outright are removed by the next one.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

LINK = "kdlink"
ADDRESSES = ("10.78.0.1/24", "10.78.0.2/24")
PREFIX = "kdspeed"
QUEUE_BYTES = 32 * 2**20  # more than sockets hold, so that no packet is dropped and no time-out of TCP is measured
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def bytes_per_second(rate: str) -> float:
    """Of a rate as tc spells it: "100mbit", "1gbit"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate.lower())
    if found is None:
        raise ValueError(f"a rate looks like 100mbit or 1gbit, got {rate!r}")
    return float(found[1]) * UNITS[found[2]] / 8


def why_not() -> str | None:
    """Why namespaces cannot be had here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} of iproute2 not found"
    try:
        with _namespaces("probe"):
            pass
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here: {error.stderr.strip()}"
    return None


def inside(namespace: str | None) -> list[str]:
    """What a command is prefixed with to run there."""
    return ["ip", "netns", "exec", namespace] if namespace else []


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout


@contextmanager
def _namespaces(*roles: str) -> Iterator[list[str]]:
    _remove_orphans()
    names = [f"{PREFIX}-{os.getpid()}-{role}" for role in roles]
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "del", name)
        signal.signal(signal.SIGTERM, before)


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _remove_orphans() -> None:
    for name in re.findall(rf"^{PREFIX}-\d+-\w+", _run("ip", "netns", "list"), re.MULTILINE):
        if not Path("/proc", name.split("-")[1]).exists():
            with suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "del", name)


@contextmanager
def own_loopback() -> Iterator[list[str]]:
    """A namespace with nothing but a loopback, so that its counter counts nobody else's bytes; for both ranks."""
    with _namespaces("lo") as names:
        yield names * 2


@contextmanager
def two_hosts(rate: str) -> Iterator[list[str]]:
    """Two namespaces, joined by a link whose two ends are shaped to ``rate``."""
    # What goes at once after a pause: two large frames, or what the rate lets through in a millisecond. More would make
    # the link look faster than it is, less would throttle a fast one.
    burst = max(128 * 1024, int(bytes_per_second(rate) * 0.001))
    with _namespaces("a", "b") as names:
        _run("ip", "link", "add", LINK, "netns", names[0], "type", "veth", "peer", "name", LINK, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _run("ip", "-n", name, "addr", "add", address, "dev", LINK)
            # Large frames: what is counted is then payload, and hardly any headers.
            _run("ip", "-n", name, "link", "set", LINK, "mtu", "65000", "up")
            shape = f"tc qdisc add dev {LINK} root tbf rate {rate} burst {burst} limit {QUEUE_BYTES}"
            _run(*inside(name), *shape.split())
        yield names
