"""GET /v1/requests/{id}: its record equals the request's own answer and the engine's work."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from server.engine.client import QueueFullError, RequestFailedError
from tests.engine_process.conftest import collect, request
from tests.engine_process.fake_engine import RAISE
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import COMPLETIONS, client_of, completion, error_of, events_of
from tests.server.requests.conftest import Serve
from tests.server.tenants.keys import of_tenant

PROMPT = [3 + 7 * place % 250 for place in range(50)]
LONG = 900  # tokens, which take seconds


async def told(client: httpx.AsyncClient, name: str) -> dict[str, Any]:
    response = await client.get(f"/v1/requests/{name}")
    assert response.status_code == 200, response.text
    return response.json()


async def when(client: httpx.AsyncClient, name: str, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The record of a request as soon as the condition holds."""
    async with asyncio.timeout(20):
        while True:
            response = await client.get(f"/v1/requests/{name}")
            if response.status_code == 200 and is_so(response.json()):
                return response.json()
            await asyncio.sleep(0.005)


async def ended(client: httpx.AsyncClient, name: str) -> dict[str, Any]:
    """The complete record: the engine may report a choice's end after the answer was sent."""
    one = await when(client, name, lambda one: one["state"] == "ended")
    assert_adds_up(one)
    return one


async def posted(client: httpx.AsyncClient, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """An answer and its record."""
    response = await client.post(COMPLETIONS, json=completion(**{"prompt": PROMPT, **fields}))
    assert response.status_code == 200, response.text
    one = await ended(client, response.headers["x-request-id"])
    assert one == await told(client, response.json()["id"])
    return response.json(), one


def assert_adds_up(one: dict[str, Any]) -> None:
    """Times are consecutive, and the totals are the sums over all choices."""
    times = one["times_ms"]
    parts = [times[name] for name in ("before", "queue", "prefill", "decode", "after")]
    if parts[0] is not None:
        parts = [part for part in parts if part is not None]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(times["total"], abs=0.01)
    assert one["num_choices"] == len(one["choices"])
    for name in ("steps", "prefill_chunks", "preemptions"):
        counts = [choice[name] for choice in one["choices"] if choice[name] is not None]
        assert one[name] == (sum(counts) if counts else None)


async def test_chunks_steps_and_tokens(with_model: Serve) -> None:
    async with with_model(chunk=16) as (client, _):
        before = time.time()
        answer, one = await posted(client, max_tokens=10, ignore_eos=True)
    assert (one["id"], one["answer_id"], one["object"]) == (one["id"], answer["id"], "request")
    assert (one["endpoint"], one["model"], one["status"], one["error"]) == (COMPLETIONS, "tiny", 200, None)
    assert (one["prefill_chunks"], one["steps"], one["preemptions"]) == (4, 4 + 9, 0)  # of 16, 16, 16 and 2 tokens
    assert (one["input_tokens"], one["cached_tokens"], one["output_tokens"]) == (50, 0, 10)
    assert before - 0.01 <= one["started_at"] <= time.time()
    assert 0 < one["time_to_first_token_ms"] <= one["times_ms"]["total"]
    (choice,) = one["choices"]
    assert (choice["state"], choice["finish_reason"], choice["output_tokens"]) == ("ended", "length", 10)
    assert choice["times_ms"] == {name: one["times_ms"][name] for name in ("queue", "prefill", "decode")}


async def test_a_second_one_with_the_same_prompt_finds_it_cached(with_model: Serve) -> None:
    async with with_model(chunk=16) as (client, _):
        await posted(client)
        answer, one = await posted(client, n=2, seed=1)
    assert one["cached_tokens"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
    assert [(choice["cached_tokens"], choice["prefill_chunks"]) for choice in one["choices"]] == [(48, 1), (48, 1)]


async def test_who_had_to_make_room_says_so(with_model: Serve) -> None:
    async with with_model(gib=5e-5) as (client, _):  # 8 blocks
        prompts = [[place] * 20 for place in (5, 6, 7)]  # of one request, so that they run at the same time
        _, one = await posted(client, prompt=prompts, max_tokens=40, ignore_eos=True)
        metrics = (await client.get("/metrics")).text
    assert f'num_preemptions_total{{model_name="tiny"}} {float(one["preemptions"])}' in metrics
    assert one["preemptions"] > 0
    for choice in one["choices"]:
        assert (choice["waited_again_ms"] > 0) == (choice["preemptions"] > 0)
        assert choice["prefill_chunks"] > choice["preemptions"]
        assert choice["steps"] >= 40


@pytest.mark.parametrize("stream", [False, True])
async def test_drafts_add_up_to_the_answer_s_usage(with_model: Serve, stream: bool) -> None:
    fields = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    body = completion(prompt=[9, 8, 7] * 6, max_tokens=40, temperature=0, n=2, ignore_eos=True, **fields)
    async with with_model() as (client, _):
        response = await client.post(COMPLETIONS, json={**body, "speculation": {"method": "suffix", "num_tokens": 3}})
        one = await ended(client, response.headers["x-request-id"])
    usage = (events_of(response.text)[-1] if stream else response.json())["usage"]["completion_tokens_details"]
    (drafts,) = one["drafts"]
    counts = usage["accepted_prediction_tokens"], usage["rejected_prediction_tokens"]
    assert drafts == {"method": "suffix", "accepted_tokens": counts[0], "rejected_tokens": counts[1]}
    assert sum(counts) > 0
    assert one["steps"] == 2 * 40 - counts[0]


async def test_a_stop_string_ends_a_choice_with_its_history(with_model: Serve) -> None:
    async with with_model() as (client, _):
        whole, _ = await posted(client, max_tokens=14, temperature=0, ignore_eos=True)
        stop = whole["choices"][0]["text"][4:6]
        answer, one = await posted(client, max_tokens=14, temperature=0, ignore_eos=True, stop=stop)
        response = await client.post(
            COMPLETIONS, json=completion(prompt=PROMPT, max_tokens=14, temperature=0, ignore_eos=True, stop=stop)
        )
        assert (await told(client, response.json()["id"]))["state"] == "ended", "the engine is asked how it ended"
    (choice,) = one["choices"]
    assert (choice["finish_reason"], choice["state"]) == ("stop", "ended")
    assert 1 <= answer["usage"]["completion_tokens"] == one["output_tokens"] <= choice["output_tokens"] <= 14
    assert choice["times_ms"]["prefill"] > 0


async def test_beams_tell_the_search_s_steps(with_model: Serve) -> None:
    async with with_model() as (client, _):
        _, one = await posted(client, max_tokens=6, ignore_eos=True, use_beam_search=True, n=2)
    assert [choice["output_tokens"] for choice in one["choices"]] == [6, 6]
    assert [choice["steps"] for choice in one["choices"]] == [6, 6]


async def test_numbers_in_place_of_tokens(with_model: Serve) -> None:
    async with with_model() as (client, _):
        response = await client.post("/v1/embeddings", json={"model": "tiny", "input": [PROMPT, [5, 6]]})
        assert response.status_code == 200, response.text
        one = await ended(client, response.headers["x-request-id"])
    assert (one["endpoint"], one["input_tokens"], one["output_tokens"]) == ("/v1/embeddings", 52, 0)
    assert [(choice["prompt"], choice["prefill_chunks"]) for choice in one["choices"]] == [(0, 1), (1, 1)]
    assert one["times_ms"]["decode"] is None
    assert [choice["times_ms"]["decode"] for choice in one["choices"]] == [None, None]
    assert one["times_ms"]["prefill"] > 0


async def test_what_runs_is_told_as_of_now(with_scripted: Serve) -> None:
    async with with_scripted() as (client, _):
        body = completion(prompt=[1, 2, 3], max_tokens=LONG, ignore_eos=True, n=2)
        task = asyncio.create_task(client.post(COMPLETIONS, json=body, headers={"x-request-id": "mine"}))
        first = await when(client, "mine", lambda one: bool(one["steps"]) and one["steps"] >= 6)
        again = await when(client, "mine", lambda one: one["steps"] > first["steps"])
        assert (again["state"], again["status"]) == ("running", None)
        assert [choice["state"] for choice in again["choices"]] == ["decode", "decode"]
        assert again["times_ms"]["decode"] > first["times_ms"]["decode"] > 0
        assert again["times_ms"]["prefill"] == first["times_ms"]["prefill"]
        assert again["output_tokens"] >= first["output_tokens"] > 0
        assert_adds_up(again)
        task.cancel()
        await asyncio.wait([task])
        last = await ended(client, "mine")
    assert [choice["finish_reason"] for choice in last["choices"]] == ["abort", "abort"]
    assert last["status"] == 499
    assert last["steps"] >= again["steps"]


async def test_a_restart_is_told(with_scripted: Serve) -> None:
    async with with_scripted() as (client, engine):
        poison = asyncio.create_task(collect(engine, request("poison", RAISE)))
        response = await client.post(COMPLETIONS, json=completion(prompt=[1, 2], max_tokens=60, ignore_eos=True))
        with pytest.raises(RequestFailedError):
            await poison
        one = await ended(client, response.headers["x-request-id"])
    assert 1 <= len(one["restarts"]) <= engine.num_restarts
    assert one["restarts"] == sorted(one["restarts"])
    assert one["started_at"] <= one["restarts"][0]
    (choice,) = one["choices"]
    assert choice["restarts"] == one["restarts"]
    assert 0 < choice["output_tokens"] < one["output_tokens"] == 60
    last = one["started_at"] + one["times_ms"]["before"] / 1000
    assert last >= one["restarts"][-1] - 0.01  # all that was before counts as such


async def test_what_failed_says_so(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.fail_after, engine.failure = 2, RequestFailedError("it cannot be computed")
    response = await client.post(COMPLETIONS, json=completion())
    assert response.status_code == 500
    one = await ended(client, response.headers["x-request-id"])
    assert (one["status"], one["error"], one["steps"]) == (500, "InternalError", None)  # nobody has told
    assert [(choice["state"], choice["finish_reason"]) for choice in one["choices"]] == [("ended", "error")]


async def test_what_took_too_long_says_so(with_scripted: Serve) -> None:
    async with with_scripted(request_timeout_s=0.05) as (client, _):
        response = await client.post(COMPLETIONS, json=completion(prompt=[1], max_tokens=LONG, ignore_eos=True))
        assert response.status_code == 504
        one = await ended(client, response.headers["x-request-id"])
        assert (one["status"], one["error"]) == (504, "RequestTimeoutError")
        assert one["choices"][0]["finish_reason"] == "timeout"
        assert one["choices"][0]["output_tokens"] > 0
        streamed = await client.post(
            COMPLETIONS, json=completion(prompt=[1], max_tokens=LONG, ignore_eos=True, stream=True)
        )
        assert streamed.status_code == 200
        assert (await ended(client, streamed.headers["x-request-id"]))["status"] == 504


# -- ids ---------------------------------------------------------------------------------------------------------------


async def test_it_is_found_by_the_ids_of_all_answers(client: httpx.AsyncClient) -> None:
    message = [{"role": "user", "content": "hi"}]
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": message}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 16}),
        ("/v1/messages", {"messages": message, "max_tokens": 3}),
    ]
    for path, body in bodies:
        response = await client.post(path, json={"model": "tiny", **body})
        assert response.status_code == 200, response.text
        one = await ended(client, response.json()["id"])
        assert (one["endpoint"], one["id"]) == (path, response.headers["x-request-id"])


async def test_of_several_requests_with_one_id_the_newest_is_told(client: httpx.AsyncClient) -> None:
    answers = []
    for max_tokens in (2, 3):
        body = completion(max_tokens=max_tokens)
        answers.append((await client.post(COMPLETIONS, json=body, headers={"x-request-id": "again"})).json()["id"])
    assert (await ended(client, "again"))["output_tokens"] == 3
    assert [(await ended(client, answer))["output_tokens"] for answer in answers] == [2, 3]


async def test_an_id_that_two_clients_use_is_each_one_s_own(make_with_keys) -> None:
    app = make_with_keys({"ann": {}, "bob": {}})
    async with of_tenant(app, "ann") as ann, of_tenant(app, "bob") as bob:
        for client, max_tokens in ((ann, 2), (bob, 3)):
            body = completion(max_tokens=max_tokens)
            await client.post(COMPLETIONS, json=body, headers={"x-request-id": "same"})
        assert [(await ended(client, "same"))["output_tokens"] for client in (ann, bob)] == [2, 3]


@pytest.mark.parametrize("body", [completion(max_tokens=0.5), completion(model="other")], ids=["invalid", "unknown"])
async def test_what_the_engine_did_not_take_is_not_there(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    refused = await client.post(COMPLETIONS, json=body)
    error = error_of(await client.get(f"/v1/requests/{refused.headers['x-request-id']}"), 404)
    assert error["code"] == "not_found"


async def test_what_found_no_place_is_not_there(client: httpx.AsyncClient, engine) -> None:
    engine.refuse = QueueFullError("full")
    refused = await client.post(COMPLETIONS, json=completion())
    assert refused.status_code == 429
    assert (await client.get(f"/v1/requests/{refused.headers['x-request-id']}")).status_code == 404


async def test_a_response_in_the_background_is_told_while_it_is_made(client: httpx.AsyncClient, engine) -> None:
    engine.step_delay_s = 0.02
    body = {"model": "tiny", "input": "hi", "max_output_tokens": 400, "background": True}
    response = await client.post("/v1/responses", json=body)
    one = await told(client, response.json()["id"])
    assert (one["state"], one["status"]) == ("running", 200)
    await client.post(f"/v1/responses/{response.json()['id']}/cancel")
    assert (await ended(client, response.json()["id"]))["choices"][0]["finish_reason"] == "abort"


async def test_no_text_is_told(make_app: Callable[..., Any]) -> None:
    async with client_of(make_app(log_prompts=True)) as client:
        body = completion(prompt="a secret prompt")
        response = await client.post(COMPLETIONS, json=body)
        await ended(client, response.headers["x-request-id"])
        text = (await client.get(f"/v1/requests/{response.headers['x-request-id']}")).text
    assert "secret" not in text
    assert response.json()["choices"][0]["text"] not in text
