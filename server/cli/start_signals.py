"""Signals during the start: they end it at once.

The kernel keeps from a container's first process every signal without a handler, so it could not be stopped while it
downloads or converts its model. Once the server answers, a signal drains it (draining_server.py).
"""

# Short: it is imported before anything heavy, so that a signal ends the start at once.

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

CLEANUP_S = 3
"""Seconds for child processes, temporary folders and downloading threads to end."""


def end_start_on_signals() -> None:
    """Make SIGINT and SIGTERM end the process with one line and status 128 + signal; a second one ends it at once."""
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, _end)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Unwind like an error, with a time limit: Python would wait for threads in the middle of a download."""
    status = 128 + number
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(one, lambda *_: os._exit(status))
    signal.alarm(CLEANUP_S)
    line = f"error: the start was ended by {signal.Signals(number).name}\n"
    os.write(2, line.encode())  # not through sys.stderr, which the signal may have found in the middle of a print
    sys.exit(status)
