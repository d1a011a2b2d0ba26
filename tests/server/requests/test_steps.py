"""GET /v1/steps: the steps' sums equal the answers' own counts."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from scheduler.interface import EngineStats
from server.engine.client import EngineState, RequestFailedError
from server.engine.step_log import MOST_STEPS
from tests.engine_process.conftest import collect, request
from tests.engine_process.fake_engine import RAISE
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import COMPLETIONS, client_of, completion, error_of
from tests.server.requests.conftest import Serve
from tests.server.requests.test_explaining import PROMPT, ended, posted
from tests.server.tenants.keys import bearer
from tests.server.test_metrics import read


async def steps(client: httpx.AsyncClient, **query: Any) -> dict[str, Any]:
    response = await client.get("/v1/steps", params=query)
    assert response.status_code == 200, response.text
    return response.json()


def column(told: dict[str, Any], name: str) -> list[Any]:
    return [step[name] for step in told["data"]]


async def test_chunks_then_tokens(with_model: Serve) -> None:
    before = time.time()
    async with with_model(chunk=16) as (client, _):
        assert (await steps(client))["data"] == []
        await posted(client, max_tokens=10, ignore_eos=True)
        told = await steps(client)
    assert (told["object"], told["last_step"]) == ("list", 4 + 9)
    assert column(told, "number") == list(range(1, 14))
    assert column(told, "prompt_tokens") == [16, 16, 16, 2] + [0] * 9
    assert column(told, "decode_tokens") == [0] * 4 + [1] * 9
    assert column(told, "draft_tokens") == column(told, "accepted_draft_tokens") == column(told, "waiting") == [0] * 13
    assert column(told, "running") == [1] * 12 + [0]
    assert min(column(told, "duration_ms")) > 0
    assert sum(column(told, "duration_ms")) / 1000 < time.time() - before
    times = column(told, "ended_at")
    assert times == sorted(times)
    assert before <= times[0] <= times[-1] <= time.time()


async def test_drafts_are_those_of_the_answer(with_model: Serve) -> None:
    body = completion(prompt=[9, 8, 7] * 6, max_tokens=40, temperature=0, n=2, ignore_eos=True)
    async with with_model() as (client, _):
        response = await client.post(COMPLETIONS, json={**body, "speculation": {"method": "suffix", "num_tokens": 3}})
        told = await steps(client)
    usage = response.json()["usage"]["completion_tokens_details"]
    accepted, rejected = usage["accepted_prediction_tokens"], usage["rejected_prediction_tokens"]
    assert accepted > 0
    assert sum(column(told, "accepted_draft_tokens")) == accepted
    assert sum(column(told, "draft_tokens")) == accepted + rejected
    assert sum(column(told, "decode_tokens")) == 2 * 40 - 2 - accepted  # the first of each comes with the prompt


async def test_every_block_is_in_one_place(with_model: Serve) -> None:
    async with with_model() as (client, engine):
        await posted(client, max_tokens=10, ignore_eos=True)  # 59 tokens are computed: three blocks of 16 are full
        kv = (await steps(client))["kv_cache"]
        seen = await read(client)
    total = engine.info.num_blocks
    assert kv == {
        "block_size": 16, "total_blocks": total, "held_blocks": 0, "cached_blocks": 3, "free_blocks": total - 3,
    }  # fmt: skip
    by_state = {state: seen["samewise:kv_cache_blocks", state] for state in ("held", "cached", "free")}
    assert by_state == {state: kv[f"{state}_blocks"] for state in by_state}


async def test_what_runs_holds_blocks(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.stats = EngineStats(kv_held_blocks=20, kv_cached_blocks=14)
    kv = (await steps(client))["kv_cache"]
    assert (kv["total_blocks"], kv["held_blocks"], kv["cached_blocks"], kv["free_blocks"]) == (64, 20, 14, 30)


async def test_before_the_engine_is_ready_there_is_no_cache(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.state = EngineState.STARTING
    assert await steps(client) == {"object": "list", "data": [], "last_step": 0, "kv_cache": None}
    assert not [name for name, *_ in await read(client) if "kv_cache_blocks" in name]


async def test_who_asks_again_gets_what_is_new(with_model: Serve) -> None:
    async with with_model() as (client, _):
        await posted(client, prompt=PROMPT[:5], max_tokens=6, ignore_eos=True)
        first = await steps(client)
        assert first["last_step"] == 6
        assert (await steps(client, after=6))["data"] == []
        await posted(client, prompt=PROMPT[5:9], max_tokens=4, ignore_eos=True)
        new = await steps(client, after=first["last_step"])
        assert column(new, "number") == [7, 8, 9, 10]
        assert (await steps(client))["data"] == first["data"] + new["data"]
        assert (await steps(client, limit=3))["data"] == new["data"][1:]
        assert (await steps(client, limit=2, after=3))["data"] == new["data"][2:]


async def test_steps_of_the_next_engine_go_on(with_scripted: Serve) -> None:
    async with with_scripted() as (client, engine):
        poison = asyncio.create_task(collect(engine, request("poison", RAISE)))
        response = await client.post(COMPLETIONS, json=completion(prompt=[1, 2], max_tokens=60, ignore_eos=True))
        with pytest.raises(RequestFailedError):
            await poison
        await ended(client, response.headers["x-request-id"])
        told = await steps(client)
    assert engine.num_restarts > 0
    assert column(told, "number") == list(range(1, told["last_step"] + 1))
    assert told["last_step"] >= 60
    assert column(told, "duration_ms") == pytest.approx([2] * told["last_step"])  # as the script has it


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": MOST_STEPS + 1}, "limit"),
        ({"limit": "all"}, "limit"),
        ({"after": -1}, "after"),
        ({"after": "1.5"}, "after"),
        ({"after": 1}, "after"),
        ({"order": "asc"}, "order"),
    ],
)
async def test_what_it_does_not_take_is_refused(client: httpx.AsyncClient, query: dict[str, Any], param: str) -> None:
    assert error_of(await client.get("/v1/steps", params=query))["param"] == param


async def test_it_takes_a_key(make_with_keys: Callable[..., FastAPI]) -> None:
    async with client_of(make_with_keys({"ann": {}})) as client:
        error_of(await client.get("/v1/steps"), 401)
        assert (await client.get("/v1/steps", headers=bearer("ann"))).status_code == 200
