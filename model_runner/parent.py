"""For processes that are of no use without the one that started them, and for that one. Imports nothing that takes
time.
"""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


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
