"""The soak itself: it must see what is wrong with a server, and nothing where nothing is."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from bench.soak import SoakPlan, SoakReport, soak
from bench.soak_mix import SoakTarget, make_mix
from tests.cli.fake_openai import running

NOT_IN_ANSWERS = ("stream", "max_tokens", "speculation", "prediction")


@dataclass
class Served:
    """Answers are determined by the request, unless a fault is switched on."""

    moody: bool = False
    leaky: bool = False
    flaky: bool = False
    asked: int = 0
    most_in_flight: int = 0
    in_flight: int = 0

    def app(self) -> Starlette:
        post = [Route(path, self.generate, methods=["POST"]) for path in ("/v1/completions", "/v1/chat/completions")]
        get = [Route("/v1/capabilities", self.capabilities), Route("/metrics", self.metrics)]
        return Starlette(routes=[*get, *post])

    async def capabilities(self, request: Request) -> Response:
        return JSONResponse({"model": "m", "vocab_size": 100, "speculation": {"methods": ["auto", "ngram"]}})

    async def metrics(self, request: Request) -> Response:
        held = {"num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage_perc": 0.5 if self.leaky else 0}
        return PlainTextResponse(
            "".join(f'samewise:{name}{{model_name="m"}} {value}\n' for name, value in held.items())
        )

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        self.asked += 1
        if self.flaky and self.asked % 10 == 0:
            return JSONResponse({"error": {"message": "Out of luck."}}, status_code=500)
        key = {name: value for name, value in body.items() if name not in NOT_IN_ANSWERS}
        text = f"{sorted(key.items())}{self.asked if self.moody else ''}"
        if body["stream"]:
            return StreamingResponse(self.stream(body, text), media_type="text/event-stream")
        field = {"message": {"content": text}} if "messages" in body else {"text": text}
        return JSONResponse(
            {"choices": [{"index": i, **field, "finish_reason": "stop"} for i in range(body.get("n", 1))]}
        )

    async def stream(self, body: dict[str, Any], text: str) -> AsyncIterator[str]:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            for start in range(0, len(text), 20):
                for index in range(body.get("n", 1)):
                    piece = text[start : start + 20]
                    field = {"delta": {"content": piece}} if "messages" in body else {"text": piece}
                    reason = "stop" if start + 20 >= len(text) else None
                    yield f"data: {json.dumps({'choices': [{'index': index, **field, 'finish_reason': reason}]})}\n\n"
                await asyncio.sleep(0)
            yield "data: [DONE]\n\n"
        finally:
            self.in_flight -= 1


@pytest.fixture
def served() -> Served:
    return Served()


@pytest.fixture
def plan(served: Served) -> Iterator[SoakPlan]:
    with running(served.app()) as address:
        yield SoakPlan(address.removesuffix("/v1"), requests=60, clients=8, checked=10)


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.soak.SETTLE_S", 0.2)


async def test_a_good_server_has_no_problems(plan: SoakPlan, served: Served) -> None:
    report = await soak(plan)
    assert report.problems == []
    assert report.completed + report.left == 60
    assert 3 <= report.left <= 25
    assert report.checked == 10
    assert 2 <= served.most_in_flight <= 8


async def test_answers_that_change_are_seen(plan: SoakPlan, served: Served) -> None:
    served.moody = True
    report = await soak(plan)
    assert len(report.mismatches) == len(report.problems) == 10


async def test_blocks_that_stay_are_seen(plan: SoakPlan, served: Served) -> None:
    served.leaky = True
    assert (await soak(plan)).problems == ["samewise:kv_cache_usage_perc is 0.5, not 0"]


async def test_requests_that_fail_are_seen(plan: SoakPlan, served: Served) -> None:
    served.flaky = True
    report = await soak(SoakPlan(plan.url, requests=60, clients=8, checked=0))
    assert report.problems == ["6 x HTTP 500: Out of luck."]


def test_memory_that_grows_is_seen() -> None:
    flat = [100.0, 180.0, 200.0, 200.0, 201.0, 199.0, 204.0, 200.0]
    grown = [100.0, 180.0, 200.0, 200.0, 220.0, 240.0, 260.0, 280.0]
    assert SoakReport(memory_mib={1: flat, 2: []}).problems == []
    assert SoakReport(memory_mib={1: flat, 2: grown}).problems == ["process 2 grew from 200 to 280 MiB"]


def test_the_mix_is_mixed_and_repeatable() -> None:
    target = SoakTarget("m", 100, ("auto", "ngram", "prediction"))
    mix = make_mix(400, 0.2, target, seed=1)
    assert mix == make_mix(400, 0.2, target, seed=1) != make_mix(400, 0.2, target, seed=2)
    speculation = [request.body["speculation"] for request in mix if "speculation" in request.body]
    named = [one["method"] for one in speculation if one != "off"]
    assert 0 < len(named) < len(speculation)
    assert set(named) == {"auto", "ngram"}
    assert any("prediction" in request.body for request in mix)
    assert not any({"prediction", "speculation"} <= request.body.keys() for request in mix)
    assert 50 <= sum(request.leaves_after is not None for request in mix) <= 110
    assert {request.path for request in mix} == {"/v1/completions", "/v1/chat/completions"}
    assert {request.body["stream"] for request in mix} == {True, False}
    assert all("seed" in request.body for request in mix)
    lengths = [len(request.body["prompt"]) for request in mix if "prompt" in request.body]
    assert min(lengths) <= 3
    assert max(lengths) >= 200
