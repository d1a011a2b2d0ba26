"""Input items of every type and form seen from clients, and errors in them."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from server.api.responses.items import seal
from tests.server.constraints.matching import accepts
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, chat, refused, says
from tests.server.responses.calling import RESPONSES, asking, both, whole
from tests.server.responses.test_answers import DEMO, SHELL, WEATHER
from tests.server.test_reasoning import ECHOING
from tests.server.test_tools import ROME, prompt_of, written

CUT = '{"city": "Ro'


def user(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def call(arguments: str = '{"city": "Rome"}', **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": arguments, **fields}


def result(output: Any = "Sunny.", **fields: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": "c1", "output": output, **fields}


async def prompt_for(client: httpx.AsyncClient, engine: FakeEngine, items: Any, **fields: Any) -> str:
    """The text that the model sees."""
    await whole(client, input=items, **fields)
    return prompt_of(engine)


async def chat_prompt(client: httpx.AsyncClient, engine: FakeEngine, messages: Any, **fields: Any) -> str:
    """The same of a chat completion."""
    answer = await client.post(CHAT, json=chat(messages=messages, **fields))
    assert answer.status_code == 200, answer.text
    return prompt_of(engine)


def called(call_id: str, arguments: str) -> dict[str, Any]:
    """A call as chat completions have it."""
    return {"id": call_id, "function": {"name": "weather", "arguments": arguments}}


SYSTEM = {"role": "system", "content": "s"}
REFUSAL = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "phase": "commentary"}
LOOK = [{"type": "output_text", "text": "Look.", "annotations": [], "logprobs": []}]
HOSTED = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
SHELL_CALL = {"type": "custom_tool_call", "call_id": "c1", "name": "shell", "input": "ls"}
SHELL_CALLED = {"id": "c1", "type": "custom", "custom": {"name": "shell", "input": "ls"}}
OUTPUT = {"role": "tool", "tool_call_id": "c1", "content": "Sunny."}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("hi", [user()]),
        ("", [user("")]),
        ([user()], [user()]),
        ([user(type="message", id="msg_1", status="completed")], [user()]),
        ([user([{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}])], [user("a\nb")]),
        ([user(), SYSTEM, user("b")], [user(), SYSTEM, user("b")]),
        (
            [user(), {"role": "assistant", "content": None, "tool_calls": []}, user()],
            [user(), {"role": "assistant", "content": ""}, user()],
        ),
        (
            [user(), {"role": "assistant", "content": [*LOOK, HOSTED]}, user()],
            [user(), {"role": "assistant", "content": "Look."}, user()],
        ),
        ([user(), REFUSAL, user()], [user(), {"role": "assistant", "content": "No."}, user()]),
        (
            [user(), call(), result(), {"role": "assistant", "content": "Sunny."}, user("b")],
            [
                user(),
                {"role": "assistant", "tool_calls": [called("c1", '{"city": "Rome"}')]},
                OUTPUT,
                {"role": "assistant", "content": "Sunny."},
                user("b"),
            ],
        ),
        (
            [
                user(),
                {"type": "message", "role": "assistant", "content": LOOK},
                call(CUT, id="fc_1", status="incomplete"),
                call("", call_id="c2"),
                result([{"type": "input_text", "text": "x"}, {"type": "input_text", "text": "y"}], id="fco_1"),
                result("z", call_id="c2"),
            ],
            [
                user(),
                {"role": "assistant", "content": "Look.", "tool_calls": [called("c1", CUT), called("c2", "")]},
                {**OUTPUT, "content": "x\ny"},
                {"role": "tool", "tool_call_id": "c2", "content": "z"},
            ],
        ),
        (
            [user(), SHELL_CALL, {"type": "custom_tool_call_output", "call_id": "c1", "output": "Sunny."}],
            [user(), {"role": "assistant", "tool_calls": [SHELL_CALLED]}, OUTPUT],
        ),
    ],
)
async def test_the_model_sees_what_it_does_in_chat_completions(
    client: httpx.AsyncClient, engine: FakeEngine, items: Any, messages: Any
) -> None:
    assert await prompt_for(client, engine, items) == await chat_prompt(client, engine, messages)


@pytest.mark.parametrize(
    "thought",
    [
        {"content": [{"type": "reasoning_text", "text": "Is it?"}], "encrypted_content": None},
        {"id": "rs_1", "summary": [], "content": None, "encrypted_content": seal(reasoning="Is it?")},
        {"summary": [{"type": "summary_text", "text": "Is it?"}], "encrypted_content": "gAAAAA=="},
        {"role": "assistant", "type": "message", "content": [{"type": "thinking", "thinking": "Is it?"}]},
    ],
)
async def test_reasoning_comes_back(client_with: Callable[..., Any], engine: FakeEngine, thought: Any) -> None:
    answer = {"role": "assistant", "content": "Blue."}
    async with client_with(ECHOING) as client:
        ours = await prompt_for(client, engine, [user(), {"type": "reasoning", **thought}, answer, user("b")])
        theirs = await chat_prompt(client, engine, [user(), {**answer, "reasoning_content": "Is it?"}, user("b")])
    assert ours == theirs


async def test_what_of_the_history_is_left_out_is_reported(client: httpx.AsyncClient) -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    items = [
        user(internal_chat_message_metadata_passthrough={"a": 1}),
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAA=="},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
        thought,
        {"role": "assistant", "content": "Hi.", "phase": "final_answer"},
        user("b"),
    ]
    response = await whole(client, input=items)
    assert {one["path"] for one in response["warnings"]} == {
        "input[0].internal_chat_message_metadata_passthrough",
        "input[1].encrypted_content",
        "input[2]",
        "input[3]",
        "input[4].phase",
    }


# -- tools -------------------------------------------------------------------------------------------------------------


async def test_namespaces_are_told_apart(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    other = {**DEMO, "name": "mcp__other"}
    engine.script = says(written("mcp__other__add", city="x"))
    history = [user(), call(name="add", namespace="mcp__demo"), result()]
    prompt = await prompt_for(client, engine, history, tools=[DEMO, other, WEATHER])
    assert '"name": "mcp__demo__add", "arguments"' in prompt
    (item,) = (await both(client, tools=[DEMO, other, WEATHER]))["output"]
    assert (item["namespace"], item["name"]) == ("mcp__other", "add")


async def test_what_a_namespace_is_for_stands_before_its_tools(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    tools = [{**DEMO, "description": "For sums.", "tools": [{**WEATHER, "name": "add", "description": "Adds."}]}]
    assert '"For sums.\\n\\nAdds."' in await prompt_for(client, engine, "hi", tools=tools)


async def test_names_that_would_fall_together_do_not(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    alike = [{**DEMO, "name": "a", "tools": [{**WEATHER, "name": "b__c"}]}]
    alike += [{**DEMO, "name": "a__b", "tools": [{**WEATHER, "name": "c"}]}]
    engine.script = says(written("a__b__c", city="x") + written("a__b__c_", city="x"))
    first, second = (await both(client, tools=alike))["output"]
    assert (first["namespace"], first["name"]) == ("a", "b__c")
    assert (second["namespace"], second["name"]) == ("a__b", "c")


async def test_tools_among_the_items_are_tools(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = says(written("mcp__demo__add", city="Rome"))
    items = [{"type": "additional_tools", "role": "developer", "tools": [DEMO]}, user()]
    (item,) = (await both(client, input=items))["output"]
    assert item["namespace"] == "mcp__demo"


@pytest.mark.parametrize(
    ("choice", "allowed"),
    [
        ("required", ("weather", "shell", "mcp__demo__add")),
        ({"type": "function", "name": "weather"}, ("weather",)),
        ({"type": "function", "name": "add", "namespace": "mcp__demo"}, ("mcp__demo__add",)),
        ({"type": "function", "name": "add"}, ("mcp__demo__add",)),
        ({"type": "custom", "name": "shell"}, ("shell",)),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "custom", "name": "shell"}, {"type": "mcp"}],
            },
            ("shell",),
        ),
    ],
)  # fmt: skip
async def test_a_choice_holds(client: httpx.AsyncClient, engine: FakeEngine, choice: Any, allowed: Any) -> None:
    await whole(client, tools=[WEATHER, SHELL, DEMO, {"type": "web_search"}], tool_choice=choice)
    grammar = engine.requests[-1].sampling.grammar
    calls = {
        "weather": written("weather", city="x"),
        "shell": written("shell", input="x"),
        "mcp__demo__add": written("mcp__demo__add", city="x"),
    }
    assert [name for name, text in calls.items() if accepts(grammar, text)] == list(allowed)
    assert not accepts(grammar, "No.")


async def test_the_input_of_a_custom_tool_is_held_to_its_grammar(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "BEGIN PATCH"'}
    response = await whole(client, tools=[{**SHELL, "format": form}], tool_choice="required")
    assert "BEGIN PATCH" in prompt_of(engine)
    assert "warnings" not in response
    grammar = engine.requests[-1].sampling.grammar
    assert accepts(grammar, written("shell", input="BEGIN PATCH"))
    assert not accepts(grammar, written("shell", input="END PATCH"))


async def test_a_grammar_that_cannot_be_enforced_is_shown_and_reported(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "(?=BEGIN)x"}
    response = await whole(client, tools=[{**SHELL, "format": form}])
    assert "(?=BEGIN)x" in prompt_of(engine)
    assert [one["path"] for one in response["warnings"]] == ["tools[0].format.definition"]


async def test_a_conversation_with_a_call_that_was_cut_goes_on(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = says(ROME)
    first = await whole(client, tools=[WEATHER], max_output_tokens=len(ROME) - 20)
    assert first["status"] == "incomplete"
    (item,) = first["output"]
    assert item["type"] == "function_call"
    assert not _is_json(item["arguments"])
    later = await whole(client, tools=[WEATHER], input=[user(), item, result("cut off", call_id=item["call_id"])])
    assert later["status"] == "completed"


async def test_the_result_of_a_hosted_tool_s_call_is_read(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    shell = {"type": "local_shell_call", "id": "lsh_1", "call_id": "c1", "action": {"type": "exec"}}
    await whole(client, input=[user(), shell, result("listed")])
    assert "listed" in prompt_of(engine)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


# -- mistakes ----------------------------------------------------------------------------------------------------------

FILE = {"type": "input_file", "file_data": "data:application/pdf;base64,AAAA"}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": None}, "input", "missing_required_parameter"),
        ({"input": []}, "input", "empty_array"),
        ({"input": 3}, "input", "invalid_type"),
        ({"input": [None]}, "input[0]", "invalid_type"),
        ({"inputs": "x"}, "inputs", "unknown_parameter"),
        ({"max_tokens": 5}, "max_tokens", "unknown_parameter"),
        ({"input": [user([FILE])]}, "input[0].content[0].type", "unsupported_value"),
        ({"input": [user(), call(), result([FILE])]}, "input[2].output[0].type", "unsupported_value"),
        ({"input": [{"role": "critic", "content": "x"}]}, "input[0].role", "invalid_value"),
        ({"input": [{"type": "magic"}]}, "input[0].type", "invalid_value"),
        ({"input": ["x"]}, "input[0]", "invalid_type"),
        ({"input": [{"type": []}]}, "input[0].type", "invalid_type"),
        ({"tools": [{"type": {}}]}, "tools[0].type", "invalid_type"),
        ({"input": [user(), {"type": "function_call", "name": "x", "arguments": ""}]}, "input[1].call_id",
         "missing_required_parameter"),
        ({"input": [user(), result()]}, "input[1].call_id", "invalid_value"),
        ({"input": [user(), result(), call()]}, "input[1].call_id", "invalid_value"),
        ({"input": [{"type": "compaction", "encrypted_content": "gAAA"}]}, "input[0].encrypted_content",
         "invalid_value"),
        ({"input": [{"type": "compaction", "encrypted_content": seal(summary="\ud800")}]},
         "input[0].encrypted_content", "invalid_value"),
        ({"input": [user(), {"type": "web_search_call", "id": {"a": 1}}]}, "input[1].id", "invalid_type"),
        ({"tools": [{"type": "function", "function": {"name": "x"}}]}, "tools[0].function", "unknown_parameter"),
        ({"tools": [{"type": "magic"}]}, "tools[0].type", "invalid_value"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1]", "invalid_value"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "invalid_value"),
        ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice", "unsupported_value"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": [{**WEATHER, "strict": True, "parameters": {"type": "object", "not": {}}}]},
         "tools[0].parameters.not", "invalid_value"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": {"not": {}}}}},
         "text.format.schema.not", "invalid_value"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "text.format",
         "invalid_parameter_combination"),
        ({"user": "x" * 65}, "user", "string_above_max_length"),
        ({"safety_identifier": "x" * 129}, "safety_identifier", "string_above_max_length"),
        ({"prompt_cache_key": "x" * 65}, "prompt_cache_key", "string_above_max_length"),
        ({"client_metadata": {"a": "x" * 65536}}, "client_metadata", "invalid_value"),
        ({"context_management": [{"a": "x" * 65536}]}, "context_management", "invalid_value"),
        ({"tools": [{**WEATHER, "output_schema": {"a": "x" * 65536}}]}, "tools[0].output_schema", "invalid_value"),
        ({"input": [user(id="x" * 65)]}, "input[0].id", "string_above_max_length"),
        ({"input": [user(), {"id": "x" * 65}]}, "input[1].id", "string_above_max_length"),
        ({"input": [user(), {"type": "web_search_call", "id": "x" * 65}]}, "input[1].id", "string_above_max_length"),
        ({"background": True, "store": False}, "background", "invalid_parameter_combination"),
        ({"previous_response_id": "resp_x", "conversation": "conv_x"}, "previous_response_id",
         "invalid_parameter_combination"),
        ({"prompt": {"id": "x"}}, "prompt", "unsupported_parameter"),
        ({"include": ["everything"]}, "include[0]", "invalid_value"),
        ({"top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
        ({"max_output_tokens": 0}, "max_output_tokens", "integer_below_min_value"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs", "invalid_type"),
        ({"beam_search": {"width": 2, "num_return": 2}}, "beam_search.num_return", "integer_above_max_value"),
    ],
)  # fmt: skip
async def test_mistakes_are_named(client: httpx.AsyncClient, fields: Any, param: str, code: str) -> None:
    await refused(client, RESPONSES, asking(**fields), param, code)


async def test_templates_of_others_are_blamed_on_the_input(client: httpx.AsyncClient) -> None:
    message = await refused(
        client, RESPONSES, asking(input=[{"role": "assistant", "content": "x"}]), "input", "invalid_value"
    )
    assert "may not begin with the assistant" in message


async def test_a_strict_server_refuses_hints(strict_client: httpx.AsyncClient) -> None:
    fields = asking(tools=[{"type": "web_search"}], max_output_tokens=5)
    await refused(strict_client, RESPONSES, fields, "tools[0]", "unsupported_parameter")
