"""Records in whose functions one walk through the project runs: `python -m bench.walk step`.

A walk is one thing that happens, such as a decoding step or a request. A table has its files in the order in which they
are first entered, and how often each is: a call is an entry if the nearest function of the project above it is in
another file. Resumed coroutines and generators are no new entries, and what runs at an import is none. A file of C++
counts if Python calls a function that it defines; what that calls within the library cannot be seen.
"""

import argparse
import dis
import functools
import inspect
import json
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
PACKAGES = ("server", "scheduler", "model_runner")
_RESUME = dis.opmap["RESUME"]
_AT_START = 0
"""Argument of RESUME at the start of a function; after a `yield` or an `await` it is another."""


class Recorder:
    """Counts entries into files of the project, while it records."""

    def __init__(self, root: Path = ROOT, packages: Sequence[str] = PACKAGES) -> None:
        self._counts: dict[str, int] = {}
        self._seen_at_home: dict[str, None] = {}
        """Files that the thread with `installed` entered, in the order of their first entries."""
        self._home = threading.get_ident()
        self._folders = tuple(f"{root / package}/" for package in packages)
        self._root = root
        self._lock = threading.Lock()
        self._thread = threading.local()
        """`num_imports` is how many bodies of modules and classes are running in a thread."""
        self._records = False

    @property
    def entries(self) -> dict[str, int]:
        """By file below the root, in the order of their first entries; at last, by name, files of other threads."""
        others = sorted(self._counts.keys() - self._seen_at_home.keys())
        return {file: self._counts[file] for file in (*self._seen_at_home, *others)}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what this thread does, and threads that it starts."""
        self.start()
        with self.installed():
            yield
        self.stop()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch this thread and threads that it starts, so that `start` and `stop` may come from any thread."""
        before = sys.getprofile()
        self._home = threading.get_ident()
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(before)
            threading.setprofile(before)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Leave out what this thread does, while other threads are recorded."""
        before = sys.getprofile()
        sys.setprofile(None)
        try:
            yield
        finally:
            sys.setprofile(before)

    def start(self) -> None:
        """Record from here on, from nothing."""
        with self._lock:
            self._counts, self._seen_at_home = {}, {}
        self._records = True

    def stop(self) -> None:
        self._records = False

    def enter_native(self, file: str, caller: FrameType | None) -> None:
        """Count a call of a native function that `file` defines."""
        if self._records and file != self._file_above(caller):
            self._count(file)

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        if not self._records or event not in ("call", "return") or (file := self._file(frame.f_code)) is None:
            return
        num_imports = getattr(self._thread, "num_imports", 0)
        if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # the body of a module or a class
            self._thread.num_imports = num_imports + (1 if event == "call" else -1)
            return
        begins = event == "call" and not num_imports and _starts(frame.f_code, frame.f_lasti)
        if begins and file != self._file_above(frame.f_back):
            self._count(file)

    def _count(self, file: str) -> None:
        with self._lock:
            self._counts[file] = self._counts.get(file, 0) + 1
            if threading.get_ident() == self._home:
                self._seen_at_home[file] = None

    def _file_above(self, frame: FrameType | None) -> str | None:
        """The file of the nearest function of the project."""
        while frame is not None:
            if (file := self._file(frame.f_code)) is not None:
                return file
            frame = frame.f_back
        return None

    def _file(self, code: CodeType) -> str | None:
        name = code.co_filename
        return name.removeprefix(f"{self._root}/") if name.startswith(self._folders) else None


@functools.cache
def _starts(code: CodeType, instruction: int) -> bool:
    """Whether a call event at this instruction is the start of the function."""
    return code.co_code[instruction] != _RESUME or code.co_code[instruction + 1] == _AT_START


class NativeLibrary:
    """A library of cffi whose calls a recorder sees: Python's profiler does not see calls of C functions by cffi."""

    def __init__(self, library: Any, recorder: Recorder) -> None:
        self._library = library
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        function, file = getattr(self._library, name), defining_file(name)
        if name == "isa":  # of a table of functions
            return function

        def call(*arguments: Any) -> Any:
            self._recorder.enter_native(file, inspect.currentframe())
            result = function(*arguments)
            return NativeLibrary(result, self._recorder) if name == "sw_kernels" else result

        setattr(self, name, call)
        return call


@functools.cache
def defining_file(function: str, root: Path = ROOT) -> str:
    """The file that defines a C function of the libraries, or declares it if no definition is found."""
    sources = sorted(path for folder in ("cpp", "h") for path in (root / "model_runner").rglob(f"*.{folder}"))
    for pattern in (rf"\b{function}\([^;{{}}]*\)\s*(?:noexcept\s*)?{{", rf"\b{function}\("):
        for path in sources:
            if re.search(pattern, path.read_text(encoding="utf-8")):
                return str(path.relative_to(root))
    return f"{function} (C)"


def see_native_calls(recorder: Recorder) -> None:
    """Have all native libraries that are loaded from here on report their calls."""
    from model_runner.kernels.interface import Header  # noqa: PLC0415  (brings torch)

    load = Header.load
    setattr(Header, "load", lambda header, path: NativeLibrary(load(header, path), recorder))  # noqa: B010


def least(walks: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The files that several recordings of a walk share: the server's own timers are in some of them only."""
    first = walks[0]
    return {file: min(walk[file] for walk in walks) for file in first if all(file in walk for walk in walks)}


def table(name: str, entries: Mapping[str, int]) -> Table:
    """One line for each file."""
    lines = Table("", "file", "entries", title=f"{name}: {len(entries)} files", title_justify="left")
    for number, (file, count) in enumerate(entries.items(), 1):
        lines.add_row(str(number), file, str(count))
    lines.add_row("", "entries of all files", str(sum(entries.values())))
    lines.columns[0].justify = lines.columns[2].justify = "right"
    return lines


def main() -> None:
    """Record the walk that the argument names, and print it."""
    from bench.engine_environment import use_engine_environment  # noqa: PLC0415  (it may start this program again)

    use_engine_environment()
    from bench.walk_scenarios import WALKS  # noqa: PLC0415  (brings torch)

    described = "\n".join(f"  {name:12} {walk.__doc__}" for name, walk in WALKS.items())
    parser = argparse.ArgumentParser(
        description=f"Record the files of a walk through the project.\n\nwalks:\n{described}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("walk", choices=WALKS)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    walk: Callable[[Recorder, Path], dict[str, int]] = WALKS[arguments.walk]
    with tempfile.TemporaryDirectory() as scratch:
        entries = walk(Recorder(), Path(scratch))
    if arguments.json:
        content = {"walk": arguments.walk, "files": len(entries), "entries": entries}
        print(json.dumps(content, indent=1))
    else:
        Console().print(table(arguments.walk, entries))


if __name__ == "__main__":
    main()
