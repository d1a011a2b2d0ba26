"""People who look at pages: each has a browser of their own, which remembers what theirs did."""

import json
from collections.abc import Mapping
from typing import Any

from playwright.async_api import Browser, BrowserContext, ConsoleMessage, Locator, Page, expect

LIMIT_MS = 60_000
"""For whatever is waited for, however busy the machine is."""

_LAST_USED = 'localStorage.getItem("samewise.conversation." + samewise.conversations()[0].id)'
_ALL_KEPT = f"""() => {{
  const {{ turns }} = JSON.parse({_LAST_USED});
  return Object.values(turns).every(({{ role, seconds }}) => role !== "assistant" || seconds !== undefined);
}}"""
"""Whether the browser was told to keep each answer as a whole, which it is after the last words were shown."""


class Visits:
    """Opens pages, and notes what their browser complains of."""

    def __init__(self, browser: Browser) -> None:
        self.problems: list[str] = []
        self._browser = browser
        self._contexts: list[BrowserContext] = []

    async def context(self, address: str, settings: Mapping[str, Any] | None = None, **options: Any) -> BrowserContext:
        """A browser that knows nothing but these settings of the chat."""
        known = [] if settings is None else [{"name": "samewise.settings", "value": json.dumps(settings)}]
        state = {"cookies": [], "origins": [{"origin": address, "localStorage": known}]}
        context = await self._browser.new_context(storage_state=state, **options)
        context.set_default_timeout(LIMIT_MS)
        context.on("console", self._note)
        context.on("weberror", lambda event: self.problems.append(str(event.error)))
        self._contexts.append(context)
        return context

    async def chat(self, address: str, settings: Mapping[str, Any] | None = None, **options: Any) -> "Chat":
        """A page in a browser of its own."""
        return await Chat.open(await self.context(address, settings, **options), address)

    async def end(self) -> None:
        """All have seen enough."""
        for context in self._contexts:
            await context.close()

    def _note(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.problems.append(message.text)


class Chat:
    """The view in which one talks to a model."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.message = page.get_by_role("textbox", name="Your message")
        self.questions = page.get_by_role("article", name="You")
        self.answers = page.get_by_role("article", name="Model")
        self.shown = self.answers.locator(".body")
        self.conversations = page.get_by_role("navigation", name="Conversations").get_by_role("listitem")

    @classmethod
    async def open(cls, context: BrowserContext, address: str) -> "Chat":
        """A further tab of this browser."""
        chat = cls(await context.new_page())
        await chat.page.goto(address)
        await expect(chat.message).to_be_visible()
        return chat

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name, exact=True)

    async def ask(self, text: str) -> None:
        """Does not wait for the answer."""
        await self.message.fill(text)
        await self.message.press("Enter")

    async def wait_for_answers(self, number: int = 1) -> None:
        """Until so many are there, and none of them grows."""
        await expect(self.answers.get_by_role("button", name="Answer again")).to_have_count(number)
        await expect(self.button("Send")).to_be_visible()
        await self.page.wait_for_function(_ALL_KEPT)

    async def answer_to(self, text: str) -> str:
        """Ask the first question of a conversation; returns the answer as shown."""
        await self.ask(text)
        await self.wait_for_answers()
        return await self.shown.inner_text()

    async def stored(self) -> list[dict[str, Any]]:
        """The turns of the conversation that was used last, in the order in which they were made."""
        text = await self.page.evaluate(_LAST_USED)
        return list(json.loads(text)["turns"].values())
