"""The rules for websockets are invisible to users, except that a page may reload itself."""

import pytest
from playwright.async_api import expect

from tests.page.in_browser.conftest import LonePage
from tests.page.in_browser.visits import Visits

pytestmark = pytest.mark.asyncio(loop_scope="session")

LOSE_CONNECTION = "window.socket.io.engine.close()"
BE_UNKNOWN = f"window.socket.io.opts.query.client_id = crypto.randomUUID(); {LOSE_CONNECTION}"
"""As after a restart of the server."""
PASTED = 'He said: "{[(\\n' * 19_000
"""285,000 characters, of which many have to be escaped."""


async def test_a_lost_connection(lone_page: LonePage, visits: Visits) -> None:
    """Comes back to the same page; a server that does not know the page any more has the browser load it again."""
    chat = await visits.chat(lone_page.address)
    lone_page.server.answer = "Well."
    await chat.page.evaluate(f"window.sameAsBefore = true; {LOSE_CONNECTION}")
    await chat.answer_to("How are you?")
    assert await chat.page.evaluate("window.sameAsBefore")
    await chat.page.evaluate(BE_UNKNOWN)
    await chat.page.wait_for_function("!window.sameAsBefore")
    await expect(chat.questions).to_contain_text("How are you?")


async def test_a_long_prompt_is_sent_as_it_was_pasted(lone_page: LonePage, visits: Visits) -> None:
    """And edited, which sends all of it with each key."""
    chat = await visits.chat(lone_page.address)
    lone_page.server.answer = "Well."
    await chat.message.fill(PASTED)
    await chat.message.press("Control+End")
    await chat.message.press_sequentially("What does that mean?")
    await chat.message.press("Enter")
    await chat.wait_for_answers()
    assert (await chat.stored())[0]["content"] == PASTED + "What does that mean?"
