"""The first requests of programs that use Ollama, and the parts of the answers that they read."""

import json
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from server.api.ollama.about import OllamaProcesses, OllamaShown, OllamaTags
from server.api.ollama.routes import CHANGES
from server.engine.client import EngineState
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import client_of, says
from tests.server.ollama.conftest import CHAT, GENERATE, lines_of
from tests.server.test_fill_in import write_coder
from tests.server.tiny_model import write_folder

HI = [{"role": "user", "content": "hi"}]


async def test_the_command_line(client: httpx.AsyncClient, engine: FakeEngine):
    """`ollama run`, `list`, `ps` and `stop`: no key, and digests that can be cut to twelve characters."""
    assert ((await client.head("/")).status_code, (await client.head("/")).text) == (200, "")
    shown = (await client.post("/api/show", json={"model": "tiny"})).json()
    assert "completion" in msgspec.convert(shown, OllamaShown).capabilities
    assert (await client.post("/api/show", json={"model": "phi"})).status_code == 404
    (line,) = lines_of_loading(await client.post(GENERATE, json={"model": "tiny", "prompt": ""}))
    assert (line["done_reason"], line["response"]) == ("load", "")
    engine.script = says("Ahoy.")
    pieces = lines_of(await client.post(CHAT, json={"model": "tiny", "messages": HI, "options": {}}))
    assert "".join(piece["message"]["content"] for piece in pieces) == "Ahoy."
    for path, kind in (("/api/tags", OllamaTags), ("/api/ps", OllamaProcesses)):
        (model,) = msgspec.convert((await client.get(path)).json(), kind).models
        assert re.fullmatch(r"[0-9a-f]{64}", model.digest)
    stopped = await client.post(GENERATE, json={"model": "tiny", "keep_alive": "0s"})
    assert stopped.json()["warnings"][0]["path"] == "keep_alive", "it stays loaded"


def lines_of_loading(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    return [response.json()]


async def test_open_webui(client: httpx.AsyncClient, engine: FakeEngine):
    version = (await client.get("/api/version")).json()["version"]
    assert [int(part) for part in version.split(".")] >= [0, 6, 4]
    (model,) = (await client.get("/api/tags")).json()["models"]
    (running,) = (await client.get("/api/ps")).json()["models"]
    assert model["name"] == model["model"] == running["name"] == "tiny:latest", (
        "it adds the tag before it looks them up"
    )
    assert datetime.fromisoformat(running["expires_at"]).year > 2100
    engine.script = says("Ahoy.")
    asked = {"model": model["model"], "messages": HI, "stream": True, "options": {"num_ctx": 2048, "stop": ["x"]}}
    assert lines_of(await client.post(CHAT, json=asked))[-1]["model"] == "tiny:latest"
    unload = {"model": "tiny:latest", "prompt": "", "keep_alive": 0}
    assert (await client.post(GENERATE, json=unload)).status_code == 200


async def test_continue(make_app: Callable[..., FastAPI], engine: FakeEngine, tmp_path: Path):
    folder = write_folder(tmp_path / "m", generation={"temperature": 0.5, "stop_strings": ["\n\n"]})
    async with client_of(make_app(folder)) as client:
        shown = (await client.post("/api/show", json={"name": "tiny"})).json()
        parameters = dict(re.split(r"\s+", line, maxsplit=1) for line in shown["parameters"].splitlines())
        assert parameters == {"num_ctx": "4096", "temperature": "0.5", "stop": '"\\n\\n"'}
        assert ".Suffix" not in shown["template"]
        options = {"num_ctx": 8192, "num_predict": 4, "stop": ["x"], "temperature": 0.1}
        asked = {"model": "tiny", "messages": HI, "options": options, "keep_alive": 1800, "stream": True}
        lines = lines_of(await client.post(CHAT, json=asked))
        assert [warning["path"] for warning in lines[0]["warnings"]] == ["keep_alive", "options.num_ctx"]
        embedded = await client.post("/api/embed", json={"model": "tiny", "input": ["a", "b"]})
        assert len(embedded.json()["embeddings"]) == 2


async def test_home_assistant(client: httpx.AsyncClient, engine: FakeEngine):
    (model,) = (await client.get("/api/tags")).json()["models"]
    engine.script = says('{"c": "red"}')
    asked = {
        "model": model["model"], "messages": [{"role": "system", "content": "Be."}, *HI], "tools": [], "stream": True,
        "format": {"type": "object", "properties": {"c": {"type": "string"}}}, "options": {"num_ctx": 8192.0},
        "keep_alive": "-1.0s", "think": False,
    }  # fmt: skip
    lines = lines_of(await client.post(CHAT, json=asked))
    assert "".join(line["message"]["content"] for line in lines) == '{"c": "red"}'
    assert [warning["path"] for warning in lines[0]["warnings"]] == ["options.num_ctx", "format"]
    assert (await client.post("/api/pull", json={"model": "phi"})).status_code == 404
    pulled = await client.post("/api/pull", json={"model": model["model"]})
    assert [json.loads(line)["status"] for line in pulled.text.splitlines()] == ["pulling manifest", "success"]


async def test_chat_ollama(client: httpx.AsyncClient, engine: FakeEngine):
    """LangChain: a name is known if it is listed, or listed with a tag; usage is in the last line."""
    names = [model["model"] for model in (await client.get("/api/tags")).json()["models"]]
    assert any(name == "tiny" or name.startswith("tiny:") for name in names)
    calls = [{"type": "function", "id": "a1", "function": {"name": "f", "arguments": {"x": 1}}}]
    messages = [
        {"role": "user", "content": "hi", "images": []},
        {"role": "assistant", "content": "", "images": [], "tool_calls": calls},
        {"role": "tool", "content": "1", "images": [], "tool_call_id": "a1"},
    ]
    engine.script = says("Ahoy.")
    asked = {"model": "tiny", "messages": messages, "tools": [], "stream": True, "options": {"num_predict": 9}}
    last = lines_of(await client.post(CHAT, json=asked))[-1]
    assert (last["prompt_eval_count"], last["eval_count"]) == (len(engine.requests[-1].prompt), 6)


async def test_copilot_and_launchers(make_app: Callable[..., FastAPI], tmp_path: Path):
    folder = write_folder(tmp_path / "m", template=None)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    async with client_of(make_app(folder, served_model_name=["Org/Tiny", "other:7b"])) as client:
        models = (await client.get("/api/tags")).json()["models"]
        assert [model["name"] for model in models] == ["Org/Tiny:latest", "other:7b"]
        assert models[0]["capabilities"] == ["completion"]
        assert models[0]["details"]["context_length"] == 4096
        shown = (await client.post("/api/show", json={"model": "org/tiny"})).json()
        assert shown["model_info"]["general.architecture"] == "llama"
        assert shown["model_info"]["llama.context_length"] == 4096
        assert (await client.post("/api/show", json={"model": "other"})).status_code == 404


async def test_what_a_model_can(make_app: Callable[..., FastAPI], thinking_folder: Path, tmp_path: Path):
    async with client_of(make_app(thinking_folder)) as client:
        shown = (await client.post("/api/show", json={"model": "tiny"})).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    async with client_of(make_app(write_coder(tmp_path / "coder"))) as client:
        shown = (await client.post("/api/show", json={"model": "tiny"})).json()
        gap = {"model": "tiny", "prompt": "a", "suffix": "b", "stream": False, "options": {"num_predict": 2}}
        assert (await client.post(GENERATE, json=gap)).json()["eval_count"] == 2
    assert "insert" in shown["capabilities"]
    assert ".Suffix" in shown["template"], "by this, Continue knows that it can fill in"


@pytest.mark.parametrize("path", CHANGES)
async def test_models_cannot_be_changed(client: httpx.AsyncClient, path: str):
    response = await client.request(CHANGES[path], path.format(digest="sha256:0"), json={"model": "tiny"})
    assert response.status_code == 501
    assert response.json()["error"].startswith("This server's API cannot add, change")


async def test_unknown_paths_have_errors_of_the_same_form(client: httpx.AsyncClient):
    response = await client.get("/api/unknown")
    assert (response.status_code, response.json()["code"]) == (404, "unknown_url")
    assert isinstance(response.json()["error"], str)
    assert (await client.get(CHAT)).json()["error"] == f"Not allowed to GET on {CHAT}."


async def test_before_the_engine_is_there(client: httpx.AsyncClient, engine: FakeEngine):
    engine.state = EngineState.STARTING
    assert (await client.get("/")).text == "Ollama is running"
    assert [model["name"] for model in (await client.get("/api/tags")).json()["models"]] == ["tiny:latest"]
    assert (await client.get("/api/ps")).json() == {"models": []}
    response = await client.post("/api/show", json={"model": "tiny"})
    assert (response.status_code, response.json()["error"][:10]) == (503, "The engine")


async def test_who_needs_a_key(make_app: Callable[..., FastAPI]):
    async with client_of(make_app(api_key="right")) as client:
        assert [(await client.get(path)).status_code for path in ("/", "/api/version", "/api/tags")] == [200, 200, 401]
        assert (await client.get("/api/tags", headers={"authorization": "Bearer right"})).status_code == 200
