"""The embedded model through the official client, and what the server does when things die."""

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.served.conftest import Server, stream_texts

pytestmark = pytest.mark.embedded

MODEL = "SmolLM2-135M-Instruct"
PARIS = [{"role": "user", "content": "What is the capital of France?"}]


def test_it_knows_the_capital_of_france(server: Server) -> None:
    answer = server.client.chat.completions.create(model=MODEL, messages=PARIS, temperature=0, max_tokens=20)
    assert "Paris" in (answer.choices[0].message.content or "")


def test_streamed_and_whole_are_the_same(server: Server) -> None:
    client = server.client
    settings = {"model": MODEL, "messages": PARIS, "temperature": 0.9, "seed": 11, "max_tokens": 24, "n": 3}
    whole = client.chat.completions.create(**settings, logprobs=True, top_logprobs=2)
    texts, logprobs = ["", "", ""], [[], [], []]
    for chunk in client.chat.completions.create(**settings, logprobs=True, top_logprobs=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
    assert texts == [choice.message.content for choice in whole.choices]
    assert logprobs == [choice.logprobs.content for choice in whole.choices]
    assert len(set(texts)) == 3


def test_echo_gives_the_logprobs_of_the_prompt(server: Server) -> None:
    client = server.client
    text = "The quick brown fox jumps over the lazy dog"
    scored = client.completions.create(model=MODEL, prompt=text, max_tokens=0, echo=True, logprobs=1).choices[0]
    assert scored.text == text
    assert scored.logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in scored.logprobs.token_logprobs[1:])
    grown = client.completions.create(model=MODEL, prompt=text, max_tokens=1, echo=True, logprobs=1).choices[0]
    assert grown.logprobs.token_logprobs[:-1] == scored.logprobs.token_logprobs


def test_a_mistake_gets_a_clear_error_and_the_server_goes_on(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="Expected a value <= 2, but got 200"):
        server.client.chat.completions.create(model=MODEL, messages=PARIS, temperature=200)
    test_it_knows_the_capital_of_france(server)


LIST = [{"role": "user", "content": "Count from one to ten, then from one to ten again, in words."}]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0, "stop": [" fi"], "include_stop_str_in_output": True, "logprobs": True, "top_logprobs": 2},
        {"temperature": 0.7, "n": 2, "min_tokens": 20, "stop": ["two", ",", "\n"], "frequency_penalty": 0.2},
    ],
)
def test_every_method_of_speculation_stops_at_the_same_place(server: Server, settings: dict[str, Any]) -> None:
    body = {"model": MODEL, "messages": LIST, "seed": 5, "max_tokens": 60, **settings}

    def answer(**speculation: Any) -> dict[str, Any]:
        response = httpx.post(f"{server.address}/v1/chat/completions", json={**body, **speculation}, timeout=120)
        assert response.status_code == 200, response.text
        whole = response.json()
        return {"choices": whole["choices"], "tokens": whole["usage"]["completion_tokens"]}

    plain = answer(speculation="off")
    assert any(choice["finish_reason"] == "stop" for choice in plain["choices"])
    methods = httpx.get(f"{server.address}/v1/capabilities").json()["speculation"]["methods"]
    assert {"auto", "hydra", "suffix"} <= set(methods)
    predicted = {"prediction": {"type": "content", "content": plain["choices"][0]["message"]["content"] + " and so on"}}
    for method in methods:
        more = predicted if method == "prediction" else {}
        assert answer(speculation={"method": method, "num_tokens": 6}, **more) == plain, method


NAMED = {"type": "object", "properties": {"name": {"type": "string", "minLength": 100}}, "required": ["name"]}
HELD: dict[str, dict[str, Any]] = {
    "schema": {
        "messages": PARIS,
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": NAMED}},
    },
    "call": {
        "messages": PARIS,
        "tools": [{"type": "function", "function": {"name": "look_up", "parameters": NAMED}}],
        "tool_choice": "required",
    },
    "thinking": {
        "messages": [*PARIS, {"role": "assistant", "content": "<think>"}],
        "extra_body": {
            "add_generation_prompt": False, "continue_final_message": True,
            "thinking_token_budget": 30, "ignore_eos": True,
        },
    },
}  # fmt: skip


async def stream_held(server: Server, fields: dict[str, Any], begun: asyncio.Event) -> dict[str, str]:
    """Text that a chat streams, by kind; sets the event when it has begun."""
    parts = {"content": "", "reasoning_content": "", "arguments": "", "end": ""}
    async with server.async_client() as client:
        async for chunk in await client.chat.completions.create(
            model=MODEL, seed=3, temperature=0.7, max_tokens=120, stream=True, **fields
        ):
            for choice in chunk.choices:
                parts["content"] += choice.delta.content or ""
                parts["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
                for call in choice.delta.tool_calls or ():
                    parts["arguments"] += call.function.arguments or "" if call.function else ""
                parts["end"] += choice.finish_reason or ""
            if any(parts.values()):
                begun.set()
    return parts


async def test_killing_the_engine_under_35_streams_changes_nothing(thinking_server: Server) -> None:
    server = thinking_server
    prompts = [f"Story number {index}: once upon a time" for index in range(32)]
    undisturbed = await stream_texts(server, MODEL, prompts, 24)
    held = await asyncio.gather(*(stream_held(server, fields, asyncio.Event()) for fields in HELD.values()))
    assert held[0]["content"].startswith("{")
    assert held[1]["arguments"].startswith("{")
    assert held[2]["reasoning_content"]
    assert held[2]["content"]  # its reasoning was ended
    begun = [asyncio.Event() for _ in range(1 + len(HELD))]
    held_streams = [
        asyncio.create_task(stream_held(server, fields, event))
        for fields, event in zip(HELD.values(), begun[1:], strict=True)
    ]
    streams = asyncio.create_task(stream_texts(server, MODEL, prompts, 24, begun[0]))
    for event in begun:
        await event.wait()
    assert not all(stream.done() for stream in held_streams)
    os.kill(server.engine_pid, signal.SIGKILL)
    assert await streams == undisturbed
    assert await asyncio.gather(*held_streams) == held
    assert server.metric("engine_restarts_total") >= 1


def test_blocks_return_when_clients_leave(server: Server) -> None:
    client = server.client
    for _ in range(5):
        stream = client.completions.create(model=MODEL, prompt="And so", max_tokens=2000, stream=True)
        next(iter(stream))
        stream.close()
    deadline = time.monotonic() + 20
    while server.metric("kv_cache_usage_perc") > 0:
        assert time.monotonic() < deadline, "blocks were not given back"
        time.sleep(0.1)
    assert server.metric("num_requests_running") == 0


def test_sigterm_lets_streams_finish_and_refuses_new_work(embedded_folder: Path) -> None:
    server = Server()
    stream = server.client.completions.create(
        model=MODEL, prompt="And so", max_tokens=60, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = iter(stream)
    next(chunks)
    code: list[int] = []
    ending = threading.Thread(target=lambda: code.append(server.terminate()))
    ending.start()
    deadline = time.monotonic() + 10
    while (ready := httpx.get(f"{server.address}/ready")).status_code != 503:
        assert time.monotonic() < deadline
    with pytest.raises(openai.APIStatusError) as refused:
        server.client.completions.create(model=MODEL, prompt="Late", max_tokens=1)
    assert refused.value.status_code == 503
    assert int(refused.value.response.headers["retry-after"]) > 0
    assert ready.json()
    last = [chunk.choices[0].finish_reason for chunk in chunks][-1]
    assert last == "length"
    ending.join(timeout=60)
    assert code == [0]
