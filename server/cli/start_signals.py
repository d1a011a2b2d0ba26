"""What a signal does to a server that does not answer yet: the start ends at once.

Without handlers the first process of a container could not be stopped while it downloads or converts its model: the
kernel keeps from it every signal that it does not handle. Once the server answers, a signal drains it
(draining_server.py).
"""

# Short: it is imported before anything heavy, so that a signal ends the start at once.

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

CLEANUP_S = 3
"""Given to what ends with the start: child processes, temporary folders, threads that download."""


def end_start_on_signals() -> None:
    """From now on SIGINT and SIGTERM end the process with one line and status 128 + signal, a second one at once."""
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, _end)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Unwind like an error does, but within a time: threads in the middle of a download would be waited for."""
    status = 128 + number
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(one, lambda *_: os._exit(status))
    signal.alarm(CLEANUP_S)
    line = f"error: the start was ended by {signal.Signals(number).name}\n"
    os.write(2, line.encode())  # not through sys.stderr, which the signal may have found in the middle of a print
    sys.exit(status)
