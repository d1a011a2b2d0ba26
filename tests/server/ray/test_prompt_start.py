"""Requests whose prompts begin alike are of one session, and nothing else decides."""

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from server.ray.routing_fields import SHORT_BYTES, START_BYTES, read_fields
from server.ray.routing_fields import session_of as session_of_fields

SYSTEM = {"role": "system", "content": "Be brief."}
LONG = "You are a helpful assistant. " * (START_BYTES // 20)


def session_of(body: Any, key: str = "") -> str:
    fields = read_fields(body if isinstance(body, bytes) else json.dumps(body).encode())
    assert fields is not None
    return session_of_fields(fields, key)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def chat(*messages: dict[str, str], **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages), **fields}


def test_a_long_prefix_decides_alone() -> None:
    system = {"role": "system", "content": LONG}
    assert session_of(chat(system, user("a"))) == session_of(chat(system, user("b")))
    assert session_of(chat(user(LONG + "a"))) == session_of(chat(user(LONG + "b")))


@pytest.mark.parametrize("field", ["prompt", "input", "input_prefix"])
def test_texts_and_conversations_count_alike(field: str) -> None:
    assert session_of({field: LONG + "a"}) == session_of({field: LONG + "b"}) != session_of({field: "b" + LONG})
    assert session_of({field: [LONG + "a", "x"]}) == session_of({field: [LONG + "b", "y"]})
    assert session_of({field: [1, 2, 3]}) != session_of({field: [1, 2, 4]})


@pytest.mark.parametrize("before", ["system", "instructions", "tools"])
def test_what_stands_before_the_conversation_counts(before: str) -> None:
    assert session_of(chat(user("a"), **{before: "x"})) != session_of(chat(user("a"), **{before: "y"}))
    assert session_of(chat(user("a"), **{before: LONG})) == session_of(chat(user("b"), **{before: LONG}))


def test_a_short_prefix_does_not_keep_others_together() -> None:
    assert session_of(chat(SYSTEM, user("a"))) != session_of(chat(SYSTEM, user("b")))


def test_a_conversation_stays_where_it_began() -> None:
    first = chat(SYSTEM, user("Hi!"))
    later = [*first["messages"], {"role": "assistant", "content": "Hello!"}, user("What is this?")]
    assert session_of(first) == session_of(chat(*later))


def test_salts_and_keys_are_kept_apart() -> None:
    sessions = {
        session_of(chat(user(LONG), **fields), key)
        for fields in ({}, {"cache_salt": "a"}, {"cache_salt": "b"})
        for key in ("", "sk-1", "sk-2")
    }
    assert len(sessions) == 9


def test_the_way_that_json_is_written_does_not_count() -> None:
    one = b'{"messages": [{"role": "user", "content": "a"}], "temperature": 0}'
    other = b'{"temperature":1,"messages":[{"content":"\\u0061","role":"user"}]}'
    assert session_of(one) == session_of(other)


def test_a_conversation_stays_where_it_began_when_it_grows_long() -> None:
    first = chat(SYSTEM, user("Hi!"))
    later = [*first["messages"], {"role": "assistant", "content": "x" * SHORT_BYTES}, user("y" * SHORT_BYTES)]
    assert session_of(first) == session_of(chat(*later)) != session_of(chat(*later[1:]))


@pytest.mark.parametrize("name", ["system", "tools", "messages", "input", "prompt"])
def test_long_values_count_by_how_they_begin(name: str) -> None:
    text = LONG + "x" * SHORT_BYTES
    assert session_of({name: text + "a"}) == session_of({name: text + "b"})
    assert session_of({name: [text, "a"]}) == session_of({name: [text, "b"]})
    assert session_of({name: "a" + text}) != session_of({name: "b" + text})


def test_long_prompts_of_tokens_count_by_more_than_a_few_tokens() -> None:
    tokens = list(range(SHORT_BYTES))
    assert session_of({"prompt": tokens}) == session_of({"prompt": [*tokens, 1]})
    assert session_of({"prompt": tokens}) != session_of({"prompt": [*tokens[:100], *tokens]})


@pytest.mark.parametrize("name", ["a", "messages", "tools", "input"])
def test_what_is_in_a_large_body_costs_little(name: str) -> None:
    """Compared with decoding all of it, in objects that are made: hardly any."""
    content = b'{"%s":[%s[]]}' % (name.encode(), b"[]," * 1_000_000)
    assert _peak(lambda: session_of(content)) < 0.2 * _peak(lambda: json.loads(content))


def _peak(work: Callable[[], object]) -> int:
    """The most bytes that it holds at a time."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("body", [{}, {"query": "x", "documents": ["y"]}, {"messages": []}, {"prompt": ""}])
def test_without_a_prompt_there_is_no_session(body: dict[str, Any]) -> None:
    assert session_of(body, "sk-1") == ""


@pytest.mark.parametrize("messages", [[None], [[]], [{}], "text", 7, {"a": 1}, [3.5, "a"]])
def test_a_body_that_is_wrong_is_the_replica_s_to_refuse(messages: object) -> None:
    assert session_of({"messages": messages})
