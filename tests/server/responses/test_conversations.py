"""Stored conversations, and windows of them: counted and compacted."""

import json
import threading
from typing import Any

import httpx
import msgspec
import pytest
from openai.types.conversations import Conversation, ConversationDeletedResource, ConversationItemList
from openai.types.responses import CompactedResponse, InputTokenCountResponse
from openai.types.responses.response_input_item import ResponseInputItem
from pydantic import TypeAdapter

from server.api.responses.objects import Compaction, ConversationObject, InputTokens, ItemList
from server.storage import rows
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import error_of, says
from tests.server.responses.calling import CONVERSATIONS, RESPONSES, events, whole
from tests.server.responses.test_answers import WEATHER
from tests.server.responses.test_inputs import prompt_for, user
from tests.server.test_tools import prompt_of


async def made(client: httpx.AsyncClient, **fields: Any) -> str:
    """The id of a new conversation."""
    answer = await client.post(CONVERSATIONS, json=fields)
    assert answer.status_code == 200, answer.text
    Conversation.model_validate(answer.json())
    msgspec.convert(answer.json(), ConversationObject)
    return answer.json()["id"]


async def items_of(client: httpx.AsyncClient, conversation: str) -> list[dict[str, Any]]:
    listed = (await client.get(f"{CONVERSATIONS}/{conversation}/items?order=asc")).json()
    ConversationItemList.model_validate(listed)
    msgspec.convert(listed, ItemList)
    return listed["data"]


def texts(items: list[dict[str, Any]]) -> list[str]:
    return [item["content"][0]["text"] for item in items]


async def test_a_conversation_is_kept(client: httpx.AsyncClient) -> None:
    one = await made(client, items=[user("a")], metadata={"k": "v"})
    path = f"{CONVERSATIONS}/{one}"
    assert (await client.get(path)).json()["metadata"] == {"k": "v"}
    changed = await client.post(path, json={"metadata": {"k": "w"}})
    assert changed.json() == (await client.get(path)).json()
    assert changed.json()["metadata"] == {"k": "w"}
    added = await client.post(f"{path}/items", json={"items": [user("b"), user("c")]})
    assert texts(added.json()["data"]) == ["b", "c"]
    assert texts(await items_of(client, one)) == ["a", "b", "c"]
    second = f"{path}/items/{added.json()['first_id']}"
    assert texts([(await client.get(second)).json()]) == ["b"]
    assert (await client.delete(second)).json() == changed.json()
    assert texts(await items_of(client, one)) == ["a", "c"]
    error_of(await client.get(second), 404)
    ConversationDeletedResource.model_validate((await client.delete(path)).json())
    for method, url in (("GET", path), ("DELETE", path), ("GET", f"{path}/items"), ("GET", second)):
        assert one in error_of(await client.request(method, url), 404)["message"] or method == "GET"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("store", [False, True])
async def test_a_response_goes_on_with_it(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool, store: bool
) -> None:
    one = await made(client, items=[user("a")])
    engine.script = says("b")
    fields = {"conversation": {"id": one}, "input": "then", "store": store}
    response = (await events(client, **fields))[-1]["response"] if stream else await whole(client, **fields)
    assert response["conversation"] == {"id": one}
    assert texts(await items_of(client, one)) == ["a", "then", "b"]
    said = [user("a"), user("then"), {"role": "assistant", "content": "b"}, user("and?")]
    prompt = await prompt_for(client, engine, "and?", conversation=one)
    assert prompt == await prompt_for(client, engine, said)


ODD = [{"type": "web_search_call", "id": "ws_1"}, {"role": "assistant", "content": "x", "phase": "commentary", "k": 1}]


async def test_what_means_nothing_in_an_item_is_reported(client: httpx.AsyncClient) -> None:
    created = await client.post(CONVERSATIONS, json={"items": ODD})
    path = f"{CONVERSATIONS}/{created.json()['id']}"
    for answer in (created, await client.post(f"{path}/items", json={"items": ODD})):
        assert [one["path"] for one in answer.json()["warnings"]] == ["items[0]", "items[1].phase", "items[1].k"]
        assert answer.headers["x-samewise-ignored"] == "items[0], items[1].phase, items[1].k"
    assert "warnings" not in (await client.get(path)).json()


async def test_what_means_nothing_in_an_item_is_refused_if_strict(strict_client: httpx.AsyncClient) -> None:
    error = error_of(await strict_client.post(CONVERSATIONS, json={"items": ODD}))
    assert (error["param"], error["code"]) == ("items[0]", "unsupported_parameter")


async def test_an_item_with_the_id_of_another_gets_its_own(client: httpx.AsyncClient) -> None:
    one = await made(client, items=[{"id": "m1", **user("first")}])
    added = (await client.post(f"{CONVERSATIONS}/{one}/items", json={"items": [{"id": "m1", **user("second")}]})).json()
    await whole(client, conversation=one, input=[{"id": "m1", **user("third")}])
    items = await items_of(client, one)
    assert texts(items)[:3] == ["first", "second", "third"]
    assert [item["id"] for item in items][:2] == ["m1", added["first_id"]]
    assert len({item["id"] for item in items}) == len(items)


async def test_many_items_are_too_many(client: httpx.AsyncClient) -> None:
    error = error_of(await client.post(CONVERSATIONS, json={"items": [user()] * 21}))
    assert (error["param"], error["code"]) == ("items", "array_above_max_length")


# -- pages -------------------------------------------------------------------------------------------------------------


async def test_items_come_in_pages(client: httpx.AsyncClient) -> None:
    one = await made(client, items=[user(name) for name in "abcde"])
    path = f"{CONVERSATIONS}/{one}/items"

    async def page(query: str) -> tuple[str, str | None, bool]:
        listed = (await client.get(f"{path}?{query}")).json()
        msgspec.convert(listed, ItemList)
        ids = [item["id"] for item in listed["data"]] or [None]
        assert (listed["first_id"], listed["last_id"]) == (ids[0], ids[-1])
        return "".join(texts(listed["data"])), listed["last_id"], listed["has_more"]

    for order, names in (("asc", ["ab", "cd", "e"]), ("desc", ["ed", "cb", "a"])):
        behind = ""
        for name in names:
            told, last, has_more = await page(f"order={order}&limit=2{behind}")
            assert (told, has_more) == (name, name != names[-1])
            behind = f"&after={last}"
        assert await page(f"order={order}{behind}") == ("", None, False)
    other = await made(client, items=[user("of another")])
    for unknown in ("msg_none", (await items_of(client, other))[0]["id"]):
        assert error_of(await client.get(f"{path}?after={unknown}"))["param"] == "after"


async def test_the_storage_parses_no_items_and_reads_none_but_those_of_the_page(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [user(f"said {number}") for number in range(20)]
    conversation = f"{CONVERSATIONS}/{await made(client, items=said)}"
    response = f"{RESPONSES}/{(await whole(client, input=said))['id']}"
    item = (await client.get(f"{conversation}/items")).json()["first_id"]
    parsed, read = [], []

    def loads(text: str | bytes, **how: Any) -> Any:
        if threading.current_thread().name.startswith("samewise-storage"):
            parsed.append(str(text))
        return parse(text, **how)

    def row(kind: str, *columns: Any) -> rows.Row:
        read.append(kind)
        return row_of(kind, *columns)

    parse, row_of = json.loads, rows.Row
    monkeypatch.setattr(json, "loads", loads)
    monkeypatch.setattr(rows, "Row", row)
    for path, most in (
        (f"{conversation}/items?limit=2", 3),
        (f"{response}/input_items?limit=2", 3),
        (f"{conversation}/items/{item}", 1),
    ):
        read.clear()
        answer = await client.get(path)
        assert answer.status_code == 200, answer.text
        assert read.count("item") == most
    await whole(client, conversation=conversation.rpartition("/")[2], input=[{"type": "item_reference", "id": item}])
    await whole(client, previous_response_id=response.rpartition("/")[2], input="and?")
    assert not [text for text in parsed if "said" in text]


# -- windows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [{"input": "hi"}, {"input": [user("a"), user("b")], "instructions": "Be brief.", "tools": [WEATHER]}],
)
async def test_tokens_are_those_that_a_response_takes(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    counted = (await client.post(f"{RESPONSES}/input_tokens", json={"model": "tiny", **fields})).json()
    InputTokenCountResponse.model_validate(counted)
    msgspec.convert(counted, InputTokens)
    response = await whole(client, **fields)
    assert counted["input_tokens"] == response["usage"]["input_tokens"]
    later = {"previous_response_id": response["id"], "input": "and?"}
    counted = (await client.post(f"{RESPONSES}/input_tokens", json=later)).json()
    assert counted["input_tokens"] == (await whole(client, **later))["usage"]["input_tokens"]


async def test_a_compacted_conversation_goes_on(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = says("They said hi.")
    window = {"model": "tiny", "input": [user("hello"), {"role": "assistant", "content": "hi"}]}
    answer = (await client.post(f"{RESPONSES}/compact", json=window)).json()
    CompactedResponse.model_validate(answer)
    msgspec.convert(answer, Compaction)
    assert "hello" in prompt_of(engine)
    assert "Summarize" in prompt_of(engine)
    TypeAdapter(list[ResponseInputItem]).validate_python(answer["output"])
    prompt = await prompt_for(client, engine, [*answer["output"], user("and?")])
    assert "They said hi." in prompt
    assert "hello" not in prompt


async def test_a_summary_that_is_cut_off_is_reported(client: httpx.AsyncClient) -> None:
    answer = await client.post(f"{RESPONSES}/compact", json={"model": "tiny", "input": "hi"})
    msgspec.convert(answer.json(), Compaction)
    assert "cut off" in answer.json()["warnings"][0]["reason"]
    assert answer.headers["x-samewise-ignored"] == "input"


async def test_no_summary_is_an_error(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = says("")
    error = error_of(await client.post(f"{RESPONSES}/compact", json={"model": "tiny", "input": "hi"}))
    assert error["param"] == "input"
