"""Pictures on the page: chosen, pasted and dropped, shown, removed, and sent as they are."""

import base64
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from tests.page.in_browser.axe import bare_context, violations
from tests.page.in_browser.conftest import LonePage
from tests.page.in_browser.visits import Chat, Visits
from tests.server.images.conftest import file_of, picture

pytestmark = pytest.mark.asyncio(loop_scope="session")

IMAGES = {"formats": ["png", "jpeg", "gif", "webp"], "max_images": 3, "max_bytes": 1 << 20}
BRING = """([selector, event, kind, name, data]) => {
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
  const held = new DataTransfer();
  held.items.add(new File([bytes], name, { type: kind }));
  const make = event === "paste" ? ClipboardEvent : DragEvent;
  const given = event === "paste" ? { clipboardData: held } : { dataTransfer: held };
  const at = document.querySelector(selector);
  at.dispatchEvent(new make(event, { bubbles: true, cancelable: true, ...given }));
}"""
KEPT = """() => new Promise((resolve) => {
  indexedDB.open("samewise", 1).onsuccess = (event) => {
    const asked = event.target.result.transaction("pictures").objectStore("pictures").count();
    asked.onsuccess = () => { event.target.result.close(); resolve(asked.result); };
  };
})"""
"""Number of pictures that the browser keeps."""
PNG, JPEG, GIF = (file_of(picture(60, 40, seed), form) for seed, form in enumerate(("PNG", "JPEG", "GIF")))


@pytest.fixture
def takes_images(lone_page: LonePage) -> Iterator[LonePage]:
    lone_page.server.capabilities = {"endpoints": {"/tokenize": {"messages": {}}}, "images": IMAGES}
    lone_page.server.prompt_size = {"count": 330, "tokens": [], "images": [{"num_tokens": 256}, {"num_tokens": 64}]}
    lone_page.server.answer = "Seen."
    yield lone_page
    lone_page.server.capabilities = None


@pytest.fixture
def has_two_models(takes_images: LonePage) -> Iterator[LonePage]:
    server, models = takes_images.server, takes_images.server.models
    server.models = [{"id": "seer", "status": {"value": "loaded"}}, {"id": "mole", "status": {"value": "unloaded"}}]
    server.capabilities_of = {"mole": {"endpoints": {}}}
    yield takes_images
    server.models = models


async def bring(page: Page, event: str, kind: str, name: str, data: bytes) -> None:
    """Paste or drop a file."""
    await page.evaluate(BRING, [".composer textarea", event, kind, name, base64.b64encode(data).decode()])


async def test_pictures(takes_images: LonePage, visits: Visits, tmp_path: Path) -> None:
    chat = await Chat.open(await bare_context(visits, takes_images.address), takes_images.address)
    page, file = chat.page, tmp_path / "chosen.png"
    file.write_bytes(PNG)
    await page.locator("input[type=file]").set_input_files(file)
    await bring(page, "paste", "image/jpeg", "pasted.jpg", JPEG)
    await bring(page, "drop", "image/gif", "dropped.gif", GIF)
    tray = page.get_by_role("group", name="Images of the message")
    await expect(tray.locator("img")).to_have_count(3)
    for image in await tray.locator("img").all():
        await expect(image).to_have_js_property("naturalWidth", 60)
    assert await violations(page) == []
    if folder := os.environ.get("SCREENSHOTS"):
        await page.screenshot(path=f"{folder}/pictures.png")
    await bring(page, "paste", "image/gif", "more.gif", GIF)
    await expect(page.get_by_text("A request can have at most 3 images.")).to_be_visible()
    await page.get_by_role("button", name="Remove pasted.jpg").click()
    await expect(tray.locator("img")).to_have_count(2)

    await chat.ask("What is this?")
    await chat.wait_for_answers()
    urls = [
        f"data:image/{kind};base64,{base64.b64encode(data).decode()}" for kind, data in (("png", PNG), ("gif", GIF))
    ]
    assert takes_images.server.bodies[-1]["messages"][-1]["content"] == [
        *({"type": "image_url", "image_url": {"url": url}} for url in urls),
        {"type": "text", "text": "What is this?"},
    ]
    await expect(tray).to_be_hidden()
    await expect(chat.questions.locator("img")).to_have_count(2)
    assert "base64" not in str(await chat.stored())
    if folder:
        await page.emulate_media(color_scheme="dark")
        await page.set_viewport_size({"width": 400, "height": 800})
        await page.screenshot(path=f"{folder}/pictures-dark.png")

    await chat.answers.get_by_role("button", name="Look inside").click()
    shown = page.get_by_text("Prompt: 10 tokens of text · image 1, 256 tokens · image 2, 64 tokens")
    await expect(shown).to_be_visible()
    await page.reload()
    for image in await chat.questions.locator("img").all():
        await expect(image).to_have_js_property("naturalWidth", 60)
    await chat.ask("And now?")
    await chat.wait_for_answers(2)
    assert takes_images.server.bodies[-1]["messages"][0] == takes_images.server.bodies[-2]["messages"][0]
    assert await page.evaluate(KEPT) == 2
    await page.evaluate("indexedDB.deleteDatabase('samewise')")
    await page.reload()
    await expect(chat.questions).to_have_count(2)
    await chat.ask("Still there?")
    await expect(page.get_by_text("does not have the images of this chat")).to_be_visible()


async def test_too_large(takes_images: LonePage, visits: Visits) -> None:
    chat = await visits.chat(takes_images.address)
    await bring(chat.page, "drop", "image/png", "large.png", PNG + bytes(3 << 20))
    await expect(chat.page.get_by_text("large.png is larger than 1 MiB.")).to_be_visible()
    await expect(chat.page.locator(".tray img")).to_have_count(0)


async def test_models_without_images(lone_page: LonePage, visits: Visits) -> None:
    chat = await visits.chat(lone_page.address)
    await expect(chat.button("Add images")).to_have_count(0)


async def test_one_of_two_models_takes_images(has_two_models: LonePage, visits: Visits) -> None:
    chat = await visits.chat(has_two_models.address)
    await expect(chat.button("Add images")).to_be_visible()
    await chat.page.get_by_role("combobox", name="Model").click()
    await chat.page.get_by_role("option", name="mole · not loaded").click()
    await expect(chat.page.get_by_text("mole is not loaded. Your next message loads it.")).to_be_visible()
    await expect(chat.button("Add images")).to_be_hidden()
    await chat.ask("Who are you?")
    await chat.wait_for_answers()
    assert has_two_models.server.bodies[-1]["model"] == "mole"
    has_two_models.server.models[1]["status"] = {"value": "loaded"}
    await expect(chat.page.get_by_text("mole is not loaded")).to_be_hidden()
    await expect(chat.answers.get_by_role("heading", name="mole")).to_be_visible()
