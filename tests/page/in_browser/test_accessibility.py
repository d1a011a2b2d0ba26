"""What axe finds, in both themes, on a desk and on a telephone: nothing serious."""

from collections.abc import Sequence

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import BrowserContext, Page, expect

from tests.page.in_browser.conftest import LonePage
from tests.page.in_browser.visits import Chat, Visits
from tests.served.conftest import Server

pytestmark = pytest.mark.asyncio(loop_scope="session")

SIZES = ((1400, 900), (400, 800))
BACK = {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 22, 26)"}
ANSWER = """# Heading

A [link](https://example.org/), `code`, and a list:

- **one**
- *two*

| name | value |
|------|-------|
| a    | 1     |

```python
def double(number: int) -> int:  # a comment
    return 2 * number + len("text")
```

> A quotation.
"""


async def test_chat(lone_page: LonePage, visits: Visits) -> None:
    lone_page.server.answer = ANSWER
    chat = await Chat.open(await bare_context(visits, lone_page.address), lone_page.address)
    assert await violations(chat.page) == []
    await chat.answer_to("Show what you can.")
    assert await violations(chat.page) == []


async def test_settings(lone_page: LonePage, visits: Visits) -> None:
    settings = {"temperature": 0.5, "response_format": {"type": "json_object"}}
    page = (await Chat.open(await bare_context(visits, lone_page.address, settings), lone_page.address)).page
    for width, height in SIZES:
        await page.set_viewport_size({"width": width, "height": height})
        await page.reload()
        await page.get_by_role("button", name="Settings", exact=True).click()
        await expect(page.get_by_role("button", name="Remove temperature")).to_be_in_viewport()
        assert await violations(page, [(width, height)]) == []


async def test_key_dialog(lone_page: LonePage, visits: Visits) -> None:
    lone_page.server.key = "a-key"
    page = await (await bare_context(visits, lone_page.address)).new_page()
    await page.goto(lone_page.address)
    await expect(page.get_by_role("dialog")).to_be_visible()
    lone_page.server.key = ""
    # Of these buttons axe takes the dialog's backdrop for the background, instead of their own and the card's.
    assert await violations(page, besides=".q-dialog .q-btn") == []


async def test_other_views(server: Server, visits: Visits) -> None:
    page = (await Chat.open(await bare_context(visits, server.address), server.address)).page
    await page.get_by_role("tab", name="Compare").click()
    await expect(page.get_by_role("region", name="Column 1")).to_be_visible()
    await page.get_by_role("spinbutton", name="Most tokens").fill("8")
    await page.get_by_role("textbox", name="Your message").fill("Say hello.")
    await page.get_by_role("textbox", name="Your message").press("Enter")
    await expect(page.get_by_text("rst after").first).to_be_visible()
    await expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    assert await violations(page) == []
    await page.get_by_role("tab", name="Server").click()
    await expect(page.get_by_role("region", name="Your last requests")).to_be_visible()
    assert await violations(page) == []


async def bare_context(visits: Visits, address: str, settings: dict[str, object] | None = None) -> BrowserContext:
    """One into which axe can be brought, and in which no colour is on its way to another."""
    return await visits.context(address, settings, bypass_csp=True, reduced_motion="reduce")


async def violations(page: Page, sizes: Sequence[tuple[int, int]] = SIZES, besides: str = "") -> list[str]:
    """Those that matter, each with the first element that has it."""
    found = []
    for width, height in sizes:
        await page.set_viewport_size({"width": width, "height": height})
        for scheme in ("light", "dark"):
            await page.emulate_media(color_scheme=scheme)
            await expect(page.locator("body")).to_have_css("background-color", BACK[scheme])
            results = await Axe().run(page, {"exclude": [[besides]]} if besides else None)
            for one in results.response["violations"]:
                if one["impact"] in ("serious", "critical"):
                    node = one["nodes"][0]
                    found.append(f"{width} {scheme} {one['id']}: {node['html']} {node['failureSummary']}")
    return found
