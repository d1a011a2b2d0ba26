import json
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from server.page.conversation import Conversation, Turn, title_of

ROLES = st.sampled_from(["user", "assistant", "tool"])
Steps = list[tuple[int, Any, bool]]
STEPS = st.lists(st.tuples(st.integers(min_value=-1), ROLES, st.booleans()), max_size=12)
"""Each says after which turn something is said, or, for the last, that it is only looked at."""


def grown(steps: Steps) -> Conversation:
    conversation = Conversation(id="c")
    for at, role, is_said in steps:
        turns = list(conversation.turns.values())
        turn = turns[at % len(turns)] if turns and at >= 0 else None
        if is_said:
            conversation.add(turn, role, f"text {len(turns)}")
        elif turn is not None:
            conversation.choose(turn)
    return conversation


def read(turns: dict[str, Any], **more: Any) -> Conversation:
    return Conversation.from_json(json.dumps({"id": "c", "turns": turns, **more}))


@given(STEPS)
def test_what_is_looked_at_is_a_chain_of_versions_that_were_chosen(steps: Steps) -> None:
    conversation = grown(steps)
    path = conversation.path()
    assert bool(path) == bool(conversation.turns)
    for turn in conversation.turns.values():
        assert turn in conversation.versions(turn)
        assert conversation.path_to(turn)[-1] is turn
        assert {other.parent for other in conversation.versions(turn)} == {turn.parent}
    for before, after in zip([None, *path], path, strict=False):
        assert after.parent == (None if before is None else before.id)
    if path:
        assert conversation.path_to(path[-1]) == path
        assert not any(turn.parent == path[-1].id for turn in conversation.turns.values())


@given(STEPS)
def test_it_can_be_kept(steps: Steps) -> None:
    conversation = grown(steps)
    again = Conversation.from_json(conversation.to_json())
    assert again == conversation
    assert again.path() == conversation.path()


@given(STEPS, STEPS)
def test_what_two_tabs_say_comes_together(ours: Steps, theirs: Steps) -> None:
    one, other = grown(ours), grown(theirs)
    path = [turn.id for turn in one.path()]
    one.merge(other)
    assert one.turns.keys() >= other.turns.keys()
    assert [turn.id for turn in one.path()] == path or not path
    Conversation.from_json(one.to_json())


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*Turn.__struct_fields__, "turns", "first", "0", "1"]), inner, max_size=4)
    ),
)


@given(st.text() | VALUES.map(json.dumps) | VALUES.map(lambda turns: json.dumps({"id": "c", "turns": turns})))
def test_what_is_no_conversation_is_said_to_be_none(text: str) -> None:
    try:
        found = Conversation.from_json(text)
    except ValueError:
        return
    found.path()
    for turn in found.turns.values():
        found.messages_before(turn)


@pytest.mark.parametrize(
    ("turns", "first"),
    [
        ({"1": {"id": 2, "role": "user"}}, None),
        ({"1": {"id": 1, "role": "user", "parent": 1}}, None),
        ({"1": {"id": 1, "role": "user", "parent": 2}, "2": {"id": 2, "role": "user"}}, None),
        ({"1": {"id": 1, "role": "user", "chosen": 1}}, 1),
        ({"1": {"id": 1, "role": "user"}}, 7),
        ({"1": {"id": 1, "role": "user"}, "2": {"id": 2, "role": "user", "parent": 1}}, 2),
    ],
)
def test_trees_that_are_none_are_refused(turns: dict[str, Any], first: int | None) -> None:
    with pytest.raises(ValueError, match="turn"):
        read(turns, first=first)


def test_a_deep_nest_is_refused() -> None:
    with pytest.raises(ValueError, match="nested"):
        Conversation.from_json('{"id": "c", "other": ' + "[" * 200_000)


def test_results_are_asked_for_until_each_call_has_one() -> None:
    conversation = Conversation(id="c", system="Be brief.")
    asked = conversation.add(None, "user", "What time is it, and where?")
    calls = [{"id": "a", "function": {"name": "clock"}}, {"id": "b", "function": {"name": "map"}}]
    answer = conversation.add(asked, "assistant", tool_calls=calls)
    assert conversation.open_calls() == calls
    first = conversation.add(answer, "tool", "noon", tool_call_id="a")
    assert conversation.open_calls() == calls[1:]
    second = conversation.add(first, "tool", "here", tool_call_id="b")
    assert conversation.open_calls() == []
    last = conversation.add(second, "assistant", "Noon, here.")
    messages = conversation.messages_before(last)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "tool"]
    assert messages[2] == {"role": "assistant", "content": None, "tool_calls": calls}
    assert messages[4] == {"role": "tool", "content": "here", "tool_call_id": "b"}


def test_exports_have_what_is_looked_at() -> None:
    conversation = Conversation(id="c", system="Be brief.")
    asked = conversation.add(None, "user", "Why?")
    conversation.add(asked, "assistant", "One reason.")
    conversation.add(asked, "assistant", "Another reason.")
    assert conversation.to_markdown() == (
        "# Why?\n\n**System**\n\nBe brief.\n\n**User**\n\nWhy?\n\n**Assistant**\n\nAnother reason.\n"
    )
    body = msgspec.json.decode(conversation.to_messages({"model": "m", "seed": 1}))
    assert (body["model"], body["seed"]) == ("m", 1)
    assert [message["content"] for message in body["messages"]] == ["Be brief.", "Why?", "Another reason."]


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("Hello", "Hello"),
        ("\n  \n Hello \nyou", "Hello"),
        ("word " * 20, "word " * 11 + "word …"),
        ("x" * 100, "x" * 60 + "…"),
        ("", ""),
    ],
)
def test_titles_are_short(text: str, title: str) -> None:
    assert title_of(text) == title


@pytest.mark.parametrize(("number", "length", "is_full"), [(2, 100, False), (1, 5_000_000, True), (5_000, 1, True)])
def test_a_conversation_is_full_at_some_time(number: int, length: int, is_full: bool) -> None:
    turns = {at: Turn(id=at, role="user", content="x" * length) for at in range(number)}
    assert Conversation(id="c", turns=turns).is_full is is_full


def test_what_has_too_many_turns_to_be_shown_is_refused() -> None:
    turns = {str(at): {"id": at, "role": "user"} for at in range(10_001)}
    with pytest.raises(ValueError, match="10,001 turns; at most 10,000 are supported"):
        read(turns)
