"""Which calls are entries of a walk."""

import asyncio
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from bench.walk import NativeLibrary, Recorder, defining_file, least

FIRST = """
import asyncio
from walked import second

def run(library):
    second.plain()
    own()
    list(map(second.plain, range(2)))
    total = sum(second.numbers())
    library.triple()
    return total

def own():
    from walked import third
    return 1

async def wait():
    await second.pause()
    own()
"""
THIRD = """
from walked import second

VALUE = second.plain()

class Late:
    value = second.plain()
"""
SECOND = """
import asyncio

def plain(number=0):
    return inner(number)

def inner(number):
    return number

def numbers():
    yield 1
    yield inner(2)

async def pause():
    for _ in range(5):
        await asyncio.sleep(0)
"""


class Library:
    def triple(self) -> int:
        return 3


@pytest.fixture
def walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package of two files."""
    folder = tmp_path / "walked"
    folder.mkdir()
    for name, source in {"__init__": "", "first": FIRST, "second": SECOND, "third": THIRD}.items():
        (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("walked.first")
    for name in ("walked", "walked.first", "walked.second", "walked.third"):
        sys.modules.pop(name, None)


def test_entries_come_from_other_files(walked: ModuleType, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, ("walked",))
    with recorder.recording():
        assert walked.run(NativeLibrary(Library(), recorder)) == 3
    triple = "triple (C)"
    assert recorder.entries == {"walked/first.py": 1, "walked/second.py": 4, triple: 1}
    assert list(recorder.entries) == ["walked/first.py", "walked/second.py", triple]
    walked.run(Library())
    assert recorder.entries["walked/first.py"] == 1


def test_a_resumed_coroutine_is_no_new_entry(walked: ModuleType, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, ("walked",))
    with recorder.recording():
        asyncio.run(walked.wait())
    assert recorder.entries == {"walked/first.py": 1, "walked/second.py": 1}


def test_the_definition_of_a_native_function() -> None:
    assert defining_file("sw_create") == "model_runner/kernels/cpu/samewise.cpp"


def test_what_several_walks_share() -> None:
    assert least([{"a": 2, "timer": 1, "b": 1}, {"a": 1, "b": 3}]) == {"a": 1, "b": 1}
