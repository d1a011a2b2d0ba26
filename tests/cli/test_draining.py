"""How the server ends: real signals, a stand-in for the engine."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from server.http.draining_server import DrainingServer, bind, configure
from tests.waiting import until


class Engine:
    """Drains when `finished` is set; then, or when stopped, streams end."""

    def __init__(self) -> None:
        self.finished = asyncio.Event()
        self.draining = False
        self.stopped = False
        self.grace_s: float | None = None

    async def drain(self, grace_s: float) -> None:
        self.draining, self.grace_s = True, grace_s
        await self.finished.wait()

    async def stop(self) -> None:
        self.stopped = True
        self.finished.set()

    async def stream(self, request: Request) -> Response:
        return StreamingResponse(self._words())

    async def ready(self, request: Request) -> Response:
        return Response(status_code=503 if self.draining else 200)

    async def _words(self) -> AsyncIterator[str]:
        yield "first "
        await self.finished.wait()
        yield "aborted" if self.stopped else "last"


class Running:
    """A server with one open stream."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        app = Starlette(routes=[Route("/stream", engine.stream), Route("/ready", engine.ready)])
        self.server = DrainingServer(configure(app, client_timeout_s=30.0), engine, grace_s=12.0)  # type: ignore[arg-type]
        self.listener = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.task = asyncio.create_task(self.server.serve(sockets=[self.listener]))

    async def read(self) -> str:
        async with httpx.AsyncClient(trust_env=False) as client:
            return (await client.get(f"{self.url}/stream")).text

    async def ready(self) -> int:
        async with httpx.AsyncClient(trust_env=False) as client:
            return (await client.get(f"{self.url}/ready")).status_code

    async def ended(self) -> None:
        await asyncio.wait_for(self.task, 20.0)


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    running = Running(Engine())
    await until(lambda: running.server.started)
    yield running
    running.server.force_exit = running.server.should_exit = True
    running.engine.finished.set()
    await running.ended()
    running.listener.close()


async def test_the_first_signal_lets_streams_finish_and_says_unready(running: Running) -> None:
    stream = asyncio.create_task(running.read())
    assert await running.ready() == 200
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: running.engine.draining)
    assert await running.ready() == 503
    assert not running.task.done()
    running.engine.finished.set()
    assert await stream == "first last"
    await running.ended()  # returns: the process goes on to exit code 0
    assert running.engine.grace_s == 12.0
    with pytest.raises(httpx.ConnectError):
        await running.ready()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_the_second_signal_ends_at_once(running: Running, second: signal.Signals) -> None:
    stream = asyncio.create_task(running.read())
    assert await running.ready() == 200
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(0.1)
    assert not running.engine.stopped
    os.kill(os.getpid(), second)
    assert await stream == "first aborted"
    await running.ended()
    assert running.engine.stopped


async def test_signals_have_their_handlers_back_afterwards(running: Running) -> None:
    before = signal.getsignal(signal.SIGTERM)
    running.server.should_exit = True
    await running.ended()
    assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
