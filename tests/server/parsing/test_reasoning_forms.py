"""Reasoning before an answer of a form: what the grammar accepts, the parser reads as reasoning and such an answer."""

import json
from functools import cache

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from model_runner.contract import Thinking
from scheduler.interface import FinishReason, RequestOutput
from server.generation.choice import ChoiceParts
from server.generation.constraints.json_schema import JsonObject
from server.generation.events import ReasoningDelta, TextDelta
from server.generation.output_formats import ModelFormats
from server.generation.parsing.choose import REASONING_TAGS, TOOL_FORMATS
from server.generation.planning.output_constraints import ConstraintRules, OutputConstraints
from server.generation.planning.plan import OutputOptions
from server.generation.request import Conversation, GenerationRequest
from server.generation.tools import Tool, ToolUse
from server.text.tokenizer import Tokenizer
from tests.server.parsing.harness import Message, parse
from tests.server.tiny_model import END, byte_level_tokenizer

TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
BLANKS = ["", "\n", "\n\n", " ", "\n \n\t\r\n", " " * 16]
ANSWER = '{"c": 1}'
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
FUNCTION = Tool("f", None, {"type": "object", "properties": {}, "additionalProperties": False})


KINDS = pytest.mark.parametrize("kind", ["special", "added", "spelled"])
"""Tags are special tokens, or tokens that are not, as Qwen's, or no tokens at all."""


@cache
def tokenizers(kind: str) -> tuple[Tokenizer, LLTokenizer]:
    """Two views of one."""
    model = byte_level_tokenizer()
    if kind != "spelled":
        model.add_tokens([AddedToken(tag, special=kind == "special", normalized=False) for tag in TAGS])
    return Tokenizer(model, {}, None), LLTokenizer(model.to_str(), eos_token=[END])


def form_of(tokenizer: Tokenizer, prompt: str, tools: ToolUse | None = None) -> OutputConstraints:
    constraint = JsonObject() if tools is None else None
    request = GenerationRequest(model="m", prompts=(Conversation(messages=()),), constraint=constraint, tools=tools)
    return ConstraintRules(tokenizer, ModelFormats("hermes", "think")).of_conversation(request, prompt, [])


def read(output: str, form: OutputConstraints, kind: str) -> Message | None:
    """The parser's result for an output; None if the grammar does not accept it."""
    tokenizer, for_grammars = tokenizers(kind)
    assert form.grammar is not None
    assert form.parser is not None
    matcher = LLMatcher(for_grammars, form.grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.encode(output, add_special_tokens=False)
    if matcher.try_consume_tokens(tokens) < len(tokens) or not matcher.is_accepting():
        return None
    pieces = [form.parser.controls.get(token) or tokenizer.token_text(token) for token in tokens]
    tools = TOOL_FORMATS[form.parser.tool_format] if form.parser.tool_format else None
    return parse(pieces, tools, REASONING_TAGS["think"], form.parser.expected, form.parser.controls.values())


@KINDS
@pytest.mark.parametrize("prompt", ["", "<think>\n"], ids=["model", "prompt"])
@pytest.mark.parametrize("mode", ["form", "required", "auto"])
def test_whitespace_around_the_reasoning_belongs_to_neither(mode: str, prompt: str, kind: str):
    tools = None if mode == "form" else ToolUse((FUNCTION,), mode)
    form = form_of(tokenizers(kind)[0], prompt, tools)
    for before in BLANKS if not prompt else [""]:
        for after in BLANKS:
            begin = "" if prompt else f"{before}<think>\n"
            answer = ANSWER if mode == "form" else CALL
            message = read(f"{begin}Is it?{after}</think>{after}{answer}", form, kind)
            assert message is not None, (before, after)
            assert message.reasoning == "Is it?"
            if mode == "form":
                assert json.loads(message.content) == {"c": 1}
                assert message.content == ANSWER
            else:
                assert [call.name for call in message.calls] == ["f"]
                assert message.content == ""


@KINDS
def test_whitespace_goes_on_for_no_longer_than_models_write_it(kind: str):
    form = form_of(tokenizers(kind)[0], "<think>\n")
    assert read(f"x</think>{' ' * 17}{ANSWER}", form, kind) is None
    assert read(f"x</think>{ANSWER}\n", form, kind) is None
    unthinking = form_of(tokenizers(kind)[0], "")
    assert read(f"\n{ANSWER}", unthinking, kind) is None


@pytest.mark.parametrize(("kind", "end"), [("added", b"\xff</think>"), ("spelled", b"</think>")])
def test_a_bound_on_the_reasoning_knows_how_its_tags_are_written(kind: str, end: bytes):
    request = GenerationRequest(model="m", prompts=(Conversation(messages=()),), thinking_budget=3)
    rules = ConstraintRules(tokenizers(kind)[0], ModelFormats("hermes", "think"))
    found = rules.of_conversation(request, "<think>\n", []).thinking
    assert found == Thinking(3, end.replace(b"/", b""), end, is_begun=True)


@pytest.mark.parametrize("are_special", [True, False])
def test_control_tokens_are_those_that_no_grammar_s_text_is_spelled_with(are_special: bool):
    model = byte_level_tokenizer()
    texts = ["</think>", "<｜tool▁calls▁begin｜>", "[THINK]", "a word", "<b", "c>", "<|d|>"]
    model.add_tokens([AddedToken(text, special=are_special, normalized=False) for text in texts])
    for_grammars = LLTokenizer(model.to_str(), eos_token=[END])
    special = {token for token in range(256, model.get_vocab_size()) if for_grammars.is_special_token(token)}
    assert Tokenizer(model, {}, None).control_ids == special


def test_a_tag_may_begin_with_a_control_token():
    """As Gemma's: the rest of it is text."""
    model = byte_level_tokenizer()
    model.add_special_tokens(["<|channel>", "<channel|>"])
    tokenizer = Tokenizer(model, {}, None)
    formats = ModelFormats("gemma4", "gemma4")
    parser = formats.parser_config(tokenizer, "", None, is_constrained=False, has_constraint=False)
    assert parser is not None
    tokens = tokenizer.encode("<|channel>thought\nhm<channel|>Red.", add_special_tokens=False)
    parts = ChoiceParts(tokenizer, (), OutputOptions(eos_token_ids=(END,)), parser)
    told = parts.push(RequestOutput("r", 0, tuple(tokens), finish_reason=FinishReason.LENGTH))
    assert [delta.text for delta in told if isinstance(delta, ReasoningDelta)] == ["hm"]
    assert [delta.text for delta in told if isinstance(delta, TextDelta)] == ["Red."]
