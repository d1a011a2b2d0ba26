"""Recorded outputs of many models, with the right parse of each: canitoolcall's fixtures.

A fixture is parsed whole, a character at a time, and in random pieces. All must agree, and be what is expected.
"""

import random
from dataclasses import replace

import pytest
from canitoolcall.fixtures import Fixture, load_families, load_fixtures
from canitoolcall.pytest_plugin import assert_conforms
from canitoolcall.results import ParsedToolCall, ParseResult

from server.generation.parsing.choose import REASONING_TAGS, TOOL_FORMATS
from server.generation.parsing.output_parser import Expected, ToolFormat
from server.generation.parsing.think_tags import ThinkTags
from tests.server.parsing.harness import Message, cuts, parse

THINK = REASONING_TAGS["think"]
FORMATS: dict[str, tuple[str, ThinkTags | None]] = {
    "Qwen/Qwen3-0.6B": ("hermes", THINK),
    "Qwen/Qwen3-4B": ("hermes", THINK),
    "Qwen/Qwen3-Coder": ("qwen3_xml", None),
    "Qwen/Qwen3.": ("qwen3_xml", THINK),
    "meta-llama/Llama-3": ("llama3_json", None),
    "meta-llama/Llama-4": ("pythonic", None),
    "mistralai/Magistral-Small-2506": ("mistral", THINK),
    "mistralai/": ("mistral", REASONING_TAGS["mistral_think"]),
    "zai-org/GLM": ("glm", THINK),
}
"""By the beginning of the name of a fixture's first model; the first that fits counts."""
FIXTURES = load_fixtures()
MISTRAL_CONTROLS = {9: "[TOOL_CALLS]", 32: "[ARGS]", 33: "[CALL_ID]", 34: "[THINK]", 35: "[/THINK]"}
"""Of the tokenizers from v11 on."""
FAMILIES = load_families()


def format_of(fixture: Fixture) -> tuple[ToolFormat, ThinkTags | None] | None:
    found = next((formats for start, formats in FORMATS.items() if fixture.models[0].startswith(start)), None)
    return found and (TOOL_FORMATS[found[0]], found[1])


def expected_of(fixture: Fixture, reasoning: ThinkTags | None) -> Expected:
    model = FAMILIES[fixture.family].reference_for(fixture.models[0])
    assert model is not None
    prompt = fixture.generation_prompt or model.default_generation_prompt or ""
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
    assert_conforms(fixture, result(whole))
    if fixture.expected is not None and not is_cut:
        held = replace(expected, calls_are_whole=True)
        assert parse([fixture.raw_output], tools, reasoning, held) == whole
    random.seed(fixture.id)
    places = [[random.randrange(10**6) for _ in range(count)] for count in (1, 2, 5, 20)]
    for pieces in (list(fixture.raw_output), *(cuts(fixture.raw_output, some) for some in places)):
        assert parse(pieces, tools, reasoning, expected, is_cut=is_cut) == whole


def pieces_by_control(fixture: Fixture) -> list[str]:
    """The output cut before and after its control tokens, which are in the order of its token ids."""
    rest, pieces = fixture.raw_output, []
    for token in fixture.output_token_ids or ():
        if token in MISTRAL_CONTROLS:
            before, marker, rest = rest.partition(MISTRAL_CONTROLS[token])
            pieces += [*cuts(before, [len(before) // 2]), marker]
    return [*pieces, rest]


@pytest.mark.parametrize(
    "fixture",
    [f for f in FIXTURES if f.family == "mistral" and f.tokenizer is not None and f.tokenizer.mode == "mistral"],
    ids=lambda fixture: fixture.id,
)
def test_markers_may_count_as_control_tokens_only(fixture):
    tools, reasoning = format_of(fixture)
    pieces = pieces_by_control(fixture)
    assert "".join(pieces) == fixture.raw_output
    expected, is_cut = expected_of(fixture, reasoning), "truncated" in fixture.tags
    controls = MISTRAL_CONTROLS.values()
    assert_conforms(fixture, result(parse(pieces, tools, reasoning, expected, controls, is_cut=is_cut)))
