"""Somebody who looks at the page, in a browser of their own."""

import json
import re
from typing import Any

from playwright.async_api import BrowserContext, Locator, Page, expect

LIMIT_MS = 30_000
_SOMETHING = re.compile(r"\S")
_IS_KEPT = """() => {
  const kept = localStorage.getItem(`samewise.conversation.${sessionStorage.getItem("samewise.current")}`);
  const turns = Object.values(JSON.parse(kept).turns);
  return turns.every((turn) => turn.role !== "assistant" || turn.seconds !== undefined);
}"""
"""Whether the browser was told to keep all answers as they are, which is after it was told to show them."""
MARK = "Pumpernickel"
"""In all that visitors say: no log may have it."""


class Visitor:
    """One tab. What its browser complains of, asks, or loads from elsewhere is noted in `troubles`."""

    def __init__(self, page: Page, address: str) -> None:
        self.page = page
        self.address = address
        self.troubles: list[str] = []
        page.set_default_timeout(LIMIT_MS)
        page.on("console", lambda message: message.type == "error" and self._note("console", message.text))
        page.on("pageerror", lambda error: self._note("script", str(error)))
        page.on("dialog", lambda dialog: self._note("dialog", dialog.message))
        page.on("request", lambda request: self._is_foreign(request.url) and self._note("request", request.url))

    @property
    def box(self) -> Locator:
        return self.page.get_by_label("Your message")

    @property
    def key_field(self) -> Locator:
        return self.page.get_by_role("textbox", name="API key")

    @property
    def answers(self) -> Locator:
        return self.page.get_by_role("article", name="Model")

    @property
    def status(self) -> Locator:
        return self.page.locator(".chat [role=status]")

    async def come(self) -> None:
        """Returns when one can speak, or is asked for a key."""
        await self.page.goto(self.address)
        await self.box.or_(self.key_field).wait_for()

    async def say(self, text: str) -> None:
        await self.box.fill(text)
        await self.box.press("Enter")

    async def ask(self, text: str) -> str:
        """Say it; the answer once it is complete."""
        count = await self.answers.count()
        await self.say(text)
        return await self.answer(count)

    async def answer(self, at: int) -> str:
        """The text of an answer once it is complete."""
        await self.button("Answer again", at).wait_for()
        await self.page.wait_for_function(_IS_KEPT)
        await self.begun(at)
        return await self.text(at)

    async def text(self, at: int) -> str:
        """As far as it has come."""
        return await self.answers.nth(at).locator(".body").inner_text()

    async def begun(self, at: int) -> None:
        """Returns when there is some text."""
        await expect(self.answers.nth(at).locator(".body")).to_contain_text(_SOMETHING, timeout=LIMIT_MS)

    def button(self, name: str, at: int) -> Locator:
        """Of an answer."""
        return self.answers.nth(at).get_by_role("button", name=name)

    async def add_setting(self, name: str, value: str) -> None:
        """The drawer of settings is open."""
        choice = self.page.get_by_role("combobox", name="Add a setting")
        await choice.fill(name.replace("_", " "))
        await self.page.get_by_role("option", name=name.replace("_", " "), exact=True).click()
        await self.page.get_by_label(name, exact=True).fill(value)

    async def stored(self) -> list[dict[str, Any]]:
        """The conversations that the browser keeps."""
        texts = await self.page.evaluate(
            "Object.keys(localStorage).filter((key) => key.startsWith('samewise.conversation.'))"
            ".map((key) => localStorage.getItem(key))"
        )
        return [json.loads(text) for text in texts]

    def _note(self, kind: str, text: str) -> None:
        self.troubles.append(f"{kind}: {text[:500]}")

    def _is_foreign(self, url: str) -> bool:
        return not url.startswith((self.address, self.address.replace("http:", "ws:"), "data:", "blob:"))


async def remember(context: BrowserContext, **values: Any) -> None:
    """As if its user had left this behind before."""
    for name, value in values.items():
        text = json.dumps(json.dumps(value))
        key = json.dumps(f"samewise.{name}")
        await context.add_init_script(f"localStorage.getItem({key}) ?? localStorage.setItem({key}, {text})")
