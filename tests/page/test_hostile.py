"""What models write is shown, and does nothing."""

import pytest
from playwright.async_api import expect

from tests.page.conftest import Visit
from tests.page.visitor import LIMIT_MS, Visitor

pytestmark = pytest.mark.asyncio(loop_scope="session")

HOSTILE = [
    "<img src=x onerror=\"window.hacked=true;alert('img')\">",
    "<script>window.hacked=true</script><script src=https://elsewhere.example/x.js></script>",
    "<svg onload=window.hacked=true><animate onbegin=window.hacked=true attributeName=x dur=1s></svg>",
    "<iframe srcdoc='<script>parent.hacked=true</script>'></iframe><object data=javascript:hacked=1></object>",
    "<details open ontoggle=window.hacked=true>x</details><style>@import 'https://elsewhere.example/x.css';</style>",
    "[link](javascript:window.hacked=true) [data](data:text/html,<script>parent.hacked=true</script>)",
    '<javascript:window.hacked=true> [title](https://elsewhere.example/ "x\\" onmouseover=\\"window.hacked=true")',
    "![picture](https://elsewhere.example/p.png) ![picture](x onerror=window.hacked=true)",
    '```"><img src=x onerror=window.hacked=true>\n<script>window.hacked=true</script>\n```',
    "```html\n<script>window.hacked=true</script>\n```",
    "| <img src=x onerror=window.hacked=true> |\n|---|\n| `<svg onload=window.hacked=true>` |",
    "{{ window.hacked = true }} ${window.hacked = true}",
    "<math><mtext><script>window.hacked=true</script></mtext></math>",
    'x" onfocus=window.hacked=true autofocus x="',
]


async def test_no_markup_of_a_model_runs_or_loads_anything(fake_address: str, visit: Visit) -> None:
    visitor = await visit(fake_address)
    for text in HOSTILE:
        assert await visitor.ask(text), text
    for thought in await visitor.answers.locator("summary").all():
        await thought.click()
    for link in await visitor.answers.locator("a").all():
        assert (await link.get_attribute("href") or "").startswith("https://elsewhere.example/")
        assert await link.get_attribute("target") == "_blank"
        assert "noopener" in (await link.get_attribute("rel") or "")
        await link.hover()
    await assert_harmless(visitor)
    await visitor.page.reload()  # from what the browser has kept, its titles included
    await visitor.button("Answer again", len(HOSTILE) - 1).wait_for()
    await assert_harmless(visitor)


async def test_errors_are_as_harmless_as_answers(fake_address: str, visit: Visit) -> None:
    visitor = await visit(fake_address)
    said = f"error {HOSTILE[0]}"
    await visitor.say(said)
    await expect(visitor.answers.get_by_role("alert")).to_have_text(said)
    await assert_harmless(visitor)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("one line " * 11_000, "one line one line"),
        ("[" * 5_000, "[[[["),
        ("```python\n" + "x = 1; " * 2_000, "x = 1"),
        ("> " * 2_000 + "deep", ""),
        ("|a" * 2_000 + "\n" + "|-" * 2_000, "a"),
        ("* " * 1_000 + "_*" * 2_000, ""),
        ("right \u202eot tfel\u202c \u2066\u2067 \u0301" * 200, "right"),
        ("a\u0000b \ufffe \u2028" * 100, "a"),
    ],
    ids=["a line", "brackets", "a fence", "quotes", "a table", "stars", "directions", "control"],
)
async def test_the_page_can_be_used_after_any_text(fake_address: str, visit: Visit, text: str, shown: str) -> None:
    visitor = await visit(fake_address)
    await visitor.say(text)
    await visitor.button("Answer again", 0).wait_for()
    await expect(visitor.answers.locator(".body")).to_contain_text(shown)
    assert await visitor.ask("And now?") == "And now?"
    await assert_harmless(visitor)
    await visitor.page.get_by_role("button", name="New chat").click(timeout=LIMIT_MS)
    await expect(visitor.answers).to_have_count(0)


async def assert_harmless(visitor: Visitor) -> None:
    """Neither script nor markup of what is shown has become part of the page."""
    assert await visitor.page.evaluate("window.hacked") is None
    log = visitor.page.get_by_role("log")
    assert await log.locator("img, script, style, iframe, object, embed, form, svg:not(.q-icon), math").count() == 0
    assert visitor.troubles == []
