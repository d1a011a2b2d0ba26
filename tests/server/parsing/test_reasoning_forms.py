"""Reasoning before an answer of a form: what the grammar accepts, the parser reads as reasoning and such an answer."""

import json
from functools import cache

import pytest
from llguidance import LLMatcher, LLTokenizer

from server.generation.constraints.json_text import JsonObject
from server.generation.parsing.choose import REASONING_TAGS, TOOL_FORMATS
from server.generation.planning.forms import Form, FormRules
from server.generation.planning.reading import ModelFormats
from server.generation.request import Conversation, GenerationRequest
from server.generation.tools import Tool, ToolUse
from server.text.tokenizer import Tokenizer
from tests.server.parsing.harness import Message, parse
from tests.server.tiny_model import END, byte_level_tokenizer

TAGS = ["<think>", "</think>"]
BLANKS = ["", "\n", "\n\n", " ", "\n \n\t\r\n", " " * 16]
ANSWER = '{"c": 1}'
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
FUNCTION = Tool("f", None, {"type": "object", "properties": {}, "additionalProperties": False})


@cache
def tokenizers(*, are_special: bool) -> tuple[Tokenizer, LLTokenizer]:
    """Two views of one: the tags are special tokens, or spelled in bytes."""
    model = byte_level_tokenizer()
    if are_special:
        model.add_special_tokens(TAGS)
    return Tokenizer(model, {}, None), LLTokenizer(model.to_str(), eos_token=[END])


def form_of(tokenizer: Tokenizer, prompt: str, tools: ToolUse | None = None) -> Form:
    constraint = JsonObject() if tools is None else None
    request = GenerationRequest(model="m", prompts=(Conversation(messages=()),), constraint=constraint, tools=tools)
    return FormRules(tokenizer, ModelFormats("hermes", "think")).of_conversation(request, prompt, [])


def read(output: str, form: Form, *, are_special: bool) -> Message | None:
    """What the parser makes of an output; None if the grammar does not accept it."""
    tokenizer, for_grammars = tokenizers(are_special=are_special)
    assert form.grammar is not None
    assert form.reading is not None
    matcher = LLMatcher(for_grammars, form.grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.encode(output, add_special_tokens=False)
    if matcher.try_consume_tokens(tokens) < len(tokens) or not matcher.is_accepting():
        return None
    pieces = [form.reading.controls.get(token) or tokenizer.token_text(token) for token in tokens]
    tools = TOOL_FORMATS[form.reading.tool_format] if form.reading.tool_format else None
    return parse(pieces, tools, REASONING_TAGS["think"], form.reading.expected, form.reading.controls.values())


@pytest.mark.parametrize("are_special", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("prompt", ["", "<think>\n"], ids=["model", "prompt"])
@pytest.mark.parametrize("mode", ["form", "required", "auto"])
def test_whitespace_around_the_reasoning_belongs_to_neither(mode: str, prompt: str, are_special: bool):
    tools = None if mode == "form" else ToolUse((FUNCTION,), mode)
    form = form_of(tokenizers(are_special=are_special)[0], prompt, tools)
    for before in BLANKS if not prompt else [""]:
        for after in BLANKS:
            begin = "" if prompt else f"{before}<think>\n"
            answer = ANSWER if mode == "form" else CALL
            message = read(f"{begin}Is it?{after}</think>{after}{answer}", form, are_special=are_special)
            assert message is not None, (before, after)
            assert message.reasoning == "Is it?"
            if mode == "form":
                assert json.loads(message.content) == {"c": 1}
                assert message.content == ANSWER
            else:
                assert [call.name for call in message.calls] == ["f"]
                assert message.content == ""


@pytest.mark.parametrize("are_special", [True, False], ids=["tokens", "text"])
def test_whitespace_goes_on_for_no_longer_than_models_write_it(are_special: bool):
    form = form_of(tokenizers(are_special=are_special)[0], "<think>\n")
    assert read(f"x</think>{' ' * 17}{ANSWER}", form, are_special=are_special) is None
    assert read(f"x</think>{ANSWER}\n", form, are_special=are_special) is None
    unthinking = form_of(tokenizers(are_special=are_special)[0], "")
    assert read(f"\n{ANSWER}", unthinking, are_special=are_special) is None
