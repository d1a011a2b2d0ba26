"""Models for Ollama's clients: one that only answers, and one that thinks first."""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.server.fake_engine import FakeEngine
from tests.server.helpers import client_of
from tests.server.test_reasoning import SWITCHED
from tests.server.tiny_model import write_folder

CHAT = "/api/chat"
GENERATE = "/api/generate"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine.roomy()


@pytest.fixture
def thinking_folder(tmp_path: Path) -> Path:
    """A model that thinks, with a switch for it."""
    return write_folder(tmp_path / "m", template=SWITCHED)


@pytest.fixture
async def thinking(make_app: Callable[..., FastAPI], thinking_folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(make_app(thinking_folder)) as client:
        yield client


def chat_of(text: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}


def lines_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The lines of a stream: each is a whole object, and the last one alone is the end."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    *texts, rest = response.text.split("\n")
    assert rest == ""
    lines = [json.loads(text) for text in texts]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    return lines


def joined(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole answer of POST /api/chat that the lines make, without its times."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for line in lines:
        for key, value in line["message"].items():
            message[key] = value if key == "role" else message.get(key, type(value)()) + value
    return untimed({**lines[-1], "message": message, **{k: v for k, v in lines[0].items() if k == "warnings"}})


def untimed(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without times and ids of calls."""
    calls = answer["message"].get("tool_calls", [])
    message = {**answer["message"], **({"tool_calls": [call["function"] for call in calls]} if calls else {})}
    kept = {key: value for key, value in answer.items() if not key.endswith("_duration") and key != "created_at"}
    return {**kept, "message": message}
