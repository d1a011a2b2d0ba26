"""Every object satisfies OpenAI's own types, and the OpenAPI document tells the truth."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from openai import types
from openai.types import chat as chat_types
from pydantic import BaseModel
from schemathesis.checks import not_a_server_error
from schemathesis.generation.modes import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from server.api.ollama.routes import CHANGES
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, COMPLETIONS, chat, completion, events_of

ENDLESS = "/v1/models/events"
"""A stream without an end."""
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
REQUIRED_BY_OPENAI = {
    "chat.completion": {"id", "choices", "created", "model", "object", "usage", "system_fingerprint", "service_tier"},
    "chat.completion.chunk": {"id", "choices", "created", "model", "object", "system_fingerprint", "service_tier"},
    "text_completion": {"id", "choices", "created", "model", "object", "system_fingerprint"},
}


def check(kind: type[BaseModel], body: dict[str, Any]) -> None:
    """Strictly: no value is bent into its type."""
    kind.model_validate_json(json.dumps(body), strict=True)
    assert REQUIRED_BY_OPENAI[body["object"]] <= set(body)


@pytest.mark.parametrize(
    "fields", [{}, {"logprobs": True, "top_logprobs": 2}, {"n": 2, "stop": "a"}, {"prompt_logprobs": 1}]
)
async def test_chat_completion(client: httpx.AsyncClient, fields: dict[str, Any]):
    body = (await client.post(CHAT, json=chat(**fields))).json()
    check(chat_types.ChatCompletion, body)
    for choice in body["choices"]:
        assert {"index", "message", "logprobs", "finish_reason"} <= set(choice)
        assert choice["message"] == {
            "role": "assistant", "content": choice["message"]["content"], "refusal": None, "annotations": [],
            "reasoning_content": None, "reasoning": None,
        }  # fmt: skip
        assert choice["token_ids"] is choice["stop_reason"] is None or "stop" in fields
        if choice["logprobs"] is not None:
            assert choice["logprobs"]["refusal"] is None
    assert body["prompt_token_ids"] is None
    assert (body["prompt_logprobs"] is None) == ("prompt_logprobs" not in fields)
    assert body["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 0, "cache_write_tokens": 0, "audio_tokens": 0, "image_tokens": 0,
        "text_tokens": body["usage"]["prompt_tokens"],
    }  # fmt: skip
    assert body["usage"]["completion_tokens_details"] == {
        "reasoning_tokens": 0, "audio_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0,
    }  # fmt: skip


@pytest.mark.parametrize("fields", [{}, {"logprobs": True}, {"stream_options": {"include_usage": True}}])
async def test_chat_chunks(client: httpx.AsyncClient, fields: dict[str, Any]):
    response = await client.post(CHAT, json=chat(stream=True, **fields))
    for chunk in events_of(response.text):
        check(chat_types.ChatCompletionChunk, chunk)
        assert ("usage" in chunk) == ("stream_options" in fields)
        for choice in chunk["choices"]:
            assert {"index", "delta", "logprobs", "finish_reason"} <= set(choice)


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2, "echo": True}, {"n": 2, "return_token_ids": True}])
async def test_completion(client: httpx.AsyncClient, fields: dict[str, Any]):
    body = (await client.post(COMPLETIONS, json=completion(**fields))).json()
    for choice in body["choices"]:
        assert {"index", "text", "logprobs", "finish_reason"} <= set(choice)
        if choice["logprobs"]:  # the type of the client does not know that the first token of an echo has null
            choice["logprobs"]["token_logprobs"][0] = 0.0
            choice["logprobs"]["top_logprobs"][0] = {}
    check(types.Completion, body)


async def test_models(client: httpx.AsyncClient):
    body = (await client.get("/v1/models/tiny")).json()
    types.Model.model_validate_json(json.dumps(body), strict=True)


async def test_document(client: httpx.AsyncClient):
    document = (await client.get("/openapi.json")).json()
    for path in (CHAT, COMPLETIONS):
        responses = document["paths"][path]["post"]["responses"]
        assert set(responses) == {"200", "400", "401", "404", "413", "415", "429", "500", "503", "504"}
        content = responses["200"]["content"]
        assert set(content) == {"application/json", "text/event-stream"}
        reference = content["text/event-stream"]["x-event-schema"]["$ref"].rpartition("/")[2]
        assert reference in document["components"]["schemas"]
    assert "HTTPValidationError" not in document["components"]["schemas"]
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert all("422" not in operation["responses"] for operation in operations)
    paths = {"/health", "/ready", "/metrics", "/version", "/v1/models", "/v1/capabilities", "/tokenize", "/detokenize"}
    assert paths <= set(document["paths"])


@pytest.mark.filterwarnings("ignore:Do not use the `random` module")  # other threads of the server may
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_nothing_undocumented_and_no_server_error(
    make_app: Callable[..., FastAPI], engine: FakeEngine, mode: GenerationMode
):
    """Random requests, by the document and against it."""
    schema = schemathesis.openapi.from_asgi("/openapi.json", make_app())
    operations = [result.ok() for result in schema.get_all_operations()]
    operations = [one for one in operations if one.path not in {*CHANGES, ENDLESS}]  # changes are always 501
    assert len(operations) > 10
    if mode is GenerationMode.NEGATIVE:
        operations = [operation for operation in operations if operation.body]  # the others leave nothing to violate
    statuses: set[int] = set()

    for operation in operations:

        @settings(max_examples=10, suppress_health_check=[*HealthCheck])
        @given(case=operation.as_strategy(generation_mode=mode))
        def run(case: schemathesis.Case) -> None:
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                case.body["model"] = "tiny"  # otherwise nothing would get past an unknown model
            response = case.call()
            statuses.add(response.status_code)
            case.validate_response(response, checks=CHECKS)

        run()
    assert 400 in statuses
    assert 200 in statuses or mode is GenerationMode.NEGATIVE
    assert engine.num_live == 0
