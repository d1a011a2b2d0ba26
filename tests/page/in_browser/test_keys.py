"""A server that answers nobody without a key, and its end."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Page, expect

from tests.page.in_browser.visits import Chat, Visits
from tests.served.conftest import Server

pytestmark = pytest.mark.asyncio(loop_scope="session")

KEY = "a-key-that-nobody-guesses"
QUESTION = "What is a pumpernickel?"


@pytest.fixture(scope="module")
def locked_server(chromium: str, embedded_folder: Path) -> Iterator[Server]:
    """The last test of this file ends it."""
    running = Server("--api-key", KEY)
    yield running
    assert running.terminate() == 0


async def test_key(locked_server: Server, visits: Visits) -> None:
    """It is asked for until it is right, and known as long as the tab is there, by nobody else."""
    address = locked_server.address
    context = await visits.context(address, {"max_completion_tokens": 8})
    page = await context.new_page()
    await page.goto(address)
    dialog = page.get_by_role("dialog")
    await expect(dialog.get_by_role("heading")).to_have_text("This server requires an API key")
    await type_key(page, "a wrong one")
    await expect(dialog.get_by_role("alert")).to_have_text(refusal(locked_server, "a wrong one"))
    await type_key(page, KEY)
    await expect(dialog).to_be_hidden()
    chat = Chat(page)
    answer = await chat.answer_to("Say hello.")

    await context.clear_cookies()  # as when the ticket that the key was exchanged for has ended
    await page.reload()
    await expect(chat.answers).to_be_visible()
    await expect(dialog).to_be_hidden()
    await expect(chat.shown).to_have_text(answer, use_inner_text=True)
    assert KEY in await page.evaluate("JSON.stringify({...sessionStorage})")
    assert KEY not in await page.evaluate("JSON.stringify({...localStorage}) + document.cookie")

    tab = await context.new_page()
    await tab.goto(address)
    await expect(tab.get_by_role("dialog")).to_be_visible()
    await tab.get_by_role("button", name="Cancel").click()
    await expect(tab.get_by_role("main").get_by_role("alert")).to_have_text(refusal(locked_server, None))
    await expect(Chat(tab).message).to_be_hidden()
    await tab.get_by_role("button", name="Try again").click()
    await type_key(tab, KEY)
    await expect(Chat(tab).message).to_be_visible()


async def test_answers_are_finished_before_the_end(locked_server: Server, visits: Visits) -> None:
    """And the server's log has neither errors nor what people said."""
    context = await visits.context(locked_server.address, {"max_completion_tokens": 120, "ignore_eos": True, "seed": 5})
    looking_on, page = await context.new_page(), await context.new_page()
    await looking_on.goto(locked_server.address)
    await page.goto(locked_server.address)
    await type_key(page, KEY)
    chat = Chat(page)
    whole = await chat.answer_to(QUESTION)
    await expect(looking_on.get_by_role("dialog")).to_be_visible()  # which keeps nothing from ending

    await chat.button("Answer again").click()
    await expect(chat.button("Stop")).to_be_visible()
    await expect(chat.shown).not_to_be_empty()
    assert await asyncio.to_thread(locked_server.terminate) == 0
    await expect(chat.shown).to_have_text(whole, use_inner_text=True)
    visits.problems.clear()  # that nobody answers any more
    assert "Draining" in locked_server.log
    assert not re.search(f"pumpernickel|{KEY}|ERROR|Traceback", locked_server.log)


async def type_key(page: Page, key: str) -> None:
    """And send it."""
    await page.get_by_role("textbox", name="API key").fill(key)
    await page.get_by_role("button", name="Use this key").click()


def refusal(server: Server, key: str | None) -> str:
    """The server's error message for a key."""
    sent = {} if key is None else {"Authorization": f"Bearer {key}"}
    message: str = httpx.get(f"{server.address}/v1/models", headers=sent).json()["error"]["message"]
    return message
