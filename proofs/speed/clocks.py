"""Time by the wall, by the processor and by a GPU's own clock; bytes by the interface's counter."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import torch


class Stopwatch:
    """``start``, ``lap`` (after the forward), ``stop``, then ``read``.

    On CUDA times lie between events on the current stream, into which the end of a backward waits for its collectives;
    else they are the wall's. ``cpu``: what all threads of this process used, whatever else the machine does.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = 0.0
        self._faults = 0
        self._marks: list[float | torch.cuda.Event] = []

    def _mark(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def start(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._marks = []
        self._faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        self._cpu = time.process_time()
        self._mark()

    def lap(self) -> None:
        self._mark()

    def stop(self) -> None:
        self._mark()

    def read(self) -> dict[str, float]:
        """Seconds: ``wall`` of the step, ``forward`` of its first part, ``cpu`` of the step. ``faults``: pages that the
        process had to fetch from the system meanwhile.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        cpu = time.process_time() - self._cpu
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - self._faults
        begin, middle, end = self._marks
        return {"wall": _between(begin, end), "forward": _between(begin, middle), "cpu": cpu, "faults": float(faults)}


def _between(earlier: float | torch.cuda.Event, later: float | torch.cuda.Event) -> float:
    if isinstance(earlier, torch.cuda.Event) and isinstance(later, torch.cuda.Event):
        return earlier.elapsed_time(later) / 1e3
    assert isinstance(earlier, float) and isinstance(later, float)
    return later - earlier


class WireCounter:
    """Bytes that left through an interface, headers and all.

    On loopback both ranks send through the one interface, so the count is divided by their number. NCCL need not use
    the interface: then what is counted is only the CPU's messages.
    """

    def __init__(self, interface: str, ranks_behind: int) -> None:
        self._path = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
        self._ranks_behind = ranks_behind

    def read(self) -> float:
        """Bytes a rank."""
        return int(self._path.read_text()) / self._ranks_behind
