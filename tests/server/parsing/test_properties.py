"""Properties of every format: calls come back as written, and everything else comes back as text."""

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.generation.parsing.choose import REASONING_TAGS, TOOL_FORMATS
from server.generation.parsing.output_parser import Expected, OutputParser
from server.generation.parsing.parts import CallArguments
from tests.server.parsing.harness import Message, cuts, parse
from tests.server.parsing.writers import WRITERS, Calls, Writer

MARKERS = sorted({marker for tools in TOOL_FORMATS.values() for marker in tools.markers})
TAGS = ["<function=f>", "</function>", "<parameter=a>", "</parameter>", "<think>", "</think>"]
SIGNS = [*"{}[]()<>\"'=,;:\\\n \u2028é🌸0-", "null", "\\u12"]
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,9}", fullmatch=True)
STRINGS = st.lists(st.sampled_from([*MARKERS, *TAGS, *SIGNS]) | st.text(max_size=5), max_size=5).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | STRINGS,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(STRINGS, values, max_size=3),
    max_leaves=5,
)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), min_size=1, max_size=3)
PLACES = st.lists(st.integers(0, 5000), max_size=12)
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
LONG = 'The quick brown fox isn\'t "lazy".\n' * 20
EXAMPLES: Sequence[Calls] = (
    [("get_weather", {"city": "Zürich", "days": 3})],
    [("f", {}), ("write_file", {"path": "C:\\a", "content": 'say "hi"\n\tthere: [{}]'})],
    [("search", {"q": "it's <b>", "filters": {"tags": ["a", None, True], "max": 1.5e3}, "deep": [[], {}]})],
    [("a", {"x": 1}), ("b", {"x": "</tool_call> [TOOL_CALLS] and <parameter=x>"}), ("a", {"y": False})],
)
NUM_MANGLED = 700
"""By writer: about 10,000 in all."""


def schemas(calls: Calls) -> dict[str, Any]:
    """A schema for each call's tool; tools with the same name accept the types of all their calls."""
    tools: dict[str, dict[str, set[str]]] = {}
    for name, arguments in calls:
        properties = tools.setdefault(name, {})
        for key, value in arguments.items():
            properties.setdefault(key, set()).add(TYPES.get(type(value), "null"))
    return {
        name: {"type": "object", "properties": {key: {"type": sorted(types)} for key, types in properties.items()}}
        for name, properties in tools.items()
    }


def test_every_format_is_written_here():
    assert {writer.format for writer in WRITERS.values()} == set(TOOL_FORMATS)


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS.keys())
@settings(max_examples=15)
@given(
    calls=CALLS, places=st.lists(st.integers(0, 5000), max_size=12), text=st.sampled_from(["", "Well [1] {<", "So:"])
)
def test_calls_come_back_as_they_were_written(writer: Writer, calls: Calls, places: list[int], text: str):
    calls = [(f"{name}_{number}", writer.sayable(given)) for number, (name, given) in enumerate(calls)]
    before = "" if writer.begins_output else text
    output = before + writer.write(calls) + "\nDone."
    tools = TOOL_FORMATS[writer.format]
    whole = parse([output], tools, expected=Expected(schemas(calls)))
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == calls
    assert [json.dumps(json.loads(call.arguments)) for call in whole.calls] == [json.dumps(given) for _, given in calls]
    assert whole.content.split() == f"{before}\nDone.".split()
    for pieces in (output, cuts(output, places)):
        for calls_are_whole in (False, True):
            expected = Expected(schemas(calls), calls_are_whole=calls_are_whole)
            assert parse(pieces, tools, expected=expected) == whole


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS.keys())
def test_arguments_come_as_they_are_written_where_calls_are_whole(writer: Writer):
    calls = [("write_file", {"path": "fox.txt", "content": LONG, "overwrite": True})]
    parser = OutputParser(TOOL_FORMATS[writer.format], None, Expected(schemas(calls), calls_are_whole=True))
    pushed = [parser.push(character) for character in writer.write(calls)]
    given = [part.text for parts in pushed for part in parts if isinstance(part, CallArguments)]
    assert len(given) > len(LONG) / 2
    assert json.loads("".join(given)) == calls[0][1]


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS.keys())
def test_a_call_that_is_cut_off_is_none(writer: Writer):
    calls = EXAMPLES[0]
    text = ("" if writer.begins_output else "Well.") + writer.write(calls)
    for end in range(len(text)):
        message = parse([text[:end]], TOOL_FORMATS[writer.format], expected=Expected(schemas(calls)), is_cut=True)
        assert all((call.name, json.loads(call.arguments)) == calls[0] for call in message.calls)


@pytest.mark.parametrize("calls_are_whole", [False, True])
@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS.keys())
def test_a_call_of_a_tool_that_was_not_offered_is_text(writer: Writer, calls_are_whole: bool):
    strange, known = ("strange", {"x": 1}), ("f", {"x": 1})
    expected = Expected(schemas([known]), only_offered=True, calls_are_whole=calls_are_whole)
    for calls in ([strange], [strange, known]):
        text = writer.write(calls)
        whole = parse([text], TOOL_FORMATS[writer.format], expected=expected)
        assert parse(text, TOOL_FORMATS[writer.format], expected=expected) == whole
        assert {call.name for call in whole.calls} <= {"f"}
        assert "strange" in whole.content
        if not whole.calls:
            assert re.sub(writer.structure, "", whole.content) == re.sub(writer.structure, "", text)


def mangled(rng: random.Random, text: str) -> str:
    """The text with a few accidents."""
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.choice([1, 2, 10, 40]))
        match rng.randrange(5):
            case 0:
                text = text[:start] + text[end:]
            case 1:
                text = text[:end] + text[start:end] + text[end:]
            case 2:
                text = text[:start] + rng.choice(SIGNS) + text[start:]
            case 3:
                text = text[:start] + rng.choice([*MARKERS, *TAGS]) + text[start:]
            case 4:
                text = text.replace(rng.choice([*MARKERS, *TAGS, *SIGNS]), rng.choice([*MARKERS, *TAGS, ""]), 1)
    return text


def check_arguments(message: Message) -> None:
    for call in message.calls:
        assert call.name
        assert call.is_whole
        assert isinstance(json.loads(call.arguments, parse_constant=pytest.fail), dict)


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS.keys())
def test_nothing_is_lost_of_broken_calls(writer: Writer):
    rng = random.Random(writer.format)
    tools, tags = TOOL_FORMATS[writer.format], REASONING_TAGS["think"]
    for number in range(NUM_MANGLED):
        calls = EXAMPLES[number % len(EXAMPLES)]
        text = mangled(rng, ("" if writer.begins_output else "Well: ") + writer.write(calls) + "\nDone.")
        pieces = cuts(text, [rng.randrange(10**6) for _ in range(rng.choice([1, 4, 12]))])
        expected = Expected(schemas(calls))
        whole = parse([text], tools, expected=expected)
        assert parse(pieces, tools, expected=expected) == whole, text
        check_arguments(whole)
        if not whole.calls:
            given = whole.content + whole.reasoning
            assert re.sub(writer.structure, "", given) == re.sub(writer.structure, "", text)
        cut = parse(pieces, tools, tags, expected, is_cut=True)
        assert parse([text], tools, tags, expected, is_cut=True) == cut, text
        check_arguments(cut)
