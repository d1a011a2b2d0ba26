"""What keeps nobody out: the rules of axe-core, which looks at names, roles, contrast and focus."""

import pytest
from axe_playwright_python.async_playwright import Axe

from tests.page.conftest import Visit
from tests.page.visitor import Visitor

pytestmark = pytest.mark.asyncio(loop_scope="session")

ANSWER = """# Sums

Some `code`, a [link](https://elsewhere.example/), ~~nothing~~ and a list:

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


async def problems_of(visitor: Visitor) -> list[str]:
    """What is serious of what axe finds in the page as it is."""
    found = (await Axe().run(visitor.page)).response["violations"]
    nodes = [node for one in found if one["impact"] in ("serious", "critical") for node in one["nodes"]]
    return [f"{node['html'][:300]}\n{node['failureSummary']}" for node in nodes]


@pytest.mark.parametrize("width", [1400, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_nothing_serious_is_in_the_way(fake_address: str, visit: Visit, scheme: str, width: int) -> None:
    visitor = await visit(
        fake_address,
        remembered={"settings": SETTINGS},
        color_scheme=scheme,
        viewport={"width": width, "height": 900},
        reduced_motion="reduce",
        bypass_csp=True,
    )
    page = visitor.page
    assert await problems_of(visitor) == []
    await visitor.ask(ANSWER)
    await visitor.button("Answer again", 0).click()
    await visitor.button("Version before", 0).wait_for()
    await page.locator("summary").last.click()
    assert await problems_of(visitor) == []
    await page.get_by_role("button", name="Settings").click()
    await page.get_by_role("button", name="Remove stop").wait_for()
    assert await problems_of(visitor) == []
    await page.keyboard.press("Escape")
    if width < 1100:
        await page.locator(".q-drawer__backdrop").last.click(position={"x": 5, "y": 400})
    await visitor.say("secret")
    await visitor.key_field.wait_for()
    assert await problems_of(visitor) == []
    visitor.troubles.clear()
