"""Responses as they are answered: their output, their events, and what they say of the request."""

import json
from typing import Any

import httpx
import pytest

from model_runner.contract import Failure
from server.api.responses.items import unseal
from server.engine.client import RequestFailedError
from server.http.event_stream import ascii_json
from tests.server.constraints.matching import accepts
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, chat, client_of, error_of, says
from tests.server.responses.calling import RESPONSES, asking, both, events, events_of, kinds_of, text_of, whole
from tests.server.test_reasoning import ECHOING
from tests.server.test_tools import CITY, ROME, written

THINKING = "<think>\nIs it?\n</think>\n\nBlue."
BEGIN = ["created", "in_progress"]
TEXT = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
ADDED, DONE = ["output_item.added"], ["output_item.done"]
WEATHER = {"type": "function", "name": "weather", "parameters": CITY}
SHELL = {"type": "custom", "name": "shell", "description": "Runs a line."}
DEMO = {"type": "namespace", "name": "mcp__demo", "description": "Sums.", "tools": [{**WEATHER, "name": "add"}]}


# -- output ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_step", [1, 3, 500])
async def test_a_text(client: httpx.AsyncClient, engine: FakeEngine, per_step: int) -> None:
    engine.script, engine.tokens_per_step = says("Hellø there."), per_step
    response = await both(client)
    assert response["status"] == "completed"
    (message,) = response["output"]
    assert message["content"] == [{"type": "output_text", "text": "Hellø there.", "annotations": [], "logprobs": []}]
    assert kinds_of(await events(client)) == [*BEGIN, *ADDED, *TEXT, *DONE, "completed"]


async def test_nothing_is_an_empty_message(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = says("")
    response = await both(client)
    assert text_of(response) == ""
    assert [item["type"] for item in response["output"]] == ["message"]


async def test_a_text_that_is_cut(client: httpx.AsyncClient) -> None:
    response = await both(client, max_output_tokens=5, seed=3)
    assert response["status"] == response["output"][0]["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["completed_at"] is None
    assert response["usage"]["output_tokens"] == 5


async def test_the_same_text_as_in_chat_completions(client: httpx.AsyncClient) -> None:
    turns = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    turns += [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "and?"}]
    theirs = await client.post(CHAT, json=chat(messages=turns, seed=7, max_tokens=9))
    ours = await whole(client, input=turns, seed=7, max_output_tokens=9)
    assert text_of(ours) == theirs.json()["choices"][0]["message"]["content"]
    split = await whole(client, instructions="Be brief.", input=turns[1:], seed=7, max_output_tokens=9)
    assert text_of(split) == text_of(ours)


@pytest.mark.parametrize("per_step", [1, 4, 500])
async def test_text_and_calls_are_items_in_their_order(
    client: httpx.AsyncClient, engine: FakeEngine, per_step: int
) -> None:
    engine.script, engine.tokens_per_step = says(f"Let me see.\n{ROME}\n{written('shell', input='ls -l')}"), per_step
    response = await both(client, tools=[WEATHER, SHELL])
    message, call, custom = response["output"]
    assert message["content"][0]["text"] == "Let me see."
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "weather", {"city": "Rome"})
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "shell", "ls -l")
    assert kinds_of(await events(client, tools=[WEATHER, SHELL])) == [
        *BEGIN,
        *(*ADDED, *TEXT, *DONE),
        *(*ADDED, "function_call_arguments.delta", "function_call_arguments.done", *DONE),
        *(*ADDED, "custom_tool_call_input.delta", "custom_tool_call_input.done", *DONE),
        "completed",
    ]


async def test_a_call_of_a_namespace_names_it(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = says(written("mcp__demo__add", city="Rome"))
    (call,) = (await both(client, tools=[DEMO]))["output"]
    assert (call["name"], call["namespace"]) == ("add", "mcp__demo")


@pytest.mark.parametrize("summary", [None, "auto"])
async def test_reasoning(client_with, engine: FakeEngine, summary: str | None) -> None:
    engine.script = says(THINKING)
    fields = {"include": ["reasoning.encrypted_content"], "reasoning": {"summary": summary}}
    async with client_with(ECHOING) as client:
        response = await both(client, **fields)
        kinds = kinds_of(await events(client, **fields))
    thought, message = response["output"]
    text = {"type": "summary_text" if summary else "reasoning_text", "text": "Is it?"}
    assert thought["summary"] == ([text] if summary else [])
    assert thought.get("content") == (None if summary else [text])
    assert unseal(thought["encrypted_content"], "reasoning") == "Is it?"
    assert message["content"][0]["text"] == "Blue."
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    part, told = ("reasoning_summary_part", "reasoning_summary_text") if summary else ("content_part", "reasoning_text")
    thinking = [*ADDED, f"{part}.added", f"{told}.delta", f"{told}.done", f"{part}.done", *DONE]
    assert kinds == [*BEGIN, *thinking, *ADDED, *TEXT, *DONE, "completed"]


async def test_logprobs(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = says("Yes")
    response = await both(client, include=["message.output_text.logprobs"], top_logprobs=2)
    logprobs = response["output"][0]["content"][0]["logprobs"]
    assert "".join(one["token"] for one in logprobs[:3]) == "Yes"
    assert all(len(one["top_logprobs"]) == 2 for one in logprobs)


async def test_logprobs_are_encoded_once(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The events at the end repeat all of them, which would keep other clients waiting for megabytes."""
    encoded: list[Any] = []

    def watched(value: Any) -> bytes:
        encoded.append(value)
        return ascii_json(value)

    monkeypatch.setattr("server.api.responses.response_builder.ascii_json", watched)
    engine.script = says("Yes")
    sent = await events(client, include=["message.output_text.logprobs"], top_logprobs=2)
    pieces = [one for event in sent if event["type"] == "response.output_text.delta" for one in event["logprobs"]]
    assert len(encoded) == len(pieces) > 0
    of_type = {event["type"]: event for event in sent}
    for done in (
        of_type["response.output_text.done"],
        of_type["response.content_part.done"]["part"],
        of_type["response.output_item.done"]["item"]["content"][0],
        sent[-1]["response"]["output"][0]["content"][0],
        (await client.get(f"{RESPONSES}/{sent[-1]['response']['id']}")).json()["output"][0]["content"][0],
    ):
        assert done["logprobs"] == pieces


@pytest.mark.parametrize("per_step", [1, 4, 500])
async def test_the_logprobs_of_a_text_before_a_call(
    client: httpx.AsyncClient, engine: FakeEngine, per_step: int
) -> None:
    """They are the text's, however many tokens a step brings."""
    engine.script, engine.tokens_per_step = says("Well: " + written("weather", city="Rome")), per_step
    response = await both(client, tools=[WEATHER], include=["message.output_text.logprobs"])
    text, call = response["output"]
    assert call["type"] == "function_call"
    assert "".join(one["token"] for one in text["content"][0]["logprobs"]) == "Well:"


# -- forms -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ({"type": "json_object"}, '{"a": 1}', "[]"),
        ({"type": "json_schema", "name": "x", "schema": CITY, "strict": True}, '{"city": "x"}', '{"town": "x"}'),
    ],
)
async def test_a_form_holds_the_text(
    client: httpx.AsyncClient, engine: FakeEngine, form: dict[str, Any], good: str, bad: str
) -> None:
    response = await whole(client, text={"format": form})
    grammar = engine.requests[-1].sampling.grammar
    assert accepts(grammar, good)
    assert not accepts(grammar, bad)
    assert response["text"]["format"]["type"] == form["type"]


# -- the object --------------------------------------------------------------------------------------------------------


async def test_the_object_tells_the_settings(client: httpx.AsyncClient) -> None:
    settings = {
        "instructions": "Be brief.", "metadata": {"a": "b"}, "temperature": 0.5, "top_p": 0.9, "tools": [DEMO, WEATHER],
        "tool_choice": "none", "parallel_tool_calls": False, "max_tool_calls": 3, "prompt_cache_key": "k",
        "safety_identifier": "me", "user": "you", "top_logprobs": 1, "store": False,
    }  # fmt: skip
    response = await whole(client, **settings)
    assert {name: response[name] for name in settings if name != "tools"} == {
        name: value for name, value in settings.items() if name != "tools"
    }
    assert [tool["name"] for tool in response["tools"]] == ["mcp__demo", "weather"]
    assert (response["service_tier"], response["truncation"], response["background"]) == ("default", "disabled", False)


async def test_what_is_left_out_is_reported(client: httpx.AsyncClient) -> None:
    fields = {
        "tools": [WEATHER, {"type": "web_search", "external_web_access": True}],
        "text": {"verbosity": "low"}, "reasoning": {"effort": "high", "context": "all_turns"}, "service_tier": "flex",
    }  # fmt: skip
    answer = await client.post(RESPONSES, json=asking(**fields))
    left_out = {"tools[1]", "text.verbosity", "reasoning.effort", "reasoning.context", "service_tier"}
    assert {one["path"] for one in answer.json()["warnings"]} == left_out
    assert set(answer.headers["x-samewise-ignored"].split(", ")) == left_out


# -- failures ----------------------------------------------------------------------------------------------------------


async def test_a_failure_after_the_beginning_is_an_event(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.fail_after, engine.failure = 3, RequestFailedError("it broke")
    told = await events(client)
    assert kinds_of(told) == [*BEGIN, *ADDED, *TEXT, *DONE, "failed"]
    assert told[-1]["response"]["error"]["code"] == "server_error"
    assert told[-1]["response"]["output"][0]["status"] == "incomplete"
    error_of(await client.post(RESPONSES, json=asking()), 500, "server_error")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_it_is_a_status(client: httpx.AsyncClient, engine: FakeEngine, stream: bool) -> None:
    engine.fail_after, engine.failure = 0, RequestFailedError("it broke")
    error_of(await client.post(RESPONSES, json=asking(stream=stream)), 500, "server_error")


async def test_a_request_that_rules_out_every_token_is_to_blame(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.fail_after, engine.error_output = 1, Failure("no token left", by_request=True)
    told = await events(client)
    assert told[-1]["response"]["error"]["code"] == "invalid_prompt"


async def test_a_prompt_that_is_too_long(client: httpx.AsyncClient) -> None:
    error = error_of(await client.post(RESPONSES, json=asking(input="x" * 5000)))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")


async def test_a_conversation_that_is_too_long_loses_its_oldest_messages(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    turns = [{"role": role, "content": f"{number}" * 400} for number in range(9) for role in ("user", "assistant")]
    said = [{"role": "system", "content": "Be brief."}, *turns, {"role": "user", "content": "And?"}]
    error = error_of(await client.post(RESPONSES, json=asking(input=said)))
    assert error["code"] == "context_length_exceeded"
    response = await whole(client, input=said, truncation="auto")
    (warning,) = response["warnings"]
    kept = engine.requests[-1].prompt
    assert warning["path"] == "input"
    assert f"the {10} oldest messages" in warning["reason"]
    assert await whole(client, input=[said[0], *said[11:]])
    assert engine.requests[-1].prompt == kept
    assert len(kept) + 400 <= 4096 < len(kept) + 400 + 850
    fitting = await whole(client, truncation="auto")
    assert "warnings" not in fitting


async def test_silence_is_filled_with_events(make_app, engine: FakeEngine) -> None:
    engine.first_delay_s = 0.3
    async with client_of(make_app(keepalive_s=0.05)) as client:
        answer = await client.post(RESPONSES, json=asking(stream=True, max_output_tokens=2))
    assert "event: keepalive\n" in answer.text
    assert kinds_of(events_of(answer.text))[:2] == BEGIN


async def test_without_a_websocket_there_is_nothing_to_get(client: httpx.AsyncClient) -> None:
    upgrade = {"connection": "upgrade", "upgrade": "websocket"}  # which did not get here as one
    answer = await client.get(RESPONSES, headers=upgrade)
    error_of(answer, 426)
    assert answer.headers["upgrade"] == "websocket"
