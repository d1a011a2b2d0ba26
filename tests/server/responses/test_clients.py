"""Clients as they are: OpenAI's own, and the bodies of others as they were seen."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import NotFoundError, OpenAI
from pydantic import BaseModel

from tests.server.fake_engine import FakeEngine
from tests.server.helpers import says
from tests.server.responses.calling import events, kinds_of, whole
from tests.server.responses.test_answers import SHELL, THINKING, WEATHER
from tests.server.responses.test_inputs import SHELL_CALL
from tests.server.test_tools import ROME


class City(BaseModel):
    city: str


@pytest.fixture
def ask(openai_client: OpenAI) -> Iterator[Any]:
    return openai_client.responses


def test_openai_creates_and_goes_on(ask: Any, engine: FakeEngine) -> None:
    engine.script = says("Hello.")
    first = ask.create(model="tiny", input="hi")
    assert first.output_text == "Hello."
    second = ask.create(model="tiny", input="and?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert ask.retrieve(first.id).output_text == "Hello."
    (said,) = ask.input_items.list(first.id)
    assert said.content[0].text == "hi"
    assert ask.input_tokens.count(model="tiny", input="hi").input_tokens == first.usage.input_tokens
    ask.delete(first.id)
    with pytest.raises(NotFoundError, match=first.id):
        ask.retrieve(first.id)


def test_openai_streams(ask: Any, engine: FakeEngine) -> None:
    engine.script = says(f"Let me see.\n{ROME}")
    with ask.stream(model="tiny", input="hi", tools=[WEATHER]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert final.output_text == "Let me see."
    assert final.output[1].arguments == '{"city": "Rome"}'
    again = ask.retrieve(final.id, stream=True, starting_after=3)
    assert [event.sequence_number for event in again] == list(range(4, len(list(kinds))))


def test_openai_parses(ask: Any, engine: FakeEngine) -> None:
    engine.script = says('{"city": "Rome"}')
    assert ask.parse(model="tiny", input="hi", text_format=City).output_parsed == City(city="Rome")


def test_openai_polls_and_cancels(ask: Any, engine: FakeEngine) -> None:
    engine.script = says("Done.")
    waiting = ask.create(model="tiny", input="hi", background=True)
    while waiting.status in ("queued", "in_progress"):
        waiting = ask.retrieve(waiting.id)
    assert waiting.output_text == "Done."
    engine.first_delay_s = 60
    endless = ask.create(model="tiny", input="hi", background=True)
    assert ask.cancel(endless.id).status == "cancelled"


def test_openai_keeps_conversations(openai_client: OpenAI, engine: FakeEngine) -> None:
    engine.script = says("Hello.")
    conversation = openai_client.conversations.create(metadata={"a": "b"})
    openai_client.responses.create(model="tiny", input="hi", conversation=conversation.id)
    items = list(openai_client.conversations.items.list(conversation.id, order="asc", limit=1))
    assert [item.role for item in items] == ["user", "assistant"]


def message(role: str, text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}], **fields}


CODEX = {
    "input": [
        message("developer", "You code.", id="msg_1"),
        message("developer", "Permissions."),
        message("user", "The folder."),
        message("user", "What is here?"),
    ],
    "tools": [
        {**WEATHER, "strict": False, "description": "Looks."},
        {**SHELL, "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}},
        {
            "type": "namespace", "name": "mcp__demo", "description": "A server.",
            "tools": [{**WEATHER, "name": "add", "strict": False}],
        },
        {"type": "web_search", "external_web_access": True},
        {"type": "tool_search", "execution": "client"},
    ],
    "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0d3f", "service_tier": "flex",
    "client_metadata": {"session_id": "1", "x-codex-turn-metadata": '{"a": 1}'}, "text": {"verbosity": "low"},
    "max_output_tokens": None,
}  # fmt: skip


async def test_codex_is_answered_and_goes_on(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = says(ROME)
    told = await events(client, **CODEX)
    assert kinds_of(told)[-1] == "completed"
    done = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    cut = {"type": "function_call", "id": "fc_2", "call_id": "c2", "name": "add", "namespace": "mcp__demo"}
    turn = {"internal_chat_message_metadata_passthrough": {"turn_id": "t"}}
    later = [
        *CODEX["input"],
        *({**item, **turn} for item in done),
        {**cut, "arguments": '{"city": "', "status": "incomplete"},
        {"type": "function_call_output", "id": "fco_1", "call_id": done[0]["call_id"], "output": "Sunny."},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "no"}]},
        {**SHELL_CALL, "id": "ctc_1", "call_id": "c3", "status": "completed"},
        {"type": "custom_tool_call_output", "call_id": "c3", "output": "a.txt"},
        message("developer", "Resumed."),
        message("user", "Go on."),
    ]  # fmt: skip
    assert kinds_of(await events(client, **{**CODEX, "input": later}))[-1] == "completed"


async def test_codex_asks_whether_the_model_is_there(client: httpx.AsyncClient) -> None:
    assert (await whole(client, input="", max_output_tokens=1))["status"] == "incomplete"


async def test_the_agents_sdk_sends_items_without_types(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = says(THINKING)
    items = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
    ]
    fields = {"include": [], "instructions": "Be brief.", "prompt_cache_retention": "24h", "truncation": "disabled"}
    assert (await whole(client, input=[*items, {"role": "user", "content": "b"}], **fields))["status"] == "completed"
