"""Every kind of bad input gets its own error, in OpenAI's form, and the server goes on."""

import gzip
import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from transformers.utils.chat_template_utils import render_jinja_template

from server.engine.client import EngineState, EngineUnavailableError, QueueFullError, RequestFailedError
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, COMPLETIONS, chat, client_of, completion, error_of, refused
from tests.server.tiny_model import TEMPLATE, byte_level_tokenizer

JSON = {"content-type": "application/json"}


pytestmark = pytest.mark.usefixtures("goes_on")


async def sent(client: httpx.AsyncClient, raw: bytes, **headers: str) -> httpx.Response:
    return await client.post(CHAT, content=raw, headers={**JSON, **headers})


@pytest.mark.parametrize(
    "raw",
    [
        b"{",
        b"",
        b"   ",
        b"{'a': 1}",
        b'{"a": 1,}',
        b"[1, 2",
        b'{"model": "tiny"} x',
        b"\xff\xfe{}",
        b'{"a": "\xed\xa0\x80"}',
    ],
)
async def test_malformed_json(client: httpx.AsyncClient, raw: bytes):
    error = error_of(await sent(client, raw))
    assert error["param"] is None
    assert error["code"] is None or not raw.strip()


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_numbers_that_json_does_not_have(client: httpx.AsyncClient, literal: str):
    raw = json.dumps(chat(temperature=0)).replace('"temperature": 0', f'"temperature": {literal}')
    assert literal in raw
    error = error_of(await sent(client, raw.encode()))
    assert error["code"] is None


async def test_a_number_of_many_digits_is_too_large(client: httpx.AsyncClient):
    raw = json.dumps(chat(seed=7)).replace('"seed": 7', f'"seed": {"7" * 5_000}')
    error = error_of(await sent(client, raw.encode()))
    assert error["message"] == "We could not parse the JSON body of your request: a number is too large."


_PART = [{"role": "user", "content": [{"type": "audio"}]}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(messages=_PART)),
        ("/v1/messages", chat(messages=_PART, max_tokens=1)),
        ("/v1/responses", {"input": [{"type": "audio"}]}),
        ("/v1/responses", {"input": "x", "tools": [{"type": "audio"}]}),
        ("/v1/responses", {"input": "x", "tool_choice": {"type": "audio"}}),
    ],
)
async def test_listed_types_can_be_sent(client: httpx.AsyncClient, path: str, body: dict[str, Any]):
    """The error for an unknown type lists types that the server knows, not names for groups of them."""
    message = (await client.post(path, json=body)).json()["error"]["message"]
    assert "Invalid value: 'audio'. Supported values are: " in message
    for known in re.findall(r"'([^']+)'", message.partition("Supported")[2]):
        answer = await client.post(path, content=json.dumps(body).replace('"audio"', json.dumps(known)), headers=JSON)
        assert "Supported values are" not in answer.text, known


async def test_key_given_twice(client: httpx.AsyncClient):
    raw = json.dumps(chat(temperature=0))[:-1] + ', "temperature": 2}'
    assert "twice" in error_of(await sent(client, raw.encode()))["message"]


@pytest.mark.parametrize("depth", [100, 5_000, 200_000])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
async def test_deeply_nested(client: httpx.AsyncClient, depth: int, opening: str):
    closing = "]" if opening == "[" else "}"
    raw = '{"model": "tiny", "messages": ' + opening * depth + "1" + closing * depth + "}"
    error = error_of(await sent(client, raw.encode()))
    assert "nested deeper" in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (chat(messages=[{"role": "user", "content": "a\ud800b"}]), "messages[0].content"),
        (completion(prompt=["a", "\udc00"]), "prompt[1]"),
        (completion(stop="\udfff"), "stop"),
        (chat(metadata={"a": "\ud800"}), "metadata.a"),
        (chat(chat_template_kwargs={"tone": ["x", "\ud800"]}), "chat_template_kwargs.tone[1]"),
    ],
)
async def test_lone_surrogate(client: httpx.AsyncClient, body: dict[str, Any], param: str):
    response = await client.post(CHAT if "messages" in body else COMPLETIONS, content=json.dumps(body), headers=JSON)
    error = error_of(response)
    assert (error["param"], error["code"]) == (param, "invalid_value")


async def test_surrogate_pairs_are_characters(client: httpx.AsyncClient):
    body = json.dumps(chat(messages=[{"role": "user", "content": "😀"}]))
    assert "\\ud83d" in body
    assert (await sent(client, body.encode())).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
async def test_ten_megabytes(client: httpx.AsyncClient, chunked: bool):
    raw = json.dumps(completion(prompt="word " * 2_000_000)).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(raw), 1 << 16):
            yield raw[start : start + (1 << 16)]

    response = await client.post(COMPLETIONS, content=pieces() if chunked else raw, headers=JSON)
    assert ("content-length" in response.request.headers) != chunked
    error_of(response, 413)


async def test_text_far_beyond_the_context_is_not_even_encoded(client: httpx.AsyncClient):
    message = await refused(
        client, COMPLETIONS, completion(prompt="x" * 7_000_000), "prompt", "context_length_exceeded"
    )
    assert "256 tokens" in message
    assert "at least" in message


FORM = {"content-type": "application/x-www-form-urlencoded"}
"""As `curl -d` sends without an option for the header."""


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"content-type": "text/plain"}, chat()),
        (FORM, "model=tiny"),
        ({}, "[1]"),
        *((FORM | {name: "https://x.example"}, chat()) for name in ("origin", "referer", "sec-fetch-site")),
        ({"origin": "http://localhost:5173"}, chat()),
    ],
)
async def test_media_type(client: httpx.AsyncClient, headers: dict[str, str], body: object):
    """Only other programs than browsers may leave it out: any page may send a form or an untyped body."""
    content = body if isinstance(body, str) else json.dumps(body)
    error_of(await client.post(CHAT, content=content, headers=headers), 415)


async def test_an_object_without_a_media_type_is_json(client: httpx.AsyncClient):
    for headers in ({}, FORM):
        answer = await client.post(CHAT, content=f" \n{json.dumps(chat())}", headers=headers)
        assert answer.status_code == 200, answer.text


async def test_two_media_types(client: httpx.AsyncClient):
    headers = [("content-type", "application/json"), ("content-type", "text/plain")]
    error_of(await client.post(CHAT, content=json.dumps(chat()), headers=headers), 415)


async def test_a_compressed_body_is_refused(client: httpx.AsyncClient):
    for content in (gzip.compress(json.dumps(chat()).encode()), json.dumps(chat()).encode()):
        error = error_of(await sent(client, content, **{"content-encoding": "gzip"}), 415)
        assert "'Content-Encoding: gzip'" in error["message"]
    assert (await sent(client, json.dumps(chat()).encode(), **{"content-encoding": "identity"})).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_model(client: httpx.AsyncClient, stream: bool):
    error = error_of(await client.post(CHAT, json=chat(model="gpt-4", stream=stream)), 404)
    assert error["message"] == "The model `gpt-4` does not exist or you do not have access to it."
    assert (error["param"], error["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize("body", [[], "x", 3, None, True])
async def test_body_that_is_no_object(client: httpx.AsyncClient, body: object):
    error = error_of(await sent(client, json.dumps(body).encode()))
    assert error["param"] is None


async def test_missing_fields(client: httpx.AsyncClient):
    message = await refused(client, CHAT, {"model": "tiny"}, "messages", "missing_required_parameter")
    assert message == "Missing required parameter: 'messages'."


async def test_millions_of_errors_cost_no_more_than_one(client: httpx.AsyncClient):
    await refused(client, COMPLETIONS, completion(prompt=[1] + [[]] * 1_000_000), "prompt[1]", "invalid_type")


async def test_prompt_too_long(client: httpx.AsyncClient):
    message = await refused(client, CHAT, chat(messages=[{"role": "user", "content": "ab " * 150}]), "messages",
                            "context_length_exceeded")  # fmt: skip
    assert "maximum context length is 256 tokens" in message
    assert "resulted in 4" in message
    assert message.endswith(
        "reduce the length of the messages, or start the server with a model that has a longer context."
    )


async def test_what_to_do_about_a_prompt_too_long(make_app: Callable[..., FastAPI], engine: FakeEngine):
    body = chat(messages=[{"role": "user", "content": "ab " * 150}])
    async with client_of(make_app(max_model_len=256)) as client:
        assert "a larger --max-model-len or" in error_of(await client.post(CHAT, json=body))["message"]
        engine.info_ = replace(engine.info_, num_blocks=8)
        assert "a larger --kv-cache-gib." in error_of(await client.post(CHAT, json=body))["message"]


async def test_output_too_long(client: httpx.AsyncClient, strict_client: httpx.AsyncClient):
    assert (await client.post(COMPLETIONS, json=completion(max_tokens=254))).status_code == 200
    message = await refused(strict_client, COMPLETIONS, completion(max_tokens=255), "prompt", "context_length_exceeded")
    assert "256 tokens" in message
    assert "257 tokens (2 in the prompt, 255 in the completion)" in message


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "assistant", "content": "I begin"}],
        [
            {"role": "developer", "content": "x"},
            {"role": "assistant", "content": "fine"},
            {"role": "user", "content": "x"},
        ],
    ],
)
async def test_messages_that_the_template_does_not_take(client: httpx.AsyncClient, messages: list[dict[str, str]]):
    response = await client.post(CHAT, json=chat(messages=messages))
    if messages[0]["role"] == "assistant":
        error = error_of(response)
        assert error["param"] == "messages"
        assert "may not begin with the assistant" in error["message"]
    else:
        assert response.status_code == 200


async def test_parts_of_messages_that_the_template_does_not_show(
    client: httpx.AsyncClient, strict_client: httpx.AsyncClient
):
    messages = [{"role": "user", "content": "x", "name": "Ann"}]
    await refused(strict_client, CHAT, chat(messages=messages), "messages[0].name", "unsupported_parameter")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "tool", "content": "y", "tool_call_id": "1"},
    ]
    assert (await client.post(CHAT, json=chat(messages=history))).status_code == 200


async def test_tool_calls_are_shown_as_in_transformers(client: httpx.AsyncClient, engine: FakeEngine):
    """There, and in the models' templates, arguments are an object that the template writes as JSON."""
    engine.info_ = replace(engine.info_, max_model_len=512)
    arguments = {"city": 'Zürich "Altstadt"', "days": [1, 2.5], "deep": {"a": None}}
    calls = [
        {"id": "1", "type": "function", "function": {"name": "weather", "arguments": value}}
        for value in (json.dumps(arguments), "", " {} ")
    ]
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "tool_calls": calls}]
    assert (await client.post(CHAT, json=chat(messages=messages))).status_code == 200
    for call, value in zip(calls, (arguments, {}, {}), strict=True):
        call["function"]["arguments"] = value
    (expected,), _ = render_jinja_template([messages], chat_template=TEMPLATE, add_generation_prompt=True)
    shown = byte_level_tokenizer().decode(engine.requests[-1].prompt, skip_special_tokens=False)
    assert shown == expected
    assert json.dumps(arguments, ensure_ascii=False) in shown


@pytest.mark.parametrize(
    "arguments",
    ["x", "{", "[1]", '"{}"', "null", "{} {}", '{"a": NaN}', '{"a": 1, "a": 2}', '{"a": "\\ud800"}', "[" * 9999],
)
async def test_tool_calls_whose_arguments_are_no_object(client: httpx.AsyncClient, engine: FakeEngine, arguments: str):
    """A model that was cut off wrote them, and the history is sent again: the template is given the text itself."""
    engine.info_ = replace(engine.info_, max_model_len=40_000, num_blocks=3000)
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": value}} for value in ("{}", arguments)
    ]
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": calls}]
    assert (await client.post(CHAT, json=chat(messages=messages))).status_code == 200
    shown = byte_level_tokenizer().decode(engine.requests[-1].prompt, skip_special_tokens=False)
    assert json.dumps(arguments, ensure_ascii=False) in shown
    calls[1]["function"]["arguments"] = {}
    path = "messages[1].tool_calls[1].function.arguments"
    await refused(client, CHAT, chat(messages=messages), path, "invalid_type")


async def test_continue_without_content(client: httpx.AsyncClient):
    messages = [{"role": "user", "content": ""}]
    body = chat(messages=messages, continue_final_message=True)
    await refused(client, CHAT, body, "continue_final_message", "invalid_value")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status", "kind", "retry"),
    [
        (QueueFullError(), 429, "rate_limit_exceeded", "true"),
        (EngineUnavailableError("draining"), 503, "server_error", "true"),
        (RequestFailedError("it killed the engine twice"), 500, "server_error", "false"),
        (ZeroDivisionError("a bug"), 500, "server_error", "false"),
    ],
)
async def test_errors_before_the_first_token_have_a_status(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool, failure: Exception, status: int, kind: str, retry: str
):
    engine.refuse = failure
    response = await client.post(CHAT, json=chat(stream=stream))
    error = error_of(response, status, kind)
    assert response.headers["x-should-retry"] == retry
    assert ("retry-after" in response.headers) == ("retry-after-ms" in response.headers) == (retry == "true")
    if isinstance(failure, ZeroDivisionError):
        assert response.headers["x-request-id"] in error["message"]
        assert "a bug" not in error["message"]


@pytest.mark.parametrize("state", [EngineState.STARTING, EngineState.DRAINING, EngineState.FAILED])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/v1/capabilities", "/tokenizer_info"])
async def test_engine_that_takes_no_work(client: httpx.AsyncClient, engine: FakeEngine, state: EngineState, path: str):
    engine.state = state
    bodies = {CHAT: chat(), COMPLETIONS: completion(), "/tokenize": {"prompt": "x"}}
    response = await (client.post(path, json=bodies[path]) if path in bodies else client.get(path))
    error_of(response, 503, "server_error")
    assert response.headers["x-should-retry"] == "true"
    assert float(response.headers["retry-after"]) > 0
    assert (await client.get("/health")).status_code == 200
    error_of(await client.get("/ready"), 503, "server_error")


async def test_restarting_engine_still_takes_requests(client: httpx.AsyncClient, engine: FakeEngine):
    engine.state = EngineState.RESTARTING
    assert (await client.post(CHAT, json=chat())).status_code == 200
    assert (await client.get("/ready")).status_code == 503


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/v1/images/generations", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/models/tiny", 405),
        ("GET", "/v1/models/other", 404),
    ],
)
async def test_the_frameworks_own_errors(client: httpx.AsyncClient, method: str, path: str, status: int):
    response = await client.request(method, path)
    error_of(response, status)
    assert ("allow" in response.headers) == (status == 405)


async def test_request_ids(client: httpx.AsyncClient):
    assert (await client.get("/health", headers={"x-request-id": "abc-1.2_3"})).headers["x-request-id"] == "abc-1.2_3"
    for bad in ("a b", "x" * 129, "ü".encode(), ""):
        response = await client.get("/health", headers={"x-request-id": bad})
        assert response.headers["x-request-id"].startswith("req_")


async def test_priority_policy(make_app: Callable[..., FastAPI], engine: FakeEngine):
    async with client_of(make_app(policy="priority")) as client:
        assert (await client.post(CHAT, json=chat(priority=-3))).status_code == 200
    assert engine.requests[-1].priority == -3


async def test_kv_cache_smaller_than_the_context(
    client: httpx.AsyncClient, strict_client: httpx.AsyncClient, engine: FakeEngine
):
    engine.info_ = replace(engine.info_, num_blocks=4)
    message = await refused(strict_client, COMPLETIONS, completion(max_tokens=63), "prompt", "context_length_exceeded")
    assert "holds 64 tokens" in message
    await client.post(CHAT, json=chat(max_tokens=None))
    assert engine.requests[-1].max_tokens == 32 < 64 - len(engine.requests[-1].prompt)
