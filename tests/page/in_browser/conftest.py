"""The page as people see it: a real Chromium before a real server. Without a Chromium all of this is skipped."""

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, async_playwright, expect

from tests.page.in_browser.fake_openai import FakeOpenAI, fake_openai
from tests.page.in_browser.visits import LIMIT_MS, Visits
from tests.served.conftest import Server

_NAMES = ("chromium", "chromium-browser", "google-chrome")

expect.set_options(timeout=LIMIT_MS)


@pytest.fixture(scope="session")
def chromium() -> str:
    """Where it is."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip(f"there is no browser: none of {', '.join(_NAMES)} can be run")
    return found


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser(chromium: str) -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield running
        await running.close()


@pytest.fixture(scope="session")
def server(chromium: str, embedded_folder: Path) -> Iterator[Server]:
    """One for all tests that do not end it."""
    running = Server()
    yield running
    assert running.terminate() == 0


@dataclass(frozen=True, slots=True)
class LonePage:
    """A `samewise page`, and the server that it is for."""

    address: str
    server: FakeOpenAI


@pytest.fixture(scope="module")
def lone_page(chromium: str) -> Iterator[LonePage]:
    """One before a server that has no more than OpenAI's must have."""
    with fake_openai() as server:
        command = [sys.executable, "-m", "server.cli.main", "page", "--base-url", server.base_url, "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            found = re.search(r"http://[^\s/]+", process.stdout.readline())
            assert found is not None
            yield LonePage(found[0], server)
            process.send_signal(signal.SIGINT)
        assert process.returncode == 0


@pytest_asyncio.fixture(loop_scope="session")
async def visits(browser: Browser) -> AsyncIterator[Visits]:
    """Visits to pages, in which nothing may go wrong that a browser reports."""
    all_of_them = Visits(browser)
    yield all_of_them
    await all_of_them.end()
    assert not all_of_them.problems
