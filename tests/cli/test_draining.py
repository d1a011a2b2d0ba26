"""How the server ends: real signals, a stand-in for the engine."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from server.http.draining_server import DrainingServer, configure
from server.http.listening import bind
from tests.waiting import until

SMALL_BUFFER = 1 << 14
LARGE_ANSWER = b"x" * (1 << 22)
"""More than lies between a server and a client that does not read, where their buffers are small."""


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

    async def large(self, request: Request) -> Response:
        return StreamingResponse(self._large())

    async def ready(self, request: Request) -> Response:
        return Response(status_code=503 if self.draining else 200)

    async def _words(self) -> AsyncIterator[str]:
        yield "first "
        await self.finished.wait()
        yield "aborted" if self.stopped else "last"

    async def _large(self) -> AsyncIterator[bytes]:
        yield LARGE_ANSWER
        yield b"[DONE]"


class Running:
    """A server with one open stream."""

    def __init__(self, engine: Engine, grace_s: float) -> None:
        self.engine = engine
        app = Starlette(
            routes=[Route("/stream", engine.stream), Route("/large", engine.large), Route("/ready", engine.ready)]
        )
        self.server = DrainingServer(configure(app, client_timeout_s=30.0), engine, grace_s)  # type: ignore[arg-type]
        self.listener = bind("127.0.0.1", 0)
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.task = asyncio.create_task(self.server.serve(sockets=[self.listener]))

    async def read(self) -> str:
        async with httpx.AsyncClient(trust_env=False) as client:
            return (await client.get(f"{self.url}/stream")).text

    async def begin_to_read(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A client that has the first byte of a large answer and continues to read later."""
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        connection.connect(self.listener.getsockname())
        reader, writer = await asyncio.open_connection(sock=connection, limit=SMALL_BUFFER)
        writer.write(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readexactly(1)
        return reader, writer

    async def ready(self) -> int:
        async with httpx.AsyncClient(trust_env=False) as client:
            return (await client.get(f"{self.url}/ready")).status_code

    async def ended(self) -> None:
        await asyncio.wait_for(self.task, 20.0)


@pytest.fixture
def grace_s() -> float:
    return 12.0


@pytest.fixture
async def running(grace_s: float) -> AsyncIterator[Running]:
    running = Running(Engine(), grace_s)
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
    await until(lambda: running.engine.draining)
    assert not running.engine.stopped
    os.kill(os.getpid(), second)
    assert await stream == "first aborted"
    await running.ended()
    assert running.engine.stopped


DELIVERING = "1 answers are still being read"


@pytest.mark.parametrize("grace_s", [300.0])
async def test_a_finished_answer_is_waited_for_while_its_client_reads(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    reader, writer = await running.begin_to_read()
    running.engine.finished.set()
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: DELIVERING in caplog.text or running.task.done())
    assert await running.ready() == 503
    assert LARGE_ANSWER + b"\r\n6\r\n[DONE]" in await reader.read()
    await running.ended()
    writer.close()


@pytest.mark.parametrize("grace_s", [0.0, 300.0])
async def test_an_answer_that_is_not_read_is_waited_for_until_the_grace_is_over_or_a_second_signal(
    running: Running, grace_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    running.server.config.timeout_graceful_shutdown = 0
    _, writer = await running.begin_to_read()
    running.engine.finished.set()
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: DELIVERING in caplog.text or running.task.done())
    if grace_s:
        os.kill(os.getpid(), signal.SIGINT)
    await running.ended()
    writer.close()


async def test_signals_have_their_handlers_back_afterwards(running: Running) -> None:
    before = signal.getsignal(signal.SIGTERM)
    running.server.should_exit = True
    await running.ended()
    assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
