"""The requests in the API's reference are answered as they stand there."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.server.fake_engine import FakeEngine
from tests.server.helpers import client_of

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
PAGES = sorted(REFERENCE.rglob("*.md"))
HOST = r"(?:http://)?(?:localhost|127\.0\.0\.1):8000"
REQUESTS = '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}}\n'
REFUSED = {"temperature": 3}
"""A request that shows an error has this field."""


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine.roomy()


def commands(page: Path) -> list[list[str]]:
    """The curl commands of a page, by their arguments."""
    blocks = re.findall(r"^```(?:bash|sh)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    texts = [text for block in blocks for text in re.split(r"^(?=curl )", block, flags=re.MULTILINE)]
    return [shlex.split(text.replace("\\\n", " "), comments=True) for text in texts if text.startswith("curl ")]


def request_of(arguments: list[str], last_id: str) -> dict[str, Any]:
    """The request that a command sends, with `$ID` filled in."""
    made: dict[str, Any] = {"method": "GET", "headers": {}, "data": {}, "files": {}}
    words = iter(argument.replace("$ID", last_id) for argument in arguments[1:])
    for word in words:
        if word == "-H":
            name, _, value = next(words).partition(":")
            made["headers"][name.strip()] = value.strip()
        elif word == "-d":
            made |= {"method": "POST", "content": next(words)}
        elif word == "-X":
            made["method"] = next(words)
        elif word == "-F":
            name, _, value = next(words).partition("=")
            made["method"] = "POST"
            made["files" if value.startswith("@") else "data"][name] = (
                ("f", REQUESTS) if value.startswith("@") else value
            )
        elif word in ("-o", ">"):
            next(words)
        elif word not in ("-s", "-N"):
            assert re.match(HOST, word), word
            made["url"] = re.sub(f"^{HOST}", "", word)
    return {key: value for key, value in made.items() if value not in ({}, None)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
async def test_requests_of_the_page_are_answered(page: Path, make_app: Callable[..., FastAPI], tmp_path: Path) -> None:
    app = make_app(data_dir=tmp_path, served_model_name=("SmolLM2-135M-Instruct",))
    await app.state.services.models.default.fingerprint.wait_known()
    async with client_of(app) as client:
        upload = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("f.jsonl", REQUESTS)})
        last_id = upload.json()["id"]
        for arguments in commands(page):
            if re.search(r"\.\.\.|\bNAME\b", " ".join(arguments)):
                continue  # with an id or a name that readers fill in
            response = await client.request(**request_of(arguments, last_id))
            assert _is_answered(response), (arguments, response.text)
            last_id = _id_in(response) or last_id


def _is_answered(response: httpx.Response) -> bool:
    if response.is_success:
        return True
    error = response.json()["error"]
    is_shown = any(f'"{name}": {value}' in response.request.content.decode() for name, value in REFUSED.items())
    return is_shown or error.get("code") == "unsupported_model" or "use another model" in error["message"]


def _id_in(response: httpx.Response) -> str | None:
    try:
        found = response.json().get("id")
    except (json.JSONDecodeError, AttributeError):
        return None
    return found if isinstance(found, str) else None
