"""Fixtures shared by the page's tests without a browser."""

from collections.abc import Iterator

import httpx
import pytest

from tests.page import fake_site


@pytest.fixture(scope="module")
def fake_address() -> Iterator[str]:
    """The page before a server with a model that nobody can ask."""
    with fake_site.running() as address:
        yield address


@pytest.fixture(scope="module")
def client(fake_address: str) -> Iterator[httpx.Client]:
    """A client of the fake server."""
    with fake_site.client_of(fake_address) as client:
        yield client
