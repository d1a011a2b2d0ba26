"""Recorded outputs of many models, with the right parse of each: canitoolcall's fixtures.

A fixture is parsed whole, a character at a time, and in random pieces. All must agree, and be what is expected.
"""

import random
import re
from dataclasses import replace

import pytest
from canitoolcall.fixtures import Fixture, load_families, load_fixtures
from canitoolcall.pytest_plugin import assert_conforms
from canitoolcall.results import ParsedToolCall, ParseResult

from server.generation.parsing.choose import REASONING_TAGS, TOOL_FORMATS
from server.generation.parsing.output_parser import Expected, ThinkTags, ToolFormat
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
    "deepseek-ai/DeepSeek-V3.2": ("deepseek_dsml", THINK),
    "deepseek-ai/DeepSeek-V3": ("deepseek_v3", THINK),
    "deepseek-ai/DeepSeek-V4": ("deepseek_dsml", THINK),
    "moonshotai/Kimi-K2": ("kimi_k2", THINK),
    "moonshotai/Kimi-K3": ("kimi_k3", None),
    "google/gemma-4": ("gemma4", REASONING_TAGS["gemma4"]),
    "openai/gpt-oss": ("harmony", None),
}
"""By the beginning of the name of a fixture's first model; the first that fits counts."""
FIXTURES = load_fixtures()
MISTRAL_CONTROLS = {9: "[TOOL_CALLS]", 32: "[ARGS]", 33: "[CALL_ID]", 34: "[THINK]", 35: "[/THINK]"}
"""Control tokens of the tokenizers from v11 on."""
FAMILIES = load_families()
ONLY_SOFT = {
    "gemma4/vllm-text-before-call": "expects the space before the call to be dropped; gemma4/sglang-text-before-call "
    "and the rule for text around calls in the fixtures' README expect it to be kept",
}
"""Fixtures that match except for whitespace at the ends of the text, with the reason."""
ONLY_BY_TOKENS = ("kimi/k3-control-marker-text-in-value",)
"""Fixtures with text that only its tokens tell from the structure around it."""
ORDINARY = {
    "kimi/k3-control-marker-text-in-value": r"<\|close\|>argument<\|sep\|> is how args end",
    "gpt-oss/harmony-marker-in-arguments": r'"content": ".*"',
    "gpt-oss/harmony-marker-in-reasoning": r"I must not .* myself",
}
"""Expressions for text that looks like control tokens but was written in ordinary tokens."""
CONTROL_IDS = {"kimi": range(163587, 163590), "gpt-oss": range(200000, 200019)}
"""Ids of control tokens, for families with fixtures of this kind."""


def format_of(fixture: Fixture) -> tuple[ToolFormat, ThinkTags | None] | None:
    found = next((formats for start, formats in FORMATS.items() if fixture.models[0].startswith(start)), None)
    return found and (TOOL_FORMATS[found[0]], found[1])


def expected_of(fixture: Fixture) -> Expected:
    model = FAMILIES[fixture.family].reference_for(fixture.models[0])
    assert model is not None
    prompt = fixture.generation_prompt
    if prompt is None:
        prompt = model.default_generation_prompt or ""
    is_thinking = prompt.rstrip().endswith(("<think>", "[THINK]", "<|open|>think<|sep|>"))
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
    [f for f in FIXTURES if f.family == "mistral" and f.tokenizer is not None and f.tokenizer.mode == "mistral"],
    ids=lambda fixture: fixture.id,
)
def test_markers_may_count_as_control_tokens_only(fixture):
    tools, reasoning = format_of(fixture)
    pieces = pieces_by_control(fixture)
    assert "".join(pieces) == fixture.raw_output
    expected, is_cut = expected_of(fixture), fixture.truncated
    controls = MISTRAL_CONTROLS.values()
    assert_conforms(fixture, result(parse(pieces, tools, reasoning, expected, controls, is_cut=is_cut)))


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
