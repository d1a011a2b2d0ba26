"""Whatever a model writes is text: it runs nothing, and tells no other host that it was read."""

from urllib.parse import urlsplit

import pytest
from playwright.async_api import BrowserContext, Dialog, Page, Request, expect

from tests.page.in_browser.conftest import LonePage
from tests.page.in_browser.visits import Chat, Visits

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCRIPTS = (
    '<img src=x onerror="window.hacked=1">',
    "<script>window.hacked=1</script>",
    '<svg onload="window.hacked=1"><animate onbegin="window.hacked=1" attributeName=x dur=1s>',
    '<iframe srcdoc="<script>parent.hacked=1</script>"></iframe>',
    "<details open ontoggle=window.hacked=1>",
    '<math><mtext><table><mglyph><style><!--</style><img title="--&gt;&lt;img src=1 onerror=hacked=1&gt;">',
    '{{constructor.constructor("window.hacked=1")()}} <p v-html="window.hacked=1" :x="window.hacked=1">',
    "[click me](javascript:window.hacked=1)",
    "[click me][1]\n\n[1]: javascript:window.hacked=1",
    "[click me](&#106;avascript&colon;window.hacked=1)",
    "[click me](java%0ascript:window.hacked=1)",
    "[click me](data:text/html,<script>opener.hacked=1</script>)",
    '```"><script>window.hacked=1</script>\ncode\n```',
    '[a](/b "\\" onmouseover=window.hacked=1 x=\\"") `<img src=x onerror=window.hacked=1>`',
)
"""Text that would run as code if it were not escaped."""
LOADS = """![x](http://other.example/pixel) <img src=http://other.example/pixel> <link rel=stylesheet
href=http://other.example/a.css> <style>@import "http://other.example/b.css"</style>
<meta http-equiv=refresh content="0;url=http://other.example/"> <object data=http://other.example/c></object>
<base href=http://other.example/> <div style="background:url(http://other.example/d)">"""
"""Text that would load other resources if it were not escaped."""
UNWIELDY = (
    "x" * 100_000,
    "[" * 5_000,
    "> " * 2_000 + "deep",
    "*_" * 3_000 + "a",
    "```python\n" + "print(1)\n" * 3_000,
    "\u202e" * 50 + "backwards\u2066\u202d" * 100 + "\x00\x1b[31m\u200b",
)
ANSWERS = ("\n\n".join(SCRIPTS), LOADS, *UNWIELDY)


class Watched:
    """Forbidden actions of a browser."""

    def __init__(self, context: BrowserContext, address: str) -> None:
        self._host = urlsplit(address).netloc
        self.elsewhere: list[str] = []
        self.dialogs: list[str] = []
        context.on("request", self._note_request)
        context.on("dialog", self._note_dialog)

    async def is_harmless(self, page: Page) -> bool:
        hacked = await page.evaluate("typeof window.hacked !== 'undefined'")
        return not (hacked or self.elsewhere or self.dialogs)

    def _note_request(self, request: Request) -> None:
        address = urlsplit(request.url)
        if address.scheme.startswith("http") and address.netloc != self._host:
            self.elsewhere.append(request.url)

    async def _note_dialog(self, dialog: Dialog) -> None:
        self.dialogs.append(dialog.message)
        await dialog.dismiss()


async def test_hostile_answers(lone_page: LonePage, visits: Visits) -> None:
    """The page is as good as before after all of them."""
    context = await visits.context(lone_page.address)
    watched = Watched(context, lone_page.address)
    chat = await Chat.open(context, lone_page.address)
    for number, answer in enumerate(ANSWERS, start=1):
        lone_page.server.answer = answer
        await chat.ask(f"Question {number}")
        await chat.wait_for_answers(number)
    links = chat.answers.get_by_role("link", name="click me")
    assert [await link.get_attribute("target") for link in await links.all()] == ["_blank"]
    await expect(links).to_have_attribute("href", "java%0ascript:window.hacked=1")  # an address below the page's
    await chat.answers.get_by_text("click me").first.click()
    assert await watched.is_harmless(chat.page)

    await chat.page.reload()
    await expect(chat.answers).to_have_count(len(ANSWERS))
    lone_page.server.answer = "All is **well**."
    await chat.ask("How are you?")
    await expect(chat.shown.last.locator("strong")).to_have_text("well")
    assert await watched.is_harmless(chat.page)


async def test_check_finds_what_runs(lone_page: LonePage, visits: Visits) -> None:
    """The negative control."""
    context = await visits.context(lone_page.address)
    watched = Watched(context, lone_page.address)
    chat = await Chat.open(context, lone_page.address)
    assert await watched.is_harmless(chat.page)
    await chat.page.evaluate("window.hacked = 1")
    assert not await watched.is_harmless(chat.page)
