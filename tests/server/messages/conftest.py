"""An engine with room for tools in the prompt, and models that think."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from tests.server.fake_engine import FakeEngine
from tests.server.helpers import client_of
from tests.server.test_reasoning import OPENING
from tests.server.tiny_model import write_folder


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine.roomy()


@pytest.fixture
async def thinking(make_app: Callable[..., FastAPI], tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a model that reasons before each answer."""
    async with client_of(make_app(write_folder(tmp_path / "m", template=OPENING))) as client:
        yield client
