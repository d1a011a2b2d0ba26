"""An application on a fake engine: called in memory, or over a socket by real clients."""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from openai import OpenAI

from model_runner.hub.repository import ModelFolder
from server.api.body_worker import WorkerPool
from server.api.dialect import Dialect
from server.api.dialects import DIALECTS
from server.api.model_services import ModelParts
from server.app import create_app
from server.config import Settings
from server.engine.client import EngineState
from server.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, chat, client_of, serving
from tests.server.tenants.keys import write_keys
from tests.server.tiny_model import write_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def make_app(
    folder: Path, tokenizer: Tokenizer, engine: FakeEngine, workers: WorkerPool
) -> Iterator[Callable[..., FastAPI]]:
    made: list[FastAPI] = []

    def make(
        model_folder: Path | None = None,
        aux: ModelFolder | None = None,
        dialects: Sequence[Dialect] = DIALECTS,
        **settings: Any,
    ) -> FastAPI:
        path = model_folder or folder
        chosen = tokenizer if model_folder is None else Tokenizer.from_folder(path)
        model = ModelFolder(path, "tiny")
        chosen_settings = Settings(**settings)
        parts = ModelParts(engine, chosen, chosen_settings, model, aux)
        made.append(create_app([parts], chosen_settings, dialects, workers=workers))
        return made[-1]

    yield make
    for app in made:
        app.state.services.storage.close()


@pytest.fixture
def make_with_keys(make_app: Callable[..., FastAPI], tmp_path: Path) -> Callable[..., FastAPI]:
    """An application with keys of these names."""

    def make(tenants: dict[str, dict[str, Any]], **settings: Any) -> FastAPI:
        return make_app(api_keys_file=write_keys(tmp_path / "keys.yaml", **tenants), **settings)

    return make


@pytest.fixture
def client_with(make_app: Callable[..., FastAPI], tmp_path: Path) -> Callable[..., httpx.AsyncClient]:
    """A client of a model with this chat template."""
    return lambda template, **settings: client_of(make_app(write_folder(tmp_path / "m", template=template), **settings))


@pytest.fixture
async def client(make_app: Callable[..., FastAPI]) -> AsyncIterator[httpx.AsyncClient]:
    app = make_app()
    await app.state.services.models.default.fingerprint.wait_known()  # or it would not be ready
    async with client_of(app) as client:
        yield client


@pytest.fixture
async def strict_client(make_app: Callable[..., FastAPI]) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(make_app(strict=True)) as client:
        yield client


@pytest.fixture
def address(make_app: Callable[..., FastAPI]) -> Iterator[str]:
    with serving(make_app()) as address:
        yield address


@pytest.fixture
def openai_client(address: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def goes_on(client: httpx.AsyncClient, engine: FakeEngine) -> AsyncIterator[None]:
    """Whatever a test did, a good request is answered afterwards."""
    yield
    engine.state, engine.refuse = EngineState.READY, None
    assert (await client.post(CHAT, json=chat())).status_code == 200
    assert engine.num_live == 0
