"""Forms, as clients send them and as they should not, and what is on the disk."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from openai.types import FileObject

from server.app import _lifespan
from tests.server.helpers import client_of
from tests.waiting import until

FILES = "/v1/files"
LINES = b'{"custom_id": "1"}\r\n{"custom_id": "2"}\n'
BATCH = {"purpose": "batch"}


@asynccontextmanager
async def running(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application, which starts and ends as a server does."""
    async with _lifespan(app), client_of(app) as client:
        yield client


async def sent(client: httpx.AsyncClient, content: bytes = LINES, name: str = "in.jsonl", **fields: str):
    """The answer to a form with this file."""
    return await client.post(FILES, data=BATCH | fields, files={"file": (name, content)})


async def uploaded(client: httpx.AsyncClient, content: bytes = LINES, **fields: Any) -> dict[str, Any]:
    """The file's object, as OpenAI's client has it."""
    answer = await sent(client, content, **fields)
    assert answer.status_code == 200, answer.text
    FileObject.model_validate_json(answer.content, strict=True)
    return answer.json()


async def listed(client: httpx.AsyncClient, **query: Any) -> list[str]:
    """Ids."""
    answer = await client.get(FILES, params=query)
    assert answer.status_code == 200, answer.text
    return [one["id"] for one in answer.json()["data"]]


def on_disk(data_dir: Path) -> dict[str, bytes]:
    """All files except the database."""
    return {path.name: path.read_bytes() for path in (data_dir / "files").iterdir()}


async def until_left(num_files: int, data_dir: Path) -> None:
    """Wait until only so many files except the database are left. They are not read: they may be deleted meanwhile."""
    await until(lambda: len(list((data_dir / "files").iterdir())) == num_files)
