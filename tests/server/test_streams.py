"""Streams: what is sent, in which order, what stays back, and what happens when a client leaves or does not read."""

import contextlib
import json
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.engine.client import RequestFailedError
from tests.server.fake_engine import FakeEngine, scripted
from tests.server.helpers import CHAT, COMPLETIONS, chat, client_of, completion, events_of, serving
from tests.server.messages.reading import answered
from tests.server.responses import calling
from tests.server.tiny_model import BOS, END, EOS, SPACED
from tests.waiting import until

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TOKENS = st.lists(
    st.sampled_from([*"你好é😀 ab\n".encode(), 256, 257, 258, 261, 0xFF, BOS, END]) | st.integers(0, 319), max_size=24
)


async def events(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_of(response.text)


def joined_chat(chunks: list[dict[str, Any]], n: int) -> list[dict[str, Any]]:
    """The choices that the chunks of a stream add up to."""
    choices: list[dict[str, Any]] = [
        {"text": "", "logprobs": [], "ids": [], "finish": None, "stop": None} for _ in range(n)
    ]
    for chunk in chunks:
        for choice in chunk["choices"]:
            whole = choices[choice["index"]]
            assert whole["finish"] is None, "nothing may follow the end"
            whole["text"] += choice["delta"].get("content", "")
            whole["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
            whole["ids"] += choice.get("token_ids", [])
            whole["finish"] = choice["finish_reason"]
            whole["stop"] = choice.get("stop_reason")
    return choices


@settings(max_examples=70, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.lists(TOKENS, min_size=1, max_size=3),
    stops=st.lists(st.sampled_from(["你", "a", "ab", "b\n", "the", "é😀", "low", " "]), max_size=4),
    fields=st.fixed_dictionaries(
        {
            "max_tokens": st.integers(1, 24),
            "include_stop_str_in_output": st.booleans(),
            "skip_special_tokens": st.booleans(),
            "ignore_eos": st.booleans(),
            "min_tokens": st.sampled_from([0, 1]),
        }
    ),
    step=st.integers(1, 5),
)
async def test_streamed_equals_whole(make_app: Callable[..., FastAPI], engine: FakeEngine, tokens, stops, fields, step):
    engine.script, engine.tokens_per_step = scripted(*[choice or [65] for choice in tokens]), step
    body = chat(**fields, stop=stops, n=3, logprobs=True, top_logprobs=1, return_token_ids=True)
    async with client_of(make_app()) as client:
        whole = (await client.post(CHAT, json=body)).json()
        engine.aborted.clear()
        chunks = await events(client, CHAT, {**body, "stream_options": {"include_usage": True}})
    streamed = joined_chat(chunks, 3)
    for choice, other in zip(whole["choices"], streamed, strict=True):
        assert choice["message"]["content"] == other["text"]
        assert choice["logprobs"]["content"] == other["logprobs"]
        assert choice["token_ids"] == other["ids"]
        assert (choice["finish_reason"], choice.get("stop_reason")) == (other["finish"], other["stop"])
        assert [entry["token"] for entry in other["logprobs"]] == [
            entry["token"] for entry in choice["logprobs"]["content"]
        ]
    assert {**whole["usage"], "prompt_tokens_details": None} == {**chunks[-1]["usage"], "prompt_tokens_details": None}
    assert whole["usage"]["completion_tokens"] == sum(len(choice["ids"]) for choice in streamed)


async def test_the_text_is_that_of_the_tokens_up_to_the_stop_string(client: httpx.AsyncClient, engine: FakeEngine):
    """The independent truth for the property above: without stop strings, the tokenizer's own decoding."""
    engine.script = scripted([*"né 你好 😀!".encode()])
    body = completion(max_tokens=19, return_token_ids=True)
    choice = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]
    assert choice["text"] == bytes(choice["token_ids"]).decode()
    stopped = (await client.post(COMPLETIONS, json={**body, "stop": "好"})).json()
    assert stopped["choices"][0]["text"] == "né 你"
    assert stopped["usage"]["completion_tokens"] == len("né 你好".encode())
    shown = (await client.post(COMPLETIONS, json={**body, "stop": "好", "include_stop_str_in_output": True})).json()
    assert shown["choices"][0]["text"] == "né 你好"


async def test_no_chunk_ends_inside_a_character_or_a_stop_string(client: httpx.AsyncClient, engine: FakeEngine):
    engine.script = scripted([*"é你 STO STOP x".encode()])
    chunks = await events(client, CHAT, chat(max_tokens=40, stop="STOP"))
    texts = [choice["delta"].get("content") for chunk in chunks for choice in chunk["choices"]]
    assert texts == ["", "é", "你", " ", "STO ", None]


async def test_logprobs_come_with_their_text(client: httpx.AsyncClient, engine: FakeEngine):
    engine.script = scripted([*"é STO".encode()])
    chunks = await events(client, CHAT, chat(max_tokens=6, stop="STOP", logprobs=True))
    seen = [
        (choice["delta"]["content"], [entry["token"] for entry in choice["logprobs"]["content"]])
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["logprobs"]
    ]
    assert seen == [("é", ["bytes:\\xc3", "bytes:\\xa9"]), (" ", [" "]), ("STO", ["S", "T", "O"])]


@pytest.mark.parametrize("max_tokens", range(1, 9))
async def test_a_character_that_was_cut_short_is_left_out(client: httpx.AsyncClient, engine: FakeEngine, max_tokens):
    """So a shorter answer is the beginning of a longer one: in each API, streamed or whole, with stop strings."""
    engine.info_ = replace(engine.info_, max_model_len=1024)
    emoji = "a 😀é"
    engine.script = scripted([*emoji.encode()])
    expected = emoji.encode()[:max_tokens].decode(errors="ignore")
    said = []
    for fields in ({}, {"stop": [" STOP", "\ufffd"]}, {"tools": [TOOL]}, {"tools": [TOOL], "stop": ["\ufffd"]}):
        body = chat(max_tokens=max_tokens, **fields)
        said.append((await client.post(CHAT, json=body)).json()["choices"][0]["message"]["content"])
        said.append(joined_chat(await events(client, CHAT, {**body, "logprobs": True}), 1)[0]["text"])
    body = completion(max_tokens=max_tokens)
    said.append((await client.post(COMPLETIONS, json=body)).json()["choices"][0]["text"])
    said.append("".join(chunk["choices"][0]["text"] for chunk in await events(client, COMPLETIONS, body)))
    said.append((await answered(client, max_tokens=max_tokens))["content"][0]["text"])
    said.append(calling.text_of(await calling.both(client, max_output_tokens=max_tokens)))
    assert said == [expected] * len(said)


@pytest.mark.parametrize("fields", [{}, {"stop": ["STOP", " c"]}, {"tools": [TOOL]}])
async def test_every_piece_of_a_text_has_tokens(client: httpx.AsyncClient, engine: FakeEngine, fields):
    """Also a space that a token has together with the beginning of the next character."""
    engine.info_ = replace(engine.info_, max_model_len=1024)
    engine.script = scripted([65, SPACED, 0x9F, 0x98, 0x80, SPACED, *b"SSTO ca"])
    body = chat(max_tokens=12, logprobs=True, **fields)
    told = await events(client, CHAT, body)
    pieces = [
        (choice["delta"]["content"], [entry["token"] for entry in choice["logprobs"]["content"]])
        for chunk in told
        for choice in chunk["choices"]
        if choice["logprobs"]
    ]
    assert all(tokens for text, tokens in pieces)
    whole = (await client.post(CHAT, json=body)).json()["choices"][0]
    assert [token for _, tokens in pieces for token in tokens] == [
        entry["token"] for entry in whole["logprobs"]["content"]
    ]
    assert "".join(text for text, _ in pieces) == whole["message"]["content"]
    told = await calling.events(client, max_output_tokens=12, include=["message.output_text.logprobs"])
    assert all(event["logprobs"] for event in told if event["type"] == "response.output_text.delta")


async def test_min_tokens_defers_stop_strings(client: httpx.AsyncClient, engine: FakeEngine):
    engine.script = scripted(b"ab")
    answer = (await client.post(CHAT, json=chat(max_tokens=9, stop="b", min_tokens=4))).json()
    assert answer["choices"][0]["message"]["content"] == "ababa"
    assert engine.requests[-1].sampling.min_tokens == 4


async def test_special_tokens_and_the_end(client: httpx.AsyncClient, engine: FakeEngine):
    engine.script = scripted([ord("a"), BOS, ord("b"), EOS, ord("c")])

    async def text(**fields: Any) -> str:
        return (await client.post(COMPLETIONS, json=completion(**fields))).json()["choices"][0]["text"]

    assert await text() == "ab"
    assert await text(skip_special_tokens=False) == "a<|bos|>b"
    assert await text(skip_special_tokens=False, include_stop_str_in_output=True) == "a<|bos|>b<|eos|>"
    assert await text(ignore_eos=True) == "abc"
    assert await text(ignore_eos=True, stop_token_ids=[ord("b")]) == "a"
    assert await text(ignore_eos=True, stop_token_ids=[ord("b")], include_stop_str_in_output=True) == "ab"


async def test_chunks_in_detail(client: httpx.AsyncClient):
    chunks = await events(client, CHAT, chat(max_tokens=2))
    first, text, _, last = (chunk["choices"][0] for chunk in chunks)
    assert first == {
        "index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None,
    }  # fmt: skip
    assert set(text["delta"]) == {"content"}
    assert (last["delta"], last["finish_reason"], last["logprobs"]) == ({}, "length", None)
    assert all("usage" not in chunk for chunk in chunks)
    assert len({(chunk["id"], chunk["created"], chunk["system_fingerprint"], chunk["seed"]) for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


async def test_usage_with_every_chunk(client: httpx.AsyncClient):
    """The first chunk of a choice brings its role, or an echo, and no token yet."""
    options = {"continuous_usage_stats": True, "include_usage": True}
    chunks = await events(client, CHAT, chat(max_tokens=3, stream_options=options))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 3, 3, 3]
    chunks = await events(client, COMPLETIONS, completion(echo=True, max_tokens=2, stream_options=options))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 2]
    chunks = await events(client, COMPLETIONS, completion(stream_options={"continuous_usage_stats": True}))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (COMPLETIONS, completion())])
async def test_no_usage_is_sent_where_that_is_said(client: httpx.AsyncClient, path: str, body: dict[str, Any]):
    options = {"continuous_usage_stats": True, "include_usage": False}
    chunks = await events(client, path, {**body, "stream_options": options})
    assert not any("usage" in chunk for chunk in chunks)
    assert [notice["path"] for notice in chunks[0]["warnings"]] == ["stream_options.continuous_usage_stats"]


async def test_completion_echo_is_the_first_chunk(client: httpx.AsyncClient):
    chunks = await events(client, COMPLETIONS, completion(prompt=["the", "low"], echo=True, n=2, max_tokens=1))
    texts: dict[int, list[str]] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts.setdefault(choice["index"], []).append(choice["text"])
    assert [texts[index][0] for index in range(4)] == ["the", "the", "low", "low"]
    assert all(len(parts) == 2 for parts in texts.values())


async def test_line_ends_of_every_kind_stay_inside_the_data(client: httpx.AsyncClient, engine: FakeEngine):
    text = "a\nb\r\nc\u2028d\u2029e\x85f"
    engine.script = scripted([*text.encode()])
    response = await client.post(CHAT, json=chat(max_tokens=len(text.encode()), stream=True))
    lines = [line for line in response.text.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert joined_chat(events_of(response.text), 1)[0]["text"] == text


async def test_failure_in_the_middle(client: httpx.AsyncClient, engine: FakeEngine):
    engine.fail_after, engine.failure = 2, RequestFailedError("it failed")
    *chunks, last = await events(client, CHAT, chat())
    assert len(chunks) == 3
    assert set(last) == {"error"}
    assert last["error"]["type"] == "server_error"
    assert "it failed" in last["error"]["message"]


async def test_bug_in_the_middle_is_not_shown(client: httpx.AsyncClient, engine: FakeEngine, caplog):
    engine.fail_after, engine.failure = 2, ZeroDivisionError("secret")
    last = (await events(client, CHAT, chat()))[-1]
    assert "secret" not in json.dumps(last)
    assert "secret" in caplog.text


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
async def test_time_limit(make_app: Callable[..., FastAPI], engine: FakeEngine, stream: bool, path: str):
    engine.first_delay_s = 60
    body = {"stream": stream, **(chat() if path == CHAT else completion())}
    async with client_of(make_app(request_timeout_s=0.05)) as client:
        response = await client.post(path, json=body)
        assert response.status_code == 504
        assert response.headers["x-should-retry"] == "false"
        assert "time limit of 0.05 s" in response.json()["error"]["message"]
    assert engine.num_live == 0


async def test_comments_in_silence(make_app: Callable[..., FastAPI], engine: FakeEngine):
    engine.step_delay_s = 0.1
    async with client_of(make_app(keepalive_s=0.03)) as client:
        response = await client.post(CHAT, json=chat(max_tokens=2, stream=True))
    assert response.text.count(": keep-alive\n\n") >= 3
    assert len(events_of(response.text)) == 4
    engine.step_delay_s = 0.0
    async with client_of(make_app(keepalive_s=5)) as client:
        assert ": keep-alive" not in (await client.post(CHAT, json=chat(stream=True))).text


async def test_other_prompts_end_when_one_fails(client: httpx.AsyncClient, engine: FakeEngine):
    engine.fail_after, engine.failure, engine.step_delay_s = 3, RequestFailedError("x"), 0.01
    response = await client.post(COMPLETIONS, json=completion(prompt=["a", "b", "c"], max_tokens=200))
    assert response.status_code == 500
    await until(lambda: engine.num_live == 0)
    assert len(engine.closed_early) == 3


def connect(address: str, body: dict[str, Any], buffer: int | None = None) -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.settimeout(10)
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.connect((host, int(port)))
    raw = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    return connection


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_client_that_leaves_frees_the_engine(address: str, engine: FakeEngine, stream: bool, n: int):
    engine.step_delay_s = 0.01
    connection = connect(address, chat(max_tokens=200, stream=stream, n=n))
    if stream:
        assert b"200 OK" in connection.recv(1000)
    wait_until(lambda: engine.num_live == 1)
    connection.close()
    wait_until(lambda: engine.num_live == 0)
    assert engine.closed_early == [engine.requests[0].request_id]


def test_client_that_leaves_while_it_waits_for_the_first_token(address: str, engine: FakeEngine):
    engine.first_delay_s = 60
    connection = connect(address, chat(stream=True))
    wait_until(lambda: engine.num_live == 1)
    connection.close()
    wait_until(lambda: engine.num_live == 0)


def test_client_that_does_not_read(make_app: Callable[..., FastAPI], engine: FakeEngine):
    """It blocks nobody, its engine request ends, and in the end so does its connection."""
    engine.info_ = replace(engine.info_, max_model_len=100_000, num_blocks=10_000)
    engine.step_delay_s = 0.001
    with serving(make_app(), client_timeout_s=3.0) as address:
        body = chat(max_tokens=30_000, n=4, stream=True, logprobs=True, top_logprobs=20)
        deaf = connect(address, body, buffer=4096)
        wait_until(lambda: engine.num_live == 1)
        assert httpx.post(address + CHAT, json=chat()).status_code == 200
        wait_until(lambda: engine.num_live == 0)
        deaf.settimeout(10)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while data := deaf.recv(1 << 20):
                received += data
        deaf.close()
        assert b"200 OK" in received
        assert b"[DONE]" not in received
        assert httpx.post(address + CHAT, json=chat()).status_code == 200


def test_nothing_is_left_in_the_engine_after_a_crowd_of_which_some_leave(address: str, engine: FakeEngine):
    engine.step_delay_s = 0.002
    connections = [connect(address, chat(max_tokens=60, stream=True, n=1 + i % 3)) for i in range(20)]
    for connection in connections[::3]:
        connection.recv(200)
        connection.close()
    for i, connection in enumerate(connections):
        if i % 3:
            data = b""
            while b"[DONE]" not in data:
                data += connection.recv(1 << 16)
            connection.close()
    wait_until(lambda: engine.num_live == 0)
