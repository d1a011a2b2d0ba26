"""Requests that wait for a load, streamed and whole, and who may wait for what."""

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from server.api.openai.errors import DONE
from tests.server.helpers import CHAT, COMPLETIONS, chat, error_of, events_of, joined
from tests.server.models.hosting import Call, Hosting

Make = Callable[..., Hosting]
LOADING = b": loading\n\n"


async def test_a_stream_begins_before_its_model_is_loaded(hosting: Make):
    several = hosting(keepalive_s=0.01)
    several.sources["b"].may_load.clear()
    async with several.running() as client:
        call = Call(several.app, CHAT, chat(model="b", stream=True, seed=1))
        assert await call.pieces.get() == LOADING
        assert call.status == 200
        assert await call.pieces.get() == LOADING
        several.sources["b"].may_load.set()
        streamed = (await call.end()).decode()
        whole = (await client.post(CHAT, json=chat(model="b", seed=1))).json()
        (choice,) = joined(events_of(streamed))
        assert choice["message"]["content"] == whole["choices"][0]["message"]["content"]
        await several.until(lambda: not several.models["b"].num_uses)


async def test_a_quick_load_leaves_the_stream_as_it_is(hosting: Make):
    several = hosting()
    async with several.running() as client:
        answer = await client.post(CHAT, json={"messages": chat()["messages"], "stream": True})
        assert answer.text.startswith("data: ")
        assert answer.headers["x-samewise-ignored"]


@pytest.mark.parametrize(("path", "end"), [(CHAT, DONE), ("/v1/messages", b"\n\n"), ("/v1/responses", DONE)])
async def test_a_load_that_fails_late_ends_the_stream(hosting: Make, path: str, end: bytes):
    several = hosting(keepalive_s=0.01)
    several.sources["b"].may_load.clear()
    several.sources["b"].broken = "no such weight"
    body = chat(model="b", stream=True) if "input" not in path else {}
    body = {"model": "b", "input": "hi", "stream": True} if path == "/v1/responses" else body
    async with several.running():
        call = Call(several.app, path, body)
        assert await call.pieces.get() == LOADING
        several.sources["b"].may_load.set()
        text = await call.end()
        assert b"The server's log says why" in text
        assert text.endswith(end)
        assert not several.models["b"].num_uses


async def test_a_load_that_fails_soon_has_its_own_status(hosting: Make):
    several = hosting()
    several.sources["b"].broken = "no such weight"
    async with several.running() as client:
        failed = await client.post(CHAT, json=chat(model="b", stream=True))
        assert error_of(failed, 503, "server_error")["code"] == "model_unavailable"
        assert failed.headers["retry-after"]


@pytest.mark.parametrize("streams", [False, True])
async def test_who_leaves_does_not_wait(hosting: Make, streams: bool):
    several = hosting(keepalive_s=0.01 if streams else 15)
    several.sources["b"].may_load.clear()
    async with several.running():
        call = Call(several.app, COMPLETIONS, {"model": "b", "prompt": "hi", "stream": streams})
        await several.until(lambda: bool(several.models["b"].waiters))
        if streams:
            assert await call.pieces.get() == LOADING
        call.leave()
        await call.end()
        assert not several.models["b"].waiters
        assert not several.models["b"].num_uses


async def test_who_is_cancelled_as_the_model_is_loaded_does_not_keep_it(hosting: Make):
    several = hosting()
    several.sources["b"].may_load.clear()
    async with several.running():
        call = Call(several.app, COMPLETIONS, {"model": "b", "prompt": "hi"})
        await several.until(lambda: bool(several.models["b"].waiters))
        end = several.host.watch(lambda: call.cancel() if several.models["b"].num_uses else False)
        several.sources["b"].may_load.set()
        with pytest.raises(asyncio.CancelledError):
            await call.end()
        end()
        assert not several.models["b"].num_uses


async def test_a_line_of_a_batch_that_streams_is_refused_once_its_model_is_loaded(hosting: Make):
    several = hosting(keepalive_s=1e-6)
    several.sources["b"].may_load.clear()
    async with several.running():
        loopback = several.app.state.services.loopback
        line = asyncio.create_task(loopback.post(CHAT, json.dumps(chat(model="b", stream=True)).encode(), ""))
        await several.settled("b", "loading")
        several.sources["b"].may_load.set()
        answer = await line
        assert answer.status == 400
        assert b"in a batch" in answer.body


async def test_a_line_of_the_log_has_the_model(hosting: Make, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="samewise.access")
    several = hosting()
    async with several.running() as client:
        answer = (await client.post(CHAT, json={"messages": chat()["messages"], "max_tokens": 2})).json()
        assert answer["warnings"] == [{"path": "model", "reason": "Missing; set to 'a', the default model."}]
        await client.post(CHAT, json=chat(model="bee"))
        await client.get("/v1/models")
    lines = [vars(record)["model"] for record in caplog.records if record.name == "samewise.access"]
    assert lines == ["a", "b", None]


async def test_a_background_response_outlives_its_model(hosting: Make, tmp_path: Path):
    several = hosting(data_dir=tmp_path)
    body = {"model": "b", "input": "hi", "background": True, "max_output_tokens": 20, "temperature": 0}
    async with several.running() as client:
        await client.post("/v1/models/load", json={"model": "b"})
        several.sources["b"].engines[0].step_delay_s = 0.01
        begun = (await client.post("/v1/responses", json=body)).json()
        assert (await client.post("/v1/models/unload", json={"model": "b", "force": True})).status_code == 200
        address, unfinished = f"/v1/responses/{begun['id']}", ("queued", "in_progress")
        while (now := (await client.get(address)).json())["status"] in unfinished:
            await several.app.state.services.storage.run(lambda rows: None)
        assert now["incomplete_details"] == {"reason": "max_output_tokens"}
        assert now["usage"]["output_tokens"] == 20
        assert len(several.sources["b"].engines) == 2
