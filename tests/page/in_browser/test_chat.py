"""Talking to a model, from the first visit on."""

import re

import pytest
from playwright.async_api import expect

from tests.page.in_browser.visits import Visits
from tests.served.conftest import Server

pytestmark = pytest.mark.asyncio(loop_scope="session")

SHORT = {"max_completion_tokens": 24, "temperature": 0}


async def test_a_first_visit(server: Server, visits: Visits) -> None:
    """From the address to an answer that is kept."""
    chat = await visits.chat(server.address, SHORT)
    await expect(chat.page).to_have_url(re.compile("/page/$"))
    await expect(chat.page.get_by_text("Talk to ")).to_be_visible()

    answer = await chat.answer_to("Say hello.")
    assert answer
    await expect(chat.page.get_by_role("status").filter(has_text="The answer is complete.")).to_be_attached()
    await expect(chat.page.get_by_text("24 tokens")).to_be_visible()

    await chat.page.reload()
    await expect(chat.questions).to_have_text(re.compile("Say hello."))
    assert await chat.shown.inner_text() == answer
