"""Contents of answers: whole answers equal the sum of their streams, and events match Anthropic's types."""

import json
from typing import Any

import httpx
import msgspec
import pytest

from server.api.messages.answer import as_written
from server.errors import RequestTimeoutError
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, chat, client_of, says
from tests.server.messages.reading import MESSAGES, answered, events_of, message
from tests.server.test_reasoning import THOUGHT
from tests.server.test_tools import CITY, written
from tests.server.tiny_model import END

TOOLS = [{"name": "weather", "description": "Looks.", "input_schema": CITY}, {"name": "time", "input_schema": CITY}]
ROME, OSLO = written("weather", city="Rome"), written("time", city="Øslo")


def text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": []}


def call_block(whole: dict[str, Any], place: int, name: str, **arguments: Any) -> dict[str, Any]:
    """The block of a call, with the id that it has in an answer."""
    made = whole["content"][place]["id"]
    return {"type": "tool_use", "id": made, "name": name, "input": arguments, "caller": {"type": "direct"}}


async def test_a_text(client: httpx.AsyncClient, engine: FakeEngine):
    engine.script, engine.num_cached, engine.num_written = says("Hello\u2028there."), 7, 16
    whole = await answered(client, seed=3)
    assert whole["id"].startswith("msg_")
    assert (whole["type"], whole["role"], whole["model"], whole["seed"]) == ("message", "assistant", "tiny", 3)
    assert whole["content"] == [text_block("Hello\u2028there.")]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)
    usage, prompt = whole["usage"], engine.requests[-1].prompt
    assert usage["cache_read_input_tokens"] == 7
    assert usage["cache_creation_input_tokens"] == usage["cache_creation"]["ephemeral_5m_input_tokens"] == 16
    assert usage["input_tokens"] == len(prompt) - 7 - 16
    assert usage["output_tokens"] == len("Hello\u2028there.".encode()) + 1
    assert "warnings" not in whole


@pytest.mark.parametrize("per_step", [1, 3, 500])
async def test_thinking_text_and_calls_keep_their_order(thinking: httpx.AsyncClient, engine: FakeEngine, per_step: int):
    engine.script, engine.tokens_per_step = says(f"{THOUGHT}</think>First.\n{ROME}\nThen.\n{OSLO}"), per_step
    whole = await answered(thinking, tools=TOOLS)
    thought, *others = whole["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", THOUGHT)
    assert thought["signature"]
    assert [block["type"] for block in others] == ["text", "tool_use", "text", "tool_use"]
    assert "".join(block["text"] for block in others if block["type"] == "text").split() == ["First.", "Then."]
    assert others[1] == call_block(whole, 2, "weather", city="Rome")
    assert others[3] == call_block(whole, 4, "time", city="Øslo")
    assert whole["stop_reason"] == "tool_use"
    assert whole["usage"]["output_tokens_details"]["thinking_tokens"] >= len(THOUGHT)


@pytest.mark.parametrize(
    "arguments",
    ["{}", r'{"city": "\ud800", "n": "\u00e9 é"}', '{"n": 1e999}', '{"n": 0.10, "n": 1}', f'{{"n": {"9" * 350}}}'],
)
async def test_arguments_are_what_the_model_wrote(client: httpx.AsyncClient, engine: FakeEngine, arguments: str):
    engine.script = says(f'<tool_call>\n{{"name": "time", "arguments": {arguments}}}\n</tool_call>')
    whole = await answered(client, tools=TOOLS, max_tokens=900)
    (call,) = [block for block in whole["content"] if block["type"] == "tool_use"]
    assert call["input"] == json.loads(arguments)


@pytest.mark.parametrize(
    ("cut", "value"), [('{"a": "x", "b', {"a": "x"}), (r'{"a": "\ud800", "b', {}), ("[" * 9999, {})]
)
def test_arguments_that_were_cut_off_have_what_is_complete(cut: str, value: object):
    assert json.loads(msgspec.json.encode(as_written(cut))) == value


async def test_no_block_is_made_of_nothing(client: httpx.AsyncClient, engine: FakeEngine):
    engine.script = says("")
    whole = await answered(client)
    assert (whole["content"], whole["stop_reason"]) == ([], "end_turn")


async def test_hidden_thinking_comes_back_with_its_signature(thinking: httpx.AsyncClient, engine: FakeEngine):
    """The model's reasoning is in the next prompt, whether or not it was shown."""
    engine.script = says(f"{THOUGHT}</think>Blue.")
    prompts = []
    for display in ("omitted", "summarized"):
        asked = {"thinking": {"type": "enabled", "budget_tokens": 300, "display": display}}
        content = (await answered(thinking, **asked))["content"]
        assert content[0]["thinking"] == ("" if display == "omitted" else THOUGHT)
        again = [*message()["messages"], {"role": "assistant", "content": content}, {"role": "user", "content": "?"}]
        await answered(thinking, messages=again)
        prompts.append(engine.requests[-1].prompt)
    assert prompts[0] == prompts[1]
    assert THOUGHT.encode() in bytes(token for token in prompts[0] if token < 256)


@pytest.mark.parametrize(
    ("fields", "reason", "sequence", "text"),
    [
        ({"max_tokens": 3}, "max_tokens", None, "abc"),
        ({"stop_sequences": ["x", "de"]}, "stop_sequence", "de", "abc"),
        ({"stop": "d"}, "stop_sequence", "d", "abc"),
        ({"stop_token_ids": [ord("c")]}, "stop_sequence", "c", "ab"),
        ({"stop_sequences": ["zz"]}, "end_turn", None, "abcdef"),
        ({"max_tokens": 0}, "max_tokens", None, ""),
    ],
)
async def test_why_an_answer_ends(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], reason: str, sequence: str | None, text: str
):
    engine.script = says("abcdef")
    whole = await answered(client, **fields)
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    assert whole["content"] == ([text_block(text)] if text else [])


async def test_more_output_than_the_context_has_room_for(client: httpx.AsyncClient, engine: FakeEngine):
    engine.script = lambda request, choice: b"a"
    whole = await answered(client, max_tokens=32_000)
    assert whole["stop_reason"] == "model_context_window_exceeded"
    assert whole["usage"]["input_tokens"] + whole["usage"]["output_tokens"] == 4096
    (warning,) = whole["warnings"]
    assert warning["path"] == "max_tokens"


async def test_a_call_that_was_cut_off_has_what_is_complete(client: httpx.AsyncClient, engine: FakeEngine):
    """And the conversation goes on with it."""
    engine.script = says(written("weather", city="Rome", day="Monday"))
    parameters = {"type": "object", "properties": {"city": {"type": "string"}, "day": {"type": "string"}}}
    tools = [{"name": "weather", "input_schema": parameters}]
    cut = len('<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "day": "Mo')
    response = await client.post(MESSAGES, json=message(tools=tools, max_tokens=cut))
    whole = response.json()
    assert whole["stop_reason"] == "max_tokens"
    assert whole["content"] == [call_block(whole, 0, "weather", city="Rome")]
    result = {"type": "tool_result", "tool_use_id": whole["content"][0]["id"], "is_error": True, "content": "cut off"}
    messages = [
        *message()["messages"],
        {"role": "assistant", "content": whole["content"]},
        {"role": "user", "content": [result]},
    ]
    again = await answered(client, messages=messages, tools=tools)
    assert again["stop_reason"] == "tool_use"
    shown = bytes(token for token in engine.requests[-1].prompt if token < 256)
    assert b'"arguments": {"city": "Rome"}' in shown
    assert b"Error: cut off" in shown


async def test_silence_is_filled_with_pings(make_app, engine: FakeEngine):
    engine.first_delay_s = 0.2
    async with client_of(make_app(keepalive_s=0.02)) as client:
        text = (await client.post(MESSAGES, json=message(stream=True, max_tokens=2))).text
    kinds = [event["type"] for event in events_of(text)]
    assert kinds[0] == "ping"
    assert kinds[-1] == "message_stop"


async def test_a_stream_that_fails(client: httpx.AsyncClient, engine: FakeEngine):
    engine.fail_after, engine.failure = 2, RequestTimeoutError("It took too long.")
    response = await client.post(MESSAGES, json=message(stream=True))
    assert response.status_code == 200
    *_, last = events_of(response.text)
    assert last == {
        "type": "error",
        "error": {"type": "timeout_error", "message": "It took too long."},
        "request_id": response.headers["request-id"],
    }


async def test_seeds_draw_what_they_draw_for_chat_completions(client: httpx.AsyncClient, engine: FakeEngine):
    """Both APIs make the same of the same conversation."""
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    whole = await answered(client, system="s", messages=said, seed=5, max_tokens=20)
    body = chat(messages=[{"role": "system", "content": "s"}, *said], seed=5, max_tokens=20)
    choice = (await client.post(CHAT, json=body)).json()["choices"][0]
    assert whole["content"] == [text_block(choice["message"]["content"])]
    assert engine.requests[0].prompt == engine.requests[-1].prompt
    assert END not in engine.requests[-1].prompt[-1:]
