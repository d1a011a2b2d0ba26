"""Talking to a model, from the first visit on."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from tests.page.in_browser.visits import Chat, Visits
from tests.served.conftest import Server
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

SHORT = {"max_completion_tokens": 24, "temperature": 0}


async def test_a_first_visit(server: Server, visits: Visits) -> None:
    """From the address to an answer that is kept."""
    chat = await visits.chat(server.address, SHORT)
    await expect(chat.page).to_have_url(re.compile("/page/$"))
    await expect(chat.page.get_by_text("Chat with ")).to_be_visible()

    answer = await chat.answer_to("Say hello.")
    assert answer
    await expect(chat.page.get_by_role("status").filter(has_text="The answer is complete.")).to_be_attached()
    await expect(chat.page.get_by_text("24 tokens")).to_be_visible()

    await chat.page.reload()
    await expect(chat.questions).to_have_text(re.compile("Say hello."))
    await expect(chat.shown).to_have_text(answer, use_inner_text=True)


async def test_stop(server: Server, visits: Visits) -> None:
    """The part received is kept, and the server stops generating."""
    chat = await visits.chat(server.address, {"max_completion_tokens": 2000, "ignore_eos": True})
    await chat.ask("Count from one to a thousand.")
    await expect(chat.shown).not_to_be_empty()
    await until(lambda: server.metric("num_requests_running") == 1)

    await chat.button("Stop").click()
    await chat.wait_for_answers()
    await expect(chat.page.get_by_text("stopped", exact=False).last).to_be_visible()
    answer = await chat.shown.inner_text()
    await until(lambda: server.metric("num_requests_running") == 0)

    await chat.page.reload()
    await expect(chat.button("Answer again")).to_be_visible()
    await expect(chat.shown).to_have_text(answer, use_inner_text=True)


async def test_versions(server: Server, visits: Visits) -> None:
    """Messages can be edited and answered again; no version is lost."""
    chat = await visits.chat(server.address, {"max_completion_tokens": 16, "seed": 3})
    page = chat.page
    first = await chat.answer_to("Name a fruit.")

    await chat.button("Edit").click()
    await page.get_by_role("textbox", name="Edit").fill("Name a metal.")
    await chat.questions.get_by_role("button", name="Send").click()
    await expect(chat.questions).to_contain_text("2 / 2")
    await chat.wait_for_answers()
    second = await chat.shown.inner_text()
    assert second != first

    await chat.button("Previous version").click()
    await expect(chat.questions).to_contain_text("1 / 2")
    await expect(chat.questions.locator(".said")).to_have_text("Name a fruit.")
    await expect(chat.shown).to_have_text(first, use_inner_text=True)
    await expect(chat.button("Previous version")).to_be_disabled()

    await chat.button("Answer again").click()
    await expect(chat.answers).to_contain_text("2 / 2")
    await chat.wait_for_answers()
    await expect(chat.shown).to_have_text(first, use_inner_text=True)  # by the same seed

    await chat.questions.get_by_role("button", name="Next version").click()
    await expect(chat.questions.locator(".said")).to_have_text("Name a metal.")
    await expect(chat.shown).to_have_text(second, use_inner_text=True)
    assert [turn["role"] for turn in await chat.stored()] == ["user", "assistant", "user", "assistant", "assistant"]


async def test_settings(server: Server, visits: Visits) -> None:
    """Added settings apply, removed ones do not, and errors are shown at the refused setting."""
    chat = await visits.chat(server.address)
    page = chat.page
    await chat.button("Settings").click()
    settings = page.get_by_role("complementary", name="Settings")
    for name, value in (("temperature", "0"), ("max completion tokens", "12")):
        await add_setting(page, name)
        await page.get_by_role("spinbutton", name=name.replace(" ", "_")).fill(value)
    answer = await chat.answer_to("Tell me something.")
    await expect(chat.page.get_by_text("12 tokens")).to_be_visible()
    await chat.button("Answer again").click()
    await expect(chat.answers).to_contain_text("2 / 2")
    await chat.wait_for_answers()
    await expect(chat.shown).to_have_text(answer, use_inner_text=True)

    await chat.button("Remove temperature").click()
    await expect(settings.get_by_role("spinbutton", name="temperature")).to_have_count(0)
    await add_setting(page, "tools")
    await chat.button("Answer again").click()
    problem = chat.answers.get_by_role("alert")
    await expect(problem).to_contain_text("tools")
    await expect(settings.get_by_role("alert").filter(has_text=await problem.inner_text())).to_be_visible()
    first, second, refused = [turn["request"] for turn in await chat.stored() if turn["role"] == "assistant"]
    assert first["temperature"] == second["temperature"] == 0
    assert "temperature" not in refused
    assert refused["max_completion_tokens"] == 12


async def test_killed_engine(server: Server, visits: Visits) -> None:
    """Nobody who reads an answer sees that the engine died under it."""
    settings = {"max_completion_tokens": 200, "ignore_eos": True, "temperature": 0.7, "seed": 11}
    chat = await visits.chat(server.address, settings)
    await chat.ask("Write a story about a lighthouse.")
    await expect(chat.shown).not_to_be_empty()
    restarts = server.metric("engine_restarts_total")
    os.kill(server.engine_pid, signal.SIGKILL)
    await chat.wait_for_answers()
    assert server.metric("engine_restarts_total") == restarts + 1

    question, answer = await chat.stored()
    async with server.async_client() as api:
        expected = await api.chat.completions.create(
            model="default", messages=[{"role": "user", "content": question["content"]}], extra_body=answer["request"]
        )
    assert answer["content"] == expected.choices[0].message.content
    assert "problem" not in answer
    await expect(chat.shown).to_contain_text(answer["content"].split()[-1])


async def test_two_tabs(server: Server, visits: Visits) -> None:
    """In two tabs of one browser, both answer at once, and each sees the other's conversations."""
    context = await visits.context(server.address, {"max_completion_tokens": 2000, "ignore_eos": True})
    one = await Chat.open(context, server.address)
    other = await Chat.open(context, server.address)
    await one.ask("What is a river?")
    await other.ask("What is a mountain?")
    await until(lambda: server.metric("num_requests_running") == 2)
    for chat in (one, other):
        await expect(chat.shown).not_to_be_empty()
        await chat.button("Stop").click()
        await chat.wait_for_answers()
    for chat in (one, other):
        await expect(chat.conversations).to_have_count(2)

    await one.conversations.get_by_role("button", name="What is a mountain?", exact=True).click()
    await expect(one.questions).to_contain_text("What is a mountain?")
    await expect(one.shown).to_have_text(await other.shown.inner_text())
    await one.button("Delete What is a mountain?").click()
    await expect(other.conversations).to_have_count(1)
    await expect(other.questions).to_contain_text("What is a mountain?")


async def test_what_is_taken_along(server: Server, visits: Visits, tmp_path: Path) -> None:
    """A conversation as a file; and the theme, which is there when the page is opened again."""
    chat = await visits.chat(server.address, SHORT)
    page = chat.page
    answer = await chat.answer_to("Say hello.")
    for kind in ("Markdown", "Request as JSON"):
        await chat.button("Export").click()
        async with page.expect_download() as download:
            await page.get_by_role("menuitem", name=kind).click()
        file = await download.value
        await file.save_as(tmp_path / file.suggested_filename)
    assert (
        tmp_path / "say-hello.md"
    ).read_text() == f"# Say hello.\n\n**User**\n\nSay hello.\n\n**Assistant**\n\n{answer}\n"
    request = json.loads((tmp_path / "say-hello.json").read_text())
    assert request["temperature"] == 0
    assert [message["role"] for message in request["messages"]] == ["user", "assistant"]

    await chat.button("Theme: auto").click()
    await chat.button("Theme: light").click()
    await expect(page.locator("body")).to_have_class(re.compile("body--dark"))
    await page.reload()
    await expect(chat.button("Theme: dark")).to_be_visible()
    await expect(page.locator("body")).to_have_class(re.compile("body--dark"))


async def add_setting(page: Page, name: str) -> None:
    """In the drawer of settings."""
    choice = page.get_by_role("combobox", name="Add a setting")
    await choice.fill(name)
    await page.get_by_role("option", name=name, exact=True).click()
    await expect(page.get_by_role("button", name=f"Remove {name.replace(' ', '_')}")).to_be_visible()
