"""The request field for learning, its effect, and its metrics."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from model_runner.runner_interface import LearningStats
from scheduler.interface import EngineStats
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, COMPLETIONS, chat, client_of, completion, requested
from tests.server.test_endpoints import read_metrics

RESPONSES, MESSAGES, EMBEDDINGS = "/v1/responses", "/v1/messages", "/v1/embeddings"
BODIES: dict[str, Callable[..., dict[str, Any]]] = {
    CHAT: chat,
    COMPLETIONS: completion,
    RESPONSES: lambda **fields: {"model": "tiny", "input": "x", "max_output_tokens": 4, **fields},
    MESSAGES: lambda **fields: {
        "model": "tiny",
        "max_tokens": 4,
        "messages": [{"role": "user", "content": "x"}],
        **fields,
    },
}


@pytest.fixture
async def learning(make_app: Callable[..., FastAPI]) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(make_app(learn=True)) as client:
        yield client


def reported(response: httpx.Response) -> list[tuple[str, str]]:
    assert response.status_code == 200, response.text
    warnings = [(one["path"], one["reason"]) for one in response.json().get("warnings", [])]
    assert response.headers.get("x-samewise-ignored", "") == ", ".join(path for path, _ in warnings)
    return warnings


@pytest.mark.parametrize("path", BODIES)
async def test_every_dialect_says_whether_it_may_be_learnt_from(
    client: httpx.AsyncClient, learning: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    body = BODIES[path]
    for asked, learn in ((None, True), (True, True), (False, False)):
        assert (await requested(learning, engine, path, body(learn=asked))).learn is learn
        assert (await requested(client, engine, path, body(learn=asked))).learn is learn
        assert not reported(await learning.post(path, json=body(learn=asked)))
    assert not reported(await client.post(path, json=body(learn=False)))
    assert reported(await client.post(path, json=body(learn=True))) == [("learn", "This server does not learn.")]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"cache_salt": "mine"}, "Requests with a 'cache_salt' are not learnt from."),
        ({"beam_search": {"width": 2}}, "Beam search and contrastive search are not learnt from."),
        ({"penalty_alpha": 0.6}, "Beam search and contrastive search are not learnt from."),
    ],
)
async def test_a_permission_that_comes_to_nothing_is_reported(
    learning: httpx.AsyncClient, fields: dict[str, Any], reason: str
) -> None:
    assert reported(await learning.post(CHAT, json=chat(learn=True, **fields))) == [("learn", reason)]
    assert not reported(await learning.post(CHAT, json=chat(learn=False, **fields)))
    assert not reported(await learning.post(CHAT, json=chat(**fields)))


async def test_nothing_is_learnt_from_what_is_only_read(learning: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"model": "tiny", "input": "x"}
    assert reported(await learning.post(EMBEDDINGS, json={**body, "learn": True})) == [
        ("learn", "Heads are trained only on generated answers.")
    ]
    assert not reported(await learning.post(EMBEDDINGS, json={**body, "learn": False}))


async def test_capabilities_list_it(learning: httpx.AsyncClient) -> None:
    endpoints = (await learning.get("/v1/capabilities")).json()["endpoints"]
    for path in (*BODIES, EMBEDDINGS):
        assert endpoints[path]["learn"]["support"] == "hint"


async def test_metrics_of_learning(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    async def seen() -> dict[str, float]:
        metrics = await read_metrics(client)
        return {name.removeprefix("samewise:"): value for name, value in metrics.items() if "learning" in name}

    assert await seen() == {}
    engine.stats = EngineStats(learning=LearningStats(pieces_dropped=3))
    counts = {"learning_tokens_total": 0, "learning_pieces_dropped_total": 3, "learning_steps_total": 0}
    assert await seen() == {**counts, "learning_publications_total": 0, "learning_rollbacks_total": 0}
    engine.stats = EngineStats(learning=LearningStats(900, 3, 7, 2, 1, 1.25, 1.75))
    assert await seen() == {
        "learning_tokens_total": 900,
        "learning_pieces_dropped_total": 3,
        "learning_steps_total": 7,
        "learning_publications_total": 2,
        "learning_rollbacks_total": 1,
        "learning_tokens_per_step,first": 1.25,
        "learning_tokens_per_step,current": 1.75,
    }
