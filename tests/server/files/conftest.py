from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from server.storage.files import FileStore
from tests.server.helpers import client_of


class Clock:
    """Goes on when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_800_000_000.5
        monkeypatch.setattr(FileStore, "now", lambda _: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def app(make_app: Callable[..., FastAPI], tmp_path: Path) -> FastAPI:
    return make_app(data_dir=tmp_path, max_file_mib=1)


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(app) as client:
        yield client
