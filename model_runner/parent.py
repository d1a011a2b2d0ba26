"""For processes that are of no use without the one that started them. Imports nothing that takes time."""

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
