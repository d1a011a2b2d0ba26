"""Conversations stored in the browser, including invalid ones."""

import json
import re
from typing import Any

import pytest
from playwright.async_api import expect

from tests.page.in_browser.conftest import LonePage
from tests.page.in_browser.visits import Chat, Visits

pytestmark = pytest.mark.asyncio(loop_scope="session")

LOAD_WHEN_TOLD = """() => {
  const load = samewise.load;
  samewise.load = async (...asked) => {
    await new Promise((resolve) => (window.goOn = resolve));
    samewise.load = load;
    return load(...asked);
  };
}"""


def conversation(name: str, answer: str) -> dict[str, Any]:
    """One of two turns, as the browser keeps it."""
    turns = {
        "1": {"id": 1, "role": "user", "content": "Speak.", "chosen": 2},
        "2": {"id": 2, "parent": 1, "role": "assistant", "content": answer, "seconds": 1.0},
    }
    return {"id": name, "title": name, "updated": 1.0, "turns": turns, "first": 1}


async def keep(chat: Chat, name: str, text: str) -> None:
    """As if an earlier visit had."""
    await chat.page.evaluate("([name, text]) => samewise.save(name, text)", [name, text])


async def test_long_one(lone_page: LonePage, visits: Visits) -> None:
    """One that is longer than a message of the browser may be is opened as a whole, also behind another view."""
    chat = await visits.chat(lone_page.address)
    lines = [f"Line {number} 😀 ends here." for number in range(50_000)]
    whole = json.dumps(
        conversation("long", "\n\n".join(lines[:500])) | {"system": "\n".join(lines)}, ensure_ascii=False
    )
    assert len(whole) > 1_200_000
    await keep(chat, "long", whole)
    await chat.page.reload()
    await chat.page.get_by_role("tab", name="Server").click()
    await chat.conversations.get_by_role("button", name="long", exact=True).click()
    await chat.page.get_by_role("tab", name="Chat").click()
    await expect(chat.shown).to_contain_text(lines[0])
    await expect(chat.shown).to_contain_text(lines[499])
    lone_page.server.answer = "Yes."
    await chat.ask("Is that all?")
    await chat.wait_for_answers(2)
    kept = await chat.page.evaluate("JSON.parse(localStorage.getItem('samewise.conversation.long'))")
    assert kept["system"] == "\n".join(lines)
    assert len(kept["turns"]) == 4


async def test_written_by_others(lone_page: LonePage, visits: Visits) -> None:
    """Invalid conversations and settings do not prevent chatting."""
    chat = await visits.chat(lone_page.address)
    cyclic = conversation("cyclic", "Ah.")
    cyclic["turns"]["1"]["parent"] = 2
    for name, text in (
        ("cyclic", json.dumps(cyclic)),
        ("other", json.dumps({"id": "other", "title": "other", "updated": 2, "turns": "none"})),
        ("mad", "{"),
    ):
        await keep(chat, name, text)
    await chat.page.evaluate("""() => {
      localStorage.setItem("samewise.settings", '"hot"');
      localStorage.setItem("samewise.theme", "5");
      sessionStorage.setItem("samewise.current", "cyclic");
    }""")
    await chat.page.reload()
    await expect(chat.conversations).to_have_count(2)
    for name in ("cyclic", "other"):
        await chat.conversations.get_by_role("button", name=name, exact=True).click()
        await expect(chat.page.get_by_text("Cannot show this conversation").first).to_be_visible()
    lone_page.server.answer = "Well."
    assert (await chat.answer_to("How are you?")).strip() == "Well."
    await expect(chat.conversations).to_have_count(3)


async def test_asked_while_it_is_loaded(lone_page: LonePage, visits: Visits) -> None:
    chat = await visits.chat(lone_page.address)
    lone_page.server.answer = "Yes."
    await chat.answer_to("Are you there?")
    await chat.page.add_init_script(f'addEventListener("DOMContentLoaded", {LOAD_WHEN_TOLD});')
    await chat.page.reload()
    await chat.page.wait_for_function("!!window.goOn")
    await chat.ask("Still?")
    await chat.page.evaluate("goOn()")
    await chat.wait_for_answers(2)
    assert [turn["content"] for turn in await chat.stored()] == ["Are you there?", "Yes.", "Still?", "Yes."]


async def test_a_new_one_while_another_is_loaded(lone_page: LonePage, visits: Visits) -> None:
    chat = await visits.chat(lone_page.address)
    lone_page.server.answer = "Yes."
    await chat.answer_to("Are you there?")
    await chat.button("New chat").click()
    await chat.answer_to("And now?")
    await chat.page.evaluate(LOAD_WHEN_TOLD)
    await chat.conversations.get_by_role("button", name="Are you there?", exact=True).click()
    await chat.page.wait_for_function("!!window.goOn")
    await chat.button("New chat").click()
    await expect(chat.answers).to_have_count(0)
    await chat.page.evaluate("goOn()")
    await chat.answer_to("Still?")
    assert [turn["content"] for turn in await chat.stored()] == ["Still?", "Yes."]


async def test_one_in_two_tabs(lone_page: LonePage, visits: Visits) -> None:
    """Both add to it, and nothing is lost."""
    context = await visits.context(lone_page.address)
    one = await Chat.open(context, lone_page.address)
    lone_page.server.answer = "First."
    await one.answer_to("Begin.")
    other = await Chat.open(context, lone_page.address)
    await other.conversations.get_by_role("button", name="Begin.", exact=True).click()
    await expect(other.shown).to_contain_text("First.")

    lone_page.server.answer = "Second."
    await other.ask("Go on.")
    await other.wait_for_answers(2)
    await expect(one.shown.nth(1)).to_contain_text("Second.")
    lone_page.server.answer = "Third."
    await one.ask("And now?")
    await one.wait_for_answers(3)
    await expect(other.shown.nth(2)).to_contain_text("Third.")
    for chat in (one, other):
        said = [turn["content"] for turn in await chat.stored()]
        assert said == ["Begin.", "First.", "Go on.", "Second.", "And now?", "Third."]


async def test_no_server_at_first(lone_page: LonePage, visits: Visits) -> None:
    """Errors at the start are shown, and the user can try again."""
    lone_page.server.status = 500
    context = await visits.context(lone_page.address)
    page = await context.new_page()
    await page.goto(lone_page.address)
    problem = page.get_by_role("main").get_by_role("alert")
    await expect(problem).to_have_text("Something has failed.")
    lone_page.server.status = 502
    await page.get_by_role("button", name="Try again").click()
    await expect(problem).to_have_text("Something else has failed.")
    lone_page.server.status = 503  # it starts, so nobody has to ask again
    await page.get_by_role("button", name="Try again").click()
    await expect(problem).to_have_text(re.compile("not ready"))
    lone_page.server.status = 200
    await expect(Chat(page).message).to_be_visible()
