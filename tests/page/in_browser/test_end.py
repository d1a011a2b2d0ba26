"""A server that ends while people look."""

import asyncio
from pathlib import Path

import pytest
from playwright.async_api import expect

from tests.page.in_browser.visits import Visits
from tests.served.conftest import Server

pytestmark = pytest.mark.asyncio(loop_scope="session")

QUESTION = "What is a pumpernickel?"


async def test_answers_are_finished_first_and_nothing_was_told(
    chromium: str, embedded_folder: Path, visits: Visits
) -> None:
    """The one that is on its way is written to its end; its log has neither errors nor what people said."""
    server = Server()
    settings = {"max_completion_tokens": 120, "ignore_eos": True, "seed": 5}
    chat = await visits.chat(server.address, settings)
    whole = await chat.answer_to(QUESTION)
    await visits.chat(server.address)  # who only looks on keeps nothing from ending
    await chat.button("Answer again").click()
    await expect(chat.button("Stop")).to_be_visible()
    await expect(chat.shown).not_to_be_empty()
    assert await asyncio.to_thread(server.terminate) == 0
    await expect(chat.shown).to_have_text(whole, use_inner_text=True)
    visits.problems.clear()  # that nobody answers any more
    assert not [
        line for line in server.log.splitlines() if "pumpernickel" in line or "ERROR" in line or "Trace" in line
    ]
