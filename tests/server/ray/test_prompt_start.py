"""Requests whose prompts begin alike are of one session, and nothing else decides."""

import json
from typing import Any

import pytest

from server.ray.prompt_start import START_BYTES, session_of

SYSTEM = {"role": "system", "content": "Be brief."}
LONG = "You are a helpful assistant. " * (START_BYTES // 20)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def chat(*messages: dict[str, str], **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages), **fields}


def test_a_long_prefix_decides_alone() -> None:
    system = {"role": "system", "content": LONG}
    assert session_of(chat(system, user("a"))) == session_of(chat(system, user("b")))
    assert session_of(chat(user(LONG + "a"))) == session_of(chat(user(LONG + "b")))


@pytest.mark.parametrize("field", ["prompt", "input"])
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
    one = json.loads('{"messages": [{"role": "user", "content": "a"}], "temperature": 0}')
    other = json.loads('{"temperature":1,"messages":[{"content":"\\u0061","role":"user"}]}')
    assert session_of(one) == session_of(other)


@pytest.mark.parametrize("body", [{}, {"query": "x", "documents": ["y"]}, {"messages": []}, {"prompt": ""}])
def test_without_a_prompt_there_is_no_session(body: dict[str, Any]) -> None:
    assert session_of(body, "sk-1") == ""


@pytest.mark.parametrize("messages", [[None], [[]], [{}], "text", 7, {"a": 1}, [3.5, "a"]])
def test_a_body_that_is_wrong_is_the_replica_s_to_refuse(messages: object) -> None:
    assert session_of({"messages": messages})
