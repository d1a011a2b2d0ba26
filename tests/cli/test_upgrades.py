"""Requests that offer to speak another protocol, on real sockets."""

import asyncio
import logging
import socket
from collections.abc import Iterator

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from uvicorn.server import ServerState

from server.http.connection import limited_connection
from server.http.draining_server import configure
from tests.cli.fake_openai import running
from tests.cli.test_connection import SLACK_S, UnreadTransport

HANDSHAKE = (
    b"connection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n"
)
LAST = b"GET /last HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
BODY = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
SIZED = b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)
CHUNKED = b"transfer-encoding: chunked\r\n\r\n5\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (BODY[:5], len(BODY) - 5, BODY[5:])


class Application:
    """Notes requests with their bodies. Takes websockets and leaves them at once; /page/never is not taken."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, bytes]] = []
        self.headers: list[list[str]] = []

    async def __call__(self, scope, receive, send):  # type: ignore[no-untyped-def]
        if scope["type"] == "lifespan":
            for _ in range(2):
                message = await receive()
                await send({"type": message["type"] + ".complete"})
        elif scope["type"] == "websocket":
            assert (await receive())["type"] == "websocket.connect"
            if scope["path"] == "/page/never":
                assert (await receive())["type"] == "websocket.disconnect"
            await send({"type": "websocket.accept"})
            if scope["path"] == "/page/stays":
                assert (await receive())["type"] == "websocket.disconnect"
        else:
            request = Request(scope, receive)
            self.requests.append((f"{request.method} {request.url.path}", await request.body()))
            self.headers.append(list(request.headers))
            await PlainTextResponse("served")(scope, receive, send)


@pytest.fixture
def application() -> Application:
    return Application()


@pytest.fixture
def client(application: Application) -> Iterator[socket.socket]:
    with running(application, configure(application, SLACK_S, {"/page/": 1 << 20})) as address:
        host, port = address.removeprefix("http://").removesuffix("/v1").split(":")
        with socket.create_connection((host, int(port)), timeout=SLACK_S) as connection:
            yield connection


def all_answers(client: socket.socket) -> bytes:
    """All that comes until the server closes."""
    received = b""
    while piece := client.recv(65536):
        received += piece
    return received


def offer(protocol: bytes) -> bytes:
    return b"POST /first HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: %b\r\n" % protocol


@pytest.mark.parametrize("framed", [SIZED, CHUNKED], ids=["sized", "chunked"])
@pytest.mark.parametrize(
    "head",
    [
        offer(b"h2c") + b"http2-settings: AAMAAABkAAQAAP__\r\n",
        offer(b"foo"),
        offer(b"websocket"),
        b"POST /page/first HTTP/1.1\r\nhost: x\r\n" + HANDSHAKE,
        b"GET /page/first HTTP/1.1\r\nhost: x\r\n" + HANDSHAKE,
    ],
    ids=["h2c", "unknown", "websocket elsewhere", "websocket by POST", "websocket with a body"],
)
def test_the_body_of_a_request_that_offers_an_upgrade_is_its_body(
    client: socket.socket, application: Application, head: bytes, framed: bytes
) -> None:
    client.sendall(head + framed + LAST)
    assert all_answers(client).count(b"HTTP/1.1 200 OK") == 2
    method, path = head.split()[:2]
    assert application.requests == [(f"{method.decode()} {path.decode()}", BODY), ("GET /last", b"")]
    assert "upgrade" not in application.headers[0]


@pytest.mark.parametrize("size", [1, 7])
def test_however_it_comes(client: socket.socket, application: Application, size: int) -> None:
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sent = offer(b"h2c") + CHUNKED + LAST
    for start in range(0, len(sent), size):
        client.sendall(sent[start : start + size])
    assert all_answers(client).count(b"HTTP/1.1 200 OK") == 2
    assert application.requests == [("POST /first", BODY), ("GET /last", b"")]


def test_many_offers_at_once(client: socket.socket, application: Application) -> None:
    client.sendall(b"GET /first HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n" * 60 + LAST)
    assert all_answers(client).count(b"HTTP/1.1 200 OK") == 61
    assert application.requests == [("GET /first", b"")] * 60 + [("GET /last", b"")]


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"CONNECT example.com:443 HTTP/1.1\r\nhost: example.com\r\n\r\n" + LAST, b"501"),
        (b"CONNECT /first HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello" + LAST, b"501"),
        (b"GET http://[ HTTP/1.1\r\nhost: x\r\n\r\n" + LAST, b"400"),
    ],
    ids=["an authority", "a path", "no URL"],
)
def test_what_is_for_a_proxy_is_refused_without_a_trace(
    client: socket.socket,
    application: Application,
    caplog: pytest.LogCaptureFixture,
    request_bytes: bytes,
    status: bytes,
) -> None:
    client.sendall(request_bytes)
    answer = all_answers(client)
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert application.requests == []
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


def test_a_websocket_opens(client: socket.socket) -> None:
    client.sendall(b"GET /page/x HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n" + HANDSHAKE + b"\r\n")
    assert client.recv(65536).startswith(b"HTTP/1.1 101 ")


@pytest.mark.parametrize(
    "more",
    [b"a: b\r\n" * 200, b"a: " + b"b" * 10_000 + b"\r\n", b"sec-websocket-version: 8\r\n"],
    ids=["many", "long", "bad"],
)
def test_a_handshake_that_cannot_be_answered_is_refused_at_once(client: socket.socket, more: bytes) -> None:
    client.sendall(b"GET /page/x HTTP/1.1\r\nhost: x\r\n" + more + HANDSHAKE + b"\r\n")
    assert all_answers(client).startswith(b"HTTP/1.1 4")


def test_a_handshake_that_nobody_takes_is_dropped(application: Application) -> None:
    with running(application, configure(application, 0.05, {"/page/": 1 << 20})) as address:
        host, port = address.removeprefix("http://").removesuffix("/v1").split(":")
        with socket.create_connection((host, int(port)), timeout=SLACK_S) as client:
            client.sendall(b"GET /page/never HTTP/1.1\r\nhost: x\r\n" + HANDSHAKE + b"\r\n")
            assert client.recv(1) == b""


class KeptTransport(UnreadTransport):
    """Which may get another protocol."""

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def pause_reading(self) -> None: ...


async def test_a_websocket_whose_client_does_not_read_is_dropped(application: Application) -> None:
    protocol, state, transport = limited_connection(0.01, {"/page/": 1 << 20}), ServerState(), KeptTransport()
    connection = protocol(configure(application, 0.01), state, {}, asyncio.get_running_loop())  # type: ignore[call-arg]
    connection.connection_made(transport)
    connection.data_received(b"GET /page/stays HTTP/1.1\r\nhost: x\r\n" + HANDSHAKE + b"\r\n")
    await asyncio.sleep(0)
    websocket = transport.protocol
    websocket.pause_writing()  # type: ignore[attr-defined]
    async with asyncio.timeout(SLACK_S):
        await transport.aborted.wait()
    websocket.connection_lost(None)  # type: ignore[attr-defined]
    await asyncio.gather(*state.tasks)


@pytest.mark.parametrize("path", [b"/page/never", b"/page/x"], ids=["not accepted", "closed, and not read"])
async def test_a_websocket_is_a_connection_and_has_a_deadline(application: Application, path: bytes) -> None:
    protocol, state, transport = limited_connection(0.01, {"/page/": 1 << 20}), ServerState(), KeptTransport()
    connection = protocol(configure(application, 0.01), state, {}, asyncio.get_running_loop())  # type: ignore[call-arg]
    connection.connection_made(transport)
    assert state.connections == {connection}
    connection.data_received(b"GET " + path + b" HTTP/1.1\r\nhost: x\r\n" + HANDSHAKE + b"\r\n")
    assert state.connections == {transport.protocol} != {connection}
    async with asyncio.timeout(SLACK_S):
        await transport.aborted.wait()
    transport.protocol.connection_lost(None)  # type: ignore[attr-defined]
    assert state.connections == set()
    await asyncio.gather(*state.tasks)
