"""The front before replicas that run in this process: what it passes on, what it refuses, and how streams end."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from openai import APIError, OpenAI
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from server.config import Settings
from server.errors import UnavailableError
from server.ray.exchange import Accepted, AnswerStreams, ForwardedRequest
from server.ray.front import create_front
from server.ray.models import ModelReplicas
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, COMPLETIONS, chat, client_of, completion, error_of, serving
from tests.server.tenants.keys import bearer, write_keys
from tests.waiting import until

LOST = UnavailableError("The replica is gone.")
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: chat(),
    COMPLETIONS: completion(),
    MESSAGES: chat(),
    RESPONSES: {"model": "tiny", "input": "hi", "max_output_tokens": 16},
}


@dataclass
class LocalReplicas:
    """Applications, of which the first answers all requests."""

    apps: Sequence[FastAPI]
    sessions: list[str] = field(default_factory=list)
    forwarded: list[ForwardedRequest] = field(default_factory=list)
    lost_after: int | None = None
    """Messages of an answer before the replica is lost."""
    is_lost_at_the_end: bool = False

    async def answer(self, request: ForwardedRequest, session: str) -> AsyncGenerator[Accepted | Message]:
        self.sessions.append(session)
        self.forwarded.append(request)
        if self.lost_after == 0:
            raise LOST
        yield Accepted("replica-0")
        async with aclosing(AnswerStreams(self.apps[0]).to(request)) as messages:
            number = 0
            async for message in messages:
                yield message
                number += 1
                if number == self.lost_after:
                    raise LOST
        if self.is_lost_at_the_end:
            raise LOST

    async def metrics(self) -> Sequence[tuple[str, Sequence[Metric]]]:
        if self.lost_after == 0:
            raise LOST
        return [(f"replica-{number}", app.state.services.collect()) for number, app in enumerate(self.apps)]


@pytest.fixture
def replicas(make_app: Callable[..., FastAPI]) -> LocalReplicas:
    return LocalReplicas([make_app(), make_app()])


@pytest.fixture
def front(replicas: LocalReplicas) -> FastAPI:
    return create_front([ModelReplicas(replicas)], Settings(), has_many=True)  # type: ignore[return-value]


@pytest.fixture
def address(front: FastAPI) -> Iterator[str]:
    with serving(front) as address:
        yield address


def without_ids(response: httpx.Response) -> str:
    """The part of an answer that does not change."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: {")]
    body = [json.loads(line) for line in lines] or [response.json()]
    return json.dumps([{key: value for key, value in one.items() if key not in ("id", "created")} for one in body])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_answers_are_the_replica_s(replicas: LocalReplicas, front: FastAPI, path: str, stream: bool) -> None:
    body = {**BODIES[path], "seed": 1, "stream": stream}
    async with client_of(front) as ours, client_of(replicas.apps[0]) as its:
        answer = await ours.post(path, json=body)
        assert without_ids(answer) == without_ids(await its.post(path, json=body))
    assert answer.headers["x-samewise-replica"] == "replica-0"


async def test_so_are_errors_and_other_paths(replicas: LocalReplicas, front: FastAPI) -> None:
    for app in replicas.apps:
        await app.state.services.models.default.fingerprint.wait_known()  # or it would not be ready
    async with client_of(front) as client:
        assert error_of(await client.post(CHAT, json=chat(temperatur=1)))["param"] == "temperatur"
        assert error_of(await client.get("/nowhere"), 404)["code"] == "unknown_url"
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "tiny"
        assert (await client.get("/ready")).json() == {"status": "ready"}


@pytest.mark.parametrize("content", [b"", b"{", b'{"a":"\xff"}', b"[" * 100_000, b"[1]", b'{"a":1e999}', b"\0"])
async def test_what_is_no_json_object_is_the_replica_s_to_refuse(
    replicas: LocalReplicas, front: FastAPI, content: bytes
) -> None:
    headers = {"content-type": "application/json"}
    async with client_of(front) as ours, client_of(replicas.apps[0]) as its:
        answer, its_answer = [await client.post(RESPONSES, content=content, headers=headers) for client in (ours, its)]
    assert error_of(answer) == error_of(its_answer)


async def test_the_client_s_headers_and_query_come_along(replicas: LocalReplicas, front: FastAPI) -> None:
    async with client_of(front) as client:
        await client.get("/v1/models?limit=1", headers={"anthropic-version": "2023-06-01"})
    (request,) = replicas.forwarded
    assert request.scope["query_string"] == b"limit=1"
    assert (b"anthropic-version", b"2023-06-01") in request.scope["headers"]


def test_a_stream_passes_through_as_it_comes(address: str, engine: FakeEngine) -> None:
    """Every token waits until the one before was read."""
    engine.step_delay_s = 0.02
    with OpenAI(base_url=f"{address}/v1", api_key="-") as client:
        stream = client.chat.completions.create(**chat(max_tokens=20), stream=True)  # type: ignore[call-overload]
        next(stream)
        assert engine.num_live == 1
        assert len(list(stream)) > 10
    assert engine.num_live == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_the_work(address: str, engine: FakeEngine, stream: bool) -> None:
    engine.step_delay_s = 0.02
    async with httpx.AsyncClient() as client:
        body = chat(max_tokens=200, stream=stream)
        task = asyncio.create_task(client.post(address + CHAT, json=body))
        await until(lambda: engine.num_live == 1)
        task.cancel()
        await asyncio.wait([task])
    await until(lambda: engine.num_live == 0)
    assert len(engine.closed_early) == 1


@pytest.mark.parametrize("path", BODIES)
async def test_without_a_replica_there_is_an_error(replicas: LocalReplicas, front: FastAPI, path: str) -> None:
    replicas.lost_after = 0
    async with client_of(front) as client:
        answer = await client.post(path, json=BODIES[path])
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == LOST.message
        assert answer.headers["x-should-retry"] == "true"
        assert (await client.get("/metrics")).status_code == 503


def test_a_handshake_is_told_that_there_are_no_websockets(front: FastAPI) -> None:
    with serving(front, {RESPONSES: 1000}) as address, pytest.raises(InvalidStatus) as answer:
        connect(f"ws{address.removeprefix('http')}{RESPONSES}", proxy=None)
    response = answer.value.response
    assert response.status_code == 426
    assert json.loads(response.body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_that_breaks_off_says_so(replicas: LocalReplicas, front: FastAPI, path: str) -> None:
    replicas.lost_after = 4
    async with client_of(front) as client:
        answer = await client.post(path, json={**BODIES[path], "stream": True})
    assert answer.status_code == 200
    *events, last = answer.text.removesuffix("\n\n").split("\n\n")
    if path in (CHAT, COMPLETIONS, RESPONSES):
        assert last == "data: [DONE]"
        last = events.pop()
    data = json.loads(last.partition("data: ")[2])
    error = data if path == RESPONSES else data["error"]
    assert error["message"] == LOST.message
    assert [event for event in events if "error" in event.partition("data: ")[0] or LOST.message in event] == []
    if path == RESPONSES:
        assert last.startswith("event: error\n")
        numbers = [json.loads(event.partition("data: ")[2])["sequence_number"] for event in events]
        assert data["sequence_number"] > max(numbers)
        assert data["code"] == "server_error"
    if path == MESSAGES:
        assert last.startswith("event: error\n")
        assert data["type"] == "error"
        assert data["request_id"] == answer.headers["request-id"]


def test_clients_raise_what_it_says(replicas: LocalReplicas, address: str) -> None:
    replicas.lost_after = 4
    with OpenAI(base_url=f"{address}/v1", api_key="-") as client, pytest.raises(APIError, match=LOST.message):
        for _ in client.chat.completions.create(**chat(), stream=True):  # type: ignore[call-overload]
            pass


async def test_an_answer_that_is_no_stream_breaks_off(replicas: LocalReplicas, address: str) -> None:
    """With its status and length sent, an error can be told in no other way."""
    replicas.lost_after = 1
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get(f"{address}/v1/models")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_replica_that_is_lost_after_its_answer_is_not_missed(
    replicas: LocalReplicas, address: str, stream: bool
) -> None:
    async with httpx.AsyncClient() as client:
        body = chat(seed=1, stream=stream)
        whole = await client.post(address + CHAT, json=body)
        replicas.is_lost_at_the_end = True
        assert without_ids(await client.post(address + CHAT, json=body)) == without_ids(whole)


async def test_what_is_stored_is_refused_where_there_may_be_several(front: FastAPI, replicas: LocalReplicas) -> None:
    async with client_of(front) as client:
        error = error_of(await client.get("/v1/responses/resp_1"))
        assert "max_replicas=1" in error["message"]
        body = {**BODIES[RESPONSES], "previous_response_id": "resp_1"}
        assert error_of(await client.post(RESPONSES, json=body))["param"] == "previous_response_id"
        assert replicas.forwarded == []
        answer = await client.post(RESPONSES, json=BODIES[RESPONSES])
        assert answer.json()["store"] is False


async def test_a_single_replica_stores(replicas: LocalReplicas) -> None:
    front = create_front([ModelReplicas(replicas)], Settings(), has_many=False)
    async with client_of(front) as client:  # type: ignore[arg-type]
        first = (await client.post(RESPONSES, json=BODIES[RESPONSES])).json()
        assert first["store"] is True
        body = {**BODIES[RESPONSES], "previous_response_id": first["id"]}
        assert (await client.post(RESPONSES, json=body)).status_code == 200
        assert (await client.get(f"{RESPONSES}/{first['id']}")).json()["id"] == first["id"]


async def test_requests_of_a_session_have_its_name(front: FastAPI, replicas: LocalReplicas) -> None:
    async with client_of(front) as client:
        for body in (chat(), chat(temperature=0), chat(cache_salt="a")):
            await client.post(CHAT, json=body)
        await client.get("/v1/models")
    first, second, salted, none = replicas.sessions
    assert first == second != salted
    assert none == ""


async def test_isolated_keys_have_their_own_sessions(replicas: LocalReplicas, tmp_path: Any) -> None:
    settings = Settings(api_keys_file=write_keys(tmp_path / "keys.yaml", one={}, two={}), isolate_keys=True)
    async with client_of(create_front([ModelReplicas(replicas)], settings, has_many=True)) as client:  # type: ignore[arg-type]
        for name in ("one", "two", "one"):
            await client.post(CHAT, json=chat(), headers=bearer(name))
    assert replicas.sessions[0] == replicas.sessions[2] != replicas.sessions[1]


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer sk-wrong"}, {"x-api-key": ""}])
@pytest.mark.parametrize("path", [*BODIES, "/nowhere", "/v1/files"])
async def test_without_a_key_nothing_is_read_and_the_answer_is_the_replica_s(
    make_app: Callable[..., FastAPI], path: str, headers: dict[str, str]
) -> None:
    replicas = LocalReplicas([make_app(api_key="sk-right")])
    front = create_front([ModelReplicas(replicas)], Settings(api_key="sk-right"), has_many=True)  # type: ignore[arg-type]
    was_read = False

    async def body() -> AsyncGenerator[bytes]:
        nonlocal was_read
        was_read = True
        yield b"{}"

    async with client_of(front) as ours, client_of(replicas.apps[0]) as its:  # type: ignore[arg-type]
        sent = {**headers, "x-request-id": "r"}
        answer, its_answer = await ours.post(path, content=body(), headers=sent), await its.post(path, headers=sent)
    assert (answer.status_code, answer.json()) == (401, its_answer.json())
    missing = its_answer.headers.items() - answer.headers.items()
    assert missing == {("x-request-id", "r")}  # Ray adds the one that it knows
    assert not was_read
    assert replicas.forwarded == []


async def test_with_a_key_and_on_open_paths_replicas_answer(make_app: Callable[..., FastAPI]) -> None:
    replicas = LocalReplicas([make_app(api_key="sk-right")])
    front = create_front([ModelReplicas(replicas)], Settings(api_key="sk-right"), has_many=True)  # type: ignore[arg-type]
    async with client_of(front) as client:  # type: ignore[arg-type]
        assert (await client.get("/health")).status_code == 200
        assert (await client.post(CHAT, json=chat(), headers={"x-api-key": "sk-right"})).status_code == 200


async def test_files_are_not_looked_into(replicas: LocalReplicas) -> None:
    front = create_front([ModelReplicas(replicas)], Settings(), has_many=False)
    async with client_of(front) as client:  # type: ignore[arg-type]
        await client.post("/v1/files", json=chat())
        await client.post(CHAT, json=chat())
    of_files, of_chat = replicas.sessions
    assert (of_files, bool(of_chat)) == ("", True)


async def test_metrics_are_those_of_all_replicas(front: FastAPI) -> None:
    async with client_of(front) as client:
        await client.post(CHAT, json=chat())
        answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    tokens = {sample.labels["replica"]: sample.value for sample in families["samewise:generation_tokens"].samples}
    assert tokens == {"replica-0": 5.0, "replica-1": 0.0}
    requests = families["samewise:http_requests"].samples
    assert {one.labels["replica"] for one in requests} == {"replica-0"}
    for family in families.values():
        assert len({(one.name, *sorted(one.labels.items())) for one in family.samples}) == len(family.samples)
        assert all("replica" in one.labels for one in family.samples)


async def test_without_keys_a_stranger_s_name_leads_nowhere(replicas: LocalReplicas) -> None:
    front = create_front([ModelReplicas(replicas)], Settings(allowed_hosts=["llm.example.com"]), has_many=True)  # type: ignore[arg-type]
    async with client_of(front) as client:  # type: ignore[arg-type]
        for host, status in (("evil.example", 403), ("llm.example.com", 200), ("10.0.0.7:8000", 200)):
            assert (await client.get("/v1/models", headers={"host": host})).status_code == status
    assert len(replicas.forwarded) == 2


@pytest.mark.parametrize("is_open", [False, True])
async def test_metrics_of_servers_with_keys_are_for_keys(make_app: Callable[..., FastAPI], is_open: bool) -> None:
    keyed = {"api_key": "k", "open_metrics": is_open}
    front = create_front([ModelReplicas(LocalReplicas([make_app(**keyed)]))], Settings(**keyed), has_many=True)
    async with client_of(front) as client:  # type: ignore[arg-type]
        assert (await client.post(CHAT, json=chat(), headers={"x-api-key": "k"})).status_code == 200
        without = await client.get("/metrics")
        with_key = await client.get("/metrics", headers={"x-api-key": "k"})
    assert without.status_code == (200 if is_open else 401)
    assert ('tenant="' in without.text, 'tenant="' in with_key.text) == (False, True)


def counted(replicas: LocalReplicas, page: str) -> dict[tuple[str, str, str], float]:
    """Requests that the front answered itself: method, handler and status."""
    families = {family.name: family for family in text_string_to_metric_families(page)}
    return {
        (one.labels["method"], one.labels["handler"], one.labels["status"]): one.value
        for one in families["tiny:http_requests"].samples
        if one.labels["replica"] == "ingress" and one.name.endswith("_total")
    }


async def test_the_front_s_own_answers_are_counted_and_logged(
    make_app: Callable[..., FastAPI], caplog: pytest.LogCaptureFixture
) -> None:
    replicas = LocalReplicas([make_app(metrics_prefix="tiny")])
    settings = Settings(metrics_prefix="tiny", max_body_mib=0.001, api_key="k")
    front = create_front([ModelReplicas(replicas)], settings, has_many=True)
    caplog.set_level("INFO", "samewise.access")
    async with client_of(front) as client:  # type: ignore[arg-type]
        await client.post(CHAT, json=chat())
        client.headers["x-api-key"] = "k"
        await client.post(MESSAGES, json={"messages": "x" * 2000})
        await client.get("/v1/responses/resp_1")
        replicas.lost_after = 4
        await client.post(CHAT, json=chat(stream=True))
        replicas.lost_after = 0
        await client.post(CHAT, json=chat())
        await client.get("/metrics")
        await client.get("/nowhere")
        replicas.lost_after = None
        await client.post(CHAT, json=chat())
        page = (await client.get("/metrics")).text
    assert counted(replicas, page) == {
        ("POST", CHAT, "401"): 1,
        ("POST", MESSAGES, "413"): 1,
        ("GET", "/v1/responses/{response_id}", "400"): 1,
        ("POST", CHAT, "503"): 2,
        ("GET", "/metrics", "503"): 1,
        ("GET", "unmatched", "503"): 1,
    }
    lines = [record.__dict__ for record in caplog.records if record.name == "samewise.access"]
    own = [(line["route"], line["status"]) for line in lines if line["status"] != 200]
    counted_once = {(CHAT, 401), (MESSAGES, 413), ("/v1/responses/{response_id}", 400), ("unmatched", 503)}
    assert sorted(own) == sorted([*counted_once, (CHAT, 503), (CHAT, 503)])


async def test_a_client_that_does_not_wait_for_a_replica_is_counted(
    replicas: LocalReplicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_asked = asyncio.Event()

    async def never(*_: Any) -> AsyncGenerator[Accepted]:
        is_asked.set()
        await asyncio.Event().wait()
        yield Accepted("")

    monkeypatch.setattr(replicas, "answer", never)
    front = create_front([ModelReplicas(replicas)], Settings(metrics_prefix="tiny"), has_many=True)
    with serving(front) as address:  # type: ignore[arg-type]
        async with httpx.AsyncClient() as client:
            task = asyncio.create_task(client.post(address + CHAT, json=chat()))
            await is_asked.wait()
            task.cancel()
            await asyncio.wait([task])
            answers: dict[tuple[str, str, str], float] = {}
            while ("POST", CHAT, "499") not in answers:
                answers = counted(replicas, (await client.get(f"{address}/metrics")).text)
    assert answers["POST", CHAT, "499"] == 1


async def test_a_body_that_is_too_large_is_not_read(replicas: LocalReplicas) -> None:
    front = create_front([ModelReplicas(replicas)], Settings(max_body_mib=0.001), has_many=True)
    async with client_of(front) as client:  # type: ignore[arg-type]
        answer = await client.post(MESSAGES, json={"messages": "x" * 2000})
    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "request_too_large"


async def test_pages_of_other_origins_can_read_the_front_s_own_errors(replicas: LocalReplicas) -> None:
    replicas.lost_after = 0
    front = create_front([ModelReplicas(replicas)], Settings(cors_origins="https://a.example"), has_many=True)  # type: ignore[arg-type]
    async with client_of(front) as client:  # type: ignore[arg-type]
        answer = await client.post(CHAT, json=chat(), headers={"origin": "https://a.example"})
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    assert "x-samewise-replica" in answer.headers["access-control-expose-headers"].split(", ")


async def test_under_a_prefix_paths_are_the_same(front: FastAPI) -> None:
    transport = httpx.ASGITransport(app=front, root_path="/llm")
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.post(f"/llm{CHAT}", json=chat())).status_code == 200
        assert error_of(await client.get("/llm/v1/files"))
        assert "'/llm/openapi.json'" in (await client.get("/llm/docs")).text
        assert (await client.get("/llm/openapi.json")).status_code == 200


async def test_a_prefix_that_paths_begin_with_is_taken_off_once(front: FastAPI) -> None:
    transport = httpx.ASGITransport(app=front, root_path="/v1")
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.post(f"/v1{CHAT}", json=chat())).status_code == 200


async def test_a_bug_is_told_as_one(front: FastAPI, replicas: LocalReplicas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "metrics", None)
    async with client_of(front) as client:
        error = error_of(await client.get("/metrics"), 500, "server_error")
    assert "request's id" in error["message"]


async def test_short_paths_are_full_ones_before_anything_looks_at_them(front: FastAPI, replicas: LocalReplicas) -> None:
    async with client_of(front) as client:
        assert (await client.post(RESPONSES.removeprefix("/v1"), json=BODIES[RESPONSES])).status_code == 200
        stored = {**BODIES[RESPONSES], "store": True}
        assert error_of(await client.post("/responses", json=stored))["param"] == "store"
        assert error_of(await client.get("/files"))["code"] == "unsupported_value"
    (forwarded,) = replicas.forwarded
    assert (forwarded.scope["path"], json.loads(forwarded.body)["store"]) == (RESPONSES, False)
