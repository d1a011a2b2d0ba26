"""A server that answers nobody without a key."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Page, expect

from tests.page.in_browser.visits import Chat, Visits
from tests.served.conftest import Server

pytestmark = pytest.mark.asyncio(loop_scope="session")

KEY = "a-key-that-nobody-guesses"


@pytest.fixture(scope="module")
def locked_server(chromium: str, embedded_folder: Path) -> Iterator[Server]:
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
    await expect(dialog.get_by_role("heading")).to_have_text("This server wants an API key")
    await type_key(page, "a wrong one")
    await expect(dialog.get_by_role("alert")).to_have_text(refusal(locked_server, "a wrong one"))
    await type_key(page, KEY)
    await expect(dialog).to_be_hidden()
    chat = Chat(page)
    answer = await chat.answer_to("Say hello.")

    await page.reload()
    await expect(chat.answers).to_be_visible()
    await expect(dialog).to_be_hidden()
    assert await chat.shown.inner_text() == answer
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


async def type_key(page: Page, key: str) -> None:
    """And send it."""
    await page.get_by_role("textbox", name="API key").fill(key)
    await page.get_by_role("button", name="Use this key").click()


def refusal(server: Server, key: str | None) -> str:
    """What the server says to those who have no other key."""
    sent = {} if key is None else {"Authorization": f"Bearer {key}"}
    message: str = httpx.get(f"{server.address}/v1/models", headers=sent).json()["error"]["message"]
    return message
