"""A control group with a limit of memory, whose processes the kernel kills beyond it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_VERSION_1, _VERSION_2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_NAME = "samewise-test"


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A group of version 1 or 2."""

    folder: Path

    @property
    def command(self) -> list[str]:
        """The beginning of a command that runs in the group, with all processes that it starts."""
        return ["sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$0" "$@"']

    @property
    def num_killed(self) -> int:
        """Processes that were killed because the group had too much memory."""
        for name in ("memory.oom_control", "memory.events"):
            if (file := self.folder / name).exists():
                return int(re.findall(r"^oom_kill (\d+)", file.read_text(), re.MULTILINE)[0])
        raise AssertionError("the group counts nothing")


@contextmanager
def memory_group(num_bytes: int) -> Iterator[MemoryGroup]:
    """A group of its own; skips the test where none can be made. All processes must have ended at the end."""
    is_first = (_VERSION_1 / "memory.limit_in_bytes").exists()
    folder = (_VERSION_1 if is_first else _VERSION_2) / _NAME
    try:
        folder.mkdir(exist_ok=True)
        (folder / ("memory.limit_in_bytes" if is_first else "memory.max")).write_text(str(num_bytes))
        if not is_first:
            (folder / "memory.swap.max").write_text("0")
    except OSError as error:
        if folder.exists():
            folder.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    try:
        yield MemoryGroup(folder)
    finally:
        folder.rmdir()
