"""Requests of clients made for other servers, as they were recorded: each is answered, as it is meant."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.model_runner.hub.weights import gguf_bytes
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, COMPLETIONS, chat, client_of, completion, refused, says
from tests.server.test_embeddings import folder_with
from tests.server.test_scores import OF_TOKENS
from tests.server.tiny_model import byte_level_tokenizer, write_folder

GENERATE = "/api/generate"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
WEATHER = {
    "name": "get_weather",
    "description": "The weather.",
    "parameters": SCHEMA,
    "return": {"type": "string", "description": "A sentence."},
}
OPEN_WEBUI = {
    "mirostat_eta": 0.1, "mirostat_tau": 5.0, "top_k": 40, "tfs_z": 1.2, "repeat_last_n": 64, "repeat_penalty": 1.1,
    "use_mmap": True, "use_mlock": True, "num_ctx": 8192, "num_batch": 512, "num_thread": 4, "num_gpu": 20,
    "num_keep": 24, "keep_alive": "5m",
}  # fmt: skip
"""Its advanced parameters, which it sends to every server as they are."""


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine.roomy()


async def answered(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    made: dict[str, Any] = response.json()
    return made


async def grammar_of(client: httpx.AsyncClient, engine: FakeEngine, form: dict[str, Any]) -> str | None:
    await answered(client, CHAT, chat(response_format=form))
    return engine.requests[-1].sampling.grammar


async def test_open_webui(client: httpx.AsyncClient, engine: FakeEngine):
    made = await answered(client, CHAT, chat(mirostat=0, **{**OPEN_WEBUI, "mirostat_eta": 0.1}))
    asked = engine.requests[-1].sampling
    assert (asked.repetition_penalty, asked.top_k) == (1.1, 40)
    reported = {warning["path"] for warning in made["warnings"]}
    honoured = {"mirostat_eta", "mirostat_tau", "top_k", "repeat_penalty", "use_mmap"}
    assert reported == OPEN_WEBUI.keys() - honoured


async def test_the_grammars_of_hugging_face(client: httpx.AsyncClient, engine: FakeEngine):
    schema = await grammar_of(client, engine, {"type": "json_object", "schema": SCHEMA})
    for form in ({"type": "json_object", "value": SCHEMA}, {"type": "json", "value": json.dumps(SCHEMA)}):
        assert await grammar_of(client, engine, form) == schema
    await answered(client, CHAT, chat(guided_regex="[ab]+"))
    assert await grammar_of(client, engine, {"type": "regex", "value": "[ab]+"}) == engine.requests[-2].sampling.grammar
    both = {"type": "json_object", "value": SCHEMA, "schema": {"type": "array"}}
    await refused(client, CHAT, chat(response_format=both), "response_format.value", "invalid_parameter_combination")
    broken = {"type": "json", "value": "{"}
    await refused(client, CHAT, chat(response_format=broken), "response_format.value", "invalid_value")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(tools=[{"type": "function", "function": WEATHER, "cache_control": {"type": "ephemeral"}}])),
        (
            "/v1/responses",
            {"model": "tiny", "input": "hi", "tools": [{"type": "function", **WEATHER, "cache_control": {"a": 1}}]},
        ),
        ("/api/chat", {**chat(max_tokens=None, stream=False), "tools": [{"type": "function", "function": WEATHER}]}),
    ],
)
async def test_tools_as_transformers_makes_them(client: httpx.AsyncClient, engine: FakeEngine, path: str, body: Any):
    engine.script = says("Ahoy.")
    made = await answered(client, path, body)
    assert "warnings" not in made, "the schema of results is for the client"
    assert "get_weather" in byte_level_tokenizer().decode(engine.requests[-1].prompt, skip_special_tokens=False)


ALTERNATIVES: list[tuple[str, Callable[[int], dict[str, Any]], str]] = [
    (COMPLETIONS, lambda num: completion(logprobs=num), "logprobs"),
    (COMPLETIONS, lambda num: completion(prompt_logprobs=num), "prompt_logprobs"),
    (COMPLETIONS, lambda num: completion(n_probs=num), "n_probs"),
    (CHAT, lambda num: chat(logprobs=True, top_logprobs=num), "top_logprobs"),
    (CHAT, lambda num: chat(n_probs=num), "n_probs"),
    ("/v1/responses", lambda num: {"model": "tiny", "input": "hi", "top_logprobs": num}, "top_logprobs"),
    ("/completion", lambda num: {"prompt": "hi", "n_predict": 2, "n_probs": num}, "n_probs"),
    (
        "/api/chat",
        lambda num: chat(max_tokens=None, stream=False, logprobs=True, top_logprobs=num),
        "top_logprobs",
    ),
]


async def test_alternatives_of_a_token_are_bounded_by_a_setting(make_app: Callable[..., FastAPI], engine: FakeEngine):
    for most, settings in ((20, {}), (40, {"max_logprobs": 40})):
        async with client_of(make_app(**settings)) as client:
            for path, body, name in ALTERNATIVES:
                await answered(client, path, body(most))
                asked = engine.requests[-1].sampling
                assert most in (asked.logprobs, asked.prompt_logprobs)
                response = await client.post(path, json=body(most + 1))
                assert response.status_code == 400
                assert f"'{name}': integer above maximum value. Expected a value <= {most}, " in response.text
                assert "--max-logprobs" in response.text
            if settings:
                fields = (await client.get("/v1/capabilities")).json()["endpoints"]
                described = fields[CHAT]["top_logprobs"]["values"]["anyOf"]
                assert {"type": "integer", "minimum": 0, "maximum": most} in described


async def test_any_model_name(make_app: Callable[..., FastAPI], engine: FakeEngine):
    engine.script = says("Ahoy.")
    async with client_of(make_app(any_model_name=True)) as client:
        for path, body in (
            (CHAT, chat(model="dummy")),
            ("/v1/responses", {"model": "dummy", "input": "hi"}),
            ("/v1/messages", chat(model="dummy")),
            ("/api/chat", chat(model="dummy", max_tokens=None, stream=False)),
            ("/v1/embeddings", {"model": "dummy", "input": "hi"}),
        ):
            made = await answered(client, path, body)
            assert [warning["path"] for warning in made["warnings"]] == ["model"]
            assert made["model"] == ("dummy" if path == "/api/chat" else "tiny")
        assert "warnings" not in await answered(client, CHAT, chat())
    async with client_of(make_app()) as client:
        assert (await client.post(CHAT, json=chat(model="dummy"))).status_code == 404


async def test_clients_of_text_embeddings_inference(client: httpx.AsyncClient, engine: FakeEngine):
    """LlamaIndex's, Haystack's and Hugging Face's."""
    engine.info_ = replace(engine.info_, max_model_len=64)
    for fields, normalizes in (({"truncate": True}, True), ({"normalize": False}, False)):
        response = await client.post("/embed", json={"inputs": ["abc", "d"], **fields})
        asked = [one.sampling.pooling for one in engine.requests[-2:]]
        same = {"model": "tiny", "input": ["abc", "d"], "use_activation": normalizes}
        listed = await answered(client, "/v1/embeddings", same)
        assert response.json() == [one["embedding"] for one in listed["data"]]
        assert asked == [one.sampling.pooling for one in engine.requests[-2:]]
        assert "x-samewise-ignored" not in response.headers
    assert len((await client.post("/embed", json={"inputs": "abc"})).json()) == 1
    long = {"inputs": ["a", "x" * 100]}
    await refused(client, "/embed", long, "inputs[1]", "context_length_exceeded")
    assert (await client.post("/embed", json={**long, "truncate": True})).status_code == 200


async def test_documents_of_cohere(make_app: Callable[..., FastAPI], engine: FakeEngine, tmp_path: Path):
    async with client_of(make_app(folder_with(tmp_path / "m", OF_TOKENS))) as client:
        body = {"model": "tiny", "query": "q", "documents": [{"text": "b", "title": "c"}], "rank_fields": ["text"]}
        made = await answered(client, "/v1/rerank", body)
        assert made["results"][0]["document"] == {"text": "b"}
        assert [warning["path"] for warning in made["warnings"]] == ["documents[0].title"]


async def test_ollama_with_a_base_model(make_app: Callable[..., FastAPI], engine: FakeEngine, tmp_path: Path):
    """As in Ollama, the prompt is all that the model gets; its file says how it is quantised."""
    folder = write_folder(tmp_path / "m", template=None)
    (folder / "model.gguf").write_bytes(gguf_bytes("llama", **{"general.file_type": 15}))
    engine.script = says("Ahoy.")
    async with client_of(make_app(folder)) as client:
        body = {"model": "tiny", "prompt": "Once", "stream": False, "options": {"seed": 1}}
        assert "warnings" not in await answered(client, GENERATE, body)
        assert list(engine.requests[-1].prompt) == [*b"Once"]
        made = await answered(client, GENERATE, {**body, "system": "Be brief."})
        assert [warning["path"] for warning in made["warnings"]] == ["system"]
        assert list(engine.requests[-1].prompt) == [*b"Once"]
        (model,) = (await client.get("/api/tags")).json()["models"]
        assert (model["details"]["quantization_level"], model["details"]["family"]) == ("Q4_K_M", "llama")
