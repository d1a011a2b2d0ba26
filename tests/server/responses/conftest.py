"""An engine with room for tools, and models of any chat template."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.server.fake_engine import FakeEngine
from tests.server.helpers import client_of
from tests.server.tiny_model import write_folder


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.info_ = replace(engine.info_, max_model_len=4096, num_blocks=512)
    return engine


@pytest.fixture
def client_with(make_app: Callable[..., FastAPI], tmp_path: Path) -> Callable[..., httpx.AsyncClient]:
    """Of a model with this chat template."""

    def make(template: str, **settings: Any) -> httpx.AsyncClient:
        return client_of(make_app(write_folder(tmp_path / "m", template=template), **settings))

    return make
