"""Calls of DeepSeek, Kimi, Gemma 4 and gpt-oss, in any pieces, mangled, and cut off."""

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.generation.parsing.formats.deepseek_dsml import DeepseekDsml
from server.generation.parsing.formats.gemma4 import Gemma4
from server.generation.parsing.formats.harmony import Harmony
from server.generation.parsing.formats.kimi_k2 import KimiK2
from server.generation.parsing.formats.kimi_k3 import KimiK3
from server.generation.parsing.output_parser import Expected, OutputParser
from server.generation.parsing.parts import CallArguments
from tests.server.parsing.harness import Message, cuts, parse
from tests.server.parsing.writers import FAMILIES, Calls, kimi_k2

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)

# -- what is written ---------------------------------------------------------------------------------------------------

MARKERS = sorted({marker for family in FAMILIES.values() for marker in family.tools.markers})
NAMES = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_.-]{0,20}", fullmatch=True)
KEYS = st.text("abcXYZ_é東 ", min_size=1, max_size=8).map(str.strip)
STRINGS = st.lists(
    st.text(max_size=12) | st.sampled_from([*MARKERS, "<", '"', "\\", "}", "```", "\n"]), max_size=4
).map("".join)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | STRINGS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(KEYS, VALUES, max_size=4)), min_size=1, max_size=3)
PLACES = st.lists(st.integers(0, 2000), max_size=30)


def without(value: Any, text: str) -> Any:
    """The value, with strings that do not hold this text."""
    match value:
        case str():
            while text and text in value:
                value = value.replace(text, "")
            return value
        case dict():
            return {key: without(inner, text) for key, inner in value.items()}
        case list():
            return [without(inner, text) for inner in value]
        case _:
            return value


def found(message: Message) -> list[tuple[str, str, str | None, bool]]:
    """The calls, with arguments in a form that can be compared."""
    return [(call.name, json.dumps(json.loads(call.arguments)), call.id, call.is_whole) for call in message.calls]


# -- calls come back ---------------------------------------------------------------------------------------------------


@EVERY_FAMILY
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_calls_come_back_as_they_were_written_in_any_pieces(family, data):
    calls = without_in_calls(data.draw(CALLS), family.raw_end)
    text = family.write("Let me see.", calls)
    whole = parse([text], family.tools)
    assert whole.content == "Let me see."
    assert found(whole) == [
        (name, json.dumps(arguments), f"functions.{name}:{number}" if family.has_ids else None, True)
        for number, (name, arguments) in enumerate(calls)
    ]
    pieces = cuts(text, data.draw(PLACES))
    assert parse(pieces, family.tools) == whole
    assert parse(pieces, family.tools, expected=Expected(calls_are_whole=True)) == whole


def without_in_calls(calls: Calls, text: str) -> Calls:
    return [(name, without(arguments, text)) for name, arguments in calls]


CALL = ("get_weather", {"city": "Zürich", "days": [1, 2.5, {"a": None}], "note": 'say "hi"\n'})


@EVERY_FAMILY
def test_arguments_are_passed_on_as_they_come_where_a_call_can_only_be_whole(family):
    text = family.write("", [CALL, CALL])
    parser = OutputParser(family.tools, None, Expected(calls_are_whole=True))
    parts = [part for character in text for part in parser.push(character)]
    assert sum(isinstance(part, CallArguments) for part in parts) > 20
    assert parser.finish() == []


@EVERY_FAMILY
def test_of_a_call_that_was_cut_off_only_the_one_before_it_is_left(family):
    text = family.write("Text.", [CALL, CALL])
    end = text.rindex("get_weather") + 40
    for pieces in ([text[:end]], list(text[:end])):
        message = parse(pieces, family.tools, is_cut=True)
        assert [call.is_whole for call in message.calls] == [True]
        assert message.content == "Text."


@EVERY_FAMILY
def test_a_call_that_is_cut_off_at_any_place_is_no_whole_call(family):
    text = family.write("Text.", [CALL])
    for end in range(len(text)):
        message = parse([text[:end]], family.tools, is_cut=True)
        assert parse(list(text[:end]), family.tools, is_cut=True) == message
        assert "Text.".startswith(message.content[:5])
        assert message.content[5:] in text[:end]
        for call in message.calls:
            assert json.loads(call.arguments) == CALL[1]


# -- what is no call ---------------------------------------------------------------------------------------------------


def mangled(text: str, chance: random.Random) -> str:
    """The text with pieces of it left out, and others put in."""
    for _ in range(chance.randint(1, 3)):
        at, from_ = chance.randrange(len(text) + 1), chance.randrange(len(text) + 1)
        length = chance.choice((1, 1, 3, 10, 30))
        if chance.random() < 0.6:
            text = text[:at] + text[at + length :]
        else:
            text = text[:at] + text[from_ : from_ + length] + text[at:]
    return text


@EVERY_FAMILY
def test_whatever_an_output_looks_like_it_is_parsed_the_same_in_any_pieces(family):
    chance = random.Random(1)
    original = family.write("Let me see.", [("f", {"a": "x y", "b": {"c": [1, True]}}), ("g", {"d": "1"})])
    for _ in range(150):
        text = mangled(original, chance)
        for is_cut in (False, True):
            expected = Expected(calls_are_whole=chance.random() < 0.3)
            whole = parse([text], family.tools, expected=expected, is_cut=is_cut)
            pieces = cuts(text, [chance.randrange(1000) for _ in range(chance.choice((1, 5, 500)))])
            assert parse(pieces, family.tools, expected=expected, is_cut=is_cut) == whole
            for call in whole.calls:
                assert not call.is_whole or isinstance(json.loads(call.arguments), dict)


@EVERY_FAMILY
def test_no_text_is_lost_where_no_call_is_found(family):
    chance = random.Random(2)
    original = family.write("Let me see.", [("f", {"a": "x y", "b": {"c": [1, True]}})])
    for _ in range(300):
        text = mangled(original, chance)
        message = parse([text], family.tools)
        if not message.calls:
            given = re.sub(family.structure, "", message.content + message.reasoning)
            assert given == re.sub(family.structure, "", text)


@EVERY_FAMILY
def test_a_broken_call_comes_back_as_text_and_the_one_after_it_is_found(family):
    broken = family.write("", [("f", {"a": [1]}), ("g", {"b": 2})]).replace("[1]", "[1")
    message = parse([broken], family.tools)
    is_in_element = isinstance(family.tools, KimiK3)  # calls are known by it, and the broken one has left it
    assert [call.name for call in message.calls] == ([] if is_in_element else ["g"])
    assert "[1" in message.content


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        (DeepseekDsml(), '<｜DSML｜tool_calls><｜DSML｜invoke name="f">{}{}</｜DSML｜invoke></｜DSML｜tool_calls>'),
        (KimiK3(), '<|open|>tools<|sep|><|open|>call tool="f"<|sep|>{}{}<|close|>call<|sep|><|close|>tools<|sep|>'),
        (Gemma4(), "<|tool_call>call:f{{{},{}}}<tool_call|>"),
    ],
    ids=["deepseek_dsml", "kimi_k3", "gemma4"],
)
def test_a_call_with_the_same_argument_twice_is_none(tools, text):
    argument = {
        "deepseek_dsml": '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>',
        "kimi_k3": '<|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|>',
        "gemma4": "a:1",
    }[tools.name]
    assert parse([text.format(argument, argument)], tools).calls == []
    other = argument.replace('"a"', '"b"').replace("a:", "b:")
    assert parse([text.format(argument, other)], tools).calls[0].arguments == '{"a": 1, "b": 1}'


def test_brackets_without_end_are_no_call():
    text = "<|tool_call>call:f{a:" + "[" * 2000
    assert parse([text], Gemma4()).content == text


def test_a_tool_is_called_by_its_bare_name_if_it_was_offered():
    text = '<|channel|>commentary to=f<|message|>{"a": 1}<|call|>'
    assert parse([text], Harmony(), expected=Expected(tools={"f": {}})).calls[0].name == "f"
    assert parse([text], Harmony()).content == '{"a": 1}'


def test_text_without_any_header_is_the_answer_of_gpt_oss():
    assert parse(list("Just <text>."), Harmony()).content == "Just <text>."


def test_a_marker_in_ordinary_tokens_is_text_if_it_is_known_as_a_control_token():
    text = kimi_k2("", [("f", {})])
    assert parse([text + " "], KimiK2(), controls=KimiK2.markers).content == text + " "
