"""Two hosts on one machine: network namespaces joined by a virtual Ethernet pair whose ends are shaped to a rate.

As a program it is one rank on such a host: it trains, counts the bytes that left its interface, and prints JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

DEVICE = "kd0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def why_not() -> str | None:
    """Why two hosts cannot be had here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not all(map(shutil.which, ("ip", "tc"))):
        return "ip and tc (Debian's iproute2) are not installed"
    probe = f"knownddp-probe-{os.getpid()}"
    try:
        _run("ip", "netns", "add", probe)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here: {error.stderr.strip()}"
    _run("ip", "netns", "del", probe)
    return None


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)


@contextmanager
def two_hosts(rate: str) -> Iterator[tuple[str, str]]:
    """The names of two namespaces, each with a loopback and one end of a link of ``rate`` (as tc spells it)."""
    names = (f"knownddp-{os.getpid()}-a", f"knownddp-{os.getpid()}-b")
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", DEVICE, "netns", names[0], "type", "veth", "peer", "name", DEVICE, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", DEVICE)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            # Large frames: what is counted is then payload, however the kernel cuts it up, and hardly any headers.
            _run("ip", "-n", name, "link", "set", DEVICE, "mtu", "65000", "up")
            shape = f"tc qdisc add dev {DEVICE} root tbf rate {rate} burst 512k latency 100ms"
            _run("ip", "netns", "exec", name, *shape.split())
        yield names
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "del", name)


@dataclass(frozen=True)
class Sent:
    """What one rank counted over its steps."""

    used_bytes: int  # of gradients
    wire_bytes: int  # that left the interface, headers included


def run_on_two_hosts(rate: str, mode: str, steps: int) -> list[Sent]:
    """Train on two hosts with half of the layers dropped; ``mode`` is "declared" or "detected"."""
    with two_hosts(rate) as names:
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, __file__, str(rank), mode, str(steps)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1"},
            )
            for rank, name in enumerate(names)
        ]
        try:
            outputs = [process.communicate(timeout=120) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    for rank, (process, (_, errors)) in enumerate(zip(ranks, outputs, strict=True)):
        assert process.returncode == 0, f"rank {rank}: {errors}"
    return [Sent(**json.loads(out)) for out, _ in outputs]


def _rank(rank: int, mode: str, steps: int) -> Sent:
    import torch
    import torch.distributed as dist
    from models import Skippable, inputs

    from knownddp import KnownDDP

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{ADDRESSES[0]}:29500", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = KnownDDP(Skippable(depth=8, width=512), find_unused_parameters=mode == "detected")
    counter = Path(f"/sys/class/net/{DEVICE}/statistics/tx_bytes")

    def step(number: int) -> None:
        skip = tuple(i for i in range(8) if (i + number) % 2)
        model.zero_grad()
        unused = model.module.of(skip) if mode == "declared" else ()
        model(inputs(rank, 4, 512), skip=skip, unused_parameters=unused).square().mean().backward()

    step(0)  # learns the order
    dist.barrier()
    before, reduced = int(counter.read_text()), model.stats().bytes_reduced
    for number in range(steps):
        step(number)
    dist.barrier()  # what the peer has received has left here
    sent = Sent(model.stats().bytes_reduced - reduced, int(counter.read_text()) - before)
    dist.destroy_process_group()
    return sent


if __name__ == "__main__":
    result = _rank(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    print(json.dumps({"used_bytes": result.used_bytes, "wire_bytes": result.wire_bytes}))
