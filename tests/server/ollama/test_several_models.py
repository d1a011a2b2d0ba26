"""Ollama's clients at a server with several models: names, loading, unloading and `keep_alive`."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from server.api.ollama.schema import seconds_of
from tests.server.helpers import says
from tests.server.models.conftest import hosting
from tests.server.models.hosting import Call, Hosting
from tests.server.ollama.conftest import CHAT, GENERATE, lines_of
from tests.server.tenants.keys import bearer, write_keys

__all__ = ["hosting"]  # a fixture

HI = [{"role": "user", "content": "hi"}]
Make = Callable[..., Hosting]


async def names(client: Any, path: str) -> list[str]:
    return [model["name"] for model in (await client.get(path)).json()["models"]]


async def test_names_are_listed_and_shown_without_a_load(hosting: Make):
    world = hosting()
    async with world.running() as client:
        await world.settled("a", "loaded")
        await world.until(lambda: world.models["c"].status.max_model_len is not None)
        assert await names(client, "/api/tags") == ["a:latest", "b:latest", "bee:latest", "c:latest"]
        assert await names(client, "/api/ps") == ["a:latest"]
        shown = (await client.post("/api/show", json={"name": "BEE:latest"})).json()
        assert shown["capabilities"] == ["completion", "tools"]
        assert shown["details"]["context_length"] == 256
        assert "num_ctx" in shown["parameters"]
        assert (await client.post("/api/show", json={"model": "phi"})).json()["error"] == "model 'phi' not found"
        assert world.models["b"].num_loads == 0


async def test_the_command_line(hosting: Make):
    """`ollama run` of a model that is not loaded, `ps`, and `stop`."""
    world = hosting()
    async with world.running() as client:
        (line,) = [(await client.post(GENERATE, json={"model": "B", "prompt": ""})).json()]
        assert (line["done_reason"], line["model"]) == ("load", "B")
        world.sources["b"].engines[-1].script = says("Ahoy.")
        pieces = lines_of(await client.post(CHAT, json={"model": "B", "messages": HI, "options": {}}))
        assert "".join(piece["message"]["content"] for piece in pieces) == "Ahoy."
        assert "b:latest" in await names(client, "/api/ps")
        stopped = (await client.post(GENERATE, json={"model": "B", "keep_alive": "0s"})).json()
        assert stopped["done_reason"] == "unload"
        assert "warnings" not in stopped
        assert "b:latest" not in await names(client, "/api/ps")
        again = (await client.post(GENERATE, json={"model": "b", "keep_alive": 0, "prompt": ""})).json()
        assert again["done_reason"] == "unload"
        assert world.models["b"].num_loads == 1, "unloading does not load"


async def test_open_webui_and_home_assistant(hosting: Make):
    """Refreshes of tags and ps, chats with both models in turn, an unload of one."""
    world = hosting(room=1)
    async with world.running() as client:
        for model in ("a:latest", "b:latest", "a:latest"):
            assert model in await names(client, "/api/tags")
            asked = {"model": model, "messages": HI, "options": {"num_ctx": 8192, "num_predict": 2}, "keep_alive": -1}
            lines = lines_of(await client.post(CHAT, json=asked))
            assert [warning["path"] for warning in lines[0]["warnings"]] == ["options.num_ctx"]
            (running,) = (await client.get("/api/ps")).json()["models"]
            assert (running["name"], running["expires_at"][:4], running["size"]) == (model, "9999", 1)
        await client.post(GENERATE, json={"model": "a:latest", "prompt": "", "keep_alive": 0})
        assert await names(client, "/api/ps") == []


async def test_a_stream_waits_with_lines_without_text(hosting: Make):
    world = hosting(keepalive_s=0.01)
    world.sources["b"].may_load.clear()
    async with world.running():
        call = Call(world.app, CHAT, {"model": "b", "messages": HI, "options": {"num_predict": 2}})
        first = json.loads(await call.pieces.get())
        assert (first["model"], first["message"]["content"], first["done"]) == ("b", "", False)
        world.sources["b"].may_load.set()
        lines = [json.loads(line) for line in (await call.end()).splitlines()]
    assert [line["done"] for line in lines[:-1]] == [False] * (len(lines) - 1)
    assert lines[-1]["done"]
    assert 0 < lines[-1]["load_duration"] <= lines[-1]["total_duration"]


async def test_the_longest_wish_counts(hosting: Make):
    world = hosting({"a": {"is_loaded_at_start": True, "idle_s": 3000.0}, "b": {}})

    async def warnings(keep_alive: object, model: str = "a") -> list[str]:
        asked = {"model": model, "messages": HI, "stream": False, "options": {"num_predict": 1},
                 "keep_alive": keep_alive}  # fmt: skip
        answer = (await client.post(CHAT, json=asked)).json()
        return [one["reason"] for one in answer.get("warnings", ())]

    async def stays_s(name: str) -> float:
        (one,) = [one for one in (await client.get("/api/ps")).json()["models"] if one["name"] == f"{name}:latest"]
        return (datetime.fromisoformat(one["expires_at"]) - datetime.now(UTC)).total_seconds()

    async with world.running() as client:
        assert await warnings("10m", "b") == []
        assert 500 < await stays_s("b") < 601
        assert await warnings(60, "b") == []
        assert await stays_s("b") > 500, "the longer wish of before counts"
        assert (await client.post("/v1/completions", json={"model": "b", "prompt": "a", "max_tokens": 1})).is_success
        assert await stays_s("b") > 1e9, "a request without a wish keeps it as the operator has set"
        assert await warnings(-1) == ["The model stays loaded for at most 3000 s after a request (idle_s)."]
        assert 2900 < await stays_s("a") < 3001


async def test_a_wish_of_nothing_unloads_after_a_while(hosting: Make):
    world = hosting({"a": {}, "b": {"is_pinned": True}})
    async with world.running() as client:
        for model in "ab":
            asked = {"model": model, "prompt": "a", "stream": False, "options": {"num_predict": 1}, "keep_alive": 0}
            (notice,) = (await client.post(GENERATE, json=asked)).json()["warnings"]
            assert notice["path"] == "keep_alive"
            expected = "for at least" if model == "a" else "it is pinned"
            assert expected in notice["reason"]
        await world.settled("a", "unloaded")
        assert await names(client, "/api/ps") == ["b:latest"]


async def test_who_may_not_manage(hosting: Make, tmp_path: Path):
    keys = write_keys(tmp_path / "keys.yaml", user={}, boss={"manage": True})
    world = hosting(api_keys_file=keys, data_dir=tmp_path / "data")
    unload = {"model": "a", "prompt": "", "keep_alive": 0}
    async with world.running() as client:
        await world.settled("a", "loaded")
        kept = (await client.post(GENERATE, json=unload, headers=bearer("user"))).json()
        assert (kept["done_reason"], kept["warnings"][0]["path"]) == ("load", "keep_alive")
        assert world.models["a"].status.standing == "loaded"
        gone = (await client.post(GENERATE, json=unload, headers=bearer("boss"))).json()
        assert gone["done_reason"] == "unload"


@pytest.mark.parametrize(
    ("duration", "seconds"), [(0, 0), ("0", 0), (1.5, 1.5), ("1h30m", 5400), ("-1s", float("inf")), (-1, float("inf")),
                              ("250ms", 0.25)],
)  # fmt: skip
def test_durations(duration: float | str, seconds: float):
    assert seconds_of(duration) == seconds
    assert ollama.GenerateResponse(response="", done_reason="unload").done_reason == "unload"


async def test_the_official_client(hosting: Make):
    world = hosting(room=1)
    async with world.running():
        client = ollama.AsyncClient(host="http://test", transport=httpx.ASGITransport(app=world.app))
        listed = [model.model for model in (await client.list()).models]
        assert listed == ["a:latest", "b:latest", "bee:latest", "c:latest"]
        for model in listed[:2]:
            assert (await client.show(str(model))).capabilities == ["completion", "tools"]
            parts = [part async for part in await client.chat(model, HI, stream=True, options={"num_predict": 3})]
            assert (parts[-1].done_reason, parts[-1].eval_count) == ("length", 3)
            (running,) = (await client.ps()).models
            assert (running.model, running.size) == (model, 1)
        assert [part.status async for part in await client.pull("b", stream=True)][-1] == "success"
        assert (await client.generate("b", keep_alive=0)).done_reason == "unload"
        assert (await client.ps()).models == []
