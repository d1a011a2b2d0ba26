"""A host of fake engines, and an application on it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import httpx
from fastapi import FastAPI

from model_runner.hub.repository import ModelFolder
from model_runner.runner_interface import RunnerInfo
from server.api.body_worker import WorkerPool
from server.api.model_services import ModelParts
from server.app import create_app
from server.config import Settings
from server.engine.client import EngineState, EngineUnavailableError
from server.engine.step_log import StepLog
from server.engine.supervisor import EngineSupervisor
from server.models.host import ModelHost
from server.models.hosted_model import HostedModel, Residency
from server.models.ledger import Ledger, Ledgers
from server.models.spare import PlanError
from server.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import client_of
from tests.server.models.worlds import NoSpare


@dataclass
class ComingEngine(FakeEngine):
    """A fake engine that is loaded when the test says so, and that can be stopped."""

    state: EngineState = EngineState.STARTING
    may_load: asyncio.Event = field(default_factory=asyncio.Event)
    broken: str | None = None
    """Why it cannot be loaded."""

    async def wait_ready(self) -> None:
        await self.may_load.wait()
        if self.broken is not None:
            self.state = EngineState.FAILED
            raise EngineUnavailableError(self.broken)
        self.state = EngineState.READY

    def die(self, reason: str) -> None:
        """End for good."""
        self.state, self.reason = EngineState.FAILED, reason
        self.has_ended.set()

    async def stop(self, reason: str = "") -> None:
        self.reason = self.reason or reason
        self.state, self.fail_after, self.failure = EngineState.DRAINING, 0, EngineUnavailableError(reason)
        self.has_ended.set()


@dataclass
class FakeSource:
    """A ModelSource. Its engines wait for `may_load`, which is set unless the test clears it."""

    ledger: Ledger
    num_bytes: int = 1
    length: int = 256
    broken: str | None = None
    """Why engines cannot be loaded."""
    unplannable: str | None = None
    may_pass: bool = True
    """Whether it may become plannable with the same settings."""
    may_load: asyncio.Event = field(default_factory=asyncio.Event)
    engines: list[ComingEngine] = field(default_factory=list)
    planned: RunnerInfo | None = None

    async def plan(self) -> int:
        if self.unplannable is not None:
            raise PlanError(self.unplannable, may_pass=self.may_pass)
        self.planned = replace(FakeEngine().info_, max_model_len=self.length)
        return self.num_bytes

    def make_engine(self, steps: StepLog) -> EngineSupervisor:
        engine = ComingEngine(steps=steps, may_load=self.may_load, broken=self.broken)
        engine.info_ = replace(engine.info_, max_model_len=self.length)
        self.engines.append(engine)
        return cast("EngineSupervisor", engine)


class Call:
    """A request whose answer is read as it comes, which httpx does not do within a process."""

    def __init__(self, app: FastAPI, path: str, body: object = None, **headers: str) -> None:
        self._app = app
        self._path = path
        self._body = b"" if body is None else json.dumps(body).encode()
        sent = {"content-type": "application/json", "content-length": str(len(self._body)), **headers}
        self._headers = [(name.encode(), value.encode()) for name, value in sent.items()]
        self._is_sent = False
        self._left = asyncio.Event()
        self.status: int | None = None
        self.text = b""
        self.pieces: asyncio.Queue[bytes] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())

    def leave(self) -> None:
        """Disconnect."""
        self._left.set()

    def cancel(self) -> None:
        """End it as the server does for reasons of its own."""
        self._task.cancel()

    async def end(self) -> bytes:
        """The whole body."""
        await self._task
        return self.text

    async def _run(self) -> None:
        scope = {"type": "http", "method": "POST" if self._body else "GET", "path": self._path, "query_string": b"",
                 "headers": self._headers, "client": ("127.0.0.1", 1), "server": ("test", 80),
                 "scheme": "http"}  # fmt: skip
        await self._app(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if not self._is_sent:
            self._is_sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.text += message["body"]
            self.pieces.put_nowait(message["body"])


@dataclass
class Hosting:
    """Several models on one application. Each takes one byte, unless its source says otherwise."""

    app: FastAPI
    host: ModelHost
    models: Mapping[str, HostedModel]
    sources: Mapping[str, FakeSource]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client of the application while the host runs."""
        await self.host.start()
        async with client_of(self.app) as client:
            yield client
        await self.host.stop()

    async def settled(self, name: str, value: str) -> None:
        """Returns when the model has this standing."""
        await self.until(lambda: self.models[name].status.standing == value)

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Returns when this is so, after some change of a model."""
        changed = asyncio.Event()
        end = self.host.watch(changed.set)
        try:
            while not is_so():
                changed.clear()
                await changed.wait()
        finally:
            end()


def host_of(
    folder: Path, tokenizer: Tokenizer, workers: WorkerPool, models: Mapping[str, Mapping[str, Any]], room: int,
    **settings: Any,
) -> Hosting:  # fmt: skip
    """Models by name, each with fields of its Residency, and `aliases`, in `room` bytes."""
    ledgers = Ledgers(room)
    host = ModelHost(ledgers, NoSpare())
    sources, parts = {}, []
    server = Settings(**settings)
    for name, fields in models.items():
        source = sources[name] = FakeSource(ledgers.host)
        source.may_load.set()
        residency = Residency(**{key: value for key, value in fields.items() if key != "aliases"})
        hosted = host.add(name, source, residency)
        own = server.model_copy(update={"served_model_name": (name, *fields.get("aliases", ()))})
        parts.append(ModelParts(hosted, tokenizer, own, ModelFolder(folder, name), None, hosted))
    app = create_app(parts, server, workers=workers)
    return Hosting(app, host, {one.name: one for one in host.models}, sources)
