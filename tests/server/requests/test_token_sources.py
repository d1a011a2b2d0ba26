"""`return_token_sources`: it names each token's origin, and adds up to what the answer and its timeline count."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from server.engine.client import RequestFailedError
from tests.engine_process.conftest import collect, request
from tests.engine_process.fake_engine import RAISE
from tests.server.fake_engine import FakeEngine, scripted
from tests.server.helpers import CHAT, COMPLETIONS, chat, client_of, completion, error_of, events_of, refused
from tests.server.requests.conftest import Serve
from tests.server.requests.test_explaining import ended
from tests.server.test_tools import ROME, WEATHER

BOTH = pytest.mark.parametrize(("path", "make"), [(CHAT, chat), (COMPLETIONS, completion)], ids=["chat", "text"])
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
REPETITIVE = [9, 8, 7] * 6


async def choices_of(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The three lists about tokens of each choice; joined for a stream."""
    response = await client.post(path, json={**body, "return_token_sources": True, "return_token_ids": True})
    assert response.status_code == 200, response.text
    parts = events_of(response.text) if body.get("stream") else [response.json()]
    choices: dict[int, dict[str, Any]] = {}
    for entry in (entry for part in parts for entry in part["choices"]):
        choice = choices.setdefault(entry["index"], {"sources": [], "ids": [], "logprobs": []})
        assert len(entry.get("token_sources", [])) == len(entry.get("token_ids", []))
        choice["sources"] += entry.get("token_sources", [])
        choice["ids"] += entry.get("token_ids", [])
        logprobs = entry["logprobs"] or {}
        choice["logprobs"] += logprobs.get("content") or logprobs.get("tokens") or []
    return [choices[index] for index in sorted(choices)]


@STREAMED
@pytest.mark.parametrize("method", ["suffix", "lookahead"])
async def test_they_add_up_to_the_drafts(with_model: Serve, method: str, stream: bool) -> None:
    body = completion(prompt=REPETITIVE, max_tokens=40, temperature=0, n=2, ignore_eos=True, logprobs=0, stream=stream)
    async with with_model() as (client, _):
        plain = await choices_of(client, COMPLETIONS, {**body, "speculation": "off"})
        body["speculation"] = {"method": method, "num_tokens": 3}
        choices = await choices_of(client, COMPLETIONS, body)
        one = (await client.get("/v1/requests")).json()["data"][0]
        one = await ended(client, one["id"])
    assert [choice["ids"] for choice in choices] == [choice["ids"] for choice in plain]
    assert [choice["logprobs"] for choice in choices] == [choice["logprobs"] for choice in plain]
    assert [choice["sources"] for choice in plain] == [["drawn"] * 40] * 2
    for choice, record in zip(choices, one["choices"], strict=True):
        assert len(choice["sources"]) == len(choice["logprobs"]) == 40
        assert set(choice["sources"]) == {"drawn", f"draft:{method}"}
        (drafts,) = record["drafts"]
        assert choice["sources"].count(f"draft:{method}") == drafts["accepted_tokens"]
        assert choice["sources"].count("drawn") == record["steps"], (
            "the prompt's step draws one, and so does each other"
        )


@BOTH
@STREAMED
async def test_drafts_come_first_in_each_step(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, make: Callable[..., dict[str, Any]], stream: bool
) -> None:
    """Steps of 3, 3 and 1 tokens: two accepted drafts and a drawn one, twice, and then there is room for one draft."""
    engine.tokens_per_step, engine.counts_drafts = 3, True
    choices = await choices_of(client, path, make(max_tokens=7, n=2, stream=stream))
    draft = "draft:suffix"
    assert [choice["sources"] for choice in choices] == [[draft, draft, "drawn"] * 2 + [draft]] * 2


@BOTH
@STREAMED
async def test_nobody_is_told_who_does_not_ask(
    client: httpx.AsyncClient, path: str, make: Callable[..., dict[str, Any]], stream: bool
) -> None:
    for asked in ({}, {"return_token_sources": False}, {"return_token_sources": None}, {"return_token_ids": True}):
        assert "token_sources" not in (await client.post(path, json=make(**asked, stream=stream))).text


@STREAMED
@pytest.mark.parametrize("group", [1, 2, 5])
async def test_what_a_stop_string_cuts_off_has_none(
    client: httpx.AsyncClient, engine: FakeEngine, group: int, stream: bool
) -> None:
    engine.script, engine.tokens_per_step, engine.counts_drafts = scripted(b"one two three"), group, True
    body = chat(max_tokens=50, stop="wo t", logprobs=True, stream=stream)
    (choice,) = await choices_of(client, CHAT, body)
    assert bytes(choice["ids"]) == b"one two t"
    assert choice["sources"] == ["drawn" if place % group == group - 1 else "draft:suffix" for place in range(9)]
    assert [entry["token"] for entry in choice["logprobs"]] == [*"one two t"]


@STREAMED
async def test_they_stay_with_characters_of_several_tokens(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    engine.script, engine.tokens_per_step, engine.counts_drafts = scripted("你é😀 ".encode()), 4, True
    (choice,) = await choices_of(client, COMPLETIONS, completion(max_tokens=20, stream=stream))
    assert choice["sources"] == ["draft:suffix"] * 3 + ["drawn"] + (["draft:suffix"] * 3 + ["drawn"]) * 4


@STREAMED
async def test_calls_have_them(make_app: Callable[..., FastAPI], engine: FakeEngine, stream: bool) -> None:
    engine.info_ = FakeEngine.roomy().info_
    call = f"I look. {ROME}".encode()
    engine.script, engine.tokens_per_step, engine.counts_drafts = scripted(call), 3, True
    async with client_of(make_app()) as client:
        (choice,) = await choices_of(client, CHAT, chat(max_tokens=len(call), tools=[WEATHER], stream=stream))
    assert bytes(choice["ids"]) == call
    assert choice["sources"] == (["draft:suffix", "draft:suffix", "drawn"] * len(call))[: len(call)]


@STREAMED
async def test_an_echo_has_none(client: httpx.AsyncClient, stream: bool) -> None:
    """As with the ids: they are of the output alone."""
    body = completion(prompt="abc", echo=True, logprobs=0, max_tokens=2, stream=stream)
    (choice,) = await choices_of(client, COMPLETIONS, body)
    assert choice["sources"] == ["drawn"] * 2
    assert len(choice["logprobs"]) == 3 + 2


async def test_the_best_answer_brings_its_own(client: httpx.AsyncClient) -> None:
    (choice,) = await choices_of(client, COMPLETIONS, completion(best_of=3, max_tokens=4))
    assert choice["sources"] == ["drawn"] * 4


async def test_without_output_there_are_none(client: httpx.AsyncClient) -> None:
    (choice,) = await choices_of(client, COMPLETIONS, completion(max_tokens=0))
    assert choice["sources"] == []


async def test_a_restart_loses_and_repeats_none(with_scripted: Serve) -> None:
    async with with_scripted() as (client, engine):
        poison = asyncio.create_task(collect(engine, request("poison", RAISE)))
        (choice,) = await choices_of(client, COMPLETIONS, completion(prompt=[1, 2], max_tokens=60, ignore_eos=True))
        with pytest.raises(RequestFailedError):
            await poison
    assert engine.num_restarts > 0
    assert len(choice["ids"]) == 60
    assert choice["sources"] == ["drawn"] * 60


@BOTH
async def test_what_it_does_not_go_with(
    client: httpx.AsyncClient, path: str, make: Callable[..., dict[str, Any]]
) -> None:
    """A search neither draws nor speculates."""
    for other in ({"beam_search": {"width": 2}}, {"use_beam_search": True}):
        body = make(return_token_sources=True, **other)
        message = await refused(client, path, body, "return_token_sources", "invalid_parameter_combination")
        assert f"'{next(iter(other))}'" in message
        assert (await client.post(path, json={**body, "return_token_sources": False})).status_code == 200
    fields = (await client.get("/v1/capabilities")).json()["endpoints"][path]
    assert fields["return_token_sources"]["support"] == "honoured"
    assert fields["return_token_sources"]["excludes"] == ["use_beam_search", "beam_search"]
    assert "return_token_sources" in fields["beam_search"]["excludes"]


@BOTH
@pytest.mark.parametrize("value", ["yes", 1, ["drawn"], {}])
async def test_it_is_yes_or_no(
    client: httpx.AsyncClient, path: str, make: Callable[..., dict[str, Any]], value: object
) -> None:
    error = error_of(await client.post(path, json=make(return_token_sources=value)))
    assert (error["param"], error["code"]) == ("return_token_sources", "invalid_type")


async def test_other_apis_do_not_know_it(client: httpx.AsyncClient) -> None:
    body = {"model": "tiny", "input": "hi", "return_token_sources": True}
    await refused(client, "/v1/responses", body, "return_token_sources", "unknown_parameter")
