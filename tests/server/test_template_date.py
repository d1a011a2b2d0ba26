"""The date that a chat template shows is an input: it is reported, can be set, and is one for a whole batch."""

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from server.api.batches.job import LinesRun
from server.api.batches.lines import Line
from server.config import Settings
from server.generation.fingerprint import Fingerprint
from server.storage.batches import Batch
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, chat
from tests.server.tiny_model import write_folder

DATED = (
    "{% if date_string is defined %}{{ date_string }}{% else %}{{ strftime_now('%d %b %Y') }}{% endif %}"
    "{% for m in messages %}|{{ m.content }}{% endfor %}"
)
OLD = {"template_date": "2001-02-03"}
MESSAGES = {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}
BODIES = [
    (CHAT, chat()),
    ("/v1/messages", MESSAGES),
    ("/v1/responses", {"model": "tiny", "input": "hi", "max_output_tokens": 3}),
    ("/apply-template", {"messages": MESSAGES["messages"]}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_the_date_is_reported_and_gives_the_same_prompt_another_day(
    path: str, body: dict[str, Any], client_with: Callable[..., httpx.AsyncClient], engine: FakeEngine
) -> None:
    def prompt(answer: httpx.Response) -> str:
        text = answer.json().get("prompt")
        return bytes(engine.requests[-1].prompt).decode() if text is None else text

    async with client_with(DATED) as client:
        answer = await client.post(path, json={**body, "chat_template_kwargs": OLD})
        assert prompt(answer) == "03 Feb 2001|hi"
        assert answer.json()["template_date"] == "2001-02-03T00:00:00"
        assert "warnings" not in answer.json()
        today = await client.post(path, json=body)
        shown = today.json()["template_date"]
        assert prompt(today) == datetime.fromisoformat(shown).strftime("%d %b %Y|hi")
        again = await client.post(path, json={**body, "chat_template_kwargs": {"template_date": shown}})
        assert prompt(again) == prompt(today)
        other = await client.post(path, json={**body, "chat_template_kwargs": {"date_string": "never"}})
        assert prompt(other) == "never|hi"
        assert "template_date" not in other.json()
        wrong = await client.post(path, json={**body, "chat_template_kwargs": {"template_date": "today"}})
        assert wrong.status_code == 400
        assert "expected a date in ISO 8601" in wrong.text


async def test_ollama_reports_it(client_with: Callable[..., httpx.AsyncClient]) -> None:
    body = {"model": "tiny", "messages": MESSAGES["messages"], "stream": False}
    async with client_with(DATED, template_date="2001-02-03") as client:
        assert (await client.post("/api/chat", json=body)).json()["template_date"] == "2001-02-03T00:00:00"


async def test_a_template_without_a_date(client: httpx.AsyncClient) -> None:
    answer = await client.post(CHAT, json=chat(chat_template_kwargs=OLD))
    assert "template_date" not in answer.json()
    assert [one["path"] for one in answer.json()["warnings"]] == ["chat_template_kwargs.template_date"]


async def test_the_setting_fixes_it_and_the_fingerprint_covers_that(
    client_with: Callable[..., httpx.AsyncClient], engine: FakeEngine, folder: Any
) -> None:
    async with client_with(DATED, template_date="2001-02-03") as client:
        await client.post(CHAT, json=chat())
        assert bytes(engine.requests[-1].prompt) == b"03 Feb 2001|hi"
    settings = [Settings(), Settings(template_date="2001-02-03"), Settings(tool_parser="hermes")]
    settings.append(Settings(reasoning_parser="think"))
    assert len({await Fingerprint([folder], one).of(engine.info) for one in settings}) == 4


async def test_the_lines_of_a_batch_have_the_date_of_its_creation(
    make_app: Callable[..., FastAPI], tmp_path: Path, engine: FakeEngine
) -> None:
    """However late they run: after midnight, or after a restart."""
    created = int(datetime(2001, 2, 3, 23, 59, 59).timestamp())

    class Results:
        async def write(self, result: Any) -> None:
            assert not result.is_error

    loopback = make_app(write_folder(tmp_path / "m", template=DATED)).state.services.loopback
    fields = {"id": "batch_1", "created_at": created, "endpoint": CHAT, "request_counts": {"total": 2}}
    for body in (chat(), chat(messages=[{"role": "user", "content": "x" * 200}])):
        lines = iter([Line(0, "a", json.dumps(body).encode())])
        await LinesRun(Batch("", fields, is_open=True), 0, loopback).run(lines, Results(), 1)  # type: ignore[arg-type]
    assert [bytes(one.prompt)[:14] for one in engine.requests] == [b"03 Feb 2001|hi", b"03 Feb 2001|xx"]
