"""A Chromium, and the servers that it looks at."""

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, async_playwright

from tests.page import fake_site
from tests.page.visitor import MARK, Visitor, remember
from tests.served.conftest import Server

Visit = Callable[..., Awaitable[Visitor]]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("there is no Chromium here (Debian: apt install chromium)")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="session")
async def visit(browser: Browser) -> AsyncIterator[Visit]:
    """Opens the page of a server for somebody who was never there, or who has left something behind then.

    Or opens it beside another tab of the same browser. Whatever browsers complain of fails the test, unless it has
    taken that from its visitor's troubles.
    """
    visitors: list[Visitor] = []

    async def come(
        address: str, *, beside: Visitor | None = None, remembered: dict[str, Any] | None = None, **options: Any
    ) -> Visitor:
        context = beside.page.context if beside is not None else await browser.new_context(**options)
        await remember(context, **(remembered or {}))
        visitor = Visitor(await context.new_page(), address)
        visitors.append(visitor)
        await visitor.come()
        return visitor

    yield come
    for visitor in visitors:
        await visitor.page.context.close()
    assert [trouble for visitor in visitors for trouble in visitor.troubles] == []


@pytest.fixture(scope="session")
def server(embedded_folder: Path) -> Iterator[Server]:
    """One for all that do not end it. At its end, nothing must have gone wrong in it, nor been told of anybody."""
    running = Server()
    yield running
    assert running.terminate() == 0
    assert not [line for line in running.log.splitlines() if "ERROR" in line or "Traceback" in line or MARK in line]


@pytest.fixture(scope="session")
def fake_address() -> Iterator[str]:
    """The page before a server that says again what it is told."""
    with fake_site.running() as address:
        yield address
