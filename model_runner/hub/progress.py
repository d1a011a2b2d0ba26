"""Progress of downloads: bars in a terminal, now and then a line everywhere else."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from model_runner.hub.limits import size_text

LINE_EVERY_S = 10.0
_SMALL = 1 << 22
"""Files with fewer bytes have no bar, so that the others remain in view."""


@contextmanager
def open_progress(console: Console, total: int) -> Iterator["Bars | Lines"]:
    """Show progress until the context ends; `total` is the number of bytes of all files."""
    if not console.is_terminal:
        yield Lines(console, total)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield Bars(progress)


class Bars:
    """A bar for each file."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def start(self, name: str, size: int, done: int) -> None:
        """Begin a file of which `done` bytes are there; again if it has to begin anew."""
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=size, visible=size >= _SMALL)
        self._progress.reset(self._tasks[name], total=size, completed=done)

    def advance(self, name: str, num_bytes: int) -> None:
        self._progress.advance(self._tasks[name], num_bytes)

    def finish(self, name: str) -> None:
        """Nothing to do: the bar is full."""

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)


class Lines:
    """A line for each file that is complete, and how far the whole is in between."""

    def __init__(self, console: Console, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._total = total
        self._clock = clock
        self._lock = threading.Lock()
        self._began = self._last = clock()
        self._received = self._found = 0
        self._sizes: dict[str, int] = {}

    def start(self, name: str, size: int, done: int) -> None:
        """Begin a file of which `done` bytes are there."""
        if done:
            self.note(f"{name}: resuming after {size_text(done)}")
        with self._lock:
            self._found += done
            self._sizes[name] = done

    def advance(self, name: str, num_bytes: int) -> None:
        with self._lock:
            self._sizes[name] += num_bytes
            self._received += num_bytes
            now = self._clock()
            if now - self._last < LINE_EVERY_S:
                return
            self._last = now
            rate = self._received / (now - self._began)
            there = self._found + self._received
            left = max(self._total - there, 0) / rate
            sizes = f"{size_text(there)} of {size_text(self._total)}"
            text = f"Downloading: {sizes}, {size_text(int(rate))}/s, {left:,.0f} s left"
        self.note(text)

    def finish(self, name: str) -> None:
        self.note(f"{name}: {size_text(self._sizes[name])}")

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)
