"""Guarantees of the reader for all formats."""

from server.generation.parsing.formats.json_calls import Hermes
from server.generation.parsing.output_parser import Expected, ThinkTags
from tests.server.parsing.harness import Call, Message, parse

BRACKETS = ThinkTags("brackets", "[THINK]", "[/THINK]")


def test_a_control_token_is_waited_for_where_nothing_is_known_yet():
    pieces = ["\n", "[THINK]", "why", "[/THINK]", "\n", "answer"]
    expected = Message(reasoning="why", content="answer")
    assert parse(pieces, None, BRACKETS, controls=("[THINK]", "[/THINK]")) == expected


def test_the_text_of_a_control_token_is_only_text():
    pieces = ["[THINK]", "a [/TH", "INK] b", "[/THINK]"]
    assert parse(pieces, None, BRACKETS, controls=("[THINK]", "[/THINK]")) == Message(reasoning="a [/THINK] b")
    assert parse(["[THI", "NK]x"], None, BRACKETS, controls=("[THINK]", "[/THINK]")) == Message(content="[THINK]x")


def test_whitespace_that_is_held_back_leaves_control_tokens_where_they_are():
    pieces = ["\n", " ", "\n\n", "text", "\n", "\n", "<tool_call>", '{"name": "f"}', "\n", " ", "</tool_call>"]
    controls = ("[THINK]", "[/THINK]", "<tool_call>", "</tool_call>")
    expected = Message(content="\n \n\ntext", calls=[Call("f", "{}", is_whole=True)])
    assert parse(pieces, Hermes(), BRACKETS, controls=controls) == expected


def test_what_does_not_even_begin_as_a_call_stays_text_where_calls_are_whole():
    expected = Expected(calls_are_whole=True)
    text = 'Calls stand in <tool_call> tags.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    message = parse(text, Hermes(), expected=expected)
    assert message.content == "Calls stand in <tool_call> tags."
    assert message.calls == [Call("f", "{}", is_whole=True)]
