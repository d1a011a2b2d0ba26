"""Endpoints by which llama.cpp's clients inspect a server: /apply-template, /props and /slots."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
from tokenizers import processors

from scheduler.interface import EngineStats
from server import __version__
from server.api.llama_cpp.routes import AppliedTemplate, LlamaProps, LlamaSlot
from server.api.llama_cpp.schema import DEFAULTS
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, chat, client_of
from tests.server.tenants.keys import bearer
from tests.server.tiny_model import BOS, TEMPLATE

TEMPLATES = [
    {},
    {"add_generation_prompt": False},
    {"chat_template_kwargs": {"tone": "dry"}},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
     "continue_final_message": True},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]},
]  # fmt: skip


@pytest.mark.parametrize("fields", TEMPLATES)
async def test_the_prompt_is_that_of_a_chat(client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any]):
    messages = {"messages": [{"role": "user", "content": "hé"}], **fields}
    response = await client.post("/apply-template", json=messages)
    msgspec.convert(response.json(), AppliedTemplate)
    engine.info_ = FakeEngine.roomy().info_
    await client.post(CHAT, json=chat(**messages))
    detokenized = await client.post("/detokenize", json={"tokens": list(engine.requests[-1].prompt)})
    assert response.json()["prompt"] == detokenized.json()["prompt"]


async def test_what_a_template_does_not_show_is_reported(client: httpx.AsyncClient, strict_client: httpx.AsyncClient):
    body = {"messages": [{"role": "user", "content": "x", "name": "Ann"}]}
    response = await client.post("/apply-template", json=body)
    assert response.json()["warnings"][0]["path"] == response.headers["x-samewise-ignored"] == "messages[0].name"
    assert (await strict_client.post("/apply-template", json=body)).status_code == 400


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": []}, "messages", "empty_array"),
        ({"model": "other"}, "model", "model_not_found"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages", "invalid_value"),
        ({"massages": 1}, "massages", "unknown_parameter"),
    ],
)
async def test_templates_refuse(client: httpx.AsyncClient, fields: dict[str, Any], param: str, code: str):
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    error = (await client.post("/apply-template", json=body)).json()["error"]
    assert (error["param"], error["error_code"]) == (param, code)


async def test_props(client: httpx.AsyncClient, folder: Any):
    response = await client.get("/props")
    props = response.json()
    msgspec.convert(props, LlamaProps)
    assert str(folder.parent) not in response.text, "no path of this machine"
    params = props["default_generation_settings"]["params"]
    assert {name: params[name] for name in DEFAULTS} == DEFAULTS
    assert props["default_generation_settings"]["n_ctx"] == 256
    assert (props["model_alias"], props["model_path"], props["total_slots"]) == ("tiny", "tiny", 8)
    assert (props["chat_template"], props["bos_token"], props["eos_token"]) == (TEMPLATE, "<|bos|>", "<|eos|>")
    assert props["build_info"] == f"samewise-{__version__}"
    assert (await client.post("/props", json={})).json()["error"]["code"] == 405


async def test_slots_show_the_completions_of_the_own_key(make_with_keys: Callable[..., Any], engine: FakeEngine):
    """The engine holds the request until it has been looked at."""
    submitted, go_on = asyncio.Event(), asyncio.Event()
    outputs = engine._outputs

    async def held(request: Any) -> Any:
        submitted.set()
        await go_on.wait()
        async for output in outputs(request):
            yield output

    engine._outputs = held  # type: ignore[method-assign]
    async with client_of(make_with_keys({"ann": {}, "bob": {}})) as client:
        ann, bob = (bearer(name) for name in ("ann", "bob"))
        body = {"prompt": "secret words", "n_predict": 7, "n_cmpl": 2}
        running = asyncio.create_task(client.post("/completion", json=body, headers={**ann, "x-request-id": "mine"}))
        await submitted.wait()
        mine, other = [await client.get("/slots", headers=headers) for headers in (ann, bob)]
        go_on.set()
        assert (await running).status_code == 200
        for slots in (mine, other):
            assert [msgspec.convert(slot, LlamaSlot).id for slot in slots.json()] == list(range(8))
            assert "secret" not in slots.text
        busy = [slot for slot in mine.json() if slot["is_processing"]]
        assert [(slot["request_id"], slot["next_token"]["n_remain"]) for slot in busy] == [("mine", 14)] * 2
        assert not any(slot["is_processing"] for slot in other.json())
        assert "mine" not in json.dumps(other.json())
        after = await client.get("/slots", headers=ann)
        assert not any(slot["is_processing"] for slot in after.json())


async def test_no_slot_is_free(client: httpx.AsyncClient, engine: FakeEngine):
    assert (await client.get("/slots?fail_on_no_slot=1")).status_code == 200
    engine.stats = EngineStats(num_running=8)
    response = await client.get("/slots?fail_on_no_slot=1")
    assert (response.status_code, response.json()["error"]["type"]) == (503, "unavailable_error")
    assert (await client.get("/slots")).status_code == 200
    assert (await client.get("/slots?fail_on_no_slot=x")).json()["error"]["param"] == "fail_on_no_slot"


async def test_an_applied_template_begins_once(client_with: Callable[..., httpx.AsyncClient], engine: FakeEngine):
    """A completion puts the tokenizer's special tokens before its text, so the text lacks them."""
    async with client_with("{{ bos_token }}{{ messages[0].content }}") as client:
        app: Any = client._transport.app  # type: ignore[attr-defined]
        model = app.state.services.models.default.tokenizer._model
        model.post_processor = processors.TemplateProcessing("<|bos|> $A", special_tokens=[("<|bos|>", BOS)])
        await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
        applied = (await client.post("/apply-template", json={"messages": [{"role": "user", "content": "hi"}]})).json()
        assert applied == {"prompt": "hi"}
        await client.post("/completion", json={"prompt": applied["prompt"], "n_predict": 1})
    assert [list(one.prompt) for one in engine.requests] == [[BOS, *b"hi"]] * 2
