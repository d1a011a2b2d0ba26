"""The life of a server from its start to its end, with a stand-in for the engine."""

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from model_runner.hub.repository import hash_file
from server.assembly import StartError
from server.cli import lifecycle
from server.config import Settings
from server.engine.client import EngineState
from server.generation import fingerprint
from tests.server.fake_engine import FakeEngine
from tests.server.tenants.keys import write_keys
from tests.server.tiny_model import write_folder
from tests.waiting import until


class ObservedEngine(FakeEngine):
    """Lets a test look on from within the server's event loop, as soon as the engine is ready."""

    def __init__(self, look_on: Callable[[FakeEngine], Awaitable[None]]) -> None:
        super().__init__()
        self._look_on = look_on
        self.observer: asyncio.Task[None] | None = None

    async def wait_ready(self) -> None:
        self.observer = self.observer or asyncio.ensure_future(self._look_on(self))


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Serves a tiny model until the test's observer or an error ends that."""
    monkeypatch.setattr(lifecycle, "configure_logging", lambda *_: None)
    monkeypatch.setattr(lifecycle, "FAILURE_CHECK_S", 0.01)
    folder = write_folder(tmp_path / "tiny")

    def run(look_on: Callable[[FakeEngine], Awaitable[None]], **settings: Any) -> None:
        engine = ObservedEngine(look_on)
        monkeypatch.setattr(lifecycle, "make_engine", lambda *_: engine)
        try:
            lifecycle.serve(Settings(model=str(folder), host="127.0.0.1", port=0, **settings), time.perf_counter())
        finally:
            if engine.observer is not None and engine.observer.done() and not engine.observer.cancelled():
                engine.observer.result()

    return run


class Printed:
    """The server's output so far."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.text = ""

    def has(self, words: str) -> bool:
        self.text += self._capsys.readouterr().out
        return words in self.text

    @property
    def address(self) -> str:
        """The address that the server listens on, from its first line."""
        return self.text.split()[1].removesuffix(",")


def end_by_signal() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_it_is_ready_when_the_files_are_hashed(
    serve: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    may_end = threading.Event()
    printed = Printed(capsys)

    def hash_later(path: Path, cache: Path) -> str:
        may_end.wait(60)
        return hash_file(path, cache)

    async def look_on(engine: FakeEngine) -> None:
        try:
            await until(lambda: printed.has("Listening"))
            address = printed.address
            async with httpx.AsyncClient(trust_env=False) as client:
                assert (await client.get(f"{address}/health")).status_code == 200
                assert (await client.get(f"{address}/ready")).status_code == 503
                assert not printed.has("Ready in")
                may_end.set()
                await until(lambda: printed.has("Ready in"))
                assert (await client.get(f"{address}/ready")).status_code == 200
        finally:
            may_end.set()
            end_by_signal()

    monkeypatch.setattr(fingerprint, "hash_file", hash_later)
    serve(look_on)
    assert ", files hashed in " in printed.text


def test_a_file_that_cannot_be_read_ends_it(serve: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, cache: Path) -> str:
        raise OSError(5, "Input/output error", str(path))

    async def look_on(engine: FakeEngine) -> None:
        pass

    monkeypatch.setattr(fingerprint, "hash_file", fail)
    with pytest.raises(StartError, match=r"^/.*/chat_template.jinja: Input/output error$"):
        serve(look_on)


def test_an_engine_that_has_failed_for_good_ends_it(
    serve: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    async def look_on(engine: FakeEngine) -> None:
        await until(lambda: "Ready in" in capsys.readouterr().out)
        engine.state = EngineState.FAILED

    with pytest.raises(StartError, match="the engine failed and could not be restarted"):
        serve(look_on)


def workers_here() -> set[int]:
    """Process ids of this process's children that check bodies, and of zombies."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            name, _, rest = status.read_text().rpartition(")")
            state, parent = rest.split()[:2]
            is_worker = state == "Z" or b"body_worker_process" in status.with_name("cmdline").read_bytes()
            if int(parent) == os.getpid() and is_worker:
                found.add(int(name.split()[0]))
    return found


def test_its_worker_processes_end_with_it(serve: Callable[..., None]) -> None:
    before = workers_here()

    async def look_on(engine: FakeEngine) -> None:
        try:
            await until(lambda: workers_here() > before)
        finally:
            end_by_signal()

    serve(look_on)
    assert workers_here() <= before


def test_hangup_has_the_keys_read_again(
    serve: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    keys = write_keys(tmp_path / "keys.yaml", ann={})

    async def look_on(engine: FakeEngine) -> None:
        try:
            await until(lambda: "Ready in" in capsys.readouterr().out)
            write_keys(keys, ann={}, bob={})
            os.kill(os.getpid(), signal.SIGHUP)
            await until(lambda: "2 are accepted" in caplog.text)
        finally:
            end_by_signal()

    serve(look_on, api_keys_file=keys)


@pytest.mark.parametrize("page", [True, False])
def test_the_page_is_there_unless_it_is_not_wanted(
    serve: Callable[..., None], capsys: pytest.CaptureFixture[str], page: bool
) -> None:
    printed = Printed(capsys)

    async def look_on(engine: FakeEngine) -> None:
        try:
            await until(lambda: printed.has("Ready in"))
            address = printed.address
            async with httpx.AsyncClient(trust_env=False) as client:
                answer = await client.get(f"{address}/", headers={"accept": "text/html"})
            if page:
                assert (answer.status_code, answer.headers["location"]) == (307, "page/")
            else:
                assert (answer.status_code, answer.text) == (200, "Ollama is running")
            assert printed.has(f"{address}/\n") == page
        finally:
            end_by_signal()

    serve(look_on, page=page)


@pytest.mark.parametrize(
    ("settings", "statuses"),
    [
        ({}, [403, 403, 403, 200]),
        ({"allowed_hosts": ["*.evil.example"]}, [200, 200, 200, 200]),
        ({"api_key": "k"}, [200, 401, 200, 200]),
    ],
    ids=["without keys", "allowed", "with keys"],
)
def test_pages_of_strangers_reach_nothing_by_a_name_of_theirs(
    serve: Callable[..., None], capsys: pytest.CaptureFixture[str], settings: dict[str, Any], statuses: list[int]
) -> None:
    printed = Printed(capsys)

    async def look_on(engine: FakeEngine) -> None:
        try:
            await until(lambda: printed.has("Ready in"))
            async with httpx.AsyncClient(trust_env=False, base_url=printed.address) as client:
                strange = {"host": "a.evil.example:8000"}
                answers = [await client.get(path, headers=strange) for path in ("/", "/v1/models", "/health")]
                answers.append(await client.get("/health"))
            assert [answer.status_code for answer in answers] == statuses
        finally:
            end_by_signal()

    serve(look_on, **settings)
