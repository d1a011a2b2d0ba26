"""The page of a server that is measured: not there at all, there and closed, or open in tabs of a browser."""

import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from playwright.async_api import Browser, async_playwright

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_LOADED_MS = 60_000


@dataclass(frozen=True, slots=True)
class Page:
    """What a server is told, and who looks at it."""

    tabs: int | None
    """That show what the server does; None for a server without a page."""

    @property
    def name(self) -> str:
        return {None: "nothing", 0: "page, closed"}.get(self.tabs, f"page, {self.tabs} open")

    @property
    def environment(self) -> Mapping[str, str]:
        """The server's settings."""
        return {"SAMEWISE_PAGE": "false" if self.tabs is None else "true"}

    @property
    def api_key(self) -> None:
        """There is none."""

    @asynccontextmanager
    async def watching(self, url: str) -> AsyncIterator[None]:
        """Look at the server at this address. Raises RuntimeError without a browser."""
        if not self.tabs:
            yield
            return
        program = next(filter(None, map(shutil.which, _BROWSERS)), None)
        if program is None:
            raise RuntimeError(f"there is no browser to open the page with: none of {', '.join(_BROWSERS)}")
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
            for _ in range(self.tabs):
                await _open(browser, url)
            yield
            await browser.close()


async def _open(browser: Browser, url: str) -> None:
    """A tab that shows what the server does."""
    tab = await browser.new_page()
    await tab.goto(url)
    await tab.get_by_role("tab", name="Server").click(timeout=_LOADED_MS)
    await tab.get_by_text("Running choices").wait_for(timeout=_LOADED_MS)
