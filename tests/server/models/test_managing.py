"""The list of several models, loading and unloading them, and the stream of their changes."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from server.api.openai.errors import DONE
from server.engine.client import EngineState
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, chat, client_of, error_of
from tests.server.models.hosting import Call, Hosting
from tests.server.tenants.keys import bearer, write_keys

LOAD, UNLOAD, EVENTS = "/v1/models/load", "/v1/models/unload", "/v1/models/events"
Make = Callable[..., Hosting]


async def standings(client: httpx.AsyncClient) -> dict[str, str]:
    models = (await client.get("/v1/models")).json()["data"]
    return {one["id"]: one["status"]["value"] for one in models}


async def test_the_list_has_every_name_loaded_or_not(hosting: Make):
    several = hosting()
    several.sources["c"].unplannable = "its files are broken"
    async with several.running() as client:
        await several.settled("a", "loaded")
        await several.until(lambda: several.models["c"].failure is not None)
        assert await standings(client) == {"a": "loaded", "b": "unloaded", "bee": "unloaded", "c": "unloaded"}
        a, b, bee, c = (await client.get("/v1/models")).json()["data"]
        assert a["max_model_len"] == b["max_model_len"] == 256
        assert b["aliases"] == bee["aliases"] == ["bee"]
        assert bee["root"] == "b"
        assert bee["parent"] is None
        assert b["status"] == {"value": "unloaded", "failed": False, "error": None, "progress": None, "waiting": 0,
                               "memory_bytes": 1}  # fmt: skip
        assert c["status"]["failed"]
        assert c["max_model_len"] is None, "what cannot be planned has no length"
        assert (await client.get("/v1/models/bee")).json() == bee
        anthropic = {"anthropic-version": "2023-06-01"}
        assert (await client.get("/v1/models/b", headers=anthropic)).json()["max_input_tokens"] == 256
        error_of(await client.get("/v1/models/d"), 404)


async def test_the_only_model_has_the_same_fields(client: httpx.AsyncClient):
    (only,) = (await client.get("/v1/models")).json()["data"]
    assert only["status"]["value"] == "loaded"
    assert only["aliases"] == []
    assert only["max_model_len"] == 256
    assert (await client.post(LOAD, json={"model": "tiny"})).json()["success"]
    assert error_of(await client.post(UNLOAD, json={"model": "tiny"}))["param"] == "model"


async def test_an_operator_loads_and_unloads(hosting: Make):
    several = hosting()
    async with several.running() as client:
        await several.settled("a", "loaded")
        loaded = (await client.post("/models/load", json={"model": "bee"})).json()  # as llama.cpp's clients write it
        assert loaded["success"]
        assert loaded["model"]["id"] == "b"
        assert loaded["model"]["status"]["value"] == "loaded"
        assert (await client.post(LOAD, json={"model": "b"})).status_code == 200, "what is loaded stays so"
        assert (await client.post(LOAD, json={"model": "c"})).status_code == 200
        assert await standings(client) == {"a": "unloaded", "b": "loaded", "bee": "loaded", "c": "loaded"}
        unloaded = (await client.post(UNLOAD, json={"model": "b"})).json()
        assert unloaded["model"]["status"]["value"] == "unloaded"
        assert (await client.post(UNLOAD, json={"model": "b"})).status_code == 200
        assert len(several.sources["b"].engines) == 1
        error_of(await client.post(LOAD, json={"model": "d"}), 404)
        error_of(await client.post(LOAD, json={}), 400)


async def test_why_a_load_failed_is_only_in_the_log(hosting: Make, caplog: pytest.LogCaptureFixture):
    several = hosting()
    path, pid = "/srv/models/secret", "process 4711"
    several.sources["b"].broken = f"{path} has no weights, so {pid} exited"
    several.sources["c"].unplannable = f"{path}/config.json is damaged"
    async with several.running() as client:
        await several.settled("a", "loaded")
        loaded = await client.post(LOAD, json={"model": "b"})
        refused = await client.post(CHAT, json=chat(model="b"))
        planned = await client.post(CHAT, json=chat(model="c"))
        several.sources["a"].engines[0].die(f"{pid} was killed")
        await several.until(lambda: several.models["a"].failure is not None)
        died = await client.post(CHAT, json=chat(model="a"))
        for answer in (loaded, refused, planned, died):
            error = error_of(answer, 503, "server_error")
            assert error["code"] == "model_unavailable"
            assert "log says why" in error["message"]
        listed = await client.get("/v1/models")
        assert [one["status"]["failed"] for one in listed.json()["data"]] == [True, True, True, True]
        for answer in (loaded, refused, planned, died, listed, await client.get("/ready")):
            assert path not in answer.text
            assert "4711" not in answer.text
        assert f"b cannot be loaded: {path} has no weights, so {pid} exited" in caplog.text
        assert f"c cannot be loaded: {path}/config.json is damaged" in caplog.text
        assert f"a cannot be loaded: {pid} was killed" in caplog.text
        several.sources["b"].broken = None
        assert (await client.post(LOAD, json={"model": "b"})).status_code == 200, "an operator need not wait"
        assert (await client.post(CHAT, json=chat(model="b"))).status_code == 200


async def test_wrong_settings_are_not_tried_again(hosting: Make):
    """The error says that retries do not help; an operator who loads the model has it planned again."""
    several = hosting()
    several.sources["b"].unplannable = "remove --kv-cache-gib"
    several.sources["b"].may_pass = False
    async with several.running() as client:
        await several.until(lambda: several.models["b"].failure is not None)
        response = await client.post(CHAT, json=chat(model="b"))
        error = error_of(response, 503, "server_error")
        assert error["code"] == "model_unavailable"
        assert "log says why. Retries do not help" in error["message"]
        assert response.headers["x-should-retry"] == "false"
        assert "retry-after" not in response.headers
        several.sources["b"].unplannable = None
        assert (await client.post(LOAD, json={"model": "b"})).status_code == 200
        assert (await client.post(CHAT, json=chat(model="b"))).status_code == 200


async def test_unloading_waits_for_requests_unless_it_is_forced(hosting: Make):
    several = hosting()
    async with several.running() as client:
        await several.settled("a", "loaded")
        engine = several.sources["a"].engines[0]
        engine.step_delay_s = 0.01
        body = chat(model="a", stream=True, max_tokens=30)
        first = Call(several.app, CHAT, body)
        await first.pieces.get()
        assert (await client.post(UNLOAD, json={"model": "a"})).status_code == 200
        text = await first.end()
        assert first.status == 200
        assert text.endswith(DONE)
        assert b"error" not in text
        assert (await client.post(LOAD, json={"model": "a"})).status_code == 200
        several.sources["a"].engines[1].step_delay_s = 0.01
        second = Call(several.app, CHAT, body)
        await second.pieces.get()
        assert (await client.post(UNLOAD, json={"model": "a", "force": True})).status_code == 200
        assert b"an operator unloaded it" in await second.end()


async def test_the_last_word_of_operators_counts(hosting: Make):
    several = hosting()
    several.sources["b"].may_load.clear()
    async with several.running() as client:
        loading = asyncio.create_task(client.post(LOAD, json={"model": "b"}))
        await several.settled("b", "loading")
        assert (await client.post(UNLOAD, json={"model": "b"})).status_code == 200
        assert "an operator unloaded it" in error_of(await loading, 503, "server_error")["message"]
        release = several.models["a"].hold()
        unloading = asyncio.create_task(client.post(UNLOAD, json={"model": "a"}))
        await several.until(lambda: bool(several.models["a"].leavers))
        assert (await client.post(LOAD, json={"model": "a"})).status_code == 200
        assert (await unloading).json()["model"]["status"]["value"] == "loaded"
        release()
        assert len(several.sources["a"].engines) == 1


async def test_only_keys_that_manage_may(hosting: Make, tmp_path: Path):
    several = hosting(api_keys_file=write_keys(tmp_path / "keys.yaml", anna={"manage": True}, ben={}))
    async with several.running() as client:
        for ask in (client.post(LOAD, json={"model": "a"}, headers=bearer("ben")),
                    client.post(UNLOAD, json={"model": "a"}, headers=bearer("ben")),
                    client.get(EVENTS, headers=bearer("ben"))):  # fmt: skip
            assert error_of(await ask, 403)["code"] == "not_permitted"
        assert (await client.post(LOAD, json={"model": "a"}, headers=bearer("anna"))).status_code == 200


async def test_the_stream_of_changes(hosting: Make):
    several = hosting()
    several.sources["b"].may_load.clear()
    async with several.running() as client:
        await several.settled("a", "loaded")
        watching = Call(several.app, EVENTS)
        first = [event for event in (await watching.pieces.get()).split(b"\n\n") if event]
        statuses = [json.loads(event.removeprefix(b"data: ")) for event in first]
        now = {one["model"]: one["data"]["value"] for one in statuses}
        assert now == {"a": "loaded", "b": "unloaded", "c": "unloaded"}
        loading = asyncio.create_task(client.post(LOAD, json={"model": "b"}))
        assert await change(watching, "b", "loading")
        several.sources["b"].may_load.set()
        assert (await change(watching, "b", "loaded"))["memory_bytes"] == 1
        await loading
        await client.post(UNLOAD, json={"model": "b"})
        assert await change(watching, "b", "unloaded")
        await several.host.stop()
        await watching.end()


async def change(watching: Call, model: str, value: str) -> dict[str, Any]:
    """The status with which the model takes this standing."""
    while True:
        for event in (await watching.pieces.get()).split(b"\n\n"):
            parsed = json.loads(event.removeprefix(b"data: ") or b"null")
            if parsed is not None and parsed["model"] == model and parsed["data"]["value"] == value:
                assert parsed["event"] == "model_status"
                status: dict[str, Any] = parsed["data"]
                return status


@pytest.mark.parametrize("ends", ["client", "server"])
async def test_one_model_has_a_stream_too(make_app: Callable[..., FastAPI], engine: FakeEngine, ends: str):
    """It ends with its client and with the engine, so that the server's end does not wait for it."""
    watching = Call(make_app(), EVENTS)
    assert b'"value":"loaded"' in await watching.pieces.get()
    if ends == "client":
        watching.leave()
    else:
        await engine.drain(0.0)
    await watching.end()


async def test_one_that_is_loading_is_listed(make_app: Callable[..., FastAPI], engine: FakeEngine):
    engine.state = EngineState.STARTING
    async with client_of(make_app()) as client:
        (only,) = (await client.get("/v1/models")).json()["data"]
    assert only["status"]["value"] == "loading"
    assert only["max_model_len"] is None
