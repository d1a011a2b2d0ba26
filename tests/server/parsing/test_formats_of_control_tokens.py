"""Peculiarities of the formats of DeepSeek, Kimi, Gemma 4 and gpt-oss."""

import pytest

from server.generation.parsing.choose import TOOL_FORMATS
from server.generation.parsing.formats.deepseek import DeepseekDsml
from server.generation.parsing.formats.gemma4 import Gemma4
from server.generation.parsing.formats.harmony import Harmony
from server.generation.parsing.formats.kimi import KimiK2, KimiK3
from server.generation.parsing.output_parser import Expected
from tests.server.parsing.harness import parse
from tests.server.parsing.writers import WRITERS, kimi_k2


@pytest.mark.parametrize("name", ["deepseek_v3.1", "deepseek_v4", "kimi_k2", "gemma4", "harmony"])
def test_a_broken_call_comes_back_as_text_and_the_one_after_it_is_found(name):
    writer = WRITERS[name]
    broken = writer.write([("f", {"a": [1]}), ("g", {"b": 2})]).replace("[1]", "[1")
    message = parse([broken], TOOL_FORMATS[writer.format])
    assert [call.name for call in message.calls] == ["g"]
    assert "[1" in message.content


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        (DeepseekDsml(), '<｜DSML｜tool_calls><｜DSML｜invoke name="f">{}{}</｜DSML｜invoke></｜DSML｜tool_calls>'),
        (KimiK3(), '<|open|>tools<|sep|><|open|>call tool="f"<|sep|>{}{}<|close|>call<|sep|><|close|>tools<|sep|>'),
    ],
    ids=["deepseek_dsml", "kimi_k3"],
)
def test_a_call_with_the_same_argument_twice_is_none(tools, text):
    argument = {
        "deepseek_dsml": '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>',
        "kimi_k3": '<|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|>',
    }[tools.name]
    assert parse([text.format(argument, argument)], tools).calls == []
    other = argument.replace('"a"', '"b"')
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
    text = kimi_k2([("f", {})])
    assert parse([text + " "], KimiK2(), controls=KimiK2.markers).content == text + " "
