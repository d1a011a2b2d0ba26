"""ParserConfig takes work in proportion to the output, whatever a model writes and however it comes in pieces."""

import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import pytest

from server.generation.parsing import output_parser, parts
from server.generation.parsing.choose import REASONING_TAGS, TOOL_FORMATS
from server.generation.parsing.output_parser import Expected, OutputParser
from server.generation.parsing.parts import CallArguments
from server.generation.parsing.reader import Reader
from tests.server.parsing.test_properties import schemas
from tests.server.parsing.writers import WRITERS, Calls, Writer

CALLS: Calls = [("f", {"x": 'say "hi"', "n": 12, "deep": {"a": [1, None]}})]
FLOODS = ["\n", "1", "[", '"', "a", "\\n", "<", "</", "functools"]
CUTS = 3
"""Places in a written call after which a flood comes: at its start, and evenly spread over the rest."""
NUM_PIECES = 24
THINK = REASONING_TAGS["think"]


class Meter:
    """Counts the lines of Python that parsing runs, and the characters that a reader has before it at each piece."""

    def __init__(self) -> None:
        self.work = 0

    def __enter__(self) -> "Meter":
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        return self._line if "/generation/parsing/" in frame.f_code.co_filename else None

    def _line(self, *_: object) -> Any:
        self.work += 1
        return self._line


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Meter:
    meter = Meter()

    class MeteredReader(Reader):
        def feed(self, text: str, *, is_control: bool = False) -> None:
            super().feed(text, is_control=is_control)
            meter.work += len(self._text)

    monkeypatch.setattr(output_parser, "Reader", MeteredReader)
    return meter


def work(meter: Meter, writer: Writer, pieces: Sequence[str]) -> int:
    parser = OutputParser(TOOL_FORMATS[writer.format], THINK, Expected(schemas(CALLS)))
    before = meter.work
    with meter:
        for piece in pieces:
            parser.push(piece)
        parser.finish(is_cut=True)
    return meter.work - before


def beginnings(text: str) -> Iterator[str]:
    return (text[: len(text) * number // CUTS] for number in range(CUTS))


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS.keys())
def test_twice_the_output_takes_twice_the_work(meter: Meter, writer: Writer):
    markers = TOOL_FORMATS[writer.format].markers
    for number, begun in enumerate(beginnings(writer.write(CALLS))):
        for flood in {*FLOODS[number::CUTS], *markers[:1], " "}:
            piece = flood * max(1, 4 // len(flood))
            start = work(meter, writer, [begun])
            once, twice = (work(meter, writer, [begun, *[piece] * n]) - start for n in (NUM_PIECES, 2 * NUM_PIECES))
            assert twice < 2.1 * once, (begun, flood)


def test_arguments_that_come_back_together_are_copied_once(monkeypatch: pytest.MonkeyPatch):
    copied = 0

    class CountedArguments(CallArguments, frozen=True, gc=False):
        def __post_init__(self) -> None:
            nonlocal copied
            copied += len(self.text)

    for module in (output_parser, parts):
        monkeypatch.setattr(module, "CallArguments", CountedArguments)
    written = WRITERS["hermes"].write([("f", {"x": "\n" * 2000})])
    OutputParser(TOOL_FORMATS["hermes"], None, Expected()).push(written)
    assert len(written) < copied + 100 < 3 * len(written)
