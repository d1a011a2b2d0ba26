"""Ollama's fields: what they mean in an engine request, what the answer reports, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from scheduler.interface import EngineRequest
from server.api.ollama.answer import OllamaChatAnswer, OllamaGenerateAnswer
from server.api.ollama.options import DEFAULTS
from tests.server import helpers
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import chat, client_of, requested, says
from tests.server.ollama.conftest import CHAT, GENERATE, chat_of, joined, lines_of, untimed
from tests.server.test_reasoning import COLOUR, ECHOING
from tests.server.test_tools import BOTH, written
from tests.server.tiny_model import write_folder

NATIVE = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "max_tokens": 5, "seed": 3}
"""Ollama's defaults as fields of a chat completion."""
FEW = {"num_predict": 5, "seed": 3}


def told(request: EngineRequest) -> tuple[Any, ...]:
    """The parts of an engine request that a body determines."""
    return request.prompt, request.sampling, request.max_tokens, request.choices, request.speculation


@pytest.mark.parametrize(
    ("fields", "native"),
    [
        ({}, {}),
        ({"options": {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0.1, "typical_p": 0.9}},
         {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0.1, "typical_p": 0.9}),
        ({"options": {"top_k": 3.0, "repeat_penalty": 1.2, "repeat_last_n": -1}},
         {"top_k": 3, "repetition_penalty": 1.2}),
        ({"options": {"repeat_penalty": 1.2, "presence_penalty": 1, "repeat_last_n": 0}}, {}),
        ({"options": {"mirostat": 2, "mirostat_tau": 3}},
         {"mirostat": 2, "mirostat_tau": 3, "top_k": None, "top_p": None}),
        ({"options": {"stop": ["x", "y"]}}, {"stop": ["x", "y"]}),
        ({"tools": BOTH}, {"tools": BOTH}),
        ({"format": "json"}, {"response_format": {"type": "json_object"}}),
        ({"format": ""}, {}),
        ({"format": COLOUR},
         {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": COLOUR}}}),
        ({"logprobs": True, "top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
    ],
)  # fmt: skip
async def test_a_chat_is_a_chat_completion(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], native: dict[str, Any]
):
    body = chat_of(**{**fields, "options": FEW | fields.get("options", {})})
    lines = lines_of(await client.post(CHAT, json=body))
    ours = told(engine.requests[-1])
    completion = (await client.post(helpers.CHAT, json=chat(**NATIVE | native))).json()
    assert ours == told(engine.requests[-1])
    made = joined(lines)
    assert made["message"]["content"] == completion["choices"][0]["message"]["content"]
    assert made["system_fingerprint"] == completion["system_fingerprint"]
    assert (made["seed"], made["eval_count"]) == (3, completion["usage"]["completion_tokens"])
    whole = (await client.post(CHAT, json={**body, "stream": False})).json()
    msgspec.convert(whole, OllamaChatAnswer)
    if "logprobs" not in fields:
        assert untimed(whole) == made


async def test_generate_is_a_chat_or_a_completion(client: httpx.AsyncClient, engine: FakeEngine):
    async def asked(**fields: Any) -> tuple[Any, ...]:
        answer = await client.post(GENERATE, json={"model": "tiny", "prompt": "hi", "stream": False, **fields})
        assert answer.status_code == 200, answer.text
        msgspec.convert(answer.json(), OllamaGenerateAnswer)
        return told(engine.requests[-1])

    messages = [{"role": "system", "content": "Be."}, {"role": "user", "content": "hi"}]
    native = told(await requested(client, engine, helpers.CHAT, chat(messages=messages, **NATIVE)))
    assert await asked(system="Be.", options=FEW) == native
    native = told(await requested(client, engine, helpers.COMPLETIONS, helpers.completion(**NATIVE)))
    assert await asked(raw=True, options=FEW) == native
    error = (await client.post(GENERATE, json={"model": "tiny", "prompt": "a", "suffix": "b"})).json()
    assert error["code"] == "unsupported_parameter"


async def test_the_models_defaults_go_before_those_of_ollama(
    make_app: Callable[..., FastAPI], engine: FakeEngine, tmp_path: Path
):
    folder = write_folder(tmp_path / "m", generation={"temperature": 0.5, "top_k": 7, "max_new_tokens": 9})
    async with client_of(make_app(folder)) as client:
        request = await requested(client, engine, CHAT, chat_of())
        assert (request.sampling.temperature, request.sampling.top_k, request.sampling.top_p) == (0.5, 7, 0.9)
        assert request.max_tokens == 9
        request = await requested(client, engine, CHAT, chat_of(options={"top_k": 3, "num_predict": 2}))
        assert (request.sampling.temperature, request.sampling.top_k, request.max_tokens) == (0.5, 3, 2)
        fields = (await client.get("/v1/capabilities")).json()["endpoints"][CHAT]
    assert fields["stream"]["default"] is fields["truncate"]["default"] is True
    assert fields["options"]["values"]["anyOf"][0]["properties"]["top_p"]["x-default"] == DEFAULTS["top_p"]


async def test_without_a_limit_the_context_is_the_limit(client: httpx.AsyncClient, engine: FakeEngine):
    engine.script = says("Ahoy.")
    for options in ({}, {"num_predict": -1}, {"num_predict": 0}, {"num_predict": -2}):
        request = await requested(client, engine, CHAT, chat_of(options=options))
        assert len(request.prompt) + request.max_tokens == 4096


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"keep_alive": "5m"}, "keep_alive"),
        ({"keep_alive": 1800}, "keep_alive"),
        ({"keep_alive": 0}, "keep_alive"),
        ({"shift": True}, "shift"),
        ({"options": {"num_ctx": 8192}}, "options.num_ctx"),
        ({"options": {"num_ctx": 100.0}}, "options.num_ctx"),
        ({"options": {"num_gpu": 1, "num_thread": 0, "use_mmap": True}}, "options.num_gpu"),
        ({"options": {"use_mmap": False}}, "options.use_mmap"),
        ({"options": {"num_keep": 4}}, "options.num_keep"),
        ({"options": {"repeat_penalty": 1.1}}, "options.repeat_last_n"),
        ({"options": {"mirostat": 2, "top_k": 5}}, "options.top_k"),
        ({"messages": [{"role": "user", "content": "hi", "colour": "red"}]}, "messages[0].colour"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "thinking": "c"},
                       {"role": "user", "content": "d"}]}, "messages[1].thinking"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b", "tool_name": "f"}]},
         "messages[1].tool_name"),
    ],
)  # fmt: skip
async def test_reported(client: httpx.AsyncClient, strict_client: httpx.AsyncClient, fields: dict[str, Any], path: str):
    options = {"num_predict": 2, **fields.get("options", {})}
    lines = lines_of(await client.post(CHAT, json=chat_of(**{**fields, "options": options})))
    assert [warning["path"] for warning in lines[0]["warnings"]] == [path]
    assert not any("warnings" in line for line in lines[1:])
    refused = await strict_client.post(CHAT, json=chat_of(**fields))
    assert (refused.status_code, refused.json()["param"]) == (400, path)


async def test_nothing_is_reported_without_reason(client: httpx.AsyncClient):
    fields = {"keep_alive": "-1.0s", "truncate": True, "shift": False, "think": False, "tools": [], "format": ""}
    body = chat_of(stream=False, options={"num_ctx": 4096.0, "num_predict": 1, "repeat_last_n": 64}, **fields)
    assert "warnings" not in (await client.post(CHAT, json=body)).json()


async def test_num_ctx_caps_prompt_and_output(client: httpx.AsyncClient, engine: FakeEngine):
    def turns(number: int) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"{place}" * 20} for place in range(number)]

    request = await requested(client, engine, CHAT, chat_of(messages=turns(1), options={"num_ctx": 100}))
    assert len(request.prompt) + request.max_tokens == 100
    answer = await client.post(CHAT, json=chat_of(messages=turns(5), options={"num_ctx": 100}, stream=False))
    paths = {warning["path"] for warning in answer.json()["warnings"]}
    assert paths == {"messages", "options.num_ctx"}
    shown = await client.post("/detokenize", json={"tokens": list(engine.requests[-1].prompt)})
    assert "4444" in shown.json()["prompt"]
    assert "0000" not in shown.json()["prompt"]
    for body in (chat_of(messages=turns(5), truncate=False), chat_of("x" * 100)):
        error = (await client.post(CHAT, json={**body, "options": {"num_ctx": 100}})).json()
        assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
        assert error["error"].endswith(
            "'options.num_ctx' caps this request at 100 tokens; the model itself takes 4096."
        )


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"model": None}, "model", "missing_required_parameter"),
        ({"model": "tiny:7b"}, "model", "model_not_found"),
        ({"colour": 1}, "colour", "unknown_parameter"),
        ({"keep_alive": "soon"}, "keep_alive", "invalid_value"),
        ({"keep_alive": "1" * 100_000}, "keep_alive", "invalid_value"),
        ({"keep_alive": "1" * 90}, "keep_alive", "invalid_value"),
        ({"keep_alive": "0s" * 100_000}, "keep_alive", "invalid_value"),
        ({"format": "xml"}, "format", "invalid_value"),
        ({"top_logprobs": 1}, "top_logprobs", "invalid_value"),
        ({"think": True}, "think", "unsupported_value"),
        ({"think": "high"}, "think", "unsupported_value"),
        ({"think": "hugely"}, "think", "invalid_value"),
        ({"options": {"top_k": 1.5}}, "options.top_k", "invalid_type"),
        ({"options": {"mirostat": 1}}, "options.mirostat", "unsupported_value"),
        ({"options": {"n_predict": 4, "num_predict": 5}}, "options.n_predict", "invalid_parameter_combination"),
        ({"options": {"seed": -2}}, "options.seed", "integer_below_min_value"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages[0].images[0]",
         "unsupported_parameter"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
         "messages[0].tool_calls[0].function.arguments", "invalid_type"),
        ({"tools": [*BOTH, BOTH[0]]}, "tools[2]", "invalid_value"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name", "invalid_value"),
    ],
)  # fmt: skip
async def test_refused(client: httpx.AsyncClient, fields: dict[str, Any], param: str, code: str):
    response = await client.post(CHAT, json=chat_of(**fields))
    error = response.json()
    assert response.status_code == (404 if code == "model_not_found" else 400)
    assert (error["param"], error["code"]) == (param, code), error
    assert set(error) == {"error", "param", "code"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"context": [1]}, "context"),
        ({"images": ["aGk="]}, "images[0]"),
        ({"images": ["aGk="], "raw": True}, "images"),
        ({"images": ["no base64"]}, "images[0]"),
        ({"width": 512}, "width"),
        ({"raw": True, "system": "x"}, "system"),
        ({"raw": True, "think": True}, "think"),
    ],
)
async def test_generate_refuses(client: httpx.AsyncClient, fields: dict[str, Any], param: str):
    response = await client.post(GENERATE, json={"model": "tiny", "prompt": "hi", **fields})
    assert (response.status_code, response.json()["param"]) == (400, param)


@pytest.mark.parametrize(
    ("think", "ends", "warned"),
    [
        (None, "assistant\n", []),
        (False, "</think>\n\n", []),
        (True, "assistant\n", []),
        ("low", "assistant\n", ["think"]),
    ],
)
async def test_thinking_is_switched(
    thinking: httpx.AsyncClient, engine: FakeEngine, think: object, ends: str, warned: list[str]
):
    answer = await thinking.post(CHAT, json=chat_of(think=think, stream=False, options={"num_predict": 1}))
    assert [warning["path"] for warning in answer.json().get("warnings", ())] == warned
    asked = {"tokens": list(engine.requests[-1].prompt)}
    assert (await thinking.post("/detokenize", json=asked)).json()["prompt"].endswith(ends)


async def test_calls_and_results_without_ids_are_matched(
    client_with: Callable[..., httpx.AsyncClient], engine: FakeEngine
):
    template = ECHOING.replace(
        "{{ message.content | trim }}",
        "{{ message.tool_call_id }}{% for call in message.tool_calls or [] %}{{ call.id }}{% endfor %}"
        "{{ message.name }}:{{ message.content | trim }}",
    )
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("a", "b")]
    results = [{"role": "tool", "tool_name": name, "content": name.upper()} for name in ("b", "a")]
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": calls}, *results]
    async with client_with(template) as client:
        request = await requested(client, engine, CHAT, chat_of(messages=history))
        text = (await client.post("/detokenize", json={"tokens": list(request.prompt)})).json()["prompt"]
    assert "call00001call00002" in text
    assert text.index("call00002b:B") < text.index("call00001a:A")


async def test_a_cut_call_has_its_complete_arguments(client: httpx.AsyncClient, engine: FakeEngine):
    text = written("weather", city="Rome", note="xxxxxxxx")
    engine.script = says(text)
    options = {"num_predict": len(text) - 24}
    made = joined(lines_of(await client.post(CHAT, json=chat_of(tools=BOTH, options=options))))
    assert made["message"]["tool_calls"] == [{"index": 0, "name": "weather", "arguments": {"city": "Rome"}}]
    assert made["done_reason"] == "length"


async def test_a_silent_stream_is_kept_alive_by_lines_that_clients_can_read(
    make_app: Callable[..., FastAPI], engine: FakeEngine
):
    engine.first_delay_s = 0.2
    async with client_of(make_app(keepalive_s=0.03)) as client:
        lines = lines_of(await client.post(CHAT, json=chat_of(options={"num_predict": 1})))
    assert lines[0]["message"] == {"role": "assistant", "content": ""}


async def test_vectors_are_those_of_the_other_api(client: httpx.AsyncClient, engine: FakeEngine):
    native = (await client.post("/v1/embeddings", json={"model": "tiny", "input": ["a", "bc"]})).json()
    normalizes = engine.requests[-1].sampling.pooling
    ours = (await client.post("/api/embed", json={"model": "tiny", "input": ["a", "bc"]})).json()
    assert ours["embeddings"] == [one["embedding"] for one in native["data"]]
    assert engine.requests[-1].sampling.pooling == normalizes
    await client.post("/api/embeddings", json={"model": "tiny", "prompt": "a"})
    assert engine.requests[-1].sampling.pooling != normalizes, "the older form does not make the length 1"


async def test_the_beginning_of_a_long_text_is_embedded(client: httpx.AsyncClient, engine: FakeEngine):
    asked = {"model": "tiny", "input": "abcdefgh", "options": {"num_ctx": 4, "top_k": 3}}
    answer = await client.post("/api/embed", json=asked)
    assert engine.requests[-1].prompt == tuple(b"abcd")
    assert [warning["path"] for warning in answer.json()["warnings"]] == ["options.top_k", "options.num_ctx"]
    refused = await client.post("/api/embed", json={**asked, "truncate": False})
    assert (refused.status_code, refused.json()["code"]) == (400, "context_length_exceeded")
