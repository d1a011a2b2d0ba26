"""Tools: request fields, prompts and constraints, and how calls are returned."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from openai.types import chat as chat_types

from server.api.chat.answer import ChatCompletion, ChatCompletionChunk
from tests.server.constraints.matching import accepts
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import (
    CHAT,
    chat,
    client_of,
    events_of,
    joined,
    refused,
    requested,
    says,
    without_ids,
)
from tests.server.tiny_model import TEMPLATE, byte_level_tokenizer, write_folder

WITH_TOOLS = "{% if tools %}<|start|>tools\n{{ tools | tojson }}<|end|>\n{% endif %}" + TEMPLATE
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str, parameters: Any = CITY, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


WEATHER, TIME = tool("weather", description="Looks out of the window."), tool("time")
SHELL = {"type": "custom", "custom": {"name": "shell", "description": "Runs a line."}}
BOTH = [WEATHER, TIME]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def written(name: str, **arguments: Any) -> str:
    """A call as Hermes models write it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'


def call_of(name: str, **arguments: Any) -> dict[str, Any]:
    """The same in an answer."""
    text = json.dumps(arguments, ensure_ascii=False)
    return {"id": None, "type": "function", "function": {"name": name, "arguments": text}}


ROME, OSLO = written("weather", city="Rome"), written("time", city="Øslo")


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine.roomy(8192)


@pytest.fixture
async def knowing(make_app, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a model whose template supports tools."""
    app = make_app(write_folder(tmp_path / "tiny", template=WITH_TOOLS))
    await app.state.services.models.default.fingerprint.wait_known()
    async with client_of(app) as client:
        yield client


def asking(**fields: Any) -> dict[str, Any]:
    return chat(**{"tools": BOTH, "max_tokens": 400, **fields})


async def answered(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """The first choice of a whole answer; streamed, it is the same."""
    response = await client.post(CHAT, json=asking(**fields))
    assert response.status_code == 200, response.text
    streamed = await client.post(CHAT, json=asking(**fields, stream=True))
    whole = response.json()["choices"]
    for ours, theirs in zip(joined(events_of(streamed.text)), whole, strict=True):
        assert without_ids(ours["message"]) == without_ids(theirs["message"])
        assert ours["finish_reason"] == theirs["finish_reason"]
    return whole[0]


def prompt_of(engine: FakeEngine) -> str:
    return byte_level_tokenizer().decode(engine.requests[-1].prompt, skip_special_tokens=False)


def grammar_of(engine: FakeEngine) -> str:
    grammar = engine.requests[-1].sampling.grammar
    assert grammar is not None
    return grammar


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_step", [1, 2, 7, 500])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (ROME, None, [call_of("weather", city="Rome")]),
        (f"{ROME}\n{OSLO}", None, [call_of("weather", city="Rome"), call_of("time", city="Øslo")]),
        (f"Let me look.\n{OSLO}", "Let me look.", [call_of("time", city="Øslo")]),
        (written("other", x=1), written("other", x=1), []),
        ("It <tool is> 5 o'clock.", "It <tool is> 5 o'clock.", []),
        ("", "", []),
    ],
)
async def test_whole_and_streamed_answers(
    client: httpx.AsyncClient, engine: FakeEngine, per_step: int, text: str, content: str | None, calls: list[Any]
):
    engine.script, engine.tokens_per_step = says(text), per_step
    choice = await answered(client)
    message = choice["message"]
    assert message["content"] == content
    assert message["refusal"] is None
    assert without_ids(message).get("tool_calls", []) == calls
    assert ("tool_calls" in message) == bool(calls)
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    assert choice["stop_reason"] is None


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (f"I look. {ROME}{OSLO}", {"logprobs": True, "n": 2}),
        (written("shell", input="ls"), {"tools": [SHELL]}),
        (ROME, {"tools": None, "functions": [WEATHER["function"]]}),
    ],
)
async def test_answers_are_of_the_official_types_and_of_ours(
    client: httpx.AsyncClient, engine: FakeEngine, text: str, fields: dict[str, Any]
):
    engine.script = says(text)
    body = (await client.post(CHAT, json=asking(**fields))).json()
    chat_types.ChatCompletion.model_validate_json(json.dumps(body), strict=True)
    msgspec.convert(body, ChatCompletion)
    for chunk in events_of((await client.post(CHAT, json=asking(stream=True, **fields))).text):
        msgspec.convert(chunk, ChatCompletionChunk)
        if SHELL not in (fields.get("tools") or ()):  # the official type of chunks knows no custom tools
            chat_types.ChatCompletionChunk.model_validate_json(json.dumps(chunk), strict=True)


async def test_ids_are_unlike_each_other(client: httpx.AsyncClient, engine: FakeEngine):
    engine.script = says(f"{ROME}\n{OSLO}")
    answers = [(await answered(client))["message"]["tool_calls"] for _ in range(3)]
    ids = [call["id"] for calls in answers for call in calls]
    assert len(set(ids)) == 6
    assert all(len(id_) == 9 and id_.isalnum() for id_ in ids), "or Mistral's template refuses them"


async def test_arguments_stream_as_they_are_written(client: httpx.AsyncClient, engine: FakeEngine):
    """And the first chunk of a call has its id, its name and no arguments."""
    engine.script = says(written("weather", city="Llanfairpwll"))
    chunks = events_of((await client.post(CHAT, json=asking(stream=True))).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    first, *others = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert first == {
        "index": 0, "id": first["id"], "type": "function", "function": {"name": "weather", "arguments": ""},
    }  # fmt: skip
    assert len(others) > 10
    assert chunks[-1]["choices"][0]["delta"] == {}


async def test_an_answer_that_was_cut_off(client: httpx.AsyncClient, engine: FakeEngine):
    engine.script = says(ROME)
    choice = await answered(client, max_tokens=len(ROME) - 20)
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert json.dumps({"city": "Rome"}).startswith(call["function"]["arguments"])


async def test_a_call_and_the_beginning_of_another(client: httpx.AsyncClient, engine: FakeEngine):
    engine.script = says(f"{ROME}\n{OSLO}")
    choice = await answered(client, max_tokens=len(ROME) + 5)
    assert choice["finish_reason"] == "length"
    assert without_ids(choice["message"])["tool_calls"] == [call_of("weather", city="Rome")]


async def test_several_choices(client: httpx.AsyncClient, engine: FakeEngine):
    engine.script = says("Hello", ROME, f"{ROME}\n{OSLO}")
    await answered(client, n=3)
    choices = (await client.post(CHAT, json=asking(n=3))).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "tool_calls", "tool_calls"]
    assert [len(choice["message"].get("tool_calls", [])) for choice in choices] == [0, 1, 2]


async def test_stop_strings_cut_text_and_no_calls(client: httpx.AsyncClient, engine: FakeEngine):
    engine.script = says(f"I look. {ROME}")
    choice = await answered(client, stop="Rome")
    assert choice["finish_reason"] == "tool_calls"
    choice = await answered(client, stop="look")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "look")
    assert choice["message"]["content"] == "I "
    assert "tool_calls" not in choice["message"]


async def test_a_stop_token_of_the_request(client: httpx.AsyncClient, engine: FakeEngine):
    engine.script = says(ROME + "!")
    choice = await answered(client, stop_token_ids=[ord("!")])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", ord("!"))


async def test_every_token_is_told_once_beside_calls(client: httpx.AsyncClient, engine: FakeEngine):
    engine.script = says(f"I look. {ROME}\n{OSLO}")
    asked = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    choice = await answered(client, **asked)
    generated = engine.script(engine.requests[-1], 0)
    assert choice["token_ids"] == generated
    assert [entry["bytes"] for entry in choice["logprobs"]["content"][:-1]] == [[token] for token in generated[:-1]]
    chunks = events_of((await client.post(CHAT, json=asking(stream=True, **asked))).text)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [token for choice in choices for token in choice.get("token_ids", [])] == generated
    assert sum(len(choice["logprobs"]["content"]) for choice in choices if choice["logprobs"]) == len(generated)


async def test_custom_tools_are_called_with_text(client: httpx.AsyncClient, engine: FakeEngine):
    engine.script = says(written("shell", input='echo "é"') + ROME)
    choice = await answered(client, tools=[SHELL, WEATHER])
    custom, function = choice["message"]["tool_calls"]
    assert custom == {"id": custom["id"], "type": "custom", "custom": {"name": "shell", "input": 'echo "é"'}}
    assert function["type"] == "function"


async def test_a_custom_tool_takes_whatever_a_model_gives_it(client: httpx.AsyncClient, engine: FakeEngine):
    """Also a number that is too long for Python."""
    engine.script = says(f'<tool_call>\n{{"name": "shell", "arguments": {{"n": {"9" * 4500}}}}}\n</tool_call>')
    (call,) = (await answered(client, tools=[SHELL], max_tokens=6000))["message"]["tool_calls"]
    assert call["custom"]["input"] == f'{{"n": {"9" * 4500}}}'


async def test_functions_are_answered_by_a_function_call(client: httpx.AsyncClient, engine: FakeEngine):
    engine.script = says(ROME)
    functions = [one["function"] for one in BOTH]
    choice = await answered(client, tools=None, functions=functions)
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["content"] is None
    assert not accepts(grammar_of(engine), f"{ROME}\n{OSLO}"), "there is one call at most"
    choice = await answered(client, tools=None, functions=functions, function_call={"name": "weather"})
    assert choice["finish_reason"] == "function_call"
    assert accepts(grammar_of(engine), ROME)
    assert not accepts(grammar_of(engine), OSLO)
    await requested(client, engine, CHAT, asking(tools=None, functions=functions, function_call="none"))
    assert engine.requests[-1].sampling.grammar is None


# -- prompts and constraints -------------------------------------------------------------------------------------------

TEXT, BOTH_CALLS, WRONG = "Hello.", f"{ROME}\n{OSLO}", written("weather", city=5)


@pytest.mark.parametrize(
    ("fields", "accepted", "rejected"),
    [
        ({}, [TEXT, ROME, BOTH_CALLS, f"Well.{ROME}"], [WRONG, written("other")]),
        ({"tool_choice": "auto"}, [TEXT, ROME, BOTH_CALLS], [WRONG]),
        ({"tool_choice": "required"}, [ROME, OSLO, BOTH_CALLS], [TEXT, "", f"Well.{ROME}", WRONG]),
        ({"tool_choice": named("time")}, [OSLO], [TEXT, ROME, f"{OSLO}\n{OSLO}"]),
        ({"parallel_tool_calls": False}, [TEXT, ROME], [BOTH_CALLS]),
        ({"parallel_tool_calls": False, "tool_choice": "required"}, [ROME, OSLO], [TEXT, BOTH_CALLS]),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("time")]}}},
         [TEXT, OSLO, f"{OSLO}\n{OSLO}"], [ROME]),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named("time")]}}},
         [OSLO], [TEXT, ROME]),
        ({"tools": [SHELL], "tool_choice": {"type": "custom", "custom": {"name": "shell"}}},
         [written("shell", input="ls")], [TEXT, written("shell", line="ls")]),
        ({"response_format": {"type": "json_object"}}, ['{"a": 1}', ROME], [TEXT]),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}},
         ['{"city": "Bonn"}', BOTH_CALLS], ["{}", TEXT, WRONG]),
        ({"tools": [tool("f", {"type": "object", "properties": {}})]}, [TEXT, written("f")], []),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, [TEXT, written("f")], []),
    ],
)  # fmt: skip
async def test_what_the_answer_is_held_to(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], accepted: list[str], rejected: list[str]
):
    await requested(client, engine, CHAT, asking(**fields))
    grammar = grammar_of(engine)
    assert [text for text in accepted if not accepts(grammar, text)] == []
    assert [text for text in rejected if accepts(grammar, text)] == []


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": []}, {"tools": None}])
async def test_nothing_to_call(
    client: httpx.AsyncClient, knowing: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any]
):
    """Then the model hears of no tools that it cannot call, and what looks like a call is text."""
    for one in (client, knowing):
        engine.script = says(ROME)
        choice = await answered(one, **fields)
        assert (choice["message"]["content"], choice["finish_reason"]) == (ROME, "stop")
        assert engine.requests[-1].sampling.grammar is None
        shown = one is knowing and "tool_choice" in fields
        assert ("weather" in prompt_of(engine)) == shown
        if shown:
            await answered(one, **fields, exclude_tools_when_tool_choice_none=True)
        assert prompt_of(engine) == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"


async def test_a_template_that_knows_tools_is_given_them(knowing: httpx.AsyncClient, engine: FakeEngine):
    await requested(knowing, engine, CHAT, asking(tool_choice=named("time")))
    head, _, rest = prompt_of(engine).removeprefix("<|start|>tools\n").partition("<|end|>\n")
    assert json.loads(head) == [
        {"type": "function", "function": {"name": "weather", "description": "Looks out of the window.",
                                          "parameters": CITY}},
        {"type": "function", "function": {"name": "time", "parameters": CITY}},
    ]  # fmt: skip
    assert rest == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"


async def test_a_template_that_knows_none_gets_a_system_message(client: httpx.AsyncClient, engine: FakeEngine):
    await requested(client, engine, CHAT, asking())
    system, _, rest = prompt_of(engine).removeprefix("<|start|>system\n").partition("<|end|>\n")
    for one in BOTH:
        assert json.dumps(one["function"]) in system or one["function"]["name"] in system
    assert "<tool_call>" in system
    assert rest == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    await requested(client, engine, CHAT, asking(messages=messages))
    assert prompt_of(engine).replace("Be brief.\n\n", "") == f"<|start|>system\n{system}<|end|>\n{rest}"


async def test_a_schema_that_cannot_be_enforced(
    client: httpx.AsyncClient, strict_client: httpx.AsyncClient, engine: FakeEngine
):
    """In a strict tool it is refused by its path; otherwise it is reported, and the rest is enforced."""
    schema = {**CITY, "properties": {"city": {"type": "string", "format": "uri"}, "n": {"not": {"type": "string"}}}}
    strict = asking(tools=[TIME, tool("f", schema, strict=True)])
    message = await refused(client, CHAT, strict, "tools[1].function.parameters.properties.n.not", "invalid_value")
    assert "'not' is not supported" in message
    loose = asking(tools=[TIME, tool("f", schema)])
    body = (await client.post(CHAT, json=loose)).json()
    assert [warning["path"].partition(".properties")[0] for warning in body["warnings"]][:1] == [
        "tools[1].function.parameters"
    ]
    assert not accepts(grammar_of(engine), written("f", city=1, n=1))
    assert (await strict_client.post(CHAT, json=loose)).status_code == 400


def shell(syntax: str, definition: str) -> dict[str, Any]:
    grammar = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {**SHELL["custom"], "format": grammar}}


@pytest.mark.parametrize(("syntax", "definition"), [("regex", "ls( -l)?"), ("lark", 'start: "ls" [" -l"]')])
async def test_the_text_of_a_custom_tool_is_held_to_its_grammar(
    client: httpx.AsyncClient, engine: FakeEngine, syntax: str, definition: str
):
    await requested(client, engine, CHAT, asking(tools=[shell(syntax, definition)]))
    assert definition in prompt_of(engine).replace('\\"', '"')
    assert accepts(grammar_of(engine), written("shell", input="ls -l"))
    assert not accepts(grammar_of(engine), written("shell", input="rm -r"))


@pytest.mark.parametrize(
    ("syntax", "definition"),
    [
        ("regex", "(?=l)ls"),
        ("regex", "("),
        ("lark", 'start: "ls" start?'),
        ("lark", "no grammar"),
        ("regex", r"a\x01b"),
    ],
)
async def test_a_grammar_of_a_custom_tool_that_cannot_be_enforced_is_reported(
    client: httpx.AsyncClient, engine: FakeEngine, syntax: str, definition: str
):
    body = (await client.post(CHAT, json=asking(tools=[TIME, shell(syntax, definition)]))).json()
    assert [warning["path"] for warning in body["warnings"]] == ["tools[1].custom.format.grammar.definition"]
    assert accepts(grammar_of(engine), written("shell", input="rm -r"))


async def test_what_is_too_much_for_all_tools_together(client: httpx.AsyncClient, engine: FakeEngine):
    """Each alone could be enforced; together, `auto` reports that the model is free, and others are refused."""
    schemas = [{**CITY, "properties": {"city": {"type": "integer", "multipleOf": 5_001 + one}}} for one in range(2)]
    tools = [tool(f"f{one}", schema) for one, schema in enumerate(schemas)]
    for one in tools:
        assert "warnings" not in (await client.post(CHAT, json=asking(tools=[one]))).json()
    body = (await client.post(CHAT, json=asking(tools=tools))).json()
    (warning,) = body["warnings"]
    assert warning["path"] == "tools"
    assert "multipleOf" in warning["reason"]
    assert engine.requests[-1].sampling.grammar is None
    message = await refused(client, CHAT, asking(tools=tools, tool_choice="required"), "tools", "invalid_value")
    assert "multipleOf" in message


async def test_keywords_of_schemas_that_clients_send(client: httpx.AsyncClient):
    """Nothing in loose schemas is refused."""
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Everything",
        "type": "object",
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
        "properties": {
            "int": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
            "above": {"type": "number", "exclusiveMinimum": 0, "default": 1},
            "short": {"type": ["string", "null"], "minLength": 1, "maxLength": 9, "pattern": "^[a-z]+$"},
            "uri": {"type": "string", "format": "uri", "encrypted": True},
            "list": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
            "any": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/node"}]},
            "one": {"oneOf": [{"const": 1}, {"enum": ["a", None]}]},
            "all": {"allOf": [{"type": "object"}, {"description": "x"}]},
            "free": {},
        },
    }
    response = await client.post(CHAT, json=asking(tools=[tool("f", schema, strict=False, description=None)]))
    assert response.status_code == 200, response.text


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tool_choice": named("other")}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "other"}}}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("other")]}}},
         "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
         "tool_choice.allowed_tools.tools", "empty_array"),
        ({"tool_choice": "any"}, "tool_choice", "invalid_value"),
        ({"tool_choice": 5}, "tool_choice", "invalid_type"),
        ({"tool_choice": {}}, "tool_choice.type", "missing_required_parameter"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.type", "invalid_value"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function", "missing_required_parameter"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": None, "tool_choice": named("weather")}, "tool_choice", "invalid_value"),
        ({"tools": None, "function_call": {"name": "f"}}, "function_call", "invalid_value"),
        ({"tools": None, "functions": [{"name": "f"}], "function_call": {"name": "g"}},
         "function_call", "invalid_value"),
        ({"tools": [WEATHER, TIME, WEATHER]}, "tools[2]", "invalid_value"),
        ({"tools": [WEATHER], "functions": [{"name": "f"}]}, "tools", "invalid_parameter_combination"),
        ({"tools": [tool(f"f{index}") for index in range(513)]}, "tools", "array_above_max_length"),
        ({"tools": "weather"}, "tools", "invalid_type"),
        ({"tools": [1]}, "tools[0]", "invalid_type"),
        ({"tools": [{}]}, "tools[0].type", "missing_required_parameter"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_value"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "missing_required_parameter"),
        ({"tools": [WEATHER, tool("a b")]}, "tools[1].function.name", "invalid_value"),
        ({"tools": [tool("")]}, "tools[0].function.name", "string_below_min_length"),
        ({"tools": [tool("f", "{}")]}, "tools[0].function.parameters", "invalid_type"),
        ({"tools": [tool("f", strict="yes")]}, "tools[0].function.strict", "invalid_type"),
        ({"tools": [tool("f", paramters={})]}, "tools[0].function.paramters", "unknown_parameter"),
        ({"tools": [shell("gbnf", "x")]}, "tools[0].custom.format.grammar.syntax", "invalid_value"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "invalid_type"),
        ({"use_beam_search": True, "n": 2}, "tools", "invalid_parameter_combination"),
        ({"ignore_eos": True}, "tools", "invalid_parameter_combination"),
    ],
)  # fmt: skip
async def test_errors_name_the_field(client: httpx.AsyncClient, fields: dict[str, Any], param: str, code: str):
    await refused(client, CHAT, asking(**fields), param, code)


async def test_formats_that_cannot_be_held_say_so(make_app, tmp_path: Path):
    """Features that rely on a grammar are refused if the model's format has none."""
    async with client_of(make_app(write_folder(tmp_path / "tiny", template=WITH_TOOLS), tool_parser="harmony")) as one:
        for fields in ({"tool_choice": "required"}, {"tool_choice": named("time")}):
            await refused(one, CHAT, asking(**fields), "tool_choice", "unsupported_parameter")
        strict = asking(tools=[tool("f", strict=True)])
        await refused(one, CHAT, strict, "tools[0].function.strict", "unsupported_parameter")
        body = (await one.post(CHAT, json=asking(parallel_tool_calls=False))).json()
        assert [warning["path"] for warning in body["warnings"]] == ["parallel_tool_calls"]


async def test_a_grammar_that_is_too_large_is_left_out_and_reported(client: httpx.AsyncClient, engine: FakeEngine):
    """The grammar is dropped with everything that depends on it, except the tools' names, which need none.

    Each tool's schema is small enough, but both together are not.
    """
    half = {**CITY, "properties": {**CITY["properties"], "share": {"type": "integer", "multipleOf": 9_000}}}
    large = [tool("time", half), tool("half", half)]
    two = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("time"), named("half")]}}
    asked = asking(tools=[*large, WEATHER, SHELL], parallel_tool_calls=False, tool_choice=two)
    engine.script = says(f"{OSLO}\n{ROME}")
    body = (await client.post(CHAT, json=asked)).json()
    assert [warning["path"] for warning in body["warnings"]] == ["tools", "parallel_tool_calls"]
    assert engine.requests[-1].sampling.grammar is None
    message = without_ids(body["choices"][0]["message"])
    assert (message["tool_calls"], message["content"]) == ([call_of("time", city="Øslo")], f"\n{ROME}")
    for fields in (
        {"tools": large, "tool_choice": "required"},
        {"tools": [*large, tool("f", strict=True)]},
    ):
        await refused(client, CHAT, asking(**fields), "tools", "invalid_value")
