"""Limits of a key: 429 with a time to retry, headers on every answer, and refunds of unused tokens."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import openai
import pytest
from fastapi import FastAPI
from openai import OpenAI

from model_runner.contract import Failure
from server.engine.client import QueueFullError
from server.errors import LimitError, QuotaError, RequestLimitError, TokenLimitError
from server.storage.usage import Used
from server.tenants.keys import Tenant, TenantLimits
from server.tenants.rate_limits import Cost, RateLimits
from server.tenants.usage_counters import UsageCounters
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, COMPLETIONS, chat, completion, error_of, serving
from tests.server.tenants.keys import Clock, of_tenant
from tests.waiting import until

REQUESTS = {"requests_per_minute": 2}
TOKENS = {"tokens_per_minute": 40}


def remaining(response) -> int:
    return int(response.headers["x-ratelimit-remaining-tokens"])


async def settled(app: FastAPI) -> None:
    await asyncio.gather(*app.state.services.accounts.limits._corrections)


async def test_requests_a_minute(make_with_keys, clock: Clock) -> None:
    async with of_tenant(make_with_keys({"ann": REQUESTS}), "ann") as client:
        for left in (1, 0):
            response = await client.post(CHAT, json=chat())
            assert response.status_code == 200
            assert response.headers["x-ratelimit-limit-requests"] == "2"
            assert response.headers["x-ratelimit-remaining-requests"] == str(left)
        response = await client.post(CHAT, json=chat())
        error = error_of(response, 429, "requests")
        assert error["code"] == "rate_limit_exceeded"
        assert error["message"] == (
            "Rate limit reached for requests per minute: limit 2, used 2, requested 1. Please try again in 1m0s."
        )
        assert response.headers["retry-after"] == "60"
        assert response.headers["x-should-retry"] == "true"
        assert response.headers["x-ratelimit-reset-requests"] == "1m30s"
        clock.now += 60
        assert (await client.post(CHAT, json=chat())).status_code == 200


COUNTED = {
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/v1/responses/input_tokens": {"input": "x"},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/conversations": {},
    CHAT: {"model": "tiny", "messages": "a mistake"},
    COMPLETIONS: {"model": "another"},
}


@pytest.mark.parametrize("path", COUNTED)
async def test_whatever_has_a_body_counts_as_a_request_and_one_too_many_is_not_taken_in(
    make_with_keys, clock: Clock, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    app = make_with_keys({"ann": REQUESTS, "bob": {}})
    async with of_tenant(app, "ann") as ann, of_tenant(app, "bob") as bob:
        for left in (1, 0):
            response = await ann.post(path, json=COUNTED[path])
            assert response.status_code < 429
            assert response.headers["x-ratelimit-remaining-requests"] == str(left)
        with monkeypatch.context() as patch:
            patch.setattr("fastapi.Request.stream", None)
            response = await ann.post(path, json=COUNTED[path])
        assert response.status_code == 429
        assert response.headers["x-ratelimit-remaining-requests"] == "0"
        assert (await ann.get("/v1/models")).status_code == 200, "what has no body does not count"
        assert (await bob.post(path, json=COUNTED[path])).status_code < 429


async def test_a_body_without_a_length_counts(make_with_keys, clock: Clock) -> None:
    async def pieces():
        yield b"{}"

    async with of_tenant(make_with_keys({"ann": REQUESTS}), "ann") as client:
        headers = {"content-type": "application/json"}
        statuses = [(await client.post("/tokenize", content=pieces(), headers=headers)).status_code for _ in range(3)]
    assert statuses == [400, 400, 429]


async def test_tokens_a_minute_are_reserved_and_what_was_not_used_is_given_back(
    make_with_keys, engine: FakeEngine, clock: Clock
) -> None:
    app = make_with_keys({"ann": TOKENS})
    engine.step_delay_s = 0.01
    async with of_tenant(app, "ann") as client:
        body = completion(prompt="x" * 10, max_tokens=20)
        num_prompt = (await client.post("/tokenize", json={"model": "tiny", "prompt": "x" * 10})).json()["count"]
        first = asyncio.create_task(client.post(COMPLETIONS, json=body))
        await until(lambda: engine.requests)
        response = await client.post(COMPLETIONS, json=body)
        error = error_of(response, 429, "tokens")
        assert error["code"] == "rate_limit_exceeded"
        assert f"limit 40, used {num_prompt + 20}, requested {num_prompt + 20}" in error["message"]
        assert (await first).json()["usage"]["total_tokens"] == num_prompt + 20
        await settled(app)
        assert remaining(await client.get("/v1/models")) == 40 - num_prompt - 20
        clock.now += 120
        engine.script = lambda request, choice: [ord("a"), 257]  # an end after one token
        response = await client.post(COMPLETIONS, json={**body, "stop": "a"})
        used = response.json()["usage"]["total_tokens"]
        assert used < num_prompt + 20
        await settled(app)
        assert remaining(await client.get("/v1/models")) == 40 - used


@pytest.mark.parametrize("how", ["fails", "is refused", "is left", "is streamed and left"])
async def test_tokens_come_back_when_a_request(make_with_keys, engine: FakeEngine, clock: Clock, how: str) -> None:
    app = make_with_keys({"ann": TOKENS})
    body = completion(prompt="x" * 4, max_tokens=30)
    async with of_tenant(app, "ann") as client:
        num_prompt = (await client.post("/tokenize", json={"model": "tiny", "prompt": "x" * 4})).json()["count"]
        if how == "fails":
            engine.fail_after, engine.error_output = 3, Failure("no")
            assert (await client.post(COMPLETIONS, json=body)).status_code == 500
            used = num_prompt + 3
        elif how == "is refused":
            engine.refuse = QueueFullError("full")
            assert (await client.post(COMPLETIONS, json=body)).status_code == 429
            used = 0
        else:
            engine.step_delay_s = 0.005
            run = client.post(COMPLETIONS, json={**body, "stream": how != "is left"})
            task = asyncio.create_task(run)
            await until(lambda: engine.requests)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: not engine.num_live)
            used = None
        await settled(app)
        left = remaining(await client.get("/v1/models"))
    assert left >= 40 - num_prompt - 3 if used is None else left == 40 - used


async def test_a_prompt_that_never_fits_is_not_tried_again(make_with_keys, clock: Clock) -> None:
    async with of_tenant(make_with_keys({"ann": TOKENS | {"max_choices": 2}}), "ann") as client:
        response = await client.post(COMPLETIONS, json=completion(prompt="x" * 100))
        assert (
            "Request too large for this key: limit 40 tokens per minute" in error_of(response, 429, "tokens")["message"]
        )
        assert response.headers["x-should-retry"] == "false"
        assert "retry-after" not in response.headers
        response = await client.post(COMPLETIONS, json=completion(n=3))
        assert "asks for 3 answers at a time" in error_of(response, 429, "requests")["message"]
        assert response.headers["x-should-retry"] == "false"
        response = await client.post(CHAT, json={"model": "tiny", "messages": chat()["messages"]})
        assert response.status_code == 200, "an answer that may be as long as it can takes what there is"


GUIDANCE = {"scale": 2, "negative_prompt": "y" * 12}


async def test_a_negative_prompt_counts_as_a_prompt(make_with_keys, clock: Clock) -> None:
    app = make_with_keys({"ann": TOKENS})
    async with of_tenant(app, "ann") as client:
        sizes = {}
        for letter, count in (("x", 4), ("y", 12)):
            counted = await client.post("/tokenize", json={"model": "tiny", "prompt": letter * count})
            sizes[letter] = counted.json()["count"]
        body = completion(prompt="xxxx", max_tokens=3, n=2, guidance=GUIDANCE)
        response = await client.post(COMPLETIONS, json=body)
        used = sizes["x"] + sizes["y"] + 2 * 3
        assert remaining(response) == 40 - used, "what is reserved"
        assert response.json()["usage"]["total_tokens"] == sizes["x"] + 2 * 3, "the answer tells of itself alone"
        await settled(app)
        assert remaining(await client.get("/v1/models")) == 40 - used
        (day,) = (await client.get("/v1/usage")).json()["data"]
        assert (day["input_tokens"], day["output_tokens"]) == (sizes["x"] + sizes["y"], 2 * 3)
        too_long = {**GUIDANCE, "negative_prompt": "y" * 60}
        response = await client.post(COMPLETIONS, json={**body, "guidance": too_long})
        assert "Request too large for this key" in error_of(response, 429, "tokens")["message"]


SEARCH = {"beam_search": {"width": 3, "num_return": 1}}


async def test_each_beam_counts_as_an_answer_at_a_time(make_with_keys, engine: FakeEngine) -> None:
    async with of_tenant(make_with_keys({"ann": {"max_choices": 5}}), "ann") as client:
        response = await client.post(COMPLETIONS, json=completion(prompt=["x", "y"], **SEARCH))
        assert "asks for 6 answers at a time" in error_of(response, 429, "requests")["message"]
        engine.step_delay_s = 0.005
        first = asyncio.create_task(client.post(COMPLETIONS, json=completion(max_tokens=50, **SEARCH)))
        await until(lambda: engine.requests)
        response = await client.post(COMPLETIONS, json=completion(n=3))
        assert "limit 5, running 3, requested 3" in error_of(response, 429, "requests")["message"]
        assert (await first).status_code == 200


@pytest.mark.parametrize("how", ["ends", "fails"])
async def test_what_all_beams_draw_is_output(make_with_keys, engine: FakeEngine, clock: Clock, how: str) -> None:
    app = make_with_keys({"ann": TOKENS})
    if how == "fails":
        engine.fail_after, engine.failure = 2, RuntimeError("broken")
    async with of_tenant(app, "ann") as client:
        response = await client.post(COMPLETIONS, json=completion(prompt=[1, 2, 3], max_tokens=5, **SEARCH))
        drawn = 3 * (2 if how == "fails" else 5)
        if how == "ends":
            assert remaining(response) == 40 - 3 - drawn, "what is reserved"
            assert response.json()["usage"]["completion_tokens"] == 5
        await settled(app)
        assert remaining(await client.get("/v1/models")) == 40 - 3 - drawn
        (day,) = (await client.get("/v1/usage")).json()["data"]
        assert (day["input_tokens"], day["output_tokens"]) == (3, drawn)


async def test_choices_at_a_time(make_with_keys, engine: FakeEngine) -> None:
    app = make_with_keys({"ann": {"max_choices": 2}, "bob": {}})
    engine.step_delay_s = 0.005
    async with of_tenant(app, "ann") as ann, of_tenant(app, "bob") as bob:
        first = asyncio.create_task(ann.post(COMPLETIONS, json=completion(n=2, max_tokens=50)))
        await until(lambda: engine.requests)
        response = await ann.post(COMPLETIONS, json=completion())
        assert "limit 2, running 2, requested 1" in error_of(response, 429, "requests")["message"]
        assert (await bob.post(COMPLETIONS, json=completion())).status_code == 200
        assert (await first).status_code == 200
        assert (await ann.post(COMPLETIONS, json=completion(n=2))).status_code == 200


async def test_a_day_s_tokens_are_a_quota_which_outlives_the_server(make_with_keys, clock: Clock, tmp_path) -> None:
    keys = {"ann": {"tokens_per_day": 20}}
    app = make_with_keys(keys, data_dir=tmp_path / "data")
    async with of_tenant(app, "ann") as client:
        used = (await client.post(COMPLETIONS, json=completion(max_tokens=15))).json()["usage"]["total_tokens"]
        await settled(app)
        response = await client.post(COMPLETIONS, json=completion(max_tokens=15))
        error = error_of(response, 429, "insufficient_quota")
        assert error["code"] == "insufficient_quota"
        assert error["message"].endswith("Your quota resets in 11h59m30s.")
        assert response.headers["x-should-retry"] == "false"
        assert remaining(response) == 20 - used
    await app.state.services.accounts.close()
    app.state.services.storage.close()
    again = make_with_keys(keys, data_dir=tmp_path / "data")
    async with again.router.lifespan_context(again), of_tenant(again, "ann") as client:
        assert remaining(await client.get("/v1/models")) == 20 - used
        assert (await client.post(COMPLETIONS, json=completion(max_tokens=15))).status_code == 429


async def test_the_api_of_messages_says_it_in_its_own_words(make_with_keys, clock: Clock) -> None:
    async with of_tenant(make_with_keys({"ann": {"requests_per_minute": 1}}), "ann") as client:
        body = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
        assert (await client.post("/v1/messages", json=body)).status_code == 200
        response = await client.post("/v1/messages", json=body)
        assert response.status_code == 429
        assert response.json()["error"]["type"] == "rate_limit_error"


async def test_every_answer_tells_how_limits_stand_errors_too_and_without_limits_none(make_with_keys) -> None:
    app = make_with_keys({"ann": REQUESTS | TOKENS, "bob": {}})
    async with of_tenant(app, "ann") as ann, of_tenant(app, "bob") as bob:
        for response in (
            await ann.get("/nowhere"),
            await ann.post(CHAT, json=chat(wrong=1)),
            await ann.get("/v1/models"),
        ):
            told = [name for name in response.headers if name.startswith("x-ratelimit-")]
            assert len(told) == 6
            assert response.headers["x-ratelimit-reset-tokens"] == "0ms"
        response = await bob.post(CHAT, json=chat(stream=True))
        assert not [name for name in response.headers if name.startswith("x-ratelimit-")]
        stream = await ann.post(CHAT, json=chat(stream=True))
        assert stream.headers["x-ratelimit-remaining-requests"] == "0"


@pytest.fixture
def patient_client(make_with_keys, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenAI]:
    """The official one, which waits by having the clock go on."""

    def sleep(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(openai._base_client, "time", SimpleNamespace(sleep=sleep, time=lambda: clock.now))
    app = make_with_keys({"ann": {"requests_per_minute": 60, "tokens_per_minute": 60}})
    with serving(app) as address, OpenAI(base_url=f"{address}/v1", api_key="ann-key", max_retries=2) as client:
        yield client


def test_the_official_client_waits_as_long_as_it_is_told(patient_client: OpenAI, clock: Clock) -> None:
    began = clock.now
    for _ in range(2):
        answer = patient_client.completions.create(model="tiny", prompt="x" * 10, max_tokens=30)
        assert answer.usage is not None
    assert clock.now - began > 10, "the second had to wait"
    raw = patient_client.completions.with_raw_response.create(model="tiny", prompt="x", max_tokens=1)
    assert raw.headers["x-ratelimit-limit-tokens"] == "60"
    with pytest.raises(openai.RateLimitError) as caught:
        patient_client.completions.create(model="tiny", prompt="x" * 200, max_tokens=1)
    assert caught.value.code == "rate_limit_exceeded"


async def test_tokens_taken_for_a_refused_request_are_given_back_in_all_windows(clock: Clock) -> None:
    limits = RateLimits(UsageCounters())
    tenant = Tenant("ann", limits=TenantLimits(requests_per_minute=5, tokens_per_minute=100, tokens_per_day=50))
    await limits.reserve(tenant, Cost(10, 30, 1))
    with pytest.raises(QuotaError, match="You exceeded your current quota"):
        await limits.reserve(tenant, Cost(10, 30, 1))
    headers = await limits.headers(tenant)
    assert headers["x-ratelimit-remaining-requests"] == "5"
    assert headers["x-ratelimit-remaining-tokens"] == "60"
    await limits.close()


async def test_a_refused_request_keeps_no_place(clock: Clock) -> None:
    limits = RateLimits(UsageCounters())
    tenant = Tenant("ann", limits=TenantLimits(max_choices=2, tokens_per_minute=100))
    running = await limits.reserve(tenant, Cost(10, 80, 1))
    for _ in range(3):
        with pytest.raises(TokenLimitError):
            await limits.reserve(tenant, Cost(10, 30, 1))
    second = await limits.reserve(tenant, Cost(5, 5, 1))
    with pytest.raises(RequestLimitError, match="limit 2, running 2"):
        await limits.reserve(tenant, Cost(0, 0, 1))
    running.settle(0)
    second.settle(0)
    await limits.reserve(tenant, Cost(0, 0, 2))


@pytest.mark.parametrize("of_limits", [{"tokens_per_minute": 100}, {"tokens_per_day": 100}, {"max_choices": 3}])
async def test_all_of_a_limit_may_be_used_and_not_one_more(clock: Clock, of_limits: dict[str, int]) -> None:
    limits = RateLimits(UsageCounters())
    tenant = Tenant("ann", limits=TenantLimits(**of_limits))
    await limits.reserve(tenant, Cost(100, 0, 3))
    with pytest.raises(LimitError):
        await limits.reserve(tenant, Cost(1, 0, 1))
    with pytest.raises(LimitError, match=r"Request too large|asks for 4 answers"):
        await limits.reserve(tenant, Cost(101, 0, 4))


async def test_work_in_the_background_takes_no_place_from_its_own_key(make_with_keys) -> None:
    services = make_with_keys({"ann": {"max_choices": 1}}).state.services
    accounts, metrics = services.accounts, services.models.default.metrics
    background = [await accounts.open("ann", Cost(1, 1, 1), metrics, is_background=True) for _ in range(3)]
    waited_for = await accounts.open("ann", Cost(1, 1, 1), metrics)
    for account in background:
        account.close(Used())
    with pytest.raises(RequestLimitError):
        await accounts.open("ann", Cost(1, 1, 1), metrics)
    waited_for.close(Used())
    await accounts.open("ann", Cost(1, 1, 1), metrics)


async def test_what_fails_before_it_has_begun_gives_back_all(make_with_keys, monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_with_keys({"ann": {"max_choices": 1, **TOKENS}})

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    async with of_tenant(app, "ann") as client:
        with monkeypatch.context() as patch:
            patch.setattr("server.api.endpoint.Run", fail)
            assert (await client.post(COMPLETIONS, json=completion())).status_code == 500
        await settled(app)
        assert remaining(await client.get("/v1/models")) == 40
        assert (await client.post(COMPLETIONS, json=completion())).status_code == 200


async def test_an_answer_of_which_nobody_says_how_long_it_may_be_takes_what_there_is(clock: Clock) -> None:
    limits = RateLimits(UsageCounters())
    tenant = Tenant("ann", limits=TenantLimits(tokens_per_minute=5000, tokens_per_day=5000))
    (await limits.reserve(tenant, Cost(10, 8000, 1, is_bounded=False))).settle(50)
    await asyncio.gather(*limits._corrections)
    second = await limits.reserve(tenant, Cost(10, 8000, 1, is_bounded=False))
    assert (await limits.headers(tenant))["x-ratelimit-remaining-tokens"] == "0"
    second.settle(4950)
    await asyncio.gather(*limits._corrections)
    with pytest.raises(TokenLimitError):
        await limits.reserve(tenant, Cost(10, 8000, 1, is_bounded=False))
    await limits.close()


async def test_a_batch_that_waits_holds_no_more_of_the_day_than_its_prompts(make_with_keys, clock: Clock) -> None:
    services = make_with_keys({"ann": {"tokens_per_day": 1000}}).state.services
    accounts, metrics = services.accounts, services.models.default.metrics
    for _ in range(20):
        await accounts.open("ann", Cost(10, 500, 1), metrics, is_background=True)
    (await accounts.open("ann", Cost(10, 500, 1), metrics)).close(Used())


async def test_settling_twice_counts_once(clock: Clock) -> None:
    limits = RateLimits(UsageCounters())
    tenant = Tenant("ann", limits=TenantLimits(tokens_per_minute=100, max_choices=1))
    reservation = await limits.reserve(tenant, Cost(10, 30, 1))
    reservation.settle(15)
    reservation.settle(40)
    await limits.close()
    assert (await limits.headers(tenant))["x-ratelimit-remaining-tokens"] == "85"
    await limits.reserve(tenant, Cost(1, 1, 1))


async def test_more_than_was_reserved_counts_too(clock: Clock) -> None:
    """Where an answer may be longer than all that may be used."""
    limits = RateLimits(UsageCounters())
    tenant = Tenant("ann", limits=TenantLimits(tokens_per_minute=100))
    (await limits.reserve(tenant, Cost(10, 3000, 1))).settle(250)
    await limits.close()
    assert (await limits.headers(tenant))["x-ratelimit-remaining-tokens"] == "0"
    clock.now += 60
    with pytest.raises(TokenLimitError, match="Rate limit reached"):
        await limits.reserve(tenant, Cost(10, 10, 1))
