"""Recorded outputs of many models, with the right parse of each: canitoolcall's fixtures.

A fixture is parsed whole, a character at a time, and in random pieces. All must agree, and be what is expected.
"""

import random

import pytest
from canitoolcall.fixtures import Fixture, load_fixtures
from canitoolcall.pytest_plugin import assert_conforms
from canitoolcall.results import ParsedToolCall, ParseResult

from server.generation.parsing.formats.hermes import Hermes
from server.generation.parsing.output_parser import Expected, ToolFormat
from server.generation.parsing.think_tags import ThinkTags
from tests.server.parsing.harness import Message, cuts, parse

THINK = ThinkTags("think", "<think>", "</think>")
FORMATS: dict[str, tuple[ToolFormat, ThinkTags | None]] = {
    "Qwen/Qwen3-0.6B": (Hermes(), THINK),
    "Qwen/Qwen3-4B": (Hermes(), THINK),
}
"""By the beginning of the name of a fixture's first model."""
FIXTURES = load_fixtures()


def format_of(fixture: Fixture) -> tuple[ToolFormat, ThinkTags | None] | None:
    return next((formats for start, formats in FORMATS.items() if fixture.models[0].startswith(start)), None)


def expected_of(fixture: Fixture, reasoning: ThinkTags | None) -> Expected:
    prompt = fixture.generation_prompt or ""
    is_thinking = reasoning is not None and prompt.rfind(reasoning.begin) > prompt.rfind(reasoning.end)
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in fixture.tools}
    return Expected(tools=schemas, is_thinking=is_thinking)


def result(message: Message) -> ParseResult:
    calls = tuple(ParsedToolCall(name=call.name, arguments_raw=call.arguments) for call in message.calls)
    return ParseResult(content=message.content, reasoning_content=message.reasoning, tool_calls=calls)


@pytest.mark.parametrize("fixture", [f for f in FIXTURES if format_of(f)], ids=lambda fixture: fixture.id)
def test_every_fixture_is_parsed_right_in_any_pieces(fixture):
    formats = format_of(fixture)
    assert formats is not None
    tools, reasoning = formats
    expected = expected_of(fixture, reasoning)
    is_cut = "truncated" in fixture.tags
    whole = parse([fixture.raw_output], tools, reasoning, expected, is_cut=is_cut)
    assert_conforms(
        fixture,
        result(whole),
    )
    random.seed(fixture.id)
    places = [[random.randrange(10**6) for _ in range(count)] for count in (1, 2, 5, 20)]
    for pieces in (list(fixture.raw_output), *(cuts(fixture.raw_output, some) for some in places)):
        assert parse(pieces, tools, reasoning, expected, is_cut=is_cut) == whole
