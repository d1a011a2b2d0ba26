"""Keys that may use some of several models."""

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.server.helpers import CHAT, chat, client_of, error_of
from tests.server.models.hosting import Hosting
from tests.server.tenants.keys import bearer, write_keys

Make = Callable[..., Hosting]
ANNA, BEN = bearer("anna"), bearer("ben")


@pytest.fixture
def several(hosting: Make, tmp_path: Path) -> Hosting:
    """anna may use all; ben only b."""
    keys = write_keys(tmp_path / "keys.yaml", anna={"manage": True, "metrics": True},
                      ben={"models": ["bee"], "manage": True}, cleo={"models": ["gone"]})  # fmt: skip
    return hosting(api_keys_file=keys, data_dir=tmp_path / "data")


def told(response: httpx.Response) -> str:
    """The body of an answer, without what differs between any two requests and the name that was asked for."""
    return response.text.replace("nobody", "a")


async def test_a_forbidden_model_looks_like_an_unknown_one(several: Hosting):
    async with several.running() as client:
        await several.settled("a", "loaded")

        async def asked(name: str) -> list[httpx.Response]:
            gets = (f"/v1/models/{name}", f"/v1/steps?model={name}", f"/v1/requests?model={name}",
                    f"/v1/capabilities?model={name}", f"/props?model={name}", f"/slots?model={name}",
                    f"/tokenizer_info?model={name}", f"/ready?model={name}")  # fmt: skip
            bodies = {CHAT: chat(), "/v1/responses": {"input": "hi"}, "/v1/embeddings": {"input": "hi"},
                      "/tokenize": {"prompt": "hi"}, "/v1/models/load": {}, "/v1/models/unload": {},
                      "/v1/messages": chat(), "/completion": {"prompt": "hi"},
                      "/invocations": {"prompt": "hi"}}  # fmt: skip
            return [
                *[await client.get(path, headers=BEN) for path in gets],
                *[await client.post(path, json={**body, "model": name}, headers=BEN) for path, body in bodies.items()],
            ]

        for forbidden, unknown in zip(await asked("a"), await asked("nobody"), strict=True):
            assert forbidden.status_code == unknown.status_code == 404, (forbidden.url, forbidden.text)
            known = told(forbidden).replace(forbidden.headers["x-request-id"], "")
            assert known == told(unknown).replace(unknown.headers["x-request-id"], "")
        assert not several.sources["a"].engines[0].requests


async def test_lists_and_defaults_are_the_keys_own(several: Hosting):
    async with several.running() as client:
        await several.settled("a", "loaded")
        models = (await client.get("/v1/models", headers=BEN)).json()["data"]
        assert [one["id"] for one in models] == ["b", "bee"]
        assert (await client.get("/v1/models", headers=bearer("cleo"))).json()["data"] == []
        answer = await client.post(CHAT, json={"messages": chat()["messages"], "max_tokens": 2}, headers=BEN)
        assert answer.json()["model"] == "b"
        assert (await client.post(CHAT, json=chat(model="a"), headers=ANNA)).status_code == 200
        error_of(await client.post(CHAT, json=chat(model="a"), headers=bearer("cleo")), 404)
        nameless = await client.post(CHAT, json={"messages": chat()["messages"]}, headers=bearer("cleo"))
        assert "any model" in error_of(nameless, 404)["message"]
        assert 'model_name="a"' not in (await client.get("/metrics", headers=BEN)).text
        assert 'model_name="a"' in (await client.get("/metrics", headers=ANNA)).text


async def test_a_probe_without_a_key_learns_no_names(several: Hosting):
    several.sources["a"].may_load.clear()
    async with several.running() as client:
        assert "`a`" not in error_of(await client.get("/ready"), 503, "server_error")["message"]
        several.sources["a"].may_load.set()
        await several.settled("a", "loaded")
        several.sources["a"].engines[0].die("`a` has no memory")
        await several.until(lambda: several.models["a"].failure is not None)
        assert "`a`" not in error_of(await client.get("/ready"), 503, "server_error")["message"]


def test_a_name_that_no_model_has_is_a_warning(several: Hosting, caplog: pytest.LogCaptureFixture):
    """The fixture has made the application, so the warning comes before the test."""
    (warning,) = caplog.get_records("setup")
    assert warning.getMessage() == "The keys file names models that are not served: gone."


async def test_a_line_of_a_batch_may_not_use_it_either(several: Hosting):
    line = {"custom_id": "1", "method": "POST", "url": CHAT, "body": chat(model="a")}
    async with several.running(), client_of(several.app) as client:
        client.headers.update(BEN)
        file = (await client.post("/v1/files", data={"purpose": "batch"},
                                  files={"file": json.dumps(line).encode()})).json()  # fmt: skip
        batch = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        job = (await client.post("/v1/batches", json=batch)).json()
        running = several.app.state.services.jobs.get(job["id"], "ben")
        while running is not None and several.app.state.services.jobs.get(job["id"], "ben") is not None:
            await several.app.state.services.storage.run(lambda rows: None)
        errors = (await client.get(f"/v1/batches/{job['id']}")).json()["error_file_id"]
        assert "model_not_found" in (await client.get(f"/v1/files/{errors}/content")).text
