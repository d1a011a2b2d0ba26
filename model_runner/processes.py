"""Processes: usable cores and memory, and child processes that start isolated and end with their parent.

`python -P -m model_runner.processes MODULE ARGUMENTS...` runs a module as a child process.
"""

import ctypes
import gc
import math
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Literal

PR_SET_PDEATHSIG = 1  # linux/prctl.h
_GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that terminals, `timeout` and systemd send to all processes of a server."""


def isolated_module(name: str) -> tuple[str, ...]:
    """First words of a command that runs a module in a child process that ignores SIGINT and SIGTERM.

    Only the parent knows when a child's work is over. The signals are ignored before the module is imported, which may
    take seconds. Plain `-m` would search the working folder.
    """
    return sys.executable, "-P", "-m", "model_runner.processes", name


def start_connected(command: Sequence[str]) -> "tuple[subprocess.Popen[bytes], Connection]":
    """Start a command that begins with an `isolated_module`; also returns the connection to it. Raises OSError.

    It gets two more arguments for `connect_to_parent`. SIGINT and SIGTERM are blocked until the process ignores them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_SIGNALS)
    try:
        ours, theirs = Pipe()
        with theirs:
            whole = [*command, str(theirs.fileno()), str(os.getpid())]
            return subprocess.Popen(whole, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]), ours
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def connect_to_parent() -> Connection:
    """The connection to the process that started this one with `start_connected`, and with which this one dies."""
    descriptor, parent = map(int, sys.argv[-2:])
    die_with_parent()
    if os.getppid() != parent:
        sys.exit(0)
    return Connection(descriptor)


def _run_module() -> None:
    """Run the module that `isolated_module` names, with the rest of the arguments."""
    for one in _GROUP_SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, so that no child is left behind.

    Linux only. If the parent died before this call, nothing happens: compare the parent's id afterwards.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def describe_end(pid: int, code: int) -> str:
    """Describe how a process ended; `code` is its return code as in subprocess."""
    if code >= 0:
        return f"process {pid} exited with code {code}; its last words are above"
    name = signal.Signals(-code).name
    hint = " (was the machine out of memory?)" if -code == signal.SIGKILL else ""
    return f"process {pid} was killed by {name}{hint}"


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait before a child process is restarted, by the number of consecutive failures."""

    max_failures: int = 5
    first_s: float = 0.5
    longest_s: float = 10.0
    steady_s: float = 60.0
    """A process that was ready for this long has stayed up, even if it had nothing to do."""

    def stayed_up(self, steps: int, ready_s: float) -> bool:
        """Whether a process that died, `ready_s` seconds and `steps` steps after it was ready, had stayed up."""
        return steps > 0 or ready_s >= self.steady_s

    def delay(self, failures: int) -> float | None:
        """Seconds to wait: 0 after a process that had stayed up, then doubling; None means to give up."""
        if failures >= self.max_failures:
            return None
        if failures == 0:
            return 0.0
        return float(min(self.first_s * 2 ** (failures - 1), self.longest_s))


_CONTROL_GROUPS = Path("/sys/fs/cgroup")


def control_groups(own: Path = Path("/proc/self/cgroup"), root: Path = _CONTROL_GROUPS) -> list[Path]:
    """Folders of this process's control group and of the groups around it (version 2). The limits of all hold.

    A container sees its own group as the root. A service of systemd is in a group below the root.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    name = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    folder = root / name
    if ".." in folder.parts:  # a group outside of what the container sees
        return [root]
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]


def available_cores(groups: Sequence[Path] | None = None) -> int:
    """Cores that this process may use, within the limits of its control groups; at least 1."""
    cores = len(os.sched_getaffinity(0))
    for group in control_groups() if groups is None else groups:
        with suppress(OSError, ValueError):  # there is no limit, or it is "max"
            quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
            cores = min(cores, math.floor(int(quota) / int(period)))
    return max(1, cores)


def free_memory(groups: Sequence[Path] | None = None) -> int:
    """Bytes of the host's memory that can be allocated now, within the limits of the control groups."""
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(meminfo["MemAvailable"].split()[0]) * 1024
    for group in control_groups() if groups is None else groups:
        limit = group / "memory.max"
        if limit.exists() and (text := limit.read_text().strip()) != "max":
            free = min(free, int(text) - _used_memory(group))
    return free


def _used_memory(group: Path) -> int:
    """Bytes that the control group cannot reclaim.

    Its current usage includes cached file content, such as a downloaded model; the kernel reclaims inactive file pages
    on demand.
    """
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int((group / "memory.current").read_text()) - int(stat["inactive_file"])


def private_memory(process: int | Literal["self"] = "self") -> int:
    """Bytes of a process that no file backs: the system cannot take them back. Raises OSError if it has ended."""
    lines = (line.split() for line in Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines())
    return sum(int(words[1]) for words in lines if words[0] in ("RssAnon:", "RssShmem:")) * 1024


@contextmanager
def without_collecting() -> Iterator[None]:
    """Pause garbage collection while modules are imported, and exempt their objects from it.

    The objects are permanent. An engine has half a million; scanning them again and again would take 0.2 s.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def can_start_threads(count: int) -> bool:
    """Whether the system gives this process `count` more threads at the same time."""
    end = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(count):
            thread = threading.Thread(target=end.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:
        return False
    finally:
        end.set()
        for thread in started:
            thread.join()
    return True


if __name__ == "__main__":
    _run_module()
