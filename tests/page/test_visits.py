"""People who visit the page of a real server in a real browser."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.async_api import expect

from tests.page.conftest import Visit
from tests.page.visitor import LIMIT_MS, MARK, Visitor
from tests.served.conftest import Server
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

MODEL = "SmolLM2-135M-Instruct"
KEY = "a key of the tests"
SHORT = {"max_tokens": 12, "temperature": 1.5}
LONG = {"max_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def keyed(embedded_folder: Path) -> Iterator[Server]:
    """One that wants a key. The last test that uses it ends it."""
    running = Server("--api-key", KEY)
    yield running
    assert running.terminate() == 0
    assert MARK not in running.log


async def shown(visitor: Visitor) -> list[str]:
    """The texts of the conversation, in their order."""
    turns = visitor.page.get_by_role("article").locator(".body")
    return [text.strip() for text in await turns.all_inner_texts()]


async def test_from_the_first_visit_to_an_answer_that_is_still_there_after_a_reload(
    server: Server, visit: Visit
) -> None:
    visitor = await visit(server.address, remembered={"settings": SHORT})
    assert visitor.page.url == f"{server.address}/page/"
    answer = await visitor.ask(f"Name three colours. {MARK}")
    assert answer
    await expect(visitor.status).to_have_text("The answer is complete.")
    assert await shown(visitor) == [f"Name three colours. {MARK}", answer]
    assert await visitor.box.input_value() == ""
    await visitor.page.reload()
    assert await visitor.answer(0) == answer
    assert await visitor.ask(f"And three more. {MARK}") == (await shown(visitor))[-1]
    (kept,) = await visitor.stored()
    assert len(kept["turns"]) == 4


async def test_edited_and_answered_again_all_versions_stay(server: Server, visit: Visit) -> None:
    visitor = await visit(server.address, remembered={"settings": SHORT})
    page = visitor.page
    first = await visitor.ask(f"Tell me of the sea. {MARK}")
    await visitor.button("Answer again", 0).click()
    await expect(visitor.answers.get_by_text("2 / 2")).to_be_visible(timeout=LIMIT_MS)
    second = await visitor.answer(0)
    assert second != first
    await visitor.button("Version before", 0).click()
    await expect(visitor.answers.get_by_text("1 / 2")).to_be_visible()
    assert await visitor.answer(0) == first
    await visitor.button("Next version", 0).click()
    await expect(visitor.answers.get_by_text("2 / 2")).to_be_visible()
    assert await visitor.answer(0) == second

    said = page.get_by_role("article", name="You")
    await said.get_by_role("button", name="Edit").click()
    await said.get_by_role("textbox", name="Edit").fill(f"Tell me of the hills. {MARK}")
    await said.get_by_role("button", name="Send").click()
    await expect(said.get_by_text("2 / 2")).to_be_visible()
    hills = await visitor.answer(0)
    await expect(visitor.button("Version before", 0)).to_have_count(0)  # of these words there is one answer
    await said.get_by_role("button", name="Version before").click()
    await expect(said.get_by_text("1 / 2")).to_be_visible()
    assert await shown(visitor) == [f"Tell me of the sea. {MARK}", second]
    await said.get_by_role("button", name="Next version").click()
    await expect(said.get_by_text("2 / 2")).to_be_visible()
    assert await shown(visitor) == [f"Tell me of the hills. {MARK}", hills]


async def test_a_stopped_answer_stays_as_far_as_it_came_and_its_request_ends(server: Server, visit: Visit) -> None:
    visitor = await visit(server.address, remembered={"settings": LONG})
    await visitor.say(f"Tell me a very long story. {MARK}")
    await visitor.begun(0)
    assert server.metric("num_requests_running") == 1
    await visitor.page.get_by_role("button", name="Stop").click()
    text = await visitor.answer(0)
    await expect(visitor.answers.get_by_text("stopped")).to_be_visible()
    await until(lambda: server.metric("num_requests_running") == 0)
    assert await visitor.text(0) == text
    assert await visitor.page.get_by_role("button", name="Send").is_visible()


async def test_settings_are_sent_and_a_refusal_stands_beside_the_one_to_blame(server: Server, visit: Visit) -> None:
    visitor = await visit(server.address, remembered={"settings": {"ignore_eos": True}})
    page = visitor.page
    await page.get_by_role("button", name="Settings").click()
    await visitor.add_setting("temperature", "0")
    await visitor.add_setting("max_tokens", "8")
    first = await visitor.ask(f"Count to ten. {MARK}")
    await expect(visitor.answers.get_by_text("8 tokens")).to_be_visible()
    await expect(visitor.answers.get_by_text("cut off at the most tokens")).to_be_visible()
    await visitor.button("Answer again", 0).click()
    await expect(visitor.answers.get_by_text("2 / 2")).to_be_visible(timeout=LIMIT_MS)
    assert await visitor.answer(0) == first
    (kept,) = await visitor.stored()
    requests = [turn["request"] for turn in kept["turns"].values() if turn["role"] == "assistant"]
    seeds = {request.pop("seed") for request in requests}
    assert len(seeds) == 2  # drawn anew, which changes nothing without chance
    assert requests == [{"model": MODEL, "ignore_eos": True, "temperature": 0, "max_tokens": 8}] * 2

    await visitor.add_setting("temperature", "3")
    row = page.locator(".setting").filter(has_text="temperature").first
    await expect(row.get_by_role("alert")).to_have_text("It takes 0 to 2.")
    await page.get_by_label("temperature", exact=True).fill("1")
    await expect(row.get_by_role("alert")).to_be_hidden()

    await visitor.add_setting("penalty_alpha", "0.6")
    alpha = page.locator(".setting").filter(has=page.get_by_label("penalty_alpha", exact=True))
    await expect(alpha.get_by_text("Not together with temperature")).to_be_visible()
    await visitor.say(f"And on. {MARK}")
    await visitor.button("Answer again", 1).wait_for()
    problem = await visitor.answers.nth(1).get_by_role("alert").inner_text()
    assert "temperature" in problem
    assert problem in await page.locator(".setting [role=alert]").all_inner_texts()


async def test_two_tabs_talk_at_once_and_know_of_each_other(server: Server, visit: Visit) -> None:
    one = await visit(server.address, remembered={"settings": SHORT})
    two = await visit(server.address, beside=one)
    await one.say(f"First tab {MARK}")
    await two.say(f"Second tab {MARK}")
    assert await one.answer(0)
    assert await two.answer(0)
    lists = [tab.page.get_by_role("navigation", name="Conversations") for tab in (one, two)]
    for conversations in lists:
        for title in (f"First tab {MARK}", f"Second tab {MARK}"):
            await expect(conversations.get_by_role("button", name=title, exact=True)).to_be_visible()
    await lists[0].get_by_role("button", name=f"Second tab {MARK}", exact=True).click()
    await expect(one.page.get_by_role("article", name="You")).to_contain_text("Second tab")
    assert await shown(one) == await shown(two)
    await lists[1].get_by_role("button", name=f"Delete First tab {MARK}").click()
    await expect(lists[0].get_by_role("button", name=f"First tab {MARK}", exact=True)).to_have_count(0)


async def test_websockets_are_for_the_page_alone(server: Server) -> None:
    upgrade = {
        "connection": "upgrade",
        "upgrade": "websocket",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
        "sec-websocket-version": "13",
    }
    async with httpx.AsyncClient(base_url=server.address, trust_env=False) as client:
        refused = await client.get("/v1/responses", headers=upgrade)
        assert (refused.status_code, refused.json()["error"]["type"]) == (426, "invalid_request_error")
        assert (await client.get("/v1/models", headers=upgrade)).status_code == 200


async def test_a_key_is_asked_for_once_and_kept_for_its_tab(keyed: Server, visit: Visit) -> None:
    async with httpx.AsyncClient(base_url=keyed.address, trust_env=False) as client:
        assert (await client.get("/page/")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 401
    visitor = await visit(keyed.address, remembered={"settings": SHORT})
    await visitor.key_field.fill("wrong")
    await visitor.key_field.press("Enter")
    await expect(visitor.page.get_by_role("dialog").get_by_role("alert")).to_contain_text("Incorrect API key")
    await visitor.key_field.fill(KEY)
    await visitor.page.get_by_role("button", name="Use this key").click()
    await visitor.box.wait_for()
    assert await visitor.ask(f"Hello {MARK}")
    await visitor.page.reload()
    await visitor.button("Answer again", 0).wait_for()
    await expect(visitor.key_field).to_have_count(0)
    other = await visit(keyed.address, beside=visitor)
    assert await other.key_field.is_visible()


async def test_an_answer_outlives_its_engine_and_is_finished_before_the_server_ends(
    keyed: Server, visit: Visit
) -> None:
    settings = {"seed": 5, "ignore_eos": True, "max_tokens": 100}
    visitor = await visit(keyed.address, remembered={"settings": settings})
    await visitor.key_field.fill(KEY)
    await visitor.key_field.press("Enter")
    undisturbed = await visitor.ask(f"Tell me a story. {MARK}")

    await answer_again(visitor)
    os.kill(keyed.engine_pid, signal.SIGKILL)
    await expect(visitor.answers.get_by_text("2 / 2")).to_be_visible(timeout=2 * LIMIT_MS)
    assert await visitor.answer(0) == undisturbed
    assert keyed.metric("engine_restarts_total") == 1

    other = await visit(keyed.address, beside=visitor)  # looks on without a key
    await answer_again(visitor)
    assert await asyncio.to_thread(keyed.terminate) == 0
    assert await visitor.text(0) == undisturbed
    for tab in (visitor, other):
        tab.troubles.clear()  # that the server is gone


async def answer_again(visitor: Visitor) -> None:
    """Returns when the other answer has begun."""
    await visitor.button("Answer again", 0).click()
    await visitor.page.get_by_role("button", name="Stop").wait_for()
    await visitor.begun(0)
