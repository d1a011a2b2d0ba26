"""The processors that this process may use."""

import math
import os
from pathlib import Path

_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def available_cores(limit_file: Path = _CPU_LIMIT) -> int:
    """Cores that the process may run on, within the limit of its control group; at least 1."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = limit_file.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.floor(int(quota) / int(period))))
