"""Runs a measured server without the page, with the page closed, or with the page open in browser tabs."""

import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from playwright.async_api import Browser, async_playwright

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_LOADED_MS = 60_000


@dataclass(frozen=True, slots=True)
class Page:
    """A server's settings for the page, and the tabs that show it."""

    tabs: int | None
    """Number of tabs that show the server view; None for a server without a page."""

    @property
    def name(self) -> str:
        return {None: "nothing", 0: "page, closed"}.get(self.tabs, f"page, {self.tabs} open")

    @property
    def environment(self) -> Mapping[str, str]:
        """The server's settings, as environment variables."""
        return {"SAMEWISE_PAGE": "false" if self.tabs is None else "true"}

    @property
    def api_key(self) -> None:
        """No key is needed."""

    @asynccontextmanager
    async def watching(self, url: str) -> AsyncIterator[None]:
        """Keep the tabs open during the block. Raises RuntimeError if there is no browser."""
        if not self.tabs:
            yield
            return
        program = next(filter(None, map(shutil.which, _BROWSERS)), None)
        if program is None:
            raise RuntimeError(f"found no browser to open the page; install one of {', '.join(_BROWSERS)}")
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
            for _ in range(self.tabs):
                await _open(browser, url)
            yield
            await browser.close()


async def _open(browser: Browser, url: str) -> None:
    """Open a tab with the server view."""
    tab = await browser.new_page()
    await tab.goto(url)
    await tab.get_by_role("tab", name="Server").click(timeout=_LOADED_MS)
    await tab.get_by_text("Running choices").wait_for(timeout=_LOADED_MS)
