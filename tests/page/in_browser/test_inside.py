"""A look inside an answer, and another answer that begins in it."""

import pytest
from playwright.async_api import expect

from tests.page.in_browser.axe import bare_context, violations
from tests.page.in_browser.visits import Chat, Visits
from tests.served.conftest import Server

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_TOKENS = 24
SETTINGS = {"max_completion_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}


async def test_inside(server: Server, visits: Visits) -> None:
    """The same comes again, by its tokens, and nothing keeps people out; another answer goes on from one of them."""
    chat = await Chat.open(await bare_context(visits, server.address, SETTINGS), server.address)
    page = chat.page
    first = await chat.answer_to("Name a few animals.")
    await chat.button("Look inside").click()
    inside = page.get_by_role("dialog", name="Inside this answer")
    proof = f"The same again: {NUM_TOKENS} tokens, equal to the last character."
    await expect(inside.get_by_role("status").filter(has_text=proof)).to_be_visible()
    boxes = inside.get_by_role("option")
    await expect(boxes).to_have_count(NUM_TOKENS)

    await boxes.first.focus()
    for key in ("End", "ArrowLeft", "Home", "ArrowRight", "Enter"):
        await page.keyboard.press(key)
    await expect(boxes.nth(1)).to_have_attribute("aria-selected", "true")
    detail = inside.get_by_role("region", name="The chosen token")
    await expect(detail).to_contain_text(f"Token 2 of {NUM_TOKENS}")
    await expect(detail).to_contain_text("(chosen)")
    assert await violations(page) == []

    await detail.get_by_role("button").first.click()
    await expect(inside).to_be_hidden()
    await expect(chat.answers).to_contain_text("2 / 2")
    await chat.wait_for_answers()
    _, before, after = await chat.stored()
    assert before["content"] != after["content"]
    assert after["content"].startswith(after["prefix"])
    assert not before["content"].startswith(after["prefix"])

    await chat.button("Look inside").click()  # what goes on from a token comes again as well
    await expect(inside.get_by_role("status").filter(has_text="The same again")).to_be_visible()
    await inside.get_by_role("button", name="Close").click()
    await chat.button("Previous version").click()
    await expect(chat.shown).to_have_text(first, use_inner_text=True)


async def test_another_answer_is_told_of(server: Server, visits: Visits) -> None:
    """If stored answers were modified, the page shows where they differ from the server's."""
    context = await visits.context(server.address, SETTINGS)
    chat = await Chat.open(context, server.address)
    await chat.answer_to("Name a few animals.")
    await chat.page.evaluate(
        """() => {
          const kept = JSON.parse(samewise.load(samewise.conversations()[0].id));
          const answer = Object.values(kept.turns).find(({ role }) => role === "assistant");
          answer.content = answer.content.slice(0, -1) + "?!";
          samewise.save(kept.id, JSON.stringify(kept));
        }"""
    )
    await chat.page.reload()
    await chat.button("Look inside").click()
    inside = chat.page.get_by_role("dialog", name="Inside this answer")
    await expect(inside.get_by_role("status").filter(has_text="Not the same: differs")).to_be_visible()
