"""On what it was measured."""

from __future__ import annotations

import os
import platform
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch


def describe(device: str) -> dict[str, Any]:
    """Processor, versions, and how busy the machine is."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return {
        "processor": found[1] if found else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name(0) if device == "cuda" else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads_a_rank": 1,
        "load": os.getloadavg()[0],
        "when": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }
