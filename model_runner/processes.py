"""Processes: the processors that one may use, and child processes that start isolated and end with their parent."""

import ctypes
import math
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def isolated_module(name: str) -> tuple[str, ...]:
    """Begins the command that runs a module in a child. `-m` alone would look for modules in the working folder."""
    return sys.executable, "-P", "-m", name


def die_with_parent() -> None:
    """Have the kernel kill this process when the parent dies, so that none is left behind, even in the middle of work.

    Only on Linux, and only if the parent has not died before: whoever calls this compares its id afterwards.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def describe_end(pid: int, code: int) -> str:
    """How a process ended, in words; `code` is what subprocess calls its return code."""
    if code >= 0:
        return f"process {pid} exited with code {code}; its last words are above"
    name = signal.Signals(-code).name
    hint = " (was the machine out of memory?)" if -code == signal.SIGKILL else ""
    return f"process {pid} was killed by {name}{hint}"


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait before a child process is started again, after this many failures in a row to stay up."""

    max_failures: int = 5
    first_s: float = 0.5
    longest_s: float = 10.0
    steady_s: float = 60.0
    """A process that was ready for this long has stayed up, also without anything to do."""

    def stayed_up(self, steps: int, ready_s: float) -> bool:
        """Whether a process that has done this many steps since it was ready, and died, was no failure."""
        return steps > 0 or ready_s >= self.steady_s

    def delay(self, failures: int) -> float | None:
        """Seconds: none after a process that had stayed up, then doubling; None means to give up."""
        if failures >= self.max_failures:
            return None
        if failures == 0:
            return 0.0
        return float(min(self.first_s * 2 ** (failures - 1), self.longest_s))


_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def available_cores(limit_file: Path = _CPU_LIMIT) -> int:
    """Cores that the process may run on, within the limit of its control group; at least 1."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = limit_file.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.floor(int(quota) / int(period))))
