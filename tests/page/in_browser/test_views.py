"""The views other than the chat, and small screens."""

import re

import pytest
from playwright.async_api import Page, expect

from tests.page.in_browser.axe import bare_context, violations
from tests.page.in_browser.visits import Chat, Visits
from tests.served.conftest import Server

pytestmark = pytest.mark.asyncio(loop_scope="session")

PARTED = re.compile("(Differs from|Same as) the first")
PHONE = {"width": 400, "height": 800}


async def test_nothing_keeps_people_out(server: Server, visits: Visits) -> None:
    page = (await Chat.open(await bare_context(visits, server.address), server.address)).page
    await page.get_by_role("tab", name="Compare").click()
    await expect(page.get_by_role("region", name="Column 1")).to_be_visible()
    await page.get_by_role("spinbutton", name="Max tokens").fill("8")
    await page.get_by_role("textbox", name="Your message").fill("Say hello.")
    await page.get_by_role("textbox", name="Your message").press("Enter")
    await expect(page.get_by_text("token after").first).to_be_visible()
    await expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    assert await violations(page) == []
    await page.get_by_role("button", name="Change its settings").first.click()
    await expect(page.get_by_role("dialog").get_by_role("spinbutton", name="temperature")).to_be_visible()
    # For buttons behind the dialog, too, axe takes its backdrop as the background instead of the buttons' own.
    assert await violations(page, besides=".q-btn") == []
    await page.get_by_role("button", name="Done").click()
    await page.get_by_role("tab", name="Server").click()
    await expect(page.get_by_role("region", name="Your recent requests")).to_be_visible()
    assert await violations(page) == []


async def test_compare(server: Server, visits: Visits) -> None:
    """Columns answer by one seed, and say where they part."""
    page = (await visits.chat(server.address)).page
    await page.get_by_role("tab", name="Compare").click()
    await page.get_by_role("spinbutton", name="Seed").fill("5")
    await page.get_by_role("spinbutton", name="Max tokens").fill("24")
    await ask(page, "Where does rain come from?")
    columns = page.get_by_role("region", name="Column")
    first, second = (columns.nth(at).get_by_role("article", name="Answer") for at in range(2))
    for answer in (first, second):
        await expect(answer).to_contain_text("24 tokens")
    await expect(second).to_contain_text(PARTED)
    bodies = [await answer.locator(".body").inner_text() for answer in (first, second)]
    same = next((at for at, (one, other) in enumerate(zip(*bodies, strict=False)) if one != other), len(bodies[0]))
    assert bodies[0] != bodies[1]
    await expect(second).to_contain_text(f"Same as the first for {same} character" if same else "from the start")

    await expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    await ask(page, "Where does rain come from?")
    await expect(page.get_by_role("button", name="Stop", exact=True)).to_be_visible()
    await expect(second).to_contain_text(PARTED)
    again = [await answer.locator(".body").inner_text() for answer in (first, second)]
    assert again == bodies  # by the same seed


async def test_server(server: Server, visits: Visits) -> None:
    """It shows an answer that is being written, and what became of it."""
    settings = {"max_completion_tokens": 2000, "ignore_eos": True}
    context = await visits.context(server.address, settings)
    chat = await Chat.open(context, server.address)
    await chat.ask("Count from one to a thousand.")
    await expect(chat.shown).not_to_be_empty()

    page = chat.page
    await page.get_by_role("tab", name="Server").click()
    running = page.locator("dl > div", has=page.get_by_text("Running choices", exact=True)).get_by_role("definition")
    await expect(running).to_have_text("1")
    requests = page.get_by_role("region", name="Your recent requests")
    newest = requests.get_by_role("row").nth(1)
    await expect(newest).to_contain_text("running")
    await newest.get_by_role("button").click()
    await expect(requests.get_by_text("Prefill chunks")).to_be_visible()
    await newest.get_by_role("button").click()

    await page.get_by_role("tab", name="Chat").click()
    await chat.button("Stop").click()
    await chat.wait_for_answers()
    await page.get_by_role("tab", name="Server").click()
    await expect(running).to_have_text("0")
    await expect(newest).not_to_contain_text("running")


async def test_small_screen(server: Server, visits: Visits) -> None:
    """Nothing is wider than it, and one can write in all that asks for text."""
    chat = await visits.chat(server.address, {"max_completion_tokens": 8}, viewport=PHONE)
    page = chat.page
    await chat.answer_to("Say " + "hello" * 50)
    await expect(chat.message).to_be_in_viewport()
    assert await width(page) <= PHONE["width"]
    await page.get_by_role("tab", name="Compare").click()
    await expect(chat.message).to_be_in_viewport()
    assert await width(page) <= PHONE["width"]
    await page.get_by_role("tab", name="Server").click()
    await expect(page.get_by_role("region", name="Your recent requests")).to_be_attached()
    assert await width(page) <= PHONE["width"]


async def ask(page: Page, question: str) -> None:
    message = page.get_by_role("textbox", name="Your message")
    await message.fill(question)
    await message.press("Enter")


async def width(page: Page) -> int:
    """Width of the scrollable page."""
    found: int = await page.evaluate("document.scrollingElement.scrollWidth")
    return found
