"""Every kind of bad input gets its own error, in OpenAI's form, and the server goes on."""

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from server.engine.client import EngineState, EngineUnavailableError, QueueFullError, RequestFailedError
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, COMPLETIONS, chat, client_of, completion

JSON = {"content-type": "application/json"}


@pytest.fixture(autouse=True)
async def goes_on(client: httpx.AsyncClient, engine: FakeEngine) -> AsyncIterator[None]:
    """Whatever a test did, a good request is answered afterwards."""
    yield
    engine.state, engine.refuse = EngineState.READY, None
    assert (await client.post(CHAT, json=chat())).status_code == 200
    assert engine.num_live == 0


def error_of(response: httpx.Response, status: int = 400, kind: str = "invalid_request_error") -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == kind
    assert len(body["error"]["message"]) < 600
    return body["error"]


async def refused(client: httpx.AsyncClient, path: str, body: object, param: str | None, code: str | None) -> str:
    error = error_of(await client.post(path, json=body))
    assert (error["param"], error["code"]) == (param, code), error
    return error["message"]


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


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
async def test_media_type(client: httpx.AsyncClient, content_type: str | None):
    headers = {"content-type": content_type} if content_type else {}
    error_of(await client.post(CHAT, content=json.dumps(chat()), headers=headers), 415)


async def test_two_media_types(client: httpx.AsyncClient):
    headers = [("content-type", "application/json"), ("content-type", "text/plain")]
    error_of(await client.post(CHAT, content=json.dumps(chat()), headers=headers), 415)


@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_model(client: httpx.AsyncClient, stream: bool):
    error = error_of(await client.post(CHAT, json=chat(model="gpt-4", stream=stream)), 404)
    assert error["message"] == "The model `gpt-4` does not exist or you do not have access to it."
    assert (error["param"], error["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": "1"}, "temperature", "invalid_type"),
        ({"temperature": True}, "temperature", "invalid_type"),
        ({"temperature": 10**400}, "temperature", "decimal_above_max_value"),
        ({"max_tokens": 1.5}, "max_tokens", "invalid_type"),
        ({"max_tokens": 1.0}, "max_tokens", "invalid_type"),
        ({"max_tokens": "5"}, "max_tokens", "invalid_type"),
        ({"n": True}, "n", "invalid_type"),
        ({"stream": 1}, "stream", "invalid_type"),
        ({"stream": "true"}, "stream", "invalid_type"),
        ({"stop": 3}, "stop", "invalid_type"),
        ({"stop": ["a", None]}, "stop[1]", "invalid_type"),
        ({"logit_bias": [1]}, "logit_bias", "invalid_type"),
        ({"logit_bias": {"5": "1"}}, "logit_bias.5", "invalid_type"),
        ({"seed": 0.5}, "seed", "invalid_type"),
        ({"model": 3}, "model", "invalid_type"),
        ({"messages": "hi"}, "messages", "invalid_type"),
        ({"messages": [3]}, "messages[0]", "invalid_type"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "messages[0].content", "invalid_type"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text",
         "invalid_type"),
        ({"temperature": 200}, "temperature", "decimal_above_max_value"),
        ({"temperature": -0.1}, "temperature", "decimal_below_min_value"),
        ({"top_p": 1.1}, "top_p", "decimal_above_max_value"),
        ({"presence_penalty": -2.5}, "presence_penalty", "decimal_below_min_value"),
        ({"frequency_penalty": 3}, "frequency_penalty", "decimal_above_max_value"),
        ({"n": 10**9}, "n", "integer_above_max_value"),
        ({"n": 0}, "n", "integer_below_min_value"),
        ({"max_tokens": -1}, "max_tokens", "integer_below_min_value"),
        ({"seed": 2**63}, "seed", "integer_above_max_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "integer_above_max_value"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "decimal_above_max_value"),
        ({"logit_bias": {"320": 1}}, "logit_bias.320", "integer_above_max_value"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"07": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {str(i): 0 for i in range(2000)}}, "logit_bias", "object_above_max_properties"),
        ({"typical_p": 0}, "typical_p", "decimal_below_min_value"),
        ({"repetition_penalty": 0}, "repetition_penalty", "decimal_below_min_value"),
        ({"top_k": -2}, "top_k", "integer_below_min_value"),
        ({"min_tokens": 6}, "min_tokens", "integer_above_max_value"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "integer_below_min_value"),
        ({"stop": [str(i) for i in range(200)]}, "stop", "array_above_max_length"),
        ({"stop": ""}, "stop", "string_below_min_length"),
        ({"stop": ["a", ""]}, "stop[1]", "string_below_min_length"),
        ({"stop": "x" * 2000}, "stop", "string_above_max_length"),
        ({"cache_salt": ""}, "cache_salt", "string_below_min_length"),
        ({"cache_salt": "x" * 129}, "cache_salt", "string_above_max_length"),
        ({"bad_words": [""]}, "bad_words[0]", "string_below_min_length"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "empty_array"),
        ({"allowed_token_ids": [5, 320]}, "allowed_token_ids[1]", "integer_above_max_value"),
        ({"allowed_token_ids": [301], "min_tokens": 1}, "allowed_token_ids", "invalid_value"),
        ({"allowed_token_ids": [120], "bad_words": ["x"]}, "allowed_token_ids", "invalid_value"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "integer_below_min_value"),
        ({"stop_token_ids": [10**30]}, "stop_token_ids[0]", "integer_above_max_value"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "object_above_max_properties"),
        ({"metadata": {"k": "x" * 513}}, "metadata.k", "string_above_max_length"),
        ({"messages": []}, "messages", "empty_array"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "empty_array"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type",
         "invalid_value"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "missing_required_parameter"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "messages[0].tool_calls", "empty_array"),
        ({"messages": [{"role": "user", "content": "x", "nmae": "y"}]}, "messages[0].nmae", "unknown_parameter"),
        ({"temprature": 1}, "temprature", "unknown_parameter"),
        ({"stream": True, "stream_options": {"include_usge": True}}, "stream_options.include_usge",
         "unknown_parameter"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "unsupported_parameter"),
        ({"top_logprobs": 1}, "top_logprobs", "invalid_value"),
        ({"max_completion_tokens": 3}, "max_tokens", "invalid_parameter_combination"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message",
         "invalid_parameter_combination"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking",
         "unknown_parameter"),
        ({"priority": 1}, "priority", "unsupported_value"),
        ({"store": True}, "store", "unsupported_value"),
        ({"service_tier": "flex"}, "service_tier", "unsupported_value"),
        ({"prompt_cache_retention": "24h"}, "prompt_cache_retention", "unsupported_value"),
        ({"modalities": ["text", "audio"]}, "modalities", "unsupported_value"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation",
         "unsupported_value"),
    ],
)  # fmt: skip
async def test_fields_of_chat(client: httpx.AsyncClient, fields: dict[str, Any], param: str, code: str):
    message = await refused(client, CHAT, chat(**fields), param, code)
    assert param.partition(".")[0].partition("[")[0] in message or code == "invalid_value"


async def test_messages_say_what_is_expected(client: httpx.AsyncClient):
    message = await refused(client, CHAT, chat(temperature=200), "temperature", "decimal_above_max_value")
    assert message == (
        "Invalid 'temperature': decimal above maximum value. Expected a value <= 2, but got 200 instead."
    )
    message = await refused(client, CHAT, chat(temprature=1), "temprature", "unknown_parameter")
    assert message == "Unknown parameter: 'temprature'. Did you mean 'temperature'?"
    message = await refused(client, CHAT, chat(n="x"), "n", "invalid_type")
    assert message == "Invalid type for 'n': expected an integer, but got a string instead."


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("web_search_options", {}),
        ("prediction", {"type": "content", "content": "x"}),
        ("reasoning_effort", "low"),
        ("verbosity", "low"),
        ("moderation", {"model": "x"}),
        ("prompt_cache_options", {"mode": "implicit"}),
        ("use_beam_search", True),
        ("best_of", 2),
        ("length_penalty", 1.5),
        ("early_stopping", True),
        ("structured_outputs", {"regex": "a"}),
        ("logits_processors", ["x"]),
        ("chat_template", "{{ messages }}"),
        ("documents", [{"text": "x"}]),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(client: httpx.AsyncClient, name: str, value: object):
    message = await refused(client, CHAT, chat(**{name: value}), name, "unsupported_parameter")
    assert f"'{name}'" in message
    assert (await client.post(CHAT, json=chat(**{name: None}))).status_code == 200


async def test_what_asks_for_nothing_is_accepted(client: httpx.AsyncClient, engine: FakeEngine):
    neutral = {
        "tool_choice": "none", "function_call": "auto", "response_format": {"type": "text"}, "modalities": ["text"],
        "use_beam_search": False, "best_of": 1, "early_stopping": False, "parallel_tool_calls": True, "store": False,
        "user": "u", "safety_identifier": "s", "metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "k",
        "prompt_cache_retention": "in_memory", "stop": [], "priority": 0,
    }  # fmt: skip
    for body in (chat(seed=1), chat(seed=1, **neutral)):
        assert (await client.post(CHAT, json=body)).status_code == 200
    assert engine.requests[0].sampling == engine.requests[1].sampling
    assert engine.requests[0].prompt == engine.requests[1].prompt


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": []}, "prompt", "empty_array"),
        ({"prompt": [[]]}, "prompt[0]", "empty_array"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": None}, "prompt", "invalid_type"),
        ({"prompt": [1, "a"]}, "prompt[1]", "invalid_type"),
        ({"prompt": [[1], [1, 320]]}, "prompt[1][1]", "integer_above_max_value"),
        ({"prompt": [1, 2, 99999]}, "prompt[2]", "integer_above_max_value"),
        ({"prompt": [-1]}, "prompt[0]", "integer_below_min_value"),
        ({"prompt": ["a"] * 1025}, "prompt", "array_above_max_length"),
        ({"prompt": ["a"] * 1000, "n": 2}, "n", "integer_above_max_value"),
        ({"logprobs": 6}, "logprobs", "integer_above_max_value"),
        ({"logprobs": True}, "logprobs", "invalid_type"),
        ({"suffix": "x"}, "suffix", "unsupported_parameter"),
        ({"max_completion_tokens": 1}, "max_completion_tokens", "unknown_parameter"),
    ],
)
async def test_fields_of_completions(client: httpx.AsyncClient, fields: dict[str, Any], param: str, code: str):
    await refused(client, COMPLETIONS, completion(**fields), param, code)


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


async def test_output_too_long(client: httpx.AsyncClient):
    message = await refused(client, COMPLETIONS, completion(max_tokens=255), "prompt", "context_length_exceeded")
    assert "256 tokens" in message
    assert "257 tokens (2 in the prompt, 255 in the completion)" in message
    assert (await client.post(COMPLETIONS, json=completion(max_tokens=254))).status_code == 200


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


async def test_parts_of_messages_that_the_template_does_not_show(client: httpx.AsyncClient):
    messages = [{"role": "user", "content": "x", "name": "Ann"}]
    await refused(client, CHAT, chat(messages=messages), "messages[0].name", "unsupported_parameter")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "tool", "content": "y", "tool_call_id": "1"},
    ]
    assert (await client.post(CHAT, json=chat(messages=history))).status_code == 200


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
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/models", "/tokenize", "/v1/capabilities", "/tokenizer_info"])
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
        ("POST", "/v1/embeddings", 404),
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


async def test_kv_cache_smaller_than_the_context(client: httpx.AsyncClient, engine: FakeEngine):
    engine.info_ = replace(engine.info_, num_blocks=4)
    message = await refused(client, COMPLETIONS, completion(max_tokens=63), "prompt", "context_length_exceeded")
    assert "holds 64 tokens" in message
    await client.post(CHAT, json=chat(max_tokens=None))
    assert engine.requests[-1].max_tokens == 64 - len(engine.requests[-1].prompt)
