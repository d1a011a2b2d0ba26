"""A new API is a folder and a line: the rest of the server serves it as it serves the others."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import httpx
import pytest
from fastapi import FastAPI

from server.api.dialects import DIALECTS
from server.api.jobs import Work
from server.api.services import Services
from server.errors import RequestTimeoutError
from tests.server import shout
from tests.server.fake_engine import FakeEngine, scripted
from tests.server.helpers import CHAT, chat, client_of, error_of

ASKED = {"model": "tiny", "say": "hi"}


@pytest.fixture
async def client(make_app: Callable[..., FastAPI], engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    engine.script = scripted(b"abc")
    async with client_of(make_app(dialects=(*DIALECTS, shout.DIALECT))) as client:
        yield client


async def test_it_answers_whole_and_streamed(client: httpx.AsyncClient, engine: FakeEngine):
    assert (await client.post("/shout", json=ASKED)).text == "ABCAB"
    assert (await client.post("/shout", json={**ASKED, "stream": True})).text == "A\nB\nC\nA\nB\n"
    assert engine.requests[0].prompt == tuple(b"hi")
    assert (await client.post(CHAT, json=chat())).status_code == 200


async def test_its_errors_are_its_own(client: httpx.AsyncClient, engine: FakeEngine):
    refused = await client.post("/shout", json={**ASKED, "sya": "x"})
    assert refused.status_code == 400
    assert refused.text.startswith("NO: Unknown parameter: 'sya'. Did you mean 'say'? A server started with --lenient")
    too_long = await client.post("/shout", json={**ASKED, "say": "x" * 9999})
    assert too_long.text.startswith("NO: This model's maximum context length is 256 tokens. However, your say resulted")
    error_of(await client.post(CHAT, json={}), 400)
    engine.fail_after, engine.failure = 2, RequestTimeoutError("too long")
    assert (await client.post("/shout", json={**ASKED, "stream": True})).text == "A\nB\nOOPS\n"


async def test_it_is_described_as_they_are(client: httpx.AsyncClient):
    fields = (await client.get("/v1/capabilities")).json()["endpoints"]["/shout"]
    assert set(fields) == {"model", "say", "stream"}
    assert "/shout" in (await client.get("/openapi.json")).json()["paths"]


async def test_what_it_has_promised_is_found_before_the_server_takes_requests(make_app: Callable[..., FastAPI]):
    found, taken_up = [], asyncio.Event()

    async def take_up() -> None:
        taken_up.set()

    async def resume(services: Services) -> Work:
        await asyncio.sleep(0)
        found.append(services)
        return take_up

    app = make_app(dialects=(replace(shout.DIALECT, resume=resume),))
    async with app.router.lifespan_context(app):
        assert found == [app.state.services]
        await taken_up.wait()


async def test_a_large_body_is_taken_in_elsewhere(client: httpx.AsyncClient):
    refused = await client.post("/shout", json={**ASKED, "say": "x" * 400_000})
    assert refused.text.startswith("NO: This model's maximum context length is 256 tokens.")
