"""Clients that keep the server waiting, on real sockets."""

import asyncio
import contextlib
import json
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from uvicorn.server import ServerState

from server.http.connection import limited_connection
from server.http.draining_server import configure
from server.http.listening import BindError, bind
from tests.cli.fake_openai import running

TIMEOUT_S = 0.8
SLACK_S = 20.0


class Application:
    """Echoes the length of the body; /headers are sent back; sends without end on /endless, and begins to on /begun.

    /early is answered without a look at the body, /pieces in pieces, and /waiting once `let_go` is set.
    """

    def __init__(self) -> None:
        self.disconnected = 0
        self.let_go = threading.Event()

    def wait_until_disconnected(self) -> None:
        """Raise TimeoutError where no request was told within SLACK_S: it learns of it after its socket has closed."""
        start = time.perf_counter()
        while not self.disconnected:
            if time.perf_counter() - start > SLACK_S:
                raise TimeoutError("no request was told of the disconnection")
            time.sleep(0.01)

    async def __call__(self, scope, receive, send):  # type: ignore[no-untyped-def]
        if scope["type"] == "lifespan":
            for _ in range(2):
                message = await receive()
                await send({"type": message["type"] + ".complete"})
            return
        try:
            await (await self.answer(Request(scope, receive)))(scope, receive, send)
        except ClientDisconnect:
            self.disconnected += 1

    async def answer(self, request: Request) -> Response:
        if request.url.path == "/endless":
            return StreamingResponse(self.endless())
        if request.url.path == "/begun":
            return StreamingResponse(self.begun())
        if request.url.path == "/pieces":
            headers = {"connection": "keep-alive"}
            return StreamingResponse(iter([b"one", b"", b"two"]), headers=headers, media_type="text/event-stream")
        if request.url.path == "/waiting":
            return await self.waiting(request)
        if request.url.path == "/early":
            return PlainTextResponse("no")
        if request.url.path == "/headers":
            await request.body()
            return JSONResponse(list(request.headers))
        return PlainTextResponse(str(len(await request.body())))

    async def waiting(self, request: Request) -> Response:
        await request.body()
        while not self.let_go.is_set():
            if await request.is_disconnected():
                raise ClientDisconnect
            await asyncio.sleep(0.001)
        return PlainTextResponse("here")

    async def begun(self):  # type: ignore[no-untyped-def]
        yield b"first"
        await asyncio.Event().wait()

    async def endless(self):  # type: ignore[no-untyped-def]
        try:
            while True:
                yield b"x" * 65536
                await asyncio.sleep(0)
        finally:
            self.disconnected += 1


@pytest.fixture
def application() -> Application:
    return Application()


@pytest.fixture
def client(application: Application) -> Iterator[socket.socket]:
    with running(application, configure(application, TIMEOUT_S)) as address:
        host, port = address.removeprefix("http://").removesuffix("/v1").split(":")
        with socket.create_connection((host, int(port)), timeout=SLACK_S) as connection:
            yield connection


def seconds_until_dropped(client: socket.socket) -> float:
    start = time.perf_counter()
    with contextlib.suppress(ConnectionResetError):
        while client.recv(65536):
            pass
    return time.perf_counter() - start


def send_until_dropped(client: socket.socket, piece: bytes) -> None:
    """Send piece after piece; raises TimeoutError where the server goes on to take them."""
    start = time.perf_counter()
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while time.perf_counter() - start < SLACK_S:
            client.sendall(piece)
            time.sleep(0.05)
        raise TimeoutError("the client was not dropped")


def ask(client: socket.socket, request: bytes) -> bytes:
    client.sendall(request)
    return client.recv(65536)


def test_one_that_says_nothing_is_dropped(client: socket.socket) -> None:
    assert TIMEOUT_S / 2 < seconds_until_dropped(client) < SLACK_S


def test_one_that_drips_its_head_is_dropped(client: socket.socket) -> None:
    client.sendall(b"G")
    send_until_dropped(client, b"E")


def test_one_that_stops_in_its_head_is_dropped_also_later(client: socket.socket) -> None:
    assert b"200 OK" in ask(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    client.sendall(b"\r\n")  # allowed before a request, and no beginning of one
    assert seconds_until_dropped(client) < SLACK_S


def test_one_that_stops_in_its_body_is_dropped(client: socket.socket, application: Application) -> None:
    client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nabc")
    assert seconds_until_dropped(client) < SLACK_S
    application.wait_until_disconnected()


def test_a_body_may_take_longer_while_it_comes(client: socket.socket) -> None:
    client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 16\r\n\r\n")
    for _ in range(16):
        time.sleep(TIMEOUT_S / 8)
        client.sendall(b"x")
    assert client.recv(65536).endswith(b"\r\n\r\n16")


def test_one_that_goes_on_with_a_body_that_was_answered_is_dropped(client: socket.socket) -> None:
    assert b"200 OK" in ask(client, b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
    send_until_dropped(client, b"x")


CHUNKED = b" HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "beside_the_body",
    [
        b"0\r\n" + b"a: b\r\n" * 20_000,
        b"0\r\na: " + b"b" * 100_000,
        b"1;" + b"x" * 100_000,
        b"0" * 100_000,
    ],
    ids=["trailers", "a long trailer", "an extension", "a chunk's size"],
)
def test_what_chunks_bring_beside_the_body_is_limited(client: socket.socket, beside_the_body: bytes) -> None:
    answer = ask(client, b"POST /" + CHUNKED + beside_the_body)
    assert answer.startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize(("chunk", "number"), [(b"1\r\nx\r\n", 5_000), (b"8\r\nxxxxxxxx\r\n", 30_000)])
def test_many_small_chunks_are_a_body_like_any_other(client: socket.socket, chunk: bytes, number: int) -> None:
    client.sendall(b"POST /" + CHUNKED + chunk * number + b"0\r\n\r\n")
    body, answer = b"\r\n\r\n%d" % (number * chunk.count(b"x")), b""
    while not answer.endswith(body) and (part := client.recv(65536)):  # head and body may come one after the other
        answer += part
    assert answer.endswith(body)


def test_chunks_that_are_hardly_anything_but_framing_end_the_connection(client: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):  # it is closed before all is sent
        client.sendall(b"POST /" + CHUNKED + b"1\r\nx\r\n" * 60_000)
    assert client.recv(65536).startswith(b"HTTP/1.1 431")


def test_requests_that_wait_behind_another_are_bounded(client: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):  # not TimeoutError
        client.sendall(b"GET /begun HTTP/1.1\r\nhost: x\r\n\r\n" + b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 1_000)
        while client.recv(65536):
            pass


def test_a_trailer_is_no_header(client: socket.socket) -> None:
    answer = ask(client, b"POST /headers" + CHUNKED + b"0\r\nauthorization: Bearer x\r\n\r\n")
    assert json.loads(answer.partition(b"\r\n\r\n")[2]) == ["host", "transfer-encoding"]


def test_a_connection_may_be_idle_between_requests(client: socket.socket) -> None:
    for _ in range(2):
        assert b"200 OK" in ask(client, b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\nx")
        time.sleep(TIMEOUT_S * 1.5)


def test_one_that_reads_nothing_is_dropped(client: socket.socket, application: Application) -> None:
    client.sendall(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
    application.wait_until_disconnected()


def test_one_that_reads_is_not_dropped(client: socket.socket, application: Application) -> None:
    client.sendall(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
    start = time.perf_counter()
    while time.perf_counter() - start < TIMEOUT_S * 3:
        assert client.recv(1 << 20)
    assert application.disconnected == 0


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [(b"GET / HTTP/1.1\r\nx: " + b"y" * 200_000, b"431"), (b"what is this\r\n\r\n", b"400")],
)
def test_what_is_no_request_is_told_so(client: socket.socket, request_bytes: bytes, status: bytes) -> None:
    head, _, body = ask(client, request_bytes).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status)
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_nothing_is_written_into_an_answer_that_has_begun(client: socket.socket) -> None:
    received = ask(client, b"GET /begun HTTP/1.1\r\nhost: x\r\n\r\n")
    while b"first" not in received:
        received += client.recv(65536)
    assert ask(client, b"what is this\r\n\r\n") == b""


@pytest.mark.parametrize("head", [b"", b"connection: upgrade\r\nupgrade: websocket\r\n"], ids=["request", "websocket"])
def test_what_comes_behind_an_unfinished_answer_does_not_orphan_it(application: Application, head: bytes) -> None:
    with running(application, configure(application, TIMEOUT_S, {"/page/": 1 << 20})) as address:
        host, port = address.removeprefix("http://").removesuffix("/v1").split(":")
        with socket.create_connection((host, int(port)), timeout=SLACK_S) as client:
            behind = b"GET /page/x HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n"
            assert b"200 OK" in ask(client, b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n" + behind)
        application.wait_until_disconnected()


@pytest.mark.parametrize("path", [b"/pieces", b"/early"])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_an_answer_that_ends_its_connection(client: socket.socket, path: bytes, version: bytes) -> None:
    """Clients of HTTP/1.0 know no chunks, and a header says once that the connection ends."""
    client.sendall(b"GET %b HTTP/%b\r\nhost: x\r\nconnection: close\r\n\r\n" % (path, version))
    head, _, body = b"".join(iter(lambda: client.recv(65536), b"")).partition(b"\r\n\r\n")
    names = [line.partition(b":")[0] for line in head.lower().split(b"\r\n")]
    assert head.lower().count(b"connection: close") == names.count(b"connection") == 1
    is_chunked = (path, version) == (b"/pieces", b"1.1")
    assert (b"transfer-encoding" in names) is is_chunked
    chunks = b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
    assert body == (b"no" if path == b"/early" else chunks if is_chunked else b"onetwo")


@pytest.mark.parametrize(
    ("head", "is_whole"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", False),
        (b"GET / HTTP/1.1\r\nhost: x\r\nhost: x\r\n\r\n", False),
        (b"GET / HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n", False),
        (b"GET / HTTP/1.1\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n", False),
        (b"GET / HTTP/1.0\r\n\r\n", True),
        (b"GET / HTTP/1.1\r\nhost:\r\n\r\n", True),
    ],
)
def test_a_request_names_one_host(client: socket.socket, head: bytes, is_whole: bool) -> None:
    answer = ask(client, head)
    assert answer.startswith(b"HTTP/1.1 200" if is_whole else b"HTTP/1.1 400")
    assert is_whole or b"header 'Host'" in answer


def test_a_client_that_has_only_closed_its_own_side_is_answered(
    client: socket.socket, application: Application
) -> None:
    client.sendall(b"POST /waiting HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\nx")
    client.shutdown(socket.SHUT_WR)
    received = client.recv(65536)
    application.let_go.set()
    while piece := client.recv(65536):
        received += piece
    assert received.startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert received.endswith(b"here")
    assert application.disconnected == 0


def test_a_client_that_has_closed_both_sides_is_gone(client: socket.socket, application: Application) -> None:
    client.sendall(b"POST /waiting HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\nx")
    client.close()
    application.wait_until_disconnected()


def test_an_old_client_that_has_only_closed_its_own_side_is_answered(client: socket.socket) -> None:
    client.sendall(b"GET /early HTTP/1.0\r\n\r\n")
    client.shutdown(socket.SHUT_WR)
    assert b"".join(iter(lambda: client.recv(65536), b"")).endswith(b"no")


class UnreadTransport(asyncio.Transport):
    """To a client that reads nothing; what is written stays below the mark at which writing pauses."""

    def __init__(self) -> None:
        super().__init__()
        self.closing = False
        self.aborted = asyncio.Event()

    def write(self, data: bytes) -> None: ...

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.aborted.set()


@pytest.mark.parametrize("request_bytes", [b"GET /early HTTP/1.0\r\n\r\n", b"what is this\r\n\r\n"])
async def test_the_end_of_an_answer_is_not_waited_for_for_ever(application: Application, request_bytes: bytes) -> None:
    protocol = limited_connection(0.01)
    connection = protocol(configure(application, 0.01), ServerState(), {}, asyncio.get_running_loop())  # type: ignore[call-arg]
    transport = UnreadTransport()
    connection.connection_made(transport)
    connection.data_received(request_bytes)
    async with asyncio.timeout(SLACK_S):
        await transport.aborted.wait()


def test_an_address_that_is_taken_is_told() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BindError, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use"):
            bind("127.0.0.1", port)
    with pytest.raises(BindError, match="cannot listen on 203"):
        bind("203.0.113.1", 1)


def test_those_that_wait_longest_make_room(application: Application) -> None:
    config = configure(application, SLACK_S)
    assert isinstance(config.http, type)
    config.http.max_connections = 8  # type: ignore[attr-defined]
    with running(application, config) as address, contextlib.ExitStack() as opened:
        host, port = address.removeprefix("http://").removesuffix("/v1").split(":")

        def connect() -> socket.socket:
            return opened.enter_context(socket.create_connection((host, int(port)), timeout=SLACK_S))

        answering = connect()
        received = ask(answering, b"GET /begun HTTP/1.1\r\nhost: x\r\n\r\n")
        while not received.endswith(b"first\r\n"):
            received += answering.recv(65536)
        waiting = []
        for start in (b"", b"G", b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nx") * 8:
            waiting.append(connect())
            waiting[-1].sendall(start)
        asker = connect()
        assert b"200 OK" in ask(asker, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        for num_dropped in range(26 - 8):
            readable, _, _ = select.select(waiting, [], [], SLACK_S)
            assert readable, num_dropped
            assert seconds_until_dropped(readable[0]) < SLACK_S
            waiting.remove(readable[0])
        assert select.select([*waiting, answering, asker], [], [], 0) == ([], [], [])


def test_there_can_be_as_many_as_the_hard_limit_allows() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 900));"
        "from server.http.connection import limited_connection; print(limited_connection(1).max_connections)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "644\n"
