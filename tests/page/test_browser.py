"""Conversations sent by browsers, with limits on what is stored."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from nicegui import Client, core
from nicegui.page import page

from server.page.browser import Browser, ConversationEntry, ConversationStore
from server.page.conversation import Conversation
from server.page.conversation_list import ConversationList


class Told(Browser):
    """A browser that returns the same to each call, and counts them."""

    def __init__(self, answer: Any) -> None:
        self.num_calls = 0
        self._answer = answer

    def _send(self, function: str, *arguments: Any) -> None:
        self.num_calls += 1

    async def _call(self, function: str, *arguments: Any) -> Any:
        self.num_calls += 1
        return self._answer


async def test_a_conversation_without_end_is_not_read() -> None:
    browser = Told("x" * 200_000)
    assert await browser.load("c") is None
    assert browser.num_calls == 50


def test_names_of_conversations_are_forgotten_in_the_end() -> None:
    """Unknown conversations are saved, which shows what the tab still knows."""
    browser = Told(None)
    store = ConversationStore(browser)
    for number in range(1000):
        store.note_change(str(number))
    store.note_change("x" * 1_000_000)
    for name in map(str, range(1000)):
        store.save_meanwhile(Conversation(id=name))
    store.save_meanwhile(Conversation(id="x" * 1_000_000))
    assert browser.num_calls == 801


async def test_a_list_that_changes_is_shown_by_the_same_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "loop", asyncio.get_running_loop())
    tab = Client(page(""), request=None)
    chat: Any = SimpleNamespace(store=ConversationStore(Told(None)), conversation=Conversation(id="2"))
    session: Any = SimpleNamespace(stored=SimpleNamespace(conversations=[]))
    with tab:
        shown = ConversationList(session, chat)
    for titles in (["a", "b", "c"], ["d", "e", "f"], ["", "a"]):
        made = tab.next_element_id
        shown._show([ConversationEntry(str(at), title, 1.0) for at, title in enumerate(titles, start=1)])
        buttons = [one for one in tab.elements.values() if "open" in one.classes]
        assert [one.text for one in buttons] == [title or "Conversation" for title in titles]
        assert [one.props["aria-current"] for one in buttons[:3]] == ["false", "true", "false"][: len(titles)]
        if titles[0] != "a":
            assert tab.next_element_id == made
    tab.delete()
