"""Responses that are stored: found, continued, listed, deleted, and nobody else's."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from openai.types.responses import ResponseItemList

from server.api.responses.stream import LiveFrames
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import client_of, error_of, says
from tests.server.responses.calling import RESPONSES, asking, events, events_of, text_of, whole
from tests.server.responses.test_answers import THINKING, WEATHER
from tests.server.responses.test_inputs import prompt_for, result, user
from tests.server.test_reasoning import ECHOING
from tests.server.test_tools import ROME, prompt_of


async def test_a_response_is_found_as_it_was(client: httpx.AsyncClient) -> None:
    for response in (await whole(client), (await events(client))[-1]["response"]):
        assert (await client.get(f"{RESPONSES}/{response['id']}")).json() == response


async def test_one_that_is_not_stored_is_not_found(client: httpx.AsyncClient) -> None:
    response = await whole(client, store=False)
    error = error_of(await client.get(f"{RESPONSES}/{response['id']}"), 404)
    assert response["id"] in error["message"]


async def test_a_conversation_goes_on(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = says(ROME)
    first = await whole(client, tools=[WEATHER], input="Where?", instructions="Be brief.")
    engine.script = says("Sunny.")
    answer = result(call_id=first["output"][0]["call_id"])
    second = await whole(client, tools=[WEATHER], previous_response_id=first["id"], input=[answer])
    prompt = await prompt_for(client, engine, "Thanks.", previous_response_id=second["id"])
    said = [user("Where?"), *first["output"], answer, *second["output"], user("Thanks.")]
    assert prompt == await prompt_for(client, engine, said)
    assert "Be brief." not in prompt


async def test_items_are_found_by_their_ids(client_with: Callable[..., Any], engine: FakeEngine) -> None:
    async with client_with(ECHOING) as client:
        engine.script = says(THINKING)
        first = await whole(client)
        said = [user(), *first["output"], user("b")]
        named = [user(), *({"type": "item_reference", "id": item["id"]} for item in first["output"]), user("b")]
        expected = await prompt_for(client, engine, said)
        assert await prompt_for(client, engine, named) == expected
        named[1].pop("type")
        second = await whole(client, input=named)
        assert prompt_of(engine) == expected
        listed = (await client.get(f"{RESPONSES}/{second['id']}/input_items?order=asc")).json()["data"]
    assert [item["id"] for item in listed[1:3]] == [item["id"] for item in first["output"]]


@pytest.mark.parametrize(
    ("fields", "param", "name", "status"),
    [
        ({"previous_response_id": "resp_none"}, "previous_response_id", "resp_none", 400),
        ({"conversation": "conv_none"}, "conversation", "conv_none", 404),
        ({"conversation": {"id": "conv_none"}}, "conversation", "conv_none", 404),
        ({"input": [user(), {"type": "item_reference", "id": "msg_none"}]}, "input", "msg_none", 404),
    ],
)
async def test_what_is_not_there_is_named(
    client: httpx.AsyncClient, fields: Any, param: str, name: str, status: int
) -> None:
    error = error_of(await client.post(RESPONSES, json=asking(**fields)), status)
    assert error["code"] == ("previous_response_not_found" if param == "previous_response_id" else "not_found")
    assert error["param"] == param
    assert name in error["message"]


async def test_a_stream_is_told_again_from_any_place(client: httpx.AsyncClient) -> None:
    told = await events(client, max_output_tokens=6)
    path = f"{RESPONSES}/{told[0]['response']['id']}?stream=true"
    assert events_of((await client.get(path)).text) == told
    for number in (0, 4, len(told) - 1):
        rest = await client.get(f"{path}&starting_after={number}")
        assert events_of(rest.text, number + 1) == told[number + 1 :]


async def test_what_was_not_streamed_is_not_told_again(client: httpx.AsyncClient) -> None:
    response = await whole(client)
    error_of(await client.get(f"{RESPONSES}/{response['id']}?stream=true"))


async def test_input_items_come_in_pages(client: httpx.AsyncClient) -> None:
    said = [user(str(number)) for number in range(5)]
    path = f"{RESPONSES}/{(await whole(client, input=said))['id']}/input_items"

    async def texts(query: str) -> tuple[str, bool]:
        listed = ResponseItemList.model_validate((await client.get(f"{path}?{query}")).json())
        return "".join(item.content[0].text for item in listed.data), listed.has_more

    assert await texts("") == ("43210", False)
    assert await texts("order=asc&limit=2") == ("01", True)
    first = (await client.get(f"{path}?order=asc&limit=2")).json()
    assert await texts(f"order=asc&limit=2&after={first['last_id']}") == ("23", True)
    assert await texts(f"order=desc&after={first['last_id']}&include[]=reasoning.encrypted_content") == ("0", False)


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "order=up", "after=msg_none", "beyond=3"])
async def test_mistakes_in_queries_are_named(client: httpx.AsyncClient, query: str) -> None:
    response = await whole(client)
    error = error_of(await client.get(f"{RESPONSES}/{response['id']}/input_items?{query}"))
    assert error["param"] == query.partition("=")[0]


async def test_a_place_in_a_stream_needs_a_stream(client: httpx.AsyncClient) -> None:
    response = await whole(client)
    error = error_of(await client.get(f"{RESPONSES}/{response['id']}?starting_after=0"))
    assert error["param"] == "starting_after"


async def test_a_deleted_response_is_forgotten(client: httpx.AsyncClient) -> None:
    response = await whole(client)
    path = f"{RESPONSES}/{response['id']}"
    assert (await client.delete(path)).json() == {"id": response["id"], "object": "response", "deleted": True}
    for method, url in (("GET", path), ("DELETE", path), ("GET", f"{path}/input_items"), ("POST", f"{path}/cancel")):
        error_of(await client.request(method, url), 404)
    item = response["output"][0]["id"]
    error_of(await client.post(RESPONSES, json=asking(input=[{"type": "item_reference", "id": item}])), 404)


@pytest.fixture
async def two_clients(make_app: Callable[..., FastAPI], tmp_path: Path) -> AsyncIterator[list[httpx.AsyncClient]]:
    keys = tmp_path / "keys"
    keys.write_text("ann\nbob\n")
    app = make_app(api_keys_file=keys)
    async with client_of(app) as ann, client_of(app) as bob:
        for client, key in ((ann, "ann"), (bob, "bob")):
            client.headers["authorization"] = f"Bearer {key}"
        yield [ann, bob]


async def test_nobody_finds_what_is_another_ones(two_clients: list[httpx.AsyncClient]) -> None:
    ann, bob = two_clients
    response = (await events(ann))[-1]["response"]
    path = f"{RESPONSES}/{response['id']}"
    asked = [("GET", path), ("GET", f"{path}?stream=true"), ("GET", f"{path}/input_items"), ("DELETE", path)]
    for method, url in [*asked, ("POST", f"{path}/cancel")]:
        error_of(await bob.request(method, url), 404)
    named: list[tuple[int, dict[str, Any]]] = [(400, {"previous_response_id": response["id"]})]
    named += [(404, {"input": [user(), {"type": "item_reference", "id": response["output"][0]["id"]}]})]
    for status, fields in named:
        error_of(await bob.post(RESPONSES, json=asking(**fields)), status)
        assert text_of(await whole(ann, **fields))


async def test_the_oldest_go_when_there_is_no_more_room(make_app: Callable[..., FastAPI]) -> None:
    async with client_of(make_app(max_stored_mib=0.02)) as client:
        ids = [(await whole(client, input="x" * 1000))["id"] for _ in range(9)]
        kept = [one for one in ids if (await client.get(f"{RESPONSES}/{one}")).status_code == 200]
    assert 0 < len(kept) < len(ids)
    assert kept == ids[-len(kept) :]


async def test_an_answer_that_cannot_be_stored_says_so(make_app: Callable[..., FastAPI]) -> None:
    async with client_of(make_app(max_stored_mib=0.01)) as client:
        first = await whole(client, max_output_tokens=3)
        large = {"input": [{**user(), "junk": "x" * 10000}], "max_output_tokens": 3}
        answer = await client.post(RESPONSES, json=asking(**large))
        told = await events(client, **large)
        for response in (answer.json(), told[-1]["response"]):
            assert response["status"] == "incomplete"
            assert "Not stored" in next(one["reason"] for one in response["warnings"] if one["path"] == "store")
            error_of(await client.get(f"{RESPONSES}/{response['id']}"), 404)
        assert "store" in answer.headers["x-samewise-ignored"]
        assert (await client.get(f"{RESPONSES}/{first['id']}")).json() == first


async def test_events_that_are_too_large_are_sent_and_not_kept(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[LiveFrames] = []

    def watched(*args: Any) -> LiveFrames:
        made.append(LiveFrames(*args))
        return made[-1]

    monkeypatch.setattr("server.api.responses.routes.LiveFrames", watched)
    sent = await events(client, store=False, seed=7)
    assert not made[-1].frames
    assert "warnings" not in sent[-1]["response"]
    monkeypatch.setattr("server.api.responses.routes.MAX_KEPT_BYTES", 5000)
    response = (await events(client, seed=7))[-1]["response"]
    assert text_of(response) == text_of(sent[-1]["response"])
    assert not made[-1].frames
    (warning,) = response["warnings"]
    assert (warning["path"], "5000 bytes" in warning["reason"]) == ("stream", True)
    path = f"{RESPONSES}/{response['id']}"
    assert (await client.get(path)).json() == response
    assert "no stored events" in error_of(await client.get(f"{path}?stream=true"))["message"]


async def test_what_a_response_goes_on_from_is_not_dropped_for_its_age(make_app: Callable[..., FastAPI]) -> None:
    async with client_of(make_app(max_stored_mib=0.03)) as client:
        fields = {"max_output_tokens": 3}
        first = await whole(client, **fields)
        second = await whole(client, **fields, previous_response_id=first["id"])
        for _ in range(9):
            await whole(client, **fields, store=False, previous_response_id=second["id"])
            other = await whole(client, input="x" * 1000)
        assert (await client.get(f"{RESPONSES}/{other['id']}")).status_code == 200
        await client.delete(f"{RESPONSES}/{first['id']}")
        error = error_of(await client.post(RESPONSES, json=asking(previous_response_id=second["id"])))
    assert error["param"] == "previous_response_id"
    assert second["id"] in error["message"]
    assert first["id"] in error["message"]


async def test_what_is_stored_outlives_the_server(make_app: Callable[..., FastAPI], tmp_path: Path) -> None:
    first = make_app(data_dir=tmp_path / "data")
    async with client_of(first) as client:
        response = await whole(client)
    first.state.services.storage.close()
    async with client_of(make_app(data_dir=tmp_path / "data")) as client:
        assert (await client.get(f"{RESPONSES}/{response['id']}")).json() == response
        assert text_of(await whole(client, previous_response_id=response["id"]))


async def test_two_servers_do_not_share_a_folder(make_app: Callable[..., FastAPI], tmp_path: Path) -> None:
    make_app(data_dir=tmp_path)
    with pytest.raises(ValueError, match=r"Cannot use the stored data in .*: database is locked"):
        make_app(data_dir=tmp_path)
