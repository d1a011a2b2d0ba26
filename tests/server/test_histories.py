"""Conversations as clients send them back: no shape of a history is refused, and what the template makes of it."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from server.generation.planning.limits import without_oldest
from server.generation.request import Conversation
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, chat, refused
from tests.server.test_reasoning import SWITCHED
from tests.server.tiny_model import TEMPLATE, byte_level_tokenizer

PLAIN = """{%- for message in messages -%}
    <|start|>{{ message.role }}
{{ message.content }}<|end|>
{%- endfor -%}"""
"""Knows neither tools nor calls."""
ALTERNATING = """{%- if messages[0].role == 'system' -%}
    {%- set first, messages = messages[0].content, messages[1:] -%}
    {{ first }}|
{%- endif -%}
{%- for message in messages -%}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif -%}
    <|start|>{{ message.role }}
{{ message.content }}<|end|>
{%- endfor -%}"""
"""As Gemma's: a system message at the beginning, and then two roles in turn."""
OBJECTS_ONLY = TEMPLATE.replace(
    "{{ call.function.arguments | tojson }}",
    "{% for key, value in call.function.arguments | items %}{{ key }}={{ value }}{% endfor %}",
)
"""As GLM's: the arguments cannot be a text."""
TEMPLATES = {"with calls": TEMPLATE, "plain": PLAIN, "alternating": ALTERNATING, "objects only": OBJECTS_ONLY}


def call(arguments: str = '{"city": "Rome"}', **fields: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}, **fields}


def user(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def system(content: Any = "Be brief.", role: str = "system") -> dict[str, Any]:
    return {"role": role, "content": content}


def calling(*calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(calls) or [call()], **fields}


def result(content: Any = "sunny", **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call_1", "content": content, **fields}


def texts(*parts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": part} for part in parts]


HISTORIES: dict[str, list[dict[str, Any]]] = {
    "content null": [user(), calling(content=None), result()],
    "content empty": [user(), calling(content=""), result()],
    "content absent": [user(), calling(), result()],
    "content a line break": [user(), calling(content="\n", reasoning_content="hm"), result()],
    "content a list": [user(texts("a", "b")), calling(content=texts("c")), result(texts("d", "e"))],
    "no result text": [user(), calling(), result("")],
    "two results": [user(), calling(call(), call(id="call_2")), result(), result(tool_call_id="call_2")],
    "name of the tool": [user(), calling(), result(name="f")],
    "no ids": [user(), calling(call(id=None)), result()],
    "no type": [user(), calling({"id": "1", "function": {"name": "f", "arguments": "{}"}}), result()],
    "index": [user(), calling(call(index=0)), result()],
    "arguments empty": [user(), calling(call("")), result()],
    "arguments cut off": [user(), calling(call('{"city": "Ro')), result("Error: bad arguments")],
    "arguments no object": [user(), calling(call("[1]")), result()],
    "a custom call": [user(), calling({"type": "custom", "custom": {"name": "sh", "input": "ls"}}), result()],
    "litellm": [user(), calling(provider_specific_fields={"refusal": None}, reasoning_content="hm"), result(name="f")],
    "calls empty": [user(tool_calls=[]), {"role": "assistant", "content": "a", "tool_calls": []}, user()],
    "assistant's content null": [user(), {"role": "assistant", "content": None}, user()],
    "tool's content null": [user(), calling(), result(None)],
    "no parts": [user(), calling(content=[]), result([])],
    "parts of Responses": [user([{"type": "input_text", "text": "a"}]),
                           {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]}, user()],
    "thinking": [user(), calling(content=[{"type": "thinking", "thinking": "hm", "signature": "x"}]), result()],
    "thinking of Mistral": [user(), calling(content=[{"type": "thinking", "thinking": texts("hm")}]), result()],
    "hosted tools": [
        user(),
        {"role": "assistant", "content": [
            {"type": "redacted_thinking", "data": "x"}, *texts("a"),
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        ]},
        user(),
    ],
    "openai": [user(), calling(content=None, refusal=None, annotations=[], audio=None, function_call=None), result()],
    "without a result": [user(), calling(call('{"a'), content=None), user("go on")],
    "result without call": [user(), result()],
    "functions": [user(), {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
                  {"role": "function", "name": "f", "content": "sunny"}],
    "answered": [system(), user(), calling(), result(), {"role": "assistant", "content": "Sunny."}, user("And now?")],
    "two systems": [system(), system("Be kind."), user()],
    "system later": [user(), {"role": "assistant", "content": "x"}, system("Be kind."), user("y")],
    "developer later": [system(), user(), {"role": "assistant", "content": "x"}, system(role="developer"), user("y")],
    "user after user": [user("a"), user("b")],
    "assistant after assistant": [user(), {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"},
                                  user("c")],
    "all of it": [system(), system("2"), user("a"), user("b"), calling(call('{"a')), result(name="f"), result(),
                  system("3"), user("c", name="Ann")],
}  # fmt: skip


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine.roomy()


async def shown(
    client: httpx.AsyncClient, engine: FakeEngine, messages: list[Any], **fields: Any
) -> tuple[str, list[str]]:
    """The prompt, and the paths of what is reported."""
    response = await client.post(CHAT, json=chat(messages=messages, **fields))
    assert response.status_code == 200, response.text
    prompt = byte_level_tokenizer().decode(engine.requests[-1].prompt, skip_special_tokens=False)
    return prompt, [warning["path"] for warning in response.json().get("warnings", [])]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("with_tools", [False, True])
async def test_every_shape_is_accepted(
    client_with: Callable[..., httpx.AsyncClient], engine: FakeEngine, template: str, with_tools: bool
):
    """Whatever the template, and with nothing of a text lost."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    async with client_with(TEMPLATES[template]) as client:
        for name, messages in HISTORIES.items():
            prompt, _ = await shown(client, engine, messages, **({"tools": tools} if with_tools else {}))
            for message in messages:
                content = message.get("content") or ""
                parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
                for text in parts:
                    assert text in prompt, name


async def test_parts_of_other_apis_are_shown_or_reported(
    client_with: Callable[..., httpx.AsyncClient], engine: FakeEngine
):
    async with client_with(SWITCHED) as client:
        for name in ("thinking", "thinking of Mistral"):
            prompt, reported = await shown(client, engine, HISTORIES[name])
            assert ("hm" in prompt, reported) == (True, [])
        _, reported = await shown(client, engine, HISTORIES["hosted tools"])
    assert reported == [f"messages[1].content[{place}]" for place in (0, 2, 3)]


async def test_templates_that_refuse_several_system_messages(
    client_with: Callable[..., httpx.AsyncClient], engine: FakeEngine
):
    async with client_with(ALTERNATING) as client:
        messages = [system(), user("a"), user("b"), system("Be kind.", "developer")]
        prompt, reported = await shown(client, engine, messages)
        assert prompt == "Be brief.\n\nBe kind.|<|start|>user\na\n\nb<|end|>"
        assert reported == ["messages[].role"] * 2
        prompt, reported = await shown(client, engine, [system(), system("Be kind."), user()])
        assert (prompt, reported) == ("Be brief.\n\nBe kind.|<|start|>user\nhi<|end|>", ["messages[].role"])
        prompt, reported = await shown(client, engine, [system(), user()])
        assert (prompt, reported) == ("Be brief.|<|start|>user\nhi<|end|>", [])
    async with client_with(ALTERNATING, strict=True) as client:
        await refused(client, CHAT, chat(messages=messages), "messages[].role", "unsupported_parameter")


async def test_templates_that_take_them_get_them_as_they_are(
    client_with: Callable[..., httpx.AsyncClient], engine: FakeEngine
):
    async with client_with(PLAIN) as client:
        prompt, reported = await shown(client, engine, [system(), user("a"), user("b"), system("Be kind.")])
    assert prompt.count("<|start|>") == 4
    assert reported == []


async def test_what_no_merging_helps_is_refused_with_the_template_s_words(
    client_with: Callable[..., httpx.AsyncClient],
):
    async with client_with(ALTERNATING) as client:
        body = chat(messages=[system(), {"role": "assistant", "content": "x"}, {"role": "assistant", "content": "y"}])
        assert "roles must alternate" in await refused(client, CHAT, body, "messages", "invalid_value")


async def test_calls_and_results_are_written_out_where_the_template_has_none(
    client_with: Callable[..., httpx.AsyncClient], engine: FakeEngine
):
    calls = calling(call(), call('{"a', id="call_2"), content="Well.")
    messages = [user(), calls, result("rainy", tool_call_id="call_2"), result(), result("?", tool_call_id="call_3")]
    for template in (PLAIN, ALTERNATING):
        async with client_with(template) as client:
            prompt, _ = await shown(client, engine, messages)
        *_, said, results = prompt.split("<|start|>")
        assert said == (
            'assistant\nWell.\n<tool_call>\n{"name": "f", "arguments": {"city": "Rome"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "f", "arguments": {"a}\n</tool_call><|end|>'
        )
        assert results == (
            "user\n<tool_response>\nResult of call 2, f:\nrainy\n</tool_response>\n"
            "<tool_response>\nResult of call 1, f:\nsunny\n</tool_response>\n"
            "<tool_response>\n?\n</tool_response><|end|>"
        )


async def test_arguments_that_a_template_cannot_show_are_put_into_an_object(
    client_with: Callable[..., httpx.AsyncClient], engine: FakeEngine
):
    async with client_with(OBJECTS_ONLY) as client:
        prompt, reported = await shown(client, engine, [user(), calling(call(), call('{"a')), result()])
    assert "city=Rome" in prompt
    assert 'arguments={"a' in prompt
    assert reported == ["messages[].tool_calls[].function.arguments"]


async def test_paths_are_those_of_the_request(client: httpx.AsyncClient, engine: FakeEngine):
    """Whatever was put before the messages, or merged."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    _, reported = await shown(client, engine, [user(), calling(), result(name="f"), user(name="Ann")], tools=tools)
    assert reported == ["messages[2].name"], "of many messages, the first"


async def test_an_agent_goes_on_after_a_broken_call(client: httpx.AsyncClient, engine: FakeEngine):
    """The same history, longer with each turn."""
    messages = [user()]
    for turn in range(3):
        messages += [calling(call('{"city": "Ro' + "m" * turn), content=None), result("Error")]
        prompt, _ = await shown(client, engine, messages)
        assert prompt.count(json.dumps('{"city": "Ro')[:-1]) == turn + 1


def test_messages_of_system_and_developer_stay_when_the_oldest_are_left_out() -> None:
    roles = ("system", "user", "assistant", "developer", "user", "assistant", "user")
    conversation = Conversation([{"role": role, "content": str(place)} for place, role in enumerate(roles)])
    for most, kept in ((7, "0123456"), (6, "03456"), (4, "036"), (1, "036")):
        shorter = without_oldest(conversation, lambda one, most=most: len(one.messages) <= most)
        assert "".join(message["content"] for message in shorter.messages) == kept
