"""axe finds nothing serious, in both themes, on desktop and mobile sizes."""

import pytest
from playwright.async_api import expect

from tests.page.in_browser.axe import SIZES, bare_context, violations
from tests.page.in_browser.conftest import LonePage
from tests.page.in_browser.visits import Chat, Visits

pytestmark = pytest.mark.asyncio(loop_scope="session")

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
    # For these buttons, axe takes the dialog's backdrop as the background instead of the button or the card.
    assert await violations(page, besides=".q-dialog .q-btn") == []
