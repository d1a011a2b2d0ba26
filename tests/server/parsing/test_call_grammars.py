"""Answers that a grammar holds: whatever a model makes of them, its calls are whole and fit their schemas."""

import json
import re
from collections.abc import Sequence
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from server.generation.constraints.fragment import ConstraintError, Fragment, text, whole
from server.generation.constraints.lark import Lark
from server.generation.parsing.call_grammar import MAX_REQUIRED_CALLS, GrammarBuilder, OfferedTool
from server.generation.parsing.choose import TOOL_FORMATS
from server.generation.parsing.output_parser import Expected
from server.generation.tools import TextFormat, Tool
from tests.server.constraints.test_grammars import APPLY_PATCH, PATCH
from tests.server.parsing.harness import Message, parse
from tests.server.parsing.writers import WRITERS

# -- a tokenizer of bytes, and all markers -----------------------------------------------------------------------------

MARKERS = sorted({marker for tools in TOOL_FORMATS.values() for marker in tools.markers})
IDS = {marker: 256 + index for index, marker in enumerate(MARKERS)}
END = 256 + len(MARKERS)
VOCABULARY = END + 1
ENDINGS = ["\n</parameter>\n", "</arg_value>", "</｜DSML｜parameter>\n", "</function>\n</tool_call>", "</tool_call>"]
OWN_ENDINGS = {"gemma4": ['<|"|>', "}"], "pythonic": ["'", ")"]}
CLOSING = [*b'"]}<\n/']
MOST = 3000


class Bytes:
    """The methods of a tokenizer that llguidance needs."""

    eos_token_id = END
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), *(b"\xff" + m.encode() for m in MARKERS), b"\xff<|end|>")
    special_token_ids = (*IDS.values(), END)

    def __call__(self, data: str | bytes) -> list[int]:
        return list(data.encode() if isinstance(data, str) else data)


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()))


def matcher(grammar: Fragment) -> LLMatcher:
    made = LLMatcher(TOKENIZER, whole(grammar), log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def allowed_tokens(state: LLMatcher) -> list[int]:
    mask = allocate_token_bitmask(1, VOCABULARY)
    fill_next_token_bitmask(state, mask, 0)
    assert not state.is_error(), state.get_error()
    return np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little")[:VOCABULARY]).tolist()


def pieces(tokens: list[int]) -> list[str]:
    """Their text, with control tokens as pieces of their own."""
    found = [b""]
    for token in tokens:
        if token < 256:
            found[-1] += bytes([token])
        else:
            found += [MARKERS[token - 256].encode(), b""]
    return [piece.decode() for piece in found]


def walk(name: str, grammar: Fragment, seed: int) -> list[str] | None:
    """A random output; None if it found no end."""
    random = Random(seed)
    state, tokens = matcher(grammar), list[int]()
    while len(tokens) < MOST:
        allowed = allowed_tokens(state)
        is_long = len(tokens) > 300
        if END in allowed and (is_long or len(allowed) == 1 or random.random() < 0.1):
            return pieces(tokens)
        if random.random() < (0.2 if is_long else 0.02):
            ending = list(random.choice(OWN_ENDINGS.get(name, ENDINGS)).encode())
            tokens += ending[: state.try_consume_tokens(ending)]
            continue
        choices = [token for token in allowed if token != END]
        markers = [token for token in choices if token > 255]
        closing = [token for token in choices if token in CLOSING]
        if markers and (is_long or random.random() < 0.2):
            choices = markers
        elif closing and random.random() < (0.9 if is_long else 0.3):
            choices = closing
        elif printable := [token for token in choices if 32 <= token < 127]:
            choices = printable
        tokens.append(random.choice(choices))
        assert state.try_consume_tokens(tokens[-1:]) == 1
    return None


def tokens_of(output: str, controls: dict[str, int]) -> list[int]:
    cut = re.split(f"({'|'.join(map(re.escape, controls)) or '(?!)'})", output)
    return [token for part in cut for token in ([controls[part]] if part in controls else part.encode())]


def accepts(grammar: Fragment, output: str, controls: dict[str, int]) -> bool:
    state, tokens = matcher(grammar), tokens_of(output, controls)
    return state.try_consume_tokens(tokens) == len(tokens) and state.is_accepting()


# -- what is offered ---------------------------------------------------------------------------------------------------

SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "unit": {"enum": ["celsius", "fahrenheit"]},
            "place": {"$ref": "#/$defs/place"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
        "$defs": {"place": {"type": "array", "items": {"type": "number"}, "maxItems": 2}},
    },
    "get": {"type": "object", "properties": {}, "additionalProperties": False},
    "any_thing": {"type": "object", "additionalProperties": True},
}
TOOLS = [OfferedTool(name, schema, "tools", is_strict=True) for name, schema in SCHEMAS.items()]
KNOWN = TOOLS[:2]
"""Tools with named arguments; with arbitrary ones, a random model repeats some."""
CALLS = [
    [("get_weather", {"city": "Zurich", "unit": "celsius"})],
    [("get_weather", {"city": "a\nb", "days": 3, "unit": "fahrenheit", "place": [1.5, -2], "note": ""})],
    [("get", {})],
    [("any_thing", {"x": "1"})],
    [("get", {}), ("get_weather", {"city": "<a>", "unit": "celsius", "note": "[1]"}), ("get", {})],
]
HELD = sorted(TOOL_FORMATS)
TOKENS_ONLY = ("harmony", "kimi_k3")
"""Formats whose markers are special tokens in any case."""
WITH_TOKENS: dict[str, Sequence[bool]] = {
    "qwen3_xml": [False],
    "seed": [True],
    "mistral v3": [False],
    "mistral v11": [True],
    "mistral with id": [True],
    "kimi_k3": [True],
    "harmony": [],
    "harmony, to after the channel": [],
    "harmony, begun by the prompt": [True],
}
"""Ways of writing that are allowed only if markers are special tokens, or only if they are not."""
ANSWER = text('{"final": 1}')


def controls_of(name: str, *, are_special: bool) -> dict[str, int]:
    return {marker: IDS[marker] for marker in TOOL_FORMATS[name].markers} if are_special else {}


def grammar(name: str, controls: dict[str, int], tools: Sequence[OfferedTool] = KNOWN, **how: Any) -> Fragment:
    found = TOOL_FORMATS[name].grammar(GrammarBuilder(tools, "calls", controls, **how))
    assert found is not None
    return found


def cases(names: list[str]) -> list[Any]:
    """Formats with markers as special tokens and as text, where both may be."""
    return [
        pytest.param(
            name, controls_of(name, are_special=are_special), id=f"{name} {'tokens' if are_special else 'text'}"
        )
        for name in names
        for are_special in (True, False)
        if are_special or name not in TOKENS_ONLY
    ]


def read(name: str, output: list[str], controls: dict[str, int]) -> Message:
    """The parser's result, which must not depend on the promise that calls are complete."""
    messages = [
        parse(output, TOOL_FORMATS[name], None, Expected(SCHEMAS, calls_are_whole=are_whole), controls)
        for are_whole in (True, False)
    ]
    assert messages[0] == messages[1], output
    for call in messages[0].calls:
        assert call.is_whole, output
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    return messages[0]


# -- tests -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "controls"), cases(HELD))
@pytest.mark.parametrize("is_parallel", [False, True], ids=["one", "several"])
def test_an_answer_that_needs_a_call_is_calls_and_nothing_else(name: str, controls: dict[str, int], is_parallel: bool):
    held = grammar(name, controls, needs_call=True, is_parallel=is_parallel)
    for seed in range(8):
        output = walk(name, held, seed)
        assert output is not None
        message = read(name, output, controls)
        assert message.calls, output
        assert is_parallel or len(message.calls) == 1
        assert name == "harmony" or not message.content.strip()
    assert not accepts(held, "Well.", controls)
    assert not accepts(held, "", controls)


@pytest.mark.parametrize(("name", "controls"), cases(HELD))
def test_any_answer_is_text_and_whole_calls(name: str, controls: dict[str, int]):
    held = grammar(name, controls)
    for seed in range(8):
        output = walk(name, held, seed)
        if output is not None:
            read(name, output, controls)
    final = "<|channel|>final<|message|>" if name == "harmony" else ""
    assert accepts(held, f"{final}Well, <b>not</b> now.\n[1] <", controls)


@pytest.mark.parametrize(("name", "controls"), cases(HELD))
def test_a_final_answer_of_a_form_or_calls(name: str, controls: dict[str, int]):
    held = grammar(name, controls, answer=ANSWER)
    final = "<|channel|>final<|message|>" if name == "harmony" else ""
    assert accepts(held, final + '{"final": 1}', controls)
    assert not accepts(held, final + "Well.", controls)
    for seed in range(6):
        output = walk(name, held, seed)
        assert output is not None
        message = read(name, output, controls)
        assert message.calls or message.content == '{"final": 1}'


@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
def test_a_grammar_of_the_client_keeps_lines_that_repeat(name: str):
    final = Lark('start: a b\na: "x"\n | "z"\nb: "y"\n | "z"', "grammar").fragment("answer")
    assert accepts(grammar(name, {}, answer=final), "xz", {})


@pytest.mark.parametrize(
    ("output", "is_call"),
    [
        ('{"name": "get", "parameters": {}}', True),
        ('\n{"type": "function",\n"name":"get", "arguments" : {}\n}; {"name": "get", "parameters": {}}', True),
        ('{"name": "get", "parameters": {"x": 1}}', None),
        ('{"name": "get_weather", "parameters": {', None),
        ('{"name": "get", "parameters": 5}', False),
        ('{"name": "Ann", "parameters": {"age": 5}}', False),
        ('{"name": "get", "age": 5}', False),
        ('{"answer": {"name": "get", "parameters": {"x": 1}}}', False),
    ],
)
def test_an_answer_in_json_is_no_call_of_llama(output: str, is_call: bool | None):
    """None: it is neither, and cannot be written."""
    held = grammar("llama3_json", {})
    assert accepts(held, output, {}) == (is_call is not None)
    if is_call is not None:
        expected = Expected({tool.name: tool.schema for tool in KNOWN}, only_offered=True, calls_are_whole=True)
        message = parse(output, TOOL_FORMATS["llama3_json"], expected=expected)
        assert bool(message.calls) == is_call
        assert is_call or message.content == output


def test_what_is_held_to_a_form_is_no_call_of_llama_without_a_marker():
    expected = Expected(SCHEMAS, has_constraint=True, only_offered=True, calls_are_whole=True)
    output = '{"name": "get", "parameters": {}}'
    assert parse(output, TOOL_FORMATS["llama3_json"], expected=expected).content == output
    assert parse(f"<|python_tag|>{output}", TOOL_FORMATS["llama3_json"], expected=expected).calls


@pytest.mark.parametrize("way", list(WRITERS))
def test_what_models_write_is_allowed(way: str):
    writer = WRITERS[way]
    for are_special in WITH_TOKENS.get(way, (True, False)):
        controls = controls_of(writer.format, are_special=are_special)
        held = grammar(writer.format, controls, TOOLS)
        for calls in CALLS:
            output = writer.write(calls[:1] if writer.format == "harmony" else calls).removesuffix("<|call|>")
            assert accepts(held, output, controls), output


DEEP: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tree": {"$ref": "#/$defs/tree"},
        "pick": {"enum": ["it's", 'a "b"', "c\\", "", 1, 10, None, True]},
        "open": {"type": "object", "properties": {"n": {"type": "integer"}}},
        "counts": {"type": "object", "additionalProperties": {"type": "integer", "maximum": 9}},
        "either": {"anyOf": [{"type": "array", "items": {"type": "string"}, "minItems": 2}, {"type": "boolean"}]},
        "closed": {
            "type": "object",
            "properties": {"a": {"type": ["number", "null"]}, "b": {"const": "x"}, "c": {}},
            "required": ["b"],
            "additionalProperties": False,
        },
    },
    "required": ["tree", "pick", "closed"],
    "additionalProperties": False,
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "label": {"type": "string"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
            },
            "required": ["label"],
            "additionalProperties": False,
        }
    },
}


@pytest.mark.parametrize(("name", "controls"), cases(["gemma4", "pythonic"]))
def test_values_of_a_notation_of_its_own_fit_any_schema(name: str, controls: dict[str, int]):
    tool = OfferedTool("deep", DEEP, "tools", is_strict=True)
    held = grammar(name, controls, [tool], needs_call=True, is_parallel=False)
    outputs = [walk(name, held, seed) for seed in range(12)]
    found = [parse(output, TOOL_FORMATS[name], controls=controls) for output in outputs if output is not None]
    assert len(found) > 6
    for message in found:
        (call,) = message.calls
        jsonschema.validate(json.loads(call.arguments), DEEP)


@pytest.mark.parametrize("name", ["gemma4", "pythonic"])
def test_what_a_notation_cannot_hold_is_refused_or_told(name: str):
    properties = {"a": {"type": "string", "pattern": "^x"}, "b:=": {"type": "null"}}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    paths = {"tools.properties.a.pattern", "tools.properties.b:="}
    loose = OfferedTool("f", schema, "tools")
    grammar(name, {}, [loose])
    assert {notice.path for notice in loose.left_out} == paths
    with pytest.raises(ConstraintError) as refusal:
        grammar(name, {}, [OfferedTool("f", schema, "tools", is_strict=True)])
    assert refusal.value.path in paths


@pytest.mark.parametrize("way", WRITERS)
def test_an_answer_that_needs_a_call_has_so_many_calls_at_most(way: str):
    writer = WRITERS[way]
    for are_special in WITH_TOKENS.get(way, (True, False)):
        controls = controls_of(writer.format, are_special=are_special)
        held = grammar(writer.format, controls, needs_call=True)
        two, most, more = (
            accepts(held, writer.write(CALLS[0][:1] * num).lstrip(), controls)
            for num in (2, MAX_REQUIRED_CALLS, MAX_REQUIRED_CALLS + 1)
        )
        assert most == two
        assert not more


def test_kimi_closes_its_reasoning_before_it_calls():
    controls = controls_of("kimi_k3", are_special=True)
    call = WRITERS["kimi_k3"].write(CALLS[2])
    thinking = grammar("kimi_k3", controls, needs_call=True, is_thinking=True)
    thought = "Hm.<|close|>think<|sep|>"
    for output in (thought + call, f"{thought}<|open|>response<|sep|>{call}"):
        assert accepts(thinking, output, controls)
        message = parse(output, TOOL_FORMATS["kimi_k3"], expected=Expected(SCHEMAS, is_thinking=True))
        assert (message.reasoning, message.content) == ("Hm.", "")
    assert not accepts(thinking, call, controls)
    assert not accepts(grammar("kimi_k3", controls, needs_call=True), thought + call, controls)


@pytest.mark.parametrize("way", WRITERS)
def test_the_text_of_a_custom_tool_fits_its_grammar(way: str):
    custom = Tool.custom("apply_patch", None, TextFormat("lark", APPLY_PATCH, "here"))
    writer = WRITERS[way]
    patch = PATCH.replace("\r", "")
    good, bad = (writer.write([("apply_patch", {"input": text})]) for text in (patch, patch.replace("+x", "x")))
    for are_special in WITH_TOKENS.get(way, (True, False)):
        controls = controls_of(writer.format, are_special=are_special)
        tool = OfferedTool(custom.name, custom.schema, custom.path, pattern=custom.pattern)
        held = grammar(writer.format, controls, [tool])
        assert bool(tool.left_out) == (writer.format in ("gemma4", "pythonic"))
        assert accepts(held, good.removesuffix("<|call|>"), controls)
        assert accepts(held, bad.removesuffix("<|call|>"), controls) == bool(tool.left_out)
