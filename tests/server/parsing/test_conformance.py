"""Recorded outputs of many models, with the right parse of each: canitoolcall's fixtures.

A fixture is parsed whole, a character at a time, and in random pieces. All must agree, and be what is expected.
"""

import random
import re

import pytest
from canitoolcall.fixtures import Fixture, load_families, load_fixtures
from canitoolcall.pytest_plugin import assert_conforms
from canitoolcall.results import ParsedToolCall, ParseResult

from server.generation.parsing.formats.deepseek_dsml import DeepseekDsml
from server.generation.parsing.formats.deepseek_v3 import DeepseekV3
from server.generation.parsing.formats.gemma4 import Gemma4
from server.generation.parsing.formats.harmony import Harmony
from server.generation.parsing.formats.hermes import Hermes
from server.generation.parsing.formats.kimi_k2 import KimiK2
from server.generation.parsing.formats.kimi_k3 import KimiK3
from server.generation.parsing.output_parser import Expected, ToolFormat
from server.generation.parsing.think_tags import ThinkTags
from tests.server.parsing.harness import Message, cuts, parse

THINK = ThinkTags("think", "<think>", "</think>")
FORMATS: dict[str, tuple[ToolFormat, ThinkTags | None]] = {
    "Qwen/Qwen3-0.6B": (Hermes(), THINK),
    "Qwen/Qwen3-4B": (Hermes(), THINK),
    "deepseek-ai/DeepSeek-V3-0324": (DeepseekV3(), THINK),
    "deepseek-ai/DeepSeek-V3.1": (DeepseekV3(), THINK),
    "deepseek-ai/DeepSeek-V3.2": (DeepseekDsml(), THINK),
    "deepseek-ai/DeepSeek-V4": (DeepseekDsml(), THINK),
    "moonshotai/Kimi-K2": (KimiK2(), THINK),
    "moonshotai/Kimi-K3": (KimiK3(), None),
    "google/gemma-4": (Gemma4(), ThinkTags("gemma4", "<|channel>thought", "<channel|>")),
    "openai/gpt-oss": (Harmony(), None),
}
"""By the beginning of the name of a fixture's first model."""
FIXTURES = load_fixtures()
PROMPTS = {
    model.repo: model.default_generation_prompt
    for family in load_families().values()
    for model in family.reference_models
}
ONLY_SOFT = {
    "gemma4/vllm-text-before-call": "expects the space before the call to be dropped; gemma4/sglang-text-before-call "
    "and the rule for text around calls in the fixtures' README expect it to be kept",
}
"""Fixtures that are met but for whitespace at the ends of the text, and why."""
ONLY_BY_TOKENS = ("kimi/k3-control-marker-text-in-value",)
"""Fixtures with text that only its tokens tell from the structure around it."""
ORDINARY = {
    "kimi/k3-control-marker-text-in-value": r"<\|close\|>argument<\|sep\|> is how args end",
    "gpt-oss/harmony-marker-in-arguments": r'"content": ".*"',
    "gpt-oss/harmony-marker-in-reasoning": r"I must not .* myself",
}
"""What reads like control tokens in a fixture, and was written in ordinary tokens: a regular expression."""
CONTROL_IDS = {"kimi": range(163587, 163590), "gpt-oss": range(200000, 200019)}
"""Of the families with such fixtures."""


def format_of(fixture: Fixture) -> tuple[ToolFormat, ThinkTags | None] | None:
    return next((formats for start, formats in FORMATS.items() if fixture.models[0].startswith(start)), None)


def expected_of(fixture: Fixture) -> Expected:
    prompt = fixture.generation_prompt
    if prompt is None:
        prompt = PROMPTS[fixture.models[0]] or ""
    is_thinking = prompt.rstrip().endswith(("<think>", "<|open|>think<|sep|>"))
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in fixture.tools}
    return Expected(tools=schemas, is_thinking=is_thinking)


def result(message: Message) -> ParseResult:
    calls = tuple(ParsedToolCall(name=call.name, arguments_raw=call.arguments) for call in message.calls)
    return ParseResult(content=message.content, reasoning_content=message.reasoning, tool_calls=calls)


@pytest.mark.parametrize(
    "fixture", [f for f in FIXTURES if format_of(f) and f.id not in ONLY_BY_TOKENS], ids=lambda fixture: fixture.id
)
def test_every_fixture_is_parsed_right_in_any_pieces(fixture):
    formats = format_of(fixture)
    assert formats is not None
    tools, reasoning = formats
    expected = expected_of(fixture)
    is_cut = fixture.truncated
    whole = parse([fixture.raw_output], tools, reasoning, expected, is_cut=is_cut)
    assert_conforms(fixture, result(whole), soft=fixture.id in ONLY_SOFT)
    random.seed(fixture.id)
    places = [[random.randrange(10**6) for _ in range(count)] for count in (1, 2, 5, 20)]
    for pieces in (list(fixture.raw_output), *(cuts(fixture.raw_output, some) for some in places)):
        assert parse(pieces, tools, reasoning, expected, is_cut=is_cut) == whole


def pieces_with_controls(fixture: Fixture, tools: ToolFormat) -> list[str]:
    """The output cut at its control tokens."""
    ordinary = ORDINARY.get(fixture.id, "(?!)")
    markers = "|".join(map(re.escape, tools.markers))
    return [
        match[0]
        for match in re.finditer(rf"{ordinary}|{markers}|(?:(?!{ordinary}|{markers}).)+", fixture.raw_output, re.DOTALL)
    ]


@pytest.mark.parametrize("fixture_id", ORDINARY)
def test_the_pieces_are_cut_at_the_control_tokens_of_the_fixture(fixture_id):
    fixture = next(fixture for fixture in FIXTURES if fixture.id == fixture_id)
    formats = format_of(fixture)
    assert formats is not None
    assert fixture.output_token_ids is not None
    pieces = pieces_with_controls(fixture, formats[0])
    num_controls = sum(token in CONTROL_IDS[fixture.family] for token in fixture.output_token_ids)
    assert "".join(pieces) == fixture.raw_output
    assert sum(piece in formats[0].markers for piece in pieces) == num_controls


@pytest.mark.parametrize(
    "fixture",
    [fixture for fixture in FIXTURES if fixture.family in ("deepseek", "kimi", "gemma4", "gpt-oss")],
    ids=lambda fixture: fixture.id,
)
def test_every_fixture_is_parsed_right_by_its_control_tokens(fixture):
    formats = format_of(fixture)
    assert formats is not None
    tools, reasoning = formats
    pieces = pieces_with_controls(fixture, tools)
    expected = expected_of(fixture)
    message = parse(pieces, tools, reasoning, expected, tools.markers, is_cut=fixture.truncated)
    assert_conforms(fixture, result(message), soft=fixture.id in ONLY_SOFT)
