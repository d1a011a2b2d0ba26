"""What would keep people out: the rules of axe-core, which looks at names, roles, order and contrast."""

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, expect

from tests.page.in_browser.conftest import LonePage
from tests.page.in_browser.visits import Visits
from tests.served.conftest import Server

pytestmark = pytest.mark.asyncio(loop_scope="session")

ANSWER = """# Sums

Some `code`, a [link](https://other.example/), ~~nothing~~ and a list:

1. one
2. two

> as it was said

```python
def add(a: int, b: int) -> int:  # the sum
    return f"{a + b}" if a else 1.5
```

| a | b |
|---|---|
| 1 | 2 |
"""
SETTINGS = {"temperature": 0.5, "stop": ["one"], "reasoning_effort": "low", "tools": []}


@pytest.mark.parametrize("width", [1400, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_chat(lone_page: LonePage, visits: Visits, scheme: str, width: int) -> None:
    """Empty, with an answer, with its settings, and when it asks for a key."""
    chat = await visits.chat(lone_page.address, SETTINGS, **look(scheme, width))
    assert await barriers(chat.page) == []
    lone_page.server.answer = ANSWER
    await chat.answer_to("How are sums made?")
    await chat.button("Answer again").click()
    await expect(chat.button("Version before")).to_be_visible()
    await chat.wait_for_answers()
    assert await barriers(chat.page) == []

    await chat.button("Settings").click()
    await expect(chat.button("Remove stop")).to_be_in_viewport()
    assert await barriers(chat.page) == []

    await chat.page.reload()
    lone_page.server.wants_key = True
    await chat.ask("And without a key?")
    await expect(chat.page.get_by_role("textbox", name="API key")).to_be_visible()
    assert await barriers(chat.page) == []
    lone_page.server.wants_key = False


@pytest.mark.parametrize(("scheme", "width"), [("light", 400), ("dark", 1400)])
async def test_other_views(server: Server, visits: Visits, scheme: str, width: int) -> None:
    """Of the inside of an answer, of answers side by side, and of the server."""
    chat = await visits.chat(server.address, {"max_completion_tokens": 12}, **look(scheme, width))
    await chat.answer_to("Say hello.")
    await chat.button("Look inside").click()
    inside = chat.page.get_by_role("dialog", name="Inside this answer")
    await expect(inside.get_by_role("button", name="Again with the same seed")).to_be_visible()
    assert await barriers(chat.page) == []
    await inside.get_by_role("button", name="Close").click()
    for name, shown in (
        ("Compare", chat.button("Add a column")),
        ("Server", chat.page.get_by_role("region", name="Server").locator("svg").first),
    ):
        await chat.page.get_by_role("tab", name=name).click()
        await expect(shown).to_be_visible()
        assert await barriers(chat.page) == [], name


def look(scheme: str, width: int) -> dict[str, object]:
    """Options of a browser; nothing moves in it, for what is half there has half its contrast."""
    return {"color_scheme": scheme, "viewport": {"width": width, "height": 900}, "reduced_motion": "reduce"}


async def barriers(page: Page) -> list[str]:
    """What is serious of what is found in the page as it is."""
    violations = (await Axe().run(page)).response["violations"]
    nodes = [node for one in violations if one["impact"] in ("serious", "critical") for node in one["nodes"]]
    return [f"{node['html'][:300]}\n{node['failureSummary']}" for node in nodes]
