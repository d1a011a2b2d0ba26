"""Hints and what clients send along: followed where that means something, else left out and reported; never refused,
unless the server is strict."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from server.api.fields.foreign import ForeignFields
from server.api.fields.rules import relations_of
from server.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, COMPLETIONS, chat, client_of, completion, events_of, refused, requested
from tests.server.tiny_model import TEMPLATE, write_folder

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
THINKING = TEMPLATE.replace("{{ message.content", "{{ message.reasoning_content or '' }}{{ message.content")
WITH_EFFORT = "{{ reasoning_effort }}" + TEMPLATE


def assistant(**fields: Any) -> list[dict[str, Any]]:
    """A conversation whose second message, of the assistant, has these fields."""
    return [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", **fields}]


def user(**fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "x", **fields}]


def text(content: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **fields}


def json_form(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", **fields}}}


HINTS = [
    ({"reasoning_effort": "low"}, {}, "reasoning_effort"),
    ({"thinking": {"type": "disabled"}}, {}, "thinking"),
    ({"verbosity": "low"}, {}, "verbosity"),
    ({"learn": True}, {}, "learn"),
    ({"prompt_cache_retention": "24h"}, {}, "prompt_cache_retention"),
    ({"prompt_cache_options": {"ttl": "1h"}}, {}, "prompt_cache_options"),
    ({"store": True}, {}, "store"),
    (json_form(description="a list"), json_form(), "response_format.json_schema.description"),
    ({"service_tier": "flex"}, {}, "service_tier"),
    ({"messages": user(name="Ann")}, {"messages": user()}, "messages[0].name"),
    ({"messages": assistant(reasoning_content="hm")}, {"messages": assistant()}, "messages[1].reasoning_content"),
    ({"messages": assistant(annotations=[{"type": "url_citation"}])}, {"messages": assistant()},
     "messages[1].annotations"),
    ({"messages": assistant(refusal="no")}, {"messages": assistant()}, "messages[1].refusal"),
    ({"messages": assistant(provider_specific_fields={"refusal": None})}, {"messages": assistant()},
     "messages[1].provider_specific_fields"),
    ({"messages": user(content=[text("x", cache_control={"type": "ephemeral"})])}, {"messages": user()},
     "messages[0].content[0].cache_control"),
    ({"messages": user(content=[text("x", refusal="no")])}, {"messages": user()}, "messages[0].content[0].refusal"),
    ({"messages": assistant(tool_calls=[{**CALL, "index": 0}])}, {"messages": assistant(tool_calls=[CALL])},
     "messages[1].tool_calls[0].index"),
    ({"messages": assistant(tool_calls=[{**CALL, "function": {**CALL["function"], "output": "z"}}])},
     {"messages": assistant(tool_calls=[CALL])}, "messages[1].tool_calls[0].function.output"),
    ({"max_tokens": 32_000}, {"max_tokens": 235}, "max_tokens"),
    ({"max_tokens": None, "max_completion_tokens": 32_000}, {"max_tokens": 235}, "max_completion_tokens"),
]  # fmt: skip
"""Fields, the same request without the hint, and the path that is reported."""


def check_reported(response: httpx.Response, answer: dict[str, Any], paths: list[str]) -> None:
    """The answer, or the first chunk of a stream, and the header name these paths."""
    assert response.status_code == 200, response.text
    warnings = answer.get("warnings", [])
    assert [warning["path"] for warning in warnings] == paths
    assert all(set(warning) == {"path", "reason"} and warning["reason"] for warning in warnings)
    assert ("warnings" in answer, "x-samewise-ignored" in response.headers) == (bool(paths), bool(paths))
    assert response.headers.get("x-samewise-ignored", "") == ", ".join(paths)


async def reports(client: httpx.AsyncClient, *paths: str, **fields: Any) -> None:
    response = await client.post(CHAT, json=chat(**fields))
    check_reported(response, response.json(), list(paths))


async def streams(client: httpx.AsyncClient, *paths: str, **fields: Any) -> None:
    response = await client.post(CHAT, json=chat(stream=True, **fields))
    first, *others = events_of(response.text)
    check_reported(response, first, list(paths))
    assert others
    assert not any("warnings" in chunk for chunk in others)


@pytest.mark.parametrize(("fields", "plain", "path"), HINTS)
async def test_a_hint_is_reported_and_changes_nothing(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], plain: dict[str, Any], path: str
):
    engine.script = lambda request, choice: b"abcdefgh"
    without = await requested(client, engine, CHAT, chat(seed=1, **plain))
    await reports(client, path, seed=1, **fields)
    await streams(client, path, seed=1, **fields)
    for request in engine.requests[1:]:
        assert replace(request, request_id=without.request_id) == without


async def test_a_hint_of_streams(client: httpx.AsyncClient, strict_client: httpx.AsyncClient):
    padded = {"stream": True, "stream_options": {"include_obfuscation": True}}
    path = "stream_options.include_obfuscation"
    for url, body in ((CHAT, chat(**padded)), (COMPLETIONS, completion(**padded))):
        response = await client.post(url, json=body)
        first, *others = events_of(response.text)
        check_reported(response, first, [path])
        assert not any("warnings" in chunk for chunk in others)
        await refused(strict_client, url, body, path, "unsupported_parameter")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "plain", "path"), HINTS)
async def test_a_strict_server_refuses_hints(
    strict_client: httpx.AsyncClient, fields: dict[str, Any], plain: dict[str, Any], path: str, stream: bool
):
    assert (await strict_client.post(CHAT, json=chat(**plain))).status_code == 200
    body = chat(stream=stream, **fields)
    is_clamp = path.startswith("max_")
    param, code = ("messages", "context_length_exceeded") if is_clamp else (path, "unsupported_parameter")
    message = await refused(strict_client, CHAT, body, param, code)
    assert path in message


@pytest.mark.parametrize(
    "fields",
    [
        {"service_tier": "auto"},
        {"service_tier": "default"},
        {"store": False},
        json_form(description=None),
        {"prompt_cache_retention": "in_memory"},
        {"prompt_cache_options": {}},
        {"reasoning_effort": None, "verbosity": None},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"max_tokens": 32},
        {"messages": assistant(annotations=[], refusal=None, reasoning_content="", name="")},
        {"messages": assistant(provider_specific_fields=None)},
        {"messages": user(content=[text("x", refusal=None)])},
    ],
)
async def test_what_asks_for_nothing_is_not_reported(strict_client: httpx.AsyncClient, fields: dict[str, Any]):
    response = await strict_client.post(CHAT, json=chat(**fields))
    assert response.status_code == 200, response.text
    assert "x-samewise-ignored" not in response.headers
    assert "warnings" not in response.text


async def test_several_hints_are_reported_in_the_order_of_the_fields(client: httpx.AsyncClient):
    messages = [*user(name="Ann", b=1, a=2), *assistant(reasoning_content="hm")]
    hints = {"service_tier": "flex", "verbosity": "low", "reasoning_effort": "high"}
    expected = ["service_tier", "messages[0].b", "messages[0].a", "verbosity", "reasoning_effort"]
    shown_late = ["messages[0].name", "messages[2].reasoning_content"]
    await reports(client, *expected, *shown_late, messages=messages, **hints)


async def test_what_many_messages_have_is_reported_once(client: httpx.AsyncClient):
    messages = [{"role": "user", "content": [text("x", tag=1)], "tag": 1, "name": "Ann"}] * 5
    await reports(client, "messages[0].content[0].tag", "messages[0].tag", "messages[0].name", messages=messages)


async def test_no_more_is_reported_than_an_answer_can_bear(client: httpx.AsyncClient):
    response = await client.post(CHAT, json=chat(messages=user(**{f"key{i}" * 50: 1 for i in range(99)})))
    assert response.status_code == 200
    assert len(response.json()["warnings"]) == 32
    assert len(response.headers["x-samewise-ignored"]) <= 1024


@pytest.mark.parametrize(
    "key", ["a\r\nset-cookie: x", "a\nb", "schön", "\u2028", "a, b", "a b", "", "😀", "\x00", "k" * 9999]
)
async def test_no_key_can_break_the_header(client: httpx.AsyncClient, key: str):
    response = await client.post(CHAT, json=chat(messages=user(**{key: 1})))
    assert response.status_code == 200, response.text
    header = response.headers["x-samewise-ignored"]
    assert header.startswith("messages[0].")
    assert header.isascii()
    assert header.isprintable()
    assert not set(header) & set(", ")
    (warning,) = response.json()["warnings"]
    assert warning["path"].startswith(f"messages[0].{key[:150]}")
    assert len(warning["path"]) < 300


@pytest.mark.parametrize(
    ("fields", "path", "near"),
    [
        ({"reasoning_efort": "low"}, "reasoning_efort", "reasoning_effort"),
        ({"stor": True}, "stor", "store"),
        ({"stream": True, "stream_options": {"include_obfuscatio": 1}}, "stream_options.include_obfuscatio",
         "include_obfuscation"),
    ],
)  # fmt: skip
async def test_unknown_names_outside_of_messages_are_refused(
    client: httpx.AsyncClient, fields: dict[str, Any], path: str, near: str
):
    message = await refused(client, CHAT, chat(**fields), path, "unknown_parameter")
    assert f"Did you mean '{near}'?" in message


async def test_capabilities_list_hints(client: httpx.AsyncClient):
    endpoints = (await client.get("/v1/capabilities")).json()["endpoints"]
    fields = endpoints[CHAT]
    listed = {name for name, field in fields.items() if field["support"] == "hint"}
    top_level = {path for _, _, path in HINTS if path in fields and not path.startswith("max_")}
    foreign = {name for name, relations in relations_of(ForeignFields).items() if relations.hint}
    assert listed == top_level | foreign - {"n_probs", "reasoning_budget"} | {"stream_reasoning"}
    (options,) = [
        shape for shape in endpoints[COMPLETIONS]["stream_options"]["values"]["anyOf"] if "properties" in shape
    ]
    assert options["properties"]["include_obfuscation"]["x-support"] == "hint"


async def with_template(make_app: Callable[..., FastAPI], folder: Path, template: str) -> httpx.AsyncClient:
    return client_of(make_app(write_folder(folder / "m", template=template)))


async def test_reasoning_is_given_to_a_template_that_shows_it(
    make_app: Callable[..., FastAPI], engine: FakeEngine, tokenizer: Tokenizer, tmp_path: Path
):
    async with await with_template(make_app, tmp_path, THINKING) as client:
        await reports(client, messages=assistant(reasoning_content="I think;"))
    assert "I think;y" in shown(engine, tokenizer)


async def test_effort_is_given_to_a_template_that_has_such_a_variable(
    make_app: Callable[..., FastAPI], engine: FakeEngine, tokenizer: Tokenizer, tmp_path: Path
):
    async with await with_template(make_app, tmp_path, WITH_EFFORT) as client:
        await reports(client, reasoning_effort="high")
        assert shown(engine, tokenizer).startswith("high<|start|>")
        await reports(client, reasoning_effort="high", chat_template_kwargs={"reasoning_effort": "high"})
        await reports(
            client, "reasoning_effort", reasoning_effort="high", chat_template_kwargs={"reasoning_effort": "low"}
        )
        assert shown(engine, tokenizer).startswith("low<|start|>")


def shown(engine: FakeEngine, tokenizer: Tokenizer) -> str:
    """The last prompt as text."""
    return tokenizer.decode(engine.requests[-1].prompt, skip_special_tokens=False)


async def test_the_tokenizer_reports_as_well(client: httpx.AsyncClient, strict_client: httpx.AsyncClient):
    body = {"messages": user(name="Ann", tag=1)}
    response = await client.post("/tokenize", json=body)
    check_reported(response, response.json(), ["messages[0].tag", "messages[0].name"])
    await refused(strict_client, "/tokenize", body, "messages[0].tag", "unsupported_parameter")


@pytest.mark.parametrize(
    "fields",
    [
        {"content": [{"type": "refusal", "refusal": "No."}]},
        {"content": None, "refusal": "No."},
        {"content": "", "refusal": "No."},
        {"refusal": "No."},
    ],
)
async def test_a_refusal_is_read_as_the_assistant_s_text(
    strict_client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any]
):
    plain = await requested(strict_client, engine, CHAT, chat(messages=assistant(content="No.")))
    messages = [*user(), {"role": "assistant", **fields}]
    assert (await requested(strict_client, engine, CHAT, chat(messages=messages))).prompt == plain.prompt


@pytest.mark.parametrize(
    ("part", "field", "code"),
    [
        ({"type": "text"}, "text", "missing_required_parameter"),
        ({"type": "text", "text": None}, "text", "missing_required_parameter"),
        ({"type": "refusal"}, "refusal", "missing_required_parameter"),
        ({"type": "refusal", "text": "x"}, "refusal", "missing_required_parameter"),
        ({"text": "x"}, "type", "missing_required_parameter"),
        ({"type": "refusal", "refusal": 3}, "refusal", "invalid_type"),
    ],
)
async def test_parts_without_their_field(client: httpx.AsyncClient, part: dict[str, Any], field: str, code: str):
    messages = assistant(content=[text("x"), part])
    await refused(client, CHAT, chat(messages=messages), f"messages[1].content[1].{field}", code)


async def test_as_many_stop_strings_as_agents_send(client: httpx.AsyncClient, engine: FakeEngine):
    engine.script = lambda request, choice: b"abcdefgh"
    others = [f"<{index}>" for index in range(15)]
    for path, body in ((CHAT, chat), (COMPLETIONS, completion)):
        answer = (await client.post(path, json=body(stop=[*others, "d"]))).json()["choices"][0]
        assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", "d")
        await refused(client, path, body(stop=[*others, "d", "e"]), "stop", "array_above_max_length")


async def test_every_name_of_the_model_answers_under_that_name(make_app: Callable[..., FastAPI]):
    async with client_of(make_app(served_model_name="tiny,gpt-4o,org/tiny")) as client:
        cards = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == ["tiny", "gpt-4o", "org/tiny"]
        for name in ("tiny", "gpt-4o", "org/tiny"):
            assert (await client.get(f"/v1/models/{name}")).json()["id"] == name
            assert (await client.post(CHAT, json=chat(model=name))).json()["model"] == name
            assert (await client.post(COMPLETIONS, json=completion(model=name))).json()["model"] == name
            chunks = events_of((await client.post(CHAT, json=chat(model=name, stream=True))).text)
            assert {chunk["model"] for chunk in chunks} == {name}
            assert (await client.post("/tokenize", json={"model": name, "prompt": "x"})).status_code == 200
        assert (await client.post(CHAT, json=chat(model="gpt-4"))).status_code == 404
