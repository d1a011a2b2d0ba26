"""The front before two models, each on a replica of its own, compared with one server that has both."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message

from model_runner.hub.repository import ModelFolder
from server.api.body_worker import WorkerPool
from server.api.model_services import ModelParts
from server.app import create_app
from server.config import Settings
from server.ray.exchange import Accepted, ForwardedRequest
from server.ray.front import create_front
from server.ray.models import ModelReplicas
from server.ray.routing_fields import SHORT_BYTES
from server.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, chat, client_of, error_of
from tests.server.models.hosting import Hosting, host_of
from tests.server.ray.test_front import LocalReplicas
from tests.server.tenants.keys import bearer, write_keys

MODELS: list[dict[str, Any]] = [{"name": "a"}, {"name": "b", "aliases": ["Bee"]}]
ANTHROPIC = {"anthropic-version": "2023-06-01"}
MESSAGES = chat()["messages"]
Make = Callable[..., "Front"]


class Front:
    """A front, and the replicas of its models."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, workers: WorkerPool, **settings: Any) -> None:
        server = Settings(models=MODELS, **settings)
        self.replicas: dict[str, LocalReplicas] = {}
        for entry in server.models:
            model = ModelFolder(folder, entry.name)
            parts = ModelParts(FakeEngine(), tokenizer, server.of_model(entry), model)
            self.replicas[entry.name] = LocalReplicas([create_app([parts], server, workers=workers)])
        models = [ModelReplicas(self.replicas[entry.name], entry.names) for entry in server.models]
        self.client = client_of(create_front(models, server, has_many=True))  # type: ignore[arg-type]

    @property
    def apps(self) -> list[FastAPI]:
        return [app for one in self.replicas.values() for app in one.apps]

    def taken(self) -> str:
        """The model whose replica got the only request since the last call."""
        (name,) = [name for name, one in self.replicas.items() for _ in one.forwarded]
        for one in self.replicas.values():
            one.forwarded.clear()
        return name

    async def known(self) -> None:
        """Returns when the files of both models are hashed."""
        for app in self.apps:
            await app.state.services.models.default.fingerprint.wait_known()


@pytest.fixture
def make(folder: Path, tokenizer: Tokenizer, workers: WorkerPool) -> Iterator[Make]:
    made: list[Front] = []

    def make(**settings: Any) -> Front:
        made.append(Front(folder, tokenizer, workers, **settings))
        return made[-1]

    yield make
    for front in made:
        for app in front.apps:
            app.state.services.storage.close()


@pytest.fixture
def front(make: Make) -> Front:
    return make()


@pytest.fixture
def one(folder: Path, tokenizer: Tokenizer, workers: WorkerPool) -> Iterator[Hosting]:
    """One server with both models, which are loaded."""
    models = {entry["name"]: {"is_loaded_at_start": True, "aliases": entry.get("aliases", ())} for entry in MODELS}
    hosting = host_of(folder, tokenizer, workers, models, room=2)
    yield hosting
    hosting.app.state.services.storage.close()


@pytest.mark.parametrize(
    ("path", "body", "model"),
    [
        (CHAT, chat(model="a"), "a"),
        (CHAT, chat(model="b"), "b"),
        (CHAT, chat(model="Bee", stream=True), "b"),
        (CHAT, {"messages": MESSAGES}, "a"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * SHORT_BYTES}], "model": "b"}, "b"),
        ("/v1/messages", chat(model="b"), "b"),
        ("/v1/messages/count_tokens", {"model": "b", "messages": MESSAGES}, "b"),
        ("/v1/responses", {"model": "b", "input": "hi"}, "b"),
        ("/tokenize", {"model": "b", "prompt": "hi"}, "b"),
        ("/tokenize", {"prompt": "hi"}, "a"),
        ("/completion", {"model": "b", "prompt": "hi"}, "b"),
        ("/invocations", {"model": "b", "prompt": "hi"}, "b"),
        ("/api/chat", {"model": "BEE:latest", "messages": MESSAGES}, "b"),
        ("/api/show", {"name": "b:latest"}, "b"),
        ("/v1/models/b", None, "b"),
        ("/v1/models/Bee", None, "b"),
        ("/v1/capabilities?model=b", None, "b"),
        ("/tokenizer_info?model=Bee", None, "b"),
        ("/props?model=b", None, "b"),
        ("/ready?model=b", None, "b"),
        ("/version", None, "a"),
    ],
)
async def test_a_request_goes_to_the_model_that_it_names(front: Front, path: str, body: Any, model: str) -> None:
    await front.known()
    async with front.client as client:
        answer = await client.get(path) if body is None else await client.post(path, json=body)
    assert answer.status_code == (400 if len(answer.request.content) > SHORT_BYTES else 200), answer.text
    assert front.taken() == model


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}),
        ("/v1/messages/count_tokens", {"messages": MESSAGES}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/responses/input_tokens", {"input": "hi"}),
        ("/v1/responses/compact", {"input": "hi"}),
        ("/v1/embeddings", {"input": "hi"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/classify", {"input": "a"}),
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [1]}),
        ("/completion", {"prompt": "hi"}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
        ("/apply-template", {"messages": MESSAGES}),
        ("/invocations", {"prompt": "hi"}),
        ("/api/chat", {"messages": MESSAGES}),
        ("/api/generate", {"prompt": "hi"}),
        ("/api/embed", {"input": "hi"}),
        ("/api/embeddings", {"prompt": "hi"}),
        ("/api/show", {}),
        ("/api/pull", {}),
        ("/api/delete", {}),
        ("/nowhere", {}),
        ("/v1/models/{}", None),
        ("/v1/capabilities?model={}", None),
        ("/tokenizer_info?model={}", None),
        ("/props?model={}", None),
        ("/ready?model={}", None),
    ],
)
async def test_an_unknown_name_is_told_as_by_one_server(front: Front, one: Hosting, path: str, body: Any) -> None:
    await front.known()
    async with one.running() as its, front.client as ours:
        await one.settled("b", "loaded")
        sent = {"x-request-id": "r"}
        if body is None:
            answers = [await client.get(path.format("nobody"), headers=sent) for client in (ours, its)]
        else:
            answers = [
                await client.post(path, json={**body, "model": "nobody"}, headers=sent) for client in (ours, its)
            ]
    answer, its_answer = answers
    assert answer.status_code == its_answer.status_code >= 400
    assert answer.json() == its_answer.json()


def without_times(value: Any) -> Any:
    """A list of models without what differs between two servers."""
    if isinstance(value, dict):
        different = ("created", "created_at", "modified_at", "size", "memory_bytes")
        return {key: without_times(item) for key, item in value.items() if key not in different}
    return [without_times(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/models", {}),
        ("/models?limit=1", {}),
        ("/v1/models", ANTHROPIC),
        ("/v1/models?limit=1", ANTHROPIC),
        ("/v1/models?after_id=a", ANTHROPIC),
        ("/v1/models?limit=0", ANTHROPIC),
        ("/api/tags", {}),
        ("/api/ps", {}),
        ("/ready", {}),
        ("/ping", {}),
        ("/health", {}),
    ],
)
async def test_answers_about_all_models_are_those_of_one_server(
    front: Front, one: Hosting, path: str, headers: dict[str, str]
) -> None:
    await front.known()
    async with one.running() as its, front.client as ours:
        await asyncio.gather(*(one.settled(name, "loaded") for name in ("a", "b")))
        for served in one.app.state.services.models:
            await served.fingerprint.wait_known()
        answer, its_answer = [
            await client.get(path, headers={"x-request-id": "r", **headers}) for client in (ours, its)
        ]
    assert answer.status_code == its_answer.status_code
    if path == "/api/ps":  # replicas reserve no memory
        assert [model["name"] for model in answer.json()["models"]] == ["a:latest", "b:latest"]
    assert without_times(answer.json()) == without_times(its_answer.json())


async def test_a_model_without_a_replica_is_starting(front: Front) -> None:
    await front.known()
    front.replicas["b"].lost_after = 0
    async with front.client as client:
        models = (await client.get("/v1/models")).json()["data"]
        assert [(model["id"], model["status"]["value"]) for model in models] == [
            ("a", "loaded"), ("b", "loading"), ("Bee", "loading"),
        ]  # fmt: skip
        infos = (await client.get("/v1/models", headers=ANTHROPIC)).json()["data"]
        assert [(info["id"], info["max_tokens"]) for info in infos] == [("a", 256), ("b", None), ("Bee", None)]
        assert [model["name"] for model in (await client.get("/api/tags")).json()["models"]] == ["a:latest"]
        assert "`b` is not ready" in error_of(await client.get("/ready"), 503, "server_error")["message"]
        assert (await client.get("/ready?model=a")).status_code == 200
        assert (await client.get("/health")).status_code == 200
        assert {line["model_name"] for line in labels(await client.get("/metrics"))} == {"a"}
        front.replicas["a"].lost_after = 0
        for path in ("/api/tags", "/metrics"):
            assert (await client.get(path)).status_code == 503


async def test_a_replica_that_is_slow_does_not_keep_a_list(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(request: ForwardedRequest, session: str) -> AsyncGenerator[Accepted | Message]:
        await asyncio.Event().wait()
        yield Accepted("")

    monkeypatch.setattr("server.ray.models.ANSWER_S", 0.01)
    monkeypatch.setattr(front.replicas["a"], "answer", never)
    monkeypatch.setattr(front.replicas["b"], "answer", never)
    async with front.client as client:
        models = (await client.get("/v1/models")).json()["data"]
    assert {model["status"]["value"] for model in models} == {"loading"}


def labels(answer: httpx.Response) -> list[dict[str, str]]:
    """The labels of each model's metrics."""
    families = text_string_to_metric_families(answer.text)
    return [one.labels for family in families for one in family.samples if "model_name" in one.labels]


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/models/load"), ("POST", "/models/unload"), ("GET", "/v1/models/events"), ("GET", "/models/sse")],
)
async def test_ray_decides_what_is_loaded(front: Front, method: str, path: str) -> None:
    async with front.client as client:
        error = error_of(await client.request(method, path, json={"model": "a"}))
    assert error["code"] == "unsupported_value"
    assert "min_replicas" in error["message"]
    assert not any(one.forwarded for one in front.replicas.values())


async def test_a_missing_name_and_a_wish_to_stay_are_reported(front: Front) -> None:
    async with front.client as client:
        (notice,) = (await client.post(CHAT, json={"messages": MESSAGES})).json()["warnings"]
        assert notice["reason"] == "Missing; set to 'a', the default model."
        kept = {"model": "b", "messages": MESSAGES, "keep_alive": 60, "stream": False}
        (notice,) = (await client.post("/api/chat", json=kept)).json()["warnings"]
        assert notice["reason"] == "The model stays loaded: this server never unloads it."


@pytest.fixture
def keyed(make: Make, tmp_path: Path) -> Front:
    """anna may use both, ben one, and cleo none."""
    keys: dict[str, dict[str, Any]] = {"anna": {}, "ben": {"models": ["Bee"]}, "cleo": {"models": ["gone"]}}
    return make(api_keys_file=write_keys(tmp_path / "keys.yaml", **keys))


async def test_keys_see_their_own_models(keyed: Front) -> None:
    await keyed.known()
    listed = {"anna": ["a", "b", "Bee"], "ben": ["b", "Bee"], "cleo": []}
    measured = {"anna": {"a", "b"}, "ben": {"b"}, "cleo": set[str]()}
    async with keyed.client as client:
        for name, names in listed.items():
            headers = bearer(name)
            assert [one["id"] for one in (await client.get("/v1/models", headers=headers)).json()["data"]] == names
            tags = (await client.get("/api/tags", headers=headers)).json()["models"]
            assert [one["name"] for one in tags] == [f"{name}:latest" for name in names]
            metrics = await client.get("/metrics", headers=headers)
            assert {line["model_name"] for line in labels(metrics)} == measured[name]
            assert "http_requests_total" in metrics.text
        for one in keyed.replicas.values():
            one.lost_after = 0
        assert (await client.get("/v1/models", headers=bearer("cleo"))).json() == {"object": "list", "data": []}
        assert len((await client.get("/v1/models", headers=bearer("ben"))).json()["data"]) == 2
        for one in keyed.replicas.values():
            one.lost_after = None
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/ready")).status_code == 200
        assert (await client.get("/ready?model=b")).status_code == 401
        assert (await client.get("/ready?model=b", headers=bearer("ben"))).status_code == 200
        assert (await client.get("/ready?model=a", headers=bearer("ben"))).status_code == 404


async def test_a_forbidden_model_looks_like_an_unknown_one(keyed: Front) -> None:
    async with keyed.client as client:
        client.headers.update(bearer("ben"))
        assert (await client.post(CHAT, json={"messages": MESSAGES})).json()["model"] == "b"
        assert (await client.post(CHAT, json=chat(model="a"))).status_code == 404
        forbidden, unknown = [await client.get(f"/v1/models/{name}", headers={"x-request-id": "r"}) for name in "ax"]
        assert forbidden.status_code == 404
        assert forbidden.text == unknown.text.replace("`x`", "`a`")
        client.headers.update(bearer("cleo"))
        assert "any model" in error_of(await client.post(CHAT, json={"messages": MESSAGES}), 404)["message"]
        assert (await client.post(CHAT, json=chat(model="a"))).status_code == 404


def test_names_of_the_other_models_in_the_keys_file_are_known(keyed: Front, caplog: pytest.LogCaptureFixture) -> None:
    """The fixture has made the applications, so their warnings come before the test."""
    warnings = {record.getMessage() for record in caplog.get_records("setup")}
    assert warnings == {"The keys file names models that are not served: gone."}
